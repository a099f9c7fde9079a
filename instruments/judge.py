"""Who decides the tournament: a checkpoint by likelihood, or a model behind a server.

`novel_mean` scores each completion alone, `Server` compares two at a time; both end in wins
(N, P, P): for each of N prompts, 1 where the row's player beat the column's, 0.5 for a tie.
Next: tournament.py, which asks them.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from config import UsageError

TIMEOUT_S = 60.0  # to wait for one answer of a server

CRITERIA = """Which continuation is better written and follows from the text? A continuation that
only repeats itself is bad."""
QUESTION = """Below are a text and two continuations of it. {criteria}

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


class Refused(UsageError):
    """The server answers, but with an HTTP error; `why` is its status and its own words."""

    def __init__(self, sentence: str, why: str) -> None:
        super().__init__(sentence)
        self.why = why


class Server:
    """A judge behind an OpenAI-compatible address (vLLM, `transformers serve`, ...)."""

    def __init__(
        self, url: str, model: str, timeout_s: float = TIMEOUT_S, criteria: str = CRITERIA
    ) -> None:
        """Asks one question, so that a server that cannot judge is known before the work begins."""
        try:
            from openai import OpenAI, OpenAIError
        except ImportError:
            raise UsageError(
                "--judge_url needs the package openai: pip install -r requirements-eval.txt"
            ) from None
        if not model:
            raise UsageError(f"--judge_url {url} needs --judge_model, the model's name there")
        self.url, self.model, self.timeout_s, self.chat = url, model, timeout_s, True
        # A local server needs no key, but the client does.
        key = os.environ.get("OPENAI_API_KEY") or "none"
        try:
            self.client = OpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=0)
        except (OpenAIError, ImportError, ValueError) as error:  # a proxy that httpx cannot use
            raise UsageError(self.fault(f"{type(error).__name__}: {error}")) from None
        self.answers = {"A": 0, "B": 0, "tie": 0, "unparsable": 0}
        self.criteria = criteria
        question = QUESTION.format(criteria=criteria, prompt="1, 2,", a=" 3, 4", b=" 2, 2")
        try:
            self.ask(question)
            how = "chat/completions"
        except Refused as refusal:  # often because the model has no chat template
            self.chat, how = False, f"completions, as it refuses chat: {refusal.why}"
        # Retry from now on: some servers drop the connection after an error.
        self.client = self.client.with_options(max_retries=2)
        if not self.chat:
            self.ask(question)
        print(f"{model} is asked through {how}")

    def ask(self, question: str) -> str:
        """The model's answer. Refused or another UsageError if there is none in time."""
        from openai import APIStatusError, OpenAIError

        options = dict(model=self.model, max_tokens=16, temperature=0)
        messages = [{"role": "user", "content": question}]
        try:
            if self.chat:
                reply = self.client.chat.completions.create(messages=messages, **options)
            else:
                reply = self.client.completions.create(prompt=question, **options)
        except APIStatusError as error:
            why = f"HTTP {error.status_code}: {error.response.text[:200]}"
            raise Refused(self.fault(why), why) from None
        except (OpenAIError, json.JSONDecodeError) as error:
            raise UsageError(self.fault(f"{type(error).__name__}: {error}")) from None
        choices = getattr(reply, "choices", None)  # what is no JSON comes as text
        if not choices:
            raise UsageError(self.fault(f"its reply has no choices: {str(reply)[:200]}"))
        text = choices[0].message.content if self.chat else choices[0].text
        return text or ""

    def fault(self, why: str) -> str:
        return (
            f"the judge at {self.url} gives no answer ({why}); is it running, does its address end "
            f"in /v1, is --judge_model {self.model} right, are {self.timeout_s:g} s enough for an "
            "answer, and does a proxy stand between (NO_PROXY)?"
        )

    def compare(self, prompts: list[str], completions: list[list[str]]) -> np.ndarray:
        """N prompts, completions [P][N] -> wins (N, P, P). Every pair is asked in both orders, so
        a judge that always likes the first makes ties. A tie, and an unparsable answer, is half a
        win."""
        from tqdm import tqdm

        shape = (len(prompts), len(completions), len(completions))
        places = [(n, i, j) for n, i, j in np.ndindex(shape) if i != j]
        questions = [
            QUESTION.format(
                criteria=self.criteria, prompt=prompts[n], a=completions[i][n], b=completions[j][n]
            )
            for n, i, j in places
        ]
        print(f"{len(questions):,} questions for {self.model}")
        pool = ThreadPoolExecutor(8)
        try:
            answers = pool.map(self.ask, questions)
            letters = [parse(a) for a in tqdm(answers, total=len(questions), disable=None)]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, ask no more
        first = np.full(shape, 0.5)  # what i as A scored against j as B
        for place, letter in zip(places, letters):
            self.answers[letter] += 1
            first[place] = {"A": 1, "B": 0}.get(letter, 0.5)
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
