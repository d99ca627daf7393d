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
1,000,000, and the most in between above the first.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from designs import DESIGNS
from measuring import Bar, Figures, Row, Server, ask, interleaved, row_of

SESSIONS = 4
QUEUE = "'queue ' || :client_id::text"
LIFE = f"select pgsched.enqueue_task('noop', :payload::jsonb, {QUEUE});\n" + DESIGNS[
    "pgsched"
].pair(1).replace("claim_task('bench'", f"claim_task('bench', {QUEUE}")
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
        Row("cost", wal_row(name), found, "bytes")
        for name, found in interleaved(variants, 5 if full else 2).items()
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
    dsn = server.database(HISTORIES[name])
    before = ask(dsn, "select pg_current_wal_lsn() - '0/0'")
    done = server.pgbench(dsn, LIFE, SESSIONS, transactions=transactions, options=PAYLOAD)
    after = ask(dsn, "select pg_current_wal_lsn() - '0/0'")
    server.drop(dsn)
    return float(after - before) / done.transactions


def steady(server: Server, seconds: int) -> list[Row]:
    """Dead rows and size."""
    dsn = server.database()
    dead, sizes = [], []
    with ThreadPoolExecutor(1) as executor:
        load = executor.submit(
            server.pgbench, dsn, LIFE, SESSIONS, seconds, options=["-R", str(STEADY_RATE), *PAYLOAD]
        )
        while not load.done():
            time.sleep(min(5, seconds / 4))
            dead.append(float(ask(dsn, DEAD)))
            sizes.append(float(ask(dsn, SIZE)))
        rate = load.result().transactions / seconds
    server.drop(dsn)
    return [
        Row("cost", "steady: rate that was reached", [rate]),
        Row("cost", "steady: most dead rows", [max(dead)], "rows"),
        Row("cost", "steady: size after a minute", [sizes[min(11, len(sizes) - 1)]], "MB"),
        Row("cost", "steady: size at the end", [sizes[-1]], "MB"),
    ]


@contextmanager
def worker_process(dsn: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of idle_worker.py that is about to run."""
    command = [sys.executable, str(Path(__file__).with_name("idle_worker.py")), dsn]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout
            assert process.stdin
            process.stdout.readline()
            yield process
            process.stdin.close()
            process.wait(30)
        finally:
            process.kill()


def idle(server: Server, seconds: float) -> list[Row]:
    """Statements of workers that have nothing to do."""
    dsn = server.database()
    with worker_process(dsn), worker_process(dsn):
        time.sleep(seconds / 3)  # registered, and listening
        before = ask(dsn, COMMITS)
        time.sleep(seconds)
        # Statistics are reported once a second, and the two looks are transactions as well.
        found = (ask(dsn, COMMITS) - before - 1) / seconds / IDLE_WORKERS
    server.drop(dsn)
    return [Row("cost", "idle: statements of a worker", [found], "a second")]


def memory(server: Server, tasks: int, begin: int) -> list[Row]:
    """Of a worker that has many tasks."""
    dsn = server.database(*DESIGNS["pgsched"].prepare(tasks))
    resident: dict[int, float] = {}
    with worker_process(dsn) as process:
        assert process.stdout
        for line in process.stdout:
            number, megabytes = line.split()
            resident[int(number)] = float(megabytes)
            if int(number) >= tasks:
                break
    server.drop(dsn)
    first = resident[begin]
    growth = max(megabytes for number, megabytes in resident.items() if number >= begin) - first
    return [
        Row("cost", f"memory: after {begin:,} tasks", [first], "MB"),
        Row("cost", f"memory: after {tasks:,} tasks", [resident[tasks]], "MB"),
        Row("cost", "memory: most above the first", [growth], "MB"),
    ]


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be."""
    return [
        *(
            Bar(
                f"WAL a task, {name}", kib(row_of(rows, f"WAL a task: {name}")), limit, False, "KiB"
            )
            for name, limit in zip(HISTORIES, (1.2, 0.95), strict=True)
        ),
        *(
            Bar("worker memory, growth", row.figures(), 20, False, "MB")
            for row in rows
            if row.name == "memory: most above the first"
        ),
    ]


def kib(row: Row) -> Figures:
    """Of bytes."""
    return Figures.of([number / 1024 for number in row.numbers()])
