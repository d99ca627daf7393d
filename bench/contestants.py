"""Who takes part in the scene drain: pgsched, bare loops, and peers; how each is filled and run."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from subprocess import PIPE, Popen
from urllib.parse import urlencode

import psycopg
from designs import DESIGNS
from measuring import Server, execute
from psycopg.conninfo import conninfo_to_dict

from pgsched.migrate import migrate

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv" / "peers"
PATIENCE = 60.0
"""Seconds that a worker may take to start, and adding tasks."""


class LeftOut(Exception):
    """A contestant does not get there; says why."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Workers of one kind in one setting.

    ``tasks``: as many as keep one worker busy for about two seconds.
    ``left``: the query that counts the tasks which are not finished for good.
    ``fill``: makes what is needed in an empty database, and so many tasks.
    ``command``: of a worker process, by the URL of its database.
    ``optional``: the run goes on when it does not get there.
    """

    name: str
    tasks: int
    left: str
    fill: Callable[[str, int], None]
    command: Callable[[str], list[str]]
    optional: bool = False


# pgsched, and the yardstick


def ours(design: str, *, tell: bool = False) -> Contestant:
    """A worker with its defaults; the design says whether completed tasks are kept."""
    options = ["--tell"] if tell else []
    return _designed(design, design, 40_000, python("drain_worker.py"), options)


def loop(name: str, design: str, batch: int, *, tell: bool = False) -> Contestant:
    """A bare loop over the yardstick B or D."""
    options = [design, str(batch), *(["--tell"] if tell else [])]
    return _designed(name, design, 150_000, python("loop_worker.py"), options)


def _designed(
    name: str, design: str, tasks: int, command: list[str], options: list[str]
) -> Contestant:
    made = DESIGNS[design]

    def fill(dsn: str, tasks: int) -> None:
        if made.pgsched:
            migrate(dsn)
        execute(dsn, *made.prepare(tasks))

    return Contestant(name, tasks, made.unfinished, fill, lambda dsn: [*command, dsn, *options])


def python(script: str) -> list[str]:
    """The command for a script beside this one."""
    return [sys.executable, str(HERE / script)]


# Peers


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, its adapter, and how many tasks are about two seconds' work for one worker."""

    name: str
    package: str
    adapter: str
    left: str
    default: int
    best: int


KNOWN = (
    Peer(
        *("graphile-worker", "graphile-worker", "graphile_peer.mjs"),
        "select count(*) from graphile_worker._private_jobs",
        *(4_000, 60_000),
    ),
    Peer(
        *("pg-boss", "pg-boss", "pgboss_peer.mjs"),
        "select count(*) from pgboss.job where name = 'noop' and state < 'completed'",
        *(20, 50_000),
    ),
    Peer(
        *("PgQueuer", "pgqueuer", "pgqueuer_peer.py"),
        "select count(*) from pgqueuer",
        *(8_000, 20_000),
    ),
    Peer(
        *("Procrastinate", "procrastinate", "procrastinate_peer.py"),
        "select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
        *(800, 1_000),
    ),
    Peer(
        *("awa-pg", "awa-pg", "awa_peer.py"),
        # The view of its jobs says the same, and takes seconds.
        """
        select (select count(*) from awa.ready_entries) - (select count(*) from awa.done_entries)
               - (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)
        """,
        *(2_000, 15_000),
    ),
)


def versions(folder: Path) -> dict[str, str]:
    """The versions of the peers' packages that are installed there."""
    site = [str(path) for path in folder.glob("python/lib/python3*/site-packages")]
    found = {each.name.lower(): each.version for each in distributions(path=site)}
    for manifest in folder.glob("node/node_modules/*/package.json"):
        package = json.loads(manifest.read_text())
        found[package["name"]] = package["version"]
    return found


def peers(folder: Path = PEERS) -> Iterator[Contestant]:
    """Each peer that is installed, in its default and in its best setting; names the others."""
    installed = versions(folder)
    for peer in KNOWN:
        if peer.package not in installed:
            print(f"{peer.name} is left out: not installed", file=sys.stderr)
            continue
        for setting, tasks in (("default", peer.default), ("best", peer.best)):
            yield _contestant(peer, setting, tasks, installed[peer.package], folder)


