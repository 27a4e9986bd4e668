//! Order per key under everything that can disturb it: late commits, delays, poison, dead deliveries.

use std::time::Duration;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::{deliveries_left, drained};
use crate::proxy::Proxy;
use crate::services::{Database, address, eventually, redis_address, shared};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(20);

async fn ids(destination: &Destination) -> Vec<String> {
    destination.read().await.into_iter().map(|received| received.id).collect()
}

/// H6: a transaction that stays open gets an early seq and commits late; what passed it meanwhile is delivered, and
/// the late event comes before later events of its own key.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_commit_is_found_and_keeps_its_place() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let bridge = setup.start();

    let mut late = database.connect().await;
    let open = late.transaction().await.unwrap();
    open.execute("select lanebridge.publish('order.x', 'p', 'k', id => 'late')", &[]).await.unwrap();
    client
        .batch_execute("select lanebridge.publish('order.x', 'p', 'other' || n, id => 'other-' || n) from generate_series(1, 300) n")
        .await
        .unwrap();
    drained(client, SOON).await;
    open.commit().await.unwrap();
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'after')").await.unwrap();
    drained(client, SOON).await;

    let ids = ids(&destinations[0]).await;
    assert_eq!(ids.len(), 302);
    let place = |id: &str| ids.iter().position(|other| other == id).unwrap();
    assert!(place("late") < place("after"), "{ids:?}");
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// H7: a transaction that stays open anywhere stalls nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_elsewhere_stalls_nothing() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let mut other = database.connect().await;
    let open = other.transaction().await.unwrap();
    open.batch_execute("create table elsewhere (a int); insert into elsewhere values (1)").await.unwrap();
    let bridge = setup.start();
    for n in 0..5 {
        let publish = format!("select lanebridge.publish('order.x', 'p', 'k', id => 'e{n}')");
        client.batch_execute(&publish).await.unwrap();
        drained(client, SOON).await;
    }
    open.rollback().await.unwrap();
    assert_eq!(ids(&destinations[0]).await, ["e0", "e1", "e2", "e3", "e4"]);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// H90: a delayed delivery delays its key, and nobody else; then all come in order.
#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_delivery_delays_its_key_only() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { client, destinations, setup, .. } = &stage;
    client
        .batch_execute(
            "select lanebridge.publish('order.x', 'p', 'k', id => 'k1', deliver_at => clock_timestamp() + interval '2 s');
             select lanebridge.publish('order.x', 'p', 'k', id => 'k2');
             select lanebridge.publish('order.x', 'p', 'j', id => 'j1')",
        )
        .await
        .unwrap();
    let bridge = setup.start();
    eventually("the other key is delivered", SOON, || async { deliveries_left(client).await == 2 }).await;
    drained(client, SOON).await;
    assert_eq!(ids(&destinations[0]).await, ["j1", "k1", "k2"]);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// H87, H88, I7: a delivery that can never go is buried and holds back its key only; requeued after the cause is gone,
/// it comes first and its followers after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_delivery_blocks_its_key_until_it_is_requeued() {
    let stage = Stage::new([Destination::nats().await]).await;
    let Stage { client, destinations, setup, .. } = &stage;
    client
        .batch_execute(
            "select lanebridge.publish('order.x', repeat('x', 1048576), 'k', id => 'poison');
             select lanebridge.publish('order.x', 'p', 'k', id => 'k2');
             select lanebridge.publish('order.x', 'p', 'j', id => 'j1')",
        )
        .await
        .unwrap();
    let bridge = setup.start();
    let dead =
        || async { client.query_one("select count(*) from lanebridge.dead", &[]).await.unwrap().get::<_, i64>(0) };
    eventually("the oversized one is dead", SOON, || async { dead().await == 1 && deliveries_left(client).await == 1 })
        .await;
    assert_eq!(ids(&destinations[0]).await, ["j1"], "the follower waits");

    // The cause goes away: the payload is cut by hand, as no operator should, but as one would.
    client.batch_execute("update lanebridge.events set payload = 'small' where id = 'poison'").await.unwrap();
    let seq: i64 = client.query_one("select seq from lanebridge.dead", &[]).await.unwrap().get(0);
    let out = setup.run(&["deliveries", "requeue", "to-nats", &seq.to_string(), "--yes"]);
    assert!(out.contains('1'), "{out}");
    drained(client, SOON).await;
    assert_eq!(ids(&destinations[0]).await, ["j1", "poison", "k2"]);
    assert_eq!(dead().await, 0);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// R1: what an operator took away while it waited in the bridge's memory is not sent: each delivery is seen again by an
