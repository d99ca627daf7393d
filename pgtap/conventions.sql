-- Rules over all of schema pgsched, by the catalog: each test lists what breaks its rule.
begin;
\ir fixtures.sql
select plan(22);

-- Comments in a body may name what the body must not use.
create temporary view functions as
select p.oid, p.proname::text as name, p.proname not like '\_%' as public, l.lanname as language,
       p.prosecdef as security_definer, p.proconfig as settings, p.pronargs as inputs,
       p.proargnames as arguments, p.proargmodes as modes, p.proacl as acl, p.proowner as owner,
       regexp_replace(pg_get_functiondef(p.oid), '--[^\n]*', '', 'g') as definition
  from pg_proc as p
  join pg_language as l on l.oid = p.prolang
 where p.pronamespace = 'pgsched'::regnamespace;

-- yoyo's own tables may be in the schema too.
create temporary view relations as
select c.oid, c.relname::text as name, c.relkind as kind, c.relacl as acl, c.relowner as owner
  from pg_class as c
 where c.relnamespace = 'pgsched'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
   and c.relname !~ '^_?yoyo_';

select isnt_empty('select name from functions', 'there are functions to look at');
select isnt_empty('select name from relations', 'there are tables to look at');

-- Comments
select isnt(obj_description('pgsched'::regnamespace, 'pg_namespace'), null,
            'the schema has a comment');
select is_empty($$select name from functions where obj_description(oid, 'pg_proc') is null$$,
                'every function has a comment');
-- The sequence of an identity column is part of its table.
select is_empty(
  $$select name from relations as r
     where obj_description(oid, 'pg_class') is null
       and not exists (select from pg_depend as d
                        where d.classid = 'pg_class'::regclass and d.objid = r.oid
                          and d.deptype = 'i')$$,
  'every table, view and sequence has a comment');
select is_empty(
  $$select t.typname from pg_type as t left join pg_class as c on c.oid = t.typrelid
     where t.typnamespace = 'pgsched'::regnamespace and t.typelem = 0
       and (c.oid is null or c.relkind = 'c') and obj_description(t.oid, 'pg_type') is null$$,
  'every type has a comment');

-- Rights. Of the type of a row pg_dump does not keep them: a restored database has PostgreSQL's own.
select is_empty(
  $$select name, privilege_type from (
      select 'schema', nspname, nspacl, 'n'::"char", nspowner from pg_namespace
       where oid = 'pgsched'::regnamespace
       union all
      select 'function', name, acl, 'f', owner from functions
       union all
      select 'relation', name, acl, case kind when 'S' then 's'::"char" else 'r' end, owner
        from relations
       union all
      select 'column', r.name || '.' || a.attname, a.attacl, 'c', r.owner
        from relations as r join pg_attribute as a on a.attrelid = r.oid
       union all
      select 'type', t.typname, t.typacl, 'T', t.typowner
        from pg_type as t left join pg_class as c on c.oid = t.typrelid
       where t.typnamespace = 'pgsched'::regnamespace and t.typelem = 0
         and (c.oid is null or c.relkind = 'c'))
      as object (class, name, acl, kind, owner)
     cross join aclexplode(coalesce(acl, acldefault(kind, owner))) as granted
     where granted.grantee = 0$$,
  'nothing is granted to PUBLIC');
select is_empty($$select name from functions where public and not security_definer$$,
                'a public function runs as its owner');
select is_empty(
  $$select name from functions
     where public and ('search_path=pg_catalog, pg_temp' = any (settings)) is not true$$,
  'and finds nothing on the search path of its caller');
select is_empty($$select name from functions where not public and security_definer$$,
                'a private function does not run as its owner: a public one that calls it does');
select set_eq(
  $$select pgsched._access('admin')$$,
  $$select name from functions where public and name not in ('grant_access', 'revoke_access')$$,
  'a kind of access has every public function but those that change rights');

-- Names
select is_empty(
  $$select f.name, a.name
      from functions as f
     cross join lateral unnest(f.arguments, f.modes) as a (name, mode)
     where (coalesce(a.mode, 'i') in ('i', 'b', 'v')) <> (a.name like 'p\_%')
     union all
    select name, 'without a name' from functions where inputs > 0 and arguments is null$$,
  'arguments start with p_, results do not');
select is_empty('select name from functions group by name having count(*) > 1',
                'no name is that of two functions');
select is_empty(
  $$select r.name, c.conname from pg_constraint as c join relations as r on r.oid = c.conrelid
     where not starts_with(c.conname, r.name || '_')$$,
  'every constraint is named by its table');
select is_empty(
  $$select r.name, c.relname
      from pg_index as i join relations as r on r.oid = i.indrelid
      join pg_class as c on c.oid = i.indexrelid
     where not starts_with(c.relname, r.name || '_')$$,
  'every index is named by its table');

-- What is not used
select is_empty(
  $$select t.tgname from pg_trigger as t join relations as r on r.oid = t.tgrelid
     where not t.tgisinternal$$,
  'there are no triggers');
select is_empty(
  $$select name from functions
     where regexp_replace(definition, '''[^'']*''', '', 'g') ~* '\mexecute\M'
       and name not in ('grant_access', 'revoke_access')$$,
  'no function makes its statements from strings but those that change rights');
select is_empty($$select name from functions where definition ~* '\mwhen\s+others\M'$$,
                'no function hides errors that it does not name');
select is_empty(
  $$select name from functions
     where definition ~* '\m(now|(transaction|statement)_timestamp)\s*\('
        or definition ~* '\m(current_(timestamp|time|date)|localtime(stamp)?)\M'$$,
  'no function takes the begin of the transaction for the time');
select is_empty(
  $$select name from functions where definition ~* '\mpg_(try_)?advisory_(?!xact_)'$$,
  'no function takes a lock that outlives the transaction');

-- Errors. 25006 is PostgreSQL's own: a read-only transaction.
select is_empty(
  $$select name from functions
     where (select count(*) from regexp_matches(definition, '\mraise\M', 'g')) <> (
            select count(*)
              from regexp_matches(definition,
                     'raise (exception using\s+errcode = ''(TS\d{3}|25006)''|'
                     'warning using\s+errcode = sqlstate),\s+message = [^;]*?\shint = ', 'g'))$$,
  'every error has a code of ours, a message and a hint');

-- plpgsql_check, where it is installed or can be until the rollback.
select exists (
         select from pg_available_extensions
          where name = 'plpgsql_check'
            and (installed_version is not null or current_setting('is_superuser')::boolean))
       as has_check \gset
\if :has_check
  create extension if not exists plpgsql_check;
  select set_config('search_path',
                    current_setting('search_path') || ', ' || extnamespace::regnamespace, true)
    from pg_extension where extname = 'plpgsql_check' \g /dev/null
  -- An immutable function may be called while a statement is planned: not one that only raises.
  select is_empty(
    $$select f.name, c.lineno, c.level, c.sqlstate, c.message
        from functions as f
       cross join lateral plpgsql_check_function_tb(
               f.oid::regprocedure, fatal_errors => false, other_warnings => true,
               extra_warnings => true, performance_warnings => true, security_warnings => true)
             as c
       where f.language = 'plpgsql'
         and not (f.name = '_raise_read_only'
                  and c.message = 'routine is marked as VOLATILE, should be IMMUTABLE')$$,
    'plpgsql_check finds no fault');
\else
  select skip('plpgsql_check is not installed', 1);
\endif

select * from finish();
rollback;
