"""Rules over the files: each test lists what breaks its rule. Rules over the catalog: pgtap/."""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgsched
from pgsched import calls

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "sql" / "schema"
FUNCTIONS = sorted((SCHEMA / "functions").glob("*.sql"))
PACKAGE = sorted((ROOT / "pgsched").glob("*.py"))
# What a worker or a producer runs: not what installs and removes, the private server and its demo.
DRIVER = [path for path in PACKAGE if path.stem not in ("migrate", "schema", "embedded", "demo")]

MAX_LINES = 2_500
"""Of code, without the private server and the demo."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MAX_NAMES = 12


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def files() -> list[Path]:
    """Every text that somebody wrote, not what tools made."""
    made = {"__pycache__", "build", "dist", ".venv", ".git"}
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = parts[0].startswith(".") and parts[0] not in (".ci", ".gitignore")
        if path.is_file() and not hidden and not made.intersection(parts):
            found.append(path)
    return found


def code(path: Path) -> str:
    """SQL without what stands in comments and strings; the bodies of functions stay."""
    return re.sub(r"--[^\n]*|'(?:[^']|'')*'", "''", read(path))


def created(path: Path) -> list[str]:
    """The functions and procedures of a file of the schema."""
    return re.findall(r"^create (?:function|procedure) pgsched\.(\w+)\(", read(path), re.MULTILINE)


def arguments(function: str) -> set[str]:
    """The names of a public function's arguments."""
    text = read(SCHEMA / "functions" / f"{function}.sql")
    head = text[text.index(f" pgsched.{function}(") :].partition("$$")[0]
    return set(re.findall(r"\b(p_\w+) \w", head))


PUBLIC = {name for path in FUNCTIONS for name in created(path) if not name.startswith("_")}


def test_there_is_something_to_look_at() -> None:
    assert len(PUBLIC) > 10
    assert len(DRIVER) > 5
    assert {ROOT / "Makefile", ROOT / ".ci" / "run", Path(__file__)} < set(files())


# SQL


def test_the_contents_page_lists_every_file_once() -> None:
    listed = re.findall(r"^\\ir (\S+)$", read(SCHEMA / "schema.sql"), re.MULTILINE)
    there = [str(path.relative_to(SCHEMA)) for path in SCHEMA.rglob("*.sql")]
    there.remove("schema.sql")
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_a_file_has_the_function_that_it_is_named_for_or_private_ones(path: Path) -> None:
    public = [name for name in created(path) if not name.startswith("_")]
    assert public in ([path.stem], [])
    assert created(path)
    # Nothing escapes the pattern above: another case, another schema, "or replace".
    assert len(re.findall(r"(?i)\bcreate\b", code(path))) == len(created(path))


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_each_function_has_its_comment_and_its_revoke_by_name_alone(path: Path) -> None:
    # With an argument list both would succeed beside an overload that was left behind.
    text = read(path)
    comments = re.findall(
        r"^comment on (?:function|procedure) pgsched\.(\w+) is\n  '\w", text, re.MULTILINE
    )
    revokes = re.findall(
        r"^revoke all on (?:function|procedure) pgsched\.(\w+) from public;$", text, re.MULTILINE
    )
    assert comments == revokes == created(path)


def test_each_public_function_has_a_pgtap_file() -> None:
    assert PUBLIC - {path.stem for path in (ROOT / "pgtap").glob("*.sql")} == set()


@pytest.mark.parametrize("path", sorted(SCHEMA.rglob("*.sql")), ids=lambda path: path.stem)
def test_sql_is_in_lower_case_and_its_lines_end_at_100(path: Path) -> None:
    assert re.findall(r"\b[A-Z]{2,}\b", code(path)) == []
    assert [line for line in read(path).splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_locals_start_with_v(path: Path) -> None:
    for block in re.findall(r"^declare$(.*?)^begin$", code(path), re.MULTILINE | re.DOTALL):
        assert re.findall(r"^  (?!v_)\w+", block, re.MULTILINE) == []


# Python


def code_lines(text: str) -> int:
    """Lines that hold code: not blank ones, comments and docstrings."""
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docs)


def test_lines_of_code_are_counted() -> None:
    text = '"""Two\nlines."""\n\n# comment\nx = (  # 3\n    """a\n\n\n"""\n)\n"""x"""\n'
    assert code_lines(text) == 6


