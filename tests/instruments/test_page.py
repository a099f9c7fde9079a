"""A model's page (instruments/pages/page.py): what gpt.js, bpe.js and worker.js compute in node,
from the written file, beside the model; what is in that file, and what is refused."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import code_texts
from test_imported import DIGITS, END, FORMS, LLAMA3, MORE, WORDS, in_turn, make, make_model, splits
from test_tokenizer import AWKWARD, random_texts
from torch.testing import assert_close

import model
from config import EXTRAS, GPTConfig, UsageError
from hf import export, parity, tokenizer_json
from instruments.pages import page
from instruments.pages.look import Probe
from machinery.formats import Provenance
from machinery.trained import EvalConfig, Trained
from model import GPT, head_logits, rms_norm
from tokenizer import SPLITS, Tokenizer

DRIVER = Path(__file__).with_name("page_driver.js")
HEADS = dict(n_head=4, n_kv_head=4, head_dim=8)
SIZES = dict(seq_len=64, vocab_size=331, n_layer=2, n_embd=32, mlp_hidden=48)
BASE = GPTConfig(**HEADS, **SIZES, rope_theta=54_321.0, extras=EXTRAS)
SHAPES = {
    "base": {},
    "no extras": dict(extras=()),
    **{name: dict(extras=(name,)) for name in EXTRAS},
    "2 key heads": dict(n_kv_head=2, n_layer=3),
    "1 key head": dict(n_kv_head=1),
    "swiglu": dict(mlp="swiglu"),
    "nope": dict(nope_every=2, n_layer=4),
    "tied": dict(tie_embeddings=True),
    "no softcap": dict(logit_softcap=0.0),
    "no qk_norm": dict(qk_norm=False),
    "no embed_norm": dict(embed_norm=False),
    "odd": dict(n_head=3, n_kv_head=3, head_dim=6, n_embd=29, mlp_hidden=43),
    "llama": dict(
        mlp="swiglu", qk_norm=False, embed_norm=False, tie_embeddings=True, logit_softcap=0.0,
        n_kv_head=2, extras=(),
    ),
}  # fmt: skip


def ask(file: Path, *requests: dict, beside: Path | str = "") -> list:
    """The page's replies: to {"do": "load"}, and to each request."""
    if not shutil.which("node"):
        pytest.skip("no node here, which runs the page's JavaScript")
    words = ["node", DRIVER, file, *filter(None, [beside])]
    given = json.dumps(requests)
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(code_texts()[:2], BASE.vocab_size)


def trained(folder: Path, tokenizer: Tokenizer, tuned: bool = False, **changes) -> Trained:
    """A model in memory, with random weights behind which nothing hides."""
    model = GPT(replace(BASE, **changes))
    parity.set_unit_weights(model)
    identity = dict(conversations=tuned)
    origin = Provenance(step=7, tokens=7000, identity=identity, model=model.config)
    return Trained(EvalConfig(), folder / "run", origin, model.eval(), tokenizer)


def written(loaded: Trained, file: Path, half: bool = False) -> Path:
    page.write(loaded, str(file), half)
    return file


