"""Roles that have what grant_access gives, and nothing else, in sessions as hostile as they come.

The schema belongs to a role that might only CREATE in the database; `app` may call everything.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import mutants
import oracle
import psycopg
import pytest
from command_line import pgsched, refused
from mutants import Mutant
from psycopg import sql
from psycopg.conninfo import make_conninfo
from scraping import free_port, get, scrape
from test_docs import COMMANDS, REFERENCE, code, section, table
from test_read_only import CALLS, fill, run, writes
from workers import (
    PATIENCE,
    install,
    make_effects,
    quick,
    running,
    wait_for,
    wait_for_delay,
    wait_for_extension,
    wait_until,
    write,
    written,
)

from pgsched import Fail, Task, enqueue, loop
from pgsched.embedded import Server
from pgsched.migrate import migrate

OWNER, APP = "the owner", 'the "app"'
PLAIN = ("producer", "worker", "observer", "admin")
"""The kinds of access, each with a role of its name that has nothing else."""
ROLES = (OWNER, APP, *PLAIN)

_numbers = count(1)


@pytest.fixture(scope="module")
def installed(server: Server) -> Iterator[str]:
    """The name of a database whose schema is the owner's."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        for role in ROLES:
            admin.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        server.create_database("rights")
        admin.execute(f'grant create on database rights to "{OWNER}"'.encode())
        dsn = server.dsn("rights", OWNER)
        migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as owner:
            for role, kind in [(APP, "admin"), *zip(PLAIN, PLAIN, strict=True)]:
                owner.execute("select pgsched.grant_access(%s, %s)", [role, kind])
            app = sql.Identifier(APP)
            changes = sql.SQL("grant execute on function {}, {} to {}")
            names = [sql.Identifier("pgsched", f"{verb}_access") for verb in ("grant", "revoke")]
            owner.execute(changes.format(*names, app))
        yield "rights"
        admin.execute("drop database rights with (force)")
        for role in ROLES:
            admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


class Database:
    """A copy of that database, and how its roles connect."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self._open: list[psycopg.Connection] = []

    def dsn(self, role: str = APP, **settings: str) -> str:
        pairs = [f"{name}={value}".replace(" ", r"\ ") for name, value in settings.items()]
        options = " ".join(f"-c {pair}" for pair in pairs)
        return make_conninfo(self.server.dsn(self.name, role), options=options)

    def connect(self, role: str = APP, **settings: str) -> psycopg.Connection:
        connection = psycopg.connect(self.dsn(role, **settings), autocommit=True)
        self._open.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()


@contextmanager
def new(server: Server, template: str) -> Iterator[Database]:
    """A database in which the owner may create schemas; dropped afterwards."""
    name = f"rights_{next(_numbers)}"
    server.create_database(name, template=template)
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f'grant create on database {name} to "{OWNER}"'.encode())
        database = Database(server, name)
        try:
            yield database
        finally:
            database.close()
            admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def database(server: Server, installed: str) -> Iterator[Database]:
    with new(server, installed) as database:
        yield database


@pytest.fixture
def empty(server: Server, installed: str) -> Iterator[Database]:
    """One without the schema."""
    with new(server, "template1") as database:
        yield database


@pytest.fixture
def owner(database: Database) -> psycopg.Connection:
    """The owner's connection."""
    return database.connect(OWNER)


@pytest.fixture
def admin(database: Database) -> psycopg.Connection:
    """A superuser's connection."""
    return database.connect("postgres")


def holds(conn: psycopg.Connection, condition: str) -> bool:
    """Whether an SQL condition is true; null is not."""
    [(answer,)] = conn.execute(f"select {condition}".encode())
    return answer is True


def call_all(session: psycopg.Connection, things: dict[str, Any]) -> None:
    """Call every function and procedure, each in a transaction that is rolled back."""
    for function in CALLS:
        with session.transaction(force_rollback=True):
            run(session, function, things)
    with session.transaction(force_rollback=True):
        session.execute("call pgsched.hold_presence(%(worker)s)", things)


# What kinds are made of


