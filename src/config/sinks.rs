//! Reads `[sinks.NAME]`: what every sink has, then what its type has.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use super::address::{BrokerUrl, host_and_port};
use super::section::{Section, Text};
use super::{Kafka, Nats, NatsAuth, Redis, Sasl, SaslMechanism, Secret, SecretSource, Sink, SinkKind, Tls, validate};

/// Longer than a broker's own leader election, shorter than a person's patience.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// One poll of the deliveries table costs 6-12 ms for 1,000 rows; half of it keeps latency low at no loss of rate.
const BATCH: u64 = 500;
/// Enough to cover a round trip of some milliseconds, few enough to bound what a crash repeats (I4).
const BATCHES_IN_FLIGHT: u64 = 4;

const KAFKA_PORT: u16 = 9092;
const NATS_PORT: u16 = 4222;
const REDIS_PORT: u16 = 6379;

/// A sink's type, known before the rest of it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Kafka,
    Nats,
    Redis,
    Stdout,
}

pub(super) const KINDS: [(&str, Kind); 4] =
    [("kafka", Kind::Kafka), ("nats", Kind::Nats), ("redis", Kind::Redis), ("stdout", Kind::Stdout)];

/// The good sinks, and of every sink its type if that much is readable.
pub(super) fn read(root: &mut Section<'_>) -> (BTreeMap<String, Sink>, BTreeMap<String, Option<Kind>>) {
    let (mut sinks, mut kinds) = (BTreeMap::new(), BTreeMap::new());
    for (name, mut section) in root.tables("sinks") {
        if let Err(rule) = validate::name(&name) {
            section.report.problem(section.at, format!("{}: {rule}", section.path));
        }
        if !section.has("type") {
            section.missing("type", "type = \"kafka\", \"nats\", \"redis\" or \"stdout\"");
        }
        let kind = section.choice("type", &KINDS);
        kinds.insert(name.clone(), kind);
        let send_timeout = section.duration("send_timeout", Duration::from_millis(100)..=Duration::from_secs(600));
        let batch = section.integer("batch", 1..=100_000);
        let batches = section.integer("batches_in_flight", 1..=1_000);
        // Without a type nobody can tell which keys are known.
        let Some(kind) = kind else { continue };
        section.doc = format!("sinks.NAME {}", KINDS.iter().find(|(_, k)| *k == kind).expect("KINDS has all").0);
        let kind = match kind {
            Kind::Kafka => kafka(&mut section).map(SinkKind::Kafka),
            Kind::Nats => nats(&mut section).map(SinkKind::Nats),
            Kind::Redis => redis(&mut section).map(SinkKind::Redis),
            Kind::Stdout => Some(SinkKind::Stdout),
        };
        section.finish();
        let count = |n: Option<u64>, default| {
            let n = u32::try_from(n.unwrap_or(default)).expect("the range is below 2^32");
            NonZeroU32::new(n).expect("the range starts at 1")
        };
        if let Some(kind) = kind {
            let send_timeout = send_timeout.unwrap_or(SEND_TIMEOUT);
            let (batch, batches_in_flight) = (count(batch, BATCH), count(batches, BATCHES_IN_FLIGHT));
            sinks.insert(name, Sink { kind, send_timeout, batch, batches_in_flight });
        }
    }
    (sinks, kinds)
}

/// The table `tls`: there means on, unless `enabled = false`.
fn tls(section: &mut Section<'_>) -> (Tls, bool) {
    let Some(mut table) = section.table("tls") else { return (Tls::default(), false) };
    table.doc = "sinks.NAME.tls".to_owned();
    let tls = Tls {
        enabled: table.flag("enabled", true),
        ca_file: table.path("ca_file"),
        cert_file: table.path("cert_file"),
        key_file: table.path("key_file"),
    };
    for (one, given, other, missing) in [
        ("cert_file", &tls.cert_file, "key_file", &tls.key_file),
        ("key_file", &tls.key_file, "cert_file", &tls.cert_file),
    ] {
        if given.is_some() && missing.is_none() && !table.has(other) {
            table.problem(table.at_key(one), one, format!("needs {other} too: a client certificate has both"));
        }
    }
    table.finish();
    (tls, true)
}

