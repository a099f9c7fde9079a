"""benchmarks/ on a rented machine: the parts of the first hour, and the comparison with a peer."""

import argparse
import contextlib
import gzip
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, environment, printed, run_code, until
from plans import small_preset, small_world

import first_hour
import peer
import resume
import throughput
import trace_kernels
from config import UsageError
from machinery import build, cli, folders, shards


# ------------------------------------------------------------------------ the parts, and their end
def part(name: str, code: str, limit_s: int = 60, **how) -> first_hour.Part:
    return first_hour.Part(name, limit_s, [sys.executable, "-c", textwrap.dedent(code)], **how)


HANGS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():  # and its child, too
    print("here I stay", flush=True)
alive = open({fifo!r}, "w")
time.sleep(600)
"""


def is_held(fifo: Path) -> bool:
    """Whether a process has it open for writing."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(reader, 1) != b""
    except BlockingIOError:
        return True
    finally:
        os.close(reader)


def test_a_part_that_hangs_or_fails_costs_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour.end, "__defaults__", (1.0,))  # seconds until SIGKILL
    hour = first_hour.Hour(tmp_path, 300, 2.0, {"WORD": "heard"})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # the part's open() waits for one
    hangs = part("hangs", HANGS.format(fifo=str(fifo)), limit_s=1, least_s=0)
    fails = part("fails", "print('no luck'); raise SystemExit(7)")
    hour.run(hangs, fails)
    os.close(reader)
    until(lambda: not is_held(fifo))  # nothing that it started is left
    code = "import os, sys; print('a table of', os.environ['WORD'], sys.argv[1])"
    works = part("works", code, shows="table")
    works.command.append(first_hour.SECONDS)  # it is told how long it has
    hour.run(works)
    hour.run(part("lacks", "", needs=tmp_path / "nothing"))
    hour.run(first_hour.Part("nowhere", 60, [str(tmp_path / "no_program")]))
    hour.ends_at = 0.0
    hour.run(part("late", "raise SystemExit(1)"))
    hour.close()
    ended = {line.split()[0]: line.split(None, 1)[1] for line in hour.ended}
    assert set(ended) == {"fails", "hangs", "works", "lacks", "nowhere", "late"}
    assert hour.failed == 3 and "no_program" in ended["nowhere"]
    assert ended["fails"].startswith("failed: exit code 7: no luck;")
    assert ended["hangs"].startswith("failed: stopped after") and ended["works"].startswith("ok")
    assert ended["lacks"].startswith("left out: there is no nothing")
    assert ended["late"].startswith("left out: no time")
    results = (tmp_path / "RESULTS.md").read_text()
    assert "a table of heard 120" in results and all(line in results for line in hour.ended)


def test_when_it_is_stopped_its_parts_are_and_what_there_was_is_told(tmp_path):
    words = ["bash", "benchmarks/first_hour.sh", "--out", tmp_path / "out", "--only", "data"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes)
    assert done.stdout.readline().split() == ["environment", "begins"]
    done.send_signal(signal.SIGTERM)
    done.communicate(timeout=60)
    assert done.returncode == 143 and not (tmp_path / "out" / "work").exists()
    assert "environment    interrupted" in (tmp_path / "out" / "RESULTS.md").read_text()


