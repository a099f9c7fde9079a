"""instruments/pages/look.py: its numbers against slow and obvious ones; its page, in a browser."""

import base64
import json
import math
import re
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from browsing import SCREENS, browser, opened  # noqa: F401
from conftest import train_here
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import data
import eval as evaluate
from bits_per_byte import score_text
from config import GPTConfig, UsageError
from instruments.pages import look
from instruments.pages.look import Probe
from instruments.pages.template import filled
from machinery.errors import NonFiniteError
from machinery.shards import Manifest
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer

CPU = ["--device", "cpu"]
SEVERAL = settings(
    max_examples=8,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# Models of every shape that a preset has, and others.
SHAPES = st.builds(
    lambda groups, per, **other: dict(n_head=groups * per, n_kv_head=groups, **other),
    groups=st.integers(1, 3),
    per=st.integers(1, 3),
    n_layer=st.integers(1, 4),
    head_dim=st.sampled_from([4, 8, 16]),
    mlp=st.sampled_from(["relu2", "swiglu"]),
    nope_every=st.sampled_from([0, 1, 2]),
    logit_softcap=st.sampled_from([0.0, 15.0]),
    extras=st.lists(st.sampled_from(["key_offset", "value_embeds"]), max_size=2).map(tuple),
    **{name: st.booleans() for name in ("qk_norm", "embed_norm", "tie_embeddings", "doc_mask")},
)


ONE_HEAD = dict(n_layer=1, n_head=1, n_kv_head=1, head_dim=8)


def random_model(shape: dict, seed: int = 0, **more) -> GPT:
    """All of its weights at work: none is at 0, as `out` and `down` are at first."""
    sizes = dict(seq_len=48, vocab_size=70, n_embd=32, mlp_hidden=48)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**sizes | shape | more))
    model.init_weights()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=1.5 * weight.size(-1) ** -0.5)
    return model.eval()


