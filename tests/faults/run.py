"""Real workers and plain SQL clients work while faults strike; then every task is accounted for.

    python tests/faults/run.py --tasks 500000 --faults 500 --minutes 25 --seed 7
    python tests/faults/run.py --check FOLDER

Needs no database: it starts a private PostgreSQL, with a proxy in front of it and, where it has
been fetched, PgBouncer. Only processes are killed, not the machine, so fsync is off; but
synchronous_commit is on: what was acknowledged has to be there. The exit status is 1 when a promise
was broken; then the history stays, and --check looks at it again.
"""

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))

import clients
import nemesis
from checker import Report, Row, check
from history import Recorder, read
from nemesis import World
from pgbouncer import PROGRAM, PgBouncer
from proxy import Proxy
from summary import left_behind, noticed, summary
from workers import install
from world import WorkerHandle

from pgsched.embedded import Server

SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "100",
    "log_min_duration_statement": "50",
    "log_min_error_statement": "panic",
    "log_line_prefix": "%e|%a|",
}
SHORT, LONG = "2", "10"
"""Leases of workers [s]. With a long one it is by its presence that a lost worker is found."""
BESIDES = {
    *("kill_worker", "freeze_worker", "freeze_worker_briefly", "cancel_statements"),
    *("terminate_session", "terminate_listener", "terminate_presence", "terminate_all_sessions"),
    *("freeze_session", "locked_rows", "locked_tasks", "old_snapshot"),
}
"""Faults that may strike while another one has the server, the way to it or a setting."""
DRAIN_SECONDS = 120.0

log = logging.getLogger("faults")


