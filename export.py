"""A checkpoint -> a model for other programs. MODEL: a preset, a run or a checkpoint.

    python export.py [MODEL] --page             one HTML file that holds the model: open it, mail it
    python export.py [MODEL] [--out FOLDER]     a folder that transformers loads
    python export.py [MODEL] --gguf [q8_0]      a file for llama.cpp and Ollama (alone: in f16)

hf/export.py does the work, and compares what the other program computes with what ours does;
instruments/pages/page.py writes the page.
"""

import machinery.needs  # first: it says which packages are missing

from functools import partial

from hf import export
from instruments.pages import page
from machinery import cli

main = partial(export.main, write_page=page.write)

if __name__ == "__main__":
    cli.run(main)