def text_for(model: GPT, T: int = 40, seed: int = 0) -> torch.Tensor:
    """Random ids (T,), BOS first and once more within."""
    torch.manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (T,))
    ids[0] = ids[T // 3] = model.config.bos_id
    return ids


def kernel_by_hand(kept: list, q, k, v, attn_mask=None, **_) -> torch.Tensor:
    """PyTorch's kernel on one row, causal or with a mask, one query after another: q and what it
    returns (1, H, T, D). Keeps its shares (H, T, T)."""
    _, H, T, D = q.shape
    shares = torch.zeros(H, T, T)
    out = torch.zeros_like(q)
    for h in range(H):
        g = h * k.size(1) // H
        for t in range(T):
            seen = torch.arange(T) <= t if attn_mask is None else attn_mask[..., t, :].flatten()
            shares[h, t, seen] = (k[0, g, seen] @ q[0, h, t] / D**0.5).softmax(0)
            out[0, h, t] = shares[h, t] @ v[0, g]
    kept.append(shares)
    return out


@SEVERAL
@given(SHAPES, st.integers(0, 99))
def test_the_shares_are_those_that_give_the_models_output(shape, seed):
    model = random_model(shape, seed)
    ids = text_for(model, 20, seed)
    probe = Probe(model)
    logits = probe(ids)
    assert probe.layers_seen() == list(range(model.config.n_layer))
    assert max(probe.error.values()) < 1e-5
    kept = []
    slow = partial(kernel_by_hand, kept)
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", slow), torch.no_grad():
        assert (model(ids[None])[0] - logits).abs().max() < 1e-4
    for p, shares in zip(probe.maps.values(), kept, strict=True):
        assert (p - shares).abs().max() < 1e-5 and (p.sum(-1) - 1).abs().max() < 1e-6


@SEVERAL
@given(SHAPES, st.integers(0, 99), st.data())
def test_a_part_that_is_off_adds_nothing(shape, seed, draw):
    """The same as with its columns of `out`, or all of `out` or `down`, at 0. A lens is the last
    step on what the layers have returned. Where nothing is off, nothing changes, to the bit; and
    the model is as it was."""
    model = random_model(shape, seed)
    ids = text_for(model, 24, seed)
    probe = Probe(model)
    with torch.no_grad():
        plain = model(ids[None])[0]
    assert torch.equal(probe(ids), plain)
    layer = draw.draw(st.integers(0, model.config.n_layer - 1))
    part = draw.draw(st.integers(0, model.config.n_head - 1) | st.sampled_from(["attn", "mlp"]))
    off = Probe(model, off=(layer, part))(ids)
    n = draw.draw(st.integers(1, model.config.n_layer))
    early = Probe(model, end=n)(ids)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    block = model.blocks[layer]
    weight = block.mlp.down.weight if part == "mlp" else block.attn.out.weight
    D = model.config.head_dim
    columns = slice(part * D, part * D + D) if isinstance(part, int) else slice(None)
    with torch.no_grad():
        whole = model.blocks
        model.blocks = whole[:n]
        assert torch.equal(early, model(ids[None])[0])
        model.blocks = whole
        weight[:, columns] = 0
        assert (model(ids[None])[0] - off).abs().max() < 1e-4


def test_habits_are_counted_one_by_one():
    for doc_mask in (False, True):
        model = random_model(dict(n_layer=1, n_head=3, n_kv_head=3, head_dim=8), doc_mask=doc_mask)
        ids = text_for(model) % 9  # with many copies, and a few more BOS
        probe = Probe(model)
        probe(ids)
        p = probe.maps[0]
        bos = model.config.bos_id
        sums = {name: [] for name in ("previous", "first", "self", "copy")}
        for i in range(len(ids)):
            begin = max(j for j in range(i + 1) if j == 0 or ids[j] == bos)
            low = begin if doc_mask else 0
            if i - begin < 2:
                continue
            first = {0, begin} & set(range(low, i + 1))
            after = {
                j for j in range(max(low, 1), i - 1) if ids[j - 1] == ids[i] and j not in first
            }
            places = dict(previous={i - 1}, first=first, self={i}, copy=after)
            for name, there in places.items():
                if there:
                    share = sum(p[:, i, j] for j in there)
                    sums[name].append((share, len(there) / (i + 1 - low)))
        found = look.habits(p, ids, model.config)
        assert found.keys() == sums.keys()
        for name, (share, equal) in found.items():
            shares, equals = zip(*sums[name])
            assert (torch.stack(shares).mean(0) - share).abs().max() < 1e-6
            assert equal == pytest.approx(sum(equals) / len(equals))


class Flipped(torch.nn.Module):
    """A student's attention, from the model's own modules, in one of several ways."""

    def __init__(self, attn, how: str):
        super().__init__()
        self.attn = attn
        self.how = how

    def forward(self, x, value_embed, at):
        c = self.attn.config
        B, T, _ = x.shape
        q, k, v = (
            m(x).view(B, T, c.n_head, c.head_dim).transpose(1, 2)
            for m in (self.attn.q, self.attn.k, self.attn.v)
        )
        scores = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        if self.how == "by hand":
            y = scores.softmax(-1) @ v
        elif self.how == "sink":  # a column that takes attention away
            scores = torch.cat([scores, torch.zeros(B, c.n_head, T, 1)], -1)
            y = torch.softmax(scores, -1)[..., :-1] @ v
        elif self.how == "twice":  # as in differential attention
            y = (scores.softmax(-1) - 0.5 * (scores / 2).softmax(-1)) @ v
        elif self.how == "linear":
            y = (torch.relu(q) @ torch.relu(k).mT).tril() @ v
        elif self.how == "dropped":  # the kernel does something that its arguments do not say
            kernel = torch.nn.functional.scaled_dot_product_attention
            y = kernel(q, k, v, is_causal=True, dropout_p=0.5)
        return self.attn.out(y.transpose(1, 2).reshape(B, T, -1))


@pytest.mark.parametrize("how", ["by hand", "sink", "twice", "linear", "dropped"])
def test_the_attention_of_a_student(how):
    """Shown if it can be computed again; otherwise the page says that it was not."""
    model = random_model(dict(n_layer=3, n_head=2, n_kv_head=2, head_dim=8))
    attn = model.blocks[1].attn
    model.blocks[1].attn = Flipped(attn, how)
    probe = Probe(model)
    ids = text_for(model)
    probe(ids)
    assert probe.layers_seen() == ([0, 1, 2] if how == "by hand" else [0, 2])
    if how == "by hand":
        off = Probe(model, off=(1, 1))(ids)
        with torch.no_grad():
            attn.out.weight[:, 8:] = 0
            assert (model(ids[None])[0] - off).abs().max() < 1e-4


# ----------------------------------------------------------------------------------- the command
@pytest.fixture
def tokenizer(small_data):
    return Tokenizer.load(small_data / "tokenizer.json")


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    """A run with grouped queries."""
    run_dir = tmp_path_factory.mktemp("look") / "run"
    shape = "--n_layer 3 --n_head 4 --n_kv_head 2 --steps 25 --eval_every 0".split()
    assert train_here(small_data, run_dir, *shape) == 0
    return run_dir


def look_at(run_dir: Path, *words) -> dict:
    """What the page of a command says: its data."""
    assert evaluate.main(["look", str(run_dir), *map(str, words), *CPU]) == 0
    page = (run_dir / "look.html").read_text()
    text = re.search(r'<script type="application/json" id=data>(.*?)</script>', page, re.DOTALL)
    return json.loads(text[1])


def model_of(run_dir) -> GPT:
    return evaluate.load_model(EvalConfig(str(run_dir), device="cpu", dtype="fp32")).model


def test_the_surprise_of_a_row_is_its_loss(trained, small_data):
    """Of a whole row: nats per token and bits per byte as `eval.py loss` computes them."""
    manifest = Manifest.load(small_data)
    row = 3
    found = look_at(trained, "--row", row, "--tokens", 64)
    assert found["source"] == f"held-out row {row} of {manifest.sources[0]}"
    assert len(found["ids"]) == 64
    inputs, targets, sources = [*data.val_batches(manifest, 1, row + 1)][row]
    batch = inputs[:, :63], targets[:, :63], sources  # BOS and 63 more
    token_bytes = torch.from_numpy(manifest.token_bytes())
    nats, bpb = score_text(model_of(trained), [batch], token_bytes)[:2]
    assert sum(found["bits"]) * math.log(2) / 63 == pytest.approx(nats, abs=1e-3)
    assert found["bpb"] == pytest.approx(bpb, abs=1e-5)
    assert found["lens"][-1]["mean"] * math.log(2) == pytest.approx(nats, abs=1e-5)


def test_the_page_says_what_the_model_computes(trained, small_data):
    prompt = "def note_3(x):\n    return x + </script>"
    found = look_at(trained, "--prompt", prompt, "--tokens", 30)
    tokenizer = Tokenizer.load(trained / "tokenizer.json")
    model = model_of(trained)
    ids = [0, *tokenizer.encode(prompt)][:30]
    assert found["ids"] == ids
    assert all(found["words"][str(i)].encode("latin-1") == tokenizer.bytes_of[i] for i in ids)
    with torch.no_grad():
        p = model(torch.tensor([ids]))[0].softmax(-1)  # (T, V)
    T = len(ids)
    right = p[range(T - 1), ids[1:]]
    assert found["bits"] == pytest.approx((-right.log2()).tolist(), abs=1e-3)
    assert found["rank"] == [1 + int((row > x).sum()) for row, x in zip(p, right)]
    best = p.sort(descending=True)
    w, share = torch.tensor(found["top"]).unbind(-1)  # (T, 5)
    assert (w == best.indices[:, :5]).all() and (share - best.values[:, :5]).abs().max() < 1e-4
    heads = found["heads"]
    maps = zlib.decompress(base64.b64decode(found["maps"]))
    assert len(maps) == len(heads) * T * (T + 1) // 2 and len(heads) == 12
    probe = Probe(model)
    probe(torch.tensor(ids))
    below = torch.ones(T, T).tril().bool()
    seen = [probe.maps[head["layer"]][head["head"]][below] for head in heads]
    assert (torch.tensor([*maps]) / 255 - torch.cat(seen)).abs().max() <= 1 / 510 + 1e-6
    parts = {(part["layer"], part["part"]) for part in found["parts"]}
    assert parts == {(i, x) for i in range(3) for x in (0, 1, 2, 3, "attn", "mlp")}
    size = torch.from_numpy(tokenizer.token_bytes)[ids]
    whole = torch.tensor(found["bits"])
    for part in found["parts"]:
        off = Probe(model, off=(part["layer"], part["part"]))(torch.tensor(ids)).log_softmax(-1)
        bits = -off[range(T - 1), ids[1:]] / math.log(2)
        assert part["bpb"] == pytest.approx(((bits - whole).sum() / size.sum()).item(), abs=1e-3)
    assert found["unseen"] == []


def test_a_prompt_needs_no_data_and_a_row_does(trained, tmp_path):
    where = ["--data_dir", str(tmp_path / "none")]
    prompt = ["--prompt", "def", "--out", str(tmp_path)]  # a folder
    assert evaluate.main(["look", str(trained), *CPU, *where, *prompt]) == 0
    assert "your prompt" in (tmp_path / "look.html").read_text()
    for options in (where, ["--row", "99999"]):
        with pytest.raises(UsageError, match=options[1]):
            evaluate.main(["look", str(trained), *CPU, *options])


# ---------------------------------------------------------------------------------- the browser
@pytest.mark.parametrize("width, scheme", SCREENS)
def test_in_a_browser(width, scheme, browser, trained):  # noqa: F811
    """Hover a token, keep it, move on by keys; choose a head by mouse and by keyboard."""
    found = look_at(trained, "--row", 1)
    with opened(browser, trained / "look.html", width, scheme) as page:
        page.wait_for_selector("body[data-ready]")
        text = lambda selector: page.locator(selector).inner_text()
        assert page.locator(".t").count() == len(found["ids"]) + 1
        page.hover("#t9")
        assert f"{found['bits'][8]:.1f} bits" in text("#place")
        likeliest = found["words"][str(found["top"][8][0][0])].strip() or "·"
        assert likeliest.replace(" ", "·") in text("#top tr:first-child")
        page.hover("h1")  # leaves the text
        early, *_, late = (after["rows"] for after in found["lens"])
        gain = [b[2] - a[2] for a, b in zip(early, late)]
        assert f"{found['bits'][gain.index(max(gain))]:.1f} bits" in text("#place")
        page.click("#t9")
        page.hover("h1")
        page.focus("#text")
        page.keyboard.press("ArrowRight")
        assert f"{found['bits'][9]:.1f} bits" in text("#place")
        page.keyboard.press("End")
        assert "comes next?" in text("#place")

        assert page.locator(".head").count() == len(found["heads"]) == 12
        page.click("[data-head='5'].head")
        name = lambda h: f"Layer {h['layer']}, head {h['head']}: {h['kind']}"
        assert text("#head h3") == name(found["heads"][5])
        part = next(p for p in found["parts"] if (p["layer"], p["part"]) == (1, 1))
        assert f"{abs(part['bpb']):.3f} bits per byte" in text("#head p >> nth=0")
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)"
        assert all(page.locator(c).evaluate(drawn) for c in ("#map", ".head >> nth=7 >> canvas"))
        page.keyboard.press("ArrowRight")  # from the head that was clicked; layers go across
        assert text("#head h3") == name(found["heads"][9])
        page.keyboard.press("ArrowUp")
        assert text("#head h3") == name(found["heads"][8])
        pressed = lambda view: page.locator(f"[data-view={view}]").get_attribute("aria-pressed")
        assert pressed("looks") == "true"
        page.click("[data-view=surprise]")
        assert pressed("surprise") == "true"
        page.click("#parts tr[data-head] >> nth=0")
        assert pressed("worth") == "true"


