"""Workers that die, freeze or lose their presence: what others do then, and what they must not."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from workers import (
    PATIENCE,
    PRESENCES,
    REAP,
    WorkerProcess,
    end_sessions,
    is_running,
    quick,
    row,
    run_to_end,
    running,
    sessions,
    shorten_grace,
    wait_for,
    wait_until,
)

from pgsched import Task, Worker, calls, enqueue, loop

Presences = list[tuple[int, bool]]


def presences(conn: psycopg.Connection) -> Presences:
    """The workers, and whether each has its presence on."""
    return conn.execute("select id, presence from pgsched.workers order by id").fetchall()


def wait_for_presence(conn: psycopg.Connection, workers: int = 1) -> None:
    """Return when so many workers are there, all with their presence on."""
    wait_until(lambda: [on for _, on in presences(conn)] == [True] * workers)


def assert_nothing_is_reaped(conn: psycopg.Connection, seconds: float) -> None:
    """Look again and again, for so long by the server's clock."""
    past = "select clock_timestamp() > %s"
    [(end,)] = conn.execute("select clock_timestamp() + %s * interval '1 second'", [seconds])

    def over() -> bool:
        assert conn.execute(REAP).fetchall() == []
        return conn.execute(past, [end]).fetchone() == (True,)

    wait_until(over)


# Killed and frozen

APP = """
import os, time
from pathlib import Path
from pgsched import Worker

worker = Worker()

@worker.task("work")
def work(task):
    Path(f"began {task.id}").touch()
    while not Path("gate").exists():
        time.sleep(0.01)
    return os.getpid()
"""


@contextmanager
def at_work(
    dsn: str, conn: psycopg.Connection, folder: Path, *options: str, tasks: int = 3
) -> Iterator[tuple[WorkerProcess, list[int]]]:
    """A worker process and the tasks that it works on, its presence on."""
    with WorkerProcess(folder, APP, "--dsn", dsn, *options) as worker:
        ids = [enqueue(conn, "work") for _ in range(tasks)]
        wait_until(lambda: len(list(folder.glob("began *"))) == tasks)
        wait_for_presence(conn)
        yield worker, ids


def rescuer(dsn: str) -> Worker:
    """Another worker, as it is by default."""
    worker = Worker(dsn)
    worker.task("work")(lambda task: "rescued")
    return worker


