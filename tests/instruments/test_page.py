"""A model's page in node: what gpt.js, bpe.js and worker.js compute, beside what the model does;
the file, and what is refused. Skipped where there is no node."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browsing import write_page
from conftest import code_texts, flip, read_json, write_json
from table import read_table
from test_imported import DIGITS, END, FORMS, LLAMA3, MORE, WORDS, in_turn, make, make_model, splits
from test_tokenizer import AWKWARD, random_texts
from torch.testing import assert_close

import model as ours
from config import EXTRAS, GPTConfig, UsageError
from hf import export, parity, tokenizer_json
from instruments.pages import page
from instruments.pages.look import Probe
from instruments.pages.template import filled
from tokenizer import SPLITS, Tokenizer

DRIVER = Path(__file__).with_name("page_driver.js")
BASE = GPTConfig(64, 331, 2, 4, 4, 8, 32, mlp_hidden=48, rope_theta=54_321.0, extras=EXTRAS)
SHAPES = """
{} => int8
{} => fp16
{"extras": []} => int8
{"extras": ["key_offset"]} => int8
{"extras": ["value_embeds"]} => int8
{"n_kv_head": 2, "n_layer": 3} => int8
{"n_kv_head": 1} => int8
{"mlp": "swiglu"} => int8
{"nope_every": 2, "n_layer": 4} => int8
{"tie_embeddings": true} => fp16
{"logit_softcap": 0} => int8
{"qk_norm": false} => int8
{"qk_gain": true, "n_kv_head": 2} => int8
{"embed_norm": false} => int8
{"n_head": 3, "n_kv_head": 3, "head_dim": 6, "n_embd": 29, "mlp_hidden": 43} => int8
{"n_head": 3, "n_kv_head": 3, "head_dim": 6, "n_embd": 29, "mlp_hidden": 43} => fp16
{"n_head": 6, "n_kv_head": 2, "head_dim": 2, "mlp": "swiglu", "tie_embeddings": true} => int8
"""
# What each position computes, one after another, as while a text is written.
LOGITS = "ids.map((_, t) => gpt.logits(gpt.after(ids, t + 1).stream.at(-1)))"
WRITE = """while (ids.length < 30) ids.push(answers.next({ids, n: ids.length, options}).id);
return ids"""
DRAW = "return places.map(([seed, n]) => draw(logits, {...options, seed}, n))"
ENCODE = """const bpe = new BPE(model.tokenizer);
return [bpe.bytes, texts.map((text) => bpe.encode(text))]"""


def js(code: str, **values) -> dict:
    """A request for what the code returns, in which these names have these values."""
    names = "".join(f"const {name} = {json.dumps(value)}; " for name, value in values.items())
    return dict(js=f"(() => {{ {names} {code}; }})()")


def ask(file: Path, *requests: dict, beside: Path | str = "") -> list:
    """The page's replies: to {"do": "load"}, and to each request."""
    if not shutil.which("node"):
        pytest.skip("no node here, which runs the page's JavaScript")
    words = ["node", DRIVER, file, beside]
    return json.loads(subprocess.check_output(words, input=json.dumps(requests), text=True))


def random_model(**changes) -> ours.GPT:
    """All of its weights at work: none is at 0."""
    model = ours.GPT(replace(BASE, **changes)).eval()
    parity.set_unit_weights(model)
    return model


@pytest.fixture
def write(tmp_path):
    """Write a page of random weights behind which nothing hides: its file, and the model."""
    tokenizer = Tokenizer.train(code_texts()[:2], BASE.vocab_size)

    def written(half=False, **changes):
        model = random_model(**changes)
        return write_page(tmp_path / "p.html", model, tokenizer, tuned=half, half=half)

    return written


