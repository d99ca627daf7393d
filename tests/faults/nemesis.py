"""Faults of the world that workers and clients live in, each injected at a random victim."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal, Protocol

import psycopg
from pgbouncer import PgBouncer
from proxy import Direction, Point, Proxy
from psycopg import sql
from workers import LISTENERS, PATIENCE, end_sessions, sessions, wait_until

from pgsched.embedded import Server

NAME = "nemesis"
"""Application name of the sessions that faults need."""

log = logging.getLogger(NAME)


class WorkerHandle(Protocol):
    """A worker process."""

    @property
    def name(self) -> str:
        """What the log of faults calls it."""

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""

    def restart(self) -> None:
        """Start it again after its end."""

    def is_running(self) -> bool:
        """Whether the process exists, stopped or not."""


@dataclass
class World:
    """What faults may do something to; `dsn` is a superuser's, of the database, and direct."""

    server: Server
    dsn: str
    bouncer: PgBouncer | None = None
    proxy: Proxy | None = None
    workers: Sequence[WorkerHandle] = ()


Fault = Callable[[World, Random], None]
"""Injects one fault, and returns when it is over: all that it stopped goes on."""

pause = time.sleep

_OPTIONS = (
    "-c statement_timeout=0 -c lock_timeout=0 -c idle_session_timeout=0"
    " -c idle_in_transaction_session_timeout=0"
    " -c default_transaction_isolation=read\\ committed"
)


def connect(world: World) -> psycopg.Connection[Any]:
    """An autocommit session, as soon as there can be one, for which no setting is short."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return psycopg.connect(
                world.dsn, autocommit=True, application_name=NAME, options=_OPTIONS
            )
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# Processes


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process is stopped meanwhile, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def running_worker(world: World, rng: Random) -> WorkerHandle:
    """One of them; it must not have ended by itself, or its pid may be anybody's."""
    worker = rng.choice(world.workers)
    assert worker.is_running(), f"{worker.name} has ended"
    log.info("%s, process %d", worker.name, worker.pid)
    return worker


def kill_worker(world: World, rng: Random) -> None:
    worker = running_worker(world, rng)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_running())
    pause(rng.uniform(0, 2))
    worker.restart()
    wait_until(worker.is_running)


def freeze_worker(world: World, rng: Random) -> None:
    """Until what it had claimed belongs to others."""
    with frozen(running_worker(world, rng).pid), closing(connect(world)) as conn:
        [(lease,)] = conn.execute(
            """
            select coalesce(extract(epoch from max(lease_expires_at) - clock_timestamp()), 0)
              from pgsched.scheduled_tasks
            """
        )
        pause(max(0, float(lease)) + rng.uniform(0.1, 6))


def freeze_worker_briefly(world: World, rng: Random) -> None:
    with frozen(running_worker(world, rng).pid):
        pause(rng.uniform(0.05, 1))


def kill_server_process(world: World, rng: Random) -> None:
    """Whichever it is, the server ends all its sessions and recovers."""
    with closing(connect(world)) as conn:
        os.kill(conn.info.backend_pid, signal.SIGKILL)
        wait_until(lambda: is_broken(conn))
    connect(world).close()


def is_broken(conn: psycopg.Connection[Any]) -> bool:
    try:
        conn.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def stop_server(mode: Literal["fast", "immediate"], world: World, rng: Random) -> None:
    world.server.stop(mode)
    try:
        pause(rng.uniform(0, 5))
    finally:
        world.server.start()


def restart(what: Callable[[World], PgBouncer | Proxy], world: World, rng: Random) -> None:
    what(world).kill()
    try:
        pause(rng.uniform(0, 3))
    finally:
        what(world).start()


def _bouncer(world: World) -> PgBouncer:
    assert world.bouncer
    return world.bouncer


def _proxy(world: World) -> Proxy:
    assert world.proxy
    return world.proxy


# Sessions


def victim(conn: psycopg.Connection[Any], rng: Random, names: str) -> int:
    """The server process of such a session of a worker, of any when there is none."""
    pids: list[int] = []

    def find() -> list[int]:
        pids[:] = sessions(conn, names) or sessions(conn)
        return pids

    wait_until(find)
    return rng.choice(pids)


def terminate(names: str, world: World, rng: Random) -> None:
    with closing(connect(world)) as conn:
        conn.execute("select pg_terminate_backend(%s, 5000)", [victim(conn, rng, names)])


def terminate_all(world: World, rng: Random) -> None:
    with closing(connect(world)) as conn:
        end_sessions(conn)


def cancel_statements(world: World, rng: Random) -> None:
    """Half of those that run, again and again."""
    with closing(connect(world)) as conn:
        for _ in range(50):
            conn.execute(
                """
                select pg_cancel_backend(pid)
                  from pg_stat_activity
                 where datname = current_database() and application_name like 'pgsched %'
                   and state = 'active' and random() < 0.5
                """
            )
            pause(rng.uniform(0, 0.04))


def freeze_session(world: World, rng: Random) -> None:
    """It keeps its locks, and its client waits."""
    with closing(connect(world)) as conn, frozen(victim(conn, rng, "pgsched %")):
        pause(rng.uniform(0.1, 3))


# The way to the server


def cut_all(world: World, rng: Random) -> None:
    _proxy(world).cut_all()


def stall(direction: Direction, then_cut: bool, world: World, rng: Random) -> None:
    proxy = _proxy(world)
    with proxy.stalled(direction):
        pause(rng.uniform(0.1, 5))
        if then_cut:
            proxy.cut_all()