def test_the_tasks_of_a_killed_worker_run_again_long_before_their_leases_end(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    with at_work(dsn, conn, tmp_path, "--lease", "3600") as (lost, ids), running(rescuer(dsn)):
        wait_for_presence(conn, 2)
        name = row(conn, ids[0]).claimed_by
        lost.process.kill()
        for task_id in ids:
            done = wait_for(conn, task_id, "completed")  # within 3 times 10 s
            reason = f"worker {name} was lost: its presence ended during attempt 1"
            assert (done.attempt, done.result, done.last_error) == (2, "rescued", reason)
        assert [on for _, on in presences(conn)] == [False, True]


@pytest.mark.parametrize("lease", [2, pytest.param(30, marks=pytest.mark.long)])
def test_the_tasks_of_a_frozen_worker_run_again_and_it_goes_on_when_it_wakes(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, lease: int
) -> None:
    with at_work(dsn, conn, tmp_path, "--lease", str(lease)) as (frozen, ids):
        with running(rescuer(dsn)):
            wait_for_presence(conn, 2)
            name = row(conn, ids[0]).claimed_by
            frozen.process.send_signal(signal.SIGSTOP)
            (tmp_path / "gate").touch()
            for task_id in ids:
                wait_until(lambda: row(conn, task_id).status == "completed", 3 * (lease + 5))  # noqa: B023
        done = [row(conn, task_id) for task_id in ids]
        reason = f"worker {name} was lost: its lease ended during attempt 1"
        assert {(task.attempt, task.last_error) for task in done} == {(2, reason)}
        frozen.process.send_signal(signal.SIGCONT)
        for task_id in ids:
            frozen.wait_for_log(f"claim lost: task={task_id} attempt=1")
        # Its presence was there all the time, and it works on.
        own = wait_for(conn, enqueue(conn, "work"), "completed")
        assert (own.attempt, own.result) == (1, frozen.process.pid)
        assert [row(conn, task_id)[:4] for task_id in ids] == [task[:4] for task in done]
        assert [on for _, on in presences(conn)] == [True]


CHILDREN = """
import multiprocessing, os, signal, subprocess, threading
from pathlib import Path
from pgsched import Worker

worker = Worker(connections=1)

def wait():
    while True:
        signal.pause()

@worker.task("write")
def write(task, conn):
    pass

@worker.task("fork")
def fork(task):
    forked = os.fork()
    if not forked:
        wait()
    spawned = subprocess.Popen(["sleep", "600"], close_fds=False)
    process = multiprocessing.get_context("fork").Process(target=wait)
    process.start()
    Path("pids.new").write_text(f"{forked} {spawned.pid} {process.pid}")
    Path("pids.new").rename("pids")
    threading.Event().wait()
"""


def test_children_of_a_killed_worker_keep_nothing_of_it_alive(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    shorten_grace(conn, 0.3)
    pids: list[int] = []
    with WorkerProcess(tmp_path, CHILDREN, "--dsn", dsn):
        wait_for(conn, enqueue(conn, "write"), "completed")
        task_id = enqueue(conn, "fork")
        wait_for_presence(conn)
        wait_until(lambda: len(sessions(conn)) == 4)
        wait_until((tmp_path / "pids").exists)
        pids += map(int, (tmp_path / "pids").read_text().split())
    try:
        wait_until(lambda: not sessions(conn))
        wait_until(lambda: conn.execute(REAP).fetchall() == [(task_id,)])
        assert [is_running(pid) for pid in pids] == [True] * 3
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


POISON = """
import os, signal
from pgsched import Worker

worker = Worker(poll_interval=0.05)

@worker.task("poison")
def poison(task):
    with open("runs", "a") as runs:
        runs.write(f"{task.attempt} ")
    os.kill(os.getpid(), signal.SIGKILL)
"""
BEFORE_ITS_HANDLER = """
from pgsched.handlers import Executor

Executor.start = lambda executor, claims: [poison(claim) for claim in claims]
"""


@pytest.mark.parametrize("source", [POISON, POISON + BEFORE_ITS_HANDLER], ids=["in", "before"])
def test_a_task_that_kills_its_worker_has_failed_when_its_attempts_are_used_up(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, source: str
) -> None:
    """A supervisor starts the worker again each time; it never lives long enough to be late."""
    shorten_grace(conn, 0.3)
    attempts = 3
    task_id = enqueue(conn, "poison", max_attempts=attempts)
    name: str | None = None
    for _ in range(attempts):
        with WorkerProcess(tmp_path, source, "--dsn", dsn) as worker:
            assert worker.process.wait(PATIENCE) == -signal.SIGKILL
            name = row(conn, task_id).claimed_by
            wait_until(lambda: conn.execute(REAP).fetchall() == [(task_id,)])
    ended = row(conn, task_id)
    reason = f"worker {name} was lost: its presence ended during attempt {attempts}"
    assert (ended.status, ended.attempt, ended.last_error) == ("failed", attempts, reason)
    assert (tmp_path / "runs").read_text() == "1 2 3 "


# A presence that is lost


def gated(worker: Worker) -> tuple[Counter[int], Event]:
    """Let tasks `wait` run until the event is set; returns how often each ran, and that."""
    runs: Counter[int] = Counter()
    gate = Event()

    @worker.task("wait")
    def wait(task: Task) -> None:
        runs[task.id] += 1
        gate.wait(PATIENCE)

    return runs, gate


def test_a_presence_that_breaks_is_taken_again_and_nobody_takes_the_tasks(
    dsn: str, conn: psycopg.Connection, reaping_often: None
) -> None:
    shorten_grace(conn, 1)
    worker = quick(dsn)
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, task_id, "processing")
        for _ in range(3):
            wait_for_presence(conn)
            before = sessions(conn, PRESENCES)
            assert end_sessions(conn, PRESENCES) == 1
            wait_until(lambda: set(sessions(conn, PRESENCES)) - set(before))  # noqa: B023
        wait_for_presence(conn)
        assert_nothing_is_reaped(conn, 2)
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert runs == {task_id: 1}


@pytest.fixture
def direct(conn: psycopg.Connection) -> Iterator[str]:
    """A role that may connect until it is told otherwise."""
    conn.execute("create role direct superuser login")
    yield "direct@"
    conn.execute("drop role direct")


def test_who_cannot_take_its_presence_again_lives_by_its_leases(
    dsn: str, conn: psycopg.Connection, reaping_often: None, direct: str
) -> None:
    shorten_grace(conn, 1)
    worker = quick(dsn, listen_dsn=dsn.replace("postgres@", direct))
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, task_id, "processing")
        wait_for_presence(conn)
        conn.execute("alter role direct nologin")
        end_sessions(conn, PRESENCES)
        wait_until(lambda: [on for _, on in presences(conn)] == [False])
        assert_nothing_is_reaped(conn, 2)
        conn.execute("alter role direct login")
        wait_for_presence(conn)
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert runs == {task_id: 1}


def test_a_worker_without_a_direct_connection_has_no_presence_and_does_not_wait_for_it(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PRESENCE_SECONDS", 2 * PATIENCE)
    shorten_grace(conn, 0.3)
    worker = quick(dsn, listen_dsn="host=/nowhere")
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, task_id, "processing")
        assert_nothing_is_reaped(conn, 1)
        assert [on for _, on in presences(conn)] == [False]
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert runs == {task_id: 1}


