"""The proxy does to connections what it is told, and nothing else."""

import select
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import psycopg
import pytest
from proxy import Point, Proxy
from psycopg.pq import DiagnosticField
from workers import PATIENCE, wait_until

from pgsched import calls
from pgsched.calls import Claim, Connection, Outcome
from pgsched.embedded import Server

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the session's server."""
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def url(conn: psycopg.Connection, proxy: Proxy) -> str:
    """The URL of the test's database through the proxy."""
    return proxy.dsn(conn.info.dbname)


@pytest.fixture
def client(url: str) -> Iterator[Connection]:
    """A connection through the proxy."""
    with connect(url) as client:
        yield client


def connect(url: str) -> Connection:
    """As the driver does."""
    return calls.connect(url, application_name="client")


def is_broken(client: Connection) -> bool:
    try:
        client.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def send(client: Connection, statement: str) -> None:
    """Not waiting for the answer."""
    client.pgconn.send_query(statement.encode())


def receive(client: Connection) -> str:
    """Wait for the answer to what was sent; return its SQLSTATE, empty if it is no error."""
    result = client.pgconn.get_result()
    assert result
    assert client.pgconn.get_result() is None
    return (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()


def is_in_state(conn: psycopg.Connection, client: Connection, state: str) -> bool:
    query = "select state from pg_stat_activity where pid = %s"
    return conn.execute(query, [client.info.backend_pid]).fetchall() == [(state,)]


def tasks(conn: psycopg.Connection) -> list[Any]:
    """All about all of them."""
    return conn.execute("select * from pgsched.tasks order by id").fetchall()


# Cut at a statement


def outcomes(
    claims: list[Claim], kind: Literal["completed", "failed", "released"]
) -> list[Outcome]:
    return [Outcome(claim, kind) for claim in claims]


WHETHER_IT_COUNTS: dict[Point, bool] = {"request": False, "answer": True, "mid-answer": True}

CALLS: dict[str, Callable[[Connection, list[Claim]], object]] = {
    "enqueue_task": lambda c, _: calls.enqueue(c, "other"),
    "claim_task": lambda c, _: calls.claim_task(c, "w", "default", MINUTE, 1),
    "extend_tasks": lambda c, claims: calls.extend_tasks(c, claims, HOUR),
    "complete_tasks": lambda c, claims: calls.complete_tasks(c, outcomes(claims, "completed")),
    "fail_tasks": lambda c, claims: calls.fail_tasks(c, outcomes(claims, "failed")),
    "release_tasks": lambda c, claims: calls.release_tasks(c, outcomes(claims, "released")),
    "complete_task": lambda c, claims: calls.complete_task(c, claims[0], None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_cut_before_it_counts_or_afterwards(
    conn: psycopg.Connection, proxy: Proxy, url: str, name: str
) -> None:
    for point, counts in WHETHER_IT_COUNTS.items():
        for _ in range(2):
            calls.enqueue(conn, "task", "x" * 500_000)
        claims = calls.claim_task(conn, "w", "default", MINUTE, 1)
        before = tasks(conn)
        with connect(url) as client:
            proxy.arm(point, name)
            assert not is_broken(client)
            with pytest.raises(psycopg.OperationalError):
                CALLS[name](client, claims)
        assert proxy.wait_for_cut(0)
        assert (tasks(conn) != before) == counts


def test_a_commit_is_cut_too(proxy: Proxy, conn: psycopg.Connection, url: str) -> None:
    for point, counts in WHETHER_IT_COUNTS.items():
        before = tasks(conn)
        with connect(url) as client:
            proxy.arm(point, "commit")
            with pytest.raises(psycopg.OperationalError), client.transaction():
                calls.enqueue(client, "task")
        assert proxy.wait_for_cut(0)
        assert (tasks(conn) != before) == counts


def test_only_what_was_named_and_went_well_is_cut(proxy: Proxy, client: Connection) -> None:
    calls.enqueue(client, "task")
    proxy.arm("request", "claim_task")
    assert not proxy.wait_for_cut(0)
    # Now that is disarmed.
    claims = calls.claim_task(client, "w", "default", MINUTE, 1)
    proxy.arm("answer", "complete_task")
    assert calls.complete_tasks(client, outcomes(claims, "completed")) == ["completed"]
    with pytest.raises(psycopg.Error) as error:
        client.execute("select pgsched.complete_task(null, null)")
    assert error.value.sqlstate == "TS400"
    with pytest.raises(psycopg.OperationalError):
        calls.complete_task(client, claims[0], None)
    assert proxy.wait_for_cut(0)


# All connections


def test_all_connections_are_reset(proxy: Proxy, url: str, client: Connection) -> None:
    with connect(url) as second:
        proxy.cut_all()
        assert is_broken(client)
        assert is_broken(second)
    connect(url).close()


def test_what_clients_say_is_held_and_what_the_server_says_is_not(
    proxy: Proxy, client: Connection, conn: psycopg.Connection
) -> None:
    conn.execute("create table said ()")
    client.execute("listen said")
    with proxy.stalled("to_server"):
        send(client, "insert into said default values")
        conn.execute("notify said")
        [heard] = client.notifies(timeout=PATIENCE, stop_after=1)
        assert heard.channel == "said"
        assert conn.execute("select from said").fetchall() == []
    assert receive(client) == ""
    assert conn.execute("select from said").fetchall() == [()]


def test_what_the_server_says_is_held_and_what_clients_say_is_not(
    proxy: Proxy, client: Connection, conn: psycopg.Connection
) -> None:
    conn.execute("create table said ()")
    with proxy.stalled("to_client"):
        send(client, "insert into said default values")
        wait_until(lambda: conn.execute("select from said").fetchall())
        wait_until(lambda: is_in_state(conn, client, "idle"))
        assert select.select([client], [], [], 0.2)[0] == []
    assert receive(client) == ""


def test_the_server_hears_of_a_clients_end_only_when_the_stall_is_over(
    proxy: Proxy, client: Connection, conn: psycopg.Connection
) -> None:
    query = f"select from pg_stat_activity where pid = {client.info.backend_pid}".encode()

    def is_gone() -> bool:
        return conn.execute(query).fetchall() == []

    with proxy.stalled("to_server"):
        client.close()
        with pytest.raises(AssertionError, match="not within"):
            wait_until(is_gone, 0.2)
    wait_until(is_gone)


def test_new_connections_are_refused_and_others_go_on(
    proxy: Proxy, url: str, client: Connection
) -> None:
    with proxy.refusing():
        with pytest.raises(psycopg.OperationalError, match="refused"):
            connect(url)
        assert not is_broken(client)
    connect(url).close()


def test_after_a_crash_it_has_its_port_again(proxy: Proxy, url: str, client: Connection) -> None:
    proxy.kill()
    assert is_broken(client)
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(url)
    proxy.start()
    connect(url).close()


# All else passes


def test_it_passes_on_what_is_large_and_word_of_a_cancel(
    client: Connection, conn: psycopg.Connection
) -> None:
    text = "x" * 3_000_000
    assert client.execute("select %s::text", [text]).fetchall() == [(text,)]
    send(client, "select pg_sleep(600)")
    wait_until(lambda: is_in_state(conn, client, "active"))
    client.cancel()
    assert receive(client) == "57014"