def test_the_documented_kinds_are_those_of_grant_access(owner: psycopg.Connection) -> None:
    rows = table(section(REFERENCE, "Rights"), "Kind")
    documented = {kind: set(code(row["May call"])) for row in rows for kind in code(row["Kind"])}
    there = {
        kind: {name for (name,) in owner.execute("select pgsched._access(%s)", [kind])}
        for kind in documented
    }
    others = documented["producer"] | documented["worker"] | documented["observer"]
    assert documented | {"admin": documented["admin"] | others} == there
    assert [*documented] == [*PLAIN]


def commands() -> list[tuple[str, str]]:
    """Each command that calls functions, with a kind of access that the documents say is enough."""
    rows = table(section(COMMANDS, "Rights"), "Command")
    return [(code(row["Command"])[0], kind) for row in rows for kind in code(row["Kind"])]


def test_the_documented_kind_is_enough_for_each_command(
    database: Database,
    owner: psycopg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    things = fill(owner)
    monkeypatch.chdir(tmp_path)
    source = "from pgsched import Worker\nworker = Worker(queues=['empty'])\n"
    (tmp_path / "app_of_rights.py").write_text(source)
    arguments = {
        "cancel": [str(things["queued"])],
        "enqueue": ["type"],
        "pause": ["mail"],
        "resume": ["paused"],
        "retry": [str(things["failed"])],
        "show": [str(things["queued"])],
        "worker": ["app_of_rights", "--drain"],
    }
    for command, kind in commands():
        result = pgsched(command, *arguments.get(command, []), "--dsn", database.dsn(kind))
        assert "denied" not in result.output, command
        if command != "doctor":  # it has found something about the tasks
            assert result.exit_code == 0, command


# Workers


@pytest.mark.parametrize("path", ["public", "evil, public"])
def test_a_worker_that_also_adds_tasks_needs_no_more_than_two_kinds(
    database: Database,
    admin: psycopg.Connection,
    owner: psycopg.Connection,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loop, "PRUNE_SECONDS", 0.1)
    make_traps(admin)
    make_effects(admin)
    admin.execute(sql.SQL("grant all on effects to {}").format(sql.Identifier(APP)))
    owner.execute("select pgsched.revoke_access(%s, 'admin')", [APP])
    for kind in ("producer", "worker"):
        owner.execute("select pgsched.grant_access(%s, %s)", [APP, kind])
    dsn, port = database.dsn(search_path=path), free_port()
    worker = quick(dsn, lease=1, db_metrics=True, metrics_port=port)
    gate = Event()
    worker.task("plain")(lambda task: gate.wait(PATIENCE))

    @worker.task("coroutine")
    async def coroutine(task: Task) -> None:
        pass

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise Fail("for good")

    @worker.task("transaction")
    def transaction(task: Task, conn: psycopg.Connection[Any]) -> None:
        write(task, conn)
        enqueue(conn, "coroutine", unique_key="from a handler")

    with running(worker):
        wait_until(lambda: holds(owner, "exists (select from pgsched.listeners)"))
        wait_until(lambda: holds(owner, "(select w.presence from pgsched.workers as w)"))
        with psycopg.connect(dsn) as conn:
            kinds = ("plain", "coroutine", "transaction", "fail", "unknown")
            plain, coro, held, failing, unknown = (enqueue(conn, kind) for kind in kinds)
        wait_for(owner, plain, "processing")
        wait_for_extension(owner, plain)
        gate.set()
        for task_id in (plain, coro, held):
            wait_for(owner, task_id, "completed")
        wait_for(owner, failing, "failed")
        wait_for_delay(owner, unknown)
        assert written(admin) == [held]
        assert scrape(port)["pgsched_database_up",] == 1
        assert get(port, "/readyz") == (200, "ok\n")
    assert owner.execute("select name from pgsched.workers").fetchall() == []
    assert "denied" not in caplog.text
    assert not touched(admin)


def test_a_worker_that_may_not_claim_is_not_ready(
    database: Database, owner: psycopg.Connection
) -> None:
    port = free_port()
    with running(quick(database.dsn("worker"), metrics_port=port)):
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))
        owner.execute("revoke execute on function pgsched.claim_task from worker")
        wait_until(lambda: get(port, "/readyz") == (503, "claims are refused\n"))
        owner.execute("select pgsched.grant_access('worker', 'worker')")
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))


# Hostile search paths

