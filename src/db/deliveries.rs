//! Statements on deliveries, one constant each, its rule above it. `{schema}` and `{p}` are filled in by `Names`.

/// The narrow poll. One snapshot for all asks; `ended_below` and the log position belong to it, the position being
/// taken after the snapshot, so that every row's commit lies before it. A held delivery (due_at) is not ordinary;
/// those behind a held or, where the handler blocks, a dead one of their key stay hidden, so that a lower bound may
/// pass them: whoever ends the hold reads again from there.
/// `owned`: the epoch is not fenced, so that what this read saw may be sent without another.
/// `looks` bounds the rows looked at: behind one head there may be millions, and a read that went past them all would keep
/// every other key waiting. The last row looked at comes back as `cut`, hidden or not: the next read begins with it.
/// $1 lanes, $2 handlers, $3 after, $4 limits, $5 ordered, $6 blocks, $7 epoch, $8 looks, more than the limits; at least
/// one row comes back.
pub(crate) const POLL: &str = "
select s.ended_below, s.written, s.owned, r.lane, r.handler, r.seq, r.key_hash, r.size_bytes, r.created_at, r.attempts,
       r.generation, r.cut
  from (select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as ended_below,
               (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as written,
               coalesce((select b.fenced_at is null from {schema}.{p}bridges b where b.epoch = $7), false) as owned) s
  left join lateral (
    select p.lane, p.handler, d.seq, d.key_hash, d.size_bytes, d.created_at, d.attempts, d.generation, d.cut
      from unnest($1::smallint[], $2::integer[], $3::bigint[], $4::integer[], $5::boolean[], $6::boolean[],
                  $8::integer[]) p(lane, handler, after, max, ordered, blocks, looks)
      cross join lateral (
        select d.seq, d.key_hash, d.size_bytes, d.created_at, d.attempts, d.generation, d.n = p.looks as cut
          from (select d.*, row_number() over (order by d.seq) as n
                  from (select d.seq, d.key_hash, d.size_bytes, d.created_at, d.attempts, d.generation
                          from {schema}.{p}deliveries d
                         where d.lane = p.lane and d.handler = p.handler and d.seq > p.after and d.due_at is null
                         order by d.seq limit p.looks) d) d
         where d.n = p.looks
            or not p.ordered or d.key_hash is null or (
                not exists (select from {schema}.{p}deliveries h
                             where h.lane = p.lane and h.handler = p.handler and h.key_hash = d.key_hash
                               and h.due_at is not null and h.seq < d.seq)
                and (not p.blocks or not exists (select from {schema}.{p}dead x
                             where x.lane = p.lane and x.handler = p.handler and x.key_hash = d.key_hash
                               and x.seq < d.seq)))
         order by d.seq limit p.max) d
  ) r on true";

/// The gate (R1): sees each delivery again, with its payload, right before it is sent. Left joins, so that every id
/// gets an answer; created_at finds the event's partition. A fenced epoch gets none: its lanes are somebody else's.
/// $1 lanes, $2 handlers, $3 seqs, $4 created_at, $5 ordered, $6 blocks, $7 epoch.
pub(crate) const CONFIRM: &str = "
select (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint as flushed, d.seq is not null as present,
       d.due_at is not null or ($5 and d.key_hash is not null and (
           exists (select from {schema}.{p}deliveries h
                    where h.lane = d.lane and h.handler = d.handler and h.key_hash = d.key_hash
                      and h.due_at is not null and h.seq < d.seq)
           or ($6 and exists (select from {schema}.{p}dead x
                    where x.lane = d.lane and x.handler = d.handler and x.key_hash = d.key_hash
                      and x.seq < d.seq)))) as held,
       d.generation, e.id, e.type, e.key, e.headers::text, e.format, e.payload, e.created_at
  from unnest($1::smallint[], $2::integer[], $3::bigint[], $4::timestamptz[])
       with ordinality k(lane, handler, seq, created_at, ord)
  left join {schema}.{p}deliveries d on d.lane = k.lane and d.handler = k.handler and d.seq = k.seq
  left join {schema}.{p}events e on e.seq = k.seq and e.created_at = k.created_at
 where (select b.fenced_at is null from {schema}.{p}bridges b where b.epoch = $7)
 order by k.ord";

/// A synchronous commit of our own: returns once everything written before it is on disk (R2). A message in the log
/// rather than an update: nothing to lock, nothing to vacuum.
pub(crate) const FLUSH: &str = "select pg_logical_emit_message(true, 'lanebridge.flush', '')";

/// $1 epoch, $2 lanes, $3 limit.
pub(crate) const PROMOTE: &str = "select lane, handler, first_seq from {schema}.{p}promote($1, $2, $3)";

/// $1 epoch, $2 lanes, $3 handlers, $4 seqs; a row per id that was not there.
pub(crate) const COMPLETE: &str = "select ord, reason from {schema}.{p}complete($1, $2, $3, $4)";

/// $1 epoch, $2 lanes, $3 handlers, $4 seqs, $5 attempts seen, $6 delays in milliseconds, $7 codes, $8 errors.
pub(crate) const RETRY: &str = "select * from {schema}.{p}retry($1, $2, $3, $4, $5, $6, $7, $8)";

/// $1 epoch, $2 lanes, $3 handlers, $4 seqs, $5 generations, $6 outcomes, $7 codes, $8 errors.
pub(crate) const BURY: &str = "select * from {schema}.{p}bury($1, $2, $3, $4, $5, $6, $7, $8)";

/// $1 epoch, $2 lanes, $3 handlers, $4 seqs, $5 attempts, $6 together.
pub(crate) const RECORD: &str = "select {schema}.{p}record_suspects($1, $2, $3, $4, $5, $6)";

/// $1 epoch, $2 lanes, $3 handlers, $4 seqs.
pub(crate) const CLEAR: &str = "select {schema}.{p}clear_suspects($1, $2, $3, $4)";

/// Run by the janitor on its own; a statement of its own because VACUUM refuses a transaction.
pub(crate) const VACUUM: &str = "vacuum (truncate off, index_cleanup on) {schema}.{p}deliveries";

/// $1 days ahead.
pub(crate) const ENSURE_PARTITIONS: &str = "select * from {schema}.{p}ensure_partitions($1)";

/// $1 retention in seconds, $2 most of each handler.
pub(crate) const PURGE_DEAD: &str = "select handler, purged from {schema}.{p}purge_dead($1, $2)";

/// $1 retention in seconds.
pub(crate) const DROP_PARTITIONS: &str = "select * from {schema}.{p}drop_partitions(make_interval(secs => $1))";
