"""What a model does inside, on one page: `python eval.py look [MODEL] [--prompt TEXT]`.

Runs the raw model on one text, a few dozen times: as it is, stopped after each layer, and without
each head, attention layer and MLP. Writes one HTML file (look.html is its template), which needs
no other file and no network. model.py is not changed, and little is assumed of it: `model.blocks`
is a list, and attention goes through F.scaled_dot_product_attention, or through a softmax over
(B, H, T, T). Where a layer does otherwise, the page says so, and shows no heads of it.

Shapes: T positions, L layers, H heads, D = head_dim, V tokens. Position i holds token i, and
predicts token i + 1. Next: the page itself; docs/look.md says how each number is defined.
"""

import base64
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import data
from config import LARGEST, Dtype, Local, UsageError
from instruments.pages.template import filled, page_file
from machinery import disk
from machinery.errors import NonFiniteError
from machinery.output import say
from machinery.trained import EvalConfig, Trained
from model import GPT
from tokenizer import Tokenizer

BIT = math.log(2)  # nats
LONGEST = 512  # tokens on a page: its maps take a byte for each head and pair of these
KINDS = {  # of head, by where most of its attention goes; test: to copies, in the copy test
    "previous": "previous token",
    "first": "first token",
    "self": "the token itself",
    "test": "induction",
}


@dataclass(frozen=True)
class LookConfig(EvalConfig):
    """A page on what the model does inside, while it reads one text."""

    prompt: str = ""
    """The text; empty: a held-out row."""
    row: Annotated[int, 0, LARGEST] = 0
    """Which held-out row, in the order of `eval.py loss`."""
    tokens: Annotated[int, 8, LONGEST] = 200
    """Length of the text at most. The page grows with its square: 200 tokens of 480 heads are 10
    MB."""
    out: Local = ""
    """The file to write, or a folder for look.html; empty: the folder of the run or export."""
    dtype: Dtype = "fp32"
    """Dtype of the computation; auto: bf16 where the hardware has it."""


# ------------------------------------------------------------------------------- the model, watched


