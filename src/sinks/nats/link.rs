//! The connection to NATS: addresses, authentication, TLS, and what its events mean for publishes in flight.
//!
//! The client reconnects by itself for ever and says nothing to a publish whose connection broke, so its events
//! are kept here: a sender watches [`Link`] and gives up at a break instead of waiting for its whole timeout.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, ServerAddr, ServerError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::watch;

use crate::config::{self, NatsAuth, SecretSource};
use crate::error::{Error, Result};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Two unanswered pings end a connection, so that a broker that vanished without a word is noticed in 30 s.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A broker that comes back is found within this time.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// 36 bytes in base32 without padding: prefix, key, checksum.
const SEED_CHARS: usize = 58;

const STATE_POLL: Duration = Duration::from_millis(20);

/// Refused subjects that are remembered for the publishes that wait for them.
const MAX_DENIALS: usize = 64;

/// What the connection's events said so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Link {
    /// Rises with every lost connection.
    pub breaks: u64,
    /// Rises with every refused publish.
    pub denials: u64,
    /// The latest refused subjects with the value that `denials` then had.
    denied: VecDeque<(u64, String)>,
    /// Why the last attempt to connect failed; `None` once connected.
    pub trouble: Option<String>,
}

impl Link {
    /// Whether the server refused to let us publish to `subject` after `denials` had that value.
    pub fn denied_since(&self, denials: u64, subject: &str) -> bool {
        self.denied.iter().any(|(at, denied)| *at > denials && denied == subject)
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Connected => self.trouble = None,
            Event::Disconnected | Event::Closed => {
                self.breaks += 1;
                self.trouble = Some("the connection was lost".into());
            }
            Event::ServerError(ServerError::Other(text)) => {
                if let Some(subject) = denied_subject(text) {
                    self.denials += 1;
                    self.denied.push_back((self.denials, subject.to_owned()));
                    if self.denied.len() > MAX_DENIALS {
                        self.denied.pop_front();
                    }
                }
            }
            Event::ServerError(ServerError::AuthorizationViolation) => {
                self.trouble = Some("authorization violation".into());
            }
            Event::ClientError(error) => self.trouble = Some(error.to_string()),
            Event::LameDuckMode | Event::Draining | Event::SlowConsumer(_) | Event::ServerError(_) => {}
        }
    }
}

/// The subject in `Permissions Violation for Publish to "x"` (nats-server `client.go`, `pubPermissionViolation`).
fn denied_subject(text: &str) -> Option<&str> {
    let start = "permissions violation for publish to \"";
    let head = text.get(..start.len())?;
    head.eq_ignore_ascii_case(start).then(|| text[start.len()..].trim_end_matches('"'))
}

/// A client that connects in the background, the events of its connection, and its addresses without secrets.
///
/// # Errors
/// [`Class::Config`](crate::error::Class::Config) for an address that is none and for files that cannot be read.
pub(super) async fn open(name: &str, config: &config::Nats) -> Result<(Client, watch::Receiver<Link>, String)> {
    let servers = addresses(name, config.url.expose())?;
    let shown: Vec<_> = servers.iter().map(|server| format!("{}:{}", server.host(), server.port())).collect();
    let (link, events) = watch::channel(Link::default());
    let link = Arc::new(link);
    let mut options = authenticate(name, &config.auth, &servers).await?;
    if config.tls.enabled || servers.iter().any(ServerAddr::tls_required) {
        options = options.require_tls(true).tls_client_config(tls(name, &config.tls)?);
    }
    let client = options
        .name(format!("lanebridge {name}"))
        .connection_timeout(CONNECT_TIMEOUT)
        .ping_interval(PING_INTERVAL)
        .retry_on_initial_connect()
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
        .event_callback(move |event| {
            link.send_modify(|link| link.note(&event));
            std::future::ready(())
        })
        .connect(servers)
        .await
        .map_err(|error| Error::config(format!("[sinks.{name}] cannot use its url")).source_is(error))?;
    Ok((client, events, shown.join(",")))
}

