"""Runs of a version that is not trusted: it trains, and is asked what it has learned.

Each is confined (confined.py) to its version's files, to the training rows, and to a folder of its
own. What it says of itself is not believed: the loss is that of held_out.py, the seconds are of our
clock. Each has a row in rows.jsonl, and is made once. For referee.py.
"""

import dataclasses
import io
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import held_out
import runs
from config import UsageError
from instruments.pages.run_folder import RunFolder
from instruments.run import law
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.output import say
from machinery.shards import Manifest
from runs import ROOT

EVERY_RUN = "--eval_every 0 --save_minutes 0 --log_every 0"
# Any peak: else each run begins with measuring it.
ON_A_CPU = "tiny --tokens_per_step 2048 --decay 0.65 --eval_tokens 8192 --peak_tflops 0.2"
SYSTEM = "/usr /lib /lib64 /bin /etc /proc /sys /dev/urandom".split()
DEVICES = ["/dev/null", *Path("/dev").glob("nvidia*")]
MOVES = 1e-3  # nats a token: beyond rounding in fp32


class Refused(Exception):
    """What is wrong with a change, in words that follow on "it"."""


@dataclass(frozen=True)
class Version:
    """Code, options of train.py and training rows. Versions that are equal in these have the same
    runs."""

    name: str  # base or change
    tree: Path  # a copy of its files
    options: str
    data: str

    @cached_property
    def key(self) -> str:
        files = sorted(file for file in self.tree.rglob("*") if file.is_file())
        facts = [[str(file.relative_to(self.tree)), disk.sha256_of(file)] for file in files]
        facts += [self.options, Manifest.load(self.data).fingerprint]
        return disk.sha256_of_tree(facts)[:12]


@dataclass(frozen=True)
class Run:
    version: Version
    depth: int
    tokens: int
    seed: int
    text: str  # scored or sealed
    words: tuple[str, ...]  # of its command, all but the folder of the run

    @cached_property
    def key(self) -> dict:
        """What makes it this run, in its row."""
        facts = dict(version=self.version.key, depth=self.depth, tokens=self.tokens)
        return facts | dict(seed=self.seed, text=self.text, machine=runs.device_name())

    @property
    def name(self) -> str:
        facts = vars(self) | dict(version=self.version.name, key=self.version.key)
        return "{version}_d{depth}_seed{seed}_{tokens}_{text}_{key}".format(**facts)


def runs_of(
    version: Version, depth: int, seed: int, text: str, tokens_per_weight: float
) -> list[Run]:
    """The shorter and the longer run, on as many tokens whatever the version."""
    if torch.cuda.is_available():
        words = [f"d{depth}"]
    else:  # the depth dial, with heads of 64
        words = ON_A_CPU.split() + ["--head_dim=64", f"--n_embd={64 * depth}"]
        words += [f"--{name}={depth}" for name in ("n_layer", "n_head", "n_kv_head")]
        words += [f"--mlp_hidden={256 * depth}"]
    words += EVERY_RUN.split()
    preset = cli.parse("train.py", "train", words)
    words += ["--seed", str(seed), "--data_dir", version.data, *shlex.split(version.options)]
    vocab_size = Manifest.load(version.data).vocab_size
    model = dataclasses.replace(preset.model, vocab_size=vocab_size)
    step = preset.train.tokens_per_step
    half = tokens_per_weight * law.weights_of("ClimbMix", model) / 2
    half = max(1, round(half / step)) * step
    return [
        Run(version, depth, n, seed, text, (*words, "--tokens", str(n))) for n in (half, 2 * half)
    ]


