"""bits_per_byte.reads_future finds a model that reads what it is to predict, and no other."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, logged, look, train_here
from test_model import SMALL, VARIANTS, build

import model as model_file
from bits_per_byte import reads_future
from instruments.pages import report

attend = model_file.attend
cross_entropy = model_file.cross_entropy
kept = {}  # of earlier calls


def from_the_call_before(x, cache, layer):
    first = kept.get(layer, x[:, :1])
    kept[layer] = x[:, -1:]
    return torch.cat([first, x[:, :-1]], dim=1)


def at_one_position(q, k, v, mask):
    """As at the end of a chunk: one query sees one key too many."""
    allowed = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
    allowed[2, 3] = True
    return attend(q, k, v, allowed)


LEAKS = {  # the part of model.py that is replaced, and by what
    "values shifted": ("attend", lambda q, k, v, mask: attend(q, k, v.roll(-1, 2), mask)),
    "a norm over time": ("rms_norm", lambda x: F.rms_norm(x, x.shape[1:], eps=1e-6)),
    "one position": ("attend", at_one_position),
    "another loss than the logits'": ("cross_entropy", lambda *args: 0.9 * cross_entropy(*args)),
    "a cache that is not cleared": ("previous", from_the_call_before),
}
HONEST = VARIANTS | {
    "BOS at the end": replace(SMALL, bos_id=99, doc_mask=True, nope_every=2, n_kv_head=1),
    "rows of one token": replace(SMALL, seq_len=1),
    "few tokens": replace(SMALL, vocab_size=7, seq_len=80),
}


def tried(model):
    """What `reads_future` returns, and all that it says."""
    said = []
    state = torch.get_rng_state()
    kept.clear()
    moved = reads_future(model.eval(), said.append)
    assert torch.equal(torch.get_rng_state(), state)
    return moved, said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found(name, dtype, monkeypatch):
    monkeypatch.setattr(model_file, *LEAKS[name])
    for config in (VARIANTS["extras"], VARIANTS["doc_mask"]):
        for seq_len in (32, 96):
            model = build(replace(config, seq_len=seq_len))
            model.compute_dtype = dtype
            moved, (said,) = tried(model)
            assert moved > 1e-5 and f"by {moved:.2g} nats when later" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_does_not_move_at_all(name, dtype):
    model = build(HONEST[name])
    model.compute_dtype = dtype
    assert tried(model) == (0.0, [])
    model.recompute = True
    assert tried(torch.compile(model, backend="eager")) == (0.0, [])


def test_a_model_that_does_not_run_is_told(monkeypatch):
    monkeypatch.setattr(model_file, "attend", None)
    moved, (said,) = tried(build(SMALL))
    assert moved is None and "is not known: " in said


def test_a_run_that_reads_the_future_is_told_by_all_who_read_it(
    trained_run, own_run, small_data, tmp_path, monkeypatch, capsys
):
    words = "reads the future"
    run_dir = tmp_path / "leaky"
    monkeypatch.setattr(model_file, *LEAKS["values shifted"])
    assert train_here(small_data, run_dir) == 0 and words in capsys.readouterr().out
    assert words in look(capsys, "loss", own_run, *CPU)
    monkeypatch.undo()
    text = look(capsys, "compare", trained_run, run_dir)
    assert f"{run_dir} {words}" in text and "how many times less" not in text
    assert words in report.write(run_dir).read_text()
    (moved,) = logged(run_dir, "reads_future")
    assert moved > 1e-3 and logged(trained_run, "reads_future") == [0.0]
    assert words not in look(capsys, "loss", own_run, *CPU)
