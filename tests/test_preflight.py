"""machinery/build.py, folders.py, plan.py, ranks.py: what train.py says before the first step or
soon after.

Damaged data, missing ranks, full disks, compilers and GPUs that do not work, too little memory, a
wandb that hangs (see faults.py)."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, environment, flip, losses, metrics, run
from faults import start
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

import config
import flops
import optim
import train
from config import GPTConfig
from data import RowLoader
from machinery import build, checkpoint, disk, plan, ranks, shards
from machinery.errors import NonFiniteError
from model import GPT


@pytest.fixture
def data(small_data, tmp_path) -> Path:
    """A copy of the data, to be damaged."""
    return shutil.copytree(small_data, tmp_path / "data")


@pytest.fixture(scope="module")
def plain(small_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    start(small_data, run_dir).end(0)
    return run_dir


def shard(data: Path) -> Path:
    return max(data.glob("train/*/*.npy"), key=lambda p: p.stat().st_size)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit_manifest(data: Path, change) -> None:
    """As a preparation with other options would have written it: its fingerprint fits."""
    path = data / "manifest.json"
    tree = json.loads(path.read_text())
    change(tree)
    tree["fingerprint"] = shards.fingerprint(tree)
    path.write_text(json.dumps(tree))


# ------------------------------------------------------------------------------------ the data


@pytest.mark.parametrize("world, position", [(1, 0), (1, 20), (2, 37)])
def test_a_flipped_byte_is_found_before_its_row_is_trained_on(world, position, data, tmp_path):
    """One bit of the row at that position of the run, which its 8 rows a step reach in time."""
    manifest = shards.Manifest.load(data)
    loader = RowLoader(manifest, seed=0, micro_batch=1)
    name = loader.row_ids(position, 1)[0]
    loader.close()
    file, row = name.split(" row ")
    flip(data / file, 128 + int(row) * 2 * manifest.row_len + 70)
    text = start(data, tmp_path / "run", world=world).end()
    assert f"{file} is damaged: row {row} does not match its crc32" in text
    assert world > 1 or "Traceback" not in text  # the other rank loses its partner
    assert "prepare_data.py" in text
    assert all(step <= position // 8 for step in losses(tmp_path / "run"))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" and (world > 1 or status["exit_code"] == 3)


def cut(path):
    os.truncate(path, path.stat().st_size - 100)


def other_dtype(path):
    path.write_bytes(path.read_bytes().replace(b"'<u2'", b"'<i2'", 1))


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, r"has [\d,]+ bytes, not [\d,]+;"),
        (Path.unlink, "is missing"),
        (other_dtype, r"has the header .*<i2.*, not .*<u2"),
    ],
)
def test_a_shard_that_is_cut_missing_or_of_another_type(damage, words, data, tmp_path):
    damaged = shard(data)
    damage(damaged)
    text = start(data, tmp_path / "run").end(3)
    assert re.search(f"error: {re.escape(str(damaged))} .*{words}", text), text
    assert "Traceback" not in text and not (tmp_path / "run").exists()


def test_a_token_beyond_the_vocabulary(data, tmp_path):
    def change(tree):
        shards = next(iter(tree["splits"]["train"].values()))["shards"]
        shards[0]["max"] = 512

    edit_manifest(data, change)
    text = start(data, tmp_path / "run").end(3)
    assert "has token 512, the vocabulary ends at 511" in text


def test_a_killed_export_is_not_in_the_way(small_data, tmp_path):
    left = tmp_path / "run" / ".tmp-export_00000004-00c0ffee"
    left.mkdir(parents=True)
    start(small_data, tmp_path / "run").end(0)
    assert left.exists()  # it could be of an export in progress; the next one to that place ends it
    (tmp_path / "run" / ".tmp-export_00000004-2-0123abcd").mkdir()  # of export_00000004-2
    with disk.creating(tmp_path / "run" / "export_00000004"):
        assert not left.exists()


# ------------------------------------------------------------------------ what does not work here


@pytest.mark.parametrize("where", ["at once", "when called"])
def test_a_compiler_that_fails_falls_back_to_eager_and_says_so(where, plain, small_data, tmp_path):
    args = ["--compile"]
    text = start(small_data, tmp_path / "a", *args, spoil=[("no_compiler", where)]).end(0)
    assert "torch.compile does not work here, so eager it is: RuntimeError: no C++ comp" in text
    assert losses(tmp_path / "a") == losses(plain)
    if where == "when called":  # on one rank alone: all follow it
        spoil = [("no_compiler", where, 1), ("fake_compiler", 0)]
        text = start(small_data, tmp_path / "b", *args, world=2, spoil=spoil).end(0)
        assert "so eager it is: RuntimeError: no C++" in text and "compiled 1 time\n" in text


# ------------------------------------------------------------------------ too little memory


@pytest.mark.parametrize("world", [1, 2])
def test_the_micro_batch_is_halved_until_it_fits(world, plain, small_data, tmp_path):
    """8 rows per step: 8 and 4 at a time are too many for one rank, 4 for one of two."""
    run_dir = tmp_path / "run"
    spoil = [("memory_for", 3, 0, world - 1)]
    text = start(small_data, run_dir, "--save_every", 4, world=world, spoil=spoil).end(0)
    halved = [int(n) for n in re.findall("micro-batch reduced to (\\d+)", text)]
    assert halved == ([4, 2] if world == 1 else [2])
    trainer = checkpoint.read_trainer(run_dir / "checkpoints" / "step_00000012")
    assert trainer["micro_batch"] == 2 and trainer["tokens"] == 12 * 512
    one, two = losses(run_dir), losses(plain)
    assert max(abs(one[s] - two[s]) for s in two) < 1e-3
    # resumed, also where there is room for more, it sums as before: the same bits
    for path in (run_dir / "checkpoints").glob("step_00000012"):
        shutil.rmtree(path)
    (run_dir / "status.json").unlink()
    start(small_data, run_dir, world=world).end(0)
    assert losses(run_dir) == one


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot put FSDP right again"
)
def test_the_micro_batch_is_halved_in_the_middle_of_a_sharded_backward(plain, small_data, tmp_path):
    """Later blocks have exchanged their gradients by then, the first is still whole."""
    run_dir, spoil = tmp_path / "run", [("memory_for_backward", 2), ("validation_in_the_trial",)]
    options = ("--parallel", "fsdp", "--lr_scale", 0.1)
    text = start(small_data, run_dir, *options, world=2, spoil=spoil).end(0)
    assert "micro-batch reduced to 2" in text
    start(small_data, tmp_path / "one", "--lr_scale", 0.1).end(0)
    one, two = losses(tmp_path / "one"), losses(run_dir)
    assert max(abs(one[s] - two[s]) for s in one) < 1e-4
    one, two = (first_norm(tmp_path / name) for name in ("one", "run"))
    assert one == pytest.approx(two, rel=1e-4)  # no gradient of the trial is left in it


def first_norm(run_dir) -> float:
    return next(r["norm"] for r in metrics(run_dir) if "norm" in r)


def test_not_even_one_row_fits(small_data, tmp_path):
    text = start(small_data, tmp_path / "run", spoil=[("memory_for", 0)]).end(2)
    assert "out of memory with 1 rows of 64 tokens; try" in text and "smaller preset" in text
    args = ["--micro_batch", 4]  # asked for: nobody halves it
    text = start(small_data, tmp_path / "run", *args, spoil=[("memory_for", 3)]).end(2)
    assert "out of memory with 4 rows of 64 tokens; try --micro_batch 2" in text


def test_out_of_memory_in_the_middle_names_the_command_that_goes_on(plain, small_data, tmp_path):
    run_dir = tmp_path / "run"
    spoil = [("memory_for", 4, 6)]
    text = start(small_data, run_dir, "--save_every", 3, spoil=spoil).end(2)
    found = re.search("error: out of memory at step 6 .*: (python train.py tiny .*)", text)
    assert found, text
    assert found[1].endswith("--micro_batch 4") and "Traceback" not in text
    status = json.loads((run_dir / "status.json").read_text())
    assert found[0] == f"error: {status['error']}" and status["exit_code"] == 2
    text = start(small_data, *_run_dir_and_rest(found[1]), spoil=spoil).end(0)
    assert "resumed at step 6 " in text
    one, two = losses(run_dir), losses(plain)
    assert max(abs(one[s] - two[s]) for s in two) < 1e-3
    spoil = [("memory_for", 2, 6, 1)]  # on one of two ranks
    text = start(small_data, tmp_path / "two", world=2, spoil=spoil).end()
    assert "resume with: torchrun --nproc_per_node=2 train.py tiny" in text
    assert "--micro_batch 2" in text


def _run_dir_and_rest(command: str) -> list[str]:
    words = command.split()[3:]
    at = words.index("--run_dir")
    return [words[at + 1], *words]


def small_preset(**train) -> config.Preset:
    """What SMALL trains, on 8 rows a step."""
    sizes = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64)
    tiny = config.PRESETS["tiny"]
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, seq_len=64, vocab_size=512, **sizes),
        train=dataclasses.replace(
            tiny.train, **(dict(steps=12, tokens_per_step=512, decay=0.65) | train)
        ),
    )


def small_world(kind: str = "cpu", ranks_: int = 1, **more) -> ranks.World:
    given = dict(device=torch.device(kind), dtype=torch.float32, memory_bytes=80 * 10**9) | more
    return ranks.World(rank=0, world_size=ranks_, local_rank=0, local_world_size=ranks_, **given)


@pytest.fixture
def trials(monkeypatch):
    """find_what_runs on a GPU that is not there, where four rows fit and no more: the micro-batches
    that were tried, and the share of the memory that each trial had."""
    limits, tried = [], []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)

    def try_step(model, plan, world, validate):
        assert validate  # on a GPU it is compiled as well
        tried.append((plan.micro_batch, limits[-1:]))
        return model, build.OUT_OF_MEMORY if plan.micro_batch > 4 else None

    monkeypatch.setattr(build, "try_step", try_step)
    return tried, limits


def test_on_a_gpu_the_trial_has_less_memory_than_the_run(trials):
    """Unless the micro-batch was asked for: then it may fill the card."""
    (tried, limits), world = trials, small_world("cuda")
    log = SimpleNamespace(print=lambda text: None)
    decided = plan.make_plan(small_preset(), small_world())
    assert decided.micro_batch == 8 and decided.auto_micro_batch
    found = build.find_what_runs("model", decided, world, log)
    assert found == ("model", dataclasses.replace(decided, micro_batch=4))
    assert tried == [(8, [0.92]), (4, [0.92])] and limits == [0.92, 1.0]
    asked = dataclasses.replace(decided, micro_batch=4, auto_micro_batch=False)
    tried.clear()
    assert build.find_what_runs("model", asked, world, log) == ("model", asked)
    assert tried == [(4, [1.0])]
    asked = dataclasses.replace(asked, micro_batch=8)
    gpt = SimpleNamespace(reset_iter_state=lambda: None, config=SimpleNamespace(seq_len=64))
    with pytest.raises(config.UsageError, match="with 8 rows of 64 tokens; try --micro_batch 4 or"):
        build.find_what_runs(gpt, asked, world, log)


def test_a_sharded_model_tries_again_only_if_all_ranks_failed(trials, monkeypatch):
    """Another rank that had memory enough waits for exchanges of this one."""
    world, log = small_world("cuda"), SimpleNamespace(print=lambda text: None)
    decided = plan.make_plan(small_preset(), small_world())
    decided, reset = dataclasses.replace(decided, parallel="fsdp"), []
    gpt = SimpleNamespace(reset_iter_state=lambda: reset.append(1))
    gpt.config = SimpleNamespace(seq_len=64)
    found = build.find_what_runs(gpt, decided, world, log)
    assert found == (gpt, dataclasses.replace(decided, micro_batch=4)) and reset == [1]
    honest = ranks.any_rank
    monkeypatch.setattr(ranks, "any_rank", lambda x: True if isinstance(x, bool) else honest(x))
    with pytest.raises(config.UsageError, match="out of memory with 8 rows .* try --micro_batch 4"):
        build.find_what_runs(gpt, decided, world, log)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_a_gpu_the_optimizers_and_the_validation_are_compiled_too(on_gpu, monkeypatch):
    """But only if the model's compiler works. Then they take a step that moves nothing."""
    done = []
    monkeypatch.setattr(optim, "compile_steps", lambda optimizers: done.append(optimizers))
    step = lambda optimizers, found_inf: done.append((optimizers, found_inf.item()))
    monkeypatch.setattr(optim, "step", step)
    monkeypatch.setattr(build, "find_what_runs", lambda model, plan, *_: ("fast", plan))
    on_cpu = mock.Mock(wraps=torch, ones=lambda size, device: torch.full(size, 1.0))
    monkeypatch.setattr(build, "torch", on_cpu)
    decided = plan.make_plan(small_preset(), small_world())
    for compile in (True, False):
        chosen = dataclasses.replace(decided, compile=compile)
        world = small_world("cuda" if on_gpu else "cpu")
        step_model, val_model, found = build.compile_step("model", ["muon"], chosen, world, None)
        assert (step_model, found) == ("fast", chosen)
        assert val_model == ("fast" if on_gpu else "model")
    stepped = (["muon"], 1.0)
    assert done == [["muon"]] * on_gpu + [stepped, stepped]


