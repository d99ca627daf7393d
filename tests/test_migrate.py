"""Installing and upgrading: what psql would install, by anyone, from a package in order."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import oracle
import psycopg
import pytest
from installing import (
    IDS,
    NEXT,
    database,
    dump,
    installers,
    later_package,
    log_rows,
    marks,
    release,
    sources,
    waiting,
    yoyo,
)
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from workers import NEWEST, wait_until

from pgsched import migrate as migrate_module
from pgsched.embedded import Server
from pgsched.migrate import (
    MIGRATION_LOCK,
    MIGRATIONS,
    MigrationError,
    NotAllowed,
    NotAsReleased,
    SchemaNewer,
    UnknownMigration,
    WaitedTooLong,
    migrate,
)
from pgsched.schema import uninstall

ROOT = Path(__file__).parent.parent
RULE = "run as the owner of schema pgsched, which has to own all in it"
INSTALL = "import sys; from pgsched.migrate import migrate; print(migrate(sys.argv[1]))"

# An application's own migration, which yoyo keeps track of in schema public.
APPLICATION = "create table customers (name text);\n"


@pytest.fixture(scope="module", autouse=True)
def roles(server: Server) -> None:
    """`installer`, which may create schemas where a test says so, and `stranger`, which may not."""
    with psycopg.connect(server.dsn()) as conn:
        conn.execute("create role installer login; create role stranger login")
        conn.execute("create role member login; grant installer to member")
        conn.execute('create role "strange ""r" login')


@pytest.fixture
def empty(server: Server) -> Iterator[psycopg.Connection]:
    """A superuser's connection to a database of this test's own, with nothing in it."""
    with database(server, "empty") as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("grant create on database empty to installer")
        yield conn


@pytest.fixture
def installer(server: Server, empty: psycopg.Connection) -> str:
    """The DSN of the empty database for the plain role."""
    return server.dsn("empty", user="installer")


@pytest.fixture
def migrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that migrate() takes for the package's; its name is no pattern."""
    folder = tmp_path / "[0]*"
    folder.mkdir()
    release(folder)
    monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
    return folder


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of a later release, whose migration makes a table."""
    folder = later_package(tmp_path / "later", "create table pgsched.more ();\n")
    monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
    return folder


def digests(conn: psycopg.Connection) -> dict[str, str | None]:
    """What yoyo's log has as comment, by migration."""
    return dict(conn.execute("select migration_id, comment from pgsched._yoyo_log").fetchall())


def schema_owners(conn: psycopg.Connection) -> list[str]:
    """Who owns the schema, and what is in it."""
    rows = conn.execute(
        """
        select distinct pg_get_userbyid(owner)
          from (select nspowner from pg_namespace where nspname = 'pgsched'
                union all
                select relowner from pg_class where relnamespace = to_regnamespace('pgsched')
                union all
                select proowner from pg_proc where pronamespace = to_regnamespace('pgsched')
               ) as a (owner)
         order by 1
        """
    )
    return [owner for (owner,) in rows]


# What is installed


def test_a_plain_role_gets_the_schema_that_psql_installs(
    server: Server, template: str, installer: str
) -> None:
    assert migrate(installer) == IDS
    assert sources(installer) == sources(server.dsn(template))
    assert dump(server, "empty").replace("installer", "postgres") == dump(server, template)


def test_a_superuser_gets_the_schema_that_psql_installs_to_the_byte(
    server: Server, template: str, empty: psycopg.Connection
) -> None:
    migrate(server.dsn("empty"))
    assert dump(server, "empty") == dump(server, template)


def test_each_function_is_to_the_byte_what_the_newest_migration_with_it_says(
    empty: psycopg.Connection, installer: str
) -> None:
    migrate(installer)
    text = "".join(path.read_text("utf-8") for path in sorted(MIGRATIONS.glob("*.sql")))
    create = r"^create (?:or replace )?(?:function|procedure) pgsched\.(\w+)\((?:(?!^as \$).)*"
    bodies = re.findall(rf"{create}^as \$\$(.*?)\$\$;$", text, re.MULTILINE | re.DOTALL)
    rows = empty.execute(
        "select proname, prosrc from pg_proc where pronamespace = 'pgsched'::regnamespace"
    )
    assert dict(rows.fetchall()) == dict(bodies)


