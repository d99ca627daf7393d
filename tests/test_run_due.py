"""Running due tasks here and now, in the caller's transaction, and until nothing is due."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import rows
from workers import (
    PATIENCE,
    WorkerProcess,
    count,
    make_effects,
    quick,
    row,
    run_to_end,
    wait_until,
    write,
    written,
)

from pgsched import Fail, InvalidArgument, Retry, SchemaError, Snooze, Task, Worker, calls, enqueue
from pgsched.embedded import Server

Connection = psycopg.Connection[Any]
Connect = Callable[..., psycopg.Connection]


@pytest.fixture
def worker() -> Worker:
    """A worker without a database, with a handler of each kind."""
    worker = Worker()

    @worker.task("plain")
    def plain(task: Task) -> object:
        return task.payload

    @worker.task("async")
    async def coroutine(task: Task) -> object:
        await asyncio.sleep(0)
        return task.payload

    @worker.task("transaction")
    def transaction(task: Task, conn: Connection) -> object:
        write(task, conn)
        if task.payload == "fail":
            raise Fail("as told")
        return task.payload

    return worker


@pytest.fixture(autouse=True)
def effects(conn: psycopg.Connection) -> None:
    make_effects(conn)


KINDS = ("plain", "async", "transaction")

CONNECTIONS: dict[str, dict[str, Any]] = {
    "autocommit": {"autocommit": True},
    "in a transaction": {"autocommit": False},
    "dict_row": {"autocommit": False, "row_factory": rows.dict_row},
    "scalar_row": {"autocommit": True, "row_factory": rows.scalar_row},
    "ClientCursor": {"autocommit": False, "cursor_factory": psycopg.ClientCursor},
    "RawCursor": {"autocommit": False, "cursor_factory": psycopg.RawCursor},
    "always prepared": {"autocommit": False, "prepare_threshold": 0},
}


@pytest.mark.parametrize("options", CONNECTIONS.values(), ids=CONNECTIONS)
def test_handlers_of_every_kind_run_over_any_connection(
    conn: psycopg.Connection, connect: Connect, worker: Worker, options: dict[str, Any]
) -> None:
    session = connect(**options)
    factories = session.cursor_factory, session.row_factory
    # The application's handler gets the caller's connection, and has to know it.
    kinds = [kind for kind in KINDS if kind != "transaction" or "RawCursor" not in str(options)]
    ids = [enqueue(session, kind, kind) for kind in kinds]
    assert worker.run_due(session) == [(task_id, "completed") for task_id in ids]
    assert (session.cursor_factory, session.row_factory) == factories
    if not options["autocommit"]:
        assert count(conn, "completed") == 0
        session.commit()
    assert [row(conn, task_id).result for task_id in ids] == kinds
    assert written(conn) == ids[2:]


def test_a_test_that_is_a_coroutine_may_call_it(conn: psycopg.Connection, worker: Worker) -> None:
    ids = [enqueue(conn, kind) for kind in KINDS]

    async def test() -> list[tuple[int, str]]:
        return worker.run_due(conn)

    assert asyncio.run(test()) == [(task_id, "completed") for task_id in ids]


def test_everything_is_rolled_back_with_the_callers_transaction(
    conn: psycopg.Connection, connect: Connect, worker: Worker
) -> None:
    session = connect(autocommit=False)
    before = [enqueue(conn, kind) for kind in KINDS]
    enqueue(session, "transaction", "fail")
    assert [how for _, how in worker.run_due(session)] == [*3 * ["completed"], "failed"]
    assert written(session) == before[2:]
    session.rollback()
    assert [row(conn, task_id)[:2] for task_id in before] == 3 * [("queued", 0)]
    assert count(conn, "completed") + count(conn, "failed") == 0
    assert written(conn) == []
    # Nothing of it is left: it can be done again.
    assert len(worker.run_due(conn)) == 3


ENDS: dict[str, tuple[BaseException | None, str]] = {
    "completed": (None, "completed"),
    "retried": (ValueError("no"), "queued"),
    "retried later": (Retry(timedelta(hours=1)), "queued"),
    "failed": (Fail("no"), "failed"),
    "released": (Snooze(timedelta(hours=1)), "queued"),
    "exit": (SystemExit(1), "queued"),
}


def test_an_attempt_that_failed_is_told_and_not_raised(
    conn: psycopg.Connection, connect: Connect
) -> None:
    conn.execute("select pgsched.configure_queue('default', p_retry_delay => '1 hour')")
    worker = Worker()

    def end(task: Task) -> None:
        if error := ENDS[task.payload][0]:
            raise error

    async def coroutine(task: Task) -> None:
        end(task)

    def transaction(task: Task, conn: Connection) -> None:
        write(task, conn)
        end(task)

    worker.task("plain")(end)
    worker.task("async")(coroutine)
    worker.task("transaction")(transaction)
    session = connect(autocommit=False)
    ids = {(kind, name): enqueue(session, kind, name) for kind in KINDS for name in ENDS}
    unknown = enqueue(session, "unknown")
    ended = worker.run_due(session)
    session.commit()
    words = {"retried later": "retried", "exit": "retried"}
    assert ended == [
        *((task_id, words.get(name, name)) for (_, name), task_id in ids.items()),
        (unknown, "released"),
    ]
    for (_, name), task_id in ids.items():
        error, status = ENDS[name]
        left = row(conn, task_id)
        assert left.status == status
        assert left.attempt == (0 if name == "released" else 1)
        assert (left.last_error or "").startswith(
            type(error).__name__ if error and name != "released" else ""
        )
    assert row(conn, unknown)[:2] == ("queued", 0)
    assert written(conn) == [ids["transaction", "completed"]]


@pytest.mark.parametrize("autocommit", [False, True])
def test_of_a_transaction_that_failed_nothing_stays_and_the_callers_goes_on(
    connect: Connect, autocommit: bool
) -> None:
    session = connect(autocommit=autocommit)
    worker = Worker()

    @worker.task("mess")
    def mess(task: Task, conn: Connection) -> object:
        write(task, conn)
        if task.payload == "rollback":
            raise psycopg.Rollback
        try:
            conn.execute("select 1 / 0")
        except psycopg.Error:
            if task.payload == "raise":
                raise
        return None

    @worker.task("return")
    def give(task: Task, conn: Connection) -> object:
        write(task, conn)
        return object()

    worker.task("write")(write)
    first = enqueue(session, "write")
    bad = [enqueue(session, "mess", how) for how in ("rollback", "raise", "swallow")]
    bad.append(enqueue(session, "return"))
    last = enqueue(session, "write")
    session.execute("update pgsched.scheduled_tasks set max_attempts = 1")
    ended = worker.run_due(session)
    assert ended == [
        (first, "completed"),
        *((task_id, "failed") for task_id in bad),
        (last, "completed"),
    ]
    assert [(row(session, task_id).last_error or "").partition(":")[0] for task_id in bad] == [
        "Rollback",
        "DivisionByZero",
        "InFailedSqlTransaction",
        "InvalidArgument",
    ]
    assert written(session) == [first, last]


def test_tasks_that_handlers_add_run_too(conn: psycopg.Connection) -> None:
    worker = Worker(queues=["first", "second"])

    @worker.task("count")
    def countdown(task: Task, conn: Connection) -> None:
        if task.payload:
            enqueue(conn, "count", task.payload - 1, queue="second")

    enqueue(conn, "count", 3, queue="first")
    assert [how for _, how in worker.run_due(conn)] == 4 * ["completed"]
    assert count(conn, "completed") == 4


def test_no_more_run_than_told(conn: psycopg.Connection, worker: Worker) -> None:
    ids = [enqueue(conn, "plain") for _ in range(5)]
    assert worker.run_due(conn, limit=0) == []
    assert worker.run_due(conn, limit=2) == [(task_id, "completed") for task_id in ids[:2]]
    assert [row(conn, task_id)[:2] for task_id in ids[2:]] == 3 * [("queued", 0)]
    assert [task_id for task_id, _ in worker.run_due(conn, limit=10)] == ids[2:]
    assert worker.run_due(conn) == []


def test_only_what_is_due_in_the_workers_queues_runs(conn: psycopg.Connection) -> None:
    worker = Worker(queues={"mine": 2, "mine too": 1})
    worker.task("noop")(lambda task: None)
    enqueue(conn, "noop", queue="other")
    enqueue(conn, "noop", queue="mine", delay=timedelta(hours=1))
    due = [enqueue(conn, "noop", queue=queue) for queue in ("mine too", "mine")]
    assert sorted(worker.run_due(conn)) == [(task_id, "completed") for task_id in due]


def test_a_failed_attempt_that_is_due_at_once_is_tried_again(conn: psycopg.Connection) -> None:
    worker = Worker()

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise ValueError(task.attempt)

    task_id = enqueue(conn, "fail", max_attempts=3)
    assert [how for _, how in worker.run_due(conn)] == ["retried", "retried", "failed"]
    assert row(conn, task_id).last_error == "ValueError: 3"


def test_without_the_schema_it_says_what_to_run(server: Server, worker: Worker) -> None:
    with psycopg.connect(server.dsn()) as conn, pytest.raises(SchemaError, match="pgsched migrate"):
        worker.run_due(conn)


def test_options_are_checked_here_too(conn: psycopg.Connection, worker: Worker) -> None:
    worker.queues = []
    with pytest.raises(InvalidArgument, match="queues"):
        worker.run_due(conn)


# Until nothing is due


def test_a_worker_that_drains_ends_by_itself(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, queues=["default", "other"], poll_interval=600)
    worker.task("noop")(lambda task: None)
    ids = [enqueue(conn, "noop", queue=queue) for queue in 30 * ["default", "other"]]
    later = enqueue(conn, "noop", delay=timedelta(hours=1))
    assert run_to_end(worker, drain=True) == 0
    assert {row(conn, task_id).status for task_id in ids} == {"completed"}
    assert row(conn, later)[:2] == ("queued", 0)
    assert conn.execute("select name from pgsched.workers").fetchall() == []


def test_with_nothing_to_do_it_ends_at_once(dsn: str) -> None:
    worker = quick(dsn, poll_interval=600)
    for _ in range(2):
        assert run_to_end(worker, drain=True) == 0


def test_what_failed_is_left_to_its_backoff(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute("select pgsched.configure_queue('default', p_retry_delay => '1 hour')")
    worker = quick(dsn)

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise ValueError("no")

    ids = [enqueue(conn, "fail") for _ in range(20)]
    assert run_to_end(worker, drain=True) == 0
    assert {row(conn, task_id)[:3] for task_id in ids} == {("queued", 1, "ValueError: no")}


def test_what_the_last_handlers_added_is_done_too(dsn: str, conn: psycopg.Connection) -> None:
    # A poll of each queue finds nothing while the handler of the other runs.
    worker = quick(dsn, queues=["first", "second"], poll_interval=600)

    @worker.task("count")
    def countdown(task: Task) -> None:
        with psycopg.connect(dsn, autocommit=True) as session:
            session.execute("select pg_sleep(0.1)")
            if task.payload:
                queue = "second" if task.queue == "first" else "first"
                enqueue(session, "count", task.payload - 1, queue=queue)

    enqueue(conn, "count", 3, queue="first")
    assert run_to_end(worker, drain=True) == 0
    assert count(conn, "completed") == 4


def test_what_failed_and_is_due_at_once_is_tried_again(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, poll_interval=600)

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise ValueError("no")

    task_id = enqueue(conn, "fail", max_attempts=3)
    assert run_to_end(worker, drain=True) == 0
    assert row(conn, task_id)[:2] == ("failed", 3)


def test_a_claim_that_failed_is_no_sign_that_nothing_is_due(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    failures = [psycopg.errors.LockNotAvailable(), psycopg.OperationalError()]
    claim_task = calls.claim_task

    def fragile(*args: Any) -> list[calls.Claim]:
        if failures:
            raise failures.pop(0)
        return claim_task(*args)

    monkeypatch.setattr(calls, "claim_task", fragile)
    task_id = enqueue(conn, "noop")
    assert run_to_end(worker, drain=True) == 0
    assert failures == []
    assert row(conn, task_id).status == "completed"


def test_the_command_may_drain(dsn: str, conn: psycopg.Connection, tmp_path: Path) -> None:
    app = """
from pgsched import Worker
worker = Worker()
@worker.task("plain")
def plain(task):
    return "well"
"""
    ids = [enqueue(conn, "plain") for _ in range(3)]
    with WorkerProcess(tmp_path, app, "--dsn", dsn, "--drain") as worker:
        assert worker.process.wait(PATIENCE) == 0
        assert "stopped: worker" in worker.log
    assert [row(conn, task_id).result for task_id in ids] == 3 * ["well"]
    wait_until(lambda: conn.execute("select name from pgsched.workers").fetchall() == [])
