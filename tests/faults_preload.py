"""What the processes of faults.py have imported before they are forked."""

import faults  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import tokenizers.implementations  # noqa: F401
import torch._dynamo  # noqa: F401
import torch._inductor.config  # noqa: F401
import tyro  # noqa: F401
from conftest import paint_nothing

import train  # noqa: F401
from instruments.pages import report  # noqa: F401

paint_nothing()
