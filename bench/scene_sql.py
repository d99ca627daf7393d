"""Claim and complete in SQL, and enqueue, with no client to speak of: pgbench, prepared statements.

All samples are of sessions that have run for a second: connected, with their plans.

`claim + complete of LIMIT, N sessions: DESIGN`: each session claims LIMIT tasks, commits, completes
them, commits, and again. DESIGN is one of designs.py. 256 sessions go through PgBouncer in
transaction mode to 20 of the server, if `.venv/pgbouncer` is there (`make test-pgbouncer` fetches
it), without prepared statements, which a pooler does not keep.

`enqueue one`, `enqueue 1,000`: a call of enqueue_task or enqueue_tasks a transaction, with one
session, beside an insert of the same columns into a table with the same columns and indexes.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

from designs import DESIGNS
from measuring import Bar, Load, Row, Sample, Server, interleaved, name_of, ratio, row_of

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import pgbouncer

EVERYTHING = ("pgsched", "pgsched, no history", "B", "D")
SHAPES = {
    (1, 1): EVERYTHING,
    (1, 64): ("pgsched", "B"),
    (10, 4): ("pgsched", "B"),
    (100, 4): EVERYTHING,
}
"""Limits and sessions, and the designs that are compared there."""
ALL_SHAPES = {(limit, n): EVERYTHING for limit in (1, 10, 100) for n in (1, 4, 16, 64)}
SECONDS = {False: 0.9, True: 2.9}
PATIENCE = {False: 30, True: math.inf}
"""Seconds for each group of rows."""
REPEAT = {False: 3, True: 5}
A_SECOND = {1: 20_000, 10: 60_000, 100: 120_000}
"""More tasks than a small machine does, by limit."""
POOLED = ("pgsched", "B")
CLIENTS = 256
POOL = 20

BATCH = 1000
TASKS = [{"task_type": "noop", "payload": {"i": i}} for i in range(BATCH)]
RAW_TABLE = "create table raw_tasks (like pgsched.scheduled_tasks including all)"
COLUMNS = "queue, task_type, payload, priority, run_at, max_attempts, created_at"
ENQUEUE = {
    "enqueue one": "select pgsched.enqueue_task('noop', :payload::jsonb);\n",
    "enqueue one: raw INSERT": f"insert into raw_tasks ({COLUMNS})"
    " values ('default', 'noop', :payload::jsonb, 5, now(), 20, now()) returning id;\n",
    "enqueue 1,000": "select count(*) from pgsched.enqueue_tasks(:tasks::jsonb);\n",
    "enqueue 1,000: raw INSERT … SELECT": f"insert into raw_tasks ({COLUMNS})"
    " select 'default', 'noop', jsonb_build_object('i', i), 5, now(), 20, now()"
    f" from generate_series(1, {BATCH}) as i;\n",
}


def run(server: Server, full: bool) -> list[Row]:
    """All rows; `full`: every limit with every number of sessions, longer."""
    seconds, repeat = SECONDS[full], REPEAT[full]
    rows = []
    for (limit, sessions), names in (ALL_SHAPES if full else SHAPES).items():
        samples = partial(claim_and_complete, server, limit, sessions, seconds)
        variants = {name: partial(samples, name) for name in names}
        rows += rows_of(title(limit, sessions), interleaved(variants, repeat, PATIENCE[full]))
    if pgbouncer.PROGRAM.exists():
        with pgbouncer.PgBouncer(server, pool_size=POOL) as pooler:
            samples = partial(claim_and_complete, server, 1, CLIENTS, seconds, pooler=pooler)
            variants = {name: partial(samples, name) for name in POOLED}
            rows += rows_of(title(1, CLIENTS), interleaved(variants, repeat, PATIENCE[full]))
    return rows + enqueue(server, full)


def title(limit: int, sessions: int) -> str:
    """What precedes the name of the design."""
    return f"claim + complete of {limit}, {sessions} session{'s' * (sessions > 1)}"


def rows_of(title: str, samples: dict[str, list[Sample]]) -> list[Row]:
    """A row for each design."""
    return [Row(f"{title}: {name}", found) for name, found in samples.items()]


def claim_and_complete(
    server: Server,
    limit: int,
    sessions: int,
    seconds: float,
    name: str,
    pooler: pgbouncer.PgBouncer | None = None,
) -> Sample:
    """A sample on a fresh database."""
    design = DESIGNS[name]
    rate = A_SECOND[limit] * (2 if name == "D" else 1)
    options = ["-M", "extended"] if pooler else []
    return server.plenty(
        lambda plenty: design.prepare(round((seconds + 1.1) * rate * plenty)),
        design.unfinished,
        Load(design.pair(limit), limit, sessions, seconds, options),
        pgsched=design.pgsched,
        through=lambda dsn: pooler.dsn(name_of(dsn)) if pooler else dsn,
    )


def enqueue(server: Server, full: bool) -> list[Row]:
    """The rows about adding tasks."""
    seconds, repeat = SECONDS[full], REPEAT[full]
    variants = {
        name: partial(enqueue_sample, server, script, BATCH if "1,000" in name else 1, seconds)
        for name, script in ENQUEUE.items()
    }
    return [
        Row(name, found) for name, found in interleaved(variants, repeat, PATIENCE[full]).items()
    ]


def enqueue_sample(server: Server, script: str, tasks: int, seconds: float) -> Sample:
    """A sample on a database that is empty at first."""
    variables = ["-D", 'payload={"i": 1}', "-D", f"tasks={json.dumps(TASKS)}"]
    with server.filled(RAW_TABLE) as dsn:
        return server.steady(dsn, Load(script, tasks, 1, seconds, variables))


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be."""

    def against(name: str, of: str, *shape: int, base: str = "B") -> tuple[Row, Row, str]:
        at = title(*shape)
        return row_of(rows, f"{at}: {name}"), row_of(rows, f"{at}: {base}"), of

    one = ratio(*against("pgsched", "server_us", 1, 1))
    kept = ratio(*against("pgsched", "rate", 100, 4))
    not_kept = ratio(*against("pgsched, no history", "rate", 100, 4))
    found = [
        Bar("claim + complete of one, server CPU, to B", one, 1.4, at_least=False),
        Bar("batch of 100, history kept, tasks/s, to B", kept, 0.7, at_least=True),
        Bar("batch of 100, no history, tasks/s, to B", not_kept, 0.85, at_least=True),
    ]
    for sessions in (64, CLIENTS):
        if any(row.name.startswith(title(1, sessions)) for row in rows):
            many = ratio(*against("pgsched", "rate", 1, sessions))
            found.append(Bar(f"{sessions} sessions, tasks/s, to B", many, 0.8, at_least=True))
    for name, raw, limit in (
        ("enqueue one", "raw INSERT", 1.25),
        ("enqueue 1,000", "raw INSERT … SELECT", 2.5),
    ):
        figures = ratio(row_of(rows, name), row_of(rows, f"{name}: {raw}"), "server_us")
        found.append(Bar(f"{name}, server CPU, to {raw}", figures, limit, at_least=False))
    return found
