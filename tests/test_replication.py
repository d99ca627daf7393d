"""Other servers: a subscriber of the tables, a standby that is promoted, and what they have.

IDS and SPARE are what docs/operations.md says.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import busy
import psycopg
import pytest
from busy import content
from oracle import outcome
from psycopg.conninfo import make_conninfo
from test_read_only import standby_of
from workers import (
    PATIENCE,
    ask,
    install,
    make_effects,
    quick,
    row,
    running,
    wait_until,
    write,
    written,
)

from pgsched.embedded import Server
from pgsched.migrate import migrate

IDS = """
select format('select setval(%L, %s);', schemaname || '.' || sequencename, last_value)
  from pg_sequences
 where schemaname = 'pgsched' and last_value is not null
"""
"""Asked of the old database, this prints what to run in the new one."""

SPARE = """
select setval('pgsched.scheduled_tasks_id_seq', last_value + 1000000)
  from pgsched.scheduled_tasks_id_seq
"""

TABLES = "pgsched.queues, pgsched.scheduled_tasks, pgsched.finished_tasks"

ENQUEUE = "select pgsched.enqueue_task('test', p_queue => %s) from generate_series(1, %s)"
CLAIM = "select id, claim_token from pgsched.claim_task('w', %s, p_limit => 100)"
COMPLETE = "select pgsched.complete_task(%s, %s)"
WITH_A_CLAIM = [
    COMPLETE,
    "select pgsched.fail_task(%s, %s, 'boom')",
    "select pgsched.extend_task(%s, %s)",
    "select pgsched.release_task(%s, %s)",
    "select pgsched.hold_task(%s, %s)",
]

Claim = tuple[int, Any]


def enqueue(conn: psycopg.Connection, queue: str = "default", count: int = 1) -> list[int]:
    return [task_id for (task_id,) in conn.execute(ENQUEUE, [queue, count])]


def claim(conn: psycopg.Connection, queue: str = "default") -> list[Claim]:
    """All that is due, up to 100."""
    return conn.execute(CLAIM, [queue]).fetchall()


def complete(conn: psycopg.Connection, claims: Sequence[Claim]) -> None:
    for each in claims:
        assert conn.execute(COMPLETE, each).fetchone() == (True,)


# Logical replication


class Pair(NamedTuple):
    """A database and another one that subscribes to it."""

    old: psycopg.Connection
    new: psycopg.Connection


@pytest.fixture(scope="module")
def logical() -> Iterator[Server]:
    """A server whose tables can be published; what fails is tried again at once."""
    settings = {"fsync": "off", "wal_level": "logical", "wal_retrieve_retry_interval": "50"}
    with Server(settings=settings) as server:
        yield server


@contextmanager
def subscribed(server: Server, *, whole: bool = False) -> Iterator[Pair]:
    """What is published: the tables of tasks and queues, or all that the database has."""
    old, new = (server.create_database(name) for name in ("old", "new"))
    migrate(old)
    if whole:
        dump = server.run("pg_dump", "--schema-only", "old", check=True, capture_output=True)
        options = ["-Xq", "-v", "ON_ERROR_STOP=1", "-o", os.devnull, "-d", "new"]
        server.run("psql", *options, input=dump.stdout, check=True)
    else:
        migrate(new)
    with ExitStack() as stack:
        admin, *pair = (
            stack.enter_context(psycopg.connect(dsn, autocommit=True))
            for dsn in (server.dsn(), old, new)
        )
        for name in ("old", "new"):
            stack.callback(admin.execute, f"drop database {name} with (force)")
        what = "all tables" if whole else f"table {TABLES}"
        pair[0].execute(f"create publication pgsched for {what}".encode())
        # On one server a subscription cannot make its slot: it would wait for its own transaction.
        pair[0].execute("select pg_create_logical_replication_slot('pgsched', 'pgoutput')")
        pair[1].execute(
            f"create subscription pgsched connection '{make_conninfo(old)}' publication pgsched"
            " with (create_slot = false)".encode()
        )
        stack.callback(pair[1].execute, "drop subscription pgsched")
        yield Pair(*pair)


def published(conn: psycopg.Connection, pair: Pair) -> dict[str, list[str]]:
    """The rows of one of both, as far as they are replicated."""
    names = {name for (name,) in pair.old.execute("select tablename from pg_publication_tables")}
    return {name: rows for name, rows in content(conn).items() if name in names}


def follow(pair: Pair) -> None:
    """Return when all tables have been copied and the subscriber has what the publisher has."""
    copied = "select bool_and(srsubstate = 'r') from pg_subscription_rel"
    wait_until(lambda: pair.new.execute(copied).fetchone() == (True,))
    wait_until(lambda: published(pair.new, pair) == published(pair.old, pair))


@pytest.mark.parametrize("whole", [False, True])
def test_a_subscriber_gets_all_that_changes(logical: Server, whole: bool) -> None:
    with subscribed(logical, whole=whole) as pair:
        busy.fill(pair.old)
        with busy.at_work(logical.dsn("old")):
            ended = "select max(id) > 200 from pgsched.finished_tasks where queue = 'busy'"
            wait_until(lambda: ask(logical.dsn("new"), ended) == [True])
        follow(pair)
        assert len(published(pair.new, pair)) == (10 if whole else 3)
        assert migrate(logical.dsn("new")) == []


def test_ids_are_given_again_unless_the_sequences_are_moved(logical: Server) -> None:
    with subscribed(logical) as pair:
        old, new = pair
        pair.old.execute("select pgsched.configure_queue('gone', p_keep_completed => '0')")
        enqueue(old)
        complete(old, claim(old))
        enqueue(old)
        [last] = enqueue(old, "gone")
        complete(old, claim(old, "gone"))
        follow(pair)

        found = "select level from pgsched.diagnose() where check_name = 'objects'"
        assert new.execute(found).fetchall() == [("error",)]
        # The first one has ended, the second one waits.
        enqueue(new, "new")
        with pytest.raises(psycopg.errors.UniqueViolation, match="finished_tasks_pkey"):
            complete(new, claim(new, "new"))
        with pytest.raises(psycopg.errors.UniqueViolation, match="scheduled_tasks_pkey"):
            enqueue(new, "new")

        moves = logical.run("psql", "-XAtc", IDS, "-d", "old", check=True, capture_output=True)
        logical.run("psql", "-Xqd", "new", input=moves.stdout, check=True, capture_output=True)
        assert enqueue(new, "new") == [last + 1]
        assert new.execute(found).fetchall() == [("ok",)]


def test_a_claim_at_the_subscriber_runs_twice_and_ends_the_replication(logical: Server) -> None:
    log = logical.folder / "server.log"
    with subscribed(logical) as pair:
        [task_id] = enqueue(pair.old)
        follow(pair)
        before = log.read_text()
        for conn in (pair.new, pair.old):
            complete(conn, claim(conn))
        enqueue(pair.old)
        wait_until(lambda: log.read_text().removeprefix(before).count('"finished_tasks_pkey"') > 1)
        assert ask(logical.dsn("new"), "select id from pgsched.tasks") == [task_id]


# Physical replication


@contextmanager
def replicating(**settings: str) -> Iterator[tuple[Server, Server]]:
    """A server with the schema, and a standby, with these settings, copied while it was busy."""
    with ExitStack() as stack:
        primary = stack.enter_context(Server(settings={"fsync": "off"}))
        if not (primary.bin_dir / "pg_basebackup").exists():
            pytest.skip("this PostgreSQL comes without pg_basebackup")
        install(primary, primary.dsn())
        conn = stack.enter_context(psycopg.connect(primary.dsn(), autocommit=True))
        with busy.at_work(primary.dsn()):
            standby = stack.enter_context(standby_of(primary, conn, **settings))
        yield primary, standby


def follow_up(primary: Server, standby: Server) -> None:
    """Return when the standby shows what the primary has committed so far."""
    [position] = ask(primary.dsn(), "select pg_current_wal_insert_lsn()")
    there = f"select pg_last_wal_replay_lsn() >= '{position}'"
    wait_until(lambda: ask(standby.dsn(), there) == [True])


def promote(standby: Server) -> None:
    assert ask(standby.dsn(), "select pg_promote(true, 60)") == [True]


@pytest.mark.long
def test_of_commits_that_the_standby_did_not_get_no_claim_is_left() -> None:
    """Then tasks are gone or run again, and ids are given again, but no token is."""
    with replicating() as (primary, standby):
        with psycopg.connect(primary.dsn(), autocommit=True) as conn:
            enqueue(conn)
            [twice] = claim(conn)
            [waiting] = enqueue(conn)
            follow_up(primary, standby)
            standby.stop()
            complete(conn, [twice])
            [lost] = claim(conn)
            assert lost[0] == waiting
            enqueue(conn, "new", 70)
            gone = dict(claim(conn, "new"))
        primary.stop("immediate")
        standby.start()
        promote(standby)
        with psycopg.connect(standby.dsn(), autocommit=True) as conn:

            def answers(claim: Claim) -> set[Any]:
                return {outcome(partial(conn.execute, call, claim)) for call in WITH_A_CLAIM}

            # Nobody knows here that it was completed.
            complete(conn, [twice])
            assert answers(lost) == {"TS409"}
            assert row(conn, waiting).status == "queued"
            assert [task_id for task_id, _ in claim(conn)] == [waiting]

            enqueue(conn, "new", 70)
            new = dict(claim(conn, "new"))
            again = gone.keys() & new.keys()
            assert again
            for task_id, token in gone.items():
                assert answers((task_id, token)) == {"TS409" if task_id in again else "TS404"}
            complete(conn, list(new.items()))

            conn.execute(SPARE)
            [next_id] = enqueue(conn)
            assert next_id > max(gone)


@pytest.mark.long
def test_a_synchronous_standby_has_all_that_was_acknowledged() -> None:
    """A worker goes over to it; the effects of its transactions are there once."""
    with replicating() as (primary, standby), ThreadPoolExecutor() as pool:
        dsn = make_conninfo(
            primary.dsn(),
            host=f"{primary.folder},{standby.folder}",
            port="5432,5432",
            target_session_attrs="read-write",
        )
        worker = quick(dsn)
        worker.task("test")(write)
        acknowledged: list[int] = []

        def produce() -> None:
            with psycopg.connect(dsn, autocommit=True) as conn:
                while True:
                    acknowledged.extend(enqueue(conn))
                    time.sleep(0.02)  # slower than the worker

        with psycopg.connect(primary.dsn(), autocommit=True) as conn:
            make_effects(conn)
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            synchronous = "select sync_state from pg_stat_replication"
            wait_until(lambda: conn.execute(synchronous).fetchall() == [("sync",)])
            with running(worker):
                producing = pool.submit(produce)
                wait_until(lambda: len(written(conn)) > 50)
                primary.stop("immediate")
                assert isinstance(producing.exception(PATIENCE), psycopg.OperationalError)
                promote(standby)
                with psycopg.connect(standby.dsn(), autocommit=True) as other:
                    live = "select id from pgsched.scheduled_tasks where queue = 'default'"
                    wait_until(lambda: ask(standby.dsn(), live) == [])
                    done = ask(
                        standby.dsn(),
                        "select id from pgsched.tasks"
                        " where queue = 'default' and status = 'completed' order by id",
                    )
                    assert written(other) == done
                    assert set(acknowledged) <= set(done)


@pytest.mark.long
def test_recovery_to_a_point_in_time_is_as_a_crash_then() -> None:
    target = {"recovery_target_name": "then", "recovery_target_action": "promote"}
    with replicating(**target) as (primary, standby):
        with psycopg.connect(primary.dsn(), autocommit=True) as conn:
            busy.fill(conn)
            with busy.at_work(primary.dsn()):
                [last] = enqueue(conn, "other")
            before = content(conn)
            conn.execute("select pg_create_restore_point('then')")
            complete(conn, claim(conn, "kept"))
            arrived = "select not pg_is_in_recovery()"
            wait_until(lambda: ask(standby.dsn(), arrived) == [True])
        with psycopg.connect(standby.dsn(), autocommit=True) as conn:
            assert content(conn) == before
            [next_id] = enqueue(conn)
            assert next_id > last
