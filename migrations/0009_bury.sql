-- A burial names the generation that failed: repeated after its answer was lost, it must not bury what an operator requeued
-- in between.

drop function {schema}.{p}bury(bigint, smallint[], integer[], bigint[], text[], text[], text[]);

-- p_generations is what the caller saw.
create function {schema}.{p}bury(
    p_epoch bigint, p_lanes smallint[], p_handlers integer[], p_seqs bigint[], p_generations integer[], p_outcomes text[],
    p_codes text[], p_errors text[]) returns setof integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform {schema}.{p}fence(p_epoch);
    return query
    with k as (
        select * from unnest(p_lanes, p_handlers, p_seqs, p_generations, p_outcomes, p_codes, p_errors)
                 with ordinality k(lane, handler, seq, generation, outcome, code, error, ord)
    ), d as (
        delete from {schema}.{p}deliveries d using k
         where d.lane = k.lane and d.handler = k.handler and d.seq = k.seq and d.generation = k.generation and d.attempts >= 0
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

revoke all on function
    {schema}.{p}bury(bigint, smallint[], integer[], bigint[], integer[], text[], text[], text[]) from public;
