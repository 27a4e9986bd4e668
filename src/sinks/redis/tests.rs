//! Against a real Redis: what arrives, where a key stops, and what a lost connection leaves behind.

use std::num::NonZeroU32;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::cmd;

use super::*;
use crate::config::{Format, Secret, SecretSource, SinkKind, Tls};
use crate::sinks::Severity;
use crate::sinks::tests::{parcel, route};

fn service(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set; run scripts/services up and load target/services/env"))
}

fn config(url: String) -> config::Redis {
    config::Redis {
        url: Secret::new(url),
        tls: Tls::default(),
        username: Some("lb".into()),
        password: Some(SecretSource::Inline(Secret::new("lb-secret"))),
        max_len: None,
    }
}

async fn sink_with(config: config::Redis, send_timeout: Duration) -> Redis {
    let common = config::Sink {
        kind: SinkKind::Redis(config.clone()),
        send_timeout,
        batch: NonZeroU32::new(500).unwrap(),
        batches_in_flight: NonZeroU32::new(2).unwrap(),
    };
    Redis::connect("streams", &config, &common).await.unwrap()
}

async fn sink() -> Redis {
    sink_with(config(service("LB_REDIS_URL")), Duration::from_secs(10)).await
}

/// The service's default user, who may do what the bridge's may not.
async fn admin() -> MultiplexedConnection {
    let client = redis::Client::open(service("LB_REDIS_URL")).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

async fn connection(sink: &Redis) -> MultiplexedConnection {
    sink.link.connection().await.unwrap().1
}

/// A name no other test or run uses.
fn fresh(what: &str) -> String {
    format!("test:{what}:{}", uuid::Uuid::new_v4())
}

type Entries = Vec<(String, Vec<(Vec<u8>, Vec<u8>)>)>;

async fn entries(sink: &Redis, stream: &str) -> Entries {
    cmd("XRANGE").arg(stream).arg("-").arg("+").query_async(&mut connection(sink).await).await.unwrap()
}

fn field<'a>(fields: &'a [(Vec<u8>, Vec<u8>)], name: &str) -> Option<&'a [u8]> {
    fields.iter().find(|(field, _)| field == name.as_bytes()).map(|(_, value)| value.as_slice())
}

fn change(mut parcel: Parcel, with: impl FnOnce(&mut crate::event::Event)) -> Parcel {
    with(Arc::make_mut(&mut parcel.event));
    parcel
}

fn code(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Acked => "acked".into(),
        Outcome::Rejected(why) => format!("rejected {}", why.code),
        Outcome::Refused(why) => format!("refused {}", why.code),
        Outcome::Unreachable(why) => format!("unreachable {}", why.code),
    }
}

fn codes(outcomes: &[Outcome]) -> Vec<String> {
    outcomes.iter().map(code).collect()
}

#[tokio::test]
async fn every_entry_arrives_in_order_with_its_attributes_and_its_very_bytes() {
    let (sink, stream) = (sink().await, fresh("content"));
    let bytes = vec![0, 255, b'\r', b'\n', b'*'];
    let odd = change(parcel(2, Some("k")), |event| {
        event.payload.bytes = bytes.clone();
        event.headers = vec![("a\r\nb".into(), "é\n".into())];
    });
    let empty = change(parcel(3, None), |event| event.payload.bytes.clear());
    let batch = [parcel(1, Some("k")), odd, empty];
    let outcomes = sink.send(&route("h", &stream, Format::CloudEvents), &batch).await;
    assert_eq!(outcomes, [Outcome::Acked, Outcome::Acked, Outcome::Acked]);
    let entries = entries(&sink, &stream).await;
    let ids: Vec<_> = entries.iter().map(|(_, fields)| field(fields, "ce_id").unwrap()).collect();
    assert_eq!(ids, [b"e1", b"e2", b"e3"]);
    assert_eq!(field(&entries[0].1, "data"), Some(&b"{\"seq\":1}"[..]));
    assert_eq!(field(&entries[0].1, "ce_partitionkey"), Some(&b"k"[..]));
    assert_eq!(field(&entries[1].1, "data"), Some(bytes.as_slice()));
    assert_eq!(field(&entries[1].1, "a\r\nb"), Some("é\n".as_bytes()));
    assert_eq!(field(&entries[2].1, "data"), Some(&b""[..]));
}

