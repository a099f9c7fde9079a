"""Multiple choice by log-likelihood: which of the answers does the model find likeliest?

`score` gives a task's figures, equal to lm_eval's (0.4.13, `--model hf`, dtype float32) within
0.001 nats an answer; `verdict` says in words whether a figure means anything. Small models are at
chance on most exams, so chance is computed from the questions themselves, and a model that always
names the same letter is told apart from one that knows. A model that was tuned on conversations is
asked in their template. eval.py calls `answer_all`; exams.py has the questions.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import NormalDist
from string import ascii_uppercase
from typing import Literal

import torch

from config import Count, UsageError
from instruments import exams
from machinery.errors import NonFiniteError
from machinery.trained import EvalConfig, is_tuned, open_data, open_tokenizer
from model import GPT
from preparation.chat import prompt_ids
from tokenizer import Tokenizer

NORMS = {"sum": lambda text: 1, "per character": len, "per byte": lambda text: len(text.encode())}
CONSTANT = 0.9  # a letter predicted more often than this is a constant answer

Pair = tuple[list[int], list[int]]  # ids of the context, BOS in front, and of the answer


@dataclass(frozen=True)
class ChoiceConfig(EvalConfig):
    """Multiple choice: which answer does the model find likeliest?"""

    task: tuple[str, ...] = ("continuation",)
    """continuation (held-out text, no download), the exams of instruments/exams.py (hellaswag,
    arc_easy, mmlu, enem, oab ...; NAME=FOLDER reads a local copy), or JSONL files with `query`,
    `choices` and `gold`. core=FOLDER: CORE, from the folder of its 22 tasks; core:copa,piqa=FOLDER:
    some of them."""
    mode: Literal["auto", "letter", "answer", "options"] = "auto"
    """letter: the options are shown, their letters compared; answer: nothing is shown, the full
    answers are compared; options: shown, and the full answers compared. auto: the exam's usual."""
    shots: int = 0
    """Solved examples before each question."""
    limit: int = 0
    """Ask only the first N questions; 0: all."""
    batch: Count = 8
    """Answers per forward pass."""
    save: str = ""
    """Write each question's log-likelihoods to this JSONL file."""
    dtype: Literal["auto", "bf16", "fp32"] = "fp32"
    """Dtype of the computation. Only fp32 gives the figures of lm_eval: bf16 moves an answer's
    log-likelihood by a tenth of a nat, which decides close questions."""


def answer_all(config: ChoiceConfig, load_model: Callable, keep_record: Callable) -> None:
    """`eval.py choice`: print the accuracy of each task, and keep a record of it."""
    model, trainer = load_model(config)
    tokenizer, tuned = open_tokenizer(config, trainer), is_tuned(trainer)
    if any(word.partition("=")[0].partition(":")[0] == "core" for word in config.task):
        from instruments import core

        found = core.run(config, model, tokenizer, trainer)
    else:
        if tuned:
            print("tuned on conversations: each question is a user's, each answer the model's")
        found = run(config, model, tokenizer, lambda: open_data(config, trainer), tuned)
    for figures in found:
        keep_record(config, trainer, **figures)


def encode_pair(tokenizer: Tokenizer, context: str, answer: str, tuned: bool = False) -> Pair:
    """For a tuned model, the context is what a user asks, and the answer follows <|assistant|>.
    Otherwise a space goes between context and answer, white space at the end of the context counts
    as the answer's, and both are encoded as one text, since a token may span the boundary."""
    if tuned and context:
        return prompt_ids(context.rstrip(), tokenizer, tuned)[0], tokenizer.encode(answer)
    bos, text = [tokenizer.bos_id], context + " " + answer
    if not context:
        return bos, tokenizer.encode(text)
    prefix, whole = bos + tokenizer.encode(context.rstrip()), bos + tokenizer.encode(text)
    return prefix, whole[len(prefix) :]