TRAPS = r"""
create schema evil;
grant usage on schema evil to public;
create sequence evil.touches;
create function evil.touch(text) returns boolean
  language plpgsql security definer set search_path = pg_catalog
as $$
begin
  perform nextval('evil.touches');  -- no rollback undoes that
  raise warning 'touched: %', $1;
  return true;
end;
$$;
create view evil.words as
select distinct w[1] as word
  from pg_proc cross join regexp_matches(prosrc, '\w+', 'g') as w
 where pronamespace = 'pgsched'::regnamespace;

do $do$
declare
  v_row record;
begin
  -- Functions, also those that are nearer to a call than PostgreSQL's own.
  for v_row in
    select p.proname as name, a.types, format_type(p.prorettype, null) as result
      from pg_proc as p
     cross join lateral (
           select oidvectortypes(p.proargtypes) as types
            union
           select replace(replace(oidvectortypes(p.proargtypes), 'anyarray', 'text[]'),
                          'anyelement', 'record')) as a
     where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and not p.proretset
       and p.proargmodes is null and p.prorettype not in ('internal'::regtype, 'void'::regtype)
       and not p.proargtypes::oid[] && array['internal', 'cstring', '"any"']::regtype[]::oid[]
       and (a.types like '%any%' or not format_type(p.prorettype, null) like 'any%')
       and (p.proname in (select word from evil.words)
            or p.proname = 'to_json')
  loop
    execute format(
      'create function evil.%I(%s) returns %s language plpgsql as '
      '$$begin perform evil.touch(%L); return null; end$$',
      v_row.name, v_row.types, v_row.result, v_row.name);
  end loop;

  for v_row in
    select o.oprname as name, o.oid, o.oprleft::regtype as lefts, o.oprright::regtype as rights,
           o.oprresult::regtype as result
      from pg_operator as o
     where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprkind = 'b'
       and array[o.oprleft, o.oprright] <@ array[
             'bool', 'int2', 'int4', 'int8', 'text', 'name', 'oid', 'uuid', 'timestamptz',
             'interval', 'jsonb', 'float8', 'numeric', 'anyarray', '"char"']::regtype[]::oid[]
  loop
    execute format(
      'create function evil.%I(%s, %s) returns %s language plpgsql as '
      '$$begin perform evil.touch(%L); return null; end$$',
      'operator ' || v_row.oid, v_row.lefts, v_row.rights, v_row.result, v_row.name);
    execute format(
      'create operator evil.%s (function = evil.%I, leftarg = %s, rightarg = %s)',
      v_row.name, 'operator ' || v_row.oid, v_row.lefts, v_row.rights);
  end loop;

  for v_row in
    select t.typname as name
      from pg_type as t
     where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype = 'b'
       and t.typname in (select word from evil.words union values ('uuid'), ('jsonb'))
  loop
    execute format('create domain evil.%I as pg_catalog.%1$I check (evil.touch(%1$L))',
                   v_row.name);
  end loop;

  for v_row in
    select c.relname as name, c.relnamespace::regnamespace as schema
      from pg_class as c
     where c.relnamespace in ('pgsched'::regnamespace, 'pg_catalog'::regnamespace)
       and c.relkind in ('r', 'v') and c.relname in (select word from evil.words)
  loop
    execute format('create view evil.%I as select * from %s.%1$I where evil.touch(%1$L)',
                   v_row.name, v_row.schema);
  end loop;
end;
$do$;
grant all on all tables in schema evil to public;
"""


def make_traps(admin: psycopg.Connection) -> list[str]:
    """Schema evil: whatever our functions name is there once more, and tells when it is touched.

    Returns the names of its views.
    """
    admin.execute(TRAPS.encode())
    views = admin.execute("select viewname::text from pg_views where schemaname = 'evil'")
    return [name for (name,) in views]


def lay_traps(session: psycopg.Connection, views: list[str]) -> None:
    """The same among the session's temporary tables."""
    for name in map(sql.Identifier, views):
        session.execute(sql.SQL("create temp view {} as table evil.{}").format(name, name))
        session.execute(sql.SQL("grant all on pg_temp.{} to public").format(name))


def touched(admin: psycopg.Connection) -> bool:
    """Whether any was, since this was asked before."""
    touched = holds(admin, "is_called from evil.touches")
    admin.execute("select setval('evil.touches', 1, false)")
    return touched


PATHS = ["''", "public", "evil,public", "evil,pg_catalog,public", "pg_temp,evil,pg_catalog"]


