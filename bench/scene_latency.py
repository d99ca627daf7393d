"""Latency: from the commit of a task, as it is sent, to the moment when its handler is entered.

An idle worker process with its defaults gets a task every 50 ms, from a producer that commits each;
a row has the median or the 99th percentile of each round. `LISTEN + claim loop` is the yardstick: a
bare Python loop over B that waits for a notification, and takes one task at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import psycopg
from contestants import Contestant, LeftOut, filled, go, line, loop, ours, ready
from measuring import Bar, Row, Server, interleaved, ratio, row_of
from replay_check import quantile

from pgsched import enqueue

OURS, LOOP = "pgsched", "LISTEN + claim loop"
INTERVAL = 0.05
SETTLED = 2.0
"""Seconds after which a worker is idle, and listens."""

_INSERT = """
with added as (insert into plain_tasks (payload) values (jsonb_build_object('i', %s::integer)))
select pg_notify('plain_tasks', '')
"""

Producer = Callable[[psycopg.Connection, int], object]


def run(server: Server, full: bool) -> list[Row]:
    """Two rows for each worker: p50 and p99."""
    seconds, rounds = (10, 5) if full else (4, 3)
    tasks = round(seconds / INTERVAL)
    variants = {
        name: partial(trickle, server, contestant, produce, tasks)
        for name, (contestant, produce) in producers().items()
    }
    measured = interleaved(variants, rounds)
    return [
        Row(f"{name}, {title}", [quantile(delays, part) for delays in found], "ms")
        for name, found in measured.items()
        for title, part in (("p50", 0.5), ("p99", 0.99))
    ]


def producers() -> dict[str, tuple[Contestant, Producer]]:
    """Each worker, by the name of its rows, and who gives it a task and commits."""
    return {
        OURS: (ours(OURS, tell=True), lambda conn, i: enqueue(conn, "noop", {"i": i})),
        LOOP: (loop(LOOP, "B", 1, tell=True), lambda conn, i: conn.execute(_INSERT, [i])),
    }


def trickle(server: Server, contestant: Contestant, produce: Producer, tasks: int) -> list[float]:
    """Milliseconds from commit to handler of so many tasks, ascending."""
    committed = []
    with (
        filled(server, replace(contestant, tasks=0)) as dsn,
        ready(contestant, dsn, 1) as [worker],
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        go([worker])
        time.sleep(SETTLED)
        server.gate.wait()
        for number in range(tasks):
            time.sleep(INTERVAL)
            with conn.transaction():
                produce(conn, number)
                committed.append(time.monotonic())
        entered = dict(map(_entered, (line(worker) for _ in range(tasks))))
    return sorted((entered[number] - at) * 1000 for number, at in enumerate(committed))


def _entered(told: bytes) -> tuple[int, float]:
    if not told:
        raise LeftOut("a task has not begun")
    number, at = told.split()
    return int(number), float(at)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The median delay, against the yardstick's."""
    figures = ratio(row_of(rows, f"{OURS}, p50"), row_of(rows, f"{LOOP}, p50"))
    return [Bar(f"latency, p50 / {LOOP}", figures, 1.5, at_least=False)]
