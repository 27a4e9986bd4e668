-- Crashes charge the guilty: after a bridge died, what it may have been sending goes out under record, so that the next
-- crash says who was on its way. Nothing here is written while no bridge dies.

-- One row per delivery that was sent under record and is not settled.
create table {schema}.{p}suspects (
    lane        smallint    not null,
    handler     integer     not null,
    seq         bigint      not null,
    -- The delivery's attempts when it was sent: one that was charged since has more, and is not charged again.
    attempts    smallint    not null,
    -- How many were sent together. 1 for one that had nothing at all beside it: if its bridge died, it is charged with an
    -- attempt.
    together    integer     not null check (together > 0),
    recorded_at timestamptz not null default pg_catalog.clock_timestamp(),
    primary key (lane, handler, seq)
);

-- Of lanes whose locks this session just got: those whose owner was another process and did not leave. Before take_lanes,
-- which forgets who that was. A bridge that only lost its session, with the server say, did not die of a delivery.
create function {schema}.{p}left_behind(p_epoch bigint, p_lanes smallint[]) returns smallint[]
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(array_agg(l.lane), '{}') from {schema}.{p}lanes l join {schema}.{p}bridges b on b.epoch = l.epoch
     where l.lane = any (p_lanes)
       and b.instance <> (select o.instance from {schema}.{p}bridges o where o.epoch = p_epoch)
$$;

-- What was sent under record and is still there.
create function {schema}.{p}suspects(p_lanes smallint[])
returns table (lane smallint, handler integer, seq bigint, attempts smallint, together integer)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select s.lane, s.handler, s.seq, s.attempts, s.together
      from {schema}.{p}suspects s join {schema}.{p}deliveries d using (lane, handler, seq)
     where s.lane = any (p_lanes)
$$;

-- Before they are sent; the arrays run in parallel.
create function {schema}.{p}record_suspects(
    p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[], p_attempts smallint[],
    p_together integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    insert into {schema}.{p}suspects as s (lane, handler, seq, attempts, together)
    select k.lane, k.handler, k.seq, k.attempts, p_together
      from unnest(p_lanes, p_handlers, p_seqs, p_attempts) k(lane, handler, seq, attempts)
    on conflict (lane, handler, seq) do update
       set attempts = excluded.attempts, together = excluded.together, recorded_at = excluded.recorded_at;
end $$;

-- The process is alive after they were sent, so they are innocent.
create function {schema}.{p}clear_suspects(p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[])
returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    delete from {schema}.{p}suspects s using unnest(p_lanes, p_handlers, p_seqs) k(lane, handler, seq)
     where s.lane = k.lane and s.handler = k.handler and s.seq = k.seq;
end $$;

do $$
declare
    f regprocedure;
begin
    for f in
        select p.oid from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where n.nspname = '{schema_text}' and p.proname in (select '{p_text}' || name from pg_catalog.unnest(array[
             'left_behind', 'suspects', 'record_suspects', 'clear_suspects']) name)
    loop
        execute pg_catalog.format('revoke all on function %s from public', f);
    end loop;
end $$;
