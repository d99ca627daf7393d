"""The worker as its user sees it: options, handlers, start and stop."""

import logging
import os
import re
import signal
import socket
import threading
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from types import FrameType
from typing import TypeVar

from pgsched.calls import dsn_parameters
from pgsched.errors import InvalidArgument
from pgsched.handlers import Handler, Inbox

H = TypeVar("H", bound=Handler)

log = logging.getLogger("pgsched")

PATIENCE = 1.0
"""Seconds after the grace that a server which does not answer gets."""


@dataclass(eq=False)
class Worker:
    """Claims due tasks, runs their handlers, reports how they ended. All times are in seconds.

    ``dsn``: URL or keywords; empty: libpq's environment variables.
    ``queues``: the queues to claim from; none of them has to exist yet.
    ``concurrency``: how many handlers run at once, 1 to 10,000.
    ``lease``: how long a claim is held, 1 to 86,400; extended every third of it while needed.
    ``poll_interval``: how long, on average, a queue without due tasks is left alone.
    ``grace``: how long handlers may go on after a stop; what runs then is left to its lease.
    ``metrics_port``: serves Prometheus' page there; None: not at all.
    ``metrics_host``: the address it listens on.

    ::

        worker = Worker("postgresql:///app", queues=["billing"], concurrency=10)

        @worker.task("charge_card")
        def charge_card(task): ...          # or async def

        worker.run()

    Raises pgsched.InvalidArgument.
    """

    dsn: str = field(default="", repr=False)
    _: KW_ONLY
    queues: Sequence[str] = ("default",)
    concurrency: int = 10
    lease: float = 30.0
    poll_interval: float = 1.0
    grace: float = 25.0
    metrics_port: int | None = None
    metrics_host: str = "0.0.0.0"
    _handlers: dict[str, Handler] = field(default_factory=dict, init=False, repr=False)
    _inbox: Inbox = field(default_factory=Inbox, init=False, repr=False)
    _stop_by: float | None = field(default=None, init=False, repr=False)
    _running: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        dsn_parameters(self.dsn)
        for valid, message in (
            (not isinstance(self.queues, str), f"queues: give a list, such as [{self.queues!r}]"),
            (0 < len(self.queues) == len(set(self.queues)), "queues: name at least one, each once"),
            (all(map(_is_name, self.queues)), "queues: 1 to 63 bytes, no control characters"),
            (self.concurrency in range(1, 10_001), "concurrency: 1 to 10000"),
            (1 <= self.lease <= 86_400, "lease: 1 to 86400 seconds"),
            (0 < self.poll_interval <= 3600, "poll_interval: above 0, at most 3600 seconds"),
            (0 <= self.grace <= 86_400, "grace: 0 to 86400 seconds"),
            (
                self.metrics_port is None or 1 <= self.metrics_port <= 65_535,
                "metrics_port: 1 to 65535",
            ),
        ):
            if not valid:
                raise InvalidArgument(message)

    def task(self, task_type: str) -> Callable[[H], H]:
        """Decorator for the function or coroutine function that handles tasks of a type.

        It is called with a pgsched.Task. Its return value, which JSON must be able to hold, becomes
        the task's result. An exception fails the attempt; Retry, Snooze and Fail say more.

        Raises pgsched.InvalidArgument when the type has a handler already.
        """
        if not isinstance(task_type, str):
            raise InvalidArgument('name the type: @worker.task("send_mail")')

        def register(handler: H) -> H:
            if task_type in self._handlers:
                raise InvalidArgument(f"task type {task_type!r} has a handler already")
            self._handlers[task_type] = handler
            return handler

        return register

    def stop(self) -> None:
        """Claim no more; run() returns when the running handlers have ended, or after ``grace``.

        May be called from any thread, and from a handler; before run(), that returns at once.
        """
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self.grace + PATIENCE
        self._inbox.put(None)

    def run(self) -> int:
        """Work until stop() or, in the main thread, SIGTERM or SIGINT; a second signal ends it now.

        Returns how many handlers still run: none, unless the grace was over or a second signal
        came. Their tasks are left to their leases. Never ends because the database is away: it
        reconnects, for ever. Raises pgsched.SchemaError when the database answers but the schema is
        not there or may not be used, RuntimeError when this very worker is running already.
        """
        self._check()  # the options may have been changed since
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this worker is running already")
        try:
            return self._run()
        finally:
            # What handlers that still run have to say is not for the next run.
            self._inbox, self._stop_by = Inbox(), None
            self._running.release()

    def _run(self) -> int:
        # prometheus_client takes a tenth of a second to import: not for those who only enqueue.
        from pgsched.loop import Loop
        from pgsched.metrics import Metrics

        host = re.sub(r"[^!-~]", "?", socket.gethostname())[:32]
        name = f"{host}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        metrics = Metrics(self.concurrency)
        loop = Loop(self, name, self._handlers, metrics, self._inbox)
        # A thread of its own: no server that does not answer keeps this one from its signals.
        control: Future[None] = Future()
        thread = threading.Thread(
            target=_fulfil, args=(control, loop.run), name="pgsched-control", daemon=True
        )
        with self._signals(), metrics.served(self.metrics_port, self.metrics_host):
            thread.start()
            while not wait([control], timeout=0.2).done:
                if self._stop_by is not None and time.monotonic() >= self._stop_by:
                    log.warning("stopped at once: worker=%s running=%d", name, loop.busy)
                    return loop.busy
        control.result()
        return loop.busy

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

        before = {
            number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
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


def _fulfil(promise: Future[None], call: Callable[[], None]) -> None:
    try:
        call()
        promise.set_result(None)
    except BaseException as error:
        promise.set_exception(error)
