"""Each fault has its effect, and leaves a world as it was."""

import logging
import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random

import nemesis
import psycopg
import pytest
from nemesis import BOUNCER_FAULTS, FAULTS, PROXY_FAULTS, World, faults, is_broken
from pgbouncer import PgBouncer
from proxy import Proxy
from psycopg.pq import ExecStatus, TransactionStatus
from workers import (
    LISTENERS,
    WorkerProcess,
    ask,
    install,
    is_running,
    sessions,
    wait_for,
    wait_until,
)

from pgsched import enqueue
from pgsched.embedded import Server

# Calls whatever the driver calls, again and again.
APP = """
import time
from datetime import timedelta

from pgsched import Retry, Snooze, Worker, enqueue, loop

loop.REAP_SECONDS = 0.2
worker = Worker(poll_interval=0.05, lease=1)
SOON = timedelta(milliseconds=100)


@worker.task("quick")
def quick(task):
    pass


@worker.task("chain")
def chain(task, conn):
    enqueue(conn, "chain", delay=SOON, max_attempts=1_000_000)
    enqueue(conn, "quick")


@worker.task("retry")
def retry(task):
    raise Retry(SOON)


@worker.task("snooze")
def snooze(task):
    raise Snooze(SOON)


@worker.task("slow")
def slow(task):
    time.sleep(0.7)
    raise Snooze(SOON)
"""


class Handle:
    """A worker process."""

    name = "worker"

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder = folder
        self._dsn = dsn
        self.restart()

    @property
    def pid(self) -> int:
        return self.worker.process.pid

    def restart(self) -> None:
        self.worker = WorkerProcess(self._folder, APP, "--dsn", self._dsn)

    def is_running(self) -> bool:
        return self.worker.process.poll() is None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A worker at work, behind a proxy."""
    with Server(settings={"fsync": "off", "max_connections": "20"}) as server:
        dsn = server.create_database("app")
        install(server, dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select pgsched.configure_queue('default', p_retry_delay => '50 ms')")
            for task_type in 3 * ("chain", "retry", "snooze", "slow"):
                enqueue(conn, task_type, max_attempts=1_000_000)
            for _ in range(100):
                enqueue(conn, "quick", queue="idle")
        with Proxy(server) as proxy:
            handle = Handle(tmp_path_factory.mktemp("worker"), proxy.dsn("app"))
            yield World(server, dsn, None, proxy, [handle])
            handle.worker.__exit__()


@dataclass
class Scene:
    """The world, and what there was before the fault."""

    world: World
    dsn: str
    worker: int
    sessions: list[int]
    listeners: list[int]
    presences: list[int]
    started: object
    logged: int
    log: pytest.LogCaptureFixture
    client: psycopg.Connection
    """Through the proxy."""
    ends: list[datetime] = field(default_factory=list)
    """When the fault wants to be over, each time it waits."""
    meanwhile: psycopg.Connection | None = None
    """Of when the fault was at its height."""

    def close(self) -> None:
        for conn in filter(None, (self.client, self.meanwhile)):
            conn.close()

    def has_lost(self, pids: list[int]) -> bool:
        """Any of these sessions."""
        return not set(pids) <= set(ask(self.dsn, "select pid from pg_stat_activity"))

    def has_lost_all(self) -> bool:
        """The sessions of workers."""
        return not set(self.sessions) & set(ask(self.dsn, "select pid from pg_stat_activity"))

    def has_restarted(self) -> bool:
        """The server, not just its sessions."""
        return ask(self.dsn, STARTED) != [self.started]

    def has_recovered(self) -> bool:
        """From a crash."""
        log = (self.world.server.folder / "server.log").read_text(errors="replace")
        return "not properly shut down" in log[self.logged :]

    def has_leases(self) -> bool:
        """That last longer than the fault."""
        query = "select max(lease_expires_at) from pgsched.scheduled_tasks"
        return bool(ask(self.dsn, query)[0] > self.ends[-1])

    def has_setting(self, name: str) -> bool:
        """A new session has it, and there are no others of workers."""
        if not self.has_lost_all():
            return False
        self.meanwhile = psycopg.connect(self.dsn, autocommit=True)
        query = "select from pg_settings where name = %s and source = 'database'"
        return self.meanwhile.execute(query, [name]).fetchall() == [()]

    def is_stalled(self) -> bool:
        """An answer does not come."""
        self.client.pgconn.send_query(b"select 1")
        return not is_readable(self.client, 0.1)

    def is_answered(self) -> bool:
        """After the stall."""
        result = self.client.pgconn.get_result()
        return result is not None and result.status == ExecStatus.TUPLES_OK

    def is_busy(self) -> bool:
        """With a long statement, until that is cancelled."""
        if self.client.pgconn.transaction_status == TransactionStatus.IDLE:
            self.client.pgconn.send_query(b"select pg_sleep(20)")
        pid = self.client.info.backend_pid
        query = f"select state = 'active' from pg_stat_activity where pid = {pid}"
        return ask(self.dsn, query) == [True] or is_readable(self.client)

    def is_refused(self) -> bool:
        """By the proxy."""
        assert self.world.proxy
        return refuses(self.world.proxy.dsn("app")) and is_broken(self.client)


class Least(Random):
    """The shortest of all faults."""

    def uniform(self, a: float, b: float) -> float:
        return a


STARTED = "select pg_postmaster_start_time()"


def is_any_stopped(pids: list[int]) -> bool:
    command = ["ps", "-o", "state=", "-p", ",".join(map(str, pids))]
    return "T" in subprocess.run(command, capture_output=True, text=True).stdout


def is_readable(client: psycopg.Connection, seconds: float = 0) -> bool:
    return bool(select.select([client], [], [], seconds)[0])


def refuses(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return True
    return False


def has_no_locks(scene: Scene) -> bool:
    try:
        ask(scene.dsn, "select pg_advisory_lock(1, n) from generate_series(1, 100) as n")
    except psycopg.errors.OutOfMemory:
        return True
    return False


def finds(query: str) -> "Effect":
    """Whether the query's first value is true."""
    return lambda scene: bool(ask(scene.dsn, query)[0])


