"""profiler.py: names, invented traces, and a real profile on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import record_function

from config import GPTConfig, UsageError
from instruments.run import profiler
from instruments.run.profiler import ROWS, Profile, breakdown, classify, to_spans
from machinery.errors import DataError
from model import GPT

NAMES = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64": "matmul",
    "aten::mm": "matmul",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "c10d::allreduce_": "communication",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_4": "elementwise",
    "Memcpy HtoD (Pinned -> Device)": "elementwise",
}


def test_classify():
    assert {name: classify(name) for name in NAMES} == NAMES


def event(name, cat, start, end, tid=1):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid}


GPU_TRACE = [
    event("ProfilerStep#1", "user_annotation", 0, 100),
    event("data", "user_annotation", 0, 10),
    event("aten::mm", "cpu_op", 10, 12),  # the host launches early: not the device's time
    event("Optimizer.step#Muon.step", "user_annotation", 14, 16),
    event("nvjet_hsh", "kernel", 15, 45, tid=7),
    event("cudnn_sdpa", "kernel", 45, 60, tid=7),
    event("triton_poi_fused", "kernel", 60, 65, tid=7),
    event("ncclDevKernel_AllReduce", "kernel", 62, 75, tid=9),  # 3 of 13 are hidden
    event("Optimizer.step#Muon.step", "gpu_user_annotation", 75, 85, tid=7),
    event("nvjet_newton_schulz", "kernel", 75, 85, tid=7),
    event("Optimizer.step#AdamW.step", "gpu_user_annotation", 86, 95, tid=7),
    event("triton_poi_adam", "kernel", 86, 95, tid=7),
]


def test_gpu_timeline_counts_each_instant_once():
    got = breakdown(to_spans(GPU_TRACE), 0, 100)
    of_device = dict(matmul=30, attention=15, elementwise=5, optimizer=19, communication=10)
    assert got == of_device | {"data wait": 10, "idle": 11}
    assert sum(got.values()) == 100
    beyond = breakdown([(-5, 5, "matmul"), (95, 120, "attention")], 0, 100)
    assert beyond == dict.fromkeys(ROWS, 0.0) | dict(matmul=5, attention=5, idle=90)


def test_cpu_timeline_takes_the_inner_operator_and_the_region_around_it():
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("data", "user_annotation", 0, 5),
        event("aten::copy_", "cpu_op", 1, 4),
        event("Torch-Compiled Region: 0/0", "cpu_op", 10, 60),
        event("aten::mm", "cpu_op", 20, 40),
        event("aten::scaled_dot_product_attention", "cpu_op", 40, 50),
        event("aten::bmm", "cpu_op", 41, 49),
        event("aten::mm", "cpu_op", 0, 100, tid=2),  # another thread's
        event("gloo:all_reduce", "user_annotation", 55, 65, tid=3),  # 5 of 10 are hidden
        event("Optimizer.step#AdamW.step", "user_annotation", 70, 90),
        event("aten::mm", "cpu_op", 72, 88),
    ]
    got = breakdown(to_spans(events), 0, 100)
    of_host = dict(matmul=20, attention=10, elementwise=20, optimizer=20, communication=5)
    assert got == of_host | {"data wait": 5, "idle": 20}


SHAPE = dict(seq_len=256, vocab_size=512, n_layer=1, n_head=4, n_kv_head=4, head_dim=64)


def test_a_real_profile_has_every_row_and_adds_up(tmp_path):
    """Two recorded steps of a small model, the optimizer and the data in their regions."""
    model = GPT(GPTConfig(**SHAPE, n_embd=256, mlp_hidden=512))
    model.init_weights()
    opt = torch.optim.AdamW(model.parameters())
    with Profile(tmp_path / "new", torch.device("cpu"), warmup=2, steps=2) as prof:
        while not prof.done:
            with record_function("data"):
                x = torch.randint(512, (4, 256))
            model(x, x).backward()
            opt.step()
            opt.zero_grad()
            prof.step()
    events, table = prof.trace_events(), prof.table()
    marks = [e for e in events if e["name"].startswith("ProfilerStep")]
    assert len(marks) == 2
    start, end = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    got = breakdown(to_spans(events), start, end)
    assert sum(got.values()) == pytest.approx(end - start)
    assert {row for row in ROWS if got[row] > 0} >= {*ROWS} - {"communication", "idle"}
    assert got["communication"] == 0
    assert all(row in table for row in ROWS) and str(prof.trace) in table


def test_too_few_steps_is_a_sentence(tmp_path):
    with Profile(tmp_path, torch.device("cpu"), warmup=1, steps=3) as prof:
        prof.step()
    with pytest.raises(UsageError, match="--steps 4"):
        prof.table()


def test_a_run_is_profiled_over_its_own_steps(tmp_path):
    taken, logged, printed, states = [], [], [], []

    def take_steps():
        for step in range(1, 10):
            taken.append(step)
            torch.ones(64, 64) @ torch.ones(64, 64)
            yield dict(step=step)

    world = SimpleNamespace(rank=1, world_size=2, is_first=True, device=torch.device("cpu"))
    status = lambda state, **facts: states.append((state, facts))
    log = SimpleNamespace(run_dir=tmp_path, print=printed.append, status=status)
    run, progress = SimpleNamespace(world=world, log=log), SimpleNamespace(step=4)
    log_step = lambda *args: logged.append(args)
    assert profiler.run(run, take_steps(), log_step, progress) == 0
    assert taken == [1, 2, 3, 4]  # one to warm up, three to record
    assert logged == [(run, progress, dict(step=step)) for step in taken]
    assert states == [("profiled", dict(step=4, exit_code=0))]
    assert (tmp_path / "profile" / "rank_1" / "trace.json.gz").exists()
    assert len(printed) == 1 and "mean of 3 steps" in printed[0]


def test_a_link_in_the_run_is_not_written_through(tmp_path):
    other, world = tmp_path / "other", SimpleNamespace(rank=0, world_size=1, device=None)
    other.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(other)
    run = SimpleNamespace(world=world, log=SimpleNamespace(run_dir=tmp_path / "run"))
    with pytest.raises(DataError):
        profiler.run(run, iter(()), None, None)
    assert not list(other.iterdir())
