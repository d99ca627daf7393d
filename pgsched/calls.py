"""The SQL functions that the driver calls, one Python function each. No other SQL stands anywhere.

All of them use the connection they are given and never commit. psycopg.Error passes through; what
an SQLSTATE of pgsched's stands for is told by pgsched.errors. A function of PostgreSQL's that takes
any type has its schema before it: on the search path there may be another that fits better.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from threading import Event
from typing import Any, Literal, LiteralString
from weakref import WeakSet

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from psycopg.rows import tuple_row

from pgsched.errors import InvalidArgument, from_database

Connection = psycopg.Connection[tuple[Any, ...]]

Document = dict[str, Any]
"""A row for observers, as the server writes it in JSON; lengths of time are in seconds."""
DatabaseStats = tuple[Document, list[Document]]
"""The row of server_stats, and those of queue_stats."""

CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    # A server that fell silent is given up after about ten seconds, not after hours.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""libpq's connection parameters, where the DSN says nothing else."""

OLDEST_SCHEMA, NEWEST_SCHEMA = "0001", "0003"
"""The first migration that brings all that a worker calls, and this package's last one."""


@dataclass(slots=True, eq=False)
class Task:
    """A claimed task, as a handler gets it.

    ``attempt`` counts this one. ``run_at`` and ``created_at`` are times of the server's clock, in
    UTC. ``cancelled`` is set when a cancel was requested, the claim was lost or the time is over:
    stop. After a request only a completion counts, after the others nothing does.
    """

    id: int
    queue: str
    task_type: str
    payload: Any
    priority: int
    attempt: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    _cancelled: list[Event] = field(default_factory=list, init=False, repr=False)

    @property
    def cancelled(self) -> Event:
        # Made when somebody looks: it takes as long as all the rest. Of two who do, one is first.
        if not self._cancelled:
            self._cancelled.append(Event())
        return self._cancelled[0]


@dataclass(slots=True, eq=False)
class Claim(Task):
    """One row of claim_task; ``payload`` is text at first: a bad one must not end the batch.

    ``waited``: seconds from run_at to the claim. ``claimed_at``: when the answer came, by
    time.monotonic().
    """

    token: str = field(repr=False)
    waited: float
    contended: int
    claimed_at: float = field(default_factory=time.monotonic, kw_only=True)


@dataclass(slots=True)
class Outcome:
    """How a handler ended: what is to be told to the database, unless it was ``recorded``.

    ``result`` is JSON text.
    """

    claim: Claim
    kind: Literal["completed", "failed", "released", "recorded"]
    result: str | None = None
    error: str = ""
    delay: timedelta | None = None
    permanent: bool = False


Answer = str | Outcome
"""What the database said; an outcome: what is to be said instead; refused: not now."""


Report = list[tuple[Outcome, Answer]]
"""What was answered to outcomes, without those that the database could not be told of."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise pgsched's exception in place of a psycopg.Error that carries an SQLSTATE of pgsched."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text that PostgreSQL cannot hold: {error.reason}") from error
    except psycopg.Error as error:
        translation = from_database(error)
        if translation is error:
            raise
        raise translation from error


@contextmanager
def plain(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Whatever cursors and rows a connection makes, they are psycopg's own meanwhile."""
    before = conn.cursor_factory, conn.row_factory
    conn.cursor_factory, conn.row_factory = psycopg.Cursor, tuple_row
    try:
        yield
    finally:
        conn.cursor_factory, conn.row_factory = before


