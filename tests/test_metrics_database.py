"""The figures of all queues that one worker of a fleet gets from the database."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from pgbouncer import POOL_SIZE, PgBouncer
from scraping import Page, free_port, scrape, served
from workers import (
    PATIENCE,
    WorkerProcess,
    ask,
    install,
    quick,
    running,
    sessions,
    wait_until,
)

from pgsched import calls, enqueue, metrics
from pgsched.calls import Connection, DatabaseStats
from pgsched.embedded import Server

Connect = Callable[..., psycopg.Connection]

OWN_SESSIONS = "pgsched % metrics"


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    return free_port()


def of_database(page: Page) -> Page:
    """The samples that come from the database."""
    names = ("pgsched_queue", "pgsched_workers", "pgsched_oldest", "pgsched_database")
    return {key: value for key, value in page.items() if key[0].startswith(names)}


def is_up(port: int) -> float | None:
    return scrape(port).get(("pgsched_database_up",))


def test_every_queue_of_the_database_is_told(dsn: str, conn: psycopg.Connection, port: int) -> None:
    for queue in ("mail", "mail", "mail", 'a "b"\\'):
        enqueue(conn, "noop", queue=queue)
    for queue in ("mail", "held"):
        enqueue(conn, "noop", queue=queue, delay=timedelta(hours=1))
    conn.execute("select pgsched.pause_queue('held')")
    conn.execute(
        "update pgsched.scheduled_tasks set run_at = clock_timestamp() - interval '1 h'"
        " where id = (select min(id) from pgsched.scheduled_tasks)"
    )
    conn.execute("select from pgsched.claim_task('other', 'mail', '1 h', 2)")
    conn.execute(
        "select pgsched.fail_task(id, claim_token, 'no', p_permanent => true)"
        "  from pgsched.tasks where status = 'processing' order by id limit 1"
    )
    with running(quick(dsn, queues=["none"], metrics_port=port, db_metrics=True)):
        # The worker's own sessions have snapshots, too, for a moment.
        quiet = {("pgsched_workers",): 1.0, ("pgsched_oldest_snapshot_age_seconds",): 0.0}
        wait_until(lambda: quiet.items() <= scrape(port).items())
        page = of_database(scrape(port))  # the same answer
    tasks = {
        "mail": {"queued": 2, "processing": 1, "failed": 1},
        'a "b"\\': {"queued": 1, "processing": 0, "failed": 0},
        "held": {"queued": 1, "processing": 0, "failed": 0},
    }
    ages = {queue: page.pop(("pgsched_queue_oldest_due_age_seconds", queue)) for queue in tasks}
    expected: Page = {
        ("pgsched_database_up",): 1,
        ("pgsched_workers",): 1,
        ("pgsched_oldest_snapshot_age_seconds",): 0,
        **{
            ("pgsched_queue_tasks", queue, status): number
            for queue, numbers in tasks.items()
            for status, number in numbers.items()
        },
        ("pgsched_queue_due", "mail"): 1,
        ("pgsched_queue_due", 'a "b"\\'): 1,
        ("pgsched_queue_due", "held"): 0,
        ("pgsched_queue_paused", "mail"): 0,
        ("pgsched_queue_paused", 'a "b"\\'): 0,
        ("pgsched_queue_paused", "held"): 1,
    }
    assert page == expected
    assert 0 < ages["mail"] < 3600
    assert 0 < ages['a "b"\\'] < 3600
    assert ages["held"] == 0


def test_the_age_of_the_oldest_due_task_is_in_seconds(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    enqueue(conn, "noop")
    conn.execute("update pgsched.scheduled_tasks set run_at = clock_timestamp() - interval '1 h'")
    with running(quick(dsn, queues=["none"], metrics_port=port, db_metrics=True)):
        wait_until(lambda: is_up(port) == 1)
        age = scrape(port)["pgsched_queue_oldest_due_age_seconds", "default"]
    assert 3600 < age < 3600 + PATIENCE


def test_a_database_without_a_queue_is_up(dsn: str, port: int) -> None:
    with running(quick(dsn, metrics_port=port, db_metrics=True)):
        wait_until(lambda: scrape(port).get(("pgsched_workers",)) == 1)
        names = {name for name, *_ in of_database(scrape(port))}
    expected = ("pgsched_database_up", "pgsched_workers", "pgsched_oldest_snapshot_age_seconds")
    assert names == set(expected)


def test_the_database_is_asked_only_where_that_is_wanted(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    with running(quick(dsn, metrics_port=port)):
        wait_until(lambda: scrape(port).get(("pgsched_worker_slots",)))
        assert of_database(scrape(port)) == {}


@pytest.mark.parametrize(("setting", "options"), [("db_metrics=True", ()), ("", ("--db-metrics",))])
def test_the_app_or_the_command_line_may_want_it(
    dsn: str, port: int, tmp_path: Path, setting: str, options: tuple[str, ...]
) -> None:
    source = f"from pgsched import Worker\nworker = Worker({setting})\n"
    with WorkerProcess(tmp_path, source, "--dsn", dsn, "--metrics-port", str(port), *options):
        wait_until(lambda: is_up(port) == 1)


def test_a_transaction_that_holds_back_vacuum_is_seen(
    dsn: str, connect: Connect, port: int
) -> None:
    name = ("pgsched_oldest_snapshot_age_seconds",)
    other = connect(autocommit=False)
    other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    other.execute("select 1")
    with running(quick(dsn, metrics_port=port, db_metrics=True)):
        wait_until(lambda: scrape(port).get(name, 0) > 1)
        other.rollback()
        wait_until(lambda: scrape(port).get(name) == 0)


def test_of_many_queues_those_with_the_most_due_tasks_are_named(
    dsn: str, conn: psycopg.Connection, port: int
) -> None:
    """300 queues: 100 have two due tasks, 200 one, of which 50 are paused."""
    conn.execute(
        "select pgsched.enqueue_task('noop', p_queue => 'q' || i)"
        "  from generate_series(1, 300) as i, generate_series(1, 1 + (i <= 100)::integer)"
    )
    conn.execute("select pgsched.pause_queue('q' || i) from generate_series(251, 300) as i")
    conn.execute(
        "update pgsched.scheduled_tasks set run_at = clock_timestamp() - interval '1 h'"
        " where queue = 'q222'"
    )
    conn.execute("select from pgsched.claim_task('other', 'q111')")
    with running(quick(dsn, queues=["none"], metrics_port=port, db_metrics=True)):
        wait_until(lambda: is_up(port) == 1)
        page = scrape(port)
    due = {key[1]: tasks for key, tasks in page.items() if key[0] == "pgsched_queue_due"}
    assert due == {"": 199, **{f"q{i}": 2 for i in range(1, 101)}}
    assert page["pgsched_queue_tasks", "", "queued"] == 199
    assert page["pgsched_queue_tasks", "", "processing"] == 1
    assert page["pgsched_queue_tasks", "", "failed"] == 0
    assert page["pgsched_queue_paused", ""] == 1
    assert 3600 < page["pgsched_queue_oldest_due_age_seconds", ""] < 3600 + PATIENCE


@pytest.mark.parametrize("queues", [metrics.QUEUES, metrics.QUEUES + 1])
def test_none_is_summed_up_without_need(
    dsn: str, conn: psycopg.Connection, port: int, queues: int
) -> None:
    conn.execute(
        "select pgsched.configure_queue('q' || i) from generate_series(1, %s) as i", [queues]
    )
    with running(quick(dsn, queues=["none"], metrics_port=port, db_metrics=True)):
        wait_until(lambda: is_up(port) == 1)
        named = {key[1] for key in scrape(port) if key[0] == "pgsched_queue_due"}
    assert len(named) == queues
    assert ("" in named) == (queues > metrics.QUEUES)


# When the database does not answer


@pytest.fixture
def fragile() -> Iterator[Server]:
    """A server of the test's own, which it stops, with the schema in database `postgres`."""
    with Server(settings={"fsync": "off"}) as server:
        install(server, server.dsn())
        yield server