def test_nothing_is_found_on_the_callers_search_path(
    database: Database, admin: psycopg.Connection, owner: psycopg.Connection
) -> None:
    assert set(CALLS) == set(writes(owner))
    things, views = fill(owner), make_traps(admin)
    assert len(views) > 15
    for path in PATHS:
        session = database.connect(search_path=path)
        lay_traps(session, views)
        call_all(session, things)
        assert not touched(admin), path


def test_a_function_that_goes_by_the_callers_path_is_seen(
    database: Database, admin: psycopg.Connection, owner: psycopg.Connection
) -> None:
    things, views = fill(owner), make_traps(admin)
    for function, path in [
        ("claim_task", "evil,pg_catalog"),  # operators
        ("enqueue_tasks", "evil,pg_catalog"),  # functions
        ("register_worker", "evil,pg_catalog"),  # types
        ("diagnose", "public"),  # temporary views
    ]:
        admin.execute(f"alter function pgsched.{function} reset search_path".encode())
        session = database.connect(search_path=path)
        lay_traps(session, views)
        with suppress(psycopg.Error):  # traps give back nothing
            run(session, function, things)
        assert touched(admin), function


# Settings of the session

SETTINGS: list[dict[str, str]] = [
    {"timezone": "America/St_Johns", "datestyle": "German", "intervalstyle": "sql_standard"},
    {"timezone": "Pacific/Kiritimati", "datestyle": "SQL,DMY", "intervalstyle": "iso_8601"},
    {"intervalstyle": "postgres_verbose", "bytea_output": "escape", "extra_float_digits": "-15"},
    {"standard_conforming_strings": "off", "backslash_quote": "off", "array_nulls": "off"},
    {"transform_null_equals": "on", "client_encoding": "LATIN1", "lc_time": "C"},
    {"default_transaction_isolation": "repeatable read"},
    {"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on"},
    {"row_security": "off", "session_replication_role": "replica"},
    {"from_collapse_limit": "1", "join_collapse_limit": "1", "geqo_threshold": "2"},
    {"enable_indexscan": "off", "enable_bitmapscan": "off", "enable_nestloop": "off"},
    {"plan_cache_mode": "force_custom_plan", "work_mem": "64kB", "jit_above_cost": "0"},
    {"plpgsql.variable_conflict": "use_column", "plpgsql.extra_errors": "all"},
]


def results(database: Database, things: dict[str, Any], **settings: str) -> dict[str, Any]:
    """Of each function what `app` gets from it, and what that leaves in the tables."""
    found = {}
    with psycopg.connect(database.dsn("postgres", **settings), autocommit=True) as session:
        for function in CALLS:
            for sequence in ("scheduled_tasks", "workers"):
                session.execute("select setval(%s, 1000)", [f"pgsched.{sequence}_id_seq"])
            with session.transaction(force_rollback=True):
                session.execute(sql.SQL("set local role {}").format(sql.Identifier(APP)))
                call = f"select to_json(f)::text from pgsched.{function}({CALLS[function]}) as f"
                answer = [text for (text,) in session.execute(call.encode(), things)]
                session.execute("set local role none; set local intervalstyle = 'postgres'")
                tables = ("queues", "scheduled_tasks", "finished_tasks", "workers", "listeners")
                rows = [
                    row
                    for name in tables
                    for row in session.execute(
                        f"select to_json(t)::text from pgsched.{name} as t order by 1".encode()
                    )
                ]
            found[function] = (
                [comparable(each) for each in answer if '"settings"' not in str(each)],
                [comparable(text) for (text,) in rows],
            )
    return found


def comparable(text: str | None) -> str:
    """Times are told in steps of ten minutes from now, tokens and ages not at all."""

    def steps(match: re.Match[str]) -> str:
        time = datetime.fromisoformat(match[0])
        minutes = (time - datetime.now(time.tzinfo)).total_seconds() / 60
        return f"step {(minutes + 8) // 10}"  # a lease of five minutes is another step than now

    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+[+-][\d:]+", steps, str(text))
    text = re.sub(r'"[0-9a-f]{8}-[0-9a-f-]{27}"', "a token", text)
    return re.sub(r'"\w+_age":"[^"]*"|\d+ seconds', "an age", text)


def test_settings_of_the_session_change_no_result(
    database: Database, owner: psycopg.Connection
) -> None:
    things = fill(owner)
    expected = results(database, things)
    assert len(expected) > 30
    for settings in SETTINGS:
        assert results(database, things, **settings) == expected, settings


