"""benchmarks/referee.py: what it says of versions whose worth is known, honest and not.

Most of them are a stub, a program of seven lines in place of train.py; the others are copies of
this project with one line edited.
"""

import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, commit_all, flip, read_lines, until
from data_helpers import make_folder
from faults import edited

import confined
import held_out
import judge
import trials
from config import UsageError
from instruments.pages import rule
from machinery import disk
from machinery.errors import DataError
from machinery.shards import Manifest
from machinery.trained import EvalConfig, load_model

no_landlock = pytest.mark.skipif(confined.landlock() < 1, reason="needs Landlock")
SMALL = dict(ROWS=40, OWN=16, PLACES=8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few held-out rows."""
    for name, value in SMALL.items():
        monkeypatch.setattr(held_out, name, value)


# -------------------------------------------------------------------------------------- the rule


def rows_of(ahead: float, cost=1, start=0) -> list[dict]:
    """Of two runs: a loss falls by 0.5 each time the tokens double. cost: FLOPs of a token, whose
    square are its seconds."""
    rows = []
    for n in (1000, 2000):
        bpb = 9 - math.log2(n * ahead) / 2
        rows.append(dict(tokens=n, bpb=bpb, FLOPs=cost * n, seconds=start + cost**2 * n))
    return rows


def of_seeds(ahead: float, seed=1.0, *cost) -> list[list[dict]]:
    """The rows of two seeds, of which one is ahead by as much more."""
    return [rows_of(ahead, *cost), rows_of(ahead * seed, *cost)]


def test_a_factor_is_found_by_each_measure():
    """1.25 times fewer tokens, at 2 times the FLOPs and 4 times the seconds of a token."""
    base = of_seeds(1, 1.1, 1, 900)
    change = of_seeds(1.25, 1.1, 2)
    for name, cost, word in (
        ("tokens", 1, "helps"),
        ("FLOPs", 2, "harms"),
        ("seconds", 4, "harms"),
    ):
        found = rule.measure(name, base, change)
        assert found.factors == [(pytest.approx(1.25 / cost), "")] * 2 and found.word == word
        assert found.luck == pytest.approx(1.1)


def test_a_verdict_is_that_of_the_two_largest_sizes_beyond_luck():
    base = of_seeds(1, 1.1)
    size = lambda ahead: rule.measure("tokens", base, of_seeds(ahead, 1.1))
    words = lambda *factors: rule.verdict([*map(size, factors)])
    assert words(0.8, 1.25, 1.25) == "helps" and words(1.25, 0.8, 0.8) == "harms"
    pairs = (0.8, 1.25), (1.05, 1.25), (1.25, 1.05)
    assert {words(*pair) for pair in pairs} == {"no difference"}
    assert rule.measure("tokens", of_seeds(1), of_seeds(1.25, 0.8)).word == "no difference"


def test_a_bound_is_no_verdict():
    """The second version has the loss before its shorter run, at ten times the cost of a token."""
    pair = of_seeds(1), of_seeds(3, 1, 10)
    for factor, bound, word in ((2, ">", "helps"), (0.5, "<", "harms")):
        found = rule.measure("tokens", *pair)
        assert found.factors == [(pytest.approx(factor), bound)] * 2 and found.word == word
        assert rule.measure("FLOPs", *pair).word == "no difference"
        pair = pair[::-1]


def test_what_does_nothing_is_seldom_said_to_do_something():
    """Runs that differ by chance alone, at two sizes with two seeds."""
    draw = np.random.default_rng(0)
    words = []
    for _ in range(2000):
        sizes = []
        for _ in range(2):
            drawn = 2 ** (0.01 * draw.standard_normal((2, 2)))
            versions = [[*map(rows_of, seeds)] for seeds in drawn]
            sizes.append(rule.measure("tokens", *versions))
        words.append(rule.verdict(sizes))
    helps, harms = (words.count(word) / 2000 for word in ("helps", "harms"))
    assert harms < 0.01 and rule.chance(2) == pytest.approx(helps, abs=0.003)
    assert 0.003 < rule.chance(2) < 0.005


# ------------------------------------------------------------------------------ the held-out text


def rows_in(data: Manifest, split: str) -> set[bytes]:
    of_source = lambda i: (data.row(split, i, row) for row in range(data.rows(split, i)))
    return {row.tobytes() for i in range(2) for row in of_source(i)}


def test_each_held_out_row_is_of_one_part(tmp_path, monkeypatch):
    sizes = {"train": dict(a=30, val=9), "val": dict(a=70, val=41)}
    whole = make_folder(tmp_path / "whole", sizes)
    held_out.divide(whole, tmp_path)
    text = Manifest.load(tmp_path / "text")
    assert rows_in(text, "train") == rows_in(whole, "train")
    parts = [np.load(tmp_path / f"{name}.npy") for name in ("scored", "sealed")]
    parts = [*({row.tobytes() for row in part} for part in parts), rows_in(text, "val")]
    assert [*map(len, parts)] == [40, 40, 16]
    assert len(set.union(*parts)) == 96 and set.union(*parts) < rows_in(whole, "val")
    files = {name: disk.sha256_of(tmp_path / name) for name in held_out.FILES}
    held_out.check(tmp_path, files)
    for file in (*files, "text/train/a/unit_00000_00.npy", "text/val/own_00.npy"):
        flip(tmp_path / file)
        pytest.raises(DataError, held_out.check, tmp_path, files)
        flip(tmp_path / file)
    monkeypatch.setattr(held_out, "ROWS", 48)
    pytest.raises(UsageError, held_out.divide, whole, tmp_path)


@pytest.mark.parametrize("ahead, shift", [(0, 9), (1, 0)])
def test_a_score_is_that_of_a_loop_over_the_places(ahead, shift):
    """By a table of logits of the next token after the last one, all of them shifted; or after the
    token ahead, where the question has it."""
    draw = np.random.default_rng(0)
    table = draw.standard_normal((30, 30)).astype("f4")
    p = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    rows = draw.integers(0, 30, (40, 33), np.uint16)
    batch_of = lambda ids: rows[:32] if len(ids) == 32 else rows[32:]
    token_bytes = draw.integers(0, 4, 30, np.int32)  # some are special
    texts = []  # before each place

    def ask(shape, ids, start=0, at=None):
        if at is not None:
            assert (ids == batch_of(ids)[:, :-1]).all()
            return table[ids[:, (at + ahead) % 32]] + shift
        texts.append(np.hstack([texts[-1], ids]) if start else ids)
        return table[ids[:, -1]] + shift

    bpb, moved = held_out.score(rows, token_bytes, ask, secret=1)
    bits = size = 0
    for ids in texts:
        batch = batch_of(ids)
        end = ids.shape[1]
        assert (ids == batch[:, :end]).all()
        for last, following in batch[:, end - 1 : end + 1]:
            if token_bytes[following]:
                bits -= math.log2(p[last, following])
                size += token_bytes[following]
    assert bpb == pytest.approx(bits / size, rel=1e-5)
    assert moved > 0.1 if ahead else moved < 1e-5
    places = [ids.shape[1] for ids in texts]
    assert len({*places[:8]}) == len({*places[8:]}) == 8 and places[:8] != places[8:]
    texts.clear()
    held_out.score(rows, token_bytes, ask, secret=2)
    assert places != [ids.shape[1] for ids in texts]


# -------------------------------------------------------------------------------- who is confined


@pytest.fixture
def confine(tmp_path):
    """confine(code): what Python code prints that may read tmp_path/read and write tmp_path/write;
    and the facts of its end."""

    def made(code: str) -> tuple[list, dict]:
        for name in ("read", "write"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").touch()
        read = [*trials.SYSTEM, sys.prefix, sys.base_prefix, "read"]
        spec = dict(read=read, write=["write"], seconds=60, end="end.json")
        words = [sys.executable, ROOT / "benchmarks" / "confined.py", json.dumps(spec)]
        words += [sys.executable, "-c", "import os, socket, sys, time\n" + code]
        said = subprocess.check_output(words, text=True, cwd=tmp_path)
        return said.split(), disk.read_json(tmp_path / "end.json")

    return made


@no_landlock
def test_what_is_confined_reads_and_writes_its_own_alone(confine, tmp_path):
    (tmp_path / "secret").touch()
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        said, facts = confine(f"""
for of, *words in (
    (open, "read/file"), (open, "write/file", "a"), (open, "write/new", "w"), (os.listdir, "read"),
    (open, "secret"), (open, "secret", "a"), (open, "new", "w"), (open, "read/file", "a"),
    (os.listdir, "."), (os.remove, "read/file"), (os.rename, "write/file", "new"),
    (socket.create_connection, ("localhost", {port})),
):
    try:
        of(*words)
        print("done")
    except PermissionError:
        print("forbidden")
""")
    assert said == ["done"] * 4 + ["forbidden"] * 8
    assert facts["confined"] and facts["code"] == facts["left"] == 0


def test_what_is_left_running_is_ended_and_counted(confine):
    said, facts = confine("""
if not os.fork():
    os.setsid()
    daemon = os.fork()
    while time.process_time() < (0.3 if daemon else 60):
        pass
    print(daemon, flush=True)
    os._exit(0)
os.wait()
sys.exit(7)
""")
    assert facts["code"] == 7 and facts["left"] == 1 and facts["cpu"] > 0.3
    assert not os.path.exists(f"/proc/{said[0]}")


# ---------------------------------------------------------------------------------------- answers


@pytest.fixture
def bench(tmp_path):
    return trials.Bench(tmp_path, secret=1, at_once=2, minutes=5)


def copied(tmp_path, small_data, old: str, new: str) -> trials.Version:
    """This project with a line of model.py edited."""
    edited(tmp_path / "tree", "model.py", old, new)
    return trials.Version("change", tmp_path / "tree", "--no_compile", str(small_data))


@pytest.mark.parametrize("old, new", [
    ("start = cache.length if cache else 0", "print(start := cache.length if cache else 0)"),
    ("= torch.stack([k, v])", "= torch.stack([k, -v])"),
    pytest.param("self.length = 0", "raise RuntimeError", marks=pytest.mark.slow),
])  # fmt: skip
def test_answers_are_the_logits_of_the_model(
    old, new, own_run, small_data, tmp_path, bench, monkeypatch
):
    """Also if it prints; or if its cache is wrong, or raises: then it is asked without."""
    model = load_model(EvalConfig(run_dir=str(own_run), device="cpu", dtype="fp32")).model
    at = np.array([0, 4, 5, 19, 63])

    def largest_error(rows, token_bytes, ask, secret) -> tuple[float, float]:
        logits = model(torch.from_numpy(rows)).detach().numpy()[:, at]
        shape = logits.shape
        pieces = np.split(rows, at + 1, axis=1)[:-1]
        streamed = [
            ask(shape[::2], ids=ids, start=end + 1 - ids.shape[1]) for ids, end in zip(pieces, at)
        ]
        whole = ask(shape, ids=rows, at=at)
        return abs(np.stack(streamed, 1) - logits).max(), abs(whole - logits).max()

    monkeypatch.setattr(held_out, "score", largest_error)
    rows = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 64))
    np.save(tmp_path / "scored.npy", rows)
    version = copied(tmp_path, small_data, old, new)
    found = bench.scored(trials.Run(version, 2, 0, 0, "scored", ()), tmp_path)
    assert 0 < max(found.values()) < 1e-4


# ----------------------------------------------------------------------------- the whole, by stubs

STUB = {
    "torch.py": """import numpy as np
class Tensor(np.ndarray):
    to = float = cpu = numpy = lambda x, *_: x
from_numpy = lambda x: x.view(Tensor)
arange = lambda n, device: from_numpy(np.arange(n))
cat = lambda parts, dim=0: np.concatenate(parts, dim).view(Tensor)
no_grad = lambda: lambda function: function
""",
    "model.py": """from types import SimpleNamespace as Facts
import numpy as np
from torch import from_numpy
class KVCache:
    pass
class GPT:
    def __init__(self, file):
        self.logits = np.load(file)
        self.config = Facts(seq_len=64, vocab_size=len(self.logits))
        self.cos = Facts(device="cpu")
    def __call__(self, ids):
        logits = self.logits + np.zeros((*ids.shape, 1))
        return from_numpy(logits.astype("f4"))
""",
    "machinery/trained.py": """from types import SimpleNamespace as EvalConfig
from model import GPT
load_model = lambda of: EvalConfig(model=GPT(of.run_dir + "/checkpoints/logits.npy"))
""",
    "train.py": """import json, math, os, pathlib, subprocess, sys, time
import numpy as np
AHEAD, NOISE, OWN = 1.0, 0.002, 4.0
words = " ".join(sys.argv).replace("=", " ").split()
of = dict(zip(words, words[1:]))
run_dir = pathlib.Path(of["--run_dir"])
(run_dir / "checkpoints").mkdir()
shards = pathlib.Path(of["--data_dir"]).glob("train/*/unit_00000_00.npy")
counts = sum(np.bincount(np.load(file).ravel(), minlength=512) for file in shards)
tokens = int(of["--tokens"])
worth = math.log2(AHEAD * tokens) / 25 + NOISE * int(of["--seed"])
np.save(run_dir / "checkpoints" / "logits.npy", worth * np.log(1.0 + counts))
start = dict(time=0, command="", device="x", world_size=1, data_dir="", flops_per_token=10)
line = dict(step=1, tokens=tokens, loss=1, bpb=1, lr=1, norm=1, time=60, step_s=1, data_wait_ms=0)
line |= dict(tokens_per_s=1, tflops_full=1, tflops_causal=1)
whole = dict(step=1, tokens=tokens, val_rows=9, full_val_loss=1, full_val_bpb=OWN)
text = "".join(json.dumps(line) + "\\n" for line in (dict(start=start), line, whole))
(run_dir / "metrics.jsonl").write_text(text)
(run_dir / "config.json").write_text("{}")
(run_dir / "status.json").write_text('{"state": "done"}')
""",
}


class Tried:
    """A repository of the stub, and the referee of it."""

    def __init__(self, folder, data):
        self.repo = folder / "repo"
        (self.repo / "machinery").mkdir(parents=True)
        for name, text in STUB.items():
            (self.repo / name).write_text(text)
        commit_all(self.repo)
        self.folder = folder / "ledger"
        facts = dict(project=self.repo, folder=self.folder, data=data)
        self.words = [f"--{name}={value}" for name, value in facts.items()]
        self.words += ["--depths", "2", "3"]

    def edit(self, file: str, old: str, new: str):
        text = (self.repo / file).read_text()
        assert text.count(old) == 1
        (self.repo / file).write_text(text.replace(old, new))

    def judged(self, *words: str) -> tuple[int, str]:
        """The exit code; the lines of the ledger and of runs so far; what was said."""
        code = judge.main([*self.words, *words])
        return code, read_lines(self.folder / "tries.jsonl")[-1]

    @property
    def rows(self) -> list[dict]:
        return read_lines(self.folder / "rows.jsonl")


@pytest.fixture
def tried(tmp_path, small_data):
    return Tried(tmp_path, small_data)


def test_a_try_from_its_beginning_to_its_page(tried, monkeypatch):
    pytest.raises(UsageError, tried.judged)  # nothing was changed
    tried.edit("train.py", "AHEAD, NOISE, OWN = 1.0", "AHEAD, NOISE, OWN = 1.25")
    for option in ("--seed", "--seed=3", "--data-dir"):
        pytest.raises(UsageError, tried.judged, "--", option, "3")
    assert len(read_lines(tried.folder / "tries.jsonl")) == 1
    code, line = tried.judged()
    assert code == 0 and line["state"] == "helps"
    assert line["factors"] == pytest.approx([1.25, 1.25], abs=0.03) and line["luck"] > 1.02
    _, begun, ended = read_lines(tried.folder / "tries.jsonl")
    assert begun["state"] == "begun" and "+AHEAD, NOISE, OWN = 1.25" in begun["diff"]
    assert begun["try"] == ended["try"] and len(tried.rows) == 16
    page = (tried.folder / "page.html").read_text()
    assert 'class="helps">helps<' in page and "+AHEAD" in page and "1.25" in page
    make_all = trials.Bench.make_all

    def edited_meanwhile(bench, wanted):
        make_all(bench, wanted)
        tried.edit("train.py", "1.25", "1.26")

    monkeypatch.setattr(trials.Bench, "make_all", edited_meanwhile)
    code, line = tried.judged()
    assert code == 0 and "edited meanwhile" in line["said"][-1]
    assert len(tried.rows) == 16  # no run is made twice
    flip(tried.folder / "scored.npy")
    pytest.raises(DataError, tried.judged)


# What a version does in the place of training, or of an answer; and the reason that the ledger has.
WRONG = {
    "crash": ("train.py", "shards = ", "raise SystemExit('no luck')\nshards = ", "no luck"),
    "hang": ("train.py", "shards = ", "time.sleep(600)\nshards = ", "takes more than"),
    "rubbish": ("train.py", 'write_text(text)', 'write_text("[" * 10**8)', "leaves no results"),
    "outside": ("train.py", "shards = ", "(run_dir.parent / 'x').touch()\nshards = ", "denied"),
    "daemon": (
        "train.py", "shards = ", "subprocess.Popen(['sleep', '600'])\nshards = ", "processes"
    ),
    "nan": ("model.py", "return from", "logits = logits * np.nan\n        return from", "finite"),
    "short": ("model.py", 'logits.astype("f4")', 'logits.astype("f4")[..., 1:]', "each token"),
    "metric": ("train.py", "OWN = 1.0, 0.002, 4.0", "OWN = 1.0, 0.002, 2.0", "measures otherwise"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_version_that_is_wrong_is_refused_by_name(name, tried, monkeypatch):
    if name == "outside" and confined.landlock() < 1:
        pytest.skip("needs Landlock")
    if name == "hang":
        made = trials.Bench.__init__
        monkeypatch.setattr(trials.Bench, "__init__", lambda b, f, s, n, _: made(b, f, s, n, 0.2))
    *edit, reason = WRONG[name]
    tried.edit(*edit)
    code, line = tried.judged()
    assert code == 1 and line["state"] == "refused" and reason in line["said"][0]
    assert reason in (tried.folder / "page.html").read_text()


@pytest.mark.slow
def test_after_a_kill_only_what_is_missing_is_made(tried):
    tried.edit("train.py", "AHEAD, NOISE, OWN = 1.0", "AHEAD, NOISE, OWN = 1.25")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=judge.main, args=[tried.words])
    process.start()
    until(lambda: (tried.folder / "rows.jsonl").exists() and len(tried.rows) > 3)
    process.kill()
    process.join()
    there = tried.rows
    code, line = tried.judged()
    assert code == 0 and tried.rows[: len(there)] == there and len(tried.rows) == 16
    assert len(read_lines(tried.folder / "tries.jsonl")) == 4  # its beginning twice


@pytest.mark.slow
@pytest.mark.parametrize("old, new", [
    ("y = attend(q, k, v, ctx.mask)", "y = attend(q, k, torch.roll(v, -1, 2), ctx.mask)"),
    ("causal = ", "causal = False and "),
    ("x = x + self.attn(rms_norm(x)", "x = x / x.std(1, keepdim=True)\n"
     "        x = x + self.attn(rms_norm(x)"),
])  # fmt: skip
def test_a_model_that_reads_the_future_is_refused(old, new, tmp_path, small_data, bench):
    """By values, a mask, a norm over time."""
    version = copied(tmp_path, small_data, old, new)
    data = Manifest.load(small_data)
    rows = [data.row("val", 0, row) for row in range(40)]
    np.save(tmp_path / "scored.npy", np.array(rows))
    run = trials.runs_of(version, 2, 0, "scored", 0.1)[0]
    with pytest.raises(trials.Refused, match="reads the future"):
        bench.make(run)
