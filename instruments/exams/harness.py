"""Public exams: the tasks of lm_eval (EleutherAI's harness), as questions for our model.

lm_eval knows the exams: where they are on the Hub, how they are written out, which answer is right.
`questions` gives them as it would ask them. Beside lm_eval's own tasks, those in tasks/*.yaml are
known. Only multiple choice is asked. Next: choice.py scores them.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lm_eval.tasks import TaskManager

from config import UsageError
from instruments.exams.questions import Question, sample
from machinery import cli
from machinery.errors import DataError, reason_of

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each setting that we choose


@lru_cache
def manager() -> TaskManager:
    """All tasks by name; ours are added to those of lm_eval, which takes some seconds."""
    return TaskManager(include_path=str(Path(__file__).with_name("tasks")))


def open_tasks(name: str) -> list:
    """The tasks of lm_eval that a name stands for: itself, or the members of a group."""
    cli.find("task", name, manager().task_index, "lm_eval ls tasks lists all")
    try:
        tasks = list(manager().load([name])["tasks"].values())
    except Exception as error:  # from the network, the Hub or the data set: they share no class
        raise DataError(
            f"{name} could not be loaded ({reason_of(error)}); connect to the Hub"
        ) from None
    for task in tasks:
        if task.OUTPUT_TYPE != "multiple_choice":
            raise UsageError(
                f"{task.task_name} is not multiple choice but {task.OUTPUT_TYPE}; lm_eval itself "
                "scores it, from an export (docs/evaluation.md)"
            )
    return tasks


def questions(name: str, shots: int, limit: int) -> Iterator[Question]:
    """The questions of a task or a group. limit: this many of all (0: all), a sample that is the
    same each time."""
    examples = [(task, i) for task in open_tasks(name) for i in range(len(task.eval_docs))]
    chosen: dict = {}
    for task, i in sample(examples, limit):
        chosen.setdefault(task, []).append(i)
    for task, own in chosen.items():  # as lm_eval's simple_evaluate does
        if task.config.num_fewshot != 0:  # 0: the task takes no examples
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(samples=own)
        asked: dict = {}
        for request in task.instances:
            asked.setdefault(request.doc_id, []).append(request)
        for requests in asked.values():
            yield question_of(task, requests)


def question_of(task, requests: list) -> Question:
    """The requests that lm_eval makes from a row -> a question."""
    row = requests[0].doc
    answers = task.doc_to_choice(row)
    gold = task.doc_to_target(row)
    if task.multiple_input:  # the answers are contexts of one continuation
        answers = [gold] * len(answers)
        gold = task.doc_to_text(row)
    if isinstance(gold, str):
        gold = answers.index(gold)
    if not isinstance(gold, int):
        raise UsageError(f"{task.task_name} has questions with several right answers")
    given = tuple(request.arguments for request in requests[: len(answers)])
    return Question(given, tuple(answers), gold)
