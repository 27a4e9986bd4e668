//! Publishers that write down the truth in their own transactions, and some that roll back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lanebridge::publish::{NewEvent, Publisher};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;
use tokio_postgres::Client;

use crate::services::{Database, unique};

/// How much to publish, and how wildly.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub seed: u64,
    pub writers: usize,
    pub keys: usize,
    /// At least this many events are committed, over all writers.
    pub events: usize,
}

/// The table of what was committed: written with each publish, in its transaction.
pub const TRUTH: &str =
    "create table truth (id text primary key, key text, seq bigint not null, payload text not null)";

/// Publishes until `load.events` are committed; counts them in `committed`. Returns the ids that were rolled back.
pub async fn publish(database: &Database, load: Load, committed: Arc<AtomicUsize>) -> Vec<String> {
    eprintln!("load: {load:?}");
    publish_with(database, load, committed, Pace::Unresting).await
}

/// How a writer spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    Unresting,
    /// Up to `transactions` at once, then a rest of up to `rest`.
    Bursts {
        transactions: usize,
        rest: Duration,
    },
}

/// [`publish`], at a pace.
pub async fn publish_with(database: &Database, load: Load, committed: Arc<AtomicUsize>, pace: Pace) -> Vec<String> {
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..load.writers {
        let client = database.connect().await;
        let rng = StdRng::seed_from_u64(load.seed.wrapping_add(writer as u64));
        writers.spawn(write(client, rng, load, Arc::clone(&committed), unique("e"), pace));
    }
    writers.join_all().await.into_iter().flatten().collect()
}

async fn write(
    mut client: Client,
    mut rng: StdRng,
    load: Load,
    committed: Arc<AtomicUsize>,
    prefix: String,
    pace: Pace,
) -> Vec<String> {
    let publisher = Publisher::default();
    let mut rolled_back = Vec::new();
    let mut n = 0;
    let mut burst = 0;
    while committed.load(Ordering::Relaxed) < load.events {
        if let Pace::Bursts { transactions, rest } = pace {
            if burst == 0 {
                burst = rng.random_range(1..=transactions);
                tokio::time::sleep_until(Instant::now() + rng.random_range(Duration::ZERO..rest)).await;
            }
            burst -= 1;
        }
        let mut transaction = client.transaction().await.unwrap();
        // Keys in one fixed order within a transaction: writers wait for each other, never in a ring.
        let mut keys: Vec<Option<usize>> = (0..rng.random_range(1..=5))
            .map(|_| rng.random_bool(0.95).then(|| rng.random_range(0..load.keys)))
            .collect();
        keys.sort_unstable();
        let mut kept = Vec::new();
        for key in keys {
            n += 1;
            let id = format!("{prefix}-{n}");
            let key = key.map(|key| format!("key-{key}"));
            let undo = rng.random_bool(0.1);
            let point = transaction.savepoint("s").await.unwrap();
            let payload = format!("{{\"id\":\"{id}\",\"pad\":\"{}\"}}", "x".repeat(rng.random_range(0..400)));
            let mut event = NewEvent::text("order.placed", payload.clone()).id(&id);
            if let Some(key) = &key {
                event = event.key(key);
            }
            let seq = publisher.publish(&point, event).await.unwrap();
            point.execute("insert into truth values ($1, $2, $3, $4)", &[&id, &key, &seq, &payload]).await.unwrap();
            if undo {
                point.rollback().await.unwrap();
                rolled_back.push(id);
            } else {
                point.commit().await.unwrap();
                kept.push(id);
            }
        }
        if rng.random_bool(0.1) {
            transaction.rollback().await.unwrap();
            rolled_back.extend(kept);
        } else {
            transaction.commit().await.unwrap();
            committed.fetch_add(kept.len(), Ordering::Relaxed);
        }
    }
    rolled_back
}
