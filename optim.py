"""The optimizers: Muon for the matrices inside the blocks, AdamW for the rest; their schedules.

`build` takes groups of parameters and a TrainConfig and returns `torch.optim.Optimizer`s, with
their state already made; it knows nothing of the model. `set_schedule` gives every group its
learning rate, momentum and weight decay of a step. Both optimizers skip a step, state included,
when their attribute `found_inf` holds 1: that keeps NaN out of the weights without a host sync.
To add an optimizer, make its state (tensors) in `__init__` and add it to `build` and `state_bytes`;
to add a schedule, to `lr_at`. Its name goes to config.py, and to READ_BY there. Next: train.py.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from config import UsageError

# ------------------------------------------------------------------------------------ schedules


def lr_at(
    step: int, steps: int, schedule: str, warmup: int = 40, decay: float = 0.65, final: float = 0.05
) -> float:
    """The factor on every learning rate at `step` (0-based) of a run of `steps`.

    All schedules warm up linearly over `warmup` steps: step 0 gets 1/warmup. Then
    - `wsd` (warmup, stable, decay): 1, then linear to `final` over the last `decay` of the run;
    - `cosine`: half a cosine from 1 to `final`;
    - `multistep`: 1, from 80% of the run 0.316, from 90% on 0.1 (DeepSeek LLM, section 2.3).
    """
    warm = min(1.0, (step + 1) / max(1, warmup))  # a short run may decay before it is warm
    if schedule == "wsd":
        if step <= (begins := decay_begins(steps, decay)):
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


def momentum_at(step: int, steps: int, warmup: int = 40, decay: float = 0.65) -> float:
    """Muon's momentum: 0.85 -> 0.97 over 20 times the warmup, at most 400 steps, then -> 0.90 over
    the decay of the learning rate: average more when the steps are large."""
    momentum = 0.85 + 0.12 * min(1.0, step / max(1, min(400, 20 * warmup)))
    begins = decay_begins(steps, decay)
    into_decay = max(0, step - begins) / max(1, steps - begins)
    return momentum + (0.90 - momentum) * into_decay


def batch_at(step: int, ramp_steps: int) -> float:
    """The share of tokens_per_step that a step takes: 1/4, 1/2, then 1 after `ramp_steps` steps.
    Early gradients point the same way, so small batches waste less (McCandlish et al. 2018)."""
    return 1.0 if step >= ramp_steps else 0.25 if step < ramp_steps / 2 else 0.5


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


# The other parts of a Muon step, in place; `apply` is 0 in a step to skip. Compiled, they
# take all matrices of one shape as one tensor (N, rows, cols): a list would compile for minutes.
# Eager, `_momentum` and `_update` take one matrix at a time, which stays in the cache of a CPU.


def _momentum(grad: Tensor, average: Tensor, momentum: Tensor, apply: Tensor) -> None:
    grad.masked_fill_(apply == 0, 0.0)  # 0 x NaN would be NaN
    average.lerp_(grad, (1 - momentum) * apply)
    grad.lerp_(average, momentum)  # Nesterov: look one step ahead


def _variance(u: Tensor, second: Tensor, beta2: Tensor, apply: Tensor) -> Tensor:
    """Factors on the rows of u (N, rows, cols), or on the columns of a wide u, that give them all
    the same long-run size and keep the norm of each matrix (NorMuon, Li et al. 2025).
    second: running mean square, (N, rows, 1) or (N, 1, cols), fp32, like the result."""
    side = -1 if second.size(-1) == 1 else -2
    norm = torch.linalg.vector_norm(u, dim=side, keepdim=True, dtype=torch.float32)
    mean_square = norm.square() / u.size(side)
    second.lerp_(mean_square, (1 - beta2) * apply)
    scale = second.clamp_min(1e-10).rsqrt()
    old_norm = mean_square.sum(dim=(-2, -1), keepdim=True)
    new_norm = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True)
    return scale * (old_norm / new_norm.clamp_min(1e-10)).sqrt()


def _update(p: Tensor, u: Tensor, scale: Tensor, lr: Tensor, decay: Tensor, apply: Tensor) -> None:
    update = u * scale
    agree = (update * p).gt_(0)  # cautious: decay never pulls against the update
    update.addcmul_(agree.mul_(p), decay)
    p.addcmul_(update, -lr * apply)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), with NorMuon's variance reduction and cautious
    weight decay. For 2-D weights inside a network; not for embedding tables or the head.

    params: 2-D tensors, plain or DTensors sharded by rows; each needs a gradient in every step. lr
    is multiplied by sqrt(max(1, rows / cols)). ns_dtype: of the Newton-Schulz matmuls. divide:
    every rank holds the same gradients, so let each orthogonalize its share (data parallel).
    State per parameter: momentum_buffer (like the parameter), second_moment (a row or a column);
    each is a view into `stacks`, which hold the state of all parameters of one shape.
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
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, beta2=beta2)
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2:
                raise UsageError(
                    f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}; give its "
                    "name another group in GROUP_OF (model.py), such as scalar"
                )
            rows, cols = p.shape
            side = (rows, 1) if rows >= cols else (1, cols)
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            self.state[p]["second_moment"] = torch.zeros(side, device=p.device)
        self.ns_dtype, self.divide = ns_dtype, divide
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = True  # torch's own mark: step() obeys found_inf

        self._orthogonalize, self.compiled = orthogonalize, False
        self._momentum, self._variance, self._update = _momentum, _variance, _update
        self._stack_state()
        self.register_load_state_dict_post_hook(Muon._stack_state)  # loading replaces the tensors

    @torch.no_grad()
    def _stack_state(self) -> None:
        self.stacks = []  # (group, N parameters of one shape, their momenta, their second moments)
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for params in by_shape.values():
                state = []
                for name in ("momentum_buffer", "second_moment"):
                    parts = [local(self.state[p][name]) for p in params]
                    state.append(torch.stack(parts))  # (N, ...)
                    for part, view in zip(parts, state[-1]):
                        part.set_(view)
                self.stacks.append((group, params, *state))

    @torch.no_grad()
    def step(self) -> None:
        for stack in self.stacks:
            self._step_stack(*stack)

    def _step_stack(self, group: dict, params: list, momenta: Tensor, seconds: Tensor) -> None:
        first, (rows, cols) = params[0], params[0].shape
        sharded = isinstance(first, DTensor)

        def scalar(x: float) -> Tensor:  # a new float, unlike a 0-D tensor, would recompile
            return torch.full((), x, dtype=torch.float32, device=first.device)  # a fill, no copy

        apply = scalar(1.0) if self.found_inf is None else 1 - self.found_inf
        momentum, decay = scalar(group["momentum"]), scalar(group["weight_decay"])
        lr = scalar(group["lr"] * max(1.0, rows / cols) ** 0.5)
        u = torch.stack([local(p.grad) for p in params])
        if self.compiled:
            self._momentum(u, momenta, momentum, apply)
        else:
            for grad, average in zip(u, momenta):
                self._momentum(grad, average, momentum, apply)
        if sharded:  # (N, local rows, cols) -> (N, rows, cols)
            whole = dict(shape=(len(params), rows, cols), stride=(rows * cols, cols, 1))
            u = DTensor.from_local(u, first.device_mesh, [Shard(1)], **whole).full_tensor()
        u = self._divided_orthogonalize(u, first)
        scale = self._variance(u, seconds, scalar(group["beta2"]), apply)
        if sharded:
            u = _own_rows(u, first)
            scale = _own_rows(scale, first) if rows >= cols else scale
        params = [local(p) for p in params]
        if self.compiled:
            weights = torch.stack(params)
            self._update(weights, u, scale, lr, decay, apply)
            torch._foreach_copy_(params, weights.unbind(0))
        else:
            for p, direction, row_scale in zip(params, u, scale):
                self._update(p, direction, row_scale, lr, decay, apply)

    def _divided_orthogonalize(self, u: Tensor, p: Tensor) -> Tensor:
        """Orthogonalize u (N, rows, cols): all of it here, or each rank a share, then exchange."""
        group = p.device_mesh.get_group() if isinstance(p, DTensor) else None
        world = dist.get_world_size(group) if self.divide or group else 1
        if world == 1:
            return self._orthogonalize(u, self.ns_dtype)
        n, rank = u.size(0), dist.get_rank(group)
        share = math.ceil(n / world)
        u = torch.cat([u, u.new_zeros(share * world - n, *u.shape[1:])])  # every share is full
        own = self._orthogonalize(u[rank * share : (rank + 1) * share], self.ns_dtype)
        whole = own.new_empty(share * world, *own.shape[1:])
        # all_gather_into_tensor is what torch before 2.13 calls it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, own.contiguous(), group=group)
        return whole[:n]


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


def _own_rows(t: Tensor, p: DTensor) -> Tensor:
    """t (N, rows, ...) -> (N, local rows, ...): the rows of p that this rank holds."""
    chunk = math.ceil(p.shape[0] / p.device_mesh.size())  # FSDP2: the last ranks may have fewer
    start = p.device_mesh.get_local_rank() * chunk
    return t[:, start : start + chunk]


# --------------------------------------------------------------------------------------- building

# The learning rates of `--optimizer muon`, by batch, width and horizon:
#
# 1. Batch. The gradient of B tokens is the true one, g, plus noise of squared norm |g|^2 B0/B,
#    where B0 is the noise scale in tokens (lesson 19). A step of Muon or Adam has the same size
#    whatever the gradient's, so the part of it that points along g is
#    c(B) = |g| / sqrt(|g|^2 + |g|^2 B0/B) = 1 / sqrt(1 + B0/B).
#    A step of size lr gains lr c |g| and loses lr^2 h/2 to the curvature h: the best lr is c |g|/h.
#    So it grows as sqrt(B) while noise dominates (Malladi et al. 2022), and not beyond B0. Rates
#    that were tuned at a batch of `rates_at` tokens are therefore multiplied by c(B)/c(rates_at).
#    B0 is three times `rates_at` for `tiny`, where it was fitted (6,144 and 2,048 tokens). That it
#    is so for d*, whose rates are nanochat's, is an assumption: nanochat takes sqrt(B/rates_at),
#    from which this differs by 13% at an eighth of the batch and by 11% at twice as much.
# 2. Width. A layer whose weights move by an orthogonal matrix times lr changes its outputs by lr
#    (RMS for RMS) at any width: no factor on Muon's rate but sqrt(rows/cols) for more outputs than
#    inputs. Adam moves a logit by lr x width if the update aligns with its input, by lr x width^1/2
#    if they are unrelated: the tables' rates scale as width^-1/2, with factor 1 at 768.
# 3. Horizon. The more steps, the smaller the best rate, down to steps^-1/2 where noise dominates
#    (Ghadimi & Lan 2013). No factor: with one, the stable part of wsd would depend on the length
#    of the run, which could then not be changed. That costs `tiny` 0.3% at 500 steps.
#
# benchmarks/RESULTS.md shows where this was measured, and where it was not.


def rates_note(config) -> str:
    """For the plan: the factor on the rates for this batch, if the optimizer has one."""
    if config.optimizer != "muon":
        return ""
    factor = lr_batch_factor(config.tokens_per_step, config.rates_at)
    return f"; learning rates x {factor:.3f} for this batch"


def lr_batch_factor(tokens_per_step: int, rates_at: int) -> float:
    """The factor on rates that were tuned at steps of `rates_at` tokens: 1 there, 1.26 at twice as
    many, 0.41 at an eighth."""
    noise = 3 * rates_at  # tokens
    return ((1 + noise / rates_at) / (1 + noise / tokens_per_step)) ** 0.5


def build(
    groups: dict[str, list[Tensor]], config, width: int, *, ns_dtype=torch.float32, divide=False
) -> list[torch.optim.Optimizer]:
    """The optimizers of a TrainConfig, with their state; `base_lr` is what the schedule multiplies.

    groups: parameters by kind (matrix, embedding, head, scalar), as GPT.param_groups gives them.
    width: of the residual stream; the tables' rates alongside Muon are tuned at 768 and scale with
    width^-1/2. Their betas and weight decay are nanochat's, but for the value embeddings, which
    nanochat gives half the rate and a decay of 0.01: with those, `tiny` is 0.8% worse after 0.8M
    tokens (1.216 +- 0.005 bits per byte against 1.206 +- 0.004, three seeds). ns_dtype, divide: see
    Muon.
    """

    def group(kinds: tuple, lr: float, betas: tuple, weight_decay: float) -> dict:
        params = [p for kind in kinds for p in groups[kind]]
        return dict(params=params, lr=lr, betas=betas, weight_decay=weight_decay)

    if config.optimizer == "adamw":
        lr, betas, decayed = config.lr, (0.9, 0.95), ("matrix", "embedding", "head")
        recipe = [
            group(decayed, lr, betas, config.weight_decay),
            group(("scalar",), lr, betas, 0.0),
        ]
        optimizers = [adamw(recipe, eps=1e-8)]
    elif config.optimizer == "muon":
        scale = config.lr_scale * lr_batch_factor(config.tokens_per_step, config.rates_at)
        table_scale = scale * (width / 768) ** -0.5
        recipe = [
            group(("embedding",), config.embedding_lr * table_scale, (0.8, 0.995), 0.001),
            group(("head",), config.head_lr * table_scale, (0.8, 0.96), 0.01),
            group(("scalar",), 0.005 * scale, (0.8, 0.95), 0.0),  # of yours: the model has none
        ]
        lr, how = config.matrix_lr * scale, dict(ns_dtype=ns_dtype, divide=divide)
        muon = Muon(groups["matrix"], lr, weight_decay=config.weight_decay, **how)
        optimizers = [muon, adamw(recipe, eps=1e-10)]
    else:
        raise ValueError(f"optimizer {config.optimizer!r} is neither muon nor adamw")
    for optimizer in optimizers:
        check_obeys_found_inf(optimizer)
        for g in optimizer.param_groups:
            g["base_lr"], g["base_weight_decay"] = g["lr"], g["weight_decay"]
    return optimizers


class _AdamW(torch.optim.AdamW):
    """torch's, on this rank's part of sharded tensors: AdamW is elementwise, so the result is the
    same. On the DTensors themselves, torch 2.11 leaks two objects per parameter and step."""

    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)  # fills the lists: parameters, grads, ...
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def adamw(groups: list[dict], eps: float = 1e-8) -> torch.optim.AdamW:
    """Fused AdamW with its state: one kernel per step, which obeys `found_inf`. groups: dicts with
    params, lr, betas, weight_decay; a group without parameters is left out."""
    groups = [group for group in groups if group["params"]]
    optimizer = _AdamW(groups, eps=eps, fused=True)
    for p in (p for group in groups for p in group["params"]):
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def check_obeys_found_inf(optimizer: torch.optim.Optimizer) -> None:
    """UsageError for an optimizer that would let NaN into the weights."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} ignores found_inf, so one NaN would spoil the weights; build it with "
            "fused=True if it has that, or let its step() do nothing where found_inf is 1 and set "
            "_step_supports_amp_scaling, as Muon does (optim.py)"
        )


