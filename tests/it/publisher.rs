//! The Rust publisher, in a transaction of its caller.

use lanebridge::publish::{NewEvent, Published, Publisher};
use serde_json::json;
use time::OffsetDateTime;

use crate::installation::{Installation, all, handler, one, run, said, script};

on_every_server!(
    it_publishes_in_the_transaction_of_its_caller,
    every_kind_of_payload_arrives_byte_by_byte,
    every_field_reaches_its_column,
    a_batch_of_1000_keeps_its_order_and_answers_in_it,
    an_empty_batch_is_no_statement_too_many,
    a_refusal_says_what_the_database_said,
    it_calls_the_functions_of_its_schema_and_prefix,
);

async fn it_publishes_in_the_transaction_of_its_caller(db: &Installation) {
    let mut client = db.connect().await;
    let publisher = Publisher::default();
    for commit in [false, true] {
        let transaction = client.transaction().await.unwrap();
        publisher.publish(&transaction, NewEvent::text("t", "one")).await.unwrap();
        publisher
            .publish_batch(&transaction, vec![NewEvent::text("t", "two"), NewEvent::text("t", "three")])
            .await
            .unwrap();
        if commit {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
        let stored: i64 = one(&client, "select count(*) from lanebridge.events").await;
        assert_eq!(stored, if commit { 3 } else { 0 });
    }
}

async fn every_kind_of_payload_arrives_byte_by_byte(db: &Installation) {
    let client = db.connect().await;
    let publisher = Publisher::default();
    let bytes: Vec<u8> = (0..=255).collect();
    let value = json!({"b": 1, "a": [null, 1.5, "é"], "n": 9007199254740993_i64});
    let events = || {
        vec![
            NewEvent::bytes("t", bytes.clone()),
            NewEvent::bytes("t", Vec::new()),
            NewEvent::text("t", "é€😀\n"),
            NewEvent::text("t", ""),
            NewEvent::json("t", &value),
        ]
    };
    for event in events() {
        publisher.publish(&client, event).await.unwrap();
    }
    publisher.publish_batch(&client, events()).await.unwrap();
    let stored = client.query("select format::text, payload from lanebridge.events order by seq", &[]).await.unwrap();
    let stored: Vec<(String, Vec<u8>)> = stored.iter().map(|row| (row.get(0), row.get(1))).collect();
    let expected = [
        ("b".to_owned(), bytes.clone()),
        ("b".to_owned(), Vec::new()),
        ("t".to_owned(), "é€😀\n".into()),
        ("t".to_owned(), Vec::new()),
        ("j".to_owned(), value.to_string().into_bytes()),
    ];
    assert_eq!(stored, [expected.clone(), expected].concat());
}

async fn every_field_reaches_its_column(db: &Installation) {
    let client = db.connect().await;
    let id = handler(&client, "h", &["never"]).await;
    let due = OffsetDateTime::from_unix_timestamp(32_503_680_000).unwrap();
    let event = |id: &str| {
        NewEvent::text("t", "p")
            .key("k")
            .header("a", "1")
            .header("a", "2")
            .header("b", "")
            .id(id)
            .deliver_at(due)
            .handlers(["h"])
    };
    let publisher = Publisher::default();
    let first = publisher.publish(&client, event("one")).await.unwrap();
    let batch = publisher.publish_batch(&client, vec![event("many"), event("one")]).await.unwrap();
    assert_eq!(batch[1], Published { seq: first, is_new: false });
    assert!(batch[0].is_new && batch[0].seq > first);
    assert_eq!(publisher.publish(&client, event("many")).await.unwrap(), batch[0].seq);
    let good: i64 = one(
        &client,
        &format!(
            r#"select count(*) from lanebridge.events e join lanebridge.deliveries d using (seq)
                where e.key = 'k' and e.headers = '{{"a": "2", "b": ""}}' and d.handler = {id}
                  and extract(epoch from d.due_at) = 32503680000 and e.id in ('one', 'many')"#
        ),
    )
    .await;
    assert_eq!(good, 2);
}

async fn a_batch_of_1000_keeps_its_order_and_answers_in_it(db: &Installation) {
    let client = db.connect().await;
    let publisher = Publisher::default();
    run(&client, "select lanebridge.publish('t', 'known', id => 'i' || n) from generate_series(0, 990, 10) n").await;
    let events = (0..1000).map(|n| {
        let event = NewEvent::text("t", n.to_string()).key(format!("k{}", n % 7));
        if n % 5 == 0 { event.id(format!("i{n}")) } else { event }
    });
    let published = publisher.publish_batch(&client, events.collect()).await.unwrap();
    assert_eq!(published.len(), 1000);
    let mut last = 0;
    for (n, published) in published.iter().enumerate() {
        assert_eq!(published.is_new, n % 10 != 0, "{n}");
        if published.is_new {
            assert!(published.seq > last);
            last = published.seq;
        }
    }
    let new: Vec<String> = all(
        &client,
        "select convert_from(payload, 'UTF8') from lanebridge.events where payload <> 'known' order by seq",
    )
    .await;
    let expected: Vec<String> = (0..1000).filter(|n| n % 10 != 0).map(|n| n.to_string()).collect();
    assert_eq!(new, expected);
}

async fn an_empty_batch_is_no_statement_too_many(db: &Installation) {
    let client = db.connect().await;
    assert_eq!(Publisher::default().publish_batch(&client, Vec::new()).await.unwrap(), []);
}

async fn a_refusal_says_what_the_database_said(db: &Installation) {
    let client = db.connect().await;
    let publisher = Publisher::default();
    let error = publisher.publish(&client, NewEvent::text("", "p")).await.unwrap_err();
    assert_eq!(said(&error), "22023 publish: type must not be null or empty");
    let batch = vec![NewEvent::text("t", "p"), NewEvent::text("t", "p").handlers(["nobody"])];
    let error = publisher.publish_batch(&client, batch).await.unwrap_err();
    assert_eq!(said(&error), "22023 publish: event 1: unknown handler 'nobody'");
    for event in [NewEvent::text("t\0", "p"), NewEvent::text("t", "p").header("h", "\0")] {
        assert!(publisher.publish(&client, event.clone()).await.is_err());
        assert!(publisher.publish_batch(&client, vec![event]).await.is_err());
    }
}

async fn it_calls_the_functions_of_its_schema_and_prefix(db: &Installation) {
    let client = db.connect().await;
    run(&client, &script("other", "x_")).await;
    let publisher = Publisher::new("other", "x_");
    publisher.publish(&client, NewEvent::text("t", "p")).await.unwrap();
    publisher.publish_batch(&client, vec![NewEvent::text("t", "p")]).await.unwrap();
    assert_eq!(one::<i64>(&client, "select count(*) from other.x_events").await, 2);
}
