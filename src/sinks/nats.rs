//! NATS JetStream: publishes a batch in order, then judges every `PubAck` on its own.
//!
//! I1: `Acked` needs a `PubAck` that names the stream this delivery was meant for, with a sequence number: any core
//! subscriber on the subject can answer in the stream's place, and does when the stream is gone (H76).
//! I2: each delivery carries `Nats-Msg-Id`, so that what was stored before a lost answer is not stored twice
//! within the stream's duplicate window. `duplicate: true` is therefore an ack of our own earlier publish.
//! I3: nothing is handed to the client while it has no connection: it would buffer, and send long after we gave up.
//!
//! Keys of one batch must be distinct (`KeyWindow::One`): JetStream refuses one message and stores the next.

mod check;
mod link;
mod streams;
mod subject;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::context::{ContextBuilder, PublishAckFuture, PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::{self};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};

use self::link::Link;
use self::streams::{Missing, Streams};
use super::cloudevents::{self, Names};
use super::{Finding, Route};
use crate::config;
use crate::controls::breaks;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::Result;

/// Least room for unacknowledged publishes, whatever the configuration says.
const MIN_WINDOW: usize = 4_096;

/// A connection that just broke is mostly back within this time; a broker that is down costs each trial no more.
const RECONNECT_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Nats {
    name: String,
    /// `host:port,…`, without secrets.
    addresses: String,
    client: Client,
    jetstream: jetstream::Context,
    link: watch::Receiver<Link>,
    streams: Streams,
    send_timeout: Duration,
    /// Taken for a whole batch before its first publish: the client's own limit counts single publishes, and two
    /// batches that each wait there for what only the other's acks can free would wait for ever.
    room: Semaphore,
    window: usize,
}

/// A publish whose answer is awaited.
struct Pending {
    subject: String,
    stream: Arc<str>,
    ack: PublishAckFuture,
}

impl Nats {
    /// A client that connects in the background.
    ///
    /// # Errors
    /// [`Class::Config`](crate::error::Class::Config) for addresses, secrets and certificates that cannot be used.
    pub(super) async fn connect(name: &str, config: &config::Nats, common: &config::Sink) -> Result<Self> {
        let (client, link, addresses) = link::open(name, config).await?;
        let batches = usize::try_from(common.batches_in_flight.get()).unwrap_or(usize::MAX);
        let batch = usize::try_from(common.batch.get()).unwrap_or(usize::MAX);
        let window = batch.saturating_mul(batches).clamp(MIN_WINDOW, 1 << 16);
        let jetstream = ContextBuilder::new()
            .timeout(common.send_timeout)
            .ack_timeout(common.send_timeout)
            // Publishes that were given up keep their place until `ack_timeout`.
            .max_ack_inflight(window * 2)
            .backpressure_on_inflight(true)
            .build(client.clone());
        Ok(Self {
            name: name.to_owned(),
            addresses,
            client,
            jetstream,
            link,
            streams: Streams::default(),
            send_timeout: common.send_timeout,
            room: Semaphore::new(window),
            window,
        })
    }

    /// What is wrong or weak at the streams of `routes`.
    ///
    /// # Errors
    /// [`Class::Transient`](crate::error::Class::Transient) when the server could not be asked.
    pub(super) async fn check(&self, routes: &[Route], max_payload_bytes: u64) -> Result<Vec<Finding>> {
        check::check(self, routes, max_payload_bytes).await
    }

