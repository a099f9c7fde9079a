"""eval.py sample: seeded text, printed once and whole; prompts of the command line, of standard
input, of the preset."""

import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, command, environment

import eval as evaluate
from config import PRESETS, GPTConfig, Preset, UsageError
from instruments.talk import sample
from model import GPT

pytest_plugins = ["chat_helpers"]
CPU = ("--device", "cpu", "--dtype", "fp32")


def look(capsys, *args) -> str:
    """eval.py sample in this process: what it prints."""
    capsys.readouterr()
    assert evaluate.main(["sample", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_samples_are_seeded_text(trained_run, capsys):
    args = (trained_run, *CPU, "--prompt", "def ", "import", "--max_new_tokens", 20)
    torch.backends.cuda.enable_cudnn_sdp(True)
    first = look(capsys, *args)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # on a GPU, a new plan for each token
    assert first == look(capsys, *args) != look(capsys, *args, "--seed", 1)
    assert "--- 'def '\ndef" in first and "--- 'import'\nimport" in first


def test_several_samples_of_a_prompt_differ(trained_run, capsys):
    args = (trained_run, *CPU, "--prompt", "x = ", "--max_new_tokens", 20)
    out = look(capsys, *args, "--n", 3).partition("---")[2]
    samples = re.findall(r"^x =.*", out, re.MULTILINE)
    assert len(samples) == 3 and len(set(samples)) > 1
    greedy = look(capsys, *args, "--n", 2, "--temperature", 0).partition("'\n")[2]
    assert greedy[: len(greedy) // 2] == greedy[len(greedy) // 2 :]
    nucleus = look(capsys, *args, "--n", 2, "--top_p", 1e-6).partition("'\n")[2]
    assert nucleus == greedy  # the likeliest token alone holds that much
    alone = look(capsys, *args, "--temperature", 0).partition("'\n")[2]
    assert 2 * alone == greedy


def test_a_tuned_model_is_asked(answering, base, capsys):
    out = look(capsys, answering, *CPU, "--prompt", "Say dog dog", "--temperature", 0)
    assert "Say dog dog\nI say dog dog.\n" in out
    assert "question" not in look(capsys, base / "run", *CPU, "--prompt", "the cat", "--n", 2)


def test_a_stream_prints_each_character_once_and_whole(capsys):
    """A character of several bytes comes when its last byte does."""
    text = "\u00e9\u65e5\U0001f389 fin\ufffd."
    ids = list(text.encode())
    tokenizer = SimpleNamespace(
        bos_id=256,
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        _text=[bytes([i]) for i in range(256)],
    )

    class Model:
        cos = torch.zeros(1)

        def stream(self, idx, *_):
            for i in [*ids, 256]:
                heard.append(capsys.readouterr().out)
                yield torch.tensor([[i]])

    heard = []
    sample.continue_prompt(Model(), tokenizer, ">", sample.SampleConfig())
    heard.append(capsys.readouterr().out)
    assert "".join(heard) == f">{text}\n\n"
    assert heard[:4] == [">", "", "\u00e9", ""]


def test_top_p_keeps_the_tokens_that_hold_it():
    torch.manual_seed(0)
    shape = dict(n_layer=1, n_head=1, n_kv_head=1, head_dim=8, n_embd=16, mlp_hidden=8)
    config = GPTConfig(seq_len=8, vocab_size=40, **shape)
    model = GPT(config)
    model.init_weights()
    torch.nn.init.normal_(model.head.weight)
    idx = torch.zeros(4000, 1, dtype=torch.long)
    probs = model(idx[:1])[0, -1].softmax(-1).detach()
    order = probs.argsort(descending=True).tolist()
    nucleus, held = set(), 0.0
    while held < 0.6:
        held += float(probs[order[len(nucleus)]])
        nucleus.add(order[len(nucleus)])
    draw = lambda **more: model.generate(idx, 1, 1.0, 0, torch.Generator().manual_seed(0), **more)
    assert set(draw(top_p=0.6)[:, 1].tolist()) == nucleus
    assert set(draw()[:, 1].tolist()) > nucleus
    share = (draw(top_p=0.6)[:, 1] == order[0]).float().mean()
    assert share == pytest.approx(float(probs[order[0]]) / held, abs=0.03)


def test_prompts_of_the_preset_or_of_standard_input(monkeypatch):
    assert sample.find_prompts((), "tiny") == PRESETS["tiny"].prompts
    assert sample.find_prompts((), "mine") == Preset.prompts
    assert sample.find_prompts(("a", "-"), "tiny") == ("a", "-")
    text = io.TextIOWrapper(io.BytesIO(b"def f\n\nimport\r\ncaf\xe9\n"))  # the last: Latin-1
    monkeypatch.setattr(sys, "stdin", text)
    assert sample.find_prompts(("-",), "tiny") == ("def f", "import", "caf\ufffd")
    for empty in (io.TextIOWrapper(io.BytesIO(b"\n")), None):
        monkeypatch.setattr(sys, "stdin", empty)
        with pytest.raises(UsageError):
            sample.find_prompts(("-",), "tiny")


def test_an_open_pipe_is_not_waited_for(trained_run):
    """Nobody writes to it, and nobody closes it; `--prompt -` reads the same pipe to its end."""
    reads, writes = os.pipe()
    words = ("sample", trained_run, *CPU, "--max_new_tokens", 4)
    options = dict(capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300)
    done = subprocess.run(command("eval.py", words), stdin=reads, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n--- ") == len(Preset.prompts)
    os.write(writes, b"def f\n")
    os.close(writes)
    done = subprocess.run(command("eval.py", [*words, "--prompt", "-"]), stdin=reads, **options)
    os.close(reads)
    assert re.findall(r"^--- (.*)", done.stdout, re.MULTILINE) == ["'def f'"], done.stderr
    assert len(re.findall(r"^4 tokens in .* tokens/s", done.stderr, re.MULTILINE)) == 1
