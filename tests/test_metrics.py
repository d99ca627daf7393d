"""What a running worker counts and times of its own work."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from prometheus_client import Counter, Histogram
from scraping import Page, answers, free_port, scrape
from workers import (
    CANCEL,
    PATIENCE,
    WorkerProcess,
    count,
    end_sessions,
    gated,
    make_effects,
    quick,
    running,
    wait_for,
    wait_for_delay,
    wait_until,
    written,
)

from pgsched import Fail, Retry, Snooze, Task, Worker, calls, enqueue, loop

Connect = Callable[..., psycopg.Connection]

LATENCY = "pgsched_scheduling_latency_seconds"
START_DELAY = "pgsched_start_delay_seconds"
DURATION = "pgsched_handler_duration_seconds"
OUTCOMES = "pgsched_task_outcomes_total"


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    return free_port()


def test_the_page_tells_slots_and_how_many_are_busy(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, concurrency=7, metrics_port=port)
    gate = Event()
    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    for _ in range(3):
        enqueue(conn, "wait")
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        wait_until(lambda: answers(port))
        wait_until(lambda: scrape(port).get(("pgsched_worker_slots_busy",)) == 3)
        assert scrape(port)["pgsched_worker_slots",] == 7
        gate.set()
        wait_until(lambda: scrape(port).get(("pgsched_worker_slots_busy",)) == 0)
        assert scrape(port)["pgsched_worker_slots",] == 7


def test_the_page_tells_what_is_held_and_has_not_begun(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UNSTARTED_SECONDS", PATIENCE)
    make_effects(conn)
    worker = quick(dsn, connections=1, metrics_port=port)
    begun, gate = gated(worker)
    for _ in range(3):
        enqueue(conn, "wait")
    with running(worker):
        assert begun.wait(PATIENCE)
        wait_until(lambda: scrape(port).get(("pgsched_worker_prefetched",)) == 2)
        assert scrape(port)["pgsched_worker_slots_busy",] == 1
        gate.set()
        wait_until(lambda: scrape(port).get(("pgsched_worker_prefetched",)) == 0)


def test_the_latency_is_that_of_each_completed_task(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, queues=["a", "b"], metrics_port=port)
    worker.task("noop")(lambda task: None)

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise Fail("no")

    began = time.monotonic()
    for _ in range(5):
        enqueue(conn, "noop", queue="a")
    enqueued = time.monotonic()
    failing = enqueue(conn, "fail", queue="a")
    # What a task was not due for does not count.
    late = enqueue(conn, "noop", queue="b", delay=timedelta(seconds=0.3))
    wait_until(lambda: time.monotonic() > enqueued + 0.2)
    with running(worker):
        wait_for(conn, failing, "failed")
        wait_for(conn, late, "completed")
        wait_until(lambda: scrape(port).get((f"{LATENCY}_count", "b", "noop")) == 1)
        page = scrape(port)
    passed = time.monotonic() - began
    # The delay of the start is part of it, also of a task that fails.
    for name in (LATENCY, START_DELAY):
        assert page[f"{name}_count", "a", "noop"] == 5
        assert 5 * 0.2 < page[f"{name}_sum", "a", "noop"] < 5 * passed
        assert 0 < page[f"{name}_sum", "b", "noop"] < passed - 0.3
    assert page[f"{START_DELAY}_sum", "a", "noop"] < page[f"{LATENCY}_sum", "a", "noop"]
    assert (f"{LATENCY}_count", "a", "fail") not in page
    assert page[f"{START_DELAY}_count", "a", "fail"] == 1
    assert page[f"{START_DELAY}_sum", "a", "fail"] > 0.2


def test_the_start_is_delayed_until_a_slot_is_free(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, concurrency=1, metrics_port=port)
    worker.task("slow")(lambda task: time.sleep(0.3))
    worker.task("next")(lambda task: None)
    enqueue(conn, "slow", priority=0)
    enqueue(conn, "next")
    with running(worker):
        wait_until(lambda: scrape(port).get((f"{START_DELAY}_count", "default", "next")) == 1)
        assert scrape(port)[f"{START_DELAY}_sum", "default", "next"] > 0.3


def plain(worker: Worker, spent: list[float], **options: Any) -> None:
    @worker.task("work", **options)
    def work(task: Task) -> None:
        began = time.monotonic()
        task.cancelled.wait(0.2)
        spent.append(time.monotonic() - began)
        if task.payload == "fail":
            raise Fail("no")


def in_transaction(worker: Worker, spent: list[float], **options: Any) -> None:
    @worker.task("work", **options)
    def work(task: Task, conn: psycopg.Connection[Any]) -> None:
        began = time.monotonic()
        conn.execute("select pg_sleep(0.2)")
        spent.append(time.monotonic() - began)
        if task.payload == "fail":
            raise Fail("no")


def coroutine(worker: Worker, spent: list[float], **options: Any) -> None:
    @worker.task("work", **options)
    async def work(task: Task) -> None:
        began = time.monotonic()
        try:
            await asyncio.sleep(0.2)
        finally:
            spent.append(time.monotonic() - began)
        if task.payload == "fail":
            raise Fail("no")


@pytest.mark.parametrize("kind", [plain, in_transaction, coroutine])
@pytest.mark.parametrize("how", ["complete", "fail", "time out"])
def test_the_duration_is_that_of_the_handler_however_it_ends(
    dsn: str,
    conn: psycopg.Connection,
    port: int,
    kind: Callable[..., None],
    how: str,
) -> None:
    worker = quick(dsn, metrics_port=port)
    spent: list[float] = []
    kind(worker, spent, timeout=0.1 if how == "time out" else None)
    enqueue(conn, "work", how)
    began = time.monotonic()
    with running(worker):
        wait_until(lambda: scrape(port).get((f"{DURATION}_count", "default", "work")) == 1)
        page = scrape(port)
    [seconds] = spent
    assert seconds <= page[f"{DURATION}_sum", "default", "work"] < time.monotonic() - began
    assert page[f"{START_DELAY}_count", "default", "work"] == 1


def test_a_function_that_goes_on_after_its_time_is_timed_to_its_end(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, metrics_port=port)
    gate = Event()
    worker.task("work", timeout=0.1)(lambda task: gate.wait(PATIENCE))
    task_id = enqueue(conn, "work")
    with running(worker):
        wait_for_delay(conn, task_id)
        assert (f"{DURATION}_count", "default", "work") not in scrape(port)
        gate.set()
        wait_until(lambda: scrape(port).get((f"{DURATION}_count", "default", "work")) == 1)


def test_a_handler_that_was_not_called_has_no_times(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise psycopg.OperationalError("no transaction today")

    monkeypatch.setattr(calls, "hold_task", refuse)
    make_effects(conn)
    worker = quick(dsn, metrics_port=port)
    gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for_delay(conn, task_id)
        wait_until(lambda: scrape(port).get((OUTCOMES, "released", "default", "wait")) == 1)
        names = {name for name, *_ in scrape(port)}
    assert {f"{START_DELAY}_count", f"{DURATION}_count"} & names == set()
    assert written(conn) == []


def test_calls_are_timed(dsn: str, conn: psycopg.Connection, connect: Connect, port: int) -> None:
    worker = quick(dsn, queues=["a", "b"], metrics_port=port)
    worker.task("noop")(lambda task: None)
    waiting = (
        "select from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'claim_task'"
        " and datname = current_database()"
    )
    claims, flushes = "pgsched_claim_duration_seconds", "pgsched_flush_duration_seconds"
    with running(worker):
        wait_for(conn, enqueue(conn, "noop", queue="a"), "completed")
        wait_until(lambda: scrape(port).get((f"{flushes}_count",)) == 1)
        page = scrape(port)
        assert page[f"{claims}_count", "a"] >= 1
        assert page[f"{claims}_count", "b"] >= 1
        assert 0 < page[f"{flushes}_sum",] < page[f"{LATENCY}_sum", "a", "noop"]
        with connect().transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            wait_until(lambda: conn.execute(waiting).fetchall())
            began = time.monotonic()
            wait_until(lambda: time.monotonic() > began + 0.3)
        sums = [(f"{claims}_sum", queue) for queue in "ab"]
        wait_until(lambda: sum(scrape(port)[each] for each in sums) > 0.3)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        *((name, 0.001, 3600) for name in (LATENCY, START_DELAY, DURATION)),
        ("pgsched_claim_duration_seconds", 0.0005, 10),
        ("pgsched_flush_duration_seconds", 0.0005, 10),
    ],
)
def test_histograms_reach_from_what_is_quick_to_what_is_slow(
    dsn: str, conn: psycopg.Connection, port: int, name: str, first: float, last: float
) -> None:
    worker = quick(dsn, metrics_port=port)
    worker.task("noop")(lambda task: None)
    enqueue(conn, "noop")
    with running(worker):
        wait_until(lambda: scrape(port).get((f"{LATENCY}_count", "default", "noop")))
        page = scrape(port)
    bounds = sorted(float(labels[0]) for each, *labels in page if each == f"{name}_bucket")
    assert (bounds[0], bounds[-2], bounds[-1]) == (first, last, float("inf"))


def test_contention_is_what_other_sessions_held(
    dsn: str, conn: psycopg.Connection, connect: Connect, port: int
) -> None:
    worker = quick(dsn, queues=["busy", "quiet"], concurrency=1, metrics_port=port)
    worker.task("noop")(lambda task: None)
    name = "pgsched_lock_contention_total"
    for _ in range(10):
        enqueue(conn, "noop", queue="busy", priority=0)
    other = connect(autocommit=False)
    other.execute("select from pgsched.scheduled_tasks for update")

    def counted() -> bool:
        # One claim of 16 counts, for all of them.
        for queue in 10 * ["busy", "quiet"]:
            enqueue(conn, "noop", queue=queue)
        return scrape(port).get((name, "busy"), 0) > 0

    with running(worker):
        wait_until(lambda: answers(port))
        wait_until(counted)
        wait_until(lambda: (name, "quiet") in scrape(port))
        other.rollback()
        page = scrape(port)
    assert page[name, "busy"] % (16 * 10) == 0
    assert page[name, "quiet"] == 0


def test_every_end_of_a_claim_is_counted(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REAP_SECONDS", 0.1)
    worker = quick(dsn, lease=1, metrics_port=port)
    later = timedelta(hours=1)
    raised = {
        "completed": None,
        "retried": Retry(later),
        "failed": Fail("no"),
        "released": Snooze(later),
        "cancelled": ValueError("stopped"),
    }
    gate = Event()

    @worker.task("end")
    def end(task: Task) -> None:
        if task.payload == "lost":
            task.cancelled.wait(PATIENCE)
        elif task.payload == "cancelled":
            gate.wait(PATIENCE)
        if error := raised.get(task.payload):
            raise error

    ids = {how: enqueue(conn, "end", how) for how in (*raised, "lost")}
    enqueue(conn, "unknown")
    enqueue(conn, "unknown, too")
    # A task of a worker that is gone, without an attempt left.
    enqueue(conn, "end", "reaped", queue="other", max_attempts=1)
    conn.execute("select from pgsched.claim_task('gone', 'other', '1 s')")
    with running(worker):
        wait_until(lambda: count(conn, "queued") == 4)
        conn.execute(CANCEL, [ids["cancelled"]])
        gate.set()
        conn.execute("delete from pgsched.scheduled_tasks where id = %s", [ids["lost"]])
        ends: Page = {
            # In the order of the labels' names: outcome, queue, task_type.
            **{(OUTCOMES, how, "default", "end"): 1.0 for how in ids},
            # The name of a type that has no handler is not the worker's to choose.
            **{(OUTCOMES, how, "default", ""): 0.0 for how in ids},
            (OUTCOMES, "released", "default", ""): 2,
            ("pgsched_reaped_total", "queued"): 0,
            ("pgsched_reaped_total", "failed"): 1,
            ("pgsched_reaped_total", "cancelled"): 0,
        }
        names = {key[0] for key in ends}
        wait_until(lambda: ends == {key: n for key, n in scrape(port).items() if key[0] in names})


def test_what_may_happen_is_there_before_it_does(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    worker = quick(dsn, metrics_port=port)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_until(lambda: answers(port))
        page = scrape(port)
        for how in ("queued", "failed", "cancelled"):
            assert page["pgsched_reaped_total", how] == 0
        assert page["pgsched_reconnects_total",] == 0
        enqueue(conn, "noop")
        wait_until(lambda: scrape(port).get((OUTCOMES, "completed", "default", "noop")) == 1)
        page = scrape(port)
        for how in ("retried", "failed", "cancelled", "released", "lost"):
            assert page[OUTCOMES, how, "default", "noop"] == 0


def test_a_lost_connection_is_counted(dsn: str, conn: psycopg.Connection, port: int) -> None:
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: conn.execute("select id from pgsched.workers").fetchall())
        assert scrape(port)["pgsched_reconnects_total",] == 0
        end_sessions(conn)
        wait_until(lambda: scrape(port).get(("pgsched_reconnects_total",)) == 1)


def test_workers_of_one_process_count_apart(dsn: str, conn: psycopg.Connection) -> None:
    ports = [free_port(), free_port()]
    first, second = (
        quick(dsn, queues=[queue], concurrency=slots, metrics_port=port)
        for queue, slots, port in zip("ab", (1, 2), ports, strict=True)
    )
    first.task("noop")(lambda task: None)
    second.task("noop")(lambda task: None)

    def completed(port: int) -> Page:
        return {key: n for key, n in scrape(port).items() if key[0] == f"{LATENCY}_count"}

    with running(first), running(second):
        for queue in "abb":
            enqueue(conn, "noop", queue=queue)
        name = f"{LATENCY}_count"
        expected = [{(name, "a", "noop"): 1}, {(name, "b", "noop"): 2}]
        wait_until(lambda: [completed(port) for port in ports] == expected)
        assert [scrape(port)["pgsched_worker_slots",] for port in ports] == [1, 2]


def test_what_cannot_be_counted_is_told_once_and_holds_up_nothing(
    dsn: str,
    conn: psycopg.Connection,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Counter, "inc", fail)
    monkeypatch.setattr(Histogram, "observe", fail)
    make_effects(conn)
    worker = quick(dsn, concurrency=2, metrics_port=port)
    worker.task("plain")(lambda task: None)

    @worker.task("coroutine")
    async def wait(task: Task) -> None:
        await asyncio.sleep(0)

    @worker.task("transaction")
    def write(task: Task, conn: psycopg.Connection[Any]) -> None:
        conn.execute("select 1")

    for _ in range(10):
        for task_type in ("plain", "coroutine", "transaction"):
            enqueue(conn, task_type)
    with running(worker):
        wait_until(lambda: count(conn, "completed") == 30)
        assert answers(port)
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    names = [text.removeprefix("not counted: metric=").partition(" ")[0] for text in told]
    assert len(names) < 2 * 8  # two threads may tell the same
    assert sorted(set(names)) == [
        "claim_duration_seconds",
        "flush_duration_seconds",
        "handler_duration_seconds",
        "lock_contention_total",
        "reaped_total",
        "scheduling_latency_seconds",
        "start_delay_seconds",
        "task_outcomes_total",
    ]
    assert {text.partition(" error=")[2] for text in told} == {"'RuntimeError: broken'"}


def test_a_worker_works_where_no_metric_can_be_made(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it inherits the variable from a web server, but not the folder."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "nowhere"))
    source = """
from pgsched import Worker
worker = Worker()
worker.task("noop")(lambda task: None)
"""
    with WorkerProcess(tmp_path, source, "--dsn", dsn):
        for _ in range(2):
            wait_for(conn, enqueue(conn, "noop"), "completed")
