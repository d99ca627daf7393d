"""pgsched uninstall: it asks, then removes what pgsched made, and nothing else, or nothing."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from command_line import pgsched, process, refused
from installing import IDS, database, waiting, yoyo
from test_cli_situations import MAKE_NEWER
from workers import NEWEST, PATIENCE, ask, install, quick, running, wait_for, wait_until

from pgsched import Task, enqueue, schema
from pgsched.embedded import Server
from pgsched.migrate import MIGRATION_LOCK, migrate
from pgsched.schema import script, uninstall
from pgsched.text import plain

CATALOGS = (
    "pg_attrdef",
    "pg_attribute",
    "pg_auth_members",
    "pg_authid",
    "pg_class",
    "pg_constraint",
    "pg_default_acl",
    "pg_depend",
    "pg_description",
    "pg_extension",
    "pg_index",
    "pg_namespace",
    "pg_proc",
    "pg_publication",
    "pg_publication_rel",
    "pg_rewrite",
    "pg_sequence",
    "pg_shdepend",
    "pg_trigger",
    "pg_type",
)
# What vacuum writes.
STATISTICS = "{relpages,reltuples,relallvisible,relallfrozen,relfrozenxid,relminmxid}"

# A bit of everything that comes with use: rows, rights, a worker.
USE = """
select pgsched.enqueue_task('type', p_queue => queue) from unnest(array['a', 'b']) as queue;
select pgsched.complete_task(id, claim_token) from pgsched.claim_task('worker', 'b');
select pgsched.register_worker('worker', array['a'], 1);
"""
RIGHTS = """
select pgsched.grant_access('reader', 'worker');
grant select on pgsched.tasks to reader;
alter default privileges in schema pgsched grant select on tables to reader;
"""


def catalog(conn: psycopg.Connection) -> set[tuple[str, str]]:
    """What there is, by the catalog, in the database and of roles."""
    return {
        (name, text)
        for name in CATALOGS
        for (text,) in conn.execute(
            f"select (to_jsonb(t) - '{STATISTICS}'::text[])::text from {name} as t".encode()
        )
    }


@pytest.fixture(scope="module", autouse=True)
def roles(server: Server) -> None:
    """`plain`, which may create schemas where a test says so, and `reader`, which may not."""
    with psycopg.connect(server.dsn()) as conn:
        conn.execute("create role plain login; create role reader login")


@pytest.fixture
def empty(server: Server) -> Iterator[psycopg.Connection]:
    """A superuser's connection to a database with nothing of pgsched in it."""
    with database(server, "app") as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("grant create on database app to plain")
        yield conn


def by_psql(server: Server, dsn: str) -> None:
    install(server, dsn)


