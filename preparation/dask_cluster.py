"""`--cluster tcp://HOST:8786`: preparation on the machines of a running Dask cluster.

All machines must share the data folder. The scheduler and the workers need the repository's folder
in PYTHONPATH, since they import preparation/worker.py by name. Next: docs/clusters.md (commands).
"""

from contextlib import contextmanager

from config import UsageError, install
from machinery.errors import DataError
from preparation import sources

HERE = "in the repository's folder: PYTHONPATH=. dask"


@contextmanager
def open_pool(address: str):
    """`with open_pool(address) as (executor, slots)`: the cluster's executor, and how many units it
    does at once; UsageError if it cannot be used as it is."""
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker

        client = Client(address, timeout="30s")
    except ImportError:
        raise UsageError(f"--cluster needs Dask: {install('requirements-cluster.txt')}") from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address} ({error}); start one {HERE} scheduler"
        ) from None
    with client:  # at its end, the cluster drops the units that still run
        slots = sum(client.nthreads().values())
        if not slots:
            raise UsageError(
                f"the cluster {address} has no workers; start some {HERE} worker {address}"
            )
        try:
            yield client.get_executor(pure=False, retries=2), slots
        except KilledWorker as error:
            raise DataError(
                f"the workers of a unit died each time ({error}); {sources.AGAIN}"
            ) from None
        except Exception as error:
            if ModuleNotFoundError not in (type(error), type(error.__cause__)):
                raise
            raise UsageError(
                f"the cluster {address} cannot import our code; start its scheduler and workers "
                "with the repository's folder in PYTHONPATH"
            ) from None
