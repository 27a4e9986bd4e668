//! Housekeeping: partitions ahead, retention, vacuum of the one table that churns.
//!
//! Never: a failure here stops delivery. Publishing does not depend on it either, the default partition catches what
//! comes when no partition was made in time.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::config;
use crate::db::{Client, Connector, Names, Session, deliveries};
use crate::error::{Error, Result};
use crate::metrics::Metrics;

/// Dead deliveries of a handler in one transaction.
const PURGED_AT_ONCE: i32 = 1000;
/// Days for which partitions exist beyond today.
const DAYS_AHEAD: i32 = 3;
const PARTITIONS_EVERY: Duration = Duration::from_secs(600);
/// Autovacuum looks once a minute, in which a busy table grows tenfold; measured, every few seconds keeps it at 12 MB.
const VACUUM_EVERY: Duration = Duration::from_secs(5);
/// Dead rows that are worth a vacuum.
const DEAD_ROWS: i64 = 5000;

/// Longest vacuum; the session's usual limit is for statements that somebody waits for.
const VACUUM_DEADLINE: Duration = Duration::from_secs(600);

/// Dead rows of the deliveries, and whether we may vacuum them: a role that may not gets a mere warning.
const DEAD_TUPLES: &str = "
select s.n_dead_tup, pg_has_role(c.relowner, 'USAGE') from pg_stat_all_tables s join pg_class c on c.oid = s.relid
 where s.relid = '{schema}.{p}deliveries'::regclass";
const IN_DEFAULT: &str = "select count(*) from (select from {schema}.{p}events_default limit 1000) d";

/// Runs until `stop`.
pub(crate) async fn run(
    connector: Connector,
    names: Names,
    retention: config::Retention,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    // A vacuum is no part of a transaction, which all is behind a pooler.
    let may_vacuum = !connector.is_pooled();
    let mut janitor = Janitor { connector, names, retention, metrics, session: None, may_vacuum, default_rows: 0 };
    let mut partitions = tokio::time::interval(PARTITIONS_EVERY);
    partitions.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut vacuum = tokio::time::interval(VACUUM_EVERY);
    vacuum.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let round = async {
            tokio::select! {
                _ = partitions.tick() => match janitor.partitions().await {
                    Ok(()) => janitor.purge().await,
                    failed => failed,
                },
                _ = vacuum.tick() => janitor.vacuum().await,
            }
        };
        // A vacuum may take minutes; a bridge that drains does not wait for it.
        let done = tokio::select! {
            () = stop.cancelled() => return,
            done = round => done,
        };
        if let Err(error) = done {
            tracing::warn!(error = %error.report(), "housekeeping failed; it is tried again");
        }
    }
}

struct Janitor {
    connector: Connector,
    names: Names,
    retention: config::Retention,
    metrics: Arc<Metrics>,
    session: Option<Client>,
    may_vacuum: bool,
    /// As last reported.
    default_rows: i64,
}

impl Janitor {
    async fn session(&mut self) -> Result<&Client> {
        if self.session.as_ref().is_none_or(Client::is_closed) {
            self.session = None;
            self.session = Some(self.connector.connect("janitor", Session::Work).await?);
        }
        self.session.as_ref().ok_or_else(|| Error::transient("the janitor's session closed"))
    }

    async fn partitions(&mut self) -> Result<()> {
        let ensure = self.names.render(deliveries::ENSURE_PARTITIONS);
        let drop = self.names.render(deliveries::DROP_PARTITIONS);
        let in_default = self.names.render(IN_DEFAULT);
        let retention = self.retention.events;
        let session = self.session().await?;
        for row in session.query(&ensure, &[&DAYS_AHEAD]).await? {
            tracing::info!(partition = row.try_get::<_, String>(0).unwrap_or_default(), "made a partition");
        }
        if let Some(retention) = retention {
            for row in session.query(&drop, &[&retention.as_secs_f64()]).await? {
                tracing::info!(
                    partition = row.try_get::<_, String>(0).unwrap_or_default(),
                    "dropped a partition past its retention; all of its events were delivered"
                );
            }
        }
        let rows: i64 = session.query_one(&in_default, &[]).await?.try_get(0).unwrap_or(0);
        if rows > 0 && rows != self.default_rows {
            tracing::error!(rows, "events are in the default partition: none was made for their day in time");
        }
        self.default_rows = rows;
        self.metrics.default_partition_rows.set(rows);
        Ok(())
    }

    /// Gives up what was dead for too long, a batch at a time so that nobody waits for its locks.
    async fn purge(&mut self) -> Result<()> {
        let Some(retention) = self.retention.dead else { return Ok(()) };
        let purge = self.names.render(deliveries::PURGE_DEAD);
        let broken = |source| Error::new("read what was purged").source_is(source);
        loop {
            let rows = self.session().await?.query(&purge, &[&retention.as_secs_f64(), &PURGED_AT_ONCE]).await?;
            let mut full = false;
            for row in rows {
                let (handler, purged): (String, i64) =
                    (row.try_get(0).map_err(broken)?, row.try_get(1).map_err(broken)?);
                full |= purged >= i64::from(PURGED_AT_ONCE);
                tracing::warn!(handler, purged, "gave up deliveries that were dead for longer than retention.dead");
            }
            if !full {
                return Ok(());
            }
        }
    }

    async fn vacuum(&mut self) -> Result<()> {
        if !self.may_vacuum {
            return Ok(());
        }
        let dead = self.names.render(DEAD_TUPLES);
        let vacuum = self.names.render(deliveries::VACUUM);
        let session = self.session().await?;
        let row = session.query_one(&dead, &[]).await?;
        let (dead, ours) = (row.try_get(0).unwrap_or(0_i64), row.try_get(1).unwrap_or(false));
        if dead < DEAD_ROWS {
            return Ok(());
        }
        if !ours {
            self.may_vacuum = false;
            tracing::warn!(
                "this role may not vacuum the deliveries; autovacuum has to; hint: make the bridge's role their owner"
            );
            return Ok(());
        }
        session.batch_execute(&format!("set statement_timeout = '{}s'", VACUUM_DEADLINE.as_secs())).await?;
        session.run_for(VACUUM_DEADLINE, session.raw().batch_execute(&vacuum)).await?;
        session.batch_execute("reset statement_timeout").await
    }
}
