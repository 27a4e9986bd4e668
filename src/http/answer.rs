//! One request, one answer. Pure but for the clock.

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};

use super::Site;
use crate::metrics::Exposition;

type Answer = Response<Full<Bytes>>;

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The pages. The order of the refusals matters: a stranger learns nothing of what is there.
pub(super) fn answer<B: hyper::body::Body>(site: &Site, request: &Request<B>) -> Answer {
    match host(request.uri(), request.headers()) {
        None => return plain(StatusCode::BAD_REQUEST, "one Host header is needed"),
        Some(host) if !is_allowed(host, &site.allowed_hosts) => {
            return plain(StatusCode::FORBIDDEN, "this name is not in [http] allowed_hosts");
        }
        Some(_) => {}
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD only");
        refusal.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    if !request.body().is_end_stream() {
        return plain(StatusCode::PAYLOAD_TOO_LARGE, "a request here has no body");
    }
    match request.uri().path() {
        "/metrics" => {
            let (exposition, kind) = match wants_openmetrics(request.headers()) {
                true => (Exposition::OpenMetrics, OPENMETRICS),
                false => (Exposition::Prometheus, PROMETHEUS),
            };
            respond(StatusCode::OK, kind, site.metrics.expose(exposition))
        }
        "/healthz" => match site.health.alive(Instant::now()) {
            Ok(()) => plain(StatusCode::OK, "alive"),
            Err(reason) => plain(StatusCode::SERVICE_UNAVAILABLE, &reason),
        },
        "/readyz" => match site.health.ready() {
            Ok(state) => plain(StatusCode::OK, state),
            Err(reason) => plain(StatusCode::SERVICE_UNAVAILABLE, reason),
        },
        _ => plain(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz"),
    }
}

/// The host that was asked for, without its port.
fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let mut given = headers.get_all(header::HOST).iter();
    let only = given.next().filter(|_| given.next().is_none())?;
    let authority = match uri.authority() {
        Some(authority) => authority.as_str(),
        None => only.to_str().ok()?,
    };
    if authority.contains('@') {
        return None;
    }
    match authority.strip_prefix('[') {
        Some(address) => address.split_once(']').map(|(address, _)| address),
        None => Some(authority.split_once(':').map_or(authority, |(host, _)| host)),
    }
}

/// An address cannot be made to lead here by somebody's name server, and `localhost` is never asked of one.
fn is_allowed(host: &str, names: &[String]) -> bool {
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    name == "localhost" || name.parse::<IpAddr>().is_ok() || names.contains(&name)
}

/// Whether any of the accepted types is OpenMetrics. Its weight is not looked at: scrapers that know it prefer it.
fn wants_openmetrics(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|kind| {
        let name = kind.split(';').next().unwrap_or_default().trim();
        let refused = kind.split(';').skip(1).any(|part| matches!(part.trim(), "q=0" | "q=0.0"));
        name.eq_ignore_ascii_case("application/openmetrics-text") && !refused
    })
}

fn plain(status: StatusCode, line: &str) -> Answer {
    respond(status, TEXT, format!("{line}\n"))
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_be_anybodys_are_refused_and_addresses_are_not() {
        let names = ["metrics.internal".to_owned()];
        for good in ["localhost", "LOCALHOST.", "127.0.0.1", "10.1.2.3", "::1", "metrics.internal", "Metrics.Internal."]
        {
            assert!(is_allowed(good, &names), "{good}");
        }
        for bad in ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "metrics.internal.evil", "0x7f.1"]
        {
            assert!(!is_allowed(bad, &names), "{bad}");
        }
    }

    #[test]
    fn the_host_is_taken_without_its_port_and_only_when_there_is_one() {
        let of = |uri: &str, hosts: &[&str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
            }
            host(&uri.parse().unwrap(), &headers).map(str::to_owned)
        };
        assert_eq!(of("/", &["a:9464"]).as_deref(), Some("a"));
        assert_eq!(of("/", &["[::1]:9464"]).as_deref(), Some("::1"));
        assert_eq!(of("http://evil.example/", &["localhost"]).as_deref(), Some("evil.example"));
        assert_eq!(of("/", &["localhost", "evil.example"]), None);
        assert_eq!(of("/", &["localhost@evil.example"]), None);
        assert_eq!(of("/", &[]), None);
    }

    #[test]
    fn openmetrics_is_for_those_who_ask() {
        let asks = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_str(accept).unwrap());
            wants_openmetrics(&headers)
        };
        assert!(asks("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"));
        assert!(asks("text/html, Application/OpenMetrics-Text"));
        assert!(!asks("text/plain;version=0.0.4"));
        assert!(!asks("*/*"));
        assert!(!asks("application/openmetrics-text;q=0, */*"));
        assert!(!wants_openmetrics(&HeaderMap::new()));
    }
}
