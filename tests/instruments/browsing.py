"""Pages in a headless Chromium: what they show, what they try to load and to run. And the page of
any model."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from instruments.pages import page as pages
from machinery.formats import Provenance
from machinery.trained import EvalConfig, Trained

QUIET = """--no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if not chromium:
        pytest.skip("no chromium here")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=QUIET.split())
        yield browser
        browser.close()


@contextmanager
def opened(browser, file: Path, width: int = 1280, scheme: str = "light"):
    """The page of a file; at the end, it must have asked for nothing elsewhere (what its policy
    stopped was not sent), raised nothing, and fit the width."""
    context = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme)
    page = context.new_page()
    errors = []
    asked = []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: asked.append(r))
    page.on("requestfailed", lambda r: "csp" in r.failure.lower() and asked.remove(r))
    page.goto(file.as_uri())
    yield page
    home = (file.as_uri(), "data:", "blob:", "about:blank")
    assert [r.url for r in asked if not r.url.startswith(home)] == errors == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def write_page(file: Path, model, tokenizer, tuned=False, half=False) -> tuple[Path, Trained]:
    """A model as a page; the file, and the model, which then has the weights of the page."""
    of = Provenance(step=7, tokens=7, identity=dict(conversations=tuned), model=model.config)
    loaded = Trained(EvalConfig(), file.parent, of, model, tokenizer)
    pages.write(loaded, str(file), half)
    return file, loaded
