"""A student's mistake in the code is a traceback, a user's on the command line is one sentence.

The former are real processes, which run a copy of the project with a line replaced."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from data_helpers import called
from faults import edited, start
from table import read_table

WRONG = [  # file, the line, what a student made of it, what Python says; one a file
    (
        "model.py",
        "H, G, D = config.n_head, config.n_kv_head, config.head_dim",
        "H, G, D = config.n_head, config.head_dim",
        "ValueError: not enough values to unpack",
    ),
    (
        "data.py",
        "return batch_of(self.manifest, rows, self.micro_batch, self.device), position",
        "return batch_of(self.manifest, rows, 1, self.device), position",  # in a thread
        "ValueError: could not broadcast input array",
    ),
]
SLOW = pytest.param("--compile", WRONG[0], marks=pytest.mark.slow)


@pytest.mark.parametrize("how, mistake", [*(("--no_compile", one) for one in WRONG), SLOW])
def test_a_students_mistake_is_shown_with_its_line(how, mistake, small_data, run_dir, tmp_path):
    """Compiled as well: it is no fault of the compiler, so nothing runs eager instead."""
    file, line, wrong, says = mistake
    spoil = [edited(tmp_path / "mine", file, line, wrong)]
    text = start(small_data, run_dir, how, spoil=spoil).end(1)
    assert "runs eager" not in text
    assert_traceback(text, tmp_path / "mine" / file, wrong, says)


def assert_traceback(text: str, file, wrong: str, says: str) -> None:
    """The file, the line in it and the error, after a traceback's first words."""
    begin = text.index("Traceback (most recent call last):")
    frame = rf'File "{re.escape(str(file))}", line \d+, in \w+\n.*{re.escape(wrong)}'
    assert re.search(frame, text[begin:]), text
    assert re.search(rf"^{says}", text[begin:], re.M), text
    assert "\nerror: " not in text


def test_a_mistake_in_the_middle_of_a_run_is_in_its_status(small_data, run_dir, tmp_path):
    """On all ranks: none waits for another."""
    line = "if is_best:"
    spoil = [
        edited(tmp_path / "mine", "train.py", line, "if [best for best in [1]][progress.step]:")
    ]
    text = start(small_data, run_dir, "--eval_every", 3, world=2, spoil=spoil).end(1)
    assert_traceback(text, tmp_path / "mine" / "train.py", "", "IndexError: list index")
    assert text.count("IndexError") == 2
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 3)


