"""Install or upgrade schema ``pgsched``, with yoyo's files, order and bookkeeping tables.

Each migration and its mark are one transaction, under an advisory lock that ends with it: a killed
installer leaves nothing behind, any number may run at once, and a transaction-mode pooler will do.
"""

import glob
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from yoyo import default_migration_table, read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.internalmigrations import upgrade
from yoyo.migrations import Migration, topological_sort

from pgsched.calls import connect

MIGRATIONS = Path(__file__).with_name("migrations")
"""The folder of numbered migrations; ``yoyo apply`` reads the same one."""

MIGRATION_LOCK = (1338, 1)
"""Advisory lock of an installer: class 1338 belongs to singletons, 1 in it to migrations."""


class MigrationError(Exception):
    """The schema cannot be installed or upgraded as things are; the message says what to do."""


def migrate(dsn: str) -> list[str]:
    """Install schema ``pgsched`` in an existing database, or bring it up to date.

    Needs no superuser: CREATE on the database or, once the schema is there, to be its owner. Safe
    to repeat, and to run from many processes at once.

    Arguments:
        dsn: URL or keywords, as libpq takes them; empty means libpq's environment variables.

    Returns the ids of the migrations that this call applied, in order; empty when up to date.

    Raises MigrationError when a right is missing, when the schema is newer than this package, and
    when the package lacks its migrations. Raises psycopg.OperationalError when the server cannot be
    reached, and whatever psycopg.Error a migration meets; that migration is then undone, those
    before it stay.
    """
    # Escaped, since yoyo takes a pattern.
    migrations = list(topological_sort(read_migrations(glob.escape(str(MIGRATIONS)))))
    if not migrations:
        raise MigrationError(f"no migrations in {MIGRATIONS}: install pgsched again")
    applied = []
    with _Backend(dsn, default_migration_table) as backend:
        backend.check_rights()
        with backend.locked():
            backend.prepare(migrations)
            if unknown := backend.applied_ids() - {migration.id for migration in migrations}:
                raise MigrationError(
                    f"schema pgsched is newer than this package, which lacks"
                    f" {', '.join(sorted(unknown))}: upgrade pgsched"
                )
        for migration in migrations:
            with backend.locked():
                if migration.id not in backend.applied_ids():
                    backend.apply_and_mark(migration)
                    applied.append(migration.id)
    return applied


class _Backend(PostgresqlPsycopgBackend):  # type: ignore[misc]
    """yoyo's bookkeeping in schema pgsched, over a connection without session state."""

    connection: psycopg.Connection[tuple[Any, ...]]

    def connect(self, dburi: str) -> psycopg.Connection[tuple[Any, ...]]:
        connection = connect(dburi, application_name="pgsched migrate")
        # A stricter default would see the database as it was before the wait for the lock.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def check_rights(self) -> None:
        [(user, database, allowed)] = self.connection.execute(
            """
            select current_user, current_database(),
                   coalesce((select pg_has_role(n.nspowner, 'usage')
                               from pg_namespace as n
                              where n.nspname = 'pgsched'),
                            has_database_privilege(current_database(), 'create'))
            """
        )
        if not allowed:
            raise MigrationError(
                f'role "{user}" may not install or upgrade schema pgsched in database "{database}":'
                " run as the owner of the schema or, where there is none yet, first"
                f' grant create on database "{database}" to "{user}"'
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A transaction that no other installer's runs beside."""
        with self.transaction():
            self.connection.execute("set local search_path to pgsched, pg_temp")
            self.connection.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
            yield

    def prepare(self, migrations: Sequence[Migration]) -> None:
        """Create the schema and yoyo's tables in it, as far as they are missing.

        A schema that psql installed is taken over: the migrations up to its version are marked.
        """
        # Not "if not exists", which asks for CREATE on the database of an owner who upgrades.
        [(schema,)] = self.connection.execute("select to_regnamespace('pgsched')::text")
        if schema is None:
            self.connection.execute("create schema pgsched")
        tables = self.list_tables()
        upgrade(self)
        if "scheduled_tasks" in tables and self.migration_table not in tables:
            [(version,)] = self.connection.execute("select pgsched.schema_version()")
            for migration in migrations:
                if migration.id.partition(".")[0] <= version:
                    self.mark_one(migration)

    def applied_ids(self) -> set[str]:
        rows = self.connection.execute("select migration_id from pgsched._yoyo_migration")
        return {migration_id for (migration_id,) in rows}

    def apply_and_mark(self, migration: Migration) -> None:
        # The file as it is, in one message: nothing splits it and "%" has no meaning.
        self.connection.execute(Path(migration.path).read_bytes())
        self.log_migration(migration, "apply")
        self.mark_one(migration, log=False)

    # What follows replaces yoyo's own, where it is called by the bookkeeping used above.

    def transaction(
        self, rollback_on_exit: bool = False
    ) -> AbstractContextManager[psycopg.Transaction]:
        return self.connection.transaction(force_rollback=rollback_on_exit)

    def ensure_internal_schema_updated(self) -> None:
        """Done by prepare(), under the lock."""

    def list_tables(self, **kwargs: Any) -> list[str]:
        # yoyo's own needs a URL of yoyo's kind.
        rows = self.connection.execute(
            "select tablename from pg_tables where schemaname = 'pgsched'"
        )
        return [name for (name,) in rows]

    def get_log_data(
        self, migration: Migration | None = None, operation: str = "apply"
    ) -> dict[str, Any]:
        # The database's user: a container's uid may have no name. No getfqdn(), which asks DNS.
        return {
            "id": str(uuid.uuid1()),
            "migration_id": migration.id if migration else None,
            "migration_hash": migration.hash if migration else None,
            "username": self.connection.info.user,
            "hostname": socket.gethostname(),
            "created_at_utc": datetime.now(UTC).replace(tzinfo=None),
            "operation": operation,
        }
