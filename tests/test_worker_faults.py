"""The worker among faults: each takes what it has to, and nothing else."""

import asyncio
import signal
import socket
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from workers import (
    CANCEL,
    PATIENCE,
    PRESENCES,
    WorkerProcess,
    count,
    end_sessions,
    quick,
    row,
    run_to_end,
    running,
    sessions,
    wait_for,
    wait_for_delay,
    wait_for_extension,
    wait_until,
)

from pgsched import InvalidArgument, Retry, Snooze, Task, Worker, calls, enqueue

Connect = Callable[..., psycopg.Connection]


def assert_no_lease_ends(conn: psycopg.Connection, until: Callable[[], object]) -> None:
    """Look at all claims again and again, until the condition holds."""

    def look() -> object:
        ended = "select id from pgsched.tasks where status = 'processing' and lease_expires_at <= "
        assert conn.execute(f"{ended} clock_timestamp()".encode()).fetchall() == []
        return until()

    wait_until(look)


def cannot_be_serialized(conn: psycopg.Connection) -> None:
    raise psycopg.errors.SerializationFailure


# Leases


@pytest.mark.parametrize("fault", [end_sessions, cannot_be_serialized])
def test_an_extension_that_failed_is_made_up_in_time(
    dsn: str,
    conn: psycopg.Connection,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[psycopg.Connection], object],
) -> None:
    worker = quick(dsn, lease=2)
    gate = Event()
    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    tries: list[int] = []
    extended: list[int] = []
    extend_tasks = calls.extend_tasks
    admin = connect()

    def fragile(*args: Any) -> list[str]:
        tries.append(1)
        if len(tries) % 4:
            fault(admin)
        answers = extend_tasks(*args)
        extended.append(1)
        return answers

    monkeypatch.setattr(calls, "extend_tasks", fragile)
    task_id = enqueue(conn, "wait")
    with running(worker):
        assert_no_lease_ends(conn, lambda: len(extended) == 2)
        gate.set()
        assert wait_for(conn, task_id, "completed").attempt == 1
    assert len(tries) >= 8


def test_many_failures_at_once_on_a_slow_database_hold_up_no_lease(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 600
    worker = quick(dsn, lease=1, concurrency=failures + 1)
    gate, end = Event(), Event()
    worker.task("long")(lambda task: end.wait(PATIENCE))

    @worker.task("fail")
    async def fail(task: Task) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.05)
        raise ValueError("all at once")

    fail_tasks = calls.fail_tasks

    def slow(*args: Any) -> list[str]:
        time.sleep(0.25)
        return fail_tasks(*args)

    monkeypatch.setattr(calls, "fail_tasks", slow)
    long = enqueue(conn, "long", priority=0)
    conn.execute(
        "select pgsched.enqueue_task('fail', p_max_attempts => 1) from generate_series(1, %s)",
        [failures],
    )
    with running(worker):
        wait_until(lambda: count(conn, "processing") == failures + 1)
        gate.set()
        assert_no_lease_ends(conn, lambda: count(conn, "failed") == failures)
        end.set()
        assert wait_for(conn, long, "completed").attempt == 1


# What handlers raise


class RateLimited(Retry):
    def __init__(self, seconds: int) -> None:
        self.seconds = seconds


class NoDelay(Retry):
    @property
    def delay(self) -> timedelta | None:
        raise SystemExit(6)

    @delay.setter
    def delay(self, delay: timedelta | None) -> None:
        pass


class OddSnooze(Snooze):
    def __init__(self, delay: object) -> None:
        super().__init__(timedelta(hours=1))
        self.delay = delay  # type: ignore[assignment]


class NoText(str):
    def __getitem__(self, key: object) -> str:
        raise ValueError("no slices")


