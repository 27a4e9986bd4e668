-- What an operator does to a failing or dead delivery: requeue, bury, skip. One function each, of one handler, by seqs or
-- by a filter, a batch a call; the second call changes nothing. Every batch that changed something leaves an audit row.
--
-- Why they cannot break the order of a key under a running bridge. They touch only
-- - dead and held deliveries (due_at is not null). No bridge sends those: it saw their outcome written, or never saw
--   them ordinary at all, and its last read before a send answers "held" for them and for those behind them.
-- - ordinary deliveries of a lane that has no owner, under the owner's lock of that lane, so that none can come.
-- An ordinary delivery of an owned lane may be on its way to the broker, and no lock on its row says that it is not;
-- they leave it alone. Holding it first would not help: acknowledged, it is deleted, and that would end a hold without
-- its owner reading again what the hold had hidden, so that a later one of the key could overtake.
-- And a hold ends in one way only: its owner promotes it and reads the lane again from there. So where a held delivery
-- goes away for good its row stays, as a mark (attempts = -1, due now): it hides the followers as before, those that
-- are committed meanwhile too, until promote() deletes it and names its seq to the owner.

-- Held deliveries whose time has come become ordinary again, and marks whose time has come are deleted. Returns the
-- lowest per lane and handler: their owner reads on from below it, so that what waited behind them comes after them. The
-- limit is shared by the lanes that have something due, so that none starves while much is due, and one alone has all
-- of it.
create or replace function {schema}.{p}promote(p_epoch bigint, p_lanes smallint[], p_limit integer)
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
           and d.attempts >= 0
        returning d.lane, d.handler, d.seq
    ), marks as (
        delete from {schema}.{p}deliveries d using due
         where d.lane = due.lane and d.handler = due.handler and d.seq = due.seq and d.due_at <= clock_timestamp()
           and d.attempts < 0
        returning d.lane, d.handler, d.seq)
    select e.lane, e.handler, min(e.seq), count(*) from (select * from u union all select * from marks) e
     group by e.lane, e.handler;
end $$;

