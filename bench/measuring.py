"""What every scene measures with: a server, CPU by process tree, samples, rounds, ratios, bars.

A scene is a module `scene_NAME.py` with `run(server, full) -> list[Row]` and
`bars(rows) -> list[Bar]`.
"""

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self, TypeVar

import psycopg
from psycopg.sql import SQL, Identifier

from pgsched import embedded
from pgsched.migrate import migrate

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "max_connections": "300",
}
"""Durable, and room for what a sample writes; all else is PostgreSQL's default."""

BUSY = 0.12
"""A machine of which others use more is not quiet."""

T = TypeVar("T")
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 3600.0  # seconds that a pgbench may take


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed piece of work; CPU in microseconds a task."""

    tasks: int
    seconds: float
    server_us: float
    client_us: float

    @property
    def rate(self) -> float:
        """Tasks a second."""
        return self.tasks / self.seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """A number that was measured once a round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Of the numbers of all rounds."""
        return cls(median(numbers), min(numbers), max(numbers))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a scene's table: samples, or numbers in a unit, one for each round."""

    name: str
    samples: Sequence[Sample] | Sequence[float]
    unit: str = "tasks/s"

    def numbers(self, of: str = "rate") -> list[float]:
        """One number for each round; `of`: the attribute of a sample that is meant."""
        return [s if isinstance(s, int | float) else getattr(s, of) for s in self.samples]

    def figures(self, of: str = "rate") -> Figures:
        """The same, in short."""
        return Figures.of(self.numbers(of))


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to be: `limit` at most, or at least; `unit` is of both (x: a ratio)."""

    what: str
    measured: Figures
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the median is on the right side of the limit."""
        value = self.measured.median
        return value >= self.limit if self.at_least else value <= self.limit


def ratio(row: Row, base: Row, of: str = "rate") -> Figures:
    """Of the first to the second, taken round by round: both were measured within a minute."""
    pairs = zip(row.numbers(of), base.numbers(of), strict=True)
    return Figures.of([number / against for number, against in pairs])


def row_of(rows: Sequence[Row], name: str) -> Row:
    """The row of this name."""
    return next(row for row in rows if row.name == name)


def interleaved(
    variants: Mapping[str, Callable[[], T]], repeat: int, patience: float = math.inf
) -> dict[str, list[T]]:
    """Measure the variants in turn, A B C A B C, so that a round has all of them."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    for _ in rounds(repeat, patience):
        for name, measure in variants.items():
            results[name].append(measure())
    return results


def rounds(repeat: int, patience: float) -> Iterator[int]:
    """The numbers of the rounds; none but the first begins after so many seconds."""
    begin = time.monotonic()
    for number in range(repeat):
        if number and time.monotonic() - begin > patience:
            return
        yield number


def cpu_seconds(pid: int) -> float:
    """CPU of a process and its descendants, with those that ended and were waited for."""
    process = Path(f"/proc/{pid}")
    try:
        stat = (process / "stat").read_text().rpartition(")")[2].split()
        user, system, waited_user, waited_system = (int(ticks) / _TICKS for ticks in stat[11:15])
        children = (process / "task" / str(pid) / "children").read_text().split()
        # Of threads that live, and not rounded down to a hundredth of a second for each process.
        threads = (process / "task").glob("*/schedstat")
        exact = sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = max(user + system, exact) + waited_user + waited_system
    return own + sum(cpu_seconds(int(child)) for child in children)


@dataclass(slots=True)
class Gate:
    """Waits for a quiet machine, in all not longer than its patience; notes how busy it was."""

    patience: float
    busy: list[float] = field(default_factory=list)

    def wait(self) -> None:
        """Return when others use little of the machine, or the patience is used up."""
        start = time.monotonic()
        while (busy := _busy()) > BUSY and time.monotonic() - start < self.patience:
            pass
        self.patience = max(0.0, self.patience - (time.monotonic() - start - 0.1))
        self.busy.append(busy)


def _busy() -> float:
    """The share of all CPUs that is in use, over a tenth of a second."""

    def ticks() -> list[int]:
        return [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]

    before = ticks()
    time.sleep(0.1)
    spent = [after - earlier for after, earlier in zip(ticks(), before, strict=True)]
    idle = spent[3] + spent[4]
    return 1 - idle / max(1, sum(spent))


class TooFewTasksError(Exception):
    """This machine did all that there were before the sample was over."""


class PgbenchRun(NamedTuple):
    """What pgbench did; `latencies`: of all transactions' scripts, in ms, ascending."""

    seconds: float
    latencies: list[float]


