"""Jobs from a file in Standard Workload Format (SWF), plain or gzipped.

The format: https://www.cs.huji.ac.il/labs/parallel/workload/swf.html
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

FIELDS = 18
"""Numbers on each line; -1 stands for what is not known."""


class SwfError(Exception):
    """The file cannot be read, is not SWF, or has no job that can be replayed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the log; times in seconds, ``submit`` since the log's start; user -1: unknown."""

    number: int
    submit: int
    run_time: int
    user: int


def read(path: Path) -> tuple[list[Job], int]:
    """The jobs by submit time, and how many lines were left out.

    Those lines lack a submit or run time, or repeat a job's number, as logs do that list each part
    of a job that was interrupted. Raises SwfError.
    """
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SwfError(f"cannot read {path}: {reason}") from error
    jobs: dict[int, Job] = {}
    lines = 0
    for number, line in enumerate(data.splitlines(), start=1):
        if line.startswith(b";") or not line.strip():
            continue
        lines += 1
        try:
            job = _job(line)
        except (ValueError, OverflowError) as error:
            message = f"{path} is not SWF: line {number} is not {FIELDS} numbers"
            raise SwfError(message) from error
        if job.submit >= 0 and job.run_time >= 0:
            jobs.setdefault(job.number, job)
    if not jobs:
        raise SwfError(f"{path} has no job with a submit time and a run time")
    return sorted(jobs.values(), key=lambda job: job.submit), lines - len(jobs)


def _job(line: bytes) -> Job:
    fields = [float(field) for field in line.split()]
    if len(fields) != FIELDS:
        raise ValueError(len(fields))
    return Job(*(int(fields[index]) for index in (0, 1, 3, 11)))
