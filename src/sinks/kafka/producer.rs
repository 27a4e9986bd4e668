//! librdkafka's client: its configuration, its life, and the way from a delivery report back to a parcel.
//!
//! I1: properties that delivery depends on are ours; all others are the operator's.
//! I2: every ticket that librdkafka took comes back once, by a report or by the purge when the client ends; a batch
//! counts them, and what is missing is never an ack.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{Producer as _, ProducerContext, PurgeConfig, ThreadedProducer};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::config::{self, SaslMechanism, Secret, SecretSource};
use crate::delivery::Outcome;
use crate::error::{Context as _, Error, Result};

/// Properties (with their other names) that decide whether an ack is true. `validate` reports them in `options`;
/// here they are left out.
const OURS: [&str; 12] = [
    "bootstrap.servers",
    "metadata.broker.list",
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "transactional.id",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "delivery.report.only.error",
    "queuing.strategy",
    "log.queue",
];

/// Larger than any topic's usual limit: the topic shall decide, not librdkafka's 1,000,000.
const MESSAGE_MAX_BYTES: usize = 64 * 1024 * 1024;

/// librdkafka's default for `batch.size`.
const BATCH_BYTES: usize = 1_000_000;

/// Room for the batch header and the request around the records, when batches are kept below a topic's limit.
const BATCH_MARGIN: usize = 512;

/// What is needed to make a client, once more whenever one dies.
pub(super) struct Settings {
    pub(super) name: String,
    config: config::Kafka,
    pub(super) send_timeout: Duration,
    pub(super) message_max_bytes: usize,
    /// `batch.size`, lowered to what the smallest topic takes.
    batch_bytes: AtomicUsize,
}

impl Settings {
    pub(super) fn new(name: &str, config: &config::Kafka, sink: &config::Sink) -> Self {
        let number = |name: &str| config.options.get(name).and_then(|value| value.expose().parse::<usize>().ok());
        for option in config.options.keys().filter(|option| OURS.contains(&option.as_str())) {
            tracing::warn!(sink = name, option, "kafka option ignored: delivery depends on it");
        }
        Self {
            name: name.to_owned(),
            config: config.clone(),
            send_timeout: sink.send_timeout,
            message_max_bytes: number("message.max.bytes").unwrap_or(MESSAGE_MAX_BYTES),
            batch_bytes: AtomicUsize::new(number("batch.size").unwrap_or(BATCH_BYTES)),
        }
    }

    pub(super) fn brokers(&self) -> &str {
        &self.config.brokers
    }

    pub(super) fn user(&self) -> Option<&str> {
        self.config.sasl.as_ref().map(|sasl| sasl.username.as_str())
    }

    /// Keeps batches of the next client below `limit`; whether that changed anything.
    pub(super) fn cap_batches(&self, limit: usize) -> bool {
        let cap = limit.saturating_sub(BATCH_MARGIN).max(1);
        self.batch_bytes.fetch_min(cap, Ordering::Relaxed) > cap
    }

    /// librdkafka's configuration, and the password in it when that came from a file.
    pub(super) async fn client_config(&self) -> Result<(ClientConfig, Option<Secret>)> {
        let mut to = ClientConfig::new();
        // Librdkafka repeats itself at every reconnect; the last trouble goes into the failures instead.
        to.set_log_level(RDKafkaLogLevel::Warning);
        // A little less than send_timeout, so that librdkafka's answer comes before ours gives up.
        let timeout = (self.send_timeout - self.send_timeout / 5).as_millis().clamp(100, 2_000_000_000);
        let propagation = (timeout / 2).min(5_000);
        to.set("client.id", format!("lanebridge-{}", self.name))
            .set("linger.ms", "5")
            .set("compression.type", "lz4")
            // Java's default for records with a key; librdkafka's own is another (H72).
            .set("partitioner", "murmur2_random")
            .set("message.max.bytes", self.message_max_bytes.to_string())
            // message.timeout.ms is noticed only between reconnects, and their pause grows to 10 s by default.
            .set("reconnect.backoff.max.ms", "1000")
            .set("topic.metadata.propagation.max.ms", propagation.to_string())
            // A topic that was once forbidden stays so in librdkafka until its metadata are asked for again, by default
            // after 5 minutes: too long for a granted ACL to take effect.
            .set("topic.metadata.refresh.interval.ms", "10000")
            .set("allow.auto.create.topics", "false")
            .set("queue.buffering.max.messages", "100000")
            .set("queue.buffering.max.kbytes", (256 * 1024).to_string());
        let password = self.secure(&mut to).await?;
        for (name, value) in self.config.options.iter().filter(|(name, _)| !OURS.contains(&name.as_str())) {
            for (alias, default) in [("queue.buffering.max.ms", "linger.ms"), ("compression.codec", "compression.type")]
            {
                if name == alias {
                    to.remove(default);
                }
            }
            to.set(name, value.expose());
        }
        to.set("bootstrap.servers", &self.config.brokers)
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("message.timeout.ms", timeout.to_string())
            .set("batch.size", self.batch_bytes.load(Ordering::Relaxed).to_string());
        Ok((to, password))
    }

