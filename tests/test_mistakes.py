"""A student's mistake in the code is a traceback, a user's on the command line is one sentence.

Each is a real process, which runs a copy of the project with a line replaced."""

import re
import sys

import pytest
from conftest import SMALL
from faults import edited, start

import eval as evaluate
import export
import prepare_data
import train
from machinery import cli

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


PROGRAMS = {
    "train.py tiny": (train.main, ["tiny"]),
    "prepare_data.py tiny": (prepare_data.main, ["tiny"]),
    "prepare_data.py verify tiny": (prepare_data.main, ["verify", "tiny"]),
    **{f"eval.py {word}": (evaluate.main, [word, "tiny"]) for word in ("loss", "tournament")},
    "export.py": (export.main, ["tiny"]),
}
# options that mean the same to every program -> what is said
UNREADABLE = {
    "--data_dri x": "there is no option '--data_dri'; did you mean --data_dir? {all}",
    "--data-dri=x": "there is no option '--data-dri'; did you mean --data_dir? {all}",
    "--data_dir x y": "there is no option 'y'; {all}",
    "--data_dir": "--data_dir takes a value; given: nothing",
}
OF_ONE = {
    "train.py tiny": {
        "--steps x --lr y": "--steps takes a whole number; given: 'x'",
        "--lr 1,5": "--lr takes a number; given: '1,5'",
        "--mlp gelu": "--mlp takes {relu2,swiglu}; given: 'gelu'",
        "--compile True": "there is no option 'True'; {all}",
        "--extras value_embed": "extras has no 'value_embed'; .*key_offset, value_embeds",
    },
    "prepare_data.py tiny": {"--workers 1.5": "--workers takes a whole number; given: '1.5'"},
    "eval.py loss": {"--dtype fp16": "--dtype takes {auto,bf16,fp32}; given: 'fp16'"},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_no_parser_can_read_is_told_in_the_same_voice(program, monkeypatch, capfd):
    """In one sentence, where tyro has a box."""
    main, words = PROGRAMS[program]
    for options, says in (UNREADABLE | OF_ONE.get(program, {})).items():
        monkeypatch.setattr(sys, "argv", [program, *words, *options.split()])
        with pytest.raises(SystemExit) as end:
            cli.run(main)
        says = says.replace("{all}", f"python {program} --help lists all")
        text = capfd.readouterr().err
        assert end.value.code == 2 and text.count("\n") == 1
        assert text == f"error: {says}\n" or re.fullmatch(f"error: {says}\n", text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_a_page(program, capsys):
    main, words = PROGRAMS[program]
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith(f"usage: {program} [-h]")
    assert "--data_dir STR  " in text


# numbers that a preset may not have: (option, what is said)
OUT_OF_RANGE = {
    "a model of too many layers": ("--n_layer 999999999999", "1 or more, up to 256"),
    "a ramp without an end": ("--ramp_steps 1000000000000000000", "0 or more, up to 100,000"),
    "layers without a position": ("--nope_every -1", "0 or more"),
    "no frequencies": ("--rope_theta 0.0", "1 or more"),
    "no logits": ("--logit_softcap nan", "0 or more"),
    "a rate": ("--lr_scale inf", "0 or more"),
    "more than all": ("--decay 1.5", "0 or more, up to 1"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_its_range_is_refused_at_once(name):
    options, says = OUT_OF_RANGE[name]
    with pytest.raises(cli.UsageError) as caught:
        cli.parse("train.py", "train", ["tiny", *options.split()])
    option, value = options.split()
    assert str(caught.value).startswith(f"{option} {value} must be {says}")


@pytest.mark.parametrize("part", ["train", "data"])
def test_an_empty_folder_is_the_presets(part):
    """As of a variable of the shell that is not set."""
    empty = ["d12", "--data_dir", "", *["--run_dir", ""] * (part == "train")]
    preset = cli.parse("program", part, empty)
    assert (preset.data if part == "data" else preset.run).data_dir == "data/d12"
    assert part == "data" or preset.run.run_dir == "runs/d12"
    config = evaluate.LossConfig(run_dir="runs/d12")
    assert cli.read_options(config, ["--run_dir="], "eval.py loss").run_dir == "runs/d12"
