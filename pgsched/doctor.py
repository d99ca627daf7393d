"""What ``pgsched doctor`` reports: what can only be seen from here, and what diagnose() finds."""

from collections.abc import Iterator
from importlib.metadata import version

import psycopg

from pgsched import calls
from pgsched.calls import Connection, Document
from pgsched.migrate import MIGRATIONS
from pgsched.text import explained

OLDEST, NEWEST = 14, 18
"""PostgreSQL's major versions that pgsched is tested with."""


def _found(check_name: str, level: str, finding: str, advice: str | None = None) -> Document:
    """As diagnose() has them."""
    return {"check_name": check_name, "level": level, "finding": finding, "advice": advice}


def examine(dsn: str) -> Iterator[Document]:
    """All that can be found out; what prevents more is a finding, too."""
    libpq = _spelled(psycopg.pq.version())
    parts = f"pgsched {version('pgsched')}, psycopg {psycopg.__version__}, libpq {libpq}."
    yield _found("client", "ok", parts)
    try:
        with calls.connect(dsn, application_name="pgsched doctor") as connection:
            yield from _server(connection)
            yield from _schema(connection)
    except psycopg.Error as error:
        yield _found("database", "error", explained(error), "Then run pgsched doctor again.")


def _spelled(number: int) -> str:
    return f"{number // 10_000}.{number % 10_000}"


def _server(connection: Connection) -> Iterator[Document]:
    info = connection.info
    where = f"{info.dbname}, as {info.user}, on PostgreSQL {_spelled(info.server_version)}."
    major = info.server_version // 10_000
    level = "error" if major < OLDEST else "note" if major > NEWEST else "ok"
    tested = f"pgsched is tested with PostgreSQL {OLDEST} to {NEWEST}: use one of these."
    yield _found("database", level, where, None if level == "ok" else tested)
    if calls.is_pooled(connection):
        advice = "LISTEN does not work through it: give workers --listen-dsn, or let them poll."
        yield _found("pooler", "note", "A pooler in transaction mode is in between.", advice)


def _schema(connection: Connection) -> Iterator[Document]:
    role, usage, missing = calls.missing_rights(connection)
    if usage is None:
        yield _found("schema", "error", "There is no schema pgsched.", "Run pgsched migrate.")
        return
    grants = "" if usage else f" grant usage on schema pgsched to {role};"
    if missing:
        functions = ", ".join(f"pgsched.{name}" for name in missing)
        grants += f" grant execute on routine {functions} to {role};"
    if grants:
        lacks = f"EXECUTE on {len(missing)} functions" if usage else "USAGE on schema pgsched"
        level = "note" if usage and "diagnose" not in missing else "error"
        yield _found("rights", level, f"Role {role} lacks {lacks}.", f"If it should:{grants}")
    if usage and "schema_version" not in missing:
        there = calls.schema_version(connection)
        known = max(path.name for path in MIGRATIONS.glob("*.sql")).partition(".")[0]
        level = "ok" if there == known else "warning"
        cure = "Run pgsched migrate." if there < known else "Upgrade the package."
        what = f"It is at {there}, and this package is made for {known}."
        yield _found("schema", level, what, None if level == "ok" else cure)
    if usage and "diagnose" not in missing:
        yield from calls.diagnose(connection)
