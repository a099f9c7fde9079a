"""Every exit code of the programs, in one table.

| code | meaning | class |
| ---- | ------- | ----- |
| 0    | done | |
| 1    | a bug, with a traceback; or a rank that did not answer (on GPUs see below) | RankError |
| 2    | the command is wrong, or names what cannot be found or used | UsageError (config.py) |
| 3    | the data is damaged or incomplete, or a source cannot be read | DataError |
| 4    | none of the run's checkpoints is valid, or the one to load does not fit | CheckpointError |
| 5    | a loss, a gradient or a weight is NaN or infinite | NonFiniteError |
| 6    | the disk is full or fails, or too few files may be open | StorageError |
| 7    | an exported or imported model does not compute what ours does | ParityError |
| 129  | stopped by SIGHUP: its terminal has closed | |
| 130  | stopped by SIGINT (Ctrl-C) | |
| 141  | nobody reads the output any more, as after `| head` | |
| 143  | stopped by SIGTERM | |

Of these classes, the programs print only the message. Any other exception is a bug, perhaps in what
you have just changed, or a host without memory, and is shown with its traceback. On several GPUs,
NCCL's watchdog thread detects a rank that does not answer, and ends the process by SIGABRT (code
-6, with NCCL's own message): status.json then still says `running`. Next: cli.py.
"""

import errno

REMEDIES = {  # of an OSError with one of these: code 6
    errno.ENOSPC: "make room, and run the same command again",
    errno.EDQUOT: "make room, and run the same command again",
    errno.EIO: "run the same command on another disk",
    errno.EMFILE: "allow more with `ulimit -n 4096`, and run the same command again",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device is out of memory, judged by the message of torch, the driver, Triton, cuDNN
    or cuBLAS."""
    text = repr(error).lower().replace(" ", "")
    known = "outofmemory", "alloc_failed", "cublascreate", "allocatememory"
    return any(words in text for words in known)


def is_lost_rank(error: BaseException) -> bool:
    """Whether gloo or NCCL says that it has lost another rank, judged by its message."""
    closed = "Connection closed by peer", "Connection reset by peer", "pair closure"
    return any(words in str(error) for words in (*closed, "Timed out waiting", "ncclRemoteError"))


def reason_of(error: BaseException) -> str:
    """What a library has raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class RankError(Exception):
    exit_code = 1


class DataError(Exception):
    exit_code = 3


class CheckpointError(Exception):
    exit_code = 4


class NonFiniteError(Exception):
    exit_code = 5


class StorageError(Exception):
    exit_code = 6


class ParityError(Exception):
    exit_code = 7