def test_a_page_without_a_single_head_that_is_seen(browser, tokenizer, tmp_path):  # noqa: F811
    model = random_model(dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=8), vocab_size=512)
    for block in model.blocks:
        block.attn = Flipped(block.attn, "linear")
    unseen = look.facts_of(model, text_for(model), tokenizer)
    assert unseen["heads"] == [] and unseen["unseen"] == [0, 1] and len(unseen["parts"]) == 4
    unseen |= dict(source="</script><b>your prompt", step=0, trained=0)
    (tmp_path / "look.html").write_text(
        filled("look.html", title="Inside <x> {{data}}", found=unseen)
    )
    with opened(browser, tmp_path / "look.html", 1280, "light") as page:
        page.wait_for_selector("body[data-ready]")
        assert "0, 1" in page.inner_text("#checks") and page.title() == "Inside <x> {{data}}"
        assert page.locator(".head").count() == 0 and page.locator("#parts tr").count() == 4
        assert "</script><b>your prompt" in page.inner_text("#facts")


def test_a_character_of_several_tokens_is_shown_once(browser, tokenizer, tmp_path):  # noqa: F811
    """In the last of them; a byte that begins none, and what would turn the line, as its code."""
    id_of = {part: i for i, part in tokenizer.bytes_of.items()}
    raw = "a\u6c49\u202e\U0001f642".encode() + b"\xe4"
    model = random_model(ONE_HEAD, vocab_size=512)
    ids = torch.tensor([0, *(id_of[bytes([byte])] for byte in raw)])
    found = look.facts_of(model, ids, tokenizer) | dict(source="x", step=0, trained=0)
    (tmp_path / "look.html").write_text(
        filled("look.html", title="x", found=found), encoding="utf-8"
    )
    with opened(browser, tmp_path / "look.html") as page:
        page.wait_for_selector("body[data-ready]")
        assert page.locator("#text").text_content() == "<|bos|>a\u6c49\\u202e\U0001f642\\xe4next?"
        assert page.locator(".part").count() == 3 + 3 + 4
        assert page.locator("#t3").get_attribute("aria-label") == "\\xb1, a part of \u6c49"
        page.click("#t4")
        page.keyboard.press("ArrowLeft")
        assert "came \\xb1, a part of \u6c49: " in page.inner_text("#place")


