"""Pages in a headless Chromium: what they show, what they try to load and to run."""

import shutil
from contextlib import contextmanager

import pytest

QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync"
SCREENS = [(1280, "light"), (400, "dark")]


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
def opened(browser, path, width: int, scheme: str):
    """The page of a file; at the end, it must have asked for no other address (what its policy
    stopped was not sent) and raised nothing, and fit the width."""
    context = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme)
    page, asked, errors = context.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: asked.append(r.url))
    page.on("requestfailed", lambda r: "csp" in r.failure.lower() and asked.remove(r.url))
    page.goto(path.as_uri())
    yield page
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert not errors
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
