"""The course as pages to read: course/out/html/index.html, a page for each lesson and each lab.

    bash run.sh course
    python course/render.py [NUMBER ...]

The first page is README.md, room.html is that of the room. Each lesson runs as a notebook in its
own kernel, and its page ends with the exercise; a lesson that fails ends the program with code 1.
With numbers, only those lessons run. The figures that these pages show are written to
course/figures. page.html is the template: nbconvert's plain one with a style of its own.
"""

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import lesson

COURSE = Path(__file__).resolve().parent
PAGES = COURSE / "out" / "html"


def execute(path: Path):
    """Run a percent-format lesson as a notebook, its folder first on the path -> the notebook."""
    import jupytext
    from nbconvert.preprocessors import ExecutePreprocessor

    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel warns about frozen modules
    notebook = jupytext.read(path)
    processor = ExecutePreprocessor(timeout=300, kernel_name="python3")
    processor.preprocess(notebook, {"metadata": {"path": str(path.parent)}})
    return notebook


def exercise(number: int) -> str:
    """The exercise's docstring and the command that judges it, as Markdown."""
    path = COURSE / f"exercises/ex{number:02d}.py"
    task = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return f"""## The exercise, as `course/exercises/{path.name}` has it
{task}

Write it there, then:

    python course/check.py {number}
"""


def name_of(path: Path) -> str:
    """Of a page: index for README.md, room for that of the room."""
    if path.name != "README.md":
        return path.stem
    return "index" if path.parent == COURSE else path.parent.name


def write(name: str, notebook, folder: Path, **shown) -> None:
    """A notebook -> NAME.html; folder is where its links and pictures begin."""
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    def link(found: re.Match) -> str:
        target = (folder / found[1]).resolve()
        page = PAGES / f"{name_of(target)}.html"
        if target.suffix == ".svg":
            return found[0]  # embedded
        return f"]({page.name if page.exists() else os.path.relpath(target, PAGES)})"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\(([^)#:]+)\)", link, cell.source)
    for mode, style in (("light", "friendly"), ("dark", "github-dark")):
        shown[mode] = HtmlFormatter(style=style).get_style_defs(".highlight")
    shown["title"] = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
    exporter = HTMLExporter(
        template_file=str(COURSE / "page.html"),
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    resources = {"metadata": {"path": str(folder)}, "page": shown}
    html, _ = exporter.from_notebook_node(notebook, resources)
    (PAGES / f"{name}.html").write_text(html, encoding="utf-8")
    print(f"course/out/html/{name}.html")


def main(argv: list[str]) -> int:
    import yours
    from nbconvert.preprocessors import CellExecutionError
    from nbformat.v4 import new_markdown_cell, new_notebook

    room = COURSE / "room/README.md"
    figures = re.findall(r"\(\.\./figures/(\S+)\.svg\)", room.read_text(encoding="utf-8"))
    numbers = {int(word) for word in argv}
    failed = False
    lessons = lesson.pages()
    names = [None, *(path.stem for path in lessons), None]
    PAGES.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(lessons, 1):
        if numbers and number not in numbers:
            continue
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            print(f"{path.stem}: {error.ename}: {error.evalue}", file=sys.stderr)
            failed = True
            continue
        notebook.cells.append(new_markdown_cell(exercise(number)))
        write(path.stem, notebook, path.parent, before=names[number - 1], after=names[number + 1])
        if path.stem in figures:
            shutil.copy(COURSE / "out" / f"{path.stem}.svg", COURSE / "figures")
    (COURSE / "figures/gpt.svg").write_text(yours.drawing(set(), 513), encoding="utf-8")
    labs = sorted((COURSE / "labs").glob("lab*.md"))
    for path in (COURSE / "idioms.md", *labs, COURSE / "room/README.md", COURSE / "README.md"):
        notebook = new_notebook(cells=[new_markdown_cell(path.read_text(encoding="utf-8"))])
        write(name_of(path), notebook, path.parent)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
