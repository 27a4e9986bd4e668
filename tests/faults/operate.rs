//! Operators at work while bridges run, and die: what they skip is never sent, what they do not skip always, in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::{Destination, jetstream_at};
use crate::drain::{deliveries_left, drained, seed};
use crate::ledger::judge;
use crate::proxy::Proxy;
use crate::services::{Database, address, eventually, redis_address, shared, unique};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(20);
/// Bytes that the stream takes in one message, until the cause of the dead ones is mended.
const SMALL: i32 = 1500;
const KEYS: usize = 30;
const EVENTS: usize = 2500;

/// One event in a transaction of its own: of 25 one is too large for the stream, one is delayed.
async fn publish(client: Client, mut rng: StdRng, events: usize) {
    let prefix = unique("e");
    let sql = "with e as (select lanebridge.publish('order.x', $1::text, $2, id => $3,
                                 deliver_at => case when $4 then clock_timestamp() + interval '400 ms' end) as seq)
               insert into truth select $3, $2, seq, $1 from e";
    for n in 0..events {
        let (id, key) = (format!("{prefix}-{n}"), format!("key-{}", rng.random_range(0..KEYS)));
        let payload = "x".repeat(if rng.random_ratio(1, 25) { 4000 } else { 20 });
        client.execute(sql, &[&payload, &key, &id, &rng.random_ratio(1, 25)]).await.unwrap();
    }
}

/// What operators changed, by action, as the functions told them.
#[derive(Default)]
struct Told {
    requeue: AtomicI64,
    bury: AtomicI64,
    skip: AtomicI64,
}

async fn operate(client: Client, mut rng: StdRng, told: Arc<Told>, stop: Arc<AtomicBool>) {
    let actions = [
        ("requeue", "dead", &told.requeue),
        ("requeue", "scheduled", &told.requeue),
        ("bury", "scheduled", &told.bury),
        ("skip", "dead", &told.skip),
        ("skip", "scheduled", &told.skip),
    ];
    let mut tick = tokio::time::interval(Duration::from_millis(25));
    while !stop.load(Ordering::Relaxed) {
        tick.tick().await;
        let (action, state, count) = actions[rng.random_range(0..actions.len())];
        let filter = serde_json::json!({ "state": state });
        let limit = rng.random_range(1..4);
        let sql = format!("select lanebridge.{action}('to-nats', null, $1, $2, 'because')");
        let changed: i64 = client.query_one(&sql, &[&filter, &limit]).await.unwrap().get(0);
        count.fetch_add(changed, Ordering::Relaxed);
    }
}

async fn limit_messages(subject: &str, bytes: i32) {
    let js = jetstream_at(&address("LB_NATS_URL")).await;
    let mut config = js.get_stream(subject).await.unwrap().cached_info().config.clone();
    config.max_message_size = bytes;
    js.update_stream(config).await.unwrap();
}

async fn sum(client: &Client, action: &str) -> i64 {
    let sql = "select coalesce(sum(changed), 0)::bigint from lanebridge.audit where action = $1
                  and changed = jsonb_array_length(detail -> 'deliveries')";
    client.query_one(sql, &[&action]).await.unwrap().get(0)
}

