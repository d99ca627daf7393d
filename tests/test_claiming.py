"""Claiming with real sessions: nobody gets a task twice, nobody waits, no plan takes too much.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from random import Random

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Connect

PLANNER_SETTINGS = (
    "enable_bitmapscan",
    "enable_hashagg",
    "enable_hashjoin",
    "enable_indexscan",
    "enable_material",
    "enable_mergejoin",
    "enable_nestloop",
    "enable_sort",
)
SWITCHED_OFF = [
    *(off for size in range(3) for off in combinations(PLANNER_SETTINGS, size)),
    PLANNER_SETTINGS,
]


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def work(session: psycopg.Connection, random: Random) -> None:
    """Claim from two queues and complete, until no task is left."""

    def left() -> bool:
        [(left,)] = session.execute("select exists (select from pgsched.scheduled_tasks)")
        assert isinstance(left, bool)
        return left

    while left():
        for queue in random.sample(["a", "b"], 2):
            limit = random.choice([1, 2, random.randint(3, 100), 100])
            held = oracle.claim(session, queue=queue, limit=limit)
            if limit <= 2:
                for each in held:
                    oracle.outcome(partial(oracle.complete, session, each))
                continue
            while held:
                random.shuffle(held)
                outcomes = oracle.complete_batch(session, held)
                held = [
                    each for each, outcome in zip(held, outcomes, strict=True) if outcome == "busy"
                ]


def drain(connect: Connect, tasks: int, sessions: int) -> None:
    """Sessions complete all tasks, each once and at the first attempt."""
    conn = connect()
    for queue in ("a", "b"):
        oracle.enqueue(conn, tasks // 2, queue=queue, priorities=range(10))
    oracle.together(partial(work, connect(), Random(seed)) for seed in range(sessions))
    oracle.check(conn)
    ended = conn.execute("select status, attempt, count(*) from pgsched.tasks group by 1, 2")
    assert ended.fetchall() == [("completed", 1, tasks)]


def test_eight_sessions_complete_every_task_once(connect: Connect) -> None:
    drain(connect, tasks=5000, sessions=8)


def test_the_oracle_sees_a_claim_without_row_lock(connect: Connect) -> None:
    mutants.install(connect(), mutants.CLAIM_BY_ID)
    mutants.install(connect(), mutants.CLAIM_WITHOUT_ROW_LOCK)
    with pytest.raises(AssertionError, match="was handed out twice"):
        test_eight_sessions_complete_every_task_once(connect)


def test_a_claim_never_waits_and_gets_the_next_ones(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    ids = oracle.enqueue(conn, 30)
    with first.transaction():
        held = oracle.claim(first, limit=10)
        assert [each.id for each in held] == ids[:10]
        others = oracle.at_once(conn, second, lambda: oracle.claim(second, limit=10))
        assert [each.id for each in others] == ids[10:20]
    with first.transaction():
        oracle.complete(first, held[0])
        oracle.complete_batch(first, held[1:3])
        oracle.fail(first, held[3])
        oracle.fail(first, held[4], permanent=True)
        oracle.release(first, held[5])
        oracle.extend(first, held[6:])
        rest = oracle.at_once(conn, second, lambda: oracle.claim(second, limit=100))
        assert [each.id for each in rest] == ids[20:]
    again = oracle.at_once(conn, second, lambda: oracle.claim(second, limit=100))
    assert sorted(each.id for each in again) == [ids[3], ids[5]]
    oracle.check(conn)


def test_a_claim_that_is_rolled_back_leaves_the_task_to_others(connect: Connect) -> None:
    conn, first = connect(), connect()
    [task_id] = oracle.enqueue(conn)
    before = oracle.task(conn, task_id)
    with first.transaction(force_rollback=True):
        assert [each.id for each in oracle.claim(first)] == [task_id]
        assert oracle.claim(conn) == []
    assert oracle.task(conn, task_id) == before
    assert [each.attempt for each in oracle.claim(conn)] == [1]
    oracle.check(conn)


@pytest.mark.parametrize("analysed", [None, 0, 1, 2, 20])
def test_no_plan_takes_more_than_it_returns(connect: Connect, analysed: int | None) -> None:
    """Plans from a table analysed with so few rows (None: never), scans and joins switched off."""
    conn, other = connect(), connect()
    if analysed is not None:
        oracle.enqueue(conn, analysed, queue="a")
        conn.execute("vacuum analyze pgsched.scheduled_tasks")
    oracle.enqueue(conn, 6, queue="a")
    oracle.enqueue(conn, 3, queue="b")
    oracle.enqueue(conn, 3, queue="a", priorities=[2, 7])
    claim_under_all_plans(conn, other)
    conn.execute("drop index pgsched.scheduled_tasks_claim_idx")
    claim_under_all_plans(conn, other)
    oracle.check(conn)


def claim_under_all_plans(conn: psycopg.Connection, other: psycopg.Connection) -> None:
    """Claim and roll back, and look each time at everything that the claim changed or locked."""
    tasks = "select id, (queue, status, attempt)::text from pgsched.scheduled_tasks"
    free = f"select count(*) from ({tasks} for update skip locked) as free"
    before = set(conn.execute(tasks))
    for limit in (1, 2, 5):
        for off in SWITCHED_OFF:
            with conn.transaction(force_rollback=True):
                conn.execute("discard plans")
                for setting in off:
                    conn.execute(f"set local {setting} = off")
                held = oracle.claim(conn, queue="a", limit=limit)
                changed = set(conn.execute(tasks)) - before
                assert len(held) == limit, off
                assert {task_id for task_id, _ in changed} == {each.id for each in held}, off
                assert {row for _, row in changed} == {"(a,processing,1)"}, off
                assert oracle.task_locks(conn, conn) == limit, off
                assert other.execute(free).fetchall() == [(len(before) - limit,)], off


@pytest.mark.parametrize("index", [True, False])
def test_an_open_claim_holds_back_only_its_own_tasks(connect: Connect, index: bool) -> None:
    conn, first, second = connect(), connect(), connect()
    for queue in ("a", "b"):
        oracle.enqueue(conn, 300, queue=queue)
    conn.execute("analyze pgsched.scheduled_tasks")
    if not index:
        conn.execute("drop index pgsched.scheduled_tasks_claim_idx")
    with first.transaction():
        oracle.claim(first, queue="a")
        assert oracle.task_locks(conn, first) == 1
        for queue, left in (("a", 299), ("b", 300)):
            held = [len(oracle.claim(second, queue=queue, limit=100)) for _ in range(4)]
            assert sum(held) == left
    oracle.check(conn)


def test_a_row_that_refers_to_a_task_does_not_hide_it(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn)
    conn.execute("create table note (task_id bigint references pgsched.scheduled_tasks)")
    with first.transaction(force_rollback=True):
        first.execute("insert into note values (%s)", [task_id])
        held = oracle.at_once(conn, second, lambda: oracle.claim(second))
        assert [each.id for each in held] == [task_id]
    oracle.check(conn)


def test_the_applications_own_advisory_locks_are_apart(connect: Connect) -> None:
    conn, application, session = connect(), connect(), connect()
    ids = oracle.enqueue(conn, 100)
    forms = ("{}({})", "{}(0, {}::integer)", "{}(1, {}::integer)")
    for form in forms:
        lock = form.format("pg_advisory_lock", "id")
        application.execute(f"select {lock} from generate_series(0, 200) as id")
    with session.transaction():
        held = oracle.at_once(conn, session, lambda: oracle.claim(session, limit=100))
        assert [each.id for each in held] == ids
        for form in forms:
            lock = form.format("pg_try_advisory_xact_lock", "id")
            got = connect().execute(f"select {lock} from unnest(%s::bigint[]) as id", [ids])
            assert set(got) == {(False,)}  # the application has them
        application.execute("select pg_advisory_unlock_all()")
        for form in forms:
            lock = form.format("pg_try_advisory_lock", "id")
            got = application.execute(f"select {lock} from unnest(%s::bigint[]) as id", [ids])
            assert set(got) == {(True,)}
    outcomes = oracle.at_once(conn, session, lambda: oracle.complete_batch(session, held))
    assert outcomes == ["completed"] * 100
    oracle.check(conn)


def set_next_id(conn: psycopg.Connection, task_id: int) -> None:
    conn.execute("select setval('pgsched.scheduled_tasks_id_seq', %s, false)", [task_id])


def test_ids_that_agree_in_their_low_bits_are_claimed_side_by_side(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    for offset in (0, 2**31, 2**32, 2**53):
        set_next_id(conn, 7 + offset)
        oracle.enqueue(conn)
    with first.transaction(), second.transaction():
        held = [oracle.claim(first), oracle.claim(second), oracle.claim(first)]
        held += [oracle.at_once(conn, second, lambda: oracle.claim(second))]
        assert [[each.id for each in claims] for claims in held] == [
            [7], [7 + 2**31], [7 + 2**32], [7 + 2**53]
        ]  # fmt: skip
    oracle.check(conn)


def test_ids_that_share_a_lock_wait_for_each_other_but_are_not_lost(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    for task_id in (7, 7 + 2147483647):
        set_next_id(conn, task_id)
        oracle.enqueue(conn)
    with first.transaction(force_rollback=True):
        assert [each.id for each in oracle.claim(first, limit=2)] == [7, 7 + 2147483647]
    with first.transaction():
        oracle.claim(first)
        assert oracle.at_once(conn, second, lambda: oracle.claim(second)) == []
    assert [each.id for each in oracle.claim(second)] == [7 + 2147483647]
    oracle.check(conn)


@pytest.mark.parametrize("last", [2**31 - 2, 2**32 - 1, 2**53])
def test_every_call_takes_ids_of_any_size(connect: Connect, last: int) -> None:
    conn = connect()
    set_next_id(conn, last - 2)
    ids = oracle.enqueue(conn, 8)
    assert ids == list(range(last - 2, last + 6))
    held = oracle.claim(conn, limit=8)
    assert [each.id for each in held] == ids
    assert oracle.complete(conn, held[0])
    assert oracle.complete_batch(conn, held[1:3]) == ["completed"] * 2
    assert oracle.fail(conn, held[3]) == "queued"
    assert oracle.fail(conn, held[4], permanent=True) == "failed"
    oracle.release(conn, held[5])
    assert oracle.extend(conn, held[6:]) == ["extended"] * 2
    oracle.expire(conn, held[7:])
    assert oracle.reap(conn) == ids[7:]
    [stats] = conn.execute("select queued, due, processing, failed from pgsched.queue_stats()")
    assert stats == (3, 3, 1, 1)
    oracle.check(conn)


def test_an_old_transaction_goes_by_the_servers_clock(connect: Connect) -> None:
    conn, session = connect(), connect()

    with session.transaction():
        session.execute("select now()")
        oracle.enqueue(conn)
        [due_by_then] = session.execute("select clock_timestamp() + interval '1 hour'")
        claims = oracle.claim(session, lease="1 hour")
        assert len(claims) == 1
        held = claims[0]
        assert (held.lease_expires_at,) >= due_by_then
        [due_by_then] = session.execute("select clock_timestamp() + interval '2 hours'")
        assert oracle.extend(session, [held], lease="2 hours") == ["extended"]
        [end] = session.execute("select lease_expires_at from pgsched.scheduled_tasks")
        assert end >= due_by_then
        [task_id] = oracle.enqueue(session)
        [run_at] = session.execute(
            "select run_at > now() from pgsched.scheduled_tasks where id = %s", [task_id]
        )
        assert run_at == (True,)
    assert oracle.reap(conn) == []
    with session.transaction():
        session.execute("select now()")
        conn.execute(
            "update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() where id = %s",
            [held.id],
        )
        assert oracle.reap(session) == [held.id]
    oracle.check(conn)


@pytest.mark.parametrize("call", ["claim_task('worker')", "reap_stale()"])
def test_an_idle_call_writes_nothing(connect: Connect, call: str) -> None:
    conn = connect()
    oracle.enqueue(conn, 3)
    assert len(oracle.claim(conn, limit=3)) == 3
    [later] = oracle.enqueue(conn)
    conn.execute("update pgsched.scheduled_tasks set run_at = 'infinity' where id = %s", [later])
    with conn.transaction():
        assert conn.execute(f"select * from pgsched.{call}").fetchall() == []
        [(plan,)] = conn.execute(
            f"explain (analyze, wal, format json) select * from pgsched.{call}"
        )
        assert plan[0]["Plan"]["WAL Records"] == 0
        [xid] = conn.execute("select pg_current_xact_id_if_assigned()")
        assert xid == (None,)
        assert oracle.task_locks(conn, conn) == 0
    oracle.check(conn)


def test_contended_is_the_mean_of_what_others_held_ahead(connect: Connect) -> None:
    conn, holder, session = connect(), connect(), connect()
    oracle.enqueue(conn, 4, priorities=[1])
    oracle.enqueue(conn, 20)
    session.execute("select setseed(0.5)")

    def contended(calls: int) -> list[int]:
        values = []
        for _ in range(calls):
            with session.transaction(force_rollback=True):
                held = oracle.claim(session, limit=5)
                assert len({each.contended for each in held}) == 1
                values.append(held[0].contended)
        return values

    assert set(contended(100)) == {0}
    with holder.transaction(force_rollback=True):
        oracle.claim(holder, limit=7)
        holder.execute("select from pgsched.scheduled_tasks where id > 20 for update")
        calls = 1600
        values = contended(calls)
        assert set(values) == {0, 16 * 7}
        # A value is 16 * 7 in one call of 16: its standard deviation is 7 * sqrt(15).
        assert abs(sum(values) / calls - 7) < 4 * 7 * 15**0.5 / calls**0.5
    oracle.check(conn)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (mutants.CLAIM_THAT_WAITS, test_a_claim_never_waits_and_gets_the_next_ones),
        (
            mutants.CLAIM_WITH_TRY_LOCK_IN_CHOICE,
            partial(test_an_open_claim_holds_back_only_its_own_tasks, index=False),
        ),
        (
            mutants.CLAIM_WITH_TRY_LOCK_IN_UPDATE,
            partial(test_no_plan_takes_more_than_it_returns, analysed=1),
        ),
        (mutants.CLAIM_WITH_ROW_LOCK_TOO_STRONG, test_a_row_that_refers_to_a_task_does_not_hide_it),
        (
            mutants.CLAIM_WITH_CUT_KEY,
            test_ids_that_agree_in_their_low_bits_are_claimed_side_by_side,
        ),
        (mutants.CLAIM_BY_TRANSACTION_TIME, test_an_old_transaction_goes_by_the_servers_clock),
    ],
)
def test_a_broken_claim_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    conn = connect()
    if mutant is mutants.CLAIM_WITH_TRY_LOCK_IN_UPDATE and conn.info.server_version < 180000:
        pytest.skip("before PostgreSQL 18 every plan finds what was picked by its place alone")
    mutants.install(conn, mutant)
    with pytest.raises(AssertionError):
        test(connect)
