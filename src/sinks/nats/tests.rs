//! Against a real NATS server: what arrives, what counts as an ack, and how soon a lost connection is noticed.

use std::num::NonZeroU32;
use std::sync::Arc;

use async_nats::jetstream::stream;
use futures_util::StreamExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::config::{Format, NatsAuth, Secret, SecretSource, SinkKind, Tls};
use crate::error::Class;
use crate::sinks::Severity;
use crate::sinks::tests::{parcel, route};

fn service(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set; run scripts/services up and load target/services/env"))
}

fn inline(secret: &str) -> SecretSource {
    SecretSource::Inline(Secret::new(secret))
}

fn config(url: String) -> config::Nats {
    let auth = NatsAuth::User { username: "lb".into(), password: inline("lb-secret") };
    config::Nats { url: Secret::new(url), tls: Tls::default(), auth }
}

async fn try_sink(config: config::Nats, send_timeout: Duration) -> Result<Nats> {
    let common = config::Sink {
        kind: SinkKind::Nats(config.clone()),
        send_timeout,
        batch: NonZeroU32::new(500).unwrap(),
        batches_in_flight: NonZeroU32::new(2).unwrap(),
    };
    Nats::connect("js", &config, &common).await
}

async fn sink() -> Nats {
    try_sink(config(service("LB_NATS_URL")), Duration::from_secs(10)).await.unwrap()
}

/// A name no other test or run uses; also the first token of its stream's subjects.
fn fresh(what: &str) -> String {
    format!("test-{what}-{}", uuid::Uuid::new_v4().simple())
}

async fn create(sink: &Nats, name: &str, change: impl FnOnce(&mut stream::Config)) {
    link::connected(&sink.client, &sink.link, Duration::from_secs(5)).await.unwrap();
    let mut config = stream::Config { name: name.into(), subjects: vec![format!("{name}.>")], ..Default::default() };
    change(&mut config);
    sink.jetstream.create_stream(config).await.unwrap();
}

async fn stored(sink: &Nats, name: &str) -> Vec<jetstream::message::StreamMessage> {
    let mut stream = sink.jetstream.get_stream(name).await.unwrap();
    let last = stream.info().await.unwrap().state.last_sequence;
    let mut all = Vec::new();
    for sequence in 1..=last {
        all.push(stream.get_raw_message(sequence).await.unwrap());
    }
    all
}

async fn delete(sink: &Nats, name: &str) {
    sink.jetstream.delete_stream(name).await.unwrap();
}

fn change(mut parcel: Parcel, with: impl FnOnce(&mut crate::event::Event)) -> Parcel {
    with(Arc::make_mut(&mut parcel.event));
    parcel
}

fn codes(outcomes: &[Outcome]) -> Vec<String> {
    let code = |outcome: &Outcome| match outcome {
        Outcome::Acked => "acked".into(),
        Outcome::Rejected(why) => format!("rejected {}", why.code),
        Outcome::Refused(why) => format!("refused {}", why.code),
        Outcome::Unreachable(why) => format!("unreachable {}", why.code),
    };
    outcomes.iter().map(code).collect()
}

#[test]
fn every_code_has_its_outcome() {
    for code in [10054, 10097] {
        assert!(matches!(classify(400, code, "x"), Outcome::Rejected(_)), "{code}");
    }
    let unreachable = [
        10002, 10004, 10005, 10006, 10007, 10008, 10009, 10010, 10023, 10028, 10035, 10039, 10047, 10059, 10060, 10076,
        10077, 10109, 10118, 10122,
    ];
    for code in unreachable {
        let outcome = classify(400, code, "x");
        assert!(matches!(&outcome, Outcome::Unreachable(why) if why.code == code.to_string()), "{code}");
    }
    assert!(matches!(classify(503, 1, "x"), Outcome::Unreachable(_)));
    for code in [0, 10003, 10070, 10071, 99999] {
        assert!(matches!(classify(400, code, "x"), Outcome::Refused(_)), "{code}");
    }
}

