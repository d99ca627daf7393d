"""Schema ``pgsched`` as one script, for psql and migration tools, and its removal."""

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from psycopg import errors
from yoyo import default_migration_table

from pgsched import migrate
from pgsched.calls import Document
from pgsched.migrate import MIGRATION_LOCK, MigrationError, WaitedTooLong

# What migrations create, by kind, in the order to drop it; indexes and the like go with a table.
_CREATED = {
    kind: re.compile(rf"^create (?:or replace )?(?:{words}) (pgsched\.\w+)", re.MULTILINE)
    for kind, words in {"routine": "function|procedure", "view": "view", "table": "table"}.items()
}

# From the table: what a function says of a name may be from before the wait for the lock.
_SCHEMA = "select current_database(), (select oid from pg_namespace where nspname = 'pgsched')"

_COUNTS = """
select (select count(*) from (select from pgsched.scheduled_tasks limit 10000) as t),
       (select count(*) from (select from pgsched.finished_tasks limit 10000) as t),
       (select count(*) from pgsched.workers as w
         where w.seen_at > clock_timestamp() - interval '2 minutes')
"""

# Another operator on the search path would be bound into checks for good.
_SET = "select pg_catalog.set_config('{}', {}, true);".format
_KEEP = _SET("pgsched.search_path", "pg_catalog.current_setting('search_path')")
_PIN = _SET("search_path", "'pgsched, pg_temp'")
_RESTORE = _SET("search_path", "pg_catalog.current_setting('pgsched.search_path')")

_NAMED = 5
"""So many of the things that are in the way are named."""


def script(after: str | None = None) -> str:
    """The schema and its migrations, or those after one, as a script of plain SQL.

    No command of psql, no begin and no commit: tools bring their own transaction. ``after`` is the
    number or id of a migration; raises UnknownMigration when there is none like it.
    """
    package = migrate._package()
    first = migrate._last(package, after) if after else 0
    since = f" from {after} on" if after else ""
    lines = [
        f"-- pgsched {version('pgsched')}: schema pgsched at {package[-1].id}{since}.",
        "-- To be run whole, in one transaction, by a migration tool that leaves it as it is, or:",
        "--   psql -X -1 -v ON_ERROR_STOP=1 -d DATABASE -f THIS_FILE",
        *([] if after else ["", "create schema pgsched;"]),
    ]
    body: list[str] = []
    for migration in (each for each in package if migrate._number(each.id) > first):
        # A line for yoyo, which would heed it in a migration of the application's, too.
        text = re.sub(r"(?m)^-- depends:.*\n", "", Path(migration.path).read_text("utf-8"))
        body += ["", f"-- {migration.id}", text.rstrip("\n")]
    if body:
        body = ["", _KEEP, _PIN, *body, "", _RESTORE]
    return "\n".join([*lines, *body, ""])


def uninstall(dsn: str, agree: Callable[[Document], None] | None = None) -> Document | None:
    """Remove schema ``pgsched`` with all that pgsched made in it, or nothing.

    Returns what there was, None: no such schema. ``agree`` is shown it before, and may raise.

    Raises MigrationError when the schema is not for this role or this package to remove, when
    something that pgsched did not make is in it or depends on it, and, WaitedTooLong, when others
    keep its tables in use.
    """
    with migrate._Backend(dsn, default_migration_table) as backend:
        try:
            there = _look(backend, remove=False) if agree else {}
            if there and agree:
                agree(there)
            return None if there is None else _look(backend, remove=True)
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            raise WaitedTooLong(f"nothing was removed: {backend.holders() or error}") from error
        except (errors.DependentObjectsStillExist, errors.AmbiguousFunction) as error:
            others = (error.diag.message_detail or error.diag.message_primary or "").splitlines()
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            raise MigrationError(
                "nothing was removed, since pgsched did not make all of what would have to go:"
                f" {', '.join(others[:_NAMED])}{more}"
            ) from error


def _look(backend: migrate._Backend, *, remove: bool) -> Document | None:
    """What there is, or was, in one transaction."""
    execute = backend.connection.execute
    with backend.transaction():
        execute(migrate._ALONE)
        # So long others wait behind us at most; autovacuum gives way after one second.
        execute("set local lock_timeout to '2s'; set local statement_timeout to 0")
        if remove:
            execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        [(database, oid)] = execute(_SCHEMA)
        if oid is None:
            return None
        backend.become_owner()
        package = migrate._package()
        _, pending = backend.compare(package, migrate._last(package, None))
        made = [migration for migration in package if migration not in pending]
        if not made and backend.migration_table not in backend.list_tables():
            raise MigrationError("nothing was removed: pgsched made nothing in this schema pgsched")
        [counts] = execute(_COUNTS) if made else [(0, 0, 0)]
        if remove:
            text = "".join(Path(migration.path).read_text("utf-8") for migration in made)
            created = {kind: set(names.findall(text)) for kind, names in _CREATED.items()}
            yoyo = (backend.migration_table, backend.log_table, backend.version_table)
            created["table"] |= {f"pgsched.{table}" for table in (*yoyo, backend.lock_table)}
            for kind, names in created.items():
                if names:
                    execute(f"drop {kind} if exists {', '.join(sorted(names))}".encode())
            execute("drop schema pgsched")
    server = f"{backend.connection.info.host}:{backend.connection.info.port}"
    schema = made[-1].id.partition(".")[0] if made else None
    keys = ("database", "server", "schema", "live", "finished", "workers")
    return dict(zip(keys, (database, server, schema, *counts), strict=True))
