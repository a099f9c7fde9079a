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
def opened(browser, address, width: int = 1280, scheme: str = "light", height: int = 900):
    """The page of a file, or at an address; at the end, it must have asked for nothing elsewhere
    (what its policy stopped was not sent), raised nothing, and fit the width."""
    address = address if isinstance(address, str) else address.as_uri()
    screen = dict(width=width, height=height)
    context = browser.new_context(viewport=screen, color_scheme=scheme)
    page = context.new_page()
    errors = []
    page.asked = []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: page.asked.append(r))
    page.on("requestfailed", lambda r: "csp" in r.failure.lower() and page.asked.remove(r))
    page.goto(address)
    yield page
    home = (address.partition("#")[0], "data:", "blob:", "about:blank")
    assert [r.url for r in page.asked if not r.url.startswith(home)] == errors == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
