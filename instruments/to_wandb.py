"""Send a run to Weights & Biases: `python instruments/to_wandb.py RUN_DIR [--follow]`.

Reads RUN_DIR/metrics.jsonl and config.json; writes RUN_DIR/wandb_id, so that a resumed run remains
one run there. `train.py --wandb` starts it with --follow, which sends new lines until the run ends.
As a process of its own it cannot stop or slow the training. Without a key it writes to a local
folder (WANDB_MODE=offline).
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path


def records(run_dir: Path, follow: bool) -> Iterator[dict]:
    """The lines of metrics.jsonl that have a step (a start has none); with follow, also those
    written later, until the run ends."""
    parent, line = os.getppid(), ""
    with open(run_dir / "metrics.jsonl") as file:
        while True:
            ended = not follow or os.getppid() != parent or has_ended(run_dir)  # before reading
            while part := file.readline():
                line += part  # it may be half a line, still being written
                if line.endswith("\n"):
                    record = json.loads(line)
                    if "step" in record:
                        yield record
                    line = ""
            if ended:
                return
            time.sleep(1)


def has_ended(run_dir: Path) -> bool:
    """Whether status.json says that the run is over, for whatever reason."""
    try:
        return json.loads((run_dir / "status.json").read_text())["state"] != "running"
    except (OSError, ValueError):
        return False


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--follow", action="store_true", help="until the run ends")
    args = parser.parse_args(argv)
    run_dir = args.run_dir
    netrc, id_file = Path(os.environ.get("NETRC", Path.home() / ".netrc")), run_dir / "wandb_id"
    key = os.environ.get("WANDB_API_KEY") or netrc.exists() and "wandb.ai" in netrc.read_text()
    os.environ.setdefault("WANDB_MODE", "online" if key else "offline")  # wandb must not prompt
    try:
        import wandb
    except ImportError:
        print("wandb is off: it is not installed; pip install wandb", flush=True)
        return 1
    try:
        config = json.loads((run_dir / "config.json").read_text())
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        same = dict(name=run_dir.name, id=id_file.read_text(), resume="allow")
        run = wandb.init(project="nano2049", dir=run_dir, config=config, **same)
        for record in records(run_dir, args.follow):
            run.log(record, step=record["step"])
        run.finish()
    except (Exception, SystemExit) as error:
        print(f"wandb is off: {type(error).__name__}: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
