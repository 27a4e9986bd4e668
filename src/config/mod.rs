//! The configuration file as one struct per section; `load` reads it, `validate` reports every problem at once.
//!
//! Unknown keys are errors with a suggestion and the line. Durations and sizes carry units (`"30s"`, `"1MiB"`).
//! Any string may hold `${NAME}`; a key that ends in `_file` reads a secret. Secrets print as `***`.

mod address;
mod describe;
mod handlers;
mod interpolate;
mod load;
mod pattern;
pub(crate) mod pg_url;
mod secret;
mod section;
mod sections;
mod sinks;
mod template;
#[cfg(test)]
mod testing;
mod units;
mod validate;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

pub use describe::describe;
pub use load::{load, parse};
pub use pattern::Pattern;
pub use secret::Secret;
pub use template::{Placeholder, Template};
pub(crate) use units::duration;

use crate::backoff::Retry;

/// A configuration that passed every check.
#[derive(Clone, Debug)]
pub struct Config {
    pub postgres: Postgres,
    pub bridge: Bridge,
    pub wal: Wal,
    /// By name; the name is what handlers, logs and metrics use.
    pub sinks: BTreeMap<String, Sink>,
    /// By name.
    pub handlers: BTreeMap<String, Handler>,
    pub http: Http,
    pub retention: Retention,
    /// What is accepted but deserves a line at start, such as a secret written into the file.
    pub warnings: Vec<String>,
}

/// `[postgres]`
#[derive(Clone, Debug)]
pub struct Postgres {
    /// `postgres://user:password@host:port/database?sslmode=…`; `LANEBRIDGE_POSTGRES_URL` overrides it.
    pub url: Secret,
    /// Where locks and LISTEN go when `url` leads to a pooler.
    pub direct_url: Option<Secret>,
    /// Read again at every connect, so that a rotated password is picked up.
    pub password_file: Option<PathBuf>,
    pub schema: String,
    pub table_prefix: String,
    /// Longest time for connecting, TLS and authentication together.
    pub connect_timeout: Duration,
    /// Longest time for one statement of the bridge, on the client and as `statement_timeout`.
    pub statement_timeout: Duration,
    /// Publishing refuses larger payloads; stored in the database by `run` and `migrate`.
    pub max_payload_bytes: u32,
}

/// `[bridge]`
#[derive(Clone, Debug)]
pub struct Bridge {
    /// Default: the host name.
    pub name: String,
    pub source: SourceKind,
    pub wake_up: WakeUp,
    pub ownership: Ownership,
    pub poll_interval: Duration,
    /// How often each owned lane is read from its start (R11).
    pub sweep_interval: Duration,
    pub shutdown_timeout: Duration,
    /// A bridge whose heartbeat stands still for so long is ended by another.
    pub frozen_after: Duration,
    /// Payload bytes in memory, over all handlers (R14).
    pub max_in_flight_bytes: u64,
    /// `ce_source`; default `/lanebridge/<schema>`.
    pub ce_source: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    Auto,
    Wal,
    Poll,
}

/// `[wal]`: what the stream of the write-ahead log may cost.
#[derive(Clone, Debug)]
pub struct Wal {
    /// Payload bytes kept until their deliveries are sent.
    pub cache_bytes: u64,
    /// Of a transaction with more payload bytes, only the lanes that it touched are remembered.
    pub max_transaction: u64,
    /// Log from before the last checkpoint that the slot may keep, bytes, before it is dropped.
    pub max_retained: u64,
    /// Bytes that decoding may write to disk in one canary interval before the slot is dropped.
    pub max_spill: u64,
    /// How long nearly all lanes may be behind before the slot is dropped.
    pub max_behind: Duration,
    /// Between two canaries.
    pub canary_interval: Duration,
    /// Longest time to make a slot, which waits for open transactions.
    pub slot_timeout: Duration,
    /// After this silence of ours the server ends the stream, and with it the slot.
    pub sender_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeUp {
    Auto,
    Notify,
    Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    Advisory,
    Lease,
}

/// `[sinks.NAME]`
#[derive(Clone, Debug)]
pub struct Sink {
    pub kind: SinkKind,
    /// Longest time for a batch's answers; what has none by then is refused as unknown.
    pub send_timeout: Duration,
    /// Most deliveries in one batch.
    pub batch: NonZeroU32,
    /// Most batches of one handler that wait for answers at once.
    pub batches_in_flight: NonZeroU32,
}

#[derive(Clone, Debug)]
pub enum SinkKind {
    Kafka(Kafka),
    Nats(Nats),
    Redis(Redis),
    Stdout,
}

impl SinkKind {
    /// As the key `type` writes it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kafka(_) => "kafka",
            Self::Nats(_) => "nats",
            Self::Redis(_) => "redis",
            Self::Stdout => "stdout",
        }
    }

    /// What this kind of broker calls a destination; `None` where there is none.
    pub fn destination_key(&self) -> Option<&'static str> {
        match self {
            Self::Kafka(_) => Some("topic"),
            Self::Nats(_) => Some("subject"),
            Self::Redis(_) => Some("stream"),
            Self::Stdout => None,
        }
    }
}

