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
from itertools import combinations
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
RETRIES = 3  # of a server that is silent, refuses, or is overloaded
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

Pair = tuple[str, str, str]  # a prompt, text A, text B


def points_of(reply: str) -> float | None:
    """What text A gets by a reply, whose last line is A, B or TIE, with any signs around it:
    "**A**". None if it is no verdict. What a model thinks before it replies ends in </think>."""
    line = reply.rpartition("</think>")[2].strip().rpartition("\n")[2]
    return POINTS.get(re.sub(r"\W", "", line).upper())


class Server:
    """A judge behind an address."""

    def __init__(self, url: str, model: str, criteria: str, max_tokens: int, kept: Path) -> None:
        """url: what stands before /chat/completions. model: empty: the one that the server lists.
        criteria: what is better, in words. max_tokens: of a reply. kept: the file of the replies.
        UsageError unless such a server answers, with one model to choose from."""
        try:
            from openai import OpenAI
        except ImportError:
            raise UsageError(
                f"--judge {url} needs the package openai: {install('requirements-eval.txt')}"
            ) from None
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a server of one's own wants none
        self.client = OpenAI(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=RETRIES)
        self.url = url
        self.criteria = criteria
        self.max_tokens = max_tokens
        self.kept = kept
        self.model = model or self.only_model()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """UsageError for whatever goes wrong: the library's errors, and those of reading an answer
        that is none, which it does not check."""
        try:
            yield
        except Exception as error:
            raise UsageError(
                f"no judge answers at {self.url} (most addresses end in /v1): {reason_of(error)}; "
                "replies so far are kept: the same command asks only what is missing"
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

    def ask(self, body: dict) -> str:
        """The end of the reply."""
        with self.asking():
            message = self.client.chat.completions.create(**body).choices[0].message
            return (message.content or "")[-KEPT:]

    def replies(self, pairs: list[Pair]) -> list[str]:
        """A reply to each pair, asked or known from the file."""
        keys = []
        bodies = {}
        for prompt, a, b in pairs:
            text = REQUEST.format(criteria=self.criteria, prompt=prompt, a=a, b=b)
            message = {"role": "user", "content": text}
            body = dict(model=self.model, messages=[message], max_tokens=self.max_tokens)
            body["temperature"] = 0
            key = hashlib.sha256(json.dumps(body).encode()).hexdigest()
            keys.append(key)
            bodies[key] = body
        known = {line.key: line.reply for line in read_lines(self.kept, Verdict)}
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            asked = {pool.submit(self.ask, bodies[key]): key for key in bodies if key not in known}
            for done in tqdm(as_completed(asked), "judge", len(asked), disable=None):
                key = asked[done]
                known[key] = done.result()
                disk.append(self.kept, json_of(dict(key=key, reply=known[key])) + "\n")
        finally:
            pool.shutdown(cancel_futures=True)  # else it would first ask all the others
        return [known[key] for key in keys]

    def compare(self, prompts: list[str], texts: list[list[str]]) -> tuple[np.ndarray, list[str]]:
        """P players' texts, N each -> (wins (N, P, P), reasons to doubt them).

        A win is the mean over both orders. Where one of the two replies is no verdict, neither
        player gets anything. UsageError if none is a verdict."""
        n_players = len(texts)
        pairs = []
        for n, prompt in enumerate(prompts):
            for i, j in combinations(range(n_players), 2):
                a, b = texts[i][n], texts[j][n]
                pairs += [(prompt, a, b), (prompt, b, a)]
        replies = self.replies(pairs)
        points = [points_of(reply) for reply in replies]
        both = np.array(points, float).reshape(len(prompts), -1, 2)  # NaN: no verdict
        won = (both[..., 0] + 1 - both[..., 1]) / 2  # (N, pairs of players)
        wins = np.zeros((len(prompts), n_players, n_players))
        i, j = np.triu_indices(n_players, 1)
        wins[:, i, j] = np.nan_to_num(won)
        wins[:, j, i] = np.nan_to_num(1 - won)
        return wins, self.doubts(replies, both)

    def doubts(self, replies: list[str], points: np.ndarray) -> list[str]:
        """Print how it judged; reasons to doubt it."""
        lost = np.isnan(points)
        if lost.all():
            raise UsageError(
                f"{self.model} gave no verdict in {len(replies)} replies, but {replies[0]!r}; a "
                "model that thinks first needs a larger --judge_tokens"
            )
        decided = points[((points == 0) | (points == 1)).all(-1)]  # (pairs, 2)
        agree = (decided.sum(-1) == 1).sum()
        say(
            f"{len(replies):,} replies: {lost.sum():,} no verdict, {(points == 0.5).sum():,} ties; "
            f"both orders decided {len(decided):,} pairs, and {agree:,} of them alike"
        )
        found = []
        if lost.mean() > 0.1:
            example = replies[int(lost.ravel().argmax())]
            found.append(f"{lost.sum():,} of {len(replies):,} replies are no verdict: {example!r}")
        if agree < len(decided) / 2 + len(decided) ** 0.5:  # two standard deviations of a coin
            found.append(
                f"it decided {len(decided):,} pairs in both orders, {agree:,} of them alike, as by "
                "tossing a coin"
            )
        return found