class Load(NamedTuple):
    """What pgbench does in `sessions` over and over: a script for so many tasks."""

    script: str
    tasks: int
    sessions: int
    seconds: float
    options: Sequence[str] = ()


class Server(embedded.Server):
    """A private server with the settings of all scenes; `gate` is asked before each sample."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(settings=SETTINGS)
        self.gate = gate
        self._plenty = 1
        self._numbers = count(1)
        self._templates: dict[Hashable, str] = {}

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        return self._process.pid

    @contextmanager
    def filled(self, *statements: str, pgsched: bool = True) -> Iterator[str]:
        """The URL of a fresh database, with pgsched, after these statements; dropped in the end."""

        def fill(dsn: str) -> None:
            if pgsched:
                migrate(dsn)
            execute(dsn, *statements)

        with self.copy(self.template((pgsched, statements), fill)) as dsn:
            yield dsn

    def template(self, key: Hashable, fill: Callable[[str], None]) -> str:
        """The name of a database that was filled, once for all with this key, and vacuumed."""
        if key not in self._templates:
            name = f"template_{next(self._numbers)}"
            dsn = self.create_database(name)
            try:
                fill(dsn)
                execute(dsn, "vacuum (freeze, analyze)")
            except BaseException:
                self._drop(name)
                raise
            self._templates[key] = name
        return self._templates[key]

    @contextmanager
    def copy(self, template: str) -> Iterator[str]:
        """The URL of a copy, in shared buffers, with a checkpoint behind it; dropped in the end."""
        name = f"bench_{next(self._numbers)}"
        statement = "create database {} template {} strategy file_copy"
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            if conn.info.server_version < 150000:
                statement = "create database {} template {}"
            conn.execute(SQL(statement).format(Identifier(name), Identifier(template)))
        try:
            self._settle(self.dsn(name))
            yield self.dsn(name)
        finally:
            self._drop(name)

    def _settle(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("set enable_indexonlyscan = off")
            tables = conn.execute("select schemaname, relname from pg_stat_user_tables").fetchall()
            for table in tables:
                conn.execute(SQL("select count(*) from {}").format(Identifier(*table)))
            conn.execute("checkpoint")

    def _drop(self, name: str) -> None:
        statement = SQL("drop database {} with (force)").format(Identifier(name))
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute(statement)

    def forget_templates(self) -> None:
        """Drop what copies were made from: a scene's is of no use to the next one."""
        for name in self._templates.values():
            self._drop(name)
        self._templates.clear()

    def with_enough(self, measure: Callable[[int], T]) -> T:
        """Measure with a factor for the number of tasks, which grows when they were too few."""
        while True:
            try:
                return measure(self._plenty)
            except TooFewTasksError:
                self._plenty *= 2

    def plenty(
        self,
        prepare: Callable[[int], Sequence[str]],
        left: str,
        load: Load,
        *,
        pgsched: bool = True,
        through: Callable[[str], str] = str,
    ) -> Sample:
        """Sample a load on a fresh database that has more tasks than will be done.

        `prepare`: its statements, by the factor for the number of tasks. `left`: counts the tasks
        that are not done. `through`: the URL by which the load gets there.
        """

        def measure(plenty: int) -> Sample:
            with self.filled(*prepare(plenty), pgsched=pgsched) as dsn:
                sample = self.steady(through(dsn), load)
                if int(ask(dsn, left)) <= load.tasks * load.sessions:
                    raise TooFewTasksError
            return sample

        return self.with_enough(measure)

    def pgbench(
        self,
        dsn: str,
        script: str,
        sessions: int,
        seconds: int | None = None,
        transactions: int | None = None,
        *,
        options: Sequence[str] = (),
    ) -> PgbenchRun:
        """Run a script for a time, or so often in each session; all must succeed.

        The time is counted from when all sessions are connected.
        """
        limit = f"-T{seconds}" if seconds else f"-t{transactions}"
        with self._pgbench(dsn, script, sessions, [limit, *options]) as process:
            logged = process.finish()
        begin = min(end - took / 1000 for end, took in logged)
        end = max(end for end, _ in logged)
        return PgbenchRun(end - begin, sorted(took for _, took in logged))

    def steady(self, dsn: str, load: Load) -> Sample:
        """Sample a load when it has run for a second.

        By then all sessions are connected and have their plans, which a worker makes once a day.
        """
        self.gate.wait()
        limit = [f"-T{math.ceil(load.seconds + 1.1)}", "-P1"]
        with self._pgbench(dsn, load.script, load.sessions, [*limit, *load.options]) as process:
            process.wait_for_progress()
            begin, server, client = time.time(), cpu_seconds(self.pid), cpu_seconds(process.pid)
            time.sleep(load.seconds)
            server, client = cpu_seconds(self.pid) - server, cpu_seconds(process.pid) - client
            finish = time.time()
            logged = process.finish()
        done = load.tasks * sum(begin <= end < finish for end, _ in logged)
        assert done, "nothing was done"
        return Sample(done, finish - begin, server / done * 1e6, client / done * 1e6)

    @contextmanager
    def _pgbench(
        self, dsn: str, script: str, sessions: int, options: Sequence[str]
    ) -> Iterator["_Pgbench"]:
        with tempfile.TemporaryDirectory(prefix="pgsched-bench-") as name:
            folder = Path(name)
            (folder / "script.sql").write_text(script)
            command: list[str | Path] = [
                self.bin_dir / "pgbench",
                *("-n", "-f", str(folder / "script.sql")),
                *("-c", str(sessions), "-j", str(min(sessions, os.cpu_count() or 1))),
                *("--log", "--log-prefix", str(folder / "log"), "-M", "prepared", *options, dsn),
            ]
            process = _Pgbench(command, folder)
            try:
                yield process
            finally:
                process.end()


