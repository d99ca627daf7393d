"""Every command where the database is not as it should be: what it says, and its exit code."""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from command_line import pgsched
from psycopg.conninfo import make_conninfo
from test_docs import COMMANDS as CLI
from test_docs import code, section, table
from test_read_only import standby_of
from workers import NEWEST, PATIENCE, WorkerProcess

from pgsched import doctor, migrate
from pgsched.cli import main
from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS

# Each with something to do. The last one may put an end to the situation.
COMMANDS = {
    "cancel": ["2"],
    "doctor": [],
    "enqueue": ["type"],
    "grant": ["observer", "pg_monitor"],
    "maintain": [],
    "pause": ["mail"],
    "reap": [],
    "resume": ["paused"],
    "retry": ["1"],
    "show": ["1"],
    "status": [],
    "top": [],
    "worker": ["app"],
    "migrate": [],
    "uninstall": ["--yes"],
}
READERS = ("show", "status", "top")

FILL = """
select pgsched.enqueue_task('type', p_queue => queue)
  from unnest(array['dead', 'mail', 'late']) as queue;
select pgsched.fail_task(id, claim_token, 'boom', p_permanent => true)
  from pgsched.claim_task('w', 'dead');
select pgsched.claim_task('w', 'late');
update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() where queue = 'late';
select pgsched.pause_queue('paused');
"""
DROP_FUNCTIONS = """
do $$
declare
  v_function regprocedure;
begin
  for v_function in
    select oid from pg_proc
     where pronamespace = 'pgsched'::regnamespace
       and proname not like '\\_%' and proname <> 'schema_version'
  loop
    execute 'drop routine ' || v_function;
  end loop;
end;
$$
"""
MAKE_OLDER = """
create or replace function pgsched.schema_version() returns text language sql
  as $$ select '0000' $$;
"""
MAKE_NEWER = """
create or replace function pgsched.schema_version() returns text language sql
  as $$ select '9999' $$;
insert into pgsched._yoyo_migration (migration_hash, migration_id, applied_at_utc)
values ('later', '9999.later', clock_timestamp());
"""
APP = "from pgsched import Worker\nworker = Worker(poll_interval=0.05)\n"
NEXT = f"{int(NEWEST) + 1:04}"


class Expected(NamedTuple):
    """The exit code, and what the output matches."""

    code: int
    text: str = ""


WORKS = Expected(0)
REMOVED = Expected(0, "^removed schema pgsched from database app$")
# A worker that cannot work yet logs why, and goes on trying: code -1.
KEEPS_TRYING = Expected(-1, "database: error")
NO_SCHEMA = Expected(1, r"^Error: schema \"pgsched\" does not exist: run pgsched migrate$")
MISSING = Expected(1, r"^Error: function pgsched\.\w+\(.*\) does not exist: run pgsched migrate$")
ONLY_READ = Expected(
    1, r"^Error: cannot .*(read-only transaction|during recovery) \(connect to the primary server"
)
GRANT = r" .* \(as the owner of the schema: pgsched grant KIND ROLE\)$"
CANNOT_LOOK = r"(?m)^error +rights +Role 'a b' lacks "
LET_IT_LOOK = r"\.\n +-> As the owner .*: select pgsched\.grant_access\('a b', 'observer'\)$"
CURE = r"\(check --dsn or PGSCHED_DSN, and that the server runs\)$"
NOBODY_THERE = Expected(1, r"^Error: connection is bad: .*No such file or directory.*" + CURE)

