//! I6: what the stream costs the database is bounded, whatever the bridge, the broker or other tables do.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::drained;
use crate::proxy::Proxy;
use crate::server::Server;
use crate::services::{address, eventually, redis_address, shared};
use crate::stage::Stage;
use crate::wal::{end_walsender, soak, source, streams, watchful};

const SOON: Duration = Duration::from_secs(30);
/// What the contract promises.
const MOST_RETAINED: i64 = 64 << 20;

/// Log that the slots of this database keep, bytes, by the server's account; `None` without a slot.
async fn retained(client: &Client) -> Option<i64> {
    let sql = "select max(pg_current_wal_lsn() - restart_lsn)::bigint from pg_replication_slots
                where database = current_database()";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// H26, H28, R12: a broker that takes nothing keeps deliveries back, never log. Ten minutes with LB_SOAK=1.
#[tokio::test(flavor = "multi_thread")]
async fn a_blackholed_broker_pins_no_log() {
    let long = Duration::from_secs(if soak() { 600 } else { 15 });
    let marker = format!("blackhole-{}", rand::random::<u32>());
    let mut proxy = Proxy::holding(redis_address(), &marker).await;
    let through = format!("redis://{}", proxy.address);
    let redis = address("LB_REDIS_URL");
    let stage = Stage::with([Destination::redis()], |setup| {
        watchful(setup).with(&redis, &through).with("[http]", "max_behind = \"1h\"\n[http]")
    })
    .await;
    let Stage { client, database, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    let publisher = database.connect().await;
    publisher.execute("select lanebridge.publish('order.x', $1, 'k')", &[&marker]).await.unwrap();
    proxy.held().await;
    let publish = publisher.prepare("select lanebridge.publish('order.x', repeat('x', 300), 'k' || $1)").await.unwrap();
    let began = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(2));
    let (mut most, mut published) = (0, 0_i64);
    let mut behind = i64::MAX;
    while began.elapsed() < long {
        tick.tick().await;
        publisher.execute(&publish, &[&(published % 500).to_string()]).await.unwrap();
        published += 1;
        if published % 100 == 0 {
            most = most.max(retained(client).await.unwrap_or(0));
            let sql = "select (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint from pg_replication_slots
                        where database = current_database()";
            behind = client.query_opt(sql, &[]).await.unwrap().map_or(0, |row| row.get(0));
        }
    }
    eprintln!("{published} events in {long:?}; at most {most} bytes retained, {behind} unconfirmed at the end");
    assert!(published > i64::try_from(long.as_secs()).unwrap() * 20, "{published} events are no load");
    assert!(most < MOST_RETAINED, "{most} bytes");
    assert!(behind < 4 << 20, "{behind} bytes were not confirmed on receipt");
    assert_eq!(source(client).await.as_deref(), Some("wal"), "it streams all the while");
    bridge.kill();
    stage.end().await;
}

/// H27: a frozen bridge on a server that never ends a silent walsender: the session's own limit ends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_bridge_loses_its_slot_where_the_server_has_no_limit() {
    let _shared = shared().await;
    let server = Server::start(&[("wal_sender_timeout", "0")]).await;
    let client = server.connect().await;
    let destination = Destination::redis();
    let setup = Setup::new(&server.url(), std::slice::from_ref(&destination), "");
    let setup = setup.with("[http]", "[wal]\nsender_timeout = \"3s\"\n[http]");
    setup.run(&["migrate"]);
    let bridge = setup.start();
    streams(&client).await;
    assert!(retained(&client).await.is_some());
    bridge.signal("STOP");
    let began = Instant::now();
    eventually("the slot is gone", Duration::from_secs(15), || async { retained(&client).await.is_none() }).await;
    eprintln!("the slot was gone after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(9));
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
    bridge.signal("CONT");
    drained(&client, SOON).await;
    streams(&client).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    assert_eq!(destination.read().await.len(), 1);
    destination.remove().await;
}

/// D2: what was received is confirmed, also when only other tables change, and when nothing does.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_others_is_confirmed_too() {
    let stage = Stage::with([Destination::redis()], watchful).await;
    let Stage { client, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    client.batch_execute("create table other (t text)").await.unwrap();
    client
        .batch_execute("insert into other select repeat(md5(n::text), 50) from generate_series(1, 5000) n")
        .await
        .unwrap();
    let written: String = client.query_one("select pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
    let sql =
        "select confirmed_flush_lsn >= $1::text::pg_lsn from pg_replication_slots where database = current_database()";
    eventually("it is confirmed", SOON, || async {
        client.query_opt(sql, &[&written]).await.unwrap().is_some_and(|row| row.get(0))
    })
    .await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}

/// H24: a bulk load of another table is spilled to disk for each stream; above the cap the stream is given up, and made
/// again when that is over. Deliveries go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_spills_too_much_is_given_up_for_a_while() {
    let stage = Stage::with([Destination::redis()], |setup| {
        // Canaries wait behind the load while it is decoded; they are not to decide here.
        watchful(setup)
            .with("\"200ms\"", "\"2s\"")
            .with("[http]", "max_spill = \"1MiB\"\nmax_retained = \"1GiB\"\n[http]")
    })
    .await;
    let Stage { client, database, setup, destinations, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    let other = database.connect().await;
    other.batch_execute("create table other (t text)").await.unwrap();
    // Above logical_decoding_work_mem, 64 MB.
    let bulk = "insert into other select repeat(md5(n::text), 50) from generate_series(1, 80000) n";
    let loading = async { other.batch_execute(bulk).await.unwrap() };
    let ending = async {
        setup.says("more than max_spill", Duration::from_secs(60)).await;
        client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
        drained(client, SOON).await;
    };
    tokio::join!(loading, ending);
    streams(client).await;
    assert_eq!(setup.log().matches("more than max_spill").count(), 1, "{}", setup.log());
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    assert_eq!(destinations[0].read().await.len(), 1);
    stage.end().await;
}

/// H28: an open write transaction keeps the log that a decoder would need. That is no harm before a checkpoint, which is
/// when the server would let it go; then, above the cap, the slot goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_keeps_too_much_is_given_up() {
    let stage = Stage::with([Destination::redis()], |setup| {
        watchful(setup).with("[http]", "max_retained = \"16MiB\"\nslot_timeout = \"500ms\"\n[http]")
    })
    .await;
    let Stage { client, database, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    let open = database.connect().await;
    open.batch_execute("create table other (t text)").await.unwrap();
    open.batch_execute("begin; insert into other values ('x')").await.unwrap();
    let bulk = "insert into other select repeat(md5(n::text), 50) from generate_series(1, 20000) n";
    client.batch_execute(bulk).await.unwrap();
    assert!(retained(client).await.is_some_and(|bytes| bytes > 16 << 20));
    // The session that weighs it asks three things each time.
    let asked = std::cell::RefCell::new(std::collections::HashSet::new());
    eventually("it is weighed three times", SOON, || async {
        let sql = "select query_start::text from pg_stat_activity where application_name like 'lanebridge/%/stream'
                      and datname = current_database()";
        let row = client.query_opt(sql, &[]).await.unwrap();
        asked.borrow_mut().extend(row.map(|row| row.get::<_, String>(0)));
        asked.borrow().len() >= 9
    })
    .await;
    assert_eq!(source(client).await.as_deref(), Some("wal"), "{}", setup.log());
    let began = Instant::now();
    client.batch_execute("checkpoint").await.unwrap();
    setup.says("more than max_retained", SOON).await;
    eprintln!("given up after {:?}", began.elapsed());
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
    drained(client, SOON).await;
    open.batch_execute("commit").await.unwrap();
    streams(client).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}

/// A backlog has no use for the newest payloads: the slot goes, and comes back when it is worked off.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_is_far_behind_polls_until_it_caught_up() {
    let marker = format!("behind-{}", rand::random::<u32>());
    let mut proxy = Proxy::holding(redis_address(), &marker).await;
    let through = format!("redis://{}", proxy.address);
    let redis = address("LB_REDIS_URL");
    let stage = Stage::with([Destination::redis()], |setup| {
        let setup = watchful(setup).with(&redis, &through).with("[http]", "max_behind = \"1s\"\n[http]");
        setup.with("send_timeout = \"10s\"", "send_timeout = \"2s\"")
    })
    .await;
    let Stage { client, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    client.execute("select lanebridge.publish('order.x', $1, 'k')", &[&marker]).await.unwrap();
    proxy.held().await;
    let backlog = "select lanebridge.publish('order.x', 'p', 'k' || n % 10000) from generate_series(1, 60000) n";
    client.execute(backlog, &[]).await.unwrap();
    // More than a window remembers, in each lane.
    setup.says("nearly all lanes are behind", Duration::from_secs(60)).await;
    assert_eq!(retained(client).await, None);
    let port = proxy.address.port();
    drop(proxy);
    eventually("the port is free", SOON, || {
        std::future::ready(std::net::TcpListener::bind(("127.0.0.1", port)).is_ok())
    })
    .await;
    let _open = Proxy::at(port, redis_address()).await;
    drained(client, Duration::from_secs(120)).await;
    streams(client).await;
    assert_eq!(setup.log().matches("nearly all lanes are behind").count(), 1, "{}", setup.log());
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    stage.end().await;
}

/// R10: a walsender that hangs is no error anywhere; only the canary tells.
#[tokio::test(flavor = "multi_thread")]
async fn a_walsender_that_hangs_is_noticed_by_the_canary() {
    let _shared = shared().await;
    let server = Server::start(&[]).await;
    let client = server.connect().await;
    let setup = watchful(Setup::new(&server.url(), &[Destination::redis()], ""));
    setup.run(&["migrate"]);
    let bridge = setup.start();
    streams(&client).await;
    let sql = "select pid from pg_stat_activity where application_name like 'lanebridge/%/wal'";
    let pid: i32 = client.query_one(sql, &[]).await.unwrap().get(0);
    server.signal(pid, "STOP");
    eventually("it is noticed", SOON, || std::future::ready(setup.log().contains("nothing came through the stream")))
        .await;
    eventually("it streams again, by another", SOON, || async {
        client.query_opt(&format!("{sql} and pid <> {pid}"), &[]).await.unwrap().is_some()
    })
    .await;
    server.signal(pid, "CONT");
    end_walsender(&client).await;
    bridge.kill();
}