def test_a_database_that_is_away_is_down_and_the_worker_tells_its_own(
    fragile: Server, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with running(quick(fragile.dsn(), metrics_port=port, db_metrics=True)):
        for _ in range(2):
            wait_until(lambda: is_up(port) == 1)
            fragile.stop()
            wait_until(lambda: is_up(port) == 0)
            page = scrape(port)
            assert of_database(page) == {("pgsched_database_up",): 0}
            assert page["pgsched_worker_slots",] == 10
            fragile.start()
        wait_until(lambda: is_up(port) == 1)
    assert any("no figures of the database: error='Op" in text for text in caplog.messages)


def test_a_schema_that_is_older_is_down_and_told(
    dsn: str, conn: psycopg.Connection, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("drop function pgsched.server_stats")
    with running(quick(dsn, metrics_port=port, db_metrics=True)):
        wait_until(lambda: is_up(port) == 0)
    told = [text for text in caplog.messages if "no figures of the database" in text]
    assert "run pgsched migrate" in told[0]


def test_a_statement_that_waits_is_given_up(
    dsn: str,
    conn: psycopg.Connection,
    connect: Connect,
    port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(quick(dsn, metrics_port=port, db_metrics=True)):
        wait_until(lambda: is_up(port) == 1)
        with connect().transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            wait_until(lambda: is_up(port) == 0)
            wait_until(lambda: sessions(conn, OWN_SESSIONS) == [])
        wait_until(lambda: is_up(port) == 1)
    told = [text for text in caplog.messages if "no figures of the database" in text]
    assert "statement timeout" in told[0]


def test_a_server_that_says_nothing_delays_no_scrape_for_long(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another scrape waits for it already. It takes 10 seconds to be given up."""
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.5)
    page = metrics.Metrics()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(10) as threads:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} sslmode=disable"
        page.registry.register(metrics.Database(dsn, "test"))
        with page.served(port, "127.0.0.1", str):
            assert list(threads.map(is_up, 10 * [port])) == 10 * [0]
            [asking] = [each for each in threading.enumerate() if each.name == "pgsched-database"]
        silent.close()
        asking.join(PATIENCE)
        assert not asking.is_alive()


def test_scrapes_at_once_ask_once(
    dsn: str,
    conn: psycopg.Connection,
    connect: Connect,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0.0)
    worker = quick(dsn, metrics_port=port, db_metrics=True)
    with running(worker), ThreadPoolExecutor(10) as threads:
        wait_until(lambda: is_up(port) == 1)
        with connect().transaction() as block:
            block.connection.execute("lock table pgsched.scheduled_tasks")
            pages = [threads.submit(scrape, port) for _ in range(10)]
            wait_until(lambda: served() == 10)
            wait_until(lambda: sessions(conn, OWN_SESSIONS))
            assert len(sessions(conn, OWN_SESSIONS)) == 1
        first, *others = [of_database(page.result(PATIENCE)) for page in pages]
        assert first["pgsched_database_up",] == 1
        assert others == 9 * [first]


def test_what_was_asked_a_moment_ago_is_not_asked_again(
    dsn: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FRESH_SECONDS", PATIENCE)
    asked = []

    def ask(conn: Connection) -> DatabaseStats:
        asked.append(conn)
        return database_stats(conn)

    database_stats = calls.database_stats
    monkeypatch.setattr(calls, "database_stats", ask)
    with running(quick(dsn, metrics_port=port, db_metrics=True)):
        for _ in range(3):
            wait_until(lambda: is_up(port) == 1)
        monkeypatch.setattr(metrics, "FRESH_SECONDS", 0.0)
        assert len(asked) == 1
        assert is_up(port) == 1
        assert len(asked) == 2


@pytest.mark.pgbouncer
def test_a_pooler_keeps_nothing_of_it(port: int) -> None:
    with Server(settings={"fsync": "off"}) as server, PgBouncer(server) as pgbouncer:
        install(server, server.dsn())
        pooled = pgbouncer.dsn("postgres")
        with running(quick(pooled, metrics_port=port, db_metrics=True)):
            for _ in range(2 * POOL_SIZE):
                wait_until(lambda: is_up(port) == 1)
        timeouts = [ask(pooled, "show statement_timeout") for _ in range(2 * POOL_SIZE)]
    assert timeouts == 2 * POOL_SIZE * [["0"]]
