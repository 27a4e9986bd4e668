//! Kafka: one idempotent producer a sink, acks=all, answers matched to parcels by position.
//!
//! I1: `Acked` comes only from a delivery report of exactly that record; no report, no ack. The report finds its
//! parcel by a ticket that owns its share of the batch, so that a dropped `send` leaves nothing dangling.
//! I2: records of a batch enter librdkafka in the order given, from one place at a time; a full queue makes `send`
//! wait with the same record in its hand (H69).
//! I3: a broker's "too large" or "invalid" fails everything in one MessageSet. Nobody is blamed before it failed
//! alone (H70).
//! Never flushes to wait for an ack (librdkafka polls in 100 ms steps), never chooses partitions: murmur2 of the key,
//! as the Java client does.

mod check;
mod classify;
mod producer;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout_at};

use self::classify::{Verdict, classify, outcome};
use self::producer::{Answer, Batch, Live, Settings, Ticket};
use super::cloudevents::{self, Names};
use super::{Finding, Route};
use crate::config;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::Result;

/// How long a full queue is left alone before the same record is tried again: librdkafka empties it in bursts of
/// milliseconds and offers nothing to wait on.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(2);

/// How old a topic's learnt size limit may be when a message is buried for it; an operator may have raised it.
const LIMIT_AGE: Duration = Duration::from_secs(30);

/// What a record batch of one record adds to key, payload and headers at least (61 bytes of batch header and 7
/// single-byte fields). The least, because a size at the boundary is the broker's to judge.
const RECORD_OVERHEAD: usize = 61 + 7;

pub struct Kafka {
    settings: Arc<Settings>,
    /// Replaced as a whole when librdkafka declares it dead.
    live: Mutex<Arc<Live>>,
    /// Held while a batch is enqueued: first come, first served, also when the queue is full.
    line: Mutex<()>,
    /// `max.message.bytes` by topic, as last heard.
    limits: std::sync::Mutex<HashMap<String, (Instant, usize)>>,
}

impl Kafka {
    /// # Errors
    /// A configuration that librdkafka refuses, or a password or certificate file that cannot be read.
    pub(super) async fn connect(name: &str, config: &config::Kafka, sink: &config::Sink) -> Result<Self> {
        let settings = Arc::new(Settings::new(name, config, sink));
        let live = Live::create(&settings).await?;
        Ok(Self {
            settings,
            live: Mutex::new(Arc::new(live)),
            line: Mutex::new(()),
            limits: std::sync::Mutex::default(),
        })
    }

    pub(super) async fn check(&self, routes: &[Route], max_payload_bytes: u64) -> Result<Vec<Finding>> {
        let live = self.healthy().await;
        let (findings, limits) = check::check(&self.settings, &live, routes, max_payload_bytes).await?;
        let smallest = limits.iter().map(|(_, limit)| *limit).min();
        self.learn(limits);
        // librdkafka fills a MessageSet up to batch.size whatever the topic allows, and does not split one that the
        // broker finds too large: small messages together would be refused for a size that none of them has.
        if let Some(limit) = smallest.filter(|limit| self.settings.cap_batches(*limit)) {
            self.renew(&live, &format!("a topic takes only {limit} bytes a batch")).await;
        }
        Ok(findings)
    }

