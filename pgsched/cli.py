"""The command line: thin wrappers around what the package and the SQL functions do."""

import importlib
import json
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import psycopg

from pgsched import calls
from pgsched.errors import PgschedError, from_database
from pgsched.migrate import MigrationError, migrate
from pgsched.worker import Worker


class _Group(click.Group):
    """Every expected error is one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PgschedError, MigrationError) as error:
            raise click.ClickException(str(error)) from error
        except psycopg.Error as error:
            translated = from_database(error)
            text = " ".join(str(translated).split()) or type(error).__name__
            raise click.ClickException(text) from error


dsn_option = click.option(
    "--dsn",
    envvar="PGSCHED_DSN",
    default="",
    help="Database, as a URL or key=value pairs. Default: PGSCHED_DSN, else libpq's environment.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pgsched", message="%(prog)s %(version)s")
def main() -> None:
    """A distributed task scheduler inside PostgreSQL."""


@main.command("migrate")
@dsn_option
def migrate_command(dsn: str) -> None:
    """Install schema pgsched in a database, or bring it up to date."""
    applied = migrate(dsn)
    for migration_id in applied:
        click.echo(f"applied {migration_id}")
    if not applied:
        click.echo("nothing to do: the schema is up to date")


@main.command("worker")
@click.argument("app")
@click.option(
    "--dsn",
    envvar="PGSCHED_DSN",
    help="Database, instead of the worker's own. Default: PGSCHED_DSN, else what APP says.",
)
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


@main.command("enqueue")
@click.argument("task_type")
@click.argument("payload", default="{}")
@dsn_option
@click.option("--queue", default="default", show_default=True)
@click.option("--delay", type=float, metavar="SECONDS", help="Not before this long from now.")
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
    with calls.connect(dsn, application_name="pgsched") as connection:
        task_id = calls.enqueue(connection, task_type, value, delay=wait, **options)
    click.echo(task_id)


@main.command("status")
@dsn_option
def status_command(dsn: str) -> None:
    """Show the queues: what waits, runs and failed."""
    with calls.connect(dsn, application_name="pgsched") as connection:
        version = calls.schema_version(connection)
        queues = calls.queue_stats(connection)
    click.echo(f"schema {version}, {len(queues)} queue{'' if len(queues) == 1 else 's'}")
    if queues:
        header = ("queue", "queued", "due", "oldest due", "running", "failed")
        table = [
            (
                row.queue + (" (paused)" if row.paused else ""),
                *(_count(number) for number in (row.queued, row.due)),
                _age(row.oldest_due_age),
                *(_count(number) for number in (row.processing, row.failed)),
            )
            for row in queues
        ]
        _print_table(header, table)


def _count(number: int) -> str:
    return "10000+" if number >= 10_000 else str(number)


def _age(age: timedelta) -> str:
    return f"{age.total_seconds():.1f} s" if age else "-"


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join((first, *others)).rstrip())


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
