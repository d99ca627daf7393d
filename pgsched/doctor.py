"""What ``pgsched doctor`` reports: what can only be seen from here, and what diagnose() finds."""

from collections.abc import Iterator
from importlib.metadata import version

import psycopg
from psycopg.pq import version_pretty

from pgsched import calls
from pgsched.calls import NEWEST_SCHEMA, Connection, Document
from pgsched.migrate import OLDEST
from pgsched.text import explained

NEWEST = 18
"""PostgreSQL's newest major version that pgsched is tested with."""


def _found(check_name: str, level: str, finding: str, advice: str | None = None) -> Document:
    """As diagnose() has them."""
    return {"check_name": check_name, "level": level, "finding": finding, "advice": advice}


def examine(dsn: str) -> Iterator[Document]:
    """All that can be found out; what prevents more is a finding, too."""
    libpq = version_pretty(psycopg.pq.version())
    parts = f"pgsched {version('pgsched')}, psycopg {psycopg.__version__}, libpq {libpq}."
    yield _found("client", "ok", parts)
    try:
        with calls.connect(dsn, application_name="pgsched doctor") as connection:
            yield from _server(connection)
            yield from _schema(connection)
    except psycopg.Error as error:
        yield _found("database", "error", explained(error), "Then run pgsched doctor again.")


def _server(connection: Connection) -> Iterator[Document]:
    info = connection.info
    where = f"{info.dbname}, as {info.user}, on PostgreSQL {version_pretty(info.server_version)}."
    major = info.server_version // 10_000
    level = "error" if major < OLDEST else "note" if major > NEWEST else "ok"
    tested = f"pgsched is tested with PostgreSQL {OLDEST} to {NEWEST}: use one of these."
    yield _found("database", level, where, None if level == "ok" else tested)
    if calls.is_pooled(connection):
        advice = "LISTEN does not work through it: give workers --listen-dsn, or let them poll."
        yield _found("pooler", "note", "A pooler in transaction mode is in between.", advice)


def _schema(connection: Connection) -> Iterator[Document]:
    role, usage, allowed = calls.rights(connection)
    if usage is None:
        yield _found("schema", "error", "There is no schema pgsched.", "Run pgsched migrate.")
        return
    if not usage or "diagnose" not in allowed:
        lacks = "EXECUTE on diagnose" if usage else "USAGE on schema pgsched"
        kind = "worker" if "claim_task" in allowed else "observer"
        grant = f"As the owner of the schema: select pgsched.grant_access({role}, '{kind}')"
        yield _found("rights", "error", f"Role {role} lacks {lacks}.", grant)
    if usage and "schema_version" in allowed:
        there = calls.schema_version(connection)
        level = "ok" if there == NEWEST_SCHEMA else "warning"
        cure = "Run pgsched migrate." if there < NEWEST_SCHEMA else "Upgrade the package."
        what = f"It is at {there}, and this package is made for {NEWEST_SCHEMA}."
        yield _found("schema", level, what, None if level == "ok" else cure)
    if usage and "diagnose" in allowed:
        yield from calls.diagnose(connection)
