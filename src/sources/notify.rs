//! NOTIFY as a hint: a session of its own that wakes the poll. A lost notification costs one poll interval.
//!
//! Never: opens a transaction (that would hold the queue of the whole server, H97), or decides anything.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::db::{Connector, Names, Session};

/// Publishers notify at most every 10 ms over all sessions; one that kept quiet commits a little later, so the poll
/// is woken again after these.
const ECHOES: [Duration; 2] = [Duration::from_millis(12), Duration::from_millis(40)];
/// Wait before connecting again.
const RECONNECT: Duration = Duration::from_secs(1);

/// Listens until `stop`, waking `wake` for every notification; reconnects by itself.
pub(crate) async fn listen(connector: Connector, names: Names, wake: Arc<Notify>, stop: CancellationToken) {
    loop {
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = session(&connector, &names, &wake) => ended,
        };
        if let Err(error) = ended {
            tracing::warn!(error = %error.report(), "listening for notifications failed; polling goes on, connecting again");
        }
        wake.notify_one();
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RECONNECT) => {}
        }
    }
}

async fn session(connector: &Connector, names: &Names, wake: &Notify) -> crate::error::Result<()> {
    let mut client = connector.connect("listen", Session::Lock).await?;
    let row = client.query_one(&names.render("select quote_ident({schema}.{p}channel())"), &[]).await?;
    let channel: String =
        row.try_get(0).map_err(|e| crate::error::Error::new("read the channel's name").source_is(e))?;
    let Some(mut notifications) = client.take_notifications() else { return Ok(()) };
    client.batch_execute(&format!("listen {channel}")).await?;
    wake.notify_one();
    while notifications.recv().await.is_some() {
        while notifications.try_recv().is_ok() {}
        wake.notify_one();
        for echo in ECHOES {
            tokio::time::sleep(echo).await;
            wake.notify_one();
        }
    }
    Ok(())
}
