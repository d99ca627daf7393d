"""What the clients of a run did and heard: one file of JSON lines for each process.

A call has a line when it begins and one when it ends: `ok` with its result; `fail`, when it surely
did not happen; `unknown`, when it may have. One that has no end, because its process was killed, is
unknown, too. Each line is one write(): SIGKILL costs at most a torn last line. Times are those of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Op:
    """A call. `name` is unique in a run; `end` is inf when none was recorded.

    What an unknown call does may happen long after its end.
    """

    name: str
    process: str
    call: str
    begin: float
    end: float
    status: str
    args: dict[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class Note:
    """Something else that happened, such as a handler's start."""

    process: str
    kind: str
    time: float
    data: list[Any]


class NotSent(psycopg.OperationalError):
    """There was no connection."""


class Recorder:
    """Writes the history of this process; any of its threads may use it."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        path = folder / f"{process}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._numbers = itertools.count()

    def close(self) -> None:
        os.close(self._file)

    def note(self, kind: str, *data: Any) -> None:
        """Record that this happened now."""
        self._write("note", kind, data)

    def call(
        self,
        call: str,
        args: dict[str, Any],
        function: Callable[[str], T],
        shown: Callable[[T], Any] = lambda result: result,
    ) -> T:
        """Record a call: the function, which is given its name, and the result as it is shown.

        What the function raises other than psycopg.Error it raises before a commit was sent.
        """
        number = next(self._numbers)
        self._write("call", number, call, args)
        try:
            result = function(f"{self.process}:{number}")
        except psycopg.Error as error:
            status = "fail" if surely_failed(error) else "unknown"
            self._write(status, number, f"{error.sqlstate}: {error}".strip())
            raise
        except Exception as error:
            self._write("fail", number, repr(error))
            raise
        self._write("ok", number, shown(result))
        return result

    def _write(self, *entry: Any) -> None:
        line = json.dumps([time.monotonic(), *entry], separators=(",", ":"))
        os.write(self._file, f"{line}\n".encode())


def surely_failed(error: psycopg.Error) -> bool:
    """Whether the server said that it rolled back; what breaks a session may follow a commit."""
    return isinstance(error, NotSent) or error.diag.severity_nonlocalized == "ERROR"


def read(folder: Path) -> Iterator[Op | Note]:
    """Everything that a run's processes recorded, file by file."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from _read(path)


def _read(path: Path) -> Iterator[Op | Note]:
    process = path.stem
    begun: dict[int, tuple[float, str, dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = None
            with suppress(ValueError):
                entry = json.loads(line)
            match entry:
                case None:
                    assert not line.endswith("\n"), f"{path}: {line}"
                case [moment, "note", kind, data]:
                    yield Note(process, kind, moment, data)
                case [begin, "call", number, call, args]:
                    begun[number] = begin, call, args
                case [end, status, number, result]:
                    begin, call, args = begun.pop(number)
                    yield Op(f"{process}:{number}", process, call, begin, end, status, args, result)
    for number, (begin, call, args) in begun.items():
        yield Op(f"{process}:{number}", process, call, begin, inf, "unknown", args, None)
