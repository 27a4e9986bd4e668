//! Ownership of lanes: a session advisory lock per lane on one pinned session, an epoch that fences, a heartbeat.
//!
//! I1: a lane is announced as gained only after its lock is held, its former owner is fenced and the new owner is
//! committed, in that order (H54). I2: when the session cannot be proven alive within [`LIVENESS`], every lane is
//! announced as lost; locks live and die with the session, so they are lost together.
//! Never: the session runs nothing else, and it never goes through a pool.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::db::{Client, Connector, Names, Session};
use crate::error::{Error, Result};

/// Between two proofs that the locks are held.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A heartbeat that takes longer counts as a lost session.
const LIVENESS: Duration = Duration::from_secs(5);
/// First and longest wait before registering again after a loss; doubled in between. Short, since nothing is delivered
/// meanwhile.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

const LANES: i16 = 256;

/// $1 name, $2 instance, $3 version.
const REGISTER: &str = "select {schema}.{p}register_bridge($1, $2, $3)";
/// $1 lanes.
const LOCK: &str = "select * from {schema}.{p}lock_lanes($1)";
/// $1 epoch, $2 lanes.
const TAKE: &str = "select {schema}.{p}take_lanes($1, $2)";
/// $1 epoch.
const HEARTBEAT_SQL: &str = "select alive, locks, last_seq, xid from {schema}.{p}heartbeat($1)";
/// $1 epoch.
const LEAVE: &str = "select {schema}.{p}leave($1)";
/// Who holds lanes now, for a line that says why there are none to get.
const OWNERS: &str = "
select distinct b.name from {schema}.{p}lanes l join {schema}.{p}bridges b on b.epoch = l.epoch
 where b.fenced_at is null order by 1";

/// What the owner of the session tells dispatch.
#[derive(Debug)]
pub(crate) enum Ownership {
    Gained {
        epoch: i64,
        lanes: Vec<i16>,
    },
    /// Every event with a seq up to `last_seq` belongs to a transaction below `xid`.
    Mark {
        xid: i64,
        last_seq: i64,
    },
    /// All lanes of the epoch are gone; nothing may be sent or written for them.
    Lost,
    /// The first round ended without a lane; these bridges hold them.
    NoneFree {
        owners: Vec<String>,
    },
}

/// Who this process is.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub name: String,
    /// Random per process.
    pub instance: String,
}

/// Holds lanes until `stop`, then gives them back; reconnects by itself. `stop` is for after the drain.
///
/// # Errors
/// A failure that no retry ends, such as a schema that does not fit.
pub(crate) async fn hold(
    connector: Connector,
    names: Names,
    identity: Identity,
    tell: mpsc::Sender<Ownership>,
    stop: CancellationToken,
) -> Result<()> {
    let mut wait = RECONNECT.0;
    loop {
        let began = Instant::now();
        let ended = term(&connector, &names, &identity, &tell, &stop).await;
        if stop.is_cancelled() {
            return ended;
        }
        // A full channel cannot lose this: dispatch must know before anything else is announced.
        if tell.send(Ownership::Lost).await.is_err() {
            return Ok(());
        }
        match ended {
            Ok(()) => return Ok(()),
            // A login that is refused now was accepted at the start: a password is being rotated, a role locked for a while.
            Err(error) if error.class() != crate::error::Class::Failure => {
                tracing::warn!(error = %error.report(), "the lock session ended; all lanes are given up until it is back");
            }
            Err(error) => return Err(error),
        }
        if began.elapsed() > RECONNECT.1 {
            wait = RECONNECT.0;
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(wait) => {}
        }
        wait = (wait * 2).min(RECONNECT.1);
    }
}

