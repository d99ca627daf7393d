"""What handlers do to the process that they run in: children, and an interpreter that hangs."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from workers import (
    LISTENERS,
    PATIENCE,
    REAP,
    WorkerProcess,
    count,
    make_effects,
    quick,
    row,
    running,
    sessions,
    take_away,
    wait_for,
    wait_for_extension,
    wait_until,
    write,
    written,
)

from pgsched import Task, enqueue

pytestmark = pytest.mark.filterwarnings(
    # What Python says about forks of a process with threads, from 3.12 on.
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


# Children


def leave(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def fail(code: object) -> None:
    raise ValueError(code)


CHILDREN: dict[str, tuple[Callable[[], object], int]] = {
    "returns": (lambda: "from the child", 0),
    "sys.exit()": (lambda: leave(None), 0),
    "sys.exit(3)": (lambda: leave(3), 3),
    "sys.exit(text)": (lambda: leave("text"), 1),
    "raises": (lambda: fail("in the child"), 1),
    "os._exit": (lambda: os._exit(4), 4),
}


def forked(do: Callable[[], object]) -> int:
    """The exit code of a child that does this, and what comes of it in the handler."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return do()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["plain", "async", "transaction"])
def test_a_child_of_a_handler_is_no_second_worker(
    dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    make_effects(conn)
    worker = quick(dsn, concurrency=2)

    def handler(task: Task) -> int:
        return forked(CHILDREN[task.payload][0])

    @worker.task("plain")
    def plain(task: Task) -> int:
        return handler(task)

    @worker.task("async")
    async def coroutine(task: Task) -> int:
        return handler(task)

    @worker.task("transaction")
    def transaction(task: Task, conn: psycopg.Connection[Any]) -> int:
        write(task, conn)
        return handler(task)

    with running(worker):
        wait_for(conn, enqueue(conn, kind, "returns"), "completed")
        before = sessions(conn)
        with conn.transaction():
            ids = [(name, enqueue(conn, kind, name)) for name in 3 * list(CHILDREN)]
        for name, task_id in ids:
            done = wait_for(conn, task_id, "completed")
            assert (done.attempt, done.result, done.last_error) == (1, CHILDREN[name][1], None)
        # Neither these nor those that it left have harmed a session.
        assert set(before) <= set(sessions(conn))
        wait_until(lambda: count(conn, "processing") == 0)
    effects = count(conn, "completed") if kind == "transaction" else 0
    assert len(written(conn)) == effects


def close_inherited(path: str) -> None:
    """What the garbage collector of a child may do with the connections that it got by the fork."""
    inherited = [each for each in gc.get_objects() if isinstance(each, psycopg.Connection)]
    of_workers = [
        each
        for each in inherited
        if not each.closed and "fallback_application_name" in each.info.get_parameters()
    ]
    for connection in of_workers:
        connection.close()
    Path(path).write_text(str(len(of_workers)))


def test_multiprocessing_may_fork(dsn: str, conn: psycopg.Connection, tmp_path: Path) -> None:
    worker = quick(dsn)

    @worker.task("fork")
    def fork(task: Task) -> int | None:
        context = multiprocessing.get_context("fork")
        path = str(tmp_path / str(task.id))
        process = context.Process(target=close_inherited, args=(path,))
        process.start()
        process.join(PATIENCE)
        return process.exitcode

    @worker.task("pool")
    def pool(task: Task) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as processes:
            results = processes.map(abs, [-1, -2, -3])
            # Python loses the SIGTERM of terminate(), if it has a handler, in a child just forked.
            processes.close()
            processes.join()
            return results

    with running(worker):
        wait_for(conn, enqueue(conn, "fork"), "completed")
        wait_until(lambda: len(sessions(conn)) == 4)
        before = sessions(conn)
        forks = [enqueue(conn, "fork") for _ in range(3)]
        pools = [enqueue(conn, "pool") for _ in range(2)]
        for task_id in forks:
            done = wait_for(conn, task_id, "completed")
            assert (done.attempt, done.result) == (1, 0)
            assert int((tmp_path / str(task_id)).read_text()) > 0
        for task_id in pools:
            assert wait_for(conn, task_id, "completed").result == [1, 2, 3]
        assert sessions(conn) == before


def test_a_process_that_has_worked_may_fork_workers(dsn: str, conn: psycopg.Connection) -> None:
    make_effects(conn)
    worker = quick(dsn)

    @worker.task("write")
    def handler(task: Task, conn: psycopg.Connection[Any]) -> int:
        write(task, conn)
        return os.getpid()

    with running(worker):
        wait_for(conn, enqueue(conn, "write"), "completed")
    if not (child := os.fork()):
        # The test's own connections are not for the child to close.
        code = 1
        try:
            code = worker.run()
        finally:
            os._exit(code)
    try:
        done = wait_for(conn, enqueue(conn, "write"), "completed")
        assert done.result == child
        assert f":{child}:" in (done.claimed_by or "")
        wait_until(lambda: len(sessions(conn, LISTENERS)) == 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
        with running(worker):
            done = wait_for(conn, enqueue(conn, "write"), "completed")
            assert done.result == os.getpid()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# An interpreter that hangs


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_that_computes_keeps_its_lease(
    dsn: str, conn: psycopg.Connection, reaping_often: None, kind: str
) -> None:
    worker = quick(dsn, lease=1)
    begun, over = Event(), Event()

    @worker.task("plain")
    def spin(task: Task) -> int:
        begun.set()
        turns = 0
        while not over.is_set():
            turns += 1
        return turns

    @worker.task("async")
    async def coroutine(task: Task) -> int:
        return spin(task)

    task_id = enqueue(conn, kind)
    with running(worker):
        assert begun.wait(PATIENCE)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            wait_for_extension(conn, task_id)
            assert conn.execute(REAP).fetchall() == []
        over.set()
        done = wait_for(conn, task_id, "completed")
    assert done.attempt == 1
    assert done.result > 0


HANGING = """
import ctypes
from pathlib import Path
from pgsched import Worker

worker = Worker(poll_interval=0.05, lease=1)

@worker.task("hang")
def hang(task):
    # As a call into C that never lets go of the interpreter: a regular expression, a sort.
    Path("hangs").touch()
    ctypes.PyDLL(None).sleep(3)
    return "late"

@worker.task("noop")
def noop(task):
    pass
"""


@pytest.mark.parametrize("reaped", [False, True])
def test_a_call_that_holds_the_interpreter_outlives_its_lease(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, reaped: bool
) -> None:
    # Nothing in the process can run meanwhile, so nothing extends the lease. If somebody reaps
    # the task, what the handler returns is refused; if nobody does, it counts.
    with WorkerProcess(tmp_path, HANGING, "--dsn", dsn) as worker:
        task_id = enqueue(conn, "hang")
        wait_until(lambda: (tmp_path / "hangs").exists())
        over = "select lease_expires_at < clock_timestamp() from pgsched.tasks where id = %s"
        wait_until(lambda: conn.execute(over, [task_id]).fetchone() == (True,))
        if reaped:
            take_away(conn, task_id)
            worker.wait_for_log(f"claim lost: task={task_id} attempt=1")
            wait_for(conn, enqueue(conn, "noop"), "completed")
            theirs = row(conn, task_id)
            assert (theirs.status, theirs.attempt, theirs.claimed_by) == ("processing", 2, "other")
        else:
            done = wait_for(conn, task_id, "completed")
            assert (done.attempt, done.result) == (1, "late")
