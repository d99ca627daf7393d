"""Calls of pgsched that keep a log, and a check that the log and the tables tell one story.

A call and its log entry share a transaction: a rollback takes both back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from workers import wait_until

T = TypeVar("T")
Connect = Callable[..., psycopg.Connection]


class Claim(NamedTuple):
    """A row of claim_task."""

    id: int
    token: UUID
    attempt: int
    lease_expires_at: datetime
    contended: int


def install(conn: psycopg.Connection) -> None:
    """Create the log; the tests' own calls write to it, nothing ever changes it."""
    conn.execute(
        """
        create schema oracle;
        create table oracle.log (
          seq bigint generated always as identity, id bigint not null, event text not null,
          claim_token uuid)
        """
    )


def enqueue(
    session: psycopg.Connection,
    count: int = 1,
    *,
    queue: str = "default",
    priorities: Sequence[int] = (5,),
    unique_key: str | None = None,
) -> list[int]:
    """The ids of `count` tasks, their priorities taken in turn."""
    rows = session.execute(
        """
        with added as materialized (
          select pgsched.enqueue_task(
                   'test', p_queue => %(queue)s, p_unique_key => %(unique_key)s,
                   p_priority => (%(priorities)s::integer[])[1 + n %% %(levels)s]) as id
            from generate_series(0, %(count)s - 1) as n),
        logged as (
          insert into oracle.log (id, event) select id, 'enqueued' from added)
        select id from added
        """,
        {
            "count": count,
            "queue": queue,
            "unique_key": unique_key,
            "priorities": list(priorities),
            "levels": len(priorities),
        },
    )
    return [task_id for (task_id,) in rows]


def claim(
    session: psycopg.Connection,
    *,
    queue: str = "default",
    limit: int = 1,
    lease: str = "5 minutes",
    worker: str = "worker",
) -> list[Claim]:
    """What claim_task returns, which is never more than the limit."""
    rows = session.execute(
        """
        with claimed as materialized (
          select * from pgsched.claim_task(
            %(worker)s, p_queue => %(queue)s, p_lease => %(lease)s, p_limit => %(limit)s)),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select id, 'claimed', claim_token from claimed)
        select id, claim_token, attempt, lease_expires_at, contended from claimed
        """,
        {"worker": worker, "queue": queue, "lease": lease, "limit": limit},
    ).fetchall()
    assert len(rows) <= limit, f"{len(rows)} tasks for a limit of {limit}"
    return [Claim(*row) for row in rows]


def complete(session: psycopg.Connection, held: Claim) -> bool:
    """What complete_task returns."""
    [(accepted,)] = session.execute(
        """
        with done as materialized (
          select pgsched.complete_task(%(id)s, %(token)s) as accepted),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select %(id)s, 'completed', %(token)s from done where accepted)
        select accepted from done
        """,
        held._asdict(),
    )
    assert isinstance(accepted, bool)
    return accepted


def complete_batch(session: psycopg.Connection, held: Sequence[Claim]) -> list[str]:
    """The outcomes of complete_tasks, in the order given."""
    rows = session.execute(
        """
        with given as (
          select * from unnest(%(ids)s::bigint[], %(tokens)s::uuid[])
                          with ordinality as g (id, claim_token, position)),
        done as materialized (
          select * from pgsched.complete_tasks(%(ids)s, %(tokens)s)
                          with ordinality as d (id, outcome, position)),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select id, 'completed', claim_token
            from done join given using (id, position)
           where outcome = 'completed')
        select id, outcome from done order by position
        """,
        _arrays(held),
    ).fetchall()
    assert [task_id for task_id, _ in rows] == [each.id for each in held]
    return [outcome for _, outcome in rows]


def extend(
    session: psycopg.Connection, held: Sequence[Claim], *, lease: str = "5 minutes"
) -> list[str]:
    """The outcomes of extend_tasks, in the order given."""
    rows = session.execute(
        "select id, outcome from pgsched.extend_tasks(%(ids)s, %(tokens)s, %(lease)s)",
        {**_arrays(held), "lease": lease},
    ).fetchall()
    assert [task_id for task_id, _ in rows] == [each.id for each in held]
    return [outcome for _, outcome in rows]


def fail(session: psycopg.Connection, held: Claim, *, permanent: bool = False) -> str:
    """The status that fail_task returns; the next attempt is due at once."""
    [(status,)] = session.execute(
        """
        with failed as materialized (
          select * from pgsched.fail_task(
            %(id)s, %(token)s, 'boom', p_retry_in => '0', p_permanent => %(permanent)s)),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select %(id)s, 'failed', %(token)s from failed)
        select status from failed
        """,
        {**held._asdict(), "permanent": permanent},
    )
    assert isinstance(status, str)
    return status


def release(session: psycopg.Connection, held: Claim) -> None:
    """Call release_task."""
    session.execute(
        """
        with released as materialized (
          select pgsched.release_task(%(id)s, %(token)s) as nothing)
        insert into oracle.log (id, event, claim_token)
        select %(id)s, 'released', %(token)s from released
        """,
        held._asdict(),
    )


