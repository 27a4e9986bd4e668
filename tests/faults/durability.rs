//! What a crash of the database server can undo must never have been sent.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::drain::{deliveries_left, drained, seed};
use crate::ledger::judge;
use crate::proxy::Proxy;
use crate::publishers::{Load, TRUTH, publish};
use crate::services::{Database, address, alone, connect, eventually, redis_address};
use crate::wal::streams;

fn service(command: &str, name: &str) {
    let status = Command::new(address("LB_SERVICES")).args([command, name]).status().unwrap();
    assert!(status.success(), "scripts/services {command} {name}");
}

/// The pid of the server's first process.
async fn postmaster(client: &Client) -> String {
    client.query_one("select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)", &[]).await.unwrap().get(0)
}

fn kill(pid: &str) {
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success());
}

/// H4, R2: a publisher with `synchronous_commit = off` commits before its WAL is on disk. The moment the event leaves
/// the bridge the server is killed; when it is back, the event must be there: no phantom.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_that_a_crash_of_the_server_can_undo() {
    let _alone = alone().await;
    let server = address("LB_POSTGRES18_URL");
    let admin = connect(&server).await;
    admin.batch_execute("alter system set wal_writer_delay = '10s'").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
    for (round, source) in ["wal", "poll", "wal", "poll"].into_iter().enumerate() {
        let database = Database::create("LB_POSTGRES18_URL").await;
        let destination = Destination::redis();
        let marker = format!("sent-before-flushed-{round}-{}", rand::random::<u32>());
        let redis = address("LB_REDIS_URL");
        let mut proxy = Proxy::holding(redis_address(), &marker).await;
        let setup = Setup::new(&database.url(), std::slice::from_ref(&destination), "");
        let setup = setup.with(&redis, &format!("redis://{}", proxy.address)).with("\"50ms\"", "\"10ms\"");
        let setup = setup.with("[http]", &format!("source = \"{source}\"\n[http]"));
        setup.run(&["migrate"]);
        let bridge = setup.start();
        eventually("it owns lanes", Duration::from_secs(20), || std::future::ready(setup.log().contains("own lanes")))
            .await;

        let client = database.connect().await;
        if source == "wal" {
            streams(&client).await;
        }
        let postmaster = postmaster(&client).await;
        client.batch_execute("set synchronous_commit = off").await.unwrap();
        let publish = "select lanebridge.publish('order.x', 'p', 'k', id => $1)";
        client.execute(publish, &[&marker]).await.unwrap();
        proxy.held().await;
        kill(&postmaster);
        service("start", "postgres18");

        let after = database.connect().await;
        let sql = "select count(*) from lanebridge.events where id = $1";
        let kept: i64 = after.query_one(sql, &[&marker]).await.unwrap().get(0);
        assert_eq!(kept, 1, "round {round}: sent, and then undone by the crash: a phantom");
        bridge.kill();
        database.drop().await;
    }
    let admin = connect(&server).await;
    admin.batch_execute("alter system reset wal_writer_delay").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
}

/// I1-I5 through a crash of the server in the middle of a drain: the bridge comes back by itself, deletes first what it
/// knows to be acknowledged, and repeats at most its window.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_in_the_middle_of_a_drain_repeats_at_most_the_window() {
    let _alone = alone().await;
    let database = Database::create("LB_POSTGRES18_URL").await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destinations = Destination::all().await;
    let setup = Setup::new(&database.url(), &destinations, "");
    setup.run(&["migrate"]);
    let load = Load { seed: seed(), writers: 4, keys: 100, events: 5_000 };
    publish(&database, load, Arc::new(AtomicUsize::new(0))).await;
    let before = deliveries_left(&client).await;
    let postmaster = postmaster(&client).await;
    let bridge = setup.start();
    eventually("it is in the middle", Duration::from_secs(30), || async {
        deliveries_left(&client).await < before * 9 / 10
    })
    .await;
    kill(&postmaster);
    service("start", "postgres18");
    let client = database.connect().await;
    eventually("the bridge noticed", Duration::from_secs(30), || {
        std::future::ready(setup.log().contains("the lock session ended"))
    })
    .await;
    drained(&client, Duration::from_secs(60)).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    for destination in &destinations {
        let verdict = judge(&client, &destination.read().await).await;
        verdict.must_be_clean(destination.name(), BATCH * BATCHES);
        destination.remove().await;
    }
    database.drop().await;
}