SITUATIONS: dict[str, dict[str, Expected]] = {
    "all is well": {"doctor": Expected(0, r"(?m)^ok +schema "), "uninstall": REMOVED},
    "no schema": {
        **dict.fromkeys(COMMANDS, NO_SCHEMA),
        "doctor": Expected(1, r"(?m)^error +schema .*\n +-> Run pgsched migrate\.$"),
        "migrate": Expected(0, "^applied 0001.initial\n"),
        "uninstall": Expected(0, "^(nothing to do: there is no|removed) schema pgsched"),
    },
    "no right to use the schema": {
        **dict.fromkeys(COMMANDS, Expected(1, "denied for schema" + GRANT)),
        "doctor": Expected(1, CANNOT_LOOK + "USAGE on schema pgsched" + LET_IT_LOOK),
        "migrate": Expected(4, r'role "a b" may not change schema pgsched'),
        "uninstall": Expected(1, r'role "a b" may not .* schema pgsched'),
    },
    "no right to call anything": {
        **dict.fromkeys(COMMANDS, Expected(1, "denied for function" + GRANT)),
        "doctor": Expected(1, CANNOT_LOOK + "EXECUTE on diagnose" + LET_IT_LOOK),
        "migrate": Expected(4, r'role "a b" may not change schema pgsched'),
        "uninstall": Expected(1, r'role "a b" may not .* schema pgsched'),
    },
    "a session that may only read": {
        **dict.fromkeys(COMMANDS, ONLY_READ),
        **dict.fromkeys(READERS, WORKS),
        "doctor": Expected(1, r"(?m)^warning +settings +default_transaction_read_only is on"),
        "migrate": Expected(0, "nothing to do"),
        "worker": KEEPS_TRYING,
    },
    "a standby": {
        **dict.fromkeys(COMMANDS, ONLY_READ),
        **dict.fromkeys(READERS, WORKS),
        "doctor": Expected(1, r"(?m)^warning +standby +This server is a standby"),
        "migrate": Expected(0, "nothing to do"),
        "worker": KEEPS_TRYING,
    },
    "no server": {
        **dict.fromkeys(COMMANDS, NOBODY_THERE),
        "migrate": NOBODY_THERE._replace(code=3),
        "doctor": Expected(1, r"(?m)^error +database +connection is bad: .*" + CURE),
        "worker": KEEPS_TRYING,
    },
    "no such database": {
        **dict.fromkeys(COMMANDS, Expected(1, 'database "nowhere" does not exist ' + CURE)),
        "doctor": Expected(1, r'(?m)^error +database .*"nowhere" does not exist ' + CURE),
        "migrate": Expected(3, '"nowhere" does not exist ' + CURE),
        "worker": KEEPS_TRYING,
    },
    "a wrong password": {
        **dict.fromkeys(COMMANDS, Expected(1, 'authentication failed for user "c d" ' + CURE)),
        "doctor": Expected(1, r'(?m)^error +database .*failed for user "c d" ' + CURE),
        "migrate": Expected(3, 'failed for user "c d" ' + CURE),
        "worker": KEEPS_TRYING,
    },
    "an older schema": {
        **dict.fromkeys(COMMANDS, MISSING),
        "worker": Expected(1, "at 0000, this package is made for .*: run pgsched migrate$"),
        "doctor": Expected(
            1, rf"(?m)^warning +schema .* 0000.* {NEXT}\.\n +-> Run pgsched migrate\.$"
        ),
        "migrate": Expected(0, f"^applied {NEXT}.more$"),
        "uninstall": REMOVED,
    },
    "a newer schema": {
        "doctor": Expected(
            1, rf"(?m)^warning +schema .* 9999.* {NEWEST}\.\n +-> Upgrade the package\.$"
        ),
        "migrate": Expected(
            6, "^Error: schema pgsched is newer than this package.*upgrade pgsched$"
        ),
        "uninstall": Expected(1, "^Error: schema pgsched is newer than this package"),
    },
}


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A server that doctor finds nothing wrong with; it asks one of two roles for a password."""
    with Server(settings={"idle_in_transaction_session_timeout": "10min"}) as server:
        access = server.folder / "data" / "pg_hba.conf"
        access.write_text(f'local all "c d" scram-sha-256\n{access.read_text()}')
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute('create role "a b" login; create role "c d" login password \'right\'')
            conn.execute("select pg_reload_conf()")
        yield server


@pytest.fixture(scope="module", params=SITUATIONS)
def situation(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def database(
    situation: str, own_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a database in this situation; all commands meet it, one after the other."""
    dsn = own_server.create_database("app")
    migrate.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(FILL)
        match situation:
            case "no schema":
                conn.execute("drop schema pgsched cascade")
            case "no right to use the schema":
                dsn = own_server.dsn("app", "a b")
            case "no right to call anything":
                conn.execute('grant usage on schema pgsched to "a b"')
                dsn = own_server.dsn("app", "a b")
            case "a session that may only read":
                dsn = make_conninfo(dsn, options="-c default_transaction_read_only=on")
            case "no server":
                dsn = make_conninfo(dsn, host=str(tmp_path_factory.mktemp("nobody")))
            case "no such database":
                dsn = own_server.dsn("nowhere")
            case "a wrong password":
                dsn = make_conninfo(own_server.dsn("app", "c d"), password="s3cret")
            case "an older schema":
                conn.execute(DROP_FUNCTIONS)
                conn.execute(MAKE_OLDER)
            case "a newer schema":
                conn.execute(MAKE_NEWER)
        if situation == "a standby":
            with standby_of(own_server, conn) as standby:
                yield standby.dsn("app")
        else:
            yield dsn
    with psycopg.connect(own_server.dsn(), autocommit=True) as conn:
        conn.execute("drop database app with (force)")