#[test]
fn an_ack_counts_only_with_its_stream_and_a_sequence() {
    let ack = |stream: &str, sequence, duplicate| {
        let ack = PublishAck { stream: stream.into(), sequence, duplicate, ..Default::default() };
        codes(&[judge(Ok(ack), "S")]).remove(0)
    };
    assert_eq!(ack("S", 1, false), "acked");
    assert_eq!(ack("S", 1, true), "acked");
    assert_eq!(ack("T", 1, false), "refused WRONG_STREAM");
    assert_eq!(ack("S", 0, false), "refused BAD_ANSWER");
    assert_eq!(ack("", 0, false), "refused WRONG_STREAM");
}

#[test]
fn every_kind_of_publish_error_has_its_outcome() {
    let of = |kind| codes(&[classify_publish(&PublishError::new(kind))]).remove(0);
    assert_eq!(of(PublishErrorKind::StreamNotFound), "unreachable STREAM_NOT_FOUND");
    assert_eq!(of(PublishErrorKind::MaxPayloadExceeded), "rejected MAX_PAYLOAD");
    assert_eq!(of(PublishErrorKind::TimedOut), "unreachable TIMED_OUT");
    assert_eq!(of(PublishErrorKind::BrokenPipe), "unreachable CONNECTION_LOST");
    assert_eq!(of(PublishErrorKind::MaxAckPending), "unreachable BUSY");
    assert_eq!(of(PublishErrorKind::Other), "refused BAD_ANSWER");
}

