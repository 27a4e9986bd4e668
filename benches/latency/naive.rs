//! The peer: the poller that a team would write itself, as most write it. Lock a page of rows past those that others
//! hold, send them, wait for every acknowledgement, delete, commit; rest when there was nothing.
//!
//! Its clients have the settings of the bridge's. It keeps no order within a key, no attempts, no dead letters.

use std::time::Duration;

use clap::ValueEnum;
use futures_util::future::join_all;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::Broker;
use crate::brokers::{jetstream, kafka, redis_connection};
use crate::servers::connect;

/// The first argument that makes this program the poller; database, broker, destination and rest in ms follow.
pub const COMMAND: &str = "naive-poller";

pub const TABLE: &str = "create table outbox (
    id bigint generated always as identity primary key, key text not null, payload text not null)";
pub const PUBLISH: &str = "insert into outbox (payload, key) values ($1, $2)";

const PAGE: &str = "select id, key, payload from outbox order by id limit 500 for update skip locked";
const DELETE: &str = "delete from outbox where id = any ($1)";

enum Sender {
    Kafka(FutureProducer),
    Nats(async_nats::jetstream::Context),
    Redis(redis::aio::MultiplexedConnection),
}

/// Until it is killed.
pub async fn run(mut arguments: impl Iterator<Item = String>) {
    let mut argument = || arguments.next().unwrap();
    let (url, broker, destination) = (argument(), argument(), argument());
    let rest = Duration::from_millis(argument().parse().unwrap());
    let mut sender = Sender::connect(Broker::from_str(&broker, false).unwrap()).await;
    let mut client = connect(&url).await;
    let (page, delete) = (client.prepare(PAGE).await.unwrap(), client.prepare(DELETE).await.unwrap());
    loop {
        let transaction = client.transaction().await.unwrap();
        let rows = transaction.query(&page, &[]).await.unwrap();
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let events: Vec<(&str, &str)> = rows.iter().map(|row| (row.get(1), row.get(2))).collect();
        if !events.is_empty() {
            sender.send(&destination, &events).await;
            transaction.execute(&delete, &[&ids]).await.unwrap();
        }
        transaction.commit().await.unwrap();
        if ids.is_empty() {
            tokio::time::sleep(rest).await;
        }
    }
}

impl Sender {
    async fn connect(broker: Broker) -> Self {
        match broker {
            Broker::Kafka => {
                let mut config = kafka();
                config.set("enable.idempotence", "true").set("linger.ms", "5").set("compression.type", "lz4");
                Self::Kafka(config.set("partitioner", "murmur2_random").create().unwrap())
            }
            Broker::Nats => Self::Nats(jetstream().await),
            Broker::Redis => Self::Redis(redis_connection().await),
        }
    }

    /// Returns when every event is acknowledged.
    async fn send(&mut self, destination: &str, events: &[(&str, &str)]) {
        match self {
            Self::Kafka(producer) => {
                let records =
                    events.iter().map(|(key, payload)| FutureRecord::to(destination).key(*key).payload(*payload));
                for sent in join_all(records.map(|record| producer.send(record, Duration::from_secs(10)))).await {
                    sent.unwrap();
                }
            }
            Self::Nats(jetstream) => {
                let mut acks = Vec::with_capacity(events.len());
                for (_, payload) in events {
                    acks.push(jetstream.publish(destination.to_owned(), (*payload).to_owned().into()).await.unwrap());
                }
                for ack in acks {
                    ack.await.unwrap();
                }
            }
            Self::Redis(redis) => {
                let mut pipe = redis::pipe();
                for (key, payload) in events {
                    pipe.cmd("XADD").arg(destination).arg("*").arg("key").arg(key).arg("data").arg(payload).ignore();
                }
                pipe.query_async::<()>(redis).await.unwrap();
            }
        }
    }
}
