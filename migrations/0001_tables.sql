-- Tables. Hot rows are inserted once and deleted once, and stay narrow; whatever is rare lives in tables of its own.
-- Every name is qualified; schema and table prefix are filled in by the runner, validated and quoted.

-- One row: what every program that uses this schema must agree on.
create table {schema}.{p}installation (
    one               boolean     primary key default true check (one),
    -- Names this set of tables for ever; copies of the database share it, which is how a copy is noticed.
    id                uuid        not null default pg_catalog.gen_random_uuid(),
    -- Fixed: a key lives in one lane for as long as it has undelivered events.
    lanes             smallint    not null default 256 check (lanes = 256),
    -- First half of the two-part advisory locks: the bridges' lane ownership, and the publishers' lanes. Random, so
    -- that two installations in one database, or another user of advisory locks, never meet.
    owner_lock_class  integer     not null default (pg_catalog.random() * 1000000000)::integer,
    key_lock_class    integer     not null default (1000000000 + pg_catalog.random() * 1000000000)::integer,
    -- Written by the bridge from its configuration; read by every publish.
    max_payload_bytes integer     not null default 1048576 check (max_payload_bytes between 1 and 268435456),
    -- Publishing notifies until then; a bridge with wake_up = "notify" moves it ahead while it listens. Never by
    -- default, because NOTIFY breaks two-phase commit and serialises commits.
    listening_until   timestamptz not null default '-infinity',
    created_at        timestamptz not null default pg_catalog.clock_timestamp()
);
insert into {schema}.{p}installation default values;

-- The order of events. CACHE 1: with a larger cache two sessions hand out numbers in the wrong order.
create sequence {schema}.{p}events_seq as bigint cache 1;

-- The last NOTIFY in milliseconds since 1970: a sequence, because its writes survive a rollback and lock nothing.
create sequence {schema}.{p}notify_clock as bigint minvalue 0 start 0;

-- What to deliver where. Written by the bridge from [handlers.*]; read by every publish.
create table {schema}.{p}handlers (
    id         integer     generated always as identity primary key,
    name       text        not null unique check (name ~ '^[a-z0-9_.-]{1,64}$'),
    -- The patterns as written, and as one anchored regular expression that publishing matches.
    events     text[]      not null,
    type_regex text        not null,
    -- LIKE patterns that pass whatever type_regex passes, and little more; null: ask the expression at once. A backend
    -- keeps 32 compiled expressions: with 100 handlers every publish compiled them all, which took 0.8 ms.
    type_likes text[],
    -- Policies that SQL must know: does order hold per key, and does a dead delivery hold back its key.
    ordered    boolean     not null default true,
    blocks     boolean     not null default true,
    -- Where it goes, for people who look.
    sink       text        not null,
    destination text       not null,
    -- Events published before this have no delivery for it unless replayed.
    since      timestamptz not null default pg_catalog.clock_timestamp(),
    updated_at timestamptz not null default pg_catalog.clock_timestamp()
);

-- Events are append only. Partitioned by day so that retention is a DROP, not a DELETE.
create table {schema}.{p}events (
    seq        bigint      not null,
    -- clock_timestamp() of the publish call, not the transaction's start. No calendar of a client goes further.
    created_at timestamptz not null check (created_at between '0001-01-01 00:00+00' and '9999-12-31 00:00+00'),
    lane       smallint    not null check (lane between 0 and 255),
    -- j json, t text, b bytes: which overload of publish stored the payload.
    format     "char"      not null check (format in ('j', 't', 'b')),
    id         text        not null,
    type       text        not null check (type <> ''),
    key        text,
    headers    jsonb,
    -- Ids of the handlers that were given a delivery.
    handlers   integer[]   not null,
    payload    bytea       not null
) partition by range (created_at);

-- Found by seq; not unique, because uniqueness over partitions would need created_at in it and check nothing.
create index {p}events_seq_idx on {schema}.{p}events (seq);
-- Events that no handler took: counted, and found again for a replay, at no cost to those that were taken.
create index {p}events_unrouted_idx on {schema}.{p}events (created_at) where handlers = '{}'::integer[];

-- lz4 compresses a 4 kB payload at half the CPU of the built-in method; a server built without it keeps that one.
do $$ begin
    alter table {schema}.{p}events alter column payload set compression lz4;
exception when feature_not_supported or invalid_parameter_value then
    raise notice 'this server has no lz4: payloads use the default compression';
end $$;

-- Catches events when nobody made partitions ahead; rows in it raise an alarm, never an error for a publisher.
create table {schema}.{p}events_default partition of {schema}.{p}events default;