#[tokio::test]
async fn every_message_arrives_in_order_with_its_headers_and_its_very_bytes() {
    let (sink, name) = (sink().await, fresh("content"));
    create(&sink, &name, |_| {}).await;
    let odd = change(parcel(2, Some("a.b c")), |event| {
        event.payload.bytes = vec![0, 255, b'\r', b'\n'];
        event.headers = vec![("traceparent".into(), "00-1é".into())];
    });
    let empty = change(parcel(3, Some("")), |event| event.payload.bytes.clear());
    let to = route("h", &format!("{name}.{{type}}.{{key}}"), Format::CloudEvents);
    let outcomes = sink.send(&to, &[parcel(1, Some("k")), odd, empty]).await;
    assert_eq!(codes(&outcomes), ["acked", "acked", "acked"]);
    let all = stored(&sink, &name).await;
    let subjects: Vec<_> = all.iter().map(|message| message.subject.to_string()).collect();
    assert_eq!(subjects, ["k", "a%2Eb%20c", "%00"].map(|key| format!("{name}.order.paid.{key}")));
    let header = |at: usize, header: &str| all[at].headers.get(header).map(|value| value.as_str().to_owned());
    assert_eq!(&all[0].payload[..], b"{\"seq\":1}");
    assert_eq!(header(0, "ce-id").as_deref(), Some("e1"));
    assert_eq!(header(0, "Nats-Msg-Id").as_deref(), Some("i/h/0/e1"));
    assert_eq!(header(0, "Nats-Expected-Stream").as_deref(), Some(name.as_str()));
    assert_eq!(header(0, "content-type").as_deref(), Some("application/json"));
    assert_eq!(&all[1].payload[..], [0, 255, b'\r', b'\n']);
    assert_eq!(header(1, "traceparent").as_deref(), Some("00-1é"));
    assert!(all[2].payload.is_empty());
    delete(&sink, &name).await;
    sink.close(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_repeated_delivery_is_acked_and_stored_once_and_a_replayed_one_twice() {
    let (sink, name) = (sink().await, fresh("dedup"));
    create(&sink, &name, |_| {}).await;
    let to = route("h", &format!("{name}.x"), Format::Raw);
    let one = parcel(1, None);
    for _ in 0..2 {
        assert_eq!(codes(&sink.send(&to, std::slice::from_ref(&one)).await), ["acked"]);
    }
    let replayed = Parcel { generation: 1, ..one.clone() };
    assert_eq!(codes(&sink.send(&to, &[replayed]).await), ["acked"]);
    let other = route("other", &format!("{name}.x"), Format::Raw);
    assert_eq!(codes(&sink.send(&other, &[one]).await), ["acked"]);
    assert_eq!(stored(&sink, &name).await.len(), 3);
    delete(&sink, &name).await;
}

#[tokio::test]
async fn a_batch_larger_than_the_window_is_sent_whole() {
    let (sink, name) = (sink().await, fresh("window"));
    create(&sink, &name, |config| config.storage = stream::StorageType::Memory).await;
    let batch: Vec<_> = (0..i64::try_from(MIN_WINDOW).unwrap() + 10).map(|seq| parcel(seq, None)).collect();
    let outcomes = sink.send(&route("h", &format!("{name}.x"), Format::Raw), &batch).await;
    assert!(outcomes.len() == batch.len() && outcomes.iter().all(|outcome| *outcome == Outcome::Acked));
    delete(&sink, &name).await;
}

#[tokio::test]
async fn a_subject_without_a_stream_is_unreachable_until_there_is_one() {
    let (sink, name) = (sink().await, fresh("missing"));
    let to = route("h", &format!("{name}.x"), Format::Raw);
    let batch = [parcel(1, None), parcel(2, None)];
    let expected = ["unreachable STREAM_NOT_FOUND", "unreachable STREAM_NOT_FOUND"];
    assert_eq!(codes(&sink.send(&to, &batch).await), expected);
    create(&sink, &name, |_| {}).await;
    assert_eq!(codes(&sink.send(&to, &batch).await), ["acked", "acked"]);
    // The stream is remembered, and must be forgotten.
    delete(&sink, &name).await;
    assert_eq!(codes(&sink.send(&to, &batch).await), expected);
}

#[tokio::test]
async fn a_stream_that_takes_the_subject_of_another_is_found_after_one_answer() {
    let (sink, old, new) = (sink().await, fresh("old"), fresh("new"));
    create(&sink, &old, |_| {}).await;
    let to = route("h", &format!("{old}.x"), Format::Raw);
    assert_eq!(codes(&sink.send(&to, &[parcel(1, None)]).await), ["acked"]);
    delete(&sink, &old).await;
    create(&sink, &new, |config| config.subjects = vec![format!("{old}.>")]).await;
    assert_eq!(codes(&sink.send(&to, &[parcel(2, None)]).await), ["unreachable 10060"]);
    assert_eq!(codes(&sink.send(&to, &[parcel(2, None)]).await), ["acked"]);
    delete(&sink, &new).await;
}

/// H76: the stream is gone, and a core subscriber answers in its place.
#[tokio::test]
async fn an_ack_from_something_that_is_not_the_stream_is_no_ack() {
    let (sink, name) = (sink().await, fresh("forged"));
    let mut to = route("h", &format!("{name}.x"), Format::Raw);
    Arc::make_mut(&mut to.handler).nats_stream = Some(name.clone());
    link::connected(&sink.client, &sink.link, Duration::from_secs(5)).await.unwrap();
    let mut requests = sink.client.subscribe(format!("{name}.x")).await.unwrap();
    let client = sink.client.clone();
    let forger = tokio::spawn(async move {
        for forged in [r#"{"stream":"elsewhere","seq":7}"#, "{\"stream\":", "", r#"{"error":{"code":400}}"#] {
            let request = requests.next().await.unwrap();
            client.publish(request.reply.unwrap(), forged.into()).await.unwrap();
        }
    });
    let batch: Vec<_> = (1..=4).map(|seq| parcel(seq, None)).collect();
    let expected = ["refused WRONG_STREAM", "refused BAD_ANSWER", "refused BAD_ANSWER", "refused 0"];
    assert_eq!(codes(&sink.send(&to, &batch).await), expected);
    forger.await.unwrap();
}

#[tokio::test]
async fn what_can_never_be_sent_is_rejected_and_its_neighbours_are_stored() {
    let (sink, name) = (sink().await, fresh("rejected"));
    create(&sink, &name, |config| config.max_message_size = 10_000).await;
    let with = |seq, name: &str, value: &str| {
        change(parcel(seq, None), |event| event.headers = vec![(name.into(), value.into())])
    };
    let sized = |seq, bytes| change(parcel(seq, None), |event| event.payload.bytes = vec![b'x'; bytes]);
    let batch = [
        parcel(1, None),
        with(2, "Nats-Rollup", "all"),
        with(3, "a b", "x"),
        with(4, "a", "x\r\nNats-Rollup: all"),
        sized(5, 20_000),
        sized(6, sink.client.max_payload()),
        parcel(7, None),
    ];
    let outcomes = sink.send(&route("h", &format!("{name}.x"), Format::Raw), &batch).await;
    let expected = [
        "acked",
        "rejected RESERVED_HEADER",
        "rejected INVALID_HEADER",
        "rejected INVALID_HEADER",
        "rejected 10054",
        "rejected MAX_PAYLOAD",
        "acked",
    ];
    assert_eq!(codes(&outcomes), expected);
    assert_eq!(stored(&sink, &name).await.len(), 2);
    let keyless = sink.send(&route("h", "{key}", Format::Raw), &[parcel(8, None)]).await;
    assert_eq!(codes(&keyless), ["rejected NO_SUBJECT"]);
    delete(&sink, &name).await;
}

#[tokio::test]
async fn a_full_stream_that_discards_new_messages_is_unreachable() {
    let (sink, name) = (sink().await, fresh("full"));
    create(&sink, &name, |config| {
        config.max_messages = 1;
        config.discard = stream::DiscardPolicy::New;
    })
    .await;
    let outcomes = sink.send(&route("h", &format!("{name}.x"), Format::Raw), &[parcel(1, None), parcel(2, None)]).await;
    assert_eq!(codes(&outcomes), ["acked", "unreachable 10077"]);
    delete(&sink, &name).await;
}

#[tokio::test]
async fn a_broker_that_is_down_is_unreachable_soon_and_shows_no_secret() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut config = config(format!("nats://u:hunter2@{closed}"));
    config.auth = NatsAuth::Url;
    let sink = try_sink(config, Duration::from_secs(30)).await.unwrap();
    let started = Instant::now();
    let outcomes = sink.send(&route("h", "x", Format::Raw), &[parcel(1, None), parcel(2, None)]).await;
    assert_eq!(codes(&outcomes), ["unreachable NOT_CONNECTED", "unreachable NOT_CONNECTED"]);
    assert!(started.elapsed() < Duration::from_secs(5));
    let Outcome::Unreachable(why) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(why.text().contains(&closed.to_string()) && !why.text().contains("hunter2"), "{why}");
    let error = sink.check(&[], 1 << 20).await.unwrap_err();
    assert_eq!(error.class(), Class::Transient);
    assert!(error.report().contains(&closed.to_string()) && !error.report().contains("hunter2"), "{error:?}");
}

/// A publish whose answer never comes must not wait for its whole timeout once the connection is known to be lost.
#[tokio::test]
async fn a_lost_connection_ends_the_wait_and_the_next_send_works() {
    let url = service("LB_NATS_URL");
    let upstream = url.trim_start_matches("nats://").trim_end_matches('/').to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = listener.local_addr().unwrap();
    let (cut, cuts) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (upstream, mut cuts) = (upstream.clone(), cuts.clone());
            tokio::spawn(async move {
                cuts.mark_unchanged();
                let mut far = TcpStream::connect(upstream).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = cuts.changed() => {}
                }
            });
        }
    });
    let sink = try_sink(config(format!("nats://{front}")), Duration::from_secs(60)).await.unwrap();
    let name = fresh("lost");
    let mut to = route("h", &format!("{name}.x"), Format::Raw);
    Arc::make_mut(&mut to.handler).nats_stream = Some(name.clone());
    link::connected(&sink.client, &sink.link, Duration::from_secs(5)).await.unwrap();
    // A subscriber that never answers: the publish is taken and stays unanswered.
    let mut silent = sink.client.subscribe(format!("{name}.x")).await.unwrap();
    let started = Instant::now();
    let parcels = [parcel(1, None)];
    let breaking = async {
        silent.next().await.unwrap();
        cut.send(1).unwrap();
    };
    let (outcomes, ()) = tokio::join!(sink.send(&to, &parcels), breaking);
    assert_eq!(codes(&outcomes), ["unreachable CONNECTION_LOST"]);
    assert!(started.elapsed() < Duration::from_secs(10));
    drop(silent);
    create(&sink, &name, |_| {}).await;
    assert_eq!(codes(&sink.send(&to, &[parcel(1, None)]).await), ["acked"]);
    delete(&sink, &name).await;
}

