//! H33: a copy of the database publishes nothing to what the original publishes to.

use std::process::Command;
use std::time::Duration;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::drained;
use crate::services::{Database, address};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(30);

/// A dump restored elsewhere, with what was waiting; adopted, it goes on under an id of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_dump_sends_nothing_until_it_is_adopted() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'delivered')").await.unwrap();
    drained(client, SOON).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'waits')").await.unwrap();

    let copy = Database::create("LB_POSTGRES_URL").await;
    // A database as a template: what a dump and its restore make of it, without the tools of the server's version.
    let admin = crate::services::connect(&address("LB_POSTGRES_URL")).await;
    admin.batch_execute(&format!("drop database {}", copy.name())).await.unwrap();
    admin
        .batch_execute(&format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = '{}'",
            database.name()
        ))
        .await
        .unwrap();
    admin.batch_execute(&format!("create database {} template {}", copy.name(), database.name())).await.unwrap();
    let elsewhere = Setup::new(&copy.url(), destinations, "");
    for _ in 0..2 {
        let output = Command::new(env!("CARGO_BIN_EXE_lanebridge"))
            .arg("-c")
            .arg(elsewhere.config())
            .args(["run", "--once"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("looks like a copy") && said.contains("lanebridge adopt"), "{said}");
    }
    assert_eq!(destinations[0].read().await.len(), 1, "nothing came from the copy");

    let there = copy.connect().await;
    let id = "select id::text from lanebridge.installation";
    let before: String = there.query_one(id, &[]).await.unwrap().get(0);
    let said = elsewhere.run(&["adopt", "--yes"]);
    assert!(said.contains("1 deliveries wait"), "{said}");
    let after: String = there.query_one(id, &[]).await.unwrap().get(0);
    assert_ne!(before, after);
    let audited = "select count(*) from lanebridge.audit where action = 'adopt'";
    assert_eq!(there.query_one(audited, &[]).await.unwrap().get::<_, i64>(0), 1);
    elsewhere.run(&["run", "--once"]);
    assert_eq!(destinations[0].read().await.len(), 2);
    drop(there);
    copy.drop().await;
    stage.end().await;
}
