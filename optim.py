"""The optimizers: Muon for the matrices inside the blocks, AdamW for the rest; their schedules.

`build` takes groups of parameters and a TrainConfig and returns `torch.optim.Optimizer`s, with
their state already made. To add an optimizer, make its state (tensors) in `__init__` and add it to
`build` and `state_bytes`; to add a schedule, add it to `lr_at`. Its name goes into config.py. Next:
flops.py.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from config import UsageError

# ------------------------------------------------------------------------------------ schedules


def lr_at(
    step: int, steps: int, schedule: str, warmup: int, decay: float = 0.65, final: float = 0.05
) -> float:
    """The factor on every learning rate at `step` (0-based) of a run of `steps`.

    All schedules warm up linearly over `warmup` steps: step 0 gets 1/warmup. Then
    - `wsd` (warmup, stable, decay): 1, then linear to `final` over the last `decay` of the run;
    - `cosine`: half a cosine from 1 to `final`;
    - `multistep`: 1, from 80% of the run 0.316, from 90% on 0.1 (DeepSeek LLM, section 2.3).
    """
    warm = min(1.0, (step + 1) / max(1, warmup))  # a short run may decay before it is warm
    if schedule == "wsd":
        begins = decay_begins(steps, decay)
        if step <= begins:
            return warm
        return warm * (final + (1 - final) * (steps - step) / (steps - begins))
    if schedule == "cosine":
        progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return warm * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
    if schedule == "multistep":
        return warm * (1.0 if step < 0.8 * steps else 0.316 if step < 0.9 * steps else 0.1)
    raise ValueError(f"schedule {schedule!r} is none of wsd, cosine, multistep")


def decay_begins(steps: int, decay: float) -> int:
    """The number of steps before the learning rate of `wsd` falls. Until then, nothing depends on
    the length of the run, so a longer one can resume from there."""
    return steps - round(decay * steps)


def momentum_at(step: int, steps: int, warmup: int, decay: float) -> float:
    """Muon's momentum: 0.85 -> 0.97 over 20 * warmup steps, at most 400; then -> 0.90 as the
    learning rate decays: average over more gradients while the steps are large."""
    momentum = 0.85 + 0.12 * min(1.0, step / max(1, min(400, 20 * warmup)))
    begins = decay_begins(steps, decay)
    into_decay = max(0, step - begins) / max(1, steps - begins)
    return momentum + (0.90 - momentum) * into_decay


LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000


def next_scale(scale: float, good_steps: int, overflow: bool) -> tuple[float, int]:
    """(the loss scale after a step in fp16, good steps since it changed): half of it after a step
    whose gradients overflowed, twice as much after 2,000 good ones (Micikevicius et al. 2018).

    The loss is multiplied by the scale before backward, and the gradients are divided by it: most
    gradients of activations are below 6e-5, where fp16 loses digits, or 6e-8, where it has none."""
    if overflow:
        return scale / 2, 0
    if good_steps + 1 >= GROWTH_STEPS:
        return min(2 * scale, LARGEST_SCALE), 0
    return scale, good_steps + 1


# ----------------------------------------------------------------------------------------- Muon

# Quintic coefficients of the five Polar Express iterations (Amsel et al. 2025, arXiv 2505.16932),
# each the best polynomial for the range in which the one before left the singular values.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(g: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The nearest semi-orthogonal matrix of each g (N, rows, cols): U V^T of its SVD, roughly.

    Iterates X <- aX + (bA + cA^2)X with A = X X^T, which moves every singular value towards 1
    (Newton-Schulz; Jordan et al. 2024). Works on the short side, in `dtype` (bf16 is enough).
    """
    tall = g.size(-2) > g.size(-1)
    norm = torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (g / (norm * 1.01 + 1e-7)).to(dtype)  # no singular value above 1, not even after rounding
    x = x.mT if tall else x
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT  # (N, short, short)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # bA + cA^2, rounded once
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT.contiguous() if tall else x


def orthogonalize_flops(matrices: list[Tensor]) -> int:
    """FLOPs of `orthogonalize`, each of whose steps has three matmuls."""
    sides = [sorted(matrix.shape) for matrix in matrices]
    per_step = sum(short**2 * (4 * long + 2 * short) for short, long in sides)
    return len(POLAR_EXPRESS) * per_step