def by_script(server: Server, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(script().encode())


def by_migrate(server: Server, dsn: str) -> None:
    migrate(dsn)


def by_yoyo(server: Server, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("create schema pgsched")
    yoyo("apply", dsn)


def at_the_first_migration(server: Server, dsn: str) -> None:
    migrate(dsn, to=IDS[0])


@pytest.mark.parametrize(
    ("put_there", "user"),
    [
        (by_psql, "postgres"),
        (by_script, "plain"),
        (by_migrate, "plain"),
        (by_yoyo, "plain"),
        (at_the_first_migration, "postgres"),
    ],
)
def test_the_database_is_what_it_was_before(
    server: Server,
    empty: psycopg.Connection,
    put_there: Callable[[Server, str], None],
    user: str,
) -> None:
    dsn = server.dsn("app", user=user)
    before = catalog(empty)
    put_there(server, dsn)
    empty.execute(USE)
    if put_there is not at_the_first_migration:
        empty.execute(RIGHTS)
    result = pgsched("uninstall", "--yes", "--dsn", dsn)
    assert (result.exit_code, result.output) == (0, "removed schema pgsched from database app\n")
    assert catalog(empty) == before
    result = pgsched("uninstall", "--yes", "--dsn", dsn)
    assert (result.exit_code, result.output) == (0, "nothing to do: there is no schema pgsched\n")


def test_bookkeeping_alone_is_removed_too(server: Server, empty: psycopg.Connection) -> None:
    """As an installer leaves it that was killed early, and yoyo's own commands."""
    before = catalog(empty)
    empty.execute("create schema pgsched")
    yoyo("mark", server.dsn("app"))
    yoyo("unmark", server.dsn("app"))
    removed = uninstall(server.dsn("app"))
    assert removed
    assert removed["schema"] is None
    assert catalog(empty) == before


def test_an_application_that_uses_yoyo_keeps_its_own(
    server: Server, empty: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "0001.app.sql").write_text("create table app (id bigint);")
    url = server.dsn("app").replace("postgresql://", "postgresql+psycopg://")
    command = [sys.executable, "-m", "yoyo", "apply", "--batch", "--no-config-file"]
    subprocess.run([*command, "--database", url, tmp_path], check=True)
    log = empty.execute("select * from public._yoyo_log").fetchall()
    before = catalog(empty)
    by_yoyo(server, server.dsn("app"))
    uninstall(server.dsn("app"))
    assert catalog(empty) == before
    assert empty.execute("select * from public._yoyo_log").fetchall() == log
    assert len(log) == 1


# What somebody else made, and what is said of it.
OTHERS = {
    "view": ("create view public.v as table pgsched.tasks", "view public.v depends on"),
    "foreign key": (
        "create table public.note (task bigint references pgsched.finished_tasks)",
        "constraint note_task_fkey on table public.note depends on",
    ),
    "function of a row": (
        "create function public.f(pgsched.tasks) returns text language sql as $$ select '' $$",
        "function public.f(pgsched.tasks) depends on",
    ),
    "default": (
        "create table public.t (channel text default pgsched.notify_channel('a'))",
        "column channel of table public.t depends on function pgsched.notify_channel(text)",
    ),
    "child": ("create table public.t () inherits (pgsched.workers)", "table public.t depends on"),
    "table inside": (
        "create table pgsched.mine ()",
        "table pgsched.mine depends on schema pgsched",
    ),
    "type inside": ("create type pgsched.mood as enum ()", "type pgsched.mood depends on"),
    "sequence inside": ("create sequence pgsched.s", "sequence pgsched.s depends on"),
    "function inside": (
        "create function pgsched.f() returns text language sql as $$ select '' $$",
        "function pgsched.f() depends on schema pgsched",
    ),
    "extension inside": ("create extension hstore schema pgsched", "extension hstore depends on"),
    "one of the same name": (
        "create function pgsched.pause_queue() returns text language sql as $$ select '' $$",
        'routine name "pgsched.pause_queue" is not unique',
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_others_made_is_named_and_nothing_removed(
    dsn: str, conn: psycopg.Connection, other: str
) -> None:
    create, named = OTHERS[other]
    conn.execute(create.encode())
    before = catalog(conn)
    message = refused("uninstall", "--yes", "--dsn", dsn)
    assert message.startswith("nothing was removed, since pgsched did not make all of what would ")
    assert named in message
    assert catalog(conn) == before


def test_of_many_the_first_are_named(dsn: str, conn: psycopg.Connection) -> None:
    for number in range(7):
        conn.execute(f"create view public.v{number} as table pgsched.tasks".encode())
    message = refused("uninstall", "--yes", "--dsn", dsn)
    assert message.count("view public.") == 5
    assert message.endswith(" and 2 more")


def test_what_was_added_to_its_tables_goes_with_them(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute("create function public.f() returns trigger language plpgsql as 'begin end'")
    conn.execute("create publication p")
    conn.execute("create role policed")
    uninstall(dsn)
    before = catalog(conn)
    migrate(dsn)
    conn.execute(
        """
        create index on pgsched.finished_tasks (task_type);
        create trigger t after insert on pgsched.finished_tasks execute function public.f();
        create policy p on pgsched.finished_tasks to policed;
        alter table pgsched.finished_tasks add column note text;
        alter publication p add table pgsched.finished_tasks;
        """
    )
    uninstall(dsn)
    assert catalog(conn) == before


@pytest.mark.parametrize("things", ["", "create table jobs () create table tasks ()"])
def test_a_schema_that_pgsched_did_not_make_is_left_alone(
    server: Server, empty: psycopg.Connection, things: str
) -> None:
    empty.execute(f"create schema pgsched {things}".encode())
    before = catalog(empty)
    assert refused("uninstall", "--yes", "--dsn", server.dsn("app")) == (
        "nothing was removed: pgsched made nothing in this schema pgsched"
    )
    assert catalog(empty) == before


def test_a_schema_that_is_newer_is_left_alone(dsn: str, conn: psycopg.Connection) -> None:
    migrate(dsn)
    conn.execute(MAKE_NEWER)
    before = catalog(conn)
    assert "is newer than this package" in refused("uninstall", "--yes", "--dsn", dsn)
    assert catalog(conn) == before


def test_only_the_owner_may(server: Server, empty: psycopg.Connection) -> None:
    migrate(server.dsn("app", "plain"))
    before = catalog(empty)
    assert "role reader may not" in refused(
        "uninstall", "--yes", "--dsn", server.dsn("app", "reader")
    )
    assert catalog(empty) == before


def test_names_mean_what_they_should(server: Server, empty: psycopg.Connection) -> None:
    """Whatever functions and operators somebody put in front of PostgreSQL's own."""
    empty.execute(
        """
        create schema evil;
        create function evil.trap(timestamptz, timestamptz) returns boolean language plpgsql
            as $$ begin raise 'trapped'; end $$;
        create operator evil.> (
            leftarg = timestamptz, rightarg = timestamptz, function = evil.trap);
        create function evil.to_regnamespace(text) returns regnamespace language plpgsql
            as $$ begin raise 'trapped'; end $$;
        alter database app set search_path = evil, pg_catalog;
        """
    )
    before = catalog(empty)
    migrate(server.dsn("app"))
    assert pgsched("uninstall", "--yes", "--dsn", server.dsn("app")).exit_code == 0
    assert catalog(empty) == before


def test_nobody_waits_behind_it_for_long(
    dsn: str, connect: Callable[..., psycopg.Connection]
) -> None:
    """It gives up, naming who has a table in use, and what waited meanwhile goes on."""
    other, producer, admin = connect(autocommit=False), connect(), connect()
    producer.execute("set statement_timeout to '30s'")
    other.execute("select from pgsched.finished_tasks")
    before = catalog(admin)
    with ThreadPoolExecutor(1) as pool:
        message = pool.submit(refused, "uninstall", "--yes", "--dsn", dsn)
        try:
            wait_until(lambda: waiting(admin) == 1)
            producer.execute("select pgsched.enqueue_task('type')")
            assert f"session {other.info.backend_pid}" in message.result(PATIENCE)
        finally:
            other.rollback()
    assert catalog(admin) == before
    assert pgsched("uninstall", "--yes", "--dsn", dsn).exit_code == 0


def test_it_waits_for_an_installer_but_not_for_long(
    dsn: str, connect: Callable[..., psycopg.Connection]
) -> None:
    installer = connect(autocommit=False)
    installer.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
    message = refused("uninstall", "--yes", "--dsn", dsn)
    assert f"session {installer.info.backend_pid}" in message
    assert connect().execute("select pgsched.schema_version()").fetchall()


def test_what_is_installed_while_it_looks_stays(
    server: Server, empty: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was asked about it."""
    dsn = server.dsn("app")

    def look(*args: Any, **kwargs: Any) -> Any:
        there = real(*args, **kwargs)
        migrate(dsn)
        return there

    real = schema._look
    monkeypatch.setattr(schema, "_look", look)
    asked: list[Any] = []
    assert (uninstall(dsn, asked.append), asked) == (None, [])
    assert ask(dsn, "select pgsched.schema_version()") == [NEWEST]


@pytest.mark.long
def test_installers_and_uninstallers_at_once_all_succeed(server: Server, empty: object) -> None:
    dsn = server.dsn("app")
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(run, dsn) for _ in range(40) for run in (migrate, uninstall)]
        for each in runs:
            each.result(PATIENCE)
    assert migrate(dsn) in ([], IDS)


def test_of_several_at_once_one_removes_it_and_none_fails(dsn: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        removed = list(pool.map(uninstall, [dsn] * 4))
    assert len([each for each in removed if each]) == 1


def test_it_says_what_was_removed_as_json(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(USE)
    removed = json.loads(pgsched("uninstall", "--yes", "--json", "--dsn", dsn).stdout)["removed"]
    assert removed.pop("server") == f"{conn.info.host}:{conn.info.port}"
    assert removed == {
        "database": conn.info.dbname,
        "schema": IDS[-1].partition(".")[0],
        "live": 1,
        "finished": 1,
        "workers": 1,
    }
    result = pgsched("uninstall", "--json", "--dsn", dsn)
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"removed": None})


# Asking


def answered(dsn: str, answer: str) -> tuple[int, str, str]:
    """Exit code and output where somebody types this at a terminal."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, answer.encode())
    with process("uninstall", "--dsn", dsn, stdin=terminal) as command:
        try:
            stdout, stderr = command.communicate(timeout=PATIENCE)
        finally:
            command.kill()
            os.close(keyboard)
            os.close(terminal)
    return command.returncode, stdout.strip(), stderr


def test_it_shows_what_there_is_and_goes_on_when_the_databases_name_is_typed(
    dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute(USE)
    name = conn.info.dbname
    code, stdout, stderr = answered(dsn, f"{name}\n")
    assert (code, stdout) == (0, f"removed schema pgsched from database {name}")
    assert stderr.splitlines()[0] == (
        f"Database {name} at {conn.info.host}:{conn.info.port}, schema"
        f" {IDS[-1].partition('.')[0]}: 1 live and 1 finished tasks, 1 workers seen within 2"
        " minutes. All of it will be removed."
    )


@pytest.mark.parametrize("answer", ["yes\n", "\n\x04", "\x04"])
def test_any_other_answer_removes_nothing(dsn: str, conn: psycopg.Connection, answer: str) -> None:
    code, stdout, _ = answered(dsn, answer)
    assert (code, stdout) == (1, "")
    assert conn.execute("select pgsched.schema_version()").fetchall()


def test_without_a_terminal_it_does_not_guess(dsn: str, conn: psycopg.Connection) -> None:
    assert refused("uninstall", "--dsn", dsn).endswith("say --yes")
    assert conn.execute("select pgsched.schema_version()").fetchall()


def test_any_name_of_a_database_can_be_typed(server: Server) -> None:
    name = 'a\n"b"\' \\\u202eé'
    with database(server, name) as dsn:
        migrate(dsn)
        assert answered(dsn, f"{plain(name)}\n")[:2] == (
            0,
            f"removed schema pgsched from database {plain(name)}",
        )


def test_a_running_worker_waits_until_it_is_there_again(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)

    @worker.task("type")
    def handler(task: Task) -> None:
        pass

    with running(worker):
        wait_for(conn, enqueue(conn, "type"), "completed")
        uninstall(dsn)
        migrate(dsn)
        wait_for(conn, enqueue(conn, "type"), "completed")
