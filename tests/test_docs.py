"""The documents against the code, both ways; what they show is run."""

import ast
import inspect
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import click
import psycopg
import pytest
import sql_examples
from prometheus_client.core import GaugeMetricFamily
from psycopg.conninfo import conninfo_to_dict
from workers import PATIENCE, wait_until

import pgsched
from pgsched import calls, doctor, metrics
from pgsched.cli import main
from pgsched.embedded import Server
from pgsched.errors import from_database
from pgsched.migrate import MIGRATION_LOCK

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
COMMANDS = ROOT / "docs" / "cli.md"
METRICS = ROOT / "docs" / "metrics.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"
DOCUMENTS = [
    path for pattern in ("*.md", "docs/*.md", "bench/*.md") for path in sorted(ROOT.glob(pattern))
]

every_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(path), flags=re.MULTILINE | re.DOTALL)


def fenced(path: Path, language: str) -> list[str]:
    """What stands in the fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL)


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)


def section(path: Path, heading: str) -> str:
    """What stands under a heading, its lower headings included."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", prose(path), re.MULTILINE)
    assert start, f"{path.name} has no section {heading}"
    text = prose(path)[start.end() :]
    return re.split(rf"^#{{1,{len(start[1])}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str, header: str) -> list[dict[str, str]]:
    """The rows of all tables whose first column has this header, each with its cells by header."""
    rows = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        names, _, *others = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()
        )
        if names[0] == header:
            rows += [dict(zip(names, cells, strict=True)) for cells in others]
    assert rows, f"no table with a first column {header}"
    return rows


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def codes(rows: list[dict[str, str]], header: str) -> list[str]:
    """The one word in backticks of this column, in each row."""
    return [word for row in rows for [word] in [code(row[header])]]


def test_every_function_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    """PostgreSQL itself reads the documented signatures."""
    rows = table(section(REFERENCE, "Functions"), "Function")
    conn.execute("create schema documented")
    for row in rows:
        [signature], results = code(row["Function"]), code(row["Returns"])
        returns = "".join(f"returns {result}" for result in results)
        routine = f"{'function' if returns else 'procedure'} documented.{signature} {returns}"
        conn.execute(f"create {routine} language plpgsql as 'begin end'".encode())
    query = """
        select proname, prokind, pg_get_function_arguments(oid), pg_get_function_result(oid)
          from pg_proc
         where pronamespace = %s::regnamespace and proname !~ '^_'
         order by proname
        """
    documented, there = (conn.execute(query, [of]).fetchall() for of in ("documented", "pgsched"))
    assert documented == there


def test_every_function_raises_what_its_comment_says(conn: psycopg.Connection) -> None:
    documented = {
        signature.partition("(")[0]: set(re.findall(r"TS\d+", row["Raises"]))
        for row in table(section(REFERENCE, "Functions"), "Function")
        for signature in code(row["Function"])
    }
    comments = conn.execute(
        "select proname, obj_description(oid, 'pg_proc') from pg_proc"
        " where pronamespace = 'pgsched'::regnamespace and proname !~ '^_'"
    )
    assert documented == {name: set(re.findall(r"TS\d+", text)) for name, text in comments}


def test_it_is_said_of_every_function_whom_it_waits_for() -> None:
    functions = codes(table(section(REFERENCE, "Functions"), "Function"), "Function")
    rows = table(section(REFERENCE, "Waiting"), "Call")
    said = [function for row in rows for function in code(row["Call"])]
    assert sorted(said) == sorted(signature.partition("(")[0] for signature in functions)


def test_every_error_code_is_documented_and_the_reverse() -> None:
    rows = table(section(REFERENCE, "Error codes"), "SQLSTATE")
    sources = "".join(read(path) for path in ROOT.glob("sql/schema/**/*.sql"))
    caught = set(re.findall(r"when sqlstate '(TS\w{3})'", sources))
    raised = set(re.findall(r"errcode = '(TS\w{3})'", sources)) - caught
    assert sorted(codes(rows, "SQLSTATE")) == sorted(raised)


def test_every_error_code_becomes_the_documented_exception() -> None:
    for row in table(section(REFERENCE, "Error codes"), "SQLSTATE"):
        [sqlstate], [name] = code(row["SQLSTATE"]), code(row["Python"])
        error = type("Error", (psycopg.Error,), {"sqlstate": sqlstate})()
        assert type(from_database(error)).__name__ == name


def test_every_relation_and_column_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    documented = {
        relation: code(row["Columns"])
        for row in table(section(REFERENCE, "Tables and columns"), "Relation")
        for relation in code(row["Relation"])
    }
    columns = conn.execute(
        """
        select c.relname, array_agg(a.attname::text order by a.attnum)
          from pg_class as c
          join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
         where c.relnamespace = 'pgsched'::regnamespace and c.relkind in ('r', 'v')
         group by c.relname
        """
    )
    assert documented == dict(columns.fetchall())


