//! A database that is there and does not do what is asked: the bridge waits it out, and says so.

use std::time::Duration;

use crate::consumers::Destination;
use crate::drain::drained;
use crate::services::{address, connect};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(30);

/// 55000: a database that is moved or copied takes no new connection, and the old ones are ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_takes_no_connection_is_waited_for() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'before')").await.unwrap();
    drained(client, SOON).await;
    let admin = connect(&address("LB_POSTGRES_URL")).await;
    let allow = |allowed: bool| format!("alter database {} allow_connections {allowed}", database.name());
    admin.batch_execute(&allow(false)).await.unwrap();
    let ended = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                  where datname = $1 and application_name like 'lanebridge/%'";
    assert!(admin.query_one(ended, &[&database.name()]).await.unwrap().get::<_, i64>(0) > 0);
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'meanwhile')").await.unwrap();
    setup.says("is not currently accepting connections", SOON).await;
    admin.batch_execute(&allow(true)).await.unwrap();
    drained(client, SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let received: Vec<String> = destinations[0].read().await.into_iter().map(|message| message.id).collect();
    assert_eq!(received, ["before", "meanwhile"]);
    stage.end().await;
}

/// 55P03: somebody's ALTER TABLE waits, or holds the table, for longer than our lock_timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_locked_for_longer_than_we_wait_is_waited_for() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e')").await.unwrap();
    let mut holder = database.connect().await;
    let holding = holder.transaction().await.unwrap();
    holding.batch_execute("lock table lanebridge.deliveries in access exclusive mode").await.unwrap();
    let bridge = setup.start();
    setup.says("55P03", SOON).await;
    holding.rollback().await.unwrap();
    drained(client, SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    assert_eq!(destinations[0].read().await.len(), 1);
    stage.end().await;
}

/// H66, H67: whatever the database sets for every session in it, publishing and delivery do the same.
#[tokio::test(flavor = "multi_thread")]
async fn settings_of_the_database_change_nothing() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_deferrable = on",
        "search_path = ''",
        "statement_timeout = '50ms'",
        "lock_timeout = '10ms'",
        "idle_in_transaction_session_timeout = '50ms'",
        "synchronous_commit = off",
        "timezone = 'Asia/Kathmandu'",
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'sql_standard'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
        "default_transaction_read_only = on",
    ] {
        client.batch_execute(&format!("alter database {} set {setting}", database.name())).await.unwrap();
    }
    let publisher = database.connect().await;
    publisher
        .batch_execute("begin read write; select lanebridge.publish('order.x', 'p', 'k', id => 'e'); commit")
        .await
        .unwrap();
    setup.run(&["run", "--once"]);
    let messages = destinations[0].read().await;
    assert_eq!(messages.iter().map(|message| message.id.as_str()).collect::<Vec<_>>(), ["e"]);
    stage.end().await;
}
