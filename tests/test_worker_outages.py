"""The worker while the database is away, and as a process that is told to stop."""

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import psycopg
import pytest
from psycopg import sql
from workers import (
    PATIENCE,
    WorkerProcess,
    ask,
    count,
    end_sessions,
    install,
    quick,
    row,
    run_to_end,
    running,
    sessions,
    wait_for,
    wait_for_extension,
    wait_until,
)

from pgsched import (
    Fail,
    SchemaError,
    Task,
    Worker,
    enqueue,
)
from pgsched.embedded import Server

Connect = Callable[..., psycopg.Connection]


@pytest.fixture(scope="module")
def fragile_server() -> Iterator[Server]:
    """A server of this module's own, which tests stop, with the schema in database `template`."""
    with Server(settings={"fsync": "off"}) as server:
        install(server, server.dsn("postgres"))
        yield server


@pytest.fixture
def fragile(fragile_server: Server) -> Iterator[Server]:
    """The server, running, with nothing in `app` but the schema."""
    fragile_server.start()
    fragile_server.create_database("app", template="postgres")
    yield fragile_server
    fragile_server.start()
    with psycopg.connect(fragile_server.dsn(), autocommit=True) as conn:
        conn.execute("drop database app with (force)")


# The database goes away


def test_every_task_is_done_although_the_server_crashes_under_load(
    fragile: Server, reaping_often: None
) -> None:
    worker = quick(fragile.dsn("app"), lease=1)
    runs: Counter[int] = Counter()

    @worker.task("work")
    def work(task: Task) -> None:
        runs[task.id] += 1
        time.sleep(0.002)

    ids = ask(
        fragile.dsn("app"), "select pgsched.enqueue_task('work') from generate_series(1, 600)"
    )
    with running(worker) as thread:
        wait_until(lambda: len(runs) >= 100)
        fragile.stop("immediate")
        fragile.start()
        wait_until(lambda: len(runs) >= 300)
        fragile.stop("immediate")
        fragile.start()
        done = "select id from pgsched.finished_tasks where status = 'completed'"
        wait_until(lambda: set(ask(fragile.dsn("app"), done)) == set(ids))
        assert thread.is_alive()
    assert ask(fragile.dsn("app"), "select id from pgsched.scheduled_tasks") == []
    assert set(runs) == set(ids)


def test_an_outcome_is_kept_while_the_server_is_away(
    fragile: Server, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(fragile.dsn("app"), lease=600)
    gate = Event()
    ended: list[str] = []

    @worker.task("result")
    def give(task: Task) -> str:
        gate.wait(PATIENCE)
        ended.append("result")
        return "kept"

    @worker.task("error")
    async def fail(task: Task) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)
        ended.append("error")
        raise Fail("kept")

    with psycopg.connect(fragile.dsn("app"), autocommit=True) as conn:
        result, error = enqueue(conn, "result"), enqueue(conn, "error")
        with running(worker):
            wait_until(lambda: count(conn, "processing") == 2)
            fragile.stop("immediate")
            gate.set()
            wait_until(lambda: len(ended) == 2)
            wait_until(lambda: caplog.text.count("database: error") >= 2)
            fragile.start()
            with psycopg.connect(fragile.dsn("app"), autocommit=True) as again:
                assert wait_for(again, result, "completed").result == "kept"
                assert wait_for(again, error, "failed").last_error == "Fail: kept"
                assert row(again, result).attempt == 1
    assert sorted(ended) == ["error", "result"]


def test_nothing_is_lost_when_the_session_is_ended_again_and_again(
    dsn: str, conn: psycopg.Connection, reaping_often: None
) -> None:
    worker = quick(dsn, lease=1)

    @worker.task("work")
    def work(task: Task) -> None:
        time.sleep(0.005)

    ended = 0
    ids = []
    with running(worker):
        for _ in range(15):
            ids += [enqueue(conn, "work") for _ in range(40)]
            time.sleep(0.2)
            ended += end_sessions(conn)
        wait_until(lambda: count(conn, "completed") == len(ids))
        assert count(conn, "queued") + count(conn, "processing") == 0
    assert ended >= 10


def test_a_statement_timeout_does_not_end_the_worker(
    dsn: str, conn: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute(
        sql.SQL("alter database {} set statement_timeout = '100ms'").format(
            sql.Identifier(conn.info.dbname)
        )
    )
    worker = quick(dsn)
    gate = Event()
    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    first = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, first, "processing")
        second = enqueue(conn, "wait")
        with connect(options="-c statement_timeout=0").transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            gate.set()
            wait_until(lambda: caplog.text.count("canceling statement due to statement") >= 2)
        assert wait_for(conn, first, "completed").attempt == 1
        wait_for(conn, second, "completed")


def test_without_the_schema_or_the_right_to_it_run_ends_at_once(server: Server, dsn: str) -> None:
    with pytest.raises(SchemaError, match="pgsched migrate"):
        run_to_end(Worker(server.dsn()))
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("create role without_rights login")
        with pytest.raises(SchemaError, match=r"permission denied.*grant"):
            run_to_end(Worker(dsn.replace("postgres@", "without_rights@")))
        admin.execute("drop role without_rights")