#[tokio::test]
async fn a_batch_of_several_calls_is_answered_by_position_and_stored_in_order() {
    let (sink, stream) = (sink().await, fresh("calls"));
    let batch: Vec<_> = (0..1_234).map(|seq| parcel(seq, Some(if seq % 2 == 0 { "a" } else { "b" }))).collect();
    let outcomes = sink.send(&route("h", &stream, Format::CloudEvents), &batch).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Acked) && outcomes.len() == batch.len());
    let stored = entries(&sink, &stream).await;
    let sequences: Vec<i64> = stored
        .iter()
        .map(|(_, fields)| String::from_utf8_lossy(field(fields, "ce_sequence").unwrap()).parse().unwrap())
        .collect();
    assert_eq!(sequences, (0..1_234).collect::<Vec<_>>());
}

/// One entry that fails in the middle of its key: with a plain pipeline the third one would be stored (R1 of 2.F).
#[tokio::test]
async fn a_key_stops_at_its_first_failure_and_its_neighbours_go_on() {
    let sink = sink().await;
    let (good, bad) = (fresh("stop"), fresh("string"));
    cmd("SET").arg(&bad).arg("x").exec_async(&mut connection(&sink).await).await.unwrap();
    let to = |seq, key, stream: &str| {
        change(parcel(seq, Some(key)), |event| event.headers = vec![("to".into(), stream.into())])
    };
    let batch = [
        to(1, "a", &good),
        to(2, "a", &bad),
        to(3, "b", &good),
        to(4, "a", &good),
        to(5, "a", &bad),
        to(6, "b", &good),
    ];
    let outcomes = sink.send(&route("h", "{header:to}", Format::CloudEvents), &batch).await;
    let expected = ["acked", "unreachable WRONGTYPE", "acked", "unreachable BEHIND", "unreachable BEHIND", "acked"];
    assert_eq!(codes(&outcomes), expected);
    let mut stored: Vec<_> =
        entries(&sink, &good).await.iter().map(|(_, fields)| field(fields, "ce_id").unwrap().to_vec()).collect();
    stored.sort();
    assert_eq!(stored, [b"e1", b"e3", b"e6"]);
}

/// Inside one call: the script itself must stop the key, since nobody else can between two of its entries.
#[tokio::test]
async fn the_script_stops_a_key_at_a_failure_inside_one_call() {
    let (sink, stream) = (sink().await, fresh("inside"));
    let entry = |at: usize, key: &str, fields: &[&str]| Entry {
        at,
        stream: stream.clone(),
        key: Some(key.into()),
        fields: fields.iter().map(|field| field.as_bytes().to_vec()).collect(),
    };
    let mut call = Call::default();
    // XADD wants fields in pairs.
    call.entries.extend([
        entry(0, "a", &["n", "0"]),
        entry(1, "a", &["n"]),
        entry(2, "", &["n", "2"]),
        entry(3, "a", &["n", "3"]),
        entry(4, "", &["n"]),
        entry(5, "", &["n", "5"]),
    ]);
    let outcomes: Vec<_> = sink.run(&[call], Instant::now() + Duration::from_secs(5)).await;
    let outcomes: Vec<_> = outcomes.into_iter().map(|(at, outcome)| format!("{at} {}", code(&outcome))).collect();
    let expected =
        ["0 acked", "1 refused ERR", "2 acked", "3 unreachable BEHIND", "4 refused ERR", "5 unreachable BEHIND"];
    assert_eq!(outcomes, expected);
    assert_eq!(entries(&sink, &stream).await.len(), 2);
}

#[tokio::test]
async fn a_delivery_that_can_never_go_is_rejected_and_stops_its_key() {
    let (sink, stream) = (sink().await, fresh("fields"));
    let headers = |count: usize| (0..count).map(|i| (format!("h{i}"), String::new())).collect::<Vec<_>>();
    // Besides the headers there are 9 attributes with a key, and `data`.
    let most = change(parcel(1, Some("a")), |event| event.headers = headers(MAX_FIELDS - 10));
    let more = change(parcel(2, Some("a")), |event| event.headers = headers(MAX_FIELDS - 9));
    let batch = [most, more, parcel(3, Some("a")), parcel(4, None)];
    let outcomes = sink.send(&route("h", &stream, Format::CloudEvents), &batch).await;
    assert_eq!(codes(&outcomes), ["acked", "rejected TOO_MANY_FIELDS", "unreachable BEHIND", "acked"]);
    assert_eq!(entries(&sink, &stream).await.len(), 2);
    let keyless = sink.send(&route("h", "{key}", Format::Raw), &[parcel(5, None)]).await;
    assert_eq!(codes(&keyless), ["rejected NO_STREAM"]);
}

