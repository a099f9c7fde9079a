"""What --recompute saves and costs: `python benchmarks/recompute.py`.

Takes training steps with it and without it in turn, in one process on the CPU, eager and in fp32.
Prints the bytes that forward keeps for backward (saved-tensor hooks; the weights not counted),
eager and as the compiler partitions the step, beside the estimate of flops.py, and processor time.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import flops  # noqa: E402
from config import PRESETS  # noqa: E402
from model import GPT  # noqa: E402


def kept_bytes(model: GPT, tokens: torch.Tensor, call) -> int:
    """What the graph of a forward pass holds, each storage once."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = call(tokens, tokens)
    model.zero_grad()
    del loss
    return sum(n for at, n in kept.items() if at not in weights)


def step_s(model: GPT, tokens: torch.Tensor) -> float:
    """Processor seconds of a forward and a backward pass; a busy machine does not change them."""
    begin = time.process_time()
    model(tokens, tokens).backward()
    model.zero_grad()
    return time.process_time() - begin


def main() -> None:
    torch.set_num_threads(1)
    tiny = PRESETS["tiny"].model
    for name, config, rows in (
        ("tiny", tiny, 2),
        ("tiny, 12 layers", replace(tiny, n_layer=12), 1),
    ):
        torch.manual_seed(0)
        model = GPT(config)
        model.init_weights()
        tokens = torch.randint(config.vocab_size, (rows, config.seq_len))
        seconds = {False: [], True: []}
        for _ in range(4):
            for model.recompute, found in seconds.items():
                found.append(step_s(model, tokens))
        plain, more = (statistics.median(found[1:]) for found in seconds.values())
        print(f"{name}, {rows} x {config.seq_len:,} tokens:")
        for model.recompute in (False, True):
            torch._dynamo.reset()
            part = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
            sizes = [kept_bytes(model, tokens, call) / 1e6 for call in (model, part)]
            how = "--recompute" if model.recompute else "without    "
            estimate = flops.activation_bytes(config, 4, model.recompute) * tokens.numel() / 1e6
            print(
                f"  {how}: keeps {sizes[0]:,.1f} MB "
                f"eager, {sizes[1]:,.1f} MB compiled; estimate of the peak {estimate:,.1f} MB"
            )
        print(f"  processor time of a step: {more / plain:.2f} times ({plain:.2f} s, {more:.2f} s)")


if __name__ == "__main__":
    main()