def kept_for_backward(model: GPT, tokens: torch.Tensor) -> float:
    """Bytes per token that the graph, partitioned as the compiler does it, keeps for backward."""
    step = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step(tokens, tokens)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(n for at, n in kept.items() if at not in weights) / tokens.numel()


@pytest.mark.parametrize("extras", [(), ("value_embeds",)])
def test_the_plan_knows_what_forward_keeps_for_backward(extras):
    """With queries and keys normed, or grouped. The logits are few here."""
    config = GPTConfig(
        n_layer=2,
        n_embd=128,
        n_head=4,
        n_kv_head=4 if extras else 2,
        head_dim=32,
        mlp="swiglu",
        mlp_hidden=256,
        vocab_size=64,
        seq_len=256,
        qk_norm=bool(extras),
        extras=extras,
    )
    model = GPT(config, compute_dtype=torch.bfloat16)
    model.init_weights()
    kept = kept_for_backward(model, torch.randint(64, (16, 256)))
    assert flops.activation_bytes(config) == pytest.approx(kept, rel=0.1)


CUDNN = SDPBackend.CUDNN_ATTENTION.value


@pytest.mark.parametrize(
    "version, seq_len, doc_mask, asks, remarks",
    [
        (91002, 2048, False, True, True),
        (91002, 2000, False, False, True),
        (91002, 2048, True, False, True),
        (91501, 2048, False, False, False),  # torch prefers it by itself
    ],
)
def test_an_old_cudnn_is_asked_by_name_where_it_is_right(
    version, seq_len, doc_mask, asks, remarks, monkeypatch
):
    """And only as long as the run lasts; with a mask, where its backward can give NaN, never."""
    before, usual = torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    model, on_gpu = GPTConfig(seq_len=seq_len, doc_mask=doc_mask), small_world("cuda")
    assert build.old_cudnn(on_gpu) == remarks and not build.old_cudnn(small_world())

    def inside(world) -> tuple[list[int], bool]:
        with build.attention_kernels(model, world):
            return torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()

    order, enabled = inside(on_gpu)
    assert enabled == (usual and not doc_mask)
    assert (order[0] == CUDNN) == (asks or before[0] == CUDNN)
    if asks:
        flash = SDPBackend.FLASH_ATTENTION.value
        assert order[:2] == [CUDNN, flash] and set(order) <= set(before)
    assert torch._C._get_sdp_priority_order() == before
    assert torch.backends.cuda.cudnn_sdp_enabled() == usual
    assert inside(small_world()) == (before, usual and not doc_mask)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # torch's own switch
    assert inside(on_gpu)[0] == before