@pytest.mark.parametrize("program", ["train.py", "prepare_data.py", "eval.py", "export.py"])
def test_a_python_without_the_packages_is_told_where_they_are(program, tmp_path):
    (tmp_path / "machinery").mkdir()
    for name in (program, "machinery/needs.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    how = dict(cwd=tmp_path, capture_output=True, text=True)
    for remedy in (f"bash {tmp_path}/run.sh", f"source {tmp_path}/.venv/bin/activate"):
        done = subprocess.run([sys.executable, "-S", program], **how)  # no site-packages
        said = rf"error: .* lacks torch, .*; run: {remedy}\n"
        assert done.returncode == 2 and re.fullmatch(said, done.stderr)
        (tmp_path / ".venv").mkdir(exist_ok=True)
    old = "import sys; sys.version_info = (3, 9); import machinery.needs"
    done = subprocess.run([sys.executable, "-c", old], **how)
    assert done.returncode == 2 and "lacks the features of Python 3.10; run: " in done.stderr


# Below a command its wrong words => what the sentence has to name: what was given, and a way out.
WRONG_WORDS = """
train.py tiny
    --data_dri x => --data_dri | --data_dir | --help
    --data_dir x y => y | --help
    --data_dir => --data_dir
    --mlp gelu => --mlp | relu2 | swiglu | 'gelu'
    --model d12 => --model | the first word
    --extras value_embed => 'value_embed' | key_offset | value_embeds
    --n_head 3 --n_kv_head 2 => n_head 3 | n_kv_head 2
    --data_dir {data} --steps 0 --tokens 2X => '2X' | 2B | 500M
    --data_dir {data} --tokens 100.000 => 100.000 | 100000 tokens or 100; | 2.5B
    --data_dir {data} --tokens 1_000,5 => 1_000,5 | 1_0005 tokens or 1_000; | 2.5B
    --device cuda:99 => cuda:99 | --device
    --tokens_per_step 1000 --data_dir {data} => 1000 | --tokens_per_step 1024
    --mixture web=1 --data_dir {data} => 'web' | texts
    --data_dir nowhere => nowhere | python prepare_data.py tiny
    --data_dir {run} => prepare_data.py tiny --data_dir NEW_FOLDER
    --data_dir {data} --n_layer 250 --n_embd 8192 --n_head 128 => GB | smaller preset
    --num_epochs 2 --training.max_steps 9 => --epochs | --max_steps it is --steps
    --extras key_offset --extras value_embeds => --extras is given twice
    --dropout 0.1 --max_iters=9 => --dropout | read about once | --max_iters | --steps
    {small} --data_dir {data} --run_dir {files}/new --resume {run} => checkpoints/step_00000012
    {small} --data_dir {data} --run_dir {run} --n_layer 3 => n_layer | 2 | 3 | --run_dir
    --epochs 2 --plan => --epochs 2 | --tokens
    --lr 3e-4 --plan => --lr does nothing with --optimizer muon | --lr_scale
    --optimizer adamw --head_lr 1 --plan => --head_lr does nothing | --lr,
    --data_dir {files}/latin.txt => latin.txt/manifest.json | NEW_FOLDER
    --input x => --input | --source
    --name ../x => --name ../x | --name mine
    --name .. => --name ..
    --batch-size=32 => --batch_size | --tokens_per_step
    --steps 3 --tokens 1M => --steps | --tokens | contradict
    --steps 3 --epochs 0.5 => --steps | --epochs | contradict
    --epochs 0.5 --tokens 1M => --tokens | --epochs | contradict
    --run_dir s3://K:hunter2@b/x?k=hunter2 => --run_dir
    --stage s3://K:hunter2@b/x => --stage
    --init_from s3://K:hunter2@b/x => --init_from
    --data_dir {data} --peak_tflops 1 --run_dir {files}/latin.txt/run => latin.txt/run

train.py
    mine => 'mine' | --source | tiny --name mine

train.py d13x
    => 'd13x' | d12 | tiny

train.py d100
    => 'd100' | up to d99

prepare_data.py tiny
    --source files:nowhere => nowhere
    --source wikipedia => wikipedia | stdlib
    --source files:{data} => files:/ | .txt
    --source stdlib#body => a source is a path | 'stdlib#body'
    --source files: => a source is a path | 'files:'
    --source http://x => a source is a path | http://x
    --source std => a source is a path | 'std'
    --source x:60=stdlib => a source is a path | 'x:60=stdlib'
    --source files:{files}/C# => /C#
    --source files:{files}/pipe => /pipe
    --source {texts} x=files:{files}/empty.jsonl#body => empty.jsonl | 'body' | which have text
    --source stdlib stdlib => two sources are named 'stdlib'
    --source stdlib chats:stdlib --mixture stdlib=1 => each source (stdlib, chats) a share above 0
    --source stdlib chats:stdlib --mixture stdlib=1 chats=0 => a share above 0
    --source hf:a/b => hf:a/b | --tokens 2B
    --source hf:a/b --tokens 1M --dedup exact => hf:a/b twice
    --source {texts} --tokenizer {files} => /tokenizer.json
    --source {texts} --tokenizer {data} --digits 1 => add --digits 2
    --source {texts} --tokenizer {data} --nfc => add --no_nfc
    --encoding utf-16 => --encoding utf-16 is none
    --encoding klingon => --encoding klingon is none
    --encoding rot13 => --encoding rot13 is none
    --encoding undefined => --encoding undefined is none
    --data_dir s3://K:hunter2@b/x => --data_dir
    --tokenizer s3://K:hunter2@b/x => --tokenizer

prepare_data.py show tiny
    --data_dri x => --data_dri | --data_dir | --help
    --data_dir x y => y | --help
    --data_dir => --data_dir
    --data_dir {data} --row 100000 => --row 100000:
    --data_dir {data} --find x => --find | is grep

prepare_data.py show nothing
    => data/nothing | prepare_data.py PRESET

prepare_data.py verify tiny
    --data_dir nowhere => nowhere

eval.py loss tiny
    --name x => --name it is the first word
    --data_dri x => --data_dri | --data_dir | --help
    --data_dir x y => y | --help
    --data_dir => --data_dir
    --run_dir nowhere => nowhere | train.py
    --run_dir {run} --data_dir nowhere => nowhere | python prepare_data.py

eval.py loss no_run
    => 'no_run' | tiny | model.safetensors | /runs has no run | to train one

eval.py compare x
    => compare x OTHER

eval.py compare no_run x
    => no_run | train.py

eval.py sample tiny
    --run_dir {run} --prompt {long} => 241 tokens | fewer than 64

eval.py sample
    {run}/checkpoints/step_00000013 => step_00000013
    {run} def -p x => --prompt is given twice

eval.py lose tiny
    => 'lose' | loss

eval.py report
    {run}/checkpoints/step_00000012 => step_00000012
    {run} --usd_per_hour 3 => --usd_per_hour | eval.py plan

eval.py
    => loss, sample, chat, choice

eval.py choice tiny
    --run_dir {run} --task => --task
    --run_dir {run} => --task FILE.jsonl
    --run_dir {run} --task none.jsonl => none.jsonl
    --run_dir {run} --task hellaswag => --tasks hellaswag

eval.py chat tiny
    --run_dir {run} => was not tuned

eval.py tournament
    --run_dir none => none
    --run_dir {run} --players {run}/checkpoints/step_00000012 => --players
    --run_dir {run} --judge nowhere => nowhere
    --run_dir {run} --prompt_tokens 60 --max_new_tokens 16 => 76
    --run_dir {run} {short} --judge http://h/v1 --criteria none.txt => none.txt
    --run_dir {run} {short} --judge http://h/v1 --criteria {files}/latin.txt => latin.txt
    --run_dir {run} --judge http://h/v1 --prompts {files}/empty.jsonl => line 1

export.py tiny
    --gguf pt => q8_0 | comes first
    --run_dir nowhere => nowhere | train.py
    --run_dri x => --run_dri | --run_dir | --help
"""

PRIVATE = r"\b(None|NoneType|dict|kwargs|argv|Path\(|PosixPath|np\.|torch\.|self|errno|dataclass)\b"
PRIVATE += "|hunter2"  # a password


@pytest.fixture
def places(small_data, own_run, tmp_path, monkeypatch) -> dict:
    """What the words below name; it is an empty folder where they are said."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.txt").write_bytes(b"\xfaltimo")
    (tmp_path / "empty.jsonl").write_text('{"text": 1}')
    monkeypatch.setattr("hf.parity.need_transformers", lambda: None)  # it would be the mistake
    return dict(
        data=small_data,
        run=own_run,
        files=tmp_path,
        texts=small_data.parent / "texts",
        small=" ".join(SMALL),
        long="word" * 80,
        short="--prompt_tokens 8 --max_new_tokens 8",
    )


BLOCKS = [block.partition("\n") for block in WRONG_WORDS.strip().split("\n\n")]


@pytest.mark.parametrize("command, _, rows", BLOCKS, ids=[command for command, *_ in BLOCKS])
def test_a_wrong_command_is_one_sentence_that_names_the_value_and_the_way_out(
    command, _, rows, places
):
    """And nothing is written."""
    program, *first = command.split()
    main = importlib.import_module(program.removesuffix(".py")).main
    wrong = []
    for words, names in read_table(rows):
        done = called(main, *first, *words.format(**places).split())
        text = done.stderr
        is_one = text.startswith("error: ") and text.count("\n") == 1
        is_box = "For full helptext" in text and done.returncode == 2  # tyro's
        text = " ".join(re.sub("-{5,}", " ", text).split())
        missing = [name for name in names if name not in text]
        is_said = (is_one or is_box) and 20 < len(text) < 450 and done.returncode in (2, 3, 4)
        if missing or not is_said or re.search(PRIVATE, text):
            wrong.append(f"{words}: exit code {done.returncode}, missing {missing}: {text}")
    assert not wrong, "\n".join(wrong)
    assert not [*Path.cwd().iterdir()]
