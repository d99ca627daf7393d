-- What pgsched is measured against: the least that a task queue in a table needs, with the one plain
-- index that serves its claims. Finished rows stay where they are, unless a yardstick deletes them.

create table plain_tasks (
  id          bigint      not null generated always as identity primary key,
  payload     jsonb       not null,
  status      text        not null default 'queued',
  claimed_at  timestamptz,
  finished_at timestamptz
);

create index plain_tasks_queued_idx on plain_tasks (id) where status = 'queued';
