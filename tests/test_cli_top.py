"""pgsched top, on a terminal: a pseudo-terminal, to which it writes and which sends it keys."""

import fcntl
import os
import pty
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import psycopg
import pytest
from command_line import process
from workers import NEWEST, PATIENCE, install, quick, running, wait_until

from pgsched import Task, enqueue
from pgsched.embedded import Server
from pgsched.text import width


class Terminal:
    """A terminal with `pgsched top` on it."""

    def __init__(self, dsn: str, columns: int, rows: int) -> None:
        self._keyboard, self._terminal = pty.openpty()
        self.resize(columns, rows)
        self.before = self.settings()
        self._written = b""
        Thread(target=self._read, daemon=True).start()
        options: dict[str, Any] = {
            "stdin": self._terminal,
            "stdout": self._terminal,
            "stderr": self._terminal,
        }
        # What a shell has exported of another terminal does not count.
        options["env"] = {"COLUMNS": "7", "LINES": "7"}
        self.process = process("top", "--interval", "0.1", "--dsn", dsn, **options)

    def _read(self) -> None:
        with suppress(OSError):
            while some := os.read(self._keyboard, 10_000):
                self._written = (self._written + some)[-100_000:]

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    @property
    def written(self) -> str:
        """The end of what it wrote."""
        return self._written.decode(errors="ignore")

    @property
    def frame(self) -> list[str]:
        """The lines of what was written last, when it is complete."""
        frames = self.written.split("\x1b[H")
        complete = [frame for frame in frames if frame.endswith("\x1b[J")]
        return complete[-1].removesuffix("\x1b[J").split("\x1b[K\r\n") if complete else []

    def shows(self, text: str) -> bool:
        return any(text in line for line in self.frame)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._keyboard)


Top = Callable[..., Terminal]


@pytest.fixture
def top() -> Iterator[Top]:
    """Open terminals; closed afterwards."""
    terminals: list[Terminal] = []

    def top(dsn: str, columns: int = 80, rows: int = 24) -> Terminal:
        terminals.append(Terminal(dsn, columns, rows))
        return terminals[-1]

    yield top
    for terminal in terminals:
        terminal.close()


@contextmanager
def working(dsn: str) -> Iterator[None]:
    """A worker of queue mail, that never runs out of tasks."""
    worker = quick(dsn, queues=["mail"], concurrency=3)

    @worker.task("again")
    def again(task: Task, conn: psycopg.Connection[Any]) -> None:
        enqueue(conn, "again", queue="mail")

    with running(worker):
        yield


def test_it_shows_queues_and_workers_as_they_change(
    top: Top, dsn: str, conn: psycopg.Connection
) -> None:
    enqueue(conn, "type", queue="reports")
    terminal = top(dsn)
    wait_until(lambda: terminal.shows("reports       1    1"))
    assert terminal.frame[1] == "workers: 0, slots: 0, running: 0, oldest snapshot: -"
    assert terminal.frame[0].startswith(f"pgsched top, schema {NEWEST}, ")
    enqueue(conn, "again", queue="mail")
    with working(dsn):
        wait_until(lambda: terminal.shows("workers: 1, slots: 3, "))
        # What ends is counted, though hardly ever is a task seen.
        wait_until(
            lambda: any(
                line.startswith("mail ") and float(line.split()[-2]) > 0 for line in terminal.frame
            )
        )
        [(name,)] = conn.execute("select name from pgsched.workers").fetchall()
        wait_until(lambda: terminal.shows(f"{name}  mail"))
    conn.execute("select pgsched.pause_queue('reports')")
    wait_until(lambda: terminal.shows("reports (paused)"))


