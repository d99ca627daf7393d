"""The command line: thin wrappers around what the package and the SQL functions do."""

import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import psycopg

from pgsched import calls, top
from pgsched.doctor import examine
from pgsched.errors import PgschedError, TaskNotFound, WrongState
from pgsched.migrate import EXIT_CODES, MigrationError, migrate
from pgsched.schema import script, uninstall
from pgsched.text import ascii_json, count, explained, plain
from pgsched.worker import Worker

TASK_ID = click.IntRange(-(2**63), 2**63 - 1)

SHOWN = 1000
"""Characters of a value that `show` prints."""

WIDE = 10_000
"""Columns and rows where nobody counts them."""


class _Group(click.Group):
    """Every expected error is one line on stderr and exit code 1, of `migrate` its own one."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PgschedError, MigrationError, psycopg.Error, UnicodeError, OSError) as error:
            # Who has read enough of the output wants no word of it.
            if ctx.params["debug"] or isinstance(error, BrokenPipeError):
                raise
            click.echo(f"Error: {explained(error)}", err=True)
            known = EXIT_CODES if ctx.invoked_subcommand == "migrate" else {}
            codes = [code for kind, code in known.items() if isinstance(error, kind)]
            raise SystemExit(codes[0] if codes else 1) from error


_dsn = partial(click.option, "--dsn", envvar="PGSCHED_DSN")
dsn_option = _dsn(
    default="",
    help="Database, as a URL or key=value pairs. Default: PGSCHED_DSN, else libpq's environment.",
)


json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, as_json: setattr(context, "obj", as_json),
    help="Print one JSON document instead of text.",
)


_seconds = partial(click.option, type=click.FloatRange(min=0), metavar="SECONDS")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pgsched", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show where in the program an error came from.")
def main(debug: bool) -> None:
    """A distributed task scheduler inside PostgreSQL."""
    with suppress(AttributeError):  # there may be no stdout
        # A name that the terminal's character set lacks is no reason to fail.
        cast("Any", sys.stdout).reconfigure(errors="backslashreplace")


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command about a database, whose output may be JSON."""
    return lambda function: main.command(name)(dsn_option(json_option(function)))


def _print(document: Any, lines: Iterable[str], *, failed: bool = False) -> None:
    """Print one JSON document, or lines; exit code 1 when something was refused or found."""
    if click.get_current_context().obj:
        click.echo(document if isinstance(document, str) else json.dumps(document))
    else:
        for line in lines:
            click.echo(plain(line))
    if failed:
        raise SystemExit(1)


@_command("migrate")
@click.option("--to", metavar="N", help="The last migration to apply: its number or id.")
@click.option("--dry-run", is_flag=True, help="Only say what would be applied.")
@_seconds("--lock-timeout", default=10, show_default=True, help="For locks that others hold.")
def migrate_command(dsn: str, to: str | None, dry_run: bool, lock_timeout: float) -> None:
    """Install schema pgsched in a database, or bring it up to date."""
    ids = migrate(dsn, to=to, dry_run=dry_run, lock_timeout=lock_timeout)
    lines = [f"{'would apply' if dry_run else 'applied'} {migration_id}" for migration_id in ids]
    nothing = f"nothing to do: the schema is {'up to date' if to is None else f'at {to} or later'}"
    _print({"pending" if dry_run else "applied": ids}, lines or [nothing])


@main.command("sql")
@click.option("--from", "after", metavar="N", help="Only the migrations after this number or id.")
def sql_command(after: str | None) -> None:
    """Print what migrate would install, as one SQL script for psql and other tools."""
    # In UTF-8, whatever the terminal's character set; by lines, since output without a buffer says
    # nothing when only the beginning of a long write got through.
    for line in script(after).splitlines(keepends=True):
        click.echo(line.encode(), nl=False)


@_command("uninstall")
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall_command(dsn: str, yes: bool) -> None:
    """Remove schema pgsched with all its tasks, and nothing else. Asks first."""
    removed = uninstall(dsn, None if yes else _ask)
    done = removed and f"removed schema pgsched from database {removed['database']}"
    _print({"removed": removed}, [done or "nothing to do: there is no schema pgsched"])


def _ask(there: dict[str, Any]) -> None:
    """Return if somebody at a terminal types the name of the database."""
    if not (sys.stdin and sys.stdin.isatty()):
        raise click.ClickException("nothing was removed: there is no terminal to ask at, say --yes")
    database = plain(there["database"])
    click.echo(
        f"Database {database} at {plain(there['server'])}, schema {there['schema'] or 'empty'}:"
        f" {count(there['live'])} live and {count(there['finished'])} finished tasks,"
        f" {there['workers']} workers seen within 2 minutes. All of it will be removed.",
        err=True,
    )
    if click.prompt("To go on, type the name of the database", err=True) != database:
        raise click.ClickException("nothing was removed: that is not its name")


