"""Plain SQL clients, as threads: producers, workers that do as they please, operators.

None of them knows of the driver. Each has a session of its own and, when that breaks, another one.
"""

import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psycopg
from history import NotSent, Recorder
from worker_app import QUEUES, end_with_parent

UNIQUE_KEYS = 200
NAME = "pgsched sql"
"""Application name: the faults take such sessions for a worker's."""
OLD = 200
"""Claims and ids that are remembered, to be used when they are over."""


class Held(NamedTuple):
    """A claim."""

    queue: str
    id: int
    token: str


class RolledBack(Exception):
    """On purpose."""


OPTIONS = [
    "",
    "-c default_transaction_isolation=repeatable\\ read",
    "-c default_transaction_isolation=serializable",
    "-c statement_timeout=100 -c lock_timeout=20",
]
"""What sessions have that no pooler shares: each new one something else."""


class Client:
    """A session that comes back; its subclasses have a `step` that is repeated."""

    def __init__(self, recorder: Recorder, dsn: str, seed: str, *, pooled: bool = False) -> None:
        self.recorder = recorder
        self.chance = random.Random(seed)
        self._dsn = dsn
        self._pooled = pooled
        self._conn: psycopg.Connection | None = None
        self.pause: Callable[[float], bool | None] = time.sleep
        """Sleep, unless it is to stop; returns whether it is."""

    @property
    def conn(self) -> psycopg.Connection:
        if self._conn is None or self._conn.closed:
            self._conn = self.connect(options="" if self._pooled else self.chance.choice(OPTIONS))
        return self._conn

    def connect(self, **options: Any) -> psycopg.Connection:
        options |= {"application_name": NAME, "connect_timeout": 5}
        try:
            return psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError as error:
            raise NotSent(str(error)) from error

    def run(self, stop: Event) -> None:
        self.pause = stop.wait
        while not stop.is_set():
            # Refused, or broken: whatever it is, the history has it.
            with suppress(psycopg.Error, RolledBack):
                self.step()
                continue
            self.pause(self.chance.random() / 10)
        if self._conn is not None:
            self._conn.close()

    def step(self) -> None:
        raise NotImplementedError

    def column(self, query: str, *args: Any) -> list[Any]:
        """The first column of a query's rows."""
        return column(self.conn, query, *args)

    def about(self, call: str, task_id: int, query: str) -> list[str]:
        """A call that takes no more than a task's id."""
        return self.recorder.call(call, {"ids": [task_id]}, lambda _: self.column(query, task_id))

    def cancel(self, task_id: int) -> None:
        self.about("cancel", task_id, "select pgsched.cancel_task(%s)")

    def retry(self, task_id: int) -> None:
        """Refused of most tasks."""
        self.about("retry", task_id, "select 'queued' from pgsched.retry_task(%s)")


def column(conn: psycopg.Connection, query: str, *args: Any) -> list[Any]:
    return [row[0] for row in conn.execute(query.encode(), args)]


