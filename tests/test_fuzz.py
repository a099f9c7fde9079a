"""Any option with any value: refused in one sentence that names it, or taken; in a moment, and
before anything is written. In this process: each program's main, up to where its work begins.

FUZZ_EXAMPLES=2000 pytest -n 0 tests/test_fuzz.py tries more."""

import importlib
import os
import random
import re
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import SMALL, write_lines
from data_helpers import called
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from table import read_table

import eval as evaluate
import flops
import train
from config import EXTRAS, LARGEST, DataConfig, GPTConfig, RunConfig, TrainConfig, UsageError
from hf.export import ExportConfig
from machinery.output import printable
from model import GPT
from preparation import sources

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 0))
SECONDS = 3.0  # of this thread's own time, for a command: a tenth of it, but where machines share


class Begins(Exception):
    """The program accepts the command, and would begin to work."""

    exit_code = 0


def begins(*args, **options):
    raise Begins


CHARACTERS = st.characters(exclude_characters="\0/", codec="utf-8") | st.sampled_from("\udcff -=\n")
JUNK = st.sampled_from(["", "--", "nan", "None", "x" * 300, "é\n", "0x10", "1_0"])
TEXT = st.text(CHARACTERS, max_size=12) | JUNK
EDGES = [1, 64, 4096, 1 << 20, 10**9, LARGEST, 1 << 63]
EDGES = [sign * n + more for n in EDGES for sign in (1, -1) for more in (-1, 0, 1)]
WHOLE = st.one_of(st.integers(0, 9), st.sampled_from(EDGES), st.integers()).map(str)
REAL = st.sampled_from("0.0 1.0 1e-30 1e9 1e30 inf".split())
REAL = st.one_of(REAL, st.floats(0, 1).map(repr), st.floats().map(repr))
KNOWN = """auto nowhere/step_00000001 . / /dev/null cpu cuda:99 2B 1e400 infB 0 -1 all 1e15T 8xH100
    0xH100 a=1 texts=1 texts=-1 texts=1e400 = texts=0 key_offset stdlib files: files:nowhere
    files:texts a=files:texts#x+y hf:a:b:c"""
TEXTS = TEXT | st.sampled_from(["a/" * 2000, "9" * 400, *KNOWN.split()])


def words_for(option) -> st.SearchStrategy[list[str]]:
    """An option of a dataclass with a value of its type, of another type, too many or none."""
    kind = get_args(option.type)[0] if hasattr(option.type, "__metadata__") else option.type
    value = {int: WHOLE, float: REAL}.get(kind, TEXTS)
    choices = [a for a in get_args(kind) if isinstance(a, str)]
    if choices:
        value = st.sampled_from(choices)
    value = st.one_of(*[value] * 15, TEXT)
    flag = f"--{option.name}"
    if kind is bool:
        return st.sampled_from([[flag], [f"--no_{option.name}"], [flag, "True"], [f"{flag}=1"]])
    many = st.lists(value, max_size=3).map(lambda values: [flag, *values])
    one = value.map(lambda text: [f"{flag}={text}"])
    return many if get_args(kind)[1:] == (...,) else st.one_of(*[one] * 9, many)


def command_lines(*kinds) -> st.SearchStrategy[list[str]]:
    """One to three options of some dataclasses; now and then one that there is not."""
    options = [option for kind in kinds for option in fields(kind)]
    known = st.sampled_from(options).flatmap(words_for)
    unknown = TEXT.map(lambda text: [f"--{text}"])
    return st.lists(st.one_of(*[known] * 20, unknown), min_size=1, max_size=3).map(
        lambda groups: [word for group in groups for word in group]
    )


def files_in(folder: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def names(said: str, given: list[str]) -> bool:
    """Whether a sentence has an option, or its value in some form."""
    options = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in given}
    values = {part for word in given for part in (word, *word.partition("=")[::2])}
    values |= {"--" + v[2:].replace("-", "_") for v in values if v.startswith("--")}
    forms = {f"data/{v}/" for v in values}
    for v in values:
        forms |= {v.strip(), repr(v), repr(v)[1:-1], f"{Path(v)} is", printable(v)}
    in_it = any(form in said for form in forms - {""})
    empty = "" in given and "Unrecognized options" in said  # tyro has nothing to show
    return in_it or empty or bool(options & set(re.findall(r"\w+", said)))


