"""Tells the database how claims ended, in a thread and over a connection of its own."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from queue import SimpleQueue
from typing import Any

import psycopg

from pgsched import calls
from pgsched.calls import Answer, Connection, Outcome, Report
from pgsched.handlers import error_text, spawn
from pgsched.metrics import Record, Timed

BATCH = 100
"""Most tasks of one claim, completion or reap: bounds how long each transaction is."""

REFUSED = ("22", "23", "54", "P0", "TS")
"""Classes of SQLSTATE that say no to one outcome for good: bad data, a constraint, a limit."""
USELESS = ("08", "25", "57P")
"""Classes of SQLSTATE that a new connection may cure: it is broken, or its server read-only."""
NOTHING_GOES = ("08", "25", "40", "42", "53", "57P", "58")
"""Classes of SQLSTATE that say no to whatever is asked now; any other is about what was asked."""

log = logging.getLogger("pgsched")


class Reporter:
    """Reports while the loop claims, since a commit waits for the disk, and an answer for the
    server. ``heard`` is called with the Report of each call of ``tell``, in the thread."""

    def __init__(self, dsn: str, name: str, flush: Record, heard: Callable[[Report], None]) -> None:
        self._dsn, self._name, self._flush, self._heard = dsn, name, flush, heard
        self._work: SimpleQueue[Sequence[Outcome]] = SimpleQueue()
        spawn(self._run, "pgsched-reporter")

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Report these; with none, it ends."""
        self._work.put(outcomes)

    def _run(self) -> None:
        outcomes, name = self._work.get(), f"pgsched {self._name} reporter"
        while outcomes:
            answers: list[tuple[Outcome, Answer]] = []
            try:
                with calls.connect(self._dsn, application_name=name) as connection:
                    while outcomes:
                        answers = []
                        for kind in ("completed", "failed", "released"):
                            for batch in batches([each for each in outcomes if each.kind == kind]):
                                answers += zip(batch, self._send(connection, batch), strict=True)
                        self._heard((answers, None))
                        outcomes = self._work.get()
            except Exception as error:
                self._heard((answers, error))
                outcomes = self._work.get()

    def _send(self, connection: Connection, batch: Sequence[Outcome]) -> Sequence[Answer]:
        """What became of each; an outcome that is refused alone is found by halving the batch."""
        try:
            with Timed(self._flush):
                return calls.tell(connection, batch)
        except psycopg.Error as error:
            if connection.closed or is_of(error, NOTHING_GOES):
                raise
            if half := len(batch) // 2:
                halves = (self._send(connection, part) for part in (batch[:half], batch[half:]))
                return list(chain.from_iterable(halves))
            [outcome] = batch
            if is_of(error, REFUSED):
                return [_simpler(outcome, error)]
            log.warning("not accepted: task=%d error=%r", outcome.claim.id, first_line(error))
            return ["refused"]


def _simpler(outcome: Outcome, refusal: psycopg.Error) -> Answer:
    """What says less, when the database refused what was said; nothing less: the claim is gone."""
    error = outcome.error
    if outcome.kind == "completed":
        # A result that jsonb cannot hold: a NUL, too deep.
        error = f"result refused: {error_text(refusal)}"
    elif outcome.delay is not None:
        error = f"delay {outcome.delay} refused: {error_text(refusal)}"
    elif not error.isascii():
        # Not every database's encoding has every character.
        error = error.encode("ascii", "backslashreplace").decode()
    else:
        log.error("left to its lease: task=%d error=%r", outcome.claim.id, error_text(refusal))
        return "gone"
    return replace(outcome, kind="failed", result=None, error=error, delay=None)


def first_line(error: BaseException) -> str:
    """Of its text: an error of the server has several."""
    return error_text(error).partition("\n")[0]


def is_of(error: psycopg.Error, classes: tuple[str, ...]) -> bool:
    """Whether its SQLSTATE is of one of them; without one, the connection broke."""
    return (error.sqlstate or "08").startswith(classes)


def batches(items: Sequence[Any]) -> Iterator[Any]:
    """All of them, so many at a time as one statement takes."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
