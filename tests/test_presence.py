"""Presence in the database: who is missed, when, and what it costs; reaping what cannot be reaped.

A test that is also run against mutants takes nothing but the connection factory and its cases.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Connect
from psycopg import sql
from workers import PATIENCE, install, row, shorten_grace, wait_until

from pgsched import calls
from pgsched.embedded import Server

GRACE = 0.2

LOOK = "select id, status from pgsched.reap_stale()"
NOTED = "select presence, suspect_since is not null from pgsched.workers where id = %s"
ABSENT, SUSPECT = (True, False), (True, True)
"""Of a worker that nobody has looked for, and that was missed once."""
PRESENT, OFF = (True, False), (False, False)
GONE = (False, True)


@pytest.fixture(autouse=True)
def short_grace(conn: psycopg.Connection) -> None:
    shorten_grace(conn, GRACE)


def register(conn: psycopg.Connection, name: str = "w", presence: bool = False) -> int:
    return calls.register_worker(conn, name, ["default"], 1, presence)


def noted(conn: psycopg.Connection, worker_id: int) -> tuple[bool, bool]:
    """Whether the worker has its presence on, and whether it is suspected."""
    [state] = conn.execute(NOTED, [worker_id])
    return state


def look(session: psycopg.Connection) -> list[int]:
    """The tasks that are reaped."""
    return sorted(task_id for task_id, _ in session.execute(LOOK))


def claimed(conn: psycopg.Connection, name: str = "w", tasks: int = 1) -> list[int]:
    """New tasks that this worker has claimed."""
    conn.execute("select pgsched.enqueue_task('a') from generate_series(1, %s)", [tasks])
    rows = conn.execute("select id from pgsched.claim_task(%s, p_limit => %s)", [name, tasks])
    return sorted(task_id for (task_id,) in rows)


def present(connect: Connect, name: str = "w") -> tuple[int, psycopg.Connection]:
    """A registered worker and the session that holds its presence, whatever its defaults are."""
    conn = connect()
    session = connect(options="-c default_transaction_isolation=serializable")
    worker_id = register(conn, name)
    calls.hold_presence(session, worker_id)
    assert register(conn, name, True) == worker_id
    assert noted(conn, worker_id) == PRESENT
    return worker_id, session


def end(conn: psycopg.Connection, session: psycopg.Connection) -> None:
    """End a session as its death would."""
    conn.execute("select pg_terminate_backend(%s, 5000)", [session.info.backend_pid])


def absent(connect: Connect, name: str = "w", tasks: int = 1) -> tuple[int, list[int]]:
    """A worker whose presence nobody holds any more, and the tasks that it has claimed."""
    conn = connect()
    worker_id, session = present(connect, name)
    ids = claimed(conn, name, tasks)
    end(conn, session)
    return worker_id, ids


def within_grace(conn: psycopg.Connection) -> None:
    """Let it last for long, for all who are suspected."""
    conn.execute("update pgsched.workers set suspect_since = suspect_since + interval '1 hour'")


def missed(conn: psycopg.Connection) -> None:
    """Look once, and return when the grace of all who are missed is over."""
    look(conn)
    over = """
        select bool_and(suspect_since < clock_timestamp() - %s * interval '1 second')
          from pgsched.workers
         where suspect_since is not null
        """
    wait_until(lambda: conn.execute(over, [GRACE]).fetchone() == (True,))


# Two looks


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_who_ended_is_gone_at_the_second_look(connect: Connect, isolation: str) -> None:
    level = isolation.replace(" ", "\\ ")
    conn = connect(options=f"-c default_transaction_isolation={level}")
    worker_id, ids = absent(connect, tasks=3)
    assert look(conn) == []
    assert noted(conn, worker_id) == SUSPECT
    missed(conn)
    assert look(conn) == ids
    assert noted(conn, worker_id) == GONE
    for task_id in ids:
        reaped = row(conn, task_id)
        reason = "worker w was lost: its presence ended during attempt 1"
        assert (reaped.status, reaped.attempt, reaped.last_error) == ("queued", 1, reason)
    assert claimed(conn, tasks=3) != []
    assert look(conn) == []


@pytest.mark.parametrize("says_so", [False, True])
def test_who_comes_back_in_time_loses_nothing(connect: Connect, says_so: bool) -> None:
    conn, session = connect(), connect()
    worker_id, [task_id] = absent(connect)
    missed(conn)
    calls.hold_presence(session, worker_id)
    if says_so:
        assert register(conn, presence=True) == worker_id
        assert noted(conn, worker_id) == PRESENT
    assert look(conn) == []
    assert noted(conn, worker_id) == PRESENT
    # Away again, it has all of its grace again.
    end(conn, session)
    assert look(conn) == []
    assert noted(conn, worker_id) == SUSPECT
    assert row(conn, task_id).status == "processing"


def test_who_says_that_it_is_not_there_lives_by_its_leases(connect: Connect) -> None:
    conn = connect()
    worker_id, [task_id] = absent(connect)
    missed(conn)
    register(conn, presence=False)
    assert noted(conn, worker_id) == OFF
    assert look(conn) == []
    conn.execute("update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp()")
    assert look(conn) == [task_id]
    assert row(conn, task_id).last_error == "worker w was lost: its lease ended during attempt 1"


def test_two_who_look_do_not_take_each_other_for_the_worker(connect: Connect) -> None:
    conn, other = connect(), connect()
    worker_id, ids = absent(connect, tasks=20)
    look(conn)
    within_grace(conn)
    with other.transaction():
        assert look(other) == []
        assert oracle.at_once(conn, conn, lambda: look(conn)) == []
        assert noted(conn, worker_id) == SUSPECT
    conn.execute("update pgsched.workers set suspect_since = null")
    missed(conn)
    with other.transaction(force_rollback=True):
        assert look(other) == ids
        assert oracle.at_once(conn, conn, lambda: look(conn)) == []
    parts = oracle.together(partial(look, connect()) for _ in range(4))
    assert sorted(task_id for part in parts for task_id in part) == ids
    assert noted(conn, worker_id) == GONE


def test_who_waits_for_an_open_look_is_not_missed_by_it(connect: Connect) -> None:
    conn, reaper, session = connect(), connect(), connect()
    worker_id, [task_id] = absent(connect)
    with reaper.transaction():
        missed(reaper)
        back = oracle.Call(conn, session, lambda: calls.hold_presence(session, worker_id))
        looks = [look(reaper), look(conn)]
    back.result()
    assert back.waits
    assert looks == [[], []]
    assert look(conn) == []
    assert noted(conn, worker_id) == PRESENT
    assert row(conn, task_id).status == "processing"


def test_an_open_look_holds_up_no_registration(connect: Connect) -> None:
    conn, reaper, session = connect(), connect(), connect()
    suspect, _ = absent(connect, "suspect")
    healthy, _ = present(connect, "healthy")
    with reaper.transaction():
        look(reaper)
        for presence in (False, True):
            again = partial(register, session, "healthy", presence)
            assert oracle.at_once(conn, session, again) == healthy
            refused = partial(oracle.outcome, partial(register, session, "suspect", presence))
            assert oracle.at_once(conn, session, refused) == "55P03"
        assert oracle.at_once(conn, session, partial(register, session, "new")) not in (
            suspect,
            healthy,
        )
        assert oracle.at_once(conn, session, lambda: look(session)) == []
    assert noted(conn, healthy) == PRESENT
    assert noted(conn, suspect) == SUSPECT
    register(conn, "suspect")
    assert noted(conn, suspect) == OFF


def test_what_is_held_in_another_database_does_not_count(connect: Connect) -> None:
    """There the id is that of another worker, whatever the other database is."""
    conn, other = connect(), connect(dbname="postgres")
    worker_id = register(conn)
    with other.transaction():
        other.execute("select pg_advisory_xact_lock(1339, %s::integer)", [worker_id])
        register(conn, presence=True)
        assert noted(conn, worker_id) == OFF
        conn.execute("update pgsched.workers set presence = true")
        missed(conn)
        assert noted(conn, worker_id) == SUSPECT
        look(conn)
        assert noted(conn, worker_id) == GONE


def test_what_a_gone_worker_is_acting_on_is_passed_by(connect: Connect) -> None:
    """One session of its process may live on, or the process may only seem to be gone."""
    conn, holder = connect(), connect()
    worker_id, ids = absent(connect, tasks=3)
    tokens: dict[int, object] = dict(
        conn.execute("select id, claim_token from pgsched.tasks where id = any (%s)", [ids])
    )
    missed(conn)
    held, completing, left = ids
    with holder.transaction(force_rollback=True):
        holder.execute("select pgsched.hold_task(%s, %s)", [held, tokens[held]])
        holder.execute("select pgsched.complete_task(%s, %s)", [completing, tokens[completing]])
        assert oracle.at_once(conn, conn, lambda: look(conn)) == [left]
        assert noted(conn, worker_id) == SUSPECT
    with holder.transaction():
        holder.execute("select pgsched.complete_task(%s, %s)", [completing, tokens[completing]])
        assert look(conn) == [held]
        assert noted(conn, worker_id) == SUSPECT
    assert row(conn, completing).status == "completed"
    assert look(conn) == []
    assert noted(conn, worker_id) == GONE
    for task_id in (held, left):
        with pytest.raises(psycopg.Error) as refused:
            holder.execute("select pgsched.complete_task(%s, %s)", [task_id, tokens[task_id]])
        assert refused.value.sqlstate == "TS409"


# What it costs


def test_a_presence_pins_and_locks_nothing(connect: Connect) -> None:
    """Neither does vacuum keep rows for it, nor a migration of the table wait."""
    conn = connect()
    worker_id, session = present(connect)
    pid = session.info.backend_pid
    held = "select locktype, classid::int, objid::int from pg_locks where pid = %s order by 1"
    key = ("advisory", 1339, worker_id)
    assert conn.execute(held, [pid]).fetchall() == [key, ("virtualxid", None, None)]
    pinned = "select state, backend_xid, backend_xmin from pg_stat_activity where pid = %s"
    assert conn.execute(pinned, [pid]).fetchall() == [("idle in transaction", None, None)]
    conn.execute("create table public.rows as select n from generate_series(1, 10000) as n")
    conn.execute("delete from public.rows")
    conn.execute("vacuum public.rows")
    assert conn.execute("select pg_relation_size('public.rows')").fetchone() == (0,)
    change = "alter table pgsched.workers add column something integer"
    oracle.at_once(connect(), conn, lambda: conn.execute(change))
    assert register(conn, presence=True) == worker_id
    assert noted(conn, worker_id) == PRESENT


def test_timeouts_of_idle_and_long_transactions_do_not_end_it(connect: Connect) -> None:
    conn = connect()
    names = ["idle_in_transaction_session_timeout", "idle_session_timeout"]
    if conn.info.server_version >= 170000:
        names.append("transaction_timeout")
    options = " ".join(f"-c {name}=200ms" for name in names)
    worker_id = register(conn)
    session = connect(options=options)
    calls.hold_presence(session, worker_id)
    alive = "select pid from pg_stat_activity where pid = %s"
    for name in names:
        other = connect(options=f"-c {name}=300ms")
        if name != "idle_session_timeout":
            other.execute("begin")
        wait_until(lambda: not conn.execute(alive, [other.info.backend_pid]).fetchall())  # noqa: B023
    assert conn.execute(alive, [session.info.backend_pid]).fetchall()
    register(conn, presence=True)
    assert noted(conn, worker_id) == PRESENT


def test_it_waits_for_the_session_that_the_server_has_not_missed_yet(connect: Connect) -> None:
    conn, again = connect(), connect()
    worker_id, session = present(connect)
    call = oracle.Call(conn, again, lambda: calls.hold_presence(again, worker_id))
    assert call.waits
    assert look(conn) == []
    end(conn, session)
    call.result()
    assert look(conn) == []
    assert noted(conn, worker_id) == PRESENT


def test_it_does_not_wait_for_ever(connect: Connect) -> None:
    """Since the snapshot of what waits is one that vacuum has to keep."""
    conn, again = connect(), connect(options="-c lock_timeout=0")
    mutants.install(conn, Mutant("hold_presence", "'1 min'", "'100 ms'"))
    worker_id, session = present(connect)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        calls.hold_presence(again, worker_id)
    again.execute("rollback")
    end(conn, session)
    calls.hold_presence(again, worker_id)
    assert again.execute("show lock_timeout").fetchone() == ("0",)


def test_a_look_that_finds_nothing_new_writes_nothing(connect: Connect) -> None:
    conn = connect()
    present(connect, "there")
    absent(connect, "gone")
    missed(conn)
    look(conn)
    worker_id, _ = absent(connect, "suspect")
    look(conn)
    within_grace(conn)
    position = "select pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())"

    def nothing_was_written() -> bool:
        # The server itself writes now and then, so one quiet stretch will do.
        before = conn.execute(position).fetchone()
        for _ in range(20):
            with conn.transaction():
                assert look(conn) == []
                assigned = conn.execute("select pg_current_xact_id_if_assigned()").fetchone()
                assert assigned == (None,)
        return conn.execute(position).fetchone() == before

    wait_until(nothing_was_written)
    left = "select locktype from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    assert conn.execute(left).fetchall() == []
    assert noted(conn, worker_id) == SUSPECT


def test_many_who_died_are_looked_for_a_hundred_at_a_time_and_then_no_more(
    connect: Connect,
) -> None:
    """Each look takes a slot of the lock table for each of them, which has few to spare."""
    conn = connect()
    conn.execute(
        """
        insert into pgsched.workers (name, queues, slots, started_at, seen_at, presence)
        select 'dead ' || n, '{a}', 1, clock_timestamp(), clock_timestamp(), true
          from generate_series(1, 250) as n
        """
    )
    locks = "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"
    left = "select count(*) from pgsched.workers where presence"
    for taken, there in ((100, 150), (100, 50), (50, 0)):
        missed(conn)
        with conn.transaction():
            assert look(conn) == []
            assert conn.execute(locks).fetchone() == (taken,)
        assert conn.execute(left).fetchone() == (there,)
    with conn.transaction():
        assert look(conn) == []
        assert conn.execute(locks).fetchone() == (0,)


# A start of the server, the network


def free_address() -> str:
    """Where nobody listens on the port that servers of ours have."""
    for last in range(1, 255):
        with suppress(OSError), socket.create_server((f"127.0.0.{last}", 5432)):
            return f"127.0.0.{last}"
    raise AssertionError("no address is free")


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A server of this module's own, which tests stop and reach over TCP, with the schema."""
    with Server(settings={"fsync": "off", "listen_addresses": free_address()}) as server:
        install(server, server.dsn())
        yield server


