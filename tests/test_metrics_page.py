"""The pages for Prometheus and Kubernetes: when they are there, and who may not spoil them."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from scraping import answers, free_port, get, scrape, served
from workers import (
    PATIENCE,
    WorkerProcess,
    count,
    install,
    quick,
    running,
    wait_for,
    wait_until,
)

from pgsched import Task, enqueue, loop, metrics
from pgsched.embedded import Server

Connect = Callable[..., psycopg.Connection]

OUT_OF_TOUCH = (503, "the database does not answer\n")


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    return free_port()


def client(port: int, sent: bytes = b"") -> socket.socket:
    """A connection over which something was sent."""
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
    connection.sendall(sent)
    return connection


# Where and when


def test_the_pages_end_with_the_worker(dsn: str, port: int) -> None:
    for _ in range(2):
        with running(quick(dsn, metrics_port=port)):
            wait_until(lambda: answers(port))
        assert not answers(port)
        assert "pgsched-metrics" not in {thread.name for thread in threading.enumerate()}


def test_the_pages_are_where_the_worker_is_told(dsn: str, port: int) -> None:
    with running(quick(dsn, metrics_port=port, metrics_host="127.0.0.2")):
        wait_until(lambda: answers(port, "127.0.0.2"))
        assert not answers(port)


def test_the_pages_may_be_on_an_ipv6_address(dsn: str, port: int) -> None:
    with running(quick(dsn, metrics_port=port, metrics_host="::1")):
        wait_until(lambda: answers(port, "[::1]"))
        assert not answers(port)


@pytest.mark.parametrize("path", ["/", "/readzy", "/metrics/", "/%0d%0a"])
def test_a_page_that_there_is_not_is_not_found(dsn: str, port: int, path: str) -> None:
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: answers(port))
        assert get(port, path) == (404, "/metrics /healthz /readyz\n")


def test_the_second_worker_on_a_port_says_what_to_do_and_goes_on(
    dsn: str, conn: psycopg.Connection, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (quick(dsn, queues=[queue], metrics_port=port) for queue in "ab")
    for worker in first, second:
        worker.task("noop")(lambda task: None)
    with running(first):
        wait_until(lambda: answers(port))
        with running(second):
            wait_for(conn, enqueue(conn, "noop", queue="b"), "completed")
            wait_for(conn, enqueue(conn, "noop", queue="a"), "completed")
            name = "pgsched_scheduling_latency_seconds_count"
            wait_until(lambda: (name, "a", "noop") in scrape(port))
            assert (name, "b", "noop") not in scrape(port)
    [told] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.name == "pgsched"
    assert f"no metrics page: port={port} error=" in told.getMessage()
    assert "in use" in told.getMessage()
    assert "each worker of a machine needs a metrics_port of its own" in told.getMessage()


@pytest.mark.parametrize("host", ["203.0.113.1", "a..b", "no host", "\udc80"])
def test_an_address_that_cannot_be_had_is_told_and_the_worker_goes_on(
    dsn: str, conn: psycopg.Connection, port: int, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = quick(dsn, metrics_port=port, metrics_host=host)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_for(conn, enqueue(conn, "noop"), "completed")
    [told] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"no metrics page: port={port} error=" in told.getMessage()


# Health


@pytest.fixture
def fragile() -> Iterator[Server]:
    """A server of the test's own, which it stops, with the schema in database `postgres`."""
    with Server(settings={"fsync": "off"}) as server:
        install(server, server.dsn())
        yield server


def test_it_is_ready_while_the_database_answers(
    fragile: Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IN_TOUCH_SECONDS", 10 * PATIENCE)
    with running(quick(fragile.dsn(), metrics_port=port)):
        for _ in range(2):
            wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))
            fragile.stop()
            wait_until(lambda: get(port, "/readyz") == OUT_OF_TOUCH)
            # It lives, and need not be started anew.
            assert get(port, "/healthz") == (200, "ok\n")
            assert answers(port)
            fragile.start()
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))


def test_it_is_not_ready_before_it_has_found_the_database(tmp_path: Path, port: int) -> None:
    with running(quick(f"host={tmp_path}", metrics_port=port)):
        wait_until(lambda: get(port, "/healthz") == (200, "ok\n"))
        assert get(port, "/readyz") == OUT_OF_TOUCH


