"""A TCP proxy in front of a private server, which cuts, stalls and refuses connections when told.

It is a process of its own, so that it takes no time from the clients under test.
"""

import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:  # the process starts sooner without
    from pgsched.embedded import Server

Direction = Literal["to_server", "to_client"]
Point = Literal["request", "answer", "mid-answer"]

_ADDRESS = "127.0.0.1"
_LENGTH = struct.Struct("!I")


class Proxy:
    """Listens on a loopback port, the same one whenever it is started; a context manager.

    One cut is armed at a time. `statement` is a function of pgsched, or how a statement begins,
    such as `commit`; a client that executes what it prepared before names neither.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        # Bound without listening: nobody is given the port while the proxy is away.
        self._reserved = _reusable(0)
        self.port: int = self._reserved.getsockname()[1]

    def start(self) -> None:
        """Return when it lets clients in."""
        path = self._server.folder / ".s.PGSQL.5432"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.port), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._tell("listen")

    def kill(self) -> None:
        """As a crash: all its connections break at once."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None

    def close(self) -> None:
        """End it and give up the port."""
        self.kill()
        self._reserved.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """The URL of a database of the server, through the proxy."""
        direct, _, _ = self._server.dsn(dbname, user).partition("?")
        return direct.replace("@", f"@{_ADDRESS}:{self.port}")

    def cut_all(self) -> None:
        """Reset all connections."""
        self._tell("cut_all")

    @contextmanager
    def stalled(self, direction: Direction) -> Iterator[None]:
        """What is sent in this direction is held meanwhile, and so is the end of a connection."""
        self._tell("stall", direction)
        try:
            yield
        finally:
            self._tell("release", direction)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """New connections are refused meanwhile."""
        self._tell("refuse")
        try:
            yield
        finally:
            self._tell("listen")

    def arm(self, point: Point, statement: str) -> None:
        """Reset the connection over which such a statement comes next.

        `request`: before the server hears of it. `answer`: the server has answered it, without an
        error, and so has committed it, unless in a transaction; the client gets nothing of that.
        `mid-answer`: the client gets half of the answer.
        """
        self._tell("arm", point, statement)

    def wait_for_cut(self, seconds: float) -> bool:
        """Disarm, as soon as the connection was cut or after so long; return whether it was."""
        deadline = time.monotonic() + seconds
        while self._tell("is_armed") and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(self._tell("disarm"))

    def _tell(self, *command: str) -> Any:
        with self._lock:
            assert self._process
            assert self._process.stdin
            assert self._process.stdout
            print(json.dumps(command), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())