def answers(dsn: str) -> bool:
    """Whether the server, which may be recovering, lets a client in."""
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize("crash", [False, True])
def test_nothing_counts_from_before_a_start_of_the_server_and_soon_after(
    own_server: Server, crash: bool
) -> None:
    """Then everybody has lost its presence, and may not have come back yet.

    When one of its processes is killed, the server recovers, and its start was long ago.
    """
    since = "select suspect_since from pgsched.workers"
    start = "stats_reset from pg_stat_bgwriter" if crash else "pg_postmaster_start_time()"
    started = f"select clock_timestamp() - (select {start}) > interval '5 seconds'"
    with psycopg.connect(own_server.dsn(), autocommit=True) as conn:
        worker_id = register(conn)
        [task_id] = claimed(conn)
        conn.execute(
            """
            update pgsched.workers
               set presence = true, suspect_since = clock_timestamp() - interval '6 seconds'
            """
        )
        before = conn.execute(since).fetchone()
        if crash:
            with psycopg.connect(own_server.dsn()) as other:
                os.kill(conn.info.backend_pid, signal.SIGKILL)
                # When the server ends all sessions, it has seen it.
                with pytest.raises(psycopg.OperationalError):
                    other.execute("select pg_sleep(30)")
    if crash:
        wait_until(lambda: answers(own_server.dsn()))
    else:
        own_server.stop()
        own_server.start()
    with psycopg.connect(own_server.dsn(), autocommit=True) as conn:
        assert look(conn) == []
        assert conn.execute(since).fetchone() == before
        wait_until(lambda: conn.execute(started.encode()).fetchone() == (True,))
        assert look(conn) == []
        assert conn.execute(since).fetchone() != before
        assert row(conn, task_id).status == "processing"
        conn.execute(f"update pgsched.workers set suspect_since = (select {start})".encode())
        assert look(conn) == [task_id]
        assert noted(conn, worker_id) == GONE


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_held_task_is_not_kept_by_a_client_whose_network_is_gone(
    own_server: Server, over_tcp: bool
) -> None:
    """The server asks the client whether it is there, for as long as the task is held."""
    [address] = own_server.run(
        "psql", "-XqAtc", "show listen_addresses", capture_output=True, check=True
    ).stdout.split()
    dsn = own_server.dsn()
    if over_tcp:
        dsn = f"host={address} port=5432 dbname=postgres user=postgres"
    with psycopg.connect(dsn, autocommit=True) as conn:

        def keepalives() -> list[str]:
            names = ("keepalives_idle", "keepalives_interval", "keepalives_count", "user_timeout")
            return [
                str(value)
                for name in names
                for (value,) in conn.execute(f"show tcp_{name}".encode())
            ]

        [task_id] = claimed(conn)
        hold = "select pgsched.hold_task(id, claim_token) from pgsched.tasks where id = %s"
        before = keepalives()
        for force_rollback in (True, False):
            with conn.transaction(force_rollback=force_rollback):
                conn.execute(hold, [task_id])
                assert keepalives() == (["10", "5", "3", "25000"] if over_tcp else 4 * ["0"])
            assert keepalives() == before
        conn.execute("select pgsched.cancel_task(%s)", [task_id])
        conn.execute("delete from pgsched.scheduled_tasks")


