"""train.py with one idea that model.py and optim.py do not have: what others use, or what we left.

    python benchmarks/tried.py smear tiny --steps 400      an idea, then the options of train.py

For benchmarks/scaling.py, which asks whether an idea pays as tokens grow. One that does belongs in
model.py. Initial values are nanochat's, where it has the idea.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import model
import optim
from machinery import cli

GATE_CHANNELS = 24  # what a gate looks at
FAST = 10  # Adam moves a weight by the rate; a factor that is 10 times the weight, by 10 rates
NEW = {"smear_gate": "matrix", "head_gate": "matrix"}
NEW |= dict.fromkeys(("smear", "residual", "first", "backout"), "scalar")


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

    @torch.no_grad()
    def init_weight(self, name, weight):
        kind, along = model.kind_of(name), torch.linspace(0, 1, len(weight), device=weight.device)
        if kind in ("smear_gate", "head_gate"):
            weight.uniform_(0, 0.02)
        elif kind == "smear":
            weight.zero_()
        elif kind == "residual":
            weight.copy_(1.15 - 0.10 * along)
        elif kind == "first":
            weight.copy_((0.20 - 0.15 * along) / FAST)
        elif kind == "backout":
            weight.fill_(0.2 / FAST)
        else:
            super().init_weight(name, weight)

    def forward(self, idx, targets=None, reduction="mean", cache=None):
        assert cache is None, "an idea that is tried out is not sampled from"
        config, layers, T = self.config, len(self.blocks), idx.size(1)
        begins = idx == config.bos_id  # (B, T)
        begins[:, 0] = True
        at = model.Positions(self.cos[:T], self.sin[:T], begins, None, None)
        x = model.rms_norm(self.embed(idx).to(self.compute_dtype))  # (B, T, C)
        factor = {k: p.to(x.dtype) for k, p in self.named_parameters() if NEW.get(k) == "scalar"}
        if "smear" in factor:
            gate = FAST * factor["smear"] * torch.sigmoid(self.smear_gate(x[..., :GATE_CHANNELS]))
            x = x + gate * ~begins[..., None] * model.token_before(x, None, 0)
        first = x
        for layer, block in enumerate(self.blocks):
            value_embed = None
            if config.has_value_embed(layer):
                value_embed = self.value_embeds[str(layer)](idx).to(x.dtype)
            if "first" in factor:
                x = factor["residual"][layer] * x + FAST * factor["first"][layer] * first
            x = block(x, value_embed, at)
            if layer == layers // 2:
                middle = x
        if "backout" in factor:
            x = x - FAST * factor["backout"] * middle
        x, weight = model.rms_norm(x), self.head.weight.to(x.dtype)
        if targets is None:
            return model.head_logits(x, weight, config)
        loss = self.cross_entropy(x, weight, targets, config)  # (B, T)
        return loss.mean() if reduction == "mean" else loss


class GatedOut(model.Linear):
    """The out projection, of heads that are multiplied by gates first."""

    def forward(self, y):
        heads = y.unflatten(-1, (self.gates.size(-1), -1)) * self.gates[..., None]  # (B, T, H, D)
        return super().forward(heads.flatten(-2))


class GatedAttention(model.Attention):
    """Each head's output times 2 sigmoid(W x), which begins near 1."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out = GatedOut(self.out.in_features, self.out.out_features)
        self.head_gate = model.Linear(GATE_CHANNELS, config.n_head)

    def forward(self, x, value_embed, at):
        self.out.gates = 2 * torch.sigmoid(self.head_gate(x[..., :GATE_CHANNELS]))  # (B, T, H)
        return super().forward(x, value_embed, at)


def slow_momentum(step, steps, warmup=40, decay=0.65, usual=optim.momentum_at):
    """Muon's momentum with twice as long a warmup."""
    return usual(step, steps, 2 * warmup, decay)


def no_previous_token_head(*_) -> None:
    """No head begins by looking back."""


def try_out(idea: str) -> None:
    """Put the idea in the place of what train.py would build. Before train.py is imported."""
    model.GROUP_OF |= NEW
    if idea == "momentum":
        optim.momentum_at = slow_momentum
    elif idea == "no_previous_token_head":
        model.GPT._init_previous_token_head = no_previous_token_head
    else:
        Tried.ideas = ("smear", "scales", "backout") if idea == "nanochat" else (idea,)
        model.GPT = Tried
        if idea == "head_gates":
            model.Attention = GatedAttention


IDEAS = "smear scales backout nanochat head_gates momentum no_previous_token_head".split()


def main(argv: list[str]) -> int:
    idea, *options = argv or [""]
    if idea not in IDEAS:
        raise model.UsageError(f"{idea!r} is no idea; choose from {', '.join(IDEAS)}")
    try_out(idea)
    import train

    return train.main(options)


if __name__ == "__main__":
    cli.run(main)