# What else an administrator may do


def test_row_level_security_binds_the_owner_only_by_force(
    database: Database, admin: psycopg.Connection, owner: psycopg.Connection
) -> None:
    things, app = fill(owner), database.connect()
    for table_name in ("queues", "scheduled_tasks", "finished_tasks", "workers", "listeners"):
        admin.execute(f"alter table pgsched.{table_name} enable row level security".encode())
    call_all(app, things)
    admin.execute("alter table pgsched.scheduled_tasks force row level security")
    assert app.execute("select id from pgsched.claim_task('w')").fetchall() == []
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        app.execute("select pgsched.enqueue_task('type')")


def test_the_helpers_of_functions_are_not_for_their_callers(
    database: Database, owner: psycopg.Connection
) -> None:
    """Those that are language sql, too, which the planner puts into the function that calls."""
    rows = owner.execute(
        """
        select p.proname, l.lanname,
               array(select r.rolname from pg_roles as r
                      where r.rolname = any (%s)
                        and has_function_privilege(r.oid, p.oid, 'execute'))
          from pg_proc as p
          join pg_language as l on l.oid = p.prolang
         where p.pronamespace = 'pgsched'::regnamespace and p.proname like '\\_%%'
        """,
        [list(ROLES)],
    ).fetchall()
    assert {language for _, language, _ in rows} == {"sql", "plpgsql"}
    assert [name for name, _, may in rows if may != [OWNER]] == []
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="_name_fault"):
        database.connect().execute("select pgsched._name_fault('p_queue', 'mail')")


# What PUBLIC may do here; PostgreSQL lets it use the row types of yoyo's tables.
OF_PUBLIC = """
select object, privilege_type
  from (select nspname::text, coalesce(nspacl, acldefault('n', nspowner)) from pg_namespace
         where oid = 'pgsched'::regnamespace
         union all
        select proname, coalesce(proacl, acldefault('f', proowner)) from pg_proc
         where pronamespace = 'pgsched'::regnamespace
         union all
        select relname, coalesce(relacl, acldefault(case relkind when 'S' then 's'::"char"
                                                                 else 'r' end, relowner))
          from pg_class
         where relnamespace = 'pgsched'::regnamespace and relkind in ('r', 'v', 'S')
         union all
        select typname, coalesce(typacl, acldefault('T', typowner)) from pg_type
         where typnamespace = 'pgsched'::regnamespace and typelem = 0 and typname !~ '^_?yoyo_')
       as o (object, acl)
 cross join aclexplode(acl) as a
 where a.grantee = 0
"""

GENEROUS = "alter default privileges for role {} grant all on {} to public, {}"


@pytest.mark.parametrize("installer", [install, lambda server, dsn: migrate(dsn)])
def test_default_privileges_give_public_nothing_and_a_role_what_they_say(
    server: Server, empty: Database, installer: Callable[[Server, str], Any]
) -> None:
    admin = empty.connect("postgres")
    for what in map(sql.SQL, ("tables", "sequences", "functions", "types", "schemas")):
        admin.execute(sql.SQL(GENEROUS).format(sql.Identifier(OWNER), what, sql.Identifier(APP)))
    installer(server, empty.dsn(OWNER))
    assert admin.execute(OF_PUBLIC).fetchall() == []
    assert holds(admin, f"has_table_privilege('{APP}', 'pgsched.tasks', 'select')")
    admin.execute("grant usage on schema pgsched to public")
    assert admin.execute(OF_PUBLIC).fetchall() == [("pgsched", "USAGE")]


# Changing rights


def acl(conn: psycopg.Connection) -> list[tuple[str, str]]:
    """The rights on functions and procedures, and on the schema."""
    return conn.execute(
        """
        select oid::regprocedure::text, array(select unnest(proacl)::text order by 1)::text
          from pg_proc
         where pronamespace = 'pgsched'::regnamespace
         union all
        select nspname, array(select unnest(nspacl)::text order by 1)::text
          from pg_namespace
         where nspname = 'pgsched'
         order by 1
        """
    ).fetchall()


