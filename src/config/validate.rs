//! The rules of single values: names, identifiers, destinations, and the librdkafka options that are ours.
//!
//! Pure functions; each returns a sentence that continues the name of its key ("must be ...", "would ...") and
//! states the rule or what would follow.

use std::net::IpAddr;

/// Postgres cuts names at 63 bytes; ours get suffixes such as `_2025_01_31`.
const SCHEMA_BYTES: usize = 40;
const PREFIX_BYTES: usize = 20;
const NAME_BYTES: usize = 64;
const TOPIC_BYTES: usize = 249;

/// `; did you mean "x"?`, or nothing when no name is near.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    // A long key is no typing error of a short one, and the comparison is quadratic.
    if name.len() > 100 {
        return String::new();
    }
    let scored = known.map(|known| (strsim::jaro_winkler(name, known), known));
    match scored.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((score, known)) if score > 0.8 => format!("; did you mean \"{known}\"?"),
        _ => String::new(),
    }
}

/// Whether traffic to `host` stays on this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || address.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

pub(super) fn schema(name: &str) -> Result<(), String> {
    identifier(name, SCHEMA_BYTES)?;
    if name.is_empty() {
        return Err("must not be empty".to_owned());
    }
    if name.starts_with("pg_") || name == "information_schema" {
        return Err("is reserved by Postgres".to_owned());
    }
    Ok(())
}

pub(super) fn table_prefix(prefix: &str) -> Result<(), String> {
    identifier(prefix, PREFIX_BYTES)
}

fn identifier(name: &str, max: usize) -> Result<(), String> {
    let letter = |b: u8| b.is_ascii_lowercase() || b == b'_';
    let well_formed = name.bytes().enumerate().all(|(i, b)| letter(b) || (i > 0 && b.is_ascii_digit()));
    if !well_formed {
        return Err("must be lower-case letters, digits and _, and not start with a digit".to_owned());
    }
    if name.len() > max {
        return Err(format!("must have at most {max} bytes, not {}; Postgres cuts longer names silently", name.len()));
    }
    Ok(())
}

/// What a `Host` header may name besides this machine.
pub(super) fn host_name(name: &str) -> Result<(), String> {
    let letter = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    if name.is_empty() || !name.bytes().all(letter) {
        return Err("must be a host name without scheme, port and wildcards".to_owned());
    }
    Ok(())
}

/// Handlers and sinks: their names end up in metrics labels, headers and subjects.
pub(super) fn name(name: &str) -> Result<(), String> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_.-".contains(&b);
    if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(allowed) {
        return Err(format!("is no name: 1 to {NAME_BYTES} of a-z, 0-9, _ . and -"));
    }
    Ok(())
}

/// As [`name`], upper case too: host names have it.
pub(super) fn bridge_name(text: &str) -> Result<(), String> {
    name(&text.to_ascii_lowercase()).map_err(|_| format!("must be 1 to {NAME_BYTES} of a-z, A-Z, 0-9, _ . and -"))
}

/// A URI reference, so no spaces.
pub(super) fn ce_source(text: &str) -> Result<(), String> {
    if text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control() || !c.is_ascii()) {
        return Err("must be a URI or a path in ASCII without spaces, such as \"/lanebridge/app\"".to_owned());
    }
    Ok(())
}

/// `topic` has every placeholder replaced by text that is fine.
pub(super) fn kafka_topic(topic: &str) -> Result<(), String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if topic.is_empty() || topic.len() > TOPIC_BYTES || !topic.bytes().all(allowed) {
        return Err(format!("is no Kafka topic: 1 to {TOPIC_BYTES} of a-z, A-Z, 0-9, . _ and -"));
    }
    if topic == "." || topic == ".." {
        return Err("is no Kafka topic: . and .. are reserved".to_owned());
    }
    if topic.starts_with("__") {
        return Err("starts with __, which Kafka keeps for its own topics".to_owned());
    }
    Ok(())
}

/// `subject` has every placeholder replaced by text that is fine.
pub(super) fn nats_subject(subject: &str) -> Result<(), String> {
    if subject.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("has a space or control character, which no NATS subject has".to_owned());
    }
    if subject.contains(['*', '>']) {
        return Err("has a wildcard: the server would store it under that very name, and no reader would find it; \
                    hint: {type} or {key}"
            .to_owned());
    }
    if subject.split('.').any(str::is_empty) {
        return Err("has an empty token between its dots".to_owned());
    }
    if subject.starts_with('$') {
        return Err("starts with $, which NATS keeps for its own subjects".to_owned());
    }
    Ok(())
}

pub(super) fn nats_stream(stream: &str) -> Result<(), String> {
    if stream.is_empty() || stream.contains(|c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c)) {
        return Err("is no stream name: no spaces and none of . * > / \\".to_owned());
    }
    Ok(())
}

