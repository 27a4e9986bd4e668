-- Lanes held by lease: ownership = "lease", for bridges that have no session of their own behind a transaction pooler. Such a
-- bridge has no lock session; its lease is its heartbeat. While that moves, nobody takes its lanes; when it has stood still
-- for frozen_after on another bridge's clock, that one ends it by end_frozen. Both kinds may share one installation.

-- The backend that holds the advisory locks; null for a bridge that holds its lanes by lease.
alter table {schema}.{p}bridges alter column lock_pid drop not null;

-- Whether its lanes are still its own, as far as the database can tell: a lease ends by being fenced.
create function {schema}.{p}lives(p_lock_pid integer) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
    select p_lock_pid is null or exists (select from pg_stat_activity a where a.pid = p_lock_pid)
$$;

create or replace function {schema}.{p}register_bridge(p_name text, p_instance text, p_version text) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    update {schema}.{p}bridges b set fenced_at = clock_timestamp()
     where b.fenced_at is null and not {schema}.{p}lives(b.lock_pid);
    insert into {schema}.{p}bridges (name, instance, version, lock_pid)
    values (p_name, p_instance, p_version, pg_backend_pid()) returning epoch
$$;

-- Begins an epoch that holds its lanes by lease. An earlier one of this process is over: the process says so itself.
create function {schema}.{p}register_lease(p_name text, p_instance text, p_version text) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    update {schema}.{p}bridges b set fenced_at = clock_timestamp()
     where b.fenced_at is null and (b.instance = p_instance or not {schema}.{p}lives(b.lock_pid));
    insert into {schema}.{p}bridges (name, instance, version) values (p_name, p_instance, p_version) returning epoch
$$;

-- A lane that is leased has no lock, and is not free for that.
create or replace function {schema}.{p}lock_lanes(p_lanes smallint[], p_most integer) returns setof smallint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_class integer := (select i.owner_lock_class from {schema}.{p}installation i);
    v_leased smallint[] := array(select l.lane from {schema}.{p}lanes l join {schema}.{p}bridges b on b.epoch = l.epoch
                                  where b.lock_pid is null and b.fenced_at is null);
    v_taken integer := 0;
    l smallint;
begin
    foreach l in array p_lanes loop
        exit when v_taken >= p_most;
        if l <> all (v_leased) and pg_try_advisory_lock(v_class, l) then
            v_taken := v_taken + 1;
            return next l;
        end if;
    end loop;
end $$;

-- Takes lanes that nobody holds, of those asked for and in their order, up to p_most: fences whoever left them behind, then
-- writes the new owner. left_behind: the owner was another process and did not leave, as in the function of that name.
create function {schema}.{p}lease_lanes(p_epoch bigint, p_lanes smallint[], p_most integer)
returns table (lane smallint, left_behind boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform {schema}.{p}fence(p_epoch);
    return query
    with free as (
        select l.lane, l.epoch, b.instance
          from {schema}.{p}lanes l left join {schema}.{p}bridges b on b.epoch = l.epoch
         where l.lane = any (p_lanes) and l.epoch is distinct from p_epoch
           and (l.epoch is null or b.fenced_at is not null or not {schema}.{p}lives(b.lock_pid))
         order by array_position(p_lanes, l.lane) limit p_most
           for update of l skip locked
    ), fenced as (
        update {schema}.{p}bridges b set fenced_at = clock_timestamp()
         where b.fenced_at is null and b.epoch in (select f.epoch from free f)
    ), taken as (
        update {schema}.{p}lanes l set epoch = p_epoch, taken_at = clock_timestamp()
          from free f where l.lane = f.lane
    )
    select f.lane, coalesce(f.instance <> (select o.instance from {schema}.{p}bridges o where o.epoch = p_epoch), false)
      from free f;
end $$;

create or replace function {schema}.{p}peers() returns table (epoch bigint, name text, beat bigint, lanes bigint)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select b.epoch, b.name, b.beat, (select count(*) from {schema}.{p}lanes l where l.epoch = b.epoch)
      from {schema}.{p}bridges b where b.fenced_at is null and {schema}.{p}lives(b.lock_pid)
$$;

-- The clean end of a bridge. Behind a pooler the locks of this session are others'.
create or replace function {schema}.{p}leave(p_epoch bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update {schema}.{p}lanes set epoch = null, taken_at = null where epoch = p_epoch;
    update {schema}.{p}bridges set left_at = clock_timestamp(), fenced_at = clock_timestamp() where epoch = p_epoch;
    perform pg_advisory_unlock_all() from {schema}.{p}bridges b where b.epoch = p_epoch and b.lock_pid = pg_backend_pid();
end $$;

revoke all on function
    {schema}.{p}lives(integer), {schema}.{p}register_lease(text, text, text),
    {schema}.{p}lease_lanes(bigint, smallint[], integer) from public;