class Bench:
    """Makes runs in FOLDER, some side by side, and keeps the row of each."""

    def __init__(self, folder: Path, secret: int, at_once: int, minutes: int):
        self.folder = folder
        self.secret = secret  # of held_out.score
        self.at_once = at_once
        self.minutes = minutes  # the longest that a run may take
        self.rows = read_lines(folder / "rows.jsonl", dict)
        self.running: set[subprocess.Popen] = set()
        self.stopped = False  # a process that begins now ends at once
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def row_of(self, run: Run) -> dict | None:
        found = [row for row in self.rows if run.key.items() <= row.items()]
        return found[-1] if found else None

    def make_all(self, wanted: list[Run]) -> None:
        """Make the runs that have no row. Refused if one of a change fails."""
        missing = [run for run in wanted if self.row_of(run) is None]
        say(f"{len(missing)} of {len(wanted)} runs to make, {self.at_once} at once")
        pool = ThreadPoolExecutor(self.at_once)
        made = [pool.submit(self.make, run) for run in missing]
        try:
            for future in made:
                future.result()
        except BaseException:
            self.stopped = True
            for process in list(self.running):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def make(self, run: Run) -> None:
        place = self.folder / "runs" / run.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            row = run.key | self.trained(run, place) | self.scored(run, place)
        except Refused as reason:
            if run.version.name == "base":
                raise UsageError(f"the base {reason}; nothing can be compared with it") from None
            raise
        shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
        self.rows.append(row)
        disk.append(self.folder / "rows.jsonl", json.dumps(row | runs.made()) + "\n")
        say(f"{run.name}: {row['bpb']:.4f} bits per byte, {row['seconds']:.0f} s", flush=True)

    def trained(self, run: Run, place: Path) -> dict:
        """Train. FLOPs: as the version itself counts them."""
        run_dir = place / "run"
        run_dir.mkdir()
        words = ["train.py", *run.words, "--run_dir", run_dir]
        with self.begun(run, place, words, run_dir) as (_, used):
            pass
        try:
            found = RunFolder(run_dir)
            own = found.whole_validation.full_val_bpb
            FLOPs = run.tokens * max(found.flops_per_token, 1)
        except Exception as error:  # whatever a version has left there
            raise Refused(f"leaves no results: {error}") from None
        seconds = used["cpu" if self.device == "cpu" else "wall"]
        return dict(own=own, FLOPs=FLOPs, seconds=seconds, confined=used["confined"])

    def scored(self, run: Run, place: Path) -> dict:
        """Ask the model that was trained."""
        rows = np.load(self.folder / f"{run.text}.npy")
        token_bytes = Manifest.load(run.version.data).token_bytes()
        words = [ROOT / "benchmarks" / "answers.py", place / "run", self.device]
        with (
            tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as empty,
            self.begun(run, place, words, empty, asked=True) as (process, _),
            Connection(os.dup(process.stdin.fileno()), readable=False) as questions,
            Connection(os.dup(process.stdout.fileno()), writable=False) as answers,
        ):

            def ask(shape: tuple[int, ...], **question) -> np.ndarray:
                content = io.BytesIO()
                np.savez(content, **question)
                questions.send_bytes(content.getvalue())
                logits = np.frombuffer(answers.recv_bytes(4 * math.prod(shape)), np.float32)
                return logits.reshape(shape).copy()

            bpb = moved = math.nan
            with suppress(EOFError, OSError, ValueError):  # it ends, or sends something else
                bpb, moved = held_out.score(rows, token_bytes, ask, self.secret)
        if not math.isfinite(bpb + moved):
            raise Refused("does not answer with a finite logit for each token")
        if moved > MOVES:
            raise Refused(
                f"reads the future: what it says of a token moves by {moved:.2g} nats, in the "
                "mean, when it has those that follow"
            )
        return dict(bpb=bpb, moved=moved)

    @contextmanager
    def begun(self, run: Run, place: Path, words: list, own: str | Path, asked: bool = False):
        """A process with the code of a version; at the end, what it has used is known. `own` is
        the folder where it may write, also what is compiled for it. Refused if it fails."""
        tree = run.version.tree
        programs = ROOT / "benchmarks"
        read = [*SYSTEM, sys.prefix, sys.base_prefix, tree, run.version.data, place / "run"]
        read.append(programs / "answers.py")
        end = place / "end.json"
        spec = dict(read=read, write=[*DEVICES, own], seconds=60 * self.minutes, end=end)
        env = dict(HOME=own, TMPDIR=own, PYTHONPYCACHEPREFIX=own, PYTHONPATH="")
        env |= dict(OMP_NUM_THREADS="1") if self.device == "cpu" else {}
        command = [sys.executable, programs / "confined.py", json.dumps(spec, default=str)]
        command += [sys.executable, *words]
        with (
            open(place / "log", "ab") as log,
            subprocess.Popen(
                [*map(str, command)], cwd=tree, env=os.environ | env, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE if asked else log, stderr=log,
            ) as process,
        ):  # fmt: skip
            self.running.add(process)
            if self.stopped:
                process.terminate()
            used = {}
            try:
                yield process, used
            finally:
                self.running.remove(process)
        if not end.exists():
            raise Refused("ends the process that watches it")
        used |= disk.read_json(end)
        end.unlink()
        if used["code"] is None:
            raise Refused(f"takes more than {self.minutes} minutes ({place})")
        if used["code"]:
            said = runs.last_line(place / "log")
            raise Refused(f"ends with exit code {used['code']}: {said} ({place / 'log'})")
        if used["left"]:
            raise Refused(f"leaves {used['left']} processes running, which were ended")