# Processes and signals

APP = """
import asyncio, threading, time
from pathlib import Path
from pgsched import Worker

worker = Worker(concurrency=3, poll_interval=0.05)

@worker.task("plain")
def plain(task):
    while not Path(task.payload).exists():
        time.sleep(0.01)

@worker.task("async")
async def coroutine(task):
    while not Path(task.payload).exists():
        await asyncio.sleep(0.01)

@worker.task("thread")
async def thread(task):
    await asyncio.to_thread(plain, task)
"""


def start(folder: Path, dsn: str, *options: str) -> WorkerProcess:
    return WorkerProcess(folder, APP, "--dsn", dsn, *options)


def test_after_sigterm_running_handlers_finish_and_nothing_else_begins(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    # The handlers outlive their leases, also after the signal.
    with start(tmp_path, dsn, "--lease", "1") as worker:
        ids = [enqueue(conn, name, str(gate)) for name in ("plain", "async", "thread")]
        wait_until(lambda: count(conn, "processing") == 3)
        assert len(conn.execute("select name from pgsched.workers").fetchall()) == 1
        waiting = enqueue(conn, "plain", str(gate))
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("stopping")
        for _ in range(4):  # more than one lease
            wait_for_extension(conn, ids[0])
        gate.touch()
        assert worker.process.wait(PATIENCE) == 0
    assert [row(conn, task_id)[:2] for task_id in ids] == 3 * [("completed", 1)]
    assert row(conn, waiting)[:2] == ("queued", 0)
    assert conn.execute("select name from pgsched.workers").fetchall() == []


def test_a_second_signal_ends_it_at_once(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    with start(tmp_path, dsn, "--grace", "600") as worker:
        for name in ("plain", "async", "thread"):
            enqueue(conn, name, str(tmp_path / "never"))
        wait_until(lambda: count(conn, "processing") == 3)
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("stopping")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(10) == 0
        assert "Traceback" not in worker.log
    assert count(conn, "processing") == 3


def test_what_runs_when_the_grace_is_over_is_left_to_its_lease(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    with start(tmp_path, dsn, "--grace", "0.3") as worker:
        ids = [enqueue(conn, name, "/never") for name in ("plain", "async", "thread")]
        wait_until(lambda: count(conn, "processing") == 3)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(10) == 0
        assert "left to their leases" in worker.log
        assert "Traceback" not in worker.log
    assert [row(conn, task_id)[:2] for task_id in ids] == 3 * [("processing", 1)]
    assert conn.execute("select name from pgsched.workers").fetchall() == []


def test_sigterm_ends_it_within_the_grace_while_the_server_is_away(
    fragile: Server, tmp_path: Path
) -> None:
    grace = 1
    with start(tmp_path, fragile.dsn("app"), "--grace", str(grace)) as worker:
        with psycopg.connect(fragile.dsn("app"), autocommit=True) as conn:
            wait_for(conn, enqueue(conn, "plain", str(tmp_path / "never")), "processing")
        fragile.stop("immediate")
        worker.wait_for_log("database: error")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(3 * (grace + 2)) == 0
        assert "Traceback" not in worker.log


def test_sigterm_ends_it_within_the_grace_while_the_server_does_not_answer(tmp_path: Path) -> None:
    grace = 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        dsn = f"host={address} port={port} dbname=app user=app"
        with start(tmp_path, dsn, "--grace", str(grace)) as worker, silent.accept()[0]:
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(3 * (grace + 2)) == 0
            assert "Traceback" not in worker.log


def test_sigterm_ends_it_within_the_grace_while_its_session_is_stuck(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    grace = 1
    with start(tmp_path, dsn, "--grace", str(grace)) as worker:
        wait_until(lambda: conn.execute("select id from pgsched.workers").fetchall())
        backends = sessions(conn)
        for backend in backends:
            os.kill(backend, signal.SIGSTOP)
        try:
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(3 * (grace + 2)) == 0
            assert "Traceback" not in worker.log
        finally:
            for backend in backends:
                os.kill(backend, signal.SIGCONT)


INTERRUPTED = """
import signal, sys, threading, time

armed = threading.Lock()  # taken: the signal is due


class Interrupted(threading.Condition):
    def __enter__(self):
        entered = super().__enter__()
        if threading.get_ident() == threading.main_thread().ident and armed.locked():
            armed.release()
            signal.raise_signal(signal.SIGTERM)
        return entered


threading.Condition = Interrupted

from pgsched import Worker

worker = Worker(poll_interval=0.01)


@worker.task("arm")
def arm(task):
    armed.acquire()
    time.sleep(1)
    if armed.locked():  # the main thread holds no such lock
        armed.release()
        signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_may_arrive_while_the_worker_wakes(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    with WorkerProcess(tmp_path, INTERRUPTED, "--dsn", dsn) as worker:
        enqueue(conn, "arm")
        assert worker.process.wait(10) == 0
        assert "stopped: worker" in worker.log
