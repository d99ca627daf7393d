"""Installers wait for others, and nobody waits behind them for longer than a moment."""

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from installing import (
    IDS,
    NEXT,
    installer,
    installers,
    later_package,
    marks,
    release,
    waiting,
)
from workers import PATIENCE, ask, wait_until

from pgsched import migrate as migrate_module
from pgsched.embedded import Server
from pgsched.migrate import MIGRATION_LOCK, WaitedTooLong, migrate

Connect = Callable[..., psycopg.Connection]
Package = Callable[[str], Path]

MORE = f"{NEXT}.more"
# Needs a table for itself, for which it waits behind whoever reads it, and all others behind it.
EXCLUSIVE = "alter table pgsched.scheduled_tasks add column more integer;\n"
INDEX = "create index more_index on pgsched.scheduled_tasks (created_at);\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Let the package have one migration more, and return its folder."""

    def package(text: str) -> Path:
        folder = later_package(tmp_path / "later", text)
        monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
        return folder

    return package


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that installers of this process make between two tries."""
    pauses: list[float] = []

    def uniform(low: float, high: float) -> float:
        pauses.append(random.uniform(low, high))
        return pauses[-1]

    monkeypatch.setattr(migrate_module, "uniform", uniform)
    return pauses


def reader(connect: Connect) -> psycopg.Connection:
    """A session in a transaction that has read the tasks."""
    reader = connect(autocommit=False)
    reader.execute("set application_name to 'report'")
    reader.execute("select from pgsched.scheduled_tasks")
    return reader


# Of tables


def test_the_application_goes_on_while_a_migration_waits_for_a_long_reader(
    dsn: str,
    conn: psycopg.Connection,
    connect: Connect,
    package: Package,
    pauses: list[float],
) -> None:
    package(EXCLUSIVE)
    reading, application = reader(connect), connect()
    # An attempt waits for a tenth of a second, and who waits behind it no longer.
    application.execute("set lock_timeout to '5s'")
    with ThreadPoolExecutor(1) as pool:
        migration = pool.submit(migrate, dsn, lock_timeout=PATIENCE)
        try:
            while len(pauses) < 5:
                application.execute("select pgsched.enqueue_task('type')")
                assert application.execute("select from pgsched.claim_task('w')").rowcount == 1
                assert not migration.done()
        finally:
            reading.rollback()
        assert migration.result(PATIENCE) == [MORE]
    assert marks(conn) == [*IDS, MORE]


def test_who_held_a_table_for_too_long_is_named(
    dsn: str, conn: psycopg.Connection, connect: Connect, package: Package
) -> None:
    package(EXCLUSIVE)
    reading = reader(connect)
    with pytest.raises(WaitedTooLong) as caught:
        migrate(dsn, lock_timeout=0)
    assert re.fullmatch(
        r"gave up after 0 s: AccessShareLock on scheduled_tasks is held by"
        rf" session {reading.info.backend_pid}, 'report', idle in transaction, 00:00:\d\d",
        str(caught.value),
    )
    # It left nothing of what came before that: tables and marks of yoyo's.
    assert ask(dsn, "select to_regclass('pgsched._yoyo_migration')::text") == [None]
    reading.rollback()
    assert migrate(dsn, lock_timeout=0) == [MORE]


@pytest.mark.long
def test_a_prepared_transaction_is_named(package: Package) -> None:
    package(EXCLUSIVE)
    with Server(settings={"fsync": "off", "max_prepared_transactions": "1"}) as server:
        migrate(server.dsn(), to=IDS[-1])
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute("begin; select pgsched.enqueue_task('type'); prepare transaction 'p'")
        with pytest.raises(WaitedTooLong, match=r"scheduled_tasks is held by a prepared trans"):
            migrate(server.dsn(), lock_timeout=0)


@pytest.mark.parametrize("sqlstate", ["55P03", "40P01", "XX000", "42P01"])
def test_what_others_can_cause_is_tried_again(
    dsn: str, conn: psycopg.Connection, package: Package, pauses: list[float], sqlstate: str
) -> None:
    conn.execute("create sequence public.tries")  # does not roll back
    package(
        f"""
        do $$ begin
          if nextval('public.tries') < 3 then
            raise exception using errcode = '{sqlstate}';
          end if;
        end $$;
        """
    )
    assert migrate(dsn) == [MORE]
    assert len(pauses) == 2


def test_what_does_not_go_away_is_said(dsn: str, package: Package) -> None:
    package("select from pgsched.nowhere;")
    with pytest.raises(WaitedTooLong, match=r'0 s: relation "pgsched\.nowhere" does not exist'):
        migrate(dsn, lock_timeout=0)


def test_the_work_itself_may_take_long(
    dsn: str, conn: psycopg.Connection, package: Package, pauses: list[float]
) -> None:
    package("select pg_sleep(1.5);")
    conn.execute(f"alter database {conn.info.dbname} set statement_timeout to '1s'".encode())
    assert migrate(dsn, lock_timeout=0) == [MORE]
    assert pauses == []


# Of installers


def test_another_installer_is_waited_for_with_nothing_in_hand(
    dsn: str, conn: psycopg.Connection, connect: Connect, pauses: list[float]
) -> None:
    other = connect(autocommit=False)
    other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(migrate, dsn, lock_timeout=0)
        wait_until(lambda: len(pauses) > 3)
        wait_until(lambda: installers(conn, "idle") == 1)
        assert waiting(conn) == 0
        other.rollback()
        assert waiter.result(PATIENCE) == []
    assert marks(conn) == IDS


def test_an_installer_that_does_not_end_is_named(
    dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_module, "INSTALLER_PATIENCE", 0.0)
    other = connect(autocommit=False)
    other.execute("set application_name to 'another'")
    other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
    message = (
        "^gave up after 0 s: the installer lock is held by"
        rf" session {other.info.backend_pid}, 'another', idle in transaction, 00:00:\d\d$"
    )
    with pytest.raises(WaitedTooLong, match=message):
        migrate(dsn)


@pytest.mark.long
def test_installers_that_build_an_index_beside_an_old_snapshot_end_and_leave_none_half_built(
    dsn: str, conn: psycopg.Connection, connect: Connect, package: Package
) -> None:
    folder = package(INDEX)
    release(folder)
    old = connect(autocommit=False)
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    # That of who only reads does not matter to an index that is built in one piece.
    old.execute("select pgsched.enqueue_task('type')")
    processes = [installer(dsn, "--lock-timeout", "5", folder=folder) for _ in range(4)]
    wait_until(lambda: waiting(conn) == 1)
    processes[0].kill()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes[1:]] == [7, 7, 7]
    for stdout, stderr in outputs[1:]:
        assert stdout == ""
        assert re.fullmatch(
            r"Error: gave up after 5 s: .*RowExclusiveLock on scheduled_tasks is held"
            rf" by session {old.info.backend_pid}, .*\n",
            stderr,
        )
    assert ask(dsn, "select to_regclass('pgsched.more_index')::text") == [None]
    old.rollback()
    second = installer(dsn, folder=folder)
    assert second.communicate(timeout=60) == (f"applied {MORE}\n", "")
    assert marks(conn) == [*IDS, MORE]
    assert ask(dsn, "select indexrelid::regclass::text from pg_index where not indisvalid") == []
    assert ask(dsn, "select to_regclass('pgsched.more_index')::text") == ["pgsched.more_index"]
