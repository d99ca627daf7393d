"""The worker as its user sees it: options, handlers, start and stop."""

import asyncio
import logging
import os
import re
import signal
import socket
import threading
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, count
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import psycopg

from pgsched import calls
from pgsched.calls import Claim, Outcome, Report, dsn_parameters, plain, translated
from pgsched.errors import InvalidArgument
from pgsched.handlers import Handler, call, elsewhere, run_coroutine, run_function, spawn
from pgsched.transactions import all_or_nothing

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Inbox = SimpleQueue[Outcome | Report | str | bool | None]
"""What other threads and signal handlers tell the loop: how a handler ended; what the database said
to that; a queue that has new tasks; whether the worker's presence is held; None: stop. Its put
never deadlocks, as the lock of an Event does when a signal comes at the wrong moment."""

Ended = tuple[int, str]

log = logging.getLogger("pgsched")

PATIENCE = 1.0
"""Seconds after the grace that a server which does not answer gets."""


@dataclass(eq=False)
class Worker:
    """Claims due tasks, runs their handlers, reports how they ended. All times are in seconds.

    ``dsn``: URL or keywords; empty: libpq's environment variables.
    ``queues``: the queues to claim from, none of which has to exist yet; a mapping gives each the
    weight, 1 to 1,000, by which they share the slots while all have due tasks.
    ``concurrency``: how many handlers run at once, 1 to 10,000.
    ``lease``: how long a claim is held, 1 to 86,400; extended every third of it while needed.
    ``poll_interval``: how long, on average, a queue without due tasks is left alone.
    ``listen_dsn``: the server itself when ``dsn`` leads through a pooler, to LISTEN for new tasks
    and to hold the worker's presence; None: dsn.
    ``connections``: for handlers that take one, and so how many of these run at once, 1 to 100.
    ``grace``: how long handlers may go on after a stop; what runs then is left to its lease.
    ``metrics_port``: serves Prometheus' page there; None: not at all.
    ``metrics_host``: the address it listens on.
    ``db_metrics``: the page also has figures of all queues, asked of the database at each scrape.

    ::

        worker = Worker("postgresql:///app", queues=["billing"], concurrency=10)

        @worker.task("charge_card")
        def charge_card(task): ...          # or async def

        worker.run()

    Raises pgsched.InvalidArgument.
    """

    dsn: str = field(default="", repr=False)
    _: KW_ONLY
    queues: Sequence[str] | Mapping[str, int] = ("default",)
    concurrency: int = 10
    lease: float = 30.0
    poll_interval: float = 1.0
    listen_dsn: str | None = field(default=None, repr=False)
    connections: int = 4
    grace: float = 25.0
    metrics_port: int | None = None
    metrics_host: str = "0.0.0.0"
    db_metrics: bool = False
    _handlers: dict[str, Handler] = field(default_factory=dict, init=False, repr=False)
    _inbox: Inbox = field(default_factory=Inbox, init=False, repr=False)
    _stop_by: float | None = field(default=None, init=False, repr=False)
    _running: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        dsn_parameters(self.dsn)
        dsn_parameters(self.listen_dsn or "")
        weights = self.queues.values() if isinstance(self.queues, Mapping) else ()
        port = self.metrics_port
        for valid, message in (
            (not isinstance(self.queues, str), f"queues: give a list, such as [{self.queues!r}]"),
            (0 < len(self.queues) == len(set(self.queues)), "queues: name at least one, each once"),
            (all(map(_is_name, self.queues)), "queues: 1 to 63 bytes, no control characters"),
            (all(weight in range(1, 1001) for weight in weights), "queues: weights 1 to 1000"),
            (self.concurrency in range(1, 10_001), "concurrency: 1 to 10000"),
            (1 <= self.lease <= 86_400, "lease: 1 to 86400 seconds"),
            (0 < self.poll_interval <= 3600, "poll_interval: above 0, at most 3600 seconds"),
            (self.connections in range(1, 101), "connections: 1 to 100"),
            (0 <= self.grace <= 86_400, "grace: 0 to 86400 seconds"),
            (port is None or 1 <= port <= 65_535, "metrics_port: 1 to 65535"),
        ):
            if not valid:
                raise InvalidArgument(message)

    def task(self, task_type: str, *, timeout: float | None = None) -> Callable[[F], F]:
        """Decorator for the function or coroutine function that handles tasks of a type.

        It is called with a pgsched.Task. Its return value, which JSON must be able to hold, becomes
        the task's result. An exception fails the attempt; Retry, Snooze and Fail say more.

        A plain function with a second argument gets a psycopg connection in a transaction that
        holds the task: what it writes there and the task's completion are one, all or nothing.

        After ``timeout`` seconds the attempt has failed: a coroutine is cancelled, a plain function
        sees ``task.cancelled`` and keeps its slot until it returns.

        Raises pgsched.InvalidArgument when the type has a handler already.
        """
        if not isinstance(task_type, str):
            raise InvalidArgument('name the type: @worker.task("send_mail")')
        if timeout is not None and not timeout > 0:
            raise InvalidArgument("timeout: above 0 seconds")

        def register(function: F) -> F:
            if task_type in self._handlers:
                raise InvalidArgument(f"task type {task_type!r} has a handler already")
            self._handlers[task_type] = Handler(function, timeout)
            return function

        return register

    def stop(self) -> None:
        """Claim no more; run() returns when the running handlers have ended, or after ``grace``.

        May be called from any thread, and from a handler; before run(), that returns at once.
        """
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self.grace + PATIENCE
        self._inbox.put(None)

    def run(self, *, drain: bool = False) -> int:
        """Work until stop() or, in the main thread, SIGTERM or SIGINT; a second signal ends it now.

        With ``drain``, also until no task is due and none is held.

        Returns how many handlers still run: none, unless the grace was over or a second signal
        came. Their tasks are left to their leases. Never ends because the database is away: it
        reconnects, for ever. Raises pgsched.SchemaError when the database answers but the schema is
        not there, too old or not to be used, RuntimeError when this very worker is running already.
        """
        self.__post_init__()  # the options may have been changed since
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this worker is running already")
        try:
            return self._run(drain)
        finally:
            # What handlers that still run have to say is not for the next run.
            self._inbox, self._stop_by = Inbox(), None
            self._running.release()

    def _run(self, drain: bool) -> int:
        # prometheus_client takes a tenth of a second to import: not for those who only enqueue.
        from pgsched.loop import Loop
        from pgsched.metrics import Database, Metrics

        host = re.sub(r"[^!-~]", "?", socket.gethostname())[:28]
        name = f"{host}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        metrics = Metrics()
        if self.db_metrics:
            metrics.registry.register(Database(self.dsn, name))
        loop = Loop(self, name, self._handlers, metrics, self._inbox, drain=drain)

        def unready() -> str:
            return "stopping" if self._stop_by is not None else loop.unready

        with self._signals(), metrics.served(self.metrics_port, self.metrics_host, unready):
            # A thread of its own: no server that does not answer keeps this one from its signals.
            control = promised(loop.run, "pgsched-control")
            while not wait([control], timeout=0.2).done:
                if self._stop_by is not None and time.monotonic() >= self._stop_by:
                    log.warning("stopped at once: worker=%s running=%d", name, loop.running)
                    return loop.running
        control.result()
        return loop.running

    def run_due(self, conn: psycopg.Connection[Any], *, limit: int | None = None) -> list[Ended]:
        """Run due tasks here and now, one after another, over ``conn``: for tests.

        Claims from the worker's queues until nothing is due, or ``limit`` tasks have run, among
        them those that handlers add. Everything is part of the transaction of ``conn``, which stays
        the caller's to commit; a handler that takes a connection gets this one. A failed attempt
        raises nothing. Timeouts and signals do not apply.

        Returns the id of each task that ran, and how that ended: completed, retried, failed,
        cancelled or released (snoozed, or without a handler).
        """
        from pgsched.loop import SETTLED

        self.__post_init__()
        lease = timedelta(seconds=self.lease)
        ended: list[Ended] = []
        while limit is None or len(ended) < limit:
            with plain(conn), translated():
                claims = (calls.claim_task(conn, "run_due", q, lease, 1) for q in self.queues)
                claim = next(chain.from_iterable(claims), None)
            if claim is None:
                return ended
            outcome = self._run_here(conn, claim)
            with plain(conn), translated():
                [answer] = calls.tell(conn, [outcome])
            ended.append((claim.id, SETTLED[outcome.kind].get(answer, answer)))
        return ended

    def _run_here(self, conn: psycopg.Connection[Any], claim: Claim) -> Outcome:
        handler = self._handlers.get(claim.task_type)
        if handler is None:
            return elsewhere(claim)
        if handler.is_coroutine:
            # In a thread of its own, since the test may run on an event loop.
            return promised(partial(asyncio.run, run_coroutine(claim, handler)), "run_due").result()
        if not handler.takes_connection:
            return run_function(claim, partial(call, claim, handler))

        def work() -> str | None:
            with all_or_nothing(conn):
                return call(claim, handler, conn)

        return run_function(claim, work)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        signals = count()

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop()
            if next(signals):
                self._stop_by = time.monotonic()

        before = {each: signal.signal(each, handle) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_name(text: object) -> bool:
    return (
        isinstance(text, str)
        and 1 <= len(text.encode(errors="replace")) <= 63
        and not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
    )


def promised(call: Callable[[], T], thread: str) -> Future[T]:
    """What will come of a call, which a thread of this name makes."""
    promise: Future[T] = Future()

    def fulfil() -> None:
        try:
            promise.set_result(call())
        except BaseException as error:
            promise.set_exception(error)

    spawn(fulfil, thread)
    return promise
