//! Against librdkafka's mock cluster: answers by position, blame, outages, order, partitions.

use std::num::NonZeroU32;
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _, OwnedMessage};
use rdkafka::mocking::MockCluster;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::super::tests::{parcel, route};
use super::super::{Route, Severity};
use super::*;
use crate::config::{Format, Secret};
use crate::error::Class;

type Cluster = MockCluster<'static, rdkafka::producer::DefaultProducerContext>;

fn cluster(topics: &[(&str, i32)]) -> Cluster {
    let cluster = MockCluster::new(1).unwrap();
    for (topic, partitions) in topics {
        cluster.create_topic(topic, *partitions, 1).unwrap();
    }
    cluster
}

async fn sink(cluster: &Cluster, timeout: Duration, options: &[(&str, &str)]) -> Kafka {
    connect(&cluster.bootstrap_servers(), timeout, options).await.unwrap()
}

async fn connect(brokers: &str, send_timeout: Duration, options: &[(&str, &str)]) -> Result<Kafka> {
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), Secret::new(*value))).collect();
    let kind = config::Kafka { brokers: brokers.to_owned(), tls: config::Tls::default(), sasl: None, options };
    let config = config::Sink {
        kind: config::SinkKind::Kafka(kind.clone()),
        send_timeout,
        batch: NonZeroU32::new(1000).unwrap(),
        batches_in_flight: NonZeroU32::new(1).unwrap(),
    };
    Kafka::connect("test", &kind, &config).await
}

fn to(topic: &str) -> Route {
    route("billing", topic, Format::CloudEvents)
}

fn read(cluster: &Cluster, topic: &str, partitions: i32, count: usize) -> Vec<OwnedMessage> {
    let consumer: BaseConsumer<_> = ClientConfig::new()
        .set("bootstrap.servers", cluster.bootstrap_servers())
        .set("group.id", "test")
        .create_with_context(rdkafka::consumer::DefaultConsumerContext)
        .unwrap();
    let mut all = TopicPartitionList::new();
    for partition in 0..partitions {
        all.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&all).unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(10);
    let mut read = Vec::new();
    while read.len() < count && std::time::Instant::now() < until {
        if let Some(message) = consumer.poll(Duration::from_millis(100)) {
            read.push(message.unwrap().detach());
        }
    }
    read
}

fn code(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Acked => "ACKED",
        Outcome::Rejected(failure) | Outcome::Refused(failure) | Outcome::Unreachable(failure) => &failure.code,
    }
}

const LONG: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_positional_and_one_bad_parcel_stops_no_other() {
    let cluster = cluster(&[("billing.a", 1)]);
    let sink = sink(&cluster, LONG, &[("message.max.bytes", "1500")]).await;
    let mut parcels: Vec<_> = (1..=5).map(|seq| parcel(seq, Some("billing.a"))).collect();
    Arc::make_mut(&mut parcels[1].event).key = None;
    Arc::make_mut(&mut parcels[2].event).key = Some("no topic".into());
    Arc::make_mut(&mut parcels[3].event).payload.bytes = vec![b'x'; 1500];

    let outcomes = sink.send(&to("{key}"), &parcels).await;

    let codes: Vec<_> = outcomes.iter().map(code).collect();
    assert_eq!(codes, ["ACKED", "NO_TOPIC", "INVALID_TOPIC", "MSG_SIZE_TOO_LARGE", "ACKED"]);
    assert!(outcomes[1..4].iter().all(|outcome| matches!(outcome, Outcome::Rejected(_))));
    let stored = read(&cluster, "billing.a", 1, 2);
    let ids: Vec<_> = stored.iter().map(|m| header(m, "ce_sequence")).collect();
    assert_eq!(ids, ["1", "5"]);
}