/// Waits until the client is connected.
///
/// # Errors
/// Why not, after `wait`.
pub(super) async fn connected(client: &Client, link: &watch::Receiver<Link>, wait: Duration) -> Result<(), String> {
    let mut changes = link.clone();
    let up = async {
        // The client sends its event just before it sets its state, so the event alone would be early.
        while client.connection_state() != State::Connected {
            if let Ok(Err(_closed)) = tokio::time::timeout(STATE_POLL, changes.changed()).await {
                return;
            }
        }
    };
    let waited = tokio::time::timeout(wait, up).await;
    if waited.is_ok() && client.connection_state() == State::Connected {
        return Ok(());
    }
    Err(link.borrow().trouble.clone().unwrap_or_else(|| "not connected yet".into()))
}

/// 0, 8, 16 … 1,000 ms: a restart of one server of several costs nothing, an outage costs one attempt a second.
fn reconnect_delay(attempts: usize) -> Duration {
    match u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX) {
        0 => Duration::ZERO,
        again => Duration::from_millis(4).saturating_mul(2u32.saturating_pow(again.min(20))).min(MAX_RECONNECT_DELAY),
    }
}

fn addresses(name: &str, urls: &str) -> Result<Vec<ServerAddr>> {
    let mut servers = Vec::new();
    for (at, url) in urls.split(',').map(str::trim).filter(|url| !url.is_empty()).enumerate() {
        // The parser's message may quote the address, which may hold a password.
        let server = url.parse().map_err(|_| {
            Error::config(format!("[sinks.{name}] url: address {} is not one of NATS", at + 1))
                .hint("nats://host:4222, or tls://host:4222, several separated by commas")
        })?;
        servers.push(server);
    }
    if servers.is_empty() {
        return Err(Error::config(format!("[sinks.{name}] url is empty")).hint("url = \"nats://localhost:4222\""));
    }
    Ok(servers)
}

/// A password or token in a file is read at every connect. A seed or a credentials file is read once: a new one
/// needs a new key pair, and the client keeps that of its start.
async fn authenticate(name: &str, auth: &NatsAuth, servers: &[ServerAddr]) -> Result<ConnectOptions> {
    let options = ConnectOptions::new();
    Ok(match auth {
        NatsAuth::Url => match servers.iter().find_map(|server| Some((server.username()?, server.password()))) {
            // The client itself ignores them. A name alone is a token, by the convention of NATS clients.
            Some((user, Some(password))) => options.user_and_password(decoded(user), decoded(password)),
            Some((token, None)) => options.token(decoded(token)),
            None => options,
        },
        NatsAuth::User { username, password } => {
            let (username, password) = (username.clone(), password.clone());
            read(name, &password)?;
            ConnectOptions::with_auth_callback(move |_nonce| {
                std::future::ready(secret(&password).map_err(AuthError::new).map(|password| {
                    let mut auth = Auth::new();
                    auth.username = Some(username.clone());
                    auth.password = Some(password);
                    auth
                }))
            })
        }
        NatsAuth::Token(token) => {
            let token = token.clone();
            read(name, &token)?;
            ConnectOptions::with_auth_callback(move |_nonce| {
                std::future::ready(secret(&token).map_err(AuthError::new).map(|token| {
                    let mut auth = Auth::new();
                    auth.token = Some(token);
                    auth
                }))
            })
        }
        NatsAuth::Nkey(seed) => {
            let seed = read(name, seed)?;
            // The client would find out at every connect, and say no more than that it cannot sign.
            if seed.len() != SEED_CHARS || !seed.starts_with("SU") || !seed.bytes().all(|b| b.is_ascii_alphanumeric()) {
                let what = format!("[sinks.{name}] has an nkey that is not the seed of a user");
                return Err(Error::config(what).hint(
                    "58 letters and digits that start with SU; a file of it belongs to the key that ends in _file",
                ));
            }
            options.nkey(seed)
        }
        NatsAuth::CredsFile(path) => options
            .credentials_file(path)
            .await
            .map_err(|error| unreadable(name, "credentials file", path).source_is(error))?,
    })
}

