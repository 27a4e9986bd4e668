//! The stream of the write-ahead log wakes the bridge and decides nothing: whatever becomes of it, the ledger is clean.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio_postgres::Client;

use crate::bridge::{Bridge, Setup};
use crate::consumers::Destination;
use crate::drain::{deliveries_left, drained, seed};
use crate::ledger::judge;
use crate::proxy::Proxy;
use crate::publishers::{Load, TRUTH, publish};
use crate::server::Server;
use crate::services::{Database, address, eventually, redis_address, shared};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(20);

pub const MAKE_PUBLICATION: &str = "create publication lanebridge_wal for table only lanebridge.events
    with (publish = 'insert', publish_via_partition_root = true)";

/// Whether `make soak` asked for the long versions.
pub fn soak() -> bool {
    std::env::var("LB_SOAK").is_ok()
}

/// How bridges learn of deliveries at present.
pub async fn source(client: &Client) -> Option<String> {
    let sql = "select source from lanebridge.bridges where fenced_at is null order by epoch desc limit 1";
    client.query_opt(sql, &[]).await.unwrap().and_then(|row| row.get(0))
}

pub async fn streams(client: &Client) {
    eventually("the bridge streams", SOON, || async { source(client).await.as_deref() == Some("wal") }).await;
}

/// A configuration that notices soon what happened to its stream.
pub fn watchful(setup: Setup) -> Setup {
    setup.with("[http]", "[wal]\ncanary_interval = \"200ms\"\n[http]")
}

/// A poll so rare that what arrives soon was brought by the stream.
pub fn patient(setup: Setup) -> Setup {
    setup.with("\"50ms\"", "\"20s\"").with("sweep_interval = \"1s\"", "sweep_interval = \"20s\"")
}

/// How many deliveries the stream brought the payload of, as the bridge says when it stops.
pub fn streamed(log: &str) -> usize {
    let (_, after) = log.rsplit_once("streamed=").expect("a bridge that stopped");
    after.split_whitespace().next().unwrap().parse().unwrap()
}