def test_it_is_not_ready_while_the_database_keeps_it_waiting(
    dsn: str, connect: Connect, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IN_TOUCH_SECONDS", 1.0)
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))
        with connect().transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            wait_until(lambda: get(port, "/readyz") == OUT_OF_TOUCH)
            assert get(port, "/healthz") == (200, "ok\n")
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))


APP = """
import pathlib, time
from pgsched import Worker

worker = Worker()

@worker.task("wait")
def wait(task):
    while not pathlib.Path("gate").exists():
        time.sleep(0.01)
"""


def test_it_is_not_ready_while_it_stops(
    dsn: str, conn: psycopg.Connection, port: int, tmp_path: Path
) -> None:
    options = ("--dsn", dsn, "--metrics-port", str(port), "--metrics-host", "127.0.0.1")
    task_id = enqueue(conn, "wait")
    with WorkerProcess(tmp_path, APP, *options) as worker:
        wait_for(conn, task_id, "processing")
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: get(port, "/readyz") == (503, "stopping\n"))
        assert get(port, "/healthz") == (200, "ok\n")
        assert scrape(port)["pgsched_worker_slots_busy",] == 1
        (tmp_path / "gate").touch()
        assert worker.process.wait(PATIENCE) == 0


# Bad clients


def test_garbage_and_halves_of_requests_spoil_nothing(
    dsn: str,
    conn: psycopg.Connection,
    port: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    worker = quick(dsn, metrics_port=port)
    worker.task("noop")(lambda task: None)
    requests = (
        *(b"", b"\0", b"\xff" * 1000, b"GET", b"GET /metrics", b"GET /metrics HTTP/1.1\r\nHo"),
        *(
            b"\r\n\r\n",
            b"GET /metrics HTTP/9.9\r\n\r\n",
            b"GET " + 70_000 * b"/" + b" HTTP/1.1\r\n",
        ),
        *(b"POST /metrics HTTP/1.1\r\n\r\n", b"GET /metrics HTTP/1.1\r\n" + 200 * b"a: b\r\n"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    )
    with running(worker), ExitStack() as clients:
        wait_until(lambda: answers(port))
        for sent in requests:
            client(port, sent).close()
        # What is not a whole request is given up, without waiting for the rest.
        for connection in [clients.enter_context(client(port, sent)) for sent in requests]:
            while connection.recv(65_536):
                pass
        assert answers(port)
        wait_for(conn, enqueue(conn, "noop"), "completed")
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert capfd.readouterr().err == ""


def test_a_client_that_stalls_blocks_no_other(
    dsn: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics._Request, "timeout", 10 * PATIENCE)
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: answers(port))
        with client(port, b"GET /metrics HTTP/1.1\r\n"), client(port):
            assert answers(port)
            assert get(port, "/healthz") == (200, "ok\n")


def test_idle_clients_take_no_more_than_so_many_threads(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics._Request, "timeout", PATIENCE)
    worker = quick(dsn, metrics_port=port)
    worker.task("noop")(lambda task: None)
    with running(worker), ExitStack() as clients:
        wait_until(lambda: answers(port))
        wait_for(conn, enqueue(conn, "noop"), "completed")
        for _ in range(2 * metrics.CLIENTS):
            clients.enter_context(client(port))
        wait_until(lambda: served() == metrics.CLIENTS)
        assert get(port, "/healthz") == (200, "ok\n")
        for _ in range(20):
            enqueue(conn, "noop")
        wait_until(lambda: count(conn, "completed") == 21)
        clients.close()
        wait_until(lambda: answers(port))


def test_a_child_of_a_handler_does_not_keep_the_port(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, metrics_port=port)
    alone, go = os.pipe()

    @worker.task("fork")
    def fork(task: Task) -> int:
        if child := os.fork():
            return child
        os.close(go)
        os.read(alone, 1)
        os._exit(0)

    with running(worker):
        wait_until(lambda: answers(port))
        child = wait_for(conn, enqueue(conn, "fork"), "completed").result
    try:
        assert not answers(port)
        with socket.create_server(("0.0.0.0", port)):
            pass
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(alone)


def test_an_error_behind_the_page_ends_nothing(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    worker = quick(dsn, metrics_port=port)
    worker.task("noop")(lambda task: None)
    with running(worker):
        wait_until(lambda: answers(port))
        with monkeypatch.context() as broken:
            broken.setattr(CollectorRegistry, "collect", fail)
            assert get(port, "/metrics")[0] == 500
        wait_for(conn, enqueue(conn, "noop"), "completed")
        assert get(port, "/healthz") == (200, "ok\n")
        assert answers(port)
