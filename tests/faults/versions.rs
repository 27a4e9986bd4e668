//! Every PostgreSQL version that is supported, from the migration to the consumer, by the poll and by the stream.

use std::time::Duration;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::{deliveries_left, drained};
use crate::services::{Database, shared};
use crate::wal::{source, streamed, streams};

const SOON: Duration = Duration::from_secs(30);

/// Every way to publish. Of key `ann` one event is held back for a while and its followers with it; the last event
/// here is not.
const PUBLISH: &str = r#"
begin;
select lanebridge.publish('order.x', 'written', 'ann', id => 'text');
select lanebridge.publish('order.x', '{"b": 1,  "a": 2}'::jsonb, 'ann', id => 'jsonb');
savepoint half;
select lanebridge.publish('order.x', 'undone', 'ann', id => 'half');
rollback to half;
select lanebridge.publish('order.x', '\x00ff'::bytea, 'ann', id => 'bytea');
select lanebridge.publish('order.x', 'no key', id => 'unkeyed');
commit;
begin;
select lanebridge.publish('order.x', 'undone', 'ann', id => 'undone');
rollback;
select lanebridge.publish('order.x', 'published again', 'ann', id => 'text');
select lanebridge.publish('order.x', 'held back', 'ann', id => 'late', deliver_at => clock_timestamp() + interval '2 s');
select lanebridge.publish_many('[
    {"type": "order.x", "payload": {"n": 1}, "key": "ann", "id": "many-1"},
    {"type": "order.x", "payload": "two", "key": "ann", "id": "many-2"},
    {"type": "order.x", "payload": "three", "key": "ben", "id": "many-3"},
    {"type": "order.x", "payload": "four", "id": "many-4"},
    {"type": "order.x", "payload": "known", "key": "ann", "id": "jsonb"}]');
select lanebridge.publish('order.x', 'not held back', 'ben', id => 'last');
"#;

const PUBLISH_ALONE: &str = "select lanebridge.publish('order.x', 'to a bridge that runs once', 'ann', id => 'alone')";

/// What must arrive, in the order of each key.
const ARRIVES: [(Option<&str>, &str, &[u8]); 11] = [
    (Some("ann"), "text", b"written"),
    (Some("ann"), "jsonb", br#"{"a": 2, "b": 1}"#),
    (Some("ann"), "bytea", &[0, 255]),
    (Some("ann"), "late", b"held back"),
    (Some("ann"), "many-1", br#"{"n": 1}"#),
    (Some("ann"), "many-2", b"two"),
    (Some("ann"), "alone", b"to a bridge that runs once"),
    (Some("ben"), "many-3", b"three"),
    (Some("ben"), "last", b"not held back"),
    (None, "many-4", b"four"),
    (None, "unkeyed", b"no key"),
];

async fn whatever_is_published_arrives_once_and_in_order(server: &str, wanted: &str) {
    let _shared = shared().await;
    let database = Database::create(server).await;
    let client = database.connect().await;
    let destination = Destination::redis();
    let setup = Setup::new(&database.url(), std::slice::from_ref(&destination), "")
        .with("[bridge]\n", &format!("[bridge]\nsource = \"{wanted}\"\n"));
    setup.run(&["migrate"]);
    setup.run(&["migrate"]);
    setup.run(&["doctor"]);

    let bridge = setup.start();
    let stream = (wanted == "wal").then_some("wal");
    if stream.is_some() {
        streams(&client).await;
    }
    client.batch_execute(PUBLISH).await.unwrap();
    for report in [&["status"][..], &["lanes"], &["deliveries", "list"]] {
        setup.run(report);
    }
    drained(&client, SOON).await;
    assert_eq!(source(&client).await.as_deref(), stream);
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    if stream.is_some() {
        assert!(streamed(&setup.log()) > 0, "the stream brought no payload\n{}", setup.log());
    }
    client.batch_execute(PUBLISH_ALONE).await.unwrap();
    setup.run(&["run", "--once"]);
    assert_eq!(deliveries_left(&client).await, 0);

    let received = destination.read().await;
    let mut arrived: Vec<_> =
        received.iter().map(|got| (got.key.as_deref(), got.id.as_str(), got.payload.as_slice())).collect();
    // Stable: the order in which a key's events arrived stays. Those without a key have none.
    arrived.sort_by_key(|(key, id, _)| (key.is_none(), *key, if key.is_none() { id } else { "" }));
    assert_eq!(arrived, ARRIVES);
    let place = |id: &str| received.iter().position(|got| got.id == id);
    assert!(place("last") < place("late"), "nothing was held back: {received:?}");
    destination.remove().await;
    database.drop().await;
}

/// A test for each way to learn of deliveries.
macro_rules! on_version {
    ($($version:ident $variable:literal)+) => {
        $(mod $version {
            #[tokio::test(flavor = "multi_thread")]
            async fn whatever_is_published_arrives_once_and_in_order_by_the_poll() {
                super::whatever_is_published_arrives_once_and_in_order($variable, "poll").await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn whatever_is_published_arrives_once_and_in_order_by_the_stream() {
                super::whatever_is_published_arrives_once_and_in_order($variable, "wal").await;
            }
        })+
    };
}

on_version! {
    postgres_14 "LB_POSTGRES14_URL"
    postgres_15 "LB_POSTGRES_URL"
    postgres_16 "LB_POSTGRES16_URL"
    postgres_17 "LB_POSTGRES17_URL"
    postgres_18 "LB_POSTGRES18_URL"
}