Effect = Callable[[Scene], bool]

SETTINGS = {
    "short_statement_timeout": "statement_timeout",
    "short_lock_timeout": "lock_timeout",
    "short_idle_timeout": "idle_session_timeout",
    "short_idle_in_transaction_timeout": "idle_in_transaction_session_timeout",
    "repeatable_read": "default_transaction_isolation",
    "serializable": "default_transaction_isolation",
}

DURING: dict[str, Effect] = {
    "kill_worker": lambda s: not is_running(s.worker),
    "freeze_worker": lambda s: is_any_stopped([s.worker]) and not s.has_leases(),
    "freeze_worker_briefly": lambda s: is_any_stopped([s.worker]),
    "stop_server": lambda s: refuses(s.dsn) and s.is_refused(),
    "stop_server_immediate": lambda s: refuses(s.dsn) and s.is_refused(),
    "cancel_statements": Scene.is_busy,
    "freeze_session": lambda s: is_any_stopped(s.sessions),
    "full_lock_table": has_no_locks,
    "locked_rows": finds(
        """
        with free as (
          select from pgsched.scheduled_tasks
           where queue = 'idle'
             for update skip locked)
        select count(*) < 100 from free
        """
    ),
    "locked_tasks": finds(
        """
        select count(*) > 0
          from pg_locks join pg_stat_activity using (pid)
         where classid = 1337 and application_name = 'nemesis'
        """
    ),
    "old_snapshot": finds(
        """
        select count(backend_xmin) > 0
          from pg_stat_activity
         where application_name = 'nemesis' and state = 'idle in transaction'
        """
    ),
    "stall_to_server": Scene.is_stalled,
    "stall_to_client": Scene.is_stalled,
    "stall_to_server_and_cut": Scene.is_stalled,
    "stall_to_client_and_cut": Scene.is_stalled,
    "refuse_connections": Scene.is_refused,
    "restart_proxy": Scene.is_refused,
    "restart_bouncer": lambda s: (
        s.world.bouncer is not None and refuses(s.world.bouncer.dsn("app"))
    ),
    **{fault: partial(Scene.has_setting, name=name) for fault, name in SETTINGS.items()},
}

