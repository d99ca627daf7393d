"""Tasks go through while a transaction is open that keeps dead rows from being removed.

A transaction is opened that is a *snapshot* (REPEATABLE READ, it reads) or a *writer* (it has
written one row elsewhere). Then 100,000 tasks are claimed and completed (500,000 in a full run),
then it is measured, then the transaction ends, VACUUM runs, and it is measured again: both
against a database in which nothing was done before.

`claim`: the median duration of a claim of one, with one session. `throughput`: claim + complete of
10 with 4 sessions. Before both, reap_stale is called three times, which each worker calls every two
seconds, and no pgbench does. A full run has B, too, the plain SKIP LOCKED table of designs.py.
"""

import math
import time
from functools import partial
from typing import NamedTuple

import psycopg
from designs import DESIGNS, Design
from measuring import (
    Bar,
    Figures,
    Load,
    Row,
    Sample,
    Server,
    TooFewTasksError,
    ask,
    execute,
    interleaved,
    ratio,
    row_of,
)
from replay_check import quantile

CHURN = {False: 100_000, True: 500_000}
PATIENCE = {False: 60, True: math.inf}
SESSIONS = 4
LIMIT = 10
PINS = {
    "snapshot": "set transaction isolation level repeatable read; select count(*) from pg_class",
    "writer": "insert into elsewhere values (1)",
}
STAGES = ("fresh", "pinned", "after")


class Stage(NamedTuple):
    """The two figures."""

    claim: float
    throughput: Sample


def run(server: Server, full: bool, churn: int | None = None) -> list[Row]:
    """All rows; `full`: more tasks, longer, more rounds, and B, too."""
    seconds, repeat = (2.9, 3) if full else (0.9, 2)
    compared = [
        (name, pin) for name in (("pgsched", "B") if full else ("pgsched",)) for pin in PINS
    ]
    variants = {
        f"{name}, {pin}": partial(
            stages, server, DESIGNS[name], PINS[pin], churn or CHURN[full], seconds
        )
        for name, pin in compared
    }
    rows = []
    for name, rounds in interleaved(variants, repeat, PATIENCE[full]).items():
        for at, stage in enumerate(STAGES):
            of = [one[at] for one in rounds]
            rows += [
                Row(f"{name}, {stage}: claim", [s.claim for s in of], "ms"),
                Row(f"{name}, {stage}: throughput", [s.throughput for s in of]),
            ]
    return rows


def stages(
    server: Server, design: Design, pin: str, churn: int, seconds: float
) -> tuple[Stage, Stage, Stage]:
    """Fresh, pinned, and after."""

    def measure(plenty: int) -> tuple[Stage, Stage, Stage]:
        tasks = churn + round(100_000 * (seconds + 1.1)) * plenty
        statements = ["create table elsewhere (i integer)", *design.prepare(tasks)]
        with server.filled(*statements, pgsched=design.pgsched) as dsn:
            fresh = stage(server, dsn, design, seconds)
        with server.filled(*statements, pgsched=design.pgsched) as dsn:
            with psycopg.connect(dsn) as holder:
                holder.execute(pin.encode())
                rounds = churn // (100 * SESSIONS)
                server.pgbench(dsn, design.pair(100), sessions=SESSIONS, transactions=rounds)
                pinned = stage(server, dsn, design, seconds)
            execute(dsn, "vacuum", "checkpoint")
            after = stage(server, dsn, design, seconds)
            if int(ask(dsn, design.unfinished)) <= LIMIT * SESSIONS:
                raise TooFewTasksError
        return fresh, pinned, after

    return server.with_enough(measure)


def stage(server: Server, dsn: str, design: Design, seconds: float) -> Stage:
    """Measure this database as it is."""
    if design.pgsched:
        for _ in range(3):
            execute(dsn, "select * from pgsched.reap_stale()")
            time.sleep(0.1)
    claims = server.pgbench(dsn, design.claim(1), sessions=1, seconds=1)
    throughput = server.steady(dsn, Load(design.pair(LIMIT), LIMIT, SESSIONS, seconds))
    return Stage(quantile(claims.latencies, 0.5), throughput)


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be, with a snapshot; what a writer costs is only shown."""

    def to_fresh(what: str) -> Figures:
        pinned, fresh = (
            row_of(rows, f"pgsched, snapshot, {stage}: {what}") for stage in ("pinned", "fresh")
        )
        return ratio(pinned, fresh)

    return [
        Bar("pinned by a snapshot, claim p50, to fresh", to_fresh("claim"), 1.5, at_least=False),
        Bar("pinned by a snapshot, tasks/s, to fresh", to_fresh("throughput"), 0.85, at_least=True),
    ]
