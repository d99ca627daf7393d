"""Drain: no-op tasks that lie ready are worked off by whole worker processes.

A row is a contestant with one process, or with two. The time runs from the start of the workers,
which have imported everything and are not connected yet, until no task is left, or for 10 s (60 s
in a full run); with it goes the CPU of the server and of the workers in that time, by task done.
`pgsched` is a worker with its defaults; with `no history` its queue keeps no completed tasks. `P`
is the yardstick, a bare Python loop over B (rows are kept) or D (deleted) in batches of 100. The
peers are in their default and in their best setting; graphile-worker and PgQueuer keep no finished
tasks, the others do.
`claim_task` is the average time of its calls in drains of their own, in which the server counts.
"""

import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import psycopg
from contestants import Contestant, LeftOut, filled, go, loop, ours, peers, ready, remaining
from measuring import (
    Bar,
    Figures,
    Row,
    Sample,
    Server,
    ask,
    cpu_seconds,
    execute,
    ratio,
    rounds,
)

KEPT, NOT_KEPT = "pgsched", "pgsched, no history"
OVER_B, OVER_D = "P over B", "P over D"
CLAIM = "claim_task, average call"
DEFAULT, BEST = ", default", ", best"
PATIENCE = {False: 120, True: math.inf}
LONGEST = {False: 10.0, True: 60.0}
"""Seconds of a drain, after which those tasks count that were done."""
REPORTED = 1.5
"""Seconds after which sessions have ended, and reported what they counted."""
IN_PYTHON = ("PgQueuer", "Procrastinate", "awa-pg")

_COUNT_CALLS = """
do $$ begin
  execute format('alter database %I set track_functions = pl', current_database());
end $$
"""
AVERAGE_CLAIM = """
select total_time / calls from pg_stat_user_functions
 where schemaname = 'pgsched' and funcname = 'claim_task'
"""


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
    repeat = 5 if full else 3
    entries = [Entry(each, 1, repeat) for each in (*core, over_b)]
    entries += [Entry(each, 2, repeat) for each in core]
    entries += [Entry(each, 1, repeat if full else 1) for each in others]
    rows = measure(server, entries, PATIENCE[full], LONGEST[full])
    calls = [average_claim(server, kept, LONGEST[full]) for _ in range(repeat - 2)]
    return [*rows, Row(CLAIM, calls, "ms")]


def _is_fastest(name: str) -> bool:
    """Whether it is the peer, in the setting, that pgsched has to beat."""
    return name.startswith("graphile-worker") and name.endswith(BEST)


def measure(server: Server, entries: Sequence[Entry], patience: float, longest: float) -> list[Row]:
    """Drain in turn, so that a round has all that take part; who fails once is left out."""
    samples: dict[str, list[Sample]] = {entry.name: [] for entry in entries}
    for number in rounds(max(entry.rounds for entry in entries), patience):
        for entry in entries:
            if number < entry.rounds and entry.name in samples:
                try:
                    sample = drain(server, entry.contestant, entry.processes, longest)
                except LeftOut as error:
                    if not entry.contestant.optional:
                        raise
                    print(f"{entry.name} is left out: {error}", file=sys.stderr)
                    del samples[entry.name]
                else:
                    samples[entry.name].append(sample)
    return [Row(name, measured) for name, measured in samples.items()]


def drain(server: Server, contestant: Contestant, processes: int, longest: float) -> Sample:
    """One drain of a fresh database; LeftOut when nothing is done, or a worker ends."""
    with (
        filled(server, contestant) as dsn,
        ready(contestant, dsn, processes) as workers,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):

        def cpu() -> tuple[float, float]:
            return cpu_seconds(server.pid), sum(cpu_seconds(worker.pid) for worker in workers)

        server.gate.wait()
        before = cpu()
        begin = go(workers)
        *_, left = remaining(conn, contestant, workers, longest)
        seconds = time.monotonic() - begin
        done = contestant.tasks - left
        spent = [(now - then) / done * 1e6 for now, then in zip(cpu(), before, strict=True)]
        return Sample(done, seconds, *spent)


def average_claim(server: Server, contestant: Contestant, longest: float) -> float:
    """Milliseconds of a call of claim_task while two workers drain."""
    with filled(server, contestant) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        execute(dsn, _COUNT_CALLS)
        with ready(contestant, dsn, 2) as workers:
            go(workers)
            for _ in remaining(conn, contestant, workers, longest):
                pass
        time.sleep(REPORTED)
        return float(ask(dsn, AVERAGE_CLAIM))


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What the figures have to be, as far as peers were there; of several the fastest counts."""
    here = {row.name: row for row in rows}
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
