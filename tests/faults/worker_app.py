"""A worker under test: its calls of pgsched, and the runs of its handlers, are recorded."""

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from history import Recorder

from pgsched import Fail, Retry, Snooze, Task, Worker, calls, enqueue, loop
from pgsched.calls import Claim, Connection, Outcome
from pgsched.transactions import Transactions

QUEUES = ["bulk", "work", "tx"]


def end_with_parent() -> None:
    """Not to outlive the run, however that ends."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def record_calls(recorder: Recorder) -> None:
    """Let everything that a worker of this process asks of the database be recorded."""

    def record(
        function: str,
        call: str,
        args: Callable[..., dict[str, Any]],
        shown: Callable[..., Any] = lambda result, *_: result,
    ) -> None:
        real = getattr(calls, function)

        def recorded(conn: Connection, *rest: Any) -> Any:
            return recorder.call(
                call, args(*rest), lambda _: real(conn, *rest), lambda result: shown(result, *rest)
            )

        setattr(calls, function, recorded)

    def held(claims: Sequence[Claim], **more: Any) -> dict[str, Any]:
        tokens = [UUID(claim.token).hex for claim in claims]
        return {"ids": [claim.id for claim in claims], "tokens": tokens, **more}

    def told(batch: Sequence[Outcome]) -> dict[str, Any]:
        return held([each.claim for each in batch])

    def delays(batch: Sequence[Outcome]) -> list[float | None]:
        return [None if each.delay is None else each.delay.total_seconds() for each in batch]

    def claimed(
        claims: Sequence[Claim], worker: str, queue: str, lease: timedelta, limit: int
    ) -> list[list[Any]]:
        return [
            [
                *(claim.id, UUID(claim.token).hex, claim.attempt, claim.max_attempts),
                *(due, due + claim.waited + lease.total_seconds()),
            ]
            for claim, due in ((claim, claim.run_at.timestamp()) for claim in claims)
        ]

    record(
        "claim_task",
        "claim",
        lambda worker, queue, lease, _: {
            "worker": worker,
            "queue": queue,
            "lease": lease.total_seconds(),
        },
        claimed,
    )
    record(
        "extend_tasks", "extend", lambda claims, lease: held(claims, lease=lease.total_seconds())
    )
    record("complete_tasks", "complete", told)
    record(
        "fail_tasks",
        "fail",
        lambda batch: {
            **told(batch),
            "delays": delays(batch),
            "permanent": [each.permanent for each in batch],
        },
    )
    record("release_tasks", "release", lambda batch: {**told(batch), "delays": delays(batch)})
    record("reap_stale", "reap", lambda _: {})
    record(
        "register_worker",
        "register",
        lambda worker, _, __, presence: {"worker": worker, "presence": presence},
    )
    transact = Transactions.run

    def run(self: Transactions, claim: Claim, work: Callable[[Connection], str | None]) -> None:
        recorder.call(
            "transact",
            held([claim]),
            lambda _: transact(self, claim, work),
            lambda _: ["completed"],
        )

    Transactions.run = run  # type: ignore[method-assign]


def add_handlers(worker: Worker, recorder: Recorder, chance: random.Random) -> None:
    """One of each kind; most tasks are `noop`."""

    def start(task: Task) -> None:
        recorder.note("start", task.id)

    def repeat(task: Task, error: Exception) -> Exception:
        recorder.note("failure", task.id)
        return error

    @worker.task("noop")
    def noop(task: Task) -> None:
        start(task)

    @worker.task("plain")
    def plain(task: Task) -> dict[str, Any]:
        start(task)
        time.sleep(chance.random() / 50)
        return {"attempt": task.attempt, "payload": task.payload}

    @worker.task("coroutine", timeout=1)
    async def coroutine(task: Task) -> int:
        start(task)
        if chance.random() < 0.02:
            recorder.note("failure", task.id)
            await asyncio.sleep(30)
        await asyncio.sleep(chance.random() / 20)
        return task.id

    @worker.task("flaky")
    def flaky(task: Task) -> None:
        start(task)
        if chance.random() < 0.5:
            raise repeat(task, ValueError("as it may be"))

    @worker.task("again")
    def again(task: Task) -> None:
        start(task)
        if chance.random() < 0.5:
            raise repeat(task, Retry(timedelta(seconds=chance.random() / 2)))

    @worker.task("snooze")
    async def snooze(task: Task) -> None:
        start(task)
        if chance.random() < 0.5:
            raise repeat(task, Snooze(timedelta(seconds=chance.random() / 2)))

    @worker.task("hopeless")
    def hopeless(task: Task) -> None:
        start(task)
        raise repeat(task, Fail("as always"))

    @worker.task("slow")
    def slow(task: Task) -> None:
        """Outlives its first lease."""
        start(task)
        task.cancelled.wait(1.5 * worker.lease)

    @worker.task("greedy")
    def greedy(task: Task) -> None:
        """Keeps the whole process from extending any lease for a second or more."""
        start(task)
        sum(range(60_000_000))

    @worker.task("pay")
    def pay(task: Task, conn: psycopg.Connection[Any]) -> None:
        start(task)
        conn.execute("insert into effects (task_id) values (%s)", [task.id])
        enqueue(conn, "noop", {"tag": f"after:{task.id}"}, queue="bulk")
        time.sleep(chance.random() / 50)
        if chance.random() < 0.1:
            raise repeat(task, ValueError("nothing of this is to stay"))


def main(folder: str, name: str, dsn: str, lease: str, seed: str) -> None:
    end_with_parent()
    loop.REAP_SECONDS = 0.5
    recorder = Recorder(Path(folder), f"{name}.{os.getpid()}")
    record_calls(recorder)
    worker = Worker(dsn, queues=QUEUES, lease=float(lease), poll_interval=0.2, grace=2)
    add_handlers(worker, recorder, random.Random(f"{seed} {name}"))
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
