//! Statements behind `status`, `deliveries` and `doctor`, one constant each, its rule above it. None scans a hot table
//! without a limit; what would be counted beyond it is said to be more.

/// Bridges that were not fenced, with their lanes. `alive`: its lock session is there. `source`: what wakes it, since
/// when, and why that is not the write-ahead log.
pub(crate) const BRIDGES: &str = "
select b.name, b.instance, b.epoch, b.version,
       (select count(*) from {schema}.{p}lanes l where l.epoch = b.epoch) as lanes,
       exists (select from pg_stat_activity a where a.pid = b.lock_pid) as alive,
       extract(epoch from clock_timestamp() - b.started_at)::bigint as seconds,
       coalesce(b.source, 'poll') as source,
       extract(epoch from clock_timestamp() - coalesce(b.source_since, b.started_at))::bigint as source_seconds,
       b.source_note
  from {schema}.{p}bridges b where b.fenced_at is null order by b.epoch";

/// Per handler, counts up to $1 each. `ordinary` are pending and blocked together; the lag is the age of the oldest
/// ordinary delivery among the first of every lane, found by the primary key.
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
          from unnest(l.lanes) lane
          cross join lateral (select d.created_at from {schema}.{p}deliveries d
                               where d.lane = lane and d.handler = h.id and d.due_at is null order by d.seq limit 1) o) as lag
  from {schema}.{p}handlers h
 cross join (select array_agg(n::smallint) as lanes from generate_series(0, 255) n) l
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
/// id, $5 type: null takes all. $6 limit. $7: only this seq, for `show`.
pub(crate) const LIST: &str = "
select d.seq, h.name, d.state, e.id, e.type, e.key, d.attempts, d.due_at, d.created_at, f.code, f.error, d.generation, d.lane
  from (
    select d.lane, d.handler, d.seq, d.created_at, d.key_hash, d.attempts::integer, d.generation, d.due_at,
           case when d.due_at is not null and d.attempts = 0 then 'scheduled'
                when d.due_at is not null then 'retrying'
                when d.key_hash is not null and hh.ordered and (
                     exists (select from {schema}.{p}deliveries b where b.lane = d.lane and b.handler = d.handler
                                and b.key_hash = d.key_hash and b.due_at is not null and b.seq < d.seq)
                     or (hh.blocks and exists (select from {schema}.{p}dead b where b.lane = d.lane
                                and b.handler = d.handler and b.key_hash = d.key_hash and b.seq < d.seq)))
                then 'blocked' else 'pending' end as state
      from {schema}.{p}deliveries d join {schema}.{p}handlers hh on hh.id = d.handler
     where ($7::bigint is null or d.seq = $7)
    union all
    select x.lane, x.handler, x.seq, x.created_at, x.key_hash, x.attempts, x.generation, null, 'dead'
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

/// Seqs of a handler's dead deliveries above $2, a batch at a time. $1 handler, $3 limit.
pub(crate) const DEAD_OF: &str = "
select x.seq from {schema}.{p}dead x join {schema}.{p}handlers h on h.id = x.handler
 where h.name = $1 and x.seq > $2 order by x.seq limit $3";

pub(crate) const HANDLER_NAMES: &str = "select name from {schema}.{p}handlers order by name";

/// $1 handler, $2 seqs; returns how many came back.
pub(crate) const REQUEUE: &str = "select {schema}.{p}requeue($1, $2)";

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
       'leave', 'complete', 'retry', 'bury', 'promote', 'register_handlers', 'requeue', 'ensure_partitions',
       'drop_partitions', 'channel', 'canary', 'report_source']) f)
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
