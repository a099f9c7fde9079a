"""The pictures of README.md, light and dark: `python benchmarks/pictures.py`.

After `bash run.sh`, `bash run.sh tiny-chat` and `bash run.sh eval`; needs playwright and a
Chromium. Writes docs/pictures. Next: instruments/pages/look.html, instruments/pages/page.html.
"""

import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright

from runs import ROOT

QUESTIONS = ("Who are you?", "What does dumps do?")


def main() -> None:
    out = ROOT / "docs" / "pictures"
    subprocess.run([sys.executable, "eval.py", "look", "tiny"], cwd=ROOT, check=True)
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"))
        for scheme in ("light", "dark"):
            page = chromium.new_page(color_scheme=scheme)
            page.set_viewport_size(dict(width=1180, height=860))
            page.goto((ROOT / "runs/tiny/look.html").as_uri())
            page.wait_for_selector("body[data-ready]")
            page.screenshot(path=out / f"look-{scheme}.png")
            page.set_viewport_size(dict(width=660, height=481))
            page.goto((ROOT / "runs/tiny-chat/page.html").as_uri())
            page.wait_for_selector("#input:enabled")  # it has its weights, and has checked itself
            page.evaluate("document.getElementById('seed').value = 0")  # it is under Options
            page.mouse.move(0, 0)  # under the pointer, a token would show its alternatives
            for question in QUESTIONS:
                page.fill("#input", question)
                page.press("#input", "Enter")
                page.locator("#send", has_text="Send").wait_for()  # meanwhile it says Stop
            page.screenshot(path=out / f"chat-{scheme}.png")


if __name__ == "__main__":
    main()
