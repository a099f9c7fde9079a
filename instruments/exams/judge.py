"""Who decides the tournament, and what follows: a checkpoint by likelihood, or a model behind a
server; and ratings from their decisions.

`novel_mean` scores each completion alone, `Server` compares two at a time; both end in wins
(N, P, P): for each of N prompts, 1 where the row's player beat the column's, 0.5 for a tie.
`bradley_terry` turns wins into ratings on Elo's scale: 400 points more are odds of ten to one, the
mean is 1000; `interval` says how much to believe of them. Next: tournament.py, which asks.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tqdm import tqdm

from config import UsageError, install

QUESTION = """Below are a text and two continuations of it. Which continuation is better written and
follows from the text? A continuation that only repeats itself is bad.

Text:
{prompt}

A:
{a}

B:
{b}

Answer with one word: A, B, or TIE if neither is better.
Answer:"""


def novel(prompt: list[int], completion: list[int]) -> list[bool]:
    """Which tokens end a bigram not seen before: [1, 2] and [1, 2, 3] -> [True, False, True]."""
    seen, new, text = set(zip(prompt, prompt[1:])), [], prompt[-1:] + completion
    for bigram in zip(text, text[1:]):
        new.append(bigram not in seen)
        seen.add(bigram)
    return new


@torch.no_grad()
def novel_mean(model, prompts: list[list[int]], completions: list[list[int]]) -> np.ndarray:
    """Mean log p (nats) over the new tokens (`novel`) of each completion, (N,); -inf without any.

    The plain mean puts a loop first, since a copied token is the easiest to predict. Leaving copies
    out of the mean neither rewards nor punishes them.
    """
    scores = np.full(len(prompts), -np.inf)
    for n, (prompt, completion) in enumerate(zip(prompts, completions)):
        new = novel(prompt, completion)
        if any(new):
            ids = [model.config.bos_id, *prompt, *completion]
            text = torch.tensor([ids], device=model.cos.device)  # (1, T)
            nats = model(text[:, :-1], text[:, 1:], reduction="none")[0]  # (T - 1,)
            scores[n] = -nats[len(prompt) :].float().cpu().numpy()[new].mean()
    return scores


def compare(scores: list[np.ndarray]) -> np.ndarray:
    """P players' scores, (N,) each -> wins (N, P, P)."""
    s = np.stack(scores, axis=1)  # (N, P)
    better, equal = s[:, :, None] > s[:, None], s[:, :, None] == s[:, None]
    return better + 0.5 * equal