def refuse_connections(world: World, rng: Random) -> None:
    proxy = _proxy(world)
    with proxy.refusing():
        proxy.cut_all()
        pause(rng.uniform(0, 3))


def cut_at(point: Point, statements: tuple[str, ...], world: World, rng: Random) -> None:
    """Nothing happens when there is no such statement for some time."""
    statement, proxy = rng.choice(statements), _proxy(world)
    proxy.arm(point, statement)
    outcome = "cut" if proxy.wait_for_cut(5) else "there was none"
    log.info("%s of %s: %s", point, statement, outcome)


# Settings


def setting(name: str, *values: str) -> Fault:
    """All sessions have it for a while, and none has it afterwards."""
    setting = sql.Identifier(name)

    def change(world: World, rng: Random) -> None:
        _alter_database(world, sql.SQL("set {} to {}").format(setting, rng.choice(values)))
        try:
            pause(rng.uniform(0.5, 4))
        finally:
            _alter_database(world, sql.SQL("reset {}").format(setting))

    return change


def _alter_database(world: World, change: sql.Composed) -> None:
    with closing(connect(world)) as conn:
        database = sql.Identifier(conn.info.dbname)
        conn.execute(sql.SQL("alter database {} {}").format(database, change))
        conn.execute(
            """
            select pg_terminate_backend(pid, 5000)
              from pg_stat_activity
             where datname = current_database() and backend_type = 'client backend'
               and pid <> pg_backend_pid()
            """
        )


# Locks and snapshots

LOCKS = 7331
"""Class of advisory locks, which nobody else uses."""


def full_lock_table(world: World, rng: Random) -> None:
    """But for a few."""
    with closing(connect(world)) as conn:
        with suppress(psycopg.errors.OutOfMemory):
            conn.execute("select pg_advisory_lock(%s, generate_series(1, 10000000))", [LOCKS])
        conn.execute(
            "select pg_advisory_unlock(%s, n) from generate_series(1, %s) as n",
            [LOCKS, rng.randint(1, 20)],
        )
        pause(rng.uniform(0.5, 2))


def hold(statement: str, world: World, rng: Random) -> None:
    """Keep what the statement locks or sees."""
    with closing(connect(world)) as conn, conn.transaction(force_rollback=True):
        conn.execute(statement.encode())
        pause(rng.uniform(0.5, 5))


ROWS = "select from pgsched.scheduled_tasks order by random() limit 50 for update skip locked"
TASKS = """
select pg_try_advisory_xact_lock(1337, (id % 2147483647)::integer)
  from (select id from pgsched.scheduled_tasks order by random() limit 50) as t
"""
SNAPSHOT = """
set transaction isolation level repeatable read; select from pgsched.scheduled_tasks limit 1
"""

_STATEMENTS = (
    *("enqueue_task", "claim_task", "extend_tasks", "complete_tasks", "fail_tasks"),
    *("release_tasks", "hold_task", "complete_task", "commit"),
)

BOUNCER_FAULTS: dict[str, Fault] = {"restart_bouncer": partial(restart, _bouncer)}
"""Those of a world with PgBouncer."""

PROXY_FAULTS: dict[str, Fault] = {
    "restart_proxy": partial(restart, _proxy),
    "cut_all": cut_all,
    "stall_to_server": partial(stall, "to_server", False),
    "stall_to_client": partial(stall, "to_client", False),
    "stall_to_server_and_cut": partial(stall, "to_server", True),
    "stall_to_client_and_cut": partial(stall, "to_client", True),
    "refuse_connections": refuse_connections,
    "cut_before_request": partial(cut_at, "request", _STATEMENTS),
    "cut_mid_answer": partial(cut_at, "mid-answer", _STATEMENTS),
    **{f"cut_before_answer_of_{name}": partial(cut_at, "answer", (name,)) for name in _STATEMENTS},
}
"""Those of a world with a proxy."""

FAULTS: dict[str, Fault] = {
    "kill_worker": kill_worker,
    "freeze_worker": freeze_worker,
    "freeze_worker_briefly": freeze_worker_briefly,
    "kill_server_process": kill_server_process,
    "stop_server": partial(stop_server, "fast"),
    "stop_server_immediate": partial(stop_server, "immediate"),
    "terminate_session": partial(terminate, "pgsched %"),
    "terminate_listener": partial(terminate, LISTENERS),
    "terminate_presence": partial(terminate, "pgsched % presence"),
    "terminate_all_sessions": terminate_all,
    "cancel_statements": cancel_statements,
    "freeze_session": freeze_session,
    "short_statement_timeout": setting("statement_timeout", "10ms", "50ms", "250ms"),
    "short_lock_timeout": setting("lock_timeout", "1ms", "20ms", "250ms"),
    "short_idle_timeout": setting("idle_session_timeout", "100ms", "1s"),
    "short_idle_in_transaction_timeout": setting(
        "idle_in_transaction_session_timeout", "10ms", "100ms", "1s"
    ),
    "repeatable_read": setting("default_transaction_isolation", "repeatable read"),
    "serializable": setting("default_transaction_isolation", "serializable"),
    "full_lock_table": full_lock_table,
    "locked_rows": partial(hold, ROWS),
    "locked_tasks": partial(hold, TASKS),
    "old_snapshot": partial(hold, SNAPSHOT),
    **PROXY_FAULTS,
    **BOUNCER_FAULTS,
}
"""All, by name."""


def faults(world: World) -> list[str]:
    """The names of those that such a world can have."""
    missing = {} if world.bouncer else BOUNCER_FAULTS
    missing = missing if world.proxy else missing | PROXY_FAULTS
    return [name for name in FAULTS if name not in missing]
