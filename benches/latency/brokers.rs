//! A topic, stream or key per run, and a consumer with the client that a user would take, at its default settings.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use futures_util::StreamExt;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};
use tokio_util::sync::CancellationToken;

use crate::Broker;
use crate::ledger::Ledger;
use crate::servers::address;

pub const PARTITIONS: i32 = 3;
/// How long a consumer waits for the next event before it looks whether it shall stop.
const WAIT: Duration = Duration::from_millis(100);

pub fn kafka() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", address("LB_KAFKA_BROKERS"));
    config
}

pub async fn jetstream() -> jetstream::Context {
    jetstream::new(async_nats::connect(address("LB_NATS_URL")).await.unwrap())
}

pub async fn redis_connection() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(address("LB_REDIS_URL")).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

fn kafka_admin() -> AdminClient<DefaultClientContext> {
    kafka().create().unwrap()
}

impl Broker {
    /// Makes the topic or stream `name`; Redis makes its keys itself.
    pub async fn make(self, name: &str) {
        match self {
            Self::Kafka => {
                let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
                let made = kafka_admin().create_topics([&topic], &AdminOptions::new()).await.unwrap();
                made.into_iter().for_each(|topic| assert_eq!(topic.unwrap(), name));
            }
            Self::Nats => {
                let (name, subjects) = (name.to_owned(), vec![name.to_owned()]);
                let config = jetstream::stream::Config { name, subjects, ..Default::default() };
                jetstream().await.create_stream(config).await.unwrap();
            }
            Self::Redis => {}
        }
    }

    pub async fn remove(self, name: &str) {
        match self {
            Self::Kafka => {
                let removed = kafka_admin().delete_topics(&[name], &AdminOptions::new()).await.unwrap();
                removed.into_iter().for_each(|topic| assert_eq!(topic.unwrap(), name));
            }
            Self::Nats => assert!(jetstream().await.delete_stream(name).await.unwrap().success),
            Self::Redis => {
                redis::cmd("DEL").arg(name).query_async::<()>(&mut redis_connection().await).await.unwrap();
            }
        }
    }

    /// Sink and handler of a configuration that sends everything to `name`.
    pub fn toml(self, name: &str) -> String {
        let (url, destination) = match self {
            Self::Kafka => (format!("brokers = \"{}\"", address("LB_KAFKA_BROKERS")), "topic"),
            Self::Nats => (format!("url = \"{}\"", address("LB_NATS_URL")), "subject"),
            Self::Redis => (format!("url = \"{}\"", address("LB_REDIS_URL")), "stream"),
        };
        format!(
            "[sinks.s]\ntype = \"{}\"\n{url}\n[handlers.h]\nevents = [\"order.*\"]\nsink = \"s\"\n{destination} = \"{name}\"\n",
            self.name()
        )
    }

    /// Writes what arrives at `name` into the ledger until `stop`.
    pub async fn consume(self, name: String, ledger: Arc<Ledger>, stop: CancellationToken) {
        match self {
            Self::Kafka => tokio::task::spawn_blocking(move || consume_kafka(&name, &ledger, &stop)).await.unwrap(),
            Self::Nats => consume_nats(&name, &ledger, &stop).await,
            Self::Redis => consume_redis(&name, &ledger, &stop).await,
        }
    }

    pub async fn version(self) -> String {
        match self {
            // The protocol has no way to ask for it; the services are in folders that are named after it.
            Self::Kafka => {
                let folder = std::path::Path::new(&address("LB_SERVICES_DIR")).join("dist");
                let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
                let mut names = names.filter_map(|name| name.into_string().ok());
                names.find(|name| name.starts_with("kafka-")).unwrap_or_else(|| "kafka-unknown".to_owned())
            }
            Self::Nats => {
                let client = async_nats::connect(address("LB_NATS_URL")).await.unwrap();
                format!("nats-{}", client.server_info().version)
            }
            Self::Redis => {
                let mut info = redis::cmd("INFO");
                let info: redis::InfoDict =
                    info.arg("server").query_async(&mut redis_connection().await).await.unwrap();
                format!("redis-{}", info.get::<String>("redis_version").unwrap())
            }
        }
    }
}

fn consume_kafka(topic: &str, ledger: &Ledger, stop: &CancellationToken) {
    let consumer: BaseConsumer = kafka().set("group.id", topic).set("enable.auto.commit", "false").create().unwrap();
    let mut from = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        from.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&from).unwrap();
    while !stop.is_cancelled() {
        if let Some(message) = consumer.poll(WAIT) {
            ledger.arrive(message.unwrap().payload().unwrap_or_default());
        }
    }
}

async fn consume_nats(stream: &str, ledger: &Ledger, stop: &CancellationToken) {
    let stream = jetstream().await.get_stream(stream).await.unwrap();
    let consumer = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    let mut messages = consumer.messages().await.unwrap();
    while let Some(Some(message)) = stop.run_until_cancelled(messages.next()).await {
        ledger.arrive(&message.unwrap().payload);
    }
}

async fn consume_redis(stream: &str, ledger: &Ledger, stop: &CancellationToken) {
    let mut redis = redis_connection().await;
    let mut after = "0-0".to_owned();
    while !stop.is_cancelled() {
        let mut read = redis::cmd("XREAD");
        read.arg("COUNT").arg(1000).arg("BLOCK").arg(WAIT.as_millis() as u64).arg("STREAMS").arg(stream).arg(&after);
        let reply: Option<redis::streams::StreamReadReply> = read.query_async(&mut redis).await.unwrap();
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            ledger.arrive(&entry.get::<Vec<u8>>("data").unwrap());
            after = entry.id;
        }
    }
}
