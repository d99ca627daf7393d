"""Calls of pgsched that keep a log, and a check that the log and the tables tell one story.

A call and its log entry share a transaction: a rollback takes both back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb
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


Use = Callable[[psycopg.Connection, Claim], Any]


def install(conn: psycopg.Connection) -> None:
    """Create the log; the tests' own calls write to it, nothing ever changes it.

    `detail` is the queue of a task that was enqueued, the status of one that failed or was reaped.
    prune_finished and maintain do not say which tasks they changed: a trigger does, and the locks
    that the reaper keeps until its transaction ends.
    """
    conn.execute(
        """
        create schema oracle;
        create table oracle.log (
          seq bigint generated always as identity, id bigint not null, event text not null,
          claim_token uuid, detail text);

        create function oracle.log_deleted() returns trigger language plpgsql as $$
        begin
          insert into oracle.log (id, event) select g.id, 'deleted' from gone as g;
          return null;
        end;
        $$;
        create trigger log_deleted after delete on pgsched.finished_tasks
          referencing old table as gone for each statement execute function oracle.log_deleted();

        create function oracle.maintain() returns void language plpgsql as $$
        begin
          perform from pgsched.maintain();
          insert into oracle.log (id, event, detail)
          select t.id, 'reaped', t.status
            from pgsched.tasks as t
           where t.id in (
                 select l.objid::bigint
                   from pg_locks as l
                  where l.pid = pg_backend_pid() and l.locktype = 'advisory' and l.classid = 1337);
        end;
        $$;
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
          insert into oracle.log (id, event, detail) select id, 'enqueued', %(queue)s from added)
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


