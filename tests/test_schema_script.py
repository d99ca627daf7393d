"""pgsched sql: one script that psql, migration tools and drivers run as it is."""

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psycopg
import pytest
from command_line import pgsched, process, refused
from installing import IDS, database, dump, marks
from test_conventions import code
from workers import PATIENCE

from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS, migrate

NUMBERS = [migration_id.partition(".")[0] for migration_id in IDS]


@pytest.fixture
def empty(server: Server) -> Iterator[str]:
    """The URL of a database of this test's own, with nothing in it."""
    with database(server, "scripted") as dsn:
        yield dsn


def script(*options: str) -> str:
    result = pgsched("sql", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def run(server: Server, script: str, folder: Path) -> None:
    """Run it as its own first comment says."""
    file = folder / "a file.sql"
    file.write_text(script, encoding="utf-8")
    [command] = re.findall(r"^-- +psql (.*)$", script, re.MULTILINE)
    names = {"DATABASE": "scripted", "THIS_FILE": str(file)}
    server.run("psql", "-q", *[names.get(word, word) for word in shlex.split(command)], check=True)


def test_psql_gets_the_schema_that_the_files_give_and_migrate_takes_it_over(
    server: Server, template: str, empty: str, tmp_path: Path
) -> None:
    run(server, script(), tmp_path)
    assert dump(server, "scripted") == dump(server, template)
    assert migrate(empty) == []
    with psycopg.connect(empty) as conn:
        assert marks(conn) == IDS


def test_a_driver_gets_it_in_one_message(server: Server, template: str, empty: str) -> None:
    """As Django, Rails and others send it: nothing is a parameter, whatever it looks like."""
    with psycopg.connect(empty) as conn:
        conn.execute(script().encode())
    assert dump(server, "scripted") == dump(server, template)


def test_no_operator_of_others_gets_into_it_and_the_search_path_comes_back(
    server: Server, template: str, empty: str, tmp_path: Path
) -> None:
    """One that fits better than PostgreSQL's own would be called with the rights of the owner."""
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute(
            """
            create function public.trap(double precision, integer) returns boolean
              language sql as 'select true';
            create operator public.>= (
              leftarg = double precision, rightarg = integer, function = public.trap);
            """
        )
        with conn.transaction():
            conn.execute("set local search_path to public")
            conn.execute(script().encode())
            assert conn.execute("show search_path").fetchone() == ("public",)
    assert dump(server, "scripted") == dump(server, template)


@pytest.mark.parametrize("given", [*IDS[:-1], *(str(int(number)) for number in NUMBERS[:-1])])
def test_what_comes_after_a_migration_is_enough_for_who_has_it(
    server: Server, template: str, empty: str, tmp_path: Path, given: str
) -> None:
    with psycopg.connect(empty) as conn:
        conn.execute("create schema pgsched")
        for migration_id, number in zip(IDS, NUMBERS, strict=True):
            if int(number) <= int(given.partition(".")[0]):
                conn.execute((MIGRATIONS / f"{migration_id}.sql").read_bytes())
    run(server, script("--from", given), tmp_path)
    assert dump(server, "scripted") == dump(server, template)


def test_after_the_newest_there_is_nothing_but_comments() -> None:
    lines = script("--from", NUMBERS[-1]).splitlines()
    assert [line for line in lines if not line.startswith("--")] == []


def test_a_migration_that_does_not_exist_is_refused() -> None:
    assert refused("sql", "--from", "9999").startswith("no migration '9999': this package has 0001")


def test_it_says_first_what_it_is() -> None:
    assert script().splitlines()[0] == (
        f"-- pgsched {version('pgsched')}: schema pgsched at {IDS[-1]}."
    )


# What would be a command of psql, a transaction of its own, or an order to a migration tool.
ORDERS = {
    "psql": r"^\s*\\",
    "transactions": r"(?i)^\s*(begin|start transaction|commit|end|rollback)\s*;",
    "Flyway": r"\$\{",
    "dbmate": r"-- *migrate:",
    "goose": r"--\s*\+goose",
    "Liquibase": r"(?i)^\s*--\s*(liquibase|changeset|rollback|precondition|property|ignoreLines)\b",
    "yoyo": r"^\s*--\s*(depends|transactional)\s*:",
}


@pytest.mark.parametrize("options", [(), ("--from", NUMBERS[0])], ids=["all", "from"])
@pytest.mark.parametrize("tool", ORDERS)
def test_no_tool_finds_an_order_in_it(tool: str, options: tuple[str, ...]) -> None:
    # Bodies of functions are sent as they are.
    text = re.sub(r"\$\$.*?\$\$", "''", script(*options), flags=re.DOTALL)
    searched = text if tool in ("psql", "transactions") else script(*options)
    assert re.findall(ORDERS[tool], searched, re.MULTILINE) == []


def test_psql_replaces_nothing_in_it(tmp_path: Path) -> None:
    """Sqitch, for example, sets variables of psql."""
    file = tmp_path / "script.sql"
    file.write_text(re.sub(r"\$\$.*?\$\$", "''", script(), flags=re.DOTALL))
    assert re.findall(r"(?<!:):['\"{]?\w+", code(file)) == []


def test_it_is_the_same_text_whatever_the_terminal_and_needs_no_server(tmp_path: Path) -> None:
    surroundings = {"PYTHONIOENCODING": "utf-16", "PGHOST": str(tmp_path), "PGSCHED_DSN": "nowhere"}
    printed = process("sql", env=surroundings).communicate(timeout=PATIENCE)
    assert printed == (script(), "")
    assert printed[0].endswith(";\n")
    assert [printed[0].count(f"\n-- {migration_id}\n") for migration_id in IDS] == [1] * len(IDS)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_reads_only_its_beginning_hears_no_complaint(unbuffered: str) -> None:
    with process("sql", env={"PYTHONUNBUFFERED": unbuffered}) as command:
        assert command.stdout
        assert command.stderr
        assert command.stdout.readline().startswith("-- pgsched")
        command.stdout.close()
        assert command.stderr.read() == ""
        assert command.wait(PATIENCE) == 1


@pytest.mark.parametrize(("unbuffered", "code"), [("1", 1), ("", 120)])
def test_a_full_disk_is_no_success(unbuffered: str, code: int) -> None:
    """120 is Python's own, when its end cannot write what is left in the buffer either."""
    environment = {"PYTHONUNBUFFERED": unbuffered}
    with (
        Path("/dev/full").open("w") as full,
        process("sql", stdout=full, env=environment) as command,
    ):
        assert command.stderr
        assert command.stderr.read().startswith("Error: ")
        assert command.wait(PATIENCE) == code
