"""Each program imports this before anything else: without the packages of requirements.txt, or with
too old a Python (for which this file is readable too), it ends in one sentence. Next: cli.py."""

import sys
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "tyro")  # with these come the others

lacks = ", ".join(name for name in PACKAGES if find_spec(name) is None)
if sys.version_info < (3, 10):  # noqa: UP036
    lacks = "the features of Python 3.10"
if lacks:
    venv = HOME / ".venv"
    remedy = f"bash {HOME}/run.sh"
    if venv.exists() and sys.prefix != str(venv):
        remedy = f"source {venv}/bin/activate"
    sys.stderr.write(f"error: {sys.executable} lacks {lacks}; run: {remedy}\n")
    sys.exit(2)