    /// TLS and SASL.
    async fn secure(&self, to: &mut ClientConfig) -> Result<Option<Secret>> {
        let (tls, sasl) = (&self.config.tls, self.config.sasl.as_ref());
        let protocol = match (tls.enabled, sasl.is_some()) {
            (false, false) => "plaintext",
            (true, false) => "ssl",
            (false, true) => "sasl_plaintext",
            (true, true) => "sasl_ssl",
        };
        to.set("security.protocol", protocol);
        if tls.enabled {
            let files = [
                ("ssl.ca.location", &tls.ca_file),
                ("ssl.certificate.location", &tls.cert_file),
                ("ssl.key.location", &tls.key_file),
            ];
            for (property, file) in files {
                if let Some(file) = file {
                    to.set(property, file.to_string_lossy());
                }
            }
        }
        let Some(sasl) = sasl else { return Ok(None) };
        let mechanism = match sasl.mechanism {
            SaslMechanism::Plain => "PLAIN",
            SaslMechanism::ScramSha256 => "SCRAM-SHA-256",
            SaslMechanism::ScramSha512 => "SCRAM-SHA-512",
        };
        to.set("sasl.mechanism", mechanism).set("sasl.username", &sasl.username);
        match &sasl.password {
            SecretSource::Inline(password) => {
                to.set("sasl.password", password.expose());
                Ok(None)
            }
            SecretSource::File(file) => {
                let password = read_password(file).await.map_err(|source| {
                    Error::config(format!("[sinks.{}] sasl: read {}", self.name, file.display())).source_is(source)
                })?;
                to.set("sasl.password", password.expose());
                Ok(Some(password))
            }
        }
    }
}

/// The file's text without the newline that editors add.
async fn read_password(file: &Path) -> std::io::Result<Secret> {
    let text = tokio::fs::read_to_string(file).await?;
    Ok(Secret::new(text.trim_end_matches(['\r', '\n'])))
}

/// One librdkafka client with its threads.
pub(super) struct Live {
    client: Option<ThreadedProducer<Reports>>,
    signs: Arc<Signs>,
    /// The password it logs in with, when that came from a file.
    password: Option<Secret>,
}

/// What librdkafka said about its brokers, shared with its threads.
#[derive(Default)]
pub(super) struct Signs {
    trouble: Mutex<Option<(Instant, String)>>,
    login_failed: AtomicBool,
}

impl Live {
    /// # Errors
    /// What librdkafka finds wrong in its configuration, without the value (it may be a secret).
    pub(super) async fn create(settings: &Settings) -> Result<Self> {
        let (config, password) = settings.client_config().await?;
        let signs = Arc::new(Signs::default());
        let context = Reports(Events { sink: settings.name.clone(), signs: signs.clone() });
        // Certificates are read there.
        let made = tokio::task::spawn_blocking(move || ThreadedProducer::from_config_and_context(&config, context));
        let client = made.await.context(|| format!("make the kafka client of [sinks.{}]", settings.name))?;
        let client = client.map_err(|error| {
            let what = match error {
                KafkaError::ClientConfig(_, text, option, _) => format!("option {option}: {text}"),
                other => other.to_string(),
            };
            Error::config(format!("[sinks.{}] {what}", settings.name))
        })?;
        Ok(Self { client: Some(client), signs, password })
    }

    pub(super) fn client(&self) -> &ThreadedProducer<Reports> {
        self.client.as_ref().expect("it is taken out by drop only")
    }

    /// Reports everything that waits as purged, soon.
    pub(super) fn purge(&self) {
        self.client().purge(PurgeConfig::default().queue().inflight());
    }

