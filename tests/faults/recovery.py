"""How long a task waits when its worker is killed or frozen, with the defaults of `pgsched worker`.

    python tests/faults/recovery.py --workers 20

Needs no database: it starts a private PostgreSQL. Each worker holds one task. All are stopped at
moments of chance, first by SIGKILL, then others by SIGSTOP; two further workers take over.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from subprocess import Popen

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))

from workers import WorkerProcess, install, wait_until

from pgsched.embedded import Server

APP = """
from threading import Event
from pgsched import Worker

worker = Worker()

@worker.task("wait")
def wait(task):
    Event().wait(600)
"""
SPREAD = 12.0
"""Seconds over which the workers are stopped: they extend their leases every 10."""


def recoveries(dsn: str, folder: Path, count: int, number: signal.Signals) -> list[float]:
    """Seconds from each worker's stop until its task was claimed again."""
    conn = psycopg.connect(dsn, autocommit=True)
    with ExitStack() as stack:
        stack.callback(conn.close)
        conn.execute("delete from pgsched.scheduled_tasks")
        conn.execute("delete from pgsched.workers")
        conn.execute("select pgsched.enqueue_task('wait') from generate_series(1, %s)", [count])
        victims = [
            stack.enter_context(worker(dsn, folder / f"{number.name}{each}", 1))
            for each in range(count)
        ]
        holders = "select split_part(claimed_by, ':', 2)::integer, id from pgsched.tasks"
        wait_until(lambda: None not in dict(conn.execute(holders).fetchall()), 60)
        held: dict[int, int] = dict(conn.execute(holders).fetchall())
        for each in ("a", "b"):
            stack.enter_context(worker(dsn, folder / f"{number.name}{each}", count))
        present = "select from pgsched.workers where presence"
        wait_until(lambda: conn.execute(present).rowcount == count + 2, 60)
        stopped = {}
        for victim in victims:
            time.sleep(random.uniform(0, 2 * SPREAD / count))
            stopped[held[victim.pid]] = time.time()
            victim.send_signal(number)
        again = "select id, date_part('epoch', claimed_at) from pgsched.tasks where attempt = 2"
        wait_until(lambda: conn.execute(again).rowcount == count, 200)
        return sorted(at - stopped[task_id] for task_id, at in conn.execute(again))


@contextmanager
def worker(dsn: str, folder: Path, concurrency: int) -> Iterator[Popen[bytes]]:
    folder.mkdir()
    with WorkerProcess(folder, APP, "--dsn", dsn, "--concurrency", str(concurrency)) as process:
        yield process.process


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=20, help="that are killed, and frozen")
    count = parser.parse_args().workers
    with Server(settings={"fsync": "off"}) as server, tempfile.TemporaryDirectory() as folder:
        dsn = server.create_database("app")
        install(server, dsn)
        for name, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
            times = recoveries(dsn, Path(folder), count, number)
            cuts = quantiles(times, n=100, method="inclusive")
            print(
                f"{name}: {len(times)} workers, claimed again after p50 {cuts[49]:.1f} s,"
                f" p99 {cuts[98]:.1f} s, at most {times[-1]:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
