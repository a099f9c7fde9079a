"""Public exams: the tasks of lm_eval (EleutherAI's harness), scored by our model.

lm_eval knows the exams: where they are on the Hub, how they are written out, which answer is right.
`Ours` gives it our log-likelihoods; `ask` gives back each question with them. Beside lm_eval's own
tasks, those in tasks/*.yaml are known. Only multiple choice is asked. Next: choice.py.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from config import UsageError
from instruments.exams.likelihood import encode_pair, log_likelihoods
from instruments.exams.questions import Question, sample, tags_of
from machinery import cli
from machinery.errors import DataError
from model import GPT
from tokenizer import Tokenizer

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each setting that we choose


class Ours(TemplateLM):
    """A model of ours as lm_eval sees it."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch: int, tuned: bool = False) -> None:
        super().__init__()
        self.gpt, self.ids, self.batch, self.tuned = model, tokenizer, batch, tuned

    @property
    def eot_token_id(self) -> int:
        """What stands before an answer without a context."""
        return self.ids.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self.ids.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return encode_pair(self.ids, context, continuation, self.tuned)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """The nats, and whether the answer is the likeliest text, which multiple choice does not
        ask for."""
        pairs = [(context, answer) for _, context, answer in requests]
        return [(x, False) for x in log_likelihoods(self.gpt, pairs, self.batch, tell=True)]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError("only multiple choice is asked")

    generate_until = loglikelihood_rolling


@lru_cache
def manager() -> TaskManager:
    """All tasks by name; ours are added to those of lm_eval, which takes some seconds."""
    return TaskManager(include_path=str(Path(__file__).with_name("tasks")))


def open_tasks(name: str) -> list:
    """The tasks of lm_eval that a name stands for: itself, or the members of a group."""
    cli.find("task", name, manager().task_index, "lm_eval ls tasks lists all")
    try:
        tasks = list(manager().load([name])["tasks"].values())
    except Exception as error:  # of the network, the Hub or the set: it has no common class
        why = (str(error).strip() or "no reason given").splitlines()[0]
        raise DataError(
            f"{name} could not be loaded ({type(error).__name__}: {why[:200]}); connect to the Hub"
        ) from None
    for task in tasks:
        if task.OUTPUT_TYPE != "multiple_choice":
            raise UsageError(
                f"{task.task_name} is no multiple choice but {task.OUTPUT_TYPE}; lm_eval itself "
                "scores it, from an export (docs/evaluation.md)"
            )
    return tasks


def ask(lm: Ours, tasks: list, shots: int, limit: int) -> Iterator[tuple[Question, list[float]]]:
    """Each question of the tasks, and the nats of its answers. limit: this many of all questions
    (0: all), a sample that is the same each time."""
    places = [(task, i) for task in tasks for i in range(len(task.eval_docs))]
    chosen: dict = {}
    for task, i in sample(places, limit):
        chosen.setdefault(task, []).append(i)
    for task in chosen:  # as lm_eval's simple_evaluate does, which then describes the machine
        if task.config.num_fewshot != 0:  # 0: the task takes no examples
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(1234)
    found = lm_eval.evaluate(
        lm,
        dict(tasks={task.task_name: task for task in chosen}),
        samples={task.task_name: places for task, places in chosen.items()},
        bootstrap_iters=0,
    )
    for task in chosen:
        for row in found["samples"][task.task_name]:
            answers, gold = task.doc_to_choice(row["doc"]), row["target"]
            if task.multiple_input:  # the answers are contexts of one continuation
                answers, gold = [gold] * len(answers), task.doc_to_text(row["doc"])
            if isinstance(gold, str):
                gold = answers.index(gold)
            if not isinstance(gold, int):
                raise UsageError(f"{task.task_name} has questions with several right answers")
            tags = tags_of(row["doc"], task.config.dataset_name)
            nats = [x for x, _ in row["filtered_resps"][: len(answers)]]
            yield Question(row["arguments"][0][0], tuple(answers), gold, tags), nats
