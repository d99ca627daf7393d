"""``pgsched demo``: real work on a private PostgreSQL, one worker killed half-way, all of it checked.

Every ``.py`` file of Python's standard library is a task. The demo reads pgsched's tables directly,
as a person would, and keeps a log of its own of how each claim ended.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import psycopg

from pgsched.calls import Connection, Task, enqueue
from pgsched.embedded import Server
from pgsched.migrate import migrate
from pgsched.worker import Worker

LIBRARY = Path(sysconfig.get_path("stdlib"))
TASK_TYPE = "measure_file"
LARGE_BYTES = 8192
FAILING, SLOW, LATE_PER_CENT = 10, 40, 2
"""Tasks that fail once and, so that a worker dies with work in hand, that take SLOW_SECONDS."""
SLOW_SECONDS = 0.5
LATE_SECONDS = (3.0, 6.0)
LEASE_SECONDS = 3
PATIENCE = 120.0
"""Seconds until the demo gives up; STOP_SECONDS: until a worker that does not stop is killed."""
STOP_SECONDS = 5.0

# One row for each claim that ended. A lease that was over: only then may a task be reaped.
LOG = """
create table ending (
  task_id bigint  not null,
  attempt integer not null,
  outcome text    not null
);

create function log_ending() returns trigger language plpgsql as $$
begin
  insert into public.ending (task_id, attempt, outcome)
  values (new.id, new.attempt,
          case
            when tg_table_name = 'finished_tasks' then new.status
            when old.lease_expires_at <= clock_timestamp() then 'reaped'
            else 'retried'
          end);
  return null;
end;
$$;

create trigger log_ending after insert on pgsched.finished_tasks
   for each row execute function log_ending();

create trigger log_ending after update on pgsched.scheduled_tasks
   for each row when (old.status = 'processing' and new.status = 'queued')
   execute function log_ending();