-- One event owed to one handler. Deleted when the broker acknowledged it.
create table {schema}.{p}deliveries (
    lane       smallint    not null check (lane between 0 and 255),
    -- Failed attempts; written by the owner when one fails.
    attempts   smallint    not null default 0,
    handler    integer     not null,
    seq        bigint      not null,
    -- As in events: finds its partition, and gives the lag without a join.
    created_at timestamptz not null check (created_at between '0001-01-01 00:00+00' and '9999-12-31 00:00+00'),
    -- hashtextextended(key, 0); null for an event without a key. Two keys with one hash wait for each other, no more.
    key_hash   bigint,
    -- Payload, key and headers together, so that a bridge can bound its memory before it fetches them.
    size_bytes integer     not null,
    -- Rises with every requeue and replay; part of the dedup id.
    generation integer     not null default 0,
    -- Not null: held, not to be sent; at that time its owner promotes it (sets null) and reads the lane again from
    -- here. Later deliveries of its key wait behind it.
    due_at     timestamptz check (due_at < '9999-12-31 00:00+00'),
    -- Order within a lane is per handler, so that a stopped handler's backlog is never read past by another.
    primary key (lane, handler, seq)
) with (
    -- The bridge vacuums this table itself every few seconds; this is for when no bridge runs.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
);
-- Held deliveries by due time, and by key to hide those behind them. Partial: fresh rows pay nothing.
create index {p}deliveries_due_idx on {schema}.{p}deliveries (lane, due_at) where due_at is not null;
create index {p}deliveries_held_idx on {schema}.{p}deliveries (lane, handler, key_hash, seq) where due_at is not null;

-- Failed attempts of deliveries that are not completed yet, for people. Written with each retry and burial.
create table {schema}.{p}failures (
    lane     smallint    not null,
    handler  integer     not null,
    seq      bigint      not null,
    attempt  integer     not null,
    at       timestamptz not null default pg_catalog.clock_timestamp(),
    outcome  text        not null check (outcome in ('rejected', 'refused')),
    code     text        not null,
    error    text        not null,
    primary key (lane, handler, seq, attempt)
);

-- Dead letters: deliveries that will not be tried again unless requeued. The event keeps the payload.
create table {schema}.{p}dead (
    lane       smallint    not null,
    handler    integer     not null,
    seq        bigint      not null,
    created_at timestamptz not null,
    key_hash   bigint,
    size_bytes integer     not null,
    attempts   integer     not null,
    generation integer     not null,
    code       text        not null,
    error      text        not null,
    buried_at  timestamptz not null default pg_catalog.clock_timestamp(),
    primary key (lane, handler, seq)
);
create index {p}dead_key_idx on {schema}.{p}dead (lane, handler, key_hash, seq);

-- Ids given by publishers, so that publishing one again finds the first. Events without one never come here.
create table {schema}.{p}event_ids (
    id         text        primary key,
    seq        bigint      not null,
    created_at timestamptz not null
);
create index {p}event_ids_created_idx on {schema}.{p}event_ids (created_at);

-- One row per run of a bridge (rather: per lock session). The epoch is the fence: every state write locks this row
-- FOR SHARE first, and who takes a lane from a dead owner sets fenced_at before reading it.
create table {schema}.{p}bridges (
    epoch      bigint      generated always as identity primary key,
    name       text        not null,
    -- Random per process, so that two bridges with one name are told apart.
    instance   text        not null,
    version    text        not null,
    -- The backend that holds the advisory locks.
    lock_pid   integer     not null,
    started_at timestamptz not null default pg_catalog.clock_timestamp(),
    -- Rises while the bridge makes progress; peers watch it on their own clock, never compare timestamps.
    beat       bigint      not null default 0,
    fenced_at  timestamptz,
    -- Set by a bridge that drained and left.
    left_at    timestamptz
) with (fillfactor = 50);

-- Who owns which lane. The advisory lock is what is held; this says whom to fence when it is found free.
create table {schema}.{p}lanes (
    lane     smallint primary key check (lane between 0 and 255),
    epoch    bigint references {schema}.{p}bridges (epoch),
    taken_at timestamptz
) with (fillfactor = 50);
insert into {schema}.{p}lanes (lane) select pg_catalog.generate_series(0, 255);

-- What people did: one row per operation that changed deliveries by hand.
create table {schema}.{p}audit (
    id      bigint      generated always as identity primary key,
    at      timestamptz not null default pg_catalog.clock_timestamp(),
    who     text        not null default session_user,
    action  text        not null,
    detail  jsonb       not null,
    changed bigint      not null
);

-- Tables give PUBLIC nothing by default; publishers call functions, and EXECUTE shall be all they need.
grant usage on schema {schema} to public;
