"""A judge behind an address: any server that speaks OpenAI's protocol, such as llama.cpp's, Ollama,
vLLM or `transformers serve`.

It is shown each pair of texts twice, in both orders, since judges favour a place. Each reply is
kept as it comes, so after a kill only what is missing is asked. The key in OPENAI_API_KEY goes to
the server, and into no file. Next: tournament.py, which makes ratings of the wins.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from config import UsageError
from machinery import disk
from machinery.errors import reason_of
from machinery.formats import Line, Verdict, checked, read_lines
from machinery.output import json_of, say

AT_ONCE = 8  # requests; if as many fail in a row, the server itself may be the reason
TIMEOUT_S = 600  # of a whole answer
WAITS_S = (1, 5, 30)  # before a server that is overloaded is asked again
OVERLOADED = 408, 429, 500, 502, 503, 504, 529  # what a server then answers
LARGEST = 4 << 20  # bytes of an answer
KEPT = 200  # last characters of a reply

REQUEST = """Two texts, A and B, were written to the same prompt. {criteria}

The prompt:
{prompt}

Text A:
{a}

Text B:
{b}

Which is better? Reply with A, B or TIE, and nothing else."""
POINTS = {"A": 1.0, "B": 0.0, "TIE": 0.5, "EMPATE": 0.5, "平局": 0.5}  # of text A


def points_of(reply: str) -> float | None:
    """What text A gets by a reply, whose last line is A, B or TIE (EMPATE, 平局), with any signs
    around it: "**A**". None if it is no verdict."""
    line = reply.strip().rpartition("\n")[2]
    return POINTS.get(re.sub(r"[\W_]", "", line).upper())


def text_of(answer: dict) -> str:
    """The end of a reply. What a model thinks first, in parts of its own or up to </think>, is left
    out. A reply that was cut ends in a line that says so, and is no verdict."""
    choice = answer["choices"][0]
    reason = str(choice.get("finish_reason")).lower()
    if reason == "error":  # which one, says the rest of the answer, which `send` shows
        raise ValueError
    text = choice["message"].get("content") or ""
    if isinstance(text, list):
        text = "".join(part["text"] for part in text if part["type"] == "text")
    text = text.rpartition("</think>")[2]
    cut = reason in ("length", "max_tokens", "content_filter") or "<think>" in text
    return text[-KEPT:] + "\n(cut)" * cut


@dataclass
class Server:
    """A judge behind an address. UsageError if no model is named, and it does not list exactly
    one."""

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
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        # It gets the first of these that it does not refuse by name.
        most = self.max_tokens
        self.settings = [
            {"max_tokens": most, "temperature": 0},
            {"max_completion_tokens": most},  # OpenAI's newest models
            {"max_tokens": most},
        ]
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        disk.append(self.kept, "")  # it can be written, before anything is paid for
        if not self.model:
            read = lambda answer: [checked(Line, x["id"], "its name") for x in answer["data"]]
            names = self.send(read, "GET", "models")
            if len(names) != 1:
                raise UsageError(
                    f"{self.url} has {len(names)} models; choose one with --judge_model: "
                    f"{', '.join(names)[:500]}"
                )
            self.model = names[0]

    def without_key(self, text: str) -> str:
        """A text of the server's, which may repeat the key, also in pieces."""
        for i in range(len(self.key) - 5):  # a shorter one, as "none", is no secret
            text = text.replace(self.key[i : i + 6], "(key)")
        return text

    async def exchange(self, method: str, path: str, body: dict | None) -> tuple[int, bytes]:
        """The status of an answer, and what it holds. The key follows no redirect."""
        url = f"{self.url.rstrip('/')}/{path}"
        headers = {}
        if self.key and "@" not in url:  # else the password in the address is sent
            headers["Authorization"] = f"Bearer {self.key}"
        how = dict(headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S), trust_env=True)
        async with (
            aiohttp.ClientSession(**how) as session,
            session.request(method, url, json=body, allow_redirects=False) as answer,
        ):
            content = b""
            async for part in answer.content.iter_any():
                content += part
                if len(content) > LARGEST:
                    raise ValueError(f"an answer of more than {LARGEST >> 20} MB")
            return answer.status, content

    def send(self, read: Callable, method: str, path: str, body: dict | None = None) -> Any:
        """What `read` finds in the answer to a request; UsageError if there is none, or if it is
        not of the protocol. A server that is overloaded is asked again after each of WAITS_S."""
        for wait_s in (*WAITS_S, None):
            status = words = None
            try:
                status, content = asyncio.run(self.exchange(method, path, body))
                words = f"{status}: {content[:1000].decode(errors='replace')}"
                if status == 200:
                    return read(json.loads(content))
            except Exception as error:  # of the library, or of an answer that `read` cannot read
                words = words or reason_of(error)
            if wait_s is None or status not in OVERLOADED:
                words = self.without_key(" ".join(words.split()))
                raise UsageError(
                    f"the judge at {self.url} gives no reply (most addresses end in /v1): {words}"
                )
            time.sleep(wait_s)

    def ask(self, item: tuple[str, str]) -> tuple[tuple, str, bool]:
        """(key, request) -> (the same; the end of the reply, which is kept, or why there is none;
        whether there is one)."""
        key, request = item
        body = dict(model=self.model, messages=[{"role": "user", "content": request}])
        for settings in self.settings:
            try:
                reply = self.without_key(
                    self.send(text_of, "POST", "chat/completions", body | settings)
                )
            except UsageError as error:
                why = str(error)
            else:
                self.settings = [settings]
                # At once, in one write, whatever the main thread waits for.
                disk.append(self.kept, json_of(dict(key=key, reply=reply)) + "\n")
                return item, reply, True
            if not any(name in why for name in settings):
                break
        return item, why[:500], False

    def replies(self, requests: list[str]) -> list[str]:
        """A reply to each, asked or known from the file; or why there is none, which is not kept:
        the next run asks again."""
        # By all that a reply depends on, but not by the address: a server may move.
        keys = {x: disk.sha256_of_tree([self.model, self.max_tokens, x]) for x in requests}
        known = {line.key: line.reply for line in read_lines(self.kept, Verdict)}
        # By key: else those with one text, or a bad one, would come in a row.
        items = sorted((key, request) for request, key in keys.items())
        missing = [item for item in items if item[0] not in known]
        answered = [item for item in items if item[0] in known]
        in_a_row = 0
        say(f"{len(missing):,} requests to {self.model}, {len(answered):,} known replies")
        with ThreadPool(AT_ONCE) as pool:  # its threads end with the program, even if they wait
            for part in missing[:1], missing[1:]:  # the first alone tries the settings
                answers = pool.imap_unordered(self.ask, part)
                for item, reply, replied in tqdm(answers, "judge", len(part), disable=None):
                    known[item[0]] = reply
                    if replied:
                        answered.append(item)
                        in_a_row = 0
                        continue
                    in_a_row += 1
                    # Whether all requests meet it, is told by one that was answered before.
                    if in_a_row % AT_ONCE == 0 and not (answered and self.ask(answered[-1])[2]):
                        raise UsageError(f"{reply}; the same command asks only what is missing")
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
        points = np.array([*map(points_of, replies)], float).reshape(len(prompts), -1)
        first[:, ~np.eye(n_players, dtype=bool)] = points
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
        # Each pair is there twice: with one winner in both orders, or with two.
        agree = np.isin(first + second, (0, 2)).sum() // 2
        n = agree + (abs(first - second) == 1).sum() // 2
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
