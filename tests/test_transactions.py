"""Handlers that take a connection: what they write and the completion are one transaction."""

import contextlib
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg import rows, sql
from workers import (
    CANCEL,
    PATIENCE,
    PRESENCES,
    REAP,
    count,
    gated,
    make_effects,
    quick,
    row,
    running,
    sessions,
    take_away,
    wait_for,
    wait_for_delay,
    wait_for_extension,
    wait_until,
    write,
    written,
)

from pgsched import Fail, InvalidArgument, Retry, Snooze, Task, Worker, calls, enqueue
from pgsched.embedded import Server

Connection = psycopg.Connection[Any]
Connect = Callable[..., psycopg.Connection]


@pytest.fixture(autouse=True)
def effects(conn: psycopg.Connection) -> None:
    make_effects(conn)


# One transaction


def test_the_writes_and_the_completion_appear_together(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> dict[str, int]:
        write(task, conn)
        return {"id": task.id}

    ids = [enqueue(conn, "write") for _ in range(20)]
    both = """
        select array(select task_id from public.effects order by 1),
               array(select id from pgsched.tasks where status = 'completed' order by 1)
        """

    def look() -> bool:
        [(effects, completed)] = conn.execute(both)
        assert effects == completed
        return len(effects) == len(ids)

    with running(worker):
        wait_until(look)
    for task_id in ids:
        done = row(conn, task_id)
        assert (done.attempt, done.result, done.last_error) == (1, {"id": task_id}, None)


RAISED: dict[str, tuple[Callable[[], BaseException], str, int, str | None]] = {
    "error": (lambda: ValueError("no"), "failed", 1, "ValueError: no"),
    "fail": (lambda: Fail("never"), "failed", 1, "Fail: never"),
    "retry": (lambda: Retry(timedelta(hours=1), "later"), "queued", 1, "Retry: later"),
    "snooze": (lambda: Snooze(timedelta(hours=1)), "queued", 0, None),
    "exit": (lambda: SystemExit(3), "failed", 1, "SystemExit: 3"),
    "rollback": (psycopg.Rollback, "failed", 1, "Rollback"),
}


def test_of_an_attempt_that_does_not_complete_nothing_stays(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)

    @worker.task("raise")
    def handler(task: Task, conn: Connection) -> None:
        write(task, conn)
        raise RAISED[task.payload][0]()

    @worker.task("return")
    def give(task: Task, conn: Connection) -> object:
        write(task, conn)
        return object() if task.payload == "object" else "a\0b"

    ids = {
        name: enqueue(conn, "raise", name, max_attempts=2 if status == "queued" else 1)
        for name, (_, status, *_) in RAISED.items()
    }
    returning = {name: enqueue(conn, "return", name, max_attempts=1) for name in ("object", "nul")}
    with running(worker):
        for name, (_, status, attempt, error) in RAISED.items():
            if status == "queued":
                wait_for_delay(conn, ids[name])
            ended = wait_for(conn, ids[name], status)
            assert (ended.attempt, ended.last_error) == (attempt, error), name
        error = wait_for(conn, returning["object"], "failed").last_error or ""
        assert error.startswith("InvalidArgument: not representable as JSON")
        error = wait_for(conn, returning["nul"], "failed").last_error or ""
        assert error.startswith("UntranslatableCharacter")
    assert written(conn) == []


def test_a_failed_attempt_is_made_up_for(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> None:
        write(task, conn)
        if task.attempt < 3:
            raise ValueError(task.attempt)

    task_id = enqueue(conn, "write")
    with running(worker):
        done = wait_for(conn, task_id, "completed")
    assert (done.attempt, done.last_error) == (3, "ValueError: 2")
    assert written(conn) == [task_id]


# A connection that is cut


class Proxy:
    """A socket to the server that cuts one session when it commits, before or after that."""

    def __init__(self, server: Server, cut: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self.cuts = [cut]
        self._server = str(server.folder / ".s.PGSQL.5432")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.folder / ".s.PGSQL.5432"))
        self._socket.listen()
        self._threads: list[Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        shutil.rmtree(self.folder)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._socket:
            while True:
                client = self._socket.accept()[0]
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                cutting = Event()
                self._spawn(self._pass, client, server, cutting, self._request)
                self._spawn(self._pass, server, client, cutting, self._answer)

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        cutting: Event,
        goes_on: Callable[[bytes, Event], bool],
    ) -> None:
        with source:
            with contextlib.suppress(OSError):
                while (data := source.recv(65536)) and goes_on(data, cutting):
                    target.sendall(data)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _request(self, data: bytes, cutting: Event) -> bool:
        if b"COMMIT" in data and self.cuts:
            if self.cuts.pop() == "before":
                return False
            cutting.set()
        return True

    def _answer(self, data: bytes, cutting: Event) -> bool:
        return not cutting.is_set()


@pytest.mark.parametrize(
    ("cut", "keep", "attempts"),
    [("before", "1 day", 2), ("after", "1 day", 1), ("after", "0", 1)],
    ids=str,
)
def test_the_effect_comes_once_although_the_connection_is_cut_at_the_commit(
    server: Server,
    dsn: str,
    conn: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    cut: str,
    keep: str,
    attempts: int,
) -> None:
    conn.execute("select pgsched.configure_queue('default', p_keep_completed => %s)", [keep])
    runs: Counter[int] = Counter()

    def handler(task: Task, conn: Connection) -> str:
        runs[task.id] += 1
        write(task, conn)
        return "well"

    task_id = enqueue(conn, "write")
    with Proxy(server, cut) as proxy:
        worker = quick(dsn.replace(str(server.folder), str(proxy.folder)))
        worker.task("write")(handler)
        with running(worker):
            wait_until(lambda: written(conn))
            if cut == "after":
                wait_until(lambda: f"claim lost: task={task_id} attempt=1" in caplog.messages)
            following = enqueue(conn, "write")
            wait_until(lambda: len(written(conn)) == 2)
    assert proxy.cuts == []
    assert written(conn) == [task_id, following]
    assert runs == {task_id: attempts, following: 1}
    assert count(conn, "queued") + count(conn, "processing") == 0
    if keep != "0":
        done = row(conn, task_id)
        assert (done.status, done.attempt, done.result) == ("completed", attempts, "well")


def transactional_sessions(conn: psycopg.Connection) -> list[int]:
    """The sessions that handlers were given."""
    idle = conn.execute("select pid from pg_stat_activity where state like 'idle in transaction%'")
    presences = sessions(conn, PRESENCES)  # afterwards: none that has just come is missing
    return [pid for (pid,) in idle if pid not in presences]


def test_the_task_is_free_at_once_when_the_connection_dies(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn)
    written_once, gate = Event(), Event()

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> None:
        write(task, conn)
        if task.attempt == 1:
            written_once.set()
            gate.wait(PATIENCE)

    task_id = enqueue(conn, "write")
    free = "select pg_try_advisory_xact_lock(1337, %s)"
    with running(worker):
        assert written_once.wait(PATIENCE)
        assert conn.execute(free, [task_id]).fetchone() == (False,)
        [session] = transactional_sessions(conn)
        conn.execute("select pg_terminate_backend(%s, 5000)", [session])
        assert conn.execute(free, [task_id]).fetchone() == (True,)
        assert row(conn, task_id).status == "processing"
        gate.set()
        done = wait_for(conn, task_id, "completed")
    assert done.attempt == 2
    assert (done.last_error or "").startswith("AdminShutdown: terminating connection")
    assert written(conn) == [task_id]


# Leases


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_task_that_is_held_is_neither_extended_nor_reaped(
    dsn: str, conn: psycopg.Connection, reaping_often: None, isolation: str
) -> None:
    conn.execute(
        sql.SQL("alter database {} set default_transaction_isolation = {}").format(
            sql.Identifier(conn.info.dbname), isolation
        )
    )
    worker = quick(dsn, lease=1)
    gate, held = Event(), Event()
    runs: Counter[int] = Counter()

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> str | None:
        runs[task.id] += 1
        write(task, conn)
        held.set()
        gate.wait(PATIENCE)
        [(level,)] = conn.execute("show transaction_isolation")
        return str(level)

    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    task_id, other = enqueue(conn, "write"), enqueue(conn, "wait")
    over = "select lease_expires_at < clock_timestamp() from pgsched.tasks where id = %s"
    with running(worker):
        assert held.wait(PATIENCE)
        lease = row(conn, task_id).lease_expires_at
        wait_until(lambda: conn.execute(over, [task_id]).fetchone() == (True,))
        for _ in range(3):
            wait_for_extension(conn, other)
            assert conn.execute(REAP).fetchall() == []
        assert row(conn, task_id).lease_expires_at == lease
        gate.set()
        done = wait_for(conn, task_id, "completed")
        wait_for(conn, other, "completed")
    assert (done.attempt, done.result) == (1, isolation)
    assert runs == {task_id: 1}
    assert written(conn) == [task_id]


def test_a_failed_attempt_is_recorded_after_its_lease_would_have_ended(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, lease=1)
    gate = Event()

    @worker.task("write")
    def handler(task: Task, conn: Connection) -> None:
        gate.wait(PATIENCE)
        raise Fail("late")

    task_id = enqueue(conn, "write")
    over = "select lease_expires_at < clock_timestamp() from pgsched.tasks where id = %s"
    with running(worker):
        wait_until(lambda: conn.execute(over, [task_id]).fetchone() == (True,))
        gate.set()
        failed = wait_for(conn, task_id, "failed")
    assert (failed.attempt, failed.last_error) == (1, "Fail: late")


def test_a_claim_that_is_lost_before_its_handler_begins_is_dropped(
    dsn: str,
    conn: psycopg.Connection,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = quick(dsn)
    worker.task("write")(write)
    hold_task = calls.hold_task
    admin = connect()

    def late(session: calls.Connection, claim: calls.Claim) -> None:
        take_away(admin, claim.id)
        hold_task(session, claim)

    monkeypatch.setattr(calls, "hold_task", late)
    task_id = enqueue(conn, "write")
    with running(worker):
        wait_until(lambda: f"claim lost: task={task_id} attempt=1" in caplog.messages)
    assert written(conn) == []
    assert row(conn, task_id)[:3] == ("processing", 2, row(conn, task_id).last_error)


# What a handler leaves behind


def swallow(conn: Connection) -> None:
    with contextlib.suppress(psycopg.Error):
        conn.execute("select 1 / 0")


def change_after_a_commit(conn: Connection) -> None:
    conn.execute("commit")
    conn.autocommit = False
    conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE


def prepare(conn: Connection) -> None:
    conn.prepare_threshold = 0
    for _ in range(3):
        conn.execute("select current_user")


def leave_open(conn: Connection) -> None:
    block = conn.transaction()
    block.__enter__()
    vars(conn)["left open"] = block


def execute(statement: str) -> Callable[[Connection], object]:
    return lambda conn: conn.execute(statement.encode())


def change(name: str, value: object) -> Callable[[Connection], None]:
    return lambda conn: setattr(conn, name, value)


MESSES: dict[str, tuple[Callable[[Connection], object], str | None]] = {
    # What a handler did that ended without an exception, and the error of its attempt, if any.
    "nothing": (lambda conn: None, None),
    "a swallowed error": (swallow, "InFailedSqlTransaction"),
    "another role": (execute("set role mess"), None),
    "another role for good": (execute("set session authorization mess"), "InsufficientPrivilege"),
    "a time limit": (execute("set statement_timeout = '1h'"), None),
    "a search path": (execute("set search_path = nowhere"), None),
    "a temporary table": (execute("create temp table mess ()"), None),
    "an advisory lock": (execute("select pg_advisory_lock(1)"), None),
    "a channel": (execute("listen mess"), None),
    "a read-only transaction": (execute("set transaction read only"), "ReadOnlySqlTransaction"),
    "a commit of its own": (lambda conn: conn.commit(), "ProgrammingError"),
    "a commit by SQL": (execute("commit"), None),
    "a rollback by SQL": (execute("rollback"), None),
    "no more connection": (lambda conn: conn.close(), "OperationalError"),
    "an open savepoint": (leave_open, "OutOfOrderTransactionNesting"),
    "a mode after a commit by SQL": (change_after_a_commit, None),
    "odd rows": (change("row_factory", rows.dict_row), None),
    "odd cursors": (change("cursor_factory", psycopg.RawCursor), None),
    "prepared statements": (prepare, None),
    "no autocommit": (change("autocommit", False), "ProgrammingError"),
    "read only": (change("read_only", True), "ProgrammingError"),
    "an isolation level": (
        change("isolation_level", psycopg.IsolationLevel.SERIALIZABLE),
        "ProgrammingError",
    ),
}


@pytest.mark.parametrize("mess", MESSES)
def test_the_next_handler_gets_a_clean_connection(
    dsn: str, conn: psycopg.Connection, mess: str
) -> None:
    worker = quick(dsn, connections=1)
    do, error = MESSES[mess]

    @worker.task("mess")
    def handler(task: Task, conn: Connection) -> None:
        do(conn)

    @worker.task("look")
    def look(task: Task, conn: Connection) -> list[str]:
        threshold = conn.prepare_threshold
        prepare(conn)
        [found] = conn.execute(
            """
            select session_user, current_user, current_setting('statement_timeout'),
                   current_setting('search_path'), current_setting('transaction_isolation'),
                   current_setting('transaction_read_only'), to_regclass('pg_temp.mess'),
                   (select count(*) from pg_listening_channels()),
                   (select count(*) from pg_locks where pid = pg_backend_pid()
                     and locktype = 'advisory')
            """
        )
        return [*map(str, found), str(conn.autocommit), str(threshold)]

    conn.execute("drop role if exists mess")
    conn.execute("create role mess")
    clean = None
    with running(worker):
        for _ in range(2):
            done = wait_for(conn, enqueue(conn, "look"), "completed", "failed")
            assert done.status == "completed", done.last_error
            clean = clean or done.result
            assert clean == done.result
            ended = wait_for(conn, enqueue(conn, "mess", max_attempts=1), "completed", "failed")
            assert (ended.last_error or "").startswith(error or "")
            assert ended.status == ("failed" if error else "completed")
    conn.execute("drop role mess")


# Cancelling, and time limits


def test_a_handler_learns_neither_of_a_cancel_nor_is_it_undone_by_one(
    dsn: str, conn: psycopg.Connection
) -> None:
    worker = quick(dsn, lease=1)
    begun, gate = gated(worker)
    task_id = enqueue(conn, "wait")
    with running(worker):
        assert begun.wait(PATIENCE)
        assert conn.execute(CANCEL, [task_id]).fetchone() == ("requested",)
        gate.set()
        wait_for(conn, task_id, "completed")
    assert written(conn) == [task_id]


def test_what_ends_after_its_time_has_no_effect(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)
    cancelled = Event()

    @worker.task("slow", timeout=0.1)
    def slow(task: Task, conn: Connection) -> None:
        write(task, conn)
        if task.attempt == 1:
            assert task.cancelled.wait(PATIENCE)
            cancelled.set()

    task_id = enqueue(conn, "slow")
    with running(worker):
        done = wait_for(conn, task_id, "completed")
    assert cancelled.is_set()
    assert done.attempt == 2
    assert "timed out after 0.1 s" in (done.last_error or "")
    assert written(conn) == [task_id]


# What takes a connection


def test_a_coroutine_that_wants_a_connection_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a coroutine takes no connection"):

        @Worker().task("wants")
        async def handler(task: Task, conn: Connection) -> None:
            pass


def test_what_has_a_default_is_not_asked_for(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn)

    @worker.task("default")
    def default(task: Task, conn: object = "default") -> object:
        return conn

    @worker.task("star")
    def star(task: Task, *more: object) -> int:
        return len(more)

    @worker.task("keyword")
    def keyword(task: Task, *, conn: object = "keyword") -> object:
        return conn

    @worker.task("async")
    async def coroutine(task: Task, conn: object = "async") -> object:
        return conn

    class Handlers:
        def method(self, task: Task) -> str:
            return "method"

        def transaction(self, task: Task, conn: Connection) -> str:
            return conn.info.transaction_status.name

    worker.task("method")(Handlers().method)
    worker.task("transaction")(Handlers().transaction)
    expected = {
        "default": "default",
        "star": 0,
        "keyword": "keyword",
        "async": "async",
        "method": "method",
        "transaction": "INTRANS",
    }
    ids = {name: enqueue(conn, name) for name in expected}
    with running(worker):
        results = {name: wait_for(conn, ids[name], "completed").result for name in expected}
    assert results == expected


def test_who_ignores_that_its_time_is_over_holds_up_no_other_task(
    dsn: str, conn: psycopg.Connection
) -> None:
    # Tried again at once, the task would be the first in its queue, where nobody can claim it.
    worker = quick(dsn, concurrency=2)
    begun, gate = Event(), Event()

    @worker.task("deaf", timeout=0.1)
    def deaf(task: Task, conn: Connection) -> None:
        write(task, conn)
        if task.attempt == 1:
            assert task.cancelled.wait(PATIENCE)
            begun.set()
            gate.wait(2 * PATIENCE)

    worker.task("noop")(lambda task: None)
    task_id = enqueue(conn, "deaf")
    with running(worker):
        assert begun.wait(PATIENCE)
        for _ in range(5):
            wait_for(conn, enqueue(conn, "noop"), "completed")
        gate.set()
        done = wait_for(conn, task_id, "completed")
    assert done.attempt == 2
    assert "timed out after 0.1 s" in (done.last_error or "")
    assert written(conn) == [task_id]