class Producer(Client):
    """Enqueues up to `quota` tasks in all, in every way; `added` says how many, `ids` the latest.

    Most are cheap ones, in batches.
    """

    quota = 0.0

    def __init__(self, recorder: Recorder, dsn: str, seed: str, ids: deque[int]) -> None:
        super().__init__(recorder, dsn, seed)
        self.added = 0
        self._ids = ids

    def step(self) -> None:
        room = int(self.quota) - self.added
        if room <= 0:
            self.pause(0.01)
            return
        ways: list[Callable[[], list[int]]] = [
            *(self.single, self.unique, self.unique_batch, self.delayed),
            *(self.taken_back, self.kinds),
        ]
        if self.chance.random() < 0.5:
            ids = self.batch([{"queue": "bulk"}] * min(room, self.chance.randint(1, 300)))
        else:
            ids = self.chance.choice(ways)()
        self.added += len(ids)
        self._ids.extend(ids)

    def batch(
        self, tasks: Sequence[dict[str, Any]], *, take_back: bool = False, **args: Any
    ) -> list[int]:
        def enqueue(name: str) -> list[int]:
            task = {"task_type": "noop", "payload": {"tag": name}}
            text = json.dumps([task | each for each in tasks])
            if not take_back:
                return self.column("select pgsched.enqueue_tasks(%s::jsonb)", text)
            conn = self.conn
            with conn.transaction():
                column(conn, "select pgsched.enqueue_tasks(%s::jsonb)", text)
                raise RolledBack

        return self.recorder.call("enqueue", {"count": len(tasks), **args}, enqueue)

    def single(self, queue: str = "bulk", key: str | None = None) -> list[int]:
        args = {"count": 1} | ({"keys": [key], "queue": queue} if key else {})
        return self.recorder.call(
            "enqueue",
            args,
            lambda name: self.column(
                "select pgsched.enqueue_task('noop', %s::jsonb, %s, p_unique_key => %s)",
                *(json.dumps({"tag": name}), queue, key),
            ),
        )

    def unique(self) -> list[int]:
        return self.single("work", f"key {self.chance.randrange(UNIQUE_KEYS)}")

    def unique_batch(self) -> list[int]:
        keys = [f"key {self.chance.randrange(UNIQUE_KEYS)}" for _ in range(10)]
        tasks = [{"queue": "work", "unique_key": key} for key in keys]
        return self.batch(tasks, keys=keys, queue="work")

    def delayed(self) -> list[int]:
        run_at = time.time() + 2 * self.chance.random()
        text = datetime.fromtimestamp(run_at, UTC).isoformat()
        return self.batch([{"queue": "bulk", "run_at": text}] * 5, run_at=run_at)

    def taken_back(self) -> list[int]:
        return self.batch([{"queue": "bulk"}] * 3, take_back=True)

    def kinds(self) -> list[int]:
        """Some for handlers of other kinds, with few attempts for some, at any priority."""
        types = ["plain", "coroutine", "flaky", "again", "snooze", "hopeless"]
        rare = self.chance.random()
        tasks: list[dict[str, Any]] = [
            {
                "task_type": task_type,
                "queue": "work",
                "priority": self.chance.randint(0, 9),
                "max_attempts": self.chance.choice([1, 3, 10]),
            }
            for task_type in [*types, *["slow"] * (rare < 0.2), *["greedy"] * (rare < 0.03)]
        ]
        return self.batch(tasks + [{"task_type": "pay", "queue": "tx"}] * 5)


