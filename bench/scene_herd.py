"""100,000 tasks that became due at one instant, and 20 sessions that fall upon them together.

Each session claims 10, notes in a table of its own that it has handled them while it completes
them, and again; beside it N, the naive SELECT … FOR UPDATE, does the same. A sample ends when
nothing is left; in a short run N ends before, when its time is over.

`to the last task`: seconds, only of what came to its end. `round`: claim and completion of 10.
`doubles`: how often a task was handled a second time, by the sessions' notes.
`waiting for …`: how many of the 20 sessions looks into pg_stat_activity, every 50 ms, found waiting
for a row or a transaction of another (Lock), inside the server (LWLock), for the disk (IO): the
mean.
"""

import math
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import NamedTuple

import psycopg
from designs import DESIGNS
from measuring import (
    Bar,
    Row,
    Sample,
    Server,
    ask,
    cpu_seconds,
    interleaved,
    ratio,
    row_of,
)
from replay_check import quantile

TASKS = 100_000
SESSIONS = 20
LIMIT = 10
PATIENCE = {False: 30, True: math.inf}
N_SECONDS = 6
"""What N gets in a short run."""
WAITS = ("Lock", "LWLock", "IO")

HANDLED = "create table handled (id bigint not null)"
NOTE = "with noted as (insert into handled (id) select unnest(:ids::bigint[])) "
COUNT_WAITING = """
select wait_event_type
  from pg_stat_activity
 where datname = current_database() and application_name = 'pgbench' and wait_event_type = any (%s)
"""


class Herd(NamedTuple):
    """What one run of it was like."""

    sample: Sample
    round_p99: float
    doubles: int
    left: int
    waiting: dict[str, float]


def run(server: Server, full: bool, tasks: int = TASKS) -> list[Row]:
    """All rows; `full`: N comes to its end."""
    herds = interleaved(
        {
            "pgsched": partial(herd, server, "pgsched", tasks, None),
            "N": partial(herd, server, "N", tasks, None if full else N_SECONDS),
        },
        3,
        PATIENCE[full],
    )
    rows = []
    for name, found in herds.items():
        rows.append(Row(name, [one.sample for one in found]))
        if not any(one.left for one in found):
            seconds = [one.sample.seconds for one in found]
            rows.append(Row(f"{name}: to the last task", seconds, "s"))
        rows += [
            Row(f"{name}: round, p99", [one.round_p99 for one in found], "ms"),
            Row(f"{name}: doubles", [one.doubles for one in found], "tasks"),
        ]
        for wait in WAITS:
            waiting = [one.waiting[wait] for one in found]
            rows.append(Row(f"{name}: waiting for {wait}", waiting, "sessions"))
    return rows


def herd(server: Server, name: str, tasks: int, seconds: int | None) -> Herd:
    """Set it loose on a fresh database; `seconds`: when it is to end before all is done."""
    design = DESIGNS[name]
    script = design.claim(LIMIT) + NOTE + design.finish(LIMIT)
    # Some rounds more: who comes last may find some tasks locked, and gets fewer than there are.
    rounds = -(-tasks // (LIMIT * SESSIONS)) + 5
    limits = (seconds, None if seconds else rounds)
    with server.filled(HANDLED, *design.prepare(tasks), pgsched=design.pgsched) as dsn:
        server.gate.wait()
        with _waiting(dsn) as waiting:
            before = cpu_seconds(server.pid), _client_cpu()
            done = server.pgbench(dsn, script, SESSIONS, *limits)
            time.sleep(0.1)  # backends that end now are still to be waited for
            after = cpu_seconds(server.pid), _client_cpu()
        handled = int(ask(dsn, "select count(*) from handled"))
        doubles = int(ask(dsn, "select count(*) - count(distinct id) from handled"))
        left = int(ask(dsn, design.unfinished))
    spent = [(now - then) / handled * 1e6 for now, then in zip(after, before, strict=True)]
    sample = Sample(handled, done.seconds, *spent)
    return Herd(sample, quantile(done.latencies, 0.99), doubles, left, waiting)


def _client_cpu() -> float:
    """Of the processes that were waited for, as pgbench is."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _waiting(dsn: str) -> Iterator[dict[str, float]]:
    """Sample what pgbench's sessions wait for, from their first to their last; the means."""
    means: dict[str, float] = {}
    counts: Counter[str] = Counter()
    looks = 0
    stop = Event()

    def look() -> None:
        nonlocal looks
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not stop.wait(0.05):
                found = [kind for (kind,) in conn.execute(COUNT_WAITING, [list(WAITS)])]
                counts.update(found)
                looks += bool(found)

    thread = Thread(target=look)
    thread.start()
    try:
        yield means
    finally:
        stop.set()
        thread.join()
    means.update({wait: counts[wait] / max(1, looks) for wait in WAITS})


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be."""
    doubles = row_of(rows, "pgsched: doubles").figures()
    faster = ratio(row_of(rows, "pgsched"), row_of(rows, "N"))
    return [
        Bar("herd, doubles", doubles, 0, at_least=False, unit="tasks"),
        Bar("herd, tasks/s, to N", faster, 5, at_least=True),
    ]
