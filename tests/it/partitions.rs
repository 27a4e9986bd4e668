//! Days: made ahead, dropped when all is delivered, and nobody else's table touched.

use crate::installation::{Installation, all, handler, one, run};

on_every_server!(
    partitions_are_made_ahead_and_once,
    partitions_are_made_once_by_many,
    rows_move_out_of_the_default_partition,
    days_are_utc_days_in_every_time_zone,
    only_what_is_delivered_and_old_is_dropped,
    tables_that_are_not_ours_are_never_touched,
    a_partition_in_use_is_kept_and_publishers_do_not_wait,
    ids_are_forgotten_after_their_events,
);

const DAYS: &str = "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
                     where i.inhparent = 'lanebridge.events'::regclass and c.relname <> 'events_default' order by 1";

/// A partition of a day long past, with one event in it.
async fn old_day(client: &tokio_postgres::Client, day: &str, seq: i64) {
    run(
        client,
        &format!(
            "create table lanebridge.events_{} partition of lanebridge.events for values from ('{day} 00:00Z') to ('{day} 24:00Z');
             insert into lanebridge.events (seq, created_at, lane, format, id, type, handlers, payload)
             values ({seq}, '{day} 12:00Z', 0, 't', 'old-{seq}', 't', '{{1}}', 'p')",
            day.replace('-', "_")
        ),
    )
    .await;
}

async fn partitions_are_made_ahead_and_once(db: &Installation) {
    let client = db.connect().await;
    let expected = "select 'events_' || to_char((clock_timestamp() at time zone 'UTC')::date + n, 'YYYY_MM_DD') from generate_series(0, 3) n";
    assert_eq!(all::<String>(&client, DAYS).await, all::<String>(&client, expected).await);
    assert_eq!(all::<String>(&client, "select lanebridge.ensure_partitions(3)").await, [""; 0]);
    assert_eq!(all::<String>(&client, "select lanebridge.ensure_partitions(5)").await.len(), 2);
    assert_eq!(all::<String>(&client, DAYS).await.len(), 6);
    let indexes: Vec<i64> = all(
        &client,
        "select count(*) from pg_index where indrelid in (select inhrelid from pg_inherits where inhparent = 'lanebridge.events'::regclass) group by indrelid",
    )
    .await;
    assert_eq!(indexes, [2; 7], "attaching uses the indexes that are there");
}

async fn partitions_are_made_once_by_many(db: &Installation) {
    let mut sessions = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let client = db.connect().await;
        sessions.spawn(async move { all::<String>(&client, "select lanebridge.ensure_partitions(9)").await.len() });
    }
    assert_eq!(sessions.join_all().await.iter().sum::<usize>(), 6);
}

async fn rows_move_out_of_the_default_partition(db: &Installation) {
    let client = db.connect().await;
    for day in all::<String>(&client, DAYS).await {
        run(&client, &format!("drop table lanebridge.{day}")).await;
    }
    handler(&client, "h", &[">"]).await;
    run(&client, "select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
    let home = "select tableoid::regclass::text from lanebridge.events";
    assert_eq!(one::<String>(&client, home).await, "lanebridge.events_default");
    assert_eq!(all::<String>(&client, "select lanebridge.ensure_partitions(0)").await.len(), 1);
    assert_ne!(one::<String>(&client, home).await, "lanebridge.events_default");
    // Still found by its id.
    handler(&client, "later", &[">"]).await;
    run(&client, "select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.deliveries").await, 2);
}

// B42.
async fn days_are_utc_days_in_every_time_zone(db: &Installation) {
    let client = db.connect().await;
    for (n, zone) in
        ["Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kathmandu", "America/New_York"].into_iter().enumerate()
    {
        run(
            &client,
            &format!(
                "set timezone = '{zone}'; set datestyle = 'SQL, DMY'; select lanebridge.ensure_partitions({})",
                n + 5
            ),
        )
        .await;
    }
    run(&client, "set timezone = 'UTC'; set datestyle = 'ISO'").await;
    let bounds: Vec<String> = all(
        &client,
        "select pg_get_expr(relpartbound, oid) from pg_class
          where relispartition and relkind = 'r' and relname <> 'events_default'",
    )
    .await;
    assert_eq!(bounds.len(), 9);
    assert!(bounds.iter().all(|bound| bound.matches(" 00:00:00+00'").count() == 2), "{bounds:?}");
    run(&client, "set timezone = 'Pacific/Kiritimati'; set datestyle = 'SQL, DMY'").await;
    old_day(&client, "2001-02-03", 1).await;
    assert_eq!(all::<String>(&client, "select lanebridge.drop_partitions('1 day')").await, ["events_2001_02_03"]);
}

