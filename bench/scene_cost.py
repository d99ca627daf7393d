"""What it costs besides CPU. A short run has the first figure only.

`WAL a task`: bytes from pg_current_wal_lsn() before to after, for tasks that are enqueued, claimed
and completed one by one, each call a transaction of its own, 4 sessions, on an empty database right
after a checkpoint.

`steady`: ten minutes at 500 tasks a second, enqueued, claimed and completed, autovacuum as it is by
default: the most dead rows of scheduled_tasks, and its size with indexes after a minute and at the
end, by a look each 5 s.

`idle`: transactions a second, all of them single statements, of each of two worker processes
without tasks, over half a minute, by pg_stat_database.

`memory`: of a worker process with default settings: resident after 100,000 tasks and after
1,000,000, and the most in between above the first, by a look each half second.
"""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
from contestants import filled, go, ours, ready, remaining
from designs import pgsched_pair
from measuring import Bar, Figures, Row, Server, ask, interleaved, row_of

SESSIONS = 4
QUEUE = "'queue ' || :client_id::text"
LIFE = f"select pgsched.enqueue_task('noop', :payload::jsonb, {QUEUE});\n{pgsched_pair(1, QUEUE)}"
"""One after the other; each session has a queue of its own, so it gets the task that it added."""
NO_HISTORY = (
    "select pgsched.configure_queue('queue ' || i, p_keep_completed => '0 seconds')"
    f" from generate_series(0, {SESSIONS - 1}) as i"
)
PAYLOAD = ["-D", 'payload={"i": 1}']
HISTORIES = {"pgsched": "", "pgsched, no history": NO_HISTORY}
STEADY_RATE = 500
STEADY_SECONDS = 600
IDLE_WORKERS = 2
IDLE_SECONDS = 30
MEMORY_TASKS = 1_000_000
MEMORY_FROM = 100_000
MEMORY_PATIENCE = 3600
MEMORY_GROWTH = "memory: most above the first"
PATIENCE = {False: 30, True: math.inf}
_PAGE = os.sysconf("SC_PAGE_SIZE")

DEAD = """
select n_dead_tup from pg_stat_user_tables
 where schemaname = 'pgsched' and relname = 'scheduled_tasks'
"""
SIZE = "select pg_total_relation_size('pgsched.scheduled_tasks') / 1e6"
COMMITS = "select xact_commit from pg_stat_database where datname = current_database()"


def run(server: Server, full: bool, transactions: int = 1000) -> list[Row]:
    """All rows."""
    variants = {name: partial(wal_a_task, server, name, transactions) for name in HISTORIES}
    rows = [
        Row(wal_row(name), found, "bytes")
        for name, found in interleaved(variants, 5 if full else 2, PATIENCE[full]).items()
    ]
    if full:
        rows += steady(server, STEADY_SECONDS) + idle(server, IDLE_SECONDS)
        rows += memory(server, MEMORY_TASKS, MEMORY_FROM)
    return rows


def wal_row(name: str) -> str:
    """The name of a design's row."""
    return f"WAL a task: {name}"


def wal_a_task(server: Server, name: str, transactions: int) -> float:
    """Bytes."""
    with server.filled(HISTORIES[name]) as dsn:
        before = ask(dsn, "select pg_current_wal_lsn() - '0/0'")
        done = server.pgbench(dsn, LIFE, SESSIONS, transactions=transactions, options=PAYLOAD)
        after = ask(dsn, "select pg_current_wal_lsn() - '0/0'")
    return float(after - before) / len(done.latencies)


def steady(server: Server, seconds: int) -> list[Row]:
    """Dead rows and size."""
    dead, sizes = [], []
    options = ["-R", str(STEADY_RATE), *PAYLOAD]
    with server.filled() as dsn, ThreadPoolExecutor(1) as executor:
        load = executor.submit(server.pgbench, dsn, LIFE, SESSIONS, seconds, options=options)
        while not load.done():
            time.sleep(min(5, seconds / 4))
            dead.append(float(ask(dsn, DEAD)))
            sizes.append(float(ask(dsn, SIZE)))
        rate = len(load.result().latencies) / seconds
    return [
        Row("steady: rate that was reached", [rate]),
        Row("steady: most dead rows", [max(dead)], "rows"),
        Row("steady: size after a minute", [sizes[min(11, len(sizes) - 1)]], "MB"),
        Row("steady: size at the end", [sizes[-1]], "MB"),
    ]


def idle(server: Server, seconds: float) -> list[Row]:
    """Statements of workers that have nothing to do."""
    worker = replace(ours("pgsched"), tasks=0)
    with filled(server, worker) as dsn, ready(worker, dsn, IDLE_WORKERS) as workers:
        go(workers)
        time.sleep(seconds / 3)  # registered, and listening
        before = ask(dsn, COMMITS)
        time.sleep(seconds)
        # Statistics are reported once a second, and the two looks are transactions as well.
        found = (ask(dsn, COMMITS) - before - 1) / seconds / IDLE_WORKERS
    return [Row("idle: statements of a worker", [found], "a second")]


def memory(server: Server, tasks: int, begin: int) -> list[Row]:
    """Of a worker that has many tasks."""
    worker = replace(ours("pgsched"), tasks=tasks)
    with (
        filled(server, worker) as dsn,
        ready(worker, dsn, 1) as [process],
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        go([process])
        looks = [
            (tasks - left, resident(process.pid))
            for left in remaining(conn, worker, [process], MEMORY_PATIENCE)
        ]
    first, *later = [megabytes for done, megabytes in looks if done >= begin]
    return [
        Row(f"memory: after {begin:,} tasks", [first], "MB"),
        Row(f"memory: after {looks[-1][0]:,} tasks", [looks[-1][1]], "MB"),
        Row(MEMORY_GROWTH, [max([first, *later]) - first], "MB"),
    ]


def resident(pid: int) -> float:
    """MB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be."""
    found = [
        Bar(f"WAL a task, {name}", kib(row_of(rows, wal_row(name))), limit, False, "KiB")
        for name, limit in zip(HISTORIES, (1.2, 0.95), strict=True)
    ]
    growth = [row.figures() for row in rows if row.name == MEMORY_GROWTH]
    return found + [Bar("worker memory, growth", figures, 20, False, "MB") for figures in growth]


def kib(row: Row) -> Figures:
    """Of bytes."""
    return Figures.of([number / 1024 for number in row.numbers()])
