//! Several bridges share the lanes: equal shares, few moves, and nothing lost, repeated or reordered when lanes move.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Bridge};
use crate::consumers::Destination;
use crate::drain::{drained, seed};
use crate::ledger::judge;
use crate::publishers::{Load, publish};
use crate::services::eventually;
use crate::stage::Stage;

pub const SOON: Duration = Duration::from_secs(60);

/// Lanes per live bridge, most first.
async fn shares(client: &Client) -> Vec<i64> {
    let sql = "select count(l.lane) from lanebridge.bridges b left join lanebridge.lanes l on l.epoch = b.epoch
                where b.fenced_at is null group by b.epoch order by 1 desc";
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn owners(client: &Client, sql: &str) -> BTreeMap<i16, i64> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
}

pub async fn share_as(client: &Client, expected: &[i64]) {
    eventually(&format!("the shares are {expected:?}"), SOON, || async { shares(client).await == expected }).await;
}

/// D5: bridges come and go under load, always drained or handed over: not even a duplicate comes of it.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_are_handed_over_without_a_duplicate() {
    let stage = Stage::new(Destination::all().await).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 3, keys: 60, events: usize::MAX / 2 };
    let stop = Arc::new(AtomicUsize::new(0));
    let moving = async {
        let first = setup.start();
        share_as(client, &[256]).await;
        let second = setup.start();
        share_as(client, &[128, 128]).await;
        let third = setup.start();
        share_as(client, &[86, 85, 85]).await;
        assert!(first.terminate().await.success(), "{}", setup.log());
        share_as(client, &[128, 128]).await;
        assert!(third.terminate().await.success(), "{}", setup.log());
        share_as(client, &[256]).await;
        stop.fetch_add(load.events, Ordering::Relaxed);
        second
    };
    let (_, last) = tokio::join!(publish(database, load, Arc::clone(&stop)), moving);
    drained(client, SOON).await;
    assert!(last.terminate().await.success(), "{}", setup.log());
    let log = setup.log();
    assert!(!log.contains("left without saying so") && !log.contains("fenced"), "every move was agreed: {log}");
    for destination in destinations {
        judge(client, &destination.read().await).await.must_be_clean(destination.name(), 0);
    }
    stage.end().await;
}

/// F1: one of three is killed; the others have its lanes within seconds, and move none of their own.
#[tokio::test(flavor = "multi_thread")]
async fn the_others_share_what_a_killed_bridge_leaves() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 2, keys: 60, events: usize::MAX / 2 };
    let stop = Arc::new(AtomicUsize::new(0));
    let killing = async {
        let mut bridges: Vec<Bridge> = Vec::new();
        for shares in [&[256][..], &[128, 128], &[86, 85, 85]] {
            bridges.push(setup.start());
            share_as(client, shares).await;
        }
        let of_the_others = "select l.lane, l.epoch from lanebridge.lanes l
                              where l.epoch <> (select min(b.epoch) from lanebridge.bridges b)";
        let before = owners(client, of_the_others).await;
        bridges.remove(0).kill();
        let began = Instant::now();
        share_as(client, &[128, 128]).await;
        eprintln!("shared again after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        let after = owners(client, "select l.lane, l.epoch from lanebridge.lanes l").await;
        assert_eq!(before.len(), 170);
        assert!(before.iter().all(|(lane, epoch)| after.get(lane) == Some(epoch)), "{before:?} {after:?}");
        stop.fetch_add(load.events, Ordering::Relaxed);
        bridges
    };
    let (_, bridges) = tokio::join!(publish(database, load, Arc::clone(&stop)), killing);
    drained(client, SOON).await;
    for bridge in bridges {
        assert!(bridge.terminate().await.success(), "{}", setup.log());
    }
    judge(client, &destinations[0].read().await).await.must_be_clean("redis", BATCH * BATCHES);
    stage.end().await;
}

/// R9, H45: a bridge that is stopped keeps its locks, since the kernel answers for it; a peer ends it. When it goes on it
/// finds itself fenced, and shares again.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_bridge_is_ended_by_another_and_comes_back() {
    let stage =
        Stage::with([Destination::redis()], |setup| setup.with("[http]", "frozen_after = \"5s\"\n[http]")).await;
    freeze_and_wake(&stage).await;
    stage.end().await;
}

/// With bridges whose `frozen_after` is five seconds.
pub async fn freeze_and_wake(stage: &Stage) {
    let Stage { database, client, destinations, setup, .. } = stage;
    let load = Load { seed: seed(), writers: 2, keys: 60, events: usize::MAX / 2 };
    let stop = Arc::new(AtomicUsize::new(0));
    let freezing = async {
        let frozen = setup.start();
        share_as(client, &[256]).await;
        let other = setup.start();
        share_as(client, &[128, 128]).await;
        frozen.signal("STOP");
        let began = Instant::now();
        share_as(client, &[256]).await;
        eprintln!("taken over after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        frozen.signal("CONT");
        share_as(client, &[128, 128]).await;
        stop.fetch_add(load.events, Ordering::Relaxed);
        [frozen, other]
    };
    let (_, bridges) = tokio::join!(publish(database, load, Arc::clone(&stop)), freezing);
    drained(client, SOON).await;
    for bridge in bridges {
        assert!(bridge.terminate().await.success(), "{}", setup.log());
    }
    assert!(setup.log().contains("the heartbeat of a bridge stood still"), "{}", setup.log());
    judge(client, &destinations[0].read().await).await.must_be_clean("redis", BATCH * BATCHES);
}

/// H45: a bridge that holds no lane is fenced like another when it stands still, but there is no lock to end its session
/// for. It learns of the fence when it takes lanes, and begins again instead of ending, for it may be the last one.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_was_fenced_without_a_lane_begins_again() {
    let stage =
        Stage::with([Destination::redis()], |setup| setup.with("[http]", "frozen_after = \"5s\"\n[http]")).await;
    let Stage { client, setup, .. } = &stage;
    let owner = setup.start();
    share_as(client, &[256]).await;
    let standby = setup.start();
    // Nobody makes room for it before its third heartbeat, nor moves a lane that moved less than five seconds ago.
    setup.says("standing by", SOON).await;
    standby.signal("STOP");
    share_as(client, &[256]).await;
    owner.kill();
    eventually("the owner's locks are free", SOON, || async {
        let sql = "select count(*) from pg_stat_activity
                    where datname = current_database() and application_name like 'lanebridge/%/lock'";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    standby.signal("CONT");
    eventually("it owns every lane", SOON, || async {
        let epochs = owners(client, "select lane, epoch from lanebridge.lanes where epoch > 2").await;
        epochs.len() == 256
    })
    .await;
    assert!(standby.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}
