"""``pgsched demo``: real work on a private PostgreSQL, a worker killed half-way, and all checked.

Every ``.py`` file of Python's standard library is a task. The demo reads pgsched's tables directly,
as a person would; what the handler wrote down of its calls is a second witness.
"""

import hashlib
import json
import os
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, LiteralString

import click

from pgsched.calls import Task, connect
from pgsched.embedded import Server
from pgsched.migrate import migrate
from pgsched.worker import Worker

LIBRARY = Path(sysconfig.get_path("stdlib"))
LARGE_BYTES = 8192
FAILING, SLOW = 10, 40  # so many, about
PATIENCE = 120  # seconds that a step may take


class _DemoWorker(Worker):
    def run(self, *, drain: bool = False) -> int:
        """Also ends when the demo does, in whatever way: it holds the other end of our stdin."""

        def follow() -> None:
            os.read(0, 1)
            self.stop()

        threading.Thread(target=follow, daemon=True).start()
        return super().run(drain=drain)


worker = _DemoWorker(queues=("small", "large"), lease=5, poll_interval=0.2, grace=2)


@worker.task("measure")
def measure(task: Task) -> dict[str, Any]:
    """Hash a file and count its lines."""
    os.write(1, f"{task.id} {task.attempt}\n".encode())
    time.sleep(task.payload["seconds"])
    if task.payload["fails"] and task.attempt == 1:
        raise OSError("planned")
    return measured(task.payload["path"])


def measured(path: str) -> dict[str, Any]:
    """The answer for a file of the library."""
    data = (LIBRARY / path).read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "lines": data.count(b"\n")}