def _contestant(peer: Peer, setting: str, tasks: int, version: str, folder: Path) -> Contestant:
    runs = "python/bin/python" if peer.adapter.endswith(".py") else "node/bin/node"
    command = [str(folder / runs), str(HERE / "peers" / peer.adapter)]

    def fill(dsn: str, tasks: int) -> None:
        run = [*command, _url(dsn), "fill", str(tasks)]
        try:
            subprocess.run(
                run, env=_environment(folder), stderr=PIPE, text=True, timeout=PATIENCE, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise LeftOut(f"{error}\n{str(error.stderr)[-1000:]}") from None

    def work(dsn: str) -> list[str]:
        return [*command, _url(dsn), "work", setting]

    name = f"{peer.name} {version}, {setting}"
    return Contestant(name, tasks, peer.left, fill, work, optional=True)


def _url(dsn: str) -> str:
    """A URL that all drivers read: not each knows one with a user and without a host."""
    parts = conninfo_to_dict(dsn)
    return f"postgresql:///{parts.pop('dbname')}?{urlencode(parts)}"


def _environment(folder: Path = PEERS) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE), "NODE_PEERS": str(folder / "node")}


# Worker processes


def filled(server: Server, contestant: Contestant) -> AbstractContextManager[str]:
    """The URL of a fresh database with its tasks; LeftOut when they cannot be added."""

    def fill(dsn: str) -> None:
        contestant.fill(dsn, contestant.tasks)

    return server.copy(server.template(contestant, fill))


@contextmanager
def ready(contestant: Contestant, dsn: str, processes: int) -> Iterator[list[Popen[bytes]]]:
    """So many workers, which wait for their start, and are killed in the end."""
    started: list[Popen[bytes]] = []
    with tempfile.TemporaryFile() as errors:
        try:
            started.extend(
                Popen(
                    contestant.command(dsn),
                    env=_environment(),
                    bufsize=0,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=errors,
                )
                for _ in range(processes)
            )
            for worker in started:
                if line(worker) != b"READY\n":
                    raise LeftOut("a worker does not start")
            yield started
        except LeftOut as error:
            errors.seek(0)
            raise LeftOut(f"{error}\n{errors.read().decode(errors='replace')[-1000:]}") from None
        finally:
            for worker in started:
                with worker:
                    worker.kill()


def line(worker: Popen[bytes]) -> bytes:
    """The next line that it writes; empty when none comes."""
    assert worker.stdout
    heard, _, _ = select.select([worker.stdout], [], [], PATIENCE)
    return worker.stdout.readline() if heard else b""


def go(workers: Sequence[Popen[bytes]]) -> float:
    """Start them; return the time."""
    for worker in workers:
        assert worker.stdin
        with suppress(BrokenPipeError):  # it has ended, as will be noticed
            worker.stdin.write(b"\n")
    return time.monotonic()


def remaining(
    conn: psycopg.Connection,
    contestant: Contestant,
    workers: Sequence[Popen[bytes]],
    seconds: float,
) -> Iterator[int]:
    """How many tasks are left, time and again: until none is, or those seconds are over.

    Raises LeftOut when a worker ends before, or nothing is done by then.
    """
    begin = time.monotonic()
    left, over = contestant.tasks, False
    while left and not over:
        [(counted,)] = conn.execute(contestant.left.encode())
        left = int(counted)
        done = contestant.tasks - left
        passed = time.monotonic() - begin
        over = passed > seconds
        ended = any(worker.poll() is not None for worker in workers)
        if left and (ended or (over and not done)):
            raise LeftOut(f"{left} of {contestant.tasks} tasks are left after {passed:.0f} s")
        yield left
        # Seldom while much is left: counting costs the server something, too.
        time.sleep(min(max(passed * left / max(1, done) / 2, 0.005), 0.5 if done else 0.1))