# What cannot be reaped


def refuse(conn: psycopg.Connection, bad: dict[str, int]) -> None:
    """Let nobody change these tasks: another has the id, a trigger, two constraints."""
    conn.execute(
        """
        insert into pgsched.finished_tasks (id, queue, task_type, payload, status, priority, run_at,
                                            attempt, max_attempts, created_at, finished_at)
        select id, queue, task_type, payload, 'failed', priority, run_at, attempt, max_attempts,
               created_at, created_at
          from pgsched.scheduled_tasks
         where id = %s
        """,
        [bad["unique_violation"]],
    )
    conn.execute(
        sql.SQL(
            """
            create function public.refuse() returns trigger language plpgsql as $$
            begin
              if old.id = {} then
                raise exception 'not this one';
              elsif old.id = {} then
                raise data_corrupted;
              end if;
              return coalesce(new, old);
            end $$;
            create trigger refuse before update or delete on pgsched.scheduled_tasks
              for each row execute function public.refuse();
            alter table pgsched.scheduled_tasks
              add constraint ours check (id <> {} or status = 'processing');
            alter table pgsched.finished_tasks
              add constraint ours check (id <> {});
            """
        ).format(
            bad["raise_exception"],
            bad["data_corrupted"],
            bad["check_violation, queued"],
            bad["check_violation, failed"],
        )
    )


