//! Sinks: one file per broker, each with its `classify` table; `stdout`; and a scripted one for tests.
//!
//! A sink gets a batch in key order and answers every parcel, by position. It never answers `Acked` without
//! the broker's own statement for exactly that parcel; a lost, short or doubtful answer is `Refused` (I1).

mod cloudevents;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "redis")]
mod redis;
pub mod scripted;
mod stdout;

use std::sync::Arc;

use crate::config;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::{Error, Result};

/// A handler as a sink sees it.
#[derive(Clone, Debug)]
pub struct Route {
    pub handler: Arc<config::Handler>,
    /// `ce_source`.
    pub source: Arc<str>,
}

/// How many unacknowledged deliveries of one (handler, key) a sink may be given (R3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWindow {
    /// One: the transport can lose the first of two and store the second.
    One,
    /// All of one batch: the broker runs it in order and stops a key at its first failure.
    Batch,
}

/// One thing that is wrong or weak at a destination, found before the first send.
#[derive(Clone, Debug)]
pub struct Finding {
    pub severity: Severity,
    /// Names handler, destination and what is missing, in one sentence.
    pub what: String,
    pub hint: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The broker may lose what it acknowledged; printed once per start (R16).
    Weak,
    /// Deliveries of this handler cannot arrive as things are.
    Missing,
}

/// A connected broker client, shared by every handler that names this sink.
#[derive(Debug)]
pub enum Sink {
    #[cfg(feature = "kafka")]
    Kafka(kafka::Kafka),
    #[cfg(feature = "nats")]
    Nats(nats::Nats),
    #[cfg(feature = "redis")]
    Redis(redis::Redis),
    Stdout(stdout::Stdout),
    Scripted(scripted::Scripted),
}
