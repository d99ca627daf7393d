"""Drain: no-op tasks that lie ready are worked off by whole worker processes.

A row is a contestant with one process, or with two. The time runs from the start of the workers,
which have imported everything and are not connected yet, until no task is left; with it goes the
CPU of the server and of the workers in that time. `pgsched` is a worker with its defaults; with `no
history` its queue keeps no completed tasks. `P` is the yardstick, a bare Python loop over B (rows
are kept) or D (deleted) in batches of 100. The peers are in their default and in their best
setting; graphile-worker and PgQueuer keep no finished tasks, the others do.
`claim_task` is the average time of its calls in drains of their own, in which the server counts.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import psycopg
from contestants import PATIENCE, Contestant, LeftOut, go, loop, ours, peers, ready
from measuring import Bar, Figures, Row, Sample, Server, ask, cpu_seconds, execute, ratio

SCENE = "drain"
KEPT, NOT_KEPT = "pgsched", "pgsched, no history"
OVER_B, OVER_D = "P over B", "P over D"
CLAIM = "claim_task, average call"
DEFAULT, BEST = ", default", ", best"
IN_PYTHON = ("PgQueuer", "Procrastinate", "awa-pg")

_COUNT_CALLS = """
do $$ begin
  execute format('alter database %I set track_functions = pl', current_database());
end $$
"""
_AVERAGE_CLAIM = """
select total_time / calls from pg_stat_user_functions
 where schemaname = 'pgsched' and funcname = 'claim_task'
