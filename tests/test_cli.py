"""The command line: what it does, and that what goes wrong is one line without a secret in it."""

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import psycopg
import pytest
from command_line import keywords, pgsched, process, refused
from psycopg.conninfo import conninfo_to_dict
from workers import PATIENCE, WorkerProcess, row, wait_for

from pgsched import enqueue
from pgsched.cli import main
from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS

IDS = sorted(path.stem for path in MIGRATIONS.glob("*.sql"))
COMMANDS = [
    *(["migrate"], ["enqueue", "type"], ["status"], ["top"], ["show", "1"], ["retry", "1"]),
    *(["cancel", "1"], ["pause", "q"], ["resume", "q"], ["reap"], ["maintain"], ["doctor"]),
]

commands = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@pytest.fixture
def empty(server: Server) -> Iterator[str]:
    """The URL of a database without the schema."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        yield server.create_database("cli_empty")
        admin.execute("drop database cli_empty with (force)")


@pytest.fixture(scope="module")
def untouched(server: Server, template: str) -> Iterator[str]:
    """The URL of a database that stays without a task."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        yield server.create_database("cli_untouched", template=template)
        admin.execute("drop database cli_untouched with (force)")


# What the commands do


def test_migrate_says_what_it_applied(empty: str) -> None:
    assert pgsched("migrate", "--dsn", empty).stdout.splitlines() == [
        f"applied {migration_id}" for migration_id in IDS
    ]
    again = pgsched("migrate", "--dsn", empty)
    assert (again.exit_code, again.stdout) == (0, "nothing to do: the schema is up to date\n")
    assert pgsched("status", "--dsn", empty).stdout.startswith(f"schema {IDS[-1][:4]}, 0 queues")


def test_enqueue_prints_the_id(dsn: str, conn: psycopg.Connection) -> None:
    first = pgsched("enqueue", "type", "--dsn", dsn)
    assert (first.exit_code, first.stderr) == (0, "")
    options = ["--queue", "q", "--priority", "1", "--max-attempts", "2", "--unique-key", "u"]
    payload = '{"\u00e4": [1, null, 12345678901234567890]}'
    second = pgsched("enqueue", "other", payload, "--delay", "3600", *options, "--dsn", dsn)
    stored = conn.execute(
        """
        select id, task_type, payload, queue, priority, max_attempts, unique_key
          from pgsched.tasks
         order by id
        """
    ).fetchall()
    assert stored == [
        (int(first.stdout), "type", {}, "default", 5, 20, None),
        (int(second.stdout), "other", json.loads(payload), "q", 1, 2, "u"),
    ]
    due_in = row(conn, int(second.stdout)).due_in
    assert timedelta(minutes=59) < due_in <= timedelta(hours=1)
    # The key is taken: the same task.
    assert pgsched("enqueue", "other", *options, "--dsn", dsn).stdout == second.stdout


def test_status_shows_the_queues(dsn: str, conn: psycopg.Connection) -> None:
    enqueue(conn, "type", queue="a queue")
    enqueue(conn, "type", queue="a queue", delay=timedelta(hours=1))
    enqueue(conn, "type", queue="busy")
    enqueue(conn, "type", queue="busy", max_attempts=1)
    conn.execute("select from pgsched.claim_task('worker', 'busy', p_limit => 2)")
    conn.execute(
        """
        select pgsched.fail_task(id, claim_token, 'error')
          from pgsched.scheduled_tasks
         where max_attempts = 1
        """
    )
    conn.execute("insert into pgsched.queues (name, paused) values ('idle', true)")
    output = pgsched("status", "--dsn", dsn).stdout
    lines = re.sub(r"\d\.\d s", "x.x s", output).splitlines()
    assert lines == [
        f"schema {IDS[-1][:4]}, 3 queues",
        "queue          queued  due  oldest due  running  failed",
        "a queue             2    1       x.x s        0       0",
        "busy                0    0           -        1       1",
        "idle (paused)       0    0           -        0       0",
    ]


