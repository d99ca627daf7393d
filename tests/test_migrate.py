"""Installing and upgrading: what psql would install, by anyone, any number of times at once."""

import getpass
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from workers import wait_until

from pgsched import migrate as migrate_module
from pgsched.embedded import Server
from pgsched.migrate import MIGRATION_LOCK, MIGRATIONS, MigrationError, migrate

ROOT = Path(__file__).parent.parent
IDS = sorted(path.stem for path in MIGRATIONS.glob("*.sql"))
INSTALL = "import sys; from pgsched.migrate import migrate; print(migrate(sys.argv[1]))"
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = %s"


@pytest.fixture(scope="module", autouse=True)
def roles(server: Server) -> None:
    """`installer`, which may create schemas where a test says so, and `stranger`, which may not."""
    with psycopg.connect(server.dsn()) as conn:
        conn.execute("create role installer login; create role stranger login")


@pytest.fixture
def empty(server: Server) -> Iterator[psycopg.Connection]:
    """A superuser's connection to a database of this test's own, with nothing in it."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        server.create_database("empty")
        with psycopg.connect(server.dsn("empty"), autocommit=True) as conn:
            conn.execute("grant create on database empty to installer")
            yield conn
        admin.execute("drop database empty with (force)")


@pytest.fixture
def installer(server: Server, empty: psycopg.Connection) -> str:
    """The DSN of the empty database for the plain role."""
    return server.dsn("empty", user="installer")


@pytest.fixture
def migrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that migrate() takes for the package's; its name is no pattern."""
    folder = tmp_path / "[0]*"
    folder.mkdir()
    monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
    return folder


def marks(conn: psycopg.Connection) -> list[str]:
    """The applied migrations by yoyo's table."""
    rows = conn.execute("select migration_id from pgsched._yoyo_migration order by migration_id")
    return [migration_id for (migration_id,) in rows]


def log_rows(conn: psycopg.Connection) -> int:
    """How often yoyo's log says that something was applied."""
    [(rows,)] = conn.execute("select count(*) from pgsched._yoyo_log")
    assert isinstance(rows, int)
    return rows


def dump(server: Server, database: str) -> str:
    """The whole schema but yoyo's tables, without pg_dump's random words."""
    without = ["--exclude-table=pgsched._yoyo*", "--exclude-table=pgsched.yoyo_lock"]
    done = server.run(
        "pg_dump", "--schema-only", "-n", "pgsched", *without, database, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)


