"""Replay a real workload (SWF) through pgsched, check every job, and print what it was like.

See README.md, here. Needs no database: it starts a PostgreSQL in a temporary folder.
"""

import contextlib
import json
import math
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import psycopg
import swf
from replay_check import Execution, Planned, Row, check, executions, report
from replay_worker import read_records

from pgsched.calls import Connection, connect, schema_version, to_json
from pgsched.embedded import EmbeddedError, Server
from pgsched.errors import PgschedError, from_database
from pgsched.migrate import MigrationError, migrate

BATCH = 1000
"""Tasks that one call of enqueue_tasks adds."""
LEAD_SECONDS = 2.0
"""From the first call of enqueue_tasks to the window; longer where that is too short."""
MARGIN_SECONDS = 1.0
"""The window is at least so far off when everything is enqueued."""
PROGRESS_SECONDS = 5.0
STOP_SECONDS = 10.0
SHOWN = 20
"""Jobs that a failure names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Defaults that belong together; ``mean_sleep`` in seconds."""

    workers: int
    concurrency: int
    mean_sleep: float


SETTINGS = {
    "light": Setting(workers=2, concurrency=200, mean_sleep=0.2),
    "saturated": Setting(workers=2, concurrency=50, mean_sleep=0.9),
}


def plan(
    jobs: Sequence[swf.Job], opening: float, window: float, factor: float, prefix: str
) -> list[Planned]:
    """The jobs spread over the window as over the log's time; run times become sleeps."""
    first = jobs[0].submit
    scale = window / max(1, jobs[-1].submit - first)
    return [
        Planned(
            job=job.number,
            queue=f"{prefix}-{'unknown' if job.user < 0 else job.user}",
            run_at=round(opening + (job.submit - first) * scale, 6),  # all that PostgreSQL keeps
            sleep=job.run_time * factor,
        )
        for job in jobs
    ]


class WorkerProcess:
    """A process of replay_worker.py; it ends with this one, which holds its stdin."""

    def __init__(self, number: int, folder: Path, options: Mapping[str, Any]) -> None:
        self._name = f"worker {number}"
        self._records = folder / f"worker-{number}.jsonl"
        self._log = folder / f"worker-{number}.log"
        with self._log.open("wb") as log:
            # In a session of its own: on Ctrl-C it is the replay that ends it.
            self._popen = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("replay_worker.py")],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._popen.stdin
        # Not on its command line, which others may read: a DSN may hold a password.
        line = json.dumps({"records": str(self._records), **options})
        with contextlib.suppress(BrokenPipeError):  # check() says more
            self._popen.stdin.write(line.encode() + b"\n")

    def records(self) -> list[dict[str, Any]]:
        """What it has recorded so far; nothing: it is not ready yet."""
        return read_records(self._records) if self._records.exists() else []

    def check(self) -> None:
        """Raise click.ClickException when it has ended."""
        if (code := self._popen.poll()) is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise click.ClickException(
                f"{self._name} ended unexpectedly, exit code {code}; its log ends:\n{tail}"
            )

    def stop(self) -> None:
        """Ask it to end."""
        self._popen.terminate()

    def wait(self) -> int:
        """Return its exit code; kill it if it does not end."""
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        assert self._popen.stdin
        self._popen.stdin.close()
        return self._popen.wait()