fn kafka(section: &mut Section<'_>) -> Option<Kafka> {
    let brokers = required(section, "brokers", "brokers = \"localhost:9092\"");
    let mut loopback = true;
    if let Some(brokers) = &brokers {
        for broker in brokers.value.split(',') {
            match host_and_port(broker.trim(), KAFKA_PORT) {
                Ok((host, _)) if !broker.contains("//") => loopback &= validate::is_loopback(&host),
                Ok(_) => section.problem(brokers.at, "brokers", "is a list of host:port without a scheme"),
                Err(rule) => {
                    let what = format!("{} {rule}; hint: \"host:9092,other:9092\"", brokers.shown());
                    section.problem(brokers.at, "brokers", what);
                }
            }
        }
    }
    let (tls, _) = tls(section);
    let sasl_at = section.at_key("sasl");
    let sasl_given = section.has("sasl");
    let sasl = section.table("sasl").and_then(sasl);
    if sasl_given && !tls.enabled && !loopback {
        let what = "needs TLS off loopback: the password, or what a password can be guessed from, would cross the \
                    network in clear; hint: tls = { enabled = true }";
        section.problem(sasl_at, "sasl", what);
    }
    let mut options = BTreeMap::new();
    if let Some(table) = section.table("options") {
        for (option, text) in table.scalars() {
            if let Err(rule) = validate::kafka_option(&option, &text.value) {
                table.problem(text.at, &option, rule);
            }
            if option.contains("password") && !text.filled {
                table.warn(text.at, &option, "is a secret inside the file; hint: \"${NAME}\"");
            }
            options.insert(option, Secret::new(text.value));
        }
    }
    let max_in_flight = ["max.in.flight", "max.in.flight.requests.per.connection"];
    if max_in_flight.iter().all(|name| options.contains_key(*name)) {
        let what =
            format!("has both {} and {}, two names of one property; keep one", max_in_flight[0], max_in_flight[1]);
        section.problem(section.at_key("options"), "options", what);
    }
    Some(Kafka { brokers: brokers?.value, tls, sasl, options })
}

fn sasl(mut table: Section<'_>) -> Option<Sasl> {
    const MECHANISMS: [(&str, SaslMechanism); 3] = [
        ("PLAIN", SaslMechanism::Plain),
        ("SCRAM-SHA-256", SaslMechanism::ScramSha256),
        ("SCRAM-SHA-512", SaslMechanism::ScramSha512),
    ];
    table.doc = "sinks.NAME.sasl".to_owned();
    if !table.has("mechanism") {
        table.missing("mechanism", "\"PLAIN\", \"SCRAM-SHA-256\" or \"SCRAM-SHA-512\"");
    }
    let mechanism = table.choice("mechanism", &MECHANISMS);
    let username = required(&mut table, "username", "the user to log in as");
    let password = table.secret_source("password", "password_file");
    if !table.has("password") && !table.has("password_file") {
        table.missing("password", "password_file = \"/path\", or password = \"${NAME}\"");
    }
    table.finish();
    Some(Sasl { mechanism: mechanism?, username: username?.value, password: password? })
}

fn nats(section: &mut Section<'_>) -> Option<Nats> {
    let url = required(section, "url", "url = \"nats://localhost:4222\"");
    let (mut tls, tls_given) = tls(section);
    let mut open = false;
    let mut credentials = false;
    if let Some(url) = &url {
        for one in url.value.split(',') {
            match BrokerUrl::parse(one.trim(), &["nats", "tls"], NATS_PORT) {
                Ok(parsed) if parsed.path || parsed.query => {
                    section.problem(url.at, "url", "has a path or query, which a NATS URL has no use for");
                }
                Ok(parsed) => {
                    credentials |= parsed.user || parsed.password;
                    open |= !parsed.loopback;
                    secure(section, &mut tls, tls_given, parsed.scheme == 1, "tls://");
                }
                Err(rule) => section.problem(url.at, "url", rule),
            }
        }
        warn_inline_url(section, url, credentials);
    }
    let auth = nats_auth(section, credentials);
    let clear = match &auth {
        Some(NatsAuth::User { .. } | NatsAuth::Token(_)) => true,
        Some(NatsAuth::Url) => credentials,
        _ => false,
    };
    warn_clear(section, clear && open && !tls.enabled, "tls://");
    Some(Nats { url: Secret::new(url?.value), tls, auth: auth? })
}

