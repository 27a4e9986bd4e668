//! `ownership = "lease"`: no session of our own anywhere, behind PgBouncer in transaction mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::drain::{drained, seed};
use crate::ledger::judge;
use crate::publishers::{Load, publish};
use crate::services::connect;
use crate::sharing::{SOON, freeze_and_wake, share_as};
use crate::stage::Stage;

/// Bridges with leases of five seconds, by way of the pooler.
async fn stage(destinations: Vec<Destination>) -> Stage {
    let mut stage = Stage::new(destinations).await;
    stage.setup = Setup::new(&stage.database.pooled_url(), &stage.destinations, "")
        .with("[http]", "ownership = \"lease\"\nfrozen_after = \"5s\"\n[http]");
    stage
}

/// D5 and F1 without a lock: lanes are shared and handed over; what a killed bridge held is free when its lease is up.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_are_leased_handed_over_and_taken_over_through_a_pooler() {
    let stage = stage(Destination::all().await).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 2, keys: 60, events: usize::MAX / 2 };
    let stop = Arc::new(AtomicUsize::new(0));
    let moving = async {
        let first = setup.start();
        share_as(client, &[256]).await;
        let second = setup.start();
        share_as(client, &[128, 128]).await;
        assert!(first.terminate().await.success(), "{}", setup.log());
        share_as(client, &[256]).await;
        let log = setup.log();
        assert!(!log.contains("left without saying so") && !log.contains("fenced"), "every move was agreed: {log}");
        let third = setup.start();
        share_as(client, &[128, 128]).await;
        second.kill();
        let began = Instant::now();
        share_as(client, &[256]).await;
        eprintln!("taken over after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        stop.fetch_add(load.events, Ordering::Relaxed);
        third
    };
    let (_, last) = tokio::join!(publish(database, load, Arc::clone(&stop)), moving);
    drained(client, SOON).await;
    assert!(last.terminate().await.success(), "{}", setup.log());
    for destination in destinations {
        judge(client, &destination.read().await).await.must_be_clean(destination.name(), BATCH * BATCHES);
    }
    // I6: the application's sessions behind the same pooler are as it left them.
    let theirs = connect(&database.pooled_url()).await;
    for _ in 0..10 {
        let rows = theirs.simple_query("show enable_seqscan").await.unwrap();
        let on = rows
            .iter()
            .any(|row| matches!(row, tokio_postgres::SimpleQueryMessage::Row(row) if row.get(0) == Some("on")));
        assert!(on, "a setting of the bridge's stayed");
    }
    drop(theirs);
    stage.end().await;
}

/// R8, R9: the owner that stood still finds its lease gone, sends nothing more under it, and shares again.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_bridge_loses_its_lease() {
    let stage = stage(vec![Destination::redis()]).await;
    freeze_and_wake(&stage).await;
    stage.end().await;
}

/// A change from one kind of ownership to the other, bridge by bridge: neither takes what the other holds.
#[tokio::test(flavor = "multi_thread")]
async fn locks_and_leases_share_one_installation() {
    let stage = stage(vec![Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let lock = Setup::new(&database.url(), destinations, "");
    let load = Load { seed: seed(), writers: 2, keys: 60, events: usize::MAX / 2 };
    let stop = Arc::new(AtomicUsize::new(0));
    let moving = async {
        let first = lock.start();
        share_as(client, &[256]).await;
        let second = setup.start();
        share_as(client, &[128, 128]).await;
        assert!(first.terminate().await.success(), "{}", lock.log());
        share_as(client, &[256]).await;
        let third = lock.start();
        share_as(client, &[128, 128]).await;
        assert!(second.terminate().await.success(), "{}", setup.log());
        share_as(client, &[256]).await;
        let log = lock.log() + &setup.log();
        assert!(!log.contains("left without saying so") && !log.contains("fenced"), "every move was agreed: {log}");
        let fourth = setup.start();
        share_as(client, &[128, 128]).await;
        third.kill();
        share_as(client, &[256]).await;
        stop.fetch_add(load.events, Ordering::Relaxed);
        fourth
    };
    let (_, last) = tokio::join!(publish(database, load, Arc::clone(&stop)), moving);
    drained(client, SOON).await;
    assert!(last.terminate().await.success(), "{}", setup.log());
    judge(client, &destinations[0].read().await).await.must_be_clean("redis", BATCH * BATCHES);
    stage.end().await;
}
