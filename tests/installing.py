"""Installers, and packages for them: the real one, and what another release could bring."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from workers import NEWEST

from pgsched.embedded import Server
from pgsched.migrate import MIGRATIONS

IDS = sorted(path.stem for path in MIGRATIONS.glob("*.sql"))
NEXT = f"{int(NEWEST) + 1:04}"
"""The number of the migration that a later release would bring."""

# The command line, with another folder of migrations.
_PROGRAM = """
import sys
from pathlib import Path
from pgsched import cli, migrate
migrate.MIGRATIONS = Path(sys.argv.pop(1))
cli.main()
"""


@contextmanager
def database(server: Server, name: str) -> Iterator[str]:
    """The URL of a new database with nothing in it, which is dropped afterwards."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        yield server.create_database(name)
        statement = sql.SQL("drop database {} with (force)")
        admin.execute(statement.format(sql.Identifier(name)))


def later_package(folder: Path, text: str) -> Path:
    """The folder of a release that has one migration more, NEXT.more."""
    shutil.copytree(MIGRATIONS, folder)
    (folder / f"{NEXT}.more.sql").write_text(f"-- More.\n-- depends: {IDS[-1]}\n{text}")
    return folder


def release(folder: Path) -> None:
    """List the folder's migrations as released."""
    lines = [
        f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("*.sql"))
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def installer(dsn: str, *options: str, folder: Path = MIGRATIONS) -> subprocess.Popen[str]:
    """`pgsched migrate` as a process, with pipes."""
    command = [sys.executable, "-c", _PROGRAM, str(folder), "migrate", "--dsn", dsn, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def yoyo(action: str, dsn: str, *options: str) -> None:
    """Run yoyo's own command on the package's migrations, as its documentation says."""
    url = dsn.replace("postgresql://", "postgresql+psycopg://") + "&schema=pgsched"
    command = [sys.executable, "-m", "yoyo", action, "--batch", "--no-config-file", *options]
    subprocess.run([*command, "--database", url, MIGRATIONS], check=True)


def marks(conn: psycopg.Connection) -> list[str]:
    """The applied migrations by yoyo's table."""
    rows = conn.execute("select migration_id from pgsched._yoyo_migration order by migration_id")
    return [migration_id for (migration_id,) in rows]


def log_rows(conn: psycopg.Connection) -> int:
    """How often yoyo's log says that something was applied."""
    [(rows,)] = conn.execute("select count(*) from pgsched._yoyo_log")
    assert isinstance(rows, int)
    return rows


def installers(conn: psycopg.Connection, state: str = "%") -> int:
    """How many sessions of installers are in this database, in this state."""
    [(sessions,)] = conn.execute(
        """
        select count(*) from pg_stat_activity
         where datname = current_database() and application_name = 'pgsched migrate'
           and state like %s
        """,
        [state],
    )
    assert isinstance(sessions, int)
    return sessions


def sources(dsn: str) -> dict[str, str]:
    """The digest of each function's body, by signature."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select oid::regprocedure::text, md5(prosrc) from pg_proc"
            " where pronamespace = 'pgsched'::regnamespace"
        )
        return dict(rows.fetchall())


def dump(server: Server, database: str) -> str:
    """The whole schema but yoyo's tables, without pg_dump's random words."""
    without = ["--exclude-table=pgsched._yoyo*", "--exclude-table=pgsched.yoyo_lock"]
    done = server.run(
        "pg_dump", "--schema-only", "-n", "pgsched", *without, database, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)


def waiting(conn: psycopg.Connection) -> int:
    """How many sessions of this database wait for a lock."""
    [(sessions,)] = conn.execute(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = %s",
        [conn.info.dbname],
    )
    assert isinstance(sessions, int)
    return sessions