@torch.no_grad()
def compare(file: Path, loaded) -> None:
    """Numbers of two documents, of the model with the weights of the page."""
    model = loaded.model
    config = model.config
    n = 47
    ids = torch.randint(config.vocab_size, (n + 1,), generator=torch.Generator().manual_seed(1))
    ids[[0, 24]] = config.bos_id
    probe = Probe(model)
    logits = probe(ids)  # (T, V)
    row = ids.tolist()
    other = [*row[:9], 7, *row[10:]]
    _, theirs, look, near, _, far, text = ask(
        file,
        js(f"return {LOGITS}", ids=row),
        *(dict(do=do, ids=row, n=n) for do in ("look", "next")),
        *(dict(do="next", ids=other, n=end) for end in (20, n)),
        js(WRITE, ids=row[:9], options=dict(temperature=0)),
    )
    assert_close(torch.tensor(theirs), logits, atol=1e-4, rtol=0)
    assert [text] == model.generate(ids[None, :9], 21, temperature=0).tolist()
    for reply, given in ((near, row), (far, other)):
        top = model(torch.tensor([given]))[0, n - 1].topk(10).indices
        assert [one["id"] for one in reply["top"]] == top.tolist()
    maps = torch.stack([*probe.maps.values()])[:, :, n - 1, :n]  # (L, H, n)
    assert_close(torch.tensor(look["heads"]), maps, atol=1e-5, rtol=0)
    for end, guess in enumerate(look["guesses"]):
        p = Probe(model, end=end)(ids)[n - 1].softmax(-1)
        found = [guess["p"], guess["own"]]
        assert found == pytest.approx([p.max().item(), p[row[n]].item()], abs=1e-5)
        likeliest = loaded.tokenizer.bytes_of[p.argmax().item()]
        assert guess["text"] == likeliest.decode(errors="backslashreplace")
    assert [near["top"][0]["p"], near["p"]] == found


@pytest.mark.parametrize("shape, form", read_table(SHAPES))
def test_a_page_computes_what_the_model_computes(shape, form, write):
    compare(*write(form == ["fp16"], **json.loads(shape)))


def test_the_page_of_a_stock_model(tmp_path):
    make_model(tmp_path, "SmolLM3", num_hidden_layers=6, no_rope_layer_interval=3)
    make(tmp_path, vocab_size=600, **FORMS["smollm2"])
    loaded = export.load(export.ExportConfig(checkpoint=str(tmp_path)))
    page.write(loaded, str(tmp_path), False)
    compare(tmp_path / "page.html", loaded)


DRAWS = """[
    {"temperature": 1, "top_k": 0, "top_p": 1},
    {"temperature": 0.5, "top_k": 9, "top_p": 1},
    {"temperature": 2, "top_k": 500, "top_p": 0.6},
    {"temperature": 1, "top_k": 7, "top_p": 0.5},
    {"temperature": 0, "top_k": 0, "top_p": 1}
]"""


def test_it_draws_as_the_model_draws(write):
    """Over many seeds, and with one seed at many positions; the same with the same seed."""
    file, loaded = write()
    rows = torch.tensor([[0, 5]] * 3000)
    logits = loaded.model(rows[:1])[0, -1].tolist()
    places = [[[i, 2] for i in range(3000)], [[1, i] for i in range(3000)]]
    for options in json.loads(DRAWS):
        draws = [js(DRAW, places=some, logits=logits, options=options) for some in places]
        _, *drawn, again = ask(file, *draws, draws[0])
        mine = Counter(loaded.model.generate(rows, 1, **options)[:, -1].tolist())
        for theirs in map(Counter, drawn):
            for token in mine | theirs:
                both = mine[token] + theirs[token]
                assert abs(mine[token] - theirs[token]) < 6 + 5 * both**0.5
        assert drawn[0] == again


THINK = ("<think>", "<think>\n\n", "r.t")
KINDS = FORMS | {
    "smollm3": dict(pre=splits(LLAMA3), special=[END], ignore_merges=True, plain=THINK),
    "digits": dict(pre=in_turn(DIGITS.replace("true", "false"), WORDS), special=[END]),
}
TEXTS = [*AWKWARD, *MORE, *parity.TEXTS, "a\ud800b\ud83d\ude00\udfff", "'\u017fab x'\u212aa"]
TEXTS += ["x<think>\n<<think>> r.t return<think>\n\n\n", *random_texts(60, seed=4)]
TEXTS += [f"a{c}{c}b {c}\n{c}1{c} {c}." for c in map(chr, range(0x3001)) if not c.isprintable()]
WORLD = "नमस्ते தமிழ் สวัสดี العَرَبِيَّة привет שלום 안녕하세요 こんにちは 你好 ação " * 50


