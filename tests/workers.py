"""Workers that tests run, in a thread or as a process, and waiting for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psycopg
from mutants import Mutant
from mutants import install as install_mutant

from pgsched import Task, Worker
from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS

SCHEMA = Path(__file__).parent.parent / "sql" / "schema" / "schema.sql"

NEWEST = max(path.name for path in MIGRATIONS.glob("*.sql")).partition(".")[0]
"""The version of the schema."""

PATIENCE = 30.0
"""Seconds that a test waits for what has to happen, on a machine that is slow today."""

REAP = "select id from pgsched.reap_stale()"
CANCEL = "select pgsched.cancel_task(%s)"


def install(server: Server, dsn: str) -> None:
    """Install the schema with psql."""
    server.run("psql", "-Xqv", "ON_ERROR_STOP=1", "-f", SCHEMA, dsn, check=True)


def ask(dsn: str, query: str) -> list[Any]:
    """The first column of a query's rows, over a connection of its own."""
    with psycopg.connect(dsn) as conn:
        return [value for (value,) in conn.execute(query.encode())]


class Row(NamedTuple):
    """What a test wants to know of a task; `due_in` is by the server's clock."""

    status: str
    attempt: int
    last_error: str | None
    result: Any
    due_in: timedelta
    claimed_by: str | None
    lease_expires_at: datetime | None


def row(conn: psycopg.Connection, task_id: int) -> Row:
    """The task as it is now."""
    [values] = conn.execute(
        """
        select status, attempt, last_error, result, run_at - clock_timestamp(), claimed_by,
               lease_expires_at
          from pgsched.tasks
         where id = %s
        """,
        [task_id],
    )
    return Row(*values)


def count(conn: psycopg.Connection, status: str) -> int:
    """How many tasks have this status."""
    [(tasks,)] = conn.execute("select count(*) from pgsched.tasks where status = %s", [status])
    assert isinstance(tasks, int)
    return tasks


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be reaped."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc here
        return not Path("/proc/self/stat").exists()


def wait_for(conn: psycopg.Connection, task_id: int, *statuses: str) -> Row:
    """The task, as soon as it has one of these statuses."""
    wait_until(lambda: row(conn, task_id).status in statuses)
    return row(conn, task_id)


def wait_for_delay(conn: psycopg.Connection, task_id: int) -> Row:
    """The task, as soon as it is queued for later."""
    wait_until(lambda: row(conn, task_id).due_in > timedelta(seconds=1))
    return row(conn, task_id)


def wait_for_extension(conn: psycopg.Connection, task_id: int) -> None:
    """Return when the lease of a running task has been extended once more."""
    before = row(conn, task_id).lease_expires_at
    wait_until(lambda: row(conn, task_id).lease_expires_at != before, 5)


def take_away(conn: psycopg.Connection, task_id: int) -> None:
    """As if the lease had ended: reap the task and claim it for another worker."""
    with conn.transaction():
        conn.execute(
            "update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() where id = %s",
            [task_id],
        )
        assert conn.execute(REAP).fetchall() == [(task_id,)]
        claimed = conn.execute("select id from pgsched.claim_task('other', p_lease => '1 h')")
        assert claimed.fetchall() == [(task_id,)]


def sessions(conn: psycopg.Connection, names: str = "pgsched %") -> list[int]:
    """The server processes of workers' sessions whose application_name is like this."""
    rows = conn.execute(
        """
        select pid
          from pg_stat_activity
         where datname = current_database() and application_name like %s
        """,
        [names],
    )
    return [pid for (pid,) in rows]


LISTENERS = "pgsched % listener"
PRESENCES = "pgsched % presence"


def end_sessions(conn: psycopg.Connection, names: str = "pgsched %") -> int:
    """End such sessions, and return, when they are gone, how many there were."""
    pids = sessions(conn, names)
    for pid in pids:
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
    return len(pids)


def shorten_grace(conn: psycopg.Connection, seconds: float) -> None:
    """Let a worker be gone when nobody held its presence for so long, in place of 5 seconds."""
    install_mutant(conn, Mutant("_gone_workers", "'5 seconds'", f"'{seconds} seconds'"))


def quick(dsn: str, **options: Any) -> Worker:
    """A worker that polls often and does not wait long for a handler that a failed test left."""
    return Worker(dsn, **{"poll_interval": 0.05, "grace": 5.0, **options})


@contextmanager
def running(worker: Worker) -> Iterator[Thread]:
    """The worker at work in a thread, stopped afterwards; what it raises fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not errors, errors
        assert not thread.is_alive()


def run_to_end(worker: Worker, *, drain: bool = False) -> int:
    """Return what the worker returns when it ends by itself, or raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(worker.run, drain=drain)
        try:
            return ended.result(PATIENCE)
        except TimeoutError:
            worker.stop()
            raise


def make_effects(conn: psycopg.Connection) -> None:
    """A table of the application's, which its handlers write to; failed attempts come at once."""
    conn.execute("create table public.effects (task_id bigint)")
    conn.execute("select pgsched.configure_queue('default', p_retry_delay => '0')")


def write(task: Task, conn: psycopg.Connection[Any]) -> None:
    """The application's own work."""
    conn.execute("insert into public.effects values (%s)", [task.id])


def written(conn: psycopg.Connection[Any]) -> list[int]:
    """What the table holds."""
    rows = psycopg.Cursor(conn).execute("select task_id from public.effects order by 1")
    return [task_id for (task_id,) in rows]


def gated(worker: Worker) -> tuple[Event, Event]:
    """Let tasks `wait` keep their connection; returns what says that one runs, and what ends it."""
    begun, gate = Event(), Event()

    @worker.task("wait")
    def wait(task: Task, conn: psycopg.Connection[Any]) -> None:
        write(task, conn)
        begun.set()
        gate.wait(PATIENCE)

    return begun, gate


class WorkerProcess:
    """`pgsched worker` on a worker of this source; a context manager that kills it.

    ``under``: a command that runs it.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        *options: str,
        app: str = "app",
        under: Sequence[str] = (),
    ) -> None:
        (folder / "app.py").write_text(source, encoding="utf-8")
        self._log = folder / "worker.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-m", "pgsched", "worker", app, *options],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(encoding="utf-8")

    def wait_for_log(self, text: str) -> None:
        """Return when it has written this."""
        wait_until(lambda: text in self.log)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
