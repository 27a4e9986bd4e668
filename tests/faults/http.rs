//! What a bridge tells of itself over HTTP, while brokers work, refuse and go away.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bridge::Setup;
use crate::broker::Broker;
use crate::consumers::{Destination, jetstream_at};
use crate::drain::{drained, seed};
use crate::ledger::judge;
use crate::publishers::{Load, publish};
use crate::services::eventually;
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(30);
const NO_HTTP: &str = "listen = \"\"";

/// The pages of one bridge.
struct Pages(SocketAddr);

impl Pages {
    /// From the line that its log has of the port it took.
    async fn of(setup: &Setup) -> Self {
        setup.says("HTTP: /metrics", SOON).await;
        let log = setup.log();
        let line = log.lines().rfind(|line| line.contains("HTTP: /metrics")).unwrap();
        let start = line.find("127.0.0.1:").unwrap();
        let address: String = line[start..].chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
        Self(address.parse().unwrap())
    }

    /// Status and body.
    async fn get(&self, path: &str, host: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.0).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    async fn status(&self, path: &str) -> u16 {
        self.get(path, "localhost").await.0
    }

    /// All series by their name with labels.
    async fn metrics(&self) -> HashMap<String, f64> {
        let (status, text) = self.get("/metrics", "localhost").await;
        assert_eq!(status, 200);
        let series = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        series.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    async fn is(&self, series: &str, value: f64) -> bool {
        self.metrics().await.get(series).copied() == Some(value)
    }

    async fn becomes(&self, series: &str, value: f64) {
        let what = format!("{series} becomes {value}");
        eventually(&what, SOON, || self.is(series, value)).await;
    }
}

fn outcome(handler: &str, outcome: &str) -> String {
    format!("lanebridge_outcomes_total{{handler=\"{handler}\",outcome=\"{outcome}\"}}")
}

fn listening(setup: Setup) -> Setup {
    setup.with(NO_HTTP, "listen = \"127.0.0.1:0\"\nallowed_hosts = [\"metrics.internal\"]")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_counters_begin_at_zero_and_are_what_the_broker_received() {
    // GIVEN a bridge that has sent nothing
    let stage = Stage::with(vec![Destination::nats().await], listening).await;
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    eventually("it is ready", SOON, || async { pages.status("/readyz").await == 200 }).await;
    let metrics = pages.metrics().await;
    for name in ["acked", "refused", "rejected", "unreachable"] {
        assert_eq!(metrics.get(&outcome("to-nats", name)), Some(&0.0), "{name}");
    }
    pages.becomes("lanebridge_lanes_owned", 256.0).await;
    pages.becomes("lanebridge_source{mode=\"wal\"}", 1.0).await;
    // WHEN events are published and delivered
    let load = Load { seed: seed(), writers: 4, keys: 50, events: 500 };
    publish(&stage.database, load, Arc::new(AtomicUsize::new(0))).await;
    drained(&stage.client, SOON).await;
    // THEN the counters are what the broker holds
    let received = stage.destinations[0].read().await;
    #[allow(clippy::cast_precision_loss, reason = "hundreds")]
    let count = received.len() as f64;
    judge(&stage.client, &received).await.must_be_clean("nats", 0);
    pages.becomes("lanebridge_completed_total{handler=\"to-nats\"}", count).await;
    let metrics = pages.metrics().await;
    assert_eq!(metrics[&outcome("to-nats", "acked")], count);
    assert_eq!(metrics["lanebridge_publish_to_ack_seconds_count{handler=\"to-nats\"}"], count);
    assert_eq!(metrics["lanebridge_in_flight_deliveries{handler=\"to-nats\"}"], 0.0);
    assert_eq!(metrics["lanebridge_in_flight_bytes{handler=\"to-nats\"}"], 0.0);
    assert_eq!(metrics["lanebridge_lane_changes_total{change=\"gained\"}"], 256.0);
    let streamed = metrics["lanebridge_commit_to_ack_seconds_count{handler=\"to-nats\"}"];
    assert!(streamed > 0.0 && streamed <= metrics["lanebridge_cache_hits_total"], "{streamed}");
    assert_eq!(metrics["lanebridge_commit_to_ack_seconds_bucket{handler=\"to-nats\",le=\"60\"}"], streamed);
    let loads = metrics["lanebridge_cache_hits_total"] + metrics["lanebridge_cache_misses_total"];
    assert!(loads >= count, "{loads}");
    for moved in
        ["poll_seconds_count", "poll_rows_total", "write_seconds_count", "epoch", "heartbeat_timestamp_seconds"]
    {
        assert!(metrics[&format!("lanebridge_{moved}")] > 0.0, "{moved}");
    }
    // AND whoever comes by a name that is not ours gets nothing
    assert_eq!(pages.get("/metrics", "evil.example").await.0, 403);
    assert_eq!(pages.get("/metrics", "metrics.internal").await.0, 200);
    assert_eq!(pages.status("/console").await, 404);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_key_shows() {
    let stage = Stage::with(vec![Destination::redis()], listening).await;
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    pages.becomes("lanebridge_lanes_owned", 256.0).await;
    // GIVEN a delivery that is buried, and two behind it
    let sql =
        "select lanebridge.publish('order.x', 'x'::text, 'k', deliver_at => clock_timestamp() + interval '1 hour')";
    stage.client.execute(sql, &[]).await.unwrap();
    for _ in 0..2 {
        stage.client.execute("select lanebridge.publish('order.x', 'x'::text, 'k')", &[]).await.unwrap();
    }
    // THEN the key shows as blocked, and what is scheduled as that
    pages.becomes("lanebridge_blocked_keys{handler=\"to-redis\"}", 1.0).await;
    let metrics = pages.metrics().await;
    assert_eq!(metrics["lanebridge_deliveries{handler=\"to-redis\",state=\"blocked\"}"], 2.0);
    assert_eq!(metrics["lanebridge_deliveries{handler=\"to-redis\",state=\"scheduled\"}"], 1.0);
    assert!(metrics["lanebridge_blocked_seconds{handler=\"to-redis\"}"] > 0.0);
    assert_eq!(pages.status("/healthz").await, 200, "it waits for a person, not for us");
    // WHEN the one that holds it is dead, it shows as that, and the key is still blocked
    let bury = "select lanebridge.bury('to-redis', null, '{\"state\": \"scheduled\"}', 10, 'because')";
    stage.client.execute(bury, &[]).await.unwrap();
    pages.becomes("lanebridge_deliveries{handler=\"to-redis\",state=\"dead\"}", 1.0).await;
    assert!(pages.is("lanebridge_blocked_keys{handler=\"to-redis\"}", 1.0).await);
    // WHEN an operator lets the key go on, it is not
    let skip = "select lanebridge.skip('to-redis', null, '{\"state\": \"dead\"}', 10, 'because')";
    stage.client.execute(skip, &[]).await.unwrap();
    pages.becomes("lanebridge_blocked_keys{handler=\"to-redis\"}", 0.0).await;
    pages.becomes(&outcome("to-redis", "acked"), 2.0).await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_dead_and_what_was_taken_over_is_counted() {
    let destination = Destination::nats().await;
    let Destination::Nats { subject, server } = &destination else { panic!("a subject") };
    let js = jetstream_at(server).await;
    let mut config = js.get_stream(subject).await.unwrap().cached_info().config.clone();
    config.max_message_size = 1500;
    js.update_stream(config).await.unwrap();
    let stage = Stage::with(vec![destination.clone()], listening).await;
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    // WHEN an event is too large for its stream
    stage.client.execute("select lanebridge.publish('order.x', repeat('x', 4000), 'k')", &[]).await.unwrap();
    pages.becomes("lanebridge_buried_total{handler=\"to-nats\"}", 1.0).await;
    assert!(pages.is(&outcome("to-nats", "rejected"), 1.0).await);
    assert!(pages.is(&outcome("to-nats", "acked"), 0.0).await);
    // WHEN its bridge is killed, and another comes
    bridge.kill();
    std::fs::remove_file(stage.setup.log_path()).unwrap();
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    pages.becomes("lanebridge_lane_changes_total{change=\"taken_over\"}", 256.0).await;
    pages.becomes("lanebridge_deliveries{handler=\"to-nats\",state=\"dead\"}", 1.0).await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

// A lost database is a lost lock session: not ready, alive, and counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_session_that_is_lost_shows_and_comes_back() {
    let stage = Stage::with(vec![Destination::redis()], listening).await;
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    pages.becomes("lanebridge_lanes_owned", 256.0).await;
    let end = "select pg_terminate_backend(lock_pid) from lanebridge.bridges where fenced_at is null";
    stage.client.execute(end, &[]).await.unwrap();
    pages.becomes("lanebridge_lane_changes_total{change=\"lost\"}", 256.0).await;
    assert_eq!(pages.status("/healthz").await, 200);
    pages.becomes("lanebridge_lanes_owned", 256.0).await;
    eventually("it is ready again", SOON, || async { pages.status("/readyz").await == 200 }).await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

// A restart would not bring the broker back.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_opens_the_breaker_and_leaves_the_bridge_healthy() {
    let broker = Broker::start("redis").await;
    let change = |setup| listening(setup).with("[http]", "[http]\nstuck_after = \"11s\"");
    let change = |setup: Setup| {
        change(setup).with("[postgres]", "[postgres]\nconnect_timeout = \"2s\"\nstatement_timeout = \"5s\"")
    };
    let stage = Stage::with(vec![Destination::redis_at(broker.url())], change).await;
    let bridge = stage.setup.start();
    let pages = Pages::of(&stage.setup).await;
    pages.becomes("lanebridge_lanes_owned", 256.0).await;
    let open = "lanebridge_breaker_open{handler=\"to-redis\",sink=\"redis\"}";
    assert!(pages.is(open, 0.0).await);
    broker.kill();
    stage.client.execute("select lanebridge.publish('order.x', 'x'::text, 'k')", &[]).await.unwrap();
    pages.becomes(open, 1.0).await;
    // Longer than what stands still may: one wait on a metric that only time moves.
    let lag = "lanebridge_lag_seconds{handler=\"to-redis\"}";
    eventually("it waits for longer than the limit", SOON * 2, || async {
        let metrics = pages.metrics().await;
        assert_eq!(pages.status("/healthz").await, 200);
        metrics[lag] > 15.0
    })
    .await;
    assert!(pages.is("lanebridge_stuck", 0.0).await && pages.is(open, 1.0).await);
    assert_eq!(pages.status("/readyz").await, 200);
    broker.start_again().await;
    pages.becomes(&outcome("to-redis", "acked"), 1.0).await;
    assert!(pages.is(open, 0.0).await);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_ends_the_start_with_what_to_do() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let listen = format!("listen = \"{address}\"");
    let stage = Stage::with(vec![Destination::redis()], |setup| setup.with(NO_HTTP, &listen)).await;
    let mut bridge = stage.setup.start();
    assert_eq!(bridge.ended(SOON).await.code(), Some(1));
    let log = stage.setup.log();
    assert!(
        log.contains(&format!("listen on {address} for HTTP")) && log.contains("[http] listen another port"),
        "{log}"
    );
    // One that only drains needs no port.
    stage.setup.run(&["run", "--once"]);
    stage.end().await;
}
