//! One database, one destination, and bridges that reach both only through wires of their own.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::bridge::{Bridge, Setup, kafka_brokers};
use crate::broker::Broker;
use crate::consumers::Destination;
use crate::publishers::TRUTH;
use crate::services::Database;
use crate::wal::watchful;
use crate::wire::{Mode, Wire};

/// A peer takes a frozen bridge's lanes after this; short, so that a round of freezes does not take an hour.
pub const FROZEN_AFTER: &str = "5s";
/// How often a question is asked while something is awaited: what is measured is exact to this.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// A broker is a little away: on loopback alone hardly anything is ever in flight when a fault comes.
const AWAY: Mode = Mode::Slow { latency: Duration::from_millis(10), bytes_per_second: 10_000_000 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Poll,
    Wal,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Wal => "wal",
        }
    }
}

pub struct Arena {
    pub database: Database,
    pub client: Client,
    pub destination: Destination,
    pub places: Vec<Place>,
    /// Where the destination is on a broker of its own.
    pub broker: Option<Broker>,
}

/// Where a bridge runs: what it was configured with, and its ways to the database and to the broker.
pub struct Place {
    pub name: String,
    pub setup: Setup,
    pub to_database: Wire,
    pub to_broker: Wire,
    bridge: Mutex<Option<Bridge>>,
}

impl Place {
    async fn new(number: usize, database: &Database, destination: &Destination, source: Source) -> Self {
        let (server, broker) = (host_and_port(&database.url()), destination.address());
        let to_database = Wire::to(&server, Mode::Pass).await;
        let to_broker = match destination {
            Destination::Kafka { .. } => Wire::to_kafka(&broker, AWAY).await,
            Destination::Nats { .. } | Destination::Redis { .. } => Wire::to(&broker, AWAY).await,
        };
        let name = format!("bridge-{number}");
        // Where nothing streams, publishers notify, so that there is a LISTEN session to end as well.
        let news = match source {
            Source::Poll => "source = \"poll\"\nwake_up = \"notify\"",
            Source::Wal => "source = \"wal\"",
        };
        let setup = Setup::new(&database.url(), std::slice::from_ref(destination), "")
            .with("\"test\"", &format!("\"{name}\""))
            .with(&server, &to_database.address())
            .with(&broker, &to_broker.address())
            .with("send_timeout = \"10s\"", "send_timeout = \"4s\"")
            .with("[http]", &format!("frozen_after = \"{FROZEN_AFTER}\"\n{news}\n[http]"));
        let setup = if source == Source::Wal { watchful(setup) } else { setup };
        Self { name, setup, to_database, to_broker, bridge: Mutex::new(None) }
    }

    fn bridge(&self) -> MutexGuard<'_, Option<Bridge>> {
        self.bridge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn start(&self) {
        let bridge = self.setup.start();
        *self.bridge() = Some(bridge);
    }

    pub fn kill(&self) {
        if let Some(bridge) = self.bridge().take() {
            bridge.kill();
        }
    }

    /// To whoever runs here now, if anybody does.
    pub fn signal(&self, name: &str) {
        if let Some(bridge) = self.bridge().as_ref() {
            bridge.signal(name);
        }
    }

    /// Drains and ends it; whether it says that it drained.
    pub async fn terminate(&self) -> bool {
        let Some(bridge) = self.bridge().take() else { return true };
        bridge.terminate().await.success()
    }
}

impl Arena {
    /// With the bridges running; they own the lanes between them, and may still be sharing.
    pub async fn open(destination: Destination, broker: Option<Broker>, source: Source, bridges: usize) -> Self {
        let database = Database::create("LB_POSTGRES_URL").await;
        let client = database.connect().await;
        client.batch_execute(TRUTH).await.unwrap();
        // Straight to the server: this thread waits for the command, and must not be needed to carry its bytes.
        Setup::new(&database.url(), std::slice::from_ref(&destination), "").run(&["migrate"]);
        let mut places = Vec::new();
        for number in 1..=bridges {
            places.push(Place::new(number, &database, &destination, source).await);
        }
        let arena = Self { database, client, destination, places, broker };
        for place in &arena.places {
            place.start();
        }
        arena.settled().await;
        arena
    }