class Probe(TorchFunctionMode):
    """Runs the model, sees its attention and what its blocks return, and takes parts away.

    PyTorch tells a TorchFunctionMode of each function that the model calls. So whatever was done to
    q, k and v (norm, rotation, key_offset, a mask) has been done in what is seen at the kernel. The
    kernel keeps its probabilities to itself: it is called again with the identity as values, which
    returns them. Their product with v is compared to what the kernel returned."""

    def __init__(self, model: GPT, end: int = LARGEST, off=()):
        """Blocks from `end` on return what they get. off: (layer, part) adds nothing; the part is a
        head's number, or "attn" or "mlp", as the block has it."""
        super().__init__()
        self.model = model
        self.end = end
        self.off = off
        self.layer = None  # of the last block that was begun
        self.maps = {}  # layer -> (H, T, T) fp32, a row per query
        self.error = {}  # layer -> largest difference, relative to the output

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """ids (T,) -> logits (T, V) in fp32."""
        self.T = len(ids)
        with ExitStack() as hooks:  # each is removed at its end
            for i, block in enumerate(self.model.blocks):
                enter = lambda *_, i=i: setattr(self, "layer", i)
                hooks.enter_context(block.register_forward_pre_hook(enter))
                if i >= self.end:
                    leave = lambda _, args, out: args[0]
                    hooks.enter_context(block.register_forward_hook(leave))
                if self.off in ((i, "attn"), (i, "mlp")):
                    part = getattr(block, self.off[1])
                    nothing = lambda _, args, out: 0 * out
                    hooks.enter_context(part.register_forward_hook(nothing))
            with self:
                return self.model(ids[None])[0].float()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:  # out (1, H, T, D)
            q, k, v, *rest = args
            identity = torch.eye(k.size(2)).to(k).expand(1, k.size(1), -1, -1)  # of each KV head
            p = func(q, k, identity, *rest, **kwargs).float()  # (1, H, T, T)
            v = v.float().repeat_interleave(p.size(1) // v.size(1), dim=1)  # (1, H, T, D)
            self._see(p, ((p @ v - out).abs().max() / out.abs().max().clamp(min=1e-9)).item())
        elif getattr(func, "__name__", "") == "softmax" and out.shape[2:] == (self.T, self.T):
            self._see(out.float(), 0.0)  # (1, H, T, T)
        else:
            return out
        if self.off and self.off[0] == self.layer and isinstance(self.off[1], int):
            out = out.clone()
            out[:, self.off[1]] = 0
        return out

    def _see(self, p, error):
        """Keep p (1, H, T, T) of this layer; unusable if there are two, or if it is not causal."""
        fits = self.layer not in self.maps and p.shape[2:] == (self.T, self.T)
        self.maps[self.layer] = p[0]
        self.error[self.layer] = error if fits and not p.triu(1).any() else math.inf

    def layers_seen(self) -> list[int]:
        """The layers whose attention is known: the shares times the values are its output."""
        close = torch.finfo(self.model.compute_dtype).eps ** 0.5  # 3e-4 in fp32
        return [i for i, error in sorted(self.error.items()) if error < close]


def nats_of(logits: Tensor, ids: Tensor) -> Tensor:
    """logits (T, V), ids (T,) -> -log p of each token but the first, (T - 1,)."""
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")


# ---------------------------------------------------------------------------- what a head does


def habits(p: Tensor, ids: Tensor, config) -> dict[str, tuple[Tensor, float]]:
    """p (H, T, T), ids (T,) -> where the heads look: {place: (share of their attention (H,), the
    share if they looked at all tokens equally)}, means over the positions that have such a place.

    previous: the token before. first: the first token, of the text or of the document. self: the
    token itself. copy: the tokens that followed earlier copies of this one, which is where an
    induction head looks (Olsson et al. 2022). No two places overlap; positions whose document has
    begun less than two tokens before do not count."""
    i = torch.arange(len(ids), device=ids.device)  # (T,)
    begins = torch.where(ids == config.bos_id, i, 0).cummax(0).values  # of each one's document
    query = i[:, None]
    key = i[None]
    first = (key == 0) | (key == begins[:, None])
    copy = (ids[:, None] == ids.roll(1)[None]) & (key >= 1) & (key <= query - 2) & ~first  # (T, T)
    visible = key <= query
    if config.doc_mask:
        visible = visible & (key >= begins[:, None])
    patterns = {"previous": key == query - 1, "first": first, "self": key == query, "copy": copy}
    found = {}
    for name, pattern in patterns.items():
        pattern = pattern & visible
        rows = pattern.any(1) & (i - begins >= 2)
        if rows.any():
            equal = (pattern.sum(1) / visible.sum(1))[rows].mean().item()
            found[name] = (p * pattern).sum(-1)[:, rows].mean(-1).cpu(), equal
    return found


def copy_test(model: GPT, size: Tensor) -> tuple[dict, dict]:
    """Random tokens, none twice, then the same again: only copying can predict the second half.
    -> n of them, and bits per token of both halves; each layer's habits. size (V,): bytes."""
    text = torch.arange(len(size))[size.cpu() > 0]  # no special tokens
    draw = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
    once = text[draw[: min(100, model.config.seq_len // 2 - 1)]]
    ids = torch.cat([torch.tensor([model.config.bos_id]), once, once]).to(model.cos.device)
    probe = Probe(model)
    n = len(once)
    bits = nats_of(probe(ids), ids) / BIT
    again = bits[n + 1 :].mean().item()  # the first of the second half comes unannounced
    test = dict(n=n, first=bits[:n].mean().item(), again=again)
    return test, {i: habits(p, ids, model.config) for i, p in probe.maps.items()}


def describe_heads(probe: Probe, ids: Tensor, in_test: dict) -> list[dict]:
    """Each head that is seen: its layer, its number, the shares of its attention ({place: (share,
    equal)}; test: `copy` in the copy test), and the kind of head that it is. A name needs a third
    of the attention, and twice what equal attention would give; induction needs it in the test,
    where nothing but copying tells the next token. in_test: the habits there, by layer."""
    found = []
    for i in probe.layers_seen():
        patterns = habits(probe.maps[i], ids, probe.model.config)
        if "copy" in in_test.get(i, {}):
            patterns["test"] = in_test[i]["copy"]
        for h in range(len(probe.maps[i])):
            own = {name: (share[h].item(), equal) for name, (share, equal) in patterns.items()}
            share, equal, best = max(
                ((*own[name], name) for name in KINDS if name in own), default=(0, 1, "")
            )
            kind = KINDS[best] if share > max(1 / 3, 2 * equal) else "mixed"
            found.append(dict(layer=i, head=h, kind=kind, places=own))
    return found


# --------------------------------------------------------------------------- what a part is worth


def switch_off(
    model: GPT, ids: Tensor, whole: Tensor, counts: Tensor, n_bytes: int, heads: list[dict]
) -> Iterator[dict]:
    """Without each attention layer, MLP and head: the change of each token's bits, and of the
    text's bits per byte, with two standard errors (a short text has few tokens). whole (T - 1,):
    nats with all parts; counts (T - 1,): the tokens that have bytes."""
    from tqdm import tqdm

    parts = [
        (i, name)
        for i, block in enumerate(model.blocks)
        for name in ("attn", "mlp")
        if hasattr(block, name)
    ]
    parts += [(h["layer"], h["head"]) for h in heads]
    for layer, part in tqdm(parts, desc="parts switched off", disable=None, leave=False):
        change = (nats_of(Probe(model, off=(layer, part))(ids), ids) - whole) / BIT  # (T - 1,)
        own = change[counts]
        bpb = own.sum().item() / n_bytes
        error = 2 * own.std(correction=0).item() * len(own) ** 0.5 / n_bytes
        yield dict(layer=layer, part=part, bpb=bpb, error=error, change=rounded(change, 2))


# ----------------------------------------------------------------------------------------- the page


def rounded(x: Tensor, digits: int = 3) -> list:
    return [round(value, digits) for value in x.tolist()]


def lens_after(n: int, model: GPT, ids: Tensor) -> dict:
    """What the head makes of the residual stream after n layers (the logit lens): the mean bits of
    a token, and at each position the guess, its probability, that of the next token."""
    early = Probe(model, end=n)(ids)
    nats = nats_of(early, ids)
    p, guess = early.softmax(-1).max(-1)
    rows = [*zip(guess.tolist(), rounded(p), [*rounded((-nats).exp()), 0.0])]
    return dict(mean=nats.mean().item() / BIT, rows=rows)


def facts_of(model: GPT, ids: Tensor, tokenizer: Tokenizer) -> dict:
    """All that the page says of a text, ids (T,) with BOS first."""
    config = model.config
    L = len(model.blocks)
    size = torch.from_numpy(tokenizer.token_bytes).to(ids.device)  # (V,) bytes of each token
    probe = Probe(model)
    logits = probe(ids)  # (T, V)
    if not logits.isfinite().all():
        raise NonFiniteError("the model's output for this text is NaN or infinite")
    nats = nats_of(logits, ids)
    counts = size[ids[1:]] > 0
    n_bytes = max(1, size[ids].sum().item())
    top = logits.softmax(-1).topk(min(5, config.vocab_size))
    test, in_test = copy_test(model, size)
    seen = probe.layers_seen()
    heads = describe_heads(probe, ids, in_test)
    below = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    maps = [(255 * probe.maps[i].cpu()[:, below]).round().byte().numpy().tobytes() for i in seen]
    return dict(
        ids=ids.tolist(),
        words={i: token.decode("latin-1") for i, token in tokenizer.bytes_of.items()},
        bits=rounded(nats / BIT),
        rank=((logits[:-1] > logits[:-1].gather(1, ids[1:, None])).sum(-1) + 1).tolist(),
        top=[list(zip(i.tolist(), rounded(p, 4))) for p, i in zip(*top)],
        lens=[lens_after(n, model, ids) for n in range(L + 1)],
        heads=heads,
        maps=base64.b64encode(zlib.compress(b"".join(maps), 9)).decode(),
        parts=list(switch_off(model, ids, nats, counts, n_bytes, heads)),
        test=test,
        bpb=nats[counts].sum().item() / BIT / n_bytes,
        error=max((probe.error[i] for i in seen), default=0.0),
        unseen=[i for i in range(L) if i not in seen],
        n_layer=L,
        n_head=config.n_head,
        vocab=config.vocab_size,
        bytes=n_bytes,
    )


def choose_text(config: LookConfig, loaded: Trained) -> tuple[list[int], str]:
    """The ids to look at, BOS first, and where they are from."""
    if config.prompt:
        ids = loaded.tokenizer.encode(config.prompt)
        return [loaded.tokenizer.bos_id, *ids], "your prompt"
    manifest = loaded.data
    rows = manifest.rows("val")
    if config.row >= rows:
        raise UsageError(f"--row {config.row}: there are {rows:,} held-out rows, from 0 on")
    source, row = data.val_rows(manifest, config.row + 1)[-1]
    ids = manifest.row("val", source, row).tolist()
    return ids, f"held-out row {config.row} of {manifest.sources[source]}"


def look(config: LookConfig, load_model: Callable) -> None:
    """`eval.py look`: write the page, and print where it is. load_model: EvalConfig ->
    Trained."""
    loaded = load_model(config)
    model = loaded.model
    run_dir = loaded.run_dir
    ids, source = choose_text(config, loaded)
    limit = min(config.tokens, model.config.seq_len)
    if len(ids) > limit:
        say(f"the page shows the first {limit:,} of {len(ids):,} tokens")
    found = facts_of(model, torch.tensor(ids[:limit], device=model.cos.device), loaded.tokenizer)
    origin = loaded.provenance
    found |= dict(source=source, step=origin.step, trained=origin.tokens, tuned=origin.tuned)
    path = page_file(config.out, run_dir, "look.html")
    disk.write_text(path, filled("look.html", title=f"Inside {run_dir.name}", found=found))
    say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
