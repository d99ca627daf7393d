"""Outcomes are reported over a connection of their own: whatever holds that up, or breaks it, stops
no claim and no lease from being extended, and loses no outcome."""

from threading import Event
from typing import Any

import psycopg
import pytest
from workers import (
    PATIENCE,
    end_sessions,
    quick,
    row,
    running,
    sessions,
    wait_for,
    wait_for_extension,
    wait_until,
)

from pgsched import Task, Worker, calls, enqueue
from pgsched.calls import Connection

REPORTER = "pgsched % reporter"


@pytest.fixture
def worker(dsn: str) -> Worker:
    """With short leases, and one handler, which does nothing."""
    worker = quick(dsn, lease=1)
    worker.task("noop")(lambda task: None)
    return worker


def held_up(monkeypatch: pytest.MonkeyPatch, *, answered: bool) -> tuple[Event, Event]:
    """Completions wait, before or after the database has done them; whether one does, and its
    end."""
    waits, end = Event(), Event()
    complete_tasks = calls.complete_tasks

    def slow(*args: Any) -> list[str]:
        answers = complete_tasks(*args) if answered else []
        waits.set()
        assert end.wait(PATIENCE)
        return answers or complete_tasks(*args)

    monkeypatch.setattr(calls, "complete_tasks", slow)
    return waits, end


def test_a_report_that_takes_long_holds_up_no_claim_and_no_lease(
    worker: Worker, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []
    worker.task("count")(lambda task: began.append(task.id))
    waits, end = held_up(monkeypatch, answered=False)
    first = enqueue(conn, "noop")
    with running(worker):
        assert waits.wait(PATIENCE)
        others = [enqueue(conn, "count") for _ in range(worker.concurrency - 1)]
        wait_until(lambda: sorted(began) == others)
        wait_for_extension(conn, first)
        wait_for_extension(conn, others[-1])
        # What cannot be reported keeps its slot.
        behind = enqueue(conn, "count")
        wait_for_extension(conn, first)
        assert row(conn, behind).status == "queued"
        end.set()
        for task_id in (first, *others, behind):
            assert wait_for(conn, task_id, "completed").attempt == 1
    assert began == [*others, behind]


def test_an_extension_that_comes_after_the_report_and_before_its_answer_loses_no_claim(
    worker: Worker,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "pgsched")
    lost: list[str] = []
    extend_tasks = calls.extend_tasks

    def watched(*args: Any) -> list[str]:
        answers = extend_tasks(*args)
        lost.extend(each for each in answers if each == "lost")
        return answers

    monkeypatch.setattr(calls, "extend_tasks", watched)
    waits, end = held_up(monkeypatch, answered=True)
    task_id = enqueue(conn, "noop")
    ended = f"ended: task={task_id} task_type=noop attempt=1 outcome=completed"
    with running(worker):
        assert waits.wait(PATIENCE)
        assert row(conn, task_id).status == "completed"
        wait_until(lambda: len(lost) >= 2)
        end.set()
        wait_until(lambda: ended in caplog.messages)
    assert [each for each in caplog.messages if each.startswith(("ended", "claim lost"))] == [ended]


def test_an_extension_that_comes_after_a_transaction_since_begun_loses_no_claim(
    dsn: str,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "pgsched")
    worker = quick(dsn, lease=1, connections=1)
    gate = Event()
    worker.task("write")(lambda task, connection: gate.wait(PATIENCE))
    first, second = enqueue(conn, "write"), enqueue(conn, "write")
    answers: list[str] = []
    extend_tasks = calls.extend_tasks

    def late(connection: Connection, claims: Any, lease: Any) -> list[str]:
        # The second waits for a connection now, and is done with when the database is asked.
        if [each.id for each in claims] == [second] and not gate.is_set():
            gate.set()
            wait_for(conn, second, "completed")
            answers.extend(extend_tasks(connection, claims, lease))
            return answers
        return extend_tasks(connection, claims, lease)

    monkeypatch.setattr(calls, "extend_tasks", late)
    with running(worker):
        for task_id in (first, second):
            ended = f"ended: task={task_id} task_type=write attempt=1 outcome=completed"
            wait_until(lambda ended=ended: ended in caplog.messages)  # type: ignore[misc]
    assert answers == ["lost"]
    assert not [each for each in caplog.messages if each.startswith("claim lost")]


def test_a_connection_that_broke_is_made_anew(worker: Worker, conn: psycopg.Connection) -> None:
    with running(worker):
        for _ in range(3):
            assert wait_for(conn, enqueue(conn, "noop"), "completed").attempt == 1
            wait_until(lambda: len(sessions(conn, REPORTER)) == 1)
            end_sessions(conn, REPORTER)
    wait_until(lambda: sessions(conn) == [])


def test_a_connection_that_cannot_be_had_is_waited_for(
    worker: Worker,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[str] = []
    connect = calls.connect

    def refused(dsn: str, *, application_name: str = "pgsched") -> Connection:
        if application_name.endswith(" reporter"):
            tries.append(application_name)
            if len(tries) < 4:
                raise psycopg.OperationalError("too many connections")
        return connect(dsn, application_name=application_name)

    monkeypatch.setattr(calls, "connect", refused)
    began: list[int] = []
    worker.task("count")(lambda task: began.append(task.id))
    task_id = enqueue(conn, "count")
    with running(worker):
        wait_until(lambda: tries)
        main = sessions(conn)
        assert wait_for(conn, task_id, "completed").attempt == 1
        # Nothing else was given up for it.
        assert set(main) <= set(sessions(conn))
    assert (began, len(tries)) == ([task_id], 4)
    assert len([each for each in caplog.messages if each.startswith("report: error=")]) == 3
    wait_until(lambda: sessions(conn) == [], 5)


def test_what_was_told_before_the_connection_broke_is_not_told_again(
    worker: Worker, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    complete_tasks, fail_tasks = calls.complete_tasks, calls.fail_tasks

    all_ended = Event()

    def complete(connection: Connection, batch: Any) -> list[str]:
        assert all_ended.wait(PATIENCE)
        told.extend(each.claim.id for each in batch)
        return complete_tasks(connection, batch)

    def broken(connection: Connection, batch: Any) -> list[str]:
        monkeypatch.setattr(calls, "fail_tasks", fail_tasks)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(calls, "complete_tasks", complete)
    monkeypatch.setattr(calls, "fail_tasks", broken)

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise ValueError("no")

    ends = Event()
    worker.task("last")(lambda task: ends.set())
    # While the first is being told, the others end: the next report has them all.
    first = enqueue(conn, "noop")
    with running(worker):
        wait_for(conn, first, "processing")
        failed = [enqueue(conn, "fail", max_attempts=1) for _ in range(3)]
        completed = [enqueue(conn, "noop") for _ in range(3)]
        last = enqueue(conn, "last")
        assert ends.wait(PATIENCE)
        all_ended.set()
        for task_id in (first, *completed, last):
            assert wait_for(conn, task_id, "completed").attempt == 1
        for task_id in failed:
            assert wait_for(conn, task_id, "failed").attempt == 1
    assert sorted(told) == [first, *completed, last]
