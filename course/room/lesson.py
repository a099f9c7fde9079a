"""`import lesson`, in a lesson of the room: course/lesson.py, one folder up, takes its place."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules["lesson"]  # this module; the one found now is course/lesson.py
import lesson  # noqa: E402, F401
