"""`--cluster tcp://HOST:8786`: preparation on the machines of a running Dask cluster.

All machines must share the data folder. The scheduler and the workers need the repository's folder
in PYTHONPATH, since they import preparation/worker.py by name. Next: docs/clusters.md (commands).
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from config import UsageError, install
from machinery.errors import DataError
from preparation import sources

HERE = "in the repository's folder: PYTHONPATH=. dask"


@contextmanager
def open_pool(address: str) -> Iterator[tuple[Executor, int]]:
    """The cluster's executor and its number of slots; UsageError if it cannot be used as it is."""
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker

        client = Client(address, timeout="30s")
    except ImportError:
        remedy = install("requirements-cluster.txt")
        raise UsageError(f"--cluster needs Dask: {remedy}") from None
    except (OSError, ValueError) as error:
        reason = f"no Dask scheduler answers at {address} ({error})"
        raise UsageError(f"{reason}; start one {HERE} scheduler") from None
    with client:  # at its end, the cluster drops the units that still run
        slots = sum(client.nthreads().values())
        if not slots:
            reason = f"the cluster {address} has no workers"
            raise UsageError(f"{reason}; start some {HERE} worker {address}")
        try:
            yield client.get_executor(pure=False, retries=2), slots
        except KilledWorker as error:
            reason = f"the workers of a unit died each time ({error})"
            raise DataError(f"{reason}; {sources.AGAIN}") from None
        except Exception as error:
            if ModuleNotFoundError not in (type(error), type(error.__cause__)):
                raise
            remedy = "start its scheduler and workers with the repository's folder in PYTHONPATH"
            raise UsageError(f"the cluster {address} cannot import our code; {remedy}") from None
