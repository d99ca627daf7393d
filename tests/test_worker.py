"""The worker: what it runs, what becomes of it, and what it withstands."""

import asyncio
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Event, Thread
from typing import Any

import psycopg
import pytest
from workers import (
    CANCEL,
    PATIENCE,
    REAP,
    count,
    install,
    quick,
    row,
    run_to_end,
    running,
    take_away,
    wait_for,
    wait_for_delay,
    wait_for_extension,
    wait_until,
)

from pgsched import (
    Fail,
    InvalidArgument,
    Retry,
    Snooze,
    Task,
    Worker,
    calls,
    enqueue,
    handlers,
)
from pgsched.embedded import Server
from pgsched.transactions import Transactions

Connect = Callable[..., psycopg.Connection]
Plain = Callable[[Task], Any]
Kind = Callable[[Plain], Callable[[Task], Any]]


def as_plain(function: Plain) -> Plain:
    return function


def as_async(function: Plain) -> Plain:
    async def handler(task: Task) -> Any:
        return function(task)

    return handler


kinds = pytest.mark.parametrize("kind", [as_plain, as_async], ids=["plain", "async"])


# What handlers return and raise


@kinds
def test_a_result_is_stored(dsn: str, conn: psycopg.Connection, kind: Kind) -> None:
    worker = quick(dsn)
    seen: list[Task] = []

    def double(task: Task) -> Any:
        seen.append(task)
        return {"doubled": task.payload["n"] * 2}

    worker.task("double")(kind(double))
    worker.task("nothing")(kind(lambda task: None))
    task_id = enqueue(conn, "double", {"n": 21}, priority=3, max_attempts=7)
    none_id = enqueue(conn, "nothing")
    with running(worker):
        done = wait_for(conn, task_id, "completed")
        assert (done.result, done.attempt, done.last_error) == ({"doubled": 42}, 1, None)
        assert wait_for(conn, none_id, "completed").result is None
    [task] = seen
    assert (task.id, task.queue, task.task_type) == (task_id, "default", "double")
    assert (task.payload, task.priority, task.attempt, task.max_attempts) == ({"n": 21}, 3, 1, 7)
    assert task.run_at == task.created_at
    assert not task.cancelled.is_set()


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class UnreadableExit(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "ordinary": (lambda: ValueError("wrong"), "ValueError: wrong"),
    "silent": (ValueError, "ValueError"),
    "nul": (lambda: ValueError("a\0b"), "ValueError: a\ufffdb"),
    "surrogate": (lambda: ValueError("a\ud800b"), "ValueError: a?b"),
    "huge": (lambda: ValueError("x" * 50_000_000), "ValueError: xxxx"),
    "wide": (lambda: ValueError("\N{SNOWMAN}" * 9_000), "ValueError: \N{SNOWMAN}"),
    "unreadable": (Unreadable, "Unreadable"),
    "unreadable exit": (UnreadableExit, "UnreadableExit"),
    "exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "generator exit": (GeneratorExit, "GeneratorExit"),
    "cancelled": (asyncio.CancelledError, "CancelledError"),
}


