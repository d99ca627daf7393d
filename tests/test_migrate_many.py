"""Sixteen installers at once, and installers killed at any point: the next one finishes."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import oracle
import psycopg
import pytest
from installing import IDS, database, dump, installer, installers, log_rows, marks, sources
from pgbouncer import PgBouncer
from workers import PATIENCE, count, quick, running, wait_until

from pgsched import Task
from pgsched.embedded import Server
from pgsched.migrate import MIGRATION_LOCK, migrate

MANY = 16
KILLS = 20


@pytest.fixture
def empty(server: Server) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    with database(server, "many") as dsn:
        yield dsn


def install_together(dsn: str) -> list[str]:
    """What sixteen processes say that they applied; each of them must succeed."""
    with psycopg.connect(dsn) as first, psycopg.connect(dsn, autocommit=True) as conn:
        first.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        processes = [installer(dsn) for _ in range(MANY)]
        wait_until(lambda: installers(conn) == MANY, 2 * PATIENCE)
        first.rollback()
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * MANY, outputs
    assert {stderr for _, stderr in outputs} == {""}
    lines = [line for stdout, _ in outputs for line in stdout.splitlines()]
    return sorted(line.removeprefix("applied ") for line in lines if line.startswith("applied "))


@pytest.mark.long
def test_many_processes_install_into_an_empty_database(empty: str) -> None:
    assert install_together(empty) == IDS
    with psycopg.connect(empty) as conn:
        assert marks(conn) == IDS
        assert log_rows(conn) == len(IDS)


@pytest.mark.long
def test_many_processes_upgrade_while_workers_are_at_work(empty: str) -> None:
    migrate(empty, to=IDS[0])
    workers = [quick(empty, concurrency=4) for _ in range(2)]
    for worker in workers:
        worker.task("type")(nothing)
    with (
        psycopg.connect(empty, autocommit=True) as conn,
        running(workers[0]),
        running(workers[1]),
        ThreadPoolExecutor(1) as pool,
    ):
        upgrade = pool.submit(install_together, empty)
        tasks = 0
        while not upgrade.done():
            conn.execute("select pgsched.enqueue_task('type')")
            tasks += 1
        assert upgrade.result() == IDS[1:]
        conn.execute("select pgsched.enqueue_task('type')")
        wait_until(lambda: count(conn, "completed") == tasks + 1, 2 * PATIENCE)
        assert marks(conn) == IDS
        assert log_rows(conn) == len(IDS)


def gone(conn: psycopg.Connection) -> bool:
    """Whether no installer is connected any more."""
    return installers(conn) == 0


def nothing(task: Task) -> None:
    """A handler."""


@pytest.mark.long
@pytest.mark.parametrize("before", [[], IDS[:1]], ids=["empty", "older"])
def test_after_an_installer_was_killed_the_next_one_finishes(
    server: Server, template: str, before: list[str]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expected, longest = sources(server.dsn(template)), 0.0
    found = []
    for kill in range(KILLS + 1):
        with database(server, "killed") as dsn, psycopg.connect(dsn, autocommit=True) as conn:
            if before:
                migrate(dsn, to=before[-1])
            process = installer(dsn)
            wait_until(partial(installers, conn))
            began = time.monotonic()
            if kill:
                time.sleep(chance.uniform(0, longest))
                process.kill()
            else:
                wait_until(partial(gone, conn))
                longest = time.monotonic() - began
            process.communicate(timeout=PATIENCE)
            [(there,)] = conn.execute("select to_regclass('pgsched._yoyo_migration')::text")
            found.append(len(marks(conn)) if there else -1)
            assert migrate(dsn) in [IDS[n:] for n in range(len(IDS) + 1)]
            assert marks(conn) == IDS
            assert log_rows(conn) == len(IDS)
            assert sources(dsn) == expected
            assert dump(server, "killed") == dump(server, template)
    print(f"seed {seed}: applied when it was killed {found[1:]}, -1: no tables yet")
    assert found[0] == len(IDS)
    assert min(found) < len(IDS)


@pytest.mark.pgbouncer
@pytest.mark.parametrize("before", [[], IDS[:1]], ids=["empty", "older"])
def test_one_session_of_a_pooler_is_enough_for_many(
    server: Server, template: str, before: list[str]
) -> None:
    with (
        database(server, "pooled") as dsn,
        PgBouncer(server, pool_size=1) as pgbouncer,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        pooled = pgbouncer.dsn("pooled")
        if before:
            assert migrate(pooled, to=before[-1]) == before
        applied = oracle.together([lambda: migrate(pooled)] * MANY)
        assert sorted(chain.from_iterable(applied)) == IDS[len(before) :]
        assert marks(conn) == IDS
        assert log_rows(conn) == len(IDS)
        assert dump(server, "pooled") == dump(server, template)
