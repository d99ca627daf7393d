"""What the tests run of PL/pgSQL: a pytest plugin that notes it, and what it adds up to.

Servers whose programs install_plpgsql_check.sh has fetched count every statement that they run, for
each database; what a test has run is read before its database is dropped or its server ends.
"""

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from pgsched.embedded import Server

FOLDER = Path(__file__).parent.parent / ".venv" / "coverage"

# A function is known by its body, too: tests break some, and install older ones. The profiler does
# not take polymorphic ones apart: of these it has the lines that are statements, once they have
# run. Line 1 stands for the whole function then.
COUNTS = """
with functions as materialized (
  select p.oid, p.proname, md5(p.prosrc) as body,
         exists (
           select
             from unnest(p.proargtypes) as a (type)
             join pg_type as t on t.oid = a.type
            where t.typtype = 'p') as polymorphic
    from pg_proc as p
    join pg_language as l on l.oid = p.prolang
   where p.pronamespace = to_regnamespace('pgsched') and l.lanname = 'plpgsql')
select f.proname, f.body, s.stmtid, s.parent_stmtid, s.parent_note, s.lineno, s.stmtname,
       s.exec_stmts
  from functions as f
 cross join plpgsql_profiler_function_statements_tb(f.oid) as s
 where not f.polymorphic
 union all
select f.proname, f.body, t.lineno, null, null, t.lineno, 'line',
       coalesce(t.exec_stmts, max(t.exec_stmts) over (partition by f.oid), 0)
  from functions as f
 cross join plpgsql_profiler_function_tb(f.oid) as t
 where f.polymorphic and (t.lineno = 1 or t.cmds_on_row > 0)
"""
FORGET = """
select plpgsql_profiler_reset(p.oid)
  from pg_proc as p
 where p.pronamespace = to_regnamespace('pgsched')
"""
DATABASES = "select datname from pg_database where datallowconn"


class Statement(NamedTuple):
    """A statement of a function, and the part of which other one it is in; lines are the body's."""

    function: str
    body: str
    number: int
    parent: int | None
    part: str | None
    line: int
    name: str


def counts(dsn: str) -> Counter[Statement]:
    """How often each statement in this database has run since this was called."""
    options = "-c plpgsql_check.profiler=off -c default_transaction_read_only=off"
    with psycopg.connect(dsn, options=options, connect_timeout=5, autocommit=True) as conn:
        conn.execute("create extension if not exists plpgsql_check schema pg_catalog")
        rows = conn.execute(COUNTS.encode()).fetchall()
        conn.execute(FORGET)
    return Counter({Statement(*row): times for *row, times in rows})


def note(dsn: str) -> None:
    """Keep what has run in this database, unless its server is away or a standby."""
    with suppress(psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
        ran = [[*statement, times] for statement, times in counts(dsn).items() if times]
        with (FOLDER / f"plpgsql.{os.getpid()}").open("a") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in ran))


def pytest_configure() -> None:
    close = Server.close

    def note_and_close(server: Server) -> None:
        with suppress(psycopg.OperationalError), psycopg.connect(server.dsn()) as conn:
            for (database,) in conn.execute(DATABASES).fetchall():
                note(server.dsn(database))
        close(server)

    pytest.MonkeyPatch().setattr(Server, "close", note_and_close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Function) -> None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "dsn" in item.funcargs and "dsn" not in parameters:
        note(str(item.funcargs["dsn"]))