@dataclass(slots=True)
class Replay:
    """One run, in queues of its own. ``deadline``: by time.monotonic()."""

    conn: Connection
    deadline: float
    prefix: str = field(default_factory=lambda: f"replay-{secrets.token_hex(4)}")
    planned: dict[int, Planned] = field(default_factory=dict)
    workers: list[WorkerProcess] = field(default_factory=list)

    def start(self, count: int, folder: Path, options: Mapping[str, Any]) -> float:
        """Start the workers; when all are ready, return how well they know the server's clock."""
        for number in range(1, count + 1):
            self.workers.append(WorkerProcess(number, folder, options))
        while not all(worker.records() for worker in self.workers):
            self.rest()
        return max(float(worker.records()[0]["uncertainty"]) for worker in self.workers)

    def end(self) -> list[int]:
        """End the workers; return their exit codes."""
        for worker in self.workers:
            worker.stop()
        return [worker.wait() for worker in self.workers]

    def enqueue(self, jobs: Sequence[swf.Job], window: float, factor: float) -> None:
        """Add a task for each job, in one transaction that ends before the window begins."""
        lead, in_time = LEAD_SECONDS, False
        while not in_time:
            with self.conn.transaction() as transaction:
                opening = self.now() + lead
                tasks = plan(jobs, opening, window, factor, self.prefix)
                ids = [
                    task_id
                    for first in range(0, len(tasks), BATCH)
                    for task_id in self.add(tasks[first : first + BATCH])
                ]
                in_time = self.now() + MARGIN_SECONDS <= opening
                if not in_time:
                    lead *= 2
                    raise psycopg.Rollback(transaction)
        if len(set(ids)) < len(ids):
            raise click.ClickException("enqueue_tasks returned an id twice")
        self.planned = dict(zip(ids, tasks, strict=True))

    def add(self, tasks: Sequence[Planned]) -> list[int]:
        """Enqueue these and return their ids, in this order."""
        elements = [
            {
                "task_type": "job",
                "payload": {"job": task.job, "sleep": task.sleep},
                "queue": task.queue,
                "run_at": datetime.fromtimestamp(task.run_at, UTC).isoformat(),
            }
            for task in tasks
        ]
        rows = self.conn.execute(
            "select pgsched.enqueue_tasks(p_tasks => %s::jsonb)", [to_json(elements)]
        )
        return [task_id for (task_id,) in rows]

    def now(self) -> float:
        """The server's clock."""
        [(now,)] = self.conn.execute("select date_part('epoch', clock_timestamp())")
        assert isinstance(now, float)
        return now

    def drain(self) -> None:
        """Show progress until every task is finished."""
        opening = min(task.run_at for task in self.planned.values())
        shown = -math.inf
        while True:
            [(now, later, due, running)] = self.conn.execute(
                """
                select date_part('epoch', c.now),
                       count(*) filter (where t.status = 'queued' and t.run_at > c.now),
                       count(*) filter (where t.status = 'queued' and t.run_at <= c.now),
                       count(*) filter (where t.status = 'processing')
                  from (select clock_timestamp() as now offset 0) as c
                  left join pgsched.scheduled_tasks as t
                    on t.id between %s and %s and starts_with(t.queue, %s)
                 group by c.now
                """,
                [min(self.planned), max(self.planned), self.prefix],
            )
            left = later + due + running
            if now - shown >= PROGRESS_SECONDS or not left:
                shown = now
                click.echo(
                    f"  {now - opening:6.1f} s  {later:6} later  {due:6} due  {running:6} running"
                    f"  {len(self.planned) - left:6} done"
                )
            if not left:
                return
            self.rest()

    def rest(self) -> None:
        """Wait a moment. Raises click.ClickException when a worker is gone or the time is over."""
        for worker in self.workers:
            worker.check()
        if time.monotonic() > self.deadline:
            raise click.ClickException(f"gave up: {self.left()}")
        time.sleep(0.25)

    def left(self) -> str:
        """What is not finished."""
        if not self.planned:
            return "the workers are not ready, nothing is enqueued"
        rows = [row for row in self.rows() if row.finished_at is None]
        some = ", ".join(f"{self.planned[row.id].job} ({row.status})" for row in rows[:SHOWN])
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return f"{len(rows)} jobs are not finished: {some}{more}"

    def rows(self) -> list[Row]:
        """This run's tasks as they are."""
        rows = self.conn.execute(
            """
            select id, queue, status, attempt, date_part('epoch', run_at),
                   date_part('epoch', claimed_at), date_part('epoch', finished_at), last_error
              from pgsched.tasks
             where starts_with(queue, %s)
             order by id
            """,
            [self.prefix],
        )
        return [Row(*row) for row in rows]

    def verify(self, runs: Sequence[Execution], rows: Sequence[Row]) -> None:
        """Raise click.ClickException unless everything went right."""
        if problems := check(self.planned, runs, rows):
            kinds = Counter(problem.partition(":")[0] for problem in problems)
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            shown = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
            raise click.ClickException(f"not as it should be ({counts}):{shown}")


