"""Documents that are equal to earlier ones of their source: `prepare_data.py --dedup exact`.

To find them takes the whole source, so the pool reads it once before it prepares it; which of its
documents a unit leaves out is then part of the unit. Lesson 35 finds those that are nearly equal as
well. Next: sources.py, `documents` leaves them out.
"""

from concurrent.futures import Executor
from dataclasses import replace

import data
from preparation.job import Job, UnitId, task_of, texts
from preparation.reading import Notes


def hashes_of(job: Job, unit: UnitId) -> list[int]:
    """64 bits for each document of a unit: the same for equal texts of one source."""
    return [data.hash64(f"{unit[0]} {text}") for text in texts(job, unit, Notes())]


def without_duplicates(job: Job, executor: Executor) -> Job:
    """The job, in which each unit has a set of "duplicates": of its documents, in the order of
    `sources.documents`, those that are equal to earlier ones of the source. The first of these
    stays, so the first units of a source have no duplicates either."""
    if job.config.dedup == "none":
        return job
    tasks = zip(*(task_of(job, unit) for unit in job.units))
    seen = set()
    units = {}
    for unit, hashes in zip(job.units, executor.map(hashes_of, *tasks)):
        duplicates = set()
        for i, value in enumerate(hashes):
            if value in seen:
                duplicates.add(i)
            seen.add(value)
        units[unit] = job.units[unit] | {"duplicates": duplicates}
    return replace(job, units=units)
