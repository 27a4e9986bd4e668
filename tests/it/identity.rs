//! An id makes publishing idempotent.

use crate::installation::{Installation, all, handler, one, pid, run, said, waits};

on_every_server!(
    an_id_published_again_is_no_second_event_and_returns_its_seq,
    an_id_published_by_eight_sessions_at_once_is_one_event,
    an_id_twice_in_one_batch_is_one_event,
    an_id_rolled_back_is_free_again,
    a_handler_added_later_gets_its_delivery_exactly_once,
    a_delivery_added_later_keeps_the_time_asked_for,
    an_id_whose_event_passed_its_retention_stays_known,
    an_id_forgotten_while_it_is_published_is_published,
    an_id_inserted_concurrently_is_40001_under_repeatable_read,
    batches_with_known_ids_in_opposite_orders_do_not_deadlock,
);

async fn an_id_published_again_is_no_second_event_and_returns_its_seq(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    let first: i64 = one(&client, "select lanebridge.publish('t', 'one', 'k', id => 'order-7')").await;
    for again in [
        "select lanebridge.publish('t', 'two', 'k', id => 'order-7')",
        "select lanebridge.publish('other', '{}'::jsonb, 'other', id => 'order-7')",
        "select seq from lanebridge.publish_batch('{t}', '{p}', '{t}', '{k}', '{null}', '{order-7}', '{null}', '{null}')",
    ] {
        assert_eq!(one::<i64>(&client, again).await, first, "{again}");
    }
    let new: i64 =
        one(&client, r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "order-7"}]')"#).await;
    assert_eq!(new, 0);
    assert_eq!(all::<Vec<u8>>(&client, "select payload from lanebridge.events").await, [b"one"]);
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.deliveries").await, 1);
    // Bytes, not letters: another spelling is another id.
    for other in ["Order-7", "order-7 ", "order-7\u{301}"] {
        assert_ne!(one::<i64>(&client, &format!("select lanebridge.publish('t', 'p', id => '{other}')")).await, first);
    }
}

async fn an_id_published_by_eight_sessions_at_once_is_one_event(db: &Installation) {
    let observer = db.connect().await;
    handler(&observer, "h", &[">"]).await;
    for round in 0..5 {
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        let mut sessions = tokio::task::JoinSet::new();
        for n in 0..8 {
            let (client, barrier) = (db.connect().await, std::sync::Arc::clone(&barrier));
            let publish = match n % 2 {
                0 => format!("select lanebridge.publish('t', 'p', 'k{n}', id => 'id-{round}')"),
                _ => format!(
                    "select seq from lanebridge.publish_batch('{{t}}', '{{p}}', '{{t}}', '{{k{n}}}', null, '{{id-{round}}}', null, null)"
                ),
            };
            sessions.spawn(async move {
                barrier.wait().await;
                one::<i64>(&client, &publish).await
            });
        }
        let seqs = sessions.join_all().await;
        assert!(seqs.iter().all(|seq| *seq == seqs[0]), "{seqs:?}");
    }
    let counts: (i64, i64) = (
        one(&observer, "select count(*) from lanebridge.events").await,
        one(&observer, "select count(*) from lanebridge.deliveries").await,
    );
    assert_eq!(counts, (5, 5));
}

async fn an_id_twice_in_one_batch_is_one_event(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &["t"]).await;
    let other = handler(&client, "other", &["never"]).await;
    let rows = client
        .query(
            "select seq, is_new from lanebridge.publish_batch('{t,t,t}', '{a,b,c}', '{t,t,t}', '{null,null,null}', null,
                '{x,y,x}', null, array[null, null, '[\"other\"]']::jsonb[]) order by ord",
            &[],
        )
        .await
        .unwrap();
    let rows: Vec<(i64, bool)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(rows[0].0, rows[2].0);
    assert_eq!(rows.iter().map(|row| row.1).collect::<Vec<_>>(), [true, true, false]);
    let payloads: Vec<Vec<u8>> = all(&client, "select payload from lanebridge.events order by seq").await;
    assert_eq!(payloads, [b"a", b"b"]);
    // The third names a handler that the first did not reach.
    let to_other: Vec<i64> =
        all(&client, &format!("select seq from lanebridge.deliveries where handler = {other}")).await;
    assert_eq!(to_other, [rows[0].0]);
}

async fn an_id_rolled_back_is_free_again(db: &Installation) {
    let client = db.connect().await;
    run(
        &client,
        "begin; select lanebridge.publish('t', 'one', id => 'x'); rollback;
         begin; savepoint s; select lanebridge.publish('t', 'two', id => 'x'); rollback to s;
         select lanebridge.publish('t', 'three', id => 'x'); commit",
    )
    .await;
    assert_eq!(all::<Vec<u8>>(&client, "select payload from lanebridge.events").await, [b"three"]);
}

async fn a_handler_added_later_gets_its_delivery_exactly_once(db: &Installation) {
    let client = db.connect().await;
    let first = handler(&client, "first", &["t"]).await;
    let seq: i64 = one(&client, "select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
    let later = handler(&client, "later", &["t"]).await;
    let again = "select lanebridge.publish('t', 'p', 'k', id => 'x')";
    let left = "select handler from lanebridge.deliveries order by handler";
    assert_eq!(one::<i64>(&client, again).await, seq);
    assert_eq!(all::<i32>(&client, left).await, [first, later]);
    // Completed deliveries do not come back.
    run(&client, "delete from lanebridge.deliveries").await;
    for _ in 0..2 {
        assert_eq!(one::<i64>(&client, again).await, seq);
        run(&client, r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "x"}]')"#).await;
    }
    assert_eq!(all::<i32>(&client, left).await, [0; 0]);

    // Eight sessions at once add one delivery, not eight; it is due rather than fresh, so that its lane is read again.
    let third = handler(&client, "third", &["t"]).await;
    let mut sessions = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let client = db.connect().await;
        sessions.spawn(async move { one::<i64>(&client, again).await });
    }
    assert!(sessions.join_all().await.iter().all(|other| *other == seq));
    assert_eq!(
        all::<i32>(&client, "select handler from lanebridge.deliveries where due_at <= clock_timestamp()").await,
        [third]
    );
    assert_eq!(all::<i32>(&client, left).await, [third]);
    assert_eq!(one::<Vec<i32>>(&client, "select handlers from lanebridge.events").await, [first, later, third]);
}

