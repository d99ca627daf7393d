"""A worker process of the scenes drain and latency: pgsched with its defaults.

    python drain_worker.py DSN [--tell]

The handler does nothing, or tells when it was entered.
"""

import sys

from protocol import handler, wait_for_start

import pgsched.loop  # noqa: F401  what run() would import
from pgsched import Task, Worker


def main() -> None:
    dsn, *options = sys.argv[1:]
    handle = handler("--tell" in options)
    worker = Worker(dsn)

    @worker.task("noop")
    def noop(task: Task) -> None:
        handle(task.payload["i"])

    wait_for_start()
    worker.run()


if __name__ == "__main__":
    main()
