"""The queues and workers of a database as tables, and the screen of ``pgsched top``."""

import os
import select
import signal
import sys
import termios
import time
import tty
from operator import itemgetter

import psycopg

from pgsched import calls
from pgsched.calls import Connection, Document
from pgsched.errors import PgschedError
from pgsched.handlers import spawn
from pgsched.text import age, count, explained, fit, plain, table

RATE_SECONDS = 10
"""Rates are averages over this time: a short one, since no more than 10,000 are counted."""

_EMPTY = {"paused": False, "queued": 0, "due": 0, "processing": 0, "failed": 0, "oldest_due_age": 0}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


def look(connection: Connection) -> Document:
    """All that is shown. A queue that works off all that comes has nothing but what ended."""
    ended = {row.pop("queue"): row for row in calls.recent_rates(connection, RATE_SECONDS)}
    queues = {name: {"queue": name} | _EMPTY for name in ended}
    server, rows = calls.database_stats(connection)
    queues |= {row["queue"]: row for row in rows}
    for name, row in queues.items():
        row["ended"] = ended.get(name, {"completed": 0, "failed": 0, "cancelled": 0})
    return {
        "schema": calls.schema_version(connection),
        "server": server,
        "queues": sorted(queues.values(), key=lambda row: (-row["due"], row["queue"])),
        "workers": calls.list_workers(connection),
    }


def queue_table(queues: list[Document], columns: int, *, rates: bool = False) -> list[str]:
    """A line for each queue."""
    header = ["queue", "queued", "due", "oldest due", "running", "failed"]
    rows = []
    for row in queues:
        name, mark = plain(row["queue"]), " (paused)" if row["paused"] else ""
        cells = [count(row[figure]) for figure in ("queued", "due", "processing", "failed")]
        cells.insert(2, age(row["oldest_due_age"]))
        if rates:
            cells += [f"{row['ended'][how] / RATE_SECONDS:.1f}" for how in ("completed", "failed")]
        rows.append([fit(name, max(columns - 61 - len(mark), 1)) + mark, *cells])
    return table(header + ["done/s", "fail/s"] * rates, rows, columns)


def lines(view: Document, columns: int, rows: int) -> list[str]:
    """The view as text. Where rows are few, half of them are for queues, if there are so many."""
    workers, running = [], 0
    for each in sorted(view["workers"], key=lambda each: (-each["running"], each["seen_age"])):
        name = f"{each['name']}  {', '.join(each['queues'])}"
        workers.append([name, str(each["running"]), str(each["slots"]), age(each["seen_age"])])
        running += each["running"]
    there, slots, oldest = itemgetter("workers", "slots", "oldest_snapshot_age")(view["server"])
    most = max(rows - len(workers) - 6, rows // 2)
    return [
        f"workers: {there}, slots: {slots}, running: {running}, oldest snapshot: {age(oldest)}",
        "",
        *queue_table(view["queues"][:most], columns, rates=True),
        "",
        *table(["worker", "running", "slots", "last seen"], workers, columns),
    ]


class _Feed:
    """Looks again and again: a server that does not answer holds up nobody but this thread."""

    def __init__(self, dsn: str, view: Document, pause: float) -> None:
        self._dsn, self._pause = dsn, pause
        self._view, self._seen_at, self._error = view, time.time(), ""

    def run(self) -> None:
        while True:
            time.sleep(self._pause)
            try:
                with calls.connect(self._dsn, application_name="pgsched top") as connection:
                    while True:
                        self._view = look(connection)
                        self._seen_at, self._error = time.time(), ""
                        time.sleep(self._pause)
            except (psycopg.Error, PgschedError) as error:
                self._error = explained(error)

    def frame(self, columns: int, rows: int) -> list[str]:
        """As much as there is room for."""
        seen = time.strftime("%H:%M:%S", time.localtime(self._seen_at))
        head = [f"pgsched top, schema {self._view['schema']}, {seen}, q quits"]
        if self._error or time.time() > self._seen_at + self._pause + 3:
            head = [f"NO ANSWER since {seen}, q quits", self._error]
        head += lines(self._view, columns, rows)
        return [fit(plain(line), columns) for line in head[:rows]]


def watch(dsn: str, view: Document, pause: float) -> None:
    """Show it on the terminal until somebody presses q or Ctrl-C; outages are shown, too."""
    feed, shown, keyboard = _Feed(dsn, view, pause), [""], sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tty.setraw(keyboard)  # Ctrl-C is a key, too: no signal comes between a change and its undo
        print(_ENTER, end="", flush=True)
        spawn(feed.run, "pgsched-top")
        keys = b" "
        while keys and not set(keys) & set(b"qQ\x03"):
            columns, rows = os.get_terminal_size(keyboard)
            if (frame := feed.frame(columns or 80, rows or 24)) != shown:
                print("\x1b[H", "\x1b[K\r\n".join(frame), "\x1b[J", sep="", end="", flush=True)
                shown = frame
            keys = os.read(keyboard, 100) if select.select([keyboard], [], [], 0.2)[0] else b" "
    except KeyboardInterrupt:
        pass
    finally:
        print(_LEAVE, end="", flush=True)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
