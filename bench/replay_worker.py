"""A worker process of replay.py: sleeps as each job's payload says, and keeps records of its own.

Its options come as a line of JSON on stdin; when stdin ends, and replay.py with it, so does this.
A record is a line of JSON, appended by one write: what was written outlives the process.
"""

import asyncio
import itertools
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from pgsched import Task, Worker
from pgsched.calls import connect

ASKS = 100
"""How often the server is asked for its time: the quickest answer counts."""


class Records:
    """Appends records to a file, with the time by the server's clock, in seconds since 1970."""

    def __init__(self, path: Path, dsn: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count(1)
        with connect(dsn, application_name="pgsched replay") as conn:
            answers = []
            for _ in range(ASKS):
                asked = time.time()
                [(answer,)] = conn.execute("select date_part('epoch', clock_timestamp())")
                answers.append((time.time() - asked, answer - asked))
        # Read between question and answer, so the sum is never earlier than the server's time: what
        # looks early is early. time.time(), for it is the server's own clock on the same machine.
        self.uncertainty, self._ahead = min(answers)
        self._append(event="ready", uncertainty=self.uncertainty)

    def start(self, task: Task) -> int:
        """The number of this execution."""
        at = time.time() + self._ahead
        number = next(self._numbers)
        job = task.payload["job"]
        self._append(
            event="start", execution=number, task=task.id, job=job, attempt=task.attempt, at=at
        )
        return number

    def end(self, number: int) -> None:
        self._append(event="end", execution=number, at=time.time() + self._ahead)

    def _append(self, **record: Any) -> None:
        os.write(self._file, json.dumps(record).encode() + b"\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """What was recorded so far."""
    # The last line may be about to be written.
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # nothing is read ahead
        options = json.loads(stdin.readline())
    records = Records(Path(options.pop("records")), options["dsn"])
    worker = Worker(**options)

    @worker.task("job")
    async def job(task: Task) -> None:
        number = records.start(task)
        await asyncio.sleep(task.payload["sleep"])
        records.end(number)

    def follow() -> None:
        os.read(0, 1)
        worker.stop()

    threading.Thread(target=follow, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