#[tokio::test]
async fn an_answer_that_does_not_come_in_time_is_unreachable_and_the_others_count() {
    let sink = try_sink(config(service("LB_NATS_URL")), Duration::from_millis(500)).await.unwrap();
    let (name, silent) = (fresh("slow"), fresh("silent"));
    create(&sink, &name, |_| {}).await;
    let _silent = sink.client.subscribe(format!("{silent}.x")).await.unwrap();
    let to = |seq, stream: &str| change(parcel(seq, None), |event| event.headers = vec![("to".into(), stream.into())]);
    let mut route = route("h", "{header:to}.x", Format::Raw);
    Arc::make_mut(&mut route.handler).nats_stream = Some(name.clone());
    let batch = [to(1, &silent), to(2, &name), to(3, &silent), to(4, &name)];
    let outcomes = sink.send(&route, &batch).await;
    assert_eq!(codes(&outcomes), ["unreachable TIMED_OUT", "acked", "unreachable TIMED_OUT", "acked"]);
    delete(&sink, &name).await;
}

#[tokio::test]
async fn a_check_names_the_stream_that_is_missing_and_every_weak_setting_once() {
    let (sink, name, gone) = (sink().await, fresh("weak"), fresh("gone"));
    create(&sink, &name, |config| {
        config.storage = stream::StorageType::Memory;
        config.max_messages = 10;
        config.duplicate_window = Duration::from_secs(1);
        config.retention = stream::RetentionPolicy::Interest;
        config.max_message_size = 1000;
    })
    .await;
    let mut mismatched = route("mismatched", &format!("{name}.x"), Format::Raw);
    Arc::make_mut(&mut mismatched.handler).nats_stream = Some(gone.clone());
    let routes = [
        route("billing", &format!("{gone}.x"), Format::Raw),
        route("good", &format!("{name}.x"), Format::Raw),
        route("good too", &format!("{name}.y"), Format::Raw),
        route("wild", &format!("{name}.*"), Format::Raw),
        mismatched,
    ];
    let findings = sink.check(&routes, 1 << 20).await.unwrap();
    let missing: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Missing).collect();
    assert_eq!(missing.len(), 3, "{findings:?}");
    assert!(missing[0].what.contains("billing") && missing[0].what.contains(&gone), "{missing:?}");
    assert!(missing[0].hint.contains("nats stream add"), "{missing:?}");
    assert!(missing[1].what.contains("wild") && missing[1].what.contains("wildcard"), "{missing:?}");
    assert!(missing[2].what.contains("mismatched") && missing[2].what.contains(&name), "{missing:?}");
    let weak: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Weak).collect();
    for part in [
        "in memory",
        "one replica",
        "discards its oldest",
        "message ids for 1 s",
        "Interest retention",
        "NATS at",
        "handler good: stream",
        "handler good too: stream",
    ] {
        assert_eq!(weak.iter().filter(|finding| finding.what.contains(part)).count(), 1, "{part}: {weak:?}");
    }
    delete(&sink, &name).await;
}