/// H44, H88, B46: operators requeue, bury and skip at random while the bridge is killed again and again. The audit is what
/// they were told; what it says was skipped never came, all else did, every key in order.
#[tokio::test(flavor = "multi_thread")]
async fn operators_and_kills_lose_and_reorder_nothing() {
    let stage = Stage::new([Destination::nats().await]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let Destination::Nats { subject, .. } = &destinations[0] else { panic!("it is nats") };
    limit_messages(subject, SMALL).await;
    let seed = seed();
    eprintln!("LB_SEED={seed}");
    let rng = |n: u64| StdRng::seed_from_u64(seed.wrapping_add(n));
    let (told, stop) = (Arc::new(Told::default()), Arc::new(AtomicBool::new(false)));
    let mut writers = tokio::task::JoinSet::new();
    for n in 0..3 {
        writers.spawn(publish(database.connect().await, rng(n), EVENTS / 3));
    }
    let mut operators = tokio::task::JoinSet::new();
    for n in 3..5 {
        operators.spawn(operate(database.connect().await, rng(n), Arc::clone(&told), Arc::clone(&stop)));
    }
    let mut rng = rng(5);
    let mut kills = 0;
    let mut bridge = setup.start();
    let (done, written) = (AtomicBool::new(false), async { writers.join_all().await });
    let killing = async {
        while !done.load(Ordering::Relaxed) {
            let moment = tokio::time::Instant::now() + Duration::from_millis(rng.random_range(500..2_000));
            tokio::time::sleep_until(moment).await;
            bridge.signal("KILL");
            bridge = setup.start();
            kills += 1;
        }
        bridge
    };
    let (_, bridge) = tokio::join!(
        async {
            written.await;
            done.store(true, Ordering::Relaxed);
        },
        killing
    );
    // What was published last fails as well, and meets operators too.
    let few = || async { deliveries_left(client).await < i64::try_from(EVENTS / 10).unwrap() };
    eventually("most is delivered", Duration::from_secs(60), few).await;
    stop.store(true, Ordering::Relaxed);
    operators.join_all().await;

    // The cause is mended, and everything comes that was not skipped.
    limit_messages(subject, -1).await;
    let requeued = setup.run(&["deliveries", "requeue", "to-nats", "--all-dead", "--yes", "--json"]);
    let requeued: serde_json::Value = serde_json::from_str(&requeued).unwrap();
    told.requeue.fetch_add(requeued["changed"].as_i64().unwrap(), Ordering::Relaxed);
    eventually("every delivery is completed, and none dead", Duration::from_secs(60), || async {
        let rest = r#"select lanebridge.requeue('to-nats', p_filter => '{"state": "dead"}'),
                             (select count(*) from lanebridge.dead)"#;
        let row = client.query_one(rest, &[]).await.unwrap();
        told.requeue.fetch_add(row.get::<_, i64>(0), Ordering::Relaxed);
        row.get::<_, i64>(1) == 0 && deliveries_left(client).await == 0
    })
    .await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());

    for (action, told) in [("requeue", &told.requeue), ("bury", &told.bury), ("skip", &told.skip)] {
        let told = told.load(Ordering::Relaxed);
        assert!(told > 5, "{action}: {told}");
        assert_eq!(sum(client, action).await, told, "{action}");
    }
    let skipped = "delete from truth where id in (select d ->> 'id' from lanebridge.audit, jsonb_array_elements(detail -> 'deliveries') d
                                                   where action = 'skip')";
    let skipped = client.execute(skipped, &[]).await.unwrap();
    assert_eq!(i64::try_from(skipped).unwrap(), told.skip.load(Ordering::Relaxed), "each is skipped once");
    let verdict = judge(client, &destinations[0].read().await).await;
    verdict.must_be_clean(&format!("{skipped} skipped, {kills} kills"), kills * BATCH * BATCHES);
    stage.end().await;
}

/// H44: a bridge that waits for its broker has deliveries in its memory that nothing in the database tells from others. They
/// are left alone while it runs, and after a kill while nobody fenced it; once it drained they can be taken.
#[tokio::test(flavor = "multi_thread")]
async fn a_pending_delivery_is_left_alone_until_no_bridge_has_it() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let destinations = [Destination::redis()];
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let setup = Setup::new(&database.url(), &destinations, "")
        .with(&address("LB_REDIS_URL"), &format!("redis://127.0.0.1:{port}"));
    setup.run(&["migrate"]);
    client
        .batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e' || n) from generate_series(1, 4) n")
        .await
        .unwrap();
    let skip = |seq: i64| {
        let out = setup.run(&["deliveries", "skip", "to-redis", &seq.to_string(), "--yes", "--json"]);
        let out: serde_json::Value = serde_json::from_str(&out).unwrap();
        (out["changed"].as_i64().unwrap(), out["left_alone"].as_i64().unwrap())
    };
    let bridge = setup.start();
    setup.says("unreachable", SOON).await;
    assert_eq!(skip(1), (0, 1), "while it runs");
    bridge.kill();
    assert_eq!(skip(1), (0, 1), "it was killed, and its last delivery may still be on its way");
    let bridge = setup.start();
    setup.says("own lanes epoch=2", SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    assert_eq!((skip(1), skip(3)), ((1, 0), (1, 0)), "it drained, and left");
    let _appears = Proxy::at(port, redis_address()).await;
    let bridge = setup.start();
    drained(&client, SOON).await;
    let received: Vec<String> = destinations[0].read().await.into_iter().map(|received| received.id).collect();
    assert_eq!(received, ["e2", "e4"]);
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    destinations[0].remove().await;
    database.drop().await;
}