@pytest.mark.parametrize("words, named", [("--peer docs", "docs"), ("", "tyro"), ("", "files")])
def test_what_is_wrong_is_said_before_anything_runs(words, named, tmp_path, monkeypatch, capsys):
    """A folder with files of others stays as it is."""
    if named == "tyro":
        monkeypatch.setattr(first_hour, "NEEDED", ("torch", "tyro_of_nobody"))
    (tmp_path / "mine.txt").touch()
    out = str(tmp_path if named == "files" else tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--out", out, *words.split()])
    assert first_hour.main() == 2 and os.listdir(tmp_path) == ["mine.txt"]
    assert re.fullmatch(f"error: .*{named}.*\n", capsys.readouterr().err)


def test_what_the_programs_import_is_asked_for_first():
    """A machine without a .venv may lack any package of requirements.txt."""
    code = "import sys, prepare_data, train, eval; print(*sys.modules)"
    loaded = set(run_code(code).split())
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {re.split("[=<>]", line)[0] for line in lines if line[:1].isalpha()}
    assert {"torch", "zstandard"} <= required & loaded <= set(first_hour.NEEDED)


class Parsed(Exception):
    """In place of what a program does with its options."""


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_part_is_a_command_that_its_program_takes(on_gpu, tmp_path, monkeypatch):
    """And all tables go to one file."""
    args = SimpleNamespace(out=tmp_path, peer="/there", minutes=10)
    sizes = first_hour.ON_GPU if on_gpu else first_hour.ON_CPU
    parts = sum(first_hour.plan_parts(sizes, args, tmp_path / "work", on_gpu), [])
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) and {"speed", "resume", "learn"} < set(names)
    honest = argparse.ArgumentParser.parse_known_args

    def parse(self, *args):
        raise Parsed(*honest(self, *args))

    for each in parts:
        words = each.command[each.command.index(sys.executable) + 1 :]
        words = ["9" if word == first_hour.SECONDS else word for word in words]
        script, options = words[0], words[1:]
        if script == "train.py":
            cli.parse(script, "train", options)
        elif script == "prepare_data.py":
            cli.parse(script, "data", options)
        elif script != "-m":
            with monkeypatch.context() as patch, pytest.raises(Parsed) as parsed:
                patch.setattr(sys, "argv", words)
                patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
                importlib.import_module(Path(script).stem).main()
            found, rest = parsed.value.args
            assert found.results in ("", str(tmp_path / "RESULTS.md"))
            if script == "benchmarks/resume.py":
                cli.parse("train.py", "train", [found.preset, *rest])
            else:
                assert not rest


def test_no_file_of_ours_is_taken_for_a_package_that_nanochat_imports():
    """It goes on without FlashAttention-3 if `kernels` is not the package."""
    ours = {path.stem for folder in (ROOT, ROOT / "benchmarks") for path in folder.glob("*.py")}
    assert "peer" in ours and not ours & {"kernels", "filelock", "nanochat"}