@main.command("worker")
@click.argument("app")
@_dsn(help="Database, instead of the worker's own. Default: PGSCHED_DSN, else what APP says.")
@click.option("--queue", "queues", multiple=True, help="Queue to claim from; may be repeated.")
@click.option("--concurrency", type=int, help="Tasks that run at once.")
@click.option("--lease", type=float, metavar="SECONDS", help="How long a claim is held.")
@click.option("--poll-interval", type=float, metavar="SECONDS", help="Rest of an idle queue.")
@click.option("--grace", type=float, metavar="SECONDS", help="Time to finish after a stop.")
@click.option("--listen-dsn", help="The server itself, when --dsn leads through a pooler.")
@click.option("--connections", type=int, help="For handlers that take one.")
@click.option("--drain", is_flag=True, help="End when no task is due and none runs.")
@click.option("--metrics-port", type=int, help="Serve Prometheus metrics on this port.")
@click.option("--metrics-host", help="Address for it. Default: all of this machine.")
@click.option("--db-metrics", is_flag=True, default=None, help="With figures of all queues.")
@click.option("--verbose", is_flag=True, help="Log every task.")
def worker_command(app: str, drain: bool, verbose: bool, **options: Any) -> None:
    """Run a worker until SIGTERM or SIGINT; a second signal ends it at once.

    APP says where the pgsched.Worker is, as module:name. Options replace what it was made with.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if verbose:
        logging.getLogger("pgsched").setLevel(logging.DEBUG)
    worker = _load(app)
    for name, value in options.items():
        if value not in (None, ()):
            setattr(worker, name, value)
    running = worker.run(drain=drain)
    # A further signal must neither spoil the exit code nor wait for threads that handlers made.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    if running:
        # What still runs would keep the interpreter from ending, as asyncio.to_thread's threads do.
        logging.shutdown()
        os._exit(0)


def _load(app: str) -> Worker:
    module_name, _, name = app.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise click.UsageError(f"APP is not of the form module:name: {app}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            message = f"no module {module_name!r} in {Path.cwd()} or sys.path"
            raise click.UsageError(message) from error
        raise
    worker = getattr(module, name or "worker", None)
    if not isinstance(worker, Worker):
        raise click.UsageError(f"{module_name}:{name or 'worker'} is not a pgsched.Worker")
    return worker


@_command("enqueue")
@click.argument("task_type")
@click.argument("payload", default="{}")
@click.option("--queue", default="default", show_default=True)
@_seconds("--delay", help="Not before this long from now.")
@click.option("--priority", type=int, default=5, show_default=True, help="0 (first) to 9 (last).")
@click.option("--max-attempts", type=int, help="Default: the queue's, else 20.")
@click.option("--unique-key", help="Add nothing while a live task of the queue has this key.")
def enqueue_command(
    dsn: str, task_type: str, payload: str, delay: float | None, **options: Any
) -> None:
    """Add a task and print its id. PAYLOAD is JSON."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"PAYLOAD is not JSON: {error}") from error
    try:
        wait = None if delay is None else timedelta(seconds=delay)
    except (ValueError, OverflowError) as error:
        raise click.UsageError(f"--delay is out of range: {error}") from error
    with calls.connect(dsn) as connection:
        task_id = calls.enqueue(connection, task_type, value, delay=wait, **options)
    _print({"id": task_id}, [str(task_id)])


@_command("status")
def status_command(dsn: str) -> None:
    """Show the queues: what waits, runs and failed."""
    with calls.connect(dsn) as connection:
        version = calls.schema_version(connection)
        _, queues = calls.database_stats(connection)
    head = f"schema {version}, {len(queues)} queue{'' if len(queues) == 1 else 's'}"
    none = f"{head}: none has tasks that are live or failed for good, or settings of its own"
    lines = [head, *top.queue_table(queues, WIDE)] if queues else [none]
    _print({"schema": version, "queues": queues}, lines)


@_command("top")
@_seconds("--interval", default=2, show_default=True)
def top_command(dsn: str, interval: float) -> None:
    """Watch queues and workers, until q is pressed.

    Looks once with --json, and where there is no terminal.
    """
    with calls.connect(dsn) as connection:
        view = top.look(connection)
    as_json = click.get_current_context().obj
    if as_json or not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        _print(view, top.lines(view, WIDE, WIDE))
    else:
        top.watch(dsn, view, min(max(0.1, interval), 3600))


@_command("show")
@click.argument("task_id", metavar="ID", type=TASK_ID)
def show_command(dsn: str, task_id: int) -> None:
    """Show what is known of a task."""
    with calls.connect(dsn) as connection:
        task, payload, result = calls.get_task(connection, task_id)
    lines = []
    for name, value in {**task, "payload": payload, "result": result}.items():
        if value is not None:
            text, size = str(value)[:SHOWN], len(str(value))
            cut = f"… ({size} characters: --json shows them all)" if size > SHOWN else ""
            lines.append(f"{name:<20}{text}{cut}")
    # As the server wrote them: Python does not read every number that jsonb holds.
    document = f'{json.dumps(task)[:-1]}, "payload": {payload}, "result": {result or "null"}}}'
    _print(ascii_json(document), lines)