/// Exactly one way to log in; `None` after a problem.
fn nats_auth(section: &mut Section<'_>, credentials: bool) -> Option<NatsAuth> {
    let username = section.text("username");
    let password = section.secret_source("password", "password_file");
    let token = section.secret_source("token", "token_file");
    let nkey = section.secret_source("nkey", "nkey_file");
    let creds_file = section.path("creds_file");
    let ways: [&[&str]; 4] =
        [&["username", "password", "password_file"], &["token", "token_file"], &["nkey", "nkey_file"], &["creds_file"]];
    let given: Vec<&str> = ways.iter().filter_map(|way| way.iter().copied().find(|key| section.has(key))).collect();
    if let [first, second, ..] = given[..] {
        let what = format!("and {second} are two ways to log in; keep one");
        section.problem(section.at_key(first), first, what);
        return None;
    }
    if let ([key], true) = (&given[..], credentials) {
        section.problem(section.at_key(key), key, "and the user in url are two ways to log in; keep one");
        return None;
    }
    match given.first().copied() {
        None => Some(NatsAuth::Url),
        Some("creds_file") => creds_file.map(NatsAuth::CredsFile),
        Some("token" | "token_file") => token.map(NatsAuth::Token),
        Some("nkey" | "nkey_file") => nkey.map(NatsAuth::Nkey),
        Some(key) => {
            let has_password = section.has("password") || section.has("password_file");
            if !section.has("username") || !has_password {
                section.problem(section.at_key(key), key, "needs both username and password (or password_file)");
            }
            Some(NatsAuth::User { username: username?.value, password: password? })
        }
    }
}

fn redis(section: &mut Section<'_>) -> Option<Redis> {
    let url = required(section, "url", "url = \"redis://localhost:6379\"");
    let (mut tls, tls_given) = tls(section);
    let username = section.text("username").map(|text| text.value);
    let password = section.secret_source("password", "password_file");
    let max_len = section.integer("max_len", 1..=i64::MAX.unsigned_abs());
    let mut open = false;
    let mut url_password = false;
    if let Some(url) = &url {
        match BrokerUrl::parse(&url.value, &["redis", "rediss"], REDIS_PORT) {
            Ok(parsed) => {
                url_password = parsed.password;
                open = !parsed.loopback;
                redis_rest(section, url);
                let encrypted = parsed.scheme == 1;
                secure(section, &mut tls, tls_given, encrypted, "rediss://");
                if tls.enabled && !encrypted {
                    section.problem(
                        url.at,
                        "url",
                        "is redis:// while tls is on; hint: rediss://, or tls.enabled = false",
                    );
                }
                for (given, key) in
                    [(parsed.user, "username"), (parsed.password, "password"), (parsed.password, "password_file")]
                {
                    if given && section.has(key) {
                        section.problem(section.at_key(key), key, "and url both name it; keep one");
                    }
                }
            }
            Err(rule) => section.problem(url.at, "url", rule),
        }
        warn_inline_url(section, url, url_password);
    }
    if username.is_some() && !url_password && !section.has("password") && !section.has("password_file") {
        section.problem(section.at_key("username"), "username", "needs password or password_file");
    }
    warn_clear(section, open && !tls.enabled && (url_password || password.is_some()), "rediss://");
    Some(Redis { url: Secret::new(url?.value), tls, username, password, max_len })
}

/// The database number, and the one parameter that changes nothing about safety.
fn redis_rest(section: &Section<'_>, url: &Text) {
    let rest = url.value.split_once("://").map_or("", |(_, rest)| rest);
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    let database = before.split_once('/').map_or("", |(_, path)| path);
    if !database.bytes().all(|b| b.is_ascii_digit()) || database.len() > 5 {
        section.problem(url.at, "url", "has a path that is not the number of a database, such as /0");
    }
    if !matches!(query, "" | "protocol=resp2" | "protocol=resp3") {
        section.problem(url.at, "url", "has an unknown parameter; allowed: protocol=resp2, protocol=resp3");
    }
}

/// Joins what the scheme and the table say about TLS.
fn secure(section: &Section<'_>, tls: &mut Tls, given: bool, encrypted: bool, scheme: &str) {
    if encrypted && given && !tls.enabled {
        section.problem(section.at_key("tls"), "tls.enabled", format!("is false while url is {scheme}; keep one"));
    }
    tls.enabled |= encrypted && !given;
}

