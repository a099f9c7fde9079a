"""model.py against slow, obvious versions of itself, and against the published counts."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import run_code
from torch.testing import assert_close

import model as model_file
from config import EXTRAS, PRESETS, GPTConfig, UsageError
from model import GPT

SIZES = dict(seq_len=32, vocab_size=100, n_layer=3, n_embd=32, mlp_hidden=64)
SMALL = GPTConfig(**SIZES, n_head=4, n_kv_head=2, head_dim=8)
STOCK = replace(
    SMALL, mlp="swiglu", qk_norm=False, embed_norm=False, tie_embeddings=True, logit_softcap=0.0
)
VARIANTS = {
    "plain": SMALL,
    "extras": replace(SMALL, extras=EXTRAS),
    "key_offset": replace(SMALL, extras=("key_offset",)),
    "stock": STOCK,
    "nope": replace(STOCK, nope_every=3),
    "doc_mask": replace(SMALL, doc_mask=True, extras=("key_offset",)),
}


def build(config, seed=0):
    """A model whose zero-initialized weights are random too, so that every path counts."""
    torch.manual_seed(seed)
    model = GPT(config)
    model.init_weights()
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def tokens(config, rows=2, length=None, seed=1):
    g = torch.Generator().manual_seed(seed)
    idx = torch.randint(1, config.vocab_size, (rows, length or config.seq_len), generator=g)
    idx[:, 0] = config.bos_id
    return idx


d20 = replace(PRESETS["d20"].model, extras=())
GOLDEN = [  # configuration, parameters, FLOPs per token in the full and in the causal convention
    (replace(d20, vocab_size=65_536), 560_988_160, 3_491_758_080, 3_177_185_280),
    (replace(PRESETS["d12"].model, extras=()), 135_266_304, 887_095_296, 773_849_088),
    (d20, 477_102_080, 3_240_099_840, 2_925_527_040),
    (replace(PRESETS["d24"].model, extras=()), 780_140_544, 5_284_823_040, 4_831_838_208),
    (PRESETS["smol-135m"].model, 134_479_872, 1_231_552_512, 1_019_215_872),
    (PRESETS["biatron-345m"].model, 345_292_800, 3_581_706_240, 2_826_731_520),
]


@pytest.mark.parametrize("config, n_params, full, causal", GOLDEN)
def test_published_parameter_and_flop_counts(config, n_params, full, causal):
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == n_params
    assert model.flops_per_token() == full
    assert model.flops_per_token(causal=True) == causal


def oracle(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """Logits of one row, one position and one head at a time; of the extras it knows key_offset."""
    c = model.config
    T = idx.size(0)
    p = dict(model.named_parameters())
    angles = [
        [t * c.rope_theta ** (-2 * i / c.head_dim) for i in range(c.head_dim // 2)]
        for t in range(T)
    ]

    def rope(v, t):  # rotate the complex number (v[i], v[i + D/2]) by its angle
        half = torch.complex(v[: c.head_dim // 2].double(), v[c.head_dim // 2 :].double())
        half = half * torch.exp(1j * torch.tensor(angles[t], dtype=torch.float64))
        return torch.cat([half.real, half.imag]).float()

    def norm(v):
        return v / (v.square().mean() + 1e-6).sqrt()

    x = [p["embed.weight"][i] for i in idx]
    if c.embed_norm:
        x = [norm(v) for v in x]
    for layer in range(c.n_layer):
        w = {k: p[f"blocks.{layer}.{k}.weight"] for k in ("attn.q", "attn.k", "attn.v", "attn.out")}
        h = [norm(v) for v in x]

        def key(s, kv, w=w, h=h):
            own = w["attn.k"][kv] @ h[s]
            half = c.head_dim // 2
            if "key_offset" in c.extras and s > 0 and idx[s] != c.bos_id:
                before = w["attn.k"][kv] @ h[s - 1]
                for i in range(half // 2, half):  # the slow frequencies, each of two channels
                    own[i], own[i + half] = before[i], before[i + half]
            return own

        for t in range(T):
            begins = [s for s in range(t + 1) if idx[s] == c.bos_id]  # of documents, up to t
            seen = range(begins[-1] if c.doc_mask else 0, t + 1)
            heads = []
            for head in range(c.n_head):
                group = head // (c.n_head // c.n_kv_head)
                rows = slice(head * c.head_dim, (head + 1) * c.head_dim)
                kv = slice(group * c.head_dim, (group + 1) * c.head_dim)
                fix = (lambda v: norm(v)) if c.qk_norm else (lambda v: v)
                turn = rope if c.has_rope(layer) else (lambda v, t: v)
                q = fix(turn(w["attn.q"][rows] @ h[t], t))
                ks = [fix(turn(key(s, kv), s)) for s in seen]
                vs = [w["attn.v"][kv] @ h[s] for s in seen]
                a = torch.softmax(torch.stack([q @ k for k in ks]) / c.head_dim**0.5, 0)
                heads.append(sum(a[i] * vs[i] for i in range(len(seen))))
            x[t] = x[t] + w["attn.out"] @ torch.cat(heads)
        mlp = model.blocks[layer].mlp
        for t in range(T):
            up = mlp.up.weight @ norm(x[t])
            hidden = (
                F.silu(mlp.gate.weight @ norm(x[t])) * up if c.mlp == "swiglu" else up.relu() ** 2
            )
            x[t] = x[t] + mlp.down.weight @ hidden
    head = p["embed.weight"] if c.tie_embeddings else p["head.weight"]
    logits = torch.stack([head @ norm(v) for v in x])[:, : c.vocab_size]
    return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


@pytest.mark.parametrize("name", ["plain", "stock", "nope", "key_offset", "doc_mask"])
@torch.no_grad()
def test_forward_equals_the_slow_oracle(name):
    model = build(VARIANTS[name])
    idx = tokens(model.config, rows=1, length=9)
    idx[0, 4] = model.config.bos_id
    assert_close(model(idx)[0], oracle(model, idx[0]), atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_loss_is_the_cross_entropy_of_the_logits_with_these_targets():
    model = build(VARIANTS["extras"])
    idx = tokens(model.config)
    targets = tokens(model.config, seed=2)
    by_hand = -F.log_softmax(model(idx).double(), -1).gather(-1, targets[..., None])[..., 0]
    each = model(idx, targets, reduction="none")
    assert_close(each.double(), by_hand, atol=1e-5, rtol=1e-5)
    assert_close(model(idx, targets), each.mean())


ACTIVATIONS = {
    "as it is": "x = F.relu(x)",
    "GELU": "return F.gelu(x)",
    "SiLU": "return F.silu(x)",
    "ReLU": "return F.relu(x)",
    "leaky ReLU squared": "x = F.leaky_relu(x, 0.3)",
    "tanh": "return x.tanh()",
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_edited_activation_learns_by_its_own_gradient(name):
    """Edited in the text, as a learner would."""
    text = Path(model_file.__file__).read_text()
    here = ACTIVATIONS["as it is"]
    assert text.count(here) == 1
    edited = {"__name__": "edited"}
    exec(text.replace(here, ACTIVATIONS[name]), edited)
    torch.manual_seed(0)
    mlp = edited["MLP"](SMALL).double()
    x = torch.randn(3, SMALL.n_embd, dtype=torch.double, requires_grad=True)
    assert torch.equal(mlp(x), model_file.MLP.forward(mlp, x)) == (name == "as it is")
    assert torch.autograd.gradcheck(mlp, (x,))


def test_an_edited_attention_or_loss_is_the_one_that_runs(monkeypatch):
    """No second branch for some device, size or number of heads."""
    monkeypatch.setattr(model_file, "attend", lambda q, k, v, mask: torch.zeros_like(q))
    for config in (SMALL, replace(SMALL, n_kv_head=SMALL.n_head), VARIANTS["stock"]):
        model = build(config)
        idx = tokens(config)
        x = torch.randn(*idx.shape, config.n_embd)
        T = idx.size(1)
        ctx = model_file.Context(idx, model.cos[:T], model.sin[:T], None, None)
        assert not model.blocks[0].attn(x, None, ctx).any()
    monkeypatch.undo()
    monkeypatch.setattr(model_file, "cross_entropy", lambda *args: torch.full((2, 3), 7.0))
    assert build(SMALL)(tokens(SMALL), tokens(SMALL)) == 7
    monkeypatch.setattr(model_file.MLP, "forward", lambda mlp, x: x * 0)
    assert not build(SMALL).blocks[0].mlp(torch.ones(1, 1, SMALL.n_embd)).any()


def test_a_weight_that_a_table_does_not_know_is_refused(monkeypatch):
    model = build(SMALL)
    model.blocks[0].attn.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    for ask in (model.init_weights, model.param_groups):
        with pytest.raises(UsageError, match=r"blocks.0.attn.gain"):
            ask()
    monkeypatch.setitem(model_file.KINDS, "gain", ("scalar", 0.5, 0.5))
    assert model.param_groups()["scalar"] == [model.blocks[0].attn.gain]
    model.init_weights()
    assert (model.blocks[0].attn.gain == 0.5).all()


def test_a_raw_matrix_counts_as_flops():
    model = build(SMALL)
    before = model.flops_per_token()
    model.blocks[0].attn.register_parameter("gate", torch.nn.Parameter(torch.zeros(5, 7)))
    assert model.flops_per_token() == before + 6 * 35


@torch.no_grad()
def test_the_padding_of_the_vocabulary_is_never_seen():
    model = build(SMALL)
    assert model.embed.num_embeddings == model.head.out_features == 128
    idx = tokens(SMALL)
    targets = tokens(SMALL, seed=2)
    before = model(idx, targets)
    model.head.weight[100:] = 1e3
    assert torch.equal(model(idx, targets), before)
    assert model(idx).shape == (2, 32, 100)
    assert model.generate(idx[:, :4], 20, temperature=5.0, top_k=1000).max() < 100


@pytest.mark.parametrize("name", ["extras", "key_offset", "stock", "nope"])
@torch.no_grad()
def test_cached_generation_takes_the_token_that_the_whole_forward_prefers(name):
    model = build(VARIANTS[name])
    idx = tokens(model.config, rows=3, length=6)
    out = model.generate(idx, 26, temperature=0)
    assert out.shape == (3, 32)
    logits = model(out)[:, 5:-1]
    best = logits.max(-1).values
    chosen = logits.gather(-1, out[:, 6:, None])[..., 0]
    assert_close(chosen, best, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 7), (1, 1, 4, 1, 3, 2)])
@pytest.mark.parametrize("first", [0, 9], ids=["BOS", "no BOS"])
@torch.no_grad()
def test_a_prompt_read_in_pieces_gives_the_same_logits(lengths, first):
    model = build(VARIANTS["extras"])
    idx = tokens(SMALL, length=12)
    idx[:, 0] = first
    idx[1, 6] = SMALL.bos_id
    cache = model_file.KVCache(model.config, 2, 12, torch.float32, idx.device)
    pieces = torch.cat([model(part, cache=cache) for part in idx.split(lengths, dim=1)], dim=1)
    assert_close(pieces, model(idx), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_generation_is_seeded_and_stops_at_the_stop_token():
    model = build(SMALL)
    idx = tokens(SMALL, length=4)
    draw = [model.generate(idx, 8, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draw)
    likeliest = model.generate(idx[:1], 8, temperature=0)
    stopped = model.generate(idx[:1], 8, temperature=0, stop_id=int(likeliest[0, 5]))
    assert torch.equal(stopped, likeliest[:, : stopped.size(1)]) and stopped.size(1) <= 6
    with pytest.raises(UsageError, match=str(SMALL.seq_len)):
        model.generate(tokens(SMALL), 1)


def test_a_batch_ends_once_each_row_has_stopped(monkeypatch):
    drawn = iter([[5, 1], [2, 5], [3, 3]])

    def forward(self, idx, cache):
        return 9.0 * F.one_hot(torch.tensor(next(drawn)), 100)[:, None]  # (2, 1, V)

    monkeypatch.setattr(GPT, "forward", forward)
    out = build(SMALL).generate(tokens(SMALL, length=4), 8, temperature=0, stop_id=5)
    assert out[:, 4:].tolist() == [[5, 2], [1, 5]]


@pytest.mark.parametrize("name", ["plain", "extras", "stock"])
def test_meta_build_equals_plain_build(name):
    plain = GPT(VARIANTS[name])
    with torch.device("meta"):
        meta = GPT(VARIANTS[name])
    assert all(t.is_meta for t in [*meta.parameters(), *meta.buffers()])
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for t in [*meta.parameters(), *meta.buffers()]:
            t.fill_(float("nan"))  # what to_empty leaves may be anything
    torch.manual_seed(3)
    meta.init_weights()
    torch.manual_seed(3)
    plain.init_weights()  # again: what nn.Linear drew for itself in between must not matter
    for (key, a), b in zip(plain.state_dict().items(), meta.state_dict().values()):
        assert torch.equal(a, b), key
    assert torch.equal(plain.cos, meta.cos) and torch.equal(plain.sin, meta.sin)


def std_of(model, suffix):
    """Without what init_previous_token_head changes: layer 0, a quarter of the embeddings."""
    named = {n: p.detach() for n, p in model.named_parameters()}
    if suffix == "embed.weight":
        return named[suffix][:, model.config.n_embd // 4 :].std()
    later = [p for n, p in named.items() if n.endswith(suffix) and not n.startswith("blocks.0.")]
    return torch.cat([p.flatten() for p in later]).std()


def test_the_table_of_initial_values():
    """Row by row, the standard deviations that model.KINDS promises."""
    shape = dict(n_layer=4, n_embd=256, n_head=2, n_kv_head=2, mlp_hidden=1024)
    config = replace(d20, **shape, vocab_size=4096, seq_len=64)
    unit = config.n_embd**-0.5
    small = 0.006
    untied = {"embed.weight": 0.8, "head.weight": 0.001, "attn.out.weight": 0, "mlp.down.weight": 0}
    untied |= dict.fromkeys(("attn.q.weight", "attn.k.weight", "attn.v.weight"), unit)
    untied |= {"mlp.up.weight": 0.4 * unit}
    tied = dict.fromkeys(("embed.weight", "attn.q.weight", "mlp.up.weight"), small)
    tied |= dict.fromkeys(("attn.out.weight", "mlp.down.weight"), small / 8**0.5)
    for tie, extras, table in ((False, EXTRAS, untied), (True, (), tied)):
        torch.manual_seed(0)
        model = GPT(replace(config, tie_embeddings=tie, extras=extras))
        model.init_weights()
        for suffix, std in table.items():
            assert float(std_of(model, suffix)) == pytest.approx(std, rel=0.03), suffix
        for embed in model.value_embeds.values():
            assert float(embed.weight.detach().std()) == pytest.approx(unit, rel=0.03)
        gates = [p for n, p in model.named_parameters() if "value_gate" in n]
        assert bool(gates) != tie and all(0 <= g.min() and g.max() <= 0.02 for g in gates)


@pytest.mark.parametrize("name", ["tiny", "d12"])
@torch.no_grad()
def test_one_head_begins_by_looking_at_the_token_before(name, monkeypatch):
    T = 256
    before = []

    def attend(q, k, v, mask):
        scores = q @ k.mT / q.size(-1) ** 0.5
        weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -1e9).softmax(-1)
        before.append(weights[0].diagonal(-1, 1, 2).mean(1))  # (H,)
        return weights @ v

    monkeypatch.setattr(model_file, "attend", attend)
    config = replace(PRESETS[name].model, n_layer=2, seq_len=T, extras=())
    model = GPT(config)
    torch.manual_seed(0)
    model.init_weights()
    model(tokens(config, rows=1, length=T))
    heads = torch.cat(before)  # of both layers
    assert heads[0] > 0.6 and heads[1:].max() < 0.1
    assert model.blocks[0].attn.out.weight[:, config.head_dim :].count_nonzero() == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_while_building_is_one_copy_of_the_model():
    """Peak host memory of meta + to_empty + init_weights, in a process of its own."""
    program = textwrap.dedent("""
        import re, torch
        from config import GPTConfig
        from model import GPT
        torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
        torch.empty(1 << 20).uniform_()
        status = lambda: open("/proc/self/status").read()
        rss = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", status())[1])
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=8, vocab_size=8192, n_embd=768, mlp_hidden=3072))
        size = 4 * sum(p.numel() for p in model.parameters())
        before = rss()
        model.to_empty(device="cpu")
        model.init_weights()
        print((rss() - before) / size)
    """)
    assert 0.5 < float(run_code(program)) <= 1.1


@pytest.mark.parametrize("name", ["extras", pytest.param("stock", marks=pytest.mark.slow)])
def test_one_graph_no_breaks_no_recompiles(name):
    """Training steps with eager evaluations and generation in between compile exactly once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(VARIANTS[name])
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="eager")
    idx = tokens(SMALL, length=33)
    inputs = idx[:, :-1].contiguous()
    targets = idx[:, 1:].contiguous()
    for step in range(6):
        compiled(inputs, targets).backward()
        model.zero_grad(set_to_none=True)
        if step % 2 == 0:
            with torch.no_grad():
                model.eval()(inputs[:1], targets[:1], reduction="none")
                model.generate(inputs[:1, :4], 3)
            model.train()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def test_sharded_blocks_are_compiled_once_per_kind():
    """Block by block, as under FSDP: with RoPE and without make two graphs, not one per layer."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(replace(SMALL, n_layer=6, nope_every=3, extras=()))
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True, backend="eager")
    model(tokens(SMALL, length=32))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
