"""What a store costs a run: `python benchmarks/store.py DATA_DIR WORK_DIR [MB_PER_S] [OPTIONS]`.

A real S3 server in this process (moto's, MB_PER_S fast; 0: as fast as it can), train.py in others:
seconds to the first step with data on the disk and from the store, wait for data, and the time of
steps during which a checkpoint was on its way against that of the others of the same run.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from conftest import environment, metrics
from store_helpers import s3_server

from machinery import stage
from machinery.shards import Manifest

ROOT = Path(__file__).parents[1]


def train(server, *options) -> tuple[float, str]:
    """Run train.py; (when it was started, what it printed)."""
    began = time.time()
    command = [sys.executable, str(ROOT / "train.py"), *map(str, options)]
    env = environment(**server.env())
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return began, done.stdout


def main(data: str, work: str, mb_per_s: str = "0", *options: str) -> None:
    with s3_server() as server:
        manifest, folder = Manifest.load(data), Path(work)
        os.environ.update(server.env())
        stage.publish(manifest, "s3://runs/data")
        for name, source in (("disk", data), ("store", "s3://runs/data")):
            where = ["--data_dir", source, "--stage", folder / "cache"]
            where = where if name == "store" else where[:2]
            run_dir = folder / name
            began, text = train(server, *options, *where, "--run_dir", run_dir, "--steps", 40)
            steps = [r for r in metrics(run_dir) if "loss" in r]
            waits = [r["data_wait_ms"] for r in steps[1:]]
            print(
                f"data on the {name}: first step after {steps[0]['time'] - began:.1f} s, then "
                f"{statistics.mean(waits):.2f} ms of waiting per step (at most {max(waits):.1f})"
            )
            print("\n".join(line for line in text.splitlines() if "shards are in" in line))
        times, rate = [], float(mb_per_s)

        def timed(method, path, body, answer):
            began = time.time()
            time.sleep(len(body) / 1e6 / rate if rate else 0)
            answered = answer(body)
            if "distcp" in path:
                times.append((began, time.time()))
            return answered

        server.spoil = timed
        run_dir = folder / "uploads"
        where = ["--data_dir", data, "--run_dir", run_dir, "--mirror", "s3://runs/mirror"]
        _, text = train(server, *options, *where, "--save_every", 20)
        steps = [r for r in metrics(run_dir) if "loss" in r][5:]
        beside, alone = [], []
        for r in steps:
            busy = any(a < r["time"] and r["time"] - r["step_s"] < b for a, b in times)
            (beside if busy else alone).append(1000 * r["step_s"])
        a, b = statistics.median(alone), statistics.median(beside)
        print(
            f"steps without an upload: {len(alone)} of {a:.1f} ms; beside one: {len(beside)} of "
            f"{b:.1f} ms ({b / a - 1:+.1%}), medians of one run"
        )
        print("\n".join(line for line in text.splitlines() if " is in s3://" in line))


if __name__ == "__main__":
    main(*sys.argv[1:])
