//! Reads `[postgres]`, `[bridge]`, `[http]` and `[retention]`, with their defaults, ranges and rules between keys.

use std::net::SocketAddr;
use std::time::Duration;

use super::pg_url::{PgUrl, SslMode};
use super::section::{Section, Text};
use super::units::{show_duration, show_size};
use super::{Bridge, Http, Ownership, Postgres, Retention, Secret, SourceKind, WakeUp, validate};

const URL_VARIABLE: &str = "LANEBRIDGE_POSTGRES_URL";

const SCHEMA: &str = "lanebridge";
/// A failover of a managed database answers within this; longer waits hide a wrong address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Far above every statement of the bridge, below what an operator takes for a hang.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// What Kafka and NATS accept unless told otherwise.
const MAX_PAYLOAD_BYTES: u64 = 1 << 20;
const LARGEST_PAYLOAD_BYTES: u64 = 256 << 20;

/// The worst latency when no hint arrives; an idle poll is an index scan of owned lanes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How late a row that every hint and bound missed can be.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Below the 30 s after which Kubernetes kills.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// Some 200,000 payloads of 300 bytes, or 64 of the largest.
const MAX_IN_FLIGHT_BYTES: u64 = 64 << 20;

const HTTP_LISTEN: &str = "127.0.0.1:9464";

const DAY: Duration = Duration::from_secs(86_400);
const RETENTION_EVENTS: Duration = Duration::from_secs(7 * 86_400);
const RETENTION_DEAD: Duration = Duration::from_secs(30 * 86_400);
const LONGEST_RETENTION: Duration = Duration::from_secs(36_500 * 86_400);

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

pub(super) fn postgres(mut section: Section<'_>) -> Postgres {
    let has_url = section.has("url");
    let (url, parsed) = match section.report.env(URL_VARIABLE) {
        Some(url) => {
            // The file's own URL does not count then; it may need variables that are not set here.
            section.ask("url");
            let parsed = PgUrl::parse(&url);
            if let Err(rule) = &parsed {
                section.report.problem_elsewhere(format!("{URL_VARIABLE}: {rule}"));
            }
            (url, parsed.ok())
        }
        None => {
            if !has_url {
                let hint = format!("url = \"postgres://user@host:5432/database\", or set {URL_VARIABLE}");
                section.missing("url", &hint);
            }
            read_url(&mut section, "url")
        }
    };
    let has_direct = section.has("direct_url");
    let (direct_url, direct) = read_url(&mut section, "direct_url");
    let password_file = section.path("password_file");
    for (name, parsed) in [("url", &parsed), ("direct_url", &direct)] {
        let password = parsed.as_ref().is_some_and(|url| url.password.is_some());
        if password && password_file.is_some() {
            let what = format!("and the password in {name} are both given; keep one");
            section.problem(section.at_key("password_file"), "password_file", what);
        }
    }
    let schema = checked(&mut section, "schema", SCHEMA, validate::schema);
    let table_prefix = checked(&mut section, "table_prefix", "", validate::table_prefix);
    let connect_timeout = section.duration("connect_timeout", 100 * MS..=600 * SECOND);
    let url_timeout = parsed.as_ref().and_then(|url| url.connect_timeout);
    if let (Some(ours), Some(urls)) = (connect_timeout, url_timeout)
        && ours != urls
    {
        let what =
            format!("is \"{}\", but connect_timeout in url is {} s; keep one", show_duration(ours), urls.as_secs());
        section.problem(section.at_key("connect_timeout"), "connect_timeout", what);
    }
    let statement_timeout = section.duration("statement_timeout", 100 * MS..=HOUR);
    let max_payload_bytes = section.bytes("max_payload_bytes", 1..=LARGEST_PAYLOAD_BYTES).unwrap_or(MAX_PAYLOAD_BYTES);
    section.finish();
    Postgres {
        url: Secret::new(url),
        direct_url: has_direct.then(|| Secret::new(direct_url)),
        password_file,
        schema,
        table_prefix,
        connect_timeout: connect_timeout.or(url_timeout).unwrap_or(CONNECT_TIMEOUT),
        statement_timeout: statement_timeout.unwrap_or(STATEMENT_TIMEOUT),
        max_payload_bytes: u32::try_from(max_payload_bytes).expect("the range is below 2^32"),
    }
}

fn read_url(section: &mut Section<'_>, key: &'static str) -> (String, Option<PgUrl>) {
    let Some(text) = section.text(key) else { return (String::new(), None) };
    match PgUrl::parse(&text.value) {
        Ok(parsed) => {
            if parsed.password.is_some() && !text.filled {
                let what =
                    "holds a password inside the file; hint: password_file, \"${NAME}\" or LANEBRIDGE_POSTGRES_URL";
                section.warn(text.at, key, what);
            }
            if parsed.sslmode == SslMode::Disable && parsed.leaves_this_machine() {
                section.warn(text.at, key, "has sslmode=disable off loopback: all events cross the network in clear");
            }
            (text.value, Some(parsed))
        }
        Err(rule) => {
            section.problem(text.at, key, rule);
            (text.value, None)
        }
    }
}