@pytest.mark.parametrize(
    "how", ["q", "Q", "\x03", signal.SIGINT, signal.SIGTERM], ids=lambda how: repr(how)
)
def test_it_ends_and_leaves_the_terminal_as_it_was(
    top: Top, dsn: str, how: str | signal.Signals
) -> None:
    terminal = top(dsn)
    wait_until(lambda: terminal.frame)
    assert terminal.settings() != terminal.before
    if isinstance(how, str):
        terminal.press(how)
    else:
        terminal.process.send_signal(how)
    assert terminal.process.wait(PATIENCE) == 0
    assert terminal.settings() == terminal.before
    # The other screen, without cursor and line ends, is left.
    wait_until(lambda: terminal.written.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l"))
    assert "Traceback" not in terminal.written


def test_other_keys_do_nothing(top: Top, dsn: str, conn: psycopg.Connection) -> None:
    terminal = top(dsn)
    wait_until(lambda: terminal.frame)
    terminal.press("x \x1a\x1c\r\x1b[A")
    enqueue(conn, "type", queue="after")
    wait_until(lambda: terminal.shows("after"))
    assert terminal.process.poll() is None


def test_it_fits_whatever_the_names_are(top: Top, dsn: str, conn: psycopg.Connection) -> None:
    names = [63 * "q", 21 * "\u5e83", "\x20\u202etxt", 15 * "\U0001f418", "e\u0301" * 21]
    for name in [*names, *(f"queue {number}" for number in range(30))]:
        enqueue(conn, "type", queue=name)
    conn.execute("select pgsched.pause_queue(queue) from pgsched.tasks")
    conn.execute("select pgsched.register_worker(%s, %s, 7)", [63 * "w", names])
    terminal = top(dsn)
    for columns, rows in ((80, 24), (60, 50), (30, 5)):
        terminal.resize(columns, rows)
        wait_until(lambda rows=rows: len(terminal.frame) == min(rows, 42))  # type: ignore[misc]
        frame = terminal.frame
        assert [line for line in frame if width(line) > columns] == []
        assert "".join(frame).isprintable()
        # Many queues leave room for workers.
        assert rows < 24 or any(line.startswith("www") for line in frame)
    terminal.resize(80, 60)
    wait_until(lambda: len(terminal.frame) == 42)
    [queue] = [line for line in terminal.frame if line.startswith("qq")]
    assert queue.split()[:3] == [f"{9 * 'q'}\u2026", "(paused)", "1"]
    assert width(queue) == width(terminal.frame[3])
    terminal.resize(0, 0)  # as a serial line has it
    wait_until(lambda: len(terminal.frame) == 24)


def test_it_outlives_a_restart_of_the_server(top: Top) -> None:
    with Server(settings={"fsync": "off"}) as server:
        dsn = server.create_database("app")
        install(server, dsn)
        terminal = top(dsn)
        wait_until(lambda: terminal.shows("pgsched top"))
        server.stop("immediate")
        wait_until(lambda: terminal.shows("NO ANSWER since "))
        wait_until(lambda: terminal.frame[1].startswith("connection"))
        assert terminal.process.poll() is None
        server.start()
        with psycopg.connect(dsn, autocommit=True) as conn:
            enqueue(conn, "type", queue="afterwards")
        wait_until(lambda: terminal.shows("afterwards"))
        assert terminal.frame[0].startswith("pgsched top")
        terminal.press("q")
        assert terminal.process.wait(PATIENCE) == 0
        assert terminal.settings() == terminal.before


def test_a_server_that_does_not_answer_keeps_nobody_from_leaving(
    top: Top, dsn: str, conn: psycopg.Connection
) -> None:
    terminal = top(dsn)
    wait_until(lambda: terminal.shows("pgsched top"))
    with conn.transaction():
        conn.execute("lock table pgsched.workers in access exclusive mode")
        wait_until(lambda: terminal.shows("NO ANSWER since "))
        terminal.press("q")
        assert terminal.process.wait(PATIENCE) == 0


def test_what_is_wrong_at_the_start_is_said_on_the_usual_screen(top: Top, server: Server) -> None:
    terminal = top(server.dsn("nowhere"))
    assert terminal.process.wait(PATIENCE) == 1
    wait_until(lambda: terminal.written.endswith("\r\n"))
    [line] = terminal.written.splitlines()
    assert line.startswith("Error: ")
    assert "\x1b" not in line
