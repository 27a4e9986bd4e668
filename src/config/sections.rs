//! Reads `[postgres]`, `[bridge]`, `[http]` and `[retention]`, with their defaults, ranges and rules between keys.

use std::net::SocketAddr;
use std::time::Duration;

use super::pg_url::{PgUrl, SslMode};
use super::section::{Section, Text};
use super::units::{show_duration, show_size};
use super::{Bridge, Http, Ownership, Postgres, Retention, Secret, SourceKind, WakeUp, Wal, validate};

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
/// Twice the longest heartbeat; a machine that swaps that long has stopped delivering.
const FROZEN_AFTER: Duration = Duration::from_secs(10);
/// Some 200,000 payloads of 300 bytes, or 64 of the largest.
const MAX_IN_FLIGHT_BYTES: u64 = 64 << 20;

/// Some 50,000 payloads of 300 bytes: more than is sent between a commit and the poll that it wakes.
const WAL_CACHE_BYTES: u64 = 32 << 20;
const WAL_MAX_TRANSACTION: u64 = 8 << 20;
/// Four segments of log; nobody misses them on their disk.
const WAL_MAX_RETAINED: u64 = 64 << 20;
/// Four times what the server decodes in memory.
const WAL_MAX_SPILL: u64 = 256 << 20;
const WAL_MAX_BEHIND: Duration = Duration::from_secs(30);
const WAL_CANARY_INTERVAL: Duration = Duration::from_secs(5);
const WAL_SLOT_TIMEOUT: Duration = Duration::from_secs(30);
const WAL_SENDER_TIMEOUT: Duration = Duration::from_secs(10);

const HTTP_LISTEN: &str = "127.0.0.1:9464";
/// Well above the longest answer of a database or a broker at their defaults: what is slow is not stuck.
const HTTP_STUCK_AFTER: Duration = Duration::from_secs(120);

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
/// `direct`: whether there is a way past a pooler.
pub(super) fn bridge(mut section: Section<'_>, schema: &str, max_payload_bytes: u32, direct: bool) -> Bridge {
    let host_name = host_name(&section);
    let name = checked(&mut section, "name", &host_name, validate::bridge_name);
    let source =
        section.choice("source", &[("auto", SourceKind::Auto), ("wal", SourceKind::Wal), ("poll", SourceKind::Poll)]);
    let wake_up =
        section.choice("wake_up", &[("auto", WakeUp::Auto), ("notify", WakeUp::Notify), ("poll", WakeUp::Poll)]);
    let ownership = section.choice("ownership", &[("advisory", Ownership::Advisory), ("lease", Ownership::Lease)]);
    if ownership == Some(Ownership::Lease) && !direct {
        let hint = "it needs a session of its own, which ownership = \"lease\" does without; hint: postgres.direct_url";
        if source == Some(SourceKind::Wal) {
            section.problem(section.at_key("source"), "source", format!("\"wal\": {hint}, or \"auto\""));
        }
        if wake_up == Some(WakeUp::Notify) {
            section.problem(section.at_key("wake_up"), "wake_up", format!("\"notify\": {hint}, or \"auto\""));
        }
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
    let frozen_after = section.duration("frozen_after", 5 * SECOND..=HOUR).unwrap_or(FROZEN_AFTER);
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
        frozen_after,
        max_in_flight_bytes,
        ce_source,
    }
}

pub(super) fn wal(mut section: Section<'_>) -> Wal {
    let mib = |n: u64| n << 20;
    let wal = Wal {
        cache_bytes: section.bytes("cache_bytes", mib(1)..=mib(64 << 10)).unwrap_or(WAL_CACHE_BYTES),
        max_transaction: section.bytes("max_transaction", mib(1)..=mib(1 << 10)).unwrap_or(WAL_MAX_TRANSACTION),
        max_retained: section.bytes("max_retained", mib(16)..=mib(1 << 20)).unwrap_or(WAL_MAX_RETAINED),
        max_spill: section.bytes("max_spill", mib(1)..=mib(1 << 20)).unwrap_or(WAL_MAX_SPILL),
        max_behind: section.duration("max_behind", SECOND..=HOUR).unwrap_or(WAL_MAX_BEHIND),
        canary_interval: section.duration("canary_interval", 100 * MS..=60 * SECOND).unwrap_or(WAL_CANARY_INTERVAL),
        slot_timeout: section.duration("slot_timeout", 100 * MS..=HOUR).unwrap_or(WAL_SLOT_TIMEOUT),
        sender_timeout: section.duration("sender_timeout", 3 * SECOND..=HOUR).unwrap_or(WAL_SENDER_TIMEOUT),
    };
    section.finish();
    wal
}

