"""The page that a running worker serves, read over HTTP as Prometheus does."""

import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from threading import Event

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from workers import CANCEL, PATIENCE, count, end_sessions, quick, running, wait_for, wait_until

from pgsched import Fail, Retry, Snooze, Task, enqueue, loop

Connect = Callable[..., psycopg.Connection]
Page = dict[tuple[str, ...], float]

LATENCY = "pgsched_scheduling_latency_seconds"


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
        assert isinstance(number, int)
        return number


def scrape(port: int) -> Page:
    """Each sample by its name and the values of its labels, in the order of their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = response.read().decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_tells_slots_and_how_many_are_busy(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, concurrency=7, metrics_port=port)
    gate = Event()
    worker.task("wait")(lambda task: gate.wait(PATIENCE))
    for _ in range(3):
        enqueue(conn, "wait")
    with running(worker):
        wait_until(lambda: count(conn, "processing") == 3)
        wait_until(lambda: answers(port))
        wait_until(lambda: scrape(port)["pgsched_worker_slots_busy",] == 3)
        assert scrape(port)["pgsched_worker_slots",] == 7
        gate.set()
        wait_until(lambda: scrape(port)["pgsched_worker_slots_busy",] == 0)
        assert scrape(port)["pgsched_worker_slots",] == 7


def test_the_latency_is_that_of_each_completed_task(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    worker = quick(dsn, queues=["a", "b"], metrics_port=port)
    worker.task("noop")(lambda task: None)

    @worker.task("fail")
    def fail(task: Task) -> None:
        raise Fail("no")

    began = time.monotonic()
    for _ in range(5):
        enqueue(conn, "noop", queue="a")
    enqueued = time.monotonic()
    failing = enqueue(conn, "fail", queue="a")
    # What a task was not due for does not count.
    late = enqueue(conn, "noop", queue="b", delay=timedelta(seconds=0.3))
    wait_until(lambda: time.monotonic() > enqueued + 0.2)
    with running(worker):
        wait_for(conn, failing, "failed")
        wait_for(conn, late, "completed")
        wait_until(lambda: scrape(port).get((f"{LATENCY}_count", "b", "noop")) == 1)
        page = scrape(port)
    passed = time.monotonic() - began
    assert page[f"{LATENCY}_count", "a", "noop"] == 5
    assert 5 * 0.2 < page[f"{LATENCY}_sum", "a", "noop"] < 5 * passed
    assert 0 < page[f"{LATENCY}_sum", "b", "noop"] < passed - 0.3
    assert (f"{LATENCY}_count", "a", "fail") not in page


def test_contention_is_what_other_sessions_held(
    dsn: str, conn: psycopg.Connection, connect: Connect, port: int
) -> None:
    worker = quick(dsn, queues=["busy", "quiet"], concurrency=1, metrics_port=port)
    worker.task("noop")(lambda task: None)
    name = "pgsched_lock_contention_total"
    for _ in range(10):
        enqueue(conn, "noop", queue="busy", priority=0)
    other = connect(autocommit=False)
    other.execute("select from pgsched.scheduled_tasks for update")

    def counted() -> bool:
        # One claim of 16 counts, for all of them.
        for queue in 10 * ["busy", "quiet"]:
            enqueue(conn, "noop", queue=queue)
        return scrape(port).get((name, "busy"), 0) > 0

    with running(worker):
        wait_until(lambda: answers(port))
        wait_until(counted)
        wait_until(lambda: (name, "quiet") in scrape(port))
        other.rollback()
        page = scrape(port)
    assert page[name, "busy"] % (16 * 10) == 0
    assert page[name, "quiet"] == 0


def test_every_end_of_a_claim_is_counted(
    dsn: str, conn: psycopg.Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REAP_SECONDS", 0.1)
    worker = quick(dsn, lease=1, metrics_port=port)
    later = timedelta(hours=1)
    raised = {
        "completed": None,
        "retried": Retry(later),
        "failed": Fail("no"),
        "released": Snooze(later),
        "cancelled": ValueError("stopped"),
    }
    gate = Event()

    @worker.task("end")
    def end(task: Task) -> None:
        if task.payload == "lost":
            task.cancelled.wait(PATIENCE)
        elif task.payload == "cancelled":
            gate.wait(PATIENCE)
        if error := raised.get(task.payload):
            raise error

    ids = {how: enqueue(conn, "end", how) for how in (*raised, "lost")}
    enqueue(conn, "unknown")
    # A task of a worker that is gone, without an attempt left.
    enqueue(conn, "end", "reaped", queue="other", max_attempts=1)
    conn.execute("select from pgsched.claim_task('gone', 'other', '1 s')")
    with running(worker):
        wait_until(lambda: count(conn, "queued") == 3)
        conn.execute(CANCEL, [ids["cancelled"]])
        gate.set()
        conn.execute("delete from pgsched.scheduled_tasks where id = %s", [ids["lost"]])
        ends: Page = {
            # In the order of the labels' names: outcome, queue, task_type.
            **{("pgsched_task_outcomes_total", how, "default", "end"): 1.0 for how in ids},
            # The name of a type that has no handler is not the worker's to choose.
            ("pgsched_task_outcomes_total", "released", "default", ""): 1,
            ("pgsched_reaped_total", "failed"): 1,
        }
        names = {key[0] for key in ends}
        wait_until(lambda: ends == {key: n for key, n in scrape(port).items() if key[0] in names})


def test_a_lost_connection_is_counted(dsn: str, conn: psycopg.Connection, port: int) -> None:
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: conn.execute("select id from pgsched.workers").fetchall())
        assert scrape(port)["pgsched_reconnects_total",] == 0
        end_sessions(conn)
        wait_until(lambda: scrape(port)["pgsched_reconnects_total",] == 1)


def test_a_taken_port_is_told_once_and_the_worker_goes_on(
    dsn: str, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        worker = quick(dsn, metrics_port=port)
        worker.task("noop")(lambda task: None)
        with running(worker):
            wait_for(conn, enqueue(conn, "noop"), "completed")
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in told] == ["pgsched"]
    assert f"no metrics page: port={port}" in told[0].getMessage()
    assert "in use" in told[0].getMessage()


def test_the_page_ends_with_the_worker(dsn: str, port: int) -> None:
    for _ in range(2):
        with running(quick(dsn, metrics_port=port)):
            wait_until(lambda: answers(port))
        assert not answers(port)


def test_the_page_listens_where_it_is_told(dsn: str, port: int) -> None:
    with running(quick(dsn, metrics_port=port, metrics_host="127.0.0.2")):
        wait_until(lambda: answers(port, "127.0.0.2"))
        assert not answers(port)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=PATIENCE):
            return True
    except urllib.error.URLError:
        return False