def to_json(value: Any) -> str:
    """JSON text of a payload or a result; InvalidArgument when there is none (NaN, a datetime…)."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not representable as JSON: {error}") from error


def dsn_parameters(dsn: str) -> dict[str, Any]:
    """What a DSN says; InvalidArgument, which shows nothing of it, when libpq cannot read it."""
    try:
        return conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeError) as error:
        names = [option.keyword.decode() for option in Conninfo.get_defaults()]
        word = str(error).strip().rpartition(' "')[2].strip('"')
        # What is not nearly an option may be a piece of a password.
        meant = [] if word in names else get_close_matches(word, names, 1, 0.8)
        wrong = [f"no option {word}, perhaps {name}" for name in meant]
        text = wrong[0] if wrong else "neither a PostgreSQL URL nor key=value pairs"
        raise InvalidArgument(f"dsn: {text}") from None


def connect(dsn: str, *, application_name: str = "pgsched") -> Connection:
    """An autocommit connection that a transaction-mode pooler may sit behind: no session state."""
    given = dsn_parameters(dsn)
    try:
        connection = psycopg.connect(
            dsn,
            autocommit=True,
            prepare_threshold=None,
            # Whatever the DSN says: errors and results may hold any character, and of an SQL_ASCII
            # database psycopg returns text as bytes otherwise.
            client_encoding="utf8",
            fallback_application_name=application_name[:63],
            **{name: value for name, value in CONNECTION.items() if name not in given},
        )
    except UnicodeError:
        raise InvalidArgument("dsn: the name of the host cannot be one") from None
    not_for_children.add(connection)
    return connection


not_for_children: WeakSet[Any] = WeakSet()
"""Connections and sockets, open or closed, that lead nowhere in a forked child."""


def _leave_to_parent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in not_for_children:
        with suppress(psycopg.OperationalError, OSError):  # it is closed
            os.dup2(nowhere, each.fileno())
    os.close(nowhere)


os.register_at_fork(after_in_child=_leave_to_parent)


def enqueue(
    conn: psycopg.Connection[Any],
    task_type: str,
    payload: Any = None,
    *,
    queue: str = "default",
    run_at: datetime | None = None,
    delay: timedelta | None = None,
    priority: int = 5,
    max_attempts: int | None = None,
    unique_key: str | None = None,
    concurrency_key: str | None = None,
) -> int:
    """Add a task in the transaction of ``conn``, which stays the caller's to commit.

    Arguments:
        conn: a psycopg connection; an autocommit one commits the task at once.
        task_type: names the handler; 1 to 63 bytes.
        payload: anything json.dumps takes; None means {}. At most 1 MiB by default.
        queue: 1 to 63 bytes; needs no setting up.
        run_at: not before this time; needs a time zone. Past or None means now.
        delay: not before this long from now by the server's clock; instead of run_at.
        priority: 0 (first) to 9 (last).
        max_attempts: at least 1; None means the queue's own, 20 by default.
        unique_key: while a live task of the queue has this key, no second one is added.
        concurrency_key: kept with the task.

    Returns the id of the new task, or of the live task that has the unique key.

    Raises InvalidArgument, and psycopg.Error for what the database itself refuses.
    """
    for name, value, kind in (
        ("conn", conn, psycopg.Connection),
        ("task_type", task_type, str),
        ("queue", queue, str),
        ("run_at", run_at, datetime | None),
        ("delay", delay, timedelta | None),
        ("priority", priority, int),
        ("max_attempts", max_attempts, int | None),
        ("unique_key", unique_key, str | None),
        ("concurrency_key", concurrency_key, str | None),
    ):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} is a {type(value).__name__}: give {kind}")
    if run_at is not None and delay is not None:
        raise InvalidArgument("give run_at or delay, not both")
    if run_at is not None and run_at.utcoffset() is None:
        raise InvalidArgument("run_at has no time zone: give an aware datetime")
    text = to_json({} if payload is None else payload)
    # Whatever cursors and rows the caller's connection makes.
    with translated(), psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        [(task_id,)] = cursor.execute(
            """
            select pgsched.enqueue_task(
                     p_task_type => %s, p_payload => %s::jsonb, p_queue => %s,
                     p_run_at => coalesce(%s::timestamptz,
                                    pg_catalog.clock_timestamp() + %s::interval),
                     p_priority => %s::integer, p_max_attempts => %s::integer,
                     p_unique_key => %s, p_concurrency_key => %s)
            """,
            (
                *(task_type, text, queue, run_at, delay),
                *(priority, max_attempts, unique_key, concurrency_key),
            ),
        )
    return int(task_id)


def _value(conn: Connection, query: LiteralString, *arguments: Any) -> Any:
    [(value,)] = conn.execute(query, arguments)
    return value


def claim_task(
    conn: Connection, worker: str, queue: str, lease: timedelta, limit: int
) -> list[Claim]:
    """Up to ``limit`` (1 to 100) due tasks of a queue, claimed for ``lease``, in claim order."""
    rows = conn.execute(
        """
        select c.id, c.queue, c.task_type, c.payload::text, c.priority, c.attempt, c.max_attempts,
               date_part('epoch', c.run_at), date_part('epoch', c.created_at),
               c.claim_token::text, date_part('epoch', c.lease_expires_at - %s - c.run_at),
               c.contended
          from pgsched.claim_task(
                 p_worker => %s, p_queue => %s, p_lease => %s, p_limit => %s::integer) as c
        """,
        (lease, worker, queue, lease, limit),
        binary=True,
    )
    # Times come as seconds since 1970: psycopg reads timestamps in the ISO DateStyle only.
    time_of = partial(datetime.fromtimestamp, tz=UTC)
    return [Claim(*row[:7], *map(time_of, row[7:9]), *row[9:]) for row in rows.fetchall()]


def extend_tasks(conn: Connection, claims: Sequence[Claim], lease: timedelta) -> list[str]:
    """What became of each claim, in the order given: extended, cancel_requested, busy or lost."""
    call = "pgsched.extend_tasks(p_ids => %s, p_claim_tokens => %s, p_lease => %s)"
    return _outcomes(conn, call, claims, lease)


def complete_tasks(conn: Connection, batch: Sequence[Outcome]) -> list[str]:
    """What became of each claim, in the order given: completed, already, stale, gone or busy."""
    call = "pgsched.complete_tasks(p_ids => %s, p_claim_tokens => %s, p_results => %s::jsonb[])"
    return _outcomes(conn, call, [each.claim for each in batch], [each.result for each in batch])


def fail_tasks(conn: Connection, batch: Sequence[Outcome]) -> list[str]:
    """What became of each: queued (for another attempt), failed, cancelled, stale, gone or busy."""
    call = (
        "pgsched.fail_tasks(p_ids => %s, p_claim_tokens => %s, p_errors => %s,"
        " p_retry_in => %s::interval[], p_permanent => %s)"
    )
    given = zip(*((each.error, each.delay, each.permanent) for each in batch), strict=True)
    return _outcomes(conn, call, [each.claim for each in batch], *map(list, given))


def release_tasks(conn: Connection, batch: Sequence[Outcome]) -> list[str]:
    """What became of each: queued (due after its delay), cancelled, stale, gone or busy."""
    call = "pgsched.release_tasks(p_ids => %s, p_claim_tokens => %s, p_delay => %s::interval[])"
    return _outcomes(conn, call, [each.claim for each in batch], [each.delay for each in batch])


def tell(conn: Connection, batch: Sequence[Outcome]) -> list[str]:
    """What became of each claim, by outcomes that are all of one kind."""
    calls = {"completed": complete_tasks, "failed": fail_tasks, "released": release_tasks}
    return calls[batch[0].kind](conn, batch)


def _outcomes(
    conn: Connection, call: LiteralString, claims: Sequence[Claim], *more: Any
) -> list[str]:
    # Arrays as PostgreSQL writes them: psycopg would look at each element.
    ids, tokens = ",".join(str(c.id) for c in claims), ",".join(c.token for c in claims)
    given = f"{{{ids}}}", f"{{{tokens}}}", *more
    return [outcome for (outcome,) in conn.execute(f"select o.outcome from {call} as o", given)]


def hold_task(conn: Connection, claim: Claim) -> None:
    """Keep the claim until the transaction of ``conn`` ends."""
    conn.execute(
        "select pgsched.hold_task(p_id => %s::bigint, p_claim_token => %s)", (claim.id, claim.token)
    )


def complete_task(conn: Connection, claim: Claim, result: str | None) -> None:
    """Complete the claim in the transaction of ``conn``; the result is JSON text."""
    conn.execute(
        "select pgsched.complete_task(p_id => %s::bigint, p_claim_token => %s,"
        " p_result => %s::jsonb)",
        (claim.id, claim.token, result),
    )


def reap_stale(conn: Connection, limit: int) -> list[tuple[int, str]]:
    """Id and new status of up to ``limit`` tasks whose lease had ended or whose worker is gone."""
    rows = conn.execute(
        "select r.id, r.status from pgsched.reap_stale(p_limit => %s::integer) as r", (limit,)
    )
    return [(task_id, status) for task_id, status in rows]


def prune_finished(conn: Connection, limit: int) -> int:
    """How many finished tasks were deleted since their queues keep them no longer."""
    return int(_value(conn, "select pgsched.prune_finished(p_limit => %s::integer)", limit))


def register_worker(
    conn: Connection, name: str, queues: Sequence[str], slots: int, presence: bool
) -> int:
    """Id of the worker's row; repeated about every minute, and when ``presence`` changed."""
    text: LiteralString = (
        "select pgsched.register_worker(p_name => %s, p_queues => %s::text[],"
        " p_slots => %s::integer, p_presence => %s)"
    )
    return int(_value(conn, text, name, list(queues), slots, presence))


