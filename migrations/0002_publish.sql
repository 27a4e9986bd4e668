-- Publishing. SECURITY DEFINER with a fixed search_path and qualified names: a temporary table or a hostile
-- search_path of the caller can neither see nor swallow an event (CVE-2007-2138's class), and EXECUTE is all a
-- publisher needs. row_security = off: where policies bind even the owner, publishing fails instead of not seeing the
-- handlers. Functions that only those call inherit these settings: setting them again costs a tenth of a
-- publish. They are nobody's but the owner's to execute. Nothing here depends on triggers, so
-- session_replication_role = replica changes nothing.

-- Keys that one transaction locks one by one before it takes whole lanes instead: lock memory is shared by the
-- whole server, and 100,000 key locks in one transaction exhaust its default size.
-- Two transactions that each pass the limit in several calls hold lanes that the other wants, and one is ended with
-- 40P01, even when they share no key; many keys belong into one call, which takes its locks in order.
create function {schema}.{p}key_lock_limit() returns integer language sql immutable parallel safe
    as $$ select 256 $$;

-- Why headers cannot be published, or null. One rule for all brokers: names are HTTP tokens, values have no control
-- characters, and no name can steer a broker or pose as one of ours.
create function {schema}.{p}headers_problem(headers jsonb) returns text
language plpgsql immutable parallel safe as $$
declare
    bad record;
begin
    if jsonb_typeof(headers) <> 'object' then
        return format('headers must be a JSON object of strings, not %s', jsonb_typeof(headers));
    end if;
    select count(*) as n, coalesce(sum(octet_length(h.key) + octet_length(h.value)), 0) as bytes
      into bad from jsonb_each_text(headers) h;
    if bad.n > 64 or bad.bytes > 16384 then
        return format('%s headers of %s bytes; the limits are 64 headers and 16384 bytes', bad.n, bad.bytes);
    end if;
    for bad in select h.key, h.value, jsonb_typeof(h.value) as kind from jsonb_each(headers) h loop
        if bad.kind <> 'string' then
            return format('header %s must be a string, not %s', quote_literal(bad.key), bad.kind);
        end if;
        if bad.key !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]{1,128}$' then
            return format('header name %s is not 1 to 128 of letters, digits and !#$%%&''*+.^_`|~-', quote_literal(left(bad.key, 60)));
        end if;
        -- In "C": elsewhere an I may have another small letter, and LANEBRIDGE pass as none of ours.
        if lower(bad.key collate "C") ~ '^(ce[_-]|nats-|lanebridge)' or lower(bad.key collate "C") = 'data' then
            return format('header name %s is reserved (ce_, ce-, nats-, lanebridge, data)', quote_literal(bad.key));
        end if;
        if (bad.value #>> '{}') ~ '[\x01-\x1f\x7f]' then
            return format('the value of header %s holds a control character', quote_literal(bad.key));
        end if;
    end loop;
    return null;
end $$;

-- Why an event cannot be published, or null.
create function {schema}.{p}event_problem(
    type text, payload bytea, key text, headers jsonb, id text, deliver_at timestamptz, max_payload_bytes integer)
    returns text
language plpgsql immutable parallel safe as $$
begin
    if type is null or type = '' then
        return 'type must not be null or empty';
    elsif octet_length(type) > 255 then
        return format('type has %s bytes; the limit is 255', octet_length(type));
    elsif type ~ '[\x01-\x1f\x7f]' then
        return 'type holds a control character';
    elsif payload is null then
        return 'payload must not be null';
    elsif octet_length(payload) > max_payload_bytes then
        return format('payload has %s bytes; max_payload_bytes is %s', octet_length(payload), max_payload_bytes);
    elsif octet_length(key) > 4096 then
        return format('key has %s bytes; the limit is 4096', octet_length(key));
    elsif id = '' then
        return 'id must not be empty';
    elsif octet_length(id) > 512 then
        return format('id has %s bytes; the limit is 512', octet_length(id));
    elsif id ~ '[\x01-\x1f\x7f]' then
        return 'id holds a control character';
    elsif deliver_at = 'infinity'::timestamptz then
        return 'deliver_at must be a time, not infinity';
    elsif deliver_at >= '9999-12-31 00:00+00'::timestamptz then
        return 'deliver_at must be before the end of the year 9999';
    elsif headers is not null then
        return {schema}.{p}headers_problem(headers);
    end if;
    return null;
end $$;

-- Whether a handler takes events of this type. CASE, because a planner would ask the expression first.
create function {schema}.{p}takes(type text, type_likes text[], type_regex text) returns boolean
language sql immutable parallel safe as $$
    select case when type_likes is null or type like any (type_likes) then type ~ type_regex else false end
$$;

-- The name that no handler has, or null: a typo must not swallow an event.
create function {schema}.{p}handlers_problem(names text[]) returns text
language plpgsql stable as $$
begin
    return (select 'unknown handler ' || coalesce(quote_literal(n), 'null') from unnest(names) n
             where n is null or not exists (select from {schema}.{p}handlers h where h.name = n) limit 1);
end $$;

-- Handler names to ids, sorted.
create function {schema}.{p}handler_ids(names text[]) returns integer[]
language plpgsql stable as $$
begin
    return array(select h.id from {schema}.{p}handlers h where h.name = any (names) order by h.id);
end $$;

-- NOTIFY at most every 10 ms over all sessions; two that look at the same moment may both speak. The listener polls a
-- little later again for those that kept quiet.
create function {schema}.{p}notify() returns void
language plpgsql as $$
declare
    now_ms bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
    last_ms bigint;
begin
    select last_value into last_ms from {schema}.{p}notify_clock;
    if now_ms - last_ms >= 10 or now_ms < last_ms then
        perform setval('{schema}.{p}notify_clock', now_ms);
        perform pg_notify({schema}.{p}channel(), '');
    end if;
end $$;

-- The channel's name; hashed when it would pass the 63 bytes of an identifier.
create function {schema}.{p}channel() returns text
language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
    select case when octet_length('{schema_text}.{p_text}deliveries') <= 63
           then '{schema_text}.{p_text}deliveries' else 'lanebridge_' || md5('{schema_text}.{p_text}deliveries') end
$$;

-- An id that was published before: nothing new, but handlers that lack a delivery get one. Returns its seq, or null
-- when retention has just forgotten the id. Such a delivery is older than what its key may have seen; it is marked
-- due, so that the lane's owner reads the lane again from there.
create function {schema}.{p}republish(p_id text, wanted integer[], p_deliver_at timestamptz) returns bigint
language plpgsql as $$
declare
    known {schema}.{p}event_ids;
    event record;
    missing integer[];
begin
    select * into known from {schema}.{p}event_ids where id = p_id;
    if not found then
        return null;
    end if;
    -- Nearly always nothing is missing: look without a lock, and again under it.
    for pass in 1 .. 2 loop
        select e.lane, e.key, e.handlers,
               octet_length(e.payload) + coalesce(octet_length(e.key), 0) + coalesce(octet_length(e.headers::text), 0) as size_bytes
          into event from {schema}.{p}events e where e.seq = known.seq and e.created_at = known.created_at;
        -- Not there: past its retention; the id is remembered a little longer than the event.
        if not found or wanted <@ event.handlers then
            return known.seq;
        end if;
        if pass = 1 then
            perform 1 from {schema}.{p}event_ids where id = p_id for update;
            if not found then
                return null;
            end if;
        end if;
    end loop;
    missing := array(select w from unnest(wanted) w where w <> all (event.handlers) order by w);
    -- The event first: under REPEATABLE READ it is here that another session's addition shows, as 40001.
    update {schema}.{p}events e set handlers = e.handlers || missing
     where e.seq = known.seq and e.created_at = known.created_at;
    insert into {schema}.{p}deliveries (lane, handler, seq, created_at, key_hash, size_bytes, due_at)
    select event.lane, h, known.seq, known.created_at, hashtextextended(event.key, 0), event.size_bytes,
           greatest(clock_timestamp(), p_deliver_at)
      from unnest(missing) h;
    return known.seq;
end $$;

-- 'xid:count:,hash,hash,' of the keys that this transaction has locked one by one, so that a key is counted and locked
-- once. A transaction-local setting: a rolled back savepoint undoes it together with the locks. It names the
-- transaction because whatever a session sets, or a pooler hands on, must not pass for a lock of this one.
create function {schema}.{p}held_keys(xid text) returns text
language plpgsql stable as $$
declare
    held text := current_setting('{schema_text}.{p_text}held', true);
begin
    if split_part(held, ':', 1) = xid then
        return held;
    end if;
    return xid || ':0:,';
end $$;

-- One event. The overloads below give it bytes and a format, and make it compare bytes whatever collation the caller's
-- columns have: a key's hash must not depend on it.
create function {schema}.{p}publish_one(
    p_type text, p_payload bytea, p_format "char", p_key text, p_headers jsonb, p_id text,
    p_deliver_at timestamptz, p_handlers text[]) returns bigint
language plpgsql as $$
declare
    settings record;
    problem text;
    v_xid text;
    v_hash bigint;
    v_lane smallint;
    v_seq bigint;
    v_known bigint;
    v_now timestamptz;
    v_due timestamptz;
    v_size integer;
    held text;
    held_count integer;
begin
    select i.max_payload_bytes, i.listening_until > clock_timestamp() as notify, i.key_lock_class,
           case when p_handlers is null then array(
               select h.id from {schema}.{p}handlers h where {schema}.{p}takes(p_type, h.type_likes, h.type_regex) order by h.id) end as handlers
      into settings from {schema}.{p}installation i;
    problem := {schema}.{p}event_problem(p_type, p_payload, p_key, p_headers, p_id, p_deliver_at, settings.max_payload_bytes);
    if problem is null and p_handlers is not null then
        problem := {schema}.{p}handlers_problem(p_handlers);
        settings.handlers := {schema}.{p}handler_ids(p_handlers);
    end if;
    if problem is not null then
        raise exception 'publish: %', problem using errcode = 'invalid_parameter_value';
    end if;

    -- The transaction's number comes before the event's: a bridge that sees all transactions below a number ended
    -- then knows that no event below the seq it noted can still appear.
    v_xid := pg_current_xact_id()::text;

    if p_key is not null then
        v_hash := hashtextextended(p_key, 0);
        v_lane := (v_hash & 255)::smallint;
        held := {schema}.{p}held_keys(v_xid);
        if strpos(held, ',' || v_hash || ',') = 0 then
            held_count := split_part(held, ':', 2)::integer;
            if held_count < {schema}.{p}key_lock_limit() then
                perform pg_advisory_xact_lock_shared(settings.key_lock_class, v_lane);
                perform pg_advisory_xact_lock(v_hash # settings.key_lock_class);
                perform set_config('{schema_text}.{p_text}held',
                    v_xid || ':' || (held_count + 1) || ':' || split_part(held, ':', 3) || v_hash || ',', true);
            else
                perform pg_advisory_xact_lock(settings.key_lock_class, v_lane);
            end if;
        end if;
    end if;

    v_seq := nextval('{schema}.{p}events_seq');
    v_now := clock_timestamp();
    if p_key is null then
        v_lane := (v_seq & 255)::smallint;
    end if;
    if p_deliver_at > v_now then
        v_due := p_deliver_at;
    end if;

    if p_id is not null then
        loop
            insert into {schema}.{p}event_ids (id, seq, created_at) values (p_id, v_seq, v_now) on conflict (id) do nothing;
            exit when found;
            v_known := {schema}.{p}republish(p_id, settings.handlers, p_deliver_at);
            if v_known is not null then
                return v_known;
            end if;
        end loop;
    end if;

    insert into {schema}.{p}events (seq, created_at, lane, format, id, type, key, headers, handlers, payload)
    values (v_seq, v_now, v_lane, p_format, coalesce(p_id, gen_random_uuid()::text), p_type, p_key, p_headers,
            settings.handlers, p_payload);
    v_size := octet_length(p_payload) + coalesce(octet_length(p_key), 0) + coalesce(octet_length(p_headers::text), 0);
    insert into {schema}.{p}deliveries (lane, handler, seq, created_at, key_hash, size_bytes, due_at)
    select v_lane, h, v_seq, v_now, v_hash, v_size, v_due from unnest(settings.handlers) h;

    if settings.notify and v_due is null then
        perform {schema}.{p}notify();
    end if;
    return v_seq;
end $$;

-- The first half of a batch: locks the keys, then inserts all events with new ids in one statement.
create function {schema}.{p}insert_batch(
    types text[], payloads bytea[], formats text[], keys text[], headers jsonb[], ids text[],
    deliver_at timestamptz[], handlers jsonb[]) returns table (ord integer, seq bigint, is_new boolean)
language plpgsql as $$
#variable_conflict use_column
declare
    settings record;
    bad record;
    v_xid text;
    held text;
    held_count integer;
    hashes bigint[];
    n integer := cardinality(types);
begin
    if types is null or payloads is null or formats is null then
        raise exception 'publish_batch: types, payloads and formats must not be null' using errcode = 'invalid_parameter_value';
    end if;
    if cardinality(payloads) <> n or cardinality(formats) <> n or cardinality(keys) <> n or cardinality(headers) <> n
       or cardinality(ids) <> n or cardinality(deliver_at) <> n or cardinality(handlers) <> n then
        raise exception 'publish_batch: the arrays differ in length' using errcode = 'invalid_parameter_value';
    end if;
    if n = 0 then
        return;
    end if;
    select i.max_payload_bytes, i.listening_until > clock_timestamp() as notify, i.key_lock_class
      into settings from {schema}.{p}installation i;

    for bad in
        select u.*, {schema}.{p}event_problem(u.type, u.payload, u.key, u.headers, u.id, u.deliver_at, settings.max_payload_bytes) as problem
          from unnest(types, payloads, formats, keys, headers, ids, deliver_at, handlers)
               with ordinality u(type, payload, format, key, headers, id, deliver_at, handlers, i)
         where {schema}.{p}event_problem(u.type, u.payload, u.key, u.headers, u.id, u.deliver_at, settings.max_payload_bytes) is not null
            or u.format is null or u.format not in ('j', 't', 'b') or u.handlers is not null
         order by u.i
    loop
        if bad.problem is null and (bad.format is null or bad.format not in ('j', 't', 'b')) then
            bad.problem := 'format must be j, t or b';
        elsif bad.problem is null and jsonb_typeof(bad.handlers) <> 'array' then
            bad.problem := 'handlers must be an array of names';
        elsif bad.problem is null then
            bad.problem := {schema}.{p}handlers_problem(array(select jsonb_array_elements_text(bad.handlers)));
        end if;
        if bad.problem is not null then
            raise exception 'publish: event %: %', bad.i - 1, bad.problem using errcode = 'invalid_parameter_value';
        end if;
    end loop;

    -- Before any seq, as in publish_one.
    v_xid := pg_current_xact_id()::text;

    -- One order for every call: lanes, then keys, each ascending; two calls can wait for each other but not in a ring.
    held := {schema}.{p}held_keys(v_xid);
    hashes := array(select k.hash from (select distinct hashtextextended(k, 0) as hash from unnest(keys) k where k is not null) k
                     where strpos(held, ',' || k.hash || ',') = 0 order by k.hash);
    if hashes <> '{}' then
        held_count := split_part(held, ':', 2)::integer + cardinality(hashes);
        if held_count <= {schema}.{p}key_lock_limit() then
            perform pg_advisory_xact_lock_shared(settings.key_lock_class, l.lane)
               from (select distinct (h & 255)::integer as lane from unnest(hashes) h order by 1 offset 0) l;
            perform pg_advisory_xact_lock(h # settings.key_lock_class) from unnest(hashes) h;
            perform set_config('{schema_text}.{p_text}held', v_xid || ':' || held_count || ':' || split_part(held, ':', 3)
                || array_to_string(hashes, ',') || ',', true);
        else
            perform pg_advisory_xact_lock(settings.key_lock_class, l.lane)
               from (select distinct (h & 255)::integer as lane from unnest(hashes) h order by 1 offset 0) l;
        end if;
    end if;

    return query
    with routes as materialized (
        select t.type, array(select h.id from {schema}.{p}handlers h where {schema}.{p}takes(t.type, h.type_likes, h.type_regex) order by h.id) as handlers
          from (select distinct u as type from unnest(types) u) t
    ), input as materialized (
        select u.i, nextval('{schema}.{p}events_seq') as seq, clock_timestamp() as created_at, u.type, u.payload,
               u.format, u.key, u.headers, u.id, hashtextextended(u.key, 0) as hash, u.deliver_at, u.handlers
          from (select * from unnest(types, payloads, formats, keys, headers, ids, deliver_at, handlers)
                with ordinality v(type, payload, format, key, headers, id, deliver_at, handlers, i)
                order by v.i offset 0) u
    ), full_input as materialized (
        select i.*, (coalesce(i.hash, i.seq) & 255)::smallint as lane,
               octet_length(i.payload) + coalesce(octet_length(i.key), 0) + coalesce(octet_length(i.headers::text), 0) as size_bytes,
               case when i.handlers is null then r.handlers
                    else {schema}.{p}handler_ids(array(select jsonb_array_elements_text(i.handlers))) end as handler_ids
          from input i join routes r on r.type = i.type
    ), new_ids as (
        insert into {schema}.{p}event_ids as i (id, seq, created_at)
        select f.id, f.seq, f.created_at from full_input f where f.id is not null order by f.id, f.seq
        on conflict (id) do nothing
        returning i.seq
    ), accepted as materialized (
        select f.* from full_input f
         where f.id is null or f.seq in (select n.seq from new_ids n)
    ), new_events as (
        insert into {schema}.{p}events (seq, created_at, lane, format, id, type, key, headers, handlers, payload)
        select a.seq, a.created_at, a.lane, a.format::"char", coalesce(a.id, gen_random_uuid()::text), a.type, a.key,
               a.headers, a.handler_ids, a.payload
          from accepted a order by a.seq
    ), new_deliveries as (
        insert into {schema}.{p}deliveries (lane, handler, seq, created_at, key_hash, size_bytes, due_at)
        select a.lane, h, a.seq, a.created_at, a.hash, a.size_bytes,
               case when a.deliver_at > a.created_at then a.deliver_at end
          from accepted a cross join unnest(a.handler_ids) h order by a.lane, h, a.seq
    )
    select f.i::integer, f.seq, f.id is null or f.seq in (select n.seq from new_ids n) from full_input f order by f.i;

    -- Nobody needs to be woken for what is delayed.
    if settings.notify
       and (deliver_at is null or exists (select from unnest(deliver_at) d where d is null or d <= clock_timestamp())) then
        perform {schema}.{p}notify();
    end if;
end $$;

-- Many events in one call: arrays of one length, in publishing order. A null element takes the default, and so does a
-- null array from keys on; handlers[i] is null (match by type) or a JSON array of names. Returns, per element, its seq
-- and whether it is new. Ids that were known already come second, in statements that see the batch's own rows, and in
-- their own order, so that two batches lock them alike.
create function {schema}.{p}publish_batch(
    types text[], payloads bytea[], formats text[], keys text[], headers jsonb[], ids text[],
    deliver_at timestamptz[], handlers jsonb[]) returns table (ord integer, seq bigint, is_new boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
#variable_conflict use_column
declare
    seqs bigint[];
    news boolean[];
    known record;
begin
    select array_agg(b.seq order by b.ord), array_agg(b.is_new order by b.ord) into seqs, news
      from {schema}.{p}insert_batch(types collate "C", payloads, formats, keys collate "C", headers, ids collate "C",
                                    deliver_at, handlers) b;
    if false = any (news) then
        for known in
            select u.i::integer as i, u.id, u.type, u.deliver_at, u.handlers
              from unnest(news, ids, types, deliver_at, handlers) with ordinality u(is_new, id, type, deliver_at, handlers, i)
             where not u.is_new order by u.id collate "C", u.i
        loop
            seqs[known.i] := {schema}.{p}republish(known.id collate "C", case when known.handlers is null
                then array(select h.id from {schema}.{p}handlers h where {schema}.{p}takes(known.type collate "C", h.type_likes, h.type_regex) order by h.id)
                else {schema}.{p}handler_ids(array(select jsonb_array_elements_text(known.handlers))) end, known.deliver_at);
            if seqs[known.i] is null then
                raise exception 'publish: event %: its id was forgotten while it was published', known.i - 1
                    using errcode = 'serialization_failure', hint = 'Publish the batch again.';
            end if;
        end loop;
    end if;
    return query select u.i::integer, u.seq, u.is_new from unnest(seqs, news) with ordinality u(seq, is_new, i);
end $$;

create function {schema}.{p}publish(
    type text, payload text, key text default null, headers jsonb default null, id text default null,
    deliver_at timestamptz default null, handlers text[] default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
begin
    return {schema}.{p}publish_one(type collate "C", convert_to(payload, 'UTF8'), 't', key collate "C", headers,
        id collate "C", deliver_at, handlers);
end $$;

create function {schema}.{p}publish(
    type text, payload jsonb, key text default null, headers jsonb default null, id text default null,
    deliver_at timestamptz default null, handlers text[] default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
begin
    return {schema}.{p}publish_one(type collate "C", convert_to(payload::text, 'UTF8'), 'j', key collate "C", headers,
        id collate "C", deliver_at, handlers);
end $$;

create function {schema}.{p}publish(
    type text, payload json, key text default null, headers jsonb default null, id text default null,
    deliver_at timestamptz default null, handlers text[] default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
begin
    return {schema}.{p}publish_one(type collate "C", convert_to(payload::text, 'UTF8'), 'j', key collate "C", headers,
        id collate "C", deliver_at, handlers);
end $$;

create function {schema}.{p}publish(
    type text, payload bytea, key text default null, headers jsonb default null, id text default null,
    deliver_at timestamptz default null, handlers text[] default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
begin
    return {schema}.{p}publish_one(type collate "C", payload, 'b', key collate "C", headers, id collate "C", deliver_at,
        handlers);
end $$;

-- A JSON array of {type, payload, key, headers, id, deliver_at, handlers}; returns how many were new. A string
-- payload is stored as its text, any other JSON value as JSON.
create function {schema}.{p}publish_many(events jsonb) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
    bad record;
    v_new bigint;
    v_deliver_at timestamptz[];
begin
    if events is null or jsonb_typeof(events) <> 'array' then
        raise exception 'publish_many: events must be a JSON array, not %', coalesce(jsonb_typeof(events), 'null')
            using errcode = 'invalid_parameter_value';
    end if;
    for bad in
        select e.i - 1 as at, p.problem
          from jsonb_array_elements(events) with ordinality e(event, i)
          cross join lateral (select case
            when jsonb_typeof(e.event) <> 'object' then format('an object is expected, not %s', jsonb_typeof(e.event))
            when not e.event ? 'payload' then 'payload is missing'
            when jsonb_typeof(e.event -> 'payload') = 'null' then 'payload must not be null'
            else (select case
                when f.name not in ('type', 'payload', 'key', 'headers', 'id', 'deliver_at', 'handlers')
                    then format('unknown field %s', quote_literal(f.name))
                when f.name in ('type', 'key', 'id', 'deliver_at') and jsonb_typeof(f.value) not in ('string', 'null')
                    then format('%s must be a string, not %s', f.name, jsonb_typeof(f.value))
                when f.name = 'handlers' and jsonb_typeof(f.value) not in ('array', 'null')
                    then 'handlers must be an array of names' end
                from jsonb_each(e.event) f(name, value)
               where f.name not in ('type', 'payload', 'key', 'headers', 'id', 'deliver_at', 'handlers')
                  or (f.name in ('type', 'key', 'id', 'deliver_at') and jsonb_typeof(f.value) not in ('string', 'null'))
                  or (f.name = 'handlers' and jsonb_typeof(f.value) not in ('array', 'null'))
               limit 1)
            end as problem) p
         where p.problem is not null order by e.i limit 1
    loop
        raise exception 'publish_many: event %: %', bad.at, bad.problem using errcode = 'invalid_parameter_value';
    end loop;
    begin
        for bad in select e.event ->> 'deliver_at' as deliver_at, e.i - 1 as at
                     from jsonb_array_elements(events) with ordinality e(event, i) order by e.i loop
            v_deliver_at := array_append(v_deliver_at, bad.deliver_at::timestamptz);
        end loop;
    exception when data_exception then
        raise exception 'publish_many: event %: deliver_at: %', bad.at, sqlerrm using errcode = 'invalid_parameter_value';
    end;
    if events = '[]' then
        return 0;
    end if;
    select count(*) into v_new
      from (select array_agg(e.event ->> 'type' order by e.i) as types,
                   array_agg(convert_to(e.event ->> 'payload', 'UTF8') order by e.i) as payloads,
                   array_agg(case jsonb_typeof(e.event -> 'payload') when 'string' then 't' else 'j' end order by e.i) as formats,
                   array_agg(e.event ->> 'key' order by e.i) as keys,
                   array_agg(nullif(e.event -> 'headers', 'null') order by e.i) as headers,
                   array_agg(e.event ->> 'id' order by e.i) as ids,
                   array_agg(nullif(e.event -> 'handlers', 'null') order by e.i) as handlers
              from jsonb_array_elements(events) with ordinality e(event, i)) a
      cross join lateral {schema}.{p}publish_batch(a.types, a.payloads, a.formats, a.keys, a.headers, a.ids, v_deliver_at, a.handlers) r
     where r.is_new;
    return v_new;
end $$;
