-- The whole schema, in reading order:  psql -v ON_ERROR_STOP=1 -1 -f sql/schema/schema.sql DSN

create schema pgsched;

-- What is stored
\ir tables.sql
\ir views.sql

-- Shared by the functions below
\ir functions/arguments.sql
\ir functions/finish.sql

-- Producers
\ir functions/enqueue_task.sql

-- Workers: claim, keep, end
\ir functions/claim_task.sql
\ir functions/extend_tasks.sql
\ir functions/complete_task.sql
\ir functions/complete_tasks.sql
\ir functions/fail_task.sql
\ir functions/release_task.sql
\ir functions/register_worker.sql
\ir functions/unregister_worker.sql

-- Recovery
\ir functions/reap_stale.sql

-- Observers
\ir functions/queue_stats.sql
\ir functions/schema_version.sql