AFTER: dict[str, Effect] = {
    "kill_server_process": lambda s: (
        s.has_recovered() and not refuses(s.dsn) and not s.has_restarted()
    ),
    "stop_server": lambda s: s.has_restarted() and not s.has_recovered(),
    "stop_server_immediate": lambda s: s.has_restarted() and s.has_recovered(),
    "terminate_session": lambda s: s.has_lost(s.sessions),
    "terminate_listener": lambda s: s.has_lost(s.listeners),
    "terminate_presence": lambda s: s.has_lost(s.presences or s.sessions),
    "terminate_all_sessions": Scene.has_lost_all,
    "cancel_statements": lambda s: not s.is_answered(),
    "stall_to_server": Scene.is_answered,
    "stall_to_client": Scene.is_answered,
    "stall_to_server_and_cut": lambda s: not s.is_answered(),
    "stall_to_client_and_cut": lambda s: not s.is_answered(),
    **{name: lambda s: ": cut" in s.log.text for name in FAULTS if name.startswith("cut_")},
    "cut_all": lambda s: is_broken(s.client),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.pgbouncer] if name in BOUNCER_FAULTS else [])
        for name in FAULTS
    ],
)
def test_it_has_its_effect_and_leaves_nothing_behind(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, nemesis.NAME)
    with ExitStack() as stack:
        if name in BOUNCER_FAULTS:
            world = replace(world, bouncer=stack.enter_context(PgBouncer(world.server)))
        assert name in faults(world)
        scene = look(world, caplog)
        stack.callback(scene.close)
        during, after = DURING.get(name), AFTER.get(name)
        assert during or after

        def pause(seconds: float) -> None:
            scene.ends.append(datetime.now(UTC) + timedelta(seconds=seconds))
            if during:
                wait_until(lambda: during(scene))

        monkeypatch.setattr(nemesis, "pause", pause)
        FAULTS[name](world, Least(name))
        assert bool(during) == bool(scene.ends)
        if after:
            wait_until(lambda: after(scene))
        if scene.meanwhile:
            assert is_broken(scene.meanwhile)
        assert_sound(world)


def look(world: World, log: pytest.LogCaptureFixture) -> Scene:
    """As soon as the worker listens."""
    assert world.proxy
    [worker] = world.workers
    with psycopg.connect(world.dsn, autocommit=True) as conn:
        wait_until(lambda: sessions(conn, LISTENERS))
        client = psycopg.connect(
            world.proxy.dsn("app"), autocommit=True, application_name="pgsched client"
        )
        return Scene(
            world=world,
            dsn=world.dsn,
            worker=worker.pid,
            sessions=sessions(conn),
            listeners=sessions(conn, LISTENERS),
            presences=sessions(conn, "pgsched % presence"),
            started=ask(world.dsn, STARTED)[0],
            logged=(world.server.folder / "server.log").stat().st_size,
            log=log,
            client=client,
        )


def assert_sound(world: World) -> None:
    """Everything runs and answers, with no setting and no lock left."""
    [worker] = world.workers
    assert worker.is_running()
    assert world.proxy
    assert not refuses(world.proxy.dsn("app"))
    assert ask(world.dsn, "select count(*) from pg_db_role_setting") == [0]
    with psycopg.connect(world.dsn, autocommit=True) as conn:
        wait_until(lambda: not sessions(conn, nemesis.NAME))
        assert not is_any_stopped([worker.pid, *sessions(conn)])
        wait_for(conn, enqueue(conn, "quick"), "completed")


def test_a_world_has_only_the_faults_that_it_can_have(world: World) -> None:
    assert [name for name in FAULTS if name not in BOUNCER_FAULTS] == faults(world)
    assert not set(faults(replace(world, proxy=None))) & set(PROXY_FAULTS)


def test_a_worker_that_ended_by_itself_is_noticed(world: World, tmp_path: Path) -> None:
    ended = Handle(tmp_path, "")
    ended.worker.__exit__()
    with pytest.raises(AssertionError, match="worker has ended"):
        nemesis.kill_worker(replace(world, workers=[ended]), Random())