def test_attention_computes_the_same_under_the_kernels_that_are_allowed():
    """The choice and its order, which a CPU has too, fit into a compiled step. In a process of its
    own, as what other tests patch may stay in the compiler's tables."""
    code = (
        "import dataclasses, torch\n"
        "from config import PRESETS\n"
        "from machinery import build\n"
        "from model import GPT\n"
        "build.old_cudnn = lambda world: True\n"
        "small = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64)\n"
        "tokens = torch.randint(512, (2, 128))\n"
        "for mask in (False, True):\n"
        "    config = PRESETS['tiny'].model\n"
        "    config = dataclasses.replace(config, seq_len=128, doc_mask=mask, **small)\n"
        "    model = GPT(config)\n"
        "    model.init_weights()\n"
        "    expected = model(tokens, tokens)\n"
        "    with build.attention_kernels(config, None):\n"
        "        step = torch.compile(model, dynamic=False, fullgraph=True, backend='aot_eager')\n"
        "        torch.testing.assert_close(step(tokens, tokens), expected)\n"
        "print('the same')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "the same\n", done.stderr


# ------------------------------------------------------------------------ the plan, as arithmetic


def test_state_over_half_of_the_memory_is_sharded():
    world = lambda n: small_world(ranks_=n, memory_bytes=80 * 10**9)
    found = [plan.pick_parallel("auto", world(8), state)[0] for state in (39e9, 41e9)]
    assert found == ["ddp", "fsdp"]
    assert plan.pick_parallel("ddp", world(8), 41e9)[0] == "ddp"
    assert plan.pick_parallel("auto", world(1), 41e9)[0] == "none"


@pytest.mark.parametrize("preset, memory_gb", [("d12", 20), ("d24", 46)])
def test_the_gradients_of_ddp_are_in_memory_once(preset, memory_gb):
    """Its buckets are the gradients (gradient_as_bucket_view): of the same card, 8 ranks fill as
    much with activations as one does."""
    found = config.PRESETS[preset]
    gpu = dict(kind="cuda", dtype=torch.bfloat16, memory_bytes=memory_gb * 10**9)
    ddp = dataclasses.replace(found, run=dataclasses.replace(found.run, parallel="ddp"))
    one, eight = (plan.make_plan(ddp, small_world(ranks_=n, **gpu)) for n in (1, 8))
    assert (one.parallel, eight.parallel) == ("none", "ddp")
    assert one.micro_batch == eight.micro_batch > 1
    whole, half = ((p.rows_in_step(0), p.grad_accum(0)) for p in (one, eight))
    assert whole == (half[0], 8 * half[1])


def test_a_plan_opens_no_file_and_touches_no_device(monkeypatch):
    """A pure function of the preset and of the figures of the machine."""
    for owner, name in ((Path, "exists"), (shutil, "disk_usage"), (torch.cuda, "is_available")):
        monkeypatch.setattr(owner, name, lambda *args: pytest.fail("not pure"))
    worlds = [small_world("cuda", 8, dtype=torch.bfloat16) for _ in range(2)]
    one, two = (plan.make_plan(config.PRESETS["d20"], world) for world in worlds)
    assert one == two and "learning rates x 1.265 for this batch" in one.text


def test_a_refused_step_names_its_rows_and_the_way_out(tmp_path, capsys):
    """Of its own rows, and not of those that have been read ahead."""
    asked, tiny = [], config.PRESETS["tiny"]
    run = SimpleNamespace(
        plan=plan.make_plan(small_preset(), small_world()),
        preset=dataclasses.replace(tiny, run=dataclasses.replace(tiny.run, skip_nonfinite=1)),
        loader=SimpleNamespace(row_ids=lambda *rows: asked.append(rows) or ["a.npy row 3"]),
        checkpoints=SimpleNamespace(join=lambda: None),
        log=SimpleNamespace(print=print, run_dir=tmp_path),
    )
    progress = train.Progress(step=4)
    train.refuse_step(run, progress, 3, "loss nan, gradient norm 1.0")
    assert progress.skipped == 1 and "skipped (1 so far)" in capsys.readouterr().out
    with pytest.raises(NonFiniteError, match="loss inf.*a.npy row 3.*--skip_nonfinite 11"):
        train.refuse_step(run, progress, 4, "loss inf, gradient norm 1.0")
    assert asked == [(16, 8), (24, 8)]  # the rows of the third step, and of the fourth


# ------------------------------------------------------------------------ wandb


WANDB = {
    "hangs at import": "import time; time.sleep(600)",
    "hangs at init": "import time\ndef init(**k): time.sleep(600)",
    "hangs at log": "import time\nclass R:\n def log(self, *a, **k): time.sleep(600)\n"
    "def init(**k): return R()",
    "raises at init": "def init(**k): raise ConnectionError('no network')",
    "raises at log": "class R:\n def log(self, *a, **k): raise OSError('gone')\n"
    "def init(**k): return R()",
    "exits": "import sys\ndef init(**k): sys.exit(3)",
}


SLOW = [pytest.param(f, marks=pytest.mark.slow) for f in ("hangs at import", "hangs at init")]


@pytest.mark.parametrize("fault", [*SLOW, *list(WANDB)[2:]])
def test_wandb_cannot_stop_a_run(fault, plain, small_data, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB[fault])
    run_dir, began = tmp_path / "run", time.monotonic()
    env = {"PYTHONPATH": str(tmp_path / "modules")}
    if fault == "hangs at log":  # once with the end of a real interpreter
        args = ["tiny", *SMALL, "--data_dir", small_data, "--run_dir", run_dir, "--wandb"]
        result = run("train.py", *args, timeout=60, **env)
        assert result.returncode == 0, result.stderr
        text = result.stdout
    else:
        text = start(small_data, run_dir, "--wandb", env=env).end(0, timeout_s=40)
    assert time.monotonic() - began < 40
    assert "wandb is" in text and "done: 12 steps" in text
    assert losses(run_dir) == losses(plain)
    assert [r["step"] for r in metrics(run_dir)] == [r["step"] for r in metrics(plain)]


def test_wandb_gets_everything_when_it_works(plain, small_data, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(
        "class R:\n"
        " def log(self, r, step): open(self.path, 'a').write(f'{step}\\n')\n"
        " def finish(self): open(self.path, 'a').write('end')\n"
        "def init(**k):\n r = R(); r.path = k['dir'] / 'seen'; return r\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "modules")}
    start(small_data, tmp_path / "run", "--wandb", env=env).end(0)
    seen = (tmp_path / "run" / "seen").read_text().split()
    assert seen == [str(r["step"]) for r in metrics(plain)] + ["end"]