class Server:
    """A judge behind an OpenAI-compatible address (vLLM, `transformers serve`, ...)."""

    def __init__(self, url: str, model: str, timeout_s: float = 60.0) -> None:
        """Asks one question, so that a server that cannot judge is known before the work begins."""
        if not model:
            raise UsageError(f"--judge_url {url} needs --judge_model, the model's name there")
        try:
            from openai import OpenAI
        except ImportError:
            how = install("requirements-eval.txt")
            raise UsageError(f"--judge_url needs the package openai: {how}") from None
        self.url, self.model, self.timeout_s = url, model, timeout_s
        self.answers = {"A": 0, "B": 0, "tie": 0, "unparsable": 0}
        # A local server needs no key, but the client does.
        key = os.environ.get("OPENAI_API_KEY") or "none"
        try:
            self.client = OpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=0)
        except Exception as error:  # of httpx: a URL or a proxy that it cannot use
            raise UsageError(f"--judge_url {url} cannot be used: {error}") from None
        self.ask(QUESTION.format(prompt="1, 2,", a=" 3, 4", b=" 2, 2"))
        self.client = self.client.with_options(max_retries=2)

    def ask(self, question: str) -> str:
        """The model's answer; UsageError if there is none in time."""
        from openai import OpenAIError

        messages = [{"role": "user", "content": question}]
        try:
            reply = self.client.chat.completions.create(
                model=self.model, messages=messages, max_completion_tokens=1024, temperature=0
            )
            return reply.choices[0].message.content or ""
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            # of the network, of HTTP, or of a reply that is no JSON or has no choices
            why = f"{type(error).__name__}: {error.__cause__ or error}"[:200]
            at = f"the judge at {self.url} gives no answer within {self.timeout_s:g} s ({why})"
            ask = f"does it chat, does the address end in /v1, is --judge_model {self.model} right?"
            raise UsageError(f"{at}; {ask}") from None

    def compare(self, prompts: list[str], completions: list[list[str]]) -> np.ndarray:
        """N prompts, completions [P][N] -> wins (N, P, P). Every pair is asked in both orders, so
        a judge that always likes the first makes ties. A tie, and an unparsable answer, is half a
        win. UsageError once more than half of all answers are sure to be unparsable."""
        shape = (len(prompts), len(completions), len(completions))
        places = [(n, i, j) for n, i, j in np.ndindex(shape) if i != j]
        questions = [
            QUESTION.format(prompt=prompts[n], a=completions[i][n], b=completions[j][n])
            for n, i, j in places
        ]
        first = np.full(shape, 0.5)  # what i as A scored against j as B
        pool = ThreadPoolExecutor(8)
        try:
            answers = tqdm(pool.map(self.ask, questions), total=len(questions), disable=None)
            for place, text in zip(places, answers):
                self.answers[letter := parse(text)] += 1
                first[place] = {"A": 1, "B": 0}.get(letter, 0.5)
                if self.answers["unparsable"] > len(questions) / 2:
                    few = f"{self.answers['unparsable']} of {len(questions)} answers"
                    why = f"{few} of {self.model} are neither A, B nor TIE, as {text[-80:]!r}"
                    raise UsageError(f"{why}; take another judge")
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, ask no more
        print("its answers: " + ", ".join(f"{n:,} {letter}" for letter, n in self.answers.items()))
        return (first + 1 - first.transpose(0, 2, 1)) / 2


def parse(text: str) -> str:
    """Answer: B -> B; A. -> A; TIE, a tie -> tie; A or B, both, Apple -> unparsable. What a model
    thinks aloud before `</think>` does not count, nor does a thought that was cut off."""
    if "<think>" in text and "</think>" not in text:
        return "unparsable"
    answer = re.sub(r"\b(?:a )?tie\b", "tie", text.rpartition("</think>")[2], flags=re.I)
    words = set(re.findall(r"\b(?:[AB]|tie)\b", answer))
    return words.pop() if len(words) == 1 else "unparsable"


def bradley_terry(wins: np.ndarray, prior: float = 0.5) -> np.ndarray:
    """Sums of wins over prompts (..., P, P) -> ratings (..., P).

    The strengths p that make the wins likeliest if i beats j with probability p_i / (p_i + p_j),
    by Newman's iteration (2023, "Efficient computation of rankings from pairwise comparisons",
    equation 11). prior: virtual wins of each player over each other, half of one by default; else
    a player that has won every match would have no finite rating.
    """
    n_players = wins.shape[-1]
    wins = (wins + prior) * (1 - np.eye(n_players))
    p = np.ones(wins.shape[:-1])  # (..., P)
    for _ in range(10_000):
        before = p.copy()
        for i in range(n_players):  # one by one: updated together, two would swap forever
            meetings = p[..., i, None] + p  # (..., P)
            won = (wins[..., i, :] * p / meetings).sum(-1)
            p[..., i] = won / (wins[..., :, i] / meetings).sum(-1)
        p /= np.exp(np.log(p).mean(-1, keepdims=True))
        if np.abs(np.log(p / before)).max() < 1e-9:
            break
    return 1000 + 400 * np.log10(p)


def interval(wins: np.ndarray, resamples: int = 1000, seed: int = 0) -> tuple[np.ndarray, ...]:
    """wins (N, P, P) -> the 2.5% and 97.5% quantiles (P,) of the rating over resampled prompts.

    Prompts are drawn with replacement, not matches: a prompt's matches share its text, so they are
    not independent, and resampling them one by one would give intervals that are too narrow.
    """
    n, n_players = wins.shape[:2]
    times = np.random.default_rng(seed).multinomial(n, [1 / n] * n, size=resamples)  # (R, N)
    sums = (times @ wins.reshape(n, -1)).reshape(resamples, n_players, n_players)
    return tuple(np.quantile(bradley_terry(sums), (0.025, 0.975), axis=0))
