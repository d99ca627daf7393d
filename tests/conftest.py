"""A PostgreSQL server for the session, and a fresh database with pgsched in it for each test.

The environment variable PGSCHED_PG_BIN chooses the server's version.
"""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import psycopg
import pytest
from psycopg import sql
from workers import install

from pgsched import loop
from pgsched.embedded import Server

_numbers = itertools.count(1)


# Whoever starts the tests in the background may have switched it off, also for processes of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running server that gives up durability for speed."""
    settings = {
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
        "max_connections": "200",
    }
    with Server(settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """The name of a database with the schema, installed with psql as a user would."""
    name = "pgsched_template"
    install(server, server.create_database(name))
    return name


@pytest.fixture
def dsn(server: Server, template: str) -> Iterator[str]:
    """The URL of a database of this test's own, with the schema; dropped afterwards."""
    name = f"test_{next(_numbers)}"
    yield server.create_database(name, template=template)
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., psycopg.Connection]]:
    """Open connections to this test's database, autocommit unless told; closed afterwards."""
    connections: list[psycopg.Connection] = []

    def connect(**options: Any) -> psycopg.Connection:
        connections.append(psycopg.connect(dsn, **{"autocommit": True, **options}))
        return connections[-1]

    yield connect
    # Closed under a thread that uses it, a connection takes the whole process with it.
    if calls := [thread for thread in threading.enumerate() if thread.name == oracle.CALL]:
        for connection in connections:
            if not connection.closed:
                connection.cancel_safe(timeout=5)
        for thread in calls:
            thread.join(30)
    for connection in connections:
        connection.close()


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection]) -> psycopg.Connection:
    """An autocommit connection to this test's database."""
    return connect()


@pytest.fixture
def reaping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process reap five times a second."""
    monkeypatch.setattr(loop, "REAP_SECONDS", 0.2)
