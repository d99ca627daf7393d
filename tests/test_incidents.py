"""Each situation of docs/incidents.md is made, and cured by the commands that the page gives."""

import logging
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import place as places
import psycopg
import pytest
from command_line import pgsched
from installing import NEXT, later_package, waiting
from oracle import Connect
from place import Place, instead, says
from psycopg.conninfo import make_conninfo
from test_cli_doctor import found, hurry
from test_docs import ROOT, headings, read
from workers import (
    NEWEST,
    PATIENCE,
    WorkerProcess,
    count,
    end_sessions,
    quick,
    row,
    running,
    shorten_grace,
    wait_for,
    wait_until,
)

from pgsched import Task, enqueue
from pgsched import migrate as migrate_module
from pgsched.embedded import Server

INCIDENTS = ROOT / "docs" / "incidents.md"

blocks = partial(places.blocks, INCIDENTS)


@pytest.fixture
def place(server: Server, dsn: str, tmp_path: Path) -> Place:
    return Place(server, dsn, tmp_path)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server with room for few connections and few locks, and two roles."""
    settings = {
        "max_connections": "20",
        "max_locks_per_transaction": "10",
        "fsync": "off",
        "idle_in_transaction_session_timeout": "10min",
    }
    with Server(settings=settings) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute("create role shop login; create role shop_worker login password 'old'")
        yield server


@pytest.fixture
def narrow_place(narrow: Server, tmp_path: Path) -> Iterator[Place]:
    dsn = narrow.create_database("app")
    migrate_module.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select pgsched.grant_access('shop_worker', 'worker')")
    yield Place(narrow, dsn, tmp_path)
    with psycopg.connect(narrow.dsn(), autocommit=True) as conn:
        conn.execute("drop database app with (force)")


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What was logged, as the command line writes it, without the time."""
    return "\n".join(f"{each.levelname} {each.name} {each.getMessage()}" for each in caplog.records)


def add_tasks(conn: psycopg.Connection, number: int, **columns: Any) -> None:
    """Add queued tasks as many calls of enqueue_task would."""
    made = {"queue": "mail", "task_type": "send_mail", "created_at": "now", **columns}
    conn.execute(
        """
        insert into pgsched.scheduled_tasks (
               queue, task_type, payload, priority, run_at, max_attempts, created_at)
        select %(queue)s, %(task_type)s, '{}', 5, now(), 20, %(created_at)s
          from generate_series(1, %(number)s)
        """,
        {**made, "number": number},
    )


def add_finished(conn: psycopg.Connection, number: int, **columns: Any) -> None:
    """Add tasks that ended yesterday; their ids, as those of new tasks, come from the sequence."""
    made = {"status": "completed", "error": None, "key": None, **columns}
    conn.execute(
        """
        insert into pgsched.finished_tasks (
               id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
               last_error, unique_key, created_at, finished_at)
        select nextval('pgsched.scheduled_tasks_id_seq'), 'mail', 'send_mail', '{}', %(status)s, 5,
               now(), 5, 5, %(error)s, %(key)s, now(), now() - interval '23 hours'
          from generate_series(1, %(number)s)
        """,
        {**made, "number": number},
    )


def size(conn: psycopg.Connection, table: str) -> int:
    [(size,)] = conn.execute("select pg_total_relation_size(%s)", [f"pgsched.{table}"])
    assert isinstance(size, int)
    return size


def test_every_situation_is_tried() -> None:
    situations = headings(INCIDENTS)[1:]
    assert len(situations) >= 10
    tests = read(Path(__file__))
    assert [name for name in situations if f'heading = "{name}"' not in tests] == []


# Speed and room


def test_slow_tasks_that_fill_all_slots_are_put_behind_the_others(
    place: Place, conn: psycopg.Connection
) -> None:
    heading = "The backlog grows though workers run"
    [look, more_slots] = blocks(heading, "sh")
    [top, *_] = blocks(heading, "text")
    [with_what, behind] = blocks(heading, "sql")
    worker, gate = quick(place.dsn, queues=["mail"], concurrency=10), Event()

    @worker.task("report")
    def report(task: Task) -> None:
        gate.wait(PATIENCE)

    add_tasks(conn, 12, task_type="report")
    with ExitStack() as stack:
        stack.enter_context(running(worker))
        stack.callback(gate.set)
        wait_until(lambda: count(conn, "processing") == 10)
        add_tasks(conn, 3)
        says(place.shell(look), top)
        assert re.search(r"mail +\| report +\| +10 ", place.sql(with_what))
        for number in ("2", "0"):
            assert place.sql(behind).split() == ["count", "-------", number, "(1", "row)"]
        source = "from pgsched import Worker\nworker = Worker()\n@worker.task('send_mail')\n"
        program, _, app, *options = shlex.split(more_slots)
        assert (program, app) == ("pgsched", "app")
        options += ["--dsn", place.dsn]
        with WorkerProcess(place.folder, f"{source}def send_mail(task): pass\n", *options):
            wait_until(lambda: count(conn, "completed") == 3)
        assert count(conn, "processing") >= 10


