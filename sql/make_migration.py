"""Write the functions that changed in sql/schema/ into the newest migration; see `make migration`.

A migration that SHA256SUMS lists is released, and frozen. In the one after these, what stands above
MARKER is written by hand, and what follows it by this program: the function files that are not as
the migrations before left them.
"""

import hashlib
import re
import sys
from pathlib import Path

SQL = Path(__file__).parent
MIGRATIONS = SQL / "migrations"
MARKER = "-- Functions, as in sql/schema/functions/: make migration writes what follows.\n"
CREATE = re.compile(r"^create (?:or replace )?(function|procedure) (pgsched\.\w+)", re.MULTILINE)


def frozen() -> dict[str, str]:
    """The digest of each released migration, by file name."""
    lines = (MIGRATIONS / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def changed(earlier: list[str]) -> list[str]:
    """The function files whose newest text in these migrations is another, or none."""
    texts = [CREATE.sub(r"create \1 \2", text) for text in earlier]
    files = []
    contents = (SQL / "schema" / "schema.sql").read_text()
    for name in re.findall(r"^\\ir (functions/.*)", contents, re.MULTILINE):
        file = (SQL / "schema" / name).read_text()
        first = CREATE.search(file)
        assert first, f"no function in {name}"
        newest = next((text for text in reversed(texts) if f"{first[0]}(" in text), "")
        if file not in newest:
            files.append(file)
    return files


def main(*, check: bool) -> None:
    released = frozen()
    for name, digest in released.items():
        if hashlib.sha256((MIGRATIONS / name).read_bytes()).hexdigest() != digest:
            sys.exit(f"sql/migrations/{name} is released: it must not change")
    files = sorted(MIGRATIONS.glob("*.sql"))
    newest = files[-1]
    if newest.name in released:
        if changed([path.read_text() for path in files]):
            sys.exit(
                f"sql/schema/ has changed since {newest.name} was released: begin the next"
                f" migration, with its first two comments and the line {MARKER.strip()!r}"
            )
        return
    text = newest.read_text()
    head, marker, _ = text.partition(MARKER)
    functions = [
        CREATE.sub(r"create or replace \1 \2", function)
        for function in changed([path.read_text() for path in files[:-1]])
    ]
    assert marker or not functions, f"{newest.name} lacks the line {MARKER.strip()!r}"
    made = "\n".join([head + marker, *functions])
    if made == text:
        return
    if check:
        sys.exit(f"sql/migrations/{newest.name} is not as sql/schema/: run make migration")
    newest.write_text(made)


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