@pytest.mark.parametrize("kind", [*KINDS, *SPLITS])
def test_ids_are_those_of_the_tokenizer(kind, tmp_path):
    if kind in SPLITS:
        own = Tokenizer.train([*code_texts()[:2], WORLD], 700, split=kind, nfc="1" in kind)
    else:
        make(tmp_path, **KINDS[kind])
        tree = read_json(tmp_path / "tokenizer.json")
        del tree["model"]["merges"][300:]  # some tokens are reached by ignore_merges alone
        write_json(tmp_path / "tokenizer.json", tree)
        own = tokenizer_json.read(tmp_path, KINDS[kind]["special"][0])
    file = tmp_path / "p.html"
    file.write_text(filled("page.html", tree=dict(tokenizer=page.tokenizer_of(own))), "utf-8")
    _, (content, found) = ask(file, js(ENCODE, texts=TEXTS))
    for text, ids in zip(TEXTS, found, strict=True):
        assert ids == own.encode(text), repr(text[:80])
    assert [*map(bytes, content)] == [own.bytes_of[i] for i in range(own.vocab_size)]


def test_the_file_runs_nothing_but_its_own(write, monkeypatch):
    hostile = "</script><script>alert(1)</script><!--<script>\u2028ENGINE"
    monkeypatch.setattr(page, "prompts_of", lambda loaded: [hostile])
    file, _ = write(half=True)
    text = file.read_text("utf-8")
    for kind, count in (("script", 4), ("style", 1)):
        assert text.count(f"<{kind}") == text.count(f"</{kind}") == count
        (nonce,) = re.findall(f"{kind}-src 'nonce-([\\w-]{{30,}})'", text)
        assert text.count(f'<{kind} nonce="{nonce}">') == 1 and text.count(nonce) == 4
    write(half=True)
    assert nonce not in file.read_text("utf-8"), "nobody knows it before"
    _, prompts, reply = ask(file, js("return model.prompts"), dict(do="next", ids=[0, 3], n=1))
    assert prompts == [hostile] and reply["ends"] and reply["bytes"] == [*b"<|end|>"]


def test_what_is_not_the_model_is_said(write, monkeypatch):
    """Weights that were spoilt or cut, or are those of another page; another vocabulary; an
    activation of one's own; a weight that gpt.js does not know."""
    said = lambda file, beside="": ask(file, beside=beside)[0].get("error", "")
    file, loaded = write()
    text = file.read_text("utf-8")
    for old, new, words in (
        (r'(?<=plain">[\w+/]{30000}).{900}', "A" * 900, "not what the model computes"),
        (r"[\w+/=]{8}(?=</script>\n<script nonce)", "", "the whole model"),
        ('"A": ', '"BC": ', "other tokens"),
    ):
        file.write_text(re.sub(old, new, text, count=1), "utf-8")
        assert words in said(file)
    monkeypatch.setattr(page, "MOST", 1000)
    file, _ = write()
    beside = file.with_suffix(".weights")
    assert said(file, beside) == ""
    flip(beside, at=0)  # of another page
    assert "the whole p.weights" in said(file, beside)
    monkeypatch.setattr(ours, "relu_squared", torch.relu)
    write()
    assert "model.py" in said(file, beside)
    loaded.model.blocks[0].gain = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(UsageError, match=r"blocks\.0\.gain"):
        page.write(loaded, "", False)


def test_export_writes_the_page_of_a_run(own_run, capsys):
    """With what the rounding costs."""
    out = own_run / "fp16.html"
    assert (
        export.main([*map(str, (own_run, "--page_fp16", "--page", "--out", out))], page.write) == 0
    )
    printed = capsys.readouterr().out
    assert f"wrote {out} (" in printed  # below, no folders
    assert re.search(r"text: [\w.]+; fp16 .*nats per token of held-out text", printed)
    assert ask(out) == [{}]
