//! What a crash of the database server can undo must never have been sent.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::drain::{deliveries_left, drained, seed};
use crate::ledger::{Verdict, judge};
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

/// A publisher with `synchronous_commit = off` commits before its WAL is on disk. The moment the event leaves the bridge
/// the server is killed; what left arrives, and the database says what is true.
pub async fn crash_while_sending(source: &str, change: impl FnOnce(Setup) -> Setup) -> Verdict {
    let server = address("LB_POSTGRES18_URL");
    let admin = connect(&server).await;
    admin.batch_execute("alter system set wal_writer_delay = '10s'").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
    let database = Database::create("LB_POSTGRES18_URL").await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destination = Destination::redis();
    let marker = format!("sent-before-flushed-{}", rand::random::<u64>());
    let redis = address("LB_REDIS_URL");
    let mut proxy = Proxy::holding(redis_address(), &marker).await;
    let setup = Setup::new(&database.url(), std::slice::from_ref(&destination), "");
    let setup = setup.with(&redis, &format!("redis://{}", proxy.address)).with("\"50ms\"", "\"10ms\"");
    let setup = change(setup.with("[http]", &format!("source = \"{source}\"\n[http]")));
    setup.run(&["migrate"]);
    let bridge = setup.start();
    setup.says("own lanes", Duration::from_secs(20)).await;
    if source == "wal" {
        streams(&client).await;
    }
    let postmaster = postmaster(&client).await;
    client.batch_execute("set synchronous_commit = off").await.unwrap();
    let publish = "with p as (select lanebridge.publish('order.x', 'p', 'k', id => $1::text) as seq)
                   insert into truth select $1, 'k', seq, 'p' from p";
    client.execute(publish, &[&marker]).await.unwrap();
    proxy.held().await;
    kill(&postmaster);
    service("start", "postgres18");
    proxy.release();
    eventually("what left arrives", Duration::from_secs(20), || async { !destination.read().await.is_empty() }).await;
    bridge.kill();

    let verdict = judge(&database.connect().await, &destination.read().await).await;
    destination.remove().await;
    database.drop().await;
    let admin = connect(&server).await;
    admin.batch_execute("alter system reset wal_writer_delay").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
    verdict
}

/// H4, R2: what was sent is there when the server is back.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_that_a_crash_of_the_server_can_undo() {
    let _alone = alone().await;
    for source in ["wal", "poll", "wal", "poll"] {
        crash_while_sending(source, |setup| setup).await.must_be_clean(source, 1);
    }
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
