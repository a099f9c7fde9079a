"""What the processes of faults.py have imported before they are forked."""

import faults  # noqa: F401
import matplotlib.figure  # noqa: F401
import tyro  # noqa: F401

import train  # noqa: F401