"""
_numbers = count(1)


class Entry(NamedTuple):
    """A contestant with so many processes, in so many rounds."""

    contestant: Contestant
    processes: int
    rounds: int

    @property
    def name(self) -> str:
        """What its row is called."""
        return _two(self.contestant.name) if self.processes == 2 else self.contestant.name


def _two(name: str) -> str:
    return f"{name}, 2 processes"


def run(server: Server, full: bool) -> list[Row]:
    """The rows; a peer that is not installed, or fails, is named and left out."""
    kept, over_b = ours(KEPT), loop(OVER_B, "B", 100)
    core = [kept, ours(NOT_KEPT), loop(OVER_D, "D", 100)]
    others = list(peers())
    core += [each for each in others if _is_fastest(each.name)]
    others = [each for each in others if each not in core]
    rounds = 5 if full else 3
    entries = [Entry(each, 1, rounds) for each in (*core, over_b)]
    entries += [Entry(each, 2, rounds) for each in core]
    entries += [Entry(each, 1, rounds if full else 1) for each in others]
    with filled(server, {entry.contestant for entry in entries}) as templates:
        rows = measure(server, entries, templates)
        calls = [average_claim(server, kept, templates[KEPT]) for _ in range(rounds - 2)]
    return [*rows, Row(SCENE, CLAIM, calls, "ms")]


def _is_fastest(name: str) -> bool:
    """Whether it is the peer, in the setting, that pgsched has to beat."""
    return name.startswith("graphile-worker") and name.endswith(BEST)


@contextmanager
def filled(server: Server, field: Iterable[Contestant]) -> Iterator[dict[str, str]]:
    """A database with its tasks for each contestant, by its name, to be copied."""
    templates = {}
    for contestant in field:
        name = f"filled_{next(_numbers)}"
        dsn = server.create_database(name)
        try:
            contestant.fill(dsn, contestant.tasks)
        except LeftOut as error:
            _leave_out(contestant, contestant.name, error)
            continue
        execute(dsn, "vacuum (freeze, analyze)")
        templates[contestant.name] = name
    try:
        yield templates
    finally:
        for name in templates.values():
            server.drop(server.dsn(name))


def measure(server: Server, entries: Sequence[Entry], templates: dict[str, str]) -> list[Row]:
    """Drain in turn, so that a round has all that take part; who fails once is left out."""
    samples: dict[str, list[Sample]] = {
        entry.name: [] for entry in entries if entry.contestant.name in templates
    }
    for number in range(max(entry.rounds for entry in entries)):
        for entry in entries:
            if number < entry.rounds and entry.name in samples:
                template = templates[entry.contestant.name]
                try:
                    sample = drain(server, entry.contestant, template, entry.processes)
                except LeftOut as error:
                    _leave_out(entry.contestant, entry.name, error)
                    del samples[entry.name]
                else:
                    samples[entry.name].append(sample)
    return [Row(SCENE, name, measured) for name, measured in samples.items()]


def _leave_out(contestant: Contestant, name: str, error: LeftOut) -> None:
    if not contestant.optional:
        raise error
    print(f"{name} is left out: {error}", file=sys.stderr)


def drain(server: Server, contestant: Contestant, template: str, processes: int) -> Sample:
    """One drain, in a copy of the filled database; raises LeftOut when it comes to no end."""
    with (
        copied(server, template) as dsn,
        ready(contestant, dsn, processes) as workers,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):

        def left() -> int:
            [(tasks,)] = conn.execute(contestant.left.encode())
            return int(tasks)

        def cpu() -> tuple[float, float]:
            return cpu_seconds(server.pid), sum(cpu_seconds(worker.pid) for worker in workers)

        tasks = left()
        server.gate.wait()
        before = cpu()
        begin = go(workers)
        while waiting := left():
            passed = time.monotonic() - begin
            if passed > PATIENCE or any(worker.poll() is not None for worker in workers):
                raise LeftOut(f"{waiting} of {tasks} tasks are left after {passed:.0f} s")
            # Seldom while much is left: counting costs the server something, too.
            rest = passed * waiting / max(1, tasks - waiting)
            time.sleep(min(max(rest / 2, 0.005), 0.1 if waiting == tasks else 0.5))
        seconds = time.monotonic() - begin
        spent = [(now - then) / tasks * 1e6 for now, then in zip(cpu(), before, strict=True)]
        return Sample(tasks, seconds, *spent)


@contextmanager
def copied(server: Server, template: str) -> Iterator[str]:
    """The URL of a copy of a database, with a checkpoint behind it."""
    dsn = server.create_database(f"drain_{next(_numbers)}", template=template)
    try:
        server.settle(dsn)
        yield dsn
    finally:
        server.drop(dsn)


def average_claim(server: Server, contestant: Contestant, template: str) -> float:
    """Milliseconds of a call of claim_task while two workers drain."""
    with copied(server, template) as dsn:
        execute(dsn, _COUNT_CALLS)
        with ready(contestant, dsn, 2) as workers:
            go(workers)
            while ask(dsn, contestant.left):
                time.sleep(0.1)
        while not (average := ask(dsn, _AVERAGE_CLAIM)):
            time.sleep(0.1)
        return float(average)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What the figures have to be, as far as peers were there; of several the fastest counts."""
    here = {row.name: row for row in rows if row.scene == SCENE}
    fastest = [name for name in here if _is_fastest(name)]
    pairs = [
        *((name(NOT_KEPT), [name(each) for each in fastest], 1.1) for name in (str, _two)),
        *((name(NOT_KEPT), [name(OVER_D)], 0.6) for name in (str, _two)),
        (KEPT, [name for name in here if name.endswith(DEFAULT)], 3.0),
        (KEPT, [name for name in here if name.startswith(IN_PYTHON) and name.endswith(BEST)], 1.5),
    ]
    return [
        *(
            _compared(here[name], [here[base] for base in bases if base in here], limit)
            for name, bases, limit in pairs
            if bases
        ),
        Bar("drain, tasks through Python", here[_two(KEPT)].figures(), 27_500, True, "tasks/s"),
        Bar("drain, their server CPU", here[_two(KEPT)].figures("server_us"), 91, False, "µs"),
        Bar("drain, average call of claim_task", here[CLAIM].figures(), 3, False, "ms"),
    ]


def _compared(row: Row, bases: Sequence[Row], limit: float) -> Bar:
    base = max(bases, key=lambda each: each.figures().median)
    if len(base.samples) == len(row.samples):
        figures = ratio(row, base)
    else:  # measured once
        figures = Figures.of([number / base.figures().median for number in row.numbers()])
    return Bar(f"drain, {row.name} / {base.name}", figures, limit, at_least=True)