class SqlWorker(Client):
    """Claims tasks and does with them what it likes, also long after its claims are over."""

    def __init__(self, recorder: Recorder, dsn: str, seed: str, *, pooled: bool = False) -> None:
        super().__init__(recorder, dsn, seed, pooled=pooled)
        self._name = f"sql {seed} {os.getpid()}"
        self._old: deque[Held] = deque(maxlen=OLD)
        self._singles: list[Callable[[Held], object]] = [
            *(self.complete_one, self.fail_one, self.release_one, self.extend_one)
        ]
        often, at_times = [self.in_bulk] * 8, [self.one_by_one, self.in_transactions] * 2
        self._ways: list[Callable[[], object]] = [
            *(*often, *at_times, *[self.late, self.reap] * 2, self.operate)
        ]

    def step(self) -> None:
        self.chance.choice(self._ways)()

    # Calls

    def claim(self, queue: str, limit: int, lease: float, worker: str | None = None) -> list[Held]:
        worker = worker or self._name
        rows = self.recorder.call(
            "claim",
            {"worker": worker, "queue": queue, "lease": lease},
            lambda _: self.conn.execute(
                """
                select id, claim_token, attempt, max_attempts, date_part('epoch', run_at),
                       date_part('epoch', lease_expires_at)
                  from pgsched.claim_task(%s, %s, %s * interval '1 second', %s)
                """,
                [worker, queue, lease, limit],
            ).fetchall(),
            lambda rows: [[task_id, token.hex, *others] for task_id, token, *others in rows],
        )
        return [Held(queue, task_id, token.hex) for task_id, token, *_ in rows]

    def use(
        self, call: str, held: Sequence[Held], query: str, *args: Any, **recorded: Any
    ) -> list[str]:
        """A call with arrays of ids and of tokens; its answers, in the order given."""
        ids, tokens = [each.id for each in held], [each.token for each in held]
        return self.recorder.call(
            call,
            {"ids": ids, "tokens": tokens, **recorded},
            lambda _: self.column(query, ids, tokens, *args),
        )

    def complete(self, held: Sequence[Held]) -> list[str]:
        query = "select outcome from pgsched.complete_tasks(%s, %s::uuid[])"
        return self.use("complete", held, query)

    def fail(self, held: Sequence[Held], delay: float = 0.0) -> list[str]:
        query = "select outcome from pgsched.fail_tasks(%s, %s::uuid[], %s, %s::interval[])"
        errors, delays = ["boom"] * len(held), [timedelta(seconds=delay)] * len(held)
        recorded = {"delays": [delay] * len(held), "permanent": [False] * len(held)}
        return self.use("fail", held, query, errors, delays, **recorded)

    def release(self, held: Sequence[Held]) -> list[str]:
        query = "select outcome from pgsched.release_tasks(%s, %s::uuid[])"
        return self.use("release", held, query)

    def extend(self, held: Sequence[Held], lease: float, linger: float = 0.0) -> list[str]:
        query = """
            select outcome from pgsched.extend_tasks(%s, %s::uuid[], %s * interval '1 second')
        """
        ids, tokens = [each.id for each in held], [each.token for each in held]

        def extend(name: str) -> list[str]:
            conn = self.conn
            with conn.transaction() if linger else nullcontext():
                answers = column(conn, query, ids, tokens, lease)
                self.pause(linger)
            return answers

        args = {"ids": ids, "tokens": tokens, "lease": lease}
        return self.recorder.call("extend", args, extend)

    def one(self, call: str, held: Held, query: str, *args: Any, **recorded: Any) -> list[str]:
        return self.recorder.call(
            call,
            {"ids": [held.id], "tokens": [held.token], **recorded},
            lambda _: self.column(query, held.id, held.token, *args),
        )

    def complete_one(self, held: Held) -> list[str]:
        query = """
            select case when pgsched.complete_task(%s, %s) then 'completed' else 'already' end
        """
        return self.one("complete", held, query)

    def fail_one(self, held: Held) -> list[str]:
        permanent = self.chance.random() < 0.1
        query = "select status from pgsched.fail_task(%s, %s, 'boom', p_permanent => %s)"
        return self.one("fail", held, query, permanent, permanent=[permanent])

    def release_one(self, held: Held) -> list[str]:
        return self.one("release", held, "select 'released' from pgsched.release_task(%s, %s)")

    def extend_one(self, held: Held) -> list[str]:
        query = "select 'extended' from pgsched.extend_task(%s, %s, '2 seconds')"
        return self.one("extend", held, query, lease=2.0)

    def transact(self, held: Held, *, take_back: bool = False) -> None:
        """Hold, have an effect, complete: all or nothing."""

        def work(name: str) -> list[str]:
            conn, tag = self.conn, json.dumps({"tag": f"after:{held.id}"})
            with conn.transaction():
                column(conn, "select pgsched.hold_task(%s, %s)", held.id, held.token)
                conn.execute("insert into effects (task_id) values (%s)", [held.id])
                column(conn, "select pgsched.enqueue_task('noop', %s::jsonb, 'bulk')", tag)
                done = column(conn, "select pgsched.complete_task(%s, %s)", held.id, held.token)
                if take_back or done != [True]:
                    raise RolledBack
            return ["completed"]

        args = {"ids": [held.id], "tokens": [held.token]}
        self.recorder.call("transact", args, work)

    # What it does

    def in_bulk(self) -> None:
        lease = self.chance.choice([1.0, 2.0, 5.0])
        held = self.claim("bulk", 100, lease)
        if not held:
            self.pause(0.02)
            return
        self.chance.shuffle(held)
        few = [held.pop() for _ in range(min(len(held), self.chance.choice([0, 0, 1, 8])))]
        self._old.extend([*few, *held[:1]])
        ways: list[Callable[[], object]] = [
            lambda: self.fail(few, self.chance.random() / 2),
            lambda: self.release(few),
            lambda: self.extend(few, lease),
            lambda: None,  # left to their leases
        ]
        if few:
            self.chance.choice(ways)()
        for _ in range(self.chance.choice([1, 1, 1, 2])):
            self.complete(held)

    def one_by_one(self) -> None:
        for held in self.claim("work", self.chance.randint(1, 5), 2.0):
            self._old.append(held)
            self.chance.choice(self._singles)(held)

    def in_transactions(self) -> None:
        for held in self.claim("tx", self.chance.randint(1, 5), 2.0):
            self._old.append(held)
            self.transact(held, take_back=self.chance.random() < 0.1)

    def late(self) -> None:
        """Uses of claims that are over, most of them."""
        some = self.chance.sample(self._old, min(20, len(self._old)))
        paid = [held for held in some if held.queue == "tx"]
        others = [held for held in some if held.queue != "tx"]
        batches: list[Callable[[Sequence[Held]], object]] = [
            *(self.complete, self.fail, self.release),
            lambda held: self.extend(held, 1.0),
        ]
        if others:
            self.chance.choice(batches)(others)
        for held in others[:3]:
            with suppress(psycopg.Error):
                self.chance.choice(self._singles)(held)
        for held in paid[:1]:
            self.transact(held)

    def reap(self) -> None:
        query = "select id, status from pgsched.reap_stale(%s)"
        limit = self.chance.randint(1, 100)
        self.recorder.call("reap", {}, lambda _: self.conn.execute(query, [limit]).fetchall())

    def operate(self) -> None:
        for held in self.chance.sample(self._old, min(3, len(self._old))):
            with suppress(psycopg.Error):
                self.cancel(held.id)
                self.retry(held.id)


