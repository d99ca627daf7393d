"""Connections beside the worker's main one that no pooler may share: it listens, it is present."""

import contextlib
import logging
import random
import selectors
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import ClassVar

import psycopg

from pgsched import calls
from pgsched.calls import Connection
from pgsched.errors import PgschedError
from pgsched.handlers import spawn

RETRY_SECONDS = 2.0
"""At most before the connection is made again. Less than the 5 seconds for which reap_stale waits
for a presence to come back."""

log = logging.getLogger("pgsched")


def backoff(failures: int, longest: float) -> float:
    """How long [s] to wait after so many failures before: 0.1 s, doubling, at most so long."""
    return min(0.1 * 2.0 ** min(failures, 16), longest) * random.uniform(0.5, 1.0)


@dataclass(eq=False)
class Direct:
    """A connection and a thread that sees to it. Never raises: without it, the worker does less.

    ``active``: whether the connection is there now and does what it is for.
    """

    purpose: ClassVar[str]
    instead: ClassVar[str]
    """What remains behind a pooler."""

    dsn: str = field(repr=False)
    name: str

    def __post_init__(self) -> None:
        self.active = False
        self._stop, self._stopped = socket.socketpair()
        self._thread = spawn(self._run, f"pgsched-{self.purpose}")

    def close(self) -> None:
        """End it, at once unless it is just connecting."""
        # A child that a handler forked has this end, too: closing it would tell nobody.
        with contextlib.suppress(OSError):  # it has ended already
            self._stop.shutdown(socket.SHUT_RDWR)
        self._stop.close()
        self._thread.join(1.0)

    def _begin(self, connection: Connection) -> None:
        """Make the new connection do what it is for."""
        raise NotImplementedError

    def _notified(self, channel: str) -> None:
        """A notification came."""

    def _lost(self) -> None:
        """The connection is not there any more, or cannot be had."""

    def _run(self) -> None:
        failures = 0
        with self._stopped:
            while True:
                try:
                    self._attend()
                    return
                except psycopg.errors.InsufficientPrivilege as error:
                    text = str(error).strip()
                    log.warning("no %s, %s: error=%r", self.purpose, self.instead, text)
                    self._lost()
                    return
                except (psycopg.Error, PgschedError, OSError) as error:
                    text, wait = str(error).strip(), backoff(failures, RETRY_SECONDS)
                    log.info("no %s: error=%r retry_in=%.1fs", self.purpose, text, wait)
                if self.active or not failures:
                    self._lost()
                failures = 0 if self.active else failures + 1
                self.active = False
                self._stopped.settimeout(wait)
                with contextlib.suppress(TimeoutError):
                    self._stopped.recv(1)  # the other end is closed
                    return

    def _attend(self) -> None:
        """Until the end, or at once when a pooler is in the way; raises when it breaks."""
        name = f"pgsched {self.name} {self.purpose}"
        with (
            calls.connect(self.dsn, application_name=name) as connection,
            selectors.DefaultSelector() as selector,
        ):
            if calls.is_pooled(connection):
                log.info("no %s behind a connection pooler: %s", self.purpose, self.instead)
                self._lost()
                return
            self._begin(connection)
            self.active = True
            ends = selector.register(self._stopped, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while True:
                ready = [key for key, _ in selector.select()]
                if ends in ready:
                    return
                for notification in connection.notifies(timeout=0):
                    self._notified(notification.channel)


@dataclass(eq=False)
class Listener(Direct):
    """Hears of new tasks, so that an idle worker need not wait to poll.

    Calls ``heard`` with a queue when it has new tasks, and once with each when it has connected.
    """

    purpose = "listener"
    instead = "polling only"

    queues: Collection[str]
    heard: Callable[[str], None]

    def _begin(self, connection: Connection) -> None:
        self._channels = {calls.listen(connection, queue): queue for queue in self.queues}
        # What came while nobody listened.
        for queue in self.queues:
            self.heard(queue)

    def _notified(self, channel: str) -> None:
        self.heard(self._channels[channel])


@dataclass(eq=False)
class Presence(Direct):
    """Holds the worker's presence: when the process dies, others need not wait for its leases.

    Calls ``changed`` with whether it is held, at the beginning and whenever that changes.
    """

    purpose = "presence"
    instead = "recovery by leases only"

    worker_id: int
    changed: Callable[[bool], None]

    def _begin(self, connection: Connection) -> None:
        calls.hold_presence(connection, self.worker_id)
        self.changed(True)

    def _lost(self) -> None:
        self.changed(False)
