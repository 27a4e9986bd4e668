//! Every way to log in to a real server for a stream, and peers that are no server at all.

use bytes::BufMut;
use futures_util::FutureExt;
use proptest::prelude::*;
use tokio::io::DuplexStream;
use tokio::net::TcpListener;

use super::super::connect::tests::{address, connector, relay, relayed, tls_ca, url, verified};
use super::super::sqlstate;
use super::*;
use crate::config::Secret;
use crate::error::Class;

const SCRAM_USER: &str = "scram_user:p%40ss%3Aw%2Frd%231";

async fn replicate(url: Secret) -> Result<Replication> {
    connector(|p| p.url = url).replicate("wal", &[]).await
}

async fn refusal(url: Secret) -> Error {
    replicate(url).await.err().expect("it is refused")
}

async fn answer(stream: &mut Replication, sql: &str) -> String {
    stream.ask(sql).await.unwrap()[0][0].clone().unwrap()
}

async fn is_encrypted(stream: &mut Replication) -> bool {
    answer(stream, "SELECT ssl FROM pg_catalog.pg_stat_ssl WHERE pid = pg_catalog.pg_backend_pid()").await == "t"
}

#[tokio::test]
async fn settings_name_and_pid_reach_the_server() {
    let connector = connector(|_| {});
    let settings = [("wal_sender_timeout", "4321".to_owned())];
    let mut stream = connector.replicate("wal", &settings).await.unwrap();
    assert_eq!(answer(&mut stream, "SHOW wal_sender_timeout").await, "4321ms");
    assert_eq!(answer(&mut stream, "SHOW application_name").await, "lanebridge/test/wal");
    assert_eq!(answer(&mut stream, "SELECT pg_catalog.pg_backend_pid()").await, stream.pid().to_string());
}

#[tokio::test]
async fn scram_works_in_clear_and_in_both_kinds_of_tls() {
    let mut plain = replicate(url(SCRAM_USER, "127.0.0.1", "sslmode=disable")).await.unwrap();
    assert!(!is_encrypted(&mut plain).await);
    for mode in ["verify-full", "verify-ca"] {
        let mut stream = replicate(url(SCRAM_USER, "localhost", &verified(mode, &tls_ca()))).await.unwrap();
        assert!(is_encrypted(&mut stream).await, "{mode}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_name_is_refused_by_verify_full_alone() {
    let relay = relay().await;
    let error = refusal(relayed(&relay, &verified("verify-full", &tls_ca()))).await;
    assert_eq!(error.class(), Class::Failure);
    assert!(error.report().starts_with(&format!("agree on TLS with {relay}: ")), "{error:?}");
    assert!(error.report().contains("not valid for name") && error.report().contains("hint: "), "{error:?}");
    let mut stream = replicate(relayed(&relay, &verified("verify-ca", &tls_ca()))).await.unwrap();
    assert!(is_encrypted(&mut stream).await);
}

#[tokio::test]
async fn an_unknown_ca_is_refused_in_every_mode() {
    for mode in ["verify-full", "verify-ca"] {
        let error = refusal(url("postgres", "localhost", &format!("sslmode={mode}"))).await;
        assert_eq!(error.class(), Class::Failure, "{error:?}");
        assert!(error.report().contains("UnknownIssuer"), "{error:?}");
    }
}

#[tokio::test]
async fn a_socket_is_a_way_too() {
    let client = connector(|_| {}).connect("test", super::super::Session::Work).await.unwrap();
    let sql = "select current_setting('unix_socket_directories'), current_setting('port'), current_database()";
    let row = client.query_one(sql, &[]).await.unwrap();
    let (folder, port, database): (String, String, String) = (row.get(0), row.get(1), row.get(2));
    let url = format!("postgres://postgres@/{database}?host={folder}&port={port}");
    replicate(Secret::new(url)).await.unwrap();
}

// H16.
#[tokio::test]
async fn a_standby_is_refused() {
    let error = refusal(Secret::new(address("LB_STANDBY_URL"))).await;
    assert_eq!(error.class(), Class::Transient);
    assert!(error.report().contains("is a standby"), "{error:?}");
}

#[tokio::test]
async fn no_password_where_one_is_asked_for_is_said_with_what_to_do() {
    let error = refusal(url("scram_user", "127.0.0.1", "sslmode=disable")).await;
    assert_eq!(error.class(), Class::Config);
    assert!(error.report().contains("hint: no password is configured"), "{error:?}");
}

#[tokio::test]
async fn silence_ends_by_the_connect_timeout_and_names_the_step() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for (query, step) in [("sslmode=disable", "authenticate at"), ("sslmode=verify-full", "agree on TLS with")] {
        let connector = connector(|p| {
            p.url = Secret::new(format!("postgres://u:canary@{address}/d?{query}"));
            p.connect_timeout = Duration::from_millis(100);
        });
        let error = connector.replicate("wal", &[]).await.err().unwrap();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().starts_with(&format!("{step} {address}")), "{error:?}");
        assert!(error.report().contains("no answer within 100ms") && !error.report().contains("canary"), "{error:?}");
    }
}

