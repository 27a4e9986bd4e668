//! What each broker holds, read from its beginning by clients that know nothing of Lanebridge.

use std::collections::HashMap;
use std::time::Duration;

use async_nats::jetstream;
use futures_util::StreamExt;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::{Offset, TopicPartitionList};

use crate::bridge::kafka_brokers;
use crate::services::{address, unique};

/// One event as a consumer got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub id: String,
    pub key: Option<String>,
    pub seq: i64,
    pub payload: Vec<u8>,
    /// What the broker takes for one delivery, where it takes any notice.
    pub dedup_id: Option<String>,
    /// Topic and partition, subject, or stream.
    pub place: String,
}

/// A place at a broker of its own, and the handler that fills it.
#[derive(Clone, Debug)]
pub enum Destination {
    Kafka { topic: String, partitions: i32 },
    Nats { subject: String, server: String },
    Redis { stream: String, server: String },
}

impl Destination {
    pub async fn kafka(partitions: i32) -> Self {
        let topic = unique("t");
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", kafka_brokers()).create().unwrap();
        let new = NewTopic::new(&topic, partitions, TopicReplication::Fixed(1));
        for made in admin.create_topics([&new], &AdminOptions::new()).await.unwrap() {
            made.unwrap();
        }
        Self::Kafka { topic, partitions }
    }

    pub async fn nats() -> Self {
        Self::nats_at(address("LB_NATS_URL")).await
    }

    /// On the server with this URL.
    pub async fn nats_at(server: String) -> Self {
        let subject = unique("s");
        let js = jetstream_at(&server).await;
        let config = jetstream::stream::Config {
            name: subject.clone(),
            subjects: vec![format!("{subject}.>")],
            ..Default::default()
        };
        js.create_stream(config).await.unwrap();
        Self::Nats { subject, server }
    }

    pub fn redis() -> Self {
        Self::redis_at(address("LB_REDIS_URL"))
    }

    /// On the server with this URL.
    pub fn redis_at(server: String) -> Self {
        Self::Redis { stream: unique("r"), server }
    }

    pub async fn all() -> Vec<Self> {
        vec![Self::kafka(3).await, Self::nats().await, Self::redis()]
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Kafka { .. } => "kafka",
            Self::Nats { .. } => "nats",
            Self::Redis { .. } => "redis",
        }
    }

    /// Sink and handler for the configuration.
    pub fn toml(&self, batch: usize, batches: usize) -> String {
        let name = self.name();
        let (sink, handler) = match self {
            Self::Kafka { topic, .. } => (format!("brokers = \"{}\"", kafka_brokers()), format!("topic = \"{topic}\"")),
            Self::Nats { subject, server } => {
                (format!("url = \"{server}\""), format!("subject = \"{subject}.{{type}}\""))
            }
            Self::Redis { stream, server } => (format!("url = \"{server}\""), format!("stream = \"{stream}\"")),
        };
        format!(
            "[sinks.{name}]\ntype = \"{name}\"\n{sink}\nbatch = {batch}\nbatches_in_flight = {batches}\nsend_timeout = \"10s\"\n\
             [handlers.to-{name}]\nevents = [\"order.*\"]\nsink = \"{name}\"\n{handler}\n\
             retry = {{ max_attempts = 20, initial = \"100ms\", max = \"1s\" }}\n"
        )
    }

    /// Everything it holds; for Kafka in the order of each partition, partitions one after the other.
    pub async fn read(&self) -> Vec<Received> {
        match self {
            Self::Kafka { topic, partitions } => {
                let (topic, partitions) = (topic.clone(), *partitions);
                tokio::task::spawn_blocking(move || read_kafka(&topic, partitions)).await.unwrap()
            }
            Self::Nats { subject, server } => read_nats(&jetstream_at(server).await, subject).await,
            Self::Redis { stream, server } => read_redis(&mut redis_at(server).await, stream).await,
        }
    }

    pub async fn remove(&self) {
        match self {
            Self::Kafka { topic, .. } => {
                let admin: AdminClient<DefaultClientContext> =
                    ClientConfig::new().set("bootstrap.servers", kafka_brokers()).create().unwrap();
                admin.delete_topics(&[topic], &AdminOptions::new()).await.unwrap();
            }
            Self::Nats { subject, server } => {
                jetstream_at(server).await.delete_stream(subject).await.unwrap();
            }
            Self::Redis { stream, server } => {
                let mut redis = redis_at(server).await;
                redis::cmd("DEL").arg(stream).query_async::<()>(&mut redis).await.unwrap();
            }
        }
    }
}

