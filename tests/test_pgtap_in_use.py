"""The pgTAP files in a database that is in use: they pass there, and it stays as it was."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from run_pgtap import ROOT, TESTS, TOOLS, prove, ran
from workers import ask, quick, running, wait_until

from pgsched.embedded import Server
from pgsched.migrate import migrate

DOCUMENT = ROOT / "docs" / "testing.md"
FILES = len(list(TESTS.glob("*.sql")))
PGTAP = TOOLS / "pgtap.sql"
DATABASE = "in_use"
ROLES = ["in_use_owner", "in_use_worker", "in_use_analyst"]

FILL = """
create schema shop;
create table shop.tasks (id bigint primary key, status text, claim_token uuid);
create function shop.plan(integer) returns text language sql as 'select null';
grant all on schema shop to public;
grant all on all tables in schema shop to public;

grant usage on schema pgsched to in_use_worker, in_use_analyst;
grant execute on all functions in schema pgsched to in_use_worker with grant option;
grant select on all tables in schema pgsched to in_use_analyst;
grant update (payload) on pgsched.scheduled_tasks to in_use_analyst;

insert into pgsched.queues (
       name, paused, max_attempts, retry_delay, retry_delay_max, max_payload_bytes, keep_completed)
values ('default', false, 3, '1 day', '10 days', 2, '0'), ('mail', true, 5, '0', '0', 2000, null),
       ('null', true, 1, null, null, 2, null);

-- Some ids are low, some past 32 bits; half of the times are over.
create temporary view given as
select n, case when n % 2 = 0 then n else 9000000000 + n end as id,
       (array['default', 'mail', 'Mail', 'bulk', 'null'])[1 + n % 5] as queue, n % 3 > 0 as claimed,
       clock_timestamp() + interval '1 minute' * (5000 - n % 10000) as at
  from generate_series(1, 12000) as n;
insert into pgsched.scheduled_tasks (
       id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts, claim_token,
       claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key, cancel_requested_at,
       last_error, created_at)
select id, queue, 'a', '{}', case when claimed then 'processing' else 'queued' end, n % 10, at,
       n % 25, 20, case when claimed then gen_random_uuid() end, case when claimed then 'w' end,
       case when claimed then at end, case when claimed then at end,
       case when n <= 20 then (array['u', 'k', 'K', 'running'])[1 + n / 5 % 4] end, 'c',
       case when claimed and n % 7 = 0 then at end, case when n % 4 = 0 then 'before' end, at
  from given;
insert into pgsched.finished_tasks (
       id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts, claim_token,
       unique_key, created_at, finished_at, result)
select id + 20000, queue, 'a', '{}', (array['completed', 'failed', 'cancelled'])[1 + n % 3], n % 10,
       at, 1, 20, gen_random_uuid(), 'k', at, at - interval '1 day' * n, '1'
  from given;
select setval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'), 9000100000);

insert into pgsched.workers (id, name, queues, slots, started_at, seen_at, presence)
select n, name, '{default,bulk}', 10, clock_timestamp() - interval '1 year',
       clock_timestamp() - age, name = 'killed'
  from (values (1, 'w', interval '1 second'), (2, 'gone', '2 days'), (3, 'lost', '25 hours'),
               (4, 'killed', '1 minute')) as given (n, name, age);
insert into pgsched.listeners (queue, worker_id) values ('default', 1), ('default', 2);
select setval(pg_get_serial_sequence('pgsched.workers', 'id'), 5000000000);
"""

# Each row with the last transaction that locked or changed it, also when that was rolled back.
LOCKS = """
select format('task %s: %s', id, xmax) from pgsched.scheduled_tasks
 union all
select format('finished task %s: %s', id, xmax) from pgsched.finished_tasks
 union all
select format('queue %s: %s', name, xmax) from pgsched.queues
 union all
