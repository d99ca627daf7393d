"""Handlers that take a connection: their own writes and the completion are one transaction."""

import queue
from collections.abc import Callable
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from pgsched import calls
from pgsched.calls import Claim, Connection


class NotBegun(Exception):
    """No transaction could be had: the handler was not called."""


class Transactions:
    """Runs at most ``limit`` at once, each on a connection of its own; a further one waits.

    ``held``: tokens of claims that a transaction holds, until the caller discards them. Their
    leases are not to be extended: that would change the row under the transaction.
    """

    def __init__(self, dsn: str, name: str, limit: int) -> None:
        self._dsn = dsn
        self._name = name
        self._idle: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        for _ in range(limit):
            self._idle.put(None)
        self.held: set[UUID] = set()

    def run(self, claim: Claim, work: Callable[[Connection], str | None]) -> None:
        """Hold the claim, do the work, complete the claim with the JSON text it returns, commit.

        Whatever is raised, all of that is rolled back: by the work itself; NotBegun; ClaimLost and
        TaskNotFound as psycopg.Error; psycopg.OperationalError also when it is not known whether
        the commit came through.
        """
        connection = self._idle.get()
        begun = False
        try:
            if connection is None:
                connection = calls.connect(self._dsn, application_name=f"pgsched {self._name}")
            self.held.add(claim.token)
            with connection.transaction():
                calls.hold_task(connection, claim)
                begun = True
                result = work(connection)
                connection.execute("reset role")
                calls.complete_task(connection, claim, result)
        except psycopg.OperationalError as error:
            if begun:
                raise
            raise NotBegun from error
        finally:
            self._idle.put(_cleaned(connection))

    def close(self) -> None:
        """Close what is idle."""
        while not self._idle.empty():
            if connection := self._idle.get():
                connection.close()


def _cleaned(connection: Connection | None) -> Connection | None:
    """The connection as a new one would be, whatever was done to it; None when it cannot be."""
    if connection is None or connection.closed:
        return None
    try:
        connection.rollback()
        connection.autocommit = True
        connection.isolation_level = connection.read_only = connection.deferrable = None
        connection.prepare_threshold = None
        connection.row_factory = tuple_row
        connection.cursor_factory = psycopg.Cursor
        connection.execute("discard all")
    except psycopg.Error:
        connection.close()
        return None
    return connection