/// `schema` is for the default of `ce_source`, `max_payload_bytes` for the rule that one must fit.
pub(super) fn bridge(mut section: Section<'_>, schema: &str, max_payload_bytes: u32) -> Bridge {
    let host_name = host_name(&section);
    let name = checked(&mut section, "name", &host_name, validate::bridge_name);
    let source =
        section.choice("source", &[("auto", SourceKind::Auto), ("wal", SourceKind::Wal), ("poll", SourceKind::Poll)]);
    if source == Some(SourceKind::Wal) {
        section.problem(section.at_key("source"), "source", "\"wal\" is not built yet; hint: \"auto\" or \"poll\"");
    }
    let wake_up =
        section.choice("wake_up", &[("auto", WakeUp::Auto), ("notify", WakeUp::Notify), ("poll", WakeUp::Poll)]);
    let ownership = section.choice("ownership", &[("advisory", Ownership::Advisory), ("lease", Ownership::Lease)]);
    if ownership == Some(Ownership::Lease) {
        let what = "\"lease\" is not built yet; hint: \"advisory\", with postgres.direct_url past the pooler";
        section.problem(section.at_key("ownership"), "ownership", what);
    }
    let poll_interval = section.duration("poll_interval", 10 * MS..=HOUR);
    let sweep_interval = section.duration("sweep_interval", 100 * MS..=HOUR);
    let (poll, sweep) = (poll_interval.unwrap_or(POLL_INTERVAL), sweep_interval.unwrap_or(SWEEP_INTERVAL));
    if sweep < poll {
        let key = if sweep_interval.is_some() { "sweep_interval" } else { "poll_interval" };
        let what = format!(
            "sweep_interval = \"{}\" is below poll_interval = \"{}\": every poll would read all of its lanes from the \
             start, which is slow under a held snapshot; hint: sweep_interval at least poll_interval",
            show_duration(sweep),
            show_duration(poll)
        );
        section.problem(section.at_key(key), key, what);
    }
    let shutdown_timeout = section.duration("shutdown_timeout", SECOND..=HOUR).unwrap_or(SHUTDOWN_TIMEOUT);
    let max_in_flight_bytes = section.bytes("max_in_flight_bytes", 1 << 20..=64 << 30).unwrap_or(MAX_IN_FLIGHT_BYTES);
    if max_in_flight_bytes < max_payload_bytes.into() {
        let what = format!(
            "max_in_flight_bytes = \"{}\" is below postgres.max_payload_bytes = \"{}\": an event of that size would be \
             accepted and never sent",
            show_size(max_in_flight_bytes),
            show_size(max_payload_bytes.into())
        );
        section.problem(section.at_key("max_in_flight_bytes"), "max_in_flight_bytes", what);
    }
    let ce_source = checked(&mut section, "ce_source", &format!("/lanebridge/{schema}"), validate::ce_source);
    section.finish();
    Bridge {
        name,
        source: source.unwrap_or(SourceKind::Auto),
        wake_up: wake_up.unwrap_or(WakeUp::Auto),
        ownership: ownership.unwrap_or(Ownership::Advisory),
        poll_interval: poll,
        sweep_interval: sweep,
        shutdown_timeout,
        max_in_flight_bytes,
        ce_source,
    }
}

pub(super) fn http(mut section: Section<'_>) -> Http {
    let default = HTTP_LISTEN.parse().expect("a constant");
    let listen = match section.text("listen") {
        None => Some(default),
        Some(text) if text.value.is_empty() => None,
        Some(text) => match text.value.parse::<SocketAddr>() {
            Ok(address) => {
                if !address.ip().is_loopback() {
                    section.warn(text.at, "listen", "is open to the network, and the console has no password");
                }
                Some(address)
            }
            Err(_) => {
                let what = format!(
                    "{} is no address and port; hint: \"{HTTP_LISTEN}\", \"[::1]:9464\", or \"\" for no HTTP",
                    text.shown()
                );
                section.problem(text.at, "listen", what);
                Some(default)
            }
        },
    };
    section.finish();
    Http { listen }
}

pub(super) fn retention(mut section: Section<'_>) -> Retention {
    // Partitions are whole days, so nothing shorter can be kept.
    let events = section.duration_or_never("events", DAY..=LONGEST_RETENTION, RETENTION_EVENTS);
    let dead = section.duration_or_never("dead", HOUR..=LONGEST_RETENTION, RETENTION_DEAD);
    let history = section.flag("history", false);
    if history {
        section.problem(section.at_key("history"), "history", "true is not built yet; hint: false");
    }
    section.finish();
    Retention { events, dead, history }
}

fn checked(
    section: &mut Section<'_>,
    key: &'static str,
    default: &str,
    rule: impl Fn(&str) -> Result<(), String>,
) -> String {
    let Some(text) = section.text(key) else { return default.to_owned() };
    let Text { at, value, .. } = &text;
    match rule(value) {
        Ok(()) => text.value,
        Err(rule) => {
            section.problem(*at, key, format!("{} {rule}", text.shown()));
            default.to_owned()
        }
    }
}

/// Always a good name: what no name may hold becomes `-`.
fn host_name(section: &Section<'_>) -> String {
    let host = section.report.env("HOSTNAME").unwrap_or_default();
    let fit = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let name: String = host.trim().chars().take(64).map(fit).collect();
    if name.is_empty() { "lanebridge".to_owned() } else { name }
}