    /// See [`Sink::send`](super::Sink::send). Dropping the future is safe: reports that come later are ignored.
    pub(super) async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let deadline = Instant::now() + self.settings.send_timeout;
        let live = self.healthy().await;
        let fixed = route.handler.destination.fixed(&route.handler.name);
        let batch = Batch::new(parcels.len());
        match timeout_at(deadline, self.line.lock()).await {
            Ok(_line) => {
                for (index, parcel) in parcels.iter().enumerate() {
                    let ticket = Ticket::new(&batch, index);
                    self.enqueue(&live, route, fixed.as_deref(), parcel, ticket, deadline).await;
                }
            }
            // Nothing was enqueued: every answer below says so.
            Err(_) => batch.answer_rest(Answer::Reported(RDKafkaErrorCode::QueueFull)),
        }
        batch.wait(deadline).await;
        let mut answers = batch.take();
        let suspects: Vec<usize> = (0..answers.len()).filter(|i| is_suspect(&answers[*i])).collect();
        if !suspects.is_empty() {
            self.try_alone(&live, route, fixed.as_deref(), parcels, &suspects, &mut answers, deadline).await;
        }
        if let Some((code, text)) = live.client().client().fatal_error() {
            self.renew(&live, &format!("{code:?}: {text}")).await;
        }
        let trouble = live.trouble();
        answers.into_iter().map(|answer| outcome(answer, fixed.is_some(), &trouble)).collect()
    }

    /// Gives the queue until `deadline` to empty; what is left then stays unknown to the caller, who re-reads it.
    pub(super) async fn close(self, deadline: Duration) {
        let live = self.live.into_inner();
        let flush = tokio::task::spawn_blocking(move || {
            if let Err(error) = live.client().flush(deadline) {
                tracing::debug!(%error, "kafka queue not empty at close");
            }
            drop(live);
        });
        // A panic there loses nothing: no ack was given for what is still queued.
        flush.await.unwrap_or_default();
    }

    /// Puts one record into librdkafka's queue, or answers its ticket at once when it can never go there.
    async fn enqueue(
        &self,
        live: &Live,
        route: &Route,
        fixed: Option<&str>,
        parcel: &Parcel,
        ticket: Box<Ticket>,
        deadline: Instant,
    ) {
        let topic = match topic_of(route, fixed, parcel) {
            Ok(topic) => topic,
            Err(outcome) => return ticket.answer(Answer::Decided(outcome)),
        };
        let encoded = cloudevents::encode(parcel, route, Names::Kafka);
        let key = parcel.event.key.as_deref();
        let bytes = wire_bytes(key, &encoded);
        if let Some(limit) = self.limit_below(&topic, bytes).await {
            let text = format!("{bytes} bytes with key and headers, and topic {topic} takes {limit}");
            return ticket.answer(Answer::Decided(Outcome::Rejected(Failure::new("MSG_SIZE_TOO_LARGE", text))));
        }
        let mut headers = OwnedHeaders::new_with_capacity(encoded.attributes.len());
        for (name, value) in &encoded.attributes {
            headers = headers.insert(Header { key: name.as_ref(), value: Some(value.as_bytes()) });
        }
        // An empty payload stays an empty value: null would be a tombstone in a compacted topic (B1).
        let mut record =
            BaseRecord::<str, [u8], _>::with_opaque_to(&topic, ticket).payload(&encoded.body).headers(headers);
        record.key = key;
        loop {
            record = match live.client().send(record) {
                Ok(()) => return,
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again))
                    if Instant::now() < deadline =>
                {
                    sleep(QUEUE_FULL_PAUSE).await;
                    again
                }
                Err((error, refused)) => {
                    let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail);
                    return refused.delivery_opaque.answer(Answer::Reported(code));
                }
            };
        }
    }

    /// Sends again, one at a time with nothing else in flight, what failed in a MessageSet whose other members may be
    /// to blame. Whoever fails now is guilty; what the deadline leaves untried is refused for what it failed with.
    #[allow(clippy::too_many_arguments)]
    async fn try_alone(
        &self,
        live: &Live,
        route: &Route,
        fixed: Option<&str>,
        parcels: &[Parcel],
        suspects: &[usize],
        answers: &mut [Answer],
        deadline: Instant,
    ) {
        let Ok(_line) = timeout_at(deadline, self.line.lock()).await else { return };
        for &index in suspects {
            while live.client().in_flight_count() > 0 {
                if Instant::now() >= deadline {
                    return;
                }
                sleep(QUEUE_FULL_PAUSE).await;
            }
            let batch = Batch::new(1);
            self.enqueue(live, route, fixed, &parcels[index], Ticket::new(&batch, 0), deadline).await;
            batch.wait(deadline).await;
            let Some(answer) = batch.take().pop() else { return };
            answers[index] = match answer {
                Answer::Reported(code) if classify(code) == Verdict::Message => {
                    Answer::Decided(Outcome::Rejected(classify::failure(code, "refused by the broker on its own")))
                }
                answer => answer,
            };
        }
    }

    /// The topic's limit if `bytes` is over it, from an answer no older than [`LIMIT_AGE`].
    async fn limit_below(&self, topic: &str, bytes: usize) -> Option<usize> {
        let ours = self.settings.message_max_bytes;
        if bytes > ours {
            return Some(ours);
        }
        let known = self.limits.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(topic).copied();
        let (at, limit) = known.filter(|(_, limit)| bytes > *limit)?;
        if at.elapsed() < LIMIT_AGE {
            return Some(limit);
        }
        // Asked again before anything is buried; without an answer the broker shall decide.
        let fresh = check::limits(&self.settings, vec![topic.to_owned()]).await;
        self.learn(fresh.iter().map(|(topic, limits)| (topic.clone(), limits.max_message_bytes)));
        fresh.get(topic).map(|limits| limits.max_message_bytes).filter(|limit| bytes > *limit)
    }

    fn learn(&self, heard: impl IntoIterator<Item = (String, usize)>) {
        let mut limits = self.limits.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        limits.extend(heard.into_iter().map(|(topic, limit)| (topic, (Instant::now(), limit))));
    }

    /// The producer, made anew first if librdkafka declared it dead or the password it uses is no longer the file's.
    async fn healthy(&self) -> Arc<Live> {
        let live = self.live.lock().await.clone();
        if let Some((code, text)) = live.client().client().fatal_error() {
            self.renew(&live, &format!("{code:?}: {text}")).await;
        } else if live.take_login_failed() && live.password_changed(&self.settings).await {
            self.renew(&live, "the password file changed").await;
        } else {
            return live;
        }
        self.live.lock().await.clone()
    }

    /// Replaces `old` unless another call did. What `old` still held is reported as purged, hence sent again.
    async fn renew(&self, old: &Arc<Live>, reason: &str) {
        let mut current = self.live.lock().await;
        if !Arc::ptr_eq(&current, old) {
            return;
        }
        match Live::create(&self.settings).await {
            Ok(new) => {
                *current = Arc::new(new);
                old.purge();
                tracing::warn!(sink = %self.settings.name, reason, "kafka producer made anew");
            }
            Err(error) => {
                tracing::error!(sink = %self.settings.name, reason, error = %error.report(), "kafka producer cannot be made anew");
            }
        }
    }
}

