"""PgQueuer on asyncpg: at its best with larger batches and a pool, as its performance guide says;
its default is batches of 10."""

from collections.abc import Iterator

import asyncpg
from peer import Peer, main
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


async def noop(job: Job) -> None:
    pass


class PgQueuerPeer(Peer):
    async def fill(self, steps: Iterator[range]) -> None:
        queries = Queries(AsyncpgDriver(await asyncpg.connect(self.dsn)))
        await queries.install()
        for step in steps:
            await queries.enqueue(["noop"] * len(step), [b"%d" % i for i in step], [0] * len(step))

    async def work(self, best: bool) -> None:
        if best:
            pool = await asyncpg.create_pool(self.dsn, min_size=5, max_size=20)
            queuer = PgQueuer(AsyncpgPoolDriver(pool))
        else:
            queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.dsn)))
        queuer.entrypoint("noop")(noop)
        await (queuer.run(batch_size=100) if best else queuer.run())


main(PgQueuerPeer)