def enqueue_batch(session: psycopg.Connection, tasks: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids of these tasks, in the order given; a task is of type test unless it says more."""
    rows = session.execute(
        """
        with given as (
          select position, coalesce(task ->> 'queue', 'default') as queue
            from jsonb_array_elements(%(tasks)s) with ordinality as g (task, position)),
        added as materialized (
          select * from pgsched.enqueue_tasks(%(tasks)s) with ordinality as a (id, position)),
        logged as (
          insert into oracle.log (id, event, detail)
          select id, 'enqueued', queue from added join given using (position))
        select id from added order by position
        """,
        {"tasks": Jsonb([{"task_type": "test", **task} for task in tasks])},
    ).fetchall()
    assert len(rows) == len(tasks)
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


def hold(session: psycopg.Connection, held: Claim) -> None:
    """Call hold_task."""
    session.execute(
        """
        with held as materialized (
          select pgsched.hold_task(%(id)s, %(token)s) as nothing)
        insert into oracle.log (id, event, claim_token)
        select %(id)s, 'held', %(token)s from held
        """,
        held._asdict(),
    )


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


def complete_together(session: psycopg.Connection, held: Sequence[Claim]) -> None:
    """Call complete_task for all or none: in id order, in one statement, which nothing delays."""
    session.execute(
        """
        with done as materialized (
          select id, claim_token, pgsched.complete_task(id, claim_token) as accepted
            from (select *
                    from unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) as u (id, claim_token)
                   order by id) as given)
        insert into oracle.log (id, event, claim_token)
        select id, 'completed', claim_token from done where accepted
        """,
        _arrays(held),
    )


def hold_and_complete(session: psycopg.Connection, held: Claim) -> bool:
    """What complete_task returns after hold_task, both in one statement, which nothing delays."""
    [(accepted,)] = session.execute(
        """
        with held as materialized (
          select pgsched.hold_task(%(id)s, %(token)s) as nothing),
        noted as (
          insert into oracle.log (id, event, claim_token)
          select %(id)s, 'held', %(token)s from held
          returning id),
        done as materialized (
          select pgsched.complete_task(id, %(token)s) as accepted from noted),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select %(id)s, 'completed', %(token)s from done where accepted)
        select accepted from done
        """,
        held._asdict(),
    )
    assert isinstance(accepted, bool)
    return accepted


def extend(
    session: psycopg.Connection, held: Sequence[Claim], *, lease: str = "5 minutes"
) -> list[str]:
    """The outcomes of extend_tasks, in the order given."""
    rows = session.execute(
        """
        with given as (
          select * from unnest(%(ids)s::bigint[], %(tokens)s::uuid[])
                          with ordinality as g (id, claim_token, position)),
        done as materialized (
          select * from pgsched.extend_tasks(%(ids)s, %(tokens)s, %(lease)s)
                          with ordinality as d (id, outcome, lease_expires_at, position)),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select id, outcome, claim_token
            from done join given using (id, position)
           where outcome in ('extended', 'cancel_requested'))
        select id, outcome from done order by position
        """,
        {**_arrays(held), "lease": lease},
    ).fetchall()
    assert [task_id for task_id, _ in rows] == [each.id for each in held]
    return [outcome for _, outcome in rows]


def extend_one(session: psycopg.Connection, held: Claim, *, lease: str = "5 minutes") -> datetime:
    """The end of the lease that extend_task returns."""
    [(lease_expires_at,)] = session.execute(
        """
        with extended as materialized (
          select pgsched.extend_task(%(id)s, %(token)s, %(lease)s) as lease_expires_at),
        logged as (
          insert into oracle.log (id, event, claim_token)
          select %(id)s, 'extended', %(token)s from extended)
        select lease_expires_at from extended
        """,
        {**held._asdict(), "lease": lease},
    )
    assert isinstance(lease_expires_at, datetime)
    return lease_expires_at


def fail(session: psycopg.Connection, held: Claim, *, permanent: bool = False) -> str:
    """The status that fail_task returns; the next attempt is due at once."""
    [(status,)] = session.execute(
        """
        with failed as materialized (
          select * from pgsched.fail_task(
            %(id)s, %(token)s, 'boom', p_retry_in => '0', p_permanent => %(permanent)s)),
        logged as (
          insert into oracle.log (id, event, claim_token, detail)
          select %(id)s, 'failed', %(token)s, status from failed)
        select status from failed
        """,
        {**held._asdict(), "permanent": permanent},
    )
    assert isinstance(status, str)
    return status


def fail_batch(session: psycopg.Connection, held: Sequence[Claim]) -> list[str]:
    """The outcomes of fail_tasks, in the order given; the next attempts are due at once."""
    rows = session.execute(
        """
        with given as (
          select * from unnest(%(ids)s::bigint[], %(tokens)s::uuid[])
                          with ordinality as g (id, claim_token, position)),
        done as materialized (
          select * from pgsched.fail_tasks(%(ids)s, %(tokens)s, %(errors)s, %(waits)s::interval[])
                          with ordinality as d (id, outcome, run_at, position)),
        logged as (
          insert into oracle.log (id, event, claim_token, detail)
          select id, 'failed', claim_token, outcome
            from done join given using (id, position)
           where outcome in ('queued', 'failed', 'cancelled'))
        select id, outcome from done order by position
        """,
        {**_arrays(held), "errors": ["boom"] * len(held), "waits": ["0"] * len(held)},
    ).fetchall()
    assert [task_id for task_id, _ in rows] == [each.id for each in held]
    return [outcome for _, outcome in rows]


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


def release_batch(session: psycopg.Connection, held: Sequence[Claim]) -> list[str]:
    """The outcomes of release_tasks, in the order given."""
    rows = session.execute(
        """
        with given as (
          select * from unnest(%(ids)s::bigint[], %(tokens)s::uuid[])
                          with ordinality as g (id, claim_token, position)),
        done as materialized (
          select * from pgsched.release_tasks(%(ids)s, %(tokens)s)
                          with ordinality as d (id, outcome, position)),
        logged as (
          insert into oracle.log (id, event, claim_token, detail)
          select id, 'released', claim_token, outcome
            from done join given using (id, position)
           where outcome in ('queued', 'cancelled'))
        select id, outcome from done order by position
        """,
        _arrays(held),
    ).fetchall()
    assert [task_id for task_id, _ in rows] == [each.id for each in held]
    return [outcome for _, outcome in rows]


def reap(session: psycopg.Connection, *, limit: int = 1000) -> list[int]:
    """The ids that reap_stale returns, in id order."""
    rows = session.execute(
        """
        with reaped as materialized (
          select * from pgsched.reap_stale(%(limit)s)),
        logged as (
          insert into oracle.log (id, event, detail) select id, 'reaped', status from reaped)
        select id from reaped order by id
        """,
        {"limit": limit},
    ).fetchall()
    assert len(rows) <= limit
    return [task_id for (task_id,) in rows]


def cancel(session: psycopg.Connection, task_id: int) -> str:
    """What cancel_task returns."""
    [(answer,)] = session.execute(
        """
        with cancelled as materialized (
          select pgsched.cancel_task(%(id)s) as answer),
        logged as (
          insert into oracle.log (id, event)
          select %(id)s, answer from cancelled where answer <> 'finished')
        select answer from cancelled
        """,
        {"id": task_id},
    )
    assert isinstance(answer, str)
    return answer


def retry(session: psycopg.Connection, task_id: int) -> int:
    """What retry_task returns."""
    [(answer,)] = session.execute(
        """
        with retried as materialized (
          select pgsched.retry_task(%(id)s) as answer),
        logged as (
          insert into oracle.log (id, event) select %(id)s, 'retried' from retried)
        select answer from retried
        """,
        {"id": task_id},
    )
    assert isinstance(answer, int)
    return answer


def reschedule(
    session: psycopg.Connection,
    task_id: int,
    *,
    run_at: datetime | None = None,
    priority: int | None = None,
) -> None:
    """Call reschedule_task."""
    session.execute(
        """
        with rescheduled as materialized (
          select pgsched.reschedule_task(%(id)s, %(run_at)s, %(priority)s) as nothing)
        insert into oracle.log (id, event) select %(id)s, 'rescheduled' from rescheduled
        """,
        {"id": task_id, "run_at": run_at, "priority": priority},
    )


def complete_in_batch(session: psycopg.Connection, held: Claim) -> str:
    """The outcome of complete_tasks, of one claim alone."""
    [outcome] = complete_batch(session, [held])
    return outcome


def fail_in_batch(session: psycopg.Connection, held: Claim) -> str:
    """The outcome of fail_tasks, of one claim alone."""
    [outcome] = fail_batch(session, [held])
    return outcome


def release_in_batch(session: psycopg.Connection, held: Claim) -> str:
    """The outcome of release_tasks, of one claim alone."""
    [outcome] = release_batch(session, [held])
    return outcome


def extend_in_batch(session: psycopg.Connection, held: Claim) -> str:
    """The outcome of extend_tasks, of one claim alone."""
    [outcome] = extend(session, [held])
    return outcome


def lengthen(session: psycopg.Connection, held: Claim) -> bool:
    """Whether extend_task returns a later end of the lease than the claim had."""
    return extend_one(session, held) > held.lease_expires_at


def prune(session: psycopg.Connection, *, limit: int = 10000) -> int:
    """The number that prune_finished returns."""
    [(count,)] = session.execute("select pgsched.prune_finished(%s)", [limit])
    assert isinstance(count, int)
    return count


def maintain(session: psycopg.Connection) -> None:
    """Call maintain."""
    session.execute("select oracle.maintain()")


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
    rows = conn.execute("select * from pgsched.tasks where id = %s", [task_id]).fetchall()
    assert len(rows) == 1, f"task {task_id} is in {len(rows)} tables"
    return rows[0]


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


# The statuses in which an event may find a task.
_FINDS = {
    "claimed": {"queued"},
    "rescheduled": {"queued"},
    "cancelled": {"queued"},
    "requested": {"processing"},
    "extended": {"processing"},
    "cancel_requested": {"processing"},
    # complete_tasks does not wait for a holder: it may have come before the holder's entry.
    "held": {"processing", "completed", "completed, deleted"},
    "completed": {"processing"},
    "failed": {"processing"},
    "released": {"processing"},
    "reaped": {"processing"},
    "deleted": {"completed", "failed", "cancelled"},
    "retried": {"failed, deleted", "cancelled, deleted"},
}


@dataclass
class _Story:
    """What the log says of a task; `token` is that of its claim, or of the one that ended it."""

    id: int
    queue: str
    status: str = "queued"
    attempt: int = 0
    token: UUID | None = None
    cancel_requested: bool = False

    def go_on(self, event: str, token: UUID | None, became: str | None) -> None:
        """Raise AssertionError unless this event can come next."""
        if event == "claimed":
            assert self.status != "processing", f"task {self.id} was handed out twice"
        else:
            assert token in {None, self.token}, f"task {self.id}: {event} with a stale token"
        assert self.status in _FINDS[event], f"task {self.id}: {event}, but {self.status}"
        match event:
            case "claimed":
                self.status, self.attempt, self.token = "processing", self.attempt + 1, token
            case "requested":
                self.cancel_requested = True
            case "cancel_requested":
                assert self.cancel_requested, f"task {self.id}: no cancel was requested"
            case "completed" | "cancelled":
                self.status = event
            case "failed" | "released" | "reaped":
                # release_task does not say what became of the task.
                self.status = became or ("cancelled" if self.cancel_requested else "queued")
                assert (self.status == "cancelled") == self.cancel_requested, f"task {self.id}"
                if self.status == "queued":
                    self.attempt, self.token = self.attempt - (event == "released"), None
            case "deleted":
                self.status += ", deleted"
            case "retried":
                self.status, self.attempt, self.token = "queued", 0, None
                self.cancel_requested = False


def check(conn: psycopg.Connection) -> None:
    """Raise AssertionError unless every task's claims took turns and the tables say the same.

    Each event finds the task in a status where it may happen: a claim begins when the one before
    has ended, and ends once, by its own token; a cancel is requested while the task runs, and then
    nothing but a completion keeps it from ending cancelled; a retry starts from nothing. Each task
    is in exactly one table, as its log says, or in none: deleted after it had ended, or completed
    in a queue that keeps no completed tasks, from its first task on. Tokens differ. Call it when
    all sessions are idle.
    """
    stories: dict[int, _Story] = {}
    tokens = []
    for task_id, event, token, detail in conn.execute(
        "select id, event, claim_token, detail from oracle.log order by seq"
    ):
        if event == "enqueued":
            story = stories.setdefault(task_id, _Story(task_id, detail))
            assert story.queue == detail, f"task {task_id}: enqueued in two queues"
            continue
        assert task_id in stories, f"task {task_id}: {event}, but not enqueued"
        stories[task_id].go_on(event, token, detail)
        if event == "claimed":
            tokens.append(token)
    assert len(set(tokens)) == len(tokens), "a token was given twice"

    rows = conn.execute(
        """
        select id, queue, status, attempt, claim_token, cancel_requested_at is not null
          from pgsched.tasks
        """
    ).fetchall()
    tasks = {task_id: _Story(task_id, *row) for task_id, *row in rows}
    assert len(tasks) == len(rows), "a task is in both tables"
    forgetful = {
        queue
        for (queue,) in conn.execute("select name from pgsched.queues where keep_completed = '0'")
    }
    for task_id, story in stories.items():
        gone = story.status.endswith("deleted") or (
            story.status == "completed" and story.queue in forgetful
        )
        found = tasks.pop(task_id, None)
        assert found == (None if gone else story), f"{found}, but {story}"
    assert not tasks, "tasks that nobody enqueued"
    assert task_locks(conn) == 0, "an advisory lock was left"


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of calls that run at the same time, each in a thread of its own."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


CALL = "call of a test"
"""The name of such a thread."""


class Call:
    """A call in a thread of its own; `waits` says whether it waits for another session's lock."""

    def __init__(
        self, conn: psycopg.Connection, session: psycopg.Connection, call: Callable[[], Any]
    ) -> None:
        """Start it, and return when it has ended or waits; `conn` looks on."""
        self.waits = False
        self._future: Future[Any] = Future()
        Thread(target=self._run, args=[call], name=CALL, daemon=True).start()

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
        outcome(started.result)
        raise AssertionError("it waited for another session")
    return started.result()


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the SQLSTATE it raises."""
    try:
        return call()
    except psycopg.Error as error:
        return error.sqlstate


def _arrays(held: Sequence[Claim]) -> dict[str, Any]:
    return {"ids": [each.id for each in held], "tokens": [each.token for each in held]}
