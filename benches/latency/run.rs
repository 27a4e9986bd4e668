//! One run: a database, a bridge or the naive poller, publishers on a clock, a consumer.

use std::fmt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};
use tokio_util::sync::CancellationToken;

use crate::consumers::{self, Arrivals};
use crate::{Broker, Mode, Plan, naive};

const PUBLISHERS: usize = 8;
const KEYS: usize = 500;
const PAYLOAD_BYTES: usize = 300;
const PATIENCE: Duration = Duration::from_secs(60);
/// Ticks of /proc a second, on every Linux that this runs on.
const TICKS: f64 = 100.0;

pub struct Bench {
    plan: Plan,
    server: String,
    /// The pid of the database server's first process.
    postmaster: u32,
    pub versions: Vec<String>,
}

/// What one run measured.
#[derive(Clone, Debug)]
pub struct Sample {
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub server_us: f64,
    pub bridge_us: f64,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {:8.2} ms  p99 {:8.2} ms  max {:8.2} ms  server {:6.0} µs  bridge {:6.0} µs",
            self.p50_ms, self.p99_ms, self.max_ms, self.server_us, self.bridge_us
        )
    }
}

pub fn address(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run: make bench-latency"))
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// CPU of a process or thread, and of its children that were waited for, in seconds.
pub fn cpu_seconds(stat: &str) -> (f64, f64) {
    let text = std::fs::read_to_string(stat).unwrap_or_default();
    // The name in parentheses may hold anything.
    let fields: Vec<f64> = text
        .rsplit_once(") ")
        .map(|(_, rest)| rest.split_whitespace().skip(11).take(4).map(|field| field.parse().unwrap()).collect())
        .unwrap_or_default();
    match fields[..] {
        [user, system, children_user, children_system] => {
            ((user + system) / TICKS, (children_user + children_system) / TICKS)
        }
        _ => (0.0, 0.0),
    }
}

/// CPU of a process and all its children, alive or reaped.
fn cpu_of_family(first: u32) -> f64 {
    let (own, reaped) = cpu_seconds(&format!("/proc/{first}/stat"));
    let mut sum = own + reaped;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) else { continue };
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = text.rsplit_once(") ").and_then(|(_, rest)| rest.split_whitespace().nth(1));
        if parent.and_then(|parent| parent.parse().ok()) == Some(first) {
            sum += cpu_seconds(&format!("/proc/{pid}/stat")).0;
        }
    }
    sum
}

impl Bench {
    pub async fn new(plan: Plan) -> Self {
        let server = address("LB_POSTGRES_URL");
        let client = connect(&server).await;
        let text = async |sql: &str| client.query_one(sql, &[]).await.unwrap().get::<_, String>(0);
        let postmaster = text("select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)").await.parse().unwrap();
        let versions = vec![text("select split_part(version(), ' on ', 1)").await];
        Self { plan, server, postmaster, versions }
    }

    fn events(&self) -> usize {
        let seconds = (self.plan.warm_up + self.plan.measured).as_secs_f64();
        (seconds * self.plan.rate as f64) as usize
    }

    /// Seconds of the server's CPU per event for publishing as `mode` does, and nothing else.
    pub async fn publish_only(&self, mode: Mode) -> f64 {
        let database = Database::new(&self.server).await;
        let sql = match mode {
            Mode::Naive => {
                connect(&database.url).await.batch_execute(naive::TABLE).await.unwrap();
                naive::PUBLISH
            }
            _ => {
                // With the handler that the runs have, so that an event costs its delivery.
                database.run(&database.config("poll", "poll", &sink(Broker::Redis, "none")), &["migrate"]);
                PUBLISH
            }
        };
        let arrivals = Arc::new(Arrivals::new(self.events()));
        let before = cpu_of_family(self.postmaster);
        self.publish(&database.url, sql, &arrivals).await;
        let cpu = cpu_of_family(self.postmaster) - before;
        database.drop().await;
        cpu / self.events() as f64
    }

