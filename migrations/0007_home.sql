-- A copy of the database must not publish to what the original publishes to (H33): a restored backup, production copied to
-- staging. The first bridge records where the installation lives; one that finds it elsewhere sends nothing.

-- Server and database, as `here` names them; null until the first bridge.
alter table {schema}.{p}installation add column home jsonb;

-- The server's identifier is made by initdb and kept by standbys, failovers and physical copies; the number of the database is
-- new wherever a dump is restored.
create function {schema}.{p}here() returns jsonb
language sql stable set search_path = pg_catalog, pg_temp as $$
    select jsonb_build_object('system', (select s.system_identifier::text from pg_control_system() s),
                              'database', (select d.oid::text from pg_database d where d.datname = current_database()))
$$;

-- Records the home if there is none. Returns null, or the recorded home when that is elsewhere.
create function {schema}.{p}settle() returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update {schema}.{p}installation set home = {schema}.{p}here() where home is null;
    return (select i.home from {schema}.{p}installation i where i.home <> {schema}.{p}here());
end $$;

-- From now on the installation lives here. It gets a new id, and with it new dedup ids: the original may go on and must not
-- meet this one in a broker's window. Returns the deliveries that wait, and will be sent from here too.
create function {schema}.{p}adopt() returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old jsonb;
    waiting bigint;
begin
    select jsonb_build_object('id', i.id, 'home', i.home) into old from {schema}.{p}installation i for update;
    update {schema}.{p}installation set id = gen_random_uuid(), home = {schema}.{p}here();
    select count(*) into waiting from {schema}.{p}deliveries;
    insert into {schema}.{p}audit (action, detail, changed)
    select 'adopt', jsonb_build_object('from', old, 'to', jsonb_build_object('id', i.id, 'home', i.home)), 1
      from {schema}.{p}installation i;
    return waiting;
end $$;

revoke all on function {schema}.{p}here(), {schema}.{p}settle(), {schema}.{p}adopt() from public;
