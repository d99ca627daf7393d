"""Hears of new tasks over a connection of its own, so that an idle worker need not wait to poll."""

import contextlib
import logging
import random
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

import psycopg

from pgsched import calls
from pgsched.errors import PgschedError

RETRY_SECONDS = (0.1, 5.0)
"""Wait before the connection is made again, and, doubling, at most before each further time."""

log = logging.getLogger("pgsched")


class Listener:
    """Calls ``heard`` with a queue when it has new tasks, and once with each when it has connected.

    ``active``: whether it listens now. Never raises: without it, the worker polls.
    """

    def __init__(
        self, dsn: str, name: str, queues: Sequence[str], heard: Callable[[str], None]
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._queues = queues
        self._heard = heard
        self.active = False
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="pgsched-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, at once unless it is just connecting."""
        # A child that a handler forked has this end, too: closing it would tell nobody.
        with contextlib.suppress(OSError):  # it has ended already
            self._stop.shutdown(socket.SHUT_RDWR)
        self._stop.close()
        self._thread.join(1.0)

    def _run(self) -> None:
        failures = 0
        with self._stopped:
            while True:
                try:
                    self._listen()
                    return
                except (psycopg.Error, PgschedError, OSError) as error:
                    first, longest = RETRY_SECONDS
                    wait = min(first * 2.0 ** min(failures, 16), longest) * random.uniform(0.5, 1)
                    failures = 0 if self.active else failures + 1
                    self.active = False
                    log.info("not listening: error=%r retry_in=%.1fs", str(error).strip(), wait)
                self._stopped.settimeout(wait)
                with contextlib.suppress(TimeoutError):
                    self._stopped.recv(1)  # the other end is closed
                    return

    def _listen(self) -> None:
        """Until the end, or for ever not when a pooler is in the way; raises when it breaks."""
        with (
            calls.connect(self._dsn, application_name=f"pgsched {self._name} listener") as conn,
            selectors.DefaultSelector() as selector,
        ):
            if calls.is_pooled(conn):
                log.info("polling only: a connection pooler passes no notifications on")
                return
            queues = {calls.listen(conn, queue): queue for queue in self._queues}
            self.active = True
            # What came while nobody listened.
            for queue in self._queues:
                self._heard(queue)
            ends = selector.register(self._stopped, selectors.EVENT_READ)
            selector.register(conn, selectors.EVENT_READ)
            while True:
                ready = [key for key, _ in selector.select()]
                if ends in ready:
                    return
                for notification in conn.notifies(timeout=0):
                    self._heard(queues[notification.channel])
