"""A checkpoint -> a folder that transformers loads: `python export.py [MODEL] [--out FOLDER]`.

hf/export.py does the work: it writes the weights, the tokenizer and a card, and compares what
transformers computes with them. MODEL: a preset, a run or a checkpoint.
"""

from hf.export import main
from machinery import cli

if __name__ == "__main__":
    cli.run(main)
