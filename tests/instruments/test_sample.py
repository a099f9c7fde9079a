"""eval.py sample: seeded text after prompts of the command line or of the preset; a tuned model is
asked."""

import re

import pytest
import torch

import eval as evaluate
from config import PRESETS, GPTConfig, Preset
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
    assert "--- 'def'\ndef" in first and "--- 'import'\nimport" in first


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


def test_a_text_ends_where_its_own_row_stopped():
    """Rows of a batch go on until all have stopped; what they draw meanwhile is not theirs."""

    class Tokens:
        bos_id = 256
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))

    class Model:
        cos = torch.zeros(1)

        def generate(self, idx, *_):
            assert idx.tolist() == [[256, *b">"]] * 2
            return torch.cat([idx, torch.tensor([[97, 98, 256], [99, 256, 97]])], dim=1)

    config = sample.SampleConfig(n=2)
    assert sample.continuations(Model(), Tokens, ">", False, config) == ([">ab", ">c"], 3)


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
    size = next(n for n in range(1, 41) if probs[order[:n]].sum() >= 0.6)
    nucleus, held = set(order[:size]), float(probs[order[:size]].sum())
    draw = lambda **more: model.generate(idx, 1, 1.0, 0, torch.Generator().manual_seed(0), **more)
    assert set(draw(top_p=0.6)[:, 1].tolist()) == nucleus
    assert set(draw()[:, 1].tolist()) > nucleus
    share = (draw(top_p=0.6)[:, 1] == order[0]).float().mean()
    assert share == pytest.approx(float(probs[order[0]]) / held, abs=0.03)


def test_prompts_of_the_preset_or_of_the_command_line(trained_run, capsys):
    assert sample.find_prompts((), "tiny", None) == PRESETS["tiny"].prompts
    assert sample.find_prompts((), "mine", None) == Preset.prompts
    assert sample.find_prompts(("a", "-"), "tiny", None) == ("a", "-")
    out = look(capsys, trained_run, *CPU, "--max_new_tokens", 4, "--data_dir", "none")
    assert re.findall("^--- '(.*)'", out, re.MULTILINE) == [*Preset.prompts]
