"""Operators' calls, and holding a task, against other sessions: who waits, and who gets what.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Claim, Connect, Use
from workers import wait_until


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def claimed(conn: psycopg.Connection, **options: Any) -> Claim:
    """The claim of a new task, the only one that is due."""
    oracle.enqueue(conn, **options)
    [held] = oracle.claim(conn)
    return held


def failed(conn: psycopg.Connection, **options: Any) -> int:
    """A new task that failed for good."""
    held = claimed(conn, **options)
    assert oracle.fail(conn, held, permanent=True) == "failed"
    return held.id


def cancel_requested(conn: psycopg.Connection, task_id: int) -> bool:
    [(requested,)] = conn.execute(
        "select cancel_requested_at is not null from pgsched.tasks where id = %s", [task_id]
    )
    assert isinstance(requested, bool)
    return requested


def waiting(
    conn: psycopg.Connection,
    call: Callable[..., Any],
    session: psycopg.Connection,
    *args: Any,
    **options: Any,
) -> oracle.Call:
    """The call, which waits for another session; its result may be an SQLSTATE."""
    started = oracle.Call(
        conn, session, partial(oracle.outcome, partial(call, session, *args, **options))
    )
    assert started.waits
    return started


def at_once(
    conn: psycopg.Connection,
    call: Callable[..., Any],
    session: psycopg.Connection,
    *args: Any,
    **options: Any,
) -> Any:
    """What the call returns, or its SQLSTATE; AssertionError when it waits."""
    return oracle.at_once(
        conn, session, partial(oracle.outcome, partial(call, session, *args, **options))
    )


def ids(claims: list[Claim]) -> list[int]:
    return [each.id for each in claims]


# cancel_task


@pytest.mark.parametrize("rolled_back", [False, True])
def test_cancelling_waits_for_an_open_claim(connect: Connect, rolled_back: bool) -> None:
    conn, worker, operator = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn)
    with worker.transaction(force_rollback=rolled_back):
        [held] = oracle.claim(worker)
        call = waiting(conn, oracle.cancel, operator, task_id)
    if rolled_back:
        assert call.result() == "cancelled"
        assert oracle.state(conn, task_id) == ("cancelled", 0)
    else:
        assert call.result() == "requested"
        assert oracle.extend(conn, [held]) == ["cancel_requested"]
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_claim_passes_by_a_task_that_is_being_cancelled(
    connect: Connect, rolled_back: bool
) -> None:
    conn, worker, operator = connect(), connect(), connect()
    first, second = oracle.enqueue(conn, 2)
    with operator.transaction(force_rollback=rolled_back):
        assert oracle.cancel(operator, first) == "cancelled"
        held = at_once(conn, oracle.claim, worker, limit=2)
        assert ids(held) == [second]
    assert ids(oracle.claim(conn)) == ([first] if rolled_back else [])
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("complete", [oracle.complete, oracle.complete_in_batch])
def test_cancelling_waits_for_an_open_completion(
    connect: Connect, complete: Use, rolled_back: bool
) -> None:
    conn, worker, operator = connect(), connect(), connect()
    held = claimed(conn)
    with worker.transaction(force_rollback=rolled_back):
        assert complete(worker, held) in {True, "completed"}
        call = waiting(conn, oracle.cancel, operator, held.id)
    assert call.result() == ("requested" if rolled_back else "finished")
    assert oracle.state(conn, held.id)[0] == ("processing" if rolled_back else "completed")
    oracle.check(conn)


def test_a_completion_that_nobody_keeps_leaves_nothing_to_cancel(connect: Connect) -> None:
    conn, worker, operator = connect(), connect(), connect()
    conn.execute("select pgsched.configure_queue('default', p_keep_completed => '0')")
    held = claimed(conn)
    with worker.transaction():
        assert oracle.complete(worker, held)
        call = waiting(conn, oracle.cancel, operator, held.id)
    assert call.result() == "TS404"
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize(
    ("end", "requested", "not_requested"),
    [
        (oracle.complete, "completed", "completed"),
        (oracle.fail, "cancelled", "queued"),
        (oracle.release, "cancelled", "queued"),
    ],
)
def test_ending_a_claim_waits_for_an_open_cancel(
    connect: Connect,
    end: Use,
    requested: str,
    not_requested: str,
    rolled_back: bool,
) -> None:
    """A completion is not lost to it; what would have come again does not."""
    conn, worker, operator = connect(), connect(), connect()
    held = claimed(conn)
    with operator.transaction(force_rollback=rolled_back):
        assert oracle.cancel(operator, held.id) == "requested"
        call = waiting(conn, end, worker, held)
    call.result()
    assert oracle.state(conn, held.id)[0] == (not_requested if rolled_back else requested)
    oracle.check(conn)


def test_a_batch_does_not_wait_for_an_open_cancel(connect: Connect) -> None:
    conn, worker, operator = connect(), connect(), connect()
    held = claimed(conn)
    with operator.transaction():
        assert oracle.cancel(operator, held.id) == "requested"
        assert at_once(conn, oracle.extend, worker, [held]) == ["busy"]
        assert at_once(conn, oracle.complete_in_batch, worker, held) == "busy"
    assert oracle.extend(worker, [held]) == ["cancel_requested"]
    assert oracle.complete_in_batch(worker, held) == "completed"
    oracle.check(conn)


def test_reaping_passes_by_an_open_cancel_and_then_ends_the_task(connect: Connect) -> None:
    conn, reaper, operator = connect(), connect(), connect()
    held = claimed(conn)
    oracle.expire(conn, [held])
    with operator.transaction():
        assert oracle.cancel(operator, held.id) == "requested"
        assert at_once(conn, oracle.reap, reaper) == []
    assert oracle.reap(reaper) == [held.id]
    assert oracle.state(conn, held.id) == ("cancelled", 1)
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_cancelling_waits_for_an_open_reaping(connect: Connect, rolled_back: bool) -> None:
    conn, reaper, operator = connect(), connect(), connect()
    held = claimed(conn)
    oracle.expire(conn, [held])
    with reaper.transaction(force_rollback=rolled_back):
        assert oracle.reap(reaper) == [held.id]
        call = waiting(conn, oracle.cancel, operator, held.id)
    assert call.result() == ("requested" if rolled_back else "cancelled")
    oracle.check(conn)


@pytest.mark.parametrize("end", [oracle.complete, oracle.fail, oracle.release])
def test_cancelling_does_not_wait_for_a_handler_that_holds_its_task(
    connect: Connect, end: Use
) -> None:
    conn, holder, operator = connect(), connect(), connect()
    held = claimed(conn)
    with holder.transaction():
        oracle.hold(holder, held)
        answer = at_once(conn, oracle.cancel, operator, held.id)
        assert answer == "requested"
        assert oracle.extend(conn, [held]) == ["cancel_requested"]
        end(holder, held)
    expected = "completed" if end is oracle.complete else "cancelled"
    assert oracle.state(conn, held.id) == (expected, 1)
    assert cancel_requested(conn, held.id)
    oracle.check(conn)


# retry_task


@pytest.mark.parametrize("rolled_back", [False, True])
def test_of_two_retries_one_succeeds(connect: Connect, rolled_back: bool) -> None:
    conn, first, second = connect(), connect(), connect()
    task_id = failed(conn)
    with first.transaction(force_rollback=rolled_back):
        assert oracle.retry(first, task_id) == task_id
        call = waiting(conn, oracle.retry, second, task_id)
    assert call.result() == (task_id if rolled_back else "TS423")
    assert oracle.state(conn, task_id) == ("queued", 0)
    oracle.check(conn)


def test_only_what_failed_or_was_cancelled_is_retried(connect: Connect) -> None:
    """Also when it was completed just before; and the attempts begin again."""
    conn, worker, operator = connect(), connect(), connect()
    held = claimed(conn)
    with worker.transaction():
        assert oracle.complete(worker, held)
        assert at_once(conn, oracle.retry, operator, held.id) == "TS423"
    assert at_once(conn, oracle.retry, operator, held.id) == "TS423"
    assert oracle.state(conn, held.id) == ("completed", 1)
    held = claimed(conn)
    assert oracle.cancel(conn, held.id) == "requested"
    assert oracle.fail(conn, held) == "cancelled"
    assert oracle.retry(operator, held.id) == held.id
    [again] = oracle.claim(conn)
    assert (again.id, again.attempt) == (held.id, 1)
    assert not cancel_requested(conn, held.id)
    assert oracle.outcome(partial(oracle.complete, conn, held)) == "TS409"
    oracle.check(conn)


def test_cancelling_does_not_wait_for_an_open_retry_nor_the_reverse(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    task_id = failed(conn)
    with first.transaction():
        assert oracle.retry(first, task_id) == task_id
        assert at_once(conn, oracle.cancel, second, task_id) == "finished"
    with first.transaction():
        assert oracle.cancel(first, task_id) == "cancelled"
        assert at_once(conn, oracle.retry, second, task_id) == "TS423"
    assert oracle.retry(conn, task_id) == task_id
    oracle.check(conn)


def test_a_task_that_is_cancelled_and_retried_all_the_time_is_always_found(
    connect: Connect,
) -> None:
    conn = connect()
    [task_id] = oracle.enqueue(conn)
    sessions = [connect() for _ in range(4)]

    def turns(session: psycopg.Connection, call: Callable[..., Any]) -> list[Any]:
        return [oracle.outcome(partial(call, session, task_id)) for _ in range(500)]

    *cancels, first, second = oracle.together(
        partial(turns, session, call)
        for session, call in zip(
            sessions, [oracle.cancel, oracle.cancel, oracle.retry, oracle.retry], strict=True
        )
    )
    assert {answer for answers in cancels for answer in answers} <= {"cancelled", "finished"}
    assert {*first, *second} <= {task_id, "TS423"}
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_retry_waits_for_an_open_task_with_its_key(connect: Connect, rolled_back: bool) -> None:
    conn, producer, operator = connect(), connect(), connect()
    task_id = failed(conn, unique_key="k")
    before = oracle.task(conn, task_id)
    with producer.transaction(force_rollback=rolled_back):
        [other] = oracle.enqueue(producer, unique_key="k")
        assert other != task_id
        call = waiting(conn, oracle.retry, operator, task_id)
    if rolled_back:
        assert call.result() == task_id
        assert oracle.state(conn, task_id) == ("queued", 0)
    else:
        assert call.result() == "TS423"
        assert oracle.task(conn, task_id) == before
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_enqueuing_waits_for_the_open_retry_of_its_key(connect: Connect, rolled_back: bool) -> None:
    conn, producer, operator = connect(), connect(), connect()
    task_id = failed(conn, unique_key="k")
    with operator.transaction(force_rollback=rolled_back):
        assert oracle.retry(operator, task_id) == task_id
        call = waiting(conn, oracle.enqueue, producer, unique_key="k")
    [answer] = call.result()
    assert (answer == task_id) is not rolled_back
    assert oracle.state(conn, task_id)[0] == ("failed" if rolled_back else "queued")
    oracle.check(conn)


def test_a_refused_retry_takes_nothing_from_the_callers_transaction(connect: Connect) -> None:
    conn, operator = connect(), connect()
    task_id = failed(conn, unique_key="k")
    before = oracle.task(conn, task_id)
    [live] = oracle.enqueue(conn, unique_key="k")
    with operator.transaction():
        [other] = oracle.enqueue(operator)
        with pytest.raises(psycopg.Error) as refusal, operator.transaction():
            oracle.retry(operator, task_id)
        assert refusal.value.sqlstate == "TS423"
        assert oracle.cancel(operator, live) == "cancelled"
    assert oracle.task(conn, task_id) == before
    assert oracle.state(conn, other) == ("queued", 0)
    assert oracle.retry(conn, task_id) == task_id
    oracle.check(conn)


def test_a_task_that_was_retried_and_cancelled_meanwhile_is_retried(
    connect: Connect,
) -> None:
    conn, first, second = connect(), connect(), connect()
    task_id = failed(conn)
    with first.transaction():
        assert oracle.retry(first, task_id) == task_id
        assert oracle.cancel(first, task_id) == "cancelled"
        call = waiting(conn, oracle.retry, second, task_id)
    assert call.result() == task_id
    oracle.check(conn)


# reschedule_task


@pytest.mark.parametrize("rolled_back", [False, True])
def test_rescheduling_waits_for_an_open_claim(connect: Connect, rolled_back: bool) -> None:
    conn, worker, operator = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn)
    with worker.transaction(force_rollback=rolled_back):
        [held] = oracle.claim(worker)
        before = oracle.task(worker, task_id)
        call = waiting(conn, oracle.reschedule, operator, task_id, priority=9)
    if rolled_back:
        assert call.result() is None
        assert oracle.state(conn, task_id) == ("queued", 0)
    else:
        assert call.result() == "TS423"
        assert oracle.task(conn, task_id) == before
        assert oracle.complete(worker, held)
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_claim_passes_by_a_task_that_is_being_rescheduled(
    connect: Connect, rolled_back: bool
) -> None:
    conn, worker, operator = connect(), connect(), connect()
    first, second = oracle.enqueue(conn, 2)
    later = datetime.now(UTC) + timedelta(days=1)
    with operator.transaction(force_rollback=rolled_back):
        oracle.reschedule(operator, first, run_at=later)
        held = at_once(conn, oracle.claim, worker, limit=2)
        assert ids(held) == [second]
    assert ids(oracle.claim(conn)) == ([first] if rolled_back else [])
    oracle.check(conn)


def test_a_queued_task_that_was_cancelled_and_retried_meanwhile_is_rescheduled(
    connect: Connect,
) -> None:
    conn, first, second = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn)
    with first.transaction():
        assert oracle.cancel(first, task_id) == "cancelled"
        assert oracle.retry(first, task_id) == task_id
        call = waiting(conn, oracle.reschedule, second, task_id, priority=9)
    assert call.result() is None
    assert oracle.state(conn, task_id) == ("queued", 0)
    oracle.check(conn)


# hold_task


def test_a_reaper_passes_by_a_held_task_past_its_lease(connect: Connect) -> None:
    conn, holder, reaper = connect(), connect(), connect()
    oracle.enqueue(conn, 2)
    held, abandoned = oracle.claim(conn, limit=2)
    with holder.transaction():
        oracle.hold(holder, held)
        at_once(conn, oracle.expire, reaper, [held, abandoned])
        assert at_once(conn, oracle.reap, reaper) == [abandoned.id]
        assert oracle.reap(holder) == []
        assert oracle.complete(holder, held)
    assert oracle.reap(reaper) == []
    assert oracle.state(conn, held.id) == ("completed", 1)
    oracle.check(conn)


def test_a_held_task_is_free_when_its_holders_connection_ends(connect: Connect) -> None:
    conn, holder = connect(), connect()
    held = claimed(conn)
    oracle.expire(conn, [held])
    holder.execute("begin")
    oracle.hold(holder, held)
    assert oracle.reap(conn) == []
    conn.execute("select pg_terminate_backend(%s)", [holder.info.backend_pid])
    wait_until(lambda: oracle.reap(conn) == [held.id])
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_holding_waits_for_an_open_reaping(connect: Connect, rolled_back: bool) -> None:
    conn, holder, reaper = connect(), connect(), connect()
    held = claimed(conn)
    oracle.expire(conn, [held])
    with reaper.transaction(force_rollback=rolled_back):
        assert oracle.reap(reaper) == [held.id]
        call = waiting(conn, oracle.hold, holder, held)
    assert call.result() == (None if rolled_back else "TS409")
    oracle.check(conn)


def test_the_holders_lease_and_batches_do_not_wait_for_it(connect: Connect) -> None:
    conn, holder, keeper = connect(), connect(), connect()
    held = claimed(conn)
    with holder.transaction():
        oracle.hold(holder, held)
        assert at_once(conn, oracle.extend, keeper, [held]) == ["extended"]
        at_once(conn, oracle.extend_one, keeper, held)
        assert oracle.complete(holder, held)
    oracle.check(conn)


# Effects that happen exactly once


def create_effects(conn: psycopg.Connection) -> None:
    conn.execute("create table effect (task_id bigint not null)")


def effects(conn: psycopg.Connection, held: Claim) -> int:
    """How often the handler took effect."""
    [(count,)] = conn.execute("select count(*) from effect where task_id = %s", [held.id])
    assert isinstance(count, int)
    return count


def handle(session: psycopg.Connection, held: Claim) -> None:
    """Hold, take effect, complete; `session` is in a transaction."""
    oracle.hold(session, held)
    session.execute("insert into effect values (%s)", [held.id])
    assert oracle.complete(session, held)


def handle_and_commit(session: psycopg.Connection, held: Claim) -> None:
    with session.transaction():
        handle(session, held)


ISOLATION = ["read\\ committed", "repeatable\\ read", "serializable"]


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize(("keep", "refusal"), [("1 day", "TS409"), ("0", "TS404")])
def test_a_held_task_takes_effect_once_although_the_answer_to_the_commit_is_lost(
    connect: Connect, isolation: str, keep: str, refusal: str
) -> None:
    conn = connect()
    create_effects(conn)
    conn.execute("select pgsched.configure_queue('default', p_keep_completed => %s)", [keep])
    held = claimed(conn)
    session, again = (
        connect(options=f"-c default_transaction_isolation={isolation}") for _ in range(2)
    )
    session.execute("begin")
    handle(session, held)
    assert effects(conn, held) == 0
    session.pgconn.send_query(b"commit")  # and never read what it answers
    wait_until(lambda: effects(conn, held) == 1)
    session.close()
    assert oracle.outcome(partial(handle_and_commit, again, held)) == refusal
    assert effects(conn, held) == 1
    oracle.check(conn)


@pytest.mark.parametrize("isolation", ISOLATION)
def test_a_held_task_that_is_tried_again_during_the_commit_takes_effect_once(
    connect: Connect, isolation: str
) -> None:
    """The second try waits for the first, whose transaction is still open."""
    conn, first = connect(), connect()
    create_effects(conn)
    held = claimed(conn)
    second = connect(options=f"-c default_transaction_isolation={isolation}")
    with first.transaction():
        handle(first, held)
        call = waiting(conn, handle_and_commit, second, held)
    # A snapshot from before the wait does not show that the claim has ended.
    assert call.result() == ("TS409" if isolation == ISOLATION[0] else "40001")
    assert effects(conn, held) == 1
    oracle.check(conn)


@pytest.mark.parametrize("isolation", ISOLATION)
def test_a_held_task_that_is_rolled_back_takes_no_effect(connect: Connect, isolation: str) -> None:
    conn = connect()
    create_effects(conn)
    held = claimed(conn)
    before = oracle.task(conn, held.id)
    session = connect(options=f"-c default_transaction_isolation={isolation}")
    with session.transaction(force_rollback=True):
        handle(session, held)
    assert oracle.task(conn, held.id) == before
    assert effects(conn, held) == 0
    session.execute("begin")
    handle(session, held)
    conn.execute("select pg_terminate_backend(%s)", [session.info.backend_pid])
    again = connect(options=f"-c default_transaction_isolation={isolation}")
    handle_and_commit(again, held)
    assert effects(conn, held) == 1
    oracle.check(conn)


def test_a_stale_holder_takes_no_effect(connect: Connect) -> None:
    conn, stale = connect(), connect()
    create_effects(conn)
    held = claimed(conn)
    oracle.expire(conn, [held])
    assert oracle.reap(conn) == [held.id]
    [current] = oracle.claim(conn)
    with conn.transaction():
        handle(conn, current)
        call = waiting(connect(), handle_and_commit, stale, held)
    assert call.result() == "TS409"
    assert effects(conn, held) == 1
    oracle.check(conn)


# extend_task


@pytest.mark.parametrize("rolled_back", [False, True])
def test_one_extension_waits_where_a_batch_says_busy(connect: Connect, rolled_back: bool) -> None:
    conn, worker, other = connect(), connect(), connect()
    held = claimed(conn)
    with other.transaction(force_rollback=rolled_back):
        assert oracle.complete(other, held)
        assert at_once(conn, oracle.extend, worker, [held]) == ["busy"]
        call = waiting(conn, oracle.extend_one, worker, held)
    if rolled_back:
        assert call.result() > held.lease_expires_at
    else:
        assert call.result() == "TS409"
    oracle.check(conn)


# Queues


def pause(session: psycopg.Connection) -> None:
    session.execute("select pgsched.pause_queue('default')")


def resume(session: psycopg.Connection) -> None:
    session.execute("select pgsched.resume_queue('default')")


def test_pausing_waits_for_nobody_and_nobody_for_it(connect: Connect) -> None:
    """It holds from its commit on, also for sessions that claimed before."""
    conn, worker, operator = connect(), connect(), connect()
    oracle.enqueue(conn, 3)
    with worker.transaction():
        [held] = oracle.claim(worker)
        at_once(conn, pause, operator)
        assert oracle.claim(worker) == []
        assert oracle.complete(worker, held)
    with operator.transaction():
        resume(operator)
        assert at_once(conn, oracle.claim, worker) == []
        at_once(conn, oracle.enqueue, worker)
    with operator.transaction():
        pause(operator)
        assert len(at_once(conn, oracle.claim, worker)) == 1
    assert oracle.claim(worker) == []
    oracle.check(conn)


def test_eight_sessions_configure_a_new_queue_at_once(connect: Connect) -> None:
    conn = connect()
    settings = {
        "max_attempts": "3",
        "retry_delay": "00:00:05",
        "retry_delay_max": "00:05:00",
        "max_payload_bytes": "100",
        "keep_completed": "01:00:00",
        "keep_failed": "02:00:00",
        "notify": "false",
    }
    calls = [f"configure_queue(%s, p_{name} => '{value}')" for name, value in settings.items()]
    sessions = [connect() for _ in range(8)]

    def configure(session: psycopg.Connection, call: str) -> None:
        for queue in range(50):
            session.execute(f"select pgsched.{call}", [f"queue-{queue}"])

    oracle.together(
        partial(configure, session, call)
        for session, call in zip(sessions, [*calls, "pause_queue(%s)"], strict=True)
    )
    columns = ", ".join([*(f"{name}::text" for name in settings), "paused"])
    queues = conn.execute(f"select {columns} from pgsched.queues").fetchall()
    assert queues == [(*settings.values(), True)] * 50


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            mutants.CANCEL_WITH_TASK_LOCK,
            partial(
                test_cancelling_does_not_wait_for_a_handler_that_holds_its_task,
                end=oracle.complete,
            ),
        ),
        (mutants.RETRY_OF_ANY_STATUS, test_only_what_failed_or_was_cancelled_is_retried),
        (
            mutants.RESCHEDULE_OF_ANY_STATUS,
            partial(test_rescheduling_waits_for_an_open_claim, rolled_back=False),
        ),
        (mutants.HOLD_WITHOUT_LOCK, test_a_reaper_passes_by_a_held_task_past_its_lease),
    ],
)
def test_a_broken_function_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        test(connect)