def state_bytes(params: dict[str, int], optimizer: str) -> int:
    """Bytes of fp32 weights, gradients and optimizer state (Muon keeps one number per weight,
    AdamW two). params: how many of each kind."""
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
            group["lr"] = group["base_lr"] * factor
            if isinstance(optimizer, Muon):
                group["momentum"] = momentum_at(step, steps, config.warmup, decay)
                group["weight_decay"] = group["base_weight_decay"] * factor
    return factor


def compile_steps(optimizers: list[torch.optim.Optimizer]) -> None:
    """Fuse the parts of Muon's step from now on: worth it on a GPU."""
    # Each part is compiled once per shape of matrix; Dynamo's own limit would be 8 of them.
    torch._dynamo.config.recompile_limit = 64
    for muon in (optimizer for optimizer in optimizers if isinstance(optimizer, Muon)):
        muon.compiled = True
        for name in ("_orthogonalize", "_momentum", "_variance", "_update"):
            part = torch.compile(getattr(muon, name), dynamic=False, fullgraph=True)
            setattr(muon, name, part)


# ------------------------------------------------------------------------------- one step of all


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """(): the norm of all gradients together; of sharded ones, over all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a factor, (), that the host need not know."""
    torch._foreach_mul_([local(p.grad) for p in parameters], factor)


def step(optimizers: list[torch.optim.Optimizer], found_inf: Tensor) -> None:
    """Move the weights, or nothing at all where found_inf, (), is 1; drop the gradients."""
    for optimizer in optimizers:
        optimizer.found_inf = found_inf
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
