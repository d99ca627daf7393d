"""How many handlers are given a connection, and what becomes of those that wait for one."""

from datetime import timedelta
from threading import Event, Lock
from typing import Any

import psycopg
import pytest
from workers import (
    LISTENERS,
    PATIENCE,
    PRESENCES,
    REAP,
    count,
    end_sessions,
    gated,
    make_effects,
    quick,
    row,
    running,
    sessions,
    wait_for,
    wait_for_extension,
    wait_until,
    write,
    written,
)

from pgsched import Task, calls, enqueue, handlers, loop

Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def effects(conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    make_effects(conn)
    monkeypatch.setattr(handlers, "SOON_SECONDS", (0.6, 0.9))


def test_no_more_run_at_once_than_there_are_connections(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, concurrency=6, connections=2)
    now = most = 0
    lock = Lock()

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        write(task, conn)
        conn.execute("select pg_sleep(0.02)")
        with lock:
            now -= 1

    ids = [enqueue(conn, "write") for _ in range(30)]
    connections: set[int] = set()

    def look() -> bool:
        there = set(sessions(conn))  # first: what comes in between is not among them
        connections.update(there - {*sessions(conn, LISTENERS), *sessions(conn, PRESENCES)})
        return count(conn, "completed") == len(ids)

    with running(worker):
        wait_until(look)
    assert most == 2
    assert len(connections) <= 1 + 2
    assert written(conn) == ids


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers give back nothing because it has to wait."""
    monkeypatch.setattr(loop, "UNSTARTED_SECONDS", 600)


def test_what_waits_for_a_connection_takes_no_slot(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, concurrency=4, connections=1)
    begun, gate = gated(worker)
    worker.task("noop")(lambda task: None)
    with conn.transaction():
        waiting = [enqueue(conn, "wait") for _ in range(3)]
        plain = enqueue(conn, "noop")
    with running(worker):
        wait_for(conn, plain, "completed")
        for _ in range(5):
            wait_for(conn, enqueue(conn, "noop"), "completed")
        assert begun.is_set()
        assert written(conn) == []
        gate.set()
        for task_id in waiting:
            assert wait_for(conn, task_id, "completed").attempt == 1
    assert written(conn) == waiting


def test_what_waits_long_for_a_connection_is_done_elsewhere(
    dsn: str, conn: psycopg.Connection
) -> None:
    first = quick(dsn, concurrency=4, connections=1, poll_interval=30)
    begun, gate = gated(first)
    second = quick(dsn)
    second.task("wait")(write)
    with conn.transaction():
        held, *others = [enqueue(conn, "wait") for _ in range(4)]
    with running(first):
        assert begun.wait(PATIENCE)
        wait_until(lambda: count(conn, "processing") == 4)
        with running(second):
            for task_id in others:
                done = wait_for(conn, task_id, "completed")
                assert (done.attempt, done.last_error) == (1, None)
        assert written(conn) == others
        gate.set()
        wait_for(conn, held, "completed")


def test_what_waits_for_a_connection_keeps_its_lease_and_its_time(
    dsn: str, conn: psycopg.Connection, reaping_often: None, patient: None
) -> None:
    worker = quick(dsn, concurrency=2, connections=1, lease=1)
    begun, gate = gated(worker)
    worker.task("write", timeout=1)(write)
    held = enqueue(conn, "wait")
    with running(worker):
        assert begun.wait(PATIENCE)
        waiting = enqueue(conn, "write")
        wait_for(conn, waiting, "processing")
        for _ in range(5):
            wait_for_extension(conn, waiting)
            assert conn.execute(REAP).fetchall() == []
        gate.set()
        for task_id in (held, waiting):
            done = wait_for(conn, task_id, "completed")
            assert (done.attempt, done.last_error) == (1, None)


def test_what_waits_for_a_connection_when_the_worker_stops_is_given_back(
    dsn: str, conn: psycopg.Connection, patient: None
) -> None:
    worker = quick(dsn, concurrency=3, connections=1)
    begun, gate = gated(worker)
    with conn.transaction():
        held, *others = [enqueue(conn, "wait") for _ in range(3)]
    with running(worker):
        assert begun.wait(PATIENCE)
        wait_until(lambda: count(conn, "processing") == 3)
        worker.stop()
        wait_until(lambda: count(conn, "queued") == 2)
        gate.set()
    assert row(conn, held)[:2] == ("completed", 1)
    assert [row(conn, task_id)[:2] for task_id in others] == 2 * [("queued", 0)]


def test_its_connections_end_with_the_worker(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, connections=2, grace=0)
    begun, gate = gated(worker)
    worker.task("write")(write)
    with running(worker):
        wait_for(conn, enqueue(conn, "write"), "completed")
        enqueue(conn, "wait")
        assert begun.wait(PATIENCE)
    # What still runs keeps its own until it ends.
    wait_until(lambda: len(sessions(conn)) == 1)
    gate.set()
    wait_until(lambda: not sessions(conn))


# When no transaction can be had


def test_a_handler_that_no_connection_can_be_had_for_has_not_failed(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = quick(dsn)
    worker.task("write")(write)
    worker.task("noop")(lambda task: None)
    connect = calls.connect
    away = Event()

    def fragile(dsn: str, **options: Any) -> calls.Connection:
        if away.is_set():
            raise psycopg.OperationalError("no more connections")
        return connect(dsn, **options)

    monkeypatch.setattr(calls, "connect", fragile)
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")
        away.set()
        task_id = enqueue(conn, "write", max_attempts=1)
        wait_until(lambda: row(conn, task_id).due_in > timedelta(seconds=0.2))
        left = row(conn, task_id)
        assert (left.status, left.attempt, left.last_error) == ("queued", 0, None)
        away.clear()
        assert wait_for(conn, task_id, "completed").attempt == 1


def test_a_handler_whose_session_had_ended_before_it_began_has_not_failed(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)
    worker.task("write")(write)
    with running(worker):
        wait_for(conn, enqueue(conn, "write"), "completed")
        wait_until(lambda: len(sessions(conn)) == 4)
        end_sessions(conn)
        done = wait_for(conn, enqueue(conn, "write", max_attempts=1), "completed", "failed")
    assert (done.status, done.attempt, done.last_error) == ("completed", 1, None)


def test_a_handler_whose_task_may_not_be_held_has_not_failed(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn)
    worker.task("write")(write)
    conn.execute("alter function pgsched.hold_task rename to gone")
    task_id = enqueue(conn, "write", max_attempts=1)
    with running(worker):
        wait_until(lambda: row(conn, task_id).due_in > timedelta(seconds=0.2))
        assert row(conn, task_id)[:3] == ("queued", 0, None)
        assert f"no transaction: task={task_id}" in caplog.text
        conn.execute("alter function pgsched.gone rename to hold_task")
        assert wait_for(conn, task_id, "completed").attempt == 1


def test_what_waits_for_a_connection_holds_up_no_other_task(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, queues=["writes", "others"], connections=1)
    gate = Event()

    @worker.task("write")
    def slow(task: Task, conn: Connection) -> None:
        gate.wait(PATIENCE)
        write(task, conn)

    worker.task("other")(lambda task: None)
    for _ in range(50):
        enqueue(conn, "write", queue="writes")
    others = [enqueue(conn, "other", queue="others") for _ in range(300)]
    with running(worker):
        wait_until(lambda: count(conn, "completed") == len(others))
        gate.set()
        wait_until(lambda: count(conn, "completed") == len(others) + 50)


def test_a_drain_does_what_waits_for_a_connection(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, connections=1)

    @worker.task("write")
    def slow(task: Task, conn: Connection) -> None:
        conn.execute("select pg_sleep(0.6)")
        write(task, conn)

    for _ in range(4):
        enqueue(conn, "write")
    assert worker.run(drain=True) == 0
    assert count(conn, "completed") == 4