#[tokio::test]
async fn a_killed_connection_is_unreachable_and_the_next_send_opens_another() {
    let (sink, stream) = (sink().await, fresh("kill"));
    let to = route("h", &stream, Format::Raw);
    assert_eq!(codes(&sink.send(&to, &[parcel(1, Some("k"))]).await), ["acked"]);
    let id: i64 = cmd("CLIENT").arg("ID").query_async(&mut connection(&sink).await).await.unwrap();
    cmd("CLIENT").arg("KILL").arg("ID").arg(id).exec_async(&mut admin().await).await.unwrap();
    let outcomes = sink.send(&to, &[parcel(2, Some("k")), parcel(3, None)]).await;
    assert_eq!(codes(&outcomes), ["unreachable IO", "unreachable IO"]);
    assert_eq!(codes(&sink.send(&to, &[parcel(2, Some("k"))]).await), ["acked"]);
}

#[tokio::test]
async fn a_server_that_lost_the_script_is_given_it_again() {
    let (sink, stream) = (sink().await, fresh("script"));
    cmd("SCRIPT").arg("FLUSH").exec_async(&mut admin().await).await.unwrap();
    let outcomes = sink.send(&route("h", &stream, Format::Raw), &[parcel(1, Some("k")), parcel(2, Some("k"))]).await;
    assert_eq!(codes(&outcomes), ["acked", "acked"]);
    assert_eq!(entries(&sink, &stream).await.len(), 2);
}

#[tokio::test]
async fn a_server_that_does_not_answer_in_time_is_unreachable() {
    let sink = sink_with(config(service("LB_REDIS_URL")), Duration::from_millis(300)).await;
    let stream = fresh("slow");
    let to = route("h", &stream, Format::Raw);
    assert_eq!(codes(&sink.send(&to, &[parcel(1, None)]).await), ["acked"]);
    let mut blocked = connection(&sink).await;
    // Only this connection waits; the answers behind it on the same connection do too.
    let wait = tokio::spawn(async move {
        cmd("BLPOP").arg(fresh("never")).arg(2).exec_async(&mut blocked).await.ok();
    });
    tokio::task::yield_now().await;
    assert_eq!(codes(&sink.send(&to, &[parcel(2, None)]).await), ["unreachable TIMED_OUT"]);
    assert_eq!(codes(&sink.send(&to, &[parcel(2, None)]).await), ["acked"]);
    wait.await.unwrap();
}

#[tokio::test]
async fn a_broker_that_is_down_or_refuses_us_is_unreachable_and_names_its_address_only() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let down = sink_with(config(format!("redis://u:hunter2@{closed}")), Duration::from_secs(2)).await;
    let outcomes = down.send(&route("h", "s", Format::Raw), &[parcel(1, None), parcel(2, None)]).await;
    assert_eq!(codes(&outcomes), ["unreachable NOT_CONNECTED", "unreachable NOT_CONNECTED"]);
    let error = down.check(&[], 1 << 20).await.unwrap_err();
    assert_eq!(error.class(), crate::error::Class::Transient);
    assert!(error.report().contains(&closed.to_string()) && !error.report().contains("hunter2"), "{error:?}");
    let mut wrong = config(service("LB_REDIS_URL"));
    wrong.password = Some(SecretSource::Inline(Secret::new("wrong")));
    let wrong = sink_with(wrong, Duration::from_secs(2)).await;
    let outcomes = wrong.send(&route("h", "s", Format::Raw), &[parcel(1, None)]).await;
    assert_eq!(codes(&outcomes), ["unreachable NOT_CONNECTED"]);
}

#[tokio::test]
async fn a_password_file_is_read_at_every_connect() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "old\n").unwrap();
    let mut config = config(service("LB_REDIS_URL"));
    config.password = Some(SecretSource::File(file.path().to_owned()));
    let sink = sink_with(config, Duration::from_secs(2)).await;
    let (to, stream) = (fresh("rotate"), [parcel(1, None)]);
    let to = route("h", &to, Format::Raw);
    assert_eq!(codes(&sink.send(&to, &stream).await), ["unreachable NOT_CONNECTED"]);
    std::fs::write(file.path(), "lb-secret\n").unwrap();
    assert_eq!(codes(&sink.send(&to, &stream).await), ["acked"]);
}

#[tokio::test]
async fn max_len_trims_a_stream_about_there() {
    let mut config = config(service("LB_REDIS_URL"));
    config.max_len = Some(10);
    let (sink, stream) = (sink_with(config, Duration::from_secs(5)).await, fresh("trim"));
    let batch: Vec<_> = (0..500).map(|seq| parcel(seq, None)).collect();
    let outcomes = sink.send(&route("h", &stream, Format::Raw), &batch).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Acked));
    let left: usize = cmd("XLEN").arg(&stream).query_async(&mut connection(&sink).await).await.unwrap();
    assert!((10..500).contains(&left), "{left}");
}