def test_status_stops_counting_at_ten_thousand(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(
        """
        insert into pgsched.scheduled_tasks (
               queue, task_type, payload, priority, run_at, max_attempts, created_at)
        select 'default', 'type', '{}', 5, now(), 1, now() from generate_series(1, 10000)
        """
    )
    [_, _, line] = pgsched("status", "--dsn", dsn).stdout.splitlines()
    assert re.split("  +", line)[1:3] == ["10000+", "10000+"]
    conn.execute("delete from pgsched.scheduled_tasks where id = 1")
    [_, _, line] = pgsched("status", "--dsn", dsn).stdout.splitlines()
    assert re.split("  +", line)[1:3] == ["9999", "9999"]


def test_the_database_is_named_by_option_environment_or_libpq(dsn: str) -> None:
    expected = pgsched("status", "--dsn", dsn).stdout
    assert expected.startswith("schema ")
    assert pgsched("status", "--dsn", keywords(dsn)).stdout == expected
    assert pgsched("status", PGSCHED_DSN=dsn).stdout == expected
    assert pgsched("status", PGSCHED_DSN=keywords(dsn)).stdout == expected
    # The option wins.
    assert pgsched("status", "--dsn", dsn, PGSCHED_DSN="nonsense").stdout == expected
    libpq = {
        {"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"): str(value)
        for name, value in conninfo_to_dict(dsn).items()
    }
    assert pgsched("status", **libpq).stdout == expected


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(option: str) -> None:
    result = pgsched(option)
    assert result.exit_code == 0
    assert {"demo", "enqueue", "migrate", "status", "worker"} <= set(result.stdout.split())


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_and_option_has_a_text(command: str) -> None:
    result = pgsched(command, "--help")
    assert result.exit_code == 0
    assert main.commands[command].help
    undescribed = [
        option.name
        for option in main.commands[command].params
        if option.param_type_name == "option"
        if not getattr(option, "help", None) and not getattr(option, "show_default", None)
    ]
    assert undescribed == []


def test_python_m_pgsched_is_the_same_program() -> None:
    command = [sys.executable, "-m", "pgsched", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.endswith(f" {version('pgsched')}\n")


# What goes wrong with a DSN; test_cli_situations.py has what goes wrong with a database.


MALFORMED = [
    "nonsense",
    "host=/nowhere password=s3cret nonsense",
    "host=/nowhere password='s3cret",
    "host=/nowhere password=not s3cret",
    "postgresql://someone:s3cret@[::1/app",
    "postgresql://someone:s3cret%zz@localhost/app",
    "postgresql://someone:s3cret@localhost/app?no_such_parameter=1",
    "postgresql://someone:s3cret@localhost:port/app",
    "postgres:/someone:s3cret@localhost/app",
    "host=/nowhere password=s3cret connect_timeout=soon",
    "password=s3cret\udc80",
]


@commands
@pytest.mark.parametrize("dsn", MALFORMED, ids=ascii)
def test_a_malformed_dsn_is_one_line_without_the_password(command: list[str], dsn: str) -> None:
    if command == ["doctor"]:  # it may have a report, too
        result = pgsched(*command, "--dsn", dsn)
        assert (result.exit_code, "s3cret" in result.output) == (1, False)
    else:
        assert "s3cret" not in refused(*command, "--dsn", dsn)


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("sslmod=s3cret", "no option sslmod, perhaps sslmode"),
        ("postgresql://u:s3cret@/app?conect_timeout=9", "no option conect_timeout, perhaps"),
        # Nothing near to an option is shown: it may be a piece of a password.
        ("password=not s3cret=it", "neither a PostgreSQL URL nor key=value pairs"),
        ("sslmode=require host", "neither a PostgreSQL URL nor key=value pairs"),
    ],
)
def test_a_misspelt_option_of_a_dsn_is_named(dsn: str, text: str) -> None:
    message = refused("status", "--dsn", dsn)
    assert message.startswith(f"dsn: {text}")
    assert "s3cret" not in message