def test_every_setting_of_a_queue_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    rows = table(section(REFERENCE, "Tables and columns"), "Setting")
    columns = conn.execute(
        "select attname from pg_attribute"
        " where attrelid = 'pgsched.queues'::regclass and attnum > 0 and not attisdropped"
        " order by attnum"
    )
    assert ["name", *codes(rows, "Setting")] == [name for (name,) in columns]


def test_every_status_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    checks = conn.execute(
        "select pg_get_constraintdef(oid) from pg_constraint"
        " where conname in ('scheduled_tasks_status_check', 'finished_tasks_status_check')"
    )
    statuses = {status for (check,) in checks for status in re.findall(r"'(\w+)'", check)}
    assert set(codes(table(section(REFERENCE, "States"), "Status"), "Status")) == statuses
    [diagram] = fenced(REFERENCE, "mermaid")
    arrows = re.findall(r"^ *(\S+) --> (\S+?)(?:: (.*))?$", diagram, re.MULTILINE)
    assert {state for start, end, _ in arrows for state in (start, end)} == {"[*]", *statuses}
    functions = {function for *_, calls in arrows for function in calls.split(", ") if calls}
    there = conn.execute(
        "select proname from pg_proc where pronamespace = 'pgsched'::regnamespace"
    ).fetchall()
    assert functions <= {name for (name,) in there}


def test_every_advisory_lock_is_documented_and_the_reverse() -> None:
    rows = table(section(REFERENCE, "Advisory locks"), "Class")
    documented = {(row["Class"], row["Key"].strip("`")) for row in rows}
    sources = "".join(read(path) for path in ROOT.glob("sql/schema/**/*.sql"))
    argument = r"(\d+), \((?:p_|p_worker_|\w+\.)(id % \d+\)::integer)\)"
    locks = re.findall(rf"lock(?:_shared)?\({argument}", sources)
    of_rows = {(number, f"({key}") for number, key in locks}
    [(steps, number)] = re.findall(
        r"for v_lock, step in values (.*) loop\n.*?lock\((\d+), v_lock\)", sources, re.DOTALL
    )
    of_rights = set(re.findall(r"lock\((\d+), (\d+)\)", sources))
    of_steps = {(number, key, step) for key, step in re.findall(r"\((\d+), '(\w+)'\)", steps)}
    assert len(locks) + len(of_rights) + 1 == len(re.findall(r"advisory\w*lock\w*\(", sources))
    assert of_steps == {
        (row["Class"], row["Key"], step)
        for row in rows
        for caller, *rest in [code(row["Taken by"])]
        if caller == "maintain"
        for step in rest
    }
    of_duties = {(number, key) for number, key, _ in of_steps}
    assert of_rights - of_duties == {tuple(map(str, MIGRATION_LOCK))}
    assert documented == {*of_rows, *of_duties, *of_rights}


def test_every_public_name_is_documented_and_the_reverse() -> None:
    rows = table(section(REFERENCE, "Python"), "Name")
    assert sorted(codes(rows, "Name")) == sorted(pgsched.__all__)


@pytest.mark.parametrize(
    ("heading", "header", "function"),
    [
        ("Worker", "Argument", pgsched.Worker),
        ("enqueue", "Argument", pgsched.enqueue),
    ],
)
def test_every_argument_is_documented_and_the_reverse(
    heading: str, header: str, function: Callable[..., Any]
) -> None:
    documented = {
        name: ast.literal_eval(default) if default else inspect.Parameter.empty
        for row in table(section(REFERENCE, heading), header)
        for [name], [default] in [(code(row[header]), code(row["Default"]) or [""])]
    }
    parameters = inspect.signature(function).parameters.values()
    assert documented == {parameter.name: parameter.default for parameter in parameters}


def test_every_method_of_a_worker_is_documented_and_the_reverse() -> None:
    rows = table(section(REFERENCE, "Worker"), "Method")
    there = [
        f"{name}{call(function)}"
        for name, function in vars(pgsched.Worker).items()
        if inspect.isfunction(function) and not name.startswith("_")
    ]
    assert sorted(codes(rows, "Method")) == sorted(there)


def call(method: Callable[..., Any]) -> str:
    """How the method is called: its parameters but the first, without their types."""
    signature = inspect.signature(method)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(parameters[1:]))


def test_every_field_of_a_task_is_documented_and_the_reverse() -> None:
    rows = table(section(REFERENCE, "Task"), "Field")
    assert codes(rows, "Field") == [field.name.lstrip("_") for field in fields(pgsched.Task)]


