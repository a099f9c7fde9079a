"""The page of eval.py serve, in a headless Chromium: typed into, streamed, stopped, read with the
keyboard; in the dark, and on a narrow screen. Skipped where there is no Chromium."""

# ruff: noqa: F811
import json
import math
import re

import pytest
import torch
from browsing import SCREENS, browser, opened  # noqa: F401
from test_serve import Gate, build, serving, tokenizer, until_left  # noqa: F401


def say(page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def sent_last(page) -> dict:
    return json.loads([r for r in page.asked if r.method == "POST"][-1].post_data)


def done(page) -> None:
    page.wait_for_selector(".answer")
    page.wait_for_selector(".writing", state="detached")


def endless(tokenizer, *args, **changes):
    """A model that never ends an answer by itself."""
    model = build(tokenizer, *args, **changes)
    ends = [*tokenizer.special.values()]
    never = lambda module, args, logits: logits.index_fill(-1, torch.tensor(ends), -1e9)
    model.register_forward_hook(never)
    return model


@pytest.fixture
def base(tokenizer):
    model = endless(tokenizer, seq_len=512)
    gate = Gate(model)
    prompts = ["class", "def name_1(x):"]
    with serving(model, tokenizer, prompts=prompts, parameters=10, tokens=None) as (url, server):
        yield url, gate, server
        gate.let()


def test_text_streams_and_each_token_has_alternatives(base, browser, tokenizer):
    url, gate, server = base
    with opened(browser, url) as page:
        assert page.title() == "small" and page.inner_text("#send") == "Continue"
        assert page.evaluate("document.activeElement.id") == "input"
        page.fill("#tokens", "60")
        page.click("#tries button >> nth=1")  # a prompt of the server's
        gate.let(3)
        page.wait_for_selector(".writing .token", state="attached")
        gate.let()
        done(page)
        assert 3 < page.locator(".token").count() <= 60  # it came bit by bit
        assert page.inner_text(".prompt") == "def name_1(x):"
        ends = r"60 tokens, \d+ per second; token limit reached$"
        assert re.match(ends, page.inner_text(".about"))
        page.locator(".token", has_text=re.compile(r"\w")).first.hover()  # a line's end has no size
        rows = page.locator("#alternatives div")
        assert 4 <= rows.count() and page.locator("#alternatives .chosen").count() >= 1
        page.mouse.move(5, 5)
        assert page.locator("#alternatives").is_hidden()
        token = page.locator(".token").nth(1)
        of_token = "e => [e.tokens.reduce((p, t) => p * t.p, 1), +e.style.getPropertyValue('--a')]"
        p, shade = token.evaluate(of_token)
        assert shade == pytest.approx(min(1, -math.log(p, tokenizer.vocab_size)))

        page.locator(".token").nth(0).focus()  # by the keyboard
        first = page.inner_text("#alternatives")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#alternatives") != first
        page.keyboard.press("Escape")
        assert page.locator("#alternatives").is_hidden()

        sent = sent_last(page)
        whole = page.locator(".text").text_content()
        assert sent["temperature"] == 0.8 and sent["max_new_tokens"] == 60
        page.fill("#tokens", "2")
        say(page, " and")  # goes on from there, in the same place
        done(page)
        whole += " and"
        assert sent_last(page)["text"] == whole and page.locator(".turn").count() == 1
        assert page.locator(".text").text_content().startswith(whole)
        assert page.input_value("#input") == ""  # the text stands once
        seed = sent_last(page)["seed"]
        page.click("#again")  # from the same place once more, beside it
        done(page)
        assert sent_last(page)["seed"] != seed
        assert sent_last(page)["text"] == whole and page.locator(".turn").count() == 2
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        page.click("text=Copy >> nth=1")
        copied = page.evaluate("copied")
        assert copied == page.locator(".text").nth(1).text_content()
        page.click("text=Edit >> nth=1")
        assert page.input_value("#input") == re.sub("\r\n?", "\n", copied)  # a textarea's
        page.click("#clear")
        assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


def test_escape_ends_the_generation(base, browser):
    url, gate, server = base
    with opened(browser, url) as page:
        page.fill("#tokens", "400")
        say(page, "def")
        gate.let(9)
        page.wait_for_selector(".writing .token", state="attached")
        assert page.inner_text("#send") == "Stop"
        page.keyboard.press("Escape")
        until_left(server)
        gate.let()
        assert server.ended.get(timeout=60)
        done(page)
        assert page.inner_text(".about").endswith("; stopped")
        assert page.inner_text("#send") == "Continue"
        assert gate.begun < 40  # of 400


HOSTILE = """<img src=x onerror="window.bad=1"><script>window.bad=1</script>'"`]]>&lt;\u202e"""


def test_hostile_strings_stay_text(tokenizer, browser):
    """In the name, the prompt, the answer, its alternatives, the errors; no other script runs."""
    model = build(tokenizer)
    with serving(model, tokenizer, name=HOSTILE) as (url, _), opened(browser, url) as page:
        others = [[HOSTILE, 0.6], ["</div>" + HOSTILE, 0.3]]
        token = dict(id=5, text=HOSTILE, p=0.6, top=others)  # \u202e would turn the line
        piece = json.dumps(dict(text=HOSTILE, tokens=[token], end="stop"))
        page.route("**/draw", lambda route: route.fulfill(body=piece + "\n"))
        say(page, HOSTILE)
        done(page)
        page.unroute("**/draw")
        page.route("**/draw", lambda route: route.fulfill(status=400, body=HOSTILE))
        say(page, HOSTILE)
        page.wait_for_selector(".bad")
        page.locator(".token").first.hover()
        assert page.locator("#alternatives div").count() == 2
        assert "\\u202e" in page.inner_text("#alternatives")
        for name in ("#name", ".prompt", ".token", ".bad"):
            assert page.locator(name).first.text_content().startswith(HOSTILE)
        assert page.input_value("#input") == HOSTILE
        assert page.title() == " ".join(HOSTILE.split()) and page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        blocked = """() => new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.bad = 1";
            document.body.append(script);
        })"""
        assert page.evaluate(blocked).startswith("script-src")
        assert page.evaluate("window.bad") is None


def test_a_conversation(tokenizer, browser):
    """Turns are sent along; when they no longer fit, the oldest are left out, and that is said."""
    with serving(build(tokenizer, 2, seq_len=160), tokenizer, tuned=True) as (url, _):
        with opened(browser, url) as page:
            assert page.inner_text("#send") == "Send"
            page.fill("#tokens", "20")
            page.fill("#system", "Be brief.")
            for i in range(3):
                say(page, f"What is {i}?")
                done(page)
                assert page.input_value("#input") == ""
            answers = page.locator(".answer .text").all_inner_texts()
            roles = "system user assistant user assistant user".split()
            assert [m["role"] for m in sent_last(page)["messages"]] == roles and all(answers)
            for _ in range(3):
                say(page, "name_1(x) and name_2(x) and name_3(x)?")
                done(page)
            assert "no longer fit and were left out" in page.inner_text("#talk")
            assert page.locator(".about.bad").count() == 0
            long = "name_1(x) " * 80
            page.route("**/draw", lambda route: route.abort())  # a dead server
            for sentence in ("does it still run?", "160 fit, the answer's included; shorten"):
                say(page, long)
                page.wait_for_selector(f'#failed:has-text("{sentence}")')
                assert page.input_value("#input") == long and page.locator(".ask").count() == 6
                page.unroute("**/draw")
