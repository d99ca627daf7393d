"""A private PgBouncer in transaction mode, in front of a private server."""

import os
import pwd
import subprocess
from pathlib import Path
from typing import Self

import psycopg
from workers import wait_until

from pgsched.embedded import Server

PROGRAM = Path(__file__).parent.parent / ".venv" / "pgbouncer" / "pgbouncer"

POOL_SIZE = 2
"""Sessions of a database, which all clients share; transactions get each in turn."""

_PORT = "6432"

# A server that was away is tried again after a second, not after 15.
_SETTINGS = f"""
[databases]
* = host=%s port=5432 user=postgres
[pgbouncer]
unix_socket_dir = %s
listen_port = {_PORT}
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 1000
server_round_robin = 1
server_login_retry = 1
"""

# Ends it when the other end of the pipe is gone: with kill(), or with our process.
_GUARD = '"$@" & cat; kill -KILL $!; wait'


class PgBouncer:
    """Runs it on a socket in the server's folder, as the server's user; a context manager."""

    def __init__(self, server: Server, pool_size: int = POOL_SIZE) -> None:
        self._server = server
        self._pool_size = pool_size
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it lets a client in, and the client into the server."""
        assert PROGRAM.exists(), "no PgBouncer: make test-pgbouncer fetches one"
        folder = self._server.folder
        settings = folder / "pgbouncer.ini"
        settings.write_text(_SETTINGS % (folder, folder, self._pool_size), encoding="utf-8")
        # Root's it takes itself, after it has found its program and libraries.
        user = ["-u", pwd.getpwuid(folder.stat().st_uid).pw_name] if os.geteuid() == 0 else []
        with (folder / "pgbouncer.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "pgsched-guard", PROGRAM, *user, settings],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._is_ready)

    def kill(self) -> None:
        """As a crash: all its connections break at once."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def dsn(self, dbname: str) -> str:
        """The URL of a database of the server, through the pooler."""
        return self._server.dsn(dbname).replace("port=5432", f"port={_PORT}")

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True
