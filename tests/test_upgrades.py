"""From every released schema to the newest, in use meanwhile: nothing is lost and nobody fails."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import UUID

import previous
import psycopg
import pytest
from installing import IDS, NEXT, dump, later_package, waiting
from test_docs import ROOT, code, headings, section, table
from workers import (
    NEWEST,
    PATIENCE,
    REAP,
    WorkerProcess,
    count,
    end_sessions,
    make_effects,
    quick,
    row,
    running,
    wait_for,
    wait_for_extension,
    wait_until,
    written,
)

from pgsched import Worker, calls, enqueue
from pgsched import migrate as migrate_module
from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS, migrate

Connect = Callable[..., psycopg.Connection]

SCHEMA = ROOT / "sql" / "schema"
UPGRADING = ROOT / "docs" / "upgrading.md"
CHANGES = ROOT / "CHANGELOG.md"

STATUSES = {"queued", "processing", "completed", "failed", "cancelled"}

# How a claim that was made before the upgrade ends after it, and what its task is then.
ENDINGS = {
    "extend_task(id, claim_token)": "processing",
    "extend_tasks(array[id], array[claim_token])": "processing",
    "hold_task(id, claim_token)": "processing",
    "cancel_task(id)": "processing",
    "complete_task(id, claim_token)": "completed",
    "complete_tasks(array[id], array[claim_token])": "completed",
    "fail_task(id, claim_token, 'boom')": "queued",
    "fail_tasks(array[id], array[claim_token], array['boom'])": "queued",
    "release_task(id, claim_token)": "queued",
    "release_tasks(array[id], array[claim_token])": "queued",
}

# The queues are named for what becomes of their tasks.
FILL = """
select pgsched.configure_queue('due', 7, '2 seconds', '1 minute', 1000, '1 hour', '1 day');
select pgsched.pause_queue('paused');
select pgsched.enqueue_task('type', '{"a": 1}', queue, null, 3, 9, 'a key', 'another')
  from unnest(array['due', 'paused', 'claimed', 'lease over', 'cancel requested', 'completed',
                    'failed', 'cancelled', 'cancelled late', 'retried']) as queue;
select pgsched.enqueue_task('type', p_queue => 'later', p_run_at => clock_timestamp() + '1 day');
select pgsched.claim_task('sql', queue, '1 hour')
  from unnest(array['claimed', 'lease over', 'cancel requested', 'completed', 'failed',
                    'cancelled late', 'retried']) as queue;
select pgsched.cancel_task(id) from pgsched.tasks where queue like 'cancel%';
select pgsched.complete_task(id, claim_token, '{"b": 2}')
  from pgsched.tasks
 where queue = 'completed';
select pgsched.fail_task(id, claim_token, 'boom', '1 day', queue = 'failed')
  from pgsched.tasks
 where queue in ('failed', 'cancelled late', 'retried');
update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() where queue = 'lease over';
select pgsched.register_listener(pgsched.register_worker('sql', array['due'], 4), array['due']);
"""

APP = """
import time
from datetime import timedelta
from pathlib import Path

import pgsched

worker = pgsched.Worker(poll_interval=0.05, lease=6)


@worker.task("which")
def which(task):
    return pgsched.__file__


@worker.task("again")
def again(task):
    if task.attempt == 1:
        raise pgsched.Retry(timedelta(0))


@worker.task("write")
def write(task, conn):
    conn.execute("insert into public.effects values (%s)", [task.id])
    if task.payload:
        wait(task)


@worker.task("wait")
def wait(task):
    while not Path(task.payload).exists():
        time.sleep(0.01)


@worker.task("later")
async def later(task):
    if not Path(task.payload).exists():
        raise pgsched.Snooze(timedelta(seconds=0.1))
"""


@pytest.fixture(scope="module", params=IDS[:-1])
def older(request: pytest.FixtureRequest, server: Server) -> str:
    """Each migration but the newest, and the name of a database with the schema as it leaves it."""
    migration = request.param
    assert isinstance(migration, str)
    migrate(server.create_database(migration), to=migration)
    return migration


@pytest.fixture
def dsn(server: Server, older: str) -> Iterator[str]:
    """The URL of a database of this test's own, with that schema."""
    yield server.create_database("older", template=older)
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop database older with (force)")