_SAID = {
    "queued": "Task {} is queued again, and due now.",
    "cancelled": "Task {} is cancelled.",
    "requested": "Task {} is running: its worker is told to stop. If it completes, it counts.",
    "finished": "Task {} had ended already.",
}


def _each(dsn: str, task_ids: Iterable[int], call: Callable[[calls.Connection, int], str]) -> None:
    """One call for each task; what is refused is said, and the others are done."""
    outcomes: list[dict[str, Any]] = []
    with calls.connect(dsn) as connection:
        for task_id in task_ids:
            try:
                with calls.translated():
                    outcomes.append({"id": task_id, "outcome": call(connection, task_id)})
            except (TaskNotFound, WrongState) as error:
                outcomes.append({"id": task_id, "outcome": None, "error": str(error)})
                click.echo(f"Error: {explained(error)}", err=True)
    done = [each for each in outcomes if each["outcome"]]
    lines = [_SAID[each["outcome"]].format(each["id"]) for each in done]
    _print(outcomes, lines, failed=done != outcomes)


task_ids = click.argument("task_ids", metavar="ID...", type=TASK_ID, nargs=-1, required=True)


@_command("retry")
@task_ids
def retry_command(dsn: str, task_ids: tuple[int, ...]) -> None:
    """Queue failed or cancelled tasks again, due now, with all their attempts."""
    _each(dsn, task_ids, calls.retry_task)


@_command("cancel")
@task_ids
def cancel_command(dsn: str, task_ids: tuple[int, ...]) -> None:
    """Cancel tasks: queued ones at once, running ones by asking their workers to stop."""
    _each(dsn, task_ids, calls.cancel_task)


@_command("pause")
@click.argument("queue")
def pause_command(dsn: str, queue: str) -> None:
    """Hand out no more tasks of a queue. What runs goes on, and so does enqueuing."""
    with calls.connect(dsn) as connection:
        calls.pause_queue(connection, queue)
    _print({"queue": queue, "paused": True}, [f"Queue {queue} is paused."])


@_command("resume")
@click.argument("queue")
def resume_command(dsn: str, queue: str) -> None:
    """Hand out the tasks of a paused queue again."""
    with calls.connect(dsn) as connection:
        calls.resume_queue(connection, queue)
    _print({"queue": queue, "paused": False}, [f"Queue {queue} is not paused."])


@_command("reap")
def reap_command(dsn: str) -> None:
    """Take back the tasks of workers that are lost, as running workers do every 2 seconds."""
    reaped: list[tuple[int, str]] = []
    with calls.connect(dsn) as connection:
        while batch := calls.reap_stale(connection, 1000):
            reaped += batch
    lines = [f"Task {task_id} is {status}." for task_id, status in reaped]
    document = [{"id": task_id, "status": status} for task_id, status in reaped]
    _print(document, lines or ["No task is held by a worker that is lost."])


@_command("maintain")
def maintain_command(dsn: str) -> None:
    """Do once what has to be done every minute. Running workers do it themselves."""
    with calls.connect(dsn) as connection:
        connection.add_notice_handler(
            lambda notice: click.echo(f"Warning: {plain(notice.message_primary or '')}", err=True)
        )
        steps = calls.maintain(connection)
    lines = [f"{step}: {'not now' if done is None else done}" for step, done in steps.items()]
    _print(steps, lines)


@_command("grant")
@click.argument("kind")
@click.argument("role")
@click.option("--revoke", is_flag=True, help="Take it back.")
def grant_command(dsn: str, kind: str, role: str, revoke: bool) -> None:
    """Let a role do what a producer, worker, observer or admin does.

    \b
    producer  enqueue
    worker    worker, reap, maintain, doctor
    observer  status, top, show, doctor
    admin     all of these, and retry, cancel, pause, resume
    """
    change = calls.revoke_access if revoke else calls.grant_access
    with calls.connect(dsn) as connection:
        change(connection, role, kind)
    said = f"Role {role}: access as {kind} {'revoked' if revoke else 'granted'}."
    _print({"role": role, "kind": kind, "granted": not revoke}, [said])


@_command("doctor")
def doctor_command(dsn: str) -> None:
    """Look for what keeps tasks from running, or will, and say what to do."""
    findings = list(examine(dsn))
    lines = []
    for each in findings:
        lines.append(f"{each['level']:<8} {each['check_name']:<13} {each['finding']}")
        if each["advice"]:
            lines.append(f"{'':<22} -> {each['advice']}")
    failed = any(each["level"] in ("warning", "error") for each in findings)
    _print(findings, lines, failed=failed)


@main.command("demo")
@click.option("--files", type=click.IntRange(min=100), help="So many tasks at most.")
def demo_command(files: int | None) -> None:
    """Work through Python's own library on a private PostgreSQL, and check every result.

    Needs no database: it starts one in a temporary folder, kills a worker half-way, and leaves
    nothing behind.
    """
    from pgsched.demo import demo
    from pgsched.embedded import EmbeddedError

    try:
        demo(files)
    except EmbeddedError as error:
        raise click.ClickException(str(error)) from error