BAD = {
    "unique_violation": "23505",
    "raise_exception": "P0001",
    "data_corrupted": "XX001",
    "check_violation, queued": "23514",
    "check_violation, failed": "23514",
}


@pytest.mark.parametrize("by_presence", [False, True])
def test_what_cannot_be_reaped_keeps_no_other_from_it(connect: Connect, by_presence: bool) -> None:
    conn = connect()
    worker_id, ids = absent(connect, tasks=100)
    for _ in range(9):
        ids += claimed(conn, tasks=100)
    bad = dict(zip(BAD, ids[::217], strict=True))
    last = [bad["unique_violation"], bad["check_violation, failed"], *ids[1::7]]
    conn.execute("update pgsched.scheduled_tasks set max_attempts = 1 where id = any (%s)", [last])
    asked = ids[2::7]
    conn.execute(
        "update pgsched.scheduled_tasks set cancel_requested_at = created_at where id = any (%s)",
        [asked],
    )
    if by_presence:
        missed(conn)
    else:
        conn.execute("update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp()")
    refuse(conn, bad)
    notices: list[tuple[str | None, str | None, str]] = []
    conn.add_notice_handler(
        lambda notice: notices.append(
            (notice.severity, notice.sqlstate, (notice.message_primary or "").partition(":")[0])
        )
    )
    expected = {
        task_id: "cancelled" if task_id in asked else "failed" if task_id in last else "queued"
        for task_id in ids
        if task_id not in bad.values()
    }
    assert dict(conn.execute(LOOK).fetchall()) == expected
    warnings = [
        ("WARNING", BAD[kind], f"task {task_id} cannot be reaped") for kind, task_id in bad.items()
    ]
    assert sorted(notices) == sorted(warnings)
    states: dict[int, str] = dict(
        conn.execute("select id, status from pgsched.tasks where claimed_by is not null")
    )
    assert [states[task_id] for task_id in list(bad.values())[1:]] == ["processing"] * 4
    assert look(conn) == []
    if by_presence:
        assert noted(conn, worker_id) == SUSPECT
    # When nothing is in the way any more, they are reaped as well.
    conn.execute(
        """
        drop function public.refuse cascade;
        alter table pgsched.scheduled_tasks drop constraint ours;
        alter table pgsched.finished_tasks drop constraint ours;
        """
    )
    conn.execute("delete from pgsched.finished_tasks where id = %s", [bad["unique_violation"]])
    assert look(conn) == sorted(bad.values())
    if by_presence:
        assert noted(conn, worker_id) == GONE