def rescale(u: Tensor, second: Tensor, beta2: float) -> Tensor:
    """Factors on the rows of u (N, rows, cols), or on the columns of a wide u, that give them all
    the same long-run size and keep the norm of each matrix (NorMuon, Li et al. 2025).
    second: running mean square, updated: (N, rows, 1) or (N, 1, cols), fp32, like the result."""
    side = -1 if second.size(-1) == 1 else -2
    norm = torch.linalg.vector_norm(u, dim=side, keepdim=True, dtype=torch.float32)
    mean_square = norm.square() / u.size(side)
    second.lerp_(mean_square, 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()
    old_norm = mean_square.sum(dim=(-2, -1), keepdim=True)
    new_norm = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True)
    return scale * (old_norm / new_norm.clamp_min(1e-10)).sqrt()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), with NorMuon's variance reduction and cautious
    weight decay. For 2-D weights inside a network; not for embedding tables or the head.

    params: 2-D tensors, plain or DTensors sharded by rows; each needs a gradient in every step.
    ns_dtype: of the Newton-Schulz matmuls. divide: every rank holds the same gradients, so each
    orthogonalizes only its share (data parallel).
    """

    def __init__(
        self,
        params,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        beta2: float = 0.9,
        ns_dtype: torch.dtype = torch.float32,
        divide: bool = False,
    ):
        self.ns_dtype = ns_dtype
        self.divide = divide
        self.orthogonalize = orthogonalize
        self.rescale = rescale
        by_shape = defaultdict(list)
        for p in params:
            if p.ndim != 2:
                raise UsageError(
                    f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}; give its "
                    "name another group in KINDS (model.py)"
                )
            by_shape[p.shape].append(p)
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, beta2=beta2)
        super().__init__([dict(params=same) for same in by_shape.values()], defaults)
        for (rows, cols), same in by_shape.items():
            side = (rows, 1) if rows >= cols else (1, cols)
            for p in same:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["second_moment"] = torch.zeros(side, device=p.device)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:  # its parameters have one shape
            params = group["params"]
            first = params[0]
            rows, cols = first.shape
            moments = [self.state[p]["second_moment"] for p in params]
            averages = [local(self.state[p]["momentum_buffer"]) for p in params]
            grads = [local(p.grad) for p in params]
            weights = [local(p) for p in params]

            torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, averages, group["momentum"])  # Nesterov: one step ahead
            u = self._whole_orthogonalized(torch.stack(grads), first)  # (N, rows, cols)
            second = torch.stack(moments)
            scale = self.rescale(u, second, group["beta2"])
            torch._foreach_copy_(moments, second.unbind())
            if isinstance(first, DTensor):
                u = _own_rows(u, first)
                scale = _own_rows(scale, first) if rows >= cols else scale
            updates = (u * scale).unbind()  # N of (rows, cols), or of this rank's rows

            if group["weight_decay"]:
                # Cautious: decay acts where it does not pull against the update, where u w > 0.
                agree = torch._foreach_mul(updates, weights)
                torch._foreach_sign_(agree)
                torch._foreach_clamp_min_(agree, 0.0)
                torch._foreach_addcmul_(updates, agree, weights, value=group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)

    def _whole_orthogonalized(self, u: Tensor, p: Tensor) -> Tensor:
        """u (N, rows of this rank, cols) -> (N, rows, cols), orthogonalized: all of it here, or
        each rank a share of the N matrices, which the ranks then exchange."""
        process_group = None  # all ranks
        if isinstance(p, DTensor):
            process_group = p.device_mesh.get_group()
            rows, cols = p.shape
            u = DTensor.from_local(
                u,
                p.device_mesh,
                [Shard(1)],
                shape=(len(u), rows, cols),
                stride=(rows * cols, cols, 1),
            ).full_tensor()
        world = dist.get_world_size(process_group) if self.divide or process_group else 1
        if world == 1:
            return self.orthogonalize(u, self.ns_dtype)
        share = math.ceil(len(u) / world)
        rank = dist.get_rank(process_group)
        own = u[rank * share : (rank + 1) * share]
        missing = u.new_zeros(share - len(own), *u.shape[1:])  # pad the last shares to full size
        own = self.orthogonalize(torch.cat([own, missing]), self.ns_dtype)
        whole = own.new_empty(share * world, *own.shape[1:])
        # all_gather_into_tensor is what torch before 2.13 calls it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, own.contiguous(), group=process_group)
        return whole[: len(u)]


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


def _own_rows(t: Tensor, p: DTensor) -> Tensor:
    """t (N, rows, ...) -> (N, local rows, ...): the rows of p that this rank holds."""
    chunk = math.ceil(p.shape[0] / p.device_mesh.size())  # FSDP2: the last ranks may have fewer
    start = p.device_mesh.get_local_rank() * chunk
    return t[:, start : start + chunk]


# --------------------------------------------------------------------------------------- building

# The rates of `--optimizer muon` were tuned at a batch of `rates_at` tokens and a width of 768. For
# a batch of B tokens all are multiplied by c(B) / c(rates_at), where c(B) = 1 / sqrt(1 + 3 rates_at
# / B): noise bounds the step of a small batch (McCandlish et al. 2018). For another width, those of
# the tables are multiplied by (width / 768)^-1/2. docs/scaling.md has the derivation, and what was
# measured.


def lr_batch_factor(tokens_per_step: int, rates_at: int) -> float:
    """The factor on rates that were tuned at steps of `rates_at` tokens: 1 there, 1.26 at twice as
    many, 0.40 at an eighth."""
    noise = 3 * rates_at  # tokens
    return ((1 + noise / rates_at) / (1 + noise / tokens_per_step)) ** 0.5


def build(
    groups: dict[str, list[Tensor]], config, width: int, *, ns_dtype=torch.float32, divide=False
) -> list[torch.optim.Optimizer]:
    """The optimizers of a TrainConfig; `initial_lr` is what the schedule multiplies.

    groups: as GPT.param_groups gives them. width: of the residual stream. The tables' betas and
    weight decay are nanochat's, except those of the value embeddings (benchmarks/RESULTS.md).
    """

    def group(names: tuple, lr: float, betas: tuple, weight_decay: float) -> dict:
        params = [p for name in names for p in groups[name]]
        return dict(params=params, lr=lr, betas=betas, weight_decay=weight_decay)

    if config.optimizer == "adamw":
        lr = config.lr
        betas = (0.9, 0.95)
        decayed = group(("matrix", "embedding", "head"), lr, betas, config.weight_decay)
        optimizers = [adamw([decayed, group(("scalar",), lr, betas, 0.0)])]
    elif config.optimizer == "muon":
        scale = config.lr_scale * lr_batch_factor(config.tokens_per_step, config.rates_at)
        table_scale = scale * (width / 768) ** -0.5
        recipe = [
            group(("embedding",), config.embedding_lr * table_scale, (0.8, 0.995), 0.001),
            group(("head",), config.head_lr * table_scale, (0.8, 0.96), 0.01),
            group(("scalar",), 0.005 * scale, (0.8, 0.95), 0.0),  # gains, and biases of yours
        ]
        muon = Muon(
            groups["matrix"],
            lr=config.matrix_lr * scale,
            weight_decay=config.weight_decay,
            ns_dtype=ns_dtype,
            divide=divide,
        )
        optimizers = [muon, adamw(recipe, eps=1e-10)]
    else:
        raise ValueError(f"optimizer {config.optimizer!r} is neither muon nor adamw")
    for optimizer in optimizers:
        for g in optimizer.param_groups:
            g["initial_lr"] = g["lr"]
            g["initial_weight_decay"] = g["weight_decay"]
    return optimizers


def adamw(groups: list[dict], eps: float = 1e-8) -> torch.optim.AdamW:
    """Fused AdamW: one kernel per step. A group without parameters is left out. Torch would make
    the state in the first step; a checkpoint is loaded before that."""
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, eps=eps, fused=True)
    for group in groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return optimizer


def state_bytes(params: dict[str, int], optimizer: str) -> int:
    """Bytes of fp32 weights, gradients and optimizer state (Muon keeps one number per weight,
    AdamW two). params: how many in each group."""
    total = sum(params.values())
    moments = 2 * total - (params["matrix"] if optimizer == "muon" else 0)
    return 4 * (2 * total + moments)


def set_schedule(optimizers: list[torch.optim.Optimizer], step: int, steps: int, config) -> float:
    """Set every group's learning rate, momentum and weight decay for `step` (0-based); returns the
    factor on the learning rates. Muon's weight decay gets the same factor."""
    factor = lr_at(step, steps, config.schedule, config.warmup, config.decay, config.final_lr)
    decay = config.decay if config.schedule == "wsd" else 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
            if isinstance(optimizer, Muon):
                group["momentum"] = momentum_at(step, steps, config.warmup, decay)
                group["weight_decay"] = group["initial_weight_decay"] * factor
    return factor


def compile_steps(optimizers: list[torch.optim.Optimizer]) -> None:
    """Compile parts of Muon from now on, once per shape of matrix: worth it on a GPU."""
    torch._dynamo.config.recompile_limit = 64  # Dynamo's own limit would be 8 shapes
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            optimizer.orthogonalize = torch.compile(orthogonalize, dynamic=False, fullgraph=True)
            optimizer.rescale = torch.compile(rescale, dynamic=False, fullgraph=True)


def sum_over_ranks(gradients: list[Tensor]) -> None:
    """Sum over ranks that each have the gradients of a whole model."""
    for reduction in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        reduction.wait()