/// One session from its registration to its end.
async fn term(
    connector: &Connector,
    names: &Names,
    identity: &Identity,
    tell: &mpsc::Sender<Ownership>,
    stop: &CancellationToken,
) -> Result<()> {
    let session = connector.connect("lock", Session::Lock).await?;
    let epoch: i64 =
        one(&session, &names.render(REGISTER), &[&identity.name, &identity.instance, &env!("CARGO_PKG_VERSION")])
            .await?;
    let lock = session.prepare(&names.render(LOCK)).await?;
    let heartbeat = session.prepare(&names.render(HEARTBEAT_SQL)).await?;
    let mut held: Vec<i16> = Vec::new();
    let mut ticks = tokio::time::interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut first_round = true;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = session.closed() => return Err(Error::transient("the server closed the lock session")),
            _ = ticks.tick() => {}
        }
        let wanted: Vec<i16> = (0..LANES).filter(|lane| !held.contains(lane)).collect();
        if !wanted.is_empty() {
            let rows = session.query(&lock, &[&wanted]).await?;
            let mut gained = Vec::with_capacity(rows.len());
            for row in &rows {
                gained.push(row.try_get::<_, i16>(0).map_err(|e| Error::new("read a lane's number").source_is(e))?);
            }
            if !gained.is_empty() {
                let fenced: Vec<i64> = one(&session, &names.render(TAKE), &[&epoch, &gained]).await?;
                if !fenced.is_empty() {
                    tracing::info!(epoch, fenced = ?fenced, lanes = gained.len(), "took over lanes of a bridge that left without saying so");
                }
                held.extend(&gained);
                tracing::info!(epoch, lanes = held.len(), "own lanes");
            }
            beat(&session, &heartbeat, epoch, held.len(), tell).await?;
            if !gained.is_empty() && tell.send(Ownership::Gained { epoch, lanes: gained }).await.is_err() {
                break;
            }
        } else {
            beat(&session, &heartbeat, epoch, held.len(), tell).await?;
        }
        if first_round && held.is_empty() {
            let rows = session.query(&names.render(OWNERS), &[]).await?;
            let owners = rows.iter().filter_map(|row| row.try_get(0).ok()).collect::<Vec<String>>();
            tracing::info!(owners = ?owners, "every lane is owned by another bridge; standing by");
            if tell.send(Ownership::NoneFree { owners }).await.is_err() {
                break;
            }
        }
        first_round = false;
    }
    // Dispatch may have ended before; what it sent is settled only when the brokers are closed.
    stop.cancelled().await;
    session.execute(&names.render(LEAVE), &[&epoch]).await?;
    Ok(())
}

/// One proof that `held` locks are still this session's.
async fn beat(
    session: &Client,
    heartbeat: &tokio_postgres::Statement,
    epoch: i64,
    held: usize,
    tell: &mpsc::Sender<Ownership>,
) -> Result<()> {
    let row = tokio::time::timeout(LIVENESS, session.query_one(heartbeat, &[&epoch]))
        .await
        .map_err(|_| Error::transient(format!("no answer to a heartbeat within {LIVENESS:?}")))??;
    let broken = |source| Error::new("read a heartbeat").source_is(source);
    let alive: bool = row.try_get(0).map_err(broken)?;
    let locks: i32 = row.try_get(1).map_err(broken)?;
    if !alive {
        return Err(Error::transient(format!("epoch {epoch} was fenced by another bridge")));
    }
    if usize::try_from(locks).ok() != Some(held) {
        return Err(Error::transient(format!("the session holds {locks} lane locks of {held}"))
            .hint("something ran DISCARD ALL or pg_advisory_unlock_all on it, or a pooler is in between"));
    }
    let mark = Ownership::Mark { last_seq: row.try_get(2).map_err(broken)?, xid: row.try_get(3).map_err(broken)? };
    if tell.send(mark).await.is_err() {
        tracing::debug!("nobody listens to marks any more");
    }
    Ok(())
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(
    session: &Client,
    sql: &str,
    values: &[&(dyn tokio_postgres::types::ToSql + Sync)],
) -> Result<T> {
    let row = session.query_one(sql, values).await?;
    row.try_get(0).map_err(|source| Error::new("read the lock session's answer").source_is(source))
}
