-- What bridges and operators do, one function each, so that the CLI, a console and a person in psql do the same.
-- Every change of delivery state begins with fence(): FOR SHARE on the owner's row. FOR KEY SHARE or EXISTS would let
-- a takeover pass between the check and the write.

-- Raises LB001 unless this epoch may still write. A takeover's UPDATE waits for those inside, and those who waited
-- for it find no row.
create function {schema}.{p}fence(p_epoch bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform 1 from {schema}.{p}bridges b where b.epoch = p_epoch and b.fenced_at is null for share;
    if not found then
        raise exception 'epoch % is fenced: another bridge took over its lanes', p_epoch using errcode = 'LB001';
    end if;
end $$;

-- Begins an epoch. Fences bridges whose lock session is gone: their lanes went with it, and those that never had one
-- are fenced by nobody else.
create function {schema}.{p}register_bridge(p_name text, p_instance text, p_version text) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    update {schema}.{p}bridges b set fenced_at = clock_timestamp()
     where b.fenced_at is null and not exists (select from pg_stat_activity a where a.pid = b.lock_pid);
    insert into {schema}.{p}bridges (name, instance, version, lock_pid)
    values (p_name, p_instance, p_version, pg_backend_pid()) returning epoch
$$;

-- Proves that the session still holds its lanes, and marks a moment: every event with a seq up to last_seq was given
-- it by a transaction below xid, so once all those have ended none can still appear. Must run on the lock session.
create function {schema}.{p}heartbeat(
    p_epoch bigint, out alive boolean, out locks integer, out last_seq bigint, out xid bigint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    -- A sequence that was never used says 1, which somebody may be about to get.
    select s.last_value - (not s.is_called)::integer into last_seq from {schema}.{p}events_seq s;
    xid := pg_current_xact_id()::text::bigint;
    update {schema}.{p}bridges b set beat = beat + 1 where b.epoch = p_epoch and b.fenced_at is null;
    alive := found;
    select count(*) into locks from pg_locks l, {schema}.{p}installation i
     where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.granted and l.objsubid = 2
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
       and l.classid::bigint = i.owner_lock_class and l.objid::bigint between 0 and 255;
end $$;

-- Whether this session listens, which DISCARD ALL or a pooler may have ended; while it does, publishers notify for
-- another while. One that does not listen moves nothing: publishers would pay for nobody. Writes at most every half of
-- that while; a publisher reads the row and never waits for it.
create function {schema}.{p}listening(p_seconds integer) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if not exists (select from pg_listening_channels() c where c = {schema}.{p}channel()) then
        return false;
    end if;
    update {schema}.{p}installation set listening_until = clock_timestamp() + make_interval(secs => p_seconds)
     where listening_until < clock_timestamp() + make_interval(secs => p_seconds / 2.0);
    return true;
end $$;

-- Tries the advisory locks of the lanes asked for, in their order, until p_most are taken; returns those that the session
-- now holds and did not before.
create function {schema}.{p}lock_lanes(p_lanes smallint[], p_most integer) returns setof smallint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_class integer := (select i.owner_lock_class from {schema}.{p}installation i);
    v_taken integer := 0;
    l smallint;
begin
    foreach l in array p_lanes loop
        exit when v_taken >= p_most;
        if pg_try_advisory_lock(v_class, l) then
            v_taken := v_taken + 1;
            return next l;
        end if;
    end loop;
end $$;

-- Bridges that are not fenced and whose lock session is there, with their lanes: who shares.
create function {schema}.{p}peers() returns table (epoch bigint, name text, beat bigint, lanes bigint)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select b.epoch, b.name, b.beat, (select count(*) from {schema}.{p}lanes l where l.epoch = b.epoch)
      from {schema}.{p}bridges b
     where b.fenced_at is null and exists (select from pg_stat_activity a where a.pid = b.lock_pid)
$$;

-- Gives lanes back that were drained: no owner is left to fence. Their locks are freed by unlock_lanes, and only when this
-- is committed: who got a lock before would still see us as the owner, and fence us.
create function {schema}.{p}release_lanes(p_epoch bigint, p_lanes smallint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    update {schema}.{p}lanes l set epoch = null, taken_at = null where l.epoch = p_epoch and l.lane = any (p_lanes);
end $$;

create function {schema}.{p}unlock_lanes(p_lanes smallint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_advisory_unlock(i.owner_lock_class, l) from {schema}.{p}installation i, unnest(p_lanes) l;
end $$;

-- Ends a bridge whose heartbeat stands still at p_beat: its lock session is terminated, which frees its locks, and its
-- epoch fenced. False when it moved meanwhile. The kernel answers keepalives for a process that is stopped, so nothing
-- else would ever free them.
create function {schema}.{p}end_frozen(p_epoch bigint, p_frozen bigint, p_beat bigint) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    update {schema}.{p}bridges b set fenced_at = clock_timestamp()
     where b.epoch = p_frozen and b.fenced_at is null and b.beat = p_beat;
    if not found then
        return false;
    end if;
    -- The session that holds lane locks, not another that got its number since.
    perform pg_terminate_backend(b.lock_pid) from {schema}.{p}bridges b, {schema}.{p}installation i
     where b.epoch = p_frozen
       and exists (select from pg_locks l
                    where l.pid = b.lock_pid and l.locktype = 'advisory' and l.granted and l.objsubid = 2
                      and l.database = (select d.oid from pg_database d where d.datname = current_database())
                      and l.classid::bigint = i.owner_lock_class and l.objid::bigint between 0 and 255);
    return true;
end $$;

-- Takes lanes whose locks this session holds: fences whoever left them behind, then writes the new owner. A lane
-- with an owner and a free lock means that the owner's session ended, and all its lanes with it.
create function {schema}.{p}take_lanes(p_epoch bigint, p_lanes smallint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    fenced bigint[];
begin
    perform {schema}.{p}fence(p_epoch);
    with f as (
        update {schema}.{p}bridges b set fenced_at = clock_timestamp()
         where b.fenced_at is null and b.epoch <> p_epoch
           and b.epoch in (select l.epoch from {schema}.{p}lanes l where l.lane = any (p_lanes) and l.epoch is not null)
        returning b.epoch)
    select coalesce(array_agg(f.epoch), '{}') into fenced from f;
    update {schema}.{p}lanes l set epoch = p_epoch, taken_at = clock_timestamp() where l.lane = any (p_lanes);
    return fenced;
end $$;

-- The clean end of a bridge: nobody will fence it, its lanes have no owner.
create function {schema}.{p}leave(p_epoch bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update {schema}.{p}lanes set epoch = null, taken_at = null where epoch = p_epoch;
    update {schema}.{p}bridges set left_at = clock_timestamp(), fenced_at = clock_timestamp() where epoch = p_epoch;
    perform pg_advisory_unlock_all();
end $$;

-- Deletes acknowledged deliveries; the arrays run in parallel. Returns the positions (from 1) of those that were not
-- there, and why: every id is accounted for.
create function {schema}.{p}complete(p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[])
returns table (ord integer, reason text)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    gone integer[];
    maybe_failed boolean;
begin
    perform {schema}.{p}fence(p_epoch);
    with d as (
        delete from {schema}.{p}deliveries d
         using unnest(p_lanes, p_handlers, p_seqs) with ordinality k(lane, handler, seq, ord)
         where d.lane = k.lane and d.handler = k.handler and d.seq = k.seq
        returning k.ord::integer as ord, d.attempts, d.generation)
    -- A delivery that was requeued starts its attempts anew, and has failed before all the same.
    select coalesce(array_agg(d.ord), '{}'), coalesce(bool_or(d.attempts > 0 or d.generation > 0), false)
      into gone, maybe_failed from d;
    if maybe_failed then
        delete from {schema}.{p}failures f
         using unnest(p_lanes, p_handlers, p_seqs) k(lane, handler, seq)
         where f.lane = k.lane and f.handler = k.handler and f.seq = k.seq;
    end if;
    if cardinality(gone) < cardinality(p_seqs) then
        return query
        select k.ord::integer,
               case when exists (select from {schema}.{p}dead x
                                  where x.lane = k.lane and x.handler = k.handler and x.seq = k.seq) then 'dead'
                    when exists (select from {schema}.{p}deliveries x
                                  where x.lane = k.lane and x.handler = k.handler and x.seq = k.seq) then 'still there'
                    else 'gone already' end
          from unnest(p_lanes, p_handlers, p_seqs) with ordinality k(lane, handler, seq, ord)
         where k.ord <> all (gone) order by 1;
    end if;
end $$;

-- Counts an attempt and holds each delivery until its delay has passed. Returns the positions that did change.
-- p_attempts is what the caller saw: a write repeated after a lost answer changes nothing.
create function {schema}.{p}retry(
    p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[], p_attempts smallint[],
    p_delay_ms bigint[], p_codes text[], p_errors text[]) returns setof integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    return query
    with k as (
        select * from unnest(p_lanes, p_handlers, p_seqs, p_attempts, p_delay_ms, p_codes, p_errors)
                 with ordinality k(lane, handler, seq, attempts, delay_ms, code, error, ord)
    ), u as (
        update {schema}.{p}deliveries d
           set attempts = least(d.attempts + 1, 32767), due_at = clock_timestamp() + k.delay_ms * interval '1 millisecond'
          from k where d.lane = k.lane and d.handler = k.handler and d.seq = k.seq and d.attempts = k.attempts
        returning d.lane, d.handler, d.seq, d.attempts, k.code, k.error, k.ord
    ), f as (
        insert into {schema}.{p}failures (lane, handler, seq, attempt, outcome, code, error)
        select u.lane, u.handler, u.seq, u.attempts, 'refused', u.code, u.error from u
        on conflict (lane, handler, seq, attempt) do update
           set at = excluded.at, outcome = excluded.outcome, code = excluded.code, error = excluded.error
    )
    select u.ord::integer from u;
end $$;

-- Moves deliveries to the dead, with their last error. Returns the positions that did change.
create function {schema}.{p}bury(
    p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[], p_outcomes text[], p_codes text[],
    p_errors text[]) returns setof integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    return query
    with k as (
        select * from unnest(p_lanes, p_handlers, p_seqs, p_outcomes, p_codes, p_errors)
                 with ordinality k(lane, handler, seq, outcome, code, error, ord)
    ), d as (
        delete from {schema}.{p}deliveries d using k
         where d.lane = k.lane and d.handler = k.handler and d.seq = k.seq
        returning d.*, k.outcome, k.code, k.error, k.ord
    ), f as (
        insert into {schema}.{p}failures (lane, handler, seq, attempt, outcome, code, error)
        select d.lane, d.handler, d.seq, d.attempts + 1, d.outcome, d.code, d.error from d
        on conflict (lane, handler, seq, attempt) do update
           set at = excluded.at, outcome = excluded.outcome, code = excluded.code, error = excluded.error
    ), x as (
        insert into {schema}.{p}dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
        select d.lane, d.handler, d.seq, d.created_at, d.key_hash, d.size_bytes, d.attempts + 1, d.generation, d.code, d.error
          from d
        on conflict (lane, handler, seq) do update
           set attempts = excluded.attempts, generation = excluded.generation, code = excluded.code,
               error = excluded.error, buried_at = excluded.buried_at
    )
    select d.ord::integer from d;
end $$;

-- Held deliveries of these lanes whose time has come become ordinary again. Returns the lowest per lane and handler:
-- their owner reads on from below it, so that what waited behind them comes after them. The limit is shared by the
-- lanes that have something due, so that none starves while much is due, and one alone has all of it.
create function {schema}.{p}promote(p_epoch bigint, p_lanes smallint[], p_limit integer)
returns table (lane smallint, handler integer, first_seq bigint, promoted bigint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    due_lanes smallint[];
begin
    -- The check first, without a lock: nearly always there is nothing due.
    due_lanes := array(select l from unnest(p_lanes) l
                        where exists (select from {schema}.{p}deliveries d
                                       where d.lane = l and d.due_at is not null and d.due_at <= clock_timestamp()));
    if due_lanes = '{}' then
        return;
    end if;
    perform {schema}.{p}fence(p_epoch);
    return query
    with due as (
        select d.lane, d.handler, d.seq from unnest(due_lanes) l
         cross join lateral (
            select d.lane, d.handler, d.seq from {schema}.{p}deliveries d
             where d.lane = l and d.due_at is not null and d.due_at <= clock_timestamp()
             order by d.due_at limit p_limit / cardinality(due_lanes) + 1) d
    ), u as (
        update {schema}.{p}deliveries d set due_at = null from due
         where d.lane = due.lane and d.handler = due.handler and d.seq = due.seq and d.due_at <= clock_timestamp()
        returning d.lane, d.handler, d.seq)
    select u.lane, u.handler, min(u.seq), count(*) from u group by u.lane, u.handler;
end $$;

-- Handlers as a bridge's configuration has them: [{name, events, type_regex, ordered, blocks, sink, destination}].
-- Returns name and id of each; handlers that are not in the list stay as they are.
create function {schema}.{p}register_handlers(p_handlers jsonb) returns table (name text, id integer)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    insert into {schema}.{p}handlers as h (name, events, type_regex, type_likes, ordered, blocks, sink, destination)
    select x.name, x.events, x.type_regex,
           -- A wildcard is always a whole token, and stands for one character or more.
           array(select replace(replace(replace(replace(replace(
                            e, E'\\', E'\\\\'), '%', E'\\%'), '_', E'\\_'), '*', '_%'), '>', '_%')
                   from unnest(x.events) e),
           x.ordered, x.blocks, x.sink, x.destination
      from jsonb_to_recordset(p_handlers)
           x(name text, events text[], type_regex text, ordered boolean, blocks boolean, sink text, destination text)
     where not exists (select from {schema}.{p}handlers o
                        where o.name = x.name and (o.events, o.type_regex, o.ordered, o.blocks, o.sink, o.destination)
                              = (x.events, x.type_regex, x.ordered, x.blocks, x.sink, x.destination))
     order by x.name
    on conflict (name) do update
       set events = excluded.events, type_regex = excluded.type_regex, type_likes = excluded.type_likes,
           ordered = excluded.ordered, blocks = excluded.blocks, sink = excluded.sink, destination = excluded.destination,
           updated_at = clock_timestamp();
    return query
    select h.name, h.id from {schema}.{p}handlers h
     where h.name in (select x.name from jsonb_to_recordset(p_handlers) x(name text));
end $$;

-- An operator's second chance: dead deliveries come back in order, with a new generation so that no dedup window
-- swallows them. Marked due rather than fresh: their key waits until its owner has read the lane again from there.
create function {schema}.{p}requeue(p_handler text, p_seqs bigint[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_handler integer;
    changed bigint;
begin
    select h.id into v_handler from {schema}.{p}handlers h where h.name = p_handler;
    if not found then
        raise exception 'unknown handler %', quote_literal(p_handler) using errcode = 'invalid_parameter_value';
    end if;
    with x as (
        delete from {schema}.{p}dead x where x.handler = v_handler and x.seq = any (p_seqs) returning x.*
    ), d as (
        insert into {schema}.{p}deliveries (lane, handler, seq, created_at, key_hash, size_bytes, generation, due_at)
        select x.lane, x.handler, x.seq, x.created_at, x.key_hash, x.size_bytes, x.generation + 1, clock_timestamp() from x
        on conflict do nothing
    )
    select count(*) into changed from x;
    if changed > 0 then
        insert into {schema}.{p}audit (action, detail, changed)
        values ('requeue', jsonb_build_object('handler', p_handler, 'seqs', p_seqs), changed);
    end if;
    return changed;
end $$;

-- Partitions for today and the days ahead, UTC. Returns the names made. A day whose rows already sit in the default
-- partition is moved out of it first. Waits for a lock only briefly: what reads all partitions queues up behind it.
create function {schema}.{p}ensure_partitions(p_days_ahead integer) returns setof text
language plpgsql set search_path = pg_catalog, pg_temp set datestyle = 'ISO' set timezone = 'UTC' set lock_timeout = '2s' as $$
declare
    day date;
    part text;
    lower_bound timestamptz;
begin
    for i in 0 .. p_days_ahead loop
        day := (clock_timestamp() at time zone 'UTC')::date + i;
        part := '{p_text}events_' || to_char(day, 'YYYY_MM_DD');
        continue when to_regclass(format('%s.%I', '{schema}', part)) is not null;
        -- One call at a time from here on, and nobody writes to the default partition while rows leave it.
        lock table {schema}.{p}events_default in access exclusive mode;
        continue when to_regclass(format('%s.%I', '{schema}', part)) is not null;
        lower_bound := day::timestamp at time zone 'UTC';
        execute format('create table {schema}.%I (like {schema}.{p}events including all)', part);
        execute format('with moved as (delete from {schema}.{p}events_default where created_at >= %1$L and created_at < %2$L returning *)
                        insert into {schema}.%3$I select * from moved', lower_bound, lower_bound + interval '1 day', part);
        execute format('alter table {schema}.{p}events attach partition {schema}.%I for values from (%L) to (%L)',
                       part, lower_bound, lower_bound + interval '1 day');
        return next part;
    end loop;
end $$;

-- Drops day partitions that ended before the retention and whose events are all delivered. Names that do not match
-- are never touched, nor is the default partition, nor one that was given other bounds by hand. Returns what was
-- dropped. A partition that is in use is left for the next time: publishers queue up behind a waiting drop.
create function {schema}.{p}drop_partitions(p_retention interval) returns setof text
language plpgsql set search_path = pg_catalog, pg_temp set datestyle = 'ISO' set timezone = 'UTC' set lock_timeout = '500ms' as $$
declare
    part text;
    from_at timestamptz;
    to_at timestamptz;
    first_seq bigint;
    last_seq bigint;
begin
    -- Ids of days that are gone. Before any lock, because it may take a while.
    delete from {schema}.{p}event_ids i
     where i.created_at < clock_timestamp() - p_retention - interval '1 day'
       and to_regclass(format('%s.%I', '{schema}', '{p_text}events_' || to_char(i.created_at, 'YYYY_MM_DD'))) is null
       and not exists (select from {schema}.{p}events_default e where e.seq = i.seq);
    for part, from_at in
        select c.relname, d.from_at
          from pg_inherits i join pg_class c on c.oid = i.inhrelid
          cross join lateral (select replace(right(c.relname, 10), '_', '-') as day) n
          -- The bounds decide; a name that is no date never equals them.
          cross join lateral (select substring(pg_get_expr(c.relpartbound, c.oid) from $re$^FOR VALUES FROM \('([^']+)'\)$re$)::timestamptz as from_at) d
         where i.inhparent = '{schema}.{p}events'::regclass
           and c.relnamespace = (select p.relnamespace from pg_class p where p.oid = i.inhparent)
           and c.relname ~ '^{p_text}events_[0-9]{4}_[0-9]{2}_[0-9]{2}$'
           and pg_get_expr(c.relpartbound, c.oid) = format('FOR VALUES FROM (%L) TO (%L)', n.day || ' 00:00:00+00', d.from_at + interval '1 day')
         order by c.relname
    loop
        to_at := from_at + interval '1 day';
        continue when to_at > clock_timestamp() - p_retention;
        continue when exists (select from {schema}.{p}deliveries d where d.created_at >= from_at and d.created_at < to_at)
                   or exists (select from {schema}.{p}dead x where x.created_at >= from_at and x.created_at < to_at);
        begin
            lock table only {schema}.{p}events in access exclusive mode;
            execute format('lock table {schema}.%I in access exclusive mode', part);
            -- A transaction that was open all day may have committed since. By index, because publishers wait.
            execute format('select min(seq), max(seq) from {schema}.%I', part) into first_seq, last_seq;
            if not exists (select from {schema}.{p}lanes l cross join {schema}.{p}handlers h
                             cross join lateral (select from {schema}.{p}deliveries d
                                 where d.lane = l.lane and d.handler = h.id and d.seq between first_seq and last_seq limit 1) d) then
                execute format('drop table {schema}.%I', part);
                return next part;
            end if;
        exception when lock_not_available then
            null;
        end;
    end loop;
end $$;

-- Functions are executable by everybody when made. Take that back for ours, and only ours: the schema may be shared.
do $$
declare
    f regprocedure;
begin
    for f in
        select p.oid from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where n.nspname = '{schema_text}' and p.proname in (select '{p_text}' || name from pg_catalog.unnest(array[
             'key_lock_limit', 'headers_problem', 'event_problem', 'takes', 'handlers_problem', 'handler_ids', 'held_keys',
             'notify', 'channel', 'republish', 'publish_one', 'insert_batch', 'publish_batch', 'publish', 'publish_many', 'fence', 'register_bridge',
             'heartbeat', 'listening', 'lock_lanes', 'peers', 'release_lanes', 'unlock_lanes', 'end_frozen', 'take_lanes', 'leave', 'complete', 'retry', 'bury', 'promote',
             'register_handlers', 'requeue', 'ensure_partitions', 'drop_partitions']) name)
    loop
        execute pg_catalog.format('revoke all on function %s from public', f);
    end loop;
end $$;

-- Since all events of today need a home before the first publish.
select {schema}.{p}ensure_partitions(3);
