//! Statements behind `status`, `deliveries` and `doctor`, one constant each, its rule above it. None scans a hot table
//! without a limit; what would be counted beyond it is said to be more.

/// Bridges that were not fenced, with their lanes. `alive`: its lock session is there. `source`: what wakes it, since
/// when, and why that is not the write-ahead log.
pub(crate) const BRIDGES: &str = "
select b.name, b.instance, b.epoch, b.version,
       (select count(*) from {schema}.{p}lanes l where l.epoch = b.epoch) as lanes,
       {schema}.{p}lives(b.lock_pid) as alive,
       extract(epoch from clock_timestamp() - b.started_at)::bigint as seconds,
       coalesce(b.source, 'poll') as source,
       extract(epoch from clock_timestamp() - coalesce(b.source_since, b.started_at))::bigint as source_seconds,
       b.source_note
  from {schema}.{p}bridges b where b.fenced_at is null order by b.epoch";

/// Per handler, counts up to $1 each. `ordinary` are pending and blocked together; the lag is the age of the oldest
/// ordinary delivery among the first of every lane, found by the primary key. Blocked ones are counted from what holds
/// them: only lanes with a held or, where the handler blocks, a dead delivery are read, from there on. `cut`: more than
/// $1 rows hold or were read, so that the blocked are at least these. Marks hold as well, until they are promoted.
pub(crate) const HANDLERS: &str = "
select h.name, h.sink, h.destination,
       (select count(*) from (select from {schema}.{p}deliveries d
                               where d.handler = h.id and d.lane = any (l.lanes) and d.due_at is null limit $1) x) as ordinary,
       (select count(*) from (select from {schema}.{p}deliveries d
                               where d.handler = h.id and d.due_at is not null and d.attempts = 0 limit $1) x) as scheduled,
       (select count(*) from (select from {schema}.{p}deliveries d
                               where d.handler = h.id and d.due_at is not null and d.attempts > 0 limit $1) x) as retrying,
       (select count(*) from (select from {schema}.{p}dead x where x.handler = h.id limit $1) x) as dead,
       (select extract(epoch from clock_timestamp() - min(o.created_at))::float8
          from unnest(l.lanes) u(lane)
          cross join lateral (select d.created_at from {schema}.{p}deliveries d
                               where d.lane = u.lane and d.handler = h.id and d.due_at is null order by d.seq limit 1) o) as lag,
       b.blocked, b.keys, b.age, b.cut
  from {schema}.{p}handlers h
 cross join (select array_agg(n::smallint) as lanes from generate_series(0, 255) n) l
 cross join lateral (
    with holds as materialized (
        (select d.lane, d.key_hash, d.seq from {schema}.{p}deliveries d
          where h.ordered and d.handler = h.id and d.lane = any (l.lanes) and d.due_at is not null and d.key_hash is not null
          limit $1)
        union all
        (select x.lane, x.key_hash, x.seq from {schema}.{p}dead x
          where h.ordered and h.blocks and x.handler = h.id and x.lane = any (l.lanes) and x.key_hash is not null limit $1)
    ), heads as materialized (
        select o.lane, o.key_hash, min(o.seq) as seq from holds o group by o.lane, o.key_hash
    ), read as materialized (
        select d.key_hash, d.seq, d.created_at
          from (select o.lane, min(o.seq) as seq from heads o group by o.lane) o
         cross join lateral (select d.key_hash, d.seq, d.created_at from {schema}.{p}deliveries d
                              where d.lane = o.lane and d.handler = h.id and d.seq > o.seq and d.due_at is null offset 0) d
         limit $1
    )
    select count(*) as blocked, count(distinct r.key_hash) as keys,
           extract(epoch from clock_timestamp() - min(r.created_at))::float8 as age,
           (select count(*) from read) >= $1 or (select count(*) from holds) >= $1 as cut
      from read r join heads o on o.key_hash = r.key_hash and o.seq < r.seq) b
 order by h.name";

/// Events no handler took, up to $1; rows in the default partition, up to $1.
pub(crate) const STRAYS: &str = "
select (select count(*) from (select from {schema}.{p}events e where e.handlers = '{}' limit $1) x),
       (select count(*) from (select from {schema}.{p}events_default limit $1) x)";

/// Lanes by owner.
pub(crate) const LANES: &str = "
select l.lane, b.name, l.epoch, extract(epoch from clock_timestamp() - l.taken_at)::bigint
  from {schema}.{p}lanes l left join {schema}.{p}bridges b on b.epoch = l.epoch order by l.lane";