#[tokio::test]
async fn every_way_to_log_in_works_and_a_wrong_password_is_unreachable() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "wrong\n").unwrap();
    let (admin, name) = (sink().await, fresh("auth"));
    create(&admin, &name, |_| {}).await;
    let to = route("h", &format!("{name}.x"), Format::Raw);
    let with = |url: &str, auth| {
        let mut config = config(service(url));
        config.auth = auth;
        try_sink(config, Duration::from_secs(10))
    };
    let user = |password| NatsAuth::User { username: "lb".into(), password };
    let rotated = with("LB_NATS_URL", user(SecretSource::File(file.path().to_owned()))).await.unwrap();
    assert_eq!(codes(&rotated.send(&to, &[parcel(1, None)]).await), ["unreachable NOT_CONNECTED"]);
    std::fs::write(file.path(), "lb-secret\n").unwrap();
    link::connected(&rotated.client, &rotated.link, Duration::from_secs(5)).await.unwrap();
    assert_eq!(codes(&rotated.send(&to, &[parcel(1, None)]).await), ["acked"]);

    let nkey =
        with("LB_NATS_URL", NatsAuth::Nkey(SecretSource::File(service("LB_NATS_NKEY_SEED").into()))).await.unwrap();
    let outcomes = nkey.send(&to, &[parcel(2, None)]).await;
    assert_eq!(codes(&outcomes), ["acked"], "{outcomes:?}");

    let mut url = config(service("LB_NATS_URL").replace("nats://", "nats://lb:lb%2Dsecret@"));
    url.auth = NatsAuth::Url;
    let url = try_sink(url, Duration::from_secs(10)).await.unwrap();
    assert_eq!(codes(&url.send(&to, &[parcel(3, None)]).await), ["acked"]);
    delete(&admin, &name).await;
}