def test_a_second_run_does_nothing(empty: psycopg.Connection, installer: str) -> None:
    migrate(installer)
    assert migrate(installer) == []
    assert marks(empty) == IDS
    assert log_rows(empty) == len(IDS)


def test_schema_version_is_the_newest_migrations_number(
    empty: psycopg.Connection, installer: str
) -> None:
    for migration_id in IDS:
        assert migrate(installer, to=migration_id) == [migration_id]
        [(version,)] = empty.execute("select pgsched.schema_version()")
        assert version == migration_id.partition(".")[0]


def test_keywords_and_the_environment_name_a_database_too(
    installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = conninfo_to_dict(installer)
    assert migrate(" ".join(f"{name}={value}" for name, value in fields.items())) == IDS
    for name, value in fields.items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    assert migrate("") == []


def test_the_file_reaches_the_server_as_it_is(
    empty: psycopg.Connection, installer: str, migrations: Path
) -> None:
    body = "\n-- 100 %; %s %(id)s :id 'ä\nbegin return $q$;$q$; /* a /* b; */ */ end\n"
    text = f"create function pgsched.f() returns text language plpgsql as $${body}$$;"
    (migrations / "0001.a.sql").write_text(text, encoding="utf-8")
    migrate(installer)
    assert empty.execute("select prosrc from pg_proc where proname = 'f'").fetchall() == [(body,)]


def test_a_failing_migration_is_undone_and_those_before_it_stay(
    empty: psycopg.Connection, installer: str, migrations: Path
) -> None:
    (migrations / "0001.a.sql").write_text("create table pgsched.a ();")
    broken = migrations / "0002.b.sql"
    broken.write_text("-- depends: 0001.a\ncreate table pgsched.b (); select 1 / 0;")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(installer)
    assert marks(empty) == ["0001.a"]
    broken.write_text("-- depends: 0001.a\ncreate table pgsched.b ();")
    assert migrate(installer) == ["0002.b"]


# Many installers, and killed ones


def test_many_installers_at_once_all_succeed(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    with psycopg.connect(server.dsn("empty")) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)

        def let_them_in() -> list[str]:
            wait_until(lambda: installers(empty, "idle") == 8)
            other.rollback()
            return []

        applied = oracle.together([let_them_in, *[lambda: migrate(installer)] * 8])
    assert sorted(chain.from_iterable(applied)) == IDS
    assert marks(empty) == IDS
    assert log_rows(empty) == len(IDS)


def test_an_installer_that_is_overtaken_finds_nothing_to_do(
    empty: psycopg.Connection, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has the lock, another one has come, installed all of it and gone."""
    empty.execute("alter database empty set default_transaction_isolation = 'repeatable read'")
    backend = migrate_module._Backend
    compare, others = backend.compare, [lambda: migrate(installer)]

    def overtaken(*arguments: Any) -> Any:
        found = compare(*arguments)
        if others:
            assert others.pop()() == IDS
        return found

    monkeypatch.setattr(backend, "compare", overtaken)
    assert migrate(installer) == []
    assert log_rows(empty) == len(IDS)


def test_an_installer_killed_before_its_mark_leaves_nothing_behind(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    empty.execute("create schema pgsched authorization installer")
    for action in ("mark", "unmark"):  # yoyo's tables are there, and nothing else
        yoyo(action, installer)
    with psycopg.connect(server.dsn("empty")) as other:
        other.execute("lock table pgsched._yoyo_log in share mode")
        killed = subprocess.Popen([sys.executable, "-c", INSTALL, installer])
        wait_until(lambda: waiting(empty) == 1)
        killed.kill()
        killed.wait()
    assert migrate(installer) == IDS
    assert marks(empty) == IDS


# Who may


def test_the_owner_of_the_schema_needs_no_right_on_the_database(
    empty: psycopg.Connection, installer: str
) -> None:
    empty.execute("create schema pgsched authorization installer")
    empty.execute("revoke create on database empty from installer")
    assert migrate(installer) == IDS


def test_what_a_member_of_the_owner_makes_belongs_to_the_owner(
    server: Server, empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer, to=IDS[0])
    assert migrate(server.dsn("empty", user="member")) == [*IDS[1:], f"{NEXT}.more"]
    assert schema_owners(empty) == ["installer"]
    [(users,)] = empty.execute("select array_agg(distinct username::text) from pgsched._yoyo_log")
    assert sorted(users) == ["installer", "member"]


def test_a_superuser_runs_nothing_in_a_plain_roles_schema(
    server: Server, empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer, to=IDS[-1])
    body = "begin reset role; alter role installer superuser; return '0000'; end"
    with psycopg.connect(installer) as conn:
        conn.execute(
            "create or replace function pgsched.schema_version() returns text"
            f" language plpgsql as $${body}$$".encode()
        )
    superuser = server.dsn("empty")
    calls: list[Callable[[], object]] = [
        lambda: migrate(superuser),
        lambda: migrate(superuser, dry_run=True),
        lambda: migrate(f"{superuser}&options=-crole%3Dinstaller"),
        lambda: uninstall(superuser),
    ]
    for call in calls:
        with pytest.raises(NotAllowed, match="run as its owner, installer, whose code"):
            call()
    superuser_now = "select rolsuper from pg_roles where rolname = 'installer'"
    assert empty.execute(superuser_now).fetchone() == (False,)


def test_no_right_to_create_the_schema_says_what_to_grant(
    server: Server, empty: psycopg.Connection
) -> None:
    with pytest.raises(NotAllowed, match="first grant create") as refused:
        migrate(server.dsn("empty", user='strange "r'))
    empty.execute(str(refused.value).partition("first ")[2].encode())
    assert migrate(server.dsn("empty", user='strange "r')) == IDS


def test_no_right_on_the_schema_says_to_run_as_its_owner(server: Server, installer: str) -> None:
    migrate(installer)
    with pytest.raises(NotAllowed, match="run as its owner, installer"):
        migrate(server.dsn("empty", user="stranger"))


def test_what_belongs_to_others_is_named(
    empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer, to=IDS[-1])
    empty.execute("alter table pgsched._yoyo_log owner to stranger")
    with pytest.raises(NotAllowed, match=rf"table _yoyo_log: {RULE}$"):
        migrate(installer)


def test_a_schema_that_changed_hands_alone_says_what_is_wrong(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    migrate(installer)
    empty.execute("alter schema pgsched owner to stranger")
    for dsn in (server.dsn("empty", user="stranger"), installer, server.dsn("empty")):
        with pytest.raises(NotAllowed, match="belongs to stranger, and what is in it to") as error:
            migrate(dsn)
    empty.execute(str(error.value).partition("first ")[2].encode())
    assert migrate(installer) == []


def test_what_is_planted_on_the_search_path_is_not_used(
    server: Server, empty: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty.execute("create schema evil")
    for planted in (
        "current_database() returns name",
        "set_config(text, text, boolean) returns text",
        "pg_try_advisory_xact_lock(integer, integer) returns boolean",
    ):
        body = "$$ begin raise exception 'planted'; end $$"
        empty.execute(f"create function evil.{planted} language plpgsql as {body}".encode())
    for view in ("pg_tables", "pg_locks", "pg_namespace"):
        empty.execute(f"create view evil.{view} as select 1 / 0 as planted".encode())
    empty.execute("alter database empty set search_path = evil, pg_catalog, public")
    monkeypatch.setattr(migrate_module, "INSTALLER_PATIENCE", 0.0)
    with psycopg.connect(server.dsn("empty")) as other:
        other.execute("select pg_catalog.pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        with pytest.raises(WaitedTooLong, match="the installer lock is held by session"):
            migrate(server.dsn("empty"))
    assert migrate(server.dsn("empty")) == IDS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_id_without_a_name_may_install(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    # Python itself may be where only root can read it.
    imports = "from pgsched import cli, migrate; import yoyo.scripts.newmigration"
    become = "import os; os.setgroups([]); os.setgid(12345); os.setuid(12345)"
    named = ("USER", "LOGNAME", "LNAME", "USERNAME")
    server.folder.chmod(0o711)  # whoever may enter it may connect
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{imports}\n{become}\ncli.main()", "migrate"],
            env={
                **{name: value for name, value in os.environ.items() if name not in named},
                "PGSCHED_DSN": installer,
            },
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.folder.chmod(0o700)
    assert (done.returncode, done.stderr) == (0, "")
    assert empty.execute("select distinct username from pgsched._yoyo_log").fetchall() == [
        ("installer",)
    ]


# yoyo, and psql


def test_yoyo_alone_gives_the_same_schema_and_leaves_nothing_to_do(
    server: Server, template: str, empty: psycopg.Connection
) -> None:
    empty.execute("create schema pgsched")
    yoyo("apply", server.dsn("empty"))
    assert migrate(server.dsn("empty")) == []
    assert dump(server, "empty") == dump(server, template)
    assert sources(server.dsn("empty")) == sources(server.dsn(template))


def test_yoyo_finds_nothing_to_do_afterwards(empty: psycopg.Connection, installer: str) -> None:
    migrate(installer)
    yoyo("apply", installer)
    assert log_rows(empty) == len(IDS)
    assert empty.execute("select to_regclass('public._yoyo_migration')").fetchone() == (None,)


def test_what_yoyo_began_is_finished(
    server: Server, template: str, empty: psycopg.Connection, installer: str
) -> None:
    empty.execute("create schema pgsched authorization installer")
    yoyo("apply", installer, "--revision", IDS[0])
    assert migrate(installer) == IDS[1:]
    assert marks(empty) == IDS
    assert dump(server, "empty").replace("installer", "postgres") == dump(server, template)
    assert [digest is None for digest in digests(empty).values()] == [
        each == IDS[0] for each in IDS
    ]


def test_what_was_begun_is_finished_by_yoyo(
    server: Server, template: str, empty: psycopg.Connection, installer: str
) -> None:
    migrate(installer, to=IDS[0])
    yoyo("apply", installer)
    assert migrate(installer) == []
    assert marks(empty) == IDS
    assert dump(server, "empty").replace("installer", "postgres") == dump(server, template)


def test_a_yoyo_that_was_killed_is_no_obstacle(empty: psycopg.Connection, installer: str) -> None:
    """It left its lock, and the newest migration without its mark, which is a later transaction."""
    empty.execute("create schema pgsched authorization installer")
    yoyo("apply", installer)
    empty.execute("insert into pgsched.yoyo_lock (locked, ctime, pid) values (1, now(), 1)")
    empty.execute("delete from pgsched._yoyo_migration where migration_id = %s", [IDS[-1]])
    assert migrate(installer) == []
    assert marks(empty) == IDS
    assert empty.execute("select locked, pid from pgsched.yoyo_lock").fetchall() == [(1, 1)]


def test_an_application_with_yoyo_of_its_own_is_untouched(
    server: Server, empty: psycopg.Connection, installer: str, tmp_path: Path
) -> None:
    def tables() -> str:
        done = server.run("pg_dump", "-n", "public", "empty", check=True, stdout=subprocess.PIPE)
        return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)

    (tmp_path / "0001.initial.sql").write_text(APPLICATION)
    url = server.dsn("empty").replace("postgresql://", "postgresql+psycopg://")
    command = [sys.executable, "-m", "yoyo", "apply", "--batch", "--no-config-file", "--database"]
    subprocess.run([*command, url, tmp_path], check=True)
    before = tables()
    assert "0001.initial" in before
    assert migrate(installer) == IDS
    assert tables() == before
    (tmp_path / "0002.more.sql").write_text("alter table customers add column age integer;\n")
    subprocess.run([*command, url, tmp_path], check=True)
    assert migrate(installer) == []
    assert marks(empty) == IDS


def test_a_schema_that_psql_installed_is_taken_over(dsn: str, conn: psycopg.Connection) -> None:
    assert migrate(dsn) == []
    assert marks(conn) == IDS
    assert migrate(dsn) == []
    assert set(digests(conn).values()) == {None}


def test_what_psql_did_not_install_yet_is_applied(
    dsn: str, conn: psycopg.Connection, later: Path
) -> None:
    assert migrate(dsn) == [f"{NEXT}.more"]
    assert marks(conn) == [*IDS, f"{NEXT}.more"]


def test_a_schema_of_another_program_is_left_alone(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    empty.execute("create schema pgsched; create table pgsched.jobs (id bigint)")
    for dsn in (server.dsn("empty"), installer):
        with pytest.raises(
            MigrationError, match=r"is another program's, with a table jobs: rename"
        ):
            migrate(dsn)
    [(tables,)] = empty.execute("select count(*) from pg_tables where schemaname = 'pgsched'")
    assert tables == 1


# Not all of them, or none


@pytest.mark.parametrize("to", [IDS[0], IDS[0][:4], "1"])
def test_the_last_migration_to_apply_has_a_number_or_an_id(
    empty: psycopg.Connection, installer: str, to: str
) -> None:
    assert migrate(installer, to=to) == IDS[:1]
    assert migrate(installer, to=to) == []
    assert marks(empty) == IDS[:1]


def test_an_earlier_migration_takes_nothing_back(empty: psycopg.Connection, installer: str) -> None:
    migrate(installer)
    assert migrate(installer, to="1") == []
    assert marks(empty) == IDS


@pytest.mark.parametrize("to", [NEXT, "0", "", "-1", "initial", "1e0", "\u0661", "9" * 5000])
def test_a_migration_that_is_none_is_unknown(to: str) -> None:
    with pytest.raises(UnknownMigration, match=f"this package has {', '.join(IDS)}$"):
        migrate("", to=to)


def test_a_dry_run_says_what_would_be_applied_and_makes_nothing(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    read_only = make_conninfo(installer, options="-c default_transaction_read_only=on")
    with psycopg.connect(server.dsn("empty")) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        for dsn in (installer, read_only, server.dsn("empty", user="stranger")):
            assert migrate(dsn, dry_run=True) == IDS
            assert migrate(dsn, dry_run=True, to="1") == IDS[:1]
    assert empty.execute("select to_regnamespace('pgsched')").fetchone() == (None,)
    migrate(installer, to="1")
    assert migrate(read_only, dry_run=True) == IDS[1:]
    assert marks(empty) == IDS[:1]


def test_a_dry_run_by_a_role_that_may_not_look_says_what_it_cannot_see(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    migrate(installer, to="1")
    stranger = server.dsn("empty", user="stranger")
    for grant, missing in (
        ("usage on schema pgsched", "schema pgsched"),
        ("select on pgsched._yoyo_migration, pgsched._yoyo_log", "table _yoyo_migration"),
        ("execute on function pgsched.schema_version()", "function schema_version"),
    ):
        message = f"^permission denied for {missing}: {RULE}$"
        with pytest.raises(NotAllowed, match=message):
            migrate(stranger, dry_run=True)
        empty.execute(f"grant {grant} to stranger".encode())
    assert migrate(stranger, dry_run=True) == IDS[1:]


# What is not as it should be


def test_a_newer_schema_is_left_alone(
    empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer)
    (later / f"{NEXT}.more.sql").unlink()
    message = rf"newer than this package \(schema {NEXT}, package {NEWEST}\): upgrade pgsched$"
    for dry_run in (False, True):
        with pytest.raises(SchemaNewer, match=message):
            migrate(installer, dry_run=dry_run)
    assert marks(empty) == [*IDS, f"{NEXT}.more"]


def test_a_newer_schema_that_psql_installed_is_left_alone(
    dsn: str, conn: psycopg.Connection, later: Path
) -> None:
    for migration_id in IDS[1:]:
        (later / f"{migration_id}.sql").unlink()
    (later / f"{NEXT}.more.sql").unlink()
    release(later)
    with pytest.raises(SchemaNewer, match=rf"\(schema {NEWEST}, package 0001\)"):
        migrate(dsn)
    assert conn.execute("select to_regclass('pgsched._yoyo_migration')").fetchone() == (None,)


@pytest.mark.parametrize("name", [f"{NEWEST}.other", "0001.other", "other"])
def test_what_was_applied_and_is_missing_is_noticed(
    empty: psycopg.Connection, installer: str, later: Path, name: str
) -> None:
    migrate(installer)
    empty.execute("update pgsched._yoyo_migration set migration_id = %s"
                  " where migration_id = %s", [name, f"{NEXT}.more"])  # fmt: skip
    with pytest.raises(NotAsReleased, match=rf"\({name} is missing\)"):
        migrate(installer)


def test_a_file_that_changed_after_it_was_applied_is_noticed(
    empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer)
    assert all(re.fullmatch("sha256 [0-9a-f]{64}", text or "") for text in digests(empty).values())
    with (later / f"{NEXT}.more.sql").open("a") as file:
        file.write("-- A word more.\n")
    message = rf"\({NEXT}.more has changed\): install a released pgsched$"
    for dry_run in (False, True):
        with pytest.raises(NotAsReleased, match=message):
            migrate(installer, dry_run=dry_run)
    # After yoyo has applied it again, nobody knows.
    empty.execute(
        """
        insert into pgsched._yoyo_log (id, migration_hash, migration_id, operation, created_at_utc)
        select 'again', migration_hash, migration_id, 'apply', now() at time zone 'utc'
          from pgsched._yoyo_migration
         where migration_id = %s
        """,
        [f"{NEXT}.more"],
    )
    assert migrate(installer) == []


def test_a_migration_that_comes_too_late_is_noticed(
    empty: psycopg.Connection, installer: str, later: Path
) -> None:
    migrate(installer)
    (later / "0001.late.sql").write_text("create table pgsched.late ();\n")
    with pytest.raises(NotAsReleased, match=r"\(0001.late comes too late\)"):
        migrate(installer)
    assert empty.execute("select to_regclass('pgsched.late')").fetchone() == (None,)


@pytest.mark.parametrize("damage", ["changed", "missing", "no sums", "no migrations"])
def test_a_damaged_package_says_so_without_a_database(later: Path, damage: str) -> None:
    released = later / "0001.initial.sql"
    match damage:
        case "changed":
            released.write_bytes(released.read_bytes().replace(b"\n", b"\r\n"))
        case "missing":
            released.unlink()
        case "no sums":
            (later / "SHA256SUMS").unlink()
        case _:
            for file in later.iterdir():
                file.unlink()
            release(later)
    what = {"no sums": "SHA256SUMS", "no migrations": "all migrations"}
    with pytest.raises(NotAsReleased) as caught:
        migrate("host=/nowhere")
    assert str(caught.value) == (
        f"damaged package: {what.get(damage, released.name)} in {later}: install pgsched again"
    )


def test_an_index_that_is_to_be_built_concurrently_is_refused_before_it_is_begun(
    empty: psycopg.Connection, installer: str, later: Path
) -> None:
    statement = "create index concurrently more_index on pgsched.queues (paused);\n"
    (later / f"{NEXT}.more.sql").write_text(f"-- More.\n-- transactional: false\n{statement}")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="cannot run inside"):
        migrate(installer)
    assert marks(empty) == IDS
    assert empty.execute("select from pg_index where not indisvalid").fetchall() == []


def test_a_server_that_is_too_old_is_refused(
    empty: psycopg.Connection, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    major = empty.info.server_version // 10_000
    monkeypatch.setattr(migrate_module, "OLDEST", major + 1)
    message = f"^PostgreSQL {major}: pgsched needs {major + 1} or newer$"
    with pytest.raises(MigrationError, match=message):
        migrate(installer)


def test_an_unreachable_server_is_an_operational_error(tmp_path: Path) -> None:
    with pytest.raises(psycopg.OperationalError):
        migrate(f"host={tmp_path}")


# The files


def test_every_migration_is_one_transaction_after_the_one_before_it() -> None:
    for migration_id, before in zip(IDS, ["", *IDS], strict=False):
        lines = (MIGRATIONS / f"{migration_id}.sql").read_text("utf-8").splitlines()
        assert re.match(r"-- [A-Z].*\.$", lines[0])
        assert lines[1] == f"-- depends: {before}".strip()
        # Statements begin in the first column, and bodies of functions do not.
        begun = "\n".join(line for line in lines if re.match(r"[a-z]", line))
        assert re.findall(r"^(?:begin|commit|rollback|vacuum)\b.*;", begun, re.MULTILINE) == []
        words = "\n".join(lines).lower()
        assert (
            re.findall(r"transactional\s*:|^.*\b(?:index|view|partition).* concurrently", words)
            == []
        )
        assert re.findall(r"set local lock_timeout (?:=|to) '(?!\d\d?ms')", words) == []


@pytest.mark.long
def test_wheel_and_source_hold_the_migrations_and_their_digests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--outdir"]
    subprocess.run([*command, tmp_path, ROOT], check=True, stdout=subprocess.DEVNULL)
    expected = {path.name: path.read_bytes() for path in MIGRATIONS.iterdir()}
    assert {f"{migration_id}.sql" for migration_id in IDS} | {"SHA256SUMS"} == expected.keys()
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/migrations/" in name]
        assert {Path(name).name: archive.read(name) for name in names} == expected
    [source] = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as files:
        for name, content in expected.items():
            file = files.extractfile(
                f"{source.name.removesuffix('.tar.gz')}/pgsched/migrations/{name}"
            )
            assert file
            assert file.read() == content