fn read(name: &str, source: &SecretSource) -> Result<String> {
    secret(source).map_err(|error| match source {
        SecretSource::Inline(_) => Error::config(format!("[sinks.{name}] has a bad secret")).source_is(error),
        SecretSource::File(path) => unreadable(name, "secret", path).source_is(error),
    })
}

/// Blocks for one small file, once per connect.
fn secret(source: &SecretSource) -> std::io::Result<String> {
    match source {
        SecretSource::Inline(secret) => Ok(secret.expose().to_owned()),
        SecretSource::File(path) => Ok(std::fs::read_to_string(path)?.trim_end_matches(['\r', '\n']).to_owned()),
    }
}

/// `%XX` of a URL's user part.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = (*first == b'%').then(|| tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok())).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Built here, so that a bad file is found at start and missing system certificates do not matter.
fn tls(name: &str, tls: &config::Tls) -> Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    match &tls.ca_file {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            for certificate in certificates(name, path)? {
                roots.add(certificate).map_err(|error| unreadable(name, "certificate", path).source_is(error))?;
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::config(format!("[sinks.{name}] cannot use TLS")).source_is(error))?
        .with_root_certificates(roots);
    match (&tls.cert_file, &tls.key_file) {
        (Some(certificate), Some(key)) => {
            let chain = certificates(name, certificate)?;
            let private =
                PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(name, "key", key).source_is(error))?;
            builder
                .with_client_auth_cert(chain, private)
                .map_err(|error| unreadable(name, "client certificate", certificate).source_is(error))
        }
        (None, None) => Ok(builder.with_no_client_auth()),
        _ => Err(Error::config(format!("[sinks.{name}] has only one of tls.cert_file and tls.key_file"))),
    }
}

fn certificates(name: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let read = read.map_err(|error| unreadable(name, "certificate", path).source_is(error))?;
    if read.is_empty() {
        return Err(unreadable(name, "certificate", path).hint("the file holds no PEM certificate"));
    }
    Ok(read)
}

fn unreadable(name: &str, what: &str, path: &Path) -> Error {
    Error::config(format!("[sinks.{name}] cannot use the {what} in {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_subject_is_remembered_for_the_publishes_that_came_before_it() {
        let refuse = |subject: &str| {
            Event::ServerError(ServerError::Other(format!("Permissions Violation for Publish to \"{subject}\"")))
        };
        let mut link = Link::default();
        link.note(&refuse("a"));
        assert!(link.denied_since(0, "a"));
        assert!(!link.denied_since(1, "a"));
        for _ in 0..MAX_DENIALS {
            link.note(&refuse("b"));
        }
        assert!(!link.denied_since(0, "a"));
        link.note(&Event::ServerError(ServerError::Other("é".repeat(80))));
        assert_eq!(link.denials, 1 + MAX_DENIALS as u64);
    }

    #[test]
    fn the_reconnect_delay_starts_at_nothing_and_ends_at_one_second() {
        assert_eq!(reconnect_delay(1), Duration::ZERO);
        assert_eq!(reconnect_delay(2), Duration::from_millis(8));
        assert_eq!(reconnect_delay(usize::MAX), MAX_RECONNECT_DELAY);
    }

    #[test]
    fn a_bad_address_is_counted_and_never_quoted() {
        let report = addresses("js", "nats://a, http://u:hunter2@b").unwrap_err().report();
        assert!(report.contains("[sinks.js]") && report.contains("address 2"), "{report}");
        assert!(!report.contains("hunter2"), "{report}");
        assert!(addresses("js", " , ").is_err());
    }

    #[test]
    fn user_parts_of_an_address_are_percent_decoded() {
        assert_eq!(decoded("p%40ss%2"), "p@ss%2");
        assert_eq!(decoded("%é"), "%é");
    }
}