"""


class _DemoWorker(Worker):
    """Ends with the demo, however that ends: the demo's side of our stdin is closed then."""

    def run(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()
        super().run()

    def _follow(self) -> None:
        os.read(0, 1)
        self.stop()


worker = _DemoWorker(queues=("small", "large"))


@worker.task(TASK_TYPE)
def measure_file(task: Task) -> dict[str, Any]:
    """The demo's handler: SHA-256 and number of lines of a file."""
    if task.payload["fails_once"] and task.attempt == 1:
        raise OSError(f"{task.payload['path']} could not be read, as planned for this attempt")
    time.sleep(task.payload["pause"])
    return _measure((LIBRARY / task.payload["path"]).read_bytes())


def _measure(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "lines": data.count(b"\n")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file: its task as it is enqueued, and the right answer, found without pgsched."""

    path: str
    answer: dict[str, Any]
    queue: str = "small"
    priority: int = 5
    delay: timedelta | None = None
    fails_once: bool = False
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the view pgsched.tasks."""

    id: int
    status: str
    attempt: int
    result: Any
    run_at: datetime
    claimed_at: datetime
    finished_at: datetime


@dataclass(frozen=True, slots=True, order=True)
class Ending:
    """How one claim ended: retried, reaped, or what the task is finished as."""

    task_id: int
    attempt: int
    outcome: str


def plan(limit: int | None) -> list[Job]:
    """The jobs, about in the order in which they will be claimed: tests last, modules first."""
    paths = [path.relative_to(LIBRARY) for path in sorted(LIBRARY.rglob("*.py"))]
    paths = [path for path in paths if not {"site-packages", "dist-packages"} & set(path.parts)]
    random.Random(0).shuffle(paths)

    def priority(path: Path) -> int:
        return 8 if {"test", "tests"} & set(path.parts) else min(len(path.parts), 5)

    paths = sorted(paths[:limit], key=priority)
    count = len(paths)
    failing = set(range(1, count, count // FAILING))
    slow = set(range(count * 45 // 100, count, max(1, count // 2 // SLOW)))
    late = range(count // 5, count, 100 // LATE_PER_CENT)
    jobs = []
    for number, path in enumerate(paths):
        data = (LIBRARY / path).read_bytes()
        delay = timedelta(seconds=random.uniform(*LATE_SECONDS))
        jobs.append(
            Job(
                path=path.as_posix(),
                answer=_measure(data),
                queue="large" if len(data) >= LARGE_BYTES else "small",
                priority=priority(path),
                delay=delay if number in late else None,
                fails_once=number in failing,
                pause=SLOW_SECONDS if number in slow else 0.0,
            )
        )
    return jobs


def verify(
    jobs: Mapping[int, Job],
    rows: Iterable[Row],
    endings: Iterable[Ending],
    held: Mapping[int, int],
) -> list[str]:
    """What is wrong, in sentences; empty when all is right.

    ``jobs`` are by task id; ``rows`` and ``endings`` are all there are; ``held`` are the attempts,
    by task id, that the killed worker was at.
    """
    rows_of: dict[int, list[Row]] = {task_id: [] for task_id in jobs}
    endings_of: dict[int, list[Ending]] = {task_id: [] for task_id in jobs}
    for row in rows:
        rows_of.setdefault(row.id, []).append(row)
    for ending in endings:
        endings_of.setdefault(ending.task_id, []).append(ending)
    problems = [f"task {task_id} was never enqueued" for task_id in rows_of.keys() - jobs.keys()]
    for task_id, job in jobs.items():
        found = rows_of[task_id]
        outcomes = ["retried"] if job.fails_once and held.get(task_id) != 1 else []
        outcomes += ["reaped"] if task_id in held else []
        outcomes += ["completed"]
        expected = [Ending(task_id, attempt, how) for attempt, how in enumerate(outcomes, 1)]
        problem = None
        if len(found) != 1:
            problem = f"is there {len(found)} times"
        elif found[0].status != "completed":
            problem = f"is {found[0].status}"
        elif found[0].result != job.answer:
            problem = f"has the result {found[0].result}, right is {job.answer}"
        elif found[0].attempt != len(expected):
            problem = f"took {found[0].attempt} attempts, right is {len(expected)}"
        elif sorted(endings_of[task_id]) != expected:
            was = ", ".join(ending.outcome for ending in sorted(endings_of[task_id]))
            problem = f"was {was}; right is {', '.join(outcomes)}"
        if problem:
            problems.append(f"task {task_id} ({job.path}) {problem}")
    return problems


class _Process:
    """A worker process. Its log is in the server's folder and goes with it."""

    def __init__(self, number: int, dsn: str, folder: Path) -> None:
        self.name = f"worker-{number}"
        self.log = folder / f"{self.name}.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "pgsched", "worker", "pgsched.demo:worker"]
        command += ["--dsn", f"{dsn}&application_name={self.name}", "--lease", str(LEASE_SECONDS)]
        command += ["--poll-interval", "0.2", "--grace", str(STOP_SECONDS / 2)]
        command += ["--metrics-port", str(self._port)]
        with self.log.open("wb") as log:
            # In a session of its own: at Ctrl-C it is for the demo to end it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid

    def check(self) -> None:
        if (code := self._process.poll()) is not None:
            raise click.ClickException(f"{self.name} ended unexpectedly, exit code {code}")

    def contention(self) -> float:
        """Sum of pgsched_lock_contention_total on its metrics page."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("pgsched_lock_contention_total{")
        )

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """End it, by force if need be, and return its exit code."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        assert self._process.stdin
        self._process.stdin.close()
        return code


class _Demo:
    def __init__(self, server: Server, dsn: str, conn: Connection) -> None:
        self._server = server
        self._dsn = dsn
        self._conn = conn
        self._deadline = time.monotonic() + PATIENCE
        self._jobs: dict[int, Job] = {}
        self._workers: list[_Process] = []
        self._started = 0
        self._held: dict[int, int] = {}
        self._contention = 0.0

    def run(self, limit: int | None) -> None:
        try:
            self._work(limit)
        except (click.ClickException, psycopg.Error, OSError):
            for process in self._workers:
                lines = process.log.read_text(errors="replace").splitlines()[-15:]
                click.echo(f"The log of {process.name} ends:\n  " + "\n  ".join(lines), err=True)
            raise
        finally:
            for process in self._workers:
                process.end()

    def _work(self, limit: int | None) -> None:
        first, second = self._start_worker(), self._start_worker()
        click.echo(f"Started two workers, processes {first.pid} and {second.pid}")
        jobs = plan(limit)
        with self._conn.transaction():
            for job in jobs:
                payload = {"path": job.path, "fails_once": job.fails_once, "pause": job.pause}
                task_id = enqueue(
                    self._conn,
                    TASK_TYPE,
                    payload,
                    queue=job.queue,
                    priority=job.priority,
                    delay=job.delay,
                )
                self._jobs[task_id] = job
        click.echo(
            f"Added {len(jobs)} tasks: hash every .py file of Python's standard library,"
            " count its lines"
        )
        self._watch(len(jobs) // 2)
        self._kill(second)
        third = self._start_worker()
        click.echo(
            f"Killed worker 2 (SIGKILL) while it held {_count(len(self._held), 'task')};"
            f" worker 3 is process {third.pid}"
        )
        self._watch(len(jobs))
        for process in self._workers:
            self._contention += process.contention()
        for process in self._workers:
            if code := process.end():
                raise click.ClickException(f"{process.name} did not stop well, exit code {code}")
        self._report()
