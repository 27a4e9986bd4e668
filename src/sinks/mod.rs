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
#[doc(hidden)]
pub mod scripted;
mod stdout;

use std::sync::Arc;
use std::time::Duration;

use crate::config::{self, Format};
#[cfg(feature = "nats")]
use crate::controls::breaks;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::Result;

/// Code of a delivery that was not tried because an earlier one of its key failed in the same batch. Says nothing of
/// the broker.
pub(crate) const BEHIND: &str = "BEHIND";

/// Codes of NATS and Redis that concern the destination: a stream that is missing, full, of another type, not ours.
const DESTINATION: [&str; 7] = ["STREAM_NOT_FOUND", "WRONG_STREAM", "10059", "10060", "10077", "WRONGTYPE", "NOPERM"];

/// What a broker counts beside the payload: a key, an id and a type (4,096, 512 and 255 bytes), 16 KiB of headers, the
/// attributes with their names, escaped where the broker wants it, and the broker's framing.
const HEADER_ALLOWANCE: u64 = 64 << 10;

/// A handler as a sink sees it.
#[derive(Clone, Debug)]
pub struct Route {
    pub handler: Arc<config::Handler>,
    /// `ce_source`.
    pub source: Arc<str>,
    /// The id of the set of tables, so that two of them may feed one place (I7).
    pub installation: Arc<str>,
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

impl Sink {
    /// A client for `[sinks.NAME]`. Brokers are contacted in the background: one that is down is no error here.
    ///
    /// # Errors
    /// [`Class::Config`](crate::error::Class::Config) for settings that can never work, such as a certificate that
    /// cannot be read, and for a broker this program was built without.
    pub async fn connect(name: &str, config: &config::Sink) -> Result<Sink> {
        match &config.kind {
            #[cfg(feature = "kafka")]
            config::SinkKind::Kafka(kind) => Ok(Sink::Kafka(kafka::Kafka::connect(name, kind, config).await?)),
            #[cfg(not(feature = "kafka"))]
            config::SinkKind::Kafka(_) => Err(not_built(name, "kafka")),
            #[cfg(feature = "nats")]
            config::SinkKind::Nats(kind) => Ok(Sink::Nats(nats::Nats::connect(name, kind, config).await?)),
            #[cfg(not(feature = "nats"))]
            config::SinkKind::Nats(_) => Err(not_built(name, "nats")),
            #[cfg(feature = "redis")]
            config::SinkKind::Redis(kind) => Ok(Sink::Redis(redis::Redis::connect(name, kind, config).await?)),
            #[cfg(not(feature = "redis"))]
            config::SinkKind::Redis(_) => Err(not_built(name, "redis")),
            config::SinkKind::Stdout => Ok(Sink::Stdout(stdout::Stdout::new(config.send_timeout))),
        }
    }

    /// What is wrong or weak at the destinations of `routes`, which all name this sink; empty when all is well.
    /// Whatever publishing lets through, up to `max_payload_bytes`, should fit there.
    ///
    /// # Errors
    /// [`Class::Transient`](crate::error::Class::Transient) when the broker could not be asked.
    pub async fn check(&self, routes: &[Route], max_payload_bytes: u32) -> Result<Vec<Finding>> {
        let max_payload_bytes = u64::from(max_payload_bytes);
        // Unused when no broker is built in.
        let _ = max_payload_bytes;
        match self {
            #[cfg(feature = "kafka")]
            Sink::Kafka(sink) => sink.check(routes, max_payload_bytes).await,
            #[cfg(feature = "nats")]
            Sink::Nats(sink) => sink.check(routes, max_payload_bytes).await,
            #[cfg(feature = "redis")]
            Sink::Redis(sink) => sink.check(routes, max_payload_bytes).await,
            Sink::Stdout(_) => Ok(Vec::new()),
            Sink::Scripted(sink) => sink.check(routes),
        }
    }

    /// How many unacknowledged deliveries of one (handler, key) [`Sink::send`] may be given.
    pub fn key_window(&self) -> KeyWindow {
        match self {
            #[cfg(feature = "kafka")]
            Sink::Kafka(_) => KeyWindow::One,
            #[cfg(feature = "nats")]
            Sink::Nats(_) if breaks("one-per-key") => KeyWindow::Batch,
            #[cfg(feature = "nats")]
            Sink::Nats(_) => KeyWindow::One,
            #[cfg(feature = "redis")]
            Sink::Redis(_) => KeyWindow::Batch,
            Sink::Stdout(_) => KeyWindow::One,
            Sink::Scripted(sink) => sink.key_window(),
        }
    }

    /// One outcome for each parcel, in their order. Answers within about the sink's `send_timeout`.
    ///
    /// Dropping the future leaves the outcomes unknown, and the broker may still store the parcels: send them again.
    pub async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let answers = match self {
            #[cfg(feature = "kafka")]
            Sink::Kafka(sink) => sink.send(route, parcels).await,
            #[cfg(feature = "nats")]
            Sink::Nats(sink) => sink.send(route, parcels).await,
            #[cfg(feature = "redis")]
            Sink::Redis(sink) => sink.send(route, parcels).await,
            Sink::Stdout(sink) => sink.send(route, parcels).await,
            Sink::Scripted(sink) => sink.send(route, parcels).await,
        };
        let mut answers = one_each(answers, parcels.len());
        if route.handler.destination.fixed(&route.handler.name).is_none() {
            answers.iter_mut().for_each(blame_the_delivery);
        }
        answers
    }