@commands
def test_an_unreachable_server_is_told_without_the_password(
    command: list[str], tmp_path: Path
) -> None:
    url = f"postgresql://someone:s3cret@/app?host={tmp_path}"
    for dsn in (url, keywords(url)):
        for result in (pgsched(*command, "--dsn", dsn), pgsched(*command, PGSCHED_DSN=dsn)):
            assert result.exit_code == (3 if command == ["migrate"] else 1)
            assert "s3cret" not in result.output


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda command: command[0])
@pytest.mark.parametrize("dsn", [MALFORMED[1], MALFORMED[5], MALFORMED[9]])
def test_a_traceback_comes_when_asked_for_and_without_the_password(
    command: list[str], dsn: str
) -> None:
    debugged = process("--debug", *command, "--dsn", dsn)
    _, traceback = debugged.communicate()
    assert debugged.returncode == 1
    assert traceback.startswith("Traceback ")
    assert "s3cret" not in traceback


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["type", "{"], "PAYLOAD is not JSON"),
        (["type", "NaN"], "not representable as JSON"),
        (["type", 50_000 * "["], "JSON"),
        (["type", '"\\u0000"'], "Unicode"),
        (["type", '"\\ud800"'], "json"),
        (["type", 5_000 * "9"], "PAYLOAD"),
        (["", "{}"], "p_task_type"),
        (["\udcff"], ""),
        (["type", "--priority", "10"], "p_priority"),
        (["type", "--priority", "99999999999"], "out of range"),
        (["type", "--max-attempts", "0"], "p_max_attempts"),
        (["type", "--queue", 64 * "q"], "p_queue"),
        (["type", "--delay", "-0.1"], "is not in the range x>=0"),
        (["type", "--delay", "nan"], ""),
        (["type", "--delay", "1e300"], ""),
        (["type", "--delay", "1e12"], "range"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_task_that_cannot_be_is_one_line(untouched: str, arguments: list[str], text: str) -> None:
    assert re.search(text, refused("enqueue", "--dsn", untouched, *arguments))
    with psycopg.connect(untouched) as conn:
        assert conn.execute("select id from pgsched.tasks").fetchall() == []


def test_an_interval_is_not_negative() -> None:
    assert refused("top", "--interval", "-1").endswith("-1.0 is not in the range x>=0.")


# pgsched worker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what is imported from it is forgotten, and logging left as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = set(sys.modules)
    level = logging.getLogger("pgsched").level
    yield tmp_path
    logging.getLogger("pgsched").setLevel(level)
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("app", "text"),
    [
        ("no_such_module", "no module 'no_such_module'"),
        ("no_such_package.module:worker", "no module 'no_such_package.module'"),
        ("app", "app:worker is not a pgsched.Worker"),
        ("app:missing", "app:missing is not a pgsched.Worker"),
        ("app:number", "app:number is not a pgsched.Worker"),
        ("", ""),
        (":worker", ""),
        (".app", ""),
        ("./app.py", ""),
    ],
)
def test_an_app_without_a_worker_is_one_line(folder: Path, app: str, text: str) -> None:
    (folder / "app.py").write_text("number = 1\n")
    assert text in refused("worker", app)


def test_a_module_that_the_app_lacks_is_not_taken_for_the_app(folder: Path) -> None:
    (folder / "billing_app.py").write_text("import billing\n")
    with pytest.raises(ModuleNotFoundError, match="'billing'"):
        pgsched("worker", "billing_app")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--concurrency", "0"], "concurrency"),
        (["--lease", "0.5"], "lease"),
        (["--poll-interval", "0"], "poll_interval"),
        (["--grace", "-1"], "grace"),
        (["--queue", "a", "--queue", "a"], "queues"),
        (["--metrics-port", "65536"], "metrics_port"),
        (["--dsn", "postgresql://someone:s3cret@[::1/app"], "dsn"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_option_out_of_range_is_one_line(folder: Path, options: list[str], text: str) -> None:
    (folder / "app.py").write_text("from pgsched import Worker\nworker = Worker()\n")
    error = refused("worker", "app", *options)
    assert text in error
    assert "s3cret" not in error


def test_a_worker_without_the_schema_is_one_line(folder: Path, server: Server) -> None:
    (folder / "app.py").write_text("from pgsched import Worker\nworker = Worker()\n")
    assert "run pgsched migrate" in refused("worker", "app", "--dsn", server.dsn())
    assert "run pgsched migrate" in refused("worker", "app", PGSCHED_DSN=server.dsn())


APP = """
from pgsched import Fail, Worker

mine = Worker("postgresql://someone:s3cret@/nowhere", poll_interval=0.05)

@mine.task("hello")
def hello(task):
    if task.payload:
        raise Fail(task.payload)
    return "world"
"""


def test_the_options_replace_what_the_worker_was_made_with(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    url = dsn.replace("postgres@", "postgres:s3cret@")
    options = ["--queue", "one", "--queue", "two", "--concurrency", "7", "--verbose", "--dsn", url]
    # The payload and the error that holds it are secrets too.
    ids = [enqueue(conn, "hello", "s3cret", queue="one"), enqueue(conn, "hello", queue="two")]
    with WorkerProcess(tmp_path, APP, *options, app="app:mine") as worker:
        wait_for(conn, ids[0], "failed")
        assert wait_for(conn, ids[1], "completed").result == "world"
        registered = conn.execute("select queues, slots from pgsched.workers").fetchall()
        assert registered == [(["one", "two"], 7)]
        conn.execute(
            """
            select pg_terminate_backend(pid)
              from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()
            """
        )
        worker.wait_for_log("database: error")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(PATIENCE) == 0
        assert f"ended: task={ids[0]} task_type=hello attempt=1 outcome=failed" in worker.log
        assert "s3cret" not in worker.log


def test_a_worker_that_finds_no_server_waits_without_showing_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSCHED_DSN", f"host={tmp_path} user=someone password=s3cret")
    with WorkerProcess(tmp_path, APP, app="app:mine") as worker:
        worker.wait_for_log("database: error")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(PATIENCE) == 0
        assert str(tmp_path) in worker.log
        assert "s3cret" not in worker.log
