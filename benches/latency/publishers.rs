//! Publishes by the clock, one event a transaction, from several connections.
//!
//! A connection that is free takes the next event and waits until it is due. So an event is late only when all
//! connections are busy, and what it then takes longer is in `publish.p99_ms`, not hidden.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_postgres::{Client, Statement};

use crate::ledger::{Ledger, payload};
use crate::servers::connect;

pub const CONNECTIONS: usize = 16;
pub const KEYS: usize = 500;

/// Connected, with the statement prepared.
pub struct Publishers(Vec<(Client, Statement)>);

/// Under way.
pub struct Publishing {
    pub start: Instant,
    publishers: JoinSet<()>,
}

impl Publishers {
    /// `statement` publishes one event: $1 is its payload, $2 its key.
    pub async fn connect(url: &str, statement: &str) -> Self {
        let mut connections = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let client = connect(url).await;
            let statement = client.prepare(statement).await.unwrap();
            connections.push((client, statement));
        }
        Self(connections)
    }

    /// Publishes as many events as `ledger` has, one every `interval`.
    pub fn start(self, ledger: &Arc<Ledger>, interval: Duration) -> Publishing {
        let start = Instant::now();
        let next = Arc::new(AtomicUsize::new(0));
        let mut publishers = JoinSet::new();
        for (client, statement) in self.0 {
            let (ledger, next) = (Arc::clone(ledger), Arc::clone(&next));
            publishers.spawn(async move {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= ledger.events() {
                        return;
                    }
                    let due = start + interval.mul_f64(n as f64);
                    tokio::time::sleep_until(due.into()).await;
                    let key = format!("key-{}", n % KEYS);
                    client.execute(&statement, &[&payload(n), &key]).await.unwrap();
                    ledger.commit(n);
                }
            });
        }
        Publishing { start, publishers }
    }
}

impl Publishing {
    /// Returns when the last COMMIT did.
    pub async fn done(self) {
        self.publishers.join_all().await;
    }
}