def hold_presence(conn: Connection, worker_id: int) -> None:
    """Show that the worker lives, in a transaction that is begun here and stays open."""
    conn.execute("begin isolation level read committed read only")
    conn.execute("call pgsched.hold_presence(p_worker_id => %s::bigint)", (worker_id,))


def unregister_worker(conn: Connection, worker_id: int) -> None:
    """The worker process ends."""
    conn.execute("select pgsched.unregister_worker(p_id => %s::bigint)", (worker_id,))


def register_listener(conn: Connection, worker_id: int, queues: Sequence[str]) -> None:
    """The worker listens for these queues now."""
    conn.execute(
        "select pgsched.register_listener(p_worker_id => %s::bigint, p_queues => %s::text[])",
        (worker_id, list(queues)),
    )


def listen(conn: Connection, queue: str) -> str:
    """Listen for new tasks of a queue; returns the channel."""
    channel = str(_value(conn, "select pgsched.notify_channel(p_queue => %s)", queue))
    conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
    return channel


def is_pooled(conn: Connection) -> bool:
    """Whether a pooler sits between: statements may run in another session than they seem to."""
    return bool(_value(conn, "select pg_backend_pid()") != conn.info.backend_pid)


def database_stats(conn: Connection) -> DatabaseStats:
    """By one statement. Queues: those that have settings, live tasks or dead letters; counts stop
    at 10,000."""
    rows = conn.execute(
        """
        select pg_catalog.to_json(v), date_part('epoch', v.oldest_snapshot_age),
               pg_catalog.to_json(s), date_part('epoch', s.oldest_due_age)
          from pgsched.server_stats() as v
          left join pgsched.queue_stats() as s on true
        """
    ).fetchall()
    server, snapshot_age, *_ = rows[0]
    queues = [queue | {"oldest_due_age": age} for *_, queue, age in rows if queue]
    return server | {"oldest_snapshot_age": snapshot_age}, queues


