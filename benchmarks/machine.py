"""What a figure may depend on: the machine and its versions. First, that its GPU works.

    python benchmarks/machine.py

first_hour.sh begins with it. It imports what the programs import, so that a missing package is
named before anything runs. Prints a list, and appends it to benchmarks/RESULTS.md (--results "" for
no file).
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import at_root  # noqa: F401
import eval  # noqa: F401
import prepare_data  # noqa: F401
import train  # noqa: F401
from at_root import ROOT
from machinery import cli, ranks
from runs import parser_of

ASKED = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def said(*command: str) -> str:
    """The first line of what a command prints; none if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.strip().partition("\n")[0] or "none"


def of_gpu() -> dict[str, str]:
    """Facts of the GPU, if there is one. An error if it does not work."""
    if not torch.cuda.is_available() and not Path("/dev/nvidia0").exists():
        return {"GPU": "none"}
    torch.zeros(1, device="cuda")  # if torch cannot use it, the error says why
    free, total = (n / 1e9 for n in torch.cuda.mem_get_info())
    facts = {"GPU": torch.cuda.get_device_name(), "memory": f"{total:.1f} GB, {free:.1f} GB free"}
    settings = torch.cuda.memory._set_allocator_settings
    try:
        settings("expandable_segments:True")  # as train.py has it
        torch.ones(1 << 28, device="cuda").sum().item()
    except RuntimeError as error:
        settings("expandable_segments:False")
        torch.ones(1 << 28, device="cuda").sum().item()  # if this fails, it was not those
        facts["expandable segments"] = f"do not work: {str(error).splitlines()[0]}"
    return facts


def main() -> None:
    results = parser_of(__doc__).parse_args().results
    facts = of_gpu() | {
        "nvidia-smi": said("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cuDNN": torch.backends.cudnn.version(),
        "Triton": said(sys.executable, "-c", "import triton; print(triton.__version__)"),
        "Python": platform.python_version(),
        "CPU": f"{cli.cores()} cores, {ranks.cpu_name()}",
        "disk": f"{shutil.disk_usage(Path(results).parent).free / 1e9:.0f} GB free",
        "commit": said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }
    text = "\n## The machine\n\n" + "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    print(text)
    if results:
        with open(results, "a") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    main()