# Who is woken


def test_reaping_wakes_those_who_listen_for_what_is_queued_again(connect: Connect) -> None:
    conn, ears = connect(), connect()
    listener = register(conn, "listener")
    queues = ["lease", "presence", "failed", "cancelled", "off", "none"]
    calls.register_listener(conn, listener, queues)
    conn.execute("select pgsched.configure_queue('off', p_notify => false)")
    channels = {calls.listen(ears, queue): queue for queue in [*queues, "unheard"]}
    worker_id, session = present(connect, "gone")
    conn.execute(
        """
        select pgsched.enqueue_task('a', p_queue => queue, p_max_attempts => 2),
               pgsched.enqueue_task('a', p_queue => queue, p_max_attempts => 2)
          from unnest(%s::text[]) as queue
        """,
        [[*queues, "unheard"]],
    )
    for queue in (*queues[:5], "unheard"):
        name = "gone" if queue == "presence" else "by lease"
        conn.execute("select from pgsched.claim_task(%s, %s, p_limit => 2)", [name, queue])
    conn.execute(
        """
        update pgsched.scheduled_tasks
           set max_attempts = case when queue = 'failed' then 1 else 2 end,
               cancel_requested_at = case when queue = 'cancelled' then clock_timestamp() end,
               lease_expires_at = case when queue = 'presence' then lease_expires_at
                                       else clock_timestamp() end
         where status = 'processing'
        """
    )
    end(conn, session)
    list(ears.notifies(timeout=0))  # of what was enqueued
    heard: list[str] = []

    def hear() -> list[str]:
        """The queues of which the listener has heard by now, all of them."""
        conn.execute("notify over")
        while "over" not in heard:
            heard.extend(
                channels.get(n.channel, n.channel)
                for n in ears.notifies(timeout=PATIENCE, stop_after=1)
            )
        told = sorted(heard[:-1])
        heard.clear()
        return told

    ears.execute("listen over")
    assert len(look(conn)) == 10
    assert hear() == ["lease"]
    missed(conn)
    assert len(look(conn)) == 2
    assert hear() == ["presence"]
    assert look(conn) == []
    assert hear() == []
    assert worker_id != listener