/// A server that answers a request for TLS with these bytes.
async fn answers_tls_with(answer: &'static [u8]) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut request = [0; 8];
        client.read_exact(&mut request).await.unwrap();
        client.write_all(answer).await.unwrap();
        // Whatever comes now must be TLS, never a log-in.
        let mut hello = [0; 1];
        if client.read(&mut hello).await.is_ok_and(|n| n == 1) {
            assert_eq!(hello, [22], "a TLS handshake");
        }
    });
    refusal(Secret::new(format!("postgres://u:canary@{address}/d?{}", verified("verify-full", &tls_ca())))).await
}

#[tokio::test]
async fn there_is_no_way_back_from_tls_to_clear() {
    for answer in [&b"N"[..], b"E\0\0\0\x08text", b"G"] {
        let error = answers_tls_with(answer).await;
        assert!(error.report().contains("the server does not support it; hint: set ssl = on"), "{error:?}");
    }
    // Bytes before the handshake, put there by somebody in between, must not pass for the server's.
    let error = answers_tls_with(b"SR\0\0\0\x08\0\0\0\0Z\0\0\0\x05I").await;
    assert!(error.report().starts_with("agree on TLS with"), "{error:?}");
}

/// A stream whose other end the test holds; what is written there fits, however much it is.
fn piped() -> (Replication, DuplexStream) {
    let (wire, peer) = tokio::io::duplex(64 << 20);
    let server = "peer:1".to_owned();
    (Replication { wire: Box::new(wire), input: BytesMut::new(), server, pid: 0, skipping: 0 }, peer)
}

/// What a connection is waiting for when the peer misbehaves.
#[derive(Clone, Copy, Debug)]
enum Doing {
    LogIn,
    Ask,
    Start,
    Next,
}
const DOING: [Doing; 4] = [Doing::LogIn, Doing::Ask, Doing::Start, Doing::Next];
/// The largest frame in these tests.
const MOST: usize = 2 << 20;

/// Does it against a peer that sends `bytes` and then, unless `open`, no more; returns the memory it took as well.
async fn against(doing: Doing, bytes: &[u8], open: bool) -> (Result<()>, usize) {
    let (mut stream, mut peer) = piped();
    peer.write_all(bytes).await.unwrap();
    if !open {
        peer.shutdown().await.unwrap();
    }
    let password = Secret::new("canary");
    let login = Login {
        server: "peer:1".to_owned(),
        user: "u",
        dbname: "d",
        password: Some(&password),
        application_name: String::new(),
        options: None,
        settings: &[],
        keepalive: None,
        user_timeout: Duration::ZERO,
    };
    let done = async {
        match doing {
            Doing::LogIn => stream.log_in(&login).await,
            Doing::Ask => stream.ask("SELECT 1").await.map(|_| ()),
            Doing::Start => stream.start("START_REPLICATION").await,
            Doing::Next => loop {
                stream.next(MOST).await?;
            },
        }
    };
    let done = timeout(Duration::from_secs(20), done).await.expect("it ends");
    (done, stream.input.capacity())
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.put_i32(i32::try_from(body.len() + 4).unwrap());
    bytes.extend_from_slice(body);
    bytes
}

/// A frame of a stream.
fn frame(body: &[u8]) -> Vec<u8> {
    message(b'd', body)
}

fn data(wal_end: u64, message: &[u8]) -> Vec<u8> {
    let mut body = vec![b'w'];
    body.put_u64(0);
    body.put_u64(wal_end);
    body.put_i64(0);
    body.extend_from_slice(message);
    frame(&body)
}