    /// One outcome for each parcel, in their order, within the sink's `send_timeout`.
    pub(super) async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let deadline = Instant::now() + self.send_timeout;
        let mut outcomes = Vec::with_capacity(parcels.len());
        for part in parcels.chunks(self.window) {
            self.send_part(route, part, deadline, &mut outcomes).await;
        }
        outcomes
    }

    async fn send_part(&self, route: &Route, parcels: &[Parcel], deadline: Instant, outcomes: &mut Vec<Outcome>) {
        let all = |outcome: Outcome| std::iter::repeat_n(outcome, parcels.len());
        let wait = RECONNECT_WAIT.min(deadline.saturating_duration_since(Instant::now()));
        if let Err(why) = link::connected(&self.client, &self.link, wait).await {
            return outcomes.extend(all(unreachable("NOT_CONNECTED", format!("{}: {why}", self.addresses))));
        }
        let permits = u32::try_from(parcels.len()).unwrap_or(u32::MAX);
        let Ok(Ok(_room)) = timeout_at(deadline, self.room.acquire_many(permits)).await else {
            return outcomes.extend(all(unreachable("BUSY", "earlier batches still wait for their answers")));
        };
        let mut link = self.link.clone();
        let (breaks, denials) = {
            let now = link.borrow_and_update();
            (now.breaks, now.denials)
        };
        let mut pending = Vec::with_capacity(parcels.len());
        let mut missing = Missing::default();
        for parcel in parcels {
            let publish = async {
                if link.borrow().breaks != breaks {
                    return Err(lost());
                }
                self.publish(route, parcel, &mut missing).await
            };
            let sent = timeout_at(deadline, publish).await;
            pending.push(sent.unwrap_or_else(|_| Err(unreachable("TIMED_OUT", "the client did not take it in time"))));
        }
        for publish in pending {
            outcomes.push(match publish {
                Err(outcome) => outcome,
                Ok(publish) => {
                    let answer = answer(publish, deadline, &mut link, breaks, denials).await;
                    if matches!(&answer, Outcome::Unreachable(why) | Outcome::Refused(why) if is_about_the_stream(&why.code)) {
                        self.streams.forget();
                    }
                    answer
                }
            });
        }
    }

    /// Hands one delivery to the client; its answer is to be awaited.
    async fn publish(&self, route: &Route, parcel: &Parcel, missing: &mut Missing) -> Result<Pending, Outcome> {
        let subject = subject::subject(route, parcel).map_err(Outcome::Rejected)?;
        let stream = match &route.handler.nats_stream {
            Some(stream) => Arc::from(stream.as_str()),
            None => self.streams.of(&self.jetstream, &subject, missing).await.map_err(Outcome::Unreachable)?,
        };
        let encoded = cloudevents::encode(parcel, route, Names::Nats);
        let dedup_id = match breaks("dedup-id") {
            true => parcel.id.seq.to_string(),
            false => parcel.dedup_id(&route.installation, &route.handler.name),
        };
        let ours = [("Nats-Msg-Id", dedup_id.as_str()), ("Nats-Expected-Stream", &stream)];
        let headers = subject::headers(&encoded.attributes, &ours).map_err(Outcome::Rejected)?;
        let message = PublishMessage::build().payload(encoded.body.into_owned().into()).headers(headers);
        let ack = self.jetstream.send_publish(subject.clone(), message).await.map_err(|error| match error.kind() {
            PublishErrorKind::Other => unreachable("CLIENT", text(&error)),
            _ => classify_publish(&error),
        })?;
        Ok(Pending { subject, stream, ack })
    }

    /// Flushes what the client still holds and closes the connection, within `deadline` from now.
    pub(super) async fn close(self, deadline: Duration) {
        let closing = async {
            if self.client.connection_state() == async_nats::connection::State::Connected {
                self.client.flush().await.ok();
            }
            self.client.drain().await.ok();
        };
        if tokio::time::timeout(deadline, closing).await.is_err() {
            tracing::debug!(sink = %self.name, "nats did not close in time");
        }
    }
}

