"""A worker process of the scenes drain and latency: the yardstick, a bare loop around the SQL.

    python loop_worker.py DSN B|D BATCH [--tell]

B claims, works and completes, in two statements; D deletes, and then works. It is what a worker
costs that has no leases, no retries, no slots, no metrics and does not notice when it goes wrong.
"""

import sys

import psycopg
from protocol import handler, wait_for_start

PICK = """
select id from plain_tasks where status = 'queued' order by id limit %s for update skip locked
"""
CLAIM = f"""
update plain_tasks set status = 'claimed', claimed_at = now()
 where id = any (array({PICK})) returning id, payload
"""
COMPLETE = """
update plain_tasks set status = 'completed', finished_at = now()
 where id = any (%s) and status = 'claimed'
"""
DELETE = f"delete from plain_tasks where id = any (array({PICK})) returning id, payload"


def main() -> None:
    dsn, yardstick, batch, *options = sys.argv[1:]
    handle = handler("--tell" in options)
    wait_for_start()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("listen plain_tasks")
        cursor = conn.cursor()
        while True:
            tasks = cursor.execute(CLAIM if yardstick == "B" else DELETE, [int(batch)]).fetchall()
            for _, payload in tasks:
                handle(payload["i"])
            if not tasks:
                list(conn.notifies(timeout=1, stop_after=1))
            elif yardstick == "B":
                cursor.execute(COMPLETE, [[task for task, _ in tasks]])


if __name__ == "__main__":
    main()