    pub async fn measure(&self, mode: Mode, broker: Broker, publish_only: f64) -> Sample {
        let database = Database::new(&self.server).await;
        let name = database.name.clone();
        consumers::make(broker, &name).await;
        let arrivals = Arc::new(Arrivals::new(self.events()));
        let consuming = tokio::spawn(consumers::consume(broker, name.clone(), Arc::clone(&arrivals)));
        let stop = CancellationToken::new();
        let (mut bridge, mut poller) = (None, None);
        let publish = match mode {
            Mode::Naive => {
                connect(&database.url).await.batch_execute(naive::TABLE).await.unwrap();
                poller = Some(naive::start(database.url.clone(), broker, name.clone(), stop.clone()));
                naive::PUBLISH
            }
            _ => {
                let (source, wake_up) = match mode {
                    Mode::Wal => ("wal", "poll"),
                    Mode::Notify => ("poll", "notify"),
                    Mode::Poll | Mode::Naive => ("poll", "poll"),
                };
                let config = database.config(source, wake_up, &sink(broker, &name));
                bridge = Some(database.start(&config, mode).await);
                PUBLISH
            }
        };
        let server_before = cpu_of_family(self.postmaster);
        let bridge_cpu = |bridge: &Option<Bridge>| bridge.as_ref().map_or(0.0, |bridge| cpu_of_family(bridge.0.id()));
        let bridge_before = bridge_cpu(&bridge);
        let committed = self.publish(&database.url, publish, &arrivals).await;
        let deadline = Instant::now() + PATIENCE;
        while !arrivals.all_came() {
            assert!(
                Instant::now() < deadline,
                "{} {}: {} of {} events never came",
                broker.name(),
                mode.name(),
                arrivals.missing(),
                self.events()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        database.is_empty(mode).await;
        let events = self.events() as f64;
        let server = cpu_of_family(self.postmaster) - server_before;
        let mut bridge_seconds = bridge_cpu(&bridge) - bridge_before;
        arrivals.stop.store(true, Ordering::Relaxed);
        stop.cancel();
        consuming.await.unwrap();
        if let Some(poller) = poller {
            bridge_seconds = poller.join().unwrap();
        }
        drop(bridge);
        consumers::remove(broker, &name).await;
        database.drop().await;

        let first = (self.plan.warm_up.as_secs_f64() * self.plan.rate as f64) as usize;
        let mut latencies: Vec<f64> = (first..self.events())
            .map(|n| arrivals.of(n).saturating_sub(committed[n].load(Ordering::Relaxed)) as f64 / 1e6)
            .collect();
        latencies.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
        Sample {
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            max_ms: at(1.0),
            server_us: (server / events - publish_only) * 1e6,
            bridge_us: bridge_seconds / events * 1e6,
        }
    }

    /// Publishes on the clock; when each commit returned, in nanoseconds since `arrivals.start`.
    async fn publish(&self, url: &str, sql: &str, arrivals: &Arc<Arrivals>) -> Arc<Vec<AtomicU64>> {
        let events = self.events();
        let committed: Arc<Vec<AtomicU64>> = Arc::new((0..events).map(|_| AtomicU64::new(0)).collect());
        let mut clients = Vec::with_capacity(PUBLISHERS);
        for _ in 0..PUBLISHERS {
            let client = connect(url).await;
            let statement = client.prepare(sql).await.unwrap();
            clients.push((client, statement));
        }
        let start = tokio::time::Instant::now();
        let every = Duration::from_secs(1).div_f64(self.plan.rate as f64);
        let mut publishers = tokio::task::JoinSet::new();
        for (first, (client, statement)) in clients.into_iter().enumerate() {
            let (committed, arrivals) = (Arc::clone(&committed), Arc::clone(arrivals));
            publishers.spawn(async move {
                for n in (first..events).step_by(PUBLISHERS) {
                    tokio::time::sleep_until(start + every * u32::try_from(n).unwrap()).await;
                    let head = format!("{{\"n\":{n},\"pad\":\"");
                    let payload = format!("{head}{}\"}}", "x".repeat(PAYLOAD_BYTES - head.len() - 2));
                    let key = format!("key-{}", n % KEYS);
                    client.execute(&statement, &[&payload, &key]).await.unwrap();
                    committed[n].store(arrivals.now(), Ordering::Relaxed);
                }
            });
        }
        publishers.join_all().await;
        committed
    }
}

const PUBLISH: &str = "select lanebridge.publish('order.placed', $1::text, $2)";

fn sink(broker: Broker, name: &str) -> String {
    let (sink, handler) = match broker {
        Broker::Kafka => {
            (format!("type = \"kafka\"\nbrokers = \"{}\"", address("LB_KAFKA_BROKERS")), format!("topic = \"{name}\""))
        }
        Broker::Nats => {
            (format!("type = \"nats\"\nurl = \"{}\"", address("LB_NATS_URL")), format!("subject = \"{name}\""))
        }
        Broker::Redis => {
            (format!("type = \"redis\"\nurl = \"{}\"", address("LB_REDIS_URL")), format!("stream = \"{name}\""))
        }
    };
    format!("[sinks.s]\n{sink}\n[handlers.h]\nevents = [\"order.*\"]\nsink = \"s\"\n{handler}\n")
}

struct Database {
    server: String,
    name: String,
    url: String,
    folder: TempDir,
}

struct Bridge(Child);

impl Drop for Bridge {
    fn drop(&mut self) {
        let _asked = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ended = self.0.wait();
    }
}

impl Database {
    async fn new(server: &str) -> Self {
        let name = format!("bench_{:08x}", rand::random::<u32>());
        connect(server).await.batch_execute(&format!("create database {name}")).await.unwrap();
        let url = format!("{}/{name}", server.rsplit_once('/').unwrap().0);
        Self { server: server.to_owned(), name, url, folder: tempfile::tempdir().unwrap() }
    }

    fn config(&self, source: &str, wake_up: &str, sinks: &str) -> String {
        let file = self.folder.path().join("lanebridge.toml").to_str().unwrap().to_owned();
        let text = format!(
            "[postgres]\nurl = \"{}\"\n[bridge]\nname = \"bench\"\nsource = \"{source}\"\nwake_up = \"{wake_up}\"\n\
             [http]\nlisten = \"\"\n{sinks}",
            self.url
        );
        std::fs::write(&file, text).unwrap();
        file
    }

    fn command(&self, config: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lanebridge"));
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        command.arg("-c").arg(config).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn run(&self, config: &str, arguments: &[&str]) {
        let status = self.command(config, arguments).status().unwrap();
        assert!(status.success(), "lanebridge {arguments:?}: {}", self.log());
    }

    /// A bridge that owns its lanes, and streams where it is to.
    async fn start(&self, config: &str, mode: Mode) -> Bridge {
        let bridge = Bridge(self.command(config, &["run"]).spawn().unwrap());
        let ready = match mode {
            Mode::Wal => "the stream of the write-ahead log is up",
            _ => "own lanes",
        };
        let deadline = Instant::now() + PATIENCE;
        while !self.log().contains(ready) {
            assert!(Instant::now() < deadline, "the bridge is not ready: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bridge
    }

    /// Returns when every delivery is deleted: the cost of that belongs to the events.
    async fn is_empty(&self, mode: Mode) {
        let client = connect(&self.url).await;
        let sql = match mode {
            Mode::Naive => "select count(*) from outbox",
            _ => "select count(*) from lanebridge.deliveries",
        };
        while client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn drop(self) {
        let sql = format!("drop database {} with (force)", self.name);
        connect(&self.server).await.batch_execute(&sql).await.unwrap();
    }
}
