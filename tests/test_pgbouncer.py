"""Everything through a transaction-mode pooler with two sessions: see `make test-pgbouncer`."""

import itertools
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import oracle
import psycopg
import pytest
from installing import IDS
from pgbouncer import POOL_SIZE, PgBouncer
from psycopg import sql
from psycopg.types.json import Jsonb
from workers import (
    LISTENERS,
    NEWEST,
    PATIENCE,
    REAP,
    WorkerProcess,
    ask,
    count,
    install,
    quick,
    row,
    running,
    sessions,
    shorten_grace,
    wait_for,
    wait_for_extension,
    wait_until,
)

from pgsched import Task, enqueue
from pgsched.embedded import Server
from pgsched.migrate import migrate

pytestmark = pytest.mark.pgbouncer

Connect = Callable[..., psycopg.Connection]

RESUMED = 15.0
"""Seconds after an outage within which workers claim again: they wait 5 between two tries."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of this module's own, which tests stop; the schema is in database `installed`."""
    with Server(settings={"fsync": "off", "max_connections": "50"}) as server:
        install(server, server.create_database("installed"))
        yield server


@pytest.fixture
def pgbouncer(server: Server) -> Iterator[PgBouncer]:
    """A pooler of this test's own, running; afterwards it must be as good as new."""
    with PgBouncer(server) as pgbouncer:
        yield pgbouncer


@pytest.fixture
def dsn(server: Server) -> Iterator[str]:
    """The direct URL of a database of this test's own, with the schema; dropped afterwards."""
    name = f"app_{next(_numbers)}"
    yield server.create_database(name, template="installed")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def pooled(dsn: str, pgbouncer: PgBouncer) -> Iterator[str]:
    """The URL of the test's database through the pooler, whose sessions must stay clean."""
    [name] = ask(dsn, "select current_database()")
    pooled = pgbouncer.dsn(name)
    yield pooled
    assert_clean(dsn, pooled)


STATE = """
select jsonb_object_agg(name, setting) || jsonb_build_object(
         'users', array[current_user, session_user],
         'channels', array(select pg_listening_channels()),
         'statements', (select count(*) from pg_prepared_statements),
         'cursors', (select count(*) from pg_cursors where name <> ''),
         'temporary', (select count(*) from pg_class where relnamespace = pg_my_temp_schema()),
         'locks', (select count(*) from pg_locks
                    where pid = pg_backend_pid() and locktype = 'advisory'))
  from pg_settings
 where name <> 'application_name' and name !~ '^plpgsql\\.'
"""


def assert_clean(dsn: str, pooled: str) -> None:
    """A plain client gets from each session of the pool what a new one of the server has."""
    with psycopg.connect(dsn) as new:
        [(expected,)] = new.execute(STATE)
    seen = set()
    with ExitStack() as stack:
        for _ in range(POOL_SIZE):
            conn = stack.enter_context(psycopg.connect(pooled))
            [(pid,)] = conn.execute("select pg_backend_pid()")
            [(state,)] = conn.execute(STATE)
            assert {name: state[name] for name in state if state[name] != expected[name]} == {}
            seen.add(pid)
    assert len(seen) == POOL_SIZE


def pool_is_open(pooled: str) -> None:
    """Make the pooler open all of its sessions, so that transactions change between them."""
    with ExitStack() as stack:
        for _ in range(POOL_SIZE):
            stack.enter_context(psycopg.connect(pooled)).execute("select 1")


def connect(dsn: str, **options: Any) -> psycopg.Connection:
    """An autocommit connection without prepared statements."""
    return psycopg.connect(dsn, autocommit=True, prepare_threshold=None, **options)


# From SQL