/// `longest_answer`: what the database or a broker may take.
pub(super) fn http(mut section: Section<'_>, longest_answer: Duration) -> Http {
    let default = HTTP_LISTEN.parse().expect("a constant");
    let listen = match section.text("listen") {
        None => Some(default),
        Some(text) if text.value.is_empty() => None,
        Some(text) => match text.value.parse::<SocketAddr>() {
            Ok(address) => {
                if !address.ip().is_loopback() {
                    section.warn(text.at, "listen", "is open to the network, and what is served has no password");
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
    let mut allowed_hosts = Vec::new();
    for host in section.texts("allowed_hosts").unwrap_or_default() {
        match validate::host_name(&host.value) {
            Ok(()) => allowed_hosts.push(host.value.to_ascii_lowercase()),
            Err(rule) => section.problem(host.at, "allowed_hosts", format!("{} {rule}", host.shown())),
        }
    }
    let stuck_after = section.duration("stuck_after", 10 * SECOND..=24 * HOUR);
    if stuck_after.is_some_and(|given| given <= longest_answer) {
        let what = format!(
            "is not above {}, the longest of connect_timeout with statement_timeout and of send_timeout: what waits for \
             an answer would count as stuck",
            show_duration(longest_answer)
        );
        section.problem(section.at_key("stuck_after"), "stuck_after", what);
    }
    let stuck_after = stuck_after.unwrap_or(HTTP_STUCK_AFTER.max(longest_answer * 2));
    section.finish();
    Http { listen, allowed_hosts, stuck_after }
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

#[cfg(test)]
mod tests {
    use super::super::testing::{SMALLEST, bad, each_is_refused, good, read};
    use super::*;

    #[test]
    fn the_smallest_file_gets_every_default() {
        let config = good("");
        assert_eq!((config.postgres.schema.as_str(), config.postgres.table_prefix.as_str()), ("lanebridge", ""));
        assert_eq!(config.postgres.max_payload_bytes, 1 << 20);
        assert_eq!(config.bridge.name, "host-1");
        assert_eq!(config.bridge.ce_source, "/lanebridge/lanebridge");
        assert_eq!(config.bridge.poll_interval, SECOND);
        assert_eq!(config.http.listen.map(|address| address.to_string()).as_deref(), Some(HTTP_LISTEN));
        assert_eq!(config.retention.events, Some(7 * DAY));
        assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
        assert!(config.warnings[0].contains("nothing is delivered"));
    }

    #[test]
    fn every_range_holds_on_its_boundary_and_not_outside() {
        for (section, key, inside, outside) in [
            ("postgres", "connect_timeout", ["100ms", "10m"], ["99ms", "601s"]),
            ("postgres", "statement_timeout", ["100ms", "1h"], ["99ms", "3601s"]),
            ("postgres", "max_payload_bytes", ["1B", "256MiB"], ["0B", "257MiB"]),
            ("bridge", "poll_interval", ["10ms", "5s"], ["9ms", "61m"]),
            ("bridge", "sweep_interval", ["1s", "1h"], ["999ms", "61m"]),
            ("bridge", "shutdown_timeout", ["1s", "1h"], ["999ms", "61m"]),
            ("bridge", "frozen_after", ["5s", "1h"], ["4s", "61m"]),
            ("bridge", "max_in_flight_bytes", ["1MiB", "64GiB"], ["1023KiB", "65GiB"]),
            ("wal", "cache_bytes", ["1MiB", "64GiB"], ["1023KiB", "65GiB"]),
            ("wal", "max_transaction", ["1MiB", "1GiB"], ["1023KiB", "1025MiB"]),
            ("wal", "max_retained", ["16MiB", "1024GiB"], ["15MiB", "1025GiB"]),
            ("wal", "max_spill", ["1MiB", "1024GiB"], ["1023KiB", "1025GiB"]),
            ("wal", "max_behind", ["1s", "1h"], ["999ms", "61m"]),
            ("wal", "canary_interval", ["100ms", "60s"], ["99ms", "61s"]),
            ("wal", "slot_timeout", ["100ms", "1h"], ["99ms", "61m"]),
            ("wal", "sender_timeout", ["3s", "1h"], ["2s", "61m"]),
            ("retention", "events", ["1d", "36500d"], ["23h", "36501d"]),
            ("retention", "dead", ["1h", "36500d"], ["59m", "36501d"]),
        ] {
            // The largest payload needs room in memory; that rule has its own test.
            let room = if key == "max_payload_bytes" { "[bridge]\nmax_in_flight_bytes = \"1GiB\"\n" } else { "" };
            let head = if section == "postgres" { String::new() } else { format!("[{section}]\n") };
            let with = |value: &str| format!("{head}{key} = \"{value}\"\n{room}");
            for value in inside {
                good(&with(value));
            }
            for value in outside {
                let report = bad(&with(value));
                assert!(report.contains(&format!("{section}.{key}: ")) && report.contains(value), "{report}");
            }
        }
        assert_eq!(good("max_payload_bytes = 4096").postgres.max_payload_bytes, 4096);
    }

    #[test]
    fn zero_is_never_only_where_that_has_a_meaning() {
        for zero in ["0", "0s", "0d"] {
            let config = good(&format!("[retention]\nevents = \"{zero}\"\ndead = \"{zero}\""));
            assert_eq!((config.retention.events, config.retention.dead), (None, None));
        }
        each_is_refused(&[
            ("[bridge]\npoll_interval = \"0\"", "must be from \"10ms\" to \"1h\", not \"0\""),
            ("max_payload_bytes = 0", "whole number from 1 to 268435456, not 0"),
            ("[retention]\nevents = 0", "must be a duration with its unit, not 0"),
        ]);
    }

    #[test]
    fn wrong_types_and_forms_name_the_key_the_value_and_the_expected_form() {
        each_is_refused(&[
            (
                "connect_timeout = 30",
                "postgres.connect_timeout: must be a duration with its unit, not 30; hint: \"30s\"",
            ),
            ("connect_timeout = \"30\"", "postgres.connect_timeout: \"30\" has no unit"),
            ("connect_timeout = \"-1s\"", "negative"),
            ("connect_timeout = 100000000000000000000", "not 100000000000000000000"),
            ("connect_timeout = \"100000000000000000000s\"", "too large"),
            ("connect_timeout = [\"1s\"]", "not a list"),
            ("max_payload_bytes = -1", "not -1"),
            ("max_payload_bytes = 1.5", "must be a size with its unit, not 1.5"),
            ("max_payload_bytes = 100000000000000000000", "not 100000000000000000000"),
            ("schema = 7", "must be a string in quotes, not 7"),
            ("schema = \"Public\"", "\"Public\" must be lower-case"),
            ("schema = \"\"", "must not be empty"),
            ("table_prefix = \"a-\"", "postgres.table_prefix"),
            ("schema = \"a\\u0000\"", "holds a NUL"),
            ("password_file = \"\"", "is empty"),
            ("[bridge]\nname = \"a b\"", "bridge.name"),
            ("[bridge]\nce_source = \"a b\"", "bridge.ce_source"),
            ("[bridge]\nsource = \"pol\"", "unknown value \"pol\"; allowed: auto, wal, poll; did you mean \"poll\"?"),
            ("[retention]\nhistory = \"false\"", "must be true or false without quotes"),
            ("[retention]\nhistory = 0", "must be true or false, not 0"),
            ("[http]\nlisten = \"localhost:9464\"", "hint: \"127.0.0.1:9464\""),
            ("[http]\nlisten = \":9464\"", "no address and port"),
            ("[http]\nlisten = \"127.0.0.1:65536\"", "no address and port"),
            ("[http]\nallowed_hosts = [\"a:80\"]", "\"a:80\" must be a host name without scheme, port"),
            ("[http]\nallowed_hosts = [\"*\"]", "port and wildcards"),
            ("[http]\nallowed_hosts = [\"\"]", "must be a host name"),
            ("[http]\nallowed_hosts = \"a\"", "must be a list of strings"),
        ]);
    }

    #[test]
    fn what_is_not_built_yet_is_refused_rather_than_ignored() {
        each_is_refused(&[("[retention]\nhistory = true", "retention.history: true is not built yet")]);
        good("[bridge]\nsource = \"wal\"\nownership = \"advisory\"\n[retention]\nhistory = false");
    }

    #[test]
    fn rules_between_keys_state_the_consequence() {
        each_is_refused(&[
            (
                "[bridge]\nownership = \"lease\"\nsource = \"wal\"",
                "bridge.source: \"wal\": it needs a session of its own",
            ),
            ("[bridge]\nownership = \"lease\"\nwake_up = \"notify\"", "hint: postgres.direct_url, or \"auto\""),
            ("[bridge]\npoll_interval = \"6s\"", "every poll would read all of its lanes"),
            ("max_payload_bytes = \"2MiB\"\n[bridge]\nmax_in_flight_bytes = \"1MiB\"", "accepted and never sent"),
            (
                "connect_timeout = \"3s\"\npassword_file = \"/x\"\ndirect_url = \"postgres://u:hunter2@localhost/d\"",
                "direct_url are both given",
            ),
        ]);
        good("max_payload_bytes = \"2MiB\"\n[bridge]\nmax_in_flight_bytes = \"2MiB\"");
        let both = "[postgres]\nurl = \"postgres://u@localhost/d?connect_timeout=3\"\nconnect_timeout = ";
        assert!(read(&format!("{both}\"4s\"")).unwrap_err().contains("in url is 3 s"));
        assert_eq!(read(&format!("{both}\"3s\"")).unwrap().postgres.connect_timeout, 3 * SECOND);
        let urls = read("[postgres]\nurl = \"postgres://u@localhost/d?connect_timeout=3\"").unwrap();
        assert_eq!(urls.postgres.connect_timeout, 3 * SECOND);
    }

    #[test]
    fn what_is_slow_is_not_stuck() {
        let after = |extra: &str| good(extra).http.stuck_after;
        assert_eq!(after(""), HTTP_STUCK_AFTER);
        assert_eq!(after("statement_timeout = \"5m\""), 620 * SECOND);
        assert_eq!(after("statement_timeout = \"30s\"\n[http]\nstuck_after = \"41s\""), 41 * SECOND);
        assert_eq!(after("[sinks.s]\ntype = \"stdout\"\nsend_timeout = \"70s\""), 140 * SECOND);
        each_is_refused(&[
            ("[http]\nstuck_after = \"40s\"", "would count as stuck"),
            ("statement_timeout = \"5s\"\n[http]\nstuck_after = \"9s\"", "http.stuck_after: must be from \"10s\" to"),
            ("[http]\nstuck_after = \"25h\"", "http.stuck_after: must be from \"10s\" to"),
        ]);
    }

    #[test]
    fn the_variable_overrides_the_url_and_empty_counts_as_unset() {
        let parse = |text: &str, url: &'static str| {
            super::super::parse(text, "f", &|name: &str| (name == URL_VARIABLE).then(|| url.to_owned()))
        };
        let file = "[postgres]\nurl = \"postgres://${UNSET}@file/d\"\n";
        assert_eq!(parse(file, "postgres://u@env/d").unwrap().postgres.url.expose(), "postgres://u@env/d");
        assert_eq!(parse(SMALLEST, "").unwrap().postgres.url.expose(), "postgres://u@localhost/d");
        parse("[http]\n", "postgres://u@env/d").unwrap();
        let report = parse(file, "postgres://u:hunter2@env:x/d").unwrap_err().report();
        assert!(report.contains("LANEBRIDGE_POSTGRES_URL: has a port") && !report.contains("hunter2"), "{report}");
        assert!(read("[http]\n").unwrap_err().contains("postgres.url: is missing"));
    }

    #[test]
    fn what_is_weak_is_a_warning() {
        for (extra, part) in [
            ("direct_url = \"postgres://u:hunter2@localhost/d\"", "direct_url: holds a password"),
            ("direct_url = \"postgres://u@db/d?sslmode=disable\"", "in clear"),
            ("[http]\nlisten = \"0.0.0.0:9464\"", "open to the network"),
        ] {
            let warnings = good(extra).warnings.join("\n");
            assert!(warnings.contains(part) && !warnings.contains("hunter2"), "{warnings}");
        }
        let filled = good("direct_url = \"postgres://u:${SET}@localhost/d\"");
        assert_eq!(filled.warnings.len(), 1, "{:?}", filled.warnings);
        assert_eq!(good("[http]\nlisten = \"\"").http.listen, None);
        assert_eq!(good("[http]\nallowed_hosts = [\"Metrics.Internal\"]").http.allowed_hosts, ["metrics.internal"]);
    }
}
