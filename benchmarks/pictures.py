"""The pictures of README.md, light and dark: `python benchmarks/pictures.py`.

After `bash run.sh`, `bash run.sh tiny-chat` and `bash run.sh eval`; needs a Chromium. Writes
docs/pictures. Next: instruments/pages/look.html and instruments/talk/serve.html, the two pages.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Who are you?"
ADDRESS = "http://127.0.0.1:8049"


def main() -> None:
    python, out = [sys.executable, "eval.py"], ROOT / "docs/pictures"
    subprocess.run([*python, "look", "tiny"], cwd=ROOT, check=True)
    server = subprocess.Popen([*python, "serve", "tiny-chat"], cwd=ROOT, stdout=subprocess.PIPE)
    server.stdout.readline()  # it says where it listens
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"))
        for scheme in ("light", "dark"):
            size = dict(width=860, height=620)
            page = chromium.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1.5)
            page.goto((ROOT / "runs/tiny/look.html").as_uri())
            page.screenshot(path=out / f"look-{scheme}.png")
            page.goto(ADDRESS)
            page.fill("#input", QUESTION)
            page.press("#input", "Enter")
            page.wait_for_selector(".answer")
            page.wait_for_selector(".writing", state="detached")
            page.screenshot(path=out / f"chat-{scheme}.png")
    server.terminate()


if __name__ == "__main__":
    main()