class LateWorker(SqlWorker):
    """Extends in the moment when the lease ends, and commits a little later."""

    def step(self) -> None:
        held = self.claim("bulk", 3, 1.0)
        if not held:
            return
        self._old.extend(held)
        self.pause(1.0 - 0.02 * self.chance.random())
        self.extend(held, 3.0, self.chance.random() / 20)
        self.pause(self.chance.random() / 2)
        self.complete(held)


class PresentWorker(SqlWorker):
    """Has a presence, which blinks or ends, and long leases. Not behind a pooler."""

    def register(self, name: str, presence: bool) -> int:
        query = "select pgsched.register_worker(%s, %s, 1, %s)"
        args = {"worker": name, "presence": presence}
        [worker_id] = self.recorder.call(
            "register", args, lambda _: self.column(query, name, QUEUES, presence)
        )
        return int(worker_id)

    def be_present(self, presence: psycopg.Connection, name: str, worker_id: int) -> None:
        """For as long as this session has its transaction."""
        presence.execute("begin isolation level read committed read only")
        presence.execute("call pgsched.hold_presence(%s)", [worker_id])
        self.register(name, True)

    def step(self) -> None:
        name = f"{self._name} {self.chance.random()}"

        worker_id = self.register(name, False)
        held: list[Held] = []
        for _ in range(2):
            with self.connect() as presence:
                self.be_present(presence, name, worker_id)
                begin = time.monotonic()
                mine: list[Held] = []
                while not mine and not self.pause(0.01):
                    mine = self.claim("bulk", 5, 10.0, name)
                held += mine
                self.pause(self.chance.choice([0.1, 0.3, 0.5, 7.0]))
                end = time.monotonic()
                presence.execute("rollback")
                self.recorder.note("present", name, begin, end)
            self.pause(self.chance.random())
        if self.chance.random() < 0.7:
            self.complete(held)


class Operator(Client):
    """Cancels some of the latest tasks, retries dead letters, maintains and looks on."""

    def __init__(self, recorder: Recorder, dsn: str, seed: str, ids: deque[int]) -> None:
        super().__init__(recorder, dsn, seed)
        self._ids = ids

    def step(self) -> None:
        self.pause(0.2)
        for task_id in self.chance.sample(self._ids, min(3, len(self._ids))):
            self.cancel(task_id)
        query = """
            select id
              from pgsched.finished_tasks
             where status = 'failed' and queue = 'work'
             order by finished_at desc
             limit 10
        """
        for task_id in self.column(query):
            if self.chance.random() < 0.3:
                self.retry(task_id)
        self.recorder.call("maintain", {}, lambda _: self.column("select pgsched.maintain()::text"))
        self.column("select queue from pgsched.queue_stats()")


def start(clients: Sequence[Client], stop: Event) -> list[Thread]:
    threads = [Thread(target=client.run, args=[stop], daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    return threads


def main(folder: str, name: str, dsn: str, route: str, seed: str) -> None:
    """Four SQL workers in a process of their own, until it is told to end."""
    end_with_parent()
    recorder = Recorder(Path(folder), f"{name}.{os.getpid()}")
    pooled = route == "pooler"
    kinds = [SqlWorker, SqlWorker, LateWorker, SqlWorker if pooled else PresentWorker]
    clients = [
        kind(recorder, dsn, f"{seed} {name} {number}", pooled=pooled)
        for number, kind in enumerate(kinds)
    ]
    for thread in start(clients, Event()):
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