/// What became of one publish, by `deadline` or as soon as the link says that no answer will come.
async fn answer(
    publish: Pending,
    deadline: Instant,
    link: &mut watch::Receiver<Link>,
    breaks: u64,
    denials: u64,
) -> Outcome {
    let Pending { subject, stream, ack } = publish;
    let hopeless = async {
        loop {
            {
                let now = link.borrow_and_update();
                if now.breaks != breaks {
                    return lost();
                }
                if now.denied_since(denials, &subject) {
                    return unreachable(
                        "PERMISSION_DENIED",
                        format!("the server refuses to let us publish to {subject}"),
                    );
                }
            }
            if link.changed().await.is_err() {
                return lost();
            }
        }
    };
    // An answer that is already here counts, whatever happened to the connection since.
    tokio::select! {
        biased;
        answer = timeout_at(deadline, ack) => match answer {
            Ok(answer) => judge(answer, &stream),
            Err(_elapsed) => unreachable("TIMED_OUT", "no answer in time, it may be stored"),
        },
        outcome = hopeless => outcome,
    }
}

/// I1 for one answer.
fn judge(answer: Result<PublishAck, PublishError>, expected: &str) -> Outcome {
    let ack = match answer {
        Ok(ack) => ack,
        Err(error) => return classify_publish(&error),
    };
    if ack.stream != expected {
        let text =
            format!("stream {:?} answered, {expected:?} was expected: something else takes this subject", ack.stream);
        return Outcome::Refused(Failure::new("WRONG_STREAM", text));
    }
    if ack.sequence == 0 {
        return Outcome::Refused(Failure::new("BAD_ANSWER", "the answer has no sequence number"));
    }
    if ack.duplicate {
        tracing::debug!(stream = expected, sequence = ack.sequence, "nats had stored this delivery before");
    }
    Outcome::Acked
}

fn classify_publish(error: &PublishError) -> Outcome {
    match error.kind() {
        PublishErrorKind::StreamNotFound => unreachable("STREAM_NOT_FOUND", "no stream takes this subject"),
        PublishErrorKind::MaxPayloadExceeded => Outcome::Rejected(Failure::new("MAX_PAYLOAD", text(error))),
        PublishErrorKind::TimedOut => unreachable("TIMED_OUT", "no answer in time, it may be stored"),
        PublishErrorKind::BrokenPipe => lost(),
        PublishErrorKind::MaxAckPending => unreachable("BUSY", text(error)),
        PublishErrorKind::WrongLastMessageId | PublishErrorKind::WrongLastSequence | PublishErrorKind::Other => {
            let source = std::error::Error::source(error);
            match source.and_then(|source| source.downcast_ref::<jetstream::Error>()) {
                Some(answer) => classify(answer.code(), answer.error_code().0, &answer.to_string()),
                // An answer that is none, such as broken JSON.
                None => Outcome::Refused(Failure::new("BAD_ANSWER", text(error))),
            }
        }
    }
}

/// The table from JetStream's error codes (nats-server `jetstream_errors_generated.go`) to outcomes.
fn classify(status: usize, code: u64, text: &str) -> Outcome {
    let failure = Failure::new(code.to_string(), text);
    match code {
        // This message is too large for this stream, with its headers or without.
        10054 | 10097 => Outcome::Rejected(failure),
        // The stream is not there, not this one, sealed, offline, or full with discard = new.
        10059 | 10060 | 10077 | 10109 | 10118 | 10122 => Outcome::Unreachable(failure),
        // The account or the server has no room.
        10002 | 10023 | 10028 | 10047 => Outcome::Unreachable(failure),
        // JetStream is off, or the cluster has no leader.
        10004..=10010 | 10035 | 10039 | 10076 => Outcome::Unreachable(failure),
        _ if status == 503 => Outcome::Unreachable(failure),
        // Nobody knows what it says about this message.
        _ => Outcome::Refused(failure),
    }
}

/// Whether an answer means that what we know about streams and subjects may be old.
fn is_about_the_stream(code: &str) -> bool {
    matches!(code, "WRONG_STREAM" | "STREAM_NOT_FOUND" | "10059" | "10060")
}

fn lost() -> Outcome {
    unreachable("CONNECTION_LOST", "the connection broke before an answer came, it may be stored")
}

fn unreachable(code: &str, text: impl AsRef<str>) -> Outcome {
    Outcome::Unreachable(Failure::new(code, text))
}

/// An error of the client with its sources, which its own text leaves out or repeats.
fn text(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        next = error.source();
    }
    text
}
