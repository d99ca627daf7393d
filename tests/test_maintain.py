"""maintain by many sessions: its steps are done once, and apart from each other.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Claim, Connect

TRY = "pg_try_advisory_xact_lock(1338, v_lock)"
MAINTAIN_WITHOUT_LOCK = Mutant("maintain", TRY, "true")
MAINTAIN_THAT_WAITS = Mutant("maintain", TRY, "pg_advisory_xact_lock(1338, v_lock) is not null")
MAINTAIN_AS_A_WHOLE = Mutant("maintain", "or serialization_failure", "")
MAINTAIN_IN_SPITE_OF_A_CANCEL = Mutant(
    "maintain", "when lock_not", "when query_canceled or lock_not"
)


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def maintain(session: psycopg.Connection) -> dict[str, int | None]:
    """Each step that is about tasks, and how many it changed."""
    rows = session.execute(
        "select step, affected from pgsched.maintain() where step <> 'move_claim_marks'"
    )
    return dict(rows.fetchall())


def stale(conn: psycopg.Connection) -> Claim:
    """A claim whose lease ended."""
    oracle.enqueue(conn)
    [held] = oracle.claim(conn)
    oracle.expire(conn, [held])
    return held


def add_old(conn: psycopg.Connection) -> None:
    """Add a finished task that is to be deleted."""
    [task_id] = oracle.enqueue(conn)
    assert oracle.cancel(conn, task_id) == "cancelled"
    age(conn, [task_id])


def age(conn: psycopg.Connection, ids: list[int]) -> None:
    conn.execute(
        "update pgsched.finished_tasks set finished_at = finished_at - interval '1 year'"
        " where id = any (%s)",
        [ids],
    )


def warnings_of(session: psycopg.Connection) -> list[tuple[str | None, str | None]]:
    """A list that gets code and message of each warning to come."""
    warnings: list[tuple[str | None, str | None]] = []
    session.add_notice_handler(lambda d: warnings.append((d.sqlstate, d.message_primary)))
    return warnings


def test_a_step_that_another_session_is_at_is_left_to_it(connect: Connect) -> None:
    conn, first, second, blocker = connect(), connect(), connect(), connect()
    held = stale(conn)
    add_old(conn)
    with blocker.transaction():
        blocker.execute("lock table pgsched.finished_tasks in share mode")
        call = oracle.Call(conn, first, partial(maintain, first))
        assert call.waits  # to delete
        steps = oracle.at_once(conn, second, partial(maintain, second))
        assert steps == {"reap_stale": 1, "prune_finished": None}
        assert oracle.state(conn, held.id) == ("queued", 1)
    assert call.result() == {"reap_stale": 0, "prune_finished": 1}


def test_all_steps_are_left_to_a_session_that_has_not_committed(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    for _ in range(2):
        stale(conn)
    add_old(conn)
    with first.transaction(force_rollback=True):
        assert maintain(first) == {"reap_stale": 2, "prune_finished": 1}
        steps = oracle.at_once(conn, second, partial(maintain, second))
        assert steps == {"reap_stale": None, "prune_finished": None}
    assert maintain(second) == {"reap_stale": 2, "prune_finished": 1}
    assert maintain(first) == {"reap_stale": 0, "prune_finished": 0}


@pytest.mark.parametrize(
    ("table", "blocked"),
    [("finished_tasks", "prune_finished"), ("scheduled_tasks", "reap_stale")],
)
def test_a_step_that_meets_a_lock_timeout_undoes_no_other(
    connect: Connect, table: str, blocked: str
) -> None:
    conn, session, blocker = connect(), connect(options="-c lock_timeout=100ms"), connect()
    stale(conn)
    add_old(conn)
    warnings = warnings_of(session)
    with blocker.transaction():
        blocker.execute(f"lock table pgsched.{table}".encode())
        assert maintain(session) == {"reap_stale": 1, "prune_finished": 1, blocked: None}
    assert warnings == [
        ("55P03", f"{blocked} could not run now: canceling statement due to lock timeout")
    ]
    assert maintain(session) == {"reap_stale": 0, "prune_finished": 0, blocked: 1}
    assert len(warnings) == 1


def test_a_step_whose_snapshot_is_too_old_undoes_no_other(connect: Connect) -> None:
    conn, session = connect(), connect()
    session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    held = stale(conn)
    add_old(conn)
    warnings = warnings_of(session)
    with session.transaction():
        session.execute("select from pgsched.scheduled_tasks")
        assert oracle.extend(conn, [held]) == ["extended"]
        assert maintain(session) == {"reap_stale": None, "prune_finished": 1}
    assert [sqlstate for sqlstate, _ in warnings] == ["40001"]
    assert maintain(session) == {"reap_stale": 0, "prune_finished": 0}
    oracle.check(conn)


@pytest.mark.parametrize("table", ["finished_tasks", "scheduled_tasks"])
def test_a_statement_timeout_ends_and_undoes_the_whole_call(connect: Connect, table: str) -> None:
    conn, session, blocker = connect(), connect(options="-c statement_timeout=500ms"), connect()
    held = stale(conn)
    add_old(conn)
    warnings = warnings_of(session)
    with blocker.transaction():
        blocker.execute(f"lock table pgsched.{table}".encode())
        assert oracle.outcome(partial(maintain, session)) == "57014"
    assert warnings == []
    assert oracle.state(conn, held.id) == ("processing", 1)
    assert maintain(session) == {"reap_stale": 1, "prune_finished": 1}


def test_many_callers_do_everything_once_and_never_deadlock(connect: Connect) -> None:
    conn = connect()
    over = Event()

    def work(session: psycopg.Connection) -> int:
        """The number of claims that were left to their leases."""
        left = 0
        for _ in range(20):
            oracle.enqueue(session, 12)
            held = oracle.claim(session, limit=12)
            for each in held[:3]:
                oracle.fail(session, each, permanent=True)
            age(session, [each.id for each in held[:3]])
            oracle.complete_batch(session, held[3:6])
            oracle.expire(session, held[6:])
            left += len(held[6:])
        return left

    def maintain_until_over(session: psycopg.Connection) -> list[tuple[str | None, str | None]]:
        """The warnings."""
        warnings = warnings_of(session)
        while not over.is_set():
            oracle.maintain(session)
        return warnings

    with ThreadPoolExecutor(8) as callers:
        options = "-c deadlock_timeout=100ms"
        calls = [callers.submit(maintain_until_over, connect(options=options)) for _ in range(8)]
        try:
            left = oracle.together(partial(work, connect(options=options)) for _ in range(4))
        finally:
            over.set()
    assert [call.result() for call in calls] == [[]] * 8
    oracle.maintain(conn)

    events = Counter(event for (event,) in conn.execute("select event from oracle.log"))
    assert events["reaped"] == sum(left)
    assert events["deleted"] == events["failed"]
    [deadlocks] = conn.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    assert deadlocks == (0,)
    oracle.check(conn)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (MAINTAIN_WITHOUT_LOCK, test_all_steps_are_left_to_a_session_that_has_not_committed),
        (MAINTAIN_THAT_WAITS, test_a_step_that_another_session_is_at_is_left_to_it),
        (MAINTAIN_AS_A_WHOLE, test_a_step_whose_snapshot_is_too_old_undoes_no_other),
        (
            MAINTAIN_IN_SPITE_OF_A_CANCEL,
            partial(
                test_a_statement_timeout_ends_and_undoes_the_whole_call, table="finished_tasks"
            ),
        ),
    ],
)
def test_a_broken_maintain_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises((AssertionError, psycopg.errors.SerializationFailure)):
        test(connect)


def test_reaping_one_task_twice_is_seen(connect: Connect) -> None:
    for mutant in (MAINTAIN_WITHOUT_LOCK, mutants.REAP_BY_ID_ONLY):
        mutants.install(connect(), mutant)
    with pytest.raises((AssertionError, psycopg.Error)):
        test_many_callers_do_everything_once_and_never_deadlock(connect)