#[tokio::test]
async fn tls_is_verified_against_the_given_authority_and_refused_without_it() {
    let (admin, name) = (sink().await, fresh("tls"));
    create(&admin, &name, |_| {}).await;
    let to = route("h", &format!("{name}.x"), Format::Raw);
    let mut config = config(service("LB_NATS_TLS_URL"));
    config.tls = Tls { enabled: true, ca_file: Some(service("LB_TLS_CA").into()), ..Tls::default() };
    let trusting = try_sink(config.clone(), Duration::from_secs(10)).await.unwrap();
    assert_eq!(codes(&trusting.send(&to, &[parcel(1, None)]).await), ["acked"]);
    config.tls.ca_file = None;
    let untrusting = try_sink(config, Duration::from_secs(10)).await.unwrap();
    assert_eq!(codes(&untrusting.send(&to, &[parcel(2, None)]).await), ["unreachable NOT_CONNECTED"]);
    delete(&admin, &name).await;
}

#[tokio::test]
async fn settings_that_can_never_work_are_named_at_once() {
    type Change = fn(&mut config::Nats);
    let bad: [(Change, &str); 6] = [
        (|c| c.url = Secret::new("http://u:hunter2@h"), "url"),
        (
            |c| c.tls = Tls { enabled: true, ca_file: Some("/nowhere/ca.pem".into()), ..Tls::default() },
            "/nowhere/ca.pem",
        ),
        (|c| c.tls = Tls { enabled: true, cert_file: Some("/nowhere/c".into()), ..Tls::default() }, "only one of"),
        (|c| c.auth = NatsAuth::Token(SecretSource::File("/nowhere/token".into())), "/nowhere/token"),
        (|c| c.auth = NatsAuth::Nkey(inline("/etc/nkey.seed")), "seed"),
        (|c| c.auth = NatsAuth::CredsFile("/nowhere/creds".into()), "/nowhere/creds"),
    ];
    for (change, part) in bad {
        let mut config = config("nats://localhost".into());
        change(&mut config);
        let error = try_sink(config, Duration::from_secs(1)).await.unwrap_err();
        assert_eq!(error.class(), Class::Config);
        let report = error.report();
        assert!(report.contains("[sinks.js]") && report.contains(part) && !report.contains("hunter2"), "{report}");
    }
}