-- Moves deliveries to the dead, with their last error. Returns the positions that did change. A burial whose answer was lost
-- is written again; a mark that an operator left at its place meanwhile must not bring it back.
create or replace function {schema}.{p}bury(
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
         where d.lane = k.lane and d.handler = k.handler and d.seq = k.seq and d.attempts >= 0
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

-- Why a filter is none, or null. Every key narrows; a typo must not widen.
create function {schema}.{p}filter_problem(p_filter jsonb) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    bad text;
begin
    if p_filter is null or jsonb_typeof(p_filter) <> 'object' then
        return 'the filter must be a JSON object';
    end if;
    select format('unknown filter %s; there are state, type, key, id, error, older_than, newer_than', quote_literal(f.key))
      into bad from jsonb_object_keys(p_filter) f(key)
     where f.key not in ('state', 'type', 'key', 'id', 'error', 'older_than', 'newer_than') limit 1;
    if bad is null then
        select format('the filter %s must be a string, not %s', quote_literal(f.key), jsonb_typeof(f.value))
          into bad from jsonb_each(p_filter) f where jsonb_typeof(f.value) <> 'string' limit 1;
    end if;
    -- Tokens, * for one, > for the rest: as in a handler's events.
    if bad is null and p_filter ->> 'type' !~ '^(>|([^.*>]+|\*)(\.([^.*>]+|\*))*(\.>)?)$' then
        bad := format('the type pattern %s is not made of tokens, * and a last >', quote_literal(p_filter ->> 'type'));
    end if;
    return bad;
end $$;

-- Deliveries of a handler that are in one of these states, among these seqs (null: any), and pass the filter, in no
-- order, up to a limit. States: dead; retrying and scheduled, which are held; pending, in a lane without an owner; owned,
-- as pending, in a lane with one. A lane keeps its owner until that one left or was fenced, so a killed bridge's too.
-- p_due_after: of the held only those due later than that. Planned anew with its values each time, since they decide
-- which index serves; without them a call for some dead ones would read a whole backlog.
create function {schema}.{p}matching(
    p_handler text, p_states text[], p_seqs bigint[], p_filter jsonb, p_limit bigint, p_due_after timestamptz default null)
returns table (lane smallint, seq bigint, state text, id text)
language plpgsql stable set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan as $$
#variable_conflict use_column
declare
    v_handler integer := (select h.id from {schema}.{p}handlers h where h.name = p_handler);
    v_owned smallint[] := array(select l.lane from {schema}.{p}lanes l join {schema}.{p}bridges b on b.epoch = l.epoch
                                 where b.fenced_at is null);
    v_ordinary boolean := 'owned' = any (p_states) or ('pending' = any (p_states) and cardinality(v_owned) < 256);
    v_key text := (p_filter ->> 'key') collate "C";
    v_hash bigint := hashtextextended(v_key, 0);
    v_type text := '^' || replace(replace(regexp_replace(p_filter ->> 'type', '([^[:alnum:]_*>-])', '\\\1', 'g'),
                                          '*', '[^.]+'), '>', '.+') || '$';
    v_before timestamptz := clock_timestamp() - (p_filter ->> 'older_than')::interval;
    v_since timestamptz := clock_timestamp() - (p_filter ->> 'newer_than')::interval;
    v_lanes smallint[] := array(select n::smallint from generate_series(0, 255) n);
    v_found smallint[];
begin
    -- The primary key begins with the lane.
    if v_hash is not null then
        v_lanes := array[(v_hash & 255)::smallint];
    elsif p_seqs is not null then
        v_found := array(select e.lane from {schema}.{p}events e where e.seq = any (p_seqs));
        -- An event that was removed by hand does not tell its lane, and its delivery is there all the same.
        if cardinality(v_found) >= (select count(distinct s) from unnest(p_seqs) s) then
            v_lanes := array(select distinct l from unnest(v_found) l);
        end if;
    end if;
    return query
    select c.lane, c.seq, c.state, e.id
      from (
        select x.lane, x.seq, x.created_at, 'dead' as state
          from {schema}.{p}dead x
         where 'dead' = any (p_states) and x.handler = v_handler and x.lane = any (v_lanes)
           and (p_seqs is null or x.seq = any (p_seqs)) and (v_hash is null or x.key_hash = v_hash)
           and (p_filter ->> 'error' is null or strpos(x.code || ': ' || x.error, p_filter ->> 'error') > 0)
        union all
        select d.lane, d.seq, d.created_at, s.state
          from {schema}.{p}deliveries d
         cross join lateral (select case when d.due_at is null and d.lane = any (v_owned) then 'owned'
                                         when d.due_at is null then 'pending'
                                         when d.attempts = 0 then 'scheduled' else 'retrying' end as state) s
         where d.handler = v_handler and d.lane = any (v_lanes) and s.state = any (p_states) and d.attempts >= 0
           and (v_ordinary or d.due_at is not null) and (p_due_after is null or d.due_at > p_due_after)
           and (p_seqs is null or d.seq = any (p_seqs)) and (v_hash is null or d.key_hash = v_hash)
           and (p_filter ->> 'error' is null or exists (
                select from (select f.code || ': ' || f.error as said from {schema}.{p}failures f
                              where f.lane = d.lane and f.handler = d.handler and f.seq = d.seq
                              order by f.attempt desc limit 1) f
                 where strpos(f.said, p_filter ->> 'error') > 0))
      ) c
      left join {schema}.{p}events e on e.seq = c.seq and e.created_at = c.created_at
     where (v_before is null or c.created_at < v_before) and (v_since is null or c.created_at >= v_since)
       and (v_key is null or e.key = v_key) and (v_type is null or e.type ~ v_type)
       and (p_filter ->> 'id' is null or e.id = p_filter ->> 'id')
     limit p_limit;
end $$;

-- The states that an action takes when the filter names none, or that of the filter. Raises what does not fit.
create function {schema}.{p}states_of(p_action text, p_seqs bigint[], p_filter jsonb) returns text[]
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    -- Requeue takes scheduled ones only where they are named: they fail at nothing, somebody wanted them later.
    may text[] := case p_action when 'requeue' then '{dead,retrying,scheduled}'
                                when 'bury' then '{retrying,scheduled,pending}'
                                when 'skip' then '{dead,retrying,scheduled,pending}' end;
    problem text := {schema}.{p}filter_problem(p_filter);
begin
    if may is null then
        problem := format('unknown action %s', quote_literal(p_action));
    elsif problem is null and p_seqs is null and p_filter = '{}' then
        problem := 'seqs or a filter are needed';
    elsif problem is null and p_filter ->> 'state' <> all (may) then
        problem := format('the state must be one of %s, not %s', array_to_string(may, ', '), quote_literal(p_filter ->> 'state'));
    end if;
    if problem is not null then
        raise exception '%: %', p_action, problem using errcode = 'invalid_parameter_value';
    elsif p_filter ? 'state' then
        return array[p_filter ->> 'state'];
    end if;
    return case when p_action = 'requeue' then array_remove(may, 'scheduled') else may end;
end $$;

-- The dry run: what an action would change, by state, each state up to p_limit; and as owned what it would leave alone, as
-- it may be in flight.
create function {schema}.{p}count_matching(
    p_action text, p_handler text, p_seqs bigint[] default null, p_filter jsonb default '{}', p_limit bigint default 1000000)
returns table (state text, deliveries bigint)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    v_states text[] := {schema}.{p}states_of(p_action, p_seqs, p_filter);
    v_now timestamptz := clock_timestamp();
begin
    if not exists (select from {schema}.{p}handlers h where h.name = p_handler) then
        raise exception 'unknown handler %', quote_literal(p_handler) using errcode = 'invalid_parameter_value';
    end if;
    if 'pending' = any (v_states) then
        v_states := v_states || 'owned'::text;
    end if;
    return query
    select s, n.deliveries from unnest(v_states) s
     cross join lateral (select count(*) as deliveries
                           from {schema}.{p}matching(p_handler, array[s], p_seqs, p_filter, p_limit,
                                    case when p_action = 'requeue' and s <> 'dead' then v_now end)) n
     where n.deliveries > 0;
end $$;

-- The three actions: finds a batch, locks it, changes it, writes the audit. Returns how many it changed; fewer than
-- p_limit does not mean that nothing is left, since what a bridge is writing at this moment is left out.
create function {schema}.{p}operate(
    p_action text, p_handler text, p_seqs bigint[], p_filter jsonb, p_limit integer, p_reason text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_states text[] := {schema}.{p}states_of(p_action, p_seqs, p_filter);
    v_handler integer;
    v_now timestamptz;
    -- What matches: lanes, seqs and event ids in parallel.
    v_lanes smallint[];
    v_seqs bigint[];
    v_ids text[];
    -- Of them the deliveries that are not dead, locked.
    held_lanes smallint[];
    held_seqs bigint[];
    changed bigint[];
    moved bigint[];
    free smallint[] := '{}';
begin
    if p_limit is null or p_limit not between 1 and 10000 then
        raise exception '%: the limit must be between 1 and 10000, not %', p_action, coalesce(p_limit::text, 'null')
            using errcode = 'invalid_parameter_value';
    end if;
    -- One operator at a time per handler: two would find the same batch, and lock it in different orders.
    select h.id into v_handler from {schema}.{p}handlers h where h.name = p_handler for no key update;
    if not found then
        raise exception 'unknown handler %', quote_literal(p_handler) using errcode = 'invalid_parameter_value';
    end if;
    v_now := clock_timestamp();
    select array_agg(m.lane), array_agg(m.seq), array_agg(m.id) into v_lanes, v_seqs, v_ids
      from {schema}.{p}matching(p_handler, v_states, p_seqs, p_filter, p_limit,
                                case when p_action = 'requeue' then v_now end) m;
    if v_seqs is null then
        return 0;
    end if;
    if 'pending' = any (v_states) then
        -- Without an owner, and none can come before this is committed.
        free := array(select l.lane from {schema}.{p}lanes l, {schema}.{p}installation i
                       where l.lane = any (v_lanes)
                         and not exists (select from {schema}.{p}bridges b where b.epoch = l.epoch and b.fenced_at is null)
                         and pg_try_advisory_xact_lock(i.owner_lock_class, l.lane));
    end if;
    -- Rows that somebody writes are passed over: to wait for a bridge that waits for us would end one of the two.
    select coalesce(array_agg(h.lane), '{}'), coalesce(array_agg(h.seq), '{}') into held_lanes, held_seqs
      from (select d.lane, d.seq from {schema}.{p}deliveries d
              join unnest(v_lanes, v_seqs) k(lane, seq) on d.lane = k.lane and d.seq = k.seq
             where d.handler = v_handler and d.attempts >= 0 and (d.due_at is not null or d.lane = any (free))
               for update of d skip locked) h;

    if p_action = 'requeue' then
        -- A new generation, so that no dedup window swallows it. Due rather than ordinary: its key waits until its owner
        -- has read the lane again from there. A mark at its place becomes the delivery.
        with x as (
            delete from {schema}.{p}dead x using unnest(v_lanes, v_seqs) k(lane, seq)
             where x.handler = v_handler and x.lane = k.lane and x.seq = k.seq and 'dead' = any (v_states) returning x.*
        ), d as (
            insert into {schema}.{p}deliveries as d (lane, handler, seq, created_at, key_hash, size_bytes, generation, due_at)
            select x.lane, x.handler, x.seq, x.created_at, x.key_hash, x.size_bytes, x.generation + 1, v_now from x
            on conflict (lane, handler, seq) do update
               set attempts = 0, generation = excluded.generation, due_at = excluded.due_at where d.attempts < 0
        )
        select coalesce(array_agg(x.seq), '{}') into changed from x;
        with d as (
            update {schema}.{p}deliveries d set due_at = v_now from unnest(held_lanes, held_seqs) k(lane, seq)
             where d.handler = v_handler and d.lane = k.lane and d.seq = k.seq and d.due_at > v_now returning d.seq)
        select changed || coalesce(array_agg(d.seq), '{}') into changed from d;
    else
        changed := held_seqs;
        if p_action = 'bury' then
            insert into {schema}.{p}dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
            select d.lane, d.handler, d.seq, d.created_at, d.key_hash, d.size_bytes, d.attempts, d.generation, 'BURIED',
                   coalesce(nullif(p_reason, ''), 'buried by hand')
              from {schema}.{p}deliveries d join unnest(held_lanes, held_seqs) k(lane, seq) on d.lane = k.lane and d.seq = k.seq
             where d.handler = v_handler
            on conflict (lane, handler, seq) do update
               set attempts = excluded.attempts, generation = excluded.generation, code = excluded.code,
                   error = excluded.error, buried_at = excluded.buried_at;
        elsif 'dead' = any (v_states) then
            with x as (
                delete from {schema}.{p}dead x using unnest(v_lanes, v_seqs) k(lane, seq)
                 where x.handler = v_handler and x.lane = k.lane and x.seq = k.seq returning x.*
            ), d as (
                insert into {schema}.{p}deliveries (lane, attempts, handler, seq, created_at, key_hash, size_bytes, generation, due_at)
                select x.lane, -1, x.handler, x.seq, x.created_at, x.key_hash, x.size_bytes, x.generation, v_now
                  from x where x.key_hash is not null
                on conflict do nothing
            )
            select coalesce(array_agg(x.seq), '{}') into moved from x;
            changed := changed || moved;
        end if;
        -- Where a key waits a mark stays; without a key nothing waits.
        update {schema}.{p}deliveries d set attempts = -1, due_at = v_now from unnest(held_lanes, held_seqs) k(lane, seq)
         where d.handler = v_handler and d.lane = k.lane and d.seq = k.seq and d.key_hash is not null;
        delete from {schema}.{p}deliveries d using unnest(held_lanes, held_seqs) k(lane, seq)
         where d.handler = v_handler and d.lane = k.lane and d.seq = k.seq and d.key_hash is null;
        if p_action = 'skip' then
            delete from {schema}.{p}failures f using unnest(v_lanes, v_seqs) k(lane, seq)
             where f.handler = v_handler and f.lane = k.lane and f.seq = k.seq
               and exists (select from unnest(changed) c where c = k.seq);
        end if;
    end if;

    if changed <> '{}' then
        insert into {schema}.{p}audit (action, detail, changed)
        select p_action, jsonb_strip_nulls(jsonb_build_object(
                   'handler', p_handler, 'seqs', to_jsonb(p_seqs), 'filter', nullif(p_filter, '{}'),
                   'reason', nullif(p_reason, ''))) || jsonb_build_object('deliveries', (
                   select jsonb_agg(jsonb_build_object('seq', k.seq, 'id', k.id) order by k.seq)
                     from unnest(v_seqs, v_ids) k(seq, id) where exists (select from unnest(changed) c where c = k.seq))),
               cardinality(changed);
    end if;
    return cardinality(changed);
end $$;

-- A second chance: dead deliveries come back in order, with a new generation and their attempts anew; retrying ones are
-- tried now, and with {"state": "scheduled"} those that are due later.
drop function {schema}.{p}requeue(text, bigint[]);
create function {schema}.{p}requeue(
    p_handler text, p_seqs bigint[] default null, p_filter jsonb default '{}', p_limit integer default 1000,
    p_reason text default null) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    select {schema}.{p}operate('requeue', p_handler, p_seqs, p_filter, p_limit, p_reason)
$$;

-- Stop trying: deliveries become dead now, with the reason as their error. What their handler does about dead ones
-- follows: the key waits, or goes on.
create function {schema}.{p}bury(
    p_handler text, p_seqs bigint[] default null, p_filter jsonb default '{}', p_limit integer default 1000,
    p_reason text default null) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    select {schema}.{p}operate('bury', p_handler, p_seqs, p_filter, p_limit, p_reason)
$$;

-- Let the key go on without them: deliveries are gone for good, which the audit alone remembers, and their followers
-- come in order.
create function {schema}.{p}skip(
    p_handler text, p_seqs bigint[] default null, p_filter jsonb default '{}', p_limit integer default 1000,
    p_reason text default null) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    select {schema}.{p}operate('skip', p_handler, p_seqs, p_filter, p_limit, p_reason)
$$;

revoke all on function
    {schema}.{p}filter_problem(jsonb), {schema}.{p}states_of(text, bigint[], jsonb),
    {schema}.{p}matching(text, text[], bigint[], jsonb, bigint, timestamptz),
    {schema}.{p}count_matching(text, text, bigint[], jsonb, bigint),
    {schema}.{p}operate(text, text, bigint[], jsonb, integer, text),
    {schema}.{p}requeue(text, bigint[], jsonb, integer, text), {schema}.{p}bury(text, bigint[], jsonb, integer, text),
    {schema}.{p}skip(text, bigint[], jsonb, integer, text) from public;