def limit_statements(conn: Connection) -> None:
    """Statements of this transaction are given up after 3 seconds."""
    conn.execute("select set_config('statement_timeout', '3s', true)")


def schema_version(conn: Connection) -> str:
    """Number of the newest migration in the database."""
    return str(_value(conn, "select pgsched.schema_version()"))


def get_task(conn: Connection, task_id: int) -> tuple[Document, str, str | None]:
    """What there is of a task, with times in UTC, and its payload and result as JSON text."""
    [(_, task, payload, result)] = conn.execute(
        """
        select set_config('timezone', 'UTC', true), pg_catalog.to_json(r),
               t.payload::text, t.result::text
          from pgsched.get_task(p_id => %s::bigint) as t,
               lateral (
                 select t.id, t.queue, t.task_type, t.status, t.priority, t.attempt,
                        t.max_attempts, clock_timestamp() as now, t.run_at, t.created_at,
                        t.claimed_by, t.claimed_at, t.lease_expires_at, t.finished_at,
                        t.cancel_requested_at, t.unique_key, t.concurrency_key, t.last_error) as r
        """,
        (task_id,),
    )
    return task, payload, result


def list_workers(conn: Connection) -> list[Document]:
    """One for each worker, with times in UTC; ``seen_age`` in seconds."""
    rows = conn.execute(
        "select set_config('timezone', 'UTC', true), pg_catalog.to_json(w),"
        " date_part('epoch', clock_timestamp() - w.seen_at) from pgsched.list_workers() as w"
    )
    return [worker | {"seen_age": age} for _, worker, age in rows]