def options(command: click.Command, context: click.Context) -> dict[str, list[str]]:
    """The options as the documents write them, each with its default."""
    return {
        " ".join([*each.opts, *([] if each.is_flag else [each.make_metavar(context)])]): (
            [str(each.envvar or each.default)] if each.envvar or shows_default(each) else []
        )
        for each in command.params
        if isinstance(each, click.Option)
    }


def documented_options(heading: str) -> dict[str, list[str]]:
    return {
        option: code(row["Default"])
        for row in table(section(COMMANDS, heading), "Option")
        for [option] in [code(row["Option"])]
    }


def test_every_command_and_option_is_documented_and_the_reverse() -> None:
    commands = {}
    for name, command in main.commands.items():
        context = click.Context(command, info_name=name)
        usage = " ".join(["pgsched", name, *command.collect_usage_pieces(context)[1:]])
        commands[usage] = options(command, context)
    documented = {
        usage: documented_options(f"`{usage}`")
        for heading in headings(COMMANDS)
        for usage in re.findall(r"^`(pgsched .*)`$", heading)
    }
    assert documented == commands


def test_every_option_of_the_program_itself_is_documented_and_the_reverse() -> None:
    context = click.Context(main, info_name="pgsched")
    assert documented_options("What holds for all commands") == options(main, context)


def test_the_rights_that_each_command_needs_are_documented() -> None:
    rows = table(section(COMMANDS, "Rights"), "Command")
    described = [command for row in rows for command in code(row["Command"])]
    assert sorted(described) == sorted({*main.commands} - {"demo", "migrate", "sql", "uninstall"})


def test_every_check_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    rows = conn.execute("select distinct check_name from pgsched.diagnose()")
    documented = codes(table(section(REFERENCE, "Findings"), "Check"), "Check")
    assert sorted(documented) == sorted(name for (name,) in rows)
    of_client = set(re.findall(r'_found\(\s*"(\w+)"', inspect.getsource(doctor)))
    rows_of_client = table(section(COMMANDS, "`pgsched doctor`"), "Check")[:-1]
    assert sorted(codes(rows_of_client, "Check")) == sorted(of_client)


def shows_default(option: click.Option) -> bool:
    """Whether there is a default other than nothing at all; click has its own word for that."""
    return isinstance(option.default, str | int) and bool(option.default)


def of_a_queue(conn: psycopg.Connection) -> list[GaugeMetricFamily]:
    """The metrics of a database with one queue."""
    conn.execute("select pgsched.configure_queue('queue')")
    return metrics._families(calls.database_stats(conn))


def test_every_metric_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    documented = {
        (row["Metric"].strip("`"), row["Type"], *code(row["Labels"]))
        for row in table(prose(METRICS), "Metric")
    }
    own = cast("Any", metrics.Metrics().registry)._collector_to_names
    of_database = of_a_queue(conn)
    there = set()
    for metric, labels in [
        *((metric, each._labelnames) for each in own for metric in each.describe()),
        *((metric, metric.samples[0].labels) for metric in of_database),
    ]:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        there.add((name, metric.type, *labels))
    assert documented == there


def test_every_value_of_a_label_is_documented_and_the_reverse(conn: psycopg.Connection) -> None:
    rows = table(section(METRICS, "Labels"), "Label")
    documented = {(*code(row["Label"]),): set(code(row["Values"])) for row in rows}
    [tasks] = (each for each in of_a_queue(conn) if each.name == "pgsched_queue_tasks")
    assert documented == {
        ("queue",): set(),
        ("task_type",): set(),
        ("outcome",): set(metrics.OUTCOMES),
        ("status", "pgsched_queue_tasks"): {sample.labels["status"] for sample in tasks.samples},
        ("status", "pgsched_reaped_total"): set(metrics.REAPED),
    }


def test_queries_are_about_metrics_that_exist() -> None:
    names = {
        f"{name}{suffix}"
        for row in table(prose(METRICS), "Metric")
        for [name] in [code(row["Metric"])]
        for suffix in (("_bucket", "_count", "_sum") if row["Type"] == "histogram" else ("",))
    }
    used = {
        name for query in fenced(METRICS, "promql") for name in re.findall(r"pgsched_\w+", query)
    }
    assert len(used) > 5
    assert used <= names


def links(path: Path) -> list[tuple[str, str]]:
    """Text and target of each link that is not to another site."""
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(path))
    return [(text, target) for text, target in found if not target.startswith("https://")]


def anchors(path: Path) -> Iterator[str]:
    """The anchors of the document's headings, as GitHub makes them."""
    for heading in headings(path):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for _, target in links(path):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in set(anchors(file)), target


