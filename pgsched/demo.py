"""``pgsched demo``: real work on a private PostgreSQL, a worker killed half-way, and all checked.

Every ``.py`` file of Python's standard library is a task. The demo reads pgsched's tables directly,
as a person would, and its database logs how each claim ended.
"""

import contextlib
import hashlib
import http.client
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import click
import psycopg

from pgsched.calls import Connection, Task, connect, enqueue
from pgsched.embedded import Server
from pgsched.migrate import migrate
from pgsched.worker import Worker

LIBRARY = Path(sysconfig.get_path("stdlib"))
LARGE_BYTES = 8192
FAILING = 10
SLOW, SLOW_SECONDS = 40, 0.5
LATE_EVERY, LATE_SECONDS = 50, (3, 6)
LEASE_SECONDS = 3
STOP_SECONDS = 5
PATIENCE = 120
"""Seconds after which unfinished work is a failure."""

# One row for each claim that ended. Reaped is told by the lease, which then must have been over.
LOG = """
create table ending (task_id bigint not null, attempt integer not null, outcome text not null);

create function log_ending() returns trigger language plpgsql as $$
begin
  insert into public.ending (task_id, attempt, outcome)
  values (new.id, new.attempt,
          case
            when tg_op = 'INSERT' then new.status
            when old.lease_expires_at <= clock_timestamp() then 'reaped'
            else 'retried'
          end);
  return null;
end;
$$;

create trigger log_ending after insert on pgsched.finished_tasks
   for each row execute function public.log_ending();

create trigger log_ending after update on pgsched.scheduled_tasks
   for each row when (old.status = 'processing' and new.status = 'queued')
   execute function public.log_ending();
"""


class _DemoWorker(Worker):
    def run(self, *, drain: bool = False) -> int:
        """Also ends when the demo does, in whatever way: it holds the other end of our stdin."""

        def follow() -> None:
            os.read(0, 1)
            self.stop()

        threading.Thread(target=follow, daemon=True).start()
        return super().run(drain=drain)


worker = _DemoWorker(queues=("small", "large"))


@worker.task("measure")
def measure(task: Task) -> dict[str, Any]:
    """Hash a file and count its lines."""
    if task.payload["fails_once"] and task.attempt == 1:
        raise OSError(f"cannot read {task.payload['path']}: planned for the first attempt")
    time.sleep(task.payload["pause"])
    return _measured((LIBRARY / task.payload["path"]).read_bytes())


