"""A step is the sum over its targets that count, divided by their number: the same on any number
of ranks, in any micro-batches, with the same rows. So is a validation."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chat_helpers import random_model
from conftest import metrics, parameters, read_json
from faults import start
from test_faults import rows_read

import data

# A large learning rate would blow up differences in the last bit, of sums in another order.
CALM = "--lr_scale 0.1 --grad_clip 0.2".split()
FIGURES = {"loss", "bpb", "val_loss", "val_bpb", "full_val_loss", "full_val_bpb"}
ROWS = 8  # of a step of the small model


def assert_same(a, b, limit=1e-6):
    """Losses, bits per byte and validations, in relative terms; and gradient norms, which alone
    show a wrong factor on the gradients, as Muon and AdamW do not depend on it."""
    one = metrics(a)
    two = metrics(b)
    assert [r["step"] for r in one] == [r["step"] for r in two]
    assert max(r["norm"] for r in one if "norm" in r) > 0.3  # there is something to clip
    for r, s in zip(one, two):
        assert r.keys() - s.keys() <= {"save_s"}, r["step"]  # a save ends sooner or later
        for key in FIGURES & r.keys():
            assert s[key] == pytest.approx(r[key], rel=limit), (r["step"], key)
        if "norm" in r:
            assert s["norm"] == pytest.approx(r["norm"], rel=20 * limit), r["step"]
        assert r.get("val_rows") == s.get("val_rows") and r["tokens"] == s["tokens"]


@pytest.fixture(scope="module")
def alone(small_data, once):
    """The run of one process, in micro-batches of all 8 rows; and the rows that it read."""

    def make(folder: Path):
        run = start(small_data, folder / "run", *CALM, spoil=[("note_rows",)])
        (folder / "printed").write_text(run.end(0))

    folder = once("alone", make)
    return folder / "run", rows_read((folder / "printed").read_text())


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("tied", [False, True])
def test_an_ignored_target_has_neither_loss_nor_gradient(tied, softcap):
    """Against the same model on the rows and targets that are left, which knows of no mark. Nor has
    the padding of the vocabulary a gradient."""
    gpt = random_model(seq_len=8, vocab_size=50, tie_embeddings=tied, logit_softcap=softcap)
    ids = torch.randint(50, (3, 9))
    inputs = ids[:, :-1].clone()
    targets = ids[:, 1:].clone()
    targets[0, :5] = targets[2] = data.IGNORED
    nats = gpt(inputs, targets, reduction="none")
    assert torch.equal(nats == 0, targets < 0)
    params = list(gpt.parameters())
    whole = torch.autograd.grad(gpt(inputs, targets) * 24, params)  # a mean over 24 places
    logits = gpt(inputs[:2])  # (2, 8, V)
    counts = targets[:2] >= 0
    nats = F.cross_entropy(logits[counts], targets[:2][counts], reduction="sum")
    alone = torch.autograd.grad(nats, params)
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5)
    assert sum(float(g.abs().sum()) for g in whole) > 1
    head = dict(zip([name for name, _ in gpt.named_parameters()], whole))
    assert not head["embed.weight" if tied else "head.weight"][50:].any()


# ranks, rows of a micro-batch, and how weights are shared; of 5 ranks the last has no row of the 8
RANKS = [(1, 3, "auto"), (1, 5, "auto"), (2, 4, "ddp"), (3, 3, "fsdp"), (5, 2, "ddp")]
MORE = [(2, 4, "fsdp"), (3, 3, "ddp"), (5, 2, "fsdp")]
RANKS += [pytest.param(*how, marks=pytest.mark.slow) for how in MORE]


@pytest.mark.parametrize("world, rows, parallel", RANKS)
def test_any_ranks_take_the_same_steps(world, rows, parallel, alone, small_data, run_dir, tmp_path):
    """With clipping: losses, validations and norms, on the same rows, each read once; and weights.
    The data is copied by the first rank, while the others wait."""
    args = ("--parallel", parallel, "--stage", tmp_path / "disk")
    args = (*CALM, *args, *["--micro_batch", rows] * (world == 1))  # of several ranks: its default
    text = start(small_data, run_dir, *args, world=world, spoil=[("note_rows",)]).end(0)
    fill = -ROWS % (world * rows)
    assert (f"({fill} rows to fill the last do not count)" in text) == (fill > 0)
    assert_same(alone[0], run_dir)
    assert rows_read(text) == alone[1]
    assert len(list(tmp_path.glob("disk/*/manifest.json"))) == 1
    record = read_json(run_dir / "checkpoints/step_00000012/trainer.json")
    assert record["data_dir"] == str(small_data)  # not the copy, which may go
    one = parameters(alone[0], 12)
    two = parameters(run_dir, 12)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Whole tensors: AdamW moves a weight by as much when its gradient is nothing but rounding,
        # so single weights of an embedding may be far apart.
        apart = (tensor.double() - two[name].double()).norm()
        assert apart <= 5e-4 * tensor.double().norm(), (name, apart)


def test_all_ranks_plan_for_the_one_with_least_memory(small_data, run_dir, tmp_path):
    """The second of two machines has no room for a whole model: both shard it."""
    poor = [("little_memory", 1, 1_000_000)]
    text = start(small_data, run_dir, world=2, spoil=poor).end(0)
    assert re.search(r"memory +fsdp: state needs 0.00 GB, .* a rank has 0.0 GB", text)
    written = [*(tmp_path / "run/checkpoints/step_00000012").rglob("*.safetensors")]
    assert len(written) == 2  # each rank wrote its part
