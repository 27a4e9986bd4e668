//! The main ledger: publishers that roll back, use savepoints and share keys; three brokers; a kill in the middle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::ledger::judge;
use crate::publishers::{Load, Pace, TRUTH, publish, publish_with};
use crate::services::{Database, eventually, shared};
use crate::stage::Stage;

pub async fn deliveries_left(client: &Client) -> i64 {
    client.query_one("select count(*) from lanebridge.deliveries", &[]).await.unwrap().get(0)
}

pub async fn drained(client: &Client, deadline: Duration) {
    eventually("every delivery is completed", deadline, || async { deliveries_left(client).await == 0 }).await;
}

pub fn seed() -> u64 {
    std::env::var("LB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random)
}

/// I1-I4 under a kill: nothing lost, invented or reordered; duplicates at most the window of each handler.
async fn a_kill_repeats_at_most_the_window(server: &str) {
    let _shared = shared().await;
    let database = Database::create(server).await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destinations = Destination::all().await;
    let setup = Setup::new(&database.url(), &destinations, "");
    setup.run(&["migrate"]);

    let load = Load { seed: seed(), writers: 8, keys: 500, events: 20_000 };
    let committed = Arc::new(AtomicUsize::new(0));
    let first = setup.start();
    let writing = {
        let committed = Arc::clone(&committed);
        async { publish(&database, load, committed).await }
    };
    let killing = async {
        eventually("half is committed", Duration::from_secs(120), || {
            std::future::ready(committed.load(Ordering::Relaxed) > load.events / 2)
        })
        .await;
        first.kill();
        setup.start()
    };
    let (rolled_back, second) = tokio::join!(writing, killing);
    assert!(!rolled_back.is_empty());
    drained(&client, Duration::from_secs(120)).await;
    let status = second.terminate().await;
    assert!(status.success(), "drained ends with 0, not {status}\n{}", setup.log());

    for destination in &destinations {
        let verdict = judge(&client, &destination.read().await).await;
        verdict.must_be_clean(&format!("{server} {}", destination.name()), BATCH * BATCHES);
        destination.remove().await;
    }
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_repeats_at_most_the_window_on_debians_postgres() {
    a_kill_repeats_at_most_the_window("LB_POSTGRES_URL").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_repeats_at_most_the_window_on_postgres_18() {
    a_kill_repeats_at_most_the_window("LB_POSTGRES18_URL").await;
}

/// Deliveries, of three for each event.
async fn completed(client: &Client) -> i64 {
    let sql = "select 3 * (select count(*) from lanebridge.events) - (select count(*) from lanebridge.deliveries)";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// R13, I4: bridges that are stopped under load, `rounds` times one after the other, say that they drained; then nothing is
/// repeated.
async fn drained_stops_repeat_nothing(rounds: usize) {
    let stage = Stage::new(Destination::all().await).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 4, keys: 50, events: usize::MAX / 2 };
    let committed = Arc::new(AtomicUsize::new(0));
    let pace = Pace::Bursts { transactions: 30, rest: Duration::from_millis(400) };
    let writing = publish_with(database, load, Arc::clone(&committed), pace);
    let stopping = async {
        for round in 1..=rounds {
            let before = completed(client).await;
            let bridge = setup.start();
            // A completed delivery of its own: others are under way then.
            let what = format!("bridge {round} delivers");
            eventually(&what, Duration::from_secs(60), || async { completed(client).await > before }).await;
            let status = bridge.terminate().await;
            assert!(status.success(), "{status}\n{}", setup.log());
        }
        committed.fetch_add(load.events, Ordering::Relaxed);
    };
    tokio::join!(writing, stopping);
    let log = setup.log();
    let busy = log.lines().filter(|line| line.contains("draining") && !line.contains("in_flight=0")).count();
    eprintln!("{busy} of {rounds} stops found deliveries in flight");
    assert!(busy > 0, "no stop found anything in flight: {log}");
    setup.run(&["run", "--once"]);
    assert_eq!(deliveries_left(client).await, 0);
    for destination in destinations {
        judge(client, &destination.read().await).await.must_be_clean(destination.name(), 0);
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_stop_repeats_nothing() {
    drained_stops_repeat_nothing(5).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make faults` runs it"]
async fn a_hundred_drained_stops_repeat_nothing() {
    drained_stops_repeat_nothing(100).await;
}
