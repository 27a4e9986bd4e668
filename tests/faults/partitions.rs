//! H72: events lie in the partitions that the Java client would choose, so that consumers can join topics.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use crate::bridge::kafka_brokers;
use crate::consumers::Destination;
use crate::services::unique;
use crate::stage::Stage;

/// Key and partition of 12, computed by the Java client.
fn vectors() -> HashMap<Vec<u8>, i32> {
    let bytes =
        |hex: &str| (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    include_str!("../fixtures/murmur2.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut columns = line.split('\t');
            (bytes(columns.next().unwrap()), columns.next().unwrap().parse().unwrap())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_partitions_are_those_of_the_java_client() {
    let vectors = vectors();
    let stage = Stage::new([Destination::kafka(12).await]).await;
    let Stage { client, destinations, setup, .. } = &stage;
    for key in vectors.keys() {
        let key = String::from_utf8(key.clone()).unwrap();
        client.execute("select lanebridge.publish('order.x', 'p', $1)", &[&key]).await.unwrap();
    }
    setup.run(&["run", "--once"]);
    let Destination::Kafka { topic, .. } = destinations[0].clone() else { unreachable!() };
    let expected = vectors.clone();
    let found = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", kafka_brokers())
            .set("group.id", unique("g"))
            .create()
            .unwrap();
        let mut all = TopicPartitionList::new();
        for partition in 0..12 {
            all.add_partition_offset(&topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&all).unwrap();
        let mut found = HashMap::new();
        while found.len() < expected.len() {
            let message = consumer.poll(Duration::from_secs(10)).expect("a message for every key").unwrap();
            found.insert(message.key().unwrap().to_vec(), message.partition());
        }
        found
    });
    assert_eq!(found.await.unwrap(), vectors);
    stage.end().await;
}