def plan(limit: int | None) -> list[dict[str, Any]]:
    """A task for each file, as enqueue_tasks takes it, about in the order of their claims."""
    files = [path.relative_to(LIBRARY) for path in sorted(LIBRARY.rglob("*.py")) if path.is_file()]
    files = [path for path in files if not {"site-packages", "dist-packages"} & {*path.parts}]
    random.Random(0).shuffle(files)
    files = sorted(files[:limit], key=lambda path: len(path.parts))
    count, later = len(files), datetime.now(UTC) + timedelta(seconds=4)
    failing = range(0, count, count // FAILING)
    # From just before the middle on: there a worker is killed, and is to have tasks in hand.
    slow = range(count * 45 // 100, count, count * 55 // 100 // SLOW)
    return [
        {
            "task_type": "measure",
            "payload": {"path": str(path), "fails": i in failing, "seconds": int(i in slow)},
            "queue": "large" if (LIBRARY / path).stat().st_size >= LARGE_BYTES else "small",
            "priority": min(len(path.parts), 9),
            "run_at": str(later) if i % 50 == 25 else None,
        }
        for i, path in enumerate(files)
    ]


def verify(
    tasks: Mapping[int, Mapping[str, Any]],
    calls: Iterable[str],
    rows: Iterable[tuple[Any, ...]],
    lost: Mapping[int, tuple[int, str]],
) -> list[str]:
    """What is wrong, a line for each task; nothing when everything is right.

    ``tasks`` by id; ``calls``, as the handler wrote them; ``rows``, all that there are: id, status,
    attempt, last_error, result, whether it was due when claimed; ``lost``, what the killed worker
    had in hand: by task id the attempt and the error that this is.
    """
    found: dict[int, list[object]] = {task_id: [] for task_id in tasks}
    for call in sorted(calls):
        task_id, attempt = map(int, call.split())
        found.setdefault(task_id, []).append(attempt)
    for task_id, *row in rows:
        found.setdefault(task_id, []).append(tuple(row))
    problems = []
    for task_id, history in found.items():
        right: list[object] = []
        if task := tasks.get(task_id):
            planned = (1, "OSError: planned") if task["payload"]["fails"] else (0, None)
            failed, error = lost.get(task_id, planned)
            answer = measured(task["payload"]["path"])
            right = [*range(1, failed + 2), ("completed", failed + 1, error, answer, True)]
            if task_id in lost and failed not in history:  # the handler had not begun
                right.remove(failed)
        if history != right:
            problems.append(f"task {task_id} is {history}, not {right}")
    return problems


class _Demo:
    def __init__(self, server: Server, dsn: str, stack: ExitStack) -> None:
        self.folder, self.dsn, self.stack = server.folder, dsn, stack
        self.conn = stack.enter_context(connect(dsn, application_name="pgsched demo"))
        self.workers: dict[str, Popen[bytes]] = {}

    def run(self, limit: int | None) -> None:
        self.start("worker 1")
        self.start("worker 2")
        self.wait_until("select count(*) = 2 from pgsched.workers")
        planned = plan(limit)
        ids = self.rows("select pgsched.enqueue_tasks(p_tasks => %s)", json.dumps(planned))
        tasks = {task_id: task for (task_id,), task in zip(ids, planned, strict=True)}
        click.echo(f"Added {len(tasks)} tasks in one transaction: hash a .py file, count its lines")
        self.wait_until("select count(finished_at) >= count(*) / 2 from pgsched.tasks")
        lost = self.kill("worker 2")
        click.echo(f"Killed worker 2 (SIGKILL) with {len(lost)} tasks in hand")
        self.start("worker 3")
        self.wait_until("select count(*) = 0 from pgsched.scheduled_tasks")
        calls = (self.folder / "calls").read_text().splitlines()
        columns: LiteralString = "id, status, attempt, last_error, result, claimed_at >= run_at"
        rows = self.rows(f"select {columns} from pgsched.tasks")
        if problems := verify(tasks, calls, rows, lost):
            text = "\n  ".join(problems[:10])
            raise click.ClickException(f"{len(problems)} tasks are not right:\n  {text}")
        attempts = sum(row[2] for row in rows)
        click.echo(f"  tasks     {len(tasks):5}  on 2 queues, by three workers")
        click.echo(f"  attempts  {attempts:5}  tasks + failed + reaped")
        click.echo(f"  failed    {attempts - len(tasks) - len(lost):5}  once each, as planned")
        click.echo(f"  reaped    {len(lost):5}  the killed worker's, when its leases had ended")

    def rows(self, query: LiteralString, *arguments: object) -> list[tuple[Any, ...]]:
        return self.conn.execute(query, arguments).fetchall()

    def start(self, name: str) -> None:
        argv = [sys.executable, "-m", "pgsched", "worker", "pgsched.demo:worker", "--dsn", self.dsn]
        with (self.folder / "calls").open("ab") as out, (self.folder / name).open("wb") as log:
            # In a session of its own: on Ctrl-C it is the demo that ends it.
            process = Popen(argv, stdin=PIPE, stdout=out, stderr=log, start_new_session=True)
        self.workers[name] = self.stack.enter_context(process)
        click.echo(f"Started {name}, process {process.pid}")

    def kill(self, name: str) -> dict[int, tuple[int, str]]:
        """Kill a worker that has tasks in hand; returns which, as verify takes them."""
        in_hand: LiteralString = "from pgsched.scheduled_tasks where claimed_by like %s"
        slow: LiteralString = "(payload ->> 'seconds')::integer > 0"
        session: LiteralString = "from pg_stat_activity where application_name like %s"
        worker = f"%:{self.workers[name].pid}:%"
        self.wait_until(f"select count(*) > 2 {in_hand} and {slow}", worker)
        self.workers.pop(name).kill()
        # What it had sent is done when its session is gone.
        self.wait_until(f"select count(*) = 0 {session}", worker)
        rows = self.rows(f"select id, attempt, claimed_by {in_hand}", worker)
        text = "worker {} was lost: its lease ended during attempt {}"
        return {task_id: (attempt, text.format(by, attempt)) for task_id, attempt, by in rows}

    def wait_until(self, query: LiteralString, *arguments: object) -> None:
        """Show progress meanwhile. Fails when a worker is gone or when all this takes too long."""
        start = shown = time.monotonic()
        while self.rows(query, *arguments) != [(True,)]:
            gone = [name for name, process in self.workers.items() if process.poll() is not None]
            if gone or time.monotonic() > start + PATIENCE:
                reason = f"{gone[0]} ended" if gone else f"not within {PATIENCE} s: {query}"
                raise click.ClickException(reason)
            if time.monotonic() > shown + 1:
                shown += 1
                done = "select 100 * count(finished_at) / greatest(count(*), 1) from pgsched.tasks"
                click.echo(f"{self.rows(done)[0][0]:4} %")
            time.sleep(0.02)


def demo(limit: int | None) -> None:
    """Run the demo with ``limit`` files at most; click.ClickException when anything is wrong."""
    started = time.monotonic()
    click.echo("Starting PostgreSQL in a temporary folder (fsync off: nothing here is to last)")
    with Server(settings={"fsync": "off"}) as server, ExitStack() as stack:
        dsn = server.create_database("demo")
        click.echo("Installing schema pgsched")
        migrate(dsn)
        try:
            _Demo(server, dsn, stack).run(limit)
        except Exception:
            for log in sorted(server.folder.glob("worker *")):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                click.echo(f"The log of {log.name} ends:\n{tail}", err=True)
            raise
    click.echo(
        "Verified: every hash and line count is right, every task was completed exactly once,\n"
        f"nothing is left. {time.monotonic() - started:.0f} seconds."
    )
