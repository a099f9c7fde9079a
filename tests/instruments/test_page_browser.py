"""A model's page in a headless Chromium, from file://: typed into, stopped, read with the keyboard,
its heads looked at; hostile strings, a wrong file. Skipped where there is no Chromium."""

# ruff: noqa: F811
import re

import pytest
import torch
from browsing import SCREENS, browser, opened  # noqa: F401

from config import GPTConfig
from hf import parity
from instruments.pages import page as pages
from machinery.formats import Provenance
from machinery.trained import EvalConfig, Trained
from model import GPT
from preparation.chat import encode
from tokenizer import Tokenizer

HOSTILE = """<img src=x onerror="window.bad=1"><script>window.bad=1</script>'"`]]>&lt;\u202e"""


@pytest.fixture(scope="module")
def tokenizer():
    words = [
        f"def name_{i}(x):\n    return x + {i}  # caf\u00e9 \u4f60\u597d\n" for i in range(200)
    ]
    return Tokenizer.train(words, 340)


@pytest.fixture
def write(tokenizer, tmp_path):
    """Write a page: its file, and the model. Its random weights never end a text."""

    def written(tuned=False, **changes):
        shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=16, n_embd=32, mlp_hidden=64)
        shape |= dict(seq_len=96, extras=("key_offset",)) | changes
        model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape)).eval()
        model.init_weights()
        parity.set_unit_weights(model, 1)
        with torch.no_grad():
            model.head.weight[[*tokenizer.special.values()]] = 0
        known = dict(conversations=tuned)
        of = Provenance(step=1, tokens=1, identity=known, model=model.config)
        path = tmp_path / "small" / "checkpoints" / "step_00000001"
        pages.write(Trained(EvalConfig(), path, of, model, tokenizer), str(tmp_path / "p.html"), False)
        return tmp_path / "p.html", model

    return written


def say(page, text: str, **options) -> None:
    page.evaluate("document.querySelector('details').open = true")
    for name, value in options.items():
        page.fill(f"#{name}", str(value))
    page.fill("#input", text)
    page.press("#input", "Enter")


def done(page) -> str:
    """Wait until it is; what is said of it."""
    page.locator("#send", has_text="Stop").wait_for(state="detached")
    return page.inner_text("#about")


def texts(page) -> list[str]:
    return page.locator("section").all_text_contents()


def greedy(model, ids, n: int) -> list[int]:
    return model.generate(torch.tensor([ids]), n, temperature=0)[0, len(ids) :].tolist()


def test_a_text_goes_on(write, browser, tokenizer):
    file, model = write()
    with opened(browser, file) as page:
        say(page, "def name_1(x):  ", tokens=30, temperature=0)
        assert done(page) == "30 tokens; token limit reached"
        ids = [tokenizer.bos_id, *tokenizer.encode("def name_1(x):")]
        whole = tokenizer.decode(ids[1:] + greedy(model, ids, 30)).rstrip("\ufffd")
        assert texts(page) == [whole]
        logits = model(torch.tensor([ids]))[0, 0].log_softmax(-1)  # typed tokens are shaded too
        shade = page.locator(".token").first.evaluate("e => +e.style.getPropertyValue('--a')")
        bits = -logits[ids[1]] / torch.tensor(tokenizer.vocab_size).log()
        assert shade == pytest.approx(min(1, bits), abs=1e-3)
        page.locator(".token", has_text=re.compile(r"\w")).nth(2).hover()
        assert 10 <= page.locator("#box code").count() <= 11
        first = page.inner_text("#box")
        page.locator(".token").first.focus()  # by the keyboard
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#box") != first and page.locator("#box .own").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("#box").is_hidden()

        say(page, " and", tokens=9, temperature=1)  # from there, in the same place
        done(page)
        (one,) = texts(page)
        assert one.startswith(whole + " and")
        page.click("#again")  # beside it, from the same place
        done(page)
        assert page.input_value("#seed") == "1"
        assert texts(page)[0] == one != texts(page)[1] and texts(page)[1].startswith(whole + " and")
        page.fill("#seed", "-1")
        page.evaluate("document.querySelector('#seed').min = -9")
        page.click("#again")  # the same seed, the same text
        done(page)
        assert texts(page)[2] == one
        say(page, "", tokens=500)
        assert "the context of 96 tokens is full" in done(page)
        assert texts(page)[2].startswith(one) and len(texts(page)) == 3
        say(page, "")
        assert "96 tokens: the model sees 96 at most" in done(page)


