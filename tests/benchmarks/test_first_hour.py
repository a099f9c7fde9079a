"""benchmarks/ on a rented machine: the parts of the first hour, and the comparison with a peer."""

import argparse
import contextlib
import fcntl
import importlib
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, printed, read_lines, until
from plans import small_preset, small_world

import peer
import throughput
from config import UsageError
from machinery import cli
from machinery.shards import Manifest

# ------------------------------------------------------------------------ the parts, and their end
PYTHON = """#!{python} -S
# In place of Python: it notes a command, and then does what a test asks of that program.
import json, os, pathlib, signal, sys, time
assert "RANK" not in os.environ
words = sys.argv[1:]
with open({noted!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
value = lambda name: pathlib.Path(words[words.index(name) + 1])
result = lambda line: open(value("--results"), "a").write(line + "\\n")
exec({does!r}.get(pathlib.Path(words[words[0] == "-m"]).stem, ""))
"""
HANGS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()  # its child hangs, too
print("here I stay", flush=True)
time.sleep(600)
"""
FAILS = """
if os.fork():
    print("no luck")
    raise SystemExit(7)
time.sleep(600)
"""
PREPARES = """
time.sleep(0.3)
value("--data_dir").mkdir()
value("--data_dir").joinpath("manifest.json").touch()
"""
TRAINS = """
value("--run_dir").joinpath("profile").mkdir(parents=True)
value("--run_dir").joinpath("profile/trace.json.gz").touch()
print("\\nwhere the time goes")
"""
NO_GPU = "result('- GPU: none')"


def script(root: Path, machine: str = NO_GPU, **does: str) -> list[str]:
    """first_hour.sh in a folder of its own, with PYTHON, into root/out; `data` may take 3 seconds.
    does: what a program does, as code."""
    text = (ROOT / "benchmarks" / "first_hour.sh").read_text()
    text = text.replace("--kill-after=10", "--kill-after=1").replace("data 150", "data 3")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    noted = str(root / "commands.jsonl")
    does["machine"] = machine
    python.write_text(PYTHON.format(python=sys.executable, noted=noted, does=does))
    python.chmod(0o755)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "first_hour.sh").write_text(text)
    return ["bash", f"{root}/benchmarks/first_hour.sh", "--out", f"{root}/out"]


def run_hour(command: list) -> tuple[int, str]:
    """(exit code, what it printed)"""
    how = dict(capture_output=True, text=True, env=environment(RANK="1"), timeout=900)
    done = subprocess.run(command, **how)
    return done.returncode, done.stdout + done.stderr


def ended(root: Path) -> dict[str, str]:
    """How each part ended, by the list at the end of the results; nothing is left running."""
    with open(root / "out" / ".lock") as lock:  # which all that it starts inherit
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    listed = (root / "out" / "RESULTS.md").read_text().partition("## Parts")[2].strip()
    return dict(line.split(None, 1) for line in listed.splitlines())


def test_a_part_that_hangs_or_fails_costs_itself_alone(tmp_path):
    does = dict(prepare_data=HANGS, pytest=FAILS, throughput="result('a table')")
    only = "data tests speed profile speed_more".split()
    code, said = run_hour([*script(tmp_path, **does), "--minutes", "1", "--only", *only])
    found = ended(tmp_path)
    assert code == 1 and {*found} == {"environment", *only}
    assert found["data"].startswith("failed: stopped after") and "here I stay" in said
    assert found["tests"].startswith("failed: exit code 7: no luck;")
    assert re.match(r"ok \(\d+ s\); \d+ s left", found["speed"])
    assert found["profile"].startswith("left out: there is no manifest.json")
    assert found["speed_more"].startswith("left out: no time")
    assert "a table" in (tmp_path / "out" / "RESULTS.md").read_text()


def test_when_it_is_stopped_its_parts_are_and_what_there_was_is_told(tmp_path):
    command = [*script(tmp_path, prepare_data=HANGS), "--slow", "30"]
    first = subprocess.Popen(command, env=environment(RANK="1"))
    log = tmp_path / "out" / "logs" / "data.txt"
    until(lambda: log.exists() and log.read_text().count("here I stay") == 2)
    assert "in use" in run_hour(command)[1]
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 143 and ended(tmp_path)["data"].startswith("interrupted")
    assert not (tmp_path / "out" / "unfinished").exists()


class Parsed(Exception):
    """In place of what a program does with its options."""


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_part_is_a_command_that_its_program_takes(on_gpu, tmp_path, checkout, monkeypatch):
    """And all tables go to one file."""
    facts = "result('- memory: 85.0 GB, 84.1 GB free')" if on_gpu else NO_GPU
    command = script(tmp_path, facts, prepare_data=PREPARES, train=TRAINS)
    code, said = run_hour([*command, "--peer", checkout])
    names = {"speed", "profile", "learn", *(("warm_peer", "speed_d20") if on_gpu else ())}
    assert code == 0 and names < {*ended(tmp_path)}, said
    assert re.search("data +ok.*speed +begins", said, re.DOTALL)  # `speed` is timed, and alone
    results = tmp_path / "out" / "RESULTS.md"
    assert "## Profile\n\n    where the time goes" in results.read_text()
    assert (tmp_path / "out" / "trace.json.gz").exists()
    honest = argparse.ArgumentParser.parse_known_args

    def parse(self, *args):
        raise Parsed(*honest(self, *args))

    kinds = {"train.py": "train", "prepare_data.py": "data"}
    for program, *options in read_lines(tmp_path / "commands.jsonl"):
        if program in kinds:
            cli.parse(program, kinds[program], options)
        elif program != "-m":
            with monkeypatch.context() as patch, pytest.raises(Parsed) as parsed:
                patch.setattr(sys, "argv", [program, *options])
                patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
                importlib.import_module(Path(program).stem).main()
            found, rest = parsed.value.args
            assert found.results in ("", str(results))
            assert not rest


def test_no_file_of_ours_is_taken_for_a_package_that_nanochat_imports():
    """It goes on without FlashAttention-3 if `kernels` is not the package."""
    ours = {path.stem for folder in (ROOT, ROOT / "benchmarks") for path in folder.glob("*.py")}
    assert "peer" in ours and not ours & {"kernels", "filelock", "nanochat"}


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
    peer.find_peer(str(package.parent))
    return package.parent


def test_the_peer_has_its_own_schedules_on_the_rows_that_ours_sees(checkout, small_data, tmp_path):
    """Values of scripts/base_train.py for 1,000 steps: 40 of warm-up, a decay over the last 650 to
    5%; Muon's momentum 0.85 to 0.97 in 400 steps, and to 0.90 in the decay."""
    world = small_world()
    preset = small_preset()
    options = replace(preset.run, run_dir=str(tmp_path), compile=False)
    preset = replace(preset, model=WIDE, run=options)
    with contextlib.ExitStack() as stack:
        ours = throughput.build_run(preset, world, Manifest.load(small_data), stack)
        expected = [ours.loader.next_batch()[0] for _ in range(2)]
        theirs = peer.Peer(preset.model, 2**19 // 16, world)
        steps = []
        rows = []

        def step(batches, grad_accum, *how):
            steps.append(how)
            rows.extend(next(batches)[0] for _ in range(2 - len(rows)))

        theirs.step = step
        theirs.train(replace(ours, plan=replace(ours.plan, steps=1000)), preset.train.seed)
        assert len(steps) == 1000
    assert all(torch.equal(a, b) for a, b in zip(rows, expected))
    rate, momentum, decay = zip(*steps)
    values = lambda schedule, *steps: [schedule[step] for step in steps]
    assert values(rate, 0, 39, 350, 675, 999) == pytest.approx([1 / 40, 1, 1, 0.525, 0.0515], 1e-2)
    assert values(momentum, 0, 200, 675, 999) == pytest.approx([0.85, 0.91, 0.935, 0.9], 1e-3)
    first = 0.28 / 4 * 216  # a batch 16 times as small; depth 12 has 216 times the weights
    assert values(decay, 0, 500) == pytest.approx([first, first / 2])


def test_what_nanochat_has_not_is_refused(checkout):
    for preset, dtype in (("smol-135m", torch.float32), ("d12", torch.float16)):
        with pytest.raises(UsageError):
            peer.Peer(throughput.find_preset(preset).model, 2**19, small_world(dtype=dtype))


def test_the_peer_is_scored_as_ours(checkout):
    theirs = peer.Peer(WIDE, 2**19 // 16, small_world())
    tokens = torch.randint(512, (2, 65))
    scored = theirs.scored(None)(tokens, tokens, "none")
    expected = theirs.model.head.weight[tokens].log_softmax(-1)  # (B, T, vocabulary)
    assert torch.allclose(scored, -expected.gather(-1, tokens[..., None])[..., 0])


@pytest.mark.slow
def test_the_first_hour_of_a_cpu(checkout, tmp_path):
    """All that it runs, beside the stand-in, which is fast and learns little."""
    command = ["bash", ROOT / "benchmarks" / "first_hour.sh", "--peer", checkout, "--slow", "6"]
    code, said = run_hour([*command, "--minutes", "40", "--out", tmp_path / "out"])
    text = (tmp_path / "out" / "RESULTS.md").read_text()
    assert code == 0 and text.count(" ok (") == 7, said
    assert "where the time goes" in text
    assert "RESULTS.md" not in text  # where a table went is no part of how it was made
    faster, *of_loss = re.findall(r"nanochat's(?:, by seed)?: ([\d.]+)(?:, ([\d.]+))?", text)
    assert float(faster[0]) < 1 and all(float(ratio) < 0.98 for ratio in of_loss[0])


@pytest.mark.slow
def test_learning_of_one_side_alone(checkout, small_data):
    words = ["learn", "tiny", "--peer", checkout, "--no_compile", "--data_dir", small_data]
    words += "--steps 4 --tokens_per_step 512 --seeds 0 --sides ours --results".split()
    said = printed("benchmarks/peer.py", *words, "", timeout=300)
    assert "| ours" in said and "| nanochat" not in said and "by seed" not in said
