"""What commands print takes no orders from what is stored, fits its columns, and may be cut off."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from command_line import pgsched, process
from oracle import Connect
from workers import PATIENCE, wait_until

from pgsched import enqueue
from pgsched.text import age, fit, plain, width

# It clears the screen, names the window, turns the direction, goes back, hides; and C1's form.
ATTACK = "a\x1b[2J\x1b]0;title\x07b\u202ec\rd\u200be\x9b31mf\ud7ff\x7f"
# What a name may hold of that.
NAME = "a\u202ec\u200be\u2066\u00adf"


def is_harmless(output: str) -> bool:
    return all(line.isprintable() for line in output.splitlines()) and "\r" not in output


def test_names_and_errors_give_no_orders_to_the_terminal(
    dsn: str, conn: psycopg.Connection
) -> None:
    bad = {"payload": {"text": ATTACK, ATTACK: 1}, "queue": NAME}
    task_id = enqueue(conn, NAME, unique_key=NAME, max_attempts=1, **bad)  # type: ignore[arg-type]
    conn.execute(
        """
        select pgsched.fail_task(id, claim_token, %(error)s)
          from pgsched.claim_task(%(name)s, %(name)s)
        """,
        {"error": ATTACK.replace("\x00", ""), "name": NAME},
    )
    enqueue(conn, "type", queue=NAME)
    conn.execute("update pgsched.scheduled_tasks set run_at = run_at - interval '1 hour'")
    conn.execute("select pgsched.register_worker(%s, array[%s], 1)", [f"w{NAME}", NAME])
    conn.execute("select set_config('application_name', %s, false)", [NAME])
    for command in (
        ["status"],
        ["top"],
        ["doctor"],
        ["show", str(task_id)],
        ["pause", NAME],
        ["resume", NAME],
        ["retry", str(task_id)],
        ["enqueue", ATTACK],
        ["pause", ATTACK],
    ):
        for options in ([], ["--json"]):
            result = pgsched(*command, "--dsn", dsn, *options)
            assert is_harmless(result.output), command
            if command[0] in ("status", "top", "doctor", "show"):
                assert "u202e" in result.output


@pytest.mark.parametrize(
    "sign", [chr(code) for code in (*range(32), 127, *range(128, 161))], ids=ascii
)
def test_control_characters_are_escaped(sign: str) -> None:
    escaped = plain(f"a{sign}b")
    assert escaped.startswith("a\\")
    assert escaped.isprintable()


def test_columns_stay_in_line_with_wide_and_combining_signs(
    dsn: str, conn: psycopg.Connection
) -> None:
    names = ["mail", "\u5e83\u5e83", "\U0001f418", "e\u0301e\u0301", "\u0939\u093f", NAME]
    for name in names:
        enqueue(conn, "type", queue=name)
    _, header, *lines = pgsched("status", "--dsn", dsn).stdout.splitlines()
    assert {width(line) for line in lines} == {width(header)}


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("", 0, ""),
        ("abc", 3, "abc"),
        ("abcd", 3, "ab\u2026"),
        ("\u5e83\u5e83", 4, "\u5e83\u5e83"),
        ("\u5e83\u5e83", 3, "\u5e83\u2026"),
        ("\u5e83\u5e83\u5e83", 4, "\u5e83\u2026"),
        ("e\u0301e\u0301", 2, "e\u0301e\u0301"),
    ],
)
def test_what_is_too_wide_is_cut(text: str, columns: int, expected: str) -> None:
    assert fit(text, columns) == expected
    assert width(expected) <= columns


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "-"),
        (0.04, "0.0 s"),
        (119.9, "119.9 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (172_799, "47 h"),
        (timedelta(days=400).total_seconds(), "400 d"),
    ],
)
def test_an_age_is_told_in_one_unit(seconds: float, expected: str) -> None:
    assert age(seconds) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_a_name_that_the_terminal_cannot_show_is_no_reason_to_fail(
    encoding: str, dsn: str, conn: psycopg.Connection
) -> None:
    enqueue(conn, "type", queue="\u5e83")
    shown = process("status", "--dsn", dsn, env={"PYTHONIOENCODING": encoding})
    output, errors = shown.communicate()
    assert (shown.returncode, errors) == (0, "")
    assert "\\u5e83" in output


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["top"], ["show", "1", "--json"]])
def test_nobody_reads_the_output(command: list[str], dsn: str, conn: psycopg.Connection) -> None:
    enqueue(conn, "type", {"long": 100_000 * "x"})
    reader, writer = os.pipe()
    os.close(reader)
    cut_off = process(*command, "--dsn", dsn, stdout=writer)
    os.close(writer)
    _, errors = cut_off.communicate()
    assert (cut_off.returncode, errors) == (1, "")


def test_a_shell_may_close_the_output(dsn: str) -> None:
    done = process(
        "status", "--dsn", dsn, stdout=None, close_fds=True, preexec_fn=lambda: os.close(1)
    )
    _, errors = done.communicate()
    assert (done.returncode, errors) == (0, "")


def test_ctrl_c_while_the_server_keeps_one_waiting(dsn: str, connect: Connect) -> None:
    holder, looker = connect(), connect()
    task_id = enqueue(holder, "type")
    with holder.transaction():
        holder.execute("select from pgsched.scheduled_tasks for update")
        waiting = process("cancel", str(task_id), "--dsn", dsn)
        wait_until(
            lambda: looker.execute(
                "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
                " and datname = current_database() and application_name = 'pgsched'"
            ).fetchall()
        )
        waiting.send_signal(signal.SIGINT)
        output, errors = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, output) == (1, "")
    assert errors.strip() == "Aborted!"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    program = Path(sys.executable).with_name("pgsched")
    asked = {**os.environ, "_PGSCHED_COMPLETE": f"{shell}_source"}
    script = subprocess.run([program], env=asked, capture_output=True, text=True, check=True)
    assert f"_PGSCHED_COMPLETE={shell}_complete" in script.stdout
    line = {"COMP_WORDS": "pgsched ret", "COMP_CWORD": "ret" if shell == "fish" else "1"}
    asked |= {"_PGSCHED_COMPLETE": f"{shell}_complete", **line}
    answer = subprocess.run([program], env=asked, capture_output=True, text=True, check=True)
    assert "retry" in answer.stdout