fn keepalive(wal_end: u64, reply: bool) -> Vec<u8> {
    let mut body = vec![b'k'];
    body.put_u64(wal_end);
    body.put_i64(0);
    body.put_u8(reply.into());
    frame(&body)
}

#[tokio::test]
async fn what_is_cut_off_is_an_error() {
    for doing in DOING {
        for bytes in [&b""[..], b"S", b"N\0\0\0\x0cSN", b"d\0\0\0\xffw"] {
            let (done, _) = against(doing, bytes, false).await;
            let error = done.unwrap_err();
            assert_eq!(error.class(), Class::Transient, "{doing:?}");
            assert!(error.report().contains("connection closed"), "{doing:?}: {error:?}");
        }
    }
    for body in [&b""[..], b"w", b"w\0\0\0\0\0\0\0", b"k\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", b"?"] {
        let error = against(Doing::Next, &frame(body), true).await.0.unwrap_err();
        assert_eq!(error.class(), Class::Transient, "{body:?}: {error:?}");
    }
}

#[tokio::test]
async fn an_error_of_the_server_is_its_own_words_wherever_it_comes() {
    let said = message(b'E', b"SFATAL\0C57P01\0Mterminating connection\0HTry later.\0\0");
    for doing in DOING {
        let bytes = match doing {
            Doing::Next => [data(1, b"x"), keepalive(2, true), said.clone()].concat(),
            _ => said.clone(),
        };
        let error = against(doing, &bytes, true).await.0.unwrap_err();
        assert_eq!(sqlstate(&error), Some("57P01"), "{doing:?}");
        assert!(error.report().ends_with("terminating connection (SQLSTATE 57P01); hint: Try later."), "{error:?}");
        // Half of an error is none yet, and one without a text still ends everything.
        let bytes = [&said[..said.len() - 1], b""].concat();
        assert!(against(doing, &bytes, false).await.0.unwrap_err().report().contains("connection closed"));
        against(doing, &message(b'E', b"\0"), true).await.0.unwrap_err();
        against(doing, &message(b'E', b"Mno end"), true).await.0.unwrap_err();
    }
}

// R14: a peer, or somebody in between, must not be able to fill the memory.
#[tokio::test]
async fn a_message_without_end_is_refused_before_it_is_stored() {
    for doing in DOING {
        for tag in *b"dDENRSTZW" {
            let mut bytes = vec![tag];
            bytes.put_i32(i32::MAX);
            bytes.resize(8 << 20, 0);
            let (done, memory) = against(doing, &bytes, false).await;
            done.unwrap_err();
            assert!(memory < 4 << 20, "{doing:?} {}: {memory} bytes", char::from(tag));
        }
    }
}

#[tokio::test]
async fn rows_without_end_are_refused() {
    let rows = message(b'D', b"\0\x01\0\0\0\x01x").repeat(1 << 20);
    let error = against(Doing::Ask, &rows, true).await.0.unwrap_err();
    assert!(error.report().contains("more rows than anybody asked for"), "{error:?}");
}

/// Small ones in a row are no recursion: a stack has an end.
#[tokio::test]
async fn notices_without_end_harm_nothing() {
    let mut bytes = message(b'N', b"\0").repeat(1 << 20);
    bytes.extend(message(b'c', b""));
    let (done, memory) = against(Doing::Next, &bytes, true).await;
    assert_eq!(done.unwrap_err().report(), "Postgres at peer:1 ended the stream");
    assert!(memory < 1 << 20, "{memory} bytes");
}

// I1.
#[tokio::test]
async fn a_frame_above_the_limit_is_passed_over_without_being_stored() {
    let (mut stream, mut peer) = piped();
    for bytes in [data(1, &vec![b'x'; 40 << 20]), data(2, b"next")] {
        peer.write_all(&bytes).await.unwrap();
    }
    assert!(matches!(stream.next(MOST).await.unwrap(), Frame::Oversized));
    assert!(matches!(stream.next(MOST).await.unwrap(), Frame::Data { wal_end: 2, message } if message == "next"));
    assert!(stream.input.capacity() < 1 << 20);
}