@contextlib.contextmanager
def database(dsn: str | None) -> Iterator[tuple[str, Connection]]:
    """DSN and connection of a database with the schema: the one given, or one of our own."""
    with contextlib.ExitStack() as stack:
        if dsn is None:
            dsn = stack.enter_context(Server()).create_database("replay")
            migrate(dsn)
        conn = stack.enter_context(connect(dsn, application_name="pgsched replay"))
        version = schema_version(conn)
        conn.execute("select from pgsched.tasks, pgsched.scheduled_tasks limit 0")
        server = conn.info.parameter_status("server_version")
        click.echo(f"PostgreSQL {server}, schema pgsched {version}")
        yield dsn, conn


def replay(
    workload: Path,
    dsn: str | None,
    window: float,
    workers: int,
    concurrency: int,
    mean_sleep: float,
    timeout: float | None,
) -> None:
    """Do all of it. Raises click.ClickException when anything is not as it should be."""
    jobs, left_out = swf.read(workload)
    run_time = sum(job.run_time for job in jobs)
    factor = mean_sleep * len(jobs) / max(1, run_time)
    slots = workers * concurrency
    longest = max(job.run_time for job in jobs) * factor
    if timeout is None:
        timeout = 120 + 2 * (window + run_time * factor / slots + longest)
    click.echo(
        f"{workload.name}: {len(jobs)} jobs, {left_out} lines left out; run times x {factor:.3g}"
        f" are sleeps of {run_time * factor / len(jobs):.3g} s on average, {longest:.3g} s at most"
    )
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, database(dsn) as (dsn, conn):
        run = Replay(conn, time.monotonic() + timeout)
        queues = sorted({task.queue for task in plan(jobs, 0, window, factor, run.prefix)})
        options = {"dsn": dsn, "queues": queues, "concurrency": concurrency, "grace": 0.0}
        try:
            uncertainty = run.start(workers, Path(folder), options)
            click.echo(
                f"Started {workers} workers with {concurrency} slots each, the server's clock known"
                f" to {uncertainty * 1000:.2f} ms"
            )
            run.enqueue(jobs, window, factor)
            click.echo(f"Added {len(run.planned)} tasks in {len(queues)} queues {run.prefix}-*")
            run.drain()
        finally:
            codes = run.end()
        if any(codes):
            raise click.ClickException(f"the workers stopped with exit codes {codes}")
        runs = [execution for worker in run.workers for execution in executions(worker.records())]
        rows = run.rows()
        run.verify(runs, rows)
    for name, figure, explanation in report(run.planned, runs, rows, slots=slots, window=window):
        click.echo(f"  {name:<14}  {figure:>26}  {explanation}")
    click.echo("Verified: every job ran exactly once, none before its time, and was completed.")


class _Seconds(click.FloatRange):
    """More than 0, at most a day. NaN is no number."""

    name = "seconds"

    def convert(self, value: Any, *context: Any) -> float:
        seconds = super().convert(value, *context)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds.", *context)
        return seconds


SECONDS = _Seconds(min=0, min_open=True, max=86_400)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("workload", type=click.Path(path_type=Path))
@click.option("--setting", type=click.Choice(list(SETTINGS)), default="light", show_default=True)
@click.option("--dsn", help="Database with schema pgsched. Default: a server of its own.")
@click.option("--window", type=SECONDS, default=60, show_default=True, help="Length of the log.")
@click.option("--workers", type=click.IntRange(1, 100), help="Worker processes.")
@click.option("--concurrency", type=click.IntRange(1, 10_000), help="Slots of each worker.")
@click.option("--mean-sleep", type=SECONDS, help="What run times are scaled to, on average.")
@click.option("--timeout", type=SECONDS, help="Give up after so long. Default: by the work.")
def main(
    setting: str,
    workers: int | None,
    concurrency: int | None,
    mean_sleep: float | None,
    **options: Any,
) -> None:
    """Replay WORKLOAD, a file in Standard Workload Format, through pgsched and check every job.

    The setting stands for workers, concurrency and mean sleep, as far as no option says otherwise.
    """
    defaults = SETTINGS[setting]
    try:
        replay(
            workers=workers or defaults.workers,
            concurrency=concurrency or defaults.concurrency,
            mean_sleep=mean_sleep or defaults.mean_sleep,
            **options,
        )
    except (swf.SwfError, EmbeddedError, MigrationError, PgschedError, psycopg.Error) as error:
        text = str(from_database(error) if isinstance(error, psycopg.Error) else error)
        raise click.ClickException(" ".join(text.split())) from error


if __name__ == "__main__":
    # So that the workers and the server are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