def end_of(main, argv: list[str], given: list[str]) -> int:
    """The exit code of main, run up to its work. It refuses, as promised, one of the words `given`:
    in one sentence that names it, in a moment, and before anything is written."""
    before = files_in(Path.cwd())
    start = time.thread_time()
    done = called(main, *argv)
    said = done.stderr
    assert time.thread_time() - start < SECONDS, "slow"
    assert files_in(Path.cwd()) == before
    if done.returncode:
        note(said)
        error = said.partition("error: ")[2].strip()
        assert 2 <= done.returncode <= 6 and len(said) > 20
        assert "\n" not in error or any("\n" in word for word in given)
        assert names(said, given), "neither the option nor its value is named"
    return done.returncode


@pytest.fixture(scope="module")
def here(small_data, tmp_path_factory):
    """A folder with texts, questions, data and a trained run, in which nothing may change."""
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(small_data.parent / "texts", folder / "texts")
    write_lines(folder / "exam.jsonl", [dict(query="a", choices=["b", "c"], gold=1)] * 2)
    (folder / "data").mkdir()
    (folder / "data" / "tiny").symlink_to(small_data)
    rng_state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("COLUMNS", "2000")  # a line of tyro's is not broken within a word
        # it times one
        patch.setattr(flops, "measure_matmul", lambda *args, **options: 1e11, raising=False)
        train.main(["tiny", *SMALL, "--steps", "2"])
        for place in WORK:
            patch.setattr(place, begins)
        patch.setattr("hf.parity.need_transformers", lambda: None)  # before the words are looked at
        listed = sources.list_units
        patch.setattr(sources, "list_units", lambda s: begins() if s.remote else listed(s))
        yield folder
    torch.set_rng_state(rng_state)


# What each program calls first that writes, takes long or needs a network.
WORK = """machinery.folders.lock_run machinery.disk.lock stores.stage.once_per_node
    machinery.trained.load_model instruments.pages.report.write
    preparation.pool.open_pool eval.load_model""".split()


# a command that is accepted => with how many lists of more words it is tried
COMMANDS = """
train tiny {small} --run_dir new => 25
train tiny {small} --run_dir new --plan => 25
prepare_data tiny --source files:texts --data_dir new --vocab_size 300 => 40
export tiny => 25
eval loss tiny --device cpu => 12
eval sample tiny --device cpu => 12
eval choice tiny --device cpu --task exam.jsonl => 12
eval look tiny --device cpu => 12
eval tournament tiny --device cpu --n_prompts 2 --prompt_tokens 8 --max_new_tokens 8 => 12
eval report tiny => 12
"""
KINDS = dict(
    train=(GPTConfig, TrainConfig, RunConfig), prepare_data=[DataConfig], export=[ExportConfig]
)


@pytest.mark.parametrize("command, examples", read_table(COMMANDS))
def test_any_option_with_any_value(command, examples, here):
    program, *base = command.format(small=" ".join(SMALL)).split()
    main = importlib.import_module(program).main
    kinds = KINDS.get(program)
    if program == "eval":
        module, _, options = evaluate.COMMANDS[base[0]]
        kinds = [getattr(importlib.import_module(module), options)]  # in its own time
    assert end_of(main, base, []) == 0

    # always the same ones in the suite; by hand always others
    @settings(
        max_examples=EXAMPLES or int(examples[0]),
        derandomize=not EXAMPLES,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(command_lines(*kinds))
    def check(words):
        end_of(main, [*base, *words], words)

    check()


@pytest.mark.parametrize("seed", range(EXAMPLES or 60))
def test_a_model_that_is_accepted_computes(seed):
    rng = random.Random(seed)
    sizes = "n_layer n_head n_kv_head seq_len head_dim mlp_hidden".split()
    fields = {name: rng.randint(1, 5) for name in sizes}
    for flag in "qk_norm embed_norm tie_embeddings doc_mask".split():
        fields[flag] = rng.random() < 0.5
    try:
        config = GPTConfig(
            **fields,
            vocab_size=rng.randint(1, 70),
            n_embd=rng.randint(1, 24),
            mlp=rng.choice(["relu2", "swiglu"]),
            logit_softcap=rng.choice([0.0, rng.uniform(0.01, 100)]),
            rope_theta=rng.uniform(1, 1e9),
            nope_every=rng.randint(0, 3),
            extras=rng.choice([(), ("key_offset",), ("value_embeds",), EXTRAS]),
        )
    except UsageError:
        return
    model = GPT(config)
    model.init_weights()
    ids = torch.arange(2 * config.seq_len).view(2, -1) % config.vocab_size  # (2, T)
    loss = model(ids, ids.flip(1))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