def test_stop(write, browser):
    file, _ = write(seq_len=4096)
    with opened(browser, file) as page:
        long = "name_1 " * 900
        say(page, long, tokens=4000)
        page.wait_for_selector("text=/reading \\d+ of/")
        page.keyboard.press("Escape")
        assert re.fullmatch(r"reading \d+ of \d+; stopped", done(page))
        assert texts(page) == [] and page.input_value("#input") == long
        say(page, "def", tokens=4000)
        page.wait_for_selector(".token >> nth=5")
        page.click("#send")
        assert re.fullmatch(r"\d+ tokens; stopped", done(page))


def test_a_conversation(write, browser, tokenizer):
    file, model = write(tuned=True, seq_len=128)
    with opened(browser, file) as page:
        ids = [tokenizer.bos_id]
        turns = [("system", "Be brief.")]
        for question in ("What is 1?", "<|end|> of name_2"):
            ids += encode([*turns, ("user", question)], tokenizer, reply=True)
            say(page, question, tokens=12, temperature=0, system="Be brief.")
            done(page)
            answer = greedy(model, ids, 12)
            assert texts(page)[-1].rstrip("\ufffd") == tokenizer.decode(answer).rstrip("\ufffd")
            ids += [*answer, tokenizer.special["<|end|>"]]
            turns = []
        page.locator("section").nth(3).locator(".token").last.click()
        page.locator(".head").nth(3).click()
        assert page.locator("section").first.locator(".token").count()
        for _ in range(3):
            say(page, "name_1(x) and name_2(x) and name_3(x)?")
            end = done(page)
        assert "no longer fit and were left out" in end
        say(page, "name_1(x) " * 80)
        assert "the model sees 128 at most" in done(page)
        assert page.input_value("#input") == "name_1(x) " * 80


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_where_it_looked(write, browser, width, scheme):
    file, _ = write(n_layer=12, n_head=16, n_kv_head=4)
    with opened(browser, file, width, scheme) as page:
        say(page, "def name_1(x):", tokens=20)
        done(page)
        page.locator(".token").nth(9).focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".head")
        assert page.locator(".head").count() == 192 and page.locator("#guesses tr").count() == 13
        page.locator(".head").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert re.match(r'layer 2, head 1: looks most at .+, \d+%\. ', page.inner_text("#says"))
        sum_of = "all => all.reduce((sum, e) => sum + e.style.getPropertyValue('--a') ** 2, 0)"
        seen = 100 * page.locator(".token").evaluate_all(sum_of)
        rest = re.search(r"([\d.]+)% goes", page.inner_text("#says"))[1]
        assert seen + float(rest) == pytest.approx(100, abs=0.6)
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden() and "surprise" in page.inner_text("#shade")


def test_weights_in_a_file(write, browser, monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "MOST", 0)
    file, _ = write()
    with opened(browser, file) as page:
        (tmp_path / "other").write_bytes(b"x" * 99)
        page.set_input_files("#file", tmp_path / "other")
        page.locator("#about", has_text="p.weights").wait_for()
        page.set_input_files("#file", tmp_path / "p.weights")
        page.wait_for_selector("#input")
        say(page, "def", tokens=3)
        assert done(page).startswith("3 tokens")


def test_hostile_strings_stay_text(write, browser, monkeypatch):
    """In the name, the facts, the prompts, the text; and no other script runs."""
    describe = pages.describe
    changed = lambda loaded: describe(loaded) | dict(name=HOSTILE, prompts=[HOSTILE])
    monkeypatch.setattr(pages, "describe", changed)
    monkeypatch.setattr(pages, "facts_of", lambda loaded: [HOSTILE])
    file, _ = write(seq_len=256)
    with opened(browser, file) as page:
        assert [r.url[:5] for r in page.asked] == ["file:", "blob:"]  # itself, and its worker
        page.click("#intro button")
        done(page)
        page.locator(".token").first.click()
        page.wait_for_selector(".head")
        assert page.inner_text("#name") == HOSTILE and texts(page)[0].startswith(HOSTILE)
        assert page.inner_text("#facts").startswith(HOSTILE) and page.locator("img").count() == 0
        blocked = """() => new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.bad = 1";
            document.body.append(script);
        })"""
        assert page.evaluate(blocked).startswith("script-src")
        assert page.evaluate("window.bad") is None
