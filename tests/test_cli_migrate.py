"""`pgsched migrate`: what it prints, and an exit code for each thing that can go wrong."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from command_line import pgsched
from installing import IDS, NEXT, database, later_package, marks
from psycopg.conninfo import make_conninfo
from test_docs import COMMANDS, section, table

from pgsched import migrate as migrate_module
from pgsched.embedded import Server
from pgsched.migrate import EXIT_CODES, MIGRATION_LOCK, MIGRATIONS

MORE = f"{NEXT}.more"


@pytest.fixture
def empty(server: Server) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    with database(server, "cli_migrate") as dsn:
        yield dsn


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Let the package have one migration more, and return its folder."""

    def package(text: str) -> Path:
        folder = later_package(tmp_path / "later", text)
        monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
        return folder

    return package


Package = Callable[[str], Path]


def run(dsn: str, *options: str) -> Result:
    return pgsched("migrate", "--dsn", dsn, *options)


def refusal(dsn: str, *options: str) -> tuple[int, str]:
    """The exit code and the one line."""
    result = run(dsn, *options)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return result.exit_code, line.removeprefix("Error: ")


# What it does


def test_what_was_applied_is_printed(empty: str) -> None:
    assert run(empty, "--to", "1").stdout == f"applied {IDS[0]}\n"
    assert run(empty, "--to", "1").stdout == "nothing to do: the schema is at 1 or later\n"
    assert run(empty).stdout.splitlines() == [f"applied {each}" for each in IDS[1:]]
    assert run(empty).stdout == "nothing to do: the schema is up to date\n"


def test_a_dry_run_prints_what_would_be(empty: str) -> None:
    would = [f"would apply {each}" for each in IDS]
    assert run(empty, "--dry-run").stdout.splitlines() == would
    assert run(empty, "--dry-run", "--to", IDS[0]).stdout.splitlines() == would[:1]
    assert run(empty).exit_code == 0
    assert run(empty, "--dry-run").stdout == "nothing to do: the schema is up to date\n"


def test_all_of_it_as_json(empty: str) -> None:
    def document(*options: str) -> object:
        return json.loads(run(empty, "--json", *options).stdout)

    assert document("--dry-run") == {"pending": IDS}
    assert document("--to", "1") == {"applied": IDS[:1]}
    assert document() == {"applied": IDS[1:]}
    assert document() == {"applied": []}
    assert document("--dry-run") == {"pending": []}


# What can go wrong


def test_every_exit_code_is_documented_and_the_reverse() -> None:
    rows = table(section(COMMANDS, "`pgsched migrate`"), "Exit code")
    assert [int(row["Exit code"]) for row in rows] == sorted({0, 1, *EXIT_CODES.values()})


def test_0_and_nothing_to_do_where_only_reading_is_possible(empty: str) -> None:
    run(empty)
    read_only = make_conninfo(empty, options="-c default_transaction_read_only=on")
    assert run(read_only).stdout == "nothing to do: the schema is up to date\n"


def test_1_when_a_migration_fails(empty: str, package: Package) -> None:
    package("select 1 / 0;")
    assert refusal(empty) == (1, "division by zero")
    with psycopg.connect(empty) as conn:
        assert marks(conn) == IDS


def test_1_when_the_schema_is_another_programs(empty: str) -> None:
    with psycopg.connect(empty) as conn:
        conn.execute("create schema pgsched; create table pgsched.jobs ()")
    assert refusal(empty) == (
        1,
        "schema pgsched is another program's, with a table jobs: rename it, or use another"
        " database",
    )


def test_1_when_the_server_is_too_old(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_module, "OLDEST", 99)
    code, text = refusal(empty)
    assert (code, text.partition(": ")[2]) == (1, "pgsched needs 99 or newer")


def test_2_when_there_is_no_such_migration(empty: str) -> None:
    assert refusal(empty, "--to", NEXT) == (
        2,
        f"no migration '{NEXT}': this package has {', '.join(IDS)}",
    )
    assert run(empty, "--lock-timeout", "-1").exit_code == 2


def test_3_when_there_is_no_server(tmp_path: Path) -> None:
    code, text = refusal(f"host={tmp_path}")
    assert code == 3
    assert text.endswith("(check --dsn or PGSCHED_DSN, and that the server runs)")


def test_4_when_the_role_may_not(server: Server, empty: str) -> None:
    with psycopg.connect(empty) as conn:
        conn.execute("drop role if exists cli_stranger; create role cli_stranger login")
    assert refusal(server.dsn("cli_migrate", "cli_stranger")) == (
        4,
        "role cli_stranger may not create schema pgsched in database cli_migrate:"
        " first grant create on database cli_migrate to cli_stranger",
    )
    run(empty)
    assert refusal(server.dsn("cli_migrate", "cli_stranger"), "--dry-run") == (
        4,
        "permission denied for schema pgsched: run as the owner of schema pgsched, which has to own"
        " all in it",
    )


def test_5_when_the_session_may_only_read(empty: str, package: Package) -> None:
    read_only = make_conninfo(empty, options="-c default_transaction_read_only=on")
    cure = "(connect to the primary server, or as a role that may write)"
    text = "cannot execute {} in a read-only transaction " + cure
    assert refusal(read_only) == (5, text.format("CREATE SCHEMA"))
    run(empty)
    package("create table pgsched.more ();")
    assert refusal(read_only) == (5, text.format("INSERT"))


def test_6_when_the_schema_is_newer(
    empty: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("")
    run(empty)
    monkeypatch.setattr(migrate_module, "MIGRATIONS", MIGRATIONS)
    text = f"(schema {NEXT}, package {IDS[-1][:4]}): upgrade pgsched"
    assert refusal(empty) == (6, f"schema pgsched is newer than this package {text}")


def test_7_when_a_lock_cannot_be_had(empty: str, package: Package) -> None:
    run(empty)
    package("alter table pgsched.queues add column more integer;")
    with psycopg.connect(empty, application_name="a \x1b[2J") as other:
        other.execute("select from pgsched.queues")
        code, text = refusal(empty, "--lock-timeout", "0.1")
    held = "gave up after 0.1 s: AccessShareLock on queues is held by session"
    assert (code, text[: len(held)]) == (7, held)
    assert text.isprintable()


def test_7_when_another_installer_does_not_end(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_module, "INSTALLER_PATIENCE", 0.0)
    with psycopg.connect(empty) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        code, text = refusal(empty)
    assert (code, text.partition(" is")[0]) == (7, "gave up after 0 s: the installer lock")


def test_8_when_the_package_is_not_as_it_was(empty: str, package: Package) -> None:
    folder = package("select 1;")
    run(empty)
    (folder / f"{MORE}.sql").write_text("select 2;")
    assert refusal(empty) == (
        8,
        f"the migrations of this package are not those that were applied ({MORE} has changed):"
        " install a released pgsched",
    )
    (folder / "SHA256SUMS").unlink()
    code, text = refusal(empty)
    assert (code, text.partition(":")[0]) == (8, "damaged package")


def test_other_commands_keep_1(tmp_path: Path) -> None:
    assert pgsched("status", "--dsn", f"host={tmp_path}").exit_code == 1