/// Refuses the librdkafka properties that another key owns or that would break a promise.
pub(super) fn kafka_option(option: &str, value: &str) -> Result<(), String> {
    let broken = |consequence: &str| Err(consequence.to_owned());
    let off = |value: &str| matches!(value, "false" | "f" | "0");
    match option {
        "acks" | "request.required.acks" if !matches!(value, "all" | "-1") => {
            broken("must be \"all\": a broker that fails after any weaker ack loses what it acknowledged")
        }
        "enable.idempotence" if off(value) => {
            broken("must stay true: without it a retry of the client stores records twice and out of order")
        }
        "max.in.flight.requests.per.connection" | "max.in.flight" => match value.parse::<u32>() {
            Ok(1..=5) => Ok(()),
            _ => broken("must be from 1 to 5: with more, a retry of the client may overtake a record of its key"),
        },
        "queuing.strategy" if value != "fifo" => {
            broken("must stay \"fifo\": anything else reorders the records of a key")
        }
        "delivery.report.only.error" if !off(value) => {
            broken("must stay false: the acks are how deliveries complete, so none ever would")
        }
        "enable.ssl.certificate.verification" if off(value) => {
            broken("must stay true: anybody on the way could pose as the broker; hint: tls.ca_file")
        }
        "ssl.endpoint.identification.algorithm" if value == "none" => {
            broken("must stay \"https\": any holder of a certificate could pose as the broker")
        }
        "message.timeout.ms" | "delivery.timeout.ms" => {
            broken("is set from send_timeout: two limits would let an ack arrive after its delivery was given up")
        }
        "transactional.id" => broken("is not supported: the producer never commits, so readers would see nothing"),
        "partitioner" | "partitioner_cb" => broken(
            "is always murmur2, as in the Java client: with another one a key changes its partition and its order",
        ),
        "dr_msg_cb" | "dr_cb" => broken("is not an option: the acks are how deliveries complete"),
        "bootstrap.servers" | "metadata.broker.list" => broken("is the key brokers of the sink"),
        "security.protocol" => broken("follows from tls and sasl of the sink"),
        "ssl.ca.location" => broken("is the key tls.ca_file of the sink"),
        "ssl.certificate.location" => broken("is the key tls.cert_file of the sink"),
        "ssl.key.location" => broken("is the key tls.key_file of the sink"),
        _ if option.starts_with("sasl.") => broken("belongs into the sasl table of the sink"),
        "" => broken("is no property name"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: impl Fn(&str) -> Result<(), String>, good: &[&str], bad: &[&str]) {
        for text in good {
            assert_eq!(rule(text), Ok(()), "{text}");
        }
        for text in bad {
            assert!(rule(text).is_err(), "{text}");
        }
    }

    #[test]
    fn identifiers_need_no_quotes_and_leave_room_for_suffixes() {
        let (fits, long) = ("a".repeat(SCHEMA_BYTES), "a".repeat(SCHEMA_BYTES + 1));
        check(
            schema,
            &["lanebridge", "_a1", "pgx", &fits],
            &["", "1a", "A", "a-b", "é", "pg_x", "information_schema", &long],
        );
        let (fits, long) = ("a".repeat(PREFIX_BYTES), "a".repeat(PREFIX_BYTES + 1));
        check(table_prefix, &["", "lb_", &fits], &["x.", "\"; drop table x; --", &long]);
    }

    #[test]
    fn names_are_short_and_plain() {
        let (fits, long) = ("a".repeat(NAME_BYTES), "a".repeat(NAME_BYTES + 1));
        check(name, &["a", "orders-kafka_1.v2", &fits], &["", "A", "a b", "a\n", "é", &long]);
        check(bridge_name, &["Host-1.example"], &["", "a b", &long]);
        check(ce_source, &["/lanebridge/app", "https://x.example/y"], &["", "a b", "a\n"]);
    }

    #[test]
    fn destinations_follow_the_rules_of_their_broker() {
        let (fits, long) = ("a".repeat(TOPIC_BYTES), "a".repeat(TOPIC_BYTES + 1));
        check(kafka_topic, &["a", "A.b_c-9", "_x", &fits], &["", ".", "..", "a b", "a/b", "__x", &long]);
        check(
            nats_subject,
            &["a", "orders.x", "a.$b"],
            &["", "a..b", ".a", "a.", "a b", "s.*", "s.>", "$JS.x", "a\r\n"],
        );
        check(nats_stream, &["ORDERS", "a-b"], &["", "a.b", "a b", "a*"]);
    }

    #[test]
    fn options_that_break_a_promise_are_refused() {
        for (option, good, bad) in [
            ("acks", "all", "1"),
            ("request.required.acks", "-1", "0"),
            ("enable.idempotence", "true", "false"),
            ("max.in.flight", "5", "6"),
            ("max.in.flight.requests.per.connection", "1", "0"),
            ("queuing.strategy", "fifo", "lifo"),
            ("delivery.report.only.error", "false", "true"),
            ("enable.ssl.certificate.verification", "true", "false"),
            ("ssl.endpoint.identification.algorithm", "https", "none"),
        ] {
            assert_eq!(kafka_option(option, good), Ok(()), "{option}");
            assert!(kafka_option(option, bad).is_err(), "{option}");
        }
        for option in [
            "message.timeout.ms",
            "delivery.timeout.ms",
            "transactional.id",
            "partitioner",
            "dr_msg_cb",
            "bootstrap.servers",
            "metadata.broker.list",
            "sasl.password",
            "sasl.mechanisms",
            "security.protocol",
            "ssl.ca.location",
            "",
        ] {
            assert!(kafka_option(option, "x").is_err(), "{option}");
        }
        assert_eq!(kafka_option("compression.type", "lz4"), Ok(()));
    }

    #[test]
    fn only_a_near_name_is_suggested() {
        assert_eq!(nearest("sslmod", ["sslmode", "host"].into_iter()), "; did you mean \"sslmode\"?");
        assert_eq!(nearest("zzz", ["sslmode", "host"].into_iter()), "");
        assert_eq!(nearest(&"s".repeat(101), ["s"].into_iter()), "");
    }

    #[test]
    fn loopback_is_this_machine_only() {
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "127.255.255.255", "::1", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "128.0.0.1", "0.0.0.0", "::", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
