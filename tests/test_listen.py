"""Workers that hear of new tasks: these poll so seldom that only a NOTIFY can be what woke them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import psycopg
import pytest
from workers import (
    LISTENERS,
    PATIENCE,
    count,
    end_sessions,
    quick,
    running,
    sessions,
    wait_for,
    wait_until,
)

from pgsched import Worker, calls, enqueue, loop

Connect = Callable[..., psycopg.Connection]

SELDOM = 3600.0


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers say that they listen when they have been idle for a fifth of a second."""
    monkeypatch.setattr(loop, "IDLE_SECONDS", 0.2)


def idle_worker(dsn: str, **options: Any) -> Worker:
    """A worker that polls about once an hour, with a handler for `noop`."""
    worker = quick(dsn, **{"poll_interval": SELDOM, **options})
    worker.task("noop")(lambda task: None)
    return worker


def listening(conn: psycopg.Connection) -> list[str]:
    """The queues that somebody listens for."""
    rows = conn.execute("select queue from pgsched.listeners order by queue")
    return [queue for (queue,) in rows]


@contextmanager
def heard(worker: Worker, conn: psycopg.Connection) -> Iterator[None]:
    """The worker at work, from the moment that producers know of it."""
    with running(worker):
        wait_until(lambda: listening(conn))
        yield


def test_an_idle_worker_begins_at_once(dsn: str, conn: psycopg.Connection) -> None:
    with heard(idle_worker(dsn, queues=["default", "other"]), conn):
        assert listening(conn) == ["default", "other"]
        for queue in ("default", "other", "default"):
            wait_for(conn, enqueue(conn, "noop", queue=queue), "completed")


def test_a_worker_that_stops_listens_no_more(dsn: str, conn: psycopg.Connection) -> None:
    with heard(idle_worker(dsn), conn):
        assert len(sessions(conn, LISTENERS)) == 1
    assert listening(conn) == []
    wait_until(lambda: not sessions(conn))


def test_a_busy_worker_says_that_it_does_not_listen(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BUSY_SECONDS", 0.3)
    monkeypatch.setattr(loop, "PREFETCH", 0)
    worker = idle_worker(dsn, concurrency=1)
    over = Event()

    @worker.task("again")
    def again(task: object) -> None:
        if not over.is_set():
            with psycopg.connect(dsn, autocommit=True) as session:
                enqueue(session, "again")

    with heard(worker, conn):
        for _ in range(3):
            enqueue(conn, "again")
        wait_until(lambda: not listening(conn))
        assert count(conn, "queued") > 0
        over.set()
        wait_until(lambda: listening(conn))
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_a_worker_whose_listening_session_ended_listens_again(
    dsn: str, conn: psycopg.Connection
) -> None:
    with heard(idle_worker(dsn), conn):
        for _ in range(2):
            [before] = sessions(conn, LISTENERS)
            assert end_sessions(conn, LISTENERS) == 1
            wait_until(lambda: set(sessions(conn, LISTENERS)) - {before})  # noqa: B023
            wait_until(lambda: listening(conn))
            wait_for(conn, enqueue(conn, "noop"), "completed")


def test_what_was_enqueued_while_it_did_not_listen_is_found(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Event()
    listen = calls.listen

    def fragile(*args: Any) -> str:
        if broken.is_set():
            raise psycopg.OperationalError("no")
        return listen(*args)

    monkeypatch.setattr(calls, "listen", fragile)
    with heard(idle_worker(dsn, queues=["default", "other"]), conn):
        broken.set()
        end_sessions(conn, LISTENERS)
        wait_until(lambda: not listening(conn))
        ids = [enqueue(conn, "noop", queue=queue) for queue in ("default", "other")]
        broken.clear()
        for task_id in ids:
            wait_for(conn, task_id, "completed")


def test_all_its_sessions_may_end_and_it_hears_again(dsn: str, conn: psycopg.Connection) -> None:
    with heard(idle_worker(dsn), conn):
        wait_until(lambda: len(sessions(conn)) == 3)
        end_sessions(conn)
        task_id = enqueue(conn, "noop")
        wait_until(lambda: len(sessions(conn)) == 3)
        wait_for(conn, task_id, "completed")
        wait_until(lambda: listening(conn))
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_what_is_enqueued_just_before_it_says_that_it_listens_is_found(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[int] = []
    register = calls.register_listener

    def late(session: calls.Connection, worker_id: int, queues: list[str]) -> None:
        ids.extend(enqueue(conn, "noop", queue=queue) for queue in queues)
        register(session, worker_id, queues)

    monkeypatch.setattr(calls, "register_listener", late)
    with heard(idle_worker(dsn, queues=["default", "other"]), conn):
        for task_id in ids[:2]:
            wait_for(conn, task_id, "completed")


def test_a_listener_that_was_forgotten_says_so_again(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REGISTER_SECONDS", 0.3)
    with heard(idle_worker(dsn), conn):
        # As another worker does when this one was not seen for long, and a day later.
        for table in ("listeners", "workers"):
            conn.execute(f"delete from pgsched.{table}".encode())
            wait_until(lambda: listening(conn))
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_a_queue_that_notifies_nobody_is_polled(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute("select pgsched.configure_queue('default', p_notify => false)")
    with heard(idle_worker(dsn, poll_interval=0.2), conn):
        for _ in range(3):
            wait_for(conn, enqueue(conn, "noop"), "completed")


def test_it_listens_where_it_is_told(dsn: str, conn: psycopg.Connection) -> None:
    worker = idle_worker(dsn, listen_dsn=f"{dsn}&application_name=ears")
    with heard(worker, conn):
        # There it shows its presence, too.
        wait_until(lambda: len(sessions(conn, "ears")) == 2)
        assert len(sessions(conn)) == 1
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_a_worker_that_cannot_listen_polls(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgsched")
    worker = idle_worker(dsn, poll_interval=0.1, listen_dsn="host=/nowhere")
    with running(worker):
        wait_until(lambda: caplog.text.count("no listener: error=") > 1)
        wait_for(conn, enqueue(conn, "noop"), "completed")
        assert listening(conn) == []


def test_behind_a_pooler_it_polls_and_says_so_once(
    dsn: str,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pgsched")
    monkeypatch.setattr(loop, "PRESENCE_SECONDS", 2 * PATIENCE)  # in vain
    # A pooler shows itself in that the session is another than the one that was connected to.
    monkeypatch.setattr(calls, "is_pooled", lambda conn: True)
    with running(idle_worker(dsn, poll_interval=0.1)):
        for _ in range(3):
            wait_for(conn, enqueue(conn, "noop"), "completed")
        wait_until(lambda: not sessions(conn, LISTENERS))
        assert listening(conn) == []
    for one in ("polling only", "recovery by leases only"):
        assert sum(one in message for message in caplog.messages) == 1


def test_a_direct_connection_is_known_from_a_pooled_one(dsn: str) -> None:
    with calls.connect(dsn, application_name="test") as conn:
        assert not calls.is_pooled(conn)


def test_a_child_of_a_handler_does_not_keep_it_listening(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = idle_worker(dsn)
    children: list[int] = []

    @worker.task("fork")
    def fork(task: object) -> None:
        if child := os.fork():
            children.append(child)
        else:
            while True:
                signal.pause()

    with heard(worker, conn):
        wait_for(conn, enqueue(conn, "fork"), "completed")
    try:
        wait_until(lambda: not sessions(conn), PATIENCE)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
