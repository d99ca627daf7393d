"""Claims begin at a mark, under which no task is and none may come, and miss none.

A test that is also run against mutants takes nothing but the connection factory.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Thread

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Claim, Connect, Use
from workers import wait_until

MOVE = "_move_claim_marks"

# What it waits for is there already, and every mark is worth moving.
EAGER = [
    Mutant(MOVE, "interval '0.01 seconds'", "interval '0'"),
    Mutant(MOVE, ">= 200", ">= 0"),
    Mutant(MOVE, "50 * (", "0 * ("),
    Mutant("_move_claim_mark", "100", "0"),
]

MOVE_IN_SPITE_OF_AN_ID = Mutant(MOVE, "pg_current_xact_id_if_assigned() is not null", "false")
MOVE_WITHOUT_LOCK = Mutant(MOVE, "pg_try_advisory_xact_lock(1338, 4)", "true")
MOVE_BEFORE_OTHERS_HAVE_ENDED = Mutant(MOVE, "<= pg_snapshot_xmin", "< pg_snapshot_xmax")
MOVE_BY_A_LATER_CLOCK = Mutant(
    MOVE,
    "v_last.read_at := v_now;",
    "perform pg_sleep(0.02); v_last.read_at := clock_timestamp();",
)
MOVE_PAST_LOCKED_TASKS = Mutant(
    "_move_claim_mark", "limit 1) as f", "limit 1 for no key update skip locked) as f"
)
MOVE_WITHOUT_SWEEP = Mutant("_move_claim_mark", "when p_sweeps then null", "when false then null")
MOVE_WITHOUT_LOOKING_AT_THE_CLOCK = Mutant(MOVE, "or v_now < greatest", "or null < greatest")
MOVE_BY_THE_ID_OF_ANOTHER_SERVER = Mutant(
    MOVE, "v_last.xid >= pg_snapshot_xmax(v_snapshot)", "false"
)
MOVE_WITHOUT_READINGS = Mutant(MOVE, "or v_last.xid is null", "or false")
CLAIM_BY_ANY_MARK = Mutant("claim_task", "when m.run_at[levels.priority + 1] <= v_now", "when true")
ENQUEUE_BY_AN_EARLIER_CLOCK = Mutant("enqueue_task", "pg_current_xact_id() is not null", "true")
BATCH_BY_AN_EARLIER_CLOCK = Mutant("enqueue_tasks", "perform pg_current_xact_id();", "")
RESCHEDULE_BY_AN_EARLIER_CLOCK = Mutant(
    "reschedule_task",
    "greatest(p_run_at, clock_timestamp())",
    "greatest(p_run_at, statement_timestamp())",
)
RESCHEDULE_OF_PRIORITY_ALONE = Mutant(
    "reschedule_task",
    "greatest(p_run_at, clock_timestamp())",
    "case when p_run_at is null then t.run_at else greatest(p_run_at, clock_timestamp()) end",
)
RETURN_AT_ITS_OLD_TIME = Mutant("_requeue_tasks", "run_at = g.run_at", "run_at = t.run_at")
RETRY_AT_ITS_OLD_TIME = Mutant("retry_task", "clock_timestamp()", "v_task.run_at")


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)
    # By its row the queue is known before one of its tasks has ended.
    conn.execute("select pgsched.configure_queue('default', p_retry_delay => '0')")


@pytest.fixture
def eager(conn: psycopg.Connection) -> None:
    for each in EAGER:
        mutants.install(conn, each)


def look(session: psycopg.Connection, times: int = 1) -> None:
    """Call what moves the marks."""
    for _ in range(times):
        session.execute("select * from pgsched.reap_stale()")


def settle(conn: psycopg.Connection) -> None:
    """Return when the marks are as high as the clock was at the call."""
    [(now,)] = conn.execute("select clock_timestamp()")

    def proven() -> bool:
        look(conn)
        [(looked_to,)] = conn.execute(
            "select max(looked_to) from pgsched.claim_readings"
        ).fetchall()
        return looked_to is not None and looked_to >= now

    wait_until(proven)


def marks(conn: psycopg.Connection) -> list[tuple[object, int]]:
    """The mark of priority 5 of the queue, as run_at and id; empty: it has none."""
    return conn.execute("select run_at[6], id[6] from pgsched.claim_marks").fetchall()


def claimed_ids(session: psycopg.Connection) -> list[int]:
    return [each.id for each in oracle.claim(session, limit=100)]


@pytest.mark.usefixtures("eager")
def test_a_mark_is_the_first_queued_task_or_else_a_time(connect: Connect) -> None:
    conn = connect()
    tasks = oracle.enqueue_batch(conn, [{}, {}, {}])
    settle(conn)
    [(run_at,)] = conn.execute("select distinct run_at from pgsched.scheduled_tasks").fetchall()
    assert marks(conn) == [(run_at, tasks[0])]
    assert [each.id for each in oracle.claim(conn)] == tasks[:1]
    settle(conn)
    assert marks(conn) == [(run_at, tasks[1])]
    assert claimed_ids(conn) == tasks[1:]
    settle(conn)
    assert (
        marks(conn)
        == conn.execute(
            "select proven_at, -9223372036854775808 from pgsched.claim_readings"
        ).fetchall()
    )
    oracle.check(conn)


@pytest.mark.usefixtures("eager")
def test_a_task_that_is_due_later_keeps_no_mark_down(connect: Connect) -> None:
    conn = connect()
    conn.execute("select pgsched.enqueue_task('t', p_run_at => now() + interval '1 hour')")
    settle(conn)
    [(passed,)] = conn.execute("select run_at[6] <= now() from pgsched.claim_marks")
    assert passed is True


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["transaction", "savepoint"])
def test_what_is_committed_late_is_claimed(connect: Connect, way: str) -> None:
    """A writing transaction that is left open keeps the marks where they are, and nothing else."""
    conn, producer = connect(), connect()
    settle(conn)
    with producer.transaction():
        if way == "savepoint":
            with producer.transaction():
                late = oracle.enqueue(producer)
        else:
            late = oracle.enqueue(producer)
        before = marks(conn)
        others = oracle.enqueue(conn, 3)
        look(conn, 4)
        assert claimed_ids(conn) == others
    assert marks(conn) != []
    assert claimed_ids(conn) == late
    settle(conn)
    assert marks(conn) > before
    oracle.check(conn)


@pytest.mark.usefixtures("eager")
def test_who_has_an_id_proves_nothing(connect: Connect) -> None:
    conn, caller, producer = connect(), connect(), connect()
    with producer.transaction():
        with caller.transaction():
            caller.execute("select pg_current_xact_id()")
            late = oracle.enqueue(producer)
            look(caller)
        look(conn, 2)
    assert claimed_ids(conn) == late


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "enqueue",
    [
        "select pgsched.enqueue_task('t')",
        "select pgsched.enqueue_task('t', p_unique_key => 'k')",
        """select pgsched.enqueue_tasks('[{"task_type": "t"}]')""",
    ],
)
def test_an_enqueue_that_has_to_wait_is_claimed(connect: Connect, enqueue: str) -> None:
    conn, producer, blocker = connect(), connect(), connect()
    # So that nextval has no reason to take a transaction id for the one that waits.
    oracle.enqueue(conn)
    assert len(claimed_ids(conn)) == 1
    with producer.transaction():
        with blocker.transaction():
            blocker.execute("lock table pgsched.scheduled_tasks in share mode")
            call = oracle.Call(
                conn, producer, lambda: producer.execute(enqueue.encode()).fetchall()
            )
            assert call.waits
            look(conn, 3)
        [late] = call.result()
    assert conn.execute("select id from pgsched.claim_task('w')").fetchall() == [late]


@pytest.mark.usefixtures("eager")
def test_a_reschedule_that_has_to_wait_is_claimed(connect: Connect) -> None:
    conn, operator, blocker = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn)
    conn.execute("update pgsched.scheduled_tasks set run_at = now() + interval '1 hour'")
    with operator.transaction():
        with blocker.transaction():
            blocker.execute("select from pgsched.scheduled_tasks for no key update")
            call = oracle.Call(
                conn,
                operator,
                lambda: operator.execute(
                    "select pgsched.reschedule_task(%s, null)", [task_id]
                ).fetchall(),
            )
            assert call.waits
            look(conn)
        call.result()
        look(conn, 2)
    assert claimed_ids(conn) == [task_id]


@pytest.mark.usefixtures("eager")
def test_a_task_with_another_priority_is_claimed(connect: Connect) -> None:
    conn = connect()
    [task_id] = oracle.enqueue(conn, priorities=[9])
    settle(conn)
    conn.execute("select pgsched.reschedule_task(%s, null, p_priority => 5)", [task_id])
    assert claimed_ids(conn) == [task_id]


def expire_and_reap(session: psycopg.Connection, held: Claim) -> None:
    oracle.expire(session, [held])
    assert oracle.reap(session) == [held.id]


def fail_and_retry(session: psycopg.Connection, held: Claim) -> None:
    assert oracle.fail(session, held, permanent=True) == "failed"
    settle(session)
    oracle.retry(session, held.id)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "back",
    [
        oracle.release,
        oracle.release_in_batch,
        oracle.fail,
        oracle.fail_in_batch,
        expire_and_reap,
        fail_and_retry,
    ],
)
def test_a_task_that_comes_back_is_claimed(connect: Connect, back: Use) -> None:
    conn = connect()
    oracle.enqueue(conn)
    [held] = oracle.claim(conn)
    settle(conn)
    back(conn, held)
    assert claimed_ids(conn) == [held.id]
    oracle.check(conn)


@pytest.mark.usefixtures("eager")
def test_a_task_whose_claim_was_rolled_back_is_claimed(connect: Connect) -> None:
    conn, session = connect(), connect()
    tasks = oracle.enqueue(conn, 2)
    settle(conn)
    reader = connect()
    # The claim takes its id after the reading that is to be proven.
    look(reader)
    with session.transaction(force_rollback=True):
        assert [each.id for each in oracle.claim(session)] == tasks[:1]
        look(reader, 2)
    assert claimed_ids(conn) == tasks


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("writing", [False, True])
def test_what_came_below_a_mark_against_the_rules_is_claimed_after_a_minute(
    connect: Connect, writing: bool
) -> None:
    """A row that was restored, replicated or written by hand; also while someone writes."""
    conn, writer = connect(), connect()
    [task_id] = oracle.enqueue(conn)
    conn.execute("update pgsched.scheduled_tasks set run_at = now() + interval '1 hour'")
    settle(conn)
    conn.execute("update pgsched.scheduled_tasks set run_at = now() - interval '1 hour'")
    with writer.transaction():
        if writing:
            writer.execute("select pg_current_xact_id()")
        look(conn, 2)
        assert claimed_ids(conn) == []
        conn.execute("update pgsched.claim_readings set sweep_at = written_at")
        look(conn)
        assert claimed_ids(conn) == [task_id]


def shift(conn: psycopg.Connection, to: str) -> None:
    """Set all that the marks know of the clock, as if the clock had been set."""
    conn.execute(
        f"""
        update pgsched.claim_marks set run_at = array_fill({to}, array[10]);
        update pgsched.claim_readings set read_at = {to}, proven_at = {to}, written_at = {to};
        """.encode()
    )


@pytest.mark.usefixtures("eager")
def test_a_clock_that_was_set_back_hides_no_task(connect: Connect) -> None:
    conn = connect()
    settle(conn)
    shift(conn, "now() + interval '1 hour'")
    tasks = oracle.enqueue(conn, 2)
    # At once: a mark that is ahead of the clock is none.
    assert [each.id for each in oracle.claim(conn)] == tasks[:1]
    look(conn)
    # An hour later the clock reaches the old marks.
    shift(conn, "now()")
    assert claimed_ids(conn) == tasks[1:]
    settle(conn)
    assert marks(conn) != []


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "restored",
    [
        "update pgsched.claim_readings set xid = '9000000000', read_xid = '9000000000'",
        "delete from pgsched.claim_readings",
    ],
)
def test_marks_of_another_server_are_dropped_and_made_anew(connect: Connect, restored: str) -> None:
    """A dump brings transaction ids of the server it came from, which may be far ahead."""
    conn = connect()
    settle(conn)
    conn.execute(restored.encode())
    look(conn)
    assert marks(conn) == []
    oracle.enqueue(conn)
    settle(conn)
    assert marks(conn) != []


@pytest.mark.usefixtures("eager")
def test_of_two_who_move_one_does_and_none_waits(connect: Connect) -> None:
    conn, other = connect(), connect(options="-c lock_timeout=100ms")
    settle(conn)
    with conn.transaction(force_rollback=True):
        look(conn)
        before = marks(conn)
        look(other, 2)
        assert marks(conn) == before
    tasks = oracle.enqueue(other, 2)
    settle(other)
    assert claimed_ids(conn) == tasks


@pytest.mark.usefixtures("eager")
def test_a_sweep_that_takes_too_long_is_put_off_and_tasks_are_reaped(connect: Connect) -> None:
    conn = connect()
    oracle.enqueue_batch(conn, [{}, {}])
    settle(conn)
    [lost] = oracle.claim(conn)
    conn.execute(
        """
        create or replace function pgsched._used_queues() returns table (queue text)
            language plpgsql as $$ begin perform pg_sleep(30); end $$;
        update pgsched.scheduled_tasks set lease_expires_at = now() where status = 'processing';
        update pgsched.claim_readings set sweep_at = written_at;
        set statement_timeout to '200ms';
        """
    )
    assert conn.execute("select id from pgsched.reap_stale()").fetchall() == [(lost.id,)]
    conn.execute("select * from pgsched.reap_stale()")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "call",
    [
        "select * from pgsched.reap_stale()",
        "select * from pgsched.maintain()",
        "select * from pgsched.complete_tasks("
        " array(select id from pgsched.scheduled_tasks), array[gen_random_uuid()])",
    ],
)
def test_what_workers_call_anyway_moves_the_marks(connect: Connect, call: str) -> None:
    conn = connect()
    oracle.enqueue(conn)

    def moved() -> bool:
        conn.execute(call.encode())
        return marks(conn) != []

    wait_until(moved)


@pytest.mark.usefixtures("eager")
def test_no_task_is_missed_while_marks_move_all_the_time(connect: Connect) -> None:
    conn = connect()
    over = Event()
    chance = random.Random(7)
    delays = [[chance.random() * 0.03 for _ in range(25)] for _ in range(4)]

    def produce(session: psycopg.Connection, delays: list[float]) -> list[int]:
        added = []
        for delay in delays:
            rolled_back = delay < 0.005
            with session.transaction(force_rollback=rolled_back):
                ids = oracle.enqueue(session, priorities=[1 if delay < 0.02 else 5])
                time.sleep(delay)
            added += [] if rolled_back else ids
        return added

    def until_over(call: Callable[[psycopg.Connection], object]) -> Thread:
        def run() -> None:
            with connect() as session:
                while not over.is_set():
                    call(session)

        thread = Thread(target=run)
        thread.start()
        return thread

    taken: list[int] = []
    threads = [
        until_over(look),
        until_over(look),
        until_over(lambda session: taken.extend(claimed_ids(session))),
    ]
    try:
        added = oracle.together(partial(produce, connect(), each) for each in delays)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sorted(taken + claimed_ids(conn)) == sorted(task_id for ids in added for task_id in ids)
    assert marks(conn) != []
    oracle.check(conn)


def used(conn: psycopg.Connection) -> int:
    """Buffers that a claim touches. One in 16 counts, and touches more: of three the least."""

    def once() -> int:
        with conn.transaction(force_rollback=True):
            [([plan],)] = conn.execute(
                "explain (analyze, buffers, format json) select * from pgsched.claim_task('w')"
            )
        return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])

    return min(once() for _ in range(3))


def writes(conn: psycopg.Connection) -> bool:
    """Whether one more look, however late, writes anything."""
    conn.execute("update pgsched.claim_readings set look_at = written_at")
    with conn.transaction():
        look(conn)
        [(xid,)] = conn.execute("select pg_current_xact_id_if_assigned()")
    return xid is not None


def test_an_old_snapshot_makes_no_claim_read_what_is_dead(connect: Connect) -> None:
    conn, reader = connect(), connect()
    fresh = used(conn)
    with reader.transaction():
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select from pgsched.scheduled_tasks")
        conn.execute(
            """
            select count(*)
              from pgsched.enqueue_tasks((
                   select jsonb_agg('{"task_type": "t"}'::jsonb) from generate_series(1, 20000)))
            """
        )
        conn.execute("delete from pgsched.scheduled_tasks")
        oracle.enqueue(conn, 10)
        assert used(conn) > fresh + 200

        def spared() -> bool:
            look(conn)
            return used(conn) < fresh + 50

        wait_until(spared)
        # Nothing more is claimed, and whoever looks writes nothing.
        wait_until(lambda: not writes(conn))
    # Without the snapshot the mark is of no more use.
    conn.execute("vacuum pgsched.scheduled_tasks")
    conn.execute("update pgsched.claim_readings set sweep_at = written_at")
    look(conn)
    assert marks(conn) == []
    assert used(conn) < fresh + 50
    assert not writes(conn)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            MOVE_BEFORE_OTHERS_HAVE_ENDED,
            partial(test_what_is_committed_late_is_claimed, way="transaction"),
        ),
        (
            MOVE_BEFORE_OTHERS_HAVE_ENDED,
            partial(test_what_is_committed_late_is_claimed, way="savepoint"),
        ),
        (MOVE_IN_SPITE_OF_AN_ID, test_who_has_an_id_proves_nothing),
        (
            ENQUEUE_BY_AN_EARLIER_CLOCK,
            partial(
                test_an_enqueue_that_has_to_wait_is_claimed,
                enqueue="select pgsched.enqueue_task('t')",
            ),
        ),
        (
            BATCH_BY_AN_EARLIER_CLOCK,
            partial(
                test_an_enqueue_that_has_to_wait_is_claimed,
                enqueue="""select pgsched.enqueue_tasks('[{"task_type": "t"}]')""",
            ),
        ),
        (RESCHEDULE_BY_AN_EARLIER_CLOCK, test_a_reschedule_that_has_to_wait_is_claimed),
        (RESCHEDULE_OF_PRIORITY_ALONE, test_a_task_with_another_priority_is_claimed),
        (RETURN_AT_ITS_OLD_TIME, partial(test_a_task_that_comes_back_is_claimed, back=oracle.fail)),
        (
            RETRY_AT_ITS_OLD_TIME,
            partial(test_a_task_that_comes_back_is_claimed, back=fail_and_retry),
        ),
        (MOVE_PAST_LOCKED_TASKS, test_a_task_whose_claim_was_rolled_back_is_claimed),
        (
            MOVE_WITHOUT_SWEEP,
            partial(
                test_what_came_below_a_mark_against_the_rules_is_claimed_after_a_minute,
                writing=False,
            ),
        ),
        (CLAIM_BY_ANY_MARK, test_a_clock_that_was_set_back_hides_no_task),
        (MOVE_WITHOUT_LOOKING_AT_THE_CLOCK, test_a_clock_that_was_set_back_hides_no_task),
        (
            MOVE_BY_THE_ID_OF_ANOTHER_SERVER,
            partial(
                test_marks_of_another_server_are_dropped_and_made_anew,
                restored="update pgsched.claim_readings set xid = '9000000000'",
            ),
        ),
        (
            MOVE_WITHOUT_READINGS,
            partial(
                test_marks_of_another_server_are_dropped_and_made_anew,
                restored="delete from pgsched.claim_readings",
            ),
        ),
        (MOVE_WITHOUT_LOCK, test_of_two_who_move_one_does_and_none_waits),
        (MOVE_BY_A_LATER_CLOCK, test_no_task_is_missed_while_marks_move_all_the_time),
        (MOVE_BEFORE_OTHERS_HAVE_ENDED, test_no_task_is_missed_while_marks_move_all_the_time),
    ],
)
@pytest.mark.usefixtures("eager")
def test_a_broken_mark_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises((AssertionError, psycopg.errors.LockNotAvailable)):
        test(connect)
