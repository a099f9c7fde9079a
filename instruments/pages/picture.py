"""One style for every picture of this project: an SVG with colours for day and for night.

matplotlib draws, by picture.mplstyle, in its usual colours; `svg` puts those of picture.css in
their place. Used by curves.py, and by the benchmarks and lessons that draw.
"""

import html
import io
import re
from pathlib import Path

CSS = Path(__file__).with_suffix(".css").read_text()
DAY = dict(re.findall(r"--(\w+): (#\w+)", CSS.partition("@media")[0]))


def figure(width: float, height: float):
    """A matplotlib figure, in inches; needs no display. Sets matplotlib's style for the process."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: works without a display

    matplotlib.rc_file(Path(__file__).with_suffix(".mplstyle"))
    return Figure(figsize=(width, height))


def svg(drawn, title: str) -> str:
    """A figure as the text of an SVG, which is a file, or a part of a page: no id but those that it
    refers to, and those are hashes of what they name. Viewers that know no variables show the
    colours of the day. matplotlib escapes the texts."""
    from matplotlib.colors import is_color_like, to_hex

    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg")
    text = f'<svg role="img" aria-label="{html.escape(title)}"'
    text += buffer.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=<g) id="[^"]*"|font-family: [^;"]*; |(?<=\n) +', "", text)
    text = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d)\d+|\n", r"\1", d[0]), text)
    text = re.sub(r'fill="(#\w*)"', r'style="fill: \1"', text)  # of a hatch
    text = re.sub(r"(?<=<style)[^<]*", lambda _: f">\n{CSS}", text, count=1)
    for name, day in DAY.items():
        for colour in filter(is_color_like, (name, f"tab:{name}")):
            shade = rf"\1: {day}; \1: var(--{name})"
            text = re.sub(f"(fill|stroke): {to_hex(colour)}", shade, text)
    return text
