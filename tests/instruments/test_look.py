"""instruments/pages/look.py: its numbers against slow and obvious ones; its page, in a browser."""

import base64
import json
import math
import re
import zlib
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from browsing import browser, opened  # noqa: F401
from conftest import CPU
from table import read_table
from test_page import SHAPES, random_model

import data
import eval as evaluate
from bits_per_byte import score_text
from config import UsageError
from instruments.pages import look
from instruments.pages.look import Probe
from instruments.pages.template import filled
from machinery.errors import NonFiniteError
from machinery.shards import Manifest
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer

EVERY = sorted({'{"doc_mask": true}', *(shape for shape, _ in read_table(SHAPES))})


def text_for(model: GPT) -> torch.Tensor:
    """Random ids (40,), BOS first and once more within."""
    torch.manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (40,))
    ids[0] = ids[13] = model.config.bos_id
    return ids


def kernel_by_hand(kept: list, q, k, v, attn_mask=None, **_) -> torch.Tensor:
    """PyTorch's kernel on one row, causal or with a mask, as one writes it down: q and what it
    returns (1, H, T, D). Keeps its shares (H, T, T)."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    T = q.size(2)
    seen = torch.ones(T, T).tril().bool() if attn_mask is None else attn_mask
    shares = (q @ k.mT / q.size(3) ** 0.5).masked_fill(~seen, -math.inf).softmax(-1)
    kept.append(shares[0])
    return shares @ v


@pytest.mark.parametrize("shape", EVERY)
def test_the_shares_are_those_that_give_the_models_output(shape):
    model = random_model(**json.loads(shape))
    ids = text_for(model)
    probe = Probe(model)
    logits = probe(ids)
    assert probe.layers_seen() == list(range(model.config.n_layer))
    kept = []
    slow = partial(kernel_by_hand, kept)
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", slow), torch.no_grad():
        assert (model(ids[None])[0] - logits).abs().max() < 1e-4
    for p, shares in zip(probe.maps.values(), kept, strict=True):
        assert (p - shares).abs().max() < 1e-5


@pytest.mark.parametrize("shape", EVERY)
@torch.no_grad()
def test_a_part_that_is_off_adds_nothing(shape):
    """The same as with its columns of `out`, or all of `out` or `down`, at 0. A lens is the last
    step on what the layers have returned. Where nothing is off, nothing changes, to the bit; and
    the model is as it was."""
    model = random_model(**json.loads(shape))
    ids = text_for(model)
    plain = model(ids[None])[0]
    D = model.config.head_dim
    blocks = model.blocks
    for layer, block in enumerate(blocks):
        for part in (*range(model.config.n_head), "attn", "mlp"):
            off = Probe(model, off=(layer, part))(ids)
            weight = block.mlp.down.weight if part == "mlp" else block.attn.out.weight
            whole = weight.clone()
            columns = slice(part * D, part * D + D) if isinstance(part, int) else slice(None)
            weight[:, columns] = 0
            assert (model(ids[None])[0] - off).abs().max() < 1e-4
            weight.copy_(whole)
    for n in range(1, len(blocks) + 1):
        early = Probe(model, end=n)(ids)
        model.blocks = blocks[:n]
        assert torch.equal(early, model(ids[None])[0])
        model.blocks = blocks
    assert torch.equal(Probe(model)(ids), plain)


def test_habits_are_counted_one_by_one():
    for doc_mask in (False, True):
        model = random_model(n_layer=1, doc_mask=doc_mask)
        ids = text_for(model) % 9  # with many copies, and a few more BOS
        probe = Probe(model)
        probe(ids)
        p = probe.maps[0]
        bos = model.config.bos_id
        sums = defaultdict(list)
        for i in range(len(ids)):
            begin = max(j for j in range(i + 1) if j == 0 or ids[j] == bos)
            low = begin if doc_mask else 0
            if i - begin < 2:
                continue
            first = {low, begin}
            seen = {*range(low, i - 1)} - first
            after = {j for j in seen if ids[j - 1] == ids[i]}
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


def flipped(attn, how: str, x, value_embed, at) -> torch.Tensor:
    """A student's attention, from the model's own modules, in one of several ways."""
    c = attn.config
    B, T, _ = x.shape
    q, k, v = (
        project(x).view(B, T, c.n_head, c.head_dim).transpose(1, 2)
        for project in (attn.q, attn.k, attn.v)
    )
    scores = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    if how == "by hand":
        y = scores.softmax(-1) @ v
    elif how == "sink":  # a column that takes attention away
        scores = torch.cat([scores, torch.zeros(B, c.n_head, T, 1)], -1)
        y = torch.softmax(scores, -1)[..., :-1] @ v
    elif how == "twice":  # as in differential attention
        y = (scores.softmax(-1) - 0.5 * (scores / 2).softmax(-1)) @ v
    elif how == "dropped":  # the kernel does something that its arguments do not say
        kernel = torch.nn.functional.scaled_dot_product_attention
        y = kernel(q, k, v, is_causal=True, dropout_p=0.5)
    return attn.out(y.transpose(1, 2).reshape(B, T, -1))


@pytest.mark.parametrize("how", ["by hand", "sink", "twice", "dropped"])
def test_the_attention_of_a_student(how):
    """Shown if it can be computed again; otherwise the page says that it was not."""
    model = random_model(n_layer=3)
    attn = model.blocks[1].attn
    attn.forward = partial(flipped, attn, how)
    probe = Probe(model)
    ids = text_for(model)
    probe(ids)
    assert probe.layers_seen() == ([0, 1, 2] if how == "by hand" else [0, 2])
    if how == "by hand":
        off = Probe(model, off=(1, 1))(ids)
        with torch.no_grad():
            attn.out.weight[:, 8:16] = 0
            assert (model(ids[None])[0] - off).abs().max() < 1e-4


# ----------------------------------------------------------------------------------- the command
@pytest.fixture
def tokenizer(small_data):
    return Tokenizer.load(small_data / "tokenizer.json")


def look_at(run_dir: Path, *words) -> dict:
    """What the page of a command says: its data."""
    assert evaluate.main(["look", str(run_dir), *map(str, words), *CPU]) == 0
    page = (run_dir / "look.html").read_text()
    text = re.search(r'<script type="application/json" id=data>(.*?)</script>', page, re.DOTALL)
    return json.loads(text[1])


def test_the_page_says_what_the_model_computes(own_run, small_data, tokenizer):
    """Of a held-out row of two documents, whose surprise is its loss."""
    manifest = Manifest.load(small_data)
    rows = [*data.val_batches(manifest, 1, 0)]
    row = next(n for n, (inputs, *_) in enumerate(rows) if (inputs == 0).sum() > 1)
    inputs, targets, sources = rows[row]
    found = look_at(own_run, "--row", row, "--tokens", 64)
    assert found["source"] == f"held-out row {row} of {manifest.sources[0]}"
    model = evaluate.load_model(EvalConfig(str(own_run), device="cpu", dtype="fp32")).model
    (ids,) = inputs
    assert found["ids"] == ids.tolist()
    words = [found["words"][str(i)].encode("latin-1") for i in found["ids"]]
    assert words == [tokenizer.bytes_of[i] for i in found["ids"]]
    size = torch.from_numpy(manifest.token_bytes())
    nats, bpb = score_text(model, [(inputs[:, :63], targets[:, :63], sources)], size)[:2]
    assert found["bpb"] == pytest.approx(bpb, abs=1e-5)
    assert found["lens"][-1]["mean"] * math.log(2) == pytest.approx(nats, abs=1e-5)
    probe = Probe(model)
    p = probe(ids).softmax(-1)  # (T, V)
    right = p[range(63), ids[1:]]
    assert found["bits"] == pytest.approx((-right.log2()).tolist(), abs=1e-3)
    assert found["rank"] == [1 + int((row > x).sum()) for row, x in zip(p, right)]
    best = p.sort(descending=True)
    w, share = torch.tensor(found["top"]).unbind(-1)  # (T, 5)
    assert (w == best.indices[:, :5]).all() and (share - best.values[:, :5]).abs().max() < 1e-4
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [*np.ndindex(2, 2)]
    maps = np.frombuffer(zlib.decompress(base64.b64decode(found["maps"])), np.uint8)
    seen = torch.cat([*probe.maps.values()])[:, torch.ones(64, 64).tril().bool()]
    assert maps / 255 == pytest.approx(seen.flatten().numpy(), abs=1 / 510 + 1e-6)
    parts = {(part["layer"], part["part"]): part["bpb"] for part in found["parts"]}
    assert parts.keys() == {(i, x) for i in range(2) for x in (0, 1, "attn", "mlp")}
    for off, worth in parts.items():
        change = right.log2() - Probe(model, off=off)(ids).softmax(-1)[range(63), ids[1:]].log2()
        change = change[size[ids[1:]] > 0].sum() / size[ids].sum()
        assert worth == pytest.approx(change.item(), abs=1e-5)


def test_a_prompt_is_read_and_a_row_that_is_not_there_is_named(own_run, tokenizer):
    prompt = "return </script>"
    assert look_at(own_run, "--prompt", prompt)["ids"] == [0, *tokenizer.encode(prompt)]
    with pytest.raises(UsageError, match="--row 99999"):
        look_at(own_run, "--row", 99999)


# ---------------------------------------------------------------------------------- the browser
def test_in_a_browser(browser, own_run):  # noqa: F811
    """On a narrow screen: hover a token, keep it, move on by keys; choose a head by mouse and by
    keyboard."""
    found = look_at(own_run, "--row", 1)
    with opened(browser, own_run / "look.html", 400, "dark") as page:
        text = lambda selector: page.locator(selector).inner_text()
        page.hover("#t9")
        assert f"{found['bits'][8]:.1f} bits" in text("#place")
        likeliest = found["words"][str(found["top"][8][0][0])].strip() or "·"
        assert likeliest.replace(" ", "·") in text("#top tr:first-child")
        page.click("#t9")
        page.hover("h1")
        page.focus("#text")
        page.keyboard.press("ArrowRight")
        assert f"{found['bits'][9]:.1f} bits" in text("#place")
        page.keyboard.press("End")
        assert "comes next?" in text("#place")

        page.click("[data-head='1'].head")
        name = lambda h: f"Layer {h['layer']}, head {h['head']}: {h['kind']}"
        assert text("#head h3") == name(found["heads"][1])
        part = next(p for p in found["parts"] if (p["layer"], p["part"]) == (0, 1))
        assert f"{abs(part['bpb']):.3f} bits per byte" in text("#head p >> nth=0")
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)"
        assert all(page.locator(c).evaluate(drawn) for c in ("#map", ".head >> nth=2 >> canvas"))
        page.keyboard.press("ArrowRight")  # from the head that was clicked; layers go across
        assert text("#head h3") == name(found["heads"][3])
        page.keyboard.press("ArrowUp")
        assert text("#head h3") == name(found["heads"][2])
        page.wait_for_selector("[data-view=looks][aria-pressed=true]")
        page.click("[data-view=surprise]")
        page.wait_for_selector("[data-view=surprise][aria-pressed=true]")
        page.click("#parts tr[data-head] >> nth=0")
        page.wait_for_selector("[data-view=worth][aria-pressed=true]")


@contextmanager
def shown(browser, folder: Path, found: dict, title: str = ""):  # noqa: F811
    """The page of these facts, of a model of yours."""
    found = dict(source="x", step=0, trained=0) | found
    (folder / "look.html").write_text(filled("look.html", title=title, found=found), "utf-8")
    with opened(browser, folder / "look.html") as page:
        page.wait_for_selector("body[data-ready]")
        yield page


def test_a_page_without_a_single_head_that_is_seen(browser, tokenizer, tmp_path):  # noqa: F811
    model = random_model(vocab_size=512)
    for block in model.blocks:
        block.attn.forward = partial(flipped, block.attn, "sink")
    unseen = look.facts_of(model, text_for(model), tokenizer)
    assert unseen["heads"] == [] and unseen["unseen"] == [0, 1] and len(unseen["parts"]) == 4
    unseen["source"] = "</script><b>your prompt"
    with shown(browser, tmp_path, unseen, "Inside <x> {{data}}") as page:
        assert "0, 1" in page.inner_text("#checks") and page.title() == "Inside <x> {{data}}"
        assert page.locator(".head").count() == 0 and page.locator("#parts tr").count() == 4
        assert "</script><b>your prompt" in page.inner_text("#facts")


def test_a_character_of_several_tokens_is_shown_once(browser, tokenizer, tmp_path):  # noqa: F811
    """In the last of them; a byte that begins none, and what would turn the line, as its code."""
    id_of = {part: i for i, part in tokenizer.bytes_of.items()}
    raw = "a\u6c49\u202e\U0001f642".encode() + b"\xe4"
    model = random_model(vocab_size=512)
    ids = torch.tensor([0, *(id_of[bytes([byte])] for byte in raw)])
    with shown(browser, tmp_path, look.facts_of(model, ids, tokenizer)) as page:
        assert page.locator("#text").text_content() == "<|bos|>a\u6c49\\u202e\U0001f642\\xe4next?"
        assert page.locator(".part").count() == 3 + 3 + 4
        assert page.locator("#t3").get_attribute("aria-label") == "\\xb1, a part of \u6c49"
        page.click("#t4")
        page.keyboard.press("ArrowLeft")
        assert "came \\xb1, a part of \u6c49: " in page.inner_text("#place")


EVIL = (
    '"\'><img src=http://127.0.0.1:9 onerror="document.title=1"><script>document.title=1</script>'
)


def test_nothing_in_the_data_becomes_part_of_the_page(browser, own_run, tmp_path):  # noqa: F811
    """Neither texts, as those of a stranger's tokenizer, nor numbers. It runs nothing and loads
    nothing; and were a part of the page not escaped, the policy would stop it."""
    honest = json.dumps(look_at(own_run, "--row", 1))
    found = json.loads(honest, parse_float=lambda number: EVIL)
    found |= dict(words=dict.fromkeys(found["words"], EVIL), source=EVIL)
    for head in found["heads"]:
        head["kind"] = EVIL
    path = tmp_path / "look.html"
    text = filled("look.html", title="honest", found=found)
    for html, images in ((text, 0), (text.replace("<h1>", f"<h1>{EVIL}"), 1)):
        path.write_text(html)
        with opened(browser, path) as page:
            page.wait_for_selector("body[data-ready]")
            assert page.title() == "honest" and page.locator("img").count() == images


def test_a_model_of_nan_is_an_error_and_no_page(tokenizer):
    model = random_model(vocab_size=512)
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    with pytest.raises(NonFiniteError):
        look.facts_of(model, text_for(model), tokenizer)