def padded(pairs: list[Pair], batch: int, most: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The pairs as rows of ids, the longest first: which ones, and their ids (B, T). A row of more
    than `most` ids loses its beginning; a shorter one is padded on its right."""
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    for at in range(0, len(pairs), batch):
        part = order[at : at + batch]
        rows = [(pairs[i][0] + pairs[i][1])[-most:] for i in part]
        ids = torch.zeros(len(part), len(rows[0]), dtype=torch.long)
        for r, row in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(row)  # attention is causal: what follows is not seen
        yield part, ids


@torch.no_grad()
def log_likelihoods(model: GPT, pairs: list[Pair], batch: int) -> list[float]:
    """log p(answer | context) in nats of each pair. A pair longer than seq_len + 1 tokens loses the
    beginning of its context; UsageError for an answer that does not fit alone."""
    seq_len, device, nats = model.config.seq_len, model.cos.device, [0.0] * len(pairs)
    most = max(len(answer) for _, answer in pairs)
    if most > seq_len:
        raise UsageError(f"an answer of {most} tokens does not fit in seq_len {seq_len}")
    for part, ids in padded(pairs, batch, seq_len + 1):  # (B, T + 1)
        loss = model(ids[:, :-1].to(device), ids[:, 1:].to(device), reduction="none").cpu()
        for r, i in enumerate(part):
            end = min(len(pairs[i][0]) + len(pairs[i][1]), seq_len + 1) - 1
            nats[i] = -loss[r, end - len(pairs[i][1]) : end].double().sum().item()
    return nats


def statistics(picks: list[int], golds: list[int], options: list[int]) -> dict:
    """Accuracy with its standard error, sqrt(p (1 - p) / (n - 1)), and its distance from chance,
    z = (hits - sum of 1/k) / sqrt(sum of 1/k (1 - 1/k)) with k the options of each question.

    Also what a constant answer would look like: the share of the position picked most often, and
    the accuracy of always naming the position that is most often right."""
    n, hits = len(picks), sum(p == g for p, g in zip(picks, golds))
    expected = sum(1 / k for k in options)
    deviation = math.sqrt(sum(1 / k * (1 - 1 / k) for k in options))
    (picked, times), (best, right) = (Counter(x).most_common(1)[0] for x in (picks, golds))
    p = hits / n
    stderr, z = math.sqrt(p * (1 - p) / (n - 1)), (hits - expected) / deviation
    score = dict(n=n, hits=hits, accuracy=p, stderr=stderr, z=z)
    score |= dict(chance=expected / n, chance_sd=deviation / n)
    score |= dict(most_picked=picked, most_picked_share=times / n)
    return score | dict(best_constant=best, best_constant_accuracy=right / n)


def by_tag(questions: list[exams.Question], picks: list[int]) -> dict[str, dict[str, dict]]:
    """{"subject": {"law": its n, hits, accuracy, z}}: the questions by each tag that divides them.
    A question without the tag counts under "none", so that the sums are those of all."""
    found: dict[str, dict[str, dict]] = {}
    for tag in dict.fromkeys(name for q in questions for name in q.tags):
        own: dict[str, list[int]] = {}
        for i, q in enumerate(questions):
            own.setdefault(q.tags.get(tag, "none"), []).append(i)
        if len(own) > 1:
            found[tag] = {name: group(questions, picks, own[name]) for name in sorted(own)}
    return found


def group(questions: list[exams.Question], picks: list[int], places: list[int]) -> dict:
    """A part of the questions: how many, how many right, and the distance from chance."""
    n, hits = len(places), sum(picks[i] == questions[i].gold for i in places)
    shares = [1 / len(questions[i].answers) for i in places]
    deviation = math.sqrt(sum(p * (1 - p) for p in shares))
    return dict(n=n, hits=hits, accuracy=hits / n, z=(hits - sum(shares)) / deviation)


def group_lines(groups: dict[str, dict[str, dict]]) -> Iterator[str]:
    """A table for each tag, with a line for all that is the sum of the others."""
    for tag, rows in groups.items():
        limit = limit_of_z(len(rows))
        width = max(map(len, [tag, *rows]))
        yield f"    {tag:{width}}  questions  right  accuracy       z"
        for name, f in rows.items():
            far = " *" if abs(f["z"]) > limit else ""
            yield (
                f"    {name:{width}}  {f['n']:>9,}  {f['hits']:>5,}  {f['accuracy']:>8.4f}  "
                f"{f['z']:+6.2f}{far}"
            )
        n, hits = (sum(f[key] for f in rows.values()) for key in ("n", "hits"))
        yield f"    {'all':{width}}  {n:>9,}  {hits:>5,}  {hits / n:>8.4f}"
        yield f"    * differs from chance: |z| > {limit:.2f}, for {len(rows)} scores"


def limit_of_z(count: int) -> float:
    """A |z| that, of `count` scores at chance, one or more exceed in at most 5% of cases
    (Bonferroni)."""
    return NormalDist().inv_cdf(1 - 0.05 / count / 2)


def verdict(figures: dict, limit: float, letters: bool) -> str:
    """A figure in plain words; a |z| up to `limit` cannot be told from chance."""
    if letters and figures["most_picked_share"] > CONSTANT:
        return f"a constant answer: nearly always {ascii_uppercase[figures['most_picked']]}"
    if abs(figures["z"]) <= limit:
        return "cannot be told from chance"
    if figures["z"] < 0:
        return "below chance"
    if letters and figures["accuracy"] <= figures["best_constant_accuracy"]:
        return "above chance, but no better than a constant answer"
    return "above chance"


def norms_of(questions: list[exams.Question], letters: bool) -> list[str]:
    """Letters, and the same answer after several contexts, have one length: the sum alone."""
    same = letters or all(isinstance(q.context, tuple) for q in questions)
    return ["sum"] if same else list(NORMS)


def score(
    questions: list[exams.Question],
    model: GPT,
    tokenizer: Tokenizer,
    batch: int,
    letters: bool,
    tuned: bool = False,
) -> tuple[dict[str, dict], list[list[float]], int]:
    """{norm: statistics}, the nats of each question's answers, and how many of the questions were
    too long. norm: the sum of the nats, or that divided by the answer's characters or bytes (not
    counting the space in front)."""
    pairs, texts = [], []
    for q in questions:
        if isinstance(q.context, str | tuple):
            contexts = q.context if isinstance(q.context, tuple) else cycle([q.context])
            asked = zip(contexts, q.answers)
            pairs += [encode_pair(tokenizer, context, answer, tuned) for context, answer in asked]
            texts.append(q.answers)
        else:
            pairs += [([tokenizer.bos_id, *q.context], answer) for answer in q.answers]
            texts.append([tokenizer.decode(answer) for answer in q.answers])
    flat = log_likelihoods(model, pairs, batch)
    if not all(map(math.isfinite, flat)):
        raise NonFiniteError("the model gives log-likelihoods that are NaN or infinite")
    rest = iter(flat)
    nats = [[next(rest) for _ in q.answers] for q in questions]
    golds, options, figures = [q.gold for q in questions], [len(q.answers) for q in questions], {}
    for norm in norms_of(questions, letters):
        picks = []
        for values, answers in zip(nats, texts):
            scaled = [x / max(1, NORMS[norm](text)) for x, text in zip(values, answers)]
            picks.append(scaled.index(max(scaled)))
        figures[norm] = statistics(picks, golds, options) | dict(picks=picks)
    room = model.config.seq_len + 1
    too_long = iter([len(context) + len(answer) > room for context, answer in pairs])
    return figures, nats, sum(any([next(too_long) for _ in q.answers]) for q in questions)


def run(
    config: ChoiceConfig,
    model: GPT,
    tokenizer: Tokenizer,
    load_manifest: Callable,
    tuned: bool = False,
) -> Iterator[dict]:
    """Score every task and print its figures; yields one record of each. All tasks are read before
    the first is scored. load_manifest(): the data, if a task needs it."""
    if not config.task:
        raise UsageError("--task needs a name; leave it out for continuation")
    asked = {}
    for task in config.task:
        mode = exams.resolve_mode(task, config.mode)
        args = (config.shots, config.limit, load_manifest, model.config.seq_len)
        asked[task] = mode, exams.ask(task, mode, *args)
        n = len(asked[task][1])
        if n < 2:
            raise UsageError(f"{task} has {n} questions to ask; a standard error needs 2 or more")
    if config.save:
        try:
            Path(config.save).write_text("")
        except OSError as error:
            raise UsageError(f"--save {config.save}: {error.strerror}") from None
    count = sum(len(norms_of(questions, mode == "letter")) for mode, questions in asked.values())
    limit = limit_of_z(count)
    for task, (mode, questions) in asked.items():
        letters = mode == "letter"
        figures, nats, cut = score(questions, model, tokenizer, config.batch, letters, tuned)
        chance = figures["sum"]["chance"]
        print(
            f"{task}: {len(questions):,} questions, mode {mode}, {config.shots} examples, chance "
            f"{chance:.4f}"
        )
        if cut:
            print(f"  {cut} questions lost their beginning: seq_len is {model.config.seq_len}")
        for norm, f in figures.items():
            print(
                f"  {norm:13}  {f['accuracy']:.4f} +- {f['stderr']:.4f}  z {f['z']:+6.2f}  "
                f"{verdict(f, limit, letters)}"
            )
            groups = by_tag(questions, f.pop("picks")) if norm == "sum" else {}
            yield dict(task=task, mode=mode, norm=norm, **f) | (dict(by=groups) if groups else {})
            for line in group_lines(groups):
                print(line)
        if letters:
            f, name = figures["sum"], ascii_uppercase
            print(
                f"  {name[f['most_picked']]} is predicted in {f['most_picked_share']:.1%} of the "
                f"questions; always {name[f['best_constant']]} would score "
                f"{f['best_constant_accuracy']:.4f}"
            )
        if config.save:
            with open(config.save, "a", encoding="utf-8") as file:
                for q, values in zip(questions, nats):
                    file.write(json.dumps(dict(task=task, gold=q.gold, nats=values)) + "\n")
    print(f"{count} scores: one differs from chance if |z| > {limit:.2f} (5% family-wise error)")
