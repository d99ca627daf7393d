"""What becomes of each task when the process is told to stop with its hands full."""

import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from workers import (
    PATIENCE,
    WorkerProcess,
    count,
    row,
    wait_for,
    wait_until,
)

from pgsched import enqueue

GRACE = 2.0

APP = """
import asyncio, time
from pathlib import Path
from pgsched import Worker, loop

# As soon as a handler has ended, it claims beyond its slots, and waits for these.
loop.PREFETCH_SECONDS, loop.UNSTARTED_SECONDS = 1000, 600

worker = Worker(concurrency=10, poll_interval=0.05, lease=600)

@worker.task("short")
def short(task):
    while not Path("gate").exists():
        time.sleep(0.01)
    return "well"

@worker.task("failing")
async def failing(task):
    while not Path("gate").exists():
        await asyncio.sleep(0.01)
    raise ValueError("while it stopped")

@worker.task("long")
def long(task):
    time.sleep(600)

@worker.task("deaf")
async def deaf(task):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

@worker.task("noop")
def noop(task):
    Path("ran").write_text(str(task.id))

@worker.task("transaction")
def transaction(task, conn):
    short(task)
    return "well"
"""

BUSY = [*3 * ["short"], *2 * ["failing"], *2 * ["long"], "deaf", *2 * ["transaction"]]


def hands_full(conn: psycopg.Connection) -> tuple[dict[str, list[int]], list[int]]:
    """Let the worker run one task for each slot and hold 20 more; returns these and those."""
    wait_for(conn, enqueue(conn, "noop"), "completed")
    with conn.transaction():
        busy: dict[str, list[int]] = {}
        for task_type in BUSY:
            busy.setdefault(task_type, []).append(enqueue(conn, task_type, priority=0))
        waiting = [enqueue(conn, "noop") for _ in range(20)]
    wait_until(lambda: count(conn, "processing") == len(BUSY) + len(waiting))
    return busy, waiting


def assert_given_back(conn: psycopg.Connection, ids: list[int]) -> None:
    """These are due at once, as if they had never been claimed."""
    for task_id in ids:
        left = row(conn, task_id)
        assert (left.status, left.attempt, left.last_error) == ("queued", 0, None)
        assert left.due_in <= timedelta(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_each_task_ends_or_is_given_back_or_left_to_its_lease(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, number: signal.Signals
) -> None:
    options = ("--dsn", dsn, "--grace", str(GRACE))
    with WorkerProcess(tmp_path, APP, *options) as worker:
        busy, waiting = hands_full(conn)
        ran = (tmp_path / "ran").read_text()
        worker.process.send_signal(number)
        wait_until(lambda: count(conn, "queued") == len(waiting))
        assert_given_back(conn, waiting)
        later = enqueue(conn, "noop")
        (tmp_path / "gate").touch()
        assert worker.process.wait(3 * (GRACE + 2)) == 0
        assert "Traceback" not in worker.log
        assert "left to their leases" in worker.log
    for task_id in busy["short"] + busy["transaction"]:
        done = row(conn, task_id)
        assert (done.status, done.attempt, done.result) == ("completed", 1, "well")
    for task_id in busy["failing"]:
        assert row(conn, task_id)[:3] == ("queued", 1, "ValueError: while it stopped")
    for task_id in busy["long"] + busy["deaf"]:
        left = row(conn, task_id)
        assert (left.status, left.attempt) == ("processing", 1)
    assert_given_back(conn, [*waiting, later])
    assert (tmp_path / "ran").read_text() == ran
    assert conn.execute("select name from pgsched.workers").fetchall() == []
    assert conn.execute("select queue from pgsched.listeners").fetchall() == []


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_it_at_once(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, first: signal.Signals
) -> None:
    with WorkerProcess(tmp_path, APP, "--dsn", dsn, "--grace", "600") as worker:
        busy, waiting = hands_full(conn)
        worker.process.send_signal(first)
        wait_until(lambda: count(conn, "queued") == len(waiting))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(10) == 0
        assert "Traceback" not in worker.log
    assert_given_back(conn, waiting)
    assert {row(conn, each)[:2] for ids in busy.values() for each in ids} == {("processing", 1)}


# In a namespace of process ids of its own, where it is the first, as in a container.
ALONE = ("unshare", "--pid", "--fork", "--kill-child")


def can_be_alone() -> bool:
    """Whether this user of this machine may have such a namespace."""
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_be_alone(), reason="no namespace of process ids can be had here")
def test_as_the_first_process_of_a_container_it_stops_like_any_other(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    options = ("--dsn", dsn, "--grace", str(GRACE))
    with WorkerProcess(tmp_path, APP, *options, under=ALONE) as worker:
        task_id = enqueue(conn, "short")
        name = wait_for(conn, task_id, "processing").claimed_by or ""
        assert name.split(":")[1] == "1"
        pid = worker.process.pid
        [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        worker.wait_for_log("stopping")
        (tmp_path / "gate").touch()
        assert worker.process.wait(PATIENCE) == 0
        assert "Traceback" not in worker.log
    assert row(conn, task_id).status == "completed"