class Run:
    """A world, who works in it and who disturbs them."""

    def __init__(self, folder: Path, seed: int, stack: ExitStack, *, pooled: bool) -> None:
        self._folder, self._seed = folder, seed
        self._recorder = Recorder(folder, "run")
        self._stop = Event()
        self._errors: list[BaseException] = []
        chance = random.Random(seed)
        locks = {"max_locks_per_transaction": chance.choice(["10", "64"])}
        self.server = stack.enter_context(Server(settings=SETTINGS | locks))
        self.dsn = self.server.create_database("app")
        install(self.server, self.dsn)
        with psycopg.connect(self.dsn) as conn:
            prepare(conn)
        self._note_clock()
        proxy = stack.enter_context(Proxy(self.server))
        routes = {"direct": self.dsn, "proxy": proxy.dsn("app")}
        self._world = World(self.server, self.dsn, proxy=proxy)
        if pooled:
            self._world.bouncer = stack.enter_context(PgBouncer(self.server))
            routes["pooler"] = self._world.bouncer.dsn("app")

        ids: deque[int] = deque(maxlen=1000)
        self._producers = [
            clients.Producer(self._recorder, routes[route], f"{seed} producer {route}", ids)
            for route in ("direct", "proxy")
        ]
        operator = clients.Operator(self._recorder, self.dsn, f"{seed} operator", ids)
        self._threads = clients.start([*self._producers, operator], self._stop)
        strict = f"{self.dsn}&options=-c%20default_transaction_isolation%3Dserializable"
        skewed = ["skewed.py", chance.choice(["3600", "-3600"]), "worker_app.py"]
        self._workers = [self._process("worker-skewed", "direct", skewed, strict, SHORT)]
        self._clients = []
        for route, dsn in routes.items():
            lease = LONG if route == "direct" else SHORT
            self._workers.append(
                self._process(f"worker-{route}", route, ["worker_app.py"], dsn, lease)
            )
            self._clients.append(self._process(f"sql-{route}", route, ["clients.py"], dsn, route))
        self._world.workers = [*self._workers, *self._clients]
        for process in (*self._workers, *self._clients):
            stack.callback(process.kill)
        log.info("seed %d, %s, routes: %s", seed, locks, ", ".join(routes))

    def _process(
        self, name: str, route: str, program: list[str], dsn: str, more: str
    ) -> WorkerHandle:
        arguments = [*program, str(self._folder), name, dsn, more, str(self._seed)]
        return WorkerHandle(name, route, arguments, self._folder, self._recorder)

    def _note_clock(self) -> None:
        with psycopg.connect(self.dsn) as conn:
            [(now,)] = conn.execute("select date_part('epoch', clock_timestamp())")
            self._recorder.note("clock", now)

    def work(self, tasks: int, faults: int, seconds: float) -> None:
        """Enqueue and disturb at an even pace; it takes longer when faults do."""
        begin = told = time.monotonic()
        names = nemesis.faults(self._world)
        lanes = [
            Thread(target=self._strike, args=[lane, count, seconds], daemon=True)
            for lane, count in (
                ([name for name in names if name not in BESIDES], faults // 2),
                ([name for name in names if name in BESIDES], faults - faults // 2),
            )
        ]
        for lane in lanes:
            lane.start()
        while True:
            share = min(1.0, (time.monotonic() - begin) / seconds)
            for producer in self._producers:
                producer.quota = tasks * share / len(self._producers)
            added = sum(producer.added for producer in self._producers)
            if self._errors:
                raise self._errors[0]
            if added >= tasks and not any(lane.is_alive() for lane in lanes):
                return
            if time.monotonic() > told + 10:
                told = time.monotonic()
                log.info("%4.0f s: %d tasks added", told - begin, added)
            time.sleep(0.1)

    def _strike(self, names: Sequence[str], count: int, seconds: float) -> None:
        """Every fault comes as often as every other, in an order of chance."""
        chance = random.Random(f"{self._seed} {names}")
        begin = time.monotonic()
        deck: list[str] = []
        try:
            for number in range(count):
                self._stop.wait(max(0.0, begin + number * seconds / count - time.monotonic()))
                deck = deck or chance.sample(names, len(names))
                self._inject(deck.pop(), chance)
        except BaseException as error:
            self._errors.append(error)

    def _inject(self, name: str, chance: random.Random) -> None:
        begin, victims = time.monotonic(), Victims()
        nemesis.log.addHandler(victims)
        try:
            nemesis.FAULTS[name](self._world, chance)
        except psycopg.Error as error:
            # Another fault hit this one's own session.
            log.info("%s broke off: %s", name, str(error).strip())
        finally:
            nemesis.log.removeHandler(victims)
        self._recorder.note("fault", name, begin)
        if name == "freeze_worker":
            for record in victims.records:
                self._recorder.note("frozen", record, begin)

    def drain(self, tasks: int) -> None:
        """Return when no task is left to do; what is left after a long time is unfinished."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.kill()
        begin = time.monotonic()
        deadline = begin + DRAIN_SECONDS + tasks / 500
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            while time.monotonic() < deadline:
                [(left,)] = conn.execute("select count(*) from pgsched.scheduled_tasks")
                if left == 0:
                    break
                time.sleep(0.2)
        log.info("drained in %.1f s", time.monotonic() - begin)
        for worker in self._workers:
            if status := worker.stop():
                self._recorder.note("left", f"{worker.name} ended with status {status}")

    def examine(self) -> None:
        """Keep what the tables hold, and what the server knows."""
        self._note_clock()
        bouncer = self._world.bouncer
        for text in left_behind(self.dsn, bouncer.dsn("app") if bouncer else None):
            self._recorder.note("left", text)
        for kind, what, count, longest in noticed(self.server.folder / "server.log"):
            self._recorder.note(kind, what, count, longest)
        with psycopg.connect(self.dsn) as conn, (self._folder / ROWS).open("w") as file:
            for row in stored(conn):
                print(json.dumps(row), file=file)
        self._recorder.close()


class Victims(logging.Handler):
    """Remembers which processes the nemesis names."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        match record.args:
            case str(name), int(pid):
                self.records.append(f"{name}.{pid}")


ROWS = "rows.json"


def prepare(conn: psycopg.Connection) -> None:
    """The application's own table, and queues that try again soon."""
    conn.execute("create table public.effects (task_id bigint)")
    conn.execute(
        """
        select pgsched.configure_queue(
                 q, p_retry_delay => '50 ms', p_retry_delay_max => '500 ms', p_max_attempts => 10)
          from unnest(array['bulk', 'work', 'tx']) as q
        """
    )


def stored(conn: psycopg.Connection) -> Iterator[Row]:
    """Every row of the tables, with what its handler did."""
    conn.execute("analyze")
    with conn.cursor("stored") as cursor:
        cursor.itersize = 10_000
        cursor.execute(
            """
            with effects as (
              select task_id, count(*) as count from public.effects group by task_id),
            followers as (
              select substr(payload ->> 'tag', 7)::bigint as task_id, count(*) as count
                from pgsched.tasks
               where payload ->> 'tag' like 'after:%'
               group by 1)
            select t.id, t.payload ->> 'tag', t.task_type, t.status, t.attempt, t.max_attempts,
                   replace(t.claim_token::text, '-', ''), coalesce(e.count, 0),
                   coalesce(f.count, 0), t.queue, t.unique_key
              from pgsched.tasks as t
              left join effects as e on e.task_id = t.id
              left join followers as f on f.task_id = t.id
            """
        )
        for row in cursor:
            yield Row(*row)


def check_folder(folder: Path) -> Report:
    """Look at what a run left in this folder."""
    with (folder / ROWS).open() as lines:
        return check(read(folder), (Row(*json.loads(line)) for line in lines))


def run(
    folder: Path, *, tasks: int, faults: int, seconds: float, seed: int, pooled: bool
) -> Report:
    """A whole run, whose records stay in the folder."""
    with ExitStack() as stack:
        this = Run(folder, seed, stack, pooled=pooled)
        this.work(tasks, faults, seconds)
        this.drain(tasks)
        this.examine()
    return check_folder(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=500_000)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="of an earlier run")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    nemesis.log.setLevel(logging.INFO)
    if options.check:
        report = check_folder(options.check)
        print(summary(report))
        sys.exit(bool(report.violations))
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    log.info("history in %s", folder)
    report = run(
        folder,
        tasks=options.tasks,
        faults=options.faults,
        seconds=60 * options.minutes,
        seed=options.seed,
        pooled=PROGRAM.exists(),
    )
    print(summary(report))
    if report.violations:
        sys.exit(f"seed {options.seed}; look again: {sys.argv[0]} --check {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
