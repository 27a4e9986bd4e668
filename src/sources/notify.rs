//! NOTIFY as a hint: a session of its own that wakes the poll. A lost notification costs one poll interval.
//!
//! I1: publishers notify only while somebody listens: each heartbeat says so for a little longer than the next one takes.
//! I2: a heartbeat also proves that the session still listens; DISCARD ALL or an UNLISTEN by somebody else is noticed.
//! Never: opens a transaction (that would hold the queue of the whole server, H97), or decides anything.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::db::{Connector, Names, Session};
use crate::error::{Error, Result};

/// Publishers notify at most every 10 ms over all sessions; one that kept quiet commits a little later, so the poll
/// is woken again after these.
const ECHOES: [Duration; 2] = [Duration::from_millis(12), Duration::from_millis(40)];
const HEARTBEAT: Duration = Duration::from_secs(5);
/// For how long a heartbeat speaks: several may be late before publishers fall silent.
const LISTENING_SECONDS: i32 = 30;
/// First and longest wait before connecting again; doubled in between, and jittered, since all bridges lose a server
/// at once.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// $1 seconds; whether this session listens.
const LISTENING: &str = "select {schema}.{p}listening($1)";

/// What outlives a session.
struct Outage {
    /// Said once when it begins and once when it ends, whatever number of tries lies between.
    lost: bool,
    /// Before the next try.
    wait: Duration,
}

/// Listens until `stop`, waking `wake` for every notification; reconnects by itself.
pub(crate) async fn listen(connector: Connector, names: Names, wake: Arc<Notify>, stop: CancellationToken) {
    let mut outage = Outage { lost: false, wait: RECONNECT.0 };
    loop {
        let session = session(&connector, &names, &wake, &mut outage);
        let Some(ended) = stop.run_until_cancelled(session).await else { return };
        if let Err(error) = ended
            && !std::mem::replace(&mut outage.lost, true)
        {
            tracing::warn!(error = %error.report(), "listening for notifications failed; polling goes on, trying again");
        }
        wake.notify_one();
        let jittered = outage.wait.mul_f64(rand::rng().random_range(0.8..1.2));
        if stop.run_until_cancelled(tokio::time::sleep(jittered)).await.is_none() {
            return;
        }
        outage.wait = (outage.wait * 2).min(RECONNECT.1);
    }
}

async fn session(connector: &Connector, names: &Names, wake: &Notify, outage: &mut Outage) -> Result<()> {
    let mut client = connector.connect("listen", Session::Lock).await?;
    let row = client.query_one(&names.render("select quote_ident({schema}.{p}channel())"), &[]).await?;
    let channel: String = row.try_get(0).map_err(|e| Error::new("read the channel's name").source_is(e))?;
    let Some(mut notifications) = client.take_notifications() else { return Ok(()) };
    client.batch_execute(&format!("listen {channel}")).await?;
    let listening = client.prepare(&names.render(LISTENING)).await?;
    let mut ticks = tokio::time::interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut lasts = false;
    loop {
        tokio::select! {
            notification = notifications.recv() => {
                if notification.is_none() {
                    return Err(Error::transient("the server closed the listening session"));
                }
                while notifications.try_recv().is_ok() {}
                wake.notify_one();
                for echo in ECHOES {
                    tokio::time::sleep(echo).await;
                    wake.notify_one();
                }
            }
            _ = ticks.tick() => {
                let row = client.query_one(&listening, &[&LISTENING_SECONDS]).await?;
                if !row.try_get::<_, bool>(0).unwrap_or(false) {
                    return Err(Error::transient("the session does not listen any more")
                        .hint("something ran DISCARD ALL or UNLISTEN on it, or a pooler is in between"));
                }
                if std::mem::replace(&mut lasts, true) {
                    // Not at the first: a session that is always ended at once must not be tried ten times a second.
                    outage.wait = RECONNECT.0;
                } else {
                    // What was published until now was notified to nobody.
                    wake.notify_one();
                }
                if std::mem::take(&mut outage.lost) {
                    tracing::info!("listening for notifications again");
                }
            }
        }
    }
}
