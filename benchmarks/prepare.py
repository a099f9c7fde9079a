"""How fast text becomes rows, and in how much memory.

    python benchmarks/prepare.py [--megabytes 100 1000]

Per size: a .jsonl file made of the Python standard library's text, over and over (each copy has a
number of its own), is prepared with 1 and with 2 workers. `bare` is the same tokenizer alone, one
thread, on the beginning of that text, in core-seconds. Of a line's two rates, the first is by the
clock, start of Python included; the second is per core-second, which a busy machine does not
disturb. Memory is the sum over all processes, sampled ten times a second.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packing import ROOT, stdlib_texts
from tokenizer import Tokenizer

OPTIONS = "--vocab_size 32768 --row_len 2049".split()


def write_jsonl(path: Path, texts: list[str], megabytes: float) -> list[str]:
    """Returns the first documents, 30 MB at most, to time the bare tokenizer on."""
    size = 0
    copy = 0
    sample = []
    sampled = 0
    with open(path, "w", encoding="utf-8") as f:
        while size < megabytes * 1e6:
            for text in texts:
                text = f"copy {copy} {text[:20_000]}"
                if sampled < 30e6:
                    sample.append(text)
                    sampled += len(text)
                f.write(json.dumps({"text": text}) + "\n")
                size += len(text)
            copy += 1
    return sample


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all that it started (what they share counts each time)."""
    total = 0
    todo = [pid]
    while todo:
        p = todo.pop()
        try:
            total += int(Path(f"/proc/{p}/statm").read_text().split()[1]) * 4096
            for task in Path(f"/proc/{p}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            pass
    return total


def run(folder: Path, text: Path, *options: str) -> tuple[float, float, float]:
    """(seconds, core-seconds, peak GB) of all processes together."""
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--source", f"files:{text}"]
    command += ["--data_dir", str(folder), *OPTIONS, *options]
    t0 = time.perf_counter()
    cpu0 = cpu_seconds()
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.1)
    assert process.returncode == 0, process.args
    return time.perf_counter() - t0, cpu_seconds() - cpu0, peak / 1e9


def cpu_seconds() -> float:
    """CPU time of all finished children and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def throughput(scratch: Path, megabytes: float) -> None:
    text = scratch / "text.jsonl"
    sample = write_jsonl(text, stdlib_texts(), megabytes)
    whole, _, peak = run(scratch / "first", text, "--workers", "2")  # trains a tokenizer, too
    path = scratch / "first" / "tokenizer.json"
    tokenizer = Tokenizer.load(path)
    t0 = time.process_time()
    bare = sum(len(tokenizer.encode_array(t)) for t in sample) / (time.process_time() - t0)
    print(
        f"{megabytes:.0f} MB of text: with a new tokenizer {whole:.1f} s, peak {peak:.2f} GB; bare "
        f"tokenizer {bare / 1e6:.2f} Mtok/s",
        flush=True,
    )
    for workers in (1, 2):
        folder = scratch / f"workers{workers}"
        options = "--workers", str(workers), "--tokenizer", str(path)
        seconds, cpu, peak = run(folder, text, *options)
        splits = json.loads((folder / "manifest.json").read_text())["splits"]
        tokens = sum(f["tokens"] for split in splits.values() for f in split.values())
        rate = tokens / seconds / workers
        per_core = tokens / cpu
        text = (
            f"{workers} workers: {seconds:.1f} s, {rate / 1e6:.2f} Mtok/s per worker = "
            f"{rate / bare:.0%} of bare by the clock; {per_core / 1e6:.2f} Mtok per core-second = "
            f"{per_core / bare:.0%}; peak {peak:.2f} GB"
        )
        print(f"  {text}", flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(scratch / "first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="*", default=[100, 1000])
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as scratch:
            throughput(Path(scratch), megabytes)


if __name__ == "__main__":
    main()
