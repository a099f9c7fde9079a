"""A student's mistake in the code is a traceback, a user's on the command line is one sentence.

Each is a real process, which runs a copy of the project with a line replaced."""

import re

import pytest
from conftest import SMALL
from faults import edited, start

# what is wrong: (file, the line, what a student made of it, what Python says)
WRONG = {
    "too few values": (
        "model.py",
        "H, G, D = config.n_head, config.n_kv_head, config.head_dim",
        "H, G, D = config.n_head, config.head_dim",
        "ValueError: not enough values to unpack",
    ),
    "a wrong shape": (
        "model.py",
        "k = self.k(x).view(B, T, G, D)",
        "k = self.k(x).view(B, T, G, D + 1)",
        "RuntimeError: shape ",
    ),
    "a misspelled attribute": (
        "model.py",
        "if self.swiglu:",
        "if self.swiglou:",
        "AttributeError: 'MLP' object has no attribute 'swiglou'",
    ),
    "the largest of nothing": (
        "model.py",
        "config.n_embd // 4, max(1, D // 12)",
        "config.n_embd // 4, max([])",
        r"ValueError: max\(\) ",
    ),
    "not in the list": (
        "optim.py",
        'decay = config.decay if config.schedule == "wsd" else 0.0',
        "decay = [].index(3)",
        "ValueError: 3 is not in list",
    ),
    "no number": (
        "optim.py",
        "noise = 3 * rates_at  # tokens",
        'noise = int("x")',
        r"ValueError: invalid literal for int\(\)",
    ),
    "an optimizer that fails": (
        "optim.py",
        "self._step_stack(*stack)",
        'raise ValueError("no stack for me")',
        "ValueError: no stack for me",
    ),
    "a missing key": (
        "data.py",
        'return [manifest.rows("train", i) for i in range(len(names))]',
        'return manifest.tree["wieghts"]',
        "KeyError: 'wieghts'",
    ),
    "the next of nothing": (
        "data.py",
        "item = self._ready.get()",
        "item = next(iter(()))",
        "StopIteration",
    ),
    "a thread that fails": (
        "data.py",
        'rows[j] = self.manifest.row("train", *self.order(first + j))',
        'rows[j] = self.manifest.row("train", *self.order(first + j))[:-1]',
        "ValueError: could not broadcast input array",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_students_mistake_is_shown_with_its_line(name, small_data, tmp_path):
    file, line, wrong, says = WRONG[name]
    spoil = [edited(tmp_path / "mine", file, line, wrong)]
    text = start(small_data, tmp_path / "run", spoil=spoil).end(1)
    assert_traceback(text, tmp_path / "mine" / file, wrong, says)


def assert_traceback(text: str, file, wrong: str, says: str) -> None:
    """The file, the line in it and the error, after a traceback's first words."""
    begin = text.index("Traceback (most recent call last):")
    frame = rf'File "{re.escape(str(file))}", line \d+, in \w+\n.*{re.escape(wrong)}'
    assert re.search(frame, text[begin:]), text
    assert re.search(rf"^{says}", text[begin:], re.M), text
    assert "\nerror: " not in text


def test_a_mistake_that_does_not_compile_is_shown_as_python_shows_it(small_data, tmp_path):
    """The step falls back to eager, says so, and then ends where the mistake is."""
    file, line, wrong, says = WRONG["too few values"]
    spoil = [edited(tmp_path / "mine", file, line, wrong)]
    words = [word for word in SMALL if word != "--no_compile"]
    words += ["--data_dir", small_data, "--run_dir", tmp_path / "run"]
    text = start(None, tmp_path / "run", argv=["tiny", *words], spoil=spoil).end(1)
    said = text.index("torch.compile does not work here, so eager it is: ")
    assert said < text.index("Traceback")
    assert_traceback(text, tmp_path / "mine" / file, wrong, says)


@pytest.mark.parametrize("world", [1, 2])
def test_a_mistake_in_the_middle_of_a_run_is_in_its_status(world, small_data, tmp_path):
    """On all ranks: none waits for another."""
    line = "if is_best and step:"
    spoil = [edited(tmp_path / "mine", "train.py", line, "if [best for best in [1]][step]:")]
    run_dir = tmp_path / "run"
    text = start(small_data, run_dir, "--eval_every", 3, world=world, spoil=spoil).end(1)
    assert_traceback(text, tmp_path / "mine" / "train.py", "", "IndexError: list index")
    assert text.count("IndexError") == world
    status = (run_dir / "status.json").read_text()
    assert '"failed"' in status and '"exit_code": 1' in status and '"step": 3' in status


# what is asked for: (options, what is said)
ASKED = {
    "no whole rows": (["--tokens_per_step", 1000], r"tokens_per_step 1000 is not a multiple .*"),
    "no such source": (["--mixture", "web=1"], r"the mixture names source 'web', the data has .*"),
    "no such data": (["--data_dir", "nowhere"], r"nowhere/manifest.json .*prepare_data.py tiny.*"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_users_mistake_is_one_sentence(name, small_data, tmp_path):
    options, says = ASKED[name]
    text = start(small_data, tmp_path / "run", *options).end(2)
    assert re.fullmatch(rf"error: {says}\n", text), text
    assert not (tmp_path / "run").exists()
