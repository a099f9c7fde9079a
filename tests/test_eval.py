"""eval.py on a small trained model: the same figure as the trainer's, and samples of text."""

import json
import re

import pytest
from conftest import SMALL, metrics, run

import train


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("eval") / "run"
    train.main(["tiny", *SMALL, "--eval_tokens", "100_000_000", "--data_dir", str(small_data),
                "--run_dir", str(run_dir)])  # fmt: skip
    return run_dir


def test_loss_is_what_the_trainer_measured(trained):
    result = run("eval.py", "loss", "--run_dir", trained, "--device", "cpu", "--batch", 3)
    assert result.returncode == 0, result.stderr
    bpb = float(re.search(r"([\d.]+) bits per byte", result.stdout)[1])
    record = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    assert record["val_bpb"] == pytest.approx(bpb, abs=1e-4)
    assert record["step"] == 12
    last = [r["val_bpb"] for r in metrics(trained) if "val_bpb" in r][-1]
    # the trainer was asked for fp32; eval.py takes bf16 where the machine has it
    assert record["val_bpb"] == pytest.approx(last, rel=5e-3)


def test_samples_are_seeded_text(trained):
    args = ("sample", "--run_dir", trained, "--device", "cpu", "--prompt", "def ", "import",
            "--max_new_tokens", 20)  # fmt: skip
    first, again = run("eval.py", *args), run("eval.py", *args)
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert "--- 'def '\ndef" in first.stdout and "--- 'import'\nimport" in first.stdout
    other = run("eval.py", *args, "--seed", 1)
    assert other.stdout != first.stdout


MISTAKES = {
    "no command": ([], "eval.py needs a command: loss or sample"),
    "misspelled": (["sampel"], "did you mean sample"),
    "no run": (["loss", "--run_dir", "{tmp}/none"], "there is no checkpoint in .*train one first"),
    "other data": (
        ["loss", "--run_dir", "{run}", "--data_dir", "{tmp}"], "python prepare_data.py",
    ),
    "long prompt": (
        ["sample", "--run_dir", "{run}", "--prompt", "word " * 80], "leaves no room in seq_len 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_sentence_and_exit_code_2(name, trained, tmp_path):
    args, words = MISTAKES[name]
    result = run("eval.py", *[a.format(tmp=tmp_path, run=trained) for a in args])
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(words, result.stderr)
    assert "Traceback" not in result.stderr