@pytest.fixture
def package(situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one situation the package has more migrations than the database."""
    if situation == "an older schema":
        later = tmp_path / "migrations"
        shutil.copytree(MIGRATIONS, later)
        (later / f"{NEXT}.more.sql").write_text("-- More.\n-- depends:\nselect 1;\n")
        monkeypatch.setattr(migrate, "MIGRATIONS", later)
        monkeypatch.setattr(doctor, "NEWEST_SCHEMA", NEXT)


def test_every_command_with_a_database_is_tried() -> None:
    takes_dsn = {
        name
        for name, command in main.commands.items()
        if "--dsn" in {option for each in command.params for option in each.opts}
    }
    assert {*COMMANDS} == takes_dsn


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_is_wrong_in_one_line(
    situation: str, database: str, command: str, tmp_path: Path
) -> None:
    expected = SITUATIONS[situation].get(command, WORKS)
    if command == "worker":
        code, output = of_worker(database, expected, tmp_path)
    else:
        result = pgsched(command, *COMMANDS[command], "--dsn", database)
        code, output = result.exit_code, result.stdout + result.stderr
        # Either it is done, or one line says why not; doctor always has a report.
        told = 1 if code and command != "doctor" else 0
        assert len(result.stderr.splitlines()) == told
        assert bool(result.stdout) == (not told)
    assert (code, bool(re.search(expected.text, output))) == (expected.code, True), output
    assert "s3cret" not in output


def of_worker(dsn: str, expected: Expected, folder: Path) -> tuple[int, str]:
    """The exit code of a worker, or that it keeps trying; and what it says."""
    with WorkerProcess(folder, APP, "--drain", "--dsn", dsn) as worker:
        code = expected.code
        if expected.code < 0:
            worker.wait_for_log(expected.text)
            assert worker.process.poll() is None
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(PATIENCE) == 0
        else:
            code = worker.process.wait(PATIENCE)
        refusals = [line for line in worker.log.splitlines() if line.startswith("Error: ")]
        assert len(refusals) == (1 if code == 1 else 0)
        return code, "\n".join(refusals) or worker.log


def rights() -> list[tuple[str, list[str]]]:
    """What the documents say that each command calls."""
    rows = table(section(CLI, "Rights"), "Command")
    found = [(code(row["Command"])[0], code(row["Calls"])) for row in rows]
    return [(command, functions) for command, functions in found if functions]


@pytest.mark.parametrize(("command", "functions"), rights(), ids=lambda value: str(value)[:20])
def test_the_documented_rights_are_enough_and_needed(
    own_server: Server, command: str, functions: list[str]
) -> None:
    dsn = own_server.create_database("limited")
    try:
        migrate.migrate(dsn)
        url = own_server.dsn("limited", "a b")
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(FILL)
            conn.execute('grant usage on schema pgsched to "a b"')
            for function in functions:
                assert pgsched(command, *COMMANDS[command], "--dsn", url).exit_code == 1
                conn.execute(f'grant execute on function pgsched.{function} to "a b"'.encode())
        assert pgsched(command, *COMMANDS[command], "--dsn", url).exit_code == 0
    finally:
        with psycopg.connect(own_server.dsn(), autocommit=True) as conn:
            conn.execute("drop database limited with (force)")