@pytest.mark.parametrize("in_transaction", [False, True])
def test_every_function_may_be_called(dsn: str, pooled: str, in_transaction: bool) -> None:
    called: set[str] = set()
    pids: set[int] = set()
    pool_is_open(pooled)
    with connect(pooled) as conn:

        def call(function: str, **arguments: Any) -> list[tuple[Any, ...]]:
            called.add(function)
            names = [sql.SQL("{} => %s").format(sql.Identifier(f"p_{a}")) for a in arguments]
            statement = sql.SQL("select pg_backend_pid(), f.* from pgsched.{}({}) as f").format(
                sql.Identifier(function), sql.SQL(", ").join(names)
            )
            rows = conn.execute(statement, list(arguments.values())).fetchall()
            pids.update(pid for pid, *_ in rows)
            return [tuple(values) for _, *values in rows]

        def claim() -> dict[str, Any]:
            [(task_id, token, *_)] = call("claim_task", worker="me", queue="q")
            return {"id": task_id, "claim_token": token}

        def arrays(**claim: Any) -> dict[str, Any]:
            return {"ids": [claim["id"]], "claim_tokens": [claim["claim_token"]]}

        with conn.transaction() if in_transaction else nullcontext():
            assert call("schema_version") == [(NEWEST,)]
            call("configure_queue", queue="q", keep_completed=timedelta(0))
            call("pause_queue", queue="q")
            call("resume_queue", queue="q")
            [(worker,)] = call("register_worker", name="me", queues=["q"], slots=1)
            conn.execute("call pgsched.hold_presence(p_worker_id => %s)", [worker])
            called.add("hold_presence")
            call("register_listener", worker_id=worker, queues=["q"])
            [(channel,)] = call("notify_channel", queue="q")
            assert channel.startswith("pgsched_")
            call("enqueue_tasks", tasks=Jsonb([{"task_type": "t", "queue": "q"}] * 6))
            [(task_id,)] = call("enqueue_task", task_type="t", queue="q", priority=0)

            call("reschedule_task", id=task_id, run_at=None, priority=1)
            assert call("cancel_task", id=task_id) == [("cancelled",)]
            assert call("retry_task", id=task_id) == [(task_id,)]
            held = claim()
            call("extend_task", **held)
            assert call("extend_tasks", **arrays(**held))[0][1] == "extended"
            call("hold_task", **held)
            assert call("complete_task", **held) == [(True,)]
            assert call("complete_tasks", **arrays(**claim())) == [(task_id - 6, "completed")]
            call("fail_task", **claim(), error="e", permanent=True)
            assert call("fail_tasks", **arrays(**claim()), errors=["e"])[0][1] == "queued"
            call("release_task", **claim())
            assert call("release_tasks", **arrays(**claim())) == [(task_id - 2, "queued")]
            assert call("reap_stale", limit=10) == []
            assert call("prune_finished") == [(0,)]
            assert {step for step, _ in call("maintain")} == {
                "move_claim_marks",
                "reap_stale",
                "prune_finished",
            }
            assert [stats[0] for stats in call("queue_stats")] == ["q"]
            assert call("get_task", id=task_id - 2)[0][0] == task_id - 2
            assert [each[1] for each in call("list_workers")] == ["me"]
            assert call("recent_rates")
            assert call("server_stats")[0][0] == 1
            assert call("diagnose")
            call("unregister_worker", id=worker)
            call("grant_access", role="pg_monitor", kind="observer")
            call("revoke_access", role="pg_monitor", kind="observer")

    public = "where pronamespace = 'pgsched'::regnamespace and proname !~ '^_'"
    assert called == set(ask(dsn, f"select proname from pg_proc {public}"))
    assert len(pids) == (1 if in_transaction else POOL_SIZE)


