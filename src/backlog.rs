//! What waits in the database, read every few seconds for the metrics: never per scrape, never on a session that a vacuum
//! may hold for minutes.
//!
//! Never: a failure here stops delivery. Figures that cannot be read keep their last value, and
//! `backlog_read_timestamp_seconds` says of when they are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_util::sync::CancellationToken;

use crate::db::{Client, Connector, Names, Session, operate};
use crate::error::{Error, Result};
use crate::metrics::{Metrics, unix_now};

/// Most scrape intervals are as long.
const EVERY: Duration = Duration::from_secs(10);
/// Reading takes at most this fraction of the time, however much waits.
const REST: u32 = 20;
/// Counts end here: enough for an alert, and some milliseconds of the server.
const COUNT_LIMIT: i64 = 10_000;

const CLOCK: &str = "select extract(epoch from clock_timestamp())::float8";

/// Runs until `stop`.
pub(crate) async fn run(connector: Connector, names: Names, metrics: Arc<Metrics>, stop: CancellationToken) {
    let mut session = None;
    let mut failing = false;
    loop {
        let began = Instant::now();
        match stop.run_until_cancelled(read(&connector, &names, &metrics, &mut session)).await {
            None => return,
            Some(Ok(())) => failing = false,
            // The same outage is told by every other session.
            Some(Err(error)) if failing => tracing::debug!(error = %error.report(), "reading the backlog failed again"),
            Some(Err(error)) => {
                failing = true;
                tracing::warn!(error = %error.report(), "reading the backlog for the metrics failed; it is tried again");
            }
        }
        let rest = EVERY.max(began.elapsed() * REST);
        if stop.run_until_cancelled(tokio::time::sleep(rest)).await.is_none() {
            return;
        }
    }
}

async fn read(connector: &Connector, names: &Names, metrics: &Metrics, session: &mut Option<Client>) -> Result<()> {
    if session.as_ref().is_none_or(Client::is_closed) {
        *session = None;
        *session = Some(connector.connect("metrics", Session::Work).await?);
    }
    let session = session.as_ref().ok_or_else(|| Error::transient("the session of the metrics closed"))?;
    metrics.set_clock_offset(offset(session).await?);
    for row in session.query(&names.render(operate::HANDLERS), &[&COUNT_LIMIT]).await? {
        let handler: String = cell(&row, 0)?;
        // Another configuration's; its bridge tells of it.
        let Some(handler) = metrics.handler(&handler) else { continue };
        let (ordinary, blocked): (i64, i64) = (cell(&row, 3)?, cell(&row, 8)?);
        let backlog = &handler.backlog;
        backlog.pending.set((ordinary - blocked).max(0));
        backlog.scheduled.set(cell(&row, 4)?);
        backlog.retrying.set(cell(&row, 5)?);
        backlog.dead.set(cell(&row, 6)?);
        backlog.blocked.set(blocked);
        backlog.blocked_keys.set(cell(&row, 9)?);
        backlog.oldest_pending.set(cell::<Option<f64>>(&row, 7)?.unwrap_or(0.0).max(0.0));
        backlog.oldest_blocked.set(cell::<Option<f64>>(&row, 10)?.unwrap_or(0.0).max(0.0));
    }
    metrics.backlog_read.set(unix_now());
    Ok(())
}

/// The database's clock less ours, in seconds, wrong by at most half of the time that the question took.
async fn offset(session: &Client) -> Result<f64> {
    let asked = unix_now();
    let row = session.query_one(CLOCK, &[]).await?;
    let answered = unix_now();
    Ok(cell::<f64>(&row, 0)? - f64::midpoint(asked, answered))
}

fn cell<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, column: usize) -> Result<T> {
    row.try_get(column).map_err(|source| Error::new("read the backlog").source_is(source))
}
