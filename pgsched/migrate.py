"""Install or upgrade schema ``pgsched``, with yoyo's files, order and bookkeeping tables.

Each migration and its mark are one transaction, under an advisory lock that ends with it: a killed
installer leaves nothing behind, any number may run at once, and a transaction-mode pooler will do.
What cannot be had within a moment is tried again later, with nothing in hand meanwhile.
"""

import glob
import socket
import time
from hashlib import sha256
from pathlib import Path
from random import uniform
from typing import Any

import psycopg
from psycopg import errors
from yoyo import default_migration_table, read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.internalmigrations import upgrade
from yoyo.migrations import Migration

from pgsched.calls import connect

MIGRATIONS = Path(__file__).with_name("migrations")
"""The folder of numbered migrations; ``yoyo apply`` reads the same one."""

OLDEST = 14
"""PostgreSQL's oldest major version that will do."""

MIGRATION_LOCK = (1338, 1)
"""Advisory lock of an installer: class 1338 belongs to singletons, 1 in it to migrations."""

INSTALLER_PATIENCE = 600.0
"""Seconds for which other installers are waited for."""

# With the rights of the owner, so without what others may have planted, in schema pgsched too.
_ALONE = "set local search_path to pg_catalog, pg_temp"

# Who makes what is made: the owner of the tables or, where there are none, of the schema or, where
# there is none, the role itself. A superuser would run that owner's code with all rights, whatever
# role it has set, so only the schema of a superuser is for superusers.
_OWNER = """
select coalesce(o.rolname, current_user), n.oid is not null, s.rolsuper,
       case when o.oid is null and not has_database_privilege(current_database(), 'create')
            then format('role %1$I may not create schema pgsched in database %2$I: first'
                        ' grant create on database %2$I to %1$I',
                        current_user, current_database())
            when c.relowner <> n.nspowner
            then format('schema pgsched belongs to %I, and what is in it to %I: first'
                        ' alter schema pgsched owner to %2$I',
                        pg_get_userbyid(n.nspowner), o.rolname)
            when s.rolsuper > o.rolsuper or not pg_has_role(o.oid, 'member')
            then format('role %I may not change schema pgsched in database %I:'
                        ' run as its owner, %I%s', session_user, current_database(), o.rolname,
                        case when s.rolsuper then ', whose code no superuser is to run' end)
       end
  from pg_roles as s
       left join pg_namespace as n on n.nspname = 'pgsched'
       left join pg_class as c on c.relnamespace = n.oid and c.relname = 'scheduled_tasks'
       left join pg_roles as o on o.oid = coalesce(c.relowner, n.nspowner)
 where s.rolname = session_user
"""

# With the digest of the file, where it is known; the last row of a migration counts.
_MARKS = """
select m.migration_id, substring(l.comment from '^sha256 (.*)')
  from pgsched._yoyo_migration as m
       left join pgsched._yoyo_log as l
       on l.migration_hash = m.migration_hash and l.operation in ('apply', 'mark')
 order by l.created_at_utc
"""

# A dump without data has the table without its row.
_VERSION = """
insert into pgsched._yoyo_version
select 2, clock_timestamp() at time zone 'utc'
 where not exists (select from pgsched._yoyo_version)
"""

_PRIVATE = """
revoke all on type pgsched._yoyo_log, pgsched._yoyo_migration, pgsched._yoyo_version from public
"""

# Of others, on tables of the schema or as an installer; the oldest first.
_LOCKS = """
select format('%%s is held by %%s', coalesce(l.mode || ' on ' || c.relname, 'the installer lock'),
              concat_ws(', ', coalesce('session ' || l.pid, 'a prepared transaction'),
                        quote_literal(coalesce(nullif(a.application_name, ''), a.backend_type)),
                        a.state, date_trunc('second', clock_timestamp() - a.xact_start)))
  from pg_locks as l
       left join pg_stat_activity as a on a.pid = l.pid
       left join pg_class as c on c.oid = l.relation and c.relkind = 'r'
 where l.granted and l.pid is distinct from pg_backend_pid()
   and l.database = (select d.oid from pg_database as d where d.datname = current_database())
   and (c.relnamespace = to_regnamespace('pgsched')
        or (l.locktype, l.classid, l.objid) = ('advisory', %s, %s))
 order by a.xact_start, l.pid, c.relname, l.mode
"""

Migrations = list[Migration]


class MigrationError(Exception):
    """The schema cannot be installed or upgraded as things are; the message says what to do."""


class NotAllowed(MigrationError):
    """The role may not install or upgrade the schema."""


class SchemaNewer(MigrationError):
    """The schema has migrations that this package does not know yet."""


class WaitedTooLong(MigrationError):
    """Others kept the locks that a migration needs, or another installer did not end."""


class NotAsReleased(MigrationError):
    """This package's migrations are not those that were released, or that were applied."""


class UnknownMigration(MigrationError):
    """There is no migration with this number or id."""


