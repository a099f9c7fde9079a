"""Seconds from the command to the end of the first step: compiling, compiled before, not compiling.

    python benchmarks/startup.py [tiny cpu-6x384 ...]

The same training step as throughput.py, on random rows. `cold` starts with an empty compile cache,
`warm` is the same command again, `eager` is --no_compile; all count Python's own imports. Appends
to benchmarks/RESULTS.md (--results "" for no file).
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from throughput import ROOT, report, run_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", default=["tiny", "cpu-6x384"])
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "RESULTS.md"))
    args = parser.parse_args()
    header, rows = ["preset", "cold", "warm", "eager"], []
    for preset in args.presets:
        seconds = []
        with tempfile.TemporaryDirectory() as cache:
            for compile in (True, True, False):
                case = dict(preset=preset, train=dict(compile=compile), steps=1, warmup=1)
                result = run_case(case, TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache)
                seconds.append(result.get("error") or f"{result['first_step_s']:.1f} s")
        rows.append([preset, *seconds])
        print(" | ".join(rows[-1]), flush=True)
    report("Start-up, from the command to the first step", header, rows, args.results)


if __name__ == "__main__":
    main()
