//! One consumer per broker, each with the client a user would take; notes when which event came.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use futures_util::StreamExt;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use crate::Broker;
use crate::run::address;

const PARTITIONS: i32 = 3;

/// When each event came, in nanoseconds since `start`; 0: not yet.
pub struct Arrivals {
    pub start: Instant,
    at: Vec<AtomicU64>,
    came: AtomicU64,
    pub stop: AtomicBool,
}

impl Arrivals {
    pub fn new(events: usize) -> Self {
        let at = (0..events).map(|_| AtomicU64::new(0)).collect();
        Self { start: Instant::now(), at, came: AtomicU64::new(0), stop: AtomicBool::new(false) }
    }

    pub fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap().max(1)
    }

    fn note(&self, payload: &[u8]) {
        let now = self.now();
        let text = std::str::from_utf8(payload).expect("a payload of this bench");
        let digits = text.strip_prefix("{\"n\": ").or_else(|| text.strip_prefix("{\"n\":")).expect("its number first");
        let end = digits.find(|c: char| !c.is_ascii_digit()).expect("something behind it");
        let n: usize = digits[..end].parse().unwrap();
        if self.at[n].swap(now, Ordering::Relaxed) == 0 {
            self.came.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn of(&self, n: usize) -> u64 {
        self.at[n].load(Ordering::Relaxed)
    }

    pub fn all_came(&self) -> bool {
        self.came.load(Ordering::Relaxed) == self.at.len() as u64
    }

    pub fn missing(&self) -> usize {
        self.at.len() - usize::try_from(self.came.load(Ordering::Relaxed)).unwrap()
    }
}

/// Makes the topic, stream or key `name`; what is published there afterwards is seen by [`consume`].
pub async fn make(broker: Broker, name: &str) {
    match broker {
        Broker::Kafka => {
            let admin: AdminClient<DefaultClientContext> = kafka().create().unwrap();
            let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
            admin.create_topics([&topic], &AdminOptions::new()).await.unwrap().remove(0).unwrap();
        }
        Broker::Nats => {
            let config = jetstream::stream::Config {
                name: name.to_owned(),
                subjects: vec![name.to_owned()],
                ..Default::default()
            };
            nats().await.create_stream(config).await.unwrap();
        }
        Broker::Redis => {}
    }
}

pub async fn remove(broker: Broker, name: &str) {
    match broker {
        Broker::Kafka => {
            let admin: AdminClient<DefaultClientContext> = kafka().create().unwrap();
            admin.delete_topics(&[name], &AdminOptions::new()).await.unwrap();
        }
        Broker::Nats => {
            nats().await.delete_stream(name).await.unwrap();
        }
        Broker::Redis => {
            redis::cmd("DEL").arg(name).query_async::<()>(&mut redis_connection().await).await.unwrap();
        }
    }
}

/// Notes arrivals until `arrivals.stop`.
pub async fn consume(broker: Broker, name: String, arrivals: Arc<Arrivals>) {
    match broker {
        Broker::Kafka => tokio::task::spawn_blocking(move || consume_kafka(&name, &arrivals)).await.unwrap(),
        Broker::Nats => consume_nats(&name, &arrivals).await,
        Broker::Redis => consume_redis(&name, &arrivals).await,
    }
}

pub fn kafka() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", address("LB_KAFKA_BROKERS"));
    config
}

pub async fn nats() -> jetstream::Context {
    jetstream::new(async_nats::connect(address("LB_NATS_URL")).await.unwrap())
}

pub async fn redis_connection() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(address("LB_REDIS_URL")).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

fn consume_kafka(topic: &str, arrivals: &Arrivals) {
    let consumer: BaseConsumer = kafka()
        .set("group.id", topic)
        .set("fetch.wait.max.ms", "10")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    let mut at = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        at.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&at).unwrap();
    while !arrivals.stop.load(Ordering::Relaxed) {
        if let Some(message) = consumer.poll(Duration::from_millis(100)) {
            arrivals.note(message.unwrap().payload().unwrap_or_default());
        }
    }
}

async fn consume_nats(stream: &str, arrivals: &Arrivals) {
    let stream = nats().await.get_stream(stream).await.unwrap();
    let consumer = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    let mut messages = consumer.messages().await.unwrap();
    while !arrivals.stop.load(Ordering::Relaxed) {
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(100), messages.next()).await {
            arrivals.note(&message.expect("the stream goes on").unwrap().payload);
        }
    }
}

async fn consume_redis(stream: &str, arrivals: &Arrivals) {
    let mut redis = redis_connection().await;
    let mut after = "0-0".to_owned();
    while !arrivals.stop.load(Ordering::Relaxed) {
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(1000).arg("BLOCK").arg(100).arg("STREAMS").arg(stream).arg(&after);
        let read: Option<redis::streams::StreamReadReply> = command.query_async(&mut redis).await.unwrap();
        for entry in read.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            let Some(redis::Value::BulkString(payload)) = entry.map.get("data") else { panic!("no data: {entry:?}") };
            arrivals.note(payload);
            after = entry.id;
        }
    }
}