def test_the_driver_stays_thin() -> None:
    driver = [path for path in PACKAGE if path.stem not in ("embedded", "demo")]
    assert 2_000 < sum(code_lines(read(path)) for path in driver) <= MAX_LINES


def test_the_public_names_are_few_and_sorted() -> None:
    assert pgsched.__all__ == sorted(set(pgsched.__all__))
    assert len(pgsched.__all__) <= MAX_NAMES


@pytest.mark.parametrize("name", pgsched.__all__)
def test_each_public_name_and_its_methods_say_what_they_do(name: str) -> None:
    thing = getattr(pgsched, name)
    # Its own words: neither inherited nor the signature that a dataclass makes up.
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}(")
    methods = {
        method: function
        for method, function in vars(thing).items()
        if inspect.isfunction(function) and not method.startswith("_")
    }
    assert [method for method, function in methods.items() if not function.__doc__] == []


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.stem)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert path.stem == "__main__" or ast.get_docstring(ast.parse(read(path)))


def test_who_only_enqueues_imports_no_more_than_psycopg() -> None:
    program = "import pgsched, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", program]
    imported = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "psycopg" in imported
    assert {"click", "prometheus_client", "yoyo"}.intersection(imported) == set()


# About the session alone: no table and no function of the schema.
SESSION_CONTROL = {
    calls.RIGHTS,  # what this role may call, by the catalog: perhaps nothing
    "begin isolation level read committed read only",
    "select set_config('statement_timeout', '3s', true)",
    "select pg_backend_pid()",
    "listen {}",
    "reset role",
    "discard all",
}


def executed(path: Path) -> Iterator[str]:
    """The first argument of each call that sends SQL, without what controls the session."""
    for node in ast.walk(ast.parse(read(path))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("execute", "executemany", "stream", "copy")
        ):
            match node.args[0]:
                case ast.Constant(value=str(text)):
                    pass
                case statement:
                    text = ast.unparse(statement)
            if text not in SESSION_CONTROL:
                yield text


def statements(path: Path) -> list[str]:
    """All SQL of a module, wherever it stands in the code, without what controls the session."""
    tree = ast.parse(read(path))
    docs = [id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    values = [str(text.value) for text in texts if id(text) not in docs]
    sql = re.compile(
        r"\s*(select|with|call|begin|insert|update|delete|set|reset|discard|listen) "
        r"|.*\bpgsched\.\w+\("
    )
    # The call itself comes as an argument.
    return [
        value
        for value in values
        if sql.match(value) and value not in {*SESSION_CONTROL, "select o.outcome from "}
    ]


STATEMENTS = statements(ROOT / "pgsched" / "calls.py")


def test_sql_stands_in_one_module_only() -> None:
    assert len(STATEMENTS) > 25
    assert [path.name for path in DRIVER for _ in executed(path) if path.stem != "calls"] == []


def called(statement: str) -> dict[str, list[str]]:
    """The functions that a statement calls, each with its arguments as they are written."""
    found = {}
    for match in re.finditer(r"\bpgsched\.(\w+)\(", statement):
        depth, texts = 1, [""]
        for letter in statement[match.end() :]:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                break
            if letter == "," and depth == 1:
                texts.append("")
            else:
                texts[-1] += letter
        found[match[1]] = [text.strip() for text in texts if text.strip()]
    return found


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: "+".join(called(statement)))
def test_a_statement_calls_functions_with_named_arguments_and_columns(statement: str) -> None:
    functions = called(statement)
    assert re.findall(r"\bpgsched\.\w+", statement) == [f"pgsched.{name}" for name in functions]
    assert set() < set(functions) <= PUBLIC
    for function, given in functions.items():
        assert [text for text in given if not re.match(r"p_\w+ => ", text)] == []
        assert {text.partition(" ")[0] for text in given} <= arguments(function)
    assert re.findall(r"(?:from|join|into|update)\s+(?!pgsched\.)(\S+)", statement) == []
    assert "*" not in statement


# All files


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_clean_text(path: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    allowed = "\n\t" if path.suffix == ".sh" or path.name == "Makefile" else "\n"
    # Not printable are also no-break spaces, zero widths and changes of direction.
    odd = {letter for letter in text if not letter.isprintable() and letter not in allowed}
    assert odd == set()
    assert unicodedata.is_normalized("NFC", text)
    assert [line for line in text.split("\n") if line != line.rstrip()] == []
    assert text == "" or (text.endswith("\n") and not text.endswith("\n\n"))
    assert re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", text) == []