@kinds
def test_whatever_a_handler_raises_is_recorded(
    dsn: str, conn: psycopg.Connection, kind: Kind
) -> None:
    worker = quick(dsn, concurrency=len(ERRORS))

    @worker.task("raise")
    @kind
    def fail(task: Task) -> None:
        raise ERRORS[task.payload][0]()

    together = Barrier(len(ERRORS))
    worker.task("meet")(lambda task: together.wait(PATIENCE))

    ids = {name: enqueue(conn, "raise", name, max_attempts=1) for name in ERRORS}
    with running(worker):
        for name, (_, text) in ERRORS.items():
            failed = wait_for(conn, ids[name], "failed")
            assert failed.last_error is not None
            assert failed.last_error.startswith(text), name
            assert len(failed.last_error.encode()) <= 8192
        # None of them took a slot with it.
        meeting = [enqueue(conn, "meet") for _ in ERRORS]
        assert {wait_for(conn, task_id, "completed").attempt for task_id in meeting} == {1}


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_an_error_is_recorded_whatever_the_encoding_of_the_database(
    server: Server, encoding: str
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        create = "create database encoded template template0 encoding '{}' locale 'C'"
        admin.execute(create.format(encoding).encode())
        dsn = server.dsn("encoded")
        install(server, dsn)
        worker = quick(dsn)

        @worker.task("fail")
        def fail(task: Task) -> None:
            raise ValueError(f"{task.payload} caf\u00e9 \N{SNOWMAN}")

        with psycopg.connect(dsn, autocommit=True, client_encoding="utf8") as conn:
            task_id = enqueue(conn, "fail", "no", max_attempts=1)
            with running(worker):
                error = wait_for(conn, task_id, "failed").last_error
        assert error is not None
        assert error.startswith("ValueError: no caf")
        admin.execute("drop database encoded with (force)")


def test_a_failed_attempt_is_retried_until_the_attempts_are_used_up(
    dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute("insert into pgsched.queues (name, retry_delay) values ('default', '0')")
    worker = quick(dsn)

    @worker.task("fail")
    def fail(task: Task) -> str:
        if task.attempt <= task.payload:
            raise ValueError(f"attempt {task.attempt}")
        return "well"

    recovering = enqueue(conn, "fail", 1, max_attempts=2)
    hopeless = enqueue(conn, "fail", 2, max_attempts=2)
    with running(worker):
        done = wait_for(conn, recovering, "completed", "failed")
        assert (done.status, done.attempt, done.result) == ("completed", 2, "well")
        assert done.last_error == "ValueError: attempt 1"
        done = wait_for(conn, hopeless, "completed", "failed")
        assert (done.status, done.attempt) == ("failed", 2)
        assert done.last_error == "ValueError: attempt 2"


@kinds
def test_retry_snooze_and_fail_say_more(dsn: str, conn: psycopg.Connection, kind: Kind) -> None:
    worker = quick(dsn)
    raised: dict[str, Exception] = {
        "retry": Retry(timedelta(hours=1), "later"),
        "retry by backoff": Retry(reason="again"),
        "snooze": Snooze(timedelta(hours=2)),
        "fail": Fail("hopeless"),
    }

    @worker.task("raise")
    @kind
    def tell(task: Task) -> None:
        raise raised[task.payload]

    ids = {name: enqueue(conn, "raise", name) for name in raised}
    conn.execute("insert into pgsched.queues (name, retry_delay) values ('default', '90 s')")
    with running(worker):
        failed = wait_for(conn, ids["fail"], "failed")
        assert (failed.attempt, failed.last_error) == (1, "Fail: hopeless")

        wait_until(lambda: row(conn, ids["retry"]).last_error)
        retried = row(conn, ids["retry"])
        assert (retried.status, retried.attempt) == ("queued", 1)
        assert retried.last_error == "Retry: later"
        assert timedelta(minutes=59) < retried.due_in <= timedelta(hours=1)

        wait_until(lambda: row(conn, ids["retry by backoff"]).last_error)
        retried = row(conn, ids["retry by backoff"])
        assert timedelta(seconds=60) < retried.due_in <= timedelta(seconds=135)

        snoozed = wait_for_delay(conn, ids["snooze"])
        assert (snoozed.status, snoozed.attempt, snoozed.last_error) == ("queued", 0, None)
        assert timedelta(minutes=119) < snoozed.due_in <= timedelta(hours=2)


DELAYS: dict[str, Callable[[], Exception]] = {
    "long": lambda: Retry(timedelta(days=400)),
    "negative": lambda: Retry(timedelta(seconds=-1)),
    "longest": lambda: Retry(timedelta.max),
    "number": lambda: Retry(5),  # type: ignore[arg-type]
    "longest snooze": lambda: Snooze(timedelta.max),
    "number snooze": lambda: Snooze(5),  # type: ignore[arg-type]
}


def test_a_delay_that_cannot_be_fails_its_own_attempt_only(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, concurrency=1)

    @worker.task("raise")
    def tell(task: Task) -> None:
        raise DELAYS[task.payload]()

    worker.task("noop")(lambda task: None)
    bad = {name: enqueue(conn, "raise", name, max_attempts=1, priority=0) for name in DELAYS}
    good = enqueue(conn, "noop")
    with running(worker):
        for name, task_id in bad.items():
            assert wait_for(conn, task_id, "failed").last_error, name
        wait_for(conn, good, "completed")


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_result_that_cannot_be_stored_fails_and_the_rest_of_its_batch_completes(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: dict[str, tuple[Any, str]] = {
        "nul": ("a\0b", "result refused: .*unsupported Unicode escape"),
        "surrogate": ("\ud800", "result refused: .*"),
        "nan": ({"x": float("nan")}, "not representable as JSON: .*"),
        "object": (object(), "not representable as JSON: .*object"),
        "deep": (deep_list(100_000), "not representable as JSON: .*recursion"),
    }
    worker = quick(dsn, concurrency=2 * len(refused))
    together = Barrier(2 * len(refused))
    batches: list[int] = []
    complete_tasks = calls.complete_tasks

    def watched(conn: calls.Connection, batch: Sequence[calls.Outcome]) -> list[str]:
        batches.append(len(batch))
        return complete_tasks(conn, batch)

    monkeypatch.setattr(calls, "complete_tasks", watched)

    @worker.task("return")
    def give(task: Task) -> Any:
        together.wait(PATIENCE)
        return refused[task.payload][0] if task.payload else "good"

    good = [enqueue(conn, "return", "") for _ in refused]
    bad = {name: enqueue(conn, "return", name, max_attempts=1) for name in refused}
    with running(worker):
        for task_id in good:
            assert wait_for(conn, task_id, "completed", "failed").result == "good"
        for name, (_, reason) in refused.items():
            failed = wait_for(conn, bad[name], "completed", "failed")
            assert failed.status == "failed", name
            assert re.search(reason, failed.last_error or "")
    assert max(batches) > 1


def test_a_result_too_large_for_the_database_fails_its_own_task_only(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)
    worker.task("huge")(lambda task: 64_000_000 * "x")
    worker.task("noop")(lambda task: None)
    huge = enqueue(conn, "huge", max_attempts=1, priority=0)
    noop = enqueue(conn, "noop")
    with running(worker):
        failed = wait_for(conn, huge, "failed", "completed")
        assert failed.status == "failed"
        assert re.search("result .* bytes", failed.last_error or "")
        wait_for(conn, noop, "completed")


def test_a_payload_that_python_cannot_read_fails_its_own_task_only(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    # One statement, so that one claim gets all of them.
    rows = conn.execute(
        """
        select pgsched.enqueue_task('noop', payload::jsonb, p_max_attempts => 1)
          from unnest(array['{}', %s, '{}']) as payload
        """,
        ['{"n": ' + 5_000 * "9" + "}"],
    )
    first, unreadable, last = (task_id for (task_id,) in rows)
    with running(worker):
        error = wait_for(conn, unreadable, "failed").last_error
        assert error is not None
        assert error.startswith("InvalidArgument: Python cannot read the payload: ")
        for task_id in (first, last):
            wait_for(conn, task_id, "completed")


def test_a_task_of_unknown_type_is_left_to_others_and_logged_once(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn)
    worker.task("known")(lambda task: None)
    unknown = [enqueue(conn, "unknown") for _ in range(3)]
    known = enqueue(conn, "known")
    with running(worker):
        wait_for(conn, known, "completed")
        for task_id in unknown:
            left = wait_for_delay(conn, task_id)
            assert (left.status, left.attempt, left.last_error) == ("queued", 0, None)
            assert timedelta(seconds=10) < left.due_in <= timedelta(seconds=45)
    assert sum("task_type=unknown" in record.getMessage() for record in caplog.records) == 1


# Leases, lost claims, cancelling


def test_a_lease_lasts_as_long_as_its_handler(
    dsn: str, conn: psycopg.Connection, reaping_often: None
) -> None:
    worker = quick(dsn, lease=1)
    runs: Counter[str] = Counter()
    seconds = 3.2

    @worker.task("plain")
    def plain(task: Task) -> None:
        runs["plain"] += 1
        time.sleep(seconds)

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        runs["async"] += 1
        await asyncio.sleep(seconds)

    @worker.task("blocking the loop")
    async def blocking(task: Task) -> None:
        runs["blocking the loop"] += 1
        time.sleep(seconds)

    ids = [enqueue(conn, name) for name in ("plain", "async", "blocking the loop")]
    with running(worker):
        wait_until(lambda: len(runs) == 3)
        while count(conn, "completed") < 3:
            assert conn.execute(REAP).fetchall() == []
            time.sleep(0.05)
        assert [row(conn, task_id).attempt for task_id in ids] == [1, 1, 1]
    assert set(runs.values()) == {1}


def test_a_lost_claim_stops_its_handler_and_its_outcome_changes_nothing(
    dsn: str, conn: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn, lease=1, concurrency=3)
    ended: Counter[str] = Counter()

    @worker.task("result")
    def give(task: Task) -> str:
        ended["result"] += task.cancelled.wait(PATIENCE)
        return "too late"

    @worker.task("error")
    def fail(task: Task) -> None:
        ended["error"] += task.cancelled.wait(PATIENCE)
        raise ValueError("too late")

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            ended["async"] += task.cancelled.is_set()
            raise

    together = Barrier(3)
    worker.task("meet")(lambda task: together.wait(PATIENCE))
    ids = [enqueue(conn, name) for name in ("result", "error", "async")]
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        for task_id in ids:
            take_away(connect(), task_id)
        wait_until(lambda: ended.total() == 3)
        # All slots are free again.
        meeting = [enqueue(conn, "meet") for _ in range(3)]
        for task_id in meeting:
            wait_for(conn, task_id, "completed")
        for task_id in ids:
            theirs = row(conn, task_id)
            assert (theirs.status, theirs.claimed_by, theirs.attempt) == ("processing", "other", 2)
    assert sum(text.startswith("claim lost") for text in caplog.messages) == 3


def test_a_running_task_learns_that_a_cancel_was_requested(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, lease=1)

    @worker.task("plain")
    def plain(task: Task) -> None:
        assert task.cancelled.wait(PATIENCE)
        raise ValueError("stopped")

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        await asyncio.sleep(PATIENCE)

    @worker.task("finishes")
    def finish(task: Task) -> str:
        assert task.cancelled.wait(PATIENCE)
        return "all the same"

    ids = {name: enqueue(conn, name) for name in ("plain", "async", "finishes")}
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        for task_id in ids.values():
            conn.execute(CANCEL, [task_id])
        assert wait_for(conn, ids["plain"], "cancelled").last_error == "ValueError: stopped"
        wait_for(conn, ids["async"], "cancelled")
        assert wait_for(conn, ids["finishes"], "completed").result == "all the same"


def test_a_coroutine_cancelled_before_it_began_gives_its_slot_back(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = quick(dsn, lease=1, concurrency=2)
    gate = Event()
    answers: list[str] = []
    extend_tasks = calls.extend_tasks

    def watched(*args: Any) -> list[str]:
        outcomes = extend_tasks(*args)
        answers.extend(outcomes)
        return outcomes

    monkeypatch.setattr(calls, "extend_tasks", watched)

    @worker.task("block")
    async def block(task: Task) -> None:
        gate.wait(PATIENCE)

    together = Barrier(2)
    worker.task("meet")(lambda task: together.wait(PATIENCE))
    enqueue(conn, "block", priority=0)
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 1)
        behind = enqueue(conn, "block")
        wait_for(conn, behind, "processing")
        conn.execute(CANCEL, [behind])
        wait_until(lambda: "cancel_requested" in answers)
        gate.set()
        wait_for(conn, behind, "cancelled", "completed")
        for task_id in [enqueue(conn, "meet") for _ in range(2)]:
            wait_for(conn, task_id, "completed")


def test_an_exit_in_a_task_of_a_coroutine_ends_that_handler_only(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)

    @worker.task("exit")
    async def exits(task: Task) -> None:
        async def leave() -> None:
            raise SystemExit(5)

        await asyncio.create_task(leave())

    @worker.task("sleep")
    async def sleep(task: Task) -> None:
        await asyncio.sleep(0.01)

    exiting = enqueue(conn, "exit", max_attempts=1)
    with running(worker):
        assert wait_for(conn, exiting, "failed").last_error == "SystemExit: 5"
        wait_for(conn, enqueue(conn, "sleep"), "completed")


def test_coroutines_that_begin_from_two_threads_share_an_event_loop(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Thread] = []
    spawn = handlers.spawn

    def slow(target: Callable[[], None], name: str) -> Thread:
        time.sleep(0.1)
        threads.append(spawn(target, name))
        return threads[-1]

    async def handler(task: Task) -> None:
        pass

    monkeypatch.setattr(handlers, "spawn", slow)
    ended: SimpleQueue[calls.Outcome] = SimpleQueue()
    executor = handlers.Executor(
        {"async": handlers.Handler(handler)}, 2, Transactions("", "test", 1), ended.put
    )
    for _ in range(2):
        enqueue(conn, "async")
    claims = calls.claim_task(conn, "test", "default", timedelta(minutes=1), 2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(executor.start, ([claim] for claim in claims)))
    assert [ended.get(timeout=PATIENCE).kind for _ in claims] == 2 * ["completed"]
    executor.close()
    assert [thread.name for thread in threads] == ["pgsched-loop"]


def test_the_stale_task_of_another_worker_is_reaped_and_done(
    dsn: str, conn: psycopg.Connection, reaping_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    task_id = enqueue(conn, "noop")
    conn.execute("select from pgsched.claim_task('lost', p_lease => '1 s')")
    with running(worker):
        done = wait_for(conn, task_id, "completed")
    assert done.attempt == 2
    assert done.last_error is not None
    assert "worker lost was lost" in done.last_error
    assert f"reaped: task={task_id} status=queued" in caplog.messages


def test_a_failure_that_has_to_wait_for_a_lock_holds_up_no_lease(
    dsn: str, conn: psycopg.Connection, connect: Connect
) -> None:
    worker = quick(dsn, lease=1)
    gate, end = Event(), Event()

    @worker.task("fail")
    def fail(task: Task) -> None:
        gate.wait(PATIENCE)
        raise ValueError("held by another")

    worker.task("long")(lambda task: end.wait(PATIENCE))
    failing = enqueue(conn, "fail", max_attempts=1)
    long = enqueue(conn, "long")
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 2)
        other = connect()
        with other.transaction():
            lock = "select from pgsched.scheduled_tasks where id = %s for update"
            other.execute(lock, [failing])
            gate.set()
            for _ in range(4):  # more than one lease
                wait_for_extension(conn, long)
        end.set()
        wait_for(conn, failing, "failed")
        wait_for(conn, long, "completed")


# Settings


@pytest.mark.parametrize(
    "dsn",
    [
        "nonsense",
        "host=localhost password='s3cret",
        "postgresql://someone:s3cret@[::1/app",
        "postgresql://someone:s3cret%zz@localhost/app",
    ],
)
def test_a_malformed_dsn_is_refused_without_showing_it(dsn: str) -> None:
    for make in (partial(Worker, dsn), partial(Worker, listen_dsn=dsn)):
        with pytest.raises(InvalidArgument, match="dsn") as caught:
            make()
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_worker_does_not_show_the_password() -> None:
    dsn = "postgresql://someone:s3cret@localhost/app"
    worker = Worker(dsn, listen_dsn=dsn)
    assert "s3cret" not in repr(worker)


@pytest.mark.parametrize(
    "options",
    [
        {"queues": []},
        {"queues": ["twice", "twice"]},
        {"queues": "billing"},
        {"queues": [""]},
        {"queues": [64 * "q"]},
        {"queues": ["line\nbreak"]},
        {"queues": {}},
        {"queues": {"a": 1, "b": 0}},
        {"queues": {"a": 1001}},
        {"queues": {"a": -1}},
        {"queues": {"a": 1.5}},
        {"queues": {"a": "1"}},
        {"queues": {"a": None}},
        {"queues": {"": 1}},
        {"concurrency": 0},
        {"concurrency": 10_001},
        {"lease": 0.9},
        {"lease": 86_401},
        {"lease": float("nan")},
        {"poll_interval": 0},
        {"poll_interval": 3601},
        {"connections": 0},
        {"connections": 101},
        {"connections": 1.5},
        {"grace": -1},
        {"grace": float("inf")},
        {"metrics_port": -1},
        {"metrics_port": 65_536},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidArgument, match=name):
        Worker(**options)


def test_a_type_has_one_handler() -> None:
    worker = Worker()
    worker.task("type")(lambda task: None)
    with pytest.raises(InvalidArgument, match="'type' has a handler"):
        worker.task("type")(lambda task: None)


def test_the_decorator_returns_the_function_itself() -> None:
    def function(task: Task) -> None:
        pass

    assert Worker().task("type")(function) is function


def test_a_handler_may_stop_the_worker(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)
    worker.task("stop")(lambda task: worker.stop())
    task_id = enqueue(conn, "stop")
    run_to_end(worker)
    assert row(conn, task_id).status == "completed"
    assert conn.execute("select name from pgsched.workers").fetchall() == []
