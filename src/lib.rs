//! Lanebridge carries events from Postgres to the broker a team already runs.
//!
//! The data path:
//!
//! 1. An application calls `lanebridge.publish(…)` inside its own transaction ([`publish`] is that call from Rust).
//!    The database stores one [`event`] and, per matching handler, one [`delivery`].
//! 2. A bridge owns lanes, each under a session advisory lock and an epoch (`lanes`).
//! 3. A narrow poll of its lanes decides what is to be sent; the write-ahead log wakes it and brings payloads (`sources`).
//! 4. Per (handler, key) the order holds without gaps in flight (`dispatch`).
//! 5. Just before sending, one read fetches the payloads that the log did not bring and sees each delivery again (R1), and
//!    its commit is on disk (R2).
//! 6. A sink hands it to Kafka, NATS JetStream or Redis Streams and waits for the broker's acknowledgement (`sinks`).
//! 7. The outcome is written back in a fenced batch; every id is accounted for (`completion`).
//!
//! Beside the path: what is counted (`metrics`), what waits (`backlog`), whether the bridge lives (`health`), and the pages
//! that show it (`http`).
//!
//! With `default-features = false` only [`publish`], [`event`], [`delivery`] and [`error`] are built.

pub mod backoff;
pub mod delivery;
pub mod error;
pub mod event;
pub mod publish;

#[cfg(feature = "bridge")]
mod backlog;
#[cfg(feature = "bridge")]
mod bridge;
#[cfg(feature = "bridge")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "bridge")]
mod completion;
#[cfg(feature = "bridge")]
pub mod config;
#[cfg(feature = "bridge")]
mod controls;
#[cfg(feature = "bridge")]
pub mod db;
#[cfg(feature = "bridge")]
mod dispatch;
#[cfg(feature = "bridge")]
mod health;
#[cfg(feature = "bridge")]
mod http;
#[cfg(feature = "bridge")]
mod janitor;
#[cfg(feature = "bridge")]
mod lanes;
#[cfg(feature = "bridge")]
mod metrics;
#[cfg(feature = "bridge")]
pub mod sinks;
#[cfg(feature = "bridge")]
mod sources;
