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
    "gains": replace(SMALL, qk_gain=True),
}


def build(config, seed=0):
    """A model without weights that are constant or tiny, so that every path counts."""
    torch.manual_seed(seed)
    model = GPT(config)
    model.init_weights()
    for p in model.parameters():
        if p.std() < 0.01:
            torch.nn.init.normal_(p, p.mean().item(), std=0.1)
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


def oracle(model, idx):
    """Logits (T, V) of one row idx (T,), one head at a time; of the extras it knows key_offset."""
    c = model.config
    D = c.head_dim
    T = idx.size(0)
    p = dict(model.named_parameters())
    exponent = torch.arange(0, D, 2) / D
    angle = torch.outer(torch.arange(T), c.rope_theta**-exponent).double()  # (T, D/2)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    if c.doc_mask:
        document = (idx == c.bos_id).cumsum(0)
        seen &= document[:, None] == document

    def norm(v):
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rope(v):  # rotate the complex number (v[i], v[i + D/2]) by its angle
        half = torch.complex(v[:, : D // 2].double(), v[:, D // 2 :].double())
        half = half * torch.exp(1j * angle)
        return torch.cat([half.real, half.imag], 1).float()

    def offset(k):  # the slow frequencies, each of two channels, are those of the token before
        k = k.clone()
        for t in reversed(range(1, T)):
            for i in range(D // 4, D // 2):
                if idx[t] != c.bos_id:
                    k[t, [i, i + D // 2]] = k[t - 1, [i, i + D // 2]]
        return k

    x = p["embed.weight"][idx]  # (T, C)
    if c.embed_norm:
        x = norm(x)
    for layer in range(c.n_layer):
        attn = model.blocks[layer].attn
        mlp = model.blocks[layer].mlp
        h = norm(x)
        heads = []
        for head in range(c.n_head):
            group = head // (c.n_head // c.n_kv_head)
            q = h @ attn.q.weight[head * D : (head + 1) * D].T  # (T, D)
            k = h @ attn.k.weight[group * D : (group + 1) * D].T
            v = h @ attn.v.weight[group * D : (group + 1) * D].T
            if "key_offset" in c.extras:
                k = offset(k)
            if c.qk_norm:
                q = norm(q) * (attn.q_gain if c.qk_gain else 1)
                k = norm(k) * (attn.k_gain if c.qk_gain else 1)
            if c.has_rope(layer):
                q = rope(q)
                k = rope(k)
            scores = (q @ k.T / D**0.5).masked_fill(~seen, -torch.inf)
            heads.append(scores.softmax(1) @ v)
        x = x + torch.cat(heads, 1) @ attn.out.weight.T
        h = norm(x)
        up = h @ mlp.up.weight.T
        up = F.silu(h @ mlp.gate.weight.T) * up if c.mlp == "swiglu" else up.relu() ** 2
        x = x + up @ mlp.down.weight.T
    head = p["embed.weight" if c.tie_embeddings else "head.weight"]
    logits = norm(x) @ head[: c.vocab_size].T
    return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


@pytest.mark.parametrize("name", ["plain", "stock", "nope", "key_offset", "doc_mask", "gains"])
@torch.no_grad()
def test_forward_equals_the_slow_oracle(name):
    model = build(VARIANTS[name])
    idx = tokens(model.config, rows=1, length=9)
    idx[0, 4] = model.config.bos_id
    assert_close(model(idx)[0], oracle(model, idx[0]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "activation", ["x = F.relu(x)", "x = F.leaky_relu(x, 0.3)", "return x.tanh()"]
)
def test_an_edited_activation_learns_by_its_own_gradient(activation):
    """Edited in the text, as a learner would; the first is what stands there."""
    text = Path(model_file.__file__).read_text()
    honest = "x = F.relu(x)"
    assert text.count(honest) == 1
    edited = {"__name__": "edited"}
    exec(text.replace(honest, activation), edited)
    torch.manual_seed(0)
    mlp = edited["MLP"](SMALL).double()
    x = torch.randn(3, SMALL.n_embd, dtype=torch.double, requires_grad=True)
    assert torch.equal(mlp(x), model_file.MLP.forward(mlp, x)) == (activation == honest)
    assert torch.autograd.gradcheck(mlp, (x,))


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, n_kv_head=SMALL.n_head), STOCK])
def test_an_edited_part_is_the_one_that_runs(config, monkeypatch):
    """No second branch for some device, size or number of heads: attention and an MLP that give
    zeros make a model without blocks."""
    monkeypatch.setattr(model_file, "attend", lambda q, k, v, mask: torch.zeros_like(q))
    monkeypatch.setattr(model_file.MLP, "forward", lambda mlp, x: torch.zeros_like(x))
    model = build(config)
    idx = tokens(config)
    edited = model(idx)
    model.blocks = model.blocks[:0]
    assert torch.equal(edited, model(idx))
    monkeypatch.setattr(model_file, "cross_entropy", lambda *args: torch.full((2, 3), 7.0))
    assert build(config)(idx, idx) == 7


def test_a_weight_that_a_table_does_not_know_is_refused(monkeypatch):
    model = build(SMALL)
    model.blocks[0].attn.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    for ask in (model.init_weights, model.param_groups):
        with pytest.raises(UsageError, match=r"blocks.0.attn.gain"):
            ask()
    monkeypatch.setitem(model_file.KINDS, "gain", ("scalar", 0.5))
    assert model.param_groups()["scalar"] == [model.blocks[0].attn.gain]
    model.init_weights()
    assert (model.blocks[0].attn.gain == 0.5).all()


def test_a_raw_matrix_counts_as_flops():
    model = build(SMALL)
    before = model.flops_per_token()
    model.blocks[0].attn.register_parameter("gate", torch.nn.Parameter(torch.zeros(5, 7)))
    assert model.flops_per_token() == before + 6 * 35


@pytest.mark.parametrize("name", ["extras", "stock", "nope"])
@torch.no_grad()
def test_a_prompt_read_in_pieces_gives_the_same_logits(name):
    """One that begins with BOS, and one that has it in its middle."""
    model = build(VARIANTS[name])
    idx = tokens(SMALL, length=12)
    idx[1, [0, 6]] = idx[0, [6, 0]]
    cache = model_file.KVCache(model.config, 2, 12, torch.float32, idx.device)
    parts = idx.split((1, 1, 4, 1, 3, 2), dim=1)
    pieces = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    assert_close(pieces, model(idx), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_generation_is_seeded_and_at_temperature_0_the_likeliest():
    """As the whole forward pass has it."""
    model = build(VARIANTS["extras"])
    idx = tokens(SMALL, length=4)
    draw = [model.generate(idx, 8, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draw)
    likeliest = model.generate(idx, 28, temperature=0)
    assert torch.equal(likeliest[:, 4:], model(likeliest)[:, 3:-1].argmax(-1))


def test_a_batch_ends_once_each_row_has_stopped(monkeypatch):
    drawn = iter([[5, 1], [2, 5], [3, 3]])

    def forward(self, idx, cache):
        return 9.0 * F.one_hot(torch.tensor(next(drawn)), 100)[:, None]  # (2, 1, V)

    monkeypatch.setattr(GPT, "forward", forward)
    out = build(SMALL).generate(tokens(SMALL, length=4), 8, temperature=0, stop_id=5)
    assert out[:, 4:].tolist() == [[5, 2], [1, 5]]


@pytest.mark.parametrize("name", ["extras", "stock"])
@torch.no_grad()
def test_meta_build_equals_plain_build(name):
    """Whatever to_empty leaves, and whatever nn.Linear draws for itself."""
    with torch.device("meta"):
        meta = GPT(VARIANTS[name])
    meta.to_empty(device="cpu")
    for t in [*meta.parameters(), *meta.buffers()]:
        t.fill_(float("nan"))
    plain = GPT(VARIANTS[name])
    states = []
    for model in (plain, meta):
        torch.manual_seed(3)
        model.init_weights()
        states.append(dict(model.named_parameters()) | dict(model.named_buffers()))
    assert_close(*states, atol=0, rtol=0)


def test_the_table_of_initial_values(monkeypatch):
    """Row by row, the standard deviations that model.KINDS promises: of the first layer as well,
    but for the head that looks at the token before."""
    monkeypatch.setattr(model_file, "init_previous_token_head", lambda *args: None)
    shape = dict(n_layer=4, n_embd=256, n_head=2, n_kv_head=2, mlp_hidden=1024)
    config = replace(d20, **shape, vocab_size=4096, seq_len=64, extras=EXTRAS)
    unit = config.n_embd**-0.5
    small = 0.006
    untied = {"embed.weight": 0.8, "head.weight": 0.001, "attn.out.weight": 0, "mlp.down.weight": 0}
    untied |= dict.fromkeys(("attn.q.weight", "attn.k.weight", "attn.v.weight"), unit)
    untied |= {"mlp.up.weight": 0.4 * unit, "value_embeds": unit}
    tied = dict.fromkeys(("embed.weight", "attn.q.weight", "mlp.up.weight"), small)
    tied |= dict.fromkeys(("attn.out.weight", "mlp.down.weight"), small / 8**0.5)
    for table in (untied, tied):
        torch.manual_seed(0)
        model = GPT(replace(config, tie_embeddings=table is tied, qk_gain=True))
        model.init_weights()
        named = {name: p.detach() for name, p in model.named_parameters()}
        for part, std in table.items():
            found = torch.cat([p.flatten() for name, p in named.items() if part in name])
            assert float(found.std()) == pytest.approx(std, rel=0.03), part
        gates = torch.cat([p.flatten() for name, p in named.items() if "value_gate" in name])
        assert 0 <= gates.min() < gates.max() <= 0.02
        assert model.blocks[3].attn.q_gain.eq(1).all() and len(model.param_groups()["scalar"]) == 8


@pytest.mark.parametrize("name", ["tiny", "d12"])
@torch.no_grad()
def test_one_head_begins_by_looking_at_the_token_before(name, monkeypatch):
    T = 256
    before = []

    def attend(q, k, v, mask):
        scores = q @ k.mT / q.size(-1) ** 0.5 + torch.full((T, T), -1e9).triu(1)
        weights = scores.softmax(-1)
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


def test_one_graph_no_breaks_no_recompiles():
    """Training steps with eager evaluations and generation in between compile exactly once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(VARIANTS["extras"])
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="eager")
    idx = tokens(SMALL, length=32)
    for _ in range(3):
        compiled(idx, idx).backward()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.eval()(idx[:1], idx[:1], reduction="none")
            model.generate(idx[:1, :4], 3)
        model.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_sharded_blocks_are_compiled_once_per_kind():
    """Block by block, as under FSDP: with RoPE and without make two graphs, not one per layer."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(replace(SMALL, n_layer=6, nope_every=3, extras=()))
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True, backend="eager")
    model(tokens(SMALL, length=32))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
