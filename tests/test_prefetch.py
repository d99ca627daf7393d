"""How much a worker claims: slots, what it claims beforehand, and what each queue gets of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from threading import Event, Lock
from typing import Any

import psycopg
import pytest
from workers import (
    CANCEL,
    LISTENERS,
    PATIENCE,
    PRESENCES,
    count,
    quick,
    row,
    running,
    sessions,
    take_away,
    wait_for,
    wait_for_extension,
    wait_until,
)

from pgsched import Task, calls, enqueue, loop

Connect = Callable[..., psycopg.Connection]


@pytest.fixture
def prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers claim ten tasks beyond the free slots as soon as a handler has ended."""
    monkeypatch.setattr(loop, "PREFETCH", 10)
    monkeypatch.setattr(loop, "PREFETCH_SECONDS", 1000)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers give back nothing because it has to wait."""
    monkeypatch.setattr(loop, "UNSTARTED_SECONDS", 600)


def enqueue_many(conn: psycopg.Connection, *types: str, queue: str = "default") -> list[int]:
    """Add tasks of these types in one transaction."""
    with conn.transaction():
        return [enqueue(conn, task_type, queue=queue) for task_type in types]


def watch_claims(monkeypatch: pytest.MonkeyPatch, watch: Callable[[str, int, int], None]) -> None:
    """Call ``watch`` after each claim with its queue, its limit, and how many tasks it got."""
    claim_task = calls.claim_task

    def watched(conn: calls.Connection, *args: Any) -> list[calls.Claim]:
        claims = claim_task(conn, *args)
        watch(args[1], args[-1], len(claims))
        return claims

    monkeypatch.setattr(calls, "claim_task", watched)


# Slots and what is claimed beyond them


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_no_more_runs_at_once_than_there_are_slots(
    dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    slots = 4
    worker = quick(dsn, concurrency=slots)
    now = most = 0
    lock = Lock()

    def change(by: int) -> None:
        nonlocal now, most
        with lock:
            now += by
            most = max(most, now)

    @worker.task("plain")
    def plain(task: Task) -> None:
        change(1)
        time.sleep(0.01)
        change(-1)

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        change(1)
        await asyncio.sleep(0.01)
        change(-1)

    ids = enqueue_many(conn, *60 * [kind])
    with running(worker):
        wait_until(lambda: count(conn, "completed") == len(ids))
    assert most == slots


@pytest.mark.parametrize(
    ("seconds", "tasks", "fewest", "most"), [(0.3, 8, 2, 2), (0.0, 400, 3, 2 + 6)], ids=str
)
def test_fast_handlers_have_some_claimed_beforehand_and_slow_ones_nothing(
    dsn: str,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    tasks: int,
    fewest: int,
    most: int,
) -> None:
    monkeypatch.setattr(loop, "PREFETCH", 6)
    worker = quick(dsn, concurrency=2)
    claimed = ended = 0
    unfinished: list[int] = []

    @worker.task("work")
    def work(task: Task) -> None:
        nonlocal ended
        time.sleep(seconds)
        with lock:
            ended += 1

    def watch(queue: str, limit: int, got: int) -> None:
        nonlocal claimed
        claimed += got
        unfinished.append(claimed - ended)

    lock = Lock()
    watch_claims(monkeypatch, watch)
    enqueue_many(conn, *tasks * ["work"])
    with running(worker):
        wait_until(lambda: count(conn, "completed") == tasks)
    assert fewest <= max(unfinished) <= most


def test_a_full_worker_does_not_ask_for_more(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = quick(dsn, concurrency=3, lease=1)
    gate = Event()
    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    ids = enqueue_many(conn, *10 * ["wait"])
    asked: list[int] = []
    watch_claims(monkeypatch, lambda queue, limit, got: asked.append(limit))
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        # Two extensions later it has had every occasion.
        for _ in range(2):
            wait_for_extension(conn, ids[0])
        assert asked == [3]
        assert (count(conn, "processing"), count(conn, "queued")) == (3, 7)
        gate.set()
        wait_until(lambda: count(conn, "completed") == len(ids))


def prefetch(
    conn: psycopg.Connection, started: Callable[[], bool], behind: int
) -> tuple[int, list[int]]:
    """Let a worker of one slot claim a task `slow`, and with it as many of type `noop`."""
    wait_for(conn, enqueue(conn, "noop"), "completed")
    slow, *others = enqueue_many(conn, "slow", *behind * ["noop"])
    wait_until(started)
    wait_until(lambda: count(conn, "processing") == 1 + behind)
    return slow, others


def test_what_waits_for_slow_handlers_is_given_back_uncounted_and_done_elsewhere(
    dsn: str, conn: psycopg.Connection, prefetching: None
) -> None:
    gate, started = Event(), Event()
    first, second = (quick(dsn, concurrency=1) for _ in range(2))
    for worker in (first, second):
        worker.task("noop")(lambda task: None)

    @first.task("slow")
    def slow(task: Task) -> None:
        started.set()
        gate.wait(PATIENCE)

    with running(first):
        running_id, others = prefetch(conn, started.is_set, 5)
        with running(second):
            for task_id in others:
                done = wait_for(conn, task_id, "completed")
                assert (done.attempt, done.last_error) == (1, None)
                assert done.claimed_by != row(conn, running_id).claimed_by
        assert row(conn, running_id)[:2] == ("processing", 1)
        gate.set()
        wait_for(conn, running_id, "completed")


def test_what_is_cancelled_or_lost_before_its_turn_never_begins(
    dsn: str,
    conn: psycopg.Connection,
    prefetching: None,
    patient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = quick(dsn, concurrency=1, lease=1)
    gate, started = Event(), Event()
    ran: list[int] = []
    worker.task("noop")(lambda task: ran.append(task.id))

    @worker.task("slow")
    def slow(task: Task) -> None:
        started.set()
        gate.wait(PATIENCE)

    with running(worker):
        slow_id, (cancelled, lost, last) = prefetch(conn, started.is_set, 3)
        assert conn.execute(CANCEL, [cancelled]).fetchone() == ("requested",)
        wait_for(conn, cancelled, "cancelled")
        take_away(conn, lost)
        wait_until(lambda: f"claim lost: task={lost} attempt=1" in caplog.messages)
        gate.set()
        wait_for(conn, slow_id, "completed")
        wait_for(conn, last, "completed")
    assert ran[1:] == [last]
    assert row(conn, lost)[:2] == ("processing", 2)


def test_what_waits_when_the_worker_stops_is_due_at_once_and_uncounted(
    dsn: str, conn: psycopg.Connection, prefetching: None, patient: None
) -> None:
    worker = quick(dsn, concurrency=1)
    gate, started = Event(), Event()
    worker.task("noop")(lambda task: None)

    @worker.task("slow")
    def slow(task: Task) -> None:
        started.set()
        gate.wait(PATIENCE)

    with running(worker):
        slow_id, others = prefetch(conn, started.is_set, 5)
        worker.stop()
        wait_until(lambda: count(conn, "queued") == 5)
        for task_id in others:
            left = row(conn, task_id)
            assert (left.attempt, left.last_error, left.due_in.total_seconds() <= 0) == (
                0,
                None,
                True,
            )
        gate.set()
    assert row(conn, slow_id)[:2] == ("completed", 1)
    assert count(conn, "queued") == 5


def test_a_worker_has_three_connections_whatever_it_runs(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, concurrency=20, queues=["default", "other"])
    gate = Event()
    worker.task("plain")(lambda task: gate.wait(PATIENCE))

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    for _ in range(10):
        enqueue(conn, "plain")
        enqueue(conn, "async", queue="other")
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 20)
        for kind in (LISTENERS, PRESENCES):
            wait_until(lambda: sessions(conn, kind))  # noqa: B023
        backends = """
            select count(*)
              from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()
               and backend_type = 'client backend'
            """
        assert conn.execute(backends).fetchone() == (3,)
        gate.set()
        wait_until(lambda: count(conn, "completed") == 20)


# What each queue gets


@pytest.mark.parametrize(("concurrency", "tasks"), [(1, 400), (4, 400), (300, 3000)])
def test_queues_that_never_empty_share_the_slots_by_weight(
    dsn: str, conn: psycopg.Connection, concurrency: int, tasks: int
) -> None:
    worker = quick(dsn, queues={"light": 1, "heavy": 3}, concurrency=concurrency)
    ran: list[str] = []

    @worker.task("noop")
    async def noop(task: Task) -> None:
        ran.append(task.queue)

    for queue in ("light", "heavy"):
        enqueue_many(conn, *tasks * ["noop"], queue=queue)
    some = tasks * 3 // 4
    with running(worker):
        wait_until(lambda: len(ran) > some)
    # By weight it were 75 of 100, alike 50; and it may be a claim or two ahead.
    assert 62 < 100 * Counter(ran[:some])["heavy"] / some < 88


@pytest.mark.parametrize("prefetch", [0, loop.PREFETCH])
def test_no_queue_starves_beside_one_that_never_empties(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    monkeypatch.setattr(loop, "PREFETCH", prefetch)
    worker = quick(dsn, queues=["endless", "first", "second"], concurrency=1)
    worker.task("noop")(lambda task: None)

    @worker.task("again")
    def again(task: Task) -> None:
        with psycopg.connect(dsn, autocommit=True) as session:
            enqueue(session, "again", queue="endless", priority=0)

    for _ in range(2):
        enqueue(conn, "again", queue="endless", priority=0)
    with running(worker):
        for _ in range(3):
            # Both have been found empty meanwhile.
            before = count(conn, "completed")
            wait_until(lambda: count(conn, "completed") > before + 3)  # noqa: B023
            for task_id in [enqueue(conn, "noop", queue=queue) for queue in ("first", "second")]:
                wait_for(conn, task_id, "completed")
        assert count(conn, "queued") + count(conn, "processing") > 0


@pytest.mark.parametrize(
    ("left", "poll_interval"),
    [
        pytest.param(0, 0.05, id="after a rest"),
        pytest.param(200, 0.05, id="while the other goes on"),
        pytest.param(200, 1e-6, id="asked at every claim"),
    ],
)
def test_a_queue_that_was_empty_does_not_take_everything_when_it_returns(
    dsn: str,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
    poll_interval: float,
) -> None:
    monkeypatch.setattr(loop, "PREFETCH", 0)
    worker = quick(dsn, queues=["returning", "steady"], concurrency=1, poll_interval=poll_interval)
    ran: list[str] = []
    gate = Event()

    @worker.task("noop")
    def noop(task: Task) -> None:
        ran.append(task.queue)

    @worker.task("wait")
    def wait(task: Task) -> None:
        ran.append("wait")
        gate.wait(PATIENCE)

    enqueue_many(conn, *100 * ["noop"], "wait", *left * ["noop"], queue="steady")
    with running(worker):
        wait_until(lambda: len(ran) == 101)
        with conn.transaction():
            for _ in range(100):
                enqueue(conn, "noop", queue="returning")
                enqueue(conn, "noop", queue="steady")
        # Before the other one is to be asked again, this one is served alone.
        due = time.monotonic() + 2 * worker.poll_interval
        wait_until(lambda: time.monotonic() > due)
        gate.set()
        wait_until(lambda: len(ran) > 101 + 60)
    assert 20 < Counter(ran[101:161])["steady"] < 40