async fn a_delivery_added_later_keeps_the_time_asked_for(db: &Installation) {
    let client = db.connect().await;
    let publish = "select lanebridge.publish('t', 'p', id => 'x', deliver_at => '2999-01-01 00:00Z')";
    run(&client, publish).await;
    handler(&client, "one", &["t"]).await;
    run(&client, publish).await;
    handler(&client, "many", &["t"]).await;
    let many = r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "x", "deliver_at": "2999-01-01 00:00Z"}]')"#;
    run(&client, many).await;
    let held: i64 = one(&client, "select count(*) from lanebridge.deliveries where due_at = '2999-01-01 00:00Z'").await;
    assert_eq!(held, 2);
}

async fn an_id_whose_event_passed_its_retention_stays_known(db: &Installation) {
    let client = db.connect().await;
    let seq: i64 = one(&client, "select lanebridge.publish('t', 'p', id => 'x')").await;
    run(&client, "delete from lanebridge.events").await;
    handler(&client, "later", &["t"]).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.publish('t', 'p', id => 'x')").await, seq);
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.deliveries").await, 0);
}

// Retention deletes an id between the moment that publishing finds it and the moment that it reads it: the event must
// be stored or refused, never swallowed with a null for a seq.
async fn an_id_forgotten_while_it_is_published_is_published(db: &Installation) {
    let mut janitor = db.connect().await;
    let publisher = db.connect().await;
    let observer = db.connect().await;
    handler(&observer, "h", &["never"]).await;
    for publish in [
        "select lanebridge.publish('t', 'new', id => 'x')",
        "select seq from lanebridge.publish_batch('{t}', '{new}', '{t}', null, null, '{x}', null, null)",
    ] {
        run(&observer, "select lanebridge.publish('t', 'old', id => 'x')").await;
        handler(&observer, "later", &["t"]).await;
        let forget = janitor.transaction().await.unwrap();
        forget.batch_execute("delete from lanebridge.event_ids; delete from lanebridge.events").await.unwrap();
        let waiting = pid(&publisher).await;
        let (published, ()) = tokio::join!(publisher.query_one(publish, &[]), async {
            waits(&observer, waiting).await;
            forget.commit().await.unwrap();
        });
        match published {
            Ok(row) => {
                let payloads: Vec<Vec<u8>> = all(&observer, "select payload from lanebridge.events").await;
                assert_eq!(
                    (row.get::<_, Option<i64>>(0).is_some(), payloads),
                    (true, vec![b"new".to_vec()]),
                    "{publish}"
                );
            }
            Err(error) => assert!(said(&error).starts_with("40001 "), "{}", said(&error)),
        }
        run(&observer, "delete from lanebridge.event_ids; delete from lanebridge.events").await;
        run(&observer, "delete from lanebridge.handlers where name = 'later'").await;
    }
}

async fn an_id_inserted_concurrently_is_40001_under_repeatable_read(db: &Installation) {
    let other = db.connect().await;
    for publish in [
        "select lanebridge.publish('t', 'p', 'k', id => 'x')",
        r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "x"}]')"#,
    ] {
        for level in ["repeatable read", "serializable"] {
            run(&other, "delete from lanebridge.event_ids").await;
            let client = db.connect().await;
            run(&client, &format!("begin isolation level {level}; select count(*) from lanebridge.event_ids")).await;
            run(&other, "select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
            let error = client.batch_execute(publish).await.unwrap_err();
            assert!(said(&error).starts_with("40001 "), "{level}: {}", said(&error));
        }
    }
}

// Keys are locked in one order; what a known id locks must be, too.
async fn batches_with_known_ids_in_opposite_orders_do_not_deadlock(db: &Installation) {
    let observer = db.connect().await;
    let ids: Vec<String> = (0..200).map(|n| format!("id-{n}")).collect();
    run(
        &observer,
        &format!("select lanebridge.publish('t', 'p', id => i) from unnest('{{{}}}'::text[]) i", ids.join(",")),
    )
    .await;
    for round in 0..5 {
        // Each round has a handler to add, so that every known id is written.
        handler(&observer, &format!("h{round}"), &["t"]).await;
        let mut sessions = tokio::task::JoinSet::new();
        for n in 0..8 {
            let client = db.connect().await;
            let mut ids = ids.clone();
            if n % 2 == 1 {
                ids.reverse();
            }
            sessions.spawn(async move {
                let kinds = vec!["t"; ids.len()];
                let payloads = vec![b"p".as_slice(); ids.len()];
                let none: Vec<Option<String>> = vec![None; ids.len()];
                let sql = "select count(*) from lanebridge.publish_batch($1, $2, $1, $3, null, $4, null, null)";
                client.query_one(sql, &[&kinds, &payloads, &none, &ids]).await.map(|_| ()).map_err(|e| said(&e))
            });
        }
        for done in sessions.join_all().await {
            assert_eq!(done, Ok(()));
        }
    }
    assert_eq!(one::<i64>(&observer, "select count(*) from lanebridge.deliveries").await, 1000);
}
