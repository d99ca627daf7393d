"""Finished tasks are deleted when their queue says so, in bounded steps, while others work.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections.abc import Callable
from functools import partial

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Connect

PRUNE_THAT_WAITS = Mutant("prune_finished", "for update skip locked", "for update")
PRUNE_OF_ANY_AGE = Mutant("prune_finished", "and f.finished_at < v_kind.finished_before", "")
PRUNE_OF_ONE_QUEUE = Mutant(
    "prune_finished", "(f.status, f.queue) > (k.status, k.queue)", "f.status > k.status"
)
PRUNE_OF_FAILED_AS_COMPLETED = Mutant("prune_finished", "k.status = 'completed'", "true")
KEEPS_NOTHING = "date_part('epoch', q.keep_completed) = 0"
COMPLETION_THAT_STORES = Mutant(
    "complete_task", "is distinct from 0 as kept", "is null or true as kept"
)
BATCH_COMPLETION_THAT_STORES = Mutant("complete_tasks", KEEPS_NOTHING, "false")

# How long each queue keeps completed tasks, and failed and cancelled ones.
KEPT = {
    "default": (None, None),
    "short": ("1 hour", "2 hours"),
    "long": ("36500 days", "36500 days"),
    "never": ("0", "0"),
    "failed": ("0", "365 days"),
}


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def configure(conn: psycopg.Connection) -> None:
    conn.execute(
        "create table made (id bigint, queue text, status text, finished_at timestamptz, kept bool)"
    )
    for queue, (completed, failed) in KEPT.items():
        conn.execute(
            "select pgsched.configure_queue(%s, p_keep_completed => %s, p_keep_failed => %s)",
            [queue, completed, failed],
        )


def add_finished(conn: psycopg.Connection, numbers: range) -> None:
    """Add tasks of all kinds in all queues; a tenth is younger, by an hour, than it may become.

    Their ids are negative. The table `made` says which of them will be kept.
    """
    conn.execute(
        """
        with kinds as (
          select row_number() over () - 1 as number, q.name as queue, s.status,
                 case when s.status = 'completed' then coalesce(q.keep_completed, '1 day')
                      else coalesce(q.keep_failed, '30 days') end as keep
            from pgsched.queues as q
           cross join unnest(array['completed', 'failed', 'cancelled']) as s (status)),
        added as (
          insert into made (id, queue, status, finished_at, kept)
          select -n, k.queue, k.status,
                 clock_timestamp() - k.keep
                 + case when n %% 10 = 0 then interval '1 hour' else n * interval '-1 ms' end,
                 n %% 10 = 0
            from generate_series(%s::integer, %s::integer) as n
            join kinds as k on k.number = n / 10 %% (select count(*) from kinds)
          returning id, queue, status, finished_at)
        insert into pgsched.finished_tasks (
               id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
               created_at, finished_at)
        select id, queue, 'test', '{}', status, 5, finished_at, 1, 20, finished_at, finished_at
          from added
        """,
        [numbers[0], numbers[-1]],
    )


def prune_all(session: psycopg.Connection, limit: int = 10000) -> int:
    """How many tasks were deleted until nothing was left to delete."""
    deleted = 0
    while step := oracle.prune(session, limit=limit):
        deleted += step
    return deleted


def work(session: psycopg.Connection, rounds: int) -> int:
    """Add tasks to all queues, end most of them in all ways, and delete none."""
    for _ in range(rounds):
        for queue in KEPT:
            oracle.enqueue(session, 5, queue=queue)
            held = oracle.claim(session, queue=queue, limit=4)
            for each in held[:1]:
                oracle.complete(session, each)
            for each in held[1:2]:
                oracle.fail(session, each, permanent=True)
            oracle.complete_batch(session, held[2:])
    return 0


def prune_beside_work(connect: Connect, rows: int, *, pinned: bool = False) -> None:
    """Two sessions delete what is old of so many finished tasks; no call takes two seconds.

    `pinned`: a third one has an old snapshot all the while.
    """
    conn, reader = connect(), connect()
    configure(conn)
    pruners = [connect(options="-c statement_timeout=2s") for _ in range(2)]
    # Plans that were made for a small table have to do for the large one.
    add_finished(conn, range(1, 501))
    conn.execute("vacuum analyze pgsched.finished_tasks")
    for pruner in pruners:
        for _ in range(10):
            with pruner.transaction(force_rollback=True):
                assert oracle.prune(pruner) == 450
    add_finished(conn, range(501, rows + 1))
    reader.execute("begin isolation level repeatable read")
    if pinned:
        reader.execute("select from pgsched.finished_tasks limit 1")

    deleted = oracle.together(
        [
            *(partial(work, connect(), rounds=2 + rows // 5000) for _ in range(4)),
            *(partial(prune_all, pruner) for pruner in pruners),
        ]
    )
    deleted.append(prune_all(conn))

    [(seen,)] = reader.execute("select count(*) from pgsched.finished_tasks where id < 0")
    assert seen == (rows if pinned else rows // 10)
    columns = "id, queue, status, finished_at"
    left = f"select {columns} from pgsched.finished_tasks where id < 0 order by id"
    kept = f"select {columns} from made where kept order by id"
    assert conn.execute(left.encode()).fetchall() == conn.execute(kept.encode()).fetchall()
    stored = conn.execute("select distinct queue, status from pgsched.finished_tasks where id > 0")
    assert set(stored) == {
        ("default", "completed"),
        ("default", "failed"),
        ("failed", "failed"),
        ("long", "completed"),
        ("long", "failed"),
        ("short", "completed"),
        ("short", "failed"),
    }
    gone = conn.execute(
        """
        select e.detail
          from oracle.log as d
          left join oracle.log as e on e.id = d.id and e.event = 'enqueued'
         where d.event = 'deleted'
        """
    ).fetchall()
    assert len(gone) == sum(deleted)
    assert set(gone) == {(None,), ("never",)}

    conn.execute("delete from pgsched.finished_tasks where id < 0")
    conn.execute("delete from oracle.log where id < 0")
    oracle.check(conn)


@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_old_goes_while_others_work(connect: Connect, pinned: bool) -> None:
    prune_beside_work(connect, 30_000, pinned=pinned)


@pytest.mark.long
def test_a_million_old_tasks_go_while_others_work(connect: Connect) -> None:
    prune_beside_work(connect, 1_000_000)


@pytest.mark.long
def test_large_tasks_go_although_each_takes_time(connect: Connect) -> None:
    conn, pruner = connect(), connect(options="-c statement_timeout=2s")
    configure(conn)
    # Stored as they are, as what cannot be compressed.
    conn.execute("alter table pgsched.finished_tasks alter payload set storage external")
    add_finished(conn, range(1, 331))
    conn.execute(
        """
        update pgsched.finished_tasks
           set payload = (
                 select to_jsonb(string_agg(md5(n::text), ''))
                   from generate_series(1, 32768) as n)
        """
    )
    assert prune_all(pruner) == 297


def test_a_call_deletes_for_half_a_second_at_most(connect: Connect) -> None:
    conn = connect()
    configure(conn)
    add_finished(conn, range(1, 4))
    conn.execute(
        """
        create function oracle.sleep() returns trigger language plpgsql as $$
        begin
          perform pg_sleep(0.6);
          return old;
        end;
        $$;
        create trigger sleep before delete on pgsched.finished_tasks
          for each row execute function oracle.sleep();
        """
    )
    assert oracle.prune(conn) == 1
    conn.execute("drop trigger sleep on pgsched.finished_tasks")
    assert oracle.prune(conn) == 2


def test_a_queue_that_keeps_no_completed_tasks_never_stores_one(connect: Connect) -> None:
    conn = connect()
    configure(conn)
    conn.execute(
        """
        alter table pgsched.finished_tasks
          add check (queue not in ('never', 'failed') or status <> 'completed')
        """
    )
    queues = list(KEPT)
    for queue in queues:
        oracle.enqueue(conn, 4, queue=queue)
    held = {queue: oracle.claim(conn, queue=queue, limit=4) for queue in queues}
    for first, *_, last in held.values():
        assert oracle.complete(conn, first)
        assert oracle.fail(conn, last, permanent=True) == "failed"
    mixed = [claims[n] for n in (1, 2) for claims in held.values()]
    assert oracle.complete_batch(conn, mixed) == ["completed"] * len(mixed)

    stored = conn.execute("select queue, status, id from pgsched.finished_tasks").fetchall()
    assert sorted(stored) == sorted(
        (queue, status, each.id)
        for queue, claims in held.items()
        for each, status in zip(claims, ["completed"] * 3 + ["failed"], strict=True)
        if status == "failed" or queue not in ("never", "failed")
    )
    again = [oracle.outcome(partial(oracle.complete, conn, each)) for each in mixed[:5]]
    assert again == [False, False, False, "TS404", "TS404"]
    assert oracle.complete_batch(conn, mixed[:5]) == ["already"] * 3 + ["gone"] * 2
    oracle.check(conn)


def failed(conn: psycopg.Connection) -> int:
    """A new task that failed for good."""
    [task_id] = oracle.enqueue(conn)
    [held] = oracle.claim(conn)
    assert oracle.fail(conn, held, permanent=True) == "failed"
    return task_id


def age(conn: psycopg.Connection, *, days: int) -> None:
    """Make all finished tasks older."""
    conn.execute(
        "update pgsched.finished_tasks set finished_at = finished_at - %s * interval '1 day'",
        [days],
    )


def complete_many(conn: psycopg.Connection, count: int) -> None:
    oracle.enqueue(conn, count)
    while held := oracle.claim(conn, limit=100):
        assert set(oracle.complete_batch(conn, held)) == {"completed"}


def left(conn: psycopg.Connection) -> int:
    [(count,)] = conn.execute("select count(*) from pgsched.finished_tasks")
    assert isinstance(count, int)
    return count


def test_two_open_prunings_share_the_work(connect: Connect) -> None:
    conn, first, second = connect(), connect(), connect()
    complete_many(conn, 10)
    age(conn, days=2)
    with first.transaction():
        assert oracle.prune(first, limit=4) == 4
        with second.transaction(force_rollback=True):
            assert oracle.at_once(conn, second, partial(oracle.prune, second)) == 6
    assert left(conn) == 6
    assert oracle.prune(conn) == 6
    oracle.check(conn)


def test_four_sessions_prune_every_task_once(connect: Connect) -> None:
    conn = connect()
    complete_many(conn, 3000)
    age(conn, days=2)
    complete_many(conn, 100)

    pruning = (partial(prune_all, connect(), limit=150) for _ in range(4))
    assert sum(oracle.together(pruning)) == 3000
    assert left(conn) == 100
    assert oracle.prune(conn) == 0
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_pruning_passes_by_what_is_being_retried(connect: Connect, rolled_back: bool) -> None:
    conn, operator, pruner = connect(), connect(), connect()
    retried, other = failed(conn), failed(conn)
    age(conn, days=31)
    with operator.transaction(force_rollback=rolled_back):
        assert oracle.retry(operator, retried) == retried
        assert oracle.at_once(conn, pruner, partial(oracle.prune, pruner)) == 1
        retry = partial(oracle.retry, pruner, other)
        assert oracle.at_once(conn, pruner, partial(oracle.outcome, retry)) == "TS404"
    assert oracle.prune(pruner) == (1 if rolled_back else 0)
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_retry_waits_for_an_open_pruning(connect: Connect, rolled_back: bool) -> None:
    conn, operator, pruner = connect(), connect(), connect()
    task_id = failed(conn)
    age(conn, days=31)
    with pruner.transaction(force_rollback=rolled_back):
        assert oracle.prune(pruner) == 1
        retry = partial(oracle.retry, operator, task_id)
        call = oracle.Call(conn, operator, partial(oracle.outcome, retry))
        assert call.waits
    assert call.result() == (task_id if rolled_back else "TS404")
    oracle.check(conn)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        *(
            (mutant, partial(prune_beside_work, rows=4000))
            for mutant in (
                PRUNE_OF_ANY_AGE,
                PRUNE_OF_ONE_QUEUE,
                PRUNE_OF_FAILED_AS_COMPLETED,
            )
        ),
        (PRUNE_OF_ANY_AGE, test_four_sessions_prune_every_task_once),
        (PRUNE_THAT_WAITS, test_two_open_prunings_share_the_work),
        (COMPLETION_THAT_STORES, test_a_queue_that_keeps_no_completed_tasks_never_stores_one),
        (BATCH_COMPLETION_THAT_STORES, test_a_queue_that_keeps_no_completed_tasks_never_stores_one),
    ],
)
def test_a_broken_retention_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises((AssertionError, psycopg.errors.CheckViolation)):
        test(connect)