/// One page of deliveries, dead ones too, by seq and handler above ($8, $9). $1 handler, $2 state, $3 key, $4 event
/// id, $5 type: null takes all. $6 limit. $7: only this seq, for `show`. Marks of skipped ones are no deliveries.
pub(crate) const LIST: &str = "
select d.seq, h.name, d.state, e.id, e.type, e.key, d.attempts, d.due_at, d.created_at,
       coalesce(d.dead_code, f.code), coalesce(d.dead_error, f.error)
  from (
    select d.lane, d.handler, d.seq, d.created_at, d.key_hash, d.attempts::integer, d.generation, d.due_at,
           null as dead_code, null as dead_error,
           case when d.due_at is not null and d.attempts = 0 then 'scheduled'
                when d.due_at is not null then 'retrying'
                when d.key_hash is not null and hh.ordered and (
                     exists (select from {schema}.{p}deliveries b where b.lane = d.lane and b.handler = d.handler
                                and b.key_hash = d.key_hash and b.due_at is not null and b.seq < d.seq)
                     or (hh.blocks and exists (select from {schema}.{p}dead b where b.lane = d.lane
                                and b.handler = d.handler and b.key_hash = d.key_hash and b.seq < d.seq)))
                then 'blocked' else 'pending' end as state
      from {schema}.{p}deliveries d join {schema}.{p}handlers hh on hh.id = d.handler
     where ($7::bigint is null or d.seq = $7) and d.attempts >= 0
    union all
    select x.lane, x.handler, x.seq, x.created_at, x.key_hash, x.attempts, x.generation, null, x.code, x.error, 'dead'
      from {schema}.{p}dead x where ($7::bigint is null or x.seq = $7)
  ) d
  join {schema}.{p}handlers h on h.id = d.handler
  left join {schema}.{p}events e on e.seq = d.seq and e.created_at = d.created_at
  left join lateral (select f.code, f.error from {schema}.{p}failures f
                      where f.lane = d.lane and f.handler = d.handler and f.seq = d.seq order by f.attempt desc limit 1) f on true
 where ($1::text is null or h.name = $1) and ($2::text is null or d.state = $2) and ($3::text is null or e.key = $3)
   and ($4::text is null or e.id = $4) and ($5::text is null or e.type = $5)
   and ($8::bigint is null or (d.seq, h.name) > ($8, $9::text))
 order by d.seq, h.name limit $6";

/// Attempts of one delivery. $1 handler, $2 seq.
pub(crate) const ATTEMPTS: &str = "
select f.attempt, f.at, f.outcome, f.code, f.error from {schema}.{p}failures f
  join {schema}.{p}handlers h on h.id = f.handler where h.name = $1 and f.seq = $2 order by f.attempt";

/// The payload of one event, on demand only. $1 seq.
pub(crate) const PAYLOAD: &str = "select payload from {schema}.{p}events where seq = $1";

pub(crate) const HANDLER_NAMES: &str = "select name from {schema}.{p}handlers order by name";

/// A batch each: $1 handler, $2 seqs, $3 filter, $4 limit, $5 reason; return how many they changed.
pub(crate) const REQUEUE: &str = "select {schema}.{p}requeue($1, $2, $3, $4, $5)";
pub(crate) const BURY: &str = "select {schema}.{p}bury($1, $2, $3, $4, $5)";
pub(crate) const SKIP: &str = "select {schema}.{p}skip($1, $2, $3, $4, $5)";

/// What an action would change, by state. $1 action, $2 handler, $3 seqs, $4 filter, $5 limit.
pub(crate) const COUNT_MATCHING: &str = "
select state, deliveries from {schema}.{p}count_matching($1, $2, $3, $4, $5)";

/// The deliveries that wait.
pub(crate) const ADOPT: &str = "select {schema}.{p}adopt()";

/// What the bridge's role may not do yet, as the GRANT that gives it.
pub(crate) const MISSING_GRANTS: &str = "
select format('GRANT %s ON %s TO %I;', w.privilege, w.object, current_user)
  from (values ('migrations', 'SELECT'), ('installation', 'SELECT'), ('installation', 'UPDATE'),
               ('handlers', 'SELECT'), ('handlers', 'INSERT'), ('handlers', 'UPDATE'),
               ('events', 'SELECT'), ('events_default', 'SELECT'),
               ('deliveries', 'SELECT'), ('deliveries', 'INSERT'), ('deliveries', 'UPDATE'), ('deliveries', 'DELETE'),
               ('failures', 'SELECT'), ('failures', 'INSERT'), ('failures', 'UPDATE'), ('failures', 'DELETE'),
               ('dead', 'SELECT'), ('dead', 'INSERT'), ('dead', 'UPDATE'), ('dead', 'DELETE'),
               ('bridges', 'SELECT'), ('bridges', 'INSERT'), ('bridges', 'UPDATE'),
               ('suspects', 'SELECT'), ('suspects', 'INSERT'), ('suspects', 'UPDATE'), ('suspects', 'DELETE'),
               ('lanes', 'SELECT'), ('lanes', 'UPDATE'), ('audit', 'INSERT')) x(relation, privilege)
 cross join lateral (select format('%s.%I', '{schema}', '{p_text}' || x.relation) as object, x.privilege) w
 where not has_table_privilege(w.object, w.privilege)
