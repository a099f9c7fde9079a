"""Texts for `scaling.py dedup`: what copies in the training text do, at equal tokens.

    python benchmarks/duplicates.py

Every document of stdlib+site is put in a group with those that are nearly equal to it. Of a sample
of the groups, one in eight is held out as a whole, one document of each, so that no copy of what is
held out is trained on. Writes data/dedup/train.jsonl and held_out.jsonl, and prepares the first in
three ways (data/dedup_none, _exact, _near) and the second (data/dedup_held_out), all with the
tokenizer of data/scaling. Needs requirements-scaling.txt.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from machinery import disk
from preparation import copies, sources, worker
from preparation.sources import documents

SAMPLE, HELD_OUT = 96, 8  # one group in so many; of these, one in so many


def main() -> None:
    source = sources.parse("stdlib+site")
    units, _ = sources.list_units(source)
    seen, kept, texts = copies.Seen(near=True), [], {"train": [], "held_out": []}
    counts = Counter()
    with worker.open_pool(2) as (pool, _):
        tasks = [(source, unit, False, True) for unit in units]
        for unit, marks in zip(units, pool.map(copies.marks_of, *zip(*tasks))):
            for text, mark in zip(documents(source, unit, Counter()), marks):
                equal, group = mark.whole in seen.by_text, seen.copy_of(mark)
                kind = "equal" if equal else "kept" if group is None else "nearly equal"
                counts.update({f"documents {kind}": 1, f"characters {kind}": len(text)})
                if group is None:
                    kept.append(worker.hash64(text))
                place = kept[-1 if group is None else group]
                if place % SAMPLE:
                    continue
                if place // SAMPLE % HELD_OUT:
                    texts["train"].append(text)
                elif group is None:
                    texts["held_out"].append(text)
    print(dict(counts))
    for name, found in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
        (ROOT / "data" / "dedup").mkdir(parents=True, exist_ok=True)
        disk.write_text(ROOT / "data" / "dedup" / f"{name}.jsonl", lines)
        print(f"{name}: {len(found):,} documents, {sum(map(len, found)) / 1e6:.2f} MB")
    for way in ("none", "exact", "near", "held_out"):
        name = "held_out" if way == "held_out" else "train"
        options = f"tiny --source files:data/dedup/{name}.jsonl --tokenizer data/scaling"
        options += f" --row_len 257 --data_dir data/dedup_{way}"
        options += " --val_fraction 0.5" if way == "held_out" else f" --dedup {way}"
        subprocess.run([sys.executable, "prepare_data.py", *options.split()], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
