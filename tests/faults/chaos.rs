//! Many small faults under load, at random; the seed is printed and `LB_SEED` replays it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::bridge::{BATCH, BATCHES};
use crate::consumers::Destination;
use crate::drain::{drained, seed};
use crate::ledger::judge;
use crate::publishers::{Load, publish};
use crate::services::eventually;
use crate::stage::Stage;

/// F14, I1-I5: any session of the bridge may end at any time, the lock's among them.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_end_at_random_lose_and_reorder_nothing() {
    let stage = Stage::new(Destination::all().await).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 4, keys: 60, events: 6_000 };
    let mut rng = StdRng::seed_from_u64(load.seed);
    let committed = Arc::new(AtomicUsize::new(0));
    let bridge = setup.start();
    eventually("it owns lanes", Duration::from_secs(20), || std::future::ready(setup.log().contains("own lanes")))
        .await;
    let mut ended = 0_i64;
    let ending = async {
        let one = "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity
                    where datname = current_database() and application_name like 'lanebridge/%'
                      and ($2 or application_name not like '%/lock')
                    order by md5(pid::text || $1) limit 1) x";
        let mut tick = tokio::time::interval(Duration::from_millis(60));
        while committed.load(Ordering::Relaxed) < load.events {
            tick.tick().await;
            let salt = rng.random::<u32>().to_string();
            // Without its lock session the bridge rests a moment, and then there is nothing else to end.
            let lock_too = rng.random_bool(0.05);
            ended += client.query_one(one, &[&salt, &lock_too]).await.unwrap().get::<_, i64>(0);
        }
    };
    tokio::join!(publish(database, load, Arc::clone(&committed)), ending);
    assert!(ended > 20, "{ended} sessions were ended: {}", setup.log());
    drained(client, Duration::from_secs(180)).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    for destination in destinations {
        // Each end may repeat what was acknowledged and not deleted; far less than a window each in practice.
        let bound = usize::try_from(ended).unwrap() * BATCH;
        judge(client, &destination.read().await).await.must_be_clean(destination.name(), bound);
    }
    stage.end().await;
}

/// F1, F2, H47: two bridges, killed in turn as soon as one owns the lanes, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn two_bridges_that_are_killed_in_turn_lose_and_reorder_nothing() {
    let stage = Stage::new(Destination::all().await).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let load = Load { seed: seed(), writers: 4, keys: 60, events: 8_000 };
    let mut rng = StdRng::seed_from_u64(load.seed);
    let committed = Arc::new(AtomicUsize::new(0));
    let mut kills = 0;
    let killing = async {
        let mut bridges = [setup.start(), setup.start()];
        while committed.load(Ordering::Relaxed) < load.events {
            let moment = tokio::time::Instant::now() + Duration::from_millis(rng.random_range(100..1_500));
            tokio::time::sleep_until(moment).await;
            let slot = rng.random_range(0..2);
            bridges[slot].signal("KILL");
            bridges[slot] = setup.start();
            kills += 1;
        }
        bridges
    };
    let (_, bridges) = tokio::join!(publish(database, load, Arc::clone(&committed)), killing);
    drained(client, Duration::from_secs(180)).await;
    // One of them may have been started a moment ago; before it listens for signals, a SIGTERM just ends it.
    eventually("both bridges run", Duration::from_secs(20), || async {
        let sql = "select count(*) from lanebridge.bridges where fenced_at is null";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 2
    })
    .await;
    for bridge in bridges {
        let status = bridge.terminate().await;
        assert!(status.success(), "{status}\n{}", setup.log());
    }
    for destination in destinations {
        let verdict = judge(client, &destination.read().await).await;
        verdict.must_be_clean(&format!("{} after {kills} kills", destination.name()), kills * BATCH * BATCHES);
    }
    stage.end().await;
}