def following(migration: str) -> str:
    return IDS[IDS.index(migration) + 1]


def contents(conn: psycopg.Connection) -> dict[str, list[dict[str, Any]]]:
    """The rows of every table of ours, in no order."""
    tables = conn.execute(
        "select relname from pg_class"
        " where relnamespace = 'pgsched'::regnamespace and relkind = 'r' and relname !~ 'yoyo'"
    )
    found = {}
    for (name,) in tables.fetchall():
        rows = conn.execute(f"select to_jsonb(t) from pgsched.{name} as t".encode())
        found[name] = [value for (value,) in rows]
    return found


def statuses(conn: psycopg.Connection) -> dict[str, int]:
    """How many tasks of FILL have each status."""
    rows = conn.execute(
        "select status, count(*) from pgsched.tasks where task_type = 'type' group by status"
    )
    return dict(rows.fetchall())


# In SQL


def test_all_rows_stay_and_claims_from_before_end_as_ever(
    server: Server, template: str, older: str, dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute(FILL)
    for call in ENDINGS:
        enqueue(conn, "type", queue=call[:63])
        conn.execute("select pgsched.claim_task('sql', %s, '1 hour')", [call[:63]])
    before = contents(conn)
    assert statuses(conn).keys() == STATUSES

    assert migrate(dsn) == IDS[IDS.index(older) + 1 :]
    assert dump(server, "older") == dump(server, template)
    after = contents(conn)
    for name, rows in before.items():
        new_rows = [{column: new[column] for column in rows[0]} for new in after[name]]
        assert sorted(new_rows, key=str) == sorted(rows, key=str)

    for call, status in ENDINGS.items():
        query = f"select pgsched.{call} from pgsched.tasks where queue = %s"
        conn.execute(query.encode(), [call[:63]])
        ended = "select status from pgsched.tasks where queue = %s"
        assert (call, conn.execute(ended, [call[:63]]).fetchall()) == (call, [(status,)])
    assert len(conn.execute(REAP).fetchall()) == 1
    assert conn.execute("select id from pgsched.claim_task('sql', 'due')").rowcount == 1
    retried = "select pgsched.retry_task(id) from pgsched.tasks where status = 'failed'"
    assert conn.execute(retried).rowcount == 1


def test_sessions_go_on_with_prepared_statements_and_open_transactions(
    dsn: str, conn: psycopg.Connection, connect: Connect
) -> None:
    sessions = {"prepared": connect(), "opened": connect(), "strict": connect()}
    claims = {name: f"select * from pgsched.claim_task('sql', '{name}')" for name in sessions}
    sessions["prepared"].execute(f"prepare claim as {claims['prepared']}".encode())
    claims["prepared"] = "execute claim"
    sessions["opened"].execute("begin")
    sessions["strict"].execute("begin isolation level repeatable read")
    for queue in 2 * [*sessions]:
        enqueue(conn, "type", queue=queue)

    def claim(name: str) -> tuple[int, UUID]:
        [(task_id, token, *_)] = sessions[name].execute(claims[name].encode())
        return task_id, token

    before = [(name, claim(name)) for name in sessions]
    migrate(dsn)
    for name, claimed in [*before, *((name, claim(name)) for name in sessions)]:
        sessions[name].execute("select pgsched.hold_task(%s, %s)", claimed)
        sessions[name].execute("select pgsched.complete_task(%s, %s)", claimed)
    for name in ("opened", "strict"):
        sessions[name].execute("commit")
    assert count(conn, "completed") == 6


SIGNATURES = """
select p.proname, array[p.prokind::text, p.proretset::text, p.prorettype::regtype::text],
       coalesce(jsonb_agg(jsonb_build_array(a.name, a.type::regtype::text, a.optional) order by a.n)
                  filter (where a.mode <> 't'), '[]'),
       coalesce(jsonb_agg(jsonb_build_array(a.name, a.type::regtype::text) order by a.n)
                  filter (where a.mode = 't'), '[]')
  from pg_proc as p
  left join lateral (
       select u.name, coalesce(u.mode, 'i') as mode, u.type, u.n,
              pg_get_function_arg_default(p.oid, u.n::integer) is not null as optional
         from unnest(p.proargnames, p.proargmodes::text[],
                     coalesce(p.proallargtypes, p.proargtypes::oid[]))
                with ordinality as u (name, mode, type, n)) as a on true
 where p.pronamespace = 'pgsched'::regnamespace and p.proname !~ '^_'
 group by p.oid
"""
COLUMNS = """
select c.relname, array_agg(row(a.attname, a.atttypid::regtype)::text order by a.attnum)
  from pg_class as c
  join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where c.relnamespace = 'pgsched'::regnamespace and c.relkind in ('r', 'v')
 group by c.relname
"""


def test_who_calls_the_older_functions_and_reads_the_older_columns_may_go_on(
    dsn: str, conn: psycopg.Connection
) -> None:
    """What is new comes last, and is optional where it is an argument."""
    functions, relations = conn.execute(SIGNATURES).fetchall(), conn.execute(COLUMNS).fetchall()
    migrate(dsn)
    newer = {name: rest for name, *rest in conn.execute(SIGNATURES)}
    for name, returned, arguments, results in functions:
        new_returned, new_arguments, new_results = newer[name]
        assert (name, new_returned) == (name, returned)
        assert (name, new_arguments[: len(arguments)]) == (name, arguments)
        assert [name for name, _, optional in new_arguments[len(arguments) :] if not optional] == []
        assert (name, new_results[: len(results)]) == (name, results)
    after: dict[str, list[str]] = dict(conn.execute(COLUMNS).fetchall())
    for name, before in relations:
        assert (name, after[name][: len(before)]) == (name, before)


GRANTS = """
create role by_hand;
grant usage on schema pgsched to by_hand;
grant execute on all routines in schema pgsched to by_hand;
grant select on all tables in schema pgsched to by_hand;
"""
RIGHTS = """
select p.proname, (aclexplode(p.proacl)).*
  from pg_proc as p where p.pronamespace = 'pgsched'::regnamespace and p.proname !~ '^_'
 union all
select c.relname, (aclexplode(c.relacl)).*
  from pg_class as c where c.relnamespace = 'pgsched'::regnamespace
 union all
select n.nspname, (aclexplode(n.nspacl)).* from pg_namespace as n where n.nspname = 'pgsched'
"""


def test_rights_that_were_given_by_hand_stay(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(GRANTS)
    before = set(conn.execute(RIGHTS).fetchall())
    migrate(dsn)
    assert before - set(conn.execute(RIGHTS).fetchall()) == set()
    conn.execute("drop owned by by_hand; drop role by_hand")


def test_a_call_that_waits_meanwhile_ends_as_ever(
    dsn: str, conn: psycopg.Connection, connect: Connect
) -> None:
    task_id = enqueue(conn, "type")
    [claim] = conn.execute("select id, claim_token from pgsched.claim_task('sql')")
    holder, waiter = connect(), connect()
    holder.execute("begin")
    holder.execute("select pgsched.hold_task(%s, %s)", claim)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiter.execute, "select pgsched.complete_task(%s, %s)", claim)
        wait_until(lambda: waiting(conn) == 1)
        migrate(dsn)
        holder.execute("rollback")
        assert call.result(PATIENCE).fetchall() == [(True,)]
    assert row(conn, task_id).status == "completed"


def test_a_migration_leaves_what_a_running_call_may_be_about_to_call(
    older: str, dsn: str, conn: psycopg.Connection
) -> None:
    """Also private functions: they may go with the migration after that."""
    query = """
        select oid::regprocedure::text from pg_proc
         where pronamespace = 'pgsched'::regnamespace
        """
    before = set(conn.execute(query).fetchall())
    migrate(dsn, to=following(older))
    assert before - set(conn.execute(query).fetchall()) == set()


# What docs/upgrading.md says

RELATIONS = """
select oid, relname, pg_relation_filenode(oid) as file
  from pg_class
 where relnamespace = 'pgsched'::regnamespace
"""
LOCKS = """
select distinct r.relname || ' ' || l.mode
  from pg_locks as l
  join pg_temp.relations as r on r.oid = l.relation
 where l.pid = pg_backend_pid() and l.mode <> 'AccessShareLock'
 order by 1
"""
REWRITTEN = """
select r.relname from pg_temp.relations as r where r.file <> pg_relation_filenode(r.oid)
"""


def described() -> dict[str, dict[str, str]]:
    """The rows of the table of migrations."""
    rows = table(section(UPGRADING, "Migrations"), "Migration")
    return {migration: each for each in rows for migration in code(each["Migration"])}


def test_every_migration_is_described_in_order() -> None:
    assert [*described()] == IDS


def test_the_release_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    release = project["version"].partition(".dev")[0]
    newest = table(section(UPGRADING, "What goes on working"), "Package")[-1]
    assert newest["Package"] == release
    assert code(newest["Brings schema"]) == [calls.NEWEST_SCHEMA]
    assert code(newest["Its workers take"]) == [calls.OLDEST_SCHEMA]
    [heading] = (each for each in headings(CHANGES) if release in each)
    changes = re.findall(r"^- Migration `(.*?)`", section(CHANGES, heading), re.MULTILINE)
    assert changes == [name for name, each in described().items() if each["Release"] == release]


def test_a_migration_locks_what_is_described_and_rewrites_nothing(
    older: str, conn: psycopg.Connection
) -> None:
    migration = following(older)
    with conn.transaction(force_rollback=True):
        conn.execute(f"create temp table relations as {RELATIONS}".encode())
        conn.execute((MIGRATIONS / f"{migration}.sql").read_bytes())
        locks = [lock for (lock,) in conn.execute(LOCKS)]
        assert code(described()[migration]["Locks"]) == locks
        assert conn.execute(REWRITTEN).fetchall() == []


# This driver, and schemas that it does not know


def set_version(conn: psycopg.Connection, version: str) -> None:
    conn.execute(
        "create or replace function pgsched.schema_version() returns text language sql"
        f" as $$ select '{version}' $$".encode()
    )


def test_the_driver_knows_the_newest_migration() -> None:
    assert calls.NEWEST_SCHEMA == NEWEST


def test_a_worker_refuses_a_schema_that_is_too_old_and_names_both(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    set_version(conn, "0000")
    known = f"{calls.OLDEST_SCHEMA} to {calls.NEWEST_SCHEMA}"
    with WorkerProcess(tmp_path, APP, "--dsn", dsn) as worker:
        assert worker.process.wait(PATIENCE) == 1
        refusal = f"Error: schema pgsched is at 0000, this package is made for {known}: run pgsched"
        assert refusal in worker.log.splitlines()[-1]
    assert conn.execute("select id from pgsched.workers").fetchall() == []


def test_a_worker_works_with_a_newer_schema_and_says_so_once(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgsched")
    set_version(conn, "9999")
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")
        end_sessions(conn)
        wait_for(conn, enqueue(conn, "noop"), "completed")
    assert caplog.text.count("connected: ") >= 2
    newer = [each.levelname for each in caplog.records if "is at 9999" in each.getMessage()]
    assert newer == ["INFO"]


def test_a_running_worker_waits_for_a_schema_that_went_away(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")
        conn.execute("alter schema pgsched rename to gone")
        end_sessions(conn)
        wait_until(lambda: caplog.text.count('schema "pgsched" does not exist') >= 3)
        conn.execute("alter schema gone rename to pgsched")
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_this_driver_works_with_the_oldest_schema_that_it_takes(
    server: Server, tmp_path: Path
) -> None:
    dsn = server.create_database("oldest")
    migrate(dsn, to=calls.OLDEST_SCHEMA)
    with psycopg.connect(dsn, autocommit=True) as conn:
        make_effects(conn)
        with start(tmp_path, dsn) as worker:
            assert_all_kinds_end(conn, tmp_path)
            finish(worker)
        here = Worker(dsn)
        here.task("noop")(lambda task: None)
        noop = enqueue(conn, "noop")
        assert here.run_due(conn) == [(noop, "completed")]
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop database oldest with (force)")


# With workers at work


def start(folder: Path, dsn: str, *options: str, driver: Path | None = None) -> WorkerProcess:
    """A worker of this driver, or of one that is installed elsewhere, with a log of its own."""
    home = folder / f"worker-{len(list(folder.iterdir()))}"
    home.mkdir()
    under = [] if driver is None else ["env", f"PYTHONPATH={driver}"]
    return WorkerProcess(home, APP, "--dsn", dsn, *options, under=under)


def finish(worker: WorkerProcess, *, previous: bool = False) -> None:
    """Stop it; nothing went wrong but what had to."""
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE) == 0
    expected = r"attempt failed: .* task_type=again |reaped: "
    if previous:
        # Of a task that it completed in a transaction while it extended leases.
        expected += r"|claim lost: task=\d+ attempt=1$"
    problem = rf"^.* (?:WARNING|ERROR) pgsched (?!{expected}).*$|Traceback"
    assert re.findall(problem, worker.log, re.MULTILINE) == []


def assert_all_kinds_end(conn: psycopg.Connection, folder: Path) -> None:
    """Tasks of all kinds are claimed, extended, snoozed, tried again and completed."""
    gate = folder / "gate"
    ids = {kind: enqueue(conn, kind, str(gate)) for kind in ("wait", "write", "later", "again")}
    wait_for(conn, ids["again"], "completed")
    wait_for_extension(conn, ids["wait"])
    gate.touch()
    attempts = {kind: wait_for(conn, task_id, "completed").attempt for kind, task_id in ids.items()}
    assert attempts == {"wait": 1, "write": 1, "later": 1, "again": 2}
    assert ids["write"] in written(conn)
    gate.unlink()


@contextmanager
def fed(dsn: str) -> Iterator[list[int]]:
    """Tasks meanwhile, more and more; all are completed at the end, and no attempt was lost."""
    ids: list[int] = []
    enough = Event()

    def feed() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for kind in cycle(("which", "write", "again")):
                ids.append(enqueue(conn, kind))
                if enough.wait(0.005):
                    return

    thread = Thread(target=feed)
    thread.start()
    try:
        yield ids
    finally:
        enough.set()
        thread.join(PATIENCE)
    with psycopg.connect(dsn, autocommit=True) as conn:
        completed = "select attempt from pgsched.tasks where id = any(%s) and status = 'completed'"
        wait_until(lambda: conn.execute(completed, [ids]).rowcount == len(ids))
        wrong = f"{completed} and attempt <> case task_type when 'again' then 2 else 1 end"
        assert conn.execute(wrong.encode(), [ids]).fetchall() == []


def more(ids: list[int], number: int = 50) -> None:
    """Return when so many more tasks are there."""
    enough = len(ids) + number
    wait_until(lambda: len(ids) >= enough)


def with_a_shard() -> str:
    """A migration that adds a column to the tasks, and brings the view and all functions."""
    view = (SCHEMA / "views.sql").read_text()
    for last, shard in (("null::jsonb as result", "t.shard"), ("f.result", "f.shard")):
        assert last in view
        view = view.replace(last, f"{last}, {shard}")
    contents = re.findall(r"functions/\w+\.sql", (SCHEMA / "schema.sql").read_text())
    functions = "\n".join((SCHEMA / path).read_text() for path in contents)
    return "".join(
        f"alter table pgsched.{name} add column shard integer not null default 0;\n"
        for name in ("finished_tasks", "scheduled_tasks")
    ) + re.sub(
        r"^create (function|procedure|view)",
        r"create or replace \1",
        f"{view}\n{functions}".replace(f"'{NEWEST}'", f"'{NEXT}'"),
        flags=re.MULTILINE,
    )


def test_a_column_is_added_while_workers_work_and_none_notices(
    older: str,
    dsn: str,
    conn: psycopg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = later_package(tmp_path / "migrations", with_a_shard())
    monkeypatch.setattr(migrate_module, "MIGRATIONS", package)
    make_effects(conn)
    conn.execute(FILL)
    before = statuses(conn)
    with start(tmp_path, dsn) as worker, start(tmp_path, dsn) as another:
        with fed(dsn) as ids:
            more(ids)
            assert migrate(dsn)[-1] == f"{NEXT}.more"
            more(ids)
        assert_all_kinds_end(conn, tmp_path)
        wait_until(lambda: statuses(conn)["queued"] == before["queued"] + 1)  # one was reaped
        for each in (worker, another):
            finish(each)
    before["queued"], before["processing"] = before["queued"] + 1, before["processing"] - 1
    assert statuses(conn) == before
    assert conn.execute("select distinct shard from pgsched.tasks").fetchall() == [(0,)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the previous driver is installed."""
    try:
        return previous.install(tmp_path_factory.mktemp("previous"))
    except previous.NoHistory as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


def which(conn: psycopg.Connection, queue: str = "default") -> str:
    """Where the driver is that a worker of the queue has."""
    return str(wait_for(conn, enqueue(conn, "which", queue=queue), "completed").result)


def listening(conn: psycopg.Connection) -> int:
    """How many workers show their presence and listen."""
    query = """
        select from pgsched.workers as w
         where w.presence and exists (select from pgsched.listeners as l where l.worker_id = w.id)
        """
    return conn.execute(query).rowcount


@pytest.mark.long
def test_workers_of_the_previous_driver_go_on_and_new_ones_join(
    server: Server,
    template: str,
    dsn: str,
    conn: psycopg.Connection,
    driver: Path,
    tmp_path: Path,
) -> None:
    make_effects(conn)
    gate = tmp_path / "before"
    idle = ("--queue", "idle", "--poll-interval", "3600", "--lease", "3600")
    with (
        start(tmp_path, dsn, driver=driver) as busy,
        start(tmp_path, dsn, *idle, driver=driver) as listener,
    ):
        begun = [enqueue(conn, kind, str(gate)) for kind in ("wait", "write")]
        wait_until(lambda: count(conn, "processing") == len(begun))
        wait_until(lambda: listening(conn) == 2)
        with fed(dsn) as ids:
            more(ids)
            conn.execute(FILL)
            before = statuses(conn)
            assert migrate(dsn)[-1] == IDS[-1]
            more(ids)
        assert dump(server, "older") == dump(server, template)

        # Claims from before, and from now.
        wait_for_extension(conn, begun[0])
        gate.touch()
        for task_id in begun:
            assert wait_for(conn, task_id, "completed").attempt == 1
        assert_all_kinds_end(conn, tmp_path)

        # It hears of tasks; its presence is still seen, and its end.
        assert which(conn, "idle").startswith(str(driver))
        held = enqueue(conn, "wait", str(tmp_path / "never"), queue="idle")
        wait_for(conn, held, "processing")
        listener.process.kill()
        assert wait_for(conn, held, "queued").attempt == 1
        conn.execute("select pgsched.cancel_task(%s)", [held])

        # Those that are done with older workers.
        with start(tmp_path, dsn) as new, start(tmp_path, dsn, driver=driver) as late:
            wait_until(lambda: listening(conn) == 3)
            wait_until(lambda: not which(conn).startswith(str(driver)))
            busy.process.send_signal(signal.SIGSTOP)
            finish(new)
            assert which(conn).startswith(str(driver))
            busy.process.send_signal(signal.SIGCONT)
            finish(late, previous=True)
        finish(busy, previous=True)
    before["queued"], before["processing"] = before["queued"] + 1, before["processing"] - 1
    assert statuses(conn) == before


@pytest.mark.long
def test_the_previous_installer_changes_nothing_and_says_that_the_schema_is_newer(
    server: Server, dsn: str, driver: Path
) -> None:
    migrate(dsn)

    def everything() -> str:
        done = server.run("pg_dump", "-n", "pgsched", "older", check=True, stdout=subprocess.PIPE)
        return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)

    before = everything()
    done = subprocess.run(
        [sys.executable, "-m", "pgsched", "migrate", "--dsn", dsn],
        env={**os.environ, "PYTHONPATH": str(driver)},
        cwd=driver,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "schema pgsched is newer than this package" in done.stderr
    assert everything() == before
