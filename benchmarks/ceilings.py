"""What a device can do at best: a large matmul, a copy, and the matmuls and attention of a step.

    python benchmarks/ceilings.py d12 d20

Random data (a GPU draws less power on zeros, and runs faster), each figure the median of several
runs. matmul: the shapes of a micro-batch, forward and both gradients. attention: each kernel that
torch has, causal FLOPs, backward counted as 2.5 times forward. Prints tables, and appends them to
benchmarks/RESULTS.md (--results "" for no file).
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import at_root  # noqa: F401
from config import GPTConfig
from model import GPT
from runs import parser_of
from throughput import find_preset, measure_matmul, report

TOKENS = {"cuda": 65_536, "cpu": 1_024}  # of a micro-batch
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
KERNELS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "FlashAttention-2": [SDPBackend.FLASH_ATTENTION],
    "torch's choice": list(SDPBackend.__members__.values())[1:],  # without ERROR
}


def median_s(work: Callable, device: torch.device, seconds: float = 0.3) -> float:
    """Median seconds of work(), in runs of this many seconds. The host waits only after several
    calls that take 10 ms together: a single one would include the launch."""
    sync = torch.get_device_module(device).synchronize

    def timed(calls: int) -> float:
        sync()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        sync()
        return (time.perf_counter() - start) / calls

    timed(1)  # the first call chooses a kernel
    calls = math.ceil(0.01 / timed(1))
    deadline = time.perf_counter() + seconds
    times = []
    while len(times) < 3 or time.perf_counter() < deadline:
        times.append(timed(calls))
    return statistics.median(times)


def tera(amount: float, seconds: float) -> str:
    return f"{amount / seconds / 1e12:.3g}"


def copy_rate(device: torch.device) -> str:
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return tera(2 * source.numel(), median_s(lambda: target.copy_(source), device))


def shapes_of(model: GPTConfig) -> Counter[tuple[int, int]]:
    """(inputs, outputs) -> how many matrices of a model have that shape; the head comes last."""
    with torch.device("meta"):
        gpt = GPT(model)
    matrices = [m for m in gpt.blocks.modules() if isinstance(m, nn.Linear)]
    shapes = Counter((m.in_features, m.out_features) for m in matrices)
    return shapes + Counter([(model.n_embd, model.padded_vocab)])


def matmuls(name: str, model: GPTConfig, device: torch.device, dtype: torch.dtype) -> list[list]:
    """Rows for the table: TFLOP/s by shape, and of all matmuls of a micro-batch together."""
    tokens = TOKENS[device.type]
    rows = []
    total_flops = 0
    total_s = 0.0
    for (inputs, outputs), count in shapes_of(model).items():
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        grad = torch.randn(tokens, outputs, device=device, dtype=dtype)
        # forward, gradient of the input, gradient of the weight
        each_s = [
            median_s(lambda: x @ weight.T, device),  # noqa: B023
            median_s(lambda: grad @ weight, device),  # noqa: B023
            median_s(lambda: grad.T @ x, device),  # noqa: B023
        ]
        flops = 2 * tokens * inputs * outputs
        rates = [tera(flops, s) for s in each_s]
        rows.append([name, f"{count} x ({inputs} -> {outputs})", *rates])
        total_flops += 3 * flops * count
        total_s += sum(each_s) * count
    all_of_them = f"all, {1e3 * total_s:.1f} ms a micro-batch"
    return [*rows, [name, all_of_them, tera(total_flops, total_s), "", ""]]


def attention(name: str, model: GPTConfig, device: torch.device, dtype: torch.dtype) -> list[list]:
    """Rows for the table: causal TFLOP/s of each kernel, or why it refuses."""
    H, G, D, T = model.n_head, model.n_kv_head, model.head_dim, model.seq_len
    B = max(1, TOKENS[device.type] // T)
    q, k, v = (
        torch.randn(B, T, n, D, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (H, G, G)
    )
    grad = torch.randn(B, T, H, D, device=device, dtype=dtype).transpose(1, 2)
    flops = 4 * B * H * T * T * D / 2

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)

    rows = []
    for kernel, backends in KERNELS.items():
        try:
            with sdpa_kernel(backends):
                forward_s = median_s(forward, device)
                both_s = median_s(lambda: torch.autograd.grad(forward(), (q, k, v), grad), device)
        except RuntimeError as error:
            rows.append([name, kernel, f"none: {str(error).splitlines()[0][:60]}", ""])
            continue
        backward = tera(2.5 * flops, max(both_s - forward_s, 1e-9))
        rows.append([name, kernel, tera(flops, forward_s), backward])
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("presets", nargs="*", default=["d12", "d20"])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = [
        ["a large matmul", f"{measure_matmul(device, dtype) / 1e12:.3g} TFLOP/s"],
        ["a copy, read and written", f"{copy_rate(device)} TB/s"],
    ]
    report(f"Ceilings, {str(dtype).removeprefix('torch.')}", ["what", "rate"], rows, args.results)
    models = {name: find_preset(name).model for name in args.presets}
    rows = [row for name, model in models.items() for row in matmuls(name, model, device, dtype)]
    header = ["model", "matmul, TFLOP/s", "forward", "gradient of x", "gradient of the weight"]
    report("Matmuls of a micro-batch", header, rows, args.results)
    rows = [row for name, model in models.items() for row in attention(name, model, device, dtype)]
    header = ["model", "attention, causal TFLOP/s", "forward", "backward"]
    report("Attention", header, rows, args.results)


if __name__ == "__main__":
    main()
