-- The stream as a hint: what the write-ahead log shows wakes the poll and saves it the payloads. Nothing here decides
-- what is sent.

-- How a bridge learns of deliveries, for people: null is the poll alone, as configured.
alter table {schema}.{p}bridges
    add column source       text check (source in ('wal', 'poll')),
    -- Why not the log.
    add column source_note  text,
    add column source_since timestamptz;

-- Marks how this process learns of deliveries. By instance: an epoch ends with every lock session.
create function {schema}.{p}report_source(p_instance text, p_source text, p_note text) returns void
language sql set search_path = pg_catalog, pg_temp as $$
    update {schema}.{p}bridges b set source = p_source, source_note = p_note, source_since = clock_timestamp()
     where b.instance = p_instance and b.fenced_at is null
       and (b.source, b.source_note) is distinct from (p_source, p_note)
$$;

-- A row that the stream shows and no snapshot ever sees: it is deleted in the transaction that inserts it. Whoever
-- does not get it back does not get events either. Never published, so it has no number of the sequence. Definer: a bridge
-- needs no right to insert events for it.
create function {schema}.{p}canary(p_mark bigint) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    if p_mark >= 0 then
        raise exception 'canary: the mark must be negative, not %', p_mark using errcode = 'invalid_parameter_value';
    end if;
    insert into {schema}.{p}events (seq, created_at, lane, format, id, type, handlers, payload)
    values (p_mark, v_now, 0, 'b', 'canary', 'lanebridge.canary', '{}', '');
    delete from {schema}.{p}events e where e.seq = p_mark and e.created_at = v_now;
end $$;

revoke all on function {schema}.{p}report_source(text, text, text), {schema}.{p}canary(bigint) from public;

-- Inserts only, and as rows of the parent: partitions come and go. Needs CREATE on the database; without it bridges
-- poll, and say who must run what.
do $$ declare
    publication constant text := left('{schema_text}_{p_text}wal', 63);
begin
    begin
        execute pg_catalog.format('create publication %I for table only {schema}.{p}events
            with (publish = ''insert'', publish_via_partition_root = true)', publication);
    exception when duplicate_object then
        -- Left behind by an earlier installation: a publication survives its tables.
        execute pg_catalog.format('alter publication %I set table only {schema}.{p}events', publication);
        execute pg_catalog.format('alter publication %I set (publish = ''insert'', publish_via_partition_root = true)',
            publication);
    end;
exception when insufficient_privilege then
    raise notice 'no right to create publication %: bridges will poll', publication;
end $$;