EVIL = '"\'><img src=http://127.0.0.1:9 onerror="document.title=1"><script>document.title=1'


def poisoned(x):
    """Each text and each number replaced, but for what the page counts with."""
    if isinstance(x, dict):
        kept = ("ids", "words", "maps", "n_layer", "n_head")
        return {k: v if k in kept else poisoned(v) for k, v in x.items()}
    return [poisoned(y) for y in x] if isinstance(x, list | tuple) else EVIL


def test_nothing_in_the_data_becomes_part_of_the_page(browser, trained, tmp_path):  # noqa: F811
    """The script may fail at such data; it must run nothing, and load nothing. And were a part of
    the page not escaped, the policy would stop it."""
    honest = look_at(trained, "--row", 1)
    path = tmp_path / "look.html"
    changes = [{name: poisoned(honest[name])} for name in honest.keys() - {"ids", "maps", "words"}]
    changes += [dict(words=dict.fromkeys(honest["words"], EVIL)), poisoned(honest)]
    changes += [dict(heads=[h | dict(kind=EVIL) for h in honest["heads"]]), dict(unseen=[EVIL])]
    page_of = partial(filled, "look.html", title="honest")
    pages = [page_of(found=honest | change) for change in changes]
    context = browser.new_context()
    page = context.new_page()
    asked = []
    page.on("request", lambda r: asked.append(r.url))
    for text in [*pages, page_of(found=honest).replace("<p id=facts>", EVIL)]:
        path.write_text(text)
        page.goto(path.as_uri())
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.title() == "honest"
        assert page.locator("img").count() == (text not in pages)
    assert {url.split(":")[0] for url in asked[: len(pages)]} == {"file"}
    context.close()


def test_a_model_of_nan_is_an_error_and_no_page(tokenizer):
    model = random_model(ONE_HEAD, vocab_size=512)
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    with pytest.raises(NonFiniteError):
        look.facts_of(model, text_for(model), tokenizer)
