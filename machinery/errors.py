"""Every exit code of the programs, in one table.

| code | meaning | class |
| ---- | ------- | ----- |
| 0    | done | |
| 1    | a bug, with a traceback; or a rank that did not answer | RankError |
| 2    | the command or its configuration is wrong | UsageError, any ValueError of ours |
| 3    | the data is missing, damaged or cannot be read | DataError |
| 4    | no checkpoint can be used, or it does not fit | CheckpointError |
| 5    | a loss, a gradient or a weight is NaN or infinite | NonFiniteError |
| 6    | the disk is full or fails | StorageError |
| 7    | an exported model does not compute what ours does | ParityError |
| 130  | stopped by SIGINT (Ctrl-C) | |
| 143  | stopped by SIGTERM | |

Plain ValueError is the idiom for a user's mistake; cli.py decides whose ValueError it was. The
classes below are for what has a code of its own. Next: cli.py.
"""

from __future__ import annotations


class RankError(Exception):
    """A rank did not answer."""

    exit_code = 1


class UsageError(ValueError):
    """A user's mistake found in a worker process: re-raised from there, a ValueError has lost the
    traceback that tells ours from a library's, so the code is explicit."""

    exit_code = 2


class DataError(Exception):
    """The data on disk is not what its manifest says, or text could not be read."""

    exit_code = 3


class CheckpointError(Exception):
    """No checkpoint can be used, or it does not fit this model."""

    exit_code = 4


class NonFiniteError(Exception):
    """A loss, a gradient or the state to save is NaN or infinite."""

    exit_code = 5


class StorageError(Exception):
    """What should be written does not fit, or the disk fails."""

    exit_code = 6


class ParityError(Exception):
    """An exported model or tokenizer does not compute what ours does."""

    exit_code = 7