/// The topic for a parcel, or the outcome when there is none.
fn topic_of<'a>(route: &Route, fixed: Option<&'a str>, parcel: &Parcel) -> Result<Cow<'a, str>, Outcome> {
    let handler = &route.handler;
    let topic = match fixed {
        Some(topic) => Cow::Borrowed(topic),
        None => match handler.destination.render(&parcel.event, &handler.name, str::to_owned) {
            Ok(topic) => Cow::Owned(topic),
            Err(text) => return Err(Outcome::Rejected(Failure::new("NO_TOPIC", text))),
        },
    };
    match valid_topic(&topic) {
        true => Ok(topic),
        // A fixed topic fails every event alike: the configuration is wrong, the events are not.
        false if fixed.is_some() => Err(Outcome::Unreachable(invalid_topic(&topic))),
        false => Err(Outcome::Rejected(invalid_topic(&topic))),
    }
}

fn invalid_topic(topic: &str) -> Failure {
    Failure::new(
        "INVALID_TOPIC",
        format!("a topic has 1 to 249 of a-z A-Z 0-9 . _ - and is not . or .., unlike {topic}"),
    )
}

/// Kafka's own rule (org.apache.kafka.common.internals.Topic).
/// Kafka's own rule, and no internal topic: a template must not let a publisher name `__consumer_offsets`.
fn valid_topic(topic: &str) -> bool {
    (1..=249).contains(&topic.len())
        && !topic.starts_with("__")
        && topic != "."
        && topic != ".."
        && topic.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The least a record weighs in an uncompressed batch of its own.
fn wire_bytes(key: Option<&str>, encoded: &cloudevents::Encoded<'_>) -> usize {
    let headers: usize = encoded.attributes.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    RECORD_OVERHEAD + key.map_or(0, str::len) + encoded.body.len() + headers
}

fn is_suspect(answer: &Answer) -> bool {
    matches!(answer, Answer::Reported(code) if classify(*code) == Verdict::Message)
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka").field("name", &self.settings.name).finish_non_exhaustive()
    }
}
