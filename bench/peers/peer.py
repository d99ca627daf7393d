"""What the adapters of Python peers share.

python PEER.py DSN fill NUMBER           # install it in an empty database, and add tasks
python PEER.py DSN work default|best     # a worker process, as ../protocol.py says
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator

from protocol import wait_for_start

CONCURRENCY = 10
"""Tasks that a worker runs at once, where a peer wants to be told: what pgsched does."""

STEP = 1000


class Peer(ABC):
    """A peer, in a database of its own."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    @abstractmethod
    async def fill(self, steps: Iterator[range]) -> None:
        """Install it and add a task for each number of each step."""

    @abstractmethod
    async def work(self, best: bool) -> None:
        """Work until killed, with its defaults or the setting that its documents advise."""


def main(kind: type[Peer]) -> None:
    """The command line."""
    dsn, command, option = sys.argv[1:]
    peer = kind(dsn)
    if command == "fill":
        numbers = range(int(option))
        asyncio.run(peer.fill(numbers[at : at + STEP] for at in numbers[::STEP]))
    else:
        wait_for_start()
        asyncio.run(peer.work(option == "best"))