union all
select format('GRANT SELECT ON SEQUENCE %s TO %I;', '{schema}.{p}events_seq', current_user)
 where not has_sequence_privilege('{schema}.{p}events_seq', 'SELECT')
union all
select format('GRANT EXECUTE ON FUNCTION %s TO %I;', p.oid::regprocedure, current_user)
  from pg_proc p
 where p.pronamespace = (select c.relnamespace from pg_class c where c.oid = '{schema}.{p}events'::regclass)
   and p.proname in (select '{p_text}' || f from unnest(array['fence', 'register_bridge', 'heartbeat', 'listening', 'lock_lanes', 'peers', 'release_lanes', 'unlock_lanes', 'end_frozen', 'take_lanes',
       'leave', 'complete', 'retry', 'bury', 'promote', 'register_handlers', 'requeue', 'skip', 'operate', 'matching', 'count_matching', 'states_of', 'filter_problem',
       'ensure_partitions', 'drop_partitions', 'channel', 'canary', 'report_source',
       'left_behind', 'suspects', 'record_suspects', 'clear_suspects', 'here', 'settle', 'lives', 'register_lease', 'lease_lanes', 'purge_dead']) f)
   and not has_function_privilege(p.oid, 'EXECUTE')";

/// The owner of the tables, when it is neither the bridge's role nor one that it is a member of: only an owner makes and
/// drops partitions.
pub(crate) const FOREIGN_OWNER: &str = "
select pg_get_userbyid(c.relowner)::text
  from pg_class c where c.oid = '{schema}.{p}events'::regclass and not pg_has_role(c.relowner, 'USAGE')";

/// Whether there are deliveries that no bridge reads: of a handler that does not exist, or with a seq that no event gets.
/// Only rows made by hand are. By the gaps between handlers, lane by lane, so that no backlog is read.
pub(crate) const UNREADABLE: &str = "
with gaps as (
    select lag(k.id, 1, -1) over (order by k.id) as above, k.id as below
      from (select h.id from {schema}.{p}handlers h union all select 2147483647) k)
select exists (select from generate_series(0, 255) n cross join gaps g
                cross join lateral (select from {schema}.{p}deliveries d
                                     where d.lane = n::smallint and d.handler > g.above and d.handler < g.below limit 1) x)
    or exists (select from generate_series(0, 255) n cross join {schema}.{p}handlers h
                cross join lateral (select from {schema}.{p}deliveries d
                                     where d.lane = n::smallint and d.handler = h.id and d.seq < 1 limit 1) x)";

/// Sessions that hold locks of our lanes and are no registered bridge.
pub(crate) const STRANGERS: &str = "
select a.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''), count(*)
  from pg_locks l join {schema}.{p}installation i on l.classid::bigint = i.owner_lock_class
  join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.objsubid = 2 and l.objid::bigint between 0 and 255
   and l.database = (select d.oid from pg_database d where d.datname = current_database())
   and not exists (select from {schema}.{p}bridges b where b.lock_pid = l.pid and b.fenced_at is null)
 group by 1, 2, 3";

/// Transactions older than five minutes: they hold back vacuum and the lower bounds.
pub(crate) const OLD_TRANSACTIONS: &str = "
select a.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''),
       extract(epoch from clock_timestamp() - a.xact_start)::bigint
  from pg_stat_activity a where a.xact_start < clock_timestamp() - interval '5 minutes' and a.backend_type = 'client backend'
 order by a.xact_start limit 5";

/// Days from today for which no partition is there, up to $1 ahead.
pub(crate) const MISSING_PARTITIONS: &str = "
select to_char(d, 'YYYY_MM_DD') from generate_series(0, $1::integer) n
 cross join lateral (select ((clock_timestamp() at time zone 'UTC')::date + n)::timestamp as d) x
 where to_regclass('{schema}.{p}events_' || to_char(d, 'YYYY_MM_DD')) is null";

/// The demo's business table, beside the application's own.
pub(crate) const DEMO_TABLE: &str = "
create table if not exists public.lanebridge_demo_orders (
    id bigint generated always as identity primary key, customer text not null, cents bigint not null)";

pub(crate) const DEMO_DROP: &str = "drop table if exists public.lanebridge_demo_orders";

/// A business row and its event in one statement. $1 customer, $2 cents.
pub(crate) const DEMO_ORDER: &str = "
with o as (insert into public.lanebridge_demo_orders (customer, cents) values ($1, $2) returning id, customer, cents)
select o.id, {schema}.{p}publish('order.placed', jsonb_build_object('order', o.id, 'customer', o.customer, 'cents', o.cents),
                                 key => o.customer) from o";