select format('worker %s: %s', name, xmax) from pgsched.workers
"""


@pytest.fixture(autouse=True, scope="module")
def pgtap_is_there() -> None:
    assert PGTAP.exists(), "make pgtap brings pgTAP"


@contextmanager
def database_in_use(server: Server, attribute: str) -> Iterator[str]:
    """A database full of tasks, and its URL for its owner, whose role has this attribute.

    pgTAP is in a schema of its own there, which is on nobody's search path.
    """
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        try:
            for role in ROLES:
                admin.execute(f"create role {role} login".encode())
            admin.execute(f"alter role in_use_owner {attribute}".encode())
            admin.execute(f"create database {DATABASE} owner in_use_owner".encode())
            dsn = server.dsn(DATABASE, "in_use_owner")
            migrate(dsn)
            with psycopg.connect(dsn, autocommit=True) as owner:
                owner.execute(FILL.encode())
                owner.execute('create schema "Test tools"; set search_path = "Test tools"')
                owner.execute(PGTAP.read_bytes())
            yield dsn
        finally:
            admin.execute(f"drop database if exists {DATABASE} with (force)".encode())
            for role in ROLES:
                admin.execute(f"drop role if exists {role}".encode())


@pytest.fixture
def database(server: Server, dsn: str) -> dict[str, str]:
    """libpq's variables for this test's database, which has pgTAP and a task that is due."""
    server.run("psql", "-Xqv", "ON_ERROR_STOP=1", "-d", dsn, "-f", PGTAP, check=True)
    ask(dsn, "select pgsched.enqueue_task('a', p_queue => 'mail')")
    names = {"dbname": "PGDATABASE"}
    settings = conninfo_to_dict(dsn).items()
    return {names.get(name, f"PG{name.upper()}"): str(value) for name, value in settings}


def dump(server: Server) -> str:
    """Everything in the database, and all roles, but not how far its sequences are."""
    dumps = [("pg_dump", "--create", DATABASE), ("pg_dumpall", "--globals-only")]
    text = "".join(server.run(*each, capture_output=True, check=True).stdout for each in dumps)
    # A dump's restrict is followed by a random word.
    passing = r"^(SELECT pg_catalog\.setval\(.*|\\(un)?restrict .*)$"
    return re.sub(passing, "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "attribute", [pytest.param("superuser", marks=pytest.mark.long), "createrole"]
)
def test_every_file_passes_and_leaves_no_trace(server: Server, attribute: str) -> None:
    with database_in_use(server, attribute) as dsn:
        before, locks_before = dump(server), ask(dsn, LOCKS)
        done = prove(server, DATABASE, user="in_use_owner")
        assert done.returncode == 0, done.stdout
        files, _ = ran(done.stdout)
        assert files == FILES
        assert dump(server) == before
        locked = {row.rpartition(":")[0] for row in {*ask(dsn, LOCKS)}.difference(locks_before)}
        settings = {"queue default", "queue mail", "queue null"}
        workers = {"worker gone", "worker lost", "worker killed"}
        assert locked == {*settings, *workers}  # as docs/testing.md says
        assert not rights_are_skipped(server)


@pytest.mark.long
def test_every_file_passes_while_others_work(server: Server, reaping_often: None) -> None:
    """A worker empties two queues, and a transaction holds what the worker leaves alone.

    Here the owner may not create a role.
    """
    finished = "select count(*) from pgsched.finished_tasks where task_type = 'a'"
    with database_in_use(server, "nocreaterole") as dsn, psycopg.connect(dsn) as holder:
        holder.execute(f"alter database {DATABASE} set lock_timeout = '5s'".encode())
        holder.commit()
        for held in (
            "scheduled_tasks where queue not in ('default', 'bulk')",
            "finished_tasks",
            "workers where name <> 'w'",
        ):
            holder.execute(f"select from pgsched.{held} for update".encode())
        worker = quick(dsn, queues=["default", "bulk"])
        worker.task("a")(lambda task: None)
        [before] = ask(dsn, finished)
        with running(worker):
            wait_until(lambda: ask(dsn, finished) > [before])
            done = prove(server, DATABASE, user="in_use_owner")
            assert done.returncode == 0, done.stdout
            assert rights_are_skipped(server)


def rights_are_skipped(server: Server) -> bool:
    """Whether the tests of rights are skipped, since the owner may not create a role for them."""
    file = str(TESTS / "schema_version.sql")
    options = ["-XqAt", "-U", "in_use_owner", "-d", DATABASE, "-f", file]
    output = server.run("psql", *options, capture_output=True, check=True).stdout
    return "# SKIP in_use_owner may not create a role" in output


def test_a_file_waits_for_that_of_another_run(
    server: Server, database: dict[str, str], dsn: str
) -> None:
    fixtures = (TESTS / "fixtures.sql").read_text(encoding="utf-8")
    [lock] = re.findall(r"^select pg_advisory_xact_lock\(.*\)(?= )", fixtures, re.MULTILINE)
    waiting = "select locktype from pg_locks where not granted"
    with ThreadPoolExecutor(1) as pool:
        with psycopg.connect(dsn) as another:
            another.execute(lock.encode())
            run = pool.submit(prove, server, database["PGDATABASE"], TESTS / "claim_task.sql")
            wait_until(lambda: ask(dsn, waiting) == ["advisory"])
        assert run.result().returncode == 0, run.result().stdout


def fenced(language: str) -> list[str]:
    """What stands in the blocks of the document in this language."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_documented_test_passes(
    server: Server, database: dict[str, str], dsn: str, tmp_path: Path
) -> None:
    [example] = fenced("plpgsql")
    (tmp_path / "order_test.sql").write_text(example, encoding="utf-8")
    done = prove(server, database["PGDATABASE"], tmp_path)
    assert (done.returncode, ran(done.stdout)) == (0, (1, 4)), done.stdout
    assert ask(dsn, "select task_type from pgsched.tasks") == ["a"]


def test_the_documented_script_passes(
    server: Server, database: dict[str, str], tmp_path: Path
) -> None:
    """Of the files it has two here: the others pass above."""
    (tmp_path / "pgtap").mkdir()
    for name in ("fixtures.sql", "schema_version.sql"):
        shutil.copy(TESTS / name, tmp_path / "pgtap")
    [script] = [block for block in fenced("sh") if "migrate" in block]
    path = [Path(sys.executable).parent, TOOLS, server.bin_dir, os.environ["PATH"]]
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **database, "PATH": os.pathsep.join(map(str, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode, ran(done.stdout)[0]) == (0, 2), done.stdout