    /// What librdkafka said last about its brokers; old news is no explanation of a new failure.
    pub(super) fn trouble(&self) -> String {
        let trouble = self.signs.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = trouble.as_ref().filter(|(at, _)| at.elapsed() < Duration::from_secs(60));
        fresh.map(|(_, text)| text.clone()).unwrap_or_default()
    }

    /// Whether a login failed since the last call.
    pub(super) fn take_login_failed(&self) -> bool {
        self.signs.login_failed.swap(false, Ordering::Relaxed)
    }

    /// Whether the password file holds another password than this client logs in with.
    pub(super) async fn password_changed(&self, settings: &Settings) -> bool {
        let (Some(used), Some(sasl)) = (&self.password, &settings.config.sasl) else { return false };
        let SecretSource::File(file) = &sasl.password else { return false };
        read_password(file).await.is_ok_and(|now| now != *used)
    }
}

impl Drop for Live {
    /// The client's own drop flushes and joins a thread, some 600 ms at worst: not on a thread that runs tasks.
    fn drop(&mut self) {
        let client = self.client.take();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(client))),
            Err(_) => drop(client),
        }
    }
}

/// Log lines and errors of a client.
#[derive(Clone)]
pub(super) struct Events {
    pub(super) sink: String,
    pub(super) signs: Arc<Signs>,
}

impl Events {
    fn note(&self, text: &str) {
        let text = text.chars().take(200).collect();
        *self.signs.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), text));
    }
}

impl ClientContext for Events {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        tracing::debug!(sink = %self.sink, ?level, facility, text, "librdkafka");
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(sink = %self.sink, %error, reason, "librdkafka error");
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed) => {
                self.signs.login_failed.store(true, Ordering::Relaxed);
                self.note(reason);
            }
            // "2/2 brokers are down" says less than the reason before it.
            Some(RDKafkaErrorCode::AllBrokersDown) => {}
            _ => self.note(reason),
        }
    }
}

/// Delivery reports: each finds its batch by its ticket.
pub(super) struct Reports(Events);

impl ClientContext for Reports {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        self.0.log(level, facility, text);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.error(error, reason);
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        ticket.answer(match result {
            Ok(_) => Answer::Acked,
            Err((error, _)) => Answer::Reported(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail)),
        });
    }
}

/// What became of one parcel.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// Nothing known.
    None,
    Acked,
    /// librdkafka's or the broker's code.
    Reported(RDKafkaErrorCode),
    /// Known before it was sent.
    Decided(Outcome),
}

/// The answers of one `send`, filled in from librdkafka's thread. Outlives the `send` while tickets exist.
pub(super) struct Batch {
    answers: Mutex<(Vec<Answer>, usize)>,
    complete: Notify,
}

impl Batch {
    pub(super) fn new(parcels: usize) -> Arc<Self> {
        Arc::new(Self { answers: Mutex::new((vec![Answer::None; parcels], parcels)), complete: Notify::new() })
    }

    fn answer(&self, index: usize, answer: Answer) {
        let mut guard = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (answers, missing) = &mut *guard;
        if let Some(slot @ Answer::None) = answers.get_mut(index) {
            *slot = answer;
            *missing -= 1;
            if *missing == 0 {
                self.complete.notify_one();
            }
        }
    }

    pub(super) fn answer_rest(&self, answer: Answer) {
        let parcels = self.answers.lock().unwrap_or_else(PoisonError::into_inner).0.len();
        (0..parcels).for_each(|index| self.answer(index, answer.clone()));
    }

    /// Until every parcel has its answer, at most until `deadline`.
    pub(super) async fn wait(&self, deadline: Instant) {
        if self.answers.lock().unwrap_or_else(PoisonError::into_inner).1 > 0 {
            // Late is the same as unknown: the slots that are empty then say so.
            timeout_at(deadline, self.complete.notified()).await.unwrap_or_default();
        }
    }

    /// The answers by position; later ones find no slot and are forgotten.
    pub(super) fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut self.answers.lock().unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// Travels with a record through librdkafka and comes back with its report.
pub(super) struct Ticket {
    batch: Arc<Batch>,
    index: usize,
}

impl Ticket {
    pub(super) fn new(batch: &Arc<Batch>, index: usize) -> Box<Self> {
        Box::new(Self { batch: batch.clone(), index })
    }

    pub(super) fn answer(&self, answer: Answer) {
        self.batch.answer(self.index, answer);
    }
}
