"""What Prometheus' own tool says of the metrics: see `make test-metrics`."""

import json
import re
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from promtool import promtool
from scraping import free_port, get, scrape
from workers import CANCEL, WorkerProcess, count, wait_for, wait_until

from pgsched import enqueue

pytestmark = pytest.mark.promtool

ROOT = Path(__file__).parent.parent

APP = """
import asyncio, pathlib, time
from datetime import timedelta
from pgsched import Fail, Retry, Snooze, Worker

worker = Worker(queues=["default", 'a "b"\\\\ {c}=', "ünï"], lease=1, poll_interval=0.05)
later = timedelta(hours=1)

@worker.task("plain")
def plain(task):
    if task.payload == "lost":
        task.cancelled.wait(30)
    if task.payload == "cancelled":
        while not pathlib.Path("gate").exists():
            time.sleep(0.01)
        raise ValueError("stopped")

@worker.task("in transaction")
def in_transaction(task, conn):
    raise Retry(later)

@worker.task("coroutine", timeout=0.1)
async def coroutine(task):
    await asyncio.sleep(30)

@worker.task('fail "now"\\\\')
def fail(task):
    raise Fail("no")

@worker.task("snooze")
def snooze(task):
    raise Snooze(later)
"""


def test_it_has_no_complaint_about_a_worker_that_has_seen_everything(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--dsn", dsn, "--metrics-host", "127.0.0.1", "--metrics-port", str(port))
    enqueue(conn, "plain", queue='a "b"\\ {c}=')
    for task_type in ("in transaction", "coroutine", 'fail "now"\\', "snooze", "unknown"):
        enqueue(conn, task_type, queue="ünï")
    lost, cancelled = (enqueue(conn, "plain", how) for how in ("lost", "cancelled"))
    enqueue(conn, "plain", queue="other", delay=timedelta(hours=1))
    # Tasks of a worker that is gone.
    for attempts in (1, 2):
        enqueue(conn, "plain", queue="gone", max_attempts=attempts)
    conn.execute("select from pgsched.claim_task('gone', 'gone', '1 s', 2)")
    with WorkerProcess(tmp_path, APP, *options, "--db-metrics") as worker:
        for task_id in (lost, cancelled):
            wait_for(conn, task_id, "processing")
        conn.execute("delete from pgsched.scheduled_tasks where id = %s", [lost])
        conn.execute(CANCEL, [cancelled])
        (tmp_path / "gate").touch()
        wait_for(conn, cancelled, "cancelled")
        wait_until(lambda: count(conn, "failed") == 2)

        def seen() -> set[str]:
            page = scrape(port).items()
            return {key[1] for key, n in page if key[0] == "pgsched_task_outcomes_total" and n}

        wait_until(lambda: len(seen()) == 6)
        wait_until(lambda: scrape(port).get(("pgsched_workers",)) == 1)
        wait_until(lambda: scrape(port).get(("pgsched_reaped_total", "queued")) == 1)
        _, text = get(port, "/metrics")
        assert "Traceback" not in worker.log
    names = set(re.findall(r"^# TYPE (\w+)(?<!_created) ", text, re.MULTILINE))
    assert len(names) == 12 + 7
    promtool("check", "metrics", text=text)


def test_it_can_read_the_queries_of_the_document(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    queries = re.findall(r"^```promql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(queries) >= 5
    rules = [{"record": f"query{i}", "expr": query} for i, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)