def reap(session: psycopg.Connection, *, limit: int = 1000) -> list[int]:
    """The ids that reap_stale returns, in id order."""
    rows = session.execute(
        """
        with reaped as materialized (
          select * from pgsched.reap_stale(%(limit)s)),
        logged as (
          insert into oracle.log (id, event) select id, 'reaped' from reaped)
        select id from reaped order by id
        """,
        {"limit": limit},
    ).fetchall()
    assert len(rows) <= limit
    return [task_id for (task_id,) in rows]


def expire(conn: psycopg.Connection, held: Iterable[Claim]) -> None:
    """Make these claims an hour older, so that their leases are over."""
    conn.execute(
        """
        update pgsched.scheduled_tasks
           set claimed_at = claimed_at - interval '1 hour',
               lease_expires_at = lease_expires_at - interval '1 hour'
         where id = any (%s)
        """,
        [[each.id for each in held]],
    )


def task(conn: psycopg.Connection, task_id: int) -> tuple[Any, ...]:
    """The whole row of a task, wherever it is."""
    [row] = conn.execute("select * from pgsched.tasks where id = %s", [task_id])
    return row


def state(conn: psycopg.Connection, task_id: int) -> tuple[str, int]:
    """Status and attempt of a task, wherever it is."""
    [(status, attempt)] = conn.execute(
        "select status, attempt from pgsched.tasks where id = %s", [task_id]
    )
    return status, attempt


def task_locks(conn: psycopg.Connection, session: psycopg.Connection | None = None) -> int:
    """How many tasks' advisory locks are held in this database, or by this session."""
    [(count,)] = conn.execute(
        """
        select count(*)
          from pg_locks
         where locktype = 'advisory' and classid = 1337
           and database = (select oid from pg_database where datname = current_database())
           and pid = coalesce(%s, pid)
        """,
        [session and session.info.backend_pid],
    )
    assert isinstance(count, int)
    return count


def check(conn: psycopg.Connection) -> None:
    """Raise AssertionError unless every task's claims took turns and the tables say the same.

    Each id is in exactly one table; a claim begins when the one before has ended, and ends once,
    by its own token; attempts are the claims less the released ones; a task is completed exactly
    when a completion was accepted; tokens differ. Call it when all sessions are idle.
    """
    enqueued = set()
    tokens = []
    stories = defaultdict(list)
    for task_id, event, token in conn.execute(
        "select id, event, claim_token from oracle.log order by seq"
    ):
        if event == "enqueued":
            enqueued.add(task_id)
        else:
            stories[task_id].append((event, token))
        if event == "claimed":
            tokens.append(token)
    tasks = conn.execute(
        "select id, status, attempt, claim_token from pgsched.tasks order by id"
    ).fetchall()
    assert [row[0] for row in tasks] == sorted(enqueued), "not every id is in exactly one table"
    assert len(set(tokens)) == len(tokens), "a token was given twice"

    for task_id, status, attempt, claim_token in tasks:
        current = None
        last = "enqueued"
        attempts = 0
        for event, token in stories[task_id]:
            if event == "claimed":
                assert current is None, f"task {task_id} was handed out twice"
                current = token
                attempts += 1
            else:
                assert current is not None, f"task {task_id}: {event}, but not claimed"
                assert token in {None, current}, f"task {task_id}: {event} with a stale token"
                current = None
                attempts -= event == "released"
            last = event
        assert attempt == attempts, f"task {task_id}: attempt {attempt}, claimed {attempts} times"
        assert (status == "processing") == (current is not None), f"task {task_id}: {status}"
        assert current is None or current == claim_token, f"task {task_id}: wrong token"
        assert (status == "completed") == (last == "completed"), f"task {task_id}: {status}"
    assert task_locks(conn) == 0, "an advisory lock was left"


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of calls that run at the same time, each in a thread of its own."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


class Call:
    """A call in a thread of its own; `waits` says whether it waits for another session's lock."""

    def __init__(
        self, conn: psycopg.Connection, session: psycopg.Connection, call: Callable[[], Any]
    ) -> None:
        """Start it, and return when it has ended or waits; `conn` looks on."""
        self.waits = False
        self._future: Future[Any] = Future()
        Thread(target=self._run, args=[call], daemon=True).start()

        def settled() -> bool:
            [(self.waits,)] = conn.execute(
                "select cardinality(pg_blocking_pids(%s)) > 0", [session.info.backend_pid]
            )
            return self.waits or self._future.done()

        wait_until(settled)

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        """What the call returned or raised, once it has ended."""
        return self._future.result(30)


def at_once(conn: psycopg.Connection, session: psycopg.Connection, call: Callable[[], Any]) -> Any:
    """The result of a call; AssertionError when it waits for another session's lock."""
    started = Call(conn, session, call)
    if started.waits:
        session.cancel()
    try:
        return started.result()
    except psycopg.errors.QueryCanceled:
        raise AssertionError("it waited for another session") from None


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the SQLSTATE it raises."""
    try:
        return call()
    except psycopg.Error as error:
        return error.sqlstate


def _arrays(held: Sequence[Claim]) -> dict[str, Any]:
    return {"ids": [each.id for each in held], "tokens": [each.token for each in held]}
