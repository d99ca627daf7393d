"""awa-pg, a core in Rust: at its best with four claimers, larger batches and more workers, which
its documents have for hot queues."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from awa import AsyncClient
from peer import CONCURRENCY, Peer, main


@dataclass
class Noop:
    i: int


async def noop(job: object) -> None:
    pass


class Awa(Peer):
    async def fill(self, steps: Iterator[range]) -> None:
        client = AsyncClient(self.dsn)
        await client.migrate()
        await client.install_queue_storage()
        for step in steps:
            await client.enqueue_many_copy([Noop(i) for i in step], queue="q")

    async def work(self, best: bool) -> None:
        client = AsyncClient(self.dsn)
        client.task(Noop, queue="q")(noop)
        hot = {"name": "q", "max_workers": 256, "claimers": 4, "claim_batch_size": 512}
        await client.start([hot] if best else [("q", CONCURRENCY)])
        await asyncio.Event().wait()


main(Awa)