def sources(dsn: str) -> dict[str, str]:
    """The digest of each function's body, by signature."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select oid::regprocedure::text, md5(prosrc) from pg_proc"
            " where pronamespace = 'pgsched'::regnamespace"
        )
        return dict(rows.fetchall())


def yoyo(action: str, dsn: str) -> None:
    """Run yoyo's own command on the package's migrations, as its documentation says."""
    url = dsn.replace("postgresql://", "postgresql+psycopg://") + "&schema=pgsched"
    command = [sys.executable, "-m", "yoyo", action, "--batch", "--no-config-file"]
    subprocess.run([*command, "--database", url, MIGRATIONS], check=True)


def waiting(conn: psycopg.Connection) -> int:
    """How many sessions of this database wait for a lock."""
    [(sessions,)] = conn.execute(WAITING, [conn.info.dbname])
    assert isinstance(sessions, int)
    return sessions


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


def test_a_second_run_does_nothing(empty: psycopg.Connection, installer: str) -> None:
    migrate(installer)
    assert migrate(installer) == []
    assert marks(empty) == IDS
    assert log_rows(empty) == len(IDS)


def test_the_owner_of_the_schema_needs_no_right_on_the_database(
    empty: psycopg.Connection, installer: str
) -> None:
    empty.execute("create schema pgsched authorization installer")
    empty.execute("revoke create on database empty from installer")
    assert migrate(installer) == IDS


def test_keywords_and_the_environment_name_a_database_too(
    installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = conninfo_to_dict(installer)
    assert migrate(" ".join(f"{name}={value}" for name, value in fields.items())) == IDS
    for name, value in fields.items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    assert migrate("") == []


def test_schema_version_is_the_newest_migrations_number(
    empty: psycopg.Connection, installer: str
) -> None:
    migrate(installer)
    [(version,)] = empty.execute("select pgsched.schema_version()")
    assert version == IDS[-1].partition(".")[0]


def test_many_installers_at_once_all_succeed(
    server: Server, empty: psycopg.Connection, installer: str
) -> None:
    # A snapshot taken before the wait for the lock would see nothing applied after it.
    empty.execute("alter database empty set default_transaction_isolation = 'repeatable read'")
    command = [sys.executable, "-c", INSTALL, installer]
    with psycopg.connect(server.dsn("empty")) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        installers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)
        ]
        wait_until(lambda: waiting(empty) == len(installers))
    outputs = [process.communicate(timeout=60)[0] for process in installers]
    assert [process.returncode for process in installers] == [0] * 8
    assert marks(empty) == IDS
    assert log_rows(empty) == len(IDS)
    assert "".join(outputs).count(IDS[0]) == 1


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


def test_a_user_id_without_a_name_may_install(
    empty: psycopg.Connection, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", getuser)
    assert migrate(installer) == IDS
    assert empty.execute("select distinct username from pgsched._yoyo_log").fetchall() == [
        ("installer",)
    ]


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


def test_the_file_reaches_the_server_as_it_is(
    empty: psycopg.Connection, installer: str, migrations: Path
) -> None:
    body = "\n-- 100 %; %s %(id)s :id 'ä\nbegin return $q$;$q$; /* a /* b; */ */ end\n"
    text = f"create function pgsched.f() returns text language plpgsql as $${body}$$;"
    (migrations / "0001.a.sql").write_text(text, encoding="utf-8")
    migrate(installer)
    assert empty.execute("select prosrc from pg_proc where proname = 'f'").fetchall() == [(body,)]


def test_no_right_to_create_the_schema_says_what_to_grant(
    server: Server, empty: psycopg.Connection
) -> None:
    with pytest.raises(MigrationError, match='grant create on database "empty" to "stranger"'):
        migrate(server.dsn("empty", user="stranger"))
    assert empty.execute("select to_regnamespace('pgsched')").fetchone() == (None,)


def test_no_right_on_the_schema_says_to_run_as_its_owner(server: Server, installer: str) -> None:
    migrate(installer)
    with pytest.raises(MigrationError, match="run as the owner of the schema"):
        migrate(server.dsn("empty", user="stranger"))


def test_a_newer_schema_is_left_alone(
    empty: psycopg.Connection, installer: str, migrations: Path
) -> None:
    for name in ("0001.a", "0002.b"):
        (migrations / f"{name}.sql").write_text("select 1;")
    migrate(installer)
    (migrations / "0002.b.sql").rename(migrations / "0002.c.sql")
    with pytest.raises(MigrationError, match=r"which lacks 0002\.b: upgrade pgsched"):
        migrate(installer)
    assert marks(empty) == ["0001.a", "0002.b"]


def test_a_schema_that_psql_installed_is_taken_over(dsn: str, conn: psycopg.Connection) -> None:
    assert migrate(dsn) == []
    assert marks(conn) == IDS
    assert migrate(dsn) == []


def test_what_psql_did_not_install_yet_is_applied(
    dsn: str, conn: psycopg.Connection, migrations: Path
) -> None:
    (migrations / "0001.initial.sql").write_text("select 1 / 0;")
    (migrations / "0002.later.sql").write_text("create table pgsched.later ();")
    assert migrate(dsn) == ["0002.later"]
    assert marks(conn) == ["0001.initial", "0002.later"]


def test_a_package_without_migrations_says_so(installer: str, migrations: Path) -> None:
    with pytest.raises(MigrationError, match="install pgsched again"):
        migrate(installer)


def test_an_unreachable_server_is_an_operational_error(tmp_path: Path) -> None:
    with pytest.raises(psycopg.OperationalError):
        migrate(f"host={tmp_path}")


def test_the_wheel_holds_the_migrations(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir"]
    subprocess.run([*command, tmp_path, ROOT], check=True, stdout=subprocess.DEVNULL)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".sql")] == [
        f"pgsched/migrations/{migration_id}.sql" for migration_id in IDS
    ]
