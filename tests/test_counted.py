"""A step is the sum over its targets that count, divided by their number: the same on any number
of ranks, in any micro-batches, with the same rows. So is a validation."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chat_helpers import random_model
from conftest import metrics, read_json
from faults import start
from test_faults import rows_read
from torch.testing import assert_close

import data

# A large learning rate would blow up differences in the last bit, of sums in another order.
CALM = "--lr_scale 0.1 --grad_clip 0.2".split()
FIGURES = {"norm", "loss", "bpb", "val_loss", "val_bpb", "full_val_loss", "full_val_bpb"}
ROWS = 8  # of a step of the small model


def assert_same(a, b, limit=1e-6):
    """Losses, bits per byte and validations, in relative terms; and gradient norms, which alone
    show a wrong factor on the gradients, as Muon and AdamW do not depend on it."""
    one = metrics(a)
    two = metrics(b)
    assert [r["step"] for r in one] == [r["step"] for r in two]
    assert max(r.get("norm", 0) for r in one) > 0.3  # there is something to clip
    for r, s in zip(one, two):
        assert r.keys() - s.keys() <= {"save_s"}, r["step"]  # a save ends sooner or later
        for key in FIGURES & r.keys():
            assert s[key] == pytest.approx(r[key], rel=limit * (20 if key == "norm" else 1)), key
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
    """Against torch's loss of the logits and targets that are left. Nor has the padding of the
    vocabulary, to a multiple of 64, a gradient."""
    gpt = random_model(seq_len=8, vocab_size=50, tie_embeddings=tied, logit_softcap=softcap)
    params = dict(gpt.named_parameters())
    gradients = lambda loss: torch.autograd.grad(loss, [*params.values()])
    ids = torch.randint(50, (3, 9))
    inputs = ids[:, :-1]
    targets = ids[:, 1:].clone()
    targets[0, :5] = targets[2] = data.IGNORED
    counts = targets >= 0
    nats = gpt(inputs, targets, reduction="none")
    assert torch.equal(nats != 0, counts)
    left = F.cross_entropy(gpt(inputs)[counts], targets[counts], reduction="sum")
    assert_close(nats.sum(), left)
    whole = gradients(gpt(inputs, targets) * 24)  # a mean over 24 places
    assert_close(whole, gradients(left), rtol=1e-4, atol=1e-5)
    head = dict(zip(params, whole))["embed.weight" if tied else "head.weight"]
    assert head[:50].any() and not head[50:].any() and len(head) == 64


# ranks, rows of a micro-batch, and how weights are shared; of 5 ranks the last has no row of the 8
RANKS = [(1, 3, "auto"), (2, 4, "ddp"), (3, 3, "fsdp"), (5, 2, "ddp")]
RANKS += [pytest.param(5, 2, "fsdp", marks=pytest.mark.slow)]


@pytest.mark.parametrize("world, rows, parallel", RANKS)
def test_any_ranks_take_the_same_steps(world, rows, parallel, alone, small_data, run_dir, tmp_path):
    """With clipping: losses, validations and norms, on the same rows, each read once.
    The data is copied by the first rank, while the others wait."""
    args = ["--parallel", parallel, "--stage", tmp_path / "disk"]
    if world == 1:  # of several ranks: its default
        args += ["--micro_batch", rows]
    text = start(small_data, run_dir, *CALM, *args, world=world, spoil=[("note_rows",)]).end(0)
    fill = -ROWS % (world * rows)
    assert (f"({fill} rows to fill the last do not count)" in text) == (fill > 0)
    assert_same(alone[0], run_dir)
    assert rows_read(text) == alone[1]
    assert len(list(tmp_path.glob("disk/*/manifest.json"))) == 1
    record = read_json(run_dir / "checkpoints/step_00000012/trainer.json")
    assert record["data_dir"] == str(small_data)  # not the copy, which may go


def test_all_ranks_plan_for_the_one_with_least_memory(small_data, run_dir):
    """The second of two machines has no room for a whole model: both shard it."""
    poor = [("little_memory", 1, 1_000_000)]
    text = start(small_data, run_dir, world=2, spoil=poor).end(0)
    assert re.search(r"memory +fsdp: state needs 0.00 GB, .* a rank has 0.0 GB", text)
    written = run_dir.glob("checkpoints/step_00000012/**/*.safetensors")
    assert len(list(written)) == 2  # each rank wrote its part
