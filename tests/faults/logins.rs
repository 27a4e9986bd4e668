//! TLS and every way to log in, as the configuration has them, through a whole bridge.

use std::process::Command;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::deliveries_left;
use crate::services::{Database, address, shared};

/// One handler per way in; returns the configuration.
fn ways_in(topic: &str, subject: &str, stream: &str) -> String {
    let ca = address("LB_TLS_CA");
    let (sasl, ssl) = (address("LB_KAFKA_SASL_BROKERS"), address("LB_KAFKA_SSL_BROKERS"));
    let (nats, nats_tls, nkey) = (address("LB_NATS_URL"), address("LB_NATS_TLS_URL"), address("LB_NATS_NKEY_SEED"));
    let (redis, redis_tls) = (address("LB_REDIS_URL"), address("LB_REDIS_TLS_URL"));
    let login = "username = \"lb\"\npassword = \"lb-secret\"";
    let kafka = |more: &str| format!("type = \"kafka\"\n{more}");
    let ways = [
        (
            "kafka-plain",
            kafka(&format!(
                "brokers = \"{sasl}\"\nsasl = {{ mechanism = \"PLAIN\", username = \"lb\", password = \"lb-secret\" }}"
            )),
            "topic",
            topic,
        ),
        (
            "kafka-scram",
            kafka(&format!(
                "brokers = \"{sasl}\"\nsasl = {{ mechanism = \"SCRAM-SHA-256\", username = \"lb\", password = \"lb-secret\" }}"
            )),
            "topic",
            topic,
        ),
        ("kafka-tls", kafka(&format!("brokers = \"{ssl}\"\ntls = {{ ca_file = \"{ca}\" }}")), "topic", topic),
        ("nats-user", format!("type = \"nats\"\nurl = \"{nats}\"\n{login}"), "subject", subject),
        ("nats-nkey", format!("type = \"nats\"\nurl = \"{nats}\"\nnkey_file = \"{nkey}\""), "subject", subject),
        (
            "nats-tls",
            format!("type = \"nats\"\nurl = \"{nats_tls}\"\ntls = {{ ca_file = \"{ca}\" }}"),
            "subject",
            subject,
        ),
        ("redis-acl", format!("type = \"redis\"\nurl = \"{redis}\"\n{login}"), "stream", stream),
        (
            "redis-tls",
            format!("type = \"redis\"\nurl = \"{redis_tls}\"\ntls = {{ ca_file = \"{ca}\" }}\n{login}"),
            "stream",
            stream,
        ),
    ];
    let section = |(name, sink, place, at): &(&str, String, &str, &str)| {
        format!(
            "[sinks.{name}]\n{sink}\n[handlers.{name}]\nevents = [\"order.*\"]\nsink = \"{name}\"\n{place} = \"{at}\"\n"
        )
    };
    ways.iter().map(section).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_in_delivers() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let all = [Destination::kafka(1).await, Destination::nats().await, Destination::redis()];
    let [Destination::Kafka { topic, .. }, Destination::Nats { subject, .. }, Destination::Redis { stream, .. }] = &all
    else {
        unreachable!("as made above")
    };
    let extra = ways_in(topic, &format!("{subject}.{{type}}"), stream);
    let setup = Setup::new(&database.url(), &[], &extra);
    setup.run(&["migrate"]);
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e')").await.unwrap();
    assert_eq!(deliveries_left(&client).await, 8);
    setup.run(&["run", "--once"]);
    assert_eq!(deliveries_left(&client).await, 0);
    // One of each handler: the dedup id holds the handler, so no broker took two for one (I7, H74).
    let mut counts = Vec::new();
    for destination in &all {
        counts.push(destination.read().await.len());
        destination.remove().await;
    }
    assert_eq!(counts, [3, 3, 2]);
    database.drop().await;
}

/// 5.3, R12: a wrong password is no attempt, ends in one line, and is in none of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_said_without_it() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let extra = ways_in("t", "s", "r").replace("lb-secret", "canary-secret");
    let setup = Setup::new(&database.url(), &[], &extra);
    setup.run(&["migrate"]);
    client.batch_execute("select lanebridge.publish('order.x', 'p')").await.unwrap();
    let doctor = Command::new(env!("CARGO_BIN_EXE_lanebridge")).arg("-c").arg(setup.config()).args(["doctor"]).output();
    let doctor = doctor.unwrap();
    assert_eq!(doctor.status.code(), Some(1));
    let bridge = setup.start();
    let trouble = ["kafka-plain", "kafka-scram", "nats-user", "redis-acl", "redis-tls"];
    crate::services::eventually("each is said", std::time::Duration::from_secs(60), || {
        let log = setup.log();
        std::future::ready(trouble.iter().all(|name| log.contains(name)))
    })
    .await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let spent = "select count(*) from lanebridge.failures";
    assert_eq!(client.query_one(spent, &[]).await.unwrap().get::<_, i64>(0), 0, "{}", setup.log());
    for text in
        [setup.log(), String::from_utf8_lossy(&doctor.stdout).into(), String::from_utf8_lossy(&doctor.stderr).into()]
    {
        assert!(!text.contains("canary"), "{text}");
    }
    database.drop().await;
}
