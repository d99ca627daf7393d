"""Exceptions: what the SQL functions refuse, and what a handler may raise to say more."""

from datetime import timedelta

import psycopg


class PgschedError(Exception):
    """Base of what pgsched raises for a call that its SQL functions refuse."""


class InvalidArgument(PgschedError):
    """TS400: an argument is missing, malformed or out of range. Nothing was changed."""


class TaskNotFound(PgschedError):
    """TS404: there is no such task."""


class ClaimLost(PgschedError):
    """TS409: the claim is not current any more. Nothing was changed; drop the work."""


class WrongState(PgschedError):
    """TS423: the task is in a state that this call is not for. Nothing was changed."""


class SchemaError(PgschedError):
    """Schema pgsched is not in this database, or too old, or this role may not use it."""


_BY_SQLSTATE: dict[str | None, type[PgschedError]] = {
    "TS400": InvalidArgument,
    "TS404": TaskNotFound,
    "TS409": ClaimLost,
    "TS423": WrongState,
    "3F000": SchemaError,
    "42883": SchemaError,
    "42501": SchemaError,
    # JSON that Python can write and jsonb cannot hold: a lone surrogate, a NUL.
    "22P02": InvalidArgument,
    "22P05": InvalidArgument,
    # A delay that no timestamp can be.
    "22008": InvalidArgument,
}


def from_database(error: psycopg.Error) -> Exception:
    """The exception of this module for an SQLSTATE of pgsched's, else the error itself."""
    kind = _BY_SQLSTATE.get(error.sqlstate)
    if kind is None:
        return error
    if kind is SchemaError:
        cure = "grant the right" if error.sqlstate == "42501" else "run pgsched migrate"
        return SchemaError(f"{error.diag.message_primary}: {cure}")
    hint = error.diag.message_hint
    return kind(f"{error.diag.message_primary}{f' ({hint})' if hint else ''}")


class Retry(Exception):
    """Raised by a handler: the attempt failed, try again after ``delay`` (None: the backoff)."""

    def __init__(self, delay: timedelta | None = None, reason: str = "retry") -> None:
        super().__init__(reason)
        if not isinstance(delay, timedelta | None):
            raise TypeError("delay: a timedelta or None")
        self.delay = delay


class Snooze(Exception):
    """Raised by a handler: not now; due again after ``delay``, the attempt is not counted."""

    def __init__(self, delay: timedelta) -> None:
        super().__init__(f"snoozed for {delay}")
        if not isinstance(delay, timedelta):
            raise TypeError("delay: a timedelta")
        self.delay = delay


class Fail(Exception):
    """Raised by a handler: failed for good, no further attempt."""