# --------------------------------------------------------------------------------------- a profile
def test_kernels_and_gaps_of_a_trace_that_was_made_up(tmp_path, monkeypatch):
    """Two steps, in microseconds: `wide` 30 + 30, with `copy` beside it, 90 of nothing, `thin`
    5, and at once after it `wide` 20."""
    rows = [("thin", 150, 5, "kernel"), ("wide", 0, 30, "kernel"), ("wide", 30, 30, "kernel")]
    rows += [("copy", 50, 5, "gpu_memcpy"), ("wide", 155, 20, "kernel")]
    rows += [(f"ProfilerStep#{n}", 0, 0, "user_annotation") for n in (1, 2)]
    events = [dict(zip(("name", "ts", "dur", "cat"), row)) for row in rows]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found, steps = trace_kernels.read_events(trace)
    assert steps == 2 and trace_kernels.gaps(found) == [(90, "thin")]
    wide, *others = trace_kernels.by_kernel(found, steps)
    assert wide == ["0.04", f"{80 / 90:.1%}", "2", "30", "wide"]
    assert {row[-1] for row in others} == {"copy", "thin"}
    words = ["trace_kernels.py", str(trace), "--results", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", words)
    assert trace_kernels.main() == 0 and "0.04 of it in gaps" in (tmp_path / "r").read_text()


# --------------------------------------------------------------------------------- kill and resume
TRAIN = """
import json, pathlib, signal, sys, time
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
every = int(sys.argv[sys.argv.index("--save_every") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
again = run_dir.exists()
run_dir.mkdir(exist_ok=True)
print(f"resumed at step {{every}}" if again else "", flush=True)
with open(run_dir / "metrics.jsonl", "a") as file:
    for step in range(every * again + 1, 30):
        loss = 5 - step / 1e4 + {wrong} * again
        file.write(json.dumps(dict(step=step, loss=loss)) + "\\n")
        if step not in (every + 1, every + 2):  # these are seen together with the next
            file.flush()
        if step == every:
            print(f"saved step_{{step}} in 0.50 s, training paused 0.01 s", flush=True)
        if step == every + 3 and not again:  # wait to be killed
            time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize("wrong, code", [(0, 143), (1e-3, 143), (0, 0)])
def test_a_resumed_run_with_other_losses_is_found(wrong, code, tmp_path, monkeypatch):
    """Or one that does not end as SIGTERM says."""
    (tmp_path / "train.py").write_text(TRAIN.format(wrong=wrong, code=code))
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["resume.py", "tiny", "--save_every", "8", "--results", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", words)
    assert resume.main() == int(wrong > 0 or code != 143)
    assert "resumed at step 8; 3 steps" in (tmp_path / "r").read_text()


# ------------------------------------------------------------------------------------ beside a peer
NANOCHAT = '''
"""A stand-in for nanochat/gpt.py: its names, in a model of one matrix."""
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head = nn.Embedding(config.vocab_size, config.vocab_size)
    def init_weights(self):
        nn.init.normal_(self.head.weight, std=0.02)
    def num_scaling_params(self):
        width = self.config.n_embd
        return dict(transformer_matrices=12 * self.config.n_layer * width**2, lm_head=0)
    def estimate_flops(self):
        return 6 * self.head.weight.numel()
    def setup_optimizer(self, matrix_lr, weight_decay, **rates):
        group = dict(kind="muon", params=list(self.parameters()), momentum=0.95)
        group |= dict(lr=matrix_lr, initial_lr=matrix_lr, weight_decay=weight_decay)
        return torch.optim.SGD([group], lr=matrix_lr)
    def forward(self, idx, targets, loss_reduction="mean"):
        logits = self.head(idx).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction=loss_reduction)
'''


# two layers, as wide as nanochat's
WIDE = replace(small_preset().model, n_embd=128, n_head=1, n_kv_head=1, head_dim=128)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a checkout of nanochat, which is found there."""
    package = tmp_path / "checkout" / "nanochat"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gpt.py").write_text(NANOCHAT)
    (package / "flash_attention.py").write_text("USE_FA3 = False\n")
    monkeypatch.setattr(sys, "path", [*sys.path])  # find_peer adds to it
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")  # put back at the end
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for name in [name for name in sys.modules if name.split(".")[0] == "nanochat"]:
        monkeypatch.delitem(sys.modules, name)
    peer.find_peer(str(package.parent))
    return package.parent


def test_the_peer_has_its_own_schedules_on_the_rows_that_ours_sees(checkout, small_data, tmp_path):
    """Values of scripts/base_train.py for 1,000 steps: 40 of warm-up, a decay over the last 650 to
    5%; Muon's momentum 0.85 to 0.97 in 400 steps, and to 0.90 in the decay."""
    manifest = shards.Manifest.load(small_data)
    world = small_world()
    preset = small_preset()
    options = replace(preset.run, run_dir=str(tmp_path), compile=False)
    preset = replace(preset, model=WIDE, run=options)
    with contextlib.ExitStack() as stack:
        ours = throughput.build_run(preset, world, manifest, stack)
        order = folders.training_order(preset, ours.plan, manifest)
        loader = build.open_loader(manifest, order, ours.plan, world, 0)
        stack.callback(loader.close)
        expected = [loader.next_batch()[0] for _ in range(2)]
        theirs = peer.Peer(preset.model, 2**19 // 16, world)
        steps = []
        rows = []

        def step(batches, grad_accum, *how):
            steps.append(how)
            rows.extend(next(batches)[0] for _ in range(2 - len(rows)))
            return 1.0

        theirs.step = step
        assert list(theirs.losses(ours, preset.train.seed, horizon=1000)) == [1.0] * 1000
    assert all(torch.equal(a, b) for a, b in zip(rows, expected))
    rate, momentum, decay = zip(*steps)
    assert rate[0] == pytest.approx(1 / 40) and rate[39] == rate[350] == 1.0
    assert rate[675] == pytest.approx(0.525) and rate[999] == pytest.approx(0.05, abs=0.002)
    assert momentum[0] == 0.85 and momentum[200] == pytest.approx(0.91)
    assert momentum[675] == pytest.approx(0.935) and momentum[999] == pytest.approx(0.9, abs=1e-3)
    ratio = 12 / preset.model.n_layer * (768 / 128) ** 2  # of the weights of depth 12 to these
    assert decay[0] == pytest.approx(0.28 / 4 * ratio)  # a batch 16 times as small
    assert decay[500] == pytest.approx(0.28 / 4 * ratio / 2)


def test_a_step_of_the_peer_is_the_mean_over_its_micro_batches(checkout):
    theirs = peer.Peer(WIDE, 2**19 // 16, small_world())
    tokens = torch.randint(512, (6, 65))
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]
    expected = theirs.model(tokens[:, :-1], tokens[:, 1:])
    (gradient,) = torch.autograd.grad(expected, theirs.model.parameters())
    before = theirs.model.head.weight.detach().clone()
    loss = theirs.step(iter(batches), 3, rate=0.5, momentum=0.9, decay=0.0)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    moved = before - 0.5 * (0.02 / 4) * gradient
    assert torch.allclose(theirs.model.head.weight, moved, atol=1e-6)
    assert theirs.optimizer.param_groups[0]["momentum"] == 0.9


def test_what_nanochat_has_not_is_refused(checkout):
    for preset, dtype, words in (
        ("smol-135m", torch.float32, "1920"),
        ("d12", torch.float16, "fp16"),
    ):
        with pytest.raises(UsageError, match=words):
            peer.Peer(throughput.find_preset(preset).model, 2**19, small_world(dtype=dtype))


@pytest.mark.slow
def test_speed_and_learning_beside_a_peer(checkout, small_data, tmp_path):
    """The stand-in is fast and learns little: both say so."""
    results = tmp_path / "RESULTS.md"
    common = ["--peer", checkout, "--no_compile", "--results", results]
    few = "--steps 2 --warmup 1 --tokens_per_step 1024".split()
    said = printed("benchmarks/peer.py", "speed", "tiny", *common, *few, timeout=300)
    assert said.count("\n| ours") == 1 and float(said.split("nanochat's: ")[1]) < 1
    learns = "--steps 10 --tokens_per_step 512 --seeds 0 1 --data_dir".split()
    said = printed("benchmarks/peer.py", "learn", "tiny", *common, *learns, small_data, timeout=300)
    ratios = said.split("by seed: ")[1].split(", ")
    assert len(ratios) == 2 and max(map(float, ratios)) < 0.97
    text = results.read_text()
    assert text.count("| nanochat") == 3 and text.count("| ours") == 3
    assert str(results) not in text


@pytest.mark.slow
def test_ceilings_and_a_real_kill_on_a_cpu(small_data, tmp_path):
    results = tmp_path / "RESULTS.md"
    printed("benchmarks/ceilings.py", "tiny", "--results", results, timeout=300)
    assert results.read_text().count("\n## ") == 3
    small = "--tokens_per_step 512 --no_compile --device cpu --save_every 8".split()
    words = ["tiny", "--data_dir", small_data, *small, "--results", results, "--dir", tmp_path]
    printed("benchmarks/resume.py", *words, timeout=300)
    assert "at most 0.0e+00 nats" in results.read_text()
