"""A judge behind an address: any server that speaks OpenAI's protocol, such as llama.cpp's, Ollama,
vLLM or `transformers serve`.

It is shown each pair of texts twice, in both orders, since judges favour a place. Each reply is
kept as it comes, so after a kill only what is missing is asked. The key in OPENAI_API_KEY goes to
the server, and into no file. Next: tournament.py, which makes ratings of the wins.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import UsageError, install
from machinery import disk
from machinery.errors import reason_of
from machinery.formats import Verdict, read_lines
from machinery.output import json_of, say

AT_ONCE = 8  # requests
TIMEOUT_S = 120  # of silence
RETRIES = 3  # of a server that is silent, cannot be reached, or is overloaded
KEPT = 200  # characters of a reply, its last

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
    "**A**". None if it is no verdict. What a model thinks before it replies ends in </think>."""
    line = re.split(r"</think>|\n", reply.strip())[-1]
    return POINTS.get(re.sub(r"\W", "", line).upper())


@dataclass
class Server:
    """A judge behind an address. UsageError if the package openai is missing, or if no model is
    named and the server does not list exactly one."""

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
        key = os.environ.get("OPENAI_API_KEY", "none")  # a server of one's own wants none
        self.client = OpenAI(base_url=self.url, api_key=key, timeout=TIMEOUT_S, max_retries=RETRIES)
        if not self.model:
            self.model = self.only_model()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """UsageError for whatever goes wrong: the library's errors, and those of reading an answer
        that is none, which it does not check."""
        try:
            yield
        except Exception as error:
            raise UsageError(
                f"the judge at {self.url} gives no reply (most addresses end in /v1): "
                f"{reason_of(error)}; replies are kept: the same command asks only what is missing"
            ) from None

    def only_model(self) -> str:
        with self.asking():
            names = [str(model.id) for model in self.client.models.list().data]
        if len(names) != 1:
            raise UsageError(
                f"{self.url} has {len(names)} models; choose one with --judge_model: "
                f"{', '.join(names)[:500]}"
            )
        return names[0]

    def ask(self, request: str) -> str:
        """The end of the reply."""
        with self.asking():
            answer = self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": request}],
                max_tokens=self.max_tokens,
                temperature=0,
            )
            return (answer.choices[0].message.content or "")[-KEPT:]

    def key_of(self, request: str) -> str:
        """A hash of all that a reply depends on, but for the address."""
        asked = json.dumps([self.model, self.max_tokens, request])
        return hashlib.sha256(asked.encode()).hexdigest()

    def replies(self, requests: list[str]) -> list[str]:
        """A reply to each, asked or known from the file."""
        keys = {request: self.key_of(request) for request in requests}
        known = {line.key: line.reply for line in read_lines(self.kept, Verdict)}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            asked = {pool.submit(self.ask, x): key for x, key in keys.items() if key not in known}
            for done in tqdm(as_completed(asked), "judge", len(asked), disable=None):
                key = asked[done]
                known[key] = done.result()
                disk.append(self.kept, json_of(dict(key=key, reply=known[key])) + "\n")
        finally:
            pool.shutdown(cancel_futures=True)  # else it would first ask all the others
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