fn warn_inline_url(section: &Section<'_>, url: &Text, credentials: bool) {
    if credentials && !url.filled {
        section.warn(url.at, "url", "holds a secret inside the file; hint: a key ending in _file, or \"${NAME}\"");
    }
}

fn warn_clear(section: &Section<'_>, clear: bool, scheme: &str) {
    if clear {
        let what = format!("sends a password over the network in clear; hint: {scheme} or tls = {{ enabled = true }}");
        section.warn(section.at_key("url"), "url", what);
    }
}

/// A string that must be there and not empty.
pub(super) fn required(section: &mut Section<'_>, key: &'static str, hint: &str) -> Option<Text> {
    let text = section.text(key);
    if !section.has(key) {
        section.missing(key, hint);
    }
    if let Some(text) = text.as_ref().filter(|text| text.value.is_empty()) {
        section.problem(text.at, key, format!("is empty; hint: {hint}"));
    }
    text.filter(|text| !text.value.is_empty())
}

/// Every file that holds a secret, with the key that names it.
pub(super) fn secret_files(sinks: &BTreeMap<String, Sink>) -> Vec<(String, &Path)> {
    let mut files = Vec::new();
    for (name, sink) in sinks {
        let (tls, key, source) = match &sink.kind {
            SinkKind::Kafka(kafka) => {
                (&kafka.tls, "sasl.password_file", kafka.sasl.as_ref().map(|sasl| &sasl.password))
            }
            SinkKind::Redis(redis) => (&redis.tls, "password_file", redis.password.as_ref()),
            SinkKind::Nats(nats) => match &nats.auth {
                NatsAuth::User { password, .. } => (&nats.tls, "password_file", Some(password)),
                NatsAuth::Token(token) => (&nats.tls, "token_file", Some(token)),
                NatsAuth::Nkey(nkey) => (&nats.tls, "nkey_file", Some(nkey)),
                NatsAuth::CredsFile(path) => {
                    files.push((format!("sinks.{name}.creds_file"), path.as_path()));
                    (&nats.tls, "", None)
                }
                NatsAuth::Url => (&nats.tls, "", None),
            },
            SinkKind::Stdout => continue,
        };
        if let Some(SecretSource::File(path)) = source {
            files.push((format!("sinks.{name}.{key}"), path.as_path()));
        }
        if let Some(path) = &tls.key_file {
            files.push((format!("sinks.{name}.tls.key_file"), path.as_path()));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bad, good};
    use super::*;

    const KAFKA: &str = "[sinks.s]\ntype = \"kafka\"\nbrokers = \"db:9092\"\n";
    const NATS: &str = "[sinks.s]\ntype = \"nats\"\nurl = \"nats://n:4222\"\n";
    const REDIS: &str = "[sinks.s]\ntype = \"redis\"\nurl = \"redis://r\"\n";

    fn each_is_refused(head: &str, cases: &[(&str, &str)]) {
        let cases: Vec<_> = cases.iter().map(|(extra, part)| (format!("{head}{extra}"), *part)).collect();
        let cases: Vec<_> = cases.iter().map(|(text, part)| (text.as_str(), *part)).collect();
        super::super::testing::each_is_refused(&cases);
    }

    fn sink(text: &str) -> Sink {
        good(text).sinks.remove("s").expect("it is there")
    }

    #[test]
    fn what_every_sink_has_is_bounded() {
        let sink = sink("[sinks.s]\ntype = \"stdout\"\nbatch = \"${BATCH}\"");
        assert_eq!((sink.batch.get(), sink.batches_in_flight.get(), sink.send_timeout), (7, 4, SEND_TIMEOUT));
        each_is_refused(
            "[sinks.s]\ntype = \"stdout\"\n",
            &[
                ("batch = 0", "from 1 to 100000, not 0"),
                ("batch = 100001", "not 100001"),
                ("batch = \"7\"", "not \"7\""),
                ("batch = \"${SET}\"", "not \"${SET}\""),
                ("batches_in_flight = 1001", "from 1 to 1000"),
                ("send_timeout = \"99ms\"", "from \"100ms\" to \"10m\""),
                ("url = \"x\"", "sinks.s.url: is no known key"),
            ],
        );
        good("[sinks.s]\ntype = \"stdout\"\nbatch = 100_000\nbatches_in_flight = 1000\nsend_timeout = \"10m\"");
        super::super::testing::each_is_refused(&[
            ("[sinks.s]\nurl = \"x\"", "sinks.s.type: is missing"),
            ("[sinks.s]\ntype = \"kafak\"", "did you mean \"kafka\"?"),
            ("[sinks.\"A b\"]\ntype = \"stdout\"", "is no name"),
            ("[sinks]\ns = 1", "sinks.s: must be a table, not an integer"),
        ]);
    }

    #[test]
    fn kafka_is_read_and_dotted_options_need_no_quotes() {
        let text = format!(
            "{KAFKA}tls.ca_file = \"/ca\"\nsasl = {{ mechanism = \"SCRAM-SHA-512\", username = \"u\", password_file = \"/p\" }}\n\
             [sinks.s.options]\ncompression.type = \"lz4\"\n\"linger.ms\" = 5\n\"socket.keepalive.enable\" = true\n"
        );
        let SinkKind::Kafka(kafka) = sink(&text).kind else { panic!("not kafka") };
        let options: Vec<_> = kafka.options.iter().map(|(name, value)| format!("{name}={}", value.expose())).collect();
        assert_eq!(options, ["compression.type=lz4", "linger.ms=5", "socket.keepalive.enable=true"]);
        assert!(kafka.tls.enabled);
        let sasl = kafka.sasl.expect("given");
        assert_eq!(sasl.mechanism, SaslMechanism::ScramSha512);
        assert!(matches!(sasl.password, SecretSource::File(_)));
    }

    #[test]
    fn kafka_rules() {
        let sasl = "sasl = { mechanism = \"PLAIN\", username = \"u\", password = \"${SET}\" }\n";
        each_is_refused(
            KAFKA,
            &[
                (sasl, "sinks.s.sasl: needs TLS off loopback: the password"),
                (&format!("tls.enabled = false\n{sasl}"), "needs TLS"),
                (
                    "tls.enabled = true\nsasl = { mechanism = \"X\", username = \"u\", password = \"${SET}\" }",
                    "PLAIN, SCRAM-SHA-256",
                ),
                (
                    "tls.enabled = true\nsasl = { mechanism = \"PLAIN\", password = \"${SET}\" }",
                    "sasl.username: is missing",
                ),
                ("tls.enabled = true\nsasl = { mechanism = \"PLAIN\", username = \"u\" }", "sasl.password: is missing"),
                (
                    "tls.enabled = true\nsasl = { mechanism = \"PLAIN\", username = \"u\", password = \"${SET}\", password_file = \"/p\" }",
                    "password_file: and password are both given",
                ),
                ("tls = { cert_file = \"/c\" }", "needs key_file too"),
                ("tls = { key_file = \"/c\" }", "needs cert_file too"),
                ("tls = true", "must be a table"),
                ("tls = { insecure = true }", "sinks.s.tls.insecure: is no known key"),
                ("options.acks = 1", "sinks.s.options.acks: must be \"all\""),
                ("options = { \"enable.idempotence\" = false }", "must stay true"),
                ("options.max.in.flight = 6", "from 1 to 5"),
                ("options = { \"max.in.flight\" = 5, \"max.in.flight.requests.per.connection\" = 5 }", "two names"),
                ("options.x = [1]", "must be a string"),
                ("options.x = \"${UNSET}\"", "UNSET"),
            ],
        );
        good(&format!("{KAFKA}tls.enabled = true\n{sasl}"));
        good(&format!("{}{sasl}", KAFKA.replace("db:", "localhost:9092,[::1]:")));
        good(&format!("{KAFKA}options = {{ acks = \"all\", \"max.in.flight\" = 5 }}"));
        for (brokers, part) in [
            ("", "is empty"),
            ("a:0", "1 to 65535"),
            ("a,,b", "names no host"),
            ("kafka://a:1", "colons"),
            ("a b", "no host has"),
        ] {
            assert!(bad(&KAFKA.replace("db:9092", brokers)).contains(part), "{brokers}");
        }
        assert!(bad(&format!("{}{sasl}", KAFKA.replace("db:9092", "localhost,db"))).contains("needs TLS"));
    }

    #[test]
    fn nats_has_one_way_to_log_in() {
        let auth = |extra: &str| match sink(&format!("{NATS}{extra}")).kind {
            SinkKind::Nats(nats) => nats.auth,
            _ => panic!("not nats"),
        };
        assert!(matches!(auth(""), NatsAuth::Url));
        assert!(matches!(auth("username = \"u\"\npassword = \"${SET}\""), NatsAuth::User { .. }));
        assert!(matches!(auth("token_file = \"/t\""), NatsAuth::Token(SecretSource::File(_))));
        assert!(matches!(auth("nkey = \"${SET}\""), NatsAuth::Nkey(SecretSource::Inline(_))));
        assert!(matches!(auth("creds_file = \"/c\""), NatsAuth::CredsFile(_)));
        each_is_refused(
            NATS,
            &[
                ("token = \"${SET}\"\ncreds_file = \"/c\"", "sinks.s.token: and creds_file are two ways to log in"),
                ("username = \"u\"\nnkey_file = \"/n\"", "sinks.s.username: and nkey_file are two ways"),
                ("username = \"u\"", "needs both username and password"),
                ("password_file = \"/p\"", "needs both username and password"),
                ("token = \"${SET}\"\ntoken_file = \"/t\"", "token_file: and token are both given"),
                ("token = \"\"", "is empty"),
            ],
        );
        let url = |url: &str| NATS.replace("nats://n:4222", url);
        assert!(bad(&format!("{}token_file = \"/t\"", url("nats://u:${SET}@n"))).contains("the user in url"));
        assert!(bad(&url("http://n")).contains("hint: nats:// or tls://"));
        assert!(bad(&url("nats://a,nats://a:0")).contains("1 to 65535"));
        assert!(bad(&url("nats://a/x")).contains("path or query"));
        assert!(bad(&format!("{}tls.enabled = false", url("tls://n"))).contains("is false while url is tls://"));
        assert!(matches!(sink(&url("tls://n")).kind, SinkKind::Nats(Nats { tls: Tls { enabled: true, .. }, .. })));
    }

    #[test]
    fn redis_rules() {
        each_is_refused(
            REDIS,
            &[
                ("username = \"u\"", "needs password"),
                ("max_len = 0", "sinks.s.max_len: must be a whole number from 1"),
                ("tls.enabled = true", "is redis:// while tls is on"),
            ],
        );
        let url = |url: &str| REDIS.replace("redis://r", url);
        for (bad_url, part) in [
            ("rediss://r/#insecure", "pose as the broker"),
            ("redis://r/x", "number of a database"),
            ("redis://r/0?x=1", "unknown parameter"),
            ("unix:///run/redis", "hint: redis:// or rediss://"),
        ] {
            assert!(bad(&url(bad_url)).contains(part), "{bad_url}");
        }
        assert!(bad(&format!("{}password_file = \"/p\"", url("redis://:${SET}@r"))).contains("and url both name it"));
        assert!(matches!(
            sink(&url("rediss://r/3")).kind,
            SinkKind::Redis(Redis { tls: Tls { enabled: true, .. }, .. })
        ));
        assert!(matches!(sink(&format!("{REDIS}max_len = 1")).kind, SinkKind::Redis(Redis { max_len: Some(1), .. })));
    }

    #[test]
    fn secrets_in_the_file_and_in_clear_are_warnings() {
        let warnings = |text: String| good(&text).warnings.join("\n");
        let password = "password_file = \"/p\"";
        assert!(warnings(format!("{REDIS}{password}")).contains("over the network in clear; hint: rediss://"));
        assert!(!warnings(REDIS.replace("//r", "//localhost") + password).contains("in clear"));
        assert!(!warnings(REDIS.replace("redis://r", "rediss://r") + password).contains("in clear"));
        assert!(warnings(NATS.replace("//n", "//u:${SET}@n")).contains("in clear; hint: tls://"));
        assert!(!warnings(format!("{NATS}nkey_file = \"/n\"")).contains("in clear"));
        for text in [
            NATS.replace("nats://n", "tls://hunter2@n"),
            REDIS.replace("redis://r", "rediss://:hunter2@r"),
            format!("{NATS}token = \"hunter2\""),
            format!("{KAFKA}options.ssl.key.password = \"hunter2\""),
        ] {
            let warnings = warnings(text);
            assert!(warnings.contains("inside the file") && !warnings.contains("hunter2"), "{warnings}");
        }
    }
}