/// Whoever asks for SCRAM has to prove that it knows the password too; a welcome in place of the proof is no proof.
#[tokio::test]
async fn a_welcome_before_the_scram_signature_is_refused() {
    let sasl = message(b'R', b"\0\0\0\x0aSCRAM-SHA-256\0\0");
    let welcome = [message(b'R', b"\0\0\0\0"), message(b'Z', b"I")].concat();
    let error = against(Doing::LogIn, &[sasl.clone(), welcome.clone()].concat(), true).await.0.unwrap_err();
    assert!(error.report().contains("a welcome before its SCRAM signature"), "{error:?}");
    let signature = message(b'R', b"\0\0\0\x0cv=AAAA");
    against(Doing::LogIn, &[sasl, signature.clone(), welcome.clone()].concat(), true).await.0.unwrap_err();
    against(Doing::LogIn, &[signature, welcome.clone()].concat(), true).await.0.unwrap_err();
    against(Doing::LogIn, &welcome, true).await.0.unwrap();
}

#[tokio::test]
async fn a_way_to_log_in_that_is_not_spoken_is_a_matter_of_configuration() {
    for body in [&b"\0\0\0\x07"[..], b"\0\0\0\x09", b"\0\0\0\x0aSCRAM-SHA-512\0\0"] {
        let error = against(Doing::LogIn, &message(b'R', body), true).await.0.unwrap_err();
        assert_eq!(error.class(), Class::Config, "{error:?}");
        assert!(!error.report().contains("canary"), "{error:?}");
    }
}

/// What a frame is, for comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Data(u64, Vec<u8>),
    Keepalive(u64, bool),
    Oversized,
}

fn one_frame() -> impl Strategy<Value = (Option<Seen>, Vec<u8>)> {
    const SMALL: usize = 200;
    prop_oneof![
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..SMALL))
            .prop_map(|(end, bytes)| (Some(Seen::Data(end, bytes.clone())), data(end, &bytes))),
        (any::<u64>(), any::<bool>())
            .prop_map(|(end, reply)| (Some(Seen::Keepalive(end, reply)), keepalive(end, reply))),
        (300_usize..5_000).prop_map(|size| (Some(Seen::Oversized), data(1, &vec![b'd'; size]))),
        Just((None, message(b'N', b"SNOTICE\0Mhello\0\0"))),
        Just((None, message(b'S', b"name\0value\0"))),
    ]
}

proptest! {
    /// However the bytes are cut, and though every wait is abandoned and begun anew, the frames are the same.
    #[test]
    fn frames_do_not_depend_on_how_their_bytes_arrive(
        frames in proptest::collection::vec(one_frame(), 0..20),
        cuts in proptest::collection::vec(1_usize..600, 1..50),
    ) {
        let (mut stream, mut peer) = piped();
        let bytes: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        let mut seen = Vec::new();
        let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
            rest = later;
            peer.write_all(now).now_or_never().unwrap().unwrap();
            // A future that is dropped while it waits.
            while let Some(frame) = stream.next(250).now_or_never() {
                seen.push(match frame.unwrap() {
                    Frame::Data { wal_end, message } => Seen::Data(wal_end, message.to_vec()),
                    Frame::Keepalive { wal_end, reply } => Seen::Keepalive(wal_end, reply),
                    Frame::Oversized => Seen::Oversized,
                });
            }
        }
        let sent: Vec<Seen> = frames.into_iter().filter_map(|(frame, _)| frame).collect();
        prop_assert_eq!(seen, sent);
    }

    /// Messages of every kind with anything in them: an error or an end, never a panic or much memory.
    #[test]
    fn garbage_is_an_error(
        messages in proptest::collection::vec(
            (proptest::sample::select(&b"123AcCdDEGHIKnNRsStTZWvw\0\xff"[..]), proptest::collection::vec(any::<u8>(), 0..40), -6_i32..3),
            1..12,
        ),
    ) {
        let mut bytes = Vec::new();
        for (tag, body, wrong_by) in &messages {
            bytes.push(*tag);
            // Mostly right, for a wrong length ends the rest of the garbage.
            let wrong_by = if *wrong_by < -2 { 0 } else { *wrong_by };
            bytes.put_i32(i32::try_from(body.len()).unwrap() + 4 + wrong_by);
            bytes.extend_from_slice(body);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for doing in DOING {
            let (done, memory) = runtime.block_on(against(doing, &bytes, false));
            // By chance it may hold all that a log-in or an answer needs; a stream never ends well.
            prop_assert!(!matches!((doing, &done), (Doing::Next, Ok(()))));
            prop_assert!(memory < 1 << 20);
        }
    }
}
