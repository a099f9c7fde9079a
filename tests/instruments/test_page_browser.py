"""A model's page in a headless Chromium, from file://: typed into, stopped, read with the keyboard,
its heads looked at; hostile strings, a wrong file. Skipped where there is no Chromium."""

# ruff: noqa: F811
import re

import pytest
import torch
from browsing import browser, opened, write_page  # noqa: F401
from chat_helpers import random_model, tokenizer  # noqa: F401

from hf import parity
from instruments.pages import page as pages
from preparation.chat import encode

HOSTILE = """<img src=x onerror="window.bad=1"><script>window.bad=1</script>'"`]]>&lt;\u202e"""


@pytest.fixture
def write(tokenizer, tmp_path):
    """Write a page of random weights, which hardly ever end a text: its file, and what is in it."""

    def written(tuned=False, **changes):
        shape = dict(vocab_size=tokenizer.vocab_size, seq_len=96, extras=()) | changes
        model = random_model(**shape).eval()
        parity.set_unit_weights(model)
        model.head.weight.data[:4] = 0
        return write_page(tmp_path / "p.html", model, tokenizer, tuned)

    return written


def say(page, text: str, **options) -> str:
    """Type it, and wait for all of the answer: what is said of it."""
    begin(page, text, **options)
    return done(page)


def begin(page, text: str, **options) -> None:
    page.evaluate("document.querySelector('details').open = true")
    for name, value in options.items():
        page.fill(f"#{name}", str(value))
    page.fill("#input", text)
    page.press("#input", "Enter")


def done(page) -> str:
    page.locator("#send", has_text="Stop").wait_for(state="detached")
    return page.inner_text("#about")


def texts(page) -> list[str]:
    return [text.rstrip("\ufffd") for text in page.locator("section").all_text_contents()]


def greedy(model, ids, n: int) -> list[int]:
    return model.generate(torch.tensor([ids]), n, temperature=0)[0, len(ids) :].tolist()


def test_a_text_goes_on(write, browser, tokenizer):
    file, loaded = write()
    with opened(browser, file) as page:
        assert say(page, "the cat  ", tokens=30, temperature=0) == "30 tokens; token limit reached"
        ids = tokenizer.encode("the cat")
        ids += greedy(loaded.model, [tokenizer.bos_id, *ids], 30)
        (whole,) = texts(page)
        assert whole == tokenizer.decode(ids).rstrip("\ufffd")
        page.locator(".token", has_text="t").first.hover()
        assert page.locator("#box code").count() >= 10
        page.locator(".token").first.focus()  # by the keyboard
        first = page.inner_text("#box")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#box") != first

        say(page, " and", tokens=9, temperature=1)  # from there, in the same place
        (one,) = texts(page)
        assert one.startswith(whole) and " and" in one
        for _ in range(2):  # beside it, from the same place, with seed 1
            page.fill("#seed", "0")
            page.click("#again")
            done(page)
        assert page.input_value("#seed") == "1"
        assert one == texts(page)[0] != texts(page)[1] == texts(page)[2]
        assert "the context of 96 tokens is full" in say(page, "", tokens=500)
        assert "the model sees 96 at most" in say(page, "") and len(texts(page)) == 3
        page.fill("#top_p", "2")  # which no answer has
        page.fill("#input", "kept")
        page.click("#again")
        assert page.input_value("#input") == "kept"


def test_stop(write, browser):
    file, _ = write(seq_len=4096)
    with opened(browser, file) as page:
        long = "cat, " * 900
        begin(page, long, tokens=4000)
        page.locator("#about", has_text="reading").wait_for()
        page.keyboard.press("Escape")
        assert re.fullmatch(r"reading \d+ of \d+; stopped", done(page))
        assert texts(page) == [] and page.input_value("#input") == long
        begin(page, "the")
        page.wait_for_selector(".token >> nth=5")
        page.click("#send")
        assert re.fullmatch(r"\d+ tokens; stopped", done(page))


def test_a_conversation(write, browser, tokenizer):
    file, loaded = write(tuned=True, seq_len=160)
    with opened(browser, file) as page:
        ids = [tokenizer.bos_id]
        turns = [("system", "It is.")]
        for question in ("What is a cat?", "<|end|> of it"):
            say(page, question, tokens=12, temperature=0, system="It is.")
            ids += encode([*turns, ("user", question)], tokenizer, reply=True)
            answer = greedy(loaded.model, ids, 12)
            assert texts(page)[-1] == tokenizer.decode(answer).rstrip("\ufffd")
            ids += [*answer, tokenizer.special["<|end|>"]]
            turns = []
        assert "left out" not in say(page, "cat", tokens=500)  # half the context is enough
        end = say(page, "What is the cat that sat on the mat?", tokens=12)
        assert "no longer fit and were left out: " in end
        assert "sees 160 at most" in say(page, "a b " * 80)


def test_where_it_looked(write, browser):
    """On a narrow screen, in the dark."""
    file, _ = write(n_layer=12, n_head=16, n_kv_head=4)
    with opened(browser, file, 400, "dark") as page:
        say(page, "the cat sat on the mat", tokens=20)
        page.locator(".token").nth(9).focus()
        page.keyboard.press("Enter")
        page.locator(".head").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator(".head").count() == 192 and page.locator("#guesses tr").count() == 13
        said = page.inner_text("#says")
        assert re.match(r"layer 2, head 1: looks most at .+, \d+%\. ", said)
        sum_of = "all => all.reduce((sum, e) => sum + e.style.getPropertyValue('--a') ** 2, 0)"
        seen = 100 * page.locator(".token").evaluate_all(sum_of)
        assert seen + float(re.search(r"([\d.]+)% goes", said)[1]) == pytest.approx(100, abs=0.6)
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden()


def test_weights_in_a_file(write, browser, monkeypatch):
    monkeypatch.setattr(pages, "MOST", 0)
    file, _ = write()
    with opened(browser, file) as page:
        for name in ("p.html", "p.weights"):
            page.set_input_files("#file", file.with_name(name))
            page.locator("#about", has_text=re.compile("not the whole|Point")).wait_for()
        assert say(page, "the", tokens=3).startswith("3 tokens")


def test_hostile_strings_stay_text(write, browser, monkeypatch):
    describe = pages.describe
    hostile = dict(name=HOSTILE, prompts=[HOSTILE])
    monkeypatch.setattr(pages, "describe", lambda loaded: describe(loaded) | hostile)
    file, _ = write(seq_len=256)
    with opened(browser, file) as page:
        page.click("#intro button")
        done(page)
        page.locator(".token").first.click()
        page.wait_for_selector(".head")
        assert page.inner_text("#name") == HOSTILE and HOSTILE in texts(page)[0]
        assert page.evaluate("window.bad") is None
