"""A new major version of PostgreSQL under a database that is in use."""

import subprocess
from pathlib import Path

import psycopg
import pytest
from test_upgrades import FILL, contents
from workers import REAP

from pgsched import enqueue
from pgsched.embedded import Server, find_binaries
from pgsched.migrate import migrate

ROOT = Path(__file__).parent.parent

ROUTINES = """
select oid::regprocedure::text, prosrc, proacl, proconfig, obj_description(oid, 'pg_proc')
  from pg_proc
 where pronamespace = 'pgsched'::regnamespace
 order by 1
"""


def major(programs: Path) -> int:
    shown = subprocess.run([programs / "postgres", "-V"], capture_output=True, check=True)
    return int(shown.stdout.split()[2].partition(b".")[0])


def older_programs() -> Path | None:
    """Those of the oldest PostgreSQL here, if it is older than what the tests use."""
    folders = [*ROOT.glob(".venv/postgresql/*/bin"), *Path("/usr/lib/postgresql").glob("*/bin")]
    oldest = min(filter(lambda each: (each / "pg_upgrade").exists(), folders), key=major)
    return oldest if major(oldest) < major(find_binaries()) else None


@pytest.mark.long
def test_pg_upgrade_carries_everything_over(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = older_programs()
    if programs is None:
        pytest.skip("no older PostgreSQL here")
    with monkeypatch.context() as patch:
        patch.setenv("PGSCHED_PG_BIN", str(programs))
        old = Server()
    with old:
        migrate(old.dsn())
        with psycopg.connect(old.dsn(), autocommit=True) as conn:
            conn.execute(FILL)
            conn.execute("create role by_hand")
            conn.execute("grant execute on all routines in schema pgsched to by_hand")
            rows, routines = contents(conn), conn.execute(ROUTINES).fetchall()
        old.stop()
        new = Server()
        data, target = old.folder / "data", new.folder / "data"
        # PostgreSQL 18 has them by default; both clusters must agree.
        for program, *arguments in (
            ("pg_checksums", "--disable", "-D", target),
            ("pg_upgrade", "-b", old.bin_dir, "-B", new.bin_dir, "-d", data, "-D", target,
             "-U", "postgres", "-s", new.folder),
        ):  # fmt: skip
            command = [str(each) for each in (new.bin_dir / program, *arguments)]
            done = subprocess.run(command, cwd=new.folder, check=False, **new._user)
        assert done.returncode == 0
    with new:
        assert migrate(new.dsn()) == []
        with psycopg.connect(new.dsn(), autocommit=True) as conn:
            assert contents(conn) == rows
            assert conn.execute(ROUTINES).fetchall() == routines
            claim = "select pgsched.complete_task(id, claim_token) from pgsched.tasks"
            assert conn.execute(f"{claim} where queue = 'claimed'").fetchall() == [(True,)]
            assert len(conn.execute(REAP).fetchall()) == 1
            ids = [task_id for (task_id,) in conn.execute("select id from pgsched.tasks")]
            assert enqueue(conn, "type") > max(ids)
            # This a dump leaves out.
            found = "select finding from pgsched.diagnose() where check_name = 'public'"
            [(finding,)] = conn.execute(found)
            assert "row types" in finding
