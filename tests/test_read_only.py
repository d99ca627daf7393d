"""In a read-only transaction and on a standby a call reads, or raises 25006 and asks for no lock.

hold_presence, a procedure, is meant for read-only transactions, but not for a standby. Which
functions there are comes from the catalog, so that a new one fails here until it has a call.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Connect
from psycopg import sql
from workers import wait_until

from pgsched.embedded import Server

# Each public function with arguments to do something with, where it may write, after `fill`.
CALLS = {
    "cancel_task": "%(queued)s",
    "claim_task": "'worker'",
    "complete_task": "%(running)s, %(token)s",
    "complete_tasks": "array[%(running)s], array[%(token)s]",
    "configure_queue": "'mail', p_max_attempts => 7",
    "enqueue_task": "'test'",
    "enqueue_tasks": """'[{"task_type": "test"}]'""",
    "extend_task": "%(running)s, %(token)s",
    "extend_tasks": "array[%(running)s], array[%(token)s]",
    "fail_task": "%(running)s, %(token)s, 'boom'",
    "fail_tasks": "array[%(running)s], array[%(token)s], array['boom']",
    "grant_access": "'pg_monitor', 'observer'",
    "hold_task": "%(running)s, %(token)s",
    "maintain": "",
    "notify_channel": "'mail'",
    "pause_queue": "'mail'",
    "prune_finished": "",
    "diagnose": "",
    "get_task": "%(queued)s",
    "list_workers": "",
    "recent_rates": "",
    "server_stats": "",
    "queue_stats": "",
    "reap_stale": "",
    "register_listener": "%(worker)s, array['mail']",
    "register_worker": "'worker', array['mail'], 1",
    "release_task": "%(running)s, %(token)s",
    "release_tasks": "array[%(running)s], array[%(token)s]",
    "reschedule_task": "%(queued)s, null",
    "resume_queue": "'paused'",
    "retry_task": "%(failed)s",
    "revoke_access": "'pg_monitor', 'observer'",
    "schema_version": "",
    "unregister_worker": "%(worker)s",
}
MAINTAIN_THAT_WRITES = Mutant(
    "maintain", "current_setting('transaction_read_only')::boolean", "false"
)
LOCK_BEFORE_REFUSAL = Mutant(
    "_lock_task", "current_setting('transaction_read_only')::boolean", "false"
)


def fill(conn: psycopg.Connection) -> dict[str, Any]:
    """Add what CALLS name: a queued task, a running, a stale, a failed and an old one, a worker."""
    oracle.install(conn)
    oracle.enqueue(conn, 4)
    running, stale, failed, old = oracle.claim(conn, limit=4)
    oracle.expire(conn, [stale])
    for each in (failed, old):
        oracle.fail(conn, each, permanent=True)
    conn.execute(
        "update pgsched.finished_tasks set finished_at = finished_at - interval '1 year'"
        " where id = %s",
        [old.id],
    )
    [queued] = oracle.enqueue(conn)
    conn.execute("select pgsched.pause_queue('paused')")
    [(worker,)] = conn.execute("select pgsched.register_worker('idle', array['mail'], 1)")
    return {
        "running": running.id,
        "token": running.token,
        "queued": queued,
        "failed": failed.id,
        "worker": worker,
    }


def writes(conn: psycopg.Connection) -> dict[str, bool]:
    """Of each public function, whether it may write: all may but the stable and immutable ones."""
    rows = conn.execute(
        """
        select proname::text, provolatile = 'v'
          from pg_proc
         where pronamespace = 'pgsched'::regnamespace and proname not like '\\_%'
           and prokind = 'f'
        """
    )
    return dict(rows.fetchall())


def run(session: psycopg.Connection, function: str, things: dict[str, Any]) -> None:
    session.execute(f"select * from pgsched.{function}({CALLS[function]})".encode(), things)


def content(conn: psycopg.Connection) -> dict[str, list[Any]]:
    """All rows of the schema's tables."""
    tables = conn.execute("select tablename from pg_tables where schemaname = 'pgsched'")
    rows = sql.SQL("select * from pgsched.{} as t order by t")
    return {name: conn.execute(rows.format(sql.Identifier(name))).fetchall() for (name,) in tables}


