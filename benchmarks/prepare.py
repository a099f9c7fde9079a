"""How fast text becomes rows, in how much memory, and whether kills leave a trace.

    python benchmarks/prepare.py [--megabytes 100 1000] [--kills 20]

Per size: a .jsonl file made of the Python standard library's text, over and over (each copy has a
number of its own), is prepared with 1 and with 2 workers. `bare` is the same tokenizer alone, one
thread, on the beginning of that text, in core-seconds. Of a line's two rates, the first is by the
clock, start of Python included; the second is per core-second, which a busy machine does not
disturb. Memory is the sum over all processes, sampled ten times a second.
`--kills N`: SIGKILL N times at random moments, then the fingerprint against an undisturbed run's.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from preparation import sources
from tokenizer import Tokenizer


def stdlib_texts() -> list[str]:
    source = sources.parse("stdlib")
    return [
        text[:20_000]
        for unit in sources.list_units(source)[0]
        for text in sources.documents(source, unit, Counter())
    ]


def write_jsonl(path: Path, texts: list[str], megabytes: float) -> list[str]:
    """Returns the first documents, 30 MB at most, to time the bare tokenizer on."""
    size, copy, sample, sampled = 0, 0, [], 0
    with open(path, "w", encoding="utf-8") as f:
        while size < megabytes * 1e6:
            for text in texts:
                text = f"copy {copy} {text}"
                if sampled < 30e6:
                    sample.append(text)
                    sampled += len(text)
                f.write(json.dumps({"text": text}) + "\n")
                size += len(text)
            copy += 1
    return sample


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all that it started (what they share counts each time)."""
    total, todo = 0, [pid]
    while todo:
        p = todo.pop()
        try:
            total += int(Path(f"/proc/{p}/statm").read_text().split()[1]) * 4096
            for task in Path(f"/proc/{p}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            pass
    return total


def command(folder: Path, text: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "prepare_data.py"),
        "--source",
        f"files:{text}",
        "--data_dir",
        str(folder),
        "--vocab_size",
        "32768",
        "--row_len",
        "2049",
        *options,
    ]


def run(folder: Path, text: Path, *options: str) -> tuple[float, float, float]:
    """(seconds, core-seconds, peak GB) of all processes together."""
    t0, cpu0, peak = time.perf_counter(), cpu_seconds(), 0
    process = subprocess.Popen(
        command(folder, text, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.1)
    assert process.returncode == 0, process.args
    return time.perf_counter() - t0, cpu_seconds() - cpu0, peak / 1e9


def cpu_seconds() -> float:
    """Of all finished children and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def facts(folder: Path) -> tuple[int, str]:
    tree = json.loads((folder / "manifest.json").read_text())
    tokens = sum(f["tokens"] for split in tree["splits"].values() for f in split.values())
    return tokens, tree["fingerprint"]


def throughput(scratch: Path, megabytes: float) -> None:
    text, sample = scratch / "text.jsonl", None
    sample = write_jsonl(text, stdlib_texts(), megabytes)
    whole, _, peak = run(scratch / "first", text, "--workers", "2")  # trains a tokenizer, too
    path = scratch / "first" / "tokenizer.json"
    tokenizer = Tokenizer.load(path)
    t0 = time.process_time()
    bare = sum(len(tokenizer.encode_array(t)) for t in sample) / (time.process_time() - t0)
    print(
        f"{megabytes:.0f} MB of text: with a new tokenizer {whole:.1f} s, peak {peak:.2f} GB; "
        f"bare tokenizer {bare / 1e6:.2f} Mtok/s",
        flush=True,
    )
    prints, seconds = set(), {}
    for workers in (1, 2):
        folder = scratch / f"workers{workers}"
        seconds[workers], cpu, peak = run(
            folder, text, "--workers", str(workers), "--tokenizer", str(path)
        )
        tokens, fingerprint = facts(folder)
        prints.add(fingerprint)
        rate, per_core = tokens / seconds[workers] / workers, tokens / cpu
        print(
            f"  {workers} workers: {seconds[workers]:.1f} s, {rate / 1e6:.2f} Mtok/s per worker "
            f"= {100 * rate / bare:.0f}% of bare by the clock; {per_core / 1e6:.2f} Mtok per "
            f"core-second = {100 * per_core / bare:.0f}%; peak {peak:.2f} GB",
            flush=True,
        )
        shutil.rmtree(folder)
    print(
        f"  1 -> 2 workers: {seconds[1] / seconds[2]:.2f}x, "
        f"{'the same fingerprint' if len(prints) == 1 else 'FINGERPRINTS DIFFER'}"
    )
    shutil.rmtree(scratch / "first")
    text.unlink()


def kills(scratch: Path, count: int, megabytes: float = 60) -> None:
    text, rng = scratch / "text.jsonl", random.Random(0)
    write_jsonl(text, stdlib_texts(), megabytes)
    seconds, _, _ = run(scratch / "undisturbed", text, "--workers", "2")
    expected, done, restarts = facts(scratch / "undisturbed")[1], 0, 0
    folder = scratch / "killed"
    while done < count:
        process = subprocess.Popen(
            command(folder, text, "--workers", str(rng.choice((1, 2, 3)))),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(timeout=rng.uniform(0.5, 0.6 * seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
        if (folder / "manifest.json").exists():  # finished too early: from the beginning
            assert facts(folder)[1] == expected
            shutil.rmtree(folder)
            restarts += 1
    run(folder, text, "--workers", "2")
    same = facts(folder)[1] == expected
    print(
        f"{count} kills ({restarts} runs finished between them): "
        f"{'the same fingerprint' if same else 'ANOTHER FINGERPRINT'} as undisturbed, "
        f"{len(list(folder.rglob('*.tmp-*')))} temporary files left"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, nargs="*", default=[100, 1000])
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as scratch:
        for megabytes in args.megabytes:
            throughput(Path(scratch), megabytes)
        if args.kills:
            kills(Path(scratch), args.kills)


if __name__ == "__main__":
    main()