def change_at_once(database: Database, owner: psycopg.Connection, sessions: int) -> None:
    """One session has changed rights, and the others wait until its transaction ends."""
    first, *others = [database.connect(OWNER) for _ in range(sessions)]
    those = f"from pg_stat_activity where datname = '{database.name}' and wait_event_type = 'Lock'"

    def end_when_all_wait() -> None:
        wait_until(lambda: holds(owner, f"count(*) = {len(others)} {those}"))
        first.commit()

    def change(session: psycopg.Connection, number: int) -> None:
        verb, role = ("grant", "revoke")[number % 2], PLAIN[number // 2]
        session.execute(f"select pgsched.{verb}_access(%s, 'worker')".encode(), [role])

    first.execute("begin")
    change(first, 0)
    calls: list[Callable[[], None]] = [end_when_all_wait]
    calls += [partial(change, session, number) for number, session in enumerate(others, 1)]
    oracle.together(calls)


def test_eight_sessions_change_rights_at_once(
    database: Database, owner: psycopg.Connection
) -> None:
    change_at_once(database, owner, 8)


@pytest.mark.long
@pytest.mark.parametrize("call", ["grant_access", "revoke_access"])
def test_others_who_change_rights_are_not_waited_for_without_end(
    database: Database, owner: psycopg.Connection, call: str
) -> None:
    with psycopg.connect(database.dsn(OWNER)) as other:
        other.execute("select pgsched.grant_access(%s, 'producer')", [PLAIN[0]])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            owner.execute(f"select pgsched.{call}(%s, 'worker')".encode(), [PLAIN[1]])


def test_changes_of_rights_that_do_not_wait_are_seen(
    database: Database, owner: psycopg.Connection
) -> None:
    mutants.install(owner, Mutant("_lock_access", "perform pg_advisory_xact_lock(1338, 1);", ""))
    with pytest.raises(psycopg.errors.InternalError_, match="tuple concurrently updated"):
        change_at_once(database, owner, 2)


def test_whoever_calls_it_the_owner_grants(
    database: Database, admin: psycopg.Connection, owner: psycopg.Connection
) -> None:
    """A superuser, and a role that may call grant_access: what the role has it cannot pass on."""
    rights = acl(owner)
    owner.execute("select pgsched.revoke_access('observer', 'observer')")
    admin.execute("select pgsched.grant_access('observer', 'observer')")
    assert acl(owner) == rights
    app = database.connect()
    app.execute("select pgsched.revoke_access('observer', 'observer')")
    assert acl(owner) != rights
    app.execute("select pgsched.grant_access('observer', 'observer')")
    assert acl(owner) == rights
    for kind in PLAIN:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            database.connect(kind).execute("select pgsched.grant_access(%s, 'admin')", [kind])


def test_rights_outlast_a_new_version_of_the_functions_and_a_dump(
    server: Server, database: Database, empty: Database, owner: psycopg.Connection
) -> None:
    rights = acl(owner)
    definitions = owner.execute(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'pgsched'::regnamespace"
    )
    for (definition,) in definitions.fetchall():
        owner.execute(definition)
    assert acl(owner) == rights
    dump = server.run("pg_dump", "-n", "pgsched", database.name, check=True, capture_output=True)
    options = ["-Xqv", "ON_ERROR_STOP=1", "-o", os.devnull]
    server.run("psql", *options, empty.dsn(OWNER), input=dump.stdout, check=True)
    assert acl(empty.connect(OWNER)) == rights


# The command


def test_the_command_gives_and_takes(database: Database, owner: psycopg.Connection) -> None:
    may = "has_function_privilege('observer', 'pgsched.enqueue_tasks(jsonb)', 'execute')"
    dsn = ["--dsn", database.dsn(OWNER)]
    result = pgsched("grant", "producer", "observer", *dsn)
    assert result.stdout == "Role observer: access as producer granted.\n"
    assert holds(owner, may)
    result = pgsched("grant", "--revoke", "--json", "producer", "observer", *dsn)
    assert json.loads(result.stdout) == {"role": "observer", "kind": "producer", "granted": False}
    assert not holds(owner, may)
    assert refused("grant", "boss", "observer", *dsn) == (
        "p_kind is not a kind of access: 'boss' (Give producer, worker, observer or admin.)"
    )
    assert "there is no role 'public'" in refused("grant", "worker", "public", *dsn)
    assert "permission denied" in refused("grant", "admin", "admin", "--dsn", database.dsn("admin"))
