-- Dead deliveries do not stay for ever: those that waited for an operator for longer than retention.dead are given up, by skip
-- and hence with an audit row, a batch for each call and handler. One that holds back its key stays: what comes after it would go
-- out without it, which only a person decides.

-- Returns how many were given up, by handler.
create function {schema}.{p}purge_dead(p_seconds double precision, p_limit integer default 1000)
returns table (handler text, purged bigint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    h record;
    v_seqs bigint[];
begin
    for h in select x.id, x.name, x.ordered and x.blocks as holds from {schema}.{p}handlers x order by x.id loop
        v_seqs := array(select x.seq from {schema}.{p}dead x
                         where x.handler = h.id and x.buried_at < clock_timestamp() - make_interval(secs => p_seconds)
                           and not (h.holds and x.key_hash is not null)
                         order by x.buried_at limit p_limit);
        continue when v_seqs = '{}';
        handler := h.name;
        purged := {schema}.{p}skip(h.name, v_seqs, p_limit => p_limit,
                                   p_reason => format('dead for longer than %s', make_interval(secs => p_seconds)));
        return next;
    end loop;
end $$;

revoke all on function {schema}.{p}purge_dead(double precision, integer) from public;
