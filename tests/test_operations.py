"""The commands of docs/operations.md, run as they stand there; its SQL is run by test_docs.py."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import place as places
import psycopg
import pytest
import test_backup
import test_replication
from oracle import Connect
from place import Place
from psycopg import sql
from test_docs import ROOT, headings, links, read
from workers import NEWEST, ask

from pgsched.embedded import Server
from pgsched.migrate import migrate

OPERATIONS = ROOT / "docs" / "operations.md"
INCIDENTS = ROOT / "docs" / "incidents.md"

blocks = partial(places.blocks, OPERATIONS)

Open = Callable[..., Place]

VERSION = "select pgsched.schema_version()"
DUE = "select id from pgsched.claim_task('w', 'mail', p_limit => 100)"


@pytest.fixture
def database(server: Server, template: str, tmp_path: Path) -> Iterator[Open]:
    """Creates a database of this name, with the schema unless told; all are dropped afterwards."""
    names = ["copy"]

    def database(name: str, template: str = template) -> Place:
        names.append(name)
        return Place(server, server.create_database(name, template=template), tmp_path)

    yield database
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        for name in names:
            drop = sql.SQL("drop database if exists {} with (force)")
            admin.execute(drop.format(sql.Identifier(name)))


def test_every_situation_is_listed() -> None:
    situations = headings(INCIDENTS)[1:]
    for page in (OPERATIONS, INCIDENTS):
        assert sorted(text for text, _ in links(page) if text in situations) == sorted(situations)


# Installing


@contextmanager
def owner(place: Place) -> Iterator[Place]:
    """The place for the role that the page lets install."""
    [create] = blocks("Installing", "sh")
    place.shell(create)
    yield place._replace(dsn=place.server.dsn("app", "pgsched_owner"))
    with psycopg.connect(place.dsn, autocommit=True) as admin:
        admin.execute("drop owned by pgsched_owner cascade; drop role pgsched_owner")


def commands() -> list[str]:
    """What is typed to install, to look and to upgrade."""
    [session] = blocks("With psql", "text")
    return re.findall(r"^\$ (.*)$", session, re.MULTILINE)


def test_a_plain_role_installs_with_psql_and_migrate_takes_over(database: Open) -> None:
    install, _, _ = commands()
    with owner(database("app", template="template1")) as place:
        place.shell(install)
        assert ask(place.dsn, VERSION) == [NEWEST]
        assert place.shell("pgsched migrate").startswith("nothing to do")


def test_psql_upgrades_what_the_database_lacks(database: Open) -> None:
    _, look, upgrade = commands()
    with owner(database("app", template="template1")) as place:
        migrate(place.dsn, to="0001")
        assert place.shell(look) == "0001\n"
        place.shell(upgrade)
        assert ask(place.dsn, VERSION) == [NEWEST]


# Backup


def fill(place: Place) -> list[int]:
    """Add tasks that are due, and say which."""
    add = "select pgsched.enqueue_task('send_mail', p_queue => 'mail') from generate_series(1, 3)"
    with psycopg.connect(place.dsn) as conn:
        return [task_id for (task_id,) in conn.execute(add)]


def test_a_copy_is_made_quieted_and_let_go(database: Open) -> None:
    dump, restore, closed, *_ = blocks("Dumping and restoring", "sh")
    quiet, go_on, forget, _ = blocks("A copy that sends no mails", "sh")
    app = database("app")
    tasks = fill(app)
    app.shell(dump)
    restored = app.shell(restore, code=1)  # of doctor: this server gives up durability
    assert "nothing to do: the schema is up to date" in restored
    app.shell(closed)
    copy = app.server.dsn("copy")
    assert "mail" in app.shell(quiet)
    assert ask(copy, DUE) == []
    app.shell(go_on)
    with psycopg.connect(copy) as conn:
        assert [task_id for (task_id,) in conn.execute(DUE)] == tasks
        conn.rollback()
    app.shell(forget)
    assert ask(copy, "select distinct status from pgsched.tasks") == ["cancelled"]
    assert ask(app.dsn, DUE) == tasks


def test_a_copy_is_quiet_from_its_first_moment_on(database: Open) -> None:
    dump, *_ = blocks("Dumping and restoring", "sh")
    *_, at_once = blocks("A copy that sends no mails", "sh")
    app, copy = database("app"), database("copy", template="template1")
    fill(app)
    app.shell(dump)
    app.shell(at_once)
    assert ask(copy.dsn, "select status from pgsched.tasks") == ["queued"] * 3
    assert ask(copy.dsn, DUE) == []


def test_ids_begin_above_what_other_systems_have_seen(database: Open) -> None:
    *_, spare = blocks("Dumping and restoring", "sh")
    app = database("app")
    last = max(fill(app))
    app.shell(spare)
    assert min(fill(app)) == last + 1_000_001


def test_sequences_are_moved_to_the_new_server(database: Open) -> None:
    [move] = blocks("Logical replication", "sh")
    old, new = database("old"), database("new")
    last = max(fill(old))
    old.shell(move)
    assert min(fill(new)) == last + 1


@pytest.mark.parametrize(
    "statement",
    [test_backup.QUIET, test_backup.FORGET, test_replication.IDS, test_replication.SPARE],
)
def test_what_other_tests_try_on_busy_databases_is_what_the_page_says(statement: str) -> None:
    assert " ".join(statement.split()) in " ".join(read(OPERATIONS).split())


# Sizing


def test_so_many_slots_of_the_lock_table_are_taken(connect: Connect) -> None:
    conn, worker = connect(), connect()

    def slots() -> list[tuple[int]]:
        return conn.execute(
            "select count(*) from pg_locks where pid = %s and locktype = 'advisory'",
            [worker.info.backend_pid],
        ).fetchall()

    conn.execute("select pgsched.enqueue_task('test') from generate_series(1, 1200)")
    with worker.transaction():
        worker.execute("select pgsched.claim_task('w', p_limit => 100)")
        assert slots() == [(100,)]
    for _ in range(11):
        worker.execute("select pgsched.claim_task('w', p_limit => 100)")
    conn.execute(
        "update pgsched.scheduled_tasks set lease_expires_at = now() where status = 'processing'"
    )
    conn.execute(
        "insert into pgsched.workers (name, queues, slots, started_at, seen_at, presence)"
        " select n, '{}', 1, now(), now(), true from generate_series(1, 200) as n"
    )
    with worker.transaction():
        worker.execute("select pgsched.reap_stale()")
        assert slots() == [(1100,)]
    with worker.transaction(force_rollback=True):
        worker.execute("select pgsched.enqueue_task('test', p_queue => 'held')")
        worker.execute(
            "select pgsched.hold_task(id, claim_token) from pgsched.claim_task('w', 'held')"
        )
        assert slots() == [(1,)]
