"""REPEATABLE READ and SERIALIZABLE: all that it takes is to try again after a 40001.

A test that is also run against mutants takes the connection factory, and what is in its cases.
"""

import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, TypeVar

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Claim, Connect, Use
from psycopg import sql
from workers import PATIENCE, WorkerProcess, count, wait_until

T = TypeVar("T")

LEVELS = ("repeatable read", "serializable")

LEVEL_IS_STRICT = "current_setting('transaction_isolation') in ('repeatable read', 'serializable')"
REFUSAL_BY_SNAPSHOT = Mutant("_status", LEVEL_IS_STRICT, "false")
REFUSAL_WITHOUT_FINISHED = Mutant("_status", "where f.id = p_id for", "where false for")
REFUSAL_FOR_EVER = Mutant("_raise_not_current", "errcode = 'TS409'", "errcode = '40001'")


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def strict(connect: Connect, level: str) -> psycopg.Connection:
    """A session whose transactions have this level unless they say otherwise."""
    return connect(options="-c default_transaction_isolation=" + level.replace(" ", "\\ "))


class Insisting:
    """Calls again as long as the answer is 40001; `refused` counts these answers."""

    def __init__(self) -> None:
        self.refused = 0

    def __call__(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        while True:
            try:
                return call(*args, **options)
            except psycopg.errors.SerializationFailure:
                self.refused += 1


# Everything at once


def claim(session: psycopg.Connection, limit: int) -> list[Claim]:
    """Claims of a transaction whose snapshot is older: it meets what others have claimed since."""
    with session.transaction():
        session.execute("select from pgsched.queues")
        return oracle.claim(session, limit=limit)


def hold_and_complete(session: psycopg.Connection, held: Claim) -> None:
    with session.transaction():
        oracle.hold(session, held)
        assert oracle.complete(session, held)


def expire(session: psycopg.Connection, held: Claim) -> None:
    oracle.expire(session, [held])


def extend_and_complete(session: psycopg.Connection, held: Claim) -> None:
    with session.transaction():
        oracle.extend_one(session, held)
        assert oracle.complete(session, held)


def fail_for_good(session: psycopg.Connection, held: Claim) -> None:
    oracle.fail(session, held, permanent=True)


def cancel_and_fail(session: psycopg.Connection, held: Claim) -> None:
    assert oracle.cancel(session, held.id) == "requested"
    assert oracle.fail(session, held) == "cancelled"


ENDINGS: list[Use] = [
    oracle.complete,
    oracle.hold_and_complete,
    hold_and_complete,
    extend_and_complete,
    oracle.fail,
    fail_for_good,
    cancel_and_fail,
    oracle.release,
    expire,
]


def work(session: psycopg.Connection, random: Random, tasks: int) -> tuple[int, int]:
    """Add tasks, claim and end them in every way until none is left.

    Returns how often 40001 came, and how many claims were left to the reaper.
    """
    insist = Insisting()
    left_alone = 0

    def left() -> bool:
        [(left,)] = session.execute("select exists (select from pgsched.scheduled_tasks)")
        assert isinstance(left, bool)
        return left

    def unless_in_another_state(operate: Callable[[psycopg.Connection, int], Any]) -> None:
        try:
            insist(operate, session, random.choice(ids))
        except psycopg.Error as error:
            if error.sqlstate != "TS423":
                raise

    ids = insist(oracle.enqueue, session, tasks // 2)
    ids += insist(oracle.enqueue_batch, session, [{"priority": n % 10} for n in range(tasks // 2)])
    while insist(left):
        held = insist(claim, session, random.choice([1, 2, 5, 20]))
        random.shuffle(held)
        for each in held[:5]:
            end = random.choice(ENDINGS)
            insist(end, session, each)
            left_alone += end is expire
        held = held[5:]
        insist(oracle.extend, session, held)
        while held:
            outcomes = insist(oracle.complete_batch, session, held)
            assert set(outcomes) <= {"completed", "busy"}
            held = [each for each, outcome in zip(held, outcomes, strict=True) if outcome == "busy"]
        for operate in (oracle.cancel, oracle.reschedule, oracle.retry):
            unless_in_another_state(operate)
    return insist.refused, left_alone


def reap(session: psycopg.Connection, over: Event, rest: float) -> None:
    insist = Insisting()
    while not over.wait(rest):
        insist(oracle.reap, session)
        insist(oracle.maintain, session)


@pytest.mark.parametrize("level", LEVELS)
def test_stricter_isolation_needs_nothing_but_retries(connect: Connect, level: str) -> None:
    conn = connect()
    over = Event()
    with ThreadPoolExecutor(1) as reaper:
        reaping = reaper.submit(reap, strict(connect, level), over, 0.01)
        try:
            counts = oracle.together(
                partial(work, strict(connect, level), Random(seed), 150) for seed in range(8)
            )
        finally:
            over.set()
        reaping.result()
    refused, left_alone = map(sum, zip(*counts, strict=True))
    assert refused > 0
    assert conn.execute("select id from pgsched.scheduled_tasks").fetchall() == []
    events = Counter(event for (event,) in conn.execute("select event from oracle.log"))
    assert set(events) - {"cancel_requested"} == {
        *("enqueued", "claimed", "held", "extended", "completed", "failed", "released", "reaped"),
        *("requested", "cancelled", "rescheduled", "deleted", "retried"),
    }
    assert events["reaped"] == left_alone
    oracle.check(conn)


# One call, in a transaction whose snapshot was taken before something else happened


def cancel(session: psycopg.Connection, held: Claim) -> str:
    return oracle.cancel(session, held.id)


def reschedule(session: psycopg.Connection, held: Claim) -> None:
    oracle.reschedule(session, held.id)


def retry(session: psycopg.Connection, held: Claim) -> bool:
    return oracle.retry(session, held.id) == held.id


HOLDERS: list[Use] = [
    oracle.hold,
    oracle.complete,
    oracle.complete_in_batch,
    oracle.fail,
    oracle.release,
    oracle.lengthen,
    oracle.extend_in_batch,
]
OPERATORS: list[Use] = [cancel, reschedule, retry]
# The answers to the calls of holders, in this order.
CURRENT = [None, True, "completed", "queued", None, True, "extended"]
CANCEL_REQUESTED = [None, True, "completed", "cancelled", None, True, "cancel_requested"]
OVER = ["TS409", "TS409", "stale", "TS409", "TS409", "TS409", "lost"]
COMPLETED = ["TS409", False, "already", "TS409", "TS409", "TS409", "lost"]
GONE = ["TS404", "TS404", "gone", "TS404", "TS404", "TS404", "lost"]
# The claim is newer than the snapshot, which shows its task as it was before.
NOT_SEEN = ["40001", "40001", "stale", "40001", "40001", "40001", "lost"]
# The snapshot shows the claim as current, but the task has changed.
CHANGED = [None, "40001", "40001", "40001", "40001", "40001", "40001"]
# The snapshot shows the completed task, but it has been deleted.
DELETED = ["40001", False, "already", "40001", "40001", "40001", "lost"]
# The answers to the calls of operators: to those who see the last change, and to others.
QUEUED = ["cancelled", None, "TS423"]
RUNNING = ["requested", "TS423", "TS423"]
FAILED = ["finished", "TS423", True]
DONE = ["finished", "TS423", "TS423"]
UNKNOWN = ["TS404", "TS404", "TS404"]
TOO_OLD = ["40001", "40001", "40001"]


def enqueue(conn: psycopg.Connection, _: None) -> None:
    oracle.enqueue(conn)


def claim_it(conn: psycopg.Connection, _: object) -> Claim:
    [held] = oracle.claim(conn)
    return held


def complete(conn: psycopg.Connection, held: Claim) -> Claim:
    assert oracle.complete(conn, held)
    return held


def fail(conn: psycopg.Connection, held: Claim) -> Claim:
    assert oracle.fail(conn, held, permanent=True) == "failed"
    return held


def bring_back(conn: psycopg.Connection, held: Claim) -> Claim:
    assert retry(conn, held)
    return held


def prune(conn: psycopg.Connection, held: Claim) -> Claim:
    conn.execute("update pgsched.finished_tasks set finished_at = '2000-01-01'")
    assert oracle.prune(conn) > 0
    return held


def lose(conn: psycopg.Connection, held: Claim) -> Claim:
    oracle.expire(conn, [held])
    assert oracle.reap(conn) == [held.id]
    return held


def lose_to_another(conn: psycopg.Connection, held: Claim) -> Claim:
    lose(conn, held)
    assert claim_it(conn, None).id == held.id
    return held


def lose_to_another_who_completes(conn: psycopg.Connection, held: Claim) -> Claim:
    lose(conn, held)
    complete(conn, claim_it(conn, None))
    return held


def prolong(conn: psycopg.Connection, held: Claim) -> Claim:
    assert oracle.extend_in_batch(conn, held) == "extended"
    return held


def request_cancel(conn: psycopg.Connection, held: Claim) -> Claim:
    assert cancel(conn, held) == "requested"
    return held


def add_unique(conn: psycopg.Connection, _: object = None) -> list[int]:
    return oracle.enqueue(conn, unique_key="k")


# Steps before the snapshot and since then, which pass on the claim; the answers then, and in a new
# transaction: first to its holder, then to an operator.
Step = Callable[[psycopg.Connection, Any], Claim | None]
SITUATIONS: list[tuple[list[Step], list[Step], list[Any], list[Any], list[Any], list[Any]]] = [
    ([], [enqueue, claim_it], GONE, CURRENT, UNKNOWN, RUNNING),
    ([enqueue], [claim_it], NOT_SEEN, CURRENT, TOO_OLD, RUNNING),
    ([enqueue, claim_it], [lose, claim_it], NOT_SEEN, CURRENT, TOO_OLD, RUNNING),
    ([enqueue, claim_it, fail], [bring_back, claim_it], NOT_SEEN, CURRENT, TOO_OLD, RUNNING),
    ([enqueue], [claim_it, complete], NOT_SEEN, COMPLETED, TOO_OLD, DONE),
    ([enqueue, claim_it], [prolong], CHANGED, CURRENT, TOO_OLD, RUNNING),
    ([enqueue, claim_it], [request_cancel], CHANGED, CANCEL_REQUESTED, TOO_OLD, RUNNING),
    ([enqueue, claim_it], [complete], CHANGED, COMPLETED, TOO_OLD, DONE),
    ([enqueue, claim_it], [fail], CHANGED, OVER, TOO_OLD, FAILED),
    ([enqueue, claim_it], [lose], CHANGED, OVER, TOO_OLD, QUEUED),
    ([enqueue, claim_it], [lose_to_another], CHANGED, OVER, TOO_OLD, RUNNING),
    ([enqueue, claim_it], [lose_to_another_who_completes], CHANGED, OVER, TOO_OLD, DONE),
    ([enqueue, claim_it, complete], [prune], DELETED, GONE, TOO_OLD, UNKNOWN),
    ([enqueue, claim_it, lose], [], OVER, OVER, QUEUED, QUEUED),
    ([enqueue, claim_it, lose_to_another], [], OVER, OVER, RUNNING, RUNNING),
    ([enqueue, claim_it, lose_to_another_who_completes], [], OVER, OVER, DONE, DONE),
    ([enqueue, claim_it, fail], [], OVER, OVER, FAILED, FAILED),
    ([enqueue, claim_it, complete], [], COMPLETED, COMPLETED, DONE, DONE),
    ([enqueue, claim_it, complete, prune], [], GONE, GONE, UNKNOWN, UNKNOWN),
]


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_goes_by_its_snapshot_or_says_that_it_is_too_old(
    connect: Connect, level: str
) -> None:
    conn, session = connect(), strict(connect, level)

    def passed_on(steps: list[Step], held: Any) -> Any:
        for step in steps:
            held = step(conn, held)
        return held

    def answers(before: list[Step], since: list[Step], use: Use) -> tuple[Any, Any]:
        held = passed_on(before, None)
        with session.transaction(force_rollback=True):
            session.execute("select from pgsched.queues")
            held = passed_on(since, held)
            then = oracle.outcome(partial(use, session, held))
        with session.transaction(force_rollback=True):
            again = oracle.outcome(partial(use, session, held))
        conn.execute("update pgsched.scheduled_tasks set run_at = 'infinity'")
        return then, again

    for before, since, *expected in SITUATIONS:
        holder, holder_again, operator, operator_again = expected
        assert [answers(before, since, use) for use in HOLDERS + OPERATORS] == list(
            zip(holder + operator, holder_again + operator_again, strict=True)
        ), f"{before}, then {since}"
    oracle.check(conn)


@pytest.mark.parametrize("level", LEVELS)
def test_calls_that_are_about_no_claim_say_that_their_snapshot_is_too_old(
    connect: Connect, level: str
) -> None:
    conn, session = connect(), strict(connect, level)
    oracle.enqueue(conn, 2)
    first = claim_it(conn, None)
    oracle.expire(conn, [first])
    for since, call, again in (
        (claim_it, oracle.claim, 0),
        (lambda conn, _: oracle.extend_in_batch(conn, first), oracle.reap, 0),
        (add_unique, add_unique, 1),
    ):
        with session.transaction(force_rollback=True):
            session.execute("select from pgsched.queues")
            since(conn, None)
            assert oracle.outcome(partial(call, session)) == "40001"
        assert len(call(session)) == again
    oracle.check(conn)


# A handler in one transaction


@pytest.fixture
def effect(conn: psycopg.Connection) -> Callable[[], list[int]]:
    """The ids of the tasks whose handler took effect."""
    conn.execute("create table effect (task_id bigint)")
    return lambda: [task_id for (task_id,) in conn.execute("select task_id from effect")]


def handle(
    session: psycopg.Connection, held: Claim, meanwhile: Callable[[], Any] = lambda: None
) -> bool:
    """Have the effect, in one transaction with the completion."""
    with session.transaction():
        oracle.hold(session, held)
        session.execute("insert into effect values (%s)", [held.id])
        meanwhile()
        return oracle.complete(session, held)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", [prolong, request_cancel])
def test_a_handler_whose_task_changed_takes_effect_when_it_is_tried_again(
    connect: Connect, effect: Callable[[], list[int]], level: str, step: Step
) -> None:
    conn, session = connect(), strict(connect, level)
    oracle.enqueue(conn)
    held = claim_it(conn, None)
    before = oracle.state(conn, held.id)
    with pytest.raises(psycopg.errors.SerializationFailure):
        handle(session, held, partial(step, conn, held))
    assert effect() == []
    assert oracle.state(conn, held.id) == before
    assert handle(session, held)
    assert effect() == [held.id]
    oracle.check(conn)


@pytest.mark.parametrize("level", LEVELS)
def test_a_handler_whose_task_is_reaped_takes_no_effect(
    connect: Connect, effect: Callable[[], list[int]], level: str
) -> None:
    """hold_task waits for the reaper, but its snapshot is older: only the completion tells."""
    conn, reaper, session = connect(), connect(), strict(connect, level)
    oracle.enqueue(conn)
    held = claim_it(conn, None)
    oracle.expire(conn, [held])
    completing = Event()
    with reaper.transaction():
        assert oracle.reap(reaper) == [held.id]
        call = oracle.Call(conn, session, partial(handle, session, held, completing.set))
        assert call.waits
    with pytest.raises(psycopg.errors.SerializationFailure):
        call.result()
    assert completing.is_set()
    assert oracle.outcome(partial(handle, session, held)) == "TS409"
    assert effect() == []
    assert oracle.state(conn, held.id) == ("queued", 1)
    oracle.check(conn)


# Workers

APP = """
import threading

import psycopg

from pgsched import Worker

worker = Worker({dsn!r}, concurrency=4, poll_interval=0.05)
local = threading.local()


@worker.task("test")
def work(task):
    if not hasattr(local, "conn"):
        local.conn = psycopg.connect({dsn!r}, autocommit=True)
    local.conn.execute("insert into ran values (%s, %s)", [task.id, task.attempt])
"""


def disturb(session: psycopg.Connection, over: Event) -> None:
    """Change what is running and what is next, so that claims and completions meet newer rows."""
    while not over.wait(0.02):
        session.execute(
            """
            update pgsched.scheduled_tasks
               set payload = payload
             where status = 'processing'
                or id = (select min(id) from pgsched.scheduled_tasks where status = 'queued')
            """
        )


@pytest.mark.parametrize("level", LEVELS)
def test_workers_run_each_task_once_whatever_the_default_level(
    dsn: str, conn: psycopg.Connection, connect: Connect, tmp_path: Path, level: str
) -> None:
    disturber = connect()  # has PostgreSQL's own default, as it must not fail
    conn.execute("create table ran (task_id bigint, attempt integer)")
    conn.execute(
        sql.SQL("alter database {} set default_transaction_isolation = {}").format(
            sql.Identifier(conn.info.dbname), sql.Literal(level)
        )
    )
    lost = oracle.enqueue(conn, 50)
    oracle.expire(conn, oracle.claim(conn, limit=50))
    fresh = oracle.enqueue(conn, 150)
    over = Event()
    workers: list[WorkerProcess] = []

    def log() -> str:
        return "".join(worker.log for worker in workers)

    def done() -> bool:
        """Every task is, and claims as well as completions have met a 40001; else add more."""
        if count(conn, "completed") < len(lost + fresh):
            return False
        if all(f"{step}: error='SerializationFailure" in log() for step in ("claim", "report")):
            return True
        fresh.extend(oracle.enqueue(conn, 50))
        return False

    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        stack.callback(over.set)
        others = [
            threads.submit(reap, connect(), over, 0.1),
            threads.submit(disturb, disturber, over),
        ]
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            workers.append(stack.enter_context(WorkerProcess(folder, APP.format(dsn=dsn))))
        wait_until(done, 2 * PATIENCE)
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        assert [worker.process.wait(PATIENCE) for worker in workers] == [0, 0]
        over.set()
        for other in others:
            other.result()
    ran = conn.execute("select task_id, attempt from ran order by task_id").fetchall()
    assert ran == [*((task_id, 2) for task_id in lost), *((task_id, 1) for task_id in fresh)]
    assert "claim lost" not in log()
    assert "Traceback" not in log()


@pytest.mark.parametrize(
    "mutant", [REFUSAL_BY_SNAPSHOT, REFUSAL_WITHOUT_FINISHED, REFUSAL_FOR_EVER]
)
def test_a_broken_answer_is_seen(connect: Connect, mutant: Mutant) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        test_a_call_goes_by_its_snapshot_or_says_that_it_is_too_old(connect, LEVELS[0])