/// Between a commit and the consumer lies no poll interval, and the table is spared the payloads.
async fn a_commit_is_at_the_broker_long_before_the_next_poll(server: &str) {
    let _shared = shared().await;
    let database = Database::create(server).await;
    let client = database.connect().await;
    let destinations = [Destination::redis()];
    let setup = patient(Setup::new(&database.url(), &destinations, ""));
    setup.run(&["migrate"]);
    let bridge = setup.start();
    streams(&client).await;
    let mut slowest = Duration::ZERO;
    for n in 0..50 {
        let began = Instant::now();
        let publish = format!("select lanebridge.publish('order.x', 'p', 'k{}')", n % 7);
        client.batch_execute(&publish).await.unwrap();
        eventually("it is delivered", SOON, || async { deliveries_left(&client).await == 0 }).await;
        slowest = slowest.max(began.elapsed());
    }
    eprintln!("{server}: slowest {slowest:?}");
    assert!(slowest < Duration::from_secs(5), "{slowest:?}, which is a poll, not the stream");
    assert!(bridge.terminate().await.success());
    assert!(streamed(&setup.log()) >= 48, "{}", setup.log());
    destinations[0].remove().await;
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_at_the_broker_long_before_the_next_poll_on_debians_postgres() {
    a_commit_is_at_the_broker_long_before_the_next_poll("LB_POSTGRES_URL").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_at_the_broker_long_before_the_next_poll_on_postgres_18() {
    a_commit_is_at_the_broker_long_before_the_next_poll("LB_POSTGRES18_URL").await;
}

/// H18-H22: the walsender ended, the publication dropped, filtered and made anew, again and again under load. What is
/// hurt is the stream alone, so not even a duplicate comes of it.
async fn a_stream_that_comes_and_goes_costs_nothing(server: &str) {
    let _shared = shared().await;
    let database = Database::create(server).await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destinations = Destination::all().await;
    let setup = watchful(Setup::new(&database.url(), &destinations, ""));
    setup.run(&["migrate"]);
    let rounds = if soak() { 200 } else { 12 };
    let load = Load { seed: seed(), writers: 2, keys: 100, events: usize::MAX / 2 };
    let mut rng = StdRng::seed_from_u64(load.seed);
    let bridge = setup.start();
    streams(&client).await;
    let stop = Arc::new(AtomicUsize::new(0));
    let mut faults = [0; 3];
    let hurting = async {
        for _ in 0..rounds {
            let fault = rng.random_range(0..3);
            faults[fault] += 1;
            match fault {
                0 => end_walsender(&client).await,
                1 => client.batch_execute("drop publication if exists lanebridge_wal").await.unwrap(),
                _ => {
                    let filtered = "alter publication lanebridge_wal set table lanebridge.events where (lane < 128)";
                    // Not there any more, perhaps.
                    let _filtered = client.batch_execute(filtered).await;
                }
            }
            // Some are mended before they are noticed, some while a new stream is on its way, most when it polls.
            if fault != 0 && rng.random_bool(0.7) {
                eventually("it is noticed", SOON, || async { source(&client).await.as_deref() == Some("poll") }).await;
            }
            mend(&client).await;
            if rng.random_bool(0.7) {
                streams(&client).await;
                let before = stop.load(Ordering::Relaxed);
                eventually("it streams for a while", SOON, || {
                    std::future::ready(stop.load(Ordering::Relaxed) > before + 100)
                })
                .await;
            }
        }
        stop.fetch_add(load.events, Ordering::Relaxed);
    };
    tokio::join!(publish(&database, load, Arc::clone(&stop)), hurting);
    drained(&client, Duration::from_secs(60)).await;
    eventually("it streams again", Duration::from_secs(60), || async {
        source(&client).await.as_deref() == Some("wal")
    })
    .await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let streamed = streamed(&setup.log());
    eprintln!("{server}: ended, dropped, filtered {faults:?} times; {streamed} streamed");
    assert!(streamed > 100, "the stream was of use between the faults");
    for destination in &destinations {
        judge(&client, &destination.read().await).await.must_be_clean(destination.name(), 0);
        destination.remove().await;
    }
    database.drop().await;
}

async fn mend(client: &Client) {
    let sql = format!("drop publication if exists lanebridge_wal; {MAKE_PUBLICATION}");
    client.batch_execute(&sql).await.unwrap();
}

pub async fn end_walsender(client: &Client) {
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name like 'lanebridge/%/wal'";
    client.execute(sql, &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_comes_and_goes_costs_nothing_on_debians_postgres() {
    a_stream_that_comes_and_goes_costs_nothing("LB_POSTGRES_URL").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_comes_and_goes_costs_nothing_on_postgres_18() {
    a_stream_that_comes_and_goes_costs_nothing("LB_POSTGRES18_URL").await;
}

/// H8, H9: stream and poll are joined anew at every start, under load. 300 times with LB_SOAK=1.
#[tokio::test(flavor = "multi_thread")]
async fn starts_and_stops_under_load_join_stream_and_poll_without_a_gap() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let rounds = if soak() { 300 } else { 30 };
    let stop = Arc::new(AtomicUsize::new(0));
    let load = Load { seed: seed(), writers: 2, keys: 20, events: usize::MAX / 2 };
    let mut rng = StdRng::seed_from_u64(load.seed);
    let joining = async {
        for _ in 0..rounds {
            let bridge = setup.start();
            let epochs = "select max(epoch) from lanebridge.bridges where fenced_at is null";
            eventually("it is there", SOON, || async {
                client.query_one(epochs, &[]).await.unwrap().get::<_, Option<i64>>(0).is_some()
            })
            .await;
            if rng.random_bool(0.5) {
                streams(client).await;
            }
            let status = bridge.terminate().await;
            assert!(status.success(), "{status}\n{}", setup.log());
        }
        stop.fetch_add(load.events, Ordering::Relaxed);
    };
    tokio::join!(publish(database, load, Arc::clone(&stop)), joining);
    setup.run(&["run", "--once"]);
    assert_eq!(deliveries_left(client).await, 0);
    let verdict = judge(client, &destinations[0].read().await).await;
    verdict.must_be_clean(&format!("{rounds} joins"), 0);
    stage.end().await;
}

/// H1: the stream shows a commit that waits for a standby; nothing is sent before it is visible, and then once.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_a_standby_is_sent_when_it_is_visible_and_once() {
    let _shared = shared().await;
    let server = Server::start(&[]).await;
    let client = server.connect().await;
    let destination = Destination::redis();
    let setup = Setup::new(&server.url(), std::slice::from_ref(&destination), "");
    setup.run(&["migrate"]);
    let bridge = setup.start();
    streams(&client).await;
    client.batch_execute("set synchronous_commit = local").await.unwrap();
    let standby = |name: &str| format!("alter system set synchronous_standby_names = '{name}'");
    client.batch_execute(&standby("nobody")).await.unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
    let publisher = server.connect().await;
    eventually("the publisher waits for a standby", SOON, || async {
        let row = publisher.query_one("select current_setting('synchronous_standby_names')", &[]).await.unwrap();
        row.get::<_, &str>(0) == "nobody"
    })
    .await;
    let publishing =
        tokio::spawn(async move { publisher.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await });
    let waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'";
    eventually("it waits", SOON, || async { client.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 1 }).await;
    // The bridge sends a canary every five seconds; two polls of the table a second have passed when it comes back.
    let early = tokio::time::timeout(Duration::from_secs(3), async {
        eventually("something is sent", SOON, || async { !destination.read().await.is_empty() }).await;
    });
    assert!(early.await.is_err(), "sent before the commit was visible");
    assert!(!publishing.is_finished());
    client.batch_execute(&standby("")).await.unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
    publishing.await.unwrap().unwrap();
    drained(&client, SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    assert_eq!(destination.read().await.len(), 1);
    destination.remove().await;
}

/// H14: the stream shows rows that were deleted by the transaction that inserted them; R1 keeps them back.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_deleted_by_its_own_transaction_is_never_sent() {
    let stage = Stage::with([Destination::redis()], patient).await;
    let Stage { client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    for n in 0..20 {
        let sql = format!(
            "begin;
             select lanebridge.publish('order.x', 'phantom', 'k', id => 'p{n}');
             delete from lanebridge.deliveries; delete from lanebridge.events where id = 'p{n}';
             commit;
             select lanebridge.publish('order.x', 'real', 'k', id => 'r{n}')"
        );
        client.batch_execute(&sql).await.unwrap();
        drained(client, SOON).await;
    }
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let received = destinations[0].read().await;
    assert_eq!(received.len(), 20);
    assert!(received.iter().all(|got| got.payload == b"real"), "a phantom was sent");
    let left: i64 = client.query_one("select count(*) from lanebridge.events where seq < 0", &[]).await.unwrap().get(0);
    assert_eq!(left, 0, "canaries leave nothing behind");
    stage.end().await;
}

/// R1: a payload of the stream is no permission. What an operator took away while it was queued is not sent, although
/// a poll saw it and the payload is there: that poll is too old.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_took_away_while_it_waited_is_not_sent() {
    let marker = format!("first-{}", rand::random::<u32>());
    let mut proxy = Proxy::holding(redis_address(), &marker).await;
    let (redis, through) = (address("LB_REDIS_URL"), format!("redis://{}", proxy.address));
    let stage = Stage::with([Destination::redis()], |setup| {
        let setup = setup.with(&redis, &through).with("batches_in_flight = 2", "batches_in_flight = 1");
        setup.with("batch = 100", "batch = 1").with("\"50ms\"", "\"10ms\"")
    })
    .await;
    let Stage { client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    client.execute("select lanebridge.publish('order.x', $1, 'a')", &[&marker]).await.unwrap();
    proxy.held().await;
    let publish = "select lanebridge.publish('order.x', 'p', 'b')";
    let taken: i64 = client.query_one(publish, &[]).await.unwrap().get(0);
    // Read by then, many times over; the first one is in the way. And again until the last such read is too old.
    let blocked = || async { tokio::time::timeout(Duration::from_secs(1), drained(client, SOON)).await.is_err() };
    assert!(blocked().await, "the proxy holds the first delivery back");
    client.execute("delete from lanebridge.deliveries where seq = $1", &[&taken]).await.unwrap();
    assert!(blocked().await);
    proxy.release();
    drained(client, SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let received = destinations[0].read().await;
    assert!(received.iter().all(|got| got.seq != taken), "sent although it was taken away");
    assert_eq!(received.len(), 1);
    stage.end().await;
}

/// R14, H25: one transaction with 60,000 events; the bridge remembers lanes, not rows, and others go on meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_huge_transaction_is_remembered_by_its_lanes() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { client, database, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    let huge = "select lanebridge.publish_batch(
        array_agg('order.x'::text), array_agg(convert_to(repeat(md5(n::text), 10), 'UTF8')), array_agg('t'::text),
        array_agg('k' || n % 1000),
        null, null, null, null) from generate_series(1, 60000) n";
    let other = database.connect().await;
    let publishing = async { other.batch_execute(huge).await.unwrap() };
    let (_, peak) = tokio::join!(publishing, async { bridge.peak_mib() });
    drained(client, Duration::from_secs(120)).await;
    let peak = peak.max(bridge.peak_mib());
    eprintln!("peak memory: {peak} MiB");
    assert!(peak < 200, "{peak} MiB at the peak");
    assert_eq!(destinations[0].read().await.len(), 60_000);
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}

/// A bridge that is stopped takes leave: its slot does not outlive it, not even for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_bridge_leaves_no_slot() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { client, setup, .. } = &stage;
    let slots = || async {
        let sql = "select count(*) from pg_replication_slots where database = current_database()";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let bridge: Bridge = setup.start();
    streams(client).await;
    assert_eq!(slots().await, 1);
    assert!(bridge.terminate().await.success());
    assert_eq!(slots().await, 0);
    stage.end().await;
}