fn header(message: &OwnedMessage, name: &str) -> String {
    let headers = message.headers().unwrap();
    let found = headers.iter().find(|header| header.key == name).unwrap();
    String::from_utf8(found.value.unwrap().to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_payload_is_no_tombstone_and_a_missing_key_no_empty_key() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[]).await;
    let mut parcels = vec![parcel(1, None), parcel(2, Some(""))];
    for parcel in &mut parcels {
        Arc::make_mut(&mut parcel.event).payload.bytes.clear();
    }
    let before = time::OffsetDateTime::now_utc().unix_timestamp() * 1000;
    assert_eq!(sink.send(&to("t"), &parcels).await, [Outcome::Acked, Outcome::Acked]);
    let stored = read(&cluster, "t", 1, 2);
    assert_eq!(stored.iter().map(|m| m.payload()).collect::<Vec<_>>(), [Some(&b""[..]); 2]);
    assert_eq!(stored.iter().map(|m| m.key()).collect::<Vec<_>>(), [None, Some(&b""[..])]);
    assert!(stored[0].timestamp().to_millis().unwrap() >= before, "the time of sending, not of the event");
    assert_eq!(header(&stored[0], "content-type"), "application/json");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_goes_where_the_java_client_would_put_it() {
    let cluster = cluster(&[("t", 12)]);
    let sink = sink(&cluster, LONG, &[]).await;
    let parcels: Vec<_> = (1..=5).map(|seq| parcel(seq, Some(&format!("k{seq}")))).collect();
    assert_eq!(sink.send(&to("t"), &parcels).await, vec![Outcome::Acked; 5]);
    let mut found: Vec<_> =
        read(&cluster, "t", 12, 5).iter().map(|m| (m.key().unwrap().to_vec(), m.partition())).collect();
    found.sort();
    assert_eq!(found.iter().map(|(_, partition)| *partition).collect::<Vec<_>>(), [5, 9, 4, 4, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_makes_the_giver_wait_and_keeps_the_order() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[("queue.buffering.max.messages", "3"), ("linger.ms", "0")]).await;
    let parcels: Vec<_> = (1..=200).map(|seq| parcel(seq, Some("k"))).collect();
    assert_eq!(sink.send(&to("t"), &parcels).await, vec![Outcome::Acked; 200]);
    let order: Vec<i64> =
        read(&cluster, "t", 1, 200).iter().map(|m| header(m, "ce_sequence").parse().unwrap()).collect();
    assert_eq!(order, (1..=200).collect::<Vec<i64>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_spends_no_attempt_and_ends_by_itself() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, Duration::from_secs(2), &[]).await;
    let parcels = [parcel(1, Some("k")), parcel(2, Some("l"))];
    assert_eq!(sink.send(&to("t"), &parcels).await, [Outcome::Acked, Outcome::Acked]);
    cluster.broker_down(-1).unwrap();
    let started = Instant::now();
    let outcomes = sink.send(&to("t"), &parcels).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Unreachable(_))), "{outcomes:?}");
    assert!(started.elapsed() < Duration::from_millis(2500), "{:?}", started.elapsed());
    assert_eq!(sink.check(&[to("t")], 1 << 20).await.unwrap_err().class(), Class::Transient);
    cluster.broker_up(-1).unwrap();
    let mut tries = 0;
    while sink.send(&to("t"), &parcels).await != [Outcome::Acked, Outcome::Acked] {
        tries += 1;
        assert!(tries < 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_listening_is_no_configuration_error() {
    let sink = connect("127.0.0.1:1", Duration::from_secs(1), &[]).await.unwrap();
    let outcomes = sink.send(&to("t"), &[parcel(1, None)]).await;
    let Outcome::Unreachable(failure) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(failure.text().contains("127.0.0.1:1"), "{failure}");
    let error = sink.check(&[to("t")], 1 << 20).await.unwrap_err();
    assert_eq!(error.class(), Class::Transient);
    assert!(error.report().contains("127.0.0.1:1"), "{}", error.report());
    sink.close(Duration::from_millis(100)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_topic_is_found_by_check_and_used_once_it_exists() {
    let cluster = cluster(&[("other", 1)]);
    let sink = sink(&cluster, Duration::from_secs(2), &[]).await;
    let findings = sink.check(&[to("late")], 1 << 20).await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].severity, Severity::Missing);
    assert!(findings[0].what.contains("\"billing\"") && findings[0].what.contains("late"), "{findings:?}");
    assert!(findings[0].hint.contains("kafka-topics") && findings[0].hint.contains("--create"));

    let outcomes = sink.send(&to("late"), &[parcel(1, None)]).await;
    assert!(matches!(&outcomes[0], Outcome::Unreachable(_)), "{outcomes:?}");
    let outcomes = sink.send(&to("{header:to}"), &[with_header("absent"), with_header("other")]).await;
    assert!(matches!(&outcomes[0], Outcome::Refused(f) if f.code.starts_with("UNKNOWN_TOPIC")), "{outcomes:?}");
    assert_eq!(outcomes[1], Outcome::Acked);

    cluster.create_topic("late", 1, 1).unwrap();
    let mut tries = 0;
    while sink.send(&to("late"), &[parcel(1, None)]).await != [Outcome::Acked] {
        tries += 1;
        assert!(tries < 50);
        sleep(Duration::from_millis(200)).await;
    }
    let findings = sink.check(&[to("late")], 1 << 20).await.unwrap();
    assert!(matches!(&findings[..], [weak] if weak.severity == Severity::Weak), "{findings:?}");
}

fn with_header(topic: &str) -> Parcel {
    let mut parcel = parcel(1, None);
    Arc::make_mut(&mut parcel.event).headers = vec![("to".into(), topic.into())];
    parcel
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_too_large_together_blames_nobody() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[]).await;
    let parcels: Vec<_> = (1..=3).map(|seq| parcel(seq, Some("k"))).collect();
    assert_eq!(sink.send(&to("t"), &parcels[..1]).await, [Outcome::Acked]);
    cluster.request_errors(RDKafkaApiKey::Produce, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE]);
    assert_eq!(sink.send(&to("t"), &parcels).await, vec![Outcome::Acked; 3]);

    let twice = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE; 2];
    cluster.request_errors(RDKafkaApiKey::Produce, &twice);
    let outcomes = sink.send(&to("t"), &parcels).await;
    assert!(matches!(&outcomes[0], Outcome::Rejected(f) if f.code == "MSG_SIZE_TOO_LARGE"), "{outcomes:?}");
    assert_eq!(outcomes[1..], [Outcome::Acked, Outcome::Acked]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_producer_is_replaced_and_its_records_are_sent_again() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[]).await;
    let parcels = [parcel(1, Some("k"))];
    assert_eq!(sink.send(&to("t"), &parcels).await, [Outcome::Acked]);
    let lost = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER];
    cluster.request_errors(RDKafkaApiKey::Produce, &lost);
    let outcomes = sink.send(&to("t"), &parcels).await;
    assert!(matches!(&outcomes[0], Outcome::Unreachable(_)), "{outcomes:?}");
    assert_eq!(sink.send(&to("t"), &parcels).await, [Outcome::Acked]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_topic_spends_no_attempt_and_is_used_once_allowed() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[("topic.metadata.refresh.interval.ms", "300")]).await;
    let denied = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED];
    cluster.request_errors(RDKafkaApiKey::Produce, &denied);
    let outcomes = sink.send(&to("t"), &[parcel(1, None)]).await;
    assert!(matches!(&outcomes[0], Outcome::Unreachable(f) if f.code == "TOPIC_AUTHORIZATION_FAILED"), "{outcomes:?}");
    let mut tries = 0;
    while sink.send(&to("t"), &[parcel(1, None)]).await != [Outcome::Acked] {
        tries += 1;
        assert!(tries < 50);
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_send_leaves_nothing_dangling() {
    let cluster = cluster(&[("t", 1)]);
    let sink = sink(&cluster, LONG, &[]).await;
    assert_eq!(sink.send(&to("t"), &[parcel(1, None)]).await, [Outcome::Acked]);
    cluster.broker_round_trip_time(1, Duration::from_millis(300)).unwrap();
    let parcels: Vec<_> = (2..=50).map(|seq| parcel(seq, None)).collect();
    let cut = tokio::time::timeout(Duration::from_millis(50), sink.send(&to("t"), &parcels)).await;
    assert!(cut.is_err());
    assert_eq!(sink.send(&to("t"), &[parcel(51, None)]).await, [Outcome::Acked]);
    assert_eq!(read(&cluster, "t", 1, 51).len(), 51);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_option_is_a_configuration_error_that_names_it_and_an_unsafe_one_is_ignored() {
    let error = connect("127.0.0.1:1", LONG, &[("linger.mss", "s3cret")]).await.unwrap_err();
    assert_eq!(error.class(), Class::Config);
    let text = error.report();
    assert!(text.contains("linger.mss") && text.contains("[sinks.test]") && !text.contains("s3cret"), "{text}");

    let sink = connect("127.0.0.1:1", LONG, &[("acks", "0"), ("enable.idempotence", "false")]).await.unwrap();
    let (config, _) = sink.settings.client_config().await.unwrap();
    assert_eq!((config.get("acks"), config.get("enable.idempotence")), (Some("all"), Some("true")));
    assert_eq!(config.get("compression.type"), Some("lz4"));
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_are_kept_below_the_smallest_topics_limit() {
    let sink = connect("127.0.0.1:1", LONG, &[]).await.unwrap();
    assert!(!sink.settings.cap_batches(1_048_588));
    assert!(sink.settings.cap_batches(100_000));
    assert!(!sink.settings.cap_batches(100_000));
    let (config, _) = sink.settings.client_config().await.unwrap();
    assert_eq!(config.get("batch.size"), Some("99488"));
}

// B4.
#[tokio::test]
async fn the_limit_that_is_too_low_is_named_with_the_setting_that_raises_it() {
    let limits = |bytes| check::Limits { max_message_bytes: bytes, min_insync_replicas: None };
    let free = connect("127.0.0.1:1", LONG, &[]).await.unwrap();
    let small =
        |sink: &Kafka, bytes| check::small(&sink.settings, "t", "handler \"h\"", &limits(bytes), 1_114_112, 1 << 20);
    assert!(small(&free, 1_114_112).is_none());
    let finding = small(&free, 1_114_111).unwrap();
    assert!(finding.what.starts_with("handler \"h\": topic t takes 1114111 bytes"), "{finding:?}");
    assert!(finding.hint.contains("--alter --topic t --add-config max.message.bytes=1114112"), "{finding:?}");
    assert!(finding.hint.ends_with("max_payload_bytes = 1048575"), "{finding:?}");
    assert_eq!(small(&free, 5).unwrap().hint.matches("max_payload_bytes").count(), 0, "no limit would help there");
    // Ours is lower than the topic's.
    let bound = connect("127.0.0.1:1", LONG, &[("message.max.bytes", "1000000")]).await.unwrap();
    let finding = small(&bound, 2_000_000).unwrap();
    assert!(finding.hint.starts_with("[sinks.test.options] \"message.max.bytes\" = 1114112"), "{finding:?}");
}

#[test]
fn topic_names_follow_kafkas_rule() {
    for good in ["a", "A.b_c-9", "...", &"x".repeat(249)] {
        assert!(valid_topic(good), "{good}");
    }
    for bad in ["", ".", "..", "a b", "a/b", "é", &"x".repeat(250)] {
        assert!(!valid_topic(bad), "{bad}");
    }
}