    /// Every place has a registered bridge, and every lane an owner.
    pub async fn settled(&self) {
        let registered = "select count(distinct name) from lanebridge.bridges where fenced_at is null";
        let bridges = i64::try_from(self.places.len()).unwrap();
        let settled = within(Duration::from_secs(60), || async {
            self.count(registered, &[]).await == bridges && self.owned_without(0).await == 256
        })
        .await;
        assert!(settled.is_some(), "the bridges never ran: {}", self.logs());
    }

    pub async fn count(&self, sql: &str, values: &[&(dyn tokio_postgres::types::ToSql + Sync)]) -> i64 {
        self.client.query_one(sql, values).await.unwrap().get(0)
    }

    /// The epoch of the bridge that runs at `place`; 0 when it has none.
    pub async fn epoch(&self, place: &Place) -> i64 {
        let sql = "select coalesce(max(epoch), 0) from lanebridge.bridges where name = $1 and fenced_at is null";
        self.count(sql, &[&place.name]).await
    }

    pub async fn lanes_of(&self, epoch: i64) -> i64 {
        self.count("select count(*) from lanebridge.lanes where epoch = $1", &[&epoch]).await
    }

    /// Lanes with an owner that is alive and not `epoch`.
    pub async fn owned_without(&self, epoch: i64) -> i64 {
        let sql = "select count(*) from lanebridge.lanes l join lanebridge.bridges b on b.epoch = l.epoch
                    where b.fenced_at is null and b.epoch <> $1";
        self.count(sql, &[&epoch]).await
    }

    /// How long until no delivery is left of what is committed by now; none when it takes longer than `deadline`.
    pub async fn recovered(&self, deadline: Duration) -> Option<Duration> {
        let newest = self.count("select coalesce(max(seq), 0) from truth", &[]).await;
        within(deadline, || async {
            self.count("select count(*) from lanebridge.deliveries where seq <= $1", &[&newest]).await == 0
        })
        .await
    }

    /// Slots of this database: all of them are the bridges'.
    pub async fn slots(&self) -> i64 {
        self.count("select count(*) from pg_replication_slots where database = current_database()", &[]).await
    }

    /// Of what bridges that ended should not have left behind, how much is there.
    pub async fn leftovers(&self) -> i64 {
        let sql = "select (select count(*) from lanebridge.failures) + (select count(*) from lanebridge.dead)
             + (select count(*) from lanebridge.lanes where epoch is not null)
             + (select count(*) from pg_locks l join pg_database d on d.oid = l.database
                 where d.datname = current_database() and l.locktype = 'advisory')
             + (select count(*) from pg_stat_activity
                 where datname = current_database() and application_name like 'lanebridge/%')";
        self.count(sql, &[]).await
    }

    pub fn logs(&self) -> String {
        let logs = self.places.iter().map(|place| format!("--- {}\n{}", place.name, place.setup.log()));
        logs.collect::<Vec<_>>().join("\n")
    }

    pub async fn close(self) {
        let Self { database, destination, places, broker, .. } = self;
        drop(places);
        destination.remove().await;
        drop(broker);
        database.drop().await;
    }
}

/// `host:port` of a URL.
pub fn host_and_port(url: &str) -> String {
    let (_, rest) = url.split_once("://").expect("a URL");
    let authority = rest.split('/').next().expect("split gives one part at least");
    authority.rsplit('@').next().expect("split gives one part at least").to_owned()
}

impl Destination {
    /// `host:port` of its broker.
    fn address(&self) -> String {
        match self {
            Self::Kafka { .. } => kafka_brokers(),
            Self::Nats { server, .. } | Self::Redis { server, .. } => host_and_port(server),
        }
    }
}

/// How long until the answer is yes; none when `deadline` passes first.
pub async fn within<F: Future<Output = bool>>(deadline: Duration, mut ask: impl FnMut() -> F) -> Option<Duration> {
    let began = Instant::now();
    let mut tick = tokio::time::interval(ASK_EVERY);
    let asked = tokio::time::timeout(deadline, async {
        loop {
            tick.tick().await;
            if ask().await {
                return;
            }
        }
    });
    asked.await.ok().map(|()| began.elapsed())
}
