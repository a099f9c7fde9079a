"""Puts the project on Python's path: the programs in this folder import this file first."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