def test_six_sessions_drain_what_a_reaper_brings_back_too(dsn: str, pooled: str) -> None:
    tasks = 2000
    drained = Event()

    def some_end_otherwise(session: psycopg.Connection, held: list[oracle.Claim]) -> None:
        if len(held) < 10:
            return  # the last ones: a release is no attempt, and would go on for ever
        if held[0].id % 7 == 0:
            assert oracle.fail(session, held.pop(0)) == "queued"
        elif held[0].id % 7 == 1:
            # A claim that looks at a row which it does not get has it locked for a moment.
            assert set(oracle.extend(session, held)) <= {"extended", "busy"}
            oracle.release(session, held.pop(0))

    def work() -> None:
        with connect(pooled) as session:
            while not drained.is_set():
                if held := oracle.claim(session, limit=10):
                    some_end_otherwise(session, held)
                    if held:
                        assert oracle.complete(session, held.pop())
                    while held:
                        outcomes = oracle.complete_batch(session, held)
                        assert set(outcomes) <= {"completed", "busy"}
                        pairs = zip(held, outcomes, strict=True)
                        held = [each for each, outcome in pairs if outcome == "busy"]
                elif count(session, "completed") == tasks:
                    drained.set()

    def reap() -> int:
        reaped = 0
        with connect(pooled) as session:
            while not drained.wait(0.1):
                reaped += len(oracle.reap(session))
        return reaped

    def until_drained(call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            drained.set()  # also when it failed: the others would wait for ever

    with connect(dsn) as conn:
        oracle.install(conn)
        # Some are claimed by a session that is heard of no more.
        with connect(pooled) as lost:
            oracle.enqueue(lost, tasks)
            for _ in range(5):
                assert len(oracle.claim(lost, limit=20, lease="1 s")) == 20
        reaped, *_ = oracle.together([partial(until_drained, call) for call in [reap, *[work] * 6]])
        assert reaped == 100
        assert count(conn, "completed") == tasks
        oracle.check(conn)


def test_the_schema_is_installed_by_two_at_once(server: Server, pgbouncer: PgBouncer) -> None:
    dsn, pooled = server.create_database("empty"), pgbouncer.dsn("empty")
    applied = oracle.together([lambda: migrate(pooled)] * 2)
    assert sorted(itertools.chain(*applied)) == IDS
    assert ask(pooled, "select pgsched.schema_version()") == [NEWEST]
    assert migrate(pooled) == []
    assert_clean(dsn, pooled)


# Workers

APP = """
from pgsched import Worker

worker = Worker(poll_interval=%s)
runs = open("runs", "ab", buffering=0)

@worker.task("plain")
def plain(task):
    runs.write(b"%%d\\n" %% task.id)

@worker.task("async")
async def coroutine(task):
    plain(task)

@worker.task("transaction")
def transaction(task, conn):
    conn.execute("insert into effects (id) values (%%s)", [task.id])
    plain(task)
"""

KINDS = ("plain", "async", "transaction")


def add(conn: psycopg.Connection, tasks: int) -> list[int]:
    """The ids of so many tasks, of all kinds in turn."""
    rows = conn.execute(
        "select pgsched.enqueue_task((%s::text[])[1 + n %% 3]) from generate_series(1, %s) as n",
        [list(KINDS), tasks],
    )
    return [task_id for (task_id,) in rows]


@contextmanager
def started(folder: Path, dsn: str, *options: str, poll: float = 0.2) -> Iterator[WorkerProcess]:
    """A worker process, which must end well when it is told to."""
    folder.mkdir()
    with WorkerProcess(folder, APP % poll, "--dsn", dsn, *options) as worker:
        yield worker
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(PATIENCE) == 0
        assert "Traceback" not in worker.log


def assert_effects_once(dsn: str) -> None:
    """What handlers wrote in their transactions is there once for each of their tasks."""
    tasks = ask(dsn, "select id from pgsched.tasks where task_type = 'transaction' order by id")
    assert tasks == ask(dsn, "select id from effects order by id")


def test_three_workers_execute_each_task_once(dsn: str, pooled: str, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    with connect(dsn) as conn, ExitStack() as stack:
        conn.execute("create table effects (id bigint)")
        workers = [stack.enter_context(started(folder, pooled)) for folder in folders]
        for worker in workers:
            worker.wait_for_log("polling only")
        ids = add(conn, 2000)
        wait_until(lambda: count(conn, "completed") == len(ids), 2 * PATIENCE)
        assert ask(dsn, "select id from pgsched.tasks where attempt <> 1") == []
        assert_effects_once(dsn)
        assert oracle.task_locks(conn) == 0
    runs = [int(line) for folder in folders for line in (folder / "runs").read_text().split()]
    assert sorted(runs) == ids
    assert [worker.log.count("polling only") for worker in workers] == [1, 1, 1]
    logs = "".join(worker.log for worker in workers).splitlines()
    assert [line for line in logs if " INFO " not in line] == []


def test_a_worker_listens_where_there_is_a_way_around(
    dsn: str, pooled: str, tmp_path: Path
) -> None:
    with (
        connect(pooled) as conn,
        started(tmp_path / "worker", pooled, "--listen-dsn", dsn, poll=3600) as worker,
    ):
        conn.execute("create table effects (id bigint)")
        wait_until(lambda: ask(dsn, "select queue from pgsched.listeners"))
        assert len(sessions(conn, LISTENERS)) == 1
        for kind in KINDS:
            wait_for(conn, enqueue(conn, kind), "completed")
            wait_until(lambda: ask(dsn, "select queue from pgsched.listeners"))
        assert "polling only" not in worker.log


SLEEPER = """
import time
from pgsched import Worker

worker = Worker(lease=2, poll_interval=0.2)

@worker.task("sleep")
def sleep(task):
    time.sleep(600)
"""


def test_a_killed_worker_is_missed_when_its_lease_ends(
    dsn: str, pooled: str, tmp_path: Path
) -> None:
    with connect(dsn) as conn, WorkerProcess(tmp_path, SLEEPER, "--dsn", pooled) as worker:
        shorten_grace(conn, 0.1)
        task_id = enqueue(conn, "sleep")
        name = wait_for(conn, task_id, "processing").claimed_by
        worker.wait_for_log("recovery by leases only")
        for _ in range(3):
            wait_for_extension(conn, task_id)
            assert ask(dsn, REAP) == []
        assert ask(dsn, "select presence from pgsched.workers") == [False]
        assert worker.log.count("no presence") == 1
        worker.process.kill()
        wait_until(lambda: ask(dsn, REAP) == [task_id])
        reason = f"worker {name} was lost: its lease ended during attempt 1"
        assert row(conn, task_id).last_error == reason


def test_handlers_get_a_connection_as_good_as_new(server: Server, pgbouncer: PgBouncer) -> None:
    with connect(server.dsn()) as admin:
        admin.execute("create database latin encoding 'LATIN1' locale 'C' template template0")
    dsn = server.dsn("latin")
    install(server, dsn)
    worker = quick(pgbouncer.dsn("latin"))
    got = []

    @worker.task("look")
    def look(task: Task, conn: psycopg.Connection) -> None:
        [(name,)] = conn.execute("select current_setting('application_name') like 'pgsched %'")
        got.append((name, conn.info.encoding, *conn.execute("show timezone").fetchall()))
        conn.execute("set timezone to 'Asia/Tokyo'")

    with connect(dsn) as conn, running(worker):
        for _ in range(3):
            wait_for(conn, enqueue(conn, "look"), "completed")
        [default] = ask(dsn, "show timezone")
    assert got == [(True, "utf-8", (default,))] * 3


@contextmanager
def work(conn: psycopg.Connection, dsn: str) -> Iterator[Counter[int]]:
    """Three workers that go on until the end; how often they have run each task."""
    conn.execute("create table effects (id bigint)")
    runs: Counter[int] = Counter()

    def plain(task: Task) -> None:
        runs[task.id] += 1
        time.sleep(0.005)

    async def coroutine(task: Task) -> None:
        plain(task)

    def transaction(task: Task, conn: psycopg.Connection) -> None:
        plain(task)
        conn.execute("insert into effects (id) values (%s)", [task.id])

    with ExitStack() as stack:
        threads = []
        for _ in range(3):
            worker = quick(dsn, lease=2)
            worker.task("plain")(plain)
            worker.task("async")(coroutine)
            worker.task("transaction")(transaction)
            threads.append(stack.enter_context(running(worker)))
        yield runs
        assert all(thread.is_alive() for thread in threads)


def wait_for_runs(runs: Counter[int], tasks: int) -> None:
    """Return when so many tasks have begun."""
    wait_until(lambda: len(runs) >= tasks)


def assert_all_done(dsn: str, ids: list[int], runs: Counter[int]) -> None:
    """Nothing is lost, and what a transaction wrote is there once, however often it was tried."""
    with connect(dsn) as conn:
        wait_until(lambda: count(conn, "completed") == len(ids), 2 * PATIENCE)
        attempts: dict[int, int] = dict(
            conn.execute("select id, attempt from pgsched.tasks").fetchall()
        )
        assert set(attempts) == set(ids)
        for task_id in ids:
            assert 1 <= runs[task_id] <= attempts[task_id], task_id
        assert_effects_once(dsn)
        wait_until(lambda: oracle.task_locks(conn) == 0)
        open_now = "select pid from pg_stat_activity where datname = current_database()"
        # And the three of this test.
        wait_until(lambda: len(ask(dsn, open_now)) <= POOL_SIZE + 3)


def assert_resumed(dsn: str, runs: Counter[int]) -> list[int]:
    """The id of a task that was added now, claimed before all others, and ran soon."""
    with connect(dsn) as conn:
        task_id = enqueue(conn, "plain", priority=0)
    wait_until(lambda: runs[task_id], RESUMED)
    return [task_id]


def test_the_pooler_may_be_killed(
    dsn: str,
    pooled: str,
    pgbouncer: PgBouncer,
    caplog: pytest.LogCaptureFixture,
    reaping_often: None,
) -> None:
    with connect(dsn) as conn, work(conn, pooled) as runs:
        ids = add(conn, 1500)
        for share in (300, 700):
            wait_for_runs(runs, share)
            caplog.clear()
            pgbouncer.kill()
            wait_until(lambda: caplog.text.count("database: error") >= 3)
            pgbouncer.start()
            ids += assert_resumed(dsn, runs)
        assert_all_done(dsn, ids, runs)


def test_the_server_may_crash(server: Server, dsn: str, pooled: str, reaping_often: None) -> None:
    with connect(dsn) as conn, work(conn, pooled) as runs:
        ids = add(conn, 1000)
        for share in (200, 500):
            wait_for_runs(runs, share)
            server.stop("immediate")
            server.start()
            ids += assert_resumed(dsn, runs)
        assert_all_done(dsn, ids, runs)


@pytest.mark.long
def test_the_server_may_be_away_for_long(
    server: Server, dsn: str, pooled: str, reaping_often: None
) -> None:
    with connect(dsn) as conn, work(conn, pooled) as runs:
        ids = add(conn, 1000)
        wait_for_runs(runs, 200)
        server.stop("immediate")
        time.sleep(45)
        server.start()
        ids += assert_resumed(dsn, runs)
        assert_all_done(dsn, ids, runs)


def test_its_sessions_may_be_ended_again_and_again(
    dsn: str, pooled: str, reaping_often: None
) -> None:
    with connect(dsn) as conn, work(conn, pooled) as runs:
        ids = []
        for _ in range(5):
            ids += add(conn, 1000)
            wait_for_runs(runs, len(ids) - 800)
            conn.execute(
                """
                select pg_terminate_backend(pid)
                  from pg_stat_activity
                 where datname = current_database() and pid <> pg_backend_pid()
                """
            )
        ids += assert_resumed(dsn, runs)
        assert_all_done(dsn, ids, runs)


def test_the_server_may_be_read_only_for_a_while(
    dsn: str, pooled: str, caplog: pytest.LogCaptureFixture, reaping_often: None
) -> None:
    def read_only(value: str) -> None:
        with connect(dsn, options="-c default_transaction_read_only=off") as admin:
            admin.execute(f"alter system set default_transaction_read_only = {value}".encode())
            admin.execute("select pg_reload_conf()")

    with connect(dsn) as conn, work(conn, pooled) as runs:
        ids = add(conn, 1000)
        wait_for_runs(runs, 200)
        try:
            read_only("on")
            wait_until(lambda: caplog.text.count("read-only transaction") >= 6)
        finally:
            read_only("off")
        wait_until(lambda: ask(dsn, "show transaction_read_only") == ["off"])
        ids += assert_resumed(dsn, runs)
        assert_all_done(dsn, ids, runs)


# A direct connection of a role with little patience


def test_a_roles_timeouts_end_no_handler_and_no_worker(
    server: Server, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(dsn) as conn:
        conn.execute("create role hasty superuser login")
        for name, value in (
            ("idle_session_timeout", "3s"),
            ("idle_in_transaction_session_timeout", "2s"),
            ("statement_timeout", "1s"),
            ("lock_timeout", "500ms"),
        ):
            conn.execute(f"alter role hasty set {name} = '{value}'".encode())
        caplog.set_level(logging.INFO)  # how the listener ends
        worker = quick(dsn.replace("postgres@", "hasty@"), lease=6)
        runs: Counter[int] = Counter()

        @worker.task("plain")
        def plain(task: Task) -> None:
            runs[task.id] += 1
            time.sleep(5)

        @worker.task("transaction")
        def transaction(task: Task, conn: psycopg.Connection) -> None:
            runs[task.id] += 1

        late = """
        select query
          from pg_stat_activity
         where application_name like 'pgsched %' and application_name not like '% presence'
           and state like 'idle in transaction%'
           and clock_timestamp() - state_change > interval '1 second'
        """
        ids = [enqueue(conn, kind) for kind in ("plain", "plain", "transaction")]
        with running(worker):
            wait_until(lambda: len(runs) == len(ids))
            with connect(dsn) as other, other.transaction():
                other.execute("lock table pgsched.scheduled_tasks")
                wait_until(lambda: "canceling statement due to lock timeout" in caplog.text)

            def done() -> bool:
                assert ask(dsn, late) == []
                return count(conn, "completed") == len(ids)

            wait_until(done)
            wait_until(lambda: "no listener: error" in caplog.text)
            wait_until(lambda: sessions(conn, LISTENERS))
            # Its connection was idle, too.
            ids.append(enqueue(conn, "transaction"))
            wait_until(done)
        assert [row(conn, task_id).attempt for task_id in ids] == [1] * 4
        assert sorted(runs.values()) == [1] * 4
        assert "no transaction" not in caplog.text
        assert "no presence" not in caplog.text
    with connect(server.dsn()) as conn:
        conn.execute("drop role hasty")