def _measured(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "lines": data.count(b"\n")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file, how its task is to go, and the right answer, which did not come from pgsched."""

    path: str
    answer: dict[str, Any]
    queue: str = "small"
    priority: int = 5
    delay: timedelta | None = None
    fails_once: bool = False
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the view pgsched.tasks, and how each of its claims ended, in order."""

    id: int
    status: str
    attempt: int
    result: Any
    run_at: datetime
    claimed_at: datetime
    finished_at: datetime
    endings: list[str]


def plan(limit: int | None) -> list[Job]:
    """One job for each file, about in the order in which they will be claimed."""
    files = sorted(path for path in LIBRARY.rglob("*.py") if path.is_file())
    names = [path.relative_to(LIBRARY) for path in files]
    names = [name for name in names if not {"site-packages", "dist-packages"} & set(name.parts)]
    chance = random.Random(0)
    chance.shuffle(names)
    names = sorted(names[:limit], key=_priority)
    count = len(names)
    failing = range(1, count, count // FAILING)
    # From just before the middle on: there a worker is killed, and is to have tasks in hand.
    slow = range(count * 45 // 100, count, max(1, count * 55 // 100 // SLOW))
    jobs = []
    for number, name in enumerate(names):
        data = (LIBRARY / name).read_bytes()
        delay = timedelta(seconds=chance.uniform(*LATE_SECONDS))
        jobs.append(
            Job(
                path=name.as_posix(),
                answer=_measured(data),
                queue="large" if len(data) >= LARGE_BYTES else "small",
                priority=_priority(name),
                delay=delay if number % LATE_EVERY == LATE_EVERY // 2 else None,
                fails_once=number in failing,
                pause=SLOW_SECONDS if number in slow else 0.0,
            )
        )
    return jobs


def _priority(name: Path) -> int:
    """Modules, then packages, the deeper the later, then tests."""
    return 8 if {"test", "tests"} & set(name.parts) else min(len(name.parts), 5)


def verify(jobs: Mapping[int, Job], rows: Iterable[Row], held: Collection[int]) -> list[str]:
    """What is wrong, a line for each task; nothing when everything is right.

    ``jobs`` by task id; ``rows``: all that there are; ``held``: the ids of what the killed worker
    had in hand.
    """
    found: dict[int, list[Row]] = {task_id: [] for task_id in jobs}
    for row in rows:
        found.setdefault(row.id, []).append(row)
    problems = []
    for task_id, copies in found.items():
        states = [(row.status, row.attempt, row.endings, row.result) for row in copies]
        if (job := jobs.get(task_id)) is None:
            problems.append(f"task {task_id}, which nobody added, is {states}")
            continue
        endings = copies[0].endings if copies else []
        # A first attempt that was lost did not live to fail. A worker that stalled past its lease
        # may have lost tasks, too, on a machine that is busy enough.
        failed = job.fails_once and endings[:1] != ["reaped"]
        losses = max(endings.count("reaped"), task_id in held)
        expected = ["retried"] * failed + ["reaped"] * losses + ["completed"]
        right = [("completed", len(expected), expected, job.answer)]
        if states != right:
            problems.append(f"task {task_id} ({job.path}) is {states}, not {right}")
    return problems


class _Process:
    """A worker process. Its log lies in the server's folder and goes with it."""

    def __init__(self, number: int, dsn: str, folder: Path) -> None:
        self.name = f"worker {number}"
        self.application_name = f"pgsched-worker-{number}"
        self._log = folder / f"{self.application_name}.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "pgsched", "worker", "pgsched.demo:worker"]
        command += ["--dsn", f"{dsn}&application_name={self.application_name}"]
        command += ["--lease", str(LEASE_SECONDS), "--poll-interval", "0.2", "--grace", "2"]
        command += ["--metrics-host", "127.0.0.1", "--metrics-port", str(self._port)]
        with self._log.open("wb") as log:
            # In a session of its own: on Ctrl-C it is the demo that ends it.
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._popen.pid
        self.send_signal = self._popen.send_signal
        click.echo(f"Started {self.name}, process {self.pid}")

    def check(self) -> None:
        if (code := self._popen.poll()) is not None:
            raise click.ClickException(f"{self.name} ended unexpectedly, exit code {code}")

    def contention(self) -> int:
        """Read the lock contention from its metrics page."""
        page = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(page):
            page.request("GET", "/metrics")
            lines = page.getresponse().read().decode().splitlines()
        name = "pgsched_lock_contention_total{"
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def end(self) -> int:
        """Stop it, kill it if that does not help, and return its exit code."""
        assert self._popen.stdin
        self._popen.terminate()
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._popen.stdin.close()
        return self._popen.wait()


@dataclass(slots=True)
class _Demo:
    folder: Path
    dsn: str
    conn: Connection
    deadline: float = field(default_factory=lambda: time.monotonic() + PATIENCE)
    jobs: dict[int, Job] = field(default_factory=dict)
    workers: list[_Process] = field(default_factory=list)
    killed: _Process | None = None
    held: set[int] = field(default_factory=set)
    contention: int = 0

    def run(self, limit: int | None) -> None:
        try:
            self.work(limit)
        except (click.ClickException, psycopg.Error, OSError) as error:
            for process in self.workers:
                click.echo(f"The log of {process.name} ends:\n{process.log_tail()}", err=True)
            if isinstance(error, OSError):
                raise click.ClickException(str(error)) from error
            raise
        finally:
            for process in self.workers:
                process.end()

    def work(self, limit: int | None) -> None:
        for number in (1, 2):
            self.workers.append(_Process(number, self.dsn, self.folder))
        jobs = plan(limit)
        while len(self.rows("select id from pgsched.workers")) < 2:
            self.rest()
        self.add(jobs)
        self.show_until(len(self.jobs) // 2)
        self.kill(self.workers[1])
        click.echo(f"Killed worker 2 (SIGKILL) with {len(self.held)} tasks in hand")
        self.workers.append(_Process(3, self.dsn, self.folder))
        self.show_until(len(self.jobs))
        self.contention += sum(process.contention() for process in self.workers)
        for process in self.workers:
            if code := process.end():
                raise click.ClickException(f"{process.name} stopped with exit code {code}")
        self.report()

    def add(self, jobs: list[Job]) -> None:
        with self.conn.transaction():
            for job in jobs:
                task_id = enqueue(
                    self.conn,
                    "measure",
                    {"path": job.path, "fails_once": job.fails_once, "pause": job.pause},
                    queue=job.queue,
                    priority=job.priority,
                    delay=job.delay,
                )
                self.jobs[task_id] = job
        click.echo(
            f"Added {len(jobs)} tasks in one transaction: hash a .py file of Python's library,\n"
            f"count its lines ({sum(job.delay is not None for job in jobs)} due in a few seconds,"
            f" {sum(job.fails_once for job in jobs)} that fail once,"
            f" {sum(job.pause > 0 for job in jobs)} that wait {SLOW_SECONDS} s)"
        )

    def rows(self, query: LiteralString, *arguments: object) -> list[tuple[Any, ...]]:
        return self.conn.execute(query, arguments).fetchall()

    def rest(self) -> None:
        """Wait a moment. Fails when a worker is gone or when all this takes too long."""
        for process in self.workers:
            process.check()
        if time.monotonic() > self.deadline:
            left = self.rows("select id, status from pgsched.scheduled_tasks order by id")
            some = ", ".join(f"{task_id} {status}" for task_id, status in left[:10])
            raise click.ClickException(
                f"gave up after {PATIENCE} s, {len(left)} tasks are not finished: {some}"
            )
        time.sleep(0.02)

    def show_until(self, target: int) -> None:
        """Show progress until so many tasks are finished."""
        finished = 0
        with click.progressbar(
            length=len(self.jobs),
            label="Working",
            show_eta=False,
            width=24,
            item_show_func=lambda note: note,
        ) as bar:
            while finished < target:
                self.rest()
                [(finished, late)] = self.rows(
                    """
                    select (select count(*) from pgsched.finished_tasks),
                           count(*) filter (where status = 'queued' and run_at > clock_timestamp())
                      from pgsched.scheduled_tasks
                    """
                )
                note = f"{late} due later" if late else ""
                if lost := len(self.held_by(self.killed)):
                    note += f"{', ' if late else ''}{lost} held by the killed worker"
                bar.update(finished - bar.pos, note)
        if not sys.stdout.isatty():
            click.echo(f"  {finished * 100 // len(self.jobs)} %")

    def kill(self, victim: _Process) -> None:
        """Kill a worker that has tasks in hand, and note which."""
        while not self.held:
            self.contention = victim.contention()
            # Stopped, it cannot finish them between our look and the kill.
            victim.send_signal(signal.SIGSTOP)
            self.rest()
            self.held = self.held_by(victim)
            victim.send_signal(signal.SIGKILL if self.held else signal.SIGCONT)
        self.killed = victim
        self.workers.remove(victim)
        victim.end()
        # What it had sent is done when its session is gone.
        query: LiteralString = "select pid from pg_stat_activity where application_name = %s"
        while self.rows(query, victim.application_name):
            self.rest()
        self.held = self.held_by(victim)

    def held_by(self, process: _Process | None) -> set[int]:
        query: LiteralString = """
            select id
              from pgsched.scheduled_tasks
             where status = 'processing' and split_part(claimed_by, ':', 2) = %s
        """
        return {task_id for (task_id,) in self.rows(query, str(process.pid))} if process else set()

    def report(self) -> None:
        query: LiteralString = """
            select t.id, t.status, t.attempt, t.result, t.run_at, t.claimed_at, t.finished_at,
                   coalesce(e.outcomes, '{}')
              from pgsched.tasks as t
              left join (
                   select task_id, array_agg(outcome order by attempt, outcome) as outcomes
                     from ending
                    group by task_id) as e on e.task_id = t.id
        """
        rows = [Row(*row) for row in self.rows(query)]
        if problems := verify(self.jobs, rows, self.held):
            text = "\n  ".join(problems[:10])
            raise click.ClickException(f"{len(problems)} tasks are not right:\n  {text}")
        endings = Counter(ending for row in rows for ending in row.endings)
        start = min(row.claimed_at for row in rows)
        ends = sorted((row.finished_at - start).total_seconds() for row in rows)
        half = len(rows) // 2
        later = [row for row in rows if self.jobs[row.id].delay]
        at_once = [row for row in rows if not self.jobs[row.id].delay]
        priorities = len({job.priority for job in self.jobs.values()})
        click.echo()
        for name, figure, explanation in (
            ("tasks", len(rows), f"on 2 queues, with {priorities} priorities"),
            ("attempts", sum(row.attempt for row in rows), "tasks + retried + reaped"),
            ("retried", endings["retried"], "failed at the first attempt, as planned"),
            ("reaped", endings["reaped"], f"{len(self.held)} of them from the killed worker"),
            ("tasks/s", f"{half / ends[half - 1]:.0f}", "by two workers, before the kill"),
            (
                "",
                f"{len(rows) / ends[-1]:.0f}",
                f"in all {ends[-1]:.1f} s, waits for leases included",
            ),
            ("latency", _latency(at_once), "p50 / p99 from due to done, of the tasks due at once"),
            ("", _latency(later), f"p50 / p99 of the {len(later)} tasks due later"),
            (
                "contention",
                self.contention,
                "estimate: due tasks passed by, held by another session",
            ),
        ):
            click.echo(f"  {name:<10}  {figure:>13}  {explanation}")
        click.echo()


def _latency(rows: Iterable[Row]) -> str:
    seconds = [(row.finished_at - row.run_at).total_seconds() for row in rows]
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{cuts[49]:.3f} / {cuts[98]:.3f} s"


def demo(limit: int | None) -> None:
    """Run the demo, with ``limit`` files at most.

    Raises click.ClickException when anything is not as it should be, EmbeddedError when there is
    no PostgreSQL, and psycopg.Error.
    """
    started = time.monotonic()
    click.echo("Starting PostgreSQL in a temporary folder (fsync off: nothing here is to last)")
    with Server(settings={"fsync": "off"}) as server:
        dsn = server.create_database("demo")
        with connect(dsn, application_name="pgsched demo") as conn:
            version = conn.info.parameter_status("server_version")
            click.echo(f"Installing schema pgsched in PostgreSQL {version}")
            migrate(dsn)
            conn.execute(LOG)
            _Demo(server.folder, dsn, conn).run(limit)
    click.echo(
        "Verified: every hash and line count is right, every task was completed exactly once,\n"
        f"nothing is left. {time.monotonic() - started:.0f} seconds."
    )