pub async fn jetstream_at(server: &str) -> jetstream::Context {
    jetstream::new(async_nats::connect(server).await.unwrap())
}

pub async fn redis_at(server: &str) -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(server).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

fn read_kafka(topic: &str, partitions: i32) -> Vec<Received> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", kafka_brokers())
        .set("group.id", unique("g"))
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    let mut all = Vec::new();
    for partition in 0..partitions {
        let (low, high) = consumer.fetch_watermarks(topic, partition, Duration::from_secs(10)).unwrap();
        let mut at = TopicPartitionList::new();
        at.add_partition_offset(topic, partition, Offset::Offset(low)).unwrap();
        consumer.assign(&at).unwrap();
        let mut next = low;
        while next < high {
            let message = consumer
                .poll(Duration::from_secs(10))
                .unwrap_or_else(|| panic!("{topic}/{partition} ends at {next}, its watermark is {high}"))
                .unwrap();
            next = message.offset() + 1;
            let headers: HashMap<String, String> = message
                .headers()
                .into_iter()
                .flat_map(|headers| headers.iter())
                .map(|h| (h.key.to_owned(), String::from_utf8_lossy(h.value.unwrap_or_default()).into_owned()))
                .collect();
            all.push(Received {
                id: headers["ce_id"].clone(),
                key: message.key().map(|key| String::from_utf8_lossy(key).into_owned()),
                seq: headers["ce_sequence"].parse().unwrap(),
                payload: message.payload().unwrap_or_default().to_vec(),
                dedup_id: None,
                place: format!("{topic}/{partition}"),
            });
        }
    }
    all
}

async fn read_nats(js: &jetstream::Context, subject: &str) -> Vec<Received> {
    let mut stream = js.get_stream(subject).await.unwrap();
    let count = stream.info().await.unwrap().state.messages;
    if count == 0 {
        return Vec::new();
    }
    let consumer = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    let mut messages = consumer.messages().await.unwrap().take(usize::try_from(count).unwrap());
    let mut all = Vec::new();
    while let Some(message) = messages.next().await {
        let message = message.unwrap();
        let header = |name: &str| message.headers.as_ref().and_then(|h| h.get(name)).map(|v| v.as_str().to_owned());
        all.push(Received {
            id: header("ce-id").unwrap(),
            key: header("ce-partitionkey"),
            seq: header("ce-sequence").unwrap().parse().unwrap(),
            payload: message.payload.to_vec(),
            dedup_id: header("Nats-Msg-Id"),
            place: message.subject.to_string(),
        });
    }
    all
}

async fn read_redis(redis: &mut redis::aio::MultiplexedConnection, stream: &str) -> Vec<Received> {
    let mut all = Vec::new();
    let mut after = "-".to_owned();
    loop {
        type Entry = (String, HashMap<String, Vec<u8>>);
        let page: Vec<Entry> = redis::cmd("XRANGE")
            .arg(stream)
            .arg(&after)
            .arg("+")
            .arg("COUNT")
            .arg(5000)
            .query_async(redis)
            .await
            .unwrap();
        let Some((last, _)) = page.last() else { return all };
        after = format!("({last}");
        for (_, fields) in &page {
            let text = |name: &str| fields.get(name).map(|v| String::from_utf8_lossy(v).into_owned());
            all.push(Received {
                id: text("ce_id").unwrap(),
                key: text("ce_partitionkey"),
                seq: text("ce_sequence").unwrap().parse().unwrap(),
                payload: fields["data"].clone(),
                dedup_id: None,
                place: stream.to_owned(),
            });
        }
    }
}