/// ordinary read right before it goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_delivery_is_never_sent() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let destinations = [Destination::redis()];
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let setup = Setup::new(&database.url(), &destinations, "")
        .with(&address("LB_REDIS_URL"), &format!("redis://127.0.0.1:{port}"));
    setup.run(&["migrate"]);
    client
        .batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e' || n) from generate_series(1, 3) n")
        .await
        .unwrap();
    let bridge = setup.start();
    eventually("the broker is found to be away", SOON, || std::future::ready(setup.log().contains("unreachable")))
        .await;
    client.batch_execute("delete from lanebridge.deliveries where seq in (1, 2)").await.unwrap();
    let _appears = Proxy::at(port, redis_address()).await;
    drained(&client, SOON).await;
    assert_eq!(ids(&destinations[0]).await, ["e3"]);
    assert!(bridge.terminate().await.success());
    destinations[0].remove().await;
    database.drop().await;
}

/// However much is due at once, it flows: promotion looks again at once, and shares its limit among the lanes.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_that_are_due_at_once_do_not_wait_for_polls() {
    let stage =
        Stage::with([Destination::redis()], |setup| setup.with("\"50ms\"", "\"5s\"").with("\"1s\"\n", "\"60s\"\n"))
            .await;
    let Stage { client, destinations, setup, .. } = &stage;
    let publish = "select lanebridge.publish('order.x', 'p', 'k' || n % 2000, id => 'e' || n,
                          deliver_at => clock_timestamp() + interval '1 s') from generate_series(1, 10000) n";
    client.batch_execute(publish).await.unwrap();
    client.batch_execute("update lanebridge.deliveries set due_at = clock_timestamp()").await.unwrap();
    let bridge = setup.start();
    drained(client, Duration::from_secs(15)).await;
    let received = destinations[0].read().await;
    assert_eq!(received.len(), 10_000);
    let mut last = std::collections::HashMap::new();
    for event in &received {
        let before = last.insert(event.key.clone(), event.seq).unwrap_or(0);
        assert!(before < event.seq, "{before} before {}", event.seq);
    }
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// H87: hundreds of thousands wait behind one dead head. The reads that pass them are cut, so that each is short; one that
/// looked at all of them at once would not end within the statement timeout, and no other key would ever go.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_behind_one_head_keeps_no_other_key_waiting() {
    let stage =
        Stage::with([Destination::redis()], |setup| setup.with("[bridge]", "statement_timeout = \"1s\"\n[bridge]"))
            .await;
    let Stage { client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'first')").await.unwrap();
    drained(client, SOON).await;
    let lane = "(hashtextextended('k', 0) & 255)::smallint";
    let (key, handler) = ("hashtextextended('k', 0)", "(select id from lanebridge.handlers)");
    let followers = 800_000;
    let blocked = format!(
        "insert into lanebridge.dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
         values ({lane}, {handler}, nextval('lanebridge.events_seq'), now(), {key}, 1, 1, 0, 'REFUSED', 'no');
         insert into lanebridge.deliveries (lane, handler, seq, created_at, key_hash, size_bytes)
         select {lane}, {handler}, nextval('lanebridge.events_seq'), now(), {key}, 1 from generate_series(1, {followers});
         analyze lanebridge.deliveries"
    );
    client.batch_execute(&blocked).await.unwrap();
    let other = "select 'other-' || n from generate_series(1, 10000) n
                  where (hashtextextended('other-' || n, 0) & 255)::smallint = (hashtextextended('k', 0) & 255)::smallint limit 5";
    let others: Vec<String> = client.query(other, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    for key in &others {
        client.execute("select lanebridge.publish('order.x', 'p', $1::text, id => $1::text)", &[key]).await.unwrap();
        let left = format!(
            "select count(*) from lanebridge.deliveries where key_hash <> {key_hash}",
            key_hash = "hashtextextended('k', 0)"
        );
        eventually("the other key's is delivered", Duration::from_secs(60), || async {
            client.query_one(&left, &[]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
    }
    assert_eq!(ids(&destinations[0]).await.len(), 6);
    assert!(!setup.log().contains("failed"), "{}", setup.log());
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}
