"""The HTML of the pages: where a page goes, and a template with its values.

Every value is escaped. A template names `nonce` in its policy, and in the script and the style that
are its own; then no other counts, whatever the values say.
"""

import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page_file(out: str, run_dir: Path, name: str) -> Path:
    """Where a page goes: the file `out`; or `name` in it if it is a folder, or in the run's."""
    path = Path(out or run_dir)
    return path / name if path.is_dir() or not out else path


def filled(name: str, **values) -> str:
    """The template of this name in this folder."""
    return TEMPLATES.get_template(name).render(nonce=secrets.token_urlsafe(), **values)