async fn only_what_is_delivered_and_old_is_dropped(db: &Installation) {
    let client = db.connect().await;
    let days = all::<String>(&client, DAYS).await;
    let h = handler(&client, "h", &[">"]).await;
    for (day, seq) in [("2001-01-01", 1), ("2001-01-02", 2), ("2001-01-03", 3), ("2001-01-04", 4)] {
        old_day(&client, day, seq).await;
    }
    run(
        &client,
        &format!(
            "insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes) values (0, {h}, 2, '2001-01-02 12:00Z', 1);
             insert into lanebridge.dead (lane, handler, seq, created_at, size_bytes, attempts, generation, code, error)
             values (0, {h}, 3, '2001-01-03 12:00Z', 1, 1, 0, 'c', 'e')"
        ),
    )
    .await;
    let drop = "select lanebridge.drop_partitions('7 days')";
    assert_eq!(all::<String>(&client, drop).await, ["events_2001_01_01", "events_2001_01_04"]);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.events order by 1").await, [2, 3]);
    run(&client, "delete from lanebridge.deliveries; delete from lanebridge.dead").await;
    assert_eq!(all::<String>(&client, drop).await, ["events_2001_01_02", "events_2001_01_03"]);
    // Today's and tomorrow's stay, however short the retention.
    assert_eq!(all::<String>(&client, "select lanebridge.drop_partitions('0')").await, [""; 0]);
    assert_eq!(all::<String>(&client, DAYS).await, days);
}

async fn tables_that_are_not_ours_are_never_touched(db: &Installation) {
    let client = db.connect().await;
    run(
        &client,
        "create table lanebridge.events_2001_01_01 (a int);
         create schema archive;
         create table archive.events_2001_01_02 partition of lanebridge.events for values from ('2001-01-02 00:00Z') to ('2001-01-03 00:00Z');
         create table lanebridge.events_2001_13_45 partition of lanebridge.events for values from ('2001-01-03 00:00Z') to ('2001-01-04 00:00Z');
         create table lanebridge.events_2001_02_01 partition of lanebridge.events for values from ('2001-02-01 00:00Z') to ('2001-03-01 00:00Z');
         create table lanebridge.events_2001 partition of lanebridge.events for values from (minvalue) to ('2000-01-01 00:00Z');
         create table lanebridge.myevents_2001_01_04 partition of lanebridge.events for values from ('2001-01-04 00:00Z') to ('2001-01-05 00:00Z');
         create table lanebridge.\"events_2001_01_05; drop table x\" partition of lanebridge.events for values from ('2001-01-05 00:00Z') to ('2001-01-06 00:00Z')",
    )
    .await;
    assert_eq!(all::<String>(&client, "select lanebridge.drop_partitions('1 day')").await, [""; 0]);
    let today: String =
        one(&client, "select to_char(clock_timestamp() at time zone 'UTC' + interval '4 days', 'YYYY_MM_DD')").await;
    run(&client, &format!("create table lanebridge.events_{today} (a int)")).await;
    assert_eq!(all::<String>(&client, "select lanebridge.ensure_partitions(4)").await, [""; 0]);
}

// The event and its delivery are in a transaction that is still open when the day is found to be delivered.
async fn a_partition_in_use_is_kept_and_publishers_do_not_wait(db: &Installation) {
    let (publisher, janitor) = (db.connect().await, db.connect().await);
    let h = handler(&janitor, "h", &[">"]).await;
    old_day(&janitor, "2001-01-01", 1).await;
    old_day(&janitor, "2001-01-02", 2).await;
    run(
        &publisher,
        &format!(
            "begin; insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes) values (0, {h}, 1, '2001-01-01 12:00Z', 1);
             update lanebridge.events set handlers = '{{{h}}}' where seq = 1 and created_at = '2001-01-01 12:00Z'"
        ),
    )
    .await;
    assert_eq!(all::<String>(&janitor, "select lanebridge.drop_partitions('1 day')").await, [""; 0]);
    run(&publisher, "select lanebridge.publish('t', 'p'); commit").await;
    assert_eq!(all::<String>(&janitor, "select lanebridge.drop_partitions('1 day')").await, ["events_2001_01_02"]);
}

async fn ids_are_forgotten_after_their_events(db: &Installation) {
    let client = db.connect().await;
    old_day(&client, "2001-01-01", 1).await;
    run(
        &client,
        "insert into lanebridge.event_ids values ('old-1', 1, '2001-01-01 12:00Z'), ('in-default', 2, '2001-01-02 12:00Z');
         insert into lanebridge.events (seq, created_at, lane, format, id, type, handlers, payload)
         values (2, '2001-01-02 12:00Z', 0, 't', 'in-default', 't', '{}', 'p');
         select lanebridge.publish('t', 'p', id => 'new')",
    )
    .await;
    let ids = "select id from lanebridge.event_ids order by 1";
    run(&client, "select lanebridge.drop_partitions('1 day')").await;
    assert_eq!(all::<String>(&client, ids).await, ["in-default", "new", "old-1"]);
    run(&client, "select lanebridge.drop_partitions('1 day')").await;
    assert_eq!(all::<String>(&client, ids).await, ["in-default", "new"]);
}
