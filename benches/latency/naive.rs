//! The poller that a team would write itself, in the way most write it: lock a page of rows past those that others hold,
//! send them, wait for every acknowledgement, delete, commit; rest when there was nothing. On a thread of its own, so that
//! its CPU can be told from the bench's.

use std::time::Duration;

use futures_util::future::join_all;
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_postgres::NoTls;
use tokio_util::sync::CancellationToken;

use crate::Broker;
use crate::consumers::{kafka, nats, redis_connection};

pub const TABLE: &str = "create table outbox (id bigint generated always as identity primary key, key text not null, payload text not null)";
pub const PUBLISH: &str = "insert into outbox (key, payload) values ($2, $1)";
const PAGE: &str = "select id, key, payload from outbox order by id limit 500 for update skip locked";
const DONE: &str = "delete from outbox where id = any ($1)";
const REST: Duration = Duration::from_millis(100);

/// Runs until `stop`; returns the seconds of CPU that its thread took.
pub fn start(url: String, broker: Broker, name: String, stop: CancellationToken) -> std::thread::JoinHandle<f64> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(poll(&url, broker, &name, stop));
        crate::run::cpu_seconds("/proc/thread-self/stat").0
    })
}

async fn poll(url: &str, broker: Broker, name: &str, stop: CancellationToken) {
    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let (page, done) = (client.prepare(PAGE).await.unwrap(), client.prepare(DONE).await.unwrap());
    // As the bridge has them.
    let producer: FutureProducer = kafka()
        .set("enable.idempotence", "true")
        .set("compression.type", "lz4")
        .set("linger.ms", "0")
        .create()
        .unwrap();
    let jetstream = nats().await;
    let mut redis = redis_connection().await;
    while !stop.is_cancelled() {
        let transaction = client.transaction().await.unwrap();
        let rows = transaction.query(&page, &[]).await.unwrap();
        if rows.is_empty() {
            transaction.commit().await.unwrap();
            tokio::time::sleep(REST).await;
            continue;
        }
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let events: Vec<(&str, &str)> = rows.iter().map(|row| (row.get(1), row.get(2))).collect();
        match broker {
            Broker::Kafka => {
                let sends = events.iter().map(|(key, payload)| {
                    producer.send(FutureRecord::to(name).key(*key).payload(*payload), Duration::from_secs(10))
                });
                for sent in join_all(sends).await {
                    sent.unwrap();
                }
            }
            Broker::Nats => {
                let mut acks = Vec::with_capacity(events.len());
                for (_, payload) in &events {
                    acks.push(jetstream.publish(name.to_owned(), (*payload).to_owned().into()).await.unwrap());
                }
                for ack in acks {
                    ack.await.unwrap();
                }
            }
            Broker::Redis => {
                let mut pipe = redis::pipe();
                for (key, payload) in &events {
                    pipe.cmd("XADD").arg(name).arg("*").arg("key").arg(key).arg("data").arg(payload).ignore();
                }
                pipe.query_async::<()>(&mut redis).await.unwrap();
            }
        }
        transaction.execute(&done, &[&ids]).await.unwrap();
        transaction.commit().await.unwrap();
    }
}
