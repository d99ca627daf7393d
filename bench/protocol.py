"""How a benchmark drives worker processes, whoever's they are.

A worker says READY when everything is imported and nothing is connected yet, and begins at the next
line on stdin: what an interpreter needs to start is not measured. When stdin ends, and the
benchmark with it, so does the worker.
"""

import os
import sys
import threading
import time
from collections.abc import Callable


def wait_for_start() -> None:
    """Return when the benchmark says so."""
    print("READY", flush=True)
    os.read(0, 1)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    while os.read(0, 100):
        pass
    os._exit(0)


def handler(tell: bool) -> Callable[[int], None]:
    """What to do with the task of a number: nothing, or tell when that was, as a line on stdout."""
    return _tell if tell else _nothing


def _nothing(number: int) -> None:
    pass


def _tell(number: int) -> None:
    os.write(sys.stdout.fileno(), f"{number} {time.monotonic()}\n".encode())