def lock_all_tasks(session: psycopg.Connection) -> None:
    """Take every advisory lock that a call could want."""
    session.execute("select pg_advisory_xact_lock(1337, id::integer) from pgsched.tasks")
    session.execute("select pg_advisory_xact_lock(1338, key) from generate_series(1, 9) as key")


def refuse(conn: psycopg.Connection, reader: psycopg.Connection, things: dict[str, Any]) -> None:
    """The reader's calls read or are refused, while others hold all locks; `conn` looks on."""

    def answer(function: str) -> Any:
        with reader.transaction(force_rollback=True):
            return oracle.outcome(
                lambda: oracle.at_once(conn, reader, partial(run, reader, function, things))
            )

    functions = writes(conn)
    answers = {function: answer(function) for function in functions}
    assert answers == {name: "25006" if written else None for name, written in functions.items()}
    left = conn.execute(
        "select from pg_locks where pid = %s and locktype = 'advisory'", [reader.info.backend_pid]
    )
    assert left.fetchall() == []


def test_what_is_called_here_would_write_where_it_may(conn: psycopg.Connection) -> None:
    things = fill(conn)

    def acts(function: str) -> bool:
        with conn.transaction(force_rollback=True):
            run(conn, function, things)
            [(acts,)] = conn.execute(
                """
                select pg_current_xact_id_if_assigned() is not null
                       or exists (
                          select
                            from pg_locks
                           where pid = pg_backend_pid() and locktype = 'advisory')
                """
            )
        assert isinstance(acts, bool)
        return acts

    functions = writes(conn)
    assert {function: acts(function) for function in functions} == functions
    assert set(CALLS) == set(functions)


def test_a_read_only_session_is_refused_and_locks_nothing(connect: Connect) -> None:
    conn, holder = connect(), connect()
    things = fill(conn)
    before = content(conn)
    with holder.transaction(force_rollback=True):
        lock_all_tasks(holder)
        for table in before:
            rows = sql.SQL("select from pgsched.{} for update")
            holder.execute(rows.format(sql.Identifier(table)))
        refuse(conn, connect(options="-c default_transaction_read_only=on"), things)
    assert content(conn) == before
    oracle.check(conn)


@contextmanager
def standby_of(server: Server, conn: psycopg.Connection, **settings: str) -> Iterator[Server]:
    """A running hot standby of the server that `conn` is connected to."""
    [(connections,)] = conn.execute("show max_connections")
    settings = {
        "primary_conninfo": server.dsn(),
        "max_connections": connections,
        "fsync": "off",
        **settings,
    }
    with closing(Server(settings=settings)) as standby:
        data = standby.folder / "data"
        shutil.rmtree(data)
        options = ["--checkpoint=fast", "--no-sync"]
        server.run("pg_basebackup", "-D", data, *options, check=True)
        (data / "standby.signal").touch()
        owner = standby.folder.stat()
        for path in (data, *data.rglob("*")):
            shutil.chown(path, owner.st_uid, owner.st_gid)
        standby.start()
        yield standby


def test_a_standby_reads_and_refuses_the_rest(server: Server, conn: psycopg.Connection) -> None:
    if not (server.bin_dir / "pg_basebackup").exists():
        pytest.skip("this PostgreSQL comes without pg_basebackup")
    things = fill(conn)
    before = content(conn)
    with standby_of(server, conn) as standby:
        dsn = standby.dsn(conn.info.dbname)
        with (
            psycopg.connect(dsn, autocommit=True) as looker,
            psycopg.connect(dsn, autocommit=True) as holder,
            psycopg.connect(dsn, autocommit=True) as reader,
        ):
            with holder.transaction():
                lock_all_tasks(holder)
                refuse(looker, reader, things)
            refusal = pytest.raises(psycopg.errors.ReadOnlySqlTransaction)
            with refusal, reader.transaction():
                reader.execute("call pgsched.hold_presence(%(worker)s)", things)
            assert content(looker) == before
            run(conn, "complete_task", things)
            wait_until(lambda: content(looker) == content(conn) != before)


@pytest.mark.parametrize("mutant", [LOCK_BEFORE_REFUSAL, MAINTAIN_THAT_WRITES])
def test_a_broken_refusal_is_seen(connect: Connect, mutant: Mutant) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        test_a_read_only_session_is_refused_and_locks_nothing(connect)
