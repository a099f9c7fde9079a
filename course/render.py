"""The course as pages to read: course/out/html/index.html, a page for each lesson and each lab.

    bash run.sh course
    python course/render.py [NUMBER ...]

Each lesson runs as a notebook in its own kernel, and its page ends with the exercise; a lesson that
fails ends the program with code 1. With numbers, only those lessons run, and the index is made for
all whose pages are there. The figures that README.md shows are copied to course/figures.
"""

import ast
import base64
import html
import os
import re
import shutil
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parent
PAGES = COURSE / "out" / "html"
SHOWN = (7, 17, 24, 29, 31, 32)  # lessons whose figure README.md shows
PARTS = {  # the first lesson of each
    1: "From nothing",
    6: "Text to rows",
    12: "The model",
    19: "Learning",
    24: "Many devices",
    32: "What it learned",
}
STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --page: #fff; --soft: #f4f5f7; --line: #d8dade;
  --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e5e8; --page: #16181c; --soft: #202329;
  --line: #3a3e46; --link: #8ab4f8; } img { background: #fff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 56rem; background: var(--page);
  color: var(--text); font: 17px/1.55 system-ui, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2rem; }
a { color: var(--link); }
nav { display: flex; gap: 1rem; justify-content: space-between; font-size: .9rem; }
nav > * { flex: 1 1 0; } nav a:nth-child(2) { flex: none; white-space: nowrap; }
nav > :nth-child(3) { text-align: right; }
nav + * { border-top: 1px solid var(--line); padding-top: 1rem; margin-top: .5rem; }
.end { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: .5rem; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; padding: .6rem .8rem; margin: .6rem 0; overflow-wrap: normal; }
code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .88em; }
pre code { font-size: inherit; }
.code pre { background: var(--soft); border-radius: 6px; }
.printed pre { border-left: 3px solid #5a9; }
.task { background: var(--soft); border-radius: 6px; padding: .1rem .8rem; }
img { max-width: 100%; height: auto; display: block; margin: 1rem auto; }
table { border-collapse: collapse; width: 100%; } td { padding: .35rem .5rem .35rem 0;
  border-top: 1px solid var(--line); vertical-align: top; } td:first-child { width: 2.2rem; }
td p { margin: .1rem 0 .3rem; }
.anchor-link { display: none; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 1rem; } figure { margin: 0; } figcaption { font-size: .9rem; }
"""
DARK = "@media (prefers-color-scheme: dark) {{ {} }}"


def lessons() -> list[Path]:
    return sorted(COURSE.glob("[0-9][0-9]_*.py"))


def number_of(path: Path) -> int:
    return int(path.stem[:2])


def title_cell(path: Path) -> str:
    """The first cell's text, one line a paragraph; of a plain script (lesson 5) its docstring."""
    text = path.read_text(encoding="utf-8")
    cell = re.split(r"^# %%.*\n", text, flags=re.MULTILINE)[1:2]
    if not cell:
        return re.sub(r"^Lesson (\d+): ", r"# \1. ", ast.get_docstring(ast.parse(text)) or "# ?")
    lines = [line.removeprefix("#").strip() for line in cell[0].strip().splitlines()]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))


def title_of(path: Path) -> str:
    return title_cell(path).splitlines()[0].removeprefix("# ").removesuffix(".")


def question_of(path: Path) -> str:
    found = re.search(r"\*\*Question\.\*\* (.*)", title_cell(path))
    return found[1] if found else ""


def execute(path: Path):
    """Run a percent-format lesson as a notebook, its folder first on the path -> the notebook.

    A figure that a cell saves is shown below the cell."""
    import jupytext
    from nbconvert.preprocessors import ExecutePreprocessor
    from nbformat.v4 import new_output

    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel warns about frozen modules
    notebook = jupytext.read(path)
    if "# %%" not in path.read_text(encoding="utf-8"):
        return notebook  # a plain script, to be read
    processor = ExecutePreprocessor(timeout=300, kernel_name="python3")
    processor.preprocess(notebook, {"metadata": {"path": str(COURSE)}})
    for cell in notebook.cells:
        printed = "".join(o.get("text", "") for o in cell.get("outputs", []))
        for name in re.findall(r"^figure: course/(out/\S+\.png)$", printed, re.MULTILINE):
            picture = base64.b64encode((COURSE / name).read_bytes()).decode()
            cell.outputs.append(new_output("display_data", {"image/png": picture}))
    return notebook


def markdown(text: str) -> str:
    from nbconvert.filters import markdown2html

    return markdown2html(text)


