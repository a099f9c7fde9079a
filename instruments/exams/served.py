"""A judge behind an address: any server that speaks OpenAI's protocol, such as llama.cpp's, Ollama,
vLLM or `transformers serve`.

It is shown each pair of texts twice, in both orders, since judges favour a place. Each reply is
kept as it comes, so after a kill only what is missing is asked. The key in OPENAI_API_KEY goes to
the server, and into no file. Next: tournament.py, which makes ratings of the wins.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import UsageError, install
from machinery import disk
from machinery.errors import reason_of
from machinery.formats import Line, Verdict, checked, read_lines
from machinery.output import json_of, say

AT_ONCE = 8  # requests
TIMEOUT_S = 120  # of silence
RETRIES = 3  # of a server that is silent, cannot be reached, or is overloaded
KEPT = 200  # last characters of a reply

REQUEST = """Two texts, A and B, were written to the same prompt. {criteria}

The prompt:
{prompt}

Text A:
{a}

Text B:
{b}

Which is better? Reply with A, B or TIE, and nothing else."""
POINTS = {"A": 1.0, "TIE": 0.5, "B": 0.0}  # of text A


def points_of(reply: str) -> float | None:
    """What text A gets by a reply, whose last line is A, B or TIE, with any signs around it:
    "**A**". None if it is no verdict."""
    line = reply.strip().rpartition("\n")[2]
    return POINTS.get(re.sub(r"[\W_]", "", line).upper())


@dataclass
class Server:
    """A judge behind an address. UsageError if the package openai is missing, if no list of models
    is there, or if none is named and the list has not exactly one."""

    url: str
    """What stands before /chat/completions."""
    model: str
    """Empty: the only one that the server lists."""
    criteria: str
    """Which text is better, in words."""
    max_tokens: int
    """Of a reply."""
    kept: Path
    """The file of the replies."""

    def __post_init__(self):
        try:
            from openai import OpenAI
        except ImportError:
            raise UsageError(
                f"--judge {self.url} needs the package openai: {install('requirements-eval.txt')}"
            ) from None
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        disk.append(self.kept, "")  # it can be written, before anything is paid for
        with self.asking():
            self.client = OpenAI(
                base_url=self.url,
                api_key=self.key or "none",  # the library wants one, though many servers do not
                timeout=TIMEOUT_S,
                max_retries=RETRIES,
            )
            listed = self.client.models.list().data
            names = [checked(Line, model.id, "a model's name") for model in listed]
        if not self.model:
            if len(names) != 1:
                raise UsageError(
                    f"{self.url} has {len(names)} models; choose one with --judge_model: "
                    f"{', '.join(names)[:500]}"
                )
            self.model = names[0]

    def without_key(self, text: str) -> str:
        """A text of the server's, which may repeat the key, also in pieces."""
        shortest = max(1, min(6, len(self.key)))
        for n in range(len(self.key), shortest - 1, -1):
            for i in range(len(self.key) - n + 1):
                text = text.replace(self.key[i : i + n], "(key)")
        return text

    @contextmanager
    def asking(self) -> Iterator[None]:
        """UsageError for any error: the library's own, and those of reading an answer that is not
        of the protocol, which the library does not check."""
        try:
            yield
        except Exception as error:
            reason = self.without_key(reason_of(error.__cause__ or error))
            raise UsageError(
                f"the judge at {self.url} gives no reply (most addresses end in /v1): {reason}; "
                "replies are kept: the same command asks only what is missing"
            ) from None

    def ask(self, request: str) -> tuple[str, str, bool]:
        """(The request, the end of the reply, whether to keep it.) What a model thinks first, up to
        </think>, is left out. If a request is refused, as one that is too long, the reply is the
        reason, which is not kept: the next run asks again."""
        from openai import BadRequestError

        with self.asking():
            try:
                answer = self.client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": request}],
                    max_tokens=self.max_tokens,
                    temperature=0,
                )
            except BadRequestError as error:
                return request, self.without_key(reason_of(error)), False
            content = answer.choices[0].message.content or ""
            return request, self.without_key(content.rpartition("</think>")[2][-KEPT:]), True

    def replies(self, requests: list[str]) -> list[str]:
        """A reply to each, asked or known from the file."""
        # By all that a reply depends on, but not by the address: a server may move.
        keys = {x: disk.sha256_of_tree([self.model, self.max_tokens, x]) for x in requests}
        known = {line.key: line.reply for line in read_lines(self.kept, Verdict)}
        missing = [request for request, key in keys.items() if key not in known]
        say(
            f"{len(missing):,} requests to {self.model}, {len(keys) - len(missing):,} known replies"
        )
        with ThreadPool(AT_ONCE) as pool:  # its threads end with the program, even if they wait
            answers = pool.imap_unordered(self.ask, missing)
            for request, reply, keep in tqdm(answers, "judge", len(missing), disable=None):
                key = keys[request]
                known[key] = reply
                if keep:
                    disk.append(self.kept, json_of(dict(key=key, reply=reply)) + "\n")
        return [known[keys[request]] for request in requests]

    def compare(self, prompts: list[str], texts: list[list[str]]) -> tuple[np.ndarray, list[str]]:
        """P players' texts, N each -> (wins (N, P, P), reasons to doubt them).

        A win is the mean over both orders. Where one of the two replies is no verdict, neither
        player gets anything. UsageError if the server fails, or if no reply is a verdict."""
        requests = [
            REQUEST.format(criteria=self.criteria, prompt=prompt, a=a, b=b)
            for prompt, *written in zip(prompts, *texts)
            for a, b in permutations(written, 2)
        ]
        replies = self.replies(requests)
        n_players = len(texts)
        first = np.full((len(prompts), n_players, n_players), np.nan)  # NaN: no verdict
        others = ~np.eye(n_players, dtype=bool)
        first[:, others] = np.array([*map(points_of, replies)], float).reshape(len(prompts), -1)
        second = 1 - first.transpose(0, 2, 1)  # the points of the row's text where it is text B
        return np.nan_to_num((first + second) / 2), self.doubts(replies, first, second)

    def doubts(self, replies: list[str], first: np.ndarray, second: np.ndarray) -> list[str]:
        """Print how it judged; reasons to doubt it. first, second: (N, P, P), the points of the
        row's text against the column's, as text A and as text B."""
        lost = [reply for reply in replies if points_of(reply) is None]
        if len(lost) == len(replies):
            raise UsageError(
                f"{self.model} gave no verdict in {len(replies)} replies, but {replies[0]!r}; a "
                "model that thinks first needs a larger --judge_tokens"
            )
        decided = np.isin(first, (0, 1)) & np.isin(second, (0, 1))
        n = decided.sum() // 2  # it has each pair twice
        agree = (decided & (first == second)).sum() // 2
        alike = f"both orders decided {n:,} pairs, and {agree:,} of them alike"
        say(
            f"{len(replies):,} replies: {len(lost):,} no verdict, {(first == 0.5).sum():,} ties; "
            f"{alike}"
        )
        found = []
        if len(lost) > len(replies) / 10:
            found.append(f"{len(lost):,} of {len(replies):,} replies are no verdict: {lost[0]!r}")
        if agree < n / 2 + n**0.5:  # two standard deviations of a coin
            found.append(f"{alike}: a coin may do as well")
        return found
