-- The whole schema, in reading order:  psql -v ON_ERROR_STOP=1 -1 -f sql/schema/schema.sql DSN

create schema pgsched;

-- What is stored
\ir tables.sql
\ir views.sql

-- Shared by the functions below
\ir functions/arguments.sql
\ir functions/claims.sql
\ir functions/finish.sql
\ir functions/claim_marks.sql

-- Wake-up
\ir functions/notify_channel.sql
\ir functions/register_listener.sql

-- Producers
\ir functions/enqueue_task.sql
\ir functions/enqueue_tasks.sql

-- Workers: claim, keep, end
\ir functions/claim_task.sql
\ir functions/hold_task.sql
\ir functions/extend_task.sql
\ir functions/extend_tasks.sql
\ir functions/complete_task.sql
\ir functions/complete_tasks.sql
\ir functions/fail_task.sql
\ir functions/fail_tasks.sql
\ir functions/release_task.sql
\ir functions/release_tasks.sql
\ir functions/register_worker.sql
\ir functions/hold_presence.sql
\ir functions/unregister_worker.sql

-- Operators
\ir functions/cancel_task.sql
\ir functions/retry_task.sql
\ir functions/reschedule_task.sql
\ir functions/configure_queue.sql
\ir functions/pause_queue.sql
\ir functions/resume_queue.sql

-- Recovery and retention
\ir functions/reap_stale.sql
\ir functions/prune_finished.sql
\ir functions/maintain.sql

-- Observers
\ir functions/observers.sql
\ir functions/get_task.sql
\ir functions/list_workers.sql
\ir functions/queue_stats.sql
\ir functions/recent_rates.sql
\ir functions/server_stats.sql
\ir functions/findings.sql
\ir functions/diagnose.sql
\ir functions/schema_version.sql

-- Rights
\ir functions/access.sql
\ir functions/grant_access.sql
\ir functions/revoke_access.sql
