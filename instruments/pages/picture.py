"""One style for every picture of this project: an SVG with colours for day and for night.

matplotlib draws, in its usual colours; `svg` puts those of SHADES in their place, as CSS variables.
Used by curves.py, and by the benchmarks and lessons that draw.
"""

import html
import io
import re
import warnings

SHADES = {  # CSS variable: by day, by night, and the colours of matplotlib in whose place it stands
    "ink": ("#1f2124", "#e8e8e4", "black"),
    "soft": ("#63676d", "#a3a6a8", "gray tab:gray"),
    "pale": ("#8a8e94", "#72777e", "silver"),
    "line": ("#e2e3e0", "#34363a", "lightgray gainsboro"),
    "card": ("#f3f3ef", "#202226", "whitesmoke"),
    "paper": ("#fcfcfa", "#16171a", "white"),
    "first": ("#2563a8", "#7db4ee", "tab:blue steelblue"),
    "second": ("#be460c", "#ff9248", "tab:orange orange darkorange"),
    "green": ("#2a7a3b", "#6cc47c", "tab:green green seagreen"),
    "red": ("#b3263f", "#f5869a", "tab:red red crimson"),
    "purple": ("#7a4bb5", "#bb97f0", "tab:purple"),
    "brown": ("#7d5a3c", "#c9a283", "tab:brown"),
    "pink": ("#b83390", "#f08ad0", "tab:pink"),
    "olive": ("#6f6b10", "#c3bc4a", "tab:olive"),
    "cyan": ("#0b7482", "#4fc4d6", "tab:cyan"),
}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "",  # the same picture is the same file
    "axes.edgecolor": "silver",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "grid.color": "lightgray",
    "legend.edgecolor": "none",
    "legend.fontsize": "small",
    "xtick.color": "silver",
    "xtick.labelcolor": "gray",
    "xtick.labelsize": "small",
    "ytick.color": "silver",
    "ytick.labelcolor": "gray",
    "ytick.labelsize": "small",
}


def figure(width: float, height: float):
    """A matplotlib figure, in inches; needs no display. Sets matplotlib's style for the process."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: works without a display

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def css() -> str:
    """The style sheet of a picture. An image, such as a map of attention, is inverted by night."""
    day, night = (
        " ".join(f"--{name}: {shade[i]};" for name, shade in SHADES.items()) for i in (0, 1)
    )
    return f"""<style>
svg {{ {day}
  fill: var(--ink); stroke-linejoin: round; font-family: Inter, system-ui, sans-serif; }}
svg text {{ white-space: pre; }}
@media (prefers-color-scheme: dark) {{ svg {{ {night} }}
  svg image {{ filter: invert(1) hue-rotate(180deg); }} }}
</style>"""


def svg(drawn, title: str) -> str:
    """A figure as the text of an SVG, which is a file, or a part of a page: no id but those that it
    refers to, and those are hashes of what they name. Viewers that know no variables show the
    colours of the day. matplotlib escapes the texts."""
    from matplotlib.colors import to_hex

    buffer = io.StringIO()
    with warnings.catch_warnings():  # another font will have the glyphs
        warnings.filterwarnings("ignore", "Glyph")
        drawn.savefig(buffer, format="svg")
    text = "<svg" + buffer.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=<g) id="[^"]*"|font-family: [^;"]*; ', "", text)
    text = re.sub(r'fill="(#\w*)"', r'style="fill: \1"', text)  # of a hatch
    text = re.sub(r"\n +", "\n", text)
    text = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d)\d+|\n", r"\1", d[0]), text)
    text = re.sub(r"<style.*?</style>", lambda _: css(), text, count=1, flags=re.DOTALL)
    for name, (day, _, colours) in SHADES.items():
        for colour in map(to_hex, colours.split()):
            text = re.sub(f"(fill|stroke): {colour}", rf"\1: {day}; \1: var(--{name})", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