def _reusable(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((_ADDRESS, port))
    return bound


# The process


@dataclass(frozen=True, eq=False)
class Trap:
    """What cuts a connection; armed while it is the relay's."""

    point: Point
    statement: re.Pattern[bytes]


class Relay:
    """Obeys the commands: its public methods, by name."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path
        self._listening: asyncio.Server | None = None
        self.ends: set[End] = set()
        self.stalled: set[str] = set()
        self.trap: Trap | None = None
        self.has_cut = False
        self.connecting: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        bound = _reusable(self._port)
        self._listening = await loop.create_server(lambda: ClientEnd(self), sock=bound, backlog=512)

    async def refuse(self) -> None:
        assert self._listening
        self._listening.close()

    async def cut_all(self) -> None:
        for end in self.ends:
            end.reset()

    async def stall(self, direction: str) -> None:
        self.stalled.add(direction)
        for end in self.ends:
            end.read_unless_stalled()

    async def release(self, direction: str) -> None:
        self.stalled.remove(direction)
        for end in self.ends:
            end.read_unless_stalled()

    async def arm(self, point: Point, statement: str) -> None:
        name = re.escape(statement).encode()
        self.trap = Trap(point, re.compile(rb"(?is)\s*%b\b|.*\bpgsched\.%b\b" % (name, name)))
        self.has_cut = False

    async def is_armed(self) -> bool:
        return self.trap is not None

    async def disarm(self) -> bool:
        self.trap = None
        return self.has_cut

    def spring(self) -> None:
        self.trap = None
        self.has_cut = True

    async def connect(self, client: "ClientEnd") -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: ServerEnd(self, client), self._path)
        except OSError:
            client.reset()


class End(asyncio.Protocol):
    """One of the two connections that make one; passes on what it receives to the other."""

    direction: Direction
    transport: asyncio.Transport
    other: "End | None" = None

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.relay.ends.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.relay.ends.discard(self)
        if self.other is not None:
            self.other.transport.close()

    def read_unless_stalled(self) -> None:
        if self.other is None or self.direction in self.relay.stalled:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def reset(self) -> None:
        if self not in self.relay.ends:
            return
        linger = struct.pack("ii", 1, 0)
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def take(self) -> tuple[bytes, list[int]]:
        """The whole messages among what was received, and where each begins."""
        received, begins, end = self.received, [], 0
        while len(received) >= end + 5:
            after = end + 1 + _LENGTH.unpack_from(received, end + 1)[0]
            if len(received) < after:
                break
            begins.append(end)
            end = after
        whole = bytes(received[:end])
        del received[:end]
        return whole, begins


class ClientEnd(End):
    direction = "to_server"
    other: "ServerEnd | None" = None
    started = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.read_unless_stalled()
        task = asyncio.create_task(self.relay.connect(self))
        self.relay.connecting.add(task)
        task.add_done_callback(self.relay.connecting.discard)

    def data_received(self, data: bytes) -> None:
        assert self.other
        self.received += data
        first = b"" if self.started else self.start()
        if not self.started:
            return
        whole, begins = self.take()
        if trap := self.relay.trap:
            for begin in begins:
                if trap.statement.match(_statement(whole, begin)):
                    if trap.point == "request":
                        self.relay.spring()
                        self.reset()
                        return
                    self.other.trap = trap
        self.other.transport.write(first + whole)

    def start(self) -> bytes:
        """The first message, which has no type, once it is whole; says no to encryption."""
        while len(self.received) >= 8:
            size, code = struct.unpack_from("!II", self.received)
            if code in (80877103, 80877104):  # SSLRequest, GSSENCRequest
                self.transport.write(b"N")
            elif len(self.received) >= size:
                self.started = True
            else:
                break
            first = bytes(self.received[:size])
            del self.received[:size]
            if self.started:
                return first
        return b""


class ServerEnd(End):
    direction = "to_client"
    other: ClientEnd

    def __init__(self, relay: Relay, client: ClientEnd) -> None:
        super().__init__(relay)
        self.other = client
        self.trap: Trap | None = None
        self.answer = bytearray()
        self.has_failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.other.transport.is_closing():
            self.transport.close()
        self.other.other = self
        for end in (self, self.other):
            end.read_unless_stalled()

    def data_received(self, data: bytes) -> None:
        self.received += data
        whole, begins = self.take()
        self.answer += whole
        if self.trap is not None:
            types = {whole[begin] for begin in begins}
            self.has_failed |= ord("E") in types
            if ord("Z") not in types:  # ReadyForQuery
                return
            if self.trap is self.relay.trap and not self.has_failed:
                self.relay.spring()
                if self.trap.point == "mid-answer":
                    self.other.transport.write(self.answer[: len(self.answer) // 2])
                self.other.reset()
                return
            self.trap, self.has_failed = None, False
        self.other.transport.write(bytes(self.answer))
        self.answer.clear()


def _statement(messages: bytes, begin: int) -> bytes:
    """The text of a Query or a Parse message that begins here, up to its zero byte."""
    text = begin + 5
    if messages[begin] == ord("P"):
        text = messages.index(0, text) + 1
    elif messages[begin] != ord("Q"):
        return b""
    return messages[text : messages.index(0, text)]


async def _main(port: str, path: str) -> None:
    relay = Relay(int(port), path)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while line := await commands.readline():
        command, *arguments = json.loads(line)
        print(json.dumps(await getattr(relay, command)(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