class OddText(str):
    def __format__(self, how: str) -> str:
        return self[1 // len(self) :]

    def __len__(self) -> int:
        raise KeyboardInterrupt

    def __bool__(self) -> bool:
        raise GeneratorExit


class Hostile(Exception):
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


RAISED: dict[str, Callable[[], Exception]] = {
    "no super": lambda: RateLimited(5),
    "no delay": NoDelay,
    "number": lambda: OddSnooze(5),
    "nothing": lambda: OddSnooze(None),
    "no text": lambda: Hostile(NoText("text")),
    "odd text": lambda: Hostile(OddText("text")),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_any_make_is_recorded_and_frees_its_slot(
    dsn: str, conn: psycopg.Connection
) -> None:
    slots = 2 * len(RAISED)
    worker = quick(dsn, concurrency=slots)

    @worker.task("plain")
    def plain(task: Task) -> None:
        raise RAISED[task.payload]()

    @worker.task("async")
    async def coroutine(task: Task) -> None:
        plain(task)

    together = Barrier(slots)
    worker.task("meet")(lambda task: together.wait(PATIENCE))
    ids = {
        (kind, name): enqueue(conn, kind, name, max_attempts=1)
        for kind in ("plain", "async")
        for name in RAISED
    }
    with running(worker):
        for (kind, name), task_id in ids.items():
            error = wait_for(conn, task_id, "failed").last_error or ""
            assert error.startswith(type(RAISED[name]()).__name__), (kind, name)
        meeting = [enqueue(conn, "meet") for _ in range(slots)]
        assert {wait_for(conn, task_id, "completed").attempt for task_id in meeting} == {1}


def test_a_failing_task_never_leaves_a_transaction_open(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, concurrency=50)

    @worker.task("end")
    def end(task: Task) -> None:
        raise Snooze(timedelta(hours=1)) if task.payload else ValueError("no")

    conn.execute(
        """
        select pgsched.enqueue_task('end', p_payload => to_jsonb(n % 2), p_max_attempts => 1)
          from generate_series(1, 400) as n
        """
    )
    states: Counter[str | None] = Counter()  # None: a session that just begins

    def look() -> bool:
        for _ in range(20):
            query = "select state from pg_stat_activity where pid = any (%s)"
            pids = set(sessions(conn)) - set(sessions(conn, PRESENCES))
            states.update(state for (state,) in conn.execute(query, [list(pids)]))
        return count(conn, "failed") == 200 and count(conn, "processing") == 0

    with running(worker):
        wait_until(look)
    assert states["active"] > 0
    assert set(states) <= {"active", "idle", None}


# What the database refuses


def refuse(conn: psycopg.Connection, sqlstate: str) -> None:
    """Let no task of type `bad` be finished as long as table `refusing` is there."""
    conn.execute(
        sql.SQL(
            """
            create table public.refusing ();
            create function public.refuse() returns trigger language plpgsql as $$
            begin
              if new.task_type = 'bad' and to_regclass('public.refusing') is not null then
                raise exception 'not this one' using errcode = {};
              end if;
              return new;
            end $$;
            create trigger refuse before insert on pgsched.finished_tasks
              for each row execute function public.refuse();
            """
        ).format(sqlstate)
    )


def test_an_outcome_refused_for_good_stops_nothing_else(dsn: str, conn: psycopg.Connection) -> None:
    refuse(conn, "P0001")
    worker = quick(dsn, lease=1)
    gate = Event()
    for task_type in ("bad", "good"):
        worker.task(task_type)(lambda task: None)
    worker.task("long")(lambda task: gate.wait(PATIENCE))
    long = enqueue(conn, "long")
    bad = enqueue(conn, "bad")
    last = enqueue(conn, "bad", max_attempts=1)
    with running(worker):
        good = [enqueue(conn, "good") for _ in range(20)]
        for task_id in good:
            assert wait_for(conn, task_id, "completed").attempt == 1
        wait_until(lambda: row(conn, bad).last_error)
        assert "result refused: RaiseException: not this one" in (row(conn, bad).last_error or "")
        # What cannot even fail is left to its lease, which ends.
        ended = "select lease_expires_at < clock_timestamp() from pgsched.tasks where id = %s"
        wait_until(lambda: conn.execute(ended, [last]).fetchone() == (True,))
        wait_for_extension(conn, long)
        wait_for(conn, enqueue(conn, "good"), "completed")
        gate.set()
        assert wait_for(conn, long, "completed").attempt == 1


def test_an_outcome_refused_for_now_is_kept_and_stops_no_lease_and_no_claim(
    dsn: str, conn: psycopg.Connection
) -> None:
    refuse(conn, "55000")
    slots = 5
    worker = quick(dsn, lease=1, concurrency=slots)
    gate = Event()
    runs: Counter[int] = Counter()

    def run(task: Task) -> str:
        runs[task.id] += 1
        return "kept"

    for task_type in ("bad", "good"):
        worker.task(task_type)(run)
    worker.task("long")(lambda task: gate.wait(PATIENCE))
    long = enqueue(conn, "long", priority=0)
    bad = enqueue(conn, "bad", priority=1)
    with running(worker):
        wait_until(lambda: runs[bad])
        good = [enqueue(conn, "good") for _ in range(2 * slots)]
        wait_until(lambda: runs.total() > 1)
        for _ in range(4):  # more than one lease
            wait_for_extension(conn, long)
            assert count(conn, "processing") <= slots
        assert_no_lease_ends(conn, lambda: True)
        assert row(conn, bad).status == "processing"
        conn.execute("drop table public.refusing")
        for task_id in (bad, *good):
            done = wait_for(conn, task_id, "completed")
            assert (done.attempt, done.result) == (1, "kept")
        gate.set()
        assert wait_for(conn, long, "completed").attempt == 1
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("function", ["reap_stale", "register_worker"])
def test_claiming_goes_on_without(
    dsn: str,
    conn: psycopg.Connection,
    reaping_often: None,
    caplog: pytest.LogCaptureFixture,
    function: str,
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    conn.execute(f"alter function pgsched.{function} rename to gone".encode())
    with running(worker):
        wait_until(lambda: caplog.text.count(f"function pgsched.{function}(") >= 2)
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_a_stale_task_that_cannot_be_reaped_stops_nothing_else(
    dsn: str, conn: psycopg.Connection, reaping_often: None
) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    bad = enqueue(conn, "noop", max_attempts=1)
    conn.execute(
        """
        insert into pgsched.finished_tasks (id, queue, task_type, payload, status, priority, run_at,
                                            attempt, max_attempts, created_at, finished_at)
        select id, queue, task_type, payload, 'failed', priority, run_at, attempt, max_attempts,
               created_at, clock_timestamp()
          from pgsched.scheduled_tasks
        """
    )
    ids = [bad, *(enqueue(conn, "noop") for _ in range(2))]
    conn.execute("select from pgsched.claim_task('lost', p_lease => '1 s', p_limit => 3)")
    conn.execute(
        "update pgsched.scheduled_tasks set lease_expires_at = lease_expires_at - interval '1 s'"
    )
    with running(worker):
        for task_id in ids[1:]:
            assert wait_for(conn, task_id, "completed").attempt == 2
        assert wait_for(conn, enqueue(conn, "noop"), "completed").attempt == 1
    assert conn.execute("select id, status from pgsched.scheduled_tasks").fetchall() == [
        (bad, "processing")
    ]


# What the machine and the settings of the database do


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_claim_that_no_thread_can_be_had_for_is_given_back(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    worker = quick(dsn, concurrency=2)
    scarce = Event()
    scarce.set()
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if scarce.is_set() and thread.name in ("pgsched-handler", "pgsched-loop"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    worker.task("plain")(lambda task: "well")

    @worker.task("async")
    async def coroutine(task: Task) -> str:
        return "well"

    ids = [enqueue(conn, kind) for _ in range(5)]
    with running(worker):
        for task_id in ids:
            left = wait_for_delay(conn, task_id)
            assert (left.status, left.attempt, left.last_error) == ("queued", 0, None)
        scarce.clear()
        assert wait_for(conn, enqueue(conn, kind), "completed").result == "well"


@pytest.mark.parametrize("host", [40 * "\u00e9", "line\nbreak\x7f", "b\udcffd"])
def test_a_worker_runs_on_a_machine_of_any_name(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    with running(worker):
        done = wait_for(conn, enqueue(conn, "noop"), "completed")
        [(name,)] = conn.execute("select name from pgsched.workers")
    assert done.claimed_by == name


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("DateStyle", "SQL, DMY"),
        ("DateStyle", "German"),
        ("DateStyle", "Postgres"),
        ("IntervalStyle", "iso_8601"),
        ("IntervalStyle", "sql_standard"),
        ("IntervalStyle", "postgres_verbose"),
    ],
)
def test_the_driver_reads_times_whatever_style_the_database_writes(
    dsn: str, conn: psycopg.Connection, setting: str, value: str
) -> None:
    conn.execute(
        sql.SQL("alter database {} set {} = {}").format(
            sql.Identifier(conn.info.dbname), sql.Identifier(setting), value
        )
    )
    worker = quick(dsn)
    seen: list[Task] = []
    worker.task("see")(seen.append)
    delay = timedelta(days=1, seconds=3, microseconds=5)

    @worker.task("retry")
    def retry(task: Task) -> None:
        raise Retry(delay)

    with calls.connect(dsn, application_name="test") as styled:
        enqueue(styled, "see", queue="left", delay=delay)
        conn.execute("update pgsched.scheduled_tasks set run_at = run_at - 2 * %s", [delay])
        _, [stats] = calls.database_stats(styled)
        age = timedelta(seconds=stats["oldest_due_age"])
        assert delay - timedelta(minutes=1) < age < delay + timedelta(minutes=1)
        see, retried = enqueue(styled, "see"), enqueue(styled, "retry")
    with running(worker):
        wait_for(conn, see, "completed")
        due_in = wait_for_delay(conn, retried).due_in
        assert delay - timedelta(minutes=1) < due_in <= delay
    [task] = seen
    times = conn.execute("select run_at, created_at from pgsched.tasks where id = %s", [see])
    assert times.fetchone() == (task.run_at, task.created_at)


# Stopping, and running again

APP = """
from pgsched import Worker
worker = Worker(poll_interval=0.05)
"""


def test_sigterm_ends_it_within_the_grace_while_its_table_is_locked(
    dsn: str, conn: psycopg.Connection, connect: Connect, tmp_path: Path
) -> None:
    grace = 0.5
    with WorkerProcess(tmp_path, APP, "--dsn", dsn, "--grace", str(grace)) as worker:
        wait_until(lambda: conn.execute("select id from pgsched.workers").fetchall())
        with connect().transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            waiting = "select from pg_locks where pid = any (%s) and not granted"
            wait_until(lambda: conn.execute(waiting, [sessions(conn)]).fetchall())
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(3 * (grace + 1)) == 0
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("signals", [2, 3])
def test_signals_in_quick_succession_end_it_in_order(
    dsn: str, tmp_path: Path, signals: int
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--dsn", dsn, "--metrics-host", "127.0.0.1", "--metrics-port", str(port))
    with WorkerProcess(tmp_path, APP, *options) as worker:
        worker.wait_for_log("started: worker")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as page:
            assert b"pgsched_worker_slots" in page.read()
        for _ in range(signals):
            worker.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # Signals that wait together are one.
        assert worker.process.wait(10) == 0
        assert "Traceback" not in worker.log


def test_a_worker_runs_once_at_a_time(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")
        with pytest.raises(RuntimeError, match="running already"):
            worker.run()
        wait_for(conn, enqueue(conn, "noop"), "completed")
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")


def test_what_an_earlier_run_left_running_is_not_counted_by_the_next(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, concurrency=1, lease=1, grace=0)
    gates = {name: Event() for name in ("first", "second", "third")}
    ended = Event()

    @worker.task("wait")
    def wait(task: Task) -> None:
        gates[task.payload].wait(PATIENCE)
        ended.set()

    first = enqueue(conn, "wait", "first")
    with running(worker):
        wait_for(conn, first, "processing")
    # Nobody gets it again here.
    conn.execute("update pgsched.scheduled_tasks set lease_expires_at = 'infinity'")
    second = enqueue(conn, "wait", "second", priority=0)
    third = enqueue(conn, "wait", "third")
    worker.grace = PATIENCE
    with running(worker):
        wait_for(conn, second, "processing")
        gates["first"].set()
        assert ended.wait(PATIENCE)
        for _ in range(2):
            wait_for_extension(conn, second)
        assert row(conn, third).status == "queued"
        gates["second"].set()
        wait_for(conn, third, "processing")
        gates["third"].set()
        wait_for(conn, third, "completed")


# Arguments


def test_a_host_that_cannot_be_one_is_refused_without_the_password() -> None:
    worker = Worker(f"postgresql://someone:s3cret@{64 * 'a'}.example/app", grace=0)
    with pytest.raises(InvalidArgument, match="dsn") as caught:
        run_to_end(worker)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "wrong",
    [
        {"task_type": None},
        {"task_type": b"noop"},
        {"queue": 5},
        {"run_at": "2030-01-01"},
        {"run_at": date(2030, 1, 1)},
        {"delay": 5},
        {"priority": "5"},
        {"priority": 5.5},
        {"max_attempts": 2.5},
        {"unique_key": uuid4()},
        {"concurrency_key": ["a"]},
    ],
    ids=lambda wrong: " ".join(f"{name} {type(value).__name__}" for name, value in wrong.items()),
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(
    conn: psycopg.Connection, wrong: dict[str, Any]
) -> None:
    [name] = wrong
    with pytest.raises(InvalidArgument, match=f"^{name} "):
        enqueue(conn, **{"task_type": "noop", **wrong})
    assert conn.execute("select id from pgsched.tasks").fetchall() == []


def test_the_decorator_without_a_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="name the type"):

        @Worker().task  # type: ignore[arg-type]
        def handler(task: Task) -> None:
            pass


def test_a_failure_that_waits_for_a_lock_holds_up_no_other_report(
    dsn: str, conn: psycopg.Connection, connect: Connect
) -> None:
    worker = quick(dsn, concurrency=3)
    gate = Event()

    @worker.task("end")
    def end(task: Task) -> None:
        gate.wait(PATIENCE)
        raise ValueError("no") if task.payload == "fails" else Snooze(timedelta(hours=1))

    failing = enqueue(conn, "end", "fails", max_attempts=1)
    snoozing = [enqueue(conn, "end", "snoozes") for _ in range(6)]
    other = connect()
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        with other.transaction():
            lock = "select from pgsched.scheduled_tasks where id = %s for update"
            other.execute(lock, [failing])
            gate.set()
            for task_id in snoozing:
                assert wait_for_delay(conn, task_id).attempt == 0
            assert row(conn, failing).status == "processing"
        wait_for(conn, failing, "failed")


def test_a_session_that_is_read_only_is_replaced(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    read_only = f"alter database {conn.info.dbname} set default_transaction_read_only"
    conn.execute(f"{read_only} = on".encode())
    task_id = enqueue(conn, "noop")
    with running(worker):
        wait_until(lambda: sessions(conn))
        conn.execute(f"{read_only} = off".encode())
        wait_for(conn, task_id, "completed")


def test_the_encoding_of_the_dsn_takes_no_character_away(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(f"{dsn}&client_encoding=latin1")

    @worker.task("euro")
    def euro(task: Task) -> None:
        raise ValueError("\N{EURO SIGN}")

    task_id = enqueue(conn, "euro", max_attempts=1)
    with running(worker):
        error = wait_for(conn, task_id, "failed").last_error
    assert error == "ValueError: \N{EURO SIGN}"


def test_a_cancelled_coroutine_may_clean_up_for_longer_than_a_lease(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, lease=1)
    cancellations: Counter[int] = Counter()

    @worker.task("clean")
    async def clean(task: Task) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            for _ in range(3):
                cancellations[task.id] += 1
                await asyncio.sleep(0.4)
            raise

    task_id = enqueue(conn, "clean")
    with running(worker):
        wait_for(conn, task_id, "processing")
        conn.execute(CANCEL, [task_id])
        wait_for(conn, task_id, "cancelled")
    assert cancellations[task_id] == 3


def test_the_threads_of_a_run_end_with_it(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, concurrency=4)
    together = Barrier(4)
    worker.task("meet")(lambda task: together.wait(PATIENCE))
    for _ in range(2):
        ids = [enqueue(conn, "meet") for _ in range(4)]
        with running(worker):
            for task_id in ids:
                wait_for(conn, task_id, "completed")
        wait_until(lambda: not [t for t in threading.enumerate() if t.name == "pgsched-handler"])
