//! The server as strangers see it, over a socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::*;
use crate::config;
use crate::health::{Phase, Stuck};

fn site() -> (SocketAddr, Arc<Health>) {
    let text = "[postgres]\nurl = \"postgres://u:hunter2@localhost/d\"\n[sinks.out]\ntype = \"stdout\"\n\
                [handlers.one]\nevents = [\"a\"]\nsink = \"out\"\n";
    let config = config::parse(text, "f", &|_| None).unwrap();
    let health = Arc::new(Health::new(Duration::from_secs(10)));
    let metrics = Arc::new(Metrics::new(&config));
    let site = Site { metrics, health: Arc::clone(&health), allowed_hosts: vec!["metrics.internal".to_owned()] };
    (start("127.0.0.1:0".parse().unwrap(), site).unwrap(), health)
}

/// Status line and the rest of what came back.
fn send(address: SocketAddr, request: &[u8]) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(ANSWER_WITHIN * 2)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    // A server that refuses a request in its middle may reset the connection.
    let _end = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (status, rest) = answer.split_once("\r\n").unwrap_or((&answer, ""));
    (status.to_owned(), rest.to_owned())
}

fn get(address: SocketAddr, path: &str) -> (String, String) {
    send(address, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
}

#[test]
fn the_pages_are_there_and_no_other() {
    let (address, health) = site();
    let (status, metrics) = get(address, "/metrics?a=b");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(metrics.contains("content-type: text/plain; version=0.0.4"), "{metrics}");
    assert!(metrics.contains("lanebridge_outcomes_total{handler=\"one\",outcome=\"acked\"} 0"), "{metrics}");
    assert!(!metrics.contains("hunter2") && !metrics.to_lowercase().contains("access-control"), "{metrics}");
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n";
    let (_, metrics) = send(address, request);
    assert!(metrics.contains("content-type: application/openmetrics-text; version=1.0.0"), "{metrics}");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    let (status, body) = send(address, b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(status.contains("200") && body.ends_with("\r\n\r\n"), "{body}");
    for path in ["/", "/metrics/", "//metrics", "/../metrics", "/%6detrics", "/healthz/../metrics", "/favicon.ico"] {
        assert!(get(address, path).0.contains("404"), "{path}");
    }
    assert!(get(address, "/readyz").0.contains("503"));
    health.enters(Phase::OwnsLanes);
    assert!(get(address, "/readyz").0.contains("200"));
    assert!(get(address, "/healthz").0.contains("200"));
    let what = "lane 7 of handler one".to_owned();
    health.is_stuck(Some(Stuck { what, reason: "in flight", since: Duration::from_secs(11) }));
    let (status, body) = get(address, "/healthz");
    assert!(status.contains("503"), "{status}");
    assert!(body.ends_with("lane 7 of handler one made no progress for 11 s: in flight\n"), "{body}");
}

// B48.
#[test]
fn what_is_no_plain_question_is_refused() {
    let (address, _health) = site();
    let long = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(HEADER_BYTES * 2));
    for (request, status) in [
        (&b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n"[..], "403"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:9464\r\nOrigin: http://evil.example\r\n\r\n", "403"),
        (b"GET /metrics HTTP/1.1\r\nHost: metrics.internal\r\n\r\n", "200"),
        (b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "403"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", "400"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "400"),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", "405"),
        (b"OPTIONS /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n", "405"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n", "413"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", "413"),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03 a TLS hello\r\n\r\n", "400"),
        (b"GET / HTTP/3.0\r\n\r\n", "400"),
        (long.as_bytes(), "431"),
    ] {
        let (found, _) = send(address, request);
        assert!(found.contains(status), "{:?}: {found}", String::from_utf8_lossy(&request[..request.len().min(80)]));
    }
}

#[test]
fn what_follows_a_request_on_its_connection_is_not_answered() {
    let (address, _health) = site();
    let one = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(one.repeat(3).as_bytes()).unwrap();
    let mut answers = Vec::new();
    let _end = stream.read_to_end(&mut answers);
    assert_eq!(String::from_utf8_lossy(&answers).matches("HTTP/1.1").count(), 1);
}

// Slowloris: every place is taken by a client that never ends its request, and others get through after.
#[test]
fn clients_that_say_nothing_hold_nobody_up_for_long() {
    let (address, _health) = site();
    let began = Instant::now();
    let idle: Vec<TcpStream> = (0..CONNECTIONS + 10)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: local").unwrap();
            stream
        })
        .collect();
    assert!(get(address, "/healthz").0.contains("200"));
    assert!(began.elapsed() < HEADERS_WITHIN * 4, "{:?}", began.elapsed());
    drop(idle);
}

#[test]
fn an_address_that_is_taken_is_named_with_what_to_do() {
    let (address, health) = site();
    let config = config::parse("[postgres]\nurl = \"postgres://u@localhost/d\"\n", "f", &|_| None).unwrap();
    let site = Site { metrics: Arc::new(Metrics::new(&config)), health, allowed_hosts: Vec::new() };
    let report = start(address, site).unwrap_err().report();
    assert!(report.starts_with(&format!("listen on {address} for HTTP: ")), "{report}");
    assert!(report.contains("give [http] listen another port"), "{report}");
}
