//! The database server, a database of its own for each run, and the process that carries its events.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

use crate::{Broker, Mode, Plan, cpu, naive};

const PATIENCE: Duration = Duration::from_secs(60);

/// The value of `name`, as `scripts/services up` wrote it.
pub fn address(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run: make bench-latency"))
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub struct Server {
    url: String,
    /// Its first process, the parent of all others.
    postmaster: u32,
}

impl Server {
    /// # Panics
    /// When the server's processes are not visible here: their CPU could not be read.
    pub async fn find() -> Self {
        let url = address("LB_POSTGRES_URL");
        let sql = "select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)";
        let row = connect(&url).await.query_one(sql, &[]).await.unwrap();
        let postmaster: u32 = row.get::<_, &str>(0).parse().unwrap();
        let name = std::fs::read_to_string(format!("/proc/{postmaster}/comm")).unwrap_or_default();
        assert!(name.starts_with("postgres"), "process {postmaster} is no Postgres; the bench runs beside the server");
        Self { url, postmaster }
    }

    pub fn cpu(&self) -> f64 {
        cpu::of_family(self.postmaster)
    }

    pub async fn version(&self) -> String {
        let row = connect(&self.url).await.query_one("select split_part(version(), ' on ', 1)", &[]).await.unwrap();
        row.get(0)
    }
}

/// Its name is also that of the topic, stream or key.
pub struct Database {
    pub name: String,
    pub url: String,
    pub client: Client,
    server_url: String,
    folder: TempDir,
}

impl Database {
    pub async fn create(server: &Server) -> Self {
        let name = format!("bench_latency_{:08x}", rand::random::<u32>());
        connect(&server.url).await.batch_execute(&format!("create database {name}")).await.unwrap();
        let url = format!("{}/{name}", server.url.rsplit_once('/').unwrap().0);
        let folder = tempfile::tempdir().unwrap();
        Self { client: connect(&url).await, name, url, server_url: server.url.clone(), folder }
    }

    /// Transactions so far of each other database of the server.
    pub async fn foreign_transactions(&self) -> BTreeMap<u32, i64> {
        let sql = "select datid, xact_commit + xact_rollback from pg_stat_database where datname <> current_database()";
        let rows = self.client.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    /// Writes the configuration of a bridge and applies the migrations. Apart from what makes the mode, everything is
    /// at its default.
    pub fn configure(&self, mode: Mode, sink: &str, plan: &Plan) {
        let mode = match mode {
            Mode::Wal => "source = \"wal\"".to_owned(),
            Mode::Notify => "source = \"poll\"\nwake_up = \"notify\"".to_owned(),
            Mode::Poll => format!("source = \"poll\"\nwake_up = \"poll\"\npoll_interval = \"{}ms\"", plan.poll_ms),
            Mode::Naive => panic!("the naive poller has no configuration"),
        };
        let url = &self.url;
        let toml =
            format!("[postgres]\nurl = \"{url}\"\n[bridge]\nname = \"bench\"\n{mode}\n[http]\nlisten = \"\"\n{sink}");
        std::fs::write(self.folder.path().join("lanebridge.toml"), toml).unwrap();
        let migrated = self.lanebridge("migrate").output().unwrap();
        assert!(migrated.status.success(), "migrate: {}", String::from_utf8_lossy(&migrated.stderr));
    }

    fn lanebridge(&self, command: &str) -> Command {
        let mut lanebridge = Command::new(env!("CARGO_BIN_EXE_lanebridge"));
        lanebridge.arg("-c").arg(self.folder.path().join("lanebridge.toml")).arg(command).stdin(Stdio::null());
        lanebridge
    }

    /// Starts what carries the events of this mode, and returns when it is ready to.
    pub async fn start(&self, mode: Mode, broker: Broker, plan: &Plan) -> Carrier {
        let log = self.folder.path().join("log");
        let mut command = if mode == Mode::Naive {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([naive::COMMAND, &self.url, broker.name(), &self.name, &plan.poll_ms.to_string()]);
            command
        } else {
            let mut command = self.lanebridge("run");
            command.stdout(Stdio::null());
            command
        };
        let child = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
        let mut carrier = Carrier { child, log };
        let deadline = Instant::now() + PATIENCE;
        while mode != Mode::Naive && !self.carries(mode, 0) {
            carrier.is_well();
            assert!(Instant::now() < deadline, "the bridge is not ready: {}", carrier.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        carrier
    }

    /// Whether a bridge owns all lanes, and has learnt of deliveries as the mode says for so many seconds.
    pub fn carries(&self, mode: Mode, seconds: u32) -> bool {
        let source = if mode == Mode::Wal { "wal" } else { "poll" };
        let output = self.lanebridge("status").arg("--json").output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let bridge = &status["bridges"][0];
        let since = bridge["source_seconds"].as_u64().unwrap_or(0);
        bridge["alive"] == true && bridge["lanes"] == 256 && bridge["source"] == source && since >= seconds.into()
    }

    /// Returns when nothing is left to deliver or to delete: deleting belongs to an event's cost.
    pub async fn drained(&self, mode: Mode, carrier: &mut Carrier) {
        let table = if mode == Mode::Naive { "outbox" } else { "lanebridge.deliveries" };
        let sql = format!("select exists (select from {table})");
        let deadline = Instant::now() + PATIENCE;
        while self.client.query_one(&sql, &[]).await.unwrap().get(0) {
            carrier.is_well();
            assert!(Instant::now() < deadline, "{table} is not empty: {}", carrier.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// After its carrier ended.
    pub async fn remove(self) {
        // Even `force` drops no database while a slot of it is there, and a slot outlives its bridge for a moment.
        let slots = "select exists (select from pg_replication_slots where database = current_database())";
        let deadline = Instant::now() + PATIENCE;
        while self.client.query_one(slots, &[]).await.unwrap().get(0) {
            assert!(Instant::now() < deadline, "{} still has a slot", self.name);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let sql = format!("drop database {} with (force)", self.name);
        connect(&self.server_url).await.batch_execute(&sql).await.unwrap();
    }
}

/// The bridge or the naive poller; killed when dropped.
pub struct Carrier {
    child: Child,
    log: PathBuf,
}

impl Carrier {
    pub fn cpu(&self) -> f64 {
        cpu::of_process(self.child.id())
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// # Panics
    /// When it has ended.
    pub fn is_well(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("it ended, {status}: {}", self.log());
        }
    }

    /// Lets it drain, as far as it can. Returns when it has ended.
    pub fn stop(mut self) {
        let asked = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(asked.success(), "it had ended: {}", self.log());
        self.child.wait().unwrap();
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // Already dead is as good.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}
