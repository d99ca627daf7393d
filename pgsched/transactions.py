"""Handlers that take a connection: their own writes and the completion are one transaction."""

import contextlib
import select
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from pgsched import calls
from pgsched.calls import Claim, Connection


class NotBegun(Exception):
    """No transaction could be had: the handler was not called."""


@contextlib.contextmanager
def all_or_nothing(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction, or a savepoint in one; raises whenever it is rolled back."""
    done = False
    with connection.transaction():
        yield
        if connection.info.transaction_status == TransactionStatus.INERROR:
            raise psycopg.errors.InFailedSqlTransaction("an error aborted the transaction")
        done = True
    if not done:
        raise psycopg.Rollback


class Transactions:
    """At most ``limit`` at once, to which the caller sees, each on a connection of its own.

    ``held``: claims that a transaction holds, until the caller discards them. Their
    leases are not to be extended: that would change the row under the transaction.
    """

    def __init__(self, dsn: str, name: str, limit: int) -> None:
        self._dsn = dsn
        self._name = name
        self.limit = limit
        self.held: set[Claim] = set()
        self._idle: list[Connection] = []
        self._closed = False

    def run(self, claim: Claim, work: Callable[[Connection], str | None]) -> None:
        """Hold the claim, do the work, complete the claim with the JSON text it returns, commit.

        Whatever is raised, all of that is rolled back: by the work itself; NotBegun; ClaimLost and
        TaskNotFound as psycopg.Error; psycopg.OperationalError also when it is not known whether
        the commit came through.
        """
        connection = None
        begun, reusable = False, True
        try:
            connection = self._idle_one()
            if connection is None:
                connection = calls.connect(self._dsn, application_name=f"pgsched {self._name}")
                # What cleans a connection would reach some other session then.
                reusable = not calls.is_pooled(connection)
            self.held.add(claim)
            with all_or_nothing(connection):
                calls.hold_task(connection, claim)
                begun = True
                result = work(connection)
                with calls.plain(connection):
                    connection.execute("reset role")
                    calls.complete_task(connection, claim, result)
        except psycopg.Error as error:
            if begun:
                raise
            raise NotBegun from error
        finally:
            if connection is not None:
                if reusable and _clean(connection) and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _idle_one(self) -> Connection | None:
        """An idle connection that nothing came over meanwhile, such as word of its end."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                ear = select.poll()
                ear.register(connection, select.POLLIN)
                if not ear.poll(0):
                    return connection
                connection.close()
        return None

    def close(self) -> None:
        """Close what is idle now, and the others when they are."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _clean(connection: Connection) -> bool:
    """Make the connection what a new one would be; whether that, whatever was done to it, went."""
    if connection.prepare_threshold is not None:
        return False  # psycopg would go on using prepared statements that are discarded here
    try:
        connection.rollback()
        connection.autocommit = True
        connection.isolation_level = connection.read_only = connection.deferrable = None
        connection.row_factory = tuple_row
        connection.cursor_factory = psycopg.Cursor
        connection.execute("discard all")
    except psycopg.Error:
        return False
    return True
