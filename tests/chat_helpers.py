"""What the tests of conversations share: invented ones, prepared, models that train on them, and
programs that are talked with."""

import random
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, environment, train_here, write_lines
from data_helpers import prepare_tiny

from config import GPTConfig
from model import GPT
from preparation import chat
from tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat. " * 40, "What is a cat? An animal."], 300)


@pytest.fixture(scope="session")
def chat_data(tmp_path_factory) -> Path:
    """Of eight words, which a model of a few thousand weights learns: Say cat -> I say cat."""
    folder = tmp_path_factory.mktemp("chats")
    rng = random.Random(0)
    chats = []
    for _ in range(400):
        turns = [("system", "Say it.")] if rng.random() < 0.2 else []
        for _ in range(rng.randint(1, 3)):
            words = " ".join(rng.choices("cat dog bird fish tree stone river cloud".split(), k=2))
            please = rng.choice(["", "", "Please: "])  # answers are of unequal shares
            turns += [("user", f"{please}Say {words}"), ("assistant", f"I say {words}.")]
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    write_lines(folder / "chats.jsonl", chats)
    said = prepare_tiny(folder / "data", "--source", f"files:{folder / 'chats.jsonl'}#messages")
    assert "padding" not in said and f"BOS tokens {chat.FILLERS[11:]}" in said
    return folder / "data"


LITTLE = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64)
LITTLE |= dict(seq_len=64, vocab_size=300, extras=("key_offset", "value_embeds"), doc_mask=True)


def random_model(seed: int = 0, **config) -> GPT:
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**LITTLE | config))
    gpt.init_weights()
    for p in gpt.parameters():  # all at work: none at 0
        torch.nn.init.normal_(p, std=0.15)
    return gpt


EXTRAS = "--extras key_offset value_embeds".split()
TUNE = [*EXTRAS, *"--doc_mask --lr_scale 0.1 --grad_clip 0.5 --eval_every 6".split()]


def here(folder, run_dir, *options):
    """train.py within this process."""
    train_here(folder, run_dir, *TUNE, *options)


@pytest.fixture(scope="session")
def base(chat_data, tmp_path_factory) -> Path:
    """A run on text with the conversations' tokenizer: what tuning begins with."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("the cat and the dog say: I say tree. " * 2000)
    options = ["--source", f"files:{folder}/text.txt", "--tokenizer", chat_data / "tokenizer.json"]
    prepare_tiny(folder / "data", *options)
    train_here(folder / "data", folder / "run", *EXTRAS)
    return folder


@pytest.fixture(scope="session")
def answering(chat_data, tmp_path_factory) -> Path:
    """A model that was trained on conversations until it answers."""
    run_dir = tmp_path_factory.mktemp("answering") / "run"
    more = "--steps 130 --eval_every 0 --lr_scale 1 --log_every 0 --dtype fp32"
    here(chat_data, run_dir, *more.split())
    return run_dir


def started(*words, **env) -> subprocess.Popen:
    """eval.py in a process of its own, with pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how = dict(cwd=ROOT, env=environment(**env), text=True)
    return subprocess.Popen(command("eval.py", words), **how, **pipes)