class _Pgbench:
    """A pgbench that runs, with a log of all transactions."""

    def __init__(self, command: Sequence[str | Path], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def wait_for_progress(self) -> None:
        """Return when it tells its progress for the first time."""
        assert self._process.stderr
        for line in self._process.stderr:
            if line.startswith("progress:"):
                return
        self.finish()

    def finish(self) -> list[tuple[float, float]]:
        """When each transaction ended, and its latency in ms; RuntimeError if one failed."""
        _, errors = self._process.communicate(timeout=_PATIENCE)
        if "expected one row, got 0" in errors:
            raise TooFewTasksError
        if self._process.returncode:
            raise RuntimeError(f"pgbench: {errors[-2000:]}")
        return [
            (int(fields[4]) + int(fields[5]) / 1e6, int(fields[2]) / 1000)
            for log in self._folder.glob("log.*")
            for fields in map(str.split, log.read_text().splitlines())
        ]

    def end(self) -> None:
        """Nothing, when it has ended."""
        self._process.kill()
        self._process.communicate()


def name_of(dsn: str) -> str:
    """The database that a URL names."""
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


def execute(dsn: str, *statements: str) -> None:
    """Execute each in a transaction of its own; one may be a whole script."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def ask(dsn: str, query: str) -> Any:
    """The value of the first column of the first row."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row
    return row[0]


def number(value: float) -> str:
    """Three significant digits, or all before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
