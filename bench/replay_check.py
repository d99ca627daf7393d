"""Whether every job of a replay went right, and what the replay was like.

All times are in seconds; points in time count from 1970, by the server's clock.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to become of a job: a task, due at ``run_at``, that sleeps."""

    job: int
    queue: str
    run_at: float
    sleep: float


@dataclass(frozen=True, slots=True)
class Execution:
    """What a worker process recorded of a handler's run; no end: it did not get there."""

    task: int
    job: int
    attempt: int
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of pgsched.tasks."""

    id: int
    queue: str
    status: str
    attempt: int
    run_at: float
    claimed_at: float | None
    finished_at: float | None
    last_error: str | None


def executions(records: Sequence[Mapping[str, Any]]) -> list[Execution]:
    """What one worker process recorded."""
    ends = {record["execution"]: record["at"] for record in records if record["event"] == "end"}
    return [
        Execution(
            task=record["task"],
            job=record["job"],
            attempt=record["attempt"],
            start=record["at"],
            end=ends.get(record["execution"]),
        )
        for record in records
        if record["event"] == "start"
    ]


def check(
    planned: Mapping[int, Planned], executions: Iterable[Execution], rows: Iterable[Row]
) -> list[str]:
    """What is wrong, each line beginning with its kind; nothing when all is right.

    ``planned`` by task id; ``rows``: all that the run's queues have.
    """
    ran: defaultdict[int, list[Execution]] = defaultdict(list)
    found: defaultdict[int, list[Row]] = defaultdict(list)
    for execution in executions:
        ran[execution.task].append(execution)
    for row in rows:
        found[row.id].append(row)
    problems = [
        f"invented: task {task}, which nobody added, was started {len(ran[task])} times,"
        f" {len(found[task])} rows in pgsched.tasks"
        for task in sorted((ran.keys() | found.keys()) - planned.keys())
    ]
    for task, job in planned.items():
        problems += [
            f"{problem} (job {job.job}, task {task})"
            for problem in itertools.chain(_recorded(job, ran[task]), _stored(job, found[task]))
        ]
    return problems


def _recorded(job: Planned, executions: Sequence[Execution]) -> Iterator[str]:
    """What is wrong by the workers' own records."""
    if not executions:
        yield "missing: never started"
    if len(executions) > 1:
        yield f"doubled: started {len(executions)} times"
    for execution in executions:
        if execution.job != job.job:
            yield f"invented: ran as job {execution.job}"
        if execution.start < job.run_at:
            yield f"early: started {job.run_at - execution.start:.6f} s before its run_at"
        if execution.end is None:
            yield "failed: did not end"
        if execution.attempt != 1:
            yield f"failed: started as attempt {execution.attempt}"


def _stored(job: Planned, rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong by pgsched.tasks."""
    if not rows:
        yield "missing: not in pgsched.tasks"
    if len(rows) > 1:
        yield f"doubled: {len(rows)} rows in pgsched.tasks"
    for row in rows:
        if (row.queue, row.run_at) != (job.queue, job.run_at):
            yield f"invented: due {row.run_at:.6f} in {row.queue}, added as {job}"
        if row.claimed_at is not None and row.claimed_at < job.run_at:
            yield f"early: claimed {job.run_at - row.claimed_at:.6f} s before its run_at"
        if row.status != "completed" or row.attempt != 1:
            yield f"failed: {row.status}, attempt {row.attempt}, last error: {row.last_error}"


def report(
    planned: Mapping[int, Planned],
    executions: Iterable[Execution],
    rows: Iterable[Row],
    *,
    slots: int,
    window: float,
) -> Iterator[tuple[str, str, str]]:
    """Name, figure and explanation of what is worth knowing of a run in which all was right."""
    starts = {execution.task: execution.start for execution in executions}
    claims = [
        (row.claimed_at, row.finished_at) for row in rows if row.claimed_at and row.finished_at
    ]
    opening = min(job.run_at for job in planned.values())
    last = max(starts.values())
    work = sum(job.sleep for job in planned.values())
    delays = sorted(starts[task] - job.run_at for task, job in planned.items())
    shown = " / ".join(f"{quantile(delays, share):.3f}" for share in (0.5, 0.99, 1.0))
    backlog, at = peak((job.run_at, starts[task]) for task, job in planned.items())
    drain = max(finished for _, finished in claims) - opening
    used = sum(min(finished, last) - min(claimed, last) for claimed, finished in claims)
    yield "jobs", f"{len(planned)}", f"in {len({job.queue for job in planned.values()})} queues"
    yield "window", f"{window:g} s", "from the first run_at to the last"
    yield "slots", f"{slots}", "of all workers"
    yield "offered load", f"{work / (slots * window):.2f}", "sum of the sleeps / (slots x window)"
    yield "start delay", f"{shown} s", "p50 / p99 / max, from run_at to the handler's start"
    yield "last start", f"{last - opening:.1f} s", "after the first run_at: the backlog is gone"
    yield "drain time", f"{drain:.1f} s", "from the first run_at to the last completion"
    yield "peak backlog", f"{backlog}", f"due and not started, {at - opening:.1f} s in"
    yield "all slots busy", f"{seconds_at(claims, slots):.1f} s", "claimed and not completed"
    yield "slots in use", f"{100 * used / (slots * (last - opening)):.1f} %", "until the last start"
    yield "throughput", f"{len(planned) / drain:.1f} /s", "jobs / drain time"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least this share of them does not exceed."""
    return values[math.ceil(share * len(values)) - 1]


def peak(spans: Iterable[tuple[float, float]]) -> tuple[int, float]:
    """How many spans overlap at most, and from when on first."""
    most, since = 0, 0.0
    for point, count in _overlaps(spans):
        if count > most:
            most, since = count, point
    return most, since


def seconds_at(spans: Iterable[tuple[float, float]], level: int) -> float:
    """How long at least so many spans overlap."""
    return sum(
        until - since
        for (since, count), (until, _) in itertools.pairwise(_overlaps(spans))
        if count >= level
    )


def _overlaps(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, int]]:
    """How many spans overlap from each point on; a span does not contain its own end."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    count = 0
    for point, change in changes:
        count += change
        yield point, count