/// TLS towards a broker. `ca_file` unset means the public roots (Kafka: the system's store).
#[derive(Clone, Debug, Default)]
pub struct Tls {
    pub enabled: bool,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
}

/// A secret given in the file, or a file to read it from at every connect.
#[derive(Clone, Debug)]
pub enum SecretSource {
    Inline(Secret),
    File(PathBuf),
}

/// `type = "kafka"`
#[derive(Clone, Debug)]
pub struct Kafka {
    pub brokers: String,
    pub tls: Tls,
    pub sasl: Option<Sasl>,
    /// Any librdkafka property; ours win only where delivery would be unsafe, and `validate` says so.
    pub options: BTreeMap<String, Secret>,
}

#[derive(Clone, Debug)]
pub struct Sasl {
    pub mechanism: SaslMechanism,
    pub username: String,
    pub password: SecretSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaslMechanism {
    Plain,
    ScramSha256,
    ScramSha512,
}

/// `type = "nats"`
#[derive(Clone, Debug)]
pub struct Nats {
    /// One or several `nats://` or `tls://` addresses, comma separated.
    pub url: Secret,
    pub tls: Tls,
    pub auth: NatsAuth,
}

#[derive(Clone, Debug)]
pub enum NatsAuth {
    /// Whatever the URL says.
    Url,
    User {
        username: String,
        password: SecretSource,
    },
    Token(SecretSource),
    /// The seed.
    Nkey(SecretSource),
    CredsFile(PathBuf),
}

/// `type = "redis"`
#[derive(Clone, Debug)]
pub struct Redis {
    /// `redis://` or `rediss://`.
    pub url: Secret,
    pub tls: Tls,
    /// ACL user; overrides the URL's.
    pub username: Option<String>,
    pub password: Option<SecretSource>,
    /// `XADD … MAXLEN ~`; consumers that lag further lose entries.
    pub max_len: Option<u64>,
}

/// `[handlers.NAME]`: which events, to which sink and destination, with which policy.
#[derive(Clone, Debug)]
pub struct Handler {
    pub name: String,
    pub events: Vec<Pattern>,
    /// A name under `[sinks]`.
    pub sink: String,
    /// `topic`, `subject` or `stream`, whichever the sink's kind calls it; empty for stdout.
    pub destination: Template,
    pub format: Format,
    pub order: Order,
    pub on_dead: OnDead,
    pub retry: Retry,
    /// nats: the stream that must acknowledge (`Nats-Expected-Stream`); found by subject at start when unset.
    pub nats_stream: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    CloudEvents,
    CloudEventsJson,
    Raw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Key,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDead {
    Block,
    Skip,
}

/// `[http]`
#[derive(Clone, Debug)]
pub struct Http {
    /// `None` (written `""`): no HTTP at all.
    pub listen: Option<std::net::SocketAddr>,
    /// Names that a request's `Host` may hold besides `localhost`, in lower case; addresses always may.
    pub allowed_hosts: Vec<String>,
    /// Deliveries that could go and did not move for so long make `/healthz` fail.
    pub stuck_after: Duration,
}

/// `[retention]`
#[derive(Clone, Debug)]
pub struct Retention {
    /// `None` (written `"0"`): never drop a partition.
    pub events: Option<Duration>,
    pub dead: Option<Duration>,
    pub history: bool,
}
