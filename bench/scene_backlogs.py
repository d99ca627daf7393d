"""Claim + complete of 10, with 4 sessions, of a table that has much in it, and as a ratio to one
that has little: 100,000 due tasks, so that there is work. What there is besides:

`future`: 200,000 tasks (1,000,000 in a full run) of the same queue that are due tomorrow. `due`: as
many due ones. `finished`: as many in the history. `queues`: 200 due tasks in each of 1,000 queues,
of which a random one is asked each time. `priorities`: nothing, but the due ones have ten.
"""

import math
from collections.abc import Sequence
from functools import partial

from designs import DESIGNS, ENQUEUE_DUE, pgsched_pair
from measuring import Bar, Load, Row, Sample, Server, interleaved, ratio, row_of

BACKLOG = {False: 200_000, True: 1_000_000}
PATIENCE = {False: 45, True: math.inf}
SESSIONS = 4
LIMIT = 10
QUEUES = 1000
IN_A_QUEUE = 200
A_SECOND = 50_000
"""More than a small machine does."""
DUE = "select count(*) from pgsched.scheduled_tasks where run_at < now()"

_COLUMNS = "queue, task_type, payload, priority, run_at, max_attempts, created_at"
_INSERT = f"insert into pgsched.scheduled_tasks ({_COLUMNS}) "
FUTURE = _INSERT + (
    "select 'default', 'noop', '{{}}', 5, now() + interval '1 day' + i * interval '1 ms', 20, now()"
    " from generate_series(1, {backlog}) as i"
)
FINISHED = (
    f"insert into pgsched.finished_tasks (id, {_COLUMNS}, status, attempt, finished_at)"
    " select nextval('pgsched.scheduled_tasks_id_seq'), 'default', 'noop', '{{}}', 5, now(), 20,"
    " now(), 'completed', 1, clock_timestamp() from generate_series(1, {backlog}) as i"
)
MANY_QUEUES = _INSERT + (
    "select 'queue ' || q, 'noop', '{{}}', 5, now(), 20, now()"
    f" from generate_series(1, {IN_A_QUEUE}) as i, generate_series(1, {QUEUES}) as q"
)
PRIORITIES = _INSERT + (
    "select 'default', 'noop', '{{}}', i % 10, now(), 20, now()"
    " from generate_series(1, {tasks}) as i"
)

ONE_QUEUE = DESIGNS["pgsched"].pair(LIMIT)
RANDOM_QUEUE = f"\\set q random(1, {QUEUES})\n" + pgsched_pair(LIMIT, "'queue ' || :q::text")
FILLS: dict[str, tuple[Sequence[str], str]] = {
    "empty": ([ENQUEUE_DUE], ONE_QUEUE),
    "future": ([ENQUEUE_DUE, FUTURE], ONE_QUEUE),
    "due": ([ENQUEUE_DUE, ENQUEUE_DUE.replace("{tasks}", "{backlog}")], ONE_QUEUE),
    "finished": ([ENQUEUE_DUE, FINISHED], ONE_QUEUE),
    "queues": ([MANY_QUEUES], RANDOM_QUEUE),
    "priorities": ([PRIORITIES], ONE_QUEUE),
}


def run(server: Server, full: bool, backlog: int | None = None) -> list[Row]:
    """All rows; `full`: more tasks, longer, more rounds."""
    seconds, repeat = (2.9, 5) if full else (0.9, 3)
    sample = partial(with_backlog, server, backlog or BACKLOG[full], seconds)
    variants = {name: partial(sample, *fill) for name, fill in FILLS.items()}
    return [
        Row(name, found) for name, found in interleaved(variants, repeat, PATIENCE[full]).items()
    ]


def with_backlog(
    server: Server, backlog: int, seconds: float, fills: Sequence[str], script: str
) -> Sample:
    """A sample on a fresh database."""

    def prepare(plenty: int) -> list[str]:
        tasks = round(A_SECOND * (seconds + 1.1)) * plenty
        return [fill.format(tasks=tasks, backlog=backlog) for fill in fills]

    return server.plenty(prepare, DUE, Load(script, LIMIT, SESSIONS, seconds))


def bars(rows: list[Row]) -> list[Bar]:
    """What the figures have to be."""
    empty = row_of(rows, "empty")
    return [
        Bar(f"{name}, tasks/s, to empty", ratio(row_of(rows, name), empty), 0.85, at_least=True)
        for name in ("future", "finished", "queues")
    ]