def test_an_old_transaction_is_found_and_ended(place: Place, connect: Connect) -> None:
    heading = "Claims get slow"
    [look] = blocks(heading, "sh")
    [doctor, _] = blocks(heading, "text")
    [end] = blocks(heading, "sql")
    conn, holder = connect(), connect(application_name="report")
    hurry(conn)
    holder.execute("begin isolation level repeatable read")
    holder.execute("select from pgsched.queues")
    add_tasks(conn, 50_001)
    conn.execute("delete from pgsched.scheduled_tasks")
    wait_until(lambda: [level for level, _ in found(conn, "snapshots")] == ["warning"])
    wait_until(lambda: found(conn, "vacuum"))
    says(place.shell(look, code=1), doctor)
    conn.execute("vacuum pgsched.scheduled_tasks")
    assert found(conn, "vacuum")
    assert re.search(r"\| report +\| t\n", place.sql(instead(end, "10 minutes", "0 minutes")))
    wait_until(lambda: not found(conn, "vacuum"))
    assert "Dead rows are removed" in place.shell(look, code=1)


def test_a_table_shrinks_while_workers_and_a_long_reader_are_there(
    place: Place, connect: Connect
) -> None:
    heading = "A table stays large"
    [look, shrink] = blocks(heading, "sh")
    [sizes] = blocks(heading, "text")
    [indexes_only] = blocks(heading, "sql")
    conn, reader = connect(options="-c lock_timeout=10s"), connect(autocommit=False)
    add_tasks(conn, 20_000)
    conn.execute("delete from pgsched.scheduled_tasks")
    conn.execute("vacuum (truncate off) pgsched.scheduled_tasks")
    worker = quick(place.dsn, queues=["mail"])
    worker.task("send_mail")(lambda task: None)
    with running(worker):
        says(place.shell(look), sizes)
        large = size(conn, "scheduled_tasks")
        assert place.sql(indexes_only) == ""
        smaller = size(conn, "scheduled_tasks")
        assert smaller < large
        reader.execute("select from pgsched.scheduled_tasks")
        process = subprocess.Popen(
            ["sh", "-c", instead(shrink, "sleep 5", "sleep 0.1")],
            env=place.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process, closing(reader):
            wait_until(lambda: waiting(conn))
            enqueued = enqueue(conn, "send_mail", queue="mail")  # behind it, for a moment
            wait_until(lambda: count(conn, "completed") == 1)
            reader.rollback()
            assert process.stdout
            output = process.stdout.read()
        assert process.returncode == 0
        assert output.count("canceling statement due to lock timeout") >= 1
        assert output.endswith("VACUUM\n")
        assert size(conn, "scheduled_tasks") < smaller / 2
        assert row(conn, enqueued).status == "completed"


def test_finished_tasks_go_and_the_loop_ends(place: Place, conn: psycopg.Connection) -> None:
    heading = "Finished tasks fill the disk"
    [look, prune, at_once] = blocks(heading, "sh")
    [sizes] = blocks(heading, "text")
    add_finished(conn, 25_000)
    add_finished(conn, 1, status="failed")
    says(place.shell(look), sizes)
    conn.execute("create role nobody_here login")
    try:
        assert "denied" in place.shell(prune, code=1, PGUSER="nobody_here")
    finally:
        conn.execute("drop role nobody_here")
    pruned = place.shell(prune)
    assert sum(map(int, re.findall(r"^\d+$", pruned, re.MULTILINE))) == 25_000
    assert pruned.endswith("VACUUM\n")
    assert [count(conn, status) for status in ("completed", "failed")] == [0, 1]
    place.shell(at_once)
    assert size(conn, "finished_tasks") < 100_000
    enqueue(conn, "send_mail", queue="mail")
    conn.execute(
        "select pgsched.complete_task(id, claim_token) from pgsched.claim_task('w', 'mail')"
    )
    assert conn.execute("select id from pgsched.tasks").fetchall() == []


# Workers and tasks


@pytest.mark.usefixtures("reaping_often")
def test_the_task_that_kills_its_worker_is_found_and_cancelled(
    place: Place, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    heading = "A task kills its worker, again and again"
    [cancel] = blocks(heading, "sh")
    [log, _] = blocks(heading, "text")
    [which] = blocks(heading, "sql")
    caplog.set_level(logging.INFO, "pgsched")
    shorten_grace(conn, 0.1)
    conn.execute("alter sequence pgsched.scheduled_tasks_id_seq restart 4711")
    source = """
import os, time
from pgsched import Worker
worker = Worker()
@worker.task("convert")
def convert(task):
    while not os.path.exists("beside"): time.sleep(0.01)
    os.kill(os.getpid(), 9)
@worker.task("send_mail")
def send_mail(task):
    open("beside", "w").close()
    if task.attempt == 1: time.sleep(30)
"""
    enqueue(conn, "convert", queue="mail")
    enqueue(conn, "send_mail", queue="mail")
    options = ["--queue", "mail", "--dsn", place.dsn]
    with WorkerProcess(place.folder, source, *options) as killed:
        assert killed.process.wait(PATIENCE) == -9
    with running(quick(place.dsn, queues=["other"])):
        wait_until(lambda: count(conn, "queued") == 2)
    says(logged(caplog), log)
    output = place.sql(which)
    assert re.search(r" 4711 \| mail +\| convert +\| queued \| +1 \| worker .* was lost", output)
    assert re.search(r" 4712 \| mail +\| send_mail \| queued \| +1 \| worker .* was lost", output)
    assert re.search(r"^status +cancelled$", place.shell(cancel), re.MULTILINE)
    with WorkerProcess(place.folder, source, *options, "--drain") as worker:
        assert worker.process.wait(PATIENCE) == 0
    assert row(conn, 4712).status == "completed"


def test_tasks_of_a_lost_machine_come_back(place: Place, connect: Connect) -> None:
    heading = "Tasks stay processing after a machine was lost"
    [look, reap] = blocks(heading, "sh")
    [doctor, _] = blocks(heading, "text")
    [end] = blocks(heading, "sql")
    conn, holder, handler = connect(), connect(), connect()
    elsewhere = connect(dbname="postgres")
    [left, held, at_work] = [enqueue(conn, "send_mail", queue="mail") for _ in range(3)]
    conn.execute("select pgsched.claim_task('node', 'mail', p_limit => 3)")
    conn.execute(
        "update pgsched.scheduled_tasks set lease_expires_at = now() - interval '1 hour'"
        " where id <> %s",
        [at_work],
    )
    hold = "select pgsched.hold_task(id, claim_token) from pgsched.tasks where id = %s"
    for session, statement, task_id in (
        (holder, hold, held),
        (handler, hold, at_work),
        (elsewhere, "select pg_advisory_xact_lock(1337, %s)", held),
    ):
        session.execute("begin")
        session.execute(statement, [task_id])
    assert place.shell(reap) == f"Task {left} is queued.\n"
    says(place.shell(look, code=1), doctor)
    assert place.shell(reap) == "No task is held by a worker that is lost.\n"
    assert re.search(rf" {held} \| +\d+ \| .* \| t\n\(1 row\)", place.sql(end))
    assert place.shell(reap) == f"Task {held} is queued.\n"
    for session in (handler, elsewhere):
        session.execute("commit")


def fill_up(**arguments: Any) -> list[psycopg.Connection]:
    """As many connections as the server lets in."""
    connections: list[psycopg.Connection] = []
    with suppress(psycopg.OperationalError):
        while True:
            connections.append(psycopg.connect(**arguments))
    return connections


def test_workers_connect_when_a_role_that_took_all_connections_is_bounded(
    narrow_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    heading = "Workers cannot connect"
    [look, who, bound] = blocks(heading, "sh")
    [doctor, sessions, _] = blocks(heading, "text")
    [end] = blocks(heading, "sql")
    place = narrow_place
    caplog.set_level(logging.INFO, "pgsched")
    hogs = fill_up(
        conninfo=place.server.dsn("app", "shop"), application_name="shop", autocommit=True
    )
    worker = quick(place.server.dsn("app", "shop_worker"), queues=["mail"])
    worker.task("send_mail")(lambda task: None)
    with running(worker):
        wait_until(lambda: "connection slots are reserved" in logged(caplog))
        says(place.shell(look, code=1, PGUSER="shop_worker"), doctor)
        says(place.shell(who), sessions)
        place.shell(bound)
        assert f" {len(hogs)}\n(1 row)" in place.sql(end)
        for hog in hogs:
            hog.close()
        wait_until(lambda: "INFO pgsched connected" in logged(caplog))
        with psycopg.connect(place.dsn, autocommit=True) as conn:
            wait_for(conn, enqueue(conn, "send_mail", queue="mail"), "completed")
        again = fill_up(conninfo=place.server.dsn("app", "shop"))
        assert len(again) == 10
        for hog in again:
            hog.close()


def test_a_new_password_is_read_from_the_password_file(
    narrow_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place = narrow_place
    access = place.server.folder / "data" / "pg_hba.conf"
    before = access.read_text()
    passwords = place.folder / "pgpass"
    passwords.touch(mode=0o600)
    passwords.write_text("*:*:*:shop_worker:old\n")
    dsn = make_conninfo(place.server.dsn("app", "shop_worker"), passfile=str(passwords))
    with psycopg.connect(place.dsn, autocommit=True) as conn, ExitStack() as stack:
        access.write_text(f"local all shop_worker scram-sha-256\n{before}")
        stack.callback(access.write_text, before)
        conn.execute("select pg_reload_conf()")
        wait_until(lambda: pgsched("status", "--dsn", f"{dsn} password=no").exit_code == 1)
        worker = quick(dsn, queues=["mail"])
        worker.task("send_mail")(lambda task: None)
        stack.enter_context(running(worker))
        wait_for(conn, enqueue(conn, "send_mail", queue="mail"), "completed")
        conn.execute("alter role shop_worker password 'new'")
        wait_for(conn, enqueue(conn, "send_mail", queue="mail"), "completed")
        end_sessions(conn)
        wait_until(lambda: "password authentication failed" in logged(caplog))
        passwords.write_text("*:*:*:shop_worker:new\n")
        wait_for(conn, enqueue(conn, "send_mail", queue="mail"), "completed")


def take_locks(conn: psycopg.Connection, spare: int) -> int:
    """Fill the server's lock table, all but a few slots, until the transaction ends."""
    conn.execute("begin")
    taken, step = 0, 256
    while step:
        try:
            with conn.transaction():
                conn.execute(
                    "select count(pg_advisory_xact_lock(7, %s + n))"
                    " from generate_series(1, %s::integer) as n",
                    [taken, step],
                )
            taken += step
        except psycopg.errors.OutOfMemory:
            step //= 2
    conn.execute("rollback; begin")
    conn.execute(
        "select count(pg_advisory_xact_lock(7, n)) from generate_series(1, %s::integer) as n",
        [taken - spare],
    )
    return taken - spare


def test_a_full_lock_table_loses_nothing_and_whoever_fills_it_is_found(
    narrow_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    heading = "Out of shared memory"
    [who] = blocks(heading, "sh")
    [log, locks] = blocks(heading, "text")
    place = narrow_place
    worker = quick(place.dsn, queues=["mail"], concurrency=50)
    worker.task("send_mail")(lambda task: None)
    shop = place.server.dsn("app", "shop")
    hog = psycopg.connect(shop, autocommit=True, application_name="import")
    with running(worker), closing(hog), psycopg.connect(place.dsn, autocommit=True) as conn:
        wait_until(lambda: conn.execute("select from pgsched.workers where presence").fetchall())
        taken = take_locks(hog, spare=20)
        assert taken >= 10 * 20 - 20  # what there is room for at least
        add_tasks(conn, 50)
        wait_until(lambda: "claim: error='OutOfMemory" in logged(caplog))
        says(logged(caplog), log)
        output = place.shell(who)
        says(output, locks)
        [(pid, most)] = re.findall(r"^ +(\d+) .* (\d+)\n\(1 row\)", output, re.MULTILINE)
        assert (int(pid), int(most)) == (hog.info.backend_pid, taken)
        place.shell(f"kill {pid}")
        wait_until(lambda: count(conn, "completed") == 50)


# By mistake


def test_tasks_that_were_added_by_mistake_are_cancelled_in_steps(
    place: Place, conn: psycopg.Connection
) -> None:
    heading = "A million tasks were added by mistake"
    [pause, resume] = blocks(heading, "sh")
    [cancel] = blocks(heading, "sql")
    add_tasks(conn, 2500, created_at="2026-11-30 09:01 UTC")
    others: list[dict[str, Any]] = [{}, {"task_type": "other"}, {"queue": "other"}]
    for other in others:
        add_tasks(conn, 1, **{"created_at": "2026-11-30 09:06 UTC", **other})
    place.shell(pause)
    assert conn.execute("select id from pgsched.claim_task('w', 'mail')").fetchall() == []
    conn.execute("create role an_admin login")
    conn.execute("select pgsched.grant_access('an_admin', 'admin')")
    conn.execute("grant select on pgsched.tasks to an_admin")
    admin = place._replace(dsn=place.server.dsn(conn.info.dbname, "an_admin"))
    assert admin.sql(cancel) == ""
    conn.execute("drop owned by an_admin; drop role an_admin")
    steps = conn.execute("select count(*) from pgsched.finished_tasks group by xmin").fetchall()
    assert sorted(number for (number,) in steps) == [501, 999, 1000]
    assert [count(conn, status) for status in ("cancelled", "queued")] == [2500, 3]
    assert re.search(r"^mail \(paused\) +2 ", place.shell(resume), re.MULTILINE)
    assert len(conn.execute("select id from pgsched.claim_task('w', 'mail')").fetchall()) == 1


def test_what_a_release_failed_is_retried_in_steps_behind_the_others(
    place: Place, conn: psycopg.Connection
) -> None:
    heading = "A release failed 50,000 tasks"
    [look] = blocks(heading, "sh")
    [doctor] = blocks(heading, "text")
    [retry] = blocks(heading, "sql")
    add_finished(conn, 1500, status="failed", error="KeyError: 'to_address'")
    add_finished(conn, 1, status="failed", error="ValueError: no")
    add_finished(conn, 1, status="failed", error="KeyError: 'to_address'", key="taken")
    taken = enqueue(conn, "send_mail", queue="mail", unique_key="taken")
    says(place.shell(look, code=1), doctor)
    assert place.sql(retry) == ""
    retried = conn.execute(
        """
        select count(*), count(distinct run_at), count(distinct xmin::text),
               min(run_at) > now() - interval '1 minute',
               max(run_at) < now() + interval '61 minutes'
          from pgsched.scheduled_tasks
         where priority = 9
        """
    ).fetchall()
    assert retried == [(1500, 1500, 2, True, True)]
    assert [count(conn, status) for status in ("failed", "queued")] == [2, 1501]
    assert row(conn, taken).status == "queued"


def indexes(conn: psycopg.Connection) -> dict[str, str]:
    """The indexes that belong to no constraint, and what makes them."""
    rows = conn.execute(
        """
        select i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid)
          from pg_index as i
          join pg_class as c on c.oid = i.indexrelid
         where c.relnamespace = 'pgsched'::regnamespace and i.indisvalid
           and not exists (select from pg_constraint as o where o.conindid = i.indexrelid)
        """
    )
    return {name.removeprefix("pgsched."): text for name, text in rows}


def test_a_missing_index_is_built_from_the_script(place: Place, conn: psycopg.Connection) -> None:
    heading = "An index is missing or not valid"
    [look, build] = blocks(heading, "sh")
    [doctor] = blocks(heading, "text")
    there = indexes(conn)
    conn.execute("drop index pgsched.scheduled_tasks_claim_idx")
    says(place.shell(look, code=1), doctor)
    # In two lines, unique, in one line: each is written in one of these ways.
    for name in (
        "scheduled_tasks_claim_idx",
        "scheduled_tasks_unique_key_idx",
        "listeners_worker_id_idx",
    ):
        conn.execute(f"drop index if exists pgsched.{name}".encode())
        place.shell(instead(build, "scheduled_tasks_claim_idx", name))
    assert indexes(conn) == there
    assert found(conn, "objects") == []


def test_an_index_that_is_not_valid_is_built_again(place: Place, conn: psycopg.Connection) -> None:
    [statement] = re.findall(r"`(reindex index concurrently)`", read(INCIDENTS))
    name = "pgsched.scheduled_tasks_claim_idx"
    conn.execute("update pg_index set indisvalid = false where indexrelid = %s::regclass", [name])
    assert [level for level, _ in found(conn, "objects")] == ["error"]
    place.sql(f"{statement} {name};")
    assert found(conn, "objects") == []


def test_a_migration_that_waits_says_for_whom(
    place: Place, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    heading = "A migration waits for a lock"
    [migrate, again] = blocks(heading, "sh")
    [error] = blocks(heading, "text")
    text = "alter table pgsched.scheduled_tasks add column more integer;\n"
    folder = later_package(place.folder / "later", text)
    monkeypatch.setattr(migrate_module, "MIGRATIONS", folder)
    migrate_module.migrate(place.dsn, to=NEWEST)
    holder = connect(application_name="report")
    holder.execute("begin; select from pgsched.scheduled_tasks")
    refused = pgsched(*shlex.split(migrate)[1:], "--dsn", place.dsn)
    assert refused.exit_code == 7
    says(refused.stderr, error)
    end, migrate = again.splitlines()
    place.shell(instead(end, "4711", holder.info.backend_pid))
    done = pgsched(*shlex.split(migrate)[1:], "--dsn", place.dsn)
    assert (done.exit_code, done.stdout) == (0, f"applied {NEXT}.more\n")