    /// Gives what is in flight until `deadline` (from now) to be answered, then closes the connections.
    pub async fn close(self, deadline: Duration) {
        // Unused when no broker is built in.
        let _ = deadline;
        match self {
            #[cfg(feature = "kafka")]
            Sink::Kafka(sink) => sink.close(deadline).await,
            #[cfg(feature = "nats")]
            Sink::Nats(sink) => sink.close(deadline).await,
            #[cfg(feature = "redis")]
            Sink::Redis(sink) => sink.close(deadline).await,
            Sink::Stdout(_) | Sink::Scripted(_) => {}
        }
    }
}

impl Route {
    /// Bytes that the largest event may take at a broker. Bytes in a JSON document grow by a third, as base64 (a text that
    /// has to be escaped may grow more, and nobody can tell ahead).
    fn needed_bytes(&self, max_payload_bytes: u64) -> u64 {
        let payload = match self.handler.format {
            Format::CloudEventsJson => max_payload_bytes.div_ceil(3) * 4,
            Format::CloudEvents | Format::Raw => max_payload_bytes,
        };
        payload + HEADER_ALLOWANCE
    }
}

/// `subject`, such as `topic t`, takes fewer bytes than an event of `max_payload_bytes` may have there.
fn too_small(subject: &str, limit: u64, needed: u64, max_payload_bytes: u64, raise: &str) -> Finding {
    let fits = limit.saturating_sub(HEADER_ALLOWANCE) * max_payload_bytes / (needed - HEADER_ALLOWANCE);
    Finding {
        severity: Severity::Weak,
        what: format!(
            "{subject} takes {limit} bytes, and a payload of max_payload_bytes ({max_payload_bytes}) may need {needed} \
             with key and headers: it would be dead at once"
        ),
        hint: match fits {
            0 => raise.to_owned(),
            _ => format!("{raise}; or [postgres] max_payload_bytes = {fits}"),
        },
    }
}

/// Where each event names its own destination, a destination that fails is that delivery's trouble: an attempt is
/// spent and its key waits, but the handler's other deliveries go on. With one destination for all it is an outage.
fn blame_the_delivery(outcome: &mut Outcome) {
    if let Outcome::Unreachable(failure) = outcome
        && DESTINATION.contains(&failure.code.as_str())
    {
        *outcome = Outcome::Refused(failure.clone());
    }
}

/// A missing answer is a refusal, never an ack (I1): the caller may match outcomes to parcels by position.
fn one_each(mut answers: Vec<Outcome>, parcels: usize) -> Vec<Outcome> {
    answers.truncate(parcels);
    answers.resize_with(parcels, || Outcome::Refused(Failure::new("NO_ANSWER", "no answer")));
    answers
}

#[cfg(not(all(feature = "kafka", feature = "nats", feature = "redis")))]
fn not_built(name: &str, feature: &str) -> crate::error::Error {
    crate::error::Error::config(format!("[sinks.{name}] needs {feature}, which this program was built without"))
        .hint(format!("build with --features {feature}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backoff::Retry;
    use crate::config::{Format, Handler, OnDead, Order, Template};
    use crate::delivery::DeliveryId;
    use crate::event::{Event, Payload, PayloadFormat};

    /// For the tests of every sink: event `e{seq}` of type `order.paid` with the payload `{"seq":SEQ}`.
    pub(super) fn parcel(seq: i64, key: Option<&str>) -> Parcel {
        Parcel {
            id: DeliveryId { lane: 0, handler: 1, seq },
            event: Arc::new(Event {
                seq,
                id: format!("e{seq}"),
                kind: "order.paid".into(),
                key: key.map(Into::into),
                headers: Vec::new(),
                payload: Payload { bytes: format!("{{\"seq\":{seq}}}").into_bytes(), format: PayloadFormat::Json },
                created_at: time::OffsetDateTime::UNIX_EPOCH,
            }),
            generation: 0,
        }
    }

    pub(super) fn route(handler: &str, destination: &str, format: Format) -> Route {
        Route {
            handler: Arc::new(Handler {
                name: handler.into(),
                events: Vec::new(),
                sink: "sink".into(),
                destination: Template::parse(destination).unwrap(),
                format,
                order: Order::Key,
                on_dead: OnDead::Block,
                retry: Retry {
                    max_attempts: std::num::NonZeroU32::MAX,
                    initial: Duration::from_secs(1),
                    max: Duration::from_secs(1),
                },
                nats_stream: None,
            }),
            source: "/lanebridge/test".into(),
            installation: "i".into(),
        }
    }

    #[test]
    fn an_event_needs_room_for_its_headers_and_for_base64() {
        assert_eq!(route("h", "t", Format::Raw).needed_bytes(1 << 20), (1 << 20) + (64 << 10));
        assert_eq!(route("h", "t", Format::CloudEventsJson).needed_bytes(300), 400 + (64 << 10));
    }

    #[test]
    fn a_short_answer_is_filled_with_refusals_and_a_long_one_is_cut() {
        let short = one_each(vec![Outcome::Acked], 2);
        assert_eq!(short[0], Outcome::Acked);
        assert!(matches!(&short[1], Outcome::Refused(failure) if failure.code == "NO_ANSWER"));
        assert_eq!(one_each(vec![Outcome::Acked; 3], 1), [Outcome::Acked]);
    }
}