#[tokio::test]
async fn a_check_tells_a_missing_stream_from_a_key_of_another_type() {
    let sink = sink().await;
    let (missing, stream, string) = (fresh("none"), fresh("stream"), fresh("string"));
    assert_eq!(codes(&sink.send(&route("h", &stream, Format::Raw), &[parcel(1, None)]).await), ["acked"]);
    cmd("SET").arg(&string).arg("x").exec_async(&mut connection(&sink).await).await.unwrap();
    let routes = [&missing, &stream, &string].map(|name| route("billing", name, Format::Raw));
    // Redis takes values of 512 MiB.
    let large = sink.check(&routes, 600 << 20).await.unwrap();
    assert!(large.iter().any(|finding| finding.hint.starts_with("CONFIG SET proto-max-bulk-len ")), "{large:?}");
    let findings = sink.check(&routes, 1 << 20).await.unwrap();
    let about = |name: &str| findings.iter().filter(|finding| finding.what.contains(name)).collect::<Vec<_>>();
    assert_eq!(about(&missing).iter().map(|finding| finding.severity).collect::<Vec<_>>(), [Severity::Weak]);
    assert!(about(&stream).is_empty());
    let wrong = about(&string);
    assert_eq!(wrong.len(), 1);
    assert!(wrong[0].severity == Severity::Missing && wrong[0].what.contains("billing"));
    assert!(wrong[0].what.contains("WRONGTYPE"));
}

#[tokio::test]
async fn a_user_without_the_right_to_add_is_found_before_and_unreachable_after() {
    let mut admin = admin().await;
    let name = fresh("user").replace(':', "-");
    let mut acl = cmd("ACL");
    acl.arg("SETUSER").arg(&name).arg("on").arg(">pw").arg("~*").arg("+@all").arg("-xadd");
    acl.exec_async(&mut admin).await.unwrap();
    let mut config = config(service("LB_REDIS_URL"));
    config.username = Some(name.clone());
    config.password = Some(SecretSource::Inline(Secret::new("pw")));
    let sink = sink_with(config, Duration::from_secs(5)).await;
    let to = route("h", &fresh("denied"), Format::Raw);
    let findings = sink.check(std::slice::from_ref(&to), 1 << 20).await.unwrap();
    assert!(findings.iter().any(|f| f.severity == Severity::Missing && f.what.contains("XADD")), "{findings:?}");
    let outcomes = sink.send(&to, &[parcel(1, None)]).await;
    cmd("ACL").arg("DELUSER").arg(&name).exec_async(&mut admin).await.unwrap();
    assert_eq!(codes(&outcomes), ["unreachable NOPERM"], "{outcomes:?}");
}

#[tokio::test]
async fn tls_is_verified_against_the_given_authority_and_refused_without_it() {
    let mut config = config(service("LB_REDIS_TLS_URL"));
    config.tls = Tls { enabled: true, ca_file: Some(service("LB_TLS_CA").into()), ..Tls::default() };
    let to = route("h", &fresh("tls"), Format::Raw);
    let sink = sink_with(config.clone(), Duration::from_secs(5)).await;
    assert_eq!(codes(&sink.send(&to, &[parcel(1, None)]).await), ["acked"]);
    config.tls.ca_file = None;
    let untrusting = sink_with(config, Duration::from_secs(5)).await;
    assert_eq!(codes(&untrusting.send(&to, &[parcel(1, None)]).await), ["unreachable NOT_CONNECTED"]);
}

#[tokio::test]
async fn settings_that_can_never_work_are_named_at_once() {
    for (change, part) in [
        ((|c: &mut config::Redis| c.url = Secret::new("http://u:hunter2@h")) as fn(&mut config::Redis), "url"),
        (|c| c.url = Secret::new("rediss://h#insecure"), "insecure"),
        (|c| c.tls.ca_file = Some("/nowhere/ca.pem".into()), "/nowhere/ca.pem"),
        (|c| c.tls.cert_file = Some("/nowhere/cert.pem".into()), "only one of"),
        (|c| c.password = Some(SecretSource::File("/nowhere/pw".into())), "/nowhere/pw"),
    ] {
        let mut config = config("redis://localhost".into());
        change(&mut config);
        let error = Link::new("streams", &config, Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.class(), crate::error::Class::Config);
        let report = error.report();
        assert!(report.contains("[sinks.streams]") && report.contains(part) && !report.contains("hunter2"), "{report}");
    }
}
