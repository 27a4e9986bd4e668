//! One run: a database, a carrier, a consumer, publishers; and what came of it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::ledger::{Ledger, quantile};
use crate::publishers::Publishers;
use crate::servers::{Database, Server};
use crate::{Broker, Mode, Plan, naive};

const PUBLISH: &str = "select lanebridge.publish('order.placed', $1::text, $2)";
/// After the last commit; far above every latency that one would call one.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Bench {
    plan: Plan,
    server: Server,
}

/// The server's CPU per event when nothing but publishing goes on.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    pub lanebridge_us: f64,
    pub naive_us: f64,
}

/// What one run measured.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// From when an event was due to the return of its COMMIT.
    pub publish_p99_ms: f64,
    /// Of the server, per event, publishing included.
    pub server_total_us: f64,
    /// The same without publishing.
    pub server_us: f64,
    /// Of the bridge or the naive poller.
    pub bridge_us: f64,
    /// Events that arrived before their COMMIT had returned.
    pub early: usize,
    /// Transactions of other databases during the run; their cost is in the server's CPU.
    pub foreign: i64,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {:7.2} ms  p99 {:7.2} ms  publish p99 {:7.2} ms  server {:5.0} of {:5.0} µs  bridge {:5.0} µs  early {}  foreign {}",
            self.p50_ms,
            self.p99_ms,
            self.publish_p99_ms,
            self.server_us,
            self.server_total_us,
            self.bridge_us,
            self.early,
            self.foreign
        )
    }
}

impl Bench {
    pub async fn new(plan: Plan) -> Self {
        Self { plan, server: Server::find().await }
    }

    /// Machine and versions, in words.
    pub async fn machine(&self) -> String {
        let cores = std::thread::available_parallelism().unwrap();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
        let load = std::fs::read_to_string("/proc/loadavg").unwrap();
        let load = load.split(' ').next().unwrap();
        let mut versions = vec![self.server.version().await];
        for broker in &self.plan.brokers {
            versions.push(broker.version().await);
        }
        let build = if cfg!(debug_assertions) { "debug build, so no figure counts" } else { "release build" };
        format!(
            "{cores} cores, {} GiB, load {load} at the start; {}; lanebridge {}, {build}",
            kib / 1024 / 1024,
            versions.join(", "),
            env!("CARGO_PKG_VERSION"),
        )
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(1).div_f64(self.plan.rate.into())
    }

    /// Publishes at the same rate into the same tables, with nothing behind them.
    pub async fn publish_only(&self) -> Published {
        let database = Database::create(&self.server).await;
        database.configure(Mode::Poll, &Broker::Redis.toml(&database.name), &self.plan);
        database.client.batch_execute(naive::TABLE).await.unwrap();
        let lanebridge_us = self.cost_of(&database, PUBLISH).await;
        let naive_us = self.cost_of(&database, naive::PUBLISH).await;
        database.remove().await;
        Published { lanebridge_us, naive_us }
    }

    /// Microseconds of the server's CPU per event.
    async fn cost_of(&self, database: &Database, publish: &str) -> f64 {
        let ledger = Arc::new(Ledger::new(self.plan.events()));
        let publishing = Publishers::connect(&database.url, publish).await.start(&ledger, self.interval());
        tokio::time::sleep(Duration::from_secs(self.plan.warm_up.into())).await;
        let before = self.server.cpu();
        publishing.done().await;
        self.per_event_us(self.server.cpu() - before)
    }

    fn per_event_us(&self, seconds: f64) -> f64 {
        seconds * 1e6 / (self.plan.events() - self.plan.warm_up_events()) as f64
    }

    /// # Panics
    /// When an event did not come, came twice, or the bridge did not do what the mode says.
    pub async fn measure(&self, mode: Mode, broker: Broker, published: &Published) -> Sample {
        let what = format!("{} {}", broker.name(), mode.name());
        let database = Database::create(&self.server).await;
        broker.make(&database.name).await;
        let (publish, publish_us) = if mode == Mode::Naive {
            database.client.batch_execute(naive::TABLE).await.unwrap();
            (naive::PUBLISH, published.naive_us)
        } else {
            database.configure(mode, &broker.toml(&database.name), &self.plan);
            (PUBLISH, published.lanebridge_us)
        };
        let ledger = Arc::new(Ledger::new(self.plan.events()));
        let stop = CancellationToken::new();
        let consumer = tokio::spawn(broker.consume(database.name.clone(), Arc::clone(&ledger), stop.clone()));
        let mut carrier = database.start(mode, broker, &self.plan).await;
        let publishers = Publishers::connect(&database.url, publish).await;
        let foreign_before = database.foreign_transactions().await;

        let publishing = publishers.start(&ledger, self.interval());
        let start = publishing.start;
        tokio::time::sleep(Duration::from_secs(self.plan.warm_up.into())).await;
        let (server_before, carrier_before) = (self.server.cpu(), carrier.cpu());
        publishing.done().await;
        let deadline = Instant::now() + PATIENCE;
        while ledger.missing() > 0 {
            assert!(!consumer.is_finished(), "{what}: the consumer ended");
            carrier.is_well();
            let late = Instant::now() > deadline;
            assert!(!late, "{what}: {} of {} events never came: {}", ledger.missing(), ledger.events(), carrier.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        database.drained(mode, &mut carrier).await;
        let server = self.per_event_us(self.server.cpu() - server_before);
        let bridge = self.per_event_us(carrier.cpu() - carrier_before);

        let foreign_after = database.foreign_transactions().await;
        let grown = |(id, after): (&u32, &i64)| after - foreign_before.get(id).unwrap_or(&0);
        let foreign = foreign_after.iter().map(grown).sum();
        let stayed = mode == Mode::Naive || database.carries(mode, self.plan.seconds);
        assert!(stayed, "{what}: the bridge did not stay so: {}", carrier.log());
        stop.cancel();
        consumer.await.unwrap();
        assert_eq!(ledger.repeated(), 0, "{what}: events came more than once: {}", carrier.log());
        carrier.stop();
        broker.remove(&database.name).await;
        database.remove().await;

        let first = self.plan.warm_up_events();
        let latencies = ledger.latencies(first);
        Sample {
            p50_ms: quantile(&latencies.sorted_ms, 0.5),
            p99_ms: quantile(&latencies.sorted_ms, 0.99),
            publish_p99_ms: quantile(&ledger.delays_ms(first, start, self.interval()), 0.99),
            server_total_us: server,
            server_us: server - publish_us,
            bridge_us: bridge,
            early: latencies.early,
            foreign,
        }
    }
}
