"""Procrastinate: one call to fetch and one to finish each job. At its best with concurrency; its
default is one job at a time."""

from collections.abc import Iterator

from peer import CONCURRENCY, Peer, main
from procrastinate import App, PsycopgConnector


async def noop(i: int) -> None:
    pass


class Procrastinate(Peer):
    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.app = App(connector=PsycopgConnector(conninfo=dsn))
        self.noop = self.app.task(name="noop")(noop)

    async def fill(self, steps: Iterator[range]) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()
            for step in steps:
                await self.noop.batch_defer_async(*({"i": i} for i in step))

    async def work(self, best: bool) -> None:
        async with self.app.open_async():
            concurrency = CONCURRENCY if best else 1
            await self.app.run_worker_async(concurrency=concurrency, install_signal_handlers=False)


main(Procrastinate)
