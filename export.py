"""A checkpoint -> a model for other programs. MODEL: a preset, a run or a checkpoint.

    python export.py [MODEL] [--out FOLDER]     a folder that transformers loads
    python export.py [MODEL] --gguf f16         a file for llama.cpp and Ollama

hf/export.py does the work, and compares what the other program computes with what ours does.
"""

import machinery.needs  # first: it says which packages are missing

from hf.export import main
from machinery import cli

if __name__ == "__main__":
    cli.run(main)