def test_every_promise_names_tests_that_exist() -> None:
    promises = [heading for heading in headings(GUARANTEES) if re.match(r"P\d", heading)]
    assert [promise[:2] for promise in promises] == ["P1", "P2", "P3", "P4", "P5"]
    shown = links(GUARANTEES)
    for promise in promises:
        tests = [text for text, _ in shown if f"[{text}](" in section(GUARANTEES, promise)]
        assert any(text.startswith("`test_") for text in tests), promise
    for text, target in shown:
        if target.endswith(".py"):
            assert f"\ndef {text.strip('`')}(" in read(GUARANTEES.parent / target), text
        elif target.endswith(".sql"):
            assert f"'{text}'" in read(GUARANTEES.parent / target), text
    named = re.findall(r"\btest_\w+", re.sub(r"\]\(.*?\)", "", prose(GUARANTEES)))
    assert sorted(named) == sorted(text.strip("`") for text, to in shown if to.endswith(".py"))


@every_document
def test_sql_prints_what_the_document_shows(path: Path, server: Server, dsn: str) -> None:
    text = read(path)
    examples = sql_examples.examples(text)
    assert len(examples) == text.count("```sql"), "a block is not where blocks are looked for"
    if any(map(is_elsewhere, examples)):
        wait_until(lambda: counts_presence(server))
    outputs: list[str] = []
    with closing(psycopg.connect(dsn, autocommit=True)) as other:
        for elsewhere, group in groupby(examples, is_elsewhere):
            statements = [example.sql for example in group]
            if elsewhere:
                for statement in statements:
                    other.execute(statement.encode())
                outputs += [""] * len(statements)
            else:
                outputs += sql_examples.run(server, dsn, statements)
    for example, output in zip(examples, outputs, strict=True):
        shown = any_process(sql_examples.normalised(example.output))
        assert any_process(sql_examples.normalised(output)) == shown, f"{path.name}:{example.line}"


def is_elsewhere(example: sql_examples.Example) -> bool:
    """Whether it is shown as another session, which stays as it is until the end."""
    return example.sql.startswith("-- Over a connection of its own")


def counts_presence(server: Server) -> bool:
    """Whether it has run for so long that a presence which is missed counts."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        [(counts,)] = conn.execute(
            "select clock_timestamp() >= pg_postmaster_start_time() + interval '5 seconds'"
        )
    assert isinstance(counts, bool)
    return counts


def any_process(output: str) -> str:
    """The output with one number for the server process that sent a notification."""
    return re.sub(r"(?<=received from server process with PID )\d+", "0", output)


PROGRAMS = [
    pytest.param(block, id=str(path.relative_to(ROOT)))
    for path in DOCUMENTS
    for block in fenced(path, "python")
]


@pytest.mark.parametrize("block", PROGRAMS)
def test_python_does_its_tasks_and_ends(
    block: str, server: Server, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as a program on a database `app`; SIGTERM when it has worked off what it enqueued."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        dsn = server.create_database("app", template=template)
        let_libpq_find(server, monkeypatch)
        program = tmp_path / "app.py"
        program.write_text(block)
        process = subprocess.Popen([sys.executable, "-W", "error", program])
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                wait_until(lambda: process.poll() is not None or worked_off(conn))
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
                statuses = conn.execute("select distinct status from pgsched.tasks").fetchall()
                assert statuses == [("completed",)]
        finally:
            process.kill()
            process.wait()
            admin.execute("drop database app with (force)")


def let_libpq_find(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in conninfo_to_dict(server.dsn()).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))


def worked_off(conn: psycopg.Connection) -> bool:
    """Whether there were tasks and none is live."""
    [(done,)] = conn.execute(
        "select exists (select from pgsched.finished_tasks)"
        " and not exists (select from pgsched.scheduled_tasks)"
    )
    assert isinstance(done, bool)
    return done


TESTS = [
    pytest.param(path, block, id=str(path.relative_to(ROOT)))
    for path in DOCUMENTS
    for block in fenced(path, r"python test_app\.py")
]


@pytest.mark.parametrize(("path", "block"), TESTS)
def test_the_tests_that_are_shown_pass_and_leave_nothing(
    path: Path,
    block: str,
    server: Server,
    template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are about the program that the document shows, and use a database `app_test`."""
    dsn = server.create_database("app_test", template=template)
    let_libpq_find(server, monkeypatch)
    [program] = fenced(path, "python")
    (tmp_path / "app.py").write_text(program)
    (tmp_path / "test_app.py").write_text(block)
    pytest_here = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(pytest_here, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select id from pgsched.tasks").fetchall() == []
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop database app_test with (force)")


@every_document
def test_commands_are_ones_that_exist(path: Path) -> None:
    for block in fenced(path, "sh"):
        for line in block.splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "pgsched":
                with main.make_context("pgsched", arguments.copy()) as context:
                    name, command, rest = main.resolve_command(context, arguments)
                    assert command
                    command.make_context(name, rest, parent=context)