EXIT_CODES: dict[type[Exception], int] = {
    UnknownMigration: 2,
    psycopg.OperationalError: 3,
    errors.IdleInTransactionSessionTimeout: 3,
    errors.TransactionTimeout: 3,
    NotAllowed: 4,
    errors.ReadOnlySqlTransaction: 5,
    SchemaNewer: 6,
    WaitedTooLong: 7,
    NotAsReleased: 8,
}
"""Of ``pgsched migrate``; 1 for all others."""


class _OtherInstaller(Exception):
    """Another installer is at work."""


# Somebody has what is needed; has changed, at this moment, the same rights; has just uninstalled.
_MEANWHILE = (
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.InternalError_,
    errors.UndefinedTable,
)


def migrate(
    dsn: str, *, to: str | None = None, dry_run: bool = False, lock_timeout: float = 10.0
) -> list[str]:
    """Install schema ``pgsched`` in an existing database, or bring it up to date.

    Needs no superuser: CREATE on the database or, once the schema is there, to be its owner or a
    member of that role. Safe to repeat, and to run from many processes at once.

    Arguments:
        dsn: URL or keywords, as libpq takes them; empty means libpq's environment variables.
        to: number or id of the last migration to apply; None: all. Nothing is ever taken back.
        dry_run: apply nothing; a role that may see what is applied will do.
        lock_timeout: how long to try to get the locks of a migration, in seconds. A single try
            waits for 0.1 s a lock, so that nobody waits behind it for longer.

    Returns the ids of the migrations that this call applied, or would apply, in order; empty when
    up to date.

    Raises MigrationError: NotAllowed, SchemaNewer, WaitedTooLong, NotAsReleased, UnknownMigration;
    itself when the server is too old and when there is a schema of this name that is none of
    pgsched. Raises psycopg.OperationalError when the server cannot be reached, and whatever
    psycopg.Error a migration meets; that migration is then undone, those before it stay.
    """
    package = _package()
    last = _last(package, to)
    applied: list[str] = []
    deadlines: dict[bool, float] = {}
    with _Backend(dsn, default_migration_table) as backend:
        if (version := backend.connection.info.server_version // 10_000) < OLDEST:
            raise MigrationError(f"PostgreSQL {version}: pgsched needs {OLDEST} or newer")
        while True:
            try:
                step = backend.step(package, last, dry_run=dry_run)
            except errors.InsufficientPrivilege as error:
                rule = "run as the owner of schema pgsched, which has to own all in it"
                raise NotAllowed(f"{error.diag.message_primary}: {rule}") from error
            except (_OtherInstaller, *_MEANWHILE) as error:
                other, pause = isinstance(error, _OtherInstaller), uniform(0.2, 0.6)
                patience = INSTALLER_PATIENCE if other else lock_timeout
                deadline = deadlines.setdefault(other, time.monotonic() + patience)
                if time.monotonic() + pause > deadline:
                    message = f"gave up after {patience:g} s: {backend.holders() or error}"
                    raise WaitedTooLong(message) from error
                time.sleep(pause)
                continue
            applied += step
            if dry_run or not step:
                return applied
            deadlines.clear()


def _package() -> list[Migration]:
    """The package's migrations, in order; NotAsReleased when a released one is not as it was."""
    sums = MIGRATIONS / "SHA256SUMS"
    lines = sums.read_text().splitlines() if sums.is_file() else [f"none {sums.name}"]
    released = {name: digest for digest, name in map(str.split, lines)}
    bad = [name for name, digest in released.items() if _digest(MIGRATIONS / name) != digest]
    if bad or not any(MIGRATIONS.glob("*.sql")):
        what = ", ".join(bad) or "all migrations"
        raise NotAsReleased(f"damaged package: {what} in {MIGRATIONS}: install pgsched again")
    # Escaped, since yoyo takes a pattern. Each depends on the one before.
    migrations = read_migrations(glob.escape(str(MIGRATIONS)))
    return sorted(migrations, key=lambda migration: (_number(migration.id), migration.id))


def _digest(file: Path) -> str | None:
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _number(migration_id: str) -> int:
    number = migration_id.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _last(package: list[Migration], to: str | None) -> int:
    """The number of the last migration that is to be applied."""
    numbers = {migration.id: _number(migration.id) for migration in package}
    chosen = [n for each, n in numbers.items() if to in (None, each) or to.lstrip("0") == str(n)]
    if not chosen:
        raise UnknownMigration(f"no migration {to!r}: this package has {', '.join(numbers)}")
    return max(chosen)


class _Backend(PostgresqlPsycopgBackend):  # type: ignore[misc]
    """yoyo's bookkeeping in schema pgsched, over a connection without session state."""

    connection: psycopg.Connection[tuple[Any, ...]]

    def connect(self, dburi: str) -> psycopg.Connection[tuple[Any, ...]]:
        connection = connect(dburi, application_name="pgsched migrate")
        # A stricter default would see the database as it was before the lock was had.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def step(self, package: list[Migration], last: int, *, dry_run: bool) -> list[str]:
        """Apply and mark the next migration, in one transaction; none: there is nothing to do.

        What a dry run returns is all that there is to do.
        """
        execute = self.connection.execute
        with self.transaction():
            execute(_ALONE)
            # Whoever needs a table waits behind who waits for it. The work itself may take long.
            execute("set local lock_timeout to '100ms'; set local statement_timeout to 0")
            tables = self.list_tables()
            if tables and not {"yoyo_lock", self.migration_table, "scheduled_tasks"} & {*tables}:
                whose = f"schema pgsched is another program's, with a table {min(tables)}"
                raise MigrationError(f"{whose}: rename it, or use another database")
            self.become_owner(dry_run=dry_run)
            unmarked, pending = self.compare(package, last)
            if dry_run or not (unmarked or pending):
                return [migration.id for migration in pending]
            lock = "select pg_try_advisory_xact_lock(%s, %s)"
            if execute(lock, MIGRATION_LOCK).fetchone() != (True,):
                raise _OtherInstaller
            # Not "if not exists", which asks for CREATE on the database of an owner who upgrades.
            if not self.become_owner():
                execute("create schema pgsched")
            execute("set local search_path to pgsched, pg_temp")
            if self.version_table in tables:
                execute(_VERSION)
            try:
                upgrade(self)
            except AssertionError as error:  # that yoyo knows their version
                raise MigrationError("yoyo's tables are newer: upgrade yoyo-migrations") from error
            execute(_PRIVATE)
            unmarked, pending = self.compare(package, last)
            for migration in unmarked:
                self.mark_one(migration)
            for migration in pending[:1]:
                # The file as it is, in one message: nothing splits it and "%" has no meaning.
                execute(Path(migration.path).read_bytes())
                self.log_migration(migration, "apply")
                self.mark_one(migration, log=False)
            return [migration.id for migration in pending[:1]]

    def become_owner(self, *, dry_run: bool = False) -> bool:
        """Let the owner make what is made; is there a schema?"""
        [(owner, there, superuser, refusal)] = self.connection.execute(_OWNER)
        if refusal and (superuser or not dry_run):
            raise NotAllowed(refusal)
        if not refusal:
            self.connection.execute("select set_config('role', %s, true)", [owner])
        return bool(there)

    def compare(self, package: Migrations, last: int) -> tuple[Migrations, Migrations]:
        """What is there without its mark, and what is to be applied; both in order."""
        tables = self.list_tables()
        has_marks = self.migration_table in tables
        marks = dict(self.connection.execute(_MARKS).fetchall()) if has_marks else {}
        marked = there = max(map(_number, marks), default=0)
        if "scheduled_tasks" in tables:
            [(version,)] = self.connection.execute("select pgsched.schema_version()")
            there = max(there, _number(version))
        if there > (newest := _last(package, None)):
            versions = f"schema {there:04}, package {newest:04}"
            raise SchemaNewer(
                f"schema pgsched is newer than this package ({versions}): upgrade pgsched"
            )
        digests = {migration.id: _digest(Path(migration.path)) for migration in package}
        missing = [migration for migration in package if migration.id not in marks]
        odd = [f"{each} is missing" for each in marks.keys() - digests.keys()]
        for each, digest in marks.items():
            if digest and digests.get(each, digest) != digest:
                odd.append(f"{each} has changed")
        odd += [f"{each.id} comes too late" for each in missing if _number(each.id) <= marked]
        if odd:
            message = "the migrations of this package are not those that were applied"
            raise NotAsReleased(f"{message} ({', '.join(sorted(odd))}): install a released pgsched")
        return (
            [each for each in missing if _number(each.id) <= there],
            [each for each in missing if there < _number(each.id) <= last],
        )

    def holders(self) -> str:
        """Who is in the way now, if anybody."""
        with self.transaction():
            self.connection.execute(_ALONE)
            rows = self.connection.execute(_LOCKS, MIGRATION_LOCK).fetchmany(3)
        return "; ".join(text for (text,) in rows)

    # What follows replaces yoyo's own, where it is called by the bookkeeping used above.

    def transaction(self, rollback_on_exit: bool = False) -> Any:
        return self.connection.transaction(force_rollback=rollback_on_exit)

    def ensure_internal_schema_updated(self) -> None:
        """Done by step(), under the lock."""

    def list_tables(self, **kwargs: Any) -> list[str]:
        # yoyo's own needs a URL of yoyo's kind.
        query = "select tablename from pg_tables where schemaname = 'pgsched'"
        return [name for (name,) in self.connection.execute(query)]

    def log_migration(self, migration: Migration, operation: str) -> None:
        digest = f"sha256 {_digest(Path(migration.path))}" if operation == "apply" else None
        # The database's user: a container's uid may have no name. No getfqdn(), which asks DNS.
        self.connection.execute(
            """
            insert into pgsched._yoyo_log (id, migration_hash, migration_id, operation, username,
                                           hostname, comment, created_at_utc)
            values (gen_random_uuid(), %s, %s, %s, session_user,
                    %s, %s, clock_timestamp() at time zone 'utc')
            """,
            [migration.hash, migration.id, operation, socket.gethostname(), digest],
        )