def test_who_may_not_hold_a_presence_is_told_so_once(
    dsn: str,
    conn: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Procedures are not among `all functions`, which somebody may have granted."""
    monkeypatch.setattr(loop, "PRESENCE_SECONDS", 2 * PATIENCE)
    conn.execute(
        """
        create role limited login;
        grant usage on schema pgsched to limited;
        grant execute on all functions in schema pgsched to limited;
        """
    )
    try:
        worker = quick(dsn.replace("postgres@", "limited@"))
        worker.task("noop")(lambda task: None)
        with running(worker):
            for _ in range(3):
                wait_for(conn, enqueue(conn, "noop"), "completed")
            assert [on for _, on in presences(conn)] == [False]
            wait_until(lambda: not sessions(conn, PRESENCES))
        told = [record for record in caplog.records if "no presence" in record.message]
        assert [record.levelname for record in told] == ["WARNING"]
    finally:
        conn.execute("drop owned by limited; drop role limited")


@pytest.mark.parametrize(("wait", "on"), [(2 * PATIENCE, True), (0.2, False)])
def test_the_first_claim_waits_for_the_presence_but_not_for_long(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, wait: float, on: bool
) -> None:
    """So a worker that dies by its first task is missed as soon as any."""
    monkeypatch.setattr(loop, "PRESENCE_SECONDS", wait)
    claimed = Event()
    hold_presence = calls.hold_presence

    def slow(*args: Any) -> None:
        claimed.wait(0.3 if on else PATIENCE)
        hold_presence(*args)

    monkeypatch.setattr(calls, "hold_presence", slow)
    worker = quick(dsn)
    seen: list[Presences] = []
    worker.task("look")(lambda task: seen.append(presences(conn)))
    task_id = enqueue(conn, "look")
    with running(worker):
        wait_for(conn, task_id, "completed")
        claimed.set()
        wait_for_presence(conn)
    assert [was_on for _, was_on in seen[0]] == [on]


def forget(conn: psycopg.Connection) -> int:
    """Delete the worker's row, as others do when it was not seen for a day; its id."""
    [(worker_id,)] = conn.execute("delete from pgsched.workers returning id")
    assert isinstance(worker_id, int)
    return worker_id


def test_a_worker_that_was_forgotten_is_there_again_with_its_new_id(
    dsn: str, conn: psycopg.Connection, reaping_often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REGISTER_SECONDS", 0.3)
    shorten_grace(conn, 1)
    worker = quick(dsn)
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, task_id, "processing")
        wait_for_presence(conn)
        before = forget(conn)
        wait_for_presence(conn)
        [(worker_id, _)] = presences(conn)
        assert worker_id > before
        held = "select objid::integer from pg_locks where classid = 1339 and granted"
        wait_until(lambda: conn.execute(held).fetchall() == [(worker_id,)])
        assert_nothing_is_reaped(conn, 2)
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert runs == {task_id: 1}


def test_a_worker_that_was_forgotten_and_cannot_be_there_again_lives_by_its_leases(
    dsn: str,
    conn: psycopg.Connection,
    reaping_often: None,
    monkeypatch: pytest.MonkeyPatch,
    direct: str,
) -> None:
    monkeypatch.setattr(loop, "REGISTER_SECONDS", 0.3)
    shorten_grace(conn, 1)
    worker = quick(dsn, listen_dsn=dsn.replace("postgres@", direct))
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_for(conn, task_id, "processing")
        wait_for_presence(conn)
        conn.execute("alter role direct nologin")
        forget(conn)
        wait_until(lambda: presences(conn))
        wait_until(lambda: not sessions(conn, PRESENCES))
        assert_nothing_is_reaped(conn, 2)
        assert [on for _, on in presences(conn)] == [False]
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert runs == {task_id: 1}


# Its end


def test_a_worker_that_stops_takes_its_presence_along(dsn: str, conn: psycopg.Connection) -> None:
    with running(quick(dsn)):
        wait_for_presence(conn)
        assert len(sessions(conn, PRESENCES)) == 1
    assert presences(conn) == []
    wait_until(lambda: not sessions(conn))


def test_a_worker_that_drains_is_present_until_the_end(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)
    worker.task("look")(lambda task: wait_for_presence(conn))
    task_id = enqueue(conn, "look")
    assert run_to_end(worker, drain=True) == 0
    assert row(conn, task_id).status == "completed"
    assert presences(conn) == []
    wait_until(lambda: not sessions(conn))


def test_what_outlives_the_grace_of_a_stop_is_left_to_its_lease(
    dsn: str, conn: psycopg.Connection
) -> None:
    """The handler runs on in its thread, and may still write."""
    shorten_grace(conn, 0.3)
    worker = quick(dsn, grace=0)
    runs, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        wait_until(lambda: runs)
        wait_for_presence(conn)
        name = row(conn, task_id).claimed_by
    wait_until(lambda: not sessions(conn))
    assert_nothing_is_reaped(conn, 1)
    conn.execute("update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp()")
    assert conn.execute(REAP).fetchall() == [(task_id,)]
    reason = f"worker {name} was lost: its lease ended during attempt 1"
    assert row(conn, task_id).last_error == reason
    gate.set()