def ids_of(config, n: int = 48) -> list[int]:
    """Two documents."""
    ids = torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(1))
    ids[[0, n // 2]] = config.bos_id
    return ids.tolist()


# What each position computes, one after another, as while a text is written.
LOGITS = "ids.map((_, t) => gpt.logits(gpt.after(ids, t + 1).stream.at(-1)))"
WRITTEN = """(() => {
  while (ids.length < 30) ids.push(answers.next({ids, n: ids.length, options}).id);
  return ids;
})()"""
DRAWN = "seeds.map(([seed, n]) => draw(logits, {...options, seed}, n))"
ENCODED = """texts.map((text) => {
  const ids = bpe.encode(text);
  return [ids, decode(ids.flatMap((id) => bpe.bytes[id]))];
})"""
SHOWN = "ids.map((id) => [bpe.shown(id), bpe.bytes[id]])"


def js(expression: str, bpe: bool = False, **values) -> dict:
    """A request for the value of an expression, in which these names have these values."""
    names = "".join(f"const {name} = {json.dumps(value)}; " for name, value in values.items())
    names += "const bpe = new BPE(model.tokenizer); " * bpe
    return dict(js=f"(() => {{ {names} return {expression}; }})()")


def compare(loaded: Trained, file: Path) -> None:
    """The page's numbers against those of the model, whose weights are the page's."""
    model = loaded.model
    config = model.config
    ids = ids_of(config)
    n = len(ids) - 1
    probe = Probe(model)
    logits = probe(torch.tensor(ids))  # (T, V)
    p = logits[n - 1].softmax(-1)
    loads, theirs, look, near, text = ask(
        file,
        js(LOGITS, ids=ids),
        dict(do="look", ids=ids, n=n),
        dict(do="next", ids=ids, n=n),
        js(WRITTEN, ids=ids[:9], options=dict(temperature=0, top_k=50, top_p=1, seed=0)),
    )
    assert loads == {}
    assert_close(torch.tensor(theirs), logits, atol=1e-4, rtol=0)
    assert [one["id"] for one in near["top"]] == p.topk(10).indices.tolist()
    assert near["id"] == ids[n]
    heads = torch.tensor(look["heads"])  # (L, H, n)
    maps = [probe.maps[layer][:, n - 1, :n] for layer in range(config.n_layer)]
    assert_close(heads, torch.stack(maps), atol=1e-5, rtol=0)
    x = model.embed(torch.tensor(ids[:n]))[None]
    head = (model.embed if config.tie_embeddings else model.head).weight
    stream = [rms_norm(x) if config.embed_norm else x, *probe.returned]
    for x, guess in zip(stream, look["guesses"], strict=True):
        p = head_logits(rms_norm(x), head, config)[0, n - 1].softmax(-1)
        assert guess["text"] == loaded.tokenizer.bytes_of[p.argmax().item()].decode(
            errors="backslashreplace"
        )
        assert abs(guess["p"] - p.max()) < 1e-5 > abs(guess["own"] - p[ids[n]])
    assert [near["p"], near["p"]] == pytest.approx([guess["own"], p[ids[n]].item()], abs=1e-5)
    assert [text] == model.generate(torch.tensor([ids[:9]]), 21, temperature=0).tolist()


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_page_computes_what_the_model_computes(shape, tokenizer, tmp_path):
    for half in (False, True):
        loaded = trained(tmp_path, tokenizer, half, **SHAPES[shape])
        compare(loaded, written(loaded, tmp_path / "p.html", half))


@torch.no_grad()
def test_the_page_of_a_stock_model(tmp_path):
    make_model(tmp_path, "SmolLM3", num_hidden_layers=6, no_rope_layer_interval=3)
    make(tmp_path, vocab_size=600, **FORMS["smollm2"])
    loaded = export.load(export.ExportConfig(checkpoint=str(tmp_path)))
    compare(loaded, written(loaded, tmp_path / "p.html"))


# temperature, top_k and top_p
DRAWS = [(1, 0, 1), (0.5, 9, 1), (2, 0, 0.6), (1, 7, 0.5), (1, 500, 1), (1, 1, 1), (0, 0, 1)]


def test_it_draws_as_the_model_draws(tokenizer, tmp_path):
    """Over many seeds, and with one seed at many positions."""
    loaded = trained(tmp_path, tokenizer)
    file = written(loaded, tmp_path / "p.html")
    ids = [0, 5]
    rows = torch.tensor([ids] * 3000)
    logits = loaded.model(rows[:1])[0, -1].tolist()
    places = [[[i, 2] for i in range(3000)], [[1, i] for i in range(3000)]]
    for temperature, top_k, top_p in DRAWS:
        options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        _, *found = ask(
            file,
            *(js(DRAWN, seeds=seeds, logits=logits, options=options) for seeds in places),
            *(js(WRITTEN, ids=ids, options=options | dict(seed=seed)) for seed in (1, 1, 2)),
        )
        ours = Counter(loaded.model.generate(rows, 1, **options)[:, -1].tolist())
        for theirs in map(Counter, found[:2]):
            for token in ours | theirs:
                both = ours[token] + theirs[token]
                assert abs(ours[token] - theirs[token]) < 6 + 5 * both**0.5
        _, _, one, again, other = found
        assert one == again and (one == other) == (temperature == 0 or top_k == 1)


KINDS = {
    **FORMS,
    "smollm3": dict(
        pre=splits(LLAMA3),
        special=[END],
        ignore_merges=True,
        plain=("<think>", "<think>\n\n", " a.b"),
    ),
    "digits": dict(
        pre=in_turn(DIGITS.replace("true", "false"), WORDS), special=[END], vocab_size=600
    ),
    **{split: split for split in SPLITS},
}
OTHERS = [
    *parity.TEXTS,
    "a\ud800b\ud83d\ude00\udfff",
    "x<think>\n<<think>> a.b a,b<think>\\n\\n\\n",
    "'\u017fab x'\u212aa",
]
OTHERS += [
    f"a{c}{c}b {c}\n{c}1{c} {c}."
    for c in map(chr, range(0x3001))
    if c.isspace() or not c.isprintable()
]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_tokenizer(kind, tmp_path):
    form = KINDS[kind]
    if kind in SPLITS:
        words = "नमस्ते தமிழ் สวัสดี العَرَبِيَّة привет שלום 안녕하세요 こんにちは 你好 ação "
        texts = [*code_texts()[:2], words * 50]
        own = Tokenizer.train(texts, 700, split=kind, nfc="1" in kind)
    else:
        make(tmp_path, **form)
        own = tokenizer_json.read(tmp_path, form["special"][0])
    file = tmp_path / "p.html"
    file.write_text(page.page(dict(tokenizer=page.tokenizer_of(own)), b""), "utf-8")
    texts = [*AWKWARD, *MORE, *OTHERS, *random_texts(60, seed=4)]
    ids = [*range(own.vocab_size)]
    _, found, shown = ask(file, js(ENCODED, True, texts=texts), js(SHOWN, True, ids=ids))
    for text, (theirs, back) in zip(texts, found, strict=True):
        assert theirs == own.encode(text), repr(text[:80])
        assert back == own.normalize(text)
    assert [bytes(content) for _, content in shown] == [own.bytes_of[i] for i in ids]
    for text, content in shown:
        assert text == bytes(content).decode(errors="replace") or "\\x" in text


def test_the_file_runs_nothing_but_its_own(tokenizer, tmp_path, monkeypatch):
    hostile = "</script><script>alert(1)</script><!--<script>\u2028ENGINE"
    monkeypatch.setattr(page, "prompts_of", lambda loaded: [hostile])
    loaded = trained(tmp_path, tokenizer)
    loaded.about = hostile
    text = written(loaded, tmp_path / "p.html").read_text("utf-8")
    own = Path(page.__file__).with_name("page.html").read_text("utf-8")
    for kind, count in (("script", 4), ("style", 1)):
        assert text.count(f"<{kind}") == own.count(f"<{kind}") == count
        assert text.count(f"</{kind}") == own.count(f"</{kind}") == count
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert "default-src 'none';" in text and f"{kind}-src 'sha256-{digest}'" in text
    said, prompts = ask(tmp_path / "p.html", dict(js="[model.facts, model.prompts]"))[1]
    assert hostile in said and prompts == [hostile]


def test_what_is_not_the_model_is_said(tokenizer, tmp_path, monkeypatch):
    """Weights that lie beside the page and are others, or cut; weights that a disk has spoilt; an
    activation of one's own; a weight that gpt.js does not know."""
    file = tmp_path / "p.html"
    text = written(trained(tmp_path, tokenizer), file).read_text()
    loads = lambda beside="": ask(file, beside=beside)[0].get("error", "")
    weights = re.search('"weights" [^>]*>([^<]+)', text)[1]
    file.write_text(text.replace(weights, weights[:40_000] + "A" * 900 + weights[40_900:]))
    assert "not what the model computes" in loads()
    file.write_text(text.replace(weights, weights[:-8]))
    assert "not the whole" in loads()
    file.write_text(text.replace("\\u0120 \\u0120", "x"))

    monkeypatch.setattr(page, "MOST", 1000)
    written(trained(tmp_path, tokenizer), file)
    beside = tmp_path / "p.weights"
    assert len(file.read_text()) < 200_000 and not loads(beside)
    other = tmp_path / "q.weights"
    written(trained(tmp_path, tokenizer, n_layer=1), other.with_suffix(".html"))
    for wrong in (beside.read_bytes()[:-1], other.read_bytes()):
        other.write_bytes(wrong)
        assert "not the whole p.weights" in loads(other)

    monkeypatch.setattr(model, "relu_squared", torch.relu)
    loaded = trained(tmp_path, tokenizer)
    written(loaded, file)
    assert "model.py" in loads(beside)
    loaded.model.blocks[0].gain = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(UsageError, match="blocks.0.gain"):
        written(loaded, file)


def test_export_writes_the_page_of_a_run(own_run, capsys):
    """Beside the run; then again, with the data gone, somewhere else, in fp16."""
    for more in ([], ["--out", str(own_run / "q.html"), "--page_fp16"]):
        capsys.readouterr()
        assert export.main([str(own_run), "--page", *more], page.write) == 0
        said = capsys.readouterr().out
        file = own_run / ("q.html" if more else "page.html")
        assert f"wrote {file} (" in said
        assert "nats per token of held-out text" in said
        assert ask(file)[0] == {}