LOCKS_OF_THE_TABLE = Mutant(
    "hold_presence",
    "if p_worker_id is null then",
    "perform from pgsched.workers as w where w.id = p_worker_id; if p_worker_id is null then",
)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (LOCKS_OF_THE_TABLE, test_a_presence_pins_and_locks_nothing),
        (
            Mutant("_gone_workers", "lock_shared(", "lock("),
            test_two_who_look_do_not_take_each_other_for_the_worker,
        ),
        (
            Mutant("_gone_workers", "not in (select pgsched._presences())", "is not null"),
            test_who_waits_for_an_open_look_is_not_missed_by_it,
        ),
        (
            Mutant("register_worker", "for no key update nowait", "for no key update"),
            test_an_open_look_holds_up_no_registration,
        ),
        (
            Mutant(
                "register_worker",
                "and (w.id % 2147483647)::integer::oid in (select pgsched._presences())",
                "",
            ),
            test_what_is_held_in_another_database_does_not_count,
        ),
        (
            Mutant("_presences", "d.datname = current_database()", "d.oid = l.database"),
            test_what_is_held_in_another_database_does_not_count,
        ),
        (
            Mutant("_reap_tasks", "raise_exception", "assert_failure"),
            partial(test_what_cannot_be_reaped_keeps_no_other_from_it, by_presence=True),
        ),
        (
            Mutant("reap_stale", "perform pgsched._notify(", "perform cardinality("),
            test_reaping_wakes_those_who_listen_for_what_is_queued_again,
        ),
        (
            Mutant("_notify", "coalesce(q.notify, true)", "true"),
            test_reaping_wakes_those_who_listen_for_what_is_queued_again,
        ),
    ],
)
def test_a_broken_function_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises((AssertionError, psycopg.errors.RaiseException)):
        test(connect)
