"""No call reads the backlog, whatever the statistics say and whatever collation arguments bring."""

from collections.abc import Callable
from functools import partial
from typing import Any

import oracle
import psycopg
import pytest
from mutants import Mutant
from mutants import install as install_mutant
from oracle import Connect

TASKS = 10_000

# On a claimed task (%(id)s, %(token)s), a queued one, a failed one and an unknown one.
CALLS = [
    "select * from pgsched.claim_task('w', 'q')",
    "select * from pgsched.claim_task(current_user, 'q', p_limit => 10)",
    "select pgsched.enqueue_task('t', p_queue => 'q', p_unique_key => n.key) from keys as n",
    "select * from pgsched.extend_tasks(array[%(id)s], array[%(token)s])",
    "select pgsched.extend_task(%(id)s, %(token)s)",
    "select pgsched.hold_task(%(id)s, %(token)s)",
    "select pgsched.complete_task(%(id)s, %(token)s)",
    "select * from pgsched.complete_tasks(array[%(id)s, 0], array[%(token)s, %(token)s])",
    "select * from pgsched.fail_task(%(id)s, %(token)s, 'no')",
    "select * from pgsched.fail_task(%(id)s, %(token)s, 'no', p_permanent => true)",
    "select * from pgsched.fail_tasks(array[%(id)s], array[%(token)s], array['no'])",
    "select pgsched.release_task(%(id)s, %(token)s)",
    "select * from pgsched.release_tasks(array[%(id)s], array[%(token)s])",
    "select pgsched.cancel_task(%(queued)s)",
    "select pgsched.reschedule_task(%(queued)s, null)",
    "select pgsched.retry_task(%(failed)s)",
    "select * from pgsched.reap_stale()",
    "select pgsched.complete_task(%(done)s, %(done_token)s)",
]


def prepare(conn: psycopg.Connection) -> dict[str, Any]:
    """A backlog in both tables, of which the statistics know nothing; tasks for the calls."""
    conn.execute("create view keys as select relname as key from pg_class limit 1")
    conn.execute(
        """
        alter table pgsched.scheduled_tasks set (autovacuum_enabled = off);
        alter table pgsched.finished_tasks set (autovacuum_enabled = off);
        """
    )
    conn.execute(
        """
        select count(*)
          from pgsched.enqueue_tasks((
               select jsonb_agg(jsonb_build_object(
                        'task_type', 't', 'queue', 'q', 'unique_key', 'key ' || n))
                 from generate_series(1, %(tasks)s) as n));
        """,
        {"tasks": TASKS},
    )
    conn.execute(
        """
        insert into pgsched.finished_tasks (
               id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
               created_at, finished_at)
        select 1000000 + n, 'q', 't', '{}', s.status, 5, now(), 1, 1, now(), now()
          from generate_series(1, %(tasks)s) as n
         cross join unnest(array['completed', 'failed']) as s (status)
         where (s.status = 'failed') = (n %% 2 = 0)
        """,
        {"tasks": TASKS},
    )
    # Behind the backlog by id, before it by priority.
    claims = []
    for _ in range(4):
        oracle.enqueue(conn, queue="q", priorities=[0])
        claims += oracle.claim(conn, queue="q")
    running, failed, done, stale = claims
    oracle.fail(conn, failed, permanent=True)
    oracle.complete(conn, done)
    oracle.expire(conn, [stale])
    # As after a vacuum of a table that was empty and large.
    conn.execute(
        """
        update pg_class
           set reltuples = 0, relpages = 100
         where relnamespace = 'pgsched'::regnamespace and relkind in ('r', 'i')
        """
    )
    [(queued,)] = conn.execute(
        "select max(id) from pgsched.scheduled_tasks where status = 'queued'"
    )
    return {
        "id": running.id,
        "token": running.token,
        "failed": failed.id,
        "done": done.id,
        "done_token": done.token,
        "queued": queued,
    }


def rows_read(conn: psycopg.Connection) -> int:
    """Rows of the task tables that this transaction has read."""
    [(rows,)] = conn.execute(
        """
        select sum(seq_tup_read + idx_tup_fetch)::bigint
          from pg_stat_xact_user_tables
         where schemaname = 'pgsched'
        """
    )
    assert isinstance(rows, int)
    return rows


def read_little(connect: Connect, calls: list[str]) -> None:
    conn = connect()
    values = prepare(conn)
    for call in calls:
        session = connect()
        with session.transaction(force_rollback=True):
            before = rows_read(session)
            session.execute(call.encode(), values).fetchall()
            assert rows_read(session) - before < 500, call


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def test_no_call_reads_the_backlog(connect: Connect) -> None:
    read_little(connect, CALLS)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            Mutant("_requeue_tasks", "t.id = any (p_ids) and t.id = g.id", "t.id = g.id"),
            partial(read_little, calls=CALLS[8:9]),
        ),
        (
            Mutant("claim_task", 'v_queue text collate "default"', "v_queue text"),
            partial(read_little, calls=CALLS[1:2]),
        ),
    ],
)
def test_a_call_that_reads_the_backlog_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    install_mutant(connect(), mutant)
    with pytest.raises(AssertionError, match="pgsched"):
        test(connect)


def test_workers_that_register_at_once_never_deadlock(connect: Connect) -> None:
    """Also when all of them were away for so long that each removes the others."""
    conn = connect()
    names = [f"worker {n}" for n in range(8)]
    sessions = [connect(options="-c deadlock_timeout=100ms") for _ in names]

    def register(session: psycopg.Connection, name: str) -> int:
        query = "select pgsched.register_worker(%s, array['q'], 1)"
        # Refused while another session is just removing the row.
        while (
            rows := oracle.outcome(lambda: session.execute(query, [name]).fetchall())
        ) == "55P03":
            pass
        [(worker_id,)] = rows
        assert isinstance(worker_id, int)
        return worker_id

    for _ in range(20):
        for name in [*names, *(f"dead {n}" for n in range(20))]:
            worker_id = register(conn, name)
            conn.execute("select pgsched.register_listener(%s, array['q', 'r'])", [worker_id])
        conn.execute("update pgsched.workers set seen_at = seen_at - interval '2 days'")
        oracle.together(
            partial(register, session, name) for session, name in zip(sessions, names, strict=True)
        )
    left = conn.execute("select name from pgsched.workers order by name").fetchall()
    assert left == [(name,) for name in names]
