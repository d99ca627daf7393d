"""Handlers with a time limit."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest
from workers import (
    PATIENCE,
    quick,
    row,
    running,
    wait_for,
    wait_until,
)

from pgsched import InvalidArgument, Task, Worker, enqueue, loop


@pytest.fixture(autouse=True)
def quickly(conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed attempts are made again at once, and workers register five times a second."""
    conn.execute("select pgsched.configure_queue('default', p_retry_delay => '0')")
    monkeypatch.setattr(loop, "REGISTER_SECONDS", 0.2)


def wait_for_turns(conn: psycopg.Connection) -> None:
    """Return when the worker's loop has gone round some more times, and polled if it polls."""
    for _ in range(4):
        before = conn.execute("select seen_at from pgsched.workers").fetchone()
        wait_until(
            lambda: conn.execute("select seen_at from pgsched.workers").fetchone() != before  # noqa: B023
        )


@pytest.mark.parametrize("limit", [0, -1, float("nan"), -float("inf")])
def test_a_limit_that_cannot_be_kept_is_refused(limit: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        Worker().task("type", timeout=limit)


def test_a_coroutine_whose_time_is_over_is_cancelled_and_tried_again(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, concurrency=1)
    ended: list[tuple[int, bool]] = []

    @worker.task("slow", timeout=0.25)
    async def slow(task: Task) -> str:
        try:
            await asyncio.sleep(0 if task.attempt == 3 else PATIENCE)
        except asyncio.CancelledError:
            ended.append((task.attempt, task.cancelled.is_set()))
            if task.attempt == 1:
                raise
        return f"attempt {task.attempt}"

    task_id = enqueue(conn, "slow")
    with running(worker):
        done = wait_for(conn, task_id, "completed")
    # What the second one returned, although it was cancelled, came too late.
    assert ended == [(1, True), (2, True)]
    assert (done.attempt, done.result) == (3, "attempt 3")
    assert done.last_error == "timed out after 0.25 s"


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_function_whose_time_is_over_sees_that_and_keeps_its_slot(
    dsn: str, conn: psycopg.Connection, attempts: int
) -> None:
    worker = quick(dsn, concurrency=1)
    gate, cancelled = Event(), Event()

    @worker.task("slow", timeout=0.1)
    def slow(task: Task) -> str:
        if task.attempt == 1:
            assert task.cancelled.wait(PATIENCE)
            cancelled.set()
            gate.wait(PATIENCE)
        return f"attempt {task.attempt}"

    worker.task("noop")(lambda task: None)
    task_id = enqueue(conn, "slow", max_attempts=attempts, priority=0)
    with running(worker):
        assert cancelled.wait(PATIENCE)
        failed = wait_for(conn, task_id, "failed" if attempts == 1 else "queued")
        assert (failed.attempt, failed.last_error) == (1, "timed out after 0.1 s")
        waiting = enqueue(conn, "noop")
        wait_for_turns(conn)
        assert row(conn, waiting).status == "queued"
        gate.set()
        wait_for(conn, waiting, "completed")
        ended = wait_for(conn, task_id, "failed", "completed")
    assert (ended.status, ended.attempt, ended.result) == (
        ("failed", 1, None) if attempts == 1 else ("completed", 2, "attempt 2")
    )
    assert ended.last_error == "timed out after 0.1 s"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_that_ended_in_time_is_not_bothered(
    dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    worker = quick(dsn)
    ended: list[Task] = []

    @worker.task("plain", timeout=0.5)
    def plain(task: Task) -> str:
        ended.append(task)
        return "in time"

    @worker.task("async", timeout=0.5)
    async def coroutine(task: Task) -> str:
        return plain(task)

    @worker.task("slow", timeout=0.5)
    def slow(task: Task) -> None:
        task.cancelled.wait(PATIENCE)

    task_id = enqueue(conn, kind)
    with running(worker):
        wait_for(conn, task_id, "completed")
        # Its time is over when that of a later one is.
        wait_for(conn, enqueue(conn, "slow", max_attempts=1), "failed")
        done = row(conn, task_id)
    assert (done.status, done.attempt, done.result) == ("completed", 1, "in time")
    assert not ended[0].cancelled.is_set()


def test_a_stop_waits_within_the_grace_for_what_ignores_that_its_time_is_over(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)
    gate = Event()
    worker.task("deaf", timeout=0.1)(lambda task: gate.wait(PATIENCE))
    task_id = enqueue(conn, "deaf", max_attempts=1)
    with running(worker) as thread:
        wait_for(conn, task_id, "failed")
        worker.stop()
        wait_for_turns(conn)
        assert thread.is_alive()
        gate.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_it_says_how_many_ignored_that_their_time_is_over(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, grace=0.2)
    gate = Event()
    worker.task("deaf", timeout=0.1)(lambda task: gate.wait(PATIENCE))
    ids = [enqueue(conn, "deaf", max_attempts=1) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(worker.run)
        for task_id in ids:
            wait_for(conn, task_id, "failed")
        worker.stop()
        assert ended.result(PATIENCE) == 2
        gate.set()
