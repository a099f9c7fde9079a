"""dN: a preset of every depth, by one rule."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, SMALL
from faults import start

import config
import optim
import prepare_data
import train
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


def test_the_batch_grows_as_nanochats():
    """2^18 at depth 8, 2^19 from 10 to 16, 2^20 from 18 to 26."""
    found = {n: find_preset(f"d{n}").train.tokens_per_step for n in range(8, 27, 2)}
    assert found == {8: 2**18} | dict.fromkeys((10, 12, 14, 16), 2**19) | dict.fromkeys(
        (18, 20, 22, 24, 26), 2**20
    )


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


@pytest.mark.parametrize("depth", [4, 8, 12, 16, 24, 32])
def test_the_rates_follow_from_batch_and_width(depth):
    """By the factors of optim.py: for the preset's own batch, and for another."""
    preset = find_preset(f"d{depth}")
    groups = {kind: [torch.nn.Parameter(torch.ones(4, 4))] for kind in ("matrix", "embedding")}
    groups |= {kind: [torch.nn.Parameter(torch.ones(4, 4))] for kind in ("head", "scalar")}
    for batch in (preset.train.tokens_per_step, 65_536):
        given = replace(preset.train, tokens_per_step=batch)
        built = optim.build(groups, given, preset.model.n_embd)
        muon, embedding, head, _ = (g["base_lr"] for o in built for g in o.param_groups)
        by_batch = 2 / (1 + 3 * 2**19 / batch) ** 0.5  # 1 at 2^19, sqrt(8/5) at 2^20
        by_width = by_batch * (64 * depth / 768) ** -0.5
        assert [muon, embedding, head] == pytest.approx(
            [0.02 * by_batch, 0.3 * by_width, 0.008 * by_width]
        )


def test_the_plan_prints_the_factor_of_the_batch(capsys):
    for word, options, factor in (("d8", (), 0.756), ("d16", ("--tokens_per_step", "65536"), 0.4)):
        assert train.main([word, "--plan", "--device", "cpu", *options]) == 0
        assert f"learning rates x {factor:.3f} for this batch" in capsys.readouterr().out


def row_of(name: str) -> dict[str, str]:
    """What the README's table says of a preset: parameters, tokens, and one H100."""
    preset = cli.parse("train.py", "train", [name])
    with torch.device("meta"):
        size = sum(p.numel() for p in GPT(preset.model).parameters())
    decided = plan.make_plan(preset, forecast.parse_gpus("H100"))
    tokens = decided.steps * decided.tokens_per_step
    hours = float(
        re.search(r"time .*: ([\d,.]+) hours", forecast.page(preset, forecast.parse_gpus("H100")))[
            1
        ]
    )
    return dict(
        parameters=f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.0f}M",
        tokens=f"{tokens / 1e9:.1f}B",
        cost=f"{hours:.2f} hours" if hours < 1 else f"{hours:.0f} hours",
        dollars=f"${3 * hours:.0f}",
    )


def test_the_table_of_the_readme_is_made_from_the_rule():
    """Every row of a depth: `dN | parameters | ... | tokens | hours, dollars |`."""
    rows = re.findall(r"^\| `(d\d+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"d12", "d20", "d24"} <= {name for name, _ in rows}
    for name, text in rows:
        parameters, about, tokens, cost = text.split(" | ")
        made = row_of(name)
        assert about.startswith(f"depth {name[1:]}")
        found = dict(parameters=parameters, tokens=tokens)
        assert found | dict(zip(("cost", "dollars"), cost.split(", "))) == made, name


def test_all_programs_take_any_depth(monkeypatch):
    prepared = []
    monkeypatch.setattr(prepare_data, "prepare", prepared.append)
    assert prepare_data.main(["d16"]) == 0 and prepared[0].data_dir == "data/d16"
    assert (prepared[0].vocab_size, prepared[0].row_len) == (32_768, 2049)
    assert prepared[0].tokens == "2.52B"
    assert trained.find_model("d16") == dict(run_dir="runs/d16")  # eval.py and export.py
    with pytest.raises(UsageError, match=r"no checkpoint in runs/d17.*: torchrun train.py d17"):
        trained.load_model(trained.EvalConfig(**trained.find_model("d17")), None)


@pytest.mark.slow
def test_a_small_depth_trains_on_data_of_its_own(small_data, tmp_path):
    """The data decides vocabulary and rows, as of any preset."""
    options = ["--steps", "2", "--tokens_per_step", "512", "--eval_tokens", "512"]
    folders = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--peak_tflops", "0.1"]
    plain = [word for word in SMALL if word in ("--no_compile", "--device", "cpu", "fp32")]
    argv = ["d3", *options, *folders, *plain[:-1], "--dtype", "fp32"]
    text = start(small_data, tmp_path / "run", argv=argv).end(0)
    assert "3 layers x 256, vocabulary 512" in text and "done: 2 steps" in text


@pytest.mark.parametrize("word", ["d0", "d100", "d1x", "D12", "d012", "d-1", "d٣", "d12 ", "d"])
def test_other_words_get_the_nearest_name(word):
    assert find_preset(word) is None
    with pytest.raises(UsageError, match=f"there is no preset {word!r};.*all other depths up to"):
        cli.parse("train.py", "train", [word])
    with pytest.raises(UsageError, match="did you mean tiny"):
        cli.parse("train.py", "train", ["tyni"])
