"""A worker process of scene_cost.py: no-op tasks, and after each 10,000 a line on stdout.

The line says how many it has handled and its resident memory in MB; the first line, that it is
about to run. The URL of the database is its argument. It ends with its stdin.
"""

import os
import sys
import threading
from itertools import count
from pathlib import Path

from pgsched import Task, Worker

EVERY = 10_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> float:
    """MB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6


def main() -> None:
    worker = Worker(sys.argv[1])
    numbers = count(1)

    @worker.task("noop")
    def noop(task: Task) -> None:
        if (number := next(numbers)) % EVERY == 0:
            print(number, resident(), flush=True)

    def follow() -> None:
        sys.stdin.read()
        worker.stop()

    threading.Thread(target=follow, daemon=True).start()
    print(0, resident(), flush=True)
    worker.run()


if __name__ == "__main__":
    main()
