"""A program with one idea that model.py and optim.py do not have: what others use, or we dropped.

    python benchmarks/tried.py smear train tiny --steps 400      an idea, a program, its options

For recipe.py, which asks whether an idea pays as tokens grow. One that does belongs in model.py.
Initial values and rates (not betas) are nanochat's, at 92d63d4, if it has the idea.
"""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import model
import optim
from machinery import cli, code, disk

GATE_CHANNELS = 24  # what a gate looks at
# Adam moves a weight by the rate, 0.005: a factor that is 100 times its weight, by 0.5.
FAST = {"smear": 40, "smear_gate": 40, "residual": 1, "first": 100, "backout": 40}


def along(weight: torch.Tensor) -> torch.Tensor:
    """From 0 at the first layer to 1 at the last."""
    return torch.linspace(0, 1, len(weight), device=weight.device)


BEGINS = {  # the others at 0
    "smear_gate": lambda weight: weight.uniform_(0, 0.02),
    "residual": lambda weight: weight.copy_(1.15 - 0.10 * along(weight)),
    "first": lambda weight: weight.copy_(0.20 - 0.15 * along(weight)),
    "backout": lambda weight: weight.fill_(0.2),
}


NEW = dict.fromkeys(FAST, ("scalar", 0.0, 0.0))  # lines of model.KINDS


class Tried(model.GPT):
    """A GPT with the ideas in `ideas`; its forward pass is GPT's, without a cache.

    smear: the embedding of the token before is mixed into each, through a gate that begins closed.
    scales: factors on the residual stream and on the first embedding, before each block.
    backout: what the middle layer had is subtracted before the head.
    """

    ideas: tuple[str, ...] = ()

    def __init__(self, config, *args, **options):
        super().__init__(config, *args, **options)
        if "smear" in self.ideas:
            self.smear_gate = model.Linear(GATE_CHANNELS, 1)
            self.smear = nn.Parameter(torch.empty(1))
        if "scales" in self.ideas:
            self.residual = nn.Parameter(torch.empty(config.n_layer))
            self.first = nn.Parameter(torch.empty(config.n_layer))
        if "backout" in self.ideas:
            self.backout = nn.Parameter(torch.empty(1))

    def init_one(self, name, weight):
        super().init_one(name, weight)
        kind = model.kind_of(name)
        if kind in BEGINS:
            BEGINS[kind](weight.data).div_(FAST[kind])

    def forward(self, idx, targets=None, reduction="mean", cache=None):
        assert cache is None, "an idea that is tried out is not sampled from"
        config = self.config
        layers = len(self.blocks)
        T = idx.size(1)
        ctx = model.Context(idx, self.cos[:T], self.sin[:T], None, None)
        x = model.rms_norm(self.embed(idx).to(self.compute_dtype))  # (B, T, C)
        own = ((name.removesuffix(".weight"), p) for name, p in self.named_parameters())
        factor = {name: FAST[name] * p.to(x.dtype) for name, p in own if name in FAST}
        if "smear" in factor:
            gate = torch.sigmoid(x[..., :GATE_CHANNELS] @ factor["smear_gate"].mT)  # (B, T, 1)
            begins = idx == config.bos_id  # (B, T)
            begins[:, 0] = True
            gate = factor["smear"] * gate * ~begins[..., None]
            x = x + gate * model.previous(x, None, 0)
        first = x
        for layer, block in enumerate(self.blocks):
            value_embed = None
            if config.has_value_embed(layer):
                value_embed = self.value_embeds[str(layer)](idx).to(x.dtype)
            if "first" in factor:
                x = factor["residual"][layer] * x + factor["first"][layer] * first
            x = block(x, value_embed, ctx)
            if layer == layers // 2:
                middle = x
        if "backout" in factor:
            x = x - factor["backout"] * middle
        x = model.rms_norm(x)
        weight = self.head.weight.to(x.dtype)
        if targets is None:
            return model.head_logits(x, weight, config)
        loss = self.cross_entropy(x, weight, targets, config)  # (B, T)
        return loss.mean() if reduction == "mean" else loss


def norm(x, *dims):
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32).clamp_min(1e-6)


def muon_eq(g, dtype=torch.float32, usual=optim.orthogonalize):
    """Rows of one norm before they are orthogonalized (arXiv 2603.28254)."""
    return usual(g * (norm(g, -2, -1) / g.size(-2) ** 0.5 / norm(g, -1)), dtype)


def muon_plus(g, dtype=torch.float32, usual=optim.orthogonalize):
    """Scaled to the norm of a matrix that is exactly orthogonal (arXiv 2602.21545)."""
    u = usual(g, dtype)
    return u * (min(u.shape[-2:]) ** 0.5 / norm(u, -2, -1)).to(u.dtype)


def larger_qk(x, cos, sin, usual=model.apply_rope):
    """q and k x 1.2: logits that are 1.44 times as large."""
    return 1.2 * usual(x, cos, sin)


def no_previous_token_head(*_) -> None:
    """No head begins by looking back."""


def tail_average(optimizers, step, steps, config, usual=optim.set_schedule):
    """The last step leaves the mean of the weights after each of the last tenth of the steps."""
    left = max(1, steps // 10)
    if step == steps - left:
        weights = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        means = [torch.zeros_like(p) for p in weights]
        share = 1 / left

        @torch.no_grad()
        def after_a_step(*_) -> None:
            nonlocal left
            left -= 1
            for p, mean in zip(weights, means):
                mean.add_(p, alpha=share)
                if not left:
                    p.copy_(mean)

        optimizers[-1].register_step_post_hook(after_a_step)
    return usual(optimizers, step, steps, config)


IDEAS = {  # in the place of what model.py or optim.py has
    "none": (model, "GPT", model.GPT),
    "muon_eq": (optim, "orthogonalize", muon_eq),
    "muon_plus": (optim, "orthogonalize", muon_plus),
    "tail_average": (optim, "set_schedule", tail_average),
    "qk_scale": (model, "apply_rope", larger_qk),
    "no_previous_token_head": (model, "init_previous_token_head", no_previous_token_head),
}
OF_THE_MODEL = ("smear", "scales", "backout")  # ideas of Tried


def try_out(idea: str) -> None:
    """Put the idea in the place of what a program would build. Before the program is imported."""
    if idea in IDEAS:
        setattr(*IDEAS[idea])
    else:
        model.KINDS |= NEW
        Tried.ideas += (idea,)
        model.GPT = Tried


def main(argv: list[str]) -> int:
    known = sorted({*IDEAS, *OF_THE_MODEL})
    if len(argv) < 2 or argv[0] not in known or argv[1] not in ("train", "eval"):
        raise model.UsageError(
            f"{' '.join(argv[:2])!r}: give {', '.join(known)}; then train or eval"
        )
    try_out(argv[0])
    known_code = code.of_process

    def with_idea():
        """A run with another idea is one of other code."""
        found, edits = known_code()
        idea = {f"{argv[0]} of benchmarks/tried.py": disk.sha256_of(Path(__file__).resolve())}
        return replace(found, files=found.files | idea), edits

    code.of_process = with_idea
    return importlib.import_module(argv[1]).main(argv[2:])


if __name__ == "__main__":
    cli.run(main)