def body_of(notebook) -> str:
    """The cells as HTML: text, code, what was printed, figures."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source))
            continue
        code = highlight(cell.source, PythonLexer(), HtmlFormatter(nowrap=True))
        parts.append(f'<div class="code"><pre>{code}</pre></div>')
        for output in cell.outputs:
            if "text" in output:
                printed = html.escape(output["text"].rstrip())
                parts.append(f'<div class="printed"><pre>{printed}</pre></div>')
            elif picture := output.get("data", {}).get("image/png"):
                parts.append(f'<img alt="figure" src="data:image/png;base64,{picture}">')
    return "\n".join(parts)


def exercise_of(number: int) -> str:
    """The exercise's docstring and the command that judges it, as HTML."""
    path = COURSE / "exercises" / f"ex{number:02d}.py"
    if not path.exists():
        return ""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    task = markdown(ast.get_docstring(tree) or "")
    return f"""<h2>The exercise, as <code>course/exercises/{path.name}</code> has it</h2>
<div class="task">{task}</div>
<p>Write it there, then:</p><div class="printed"><pre>python course/check.py {number}</pre></div>"""


def page(title: str, body: str) -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="friendly").get_style_defs(".code")
    dark = DARK.format(HtmlFormatter(style="github-dark").get_style_defs(".code"))
    keep = ".code, .code pre { background: var(--soft); }"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}{light}{dark}{keep}</style></head>
<body>
{body}
</body></html>
"""


def navigation(path: Path, all_: list[Path]) -> str:
    i = all_.index(path)
    before, after = all_[max(i - 1, 0)], all_[min(i + 1, len(all_) - 1)]
    previous = (
        f'<a href="{before.stem}.html">&larr; {title_of(before)}</a>' if i else "<span></span>"
    )
    following = f'<a href="{after.stem}.html">{title_of(after)} &rarr;</a>'
    last = i == len(all_) - 1
    return f'<nav>{previous}<a href="index.html">all lessons</a>{"" if last else following}</nav>'


def index(made: list[Path]) -> str:
    """The parts, the lessons with their questions, six pictures, the labs."""
    intro = (COURSE / "README.md").read_text(encoding="utf-8").partition("## ")[0]
    body = [markdown(intro)]
    for path in lessons():
        if part := PARTS.get(number_of(path)):
            body.append(f"</table><h2>{list(PARTS.values()).index(part)}. {part}</h2><table>")
        name, question = title_of(path), markdown(question_of(path))
        name = name.partition(". ")[2]
        link = f'<a href="{path.stem}.html">{name}</a>' if path in made else name
        body.append(f"<tr><td>{number_of(path)}</td><td>{link}{question}</td></tr>")
    body.append("</table><h2>Labs: change the code</h2><table>")
    for lab in sorted((COURSE / "labs").glob("lab*.md")):
        title = lab.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        body.append(
            f'<tr><td>{lab.stem[3:]}</td><td><a href="{lab.stem}.html">{title}</a></td></tr>'
        )
    body.append('</table><h2>Six of the answers</h2><div class="pictures">')
    for path in lessons():
        figure = COURSE / "figures" / f"{path.stem}.png"
        if number_of(path) in SHOWN and figure.exists():
            picture = base64.b64encode(figure.read_bytes()).decode()
            body.append(
                f'<figure><img alt="" src="data:image/png;base64,{picture}">'
                f"<figcaption>{title_of(path)}</figcaption></figure>"
            )
    body.append("</div>")
    return page("The course", "\n".join(body).replace("</table>", "", 1))


def main(argv: list[str]) -> int:
    from nbconvert.preprocessors import CellExecutionError

    numbers, failed = [int(word) for word in argv], []
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in lessons():
        if numbers and number_of(path) not in numbers:
            continue
        try:
            body = body_of(execute(path))
        except CellExecutionError as error:
            print(f"{path.stem}: {error.ename}: {error.evalue}", file=sys.stderr)
            failed.append(path.stem)
            continue
        links = navigation(path, lessons())
        end = f'{exercise_of(number_of(path))}\n<div class="end">{links}</div>'
        target = PAGES / f"{path.stem}.html"
        target.write_text(page(title_of(path), f"{links}\n{body}\n{end}"), encoding="utf-8")
        print(target.relative_to(COURSE.parent))
        if number_of(path) in SHOWN:
            (COURSE / "figures").mkdir(exist_ok=True)
            shutil.copy(COURSE / "out" / f"{path.stem}.png", COURSE / "figures")
    for lab in sorted((COURSE / "labs").glob("lab*.md")):
        text = lab.read_text(encoding="utf-8")
        body = f'<nav><a href="index.html">all lessons</a></nav>{markdown(text)}'
        title = text.splitlines()[0].removeprefix("# ")
        (PAGES / f"{lab.stem}.html").write_text(page(title, body), encoding="utf-8")
    made = [path for path in lessons() if (PAGES / f"{path.stem}.html").exists()]
    (PAGES / "index.html").write_text(index(made), encoding="utf-8")
    print((PAGES / "index.html").relative_to(COURSE.parent))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
