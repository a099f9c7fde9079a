"""dN: a preset of every depth, by one rule."""

import re

import pytest
import torch
from conftest import ROOT

import config
import prepare_data
from config import UsageError, find_preset
from instruments.run import forecast
from machinery import cli, plan, trained
from model import GPT


@pytest.mark.parametrize("depth, tokens_per_step, steps", [(12, 2**19, 2206), (20, 2**20, 4358)])
def test_the_presets_of_the_table_are_points_of_the_rule(depth, tokens_per_step, steps):
    """Those that the README plans, as they stood before there was a rule."""
    preset = config.PRESETS[f"d{depth}"]
    assert preset == find_preset(f"d{depth}") == config.preset_of_depth(depth)
    shape = dict(n_layer=depth, n_embd=64 * depth, n_head=depth // 2, n_kv_head=depth // 2)
    shape |= dict(head_dim=128, mlp_hidden=256 * depth, vocab_size=32_768, seq_len=2048)
    assert {name: getattr(preset.model, name) for name in shape} == shape
    assert preset.train == config.TrainConfig(tokens_per_step=tokens_per_step)
    assert plan.make_plan(preset, forecast.parse_gpus("H100")).steps == steps


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 13, 16, 33, 99])
def test_every_depth_is_a_preset(depth):
    """Whole heads, also of an odd one; whole rows; enough data; and the batch that 10.5 tokens per
    weight ask for, counted in the model itself."""
    preset = find_preset(f"d{depth}")
    model, batch = preset.model, preset.train.tokens_per_step
    assert model.n_head * model.head_dim == model.n_embd == 128 * ((depth + 1) // 2)
    assert 0 <= model.n_embd - 64 * depth <= 64 and model.mlp_hidden == 4 * model.n_embd
    assert batch % model.seq_len == 0
    with torch.device("meta"):
        groups = GPT(model).param_groups()
    params = {kind: sum(p.numel() for p in ps) for kind, ps in groups.items()}
    weights = params["matrix"] + params["head"]
    exact = 2**19 * (weights / 110_100_480) ** 0.383
    assert 2**-0.51 < batch / exact < 2**0.51
    trained_on = plan.steps_for(preset.train, params) * batch
    assert trained_on <= cli.count(preset.data.tokens) <= 1.03 * trained_on


def test_the_table_of_the_readme_is_made_from_the_rule():
    """Every row of a depth: `dN | parameters | about | tokens | cost`."""
    rows = re.findall(r"^\| `(d\d+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"d12", "d20", "d24"} <= {name for name, _ in rows}
    for name, text in rows:
        parameters, about, tokens, _ = text.split(" | ")
        preset = cli.parse("train.py", "train", [name])
        with torch.device("meta"):
            size = sum(p.numel() for p in GPT(preset.model).parameters())
        decided = plan.make_plan(preset, forecast.parse_gpus("H100"))
        assert parameters == (f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.0f}M"), name
        assert tokens == f"{decided.steps * decided.tokens_per_step / 1e9:.1f}B", name
        assert about.startswith(f"depth {name[1:]}")


def test_all_programs_take_any_depth(monkeypatch):
    prepared = []
    monkeypatch.setattr(prepare_data, "prepare", prepared.append)
    assert prepare_data.main(["d16"]) == 0 and prepared[0].data_dir == "data/d16"
    assert (prepared[0].vocab_size, prepared[0].row_len) == (32_768, 2049)
    assert prepared[0].tokens == "2.52B"
    assert trained.find_model("d16") == dict(run_dir="runs/d16")  # eval.py and export.py
    with pytest.raises(UsageError, match=r"no checkpoint in runs/d17.*train.py d17"):
        trained.load_model(trained.EvalConfig(**trained.find_model("d17")), None)


@pytest.mark.parametrize("word", ["d0", "d100", "D12", "d012", "d-1", "d٣"])
def test_other_words_get_the_nearest_name(word):
    assert find_preset(word) is None
    with pytest.raises(UsageError, match=f"there is no preset {word!r};.*all other depths up to"):
        cli.parse("train.py", "train", [word])
    with pytest.raises(UsageError, match="did you mean tiny"):
        cli.parse("train.py", "train", ["tyni"])
