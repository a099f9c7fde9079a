"""All lessons as pages with their output: course/*.py -> course/out/html/*.html.

    pip install -r course/requirements.txt
    python course/render.py [NUMBER ...]

Each lesson runs as a notebook in its own kernel; a lesson that fails ends the program with code 1.
The figures that README.md shows are copied to course/figures.
"""

import os
import shutil
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parent
SHOWN = (7, 17, 24, 29, 31, 32)  # lessons whose figure README.md shows


def execute(path: Path):
    """Run a percent-format lesson as a notebook, its folder first on the path -> the notebook."""
    import jupytext
    from nbconvert.preprocessors import ExecutePreprocessor

    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel warns about frozen modules
    notebook = jupytext.read(path)
    processor = ExecutePreprocessor(timeout=180, kernel_name="python3")
    processor.preprocess(notebook, {"metadata": {"path": str(COURSE)}})
    return notebook


def main(argv: list[str]) -> int:
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import CellExecutionError

    numbers = [int(word) for word in argv]
    lessons = [path for path in sorted(COURSE.glob("[0-9][0-9]_*.py")) if "05" not in path.stem]
    lessons = [path for path in lessons if not numbers or int(path.stem[:2]) in numbers]
    (COURSE / "out" / "html").mkdir(parents=True, exist_ok=True)
    failed = []
    for path in lessons:
        try:
            page, _ = HTMLExporter().from_notebook_node(execute(path))
        except CellExecutionError as error:
            print(f"{path.stem}: {error.ename}: {error.evalue}", file=sys.stderr)
            failed.append(path.stem)
            continue
        target = COURSE / "out" / "html" / f"{path.stem}.html"
        target.write_text(page, encoding="utf-8")
        print(target.relative_to(COURSE.parent))
        if int(path.stem[:2]) in SHOWN:
            (COURSE / "figures").mkdir(exist_ok=True)
            shutil.copy(COURSE / "out" / f"{path.stem}.png", COURSE / "figures")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