def recent_rates(conn: Connection, seconds: int) -> list[Document]:
    """What ended in the last seconds, by queue. Counts stop at 10,000."""
    rows = conn.execute(
        "select pg_catalog.to_json(r) from pgsched.recent_rates(p_seconds => %s::integer) as r",
        (seconds,),
    )
    return [rate for (rate,) in rows]


def diagnose(conn: Connection) -> list[Document]:
    """What was found, each with check_name, level, finding and advice."""
    rows = conn.execute("select pg_catalog.to_json(d) from pgsched.diagnose() as d")
    return [found for (found,) in rows]


def cancel_task(conn: Connection, task_id: int) -> str:
    """cancelled, requested (it is running) or finished (it had ended already)."""
    return str(_value(conn, "select pgsched.cancel_task(p_id => %s::bigint)", task_id))


def retry_task(conn: Connection, task_id: int) -> str:
    """The status that the task has now: queued."""
    conn.execute("select pgsched.retry_task(p_id => %s::bigint)", (task_id,))
    return "queued"


def pause_queue(conn: Connection, queue: str) -> None:
    """Its tasks are not handed out any more."""
    conn.execute("select pgsched.pause_queue(p_queue => %s)", (queue,))


def resume_queue(conn: Connection, queue: str) -> None:
    """They are again."""
    conn.execute("select pgsched.resume_queue(p_queue => %s)", (queue,))


def maintain(conn: Connection) -> dict[str, int | None]:
    """Of each step, how many tasks it changed; None: it could not run now."""
    return dict(conn.execute("select m.step, m.affected from pgsched.maintain() as m").fetchall())


def grant_access(conn: Connection, role: str, kind: str) -> None:
    """Let a role call what a producer, worker, observer or admin calls."""
    conn.execute("select pgsched.grant_access(p_role => %s, p_kind => %s)", (role, kind))


def revoke_access(conn: Connection, role: str, kind: str) -> None:
    """Take that back, but what another kind needs that the role has."""
    conn.execute("select pgsched.revoke_access(p_role => %s, p_kind => %s)", (role, kind))


RIGHTS = """
select quote_literal(current_user), has_schema_privilege(n.oid, 'usage'), array(
       select p.proname::text from pg_proc as p
        where p.pronamespace = n.oid and has_function_privilege(p.oid, 'execute'))
  from (select to_regnamespace('pgsched')) as n (oid)
"""
"""By the catalog: whose rights are in question may be unable to call any function of pgsched."""


def rights(conn: Connection) -> tuple[str, bool | None, list[str]]:
    """This role, as SQL writes it; whether it may use the schema, None: there is none; what it may
    call."""
    [(role, usage, functions)] = conn.execute(RIGHTS)
    return role, usage, functions
