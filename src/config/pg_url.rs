//! `postgres://` URLs, parsed by us because `tokio-postgres` knows neither `verify-full` nor `sslrootcert`.
//!
//! - I1: no error text holds any part of the URL that could be a password. A badly encoded password moves the
//!   borders between the parts, so ports, database names and users are never quoted either.
//! - I2: off loopback TLS is verified unless `sslmode=disable` says otherwise; there is no mode that encrypts
//!   without verifying, because whoever can read the line can also answer it.
//!
//! User, password, database, host and every parameter are percent-decoded (`%40` is `@`; `+` stays `+`).

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::Secret;
use super::address::{ENCODE_HINT, decode, host_and_port, host_name, port_number};
use super::validate::{is_loopback, nearest};

const DEFAULT_PORT: u16 = 5432;

/// Every parameter that the query may hold.
const PARAMETERS: [&str; 16] = [
    "application_name",
    "connect_timeout",
    "dbname",
    "host",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "options",
    "password",
    "port",
    "sslmode",
    "sslrootcert",
    "target_session_attrs",
    "tcp_user_timeout",
    "user",
];

/// The parts of a URL, decoded. `Display` shows it without the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PgUrl {
    /// At least one, in the order to try: a host name, an address without brackets, or the directory of a socket
    /// (it starts with `/`).
    pub(crate) hosts: Vec<(String, u16)>,
    /// Never empty. Not defaulted to the operating system's user as in libpq: that differs between a shell and a service.
    pub(crate) user: String,
    pub(crate) password: Option<Secret>,
    /// The user's name when the URL has none, as in libpq.
    pub(crate) dbname: String,
    pub(crate) sslmode: SslMode,
    /// `None`, or `system`: the public roots.
    pub(crate) sslrootcert: Option<PathBuf>,
    pub(crate) application_name: Option<String>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) options: Option<String>,
    pub(crate) target_session_attrs: Option<TargetSessionAttrs>,
    pub(crate) keepalives: Keepalives,
}

/// What TLS proves. Default: `VerifyFull` when any host is neither loopback nor a socket, else `Disable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SslMode {
    Disable,
    /// The certificate is from a known authority, for whatever name.
    VerifyCa,
    /// The certificate is from a known authority and for this host.
    VerifyFull,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetSessionAttrs {
    Any,
    ReadWrite,
}

/// TCP settings that the URL asks for; `None` leaves the bridge's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keepalives {
    pub(crate) enabled: Option<bool>,
    pub(crate) idle: Option<Duration>,
    pub(crate) interval: Option<Duration>,
    pub(crate) count: Option<u32>,
    /// `tcp_user_timeout`, in milliseconds in the URL.
    pub(crate) user_timeout: Option<Duration>,
}

/// What the query said, before it is joined with the authority.
#[derive(Default)]
struct Query {
    pairs: Vec<(&'static str, String)>,
}

impl PgUrl {
    /// # Errors
    /// A sentence that says which part is wrong, without any text that could be a password (I1).
    pub(crate) fn parse(url: &str) -> Result<Self, String> {
        let (authority, path, query) = split(url)?;
        let mut query = Query::parse(query)?;
        let (user_info, host_list) = match authority.rsplit_once('@') {
            Some((user_info, _)) if user_info.contains('@') => {
                return Err(format!("has more than one @ before the host; {ENCODE_HINT}"));
            }
            Some((user_info, hosts)) => (Some(user_info), hosts),
            None => (None, authority),
        };
        let (mut user, mut password) = (None, None);
        if let Some(user_info) = user_info {
            let (name, secret) = user_info.split_once(':').map_or((user_info, None), |(u, p)| (u, Some(p)));
            user = Some(decode(name, "user")?);
            password = secret.map(|secret| decode(secret, "password")).transpose()?;
        }
        let dbname = Some(decode(path, "database name")?).filter(|name| !name.is_empty());

        let user = query.merge("user", user, "the user before @")?;
        let password = query.merge("password", password, "the password before @")?;
        let dbname = query.merge("dbname", dbname, "the database after /")?;
        let hosts = hosts(host_list, &mut query)?;
        let user = user.filter(|user| !user.is_empty());
        let user = user.ok_or("names no user; hint: postgres://user@host:5432/database")?;
        let plain = hosts.iter().all(|(host, _)| host.starts_with('/') || is_loopback(host));
        let sslmode = match query.take("sslmode") {
            Some(mode) => ssl_mode(&mode)?,
            None if plain => SslMode::Disable,
            None => SslMode::VerifyFull,
        };
        let sslrootcert = query.take("sslrootcert").map(PathBuf::from);
        if sslrootcert.is_some() && sslmode == SslMode::Disable {
            return Err(
                "has sslrootcert, but no TLS is used (sslmode is disable, the default on loopback and sockets); \
                        hint: sslmode=verify-full"
                    .to_owned(),
            );
        }
        Ok(Self {
            hosts,
            dbname: dbname.unwrap_or_else(|| user.clone()),
            user,
            password: password.map(Secret::new),
            sslmode,
            sslrootcert,
            application_name: query.take("application_name"),
            connect_timeout: query.seconds("connect_timeout")?.filter(|limit| !limit.is_zero()),
            options: query.take("options"),
            target_session_attrs: query.target_session_attrs()?,
            keepalives: Keepalives {
                enabled: query.number("keepalives", 1)?.map(|n| n == 1),
                idle: query.seconds("keepalives_idle")?,
                interval: query.seconds("keepalives_interval")?,
                count: query.number("keepalives_count", 1_000)?,
                user_timeout: query.number("tcp_user_timeout", u32::MAX)?.map(|ms| Duration::from_millis(ms.into())),
            },
        })
    }

    /// Whether any host is reached over a network that others may read.
    pub(crate) fn leaves_this_machine(&self) -> bool {
        self.hosts.iter().any(|(host, _)| !host.starts_with('/') && !is_loopback(host))
    }
}

impl fmt::Display for PgUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = if self.password.is_some() { ":***" } else { "" };
        write!(f, "postgres://{}{password}@", self.user.escape_debug())?;
        for (i, (host, port)) in self.hosts.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match host {
                host if host.starts_with('/') => write!(f, "{comma}{}:{port}", host.replace('/', "%2F"))?,
                host if host.contains(':') => write!(f, "{comma}[{host}]:{port}")?,
                host => write!(f, "{comma}{host}:{port}")?,
            }
        }
        let mode = match self.sslmode {
            SslMode::Disable => "disable",
            SslMode::VerifyCa => "verify-ca",
            SslMode::VerifyFull => "verify-full",
        };
        write!(f, "/{}?sslmode={mode}", self.dbname.escape_debug())
    }
}

/// Authority, path without its slash, query; each still encoded.
fn split(url: &str) -> Result<(&str, &str, &str), String> {
    let (scheme, rest) =
        url.split_once("://").ok_or("is not a URL; hint: postgres://user@host:5432/database?sslmode=verify-full")?;
    if scheme != "postgres" && scheme != "postgresql" {
        let shown = scheme.len() <= 20 && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b));
        let shown = if shown { format!(" \"{scheme}\"") } else { String::new() };
        return Err(format!("has the unknown scheme{shown}; hint: postgres:// or postgresql://"));
    }
    if rest.contains('#') {
        return Err(format!("has a #, which a postgres URL has no use for; {ENCODE_HINT}"));
    }
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = before.split_once('/').unwrap_or((before, ""));
    // An @ further right means that a / or ? of a password ended the authority too early.
    if path.contains(['@', '/']) || (query.contains('@') && !authority.contains('@')) {
        return Err(format!("has a / or @ after the host; {ENCODE_HINT}"));
    }
    Ok((authority, path, query))
}

fn hosts(list: &str, query: &mut Query) -> Result<Vec<(String, u16)>, String> {
    if let Some(names) = query.take("host") {
        if !list.is_empty() {
            return Err("names its host twice, before the / and as the parameter host".to_owned());
        }
        let ports = query.take("port");
        let ports: Vec<&str> = ports.as_deref().map(|ports| ports.split(',').collect()).unwrap_or_default();
        let names: Vec<&str> = names.split(',').collect();
        if ports.len() > 1 && ports.len() != names.len() {
            return Err(format!("has {} hosts but {} ports", names.len(), ports.len()));
        }
        let one = |(i, name): (usize, &&str)| {
            let port = ports.get(i).or(ports.first()).map_or(Ok(DEFAULT_PORT), |port| port_number(port))?;
            Ok((host_name(name)?, port))
        };
        return names.iter().enumerate().map(one).collect();
    }
    if query.take("port").is_some() {
        return Err("has the parameter port without the parameter host; hint: write host:port".to_owned());
    }
    list.split(',').map(|text| host_and_port(text, DEFAULT_PORT)).collect()
}

fn ssl_mode(mode: &str) -> Result<SslMode, String> {
    match mode {
        "disable" => Ok(SslMode::Disable),
        "verify-ca" => Ok(SslMode::VerifyCa),
        "verify-full" => Ok(SslMode::VerifyFull),
        "allow" | "prefer" => Err(format!(
            "has sslmode={mode}, which falls back to clear text when the server, or somebody in between, says it has \
             no TLS; hint: sslmode=verify-full, or sslmode=disable to say so openly"
        )),
        "require" => Err("has sslmode=require, which encrypts but does not verify whom it talks to; \
                          hint: sslmode=verify-full (sslrootcert=FILE for an own authority)"
            .to_owned()),
        _ => Err("has an unknown sslmode; allowed: disable, verify-ca, verify-full".to_owned()),
    }
}

impl Query {
    fn parse(text: &str) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let Some(known) = PARAMETERS.iter().find(|known| **known == name) else {
                let shown = name.len() <= 40 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
                let shown = if shown { format!(" \"{name}\"") } else { String::new() };
                return Err(format!("has the unknown parameter{shown}{}", nearest(name, PARAMETERS.into_iter())));
            };
            if value.is_empty() {
                return Err(format!("has the parameter {known} without a value"));
            }
            if query.take(known).is_some() {
                return Err(format!("has the parameter {known} twice"));
            }
            query.pairs.push((known, decode(value, known)?));
        }
        Ok(query)
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.pairs.iter().position(|(known, _)| *known == name)?;
        Some(self.pairs.swap_remove(at).1)
    }

    fn merge(&mut self, name: &str, other: Option<String>, place: &str) -> Result<Option<String>, String> {
        match (self.take(name), other) {
            (Some(_), Some(_)) => Err(format!("has both {place} and the parameter {name}; keep one")),
            (parameter, other) => Ok(parameter.or(other)),
        }
    }

    fn number(&mut self, name: &str, max: u32) -> Result<Option<u32>, String> {
        let Some(text) = self.take(name) else { return Ok(None) };
        let number = text.parse::<u32>().ok().filter(|number| *number <= max);
        number.map(Some).ok_or_else(|| format!("has a {name} that is not a whole number from 0 to {max}"))
    }

    fn seconds(&mut self, name: &str) -> Result<Option<Duration>, String> {
        Ok(self.number(name, 86_400)?.map(|seconds| Duration::from_secs(seconds.into())))
    }

    fn target_session_attrs(&mut self) -> Result<Option<TargetSessionAttrs>, String> {
        match self.take("target_session_attrs").as_deref() {
            None => Ok(None),
            Some("any") => Ok(Some(TargetSessionAttrs::Any)),
            Some("read-write" | "primary") => Ok(Some(TargetSessionAttrs::ReadWrite)),
            Some(_) => Err("has a target_session_attrs that the bridge cannot work with (it writes, so it needs the \
                            primary); allowed: read-write, primary, any"
                .to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> PgUrl {
        PgUrl::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn every_part_is_decoded() {
        let url = parse(
            "postgresql://b%40r:p%3A%2F%23%25%20+%24@db.example:6432/my%2Fapp?sslmode=verify-ca&sslrootcert=/ca.pem\
             &application_name=a%20b&connect_timeout=3&options=-c%20x%3D1&target_session_attrs=primary\
             &keepalives=1&keepalives_idle=7&keepalives_interval=5&keepalives_count=2&tcp_user_timeout=900",
        );
        assert_eq!(url.hosts, [("db.example".to_owned(), 6432)]);
        assert_eq!(url.user, "b@r");
        assert_eq!(url.password.as_ref().map(Secret::expose), Some("p:/#% +$"));
        assert_eq!(url.dbname, "my/app");
        assert_eq!((url.sslmode, url.sslrootcert), (SslMode::VerifyCa, Some("/ca.pem".into())));
        assert_eq!(url.application_name.as_deref(), Some("a b"));
        assert_eq!(url.options.as_deref(), Some("-c x=1"));
        assert_eq!(url.connect_timeout, Some(Duration::from_secs(3)));
        assert_eq!(url.target_session_attrs, Some(TargetSessionAttrs::ReadWrite));
        assert_eq!((url.keepalives.enabled, url.keepalives.count), (Some(true), Some(2)));
        assert_eq!(url.keepalives.user_timeout, Some(Duration::from_millis(900)));
    }

    #[test]
    fn hosts_are_names_addresses_and_sockets() {
        let hosts = |url: &str| parse(url).hosts.iter().map(|(h, p)| format!("{h} {p}")).collect::<Vec<_>>().join(", ");
        assert_eq!(hosts("postgres://u@localhost"), "localhost 5432");
        assert_eq!(hosts("postgres://u@a:1,b:65535/d"), "a 1, b 65535");
        assert_eq!(hosts("postgres://u@[::1]:7/d"), "::1 7");
        assert_eq!(hosts("postgres://u@[fe80::1]/d"), "fe80::1 5432");
        assert_eq!(hosts("postgres://u@%2Fvar%2Frun/d"), "/var/run 5432");
        assert_eq!(hosts("postgres://u@/d?host=/var/run&port=5433"), "/var/run 5433");
        assert_eq!(hosts("postgres:///d?host=a,b&port=1,2&user=u"), "a 1, b 2");
    }

    #[test]
    fn tls_is_verified_unless_nothing_leaves_the_machine() {
        let mode = |url: &str| parse(url).sslmode;
        for local in ["localhost", "127.0.0.1", "127.9.9.9", "[::1]", "%2Frun"] {
            assert_eq!(mode(&format!("postgres://u@{local}/d")), SslMode::Disable, "{local}");
        }
        for remote in ["db", "10.0.0.1", "localhost,db", "localhost.example", "[::2]", "128.0.0.1"] {
            assert_eq!(mode(&format!("postgres://u@{remote}/d")), SslMode::VerifyFull, "{remote}");
        }
        assert_eq!(mode("postgres://u@db/d?sslmode=disable"), SslMode::Disable);
    }

    #[test]
    fn a_bad_url_names_the_part_and_never_the_password() {
        for (url, part) in [
            ("", "not a URL"),
            ("host=db password=hunter2", "not a URL"),
            ("postgresql+tls://u:hunter2@h/d", "unknown scheme \"postgresql+tls\""),
            ("mysql://u:hunter2@h/d", "unknown scheme \"mysql\""),
            ("postgres://", "names no host"),
            ("postgres://u:hunter2@/d", "names no host"),
            ("postgres://u@h,,g/d", "names no host"),
            ("postgres://@h/d", "names no user"),
            ("postgres://h/d", "names no user"),
            ("postgres://:hunter2@h/d", "names no user"),
            ("postgres://u:hunter2@h:0/d", "1 to 65535"),
            ("postgres://u:hunter2@h:65536/d", "1 to 65535"),
            ("postgres://u:hunter2@h:/d", "1 to 65535"),
            ("postgres://u:hunter2@h:+1/d", "1 to 65535"),
            ("postgres://u:hunter2@::1/d", "several colons"),
            ("postgres://u:hunter2@[::1/d", "without its ]"),
            ("postgres://u:hunter2@[hunter2]/d", "no IPv6"),
            ("postgres://u:hunter2@[::1]x/d", "after the ]"),
            ("postgres://u:a@hunter2@h/d", "more than one @"),
            ("postgres://u:hunter2/x@h/d", "after the host"),
            ("postgres://u:1/hunter2@h/d", "after the host"),
            ("postgres://u:1?hunter2=@h/d", "after the host"),
            ("postgres://u:hunter2#x@h/d", "has a #"),
            ("postgres://u:hunter2%@h/d", "two hex digits"),
            ("postgres://u:hunter2%ff@h/d", "not UTF-8"),
            ("postgres://u:hunter2%00@h/d", "NUL"),
            ("postgres://u@h/d?sslmod=disable", "did you mean \"sslmode\""),
            ("postgres://u@h/d?sslmode=prefer", "falls back to clear text"),
            ("postgres://u@h/d?sslmode=allow", "falls back to clear text"),
            ("postgres://u@h/d?sslmode=require", "does not verify"),
            ("postgres://u@h/d?sslmode=verify_full", "allowed: disable"),
            ("postgres://u@h/d?sslmode=", "without a value"),
            ("postgres://u@h/d?sslmode=disable&sslmode=disable", "twice"),
            ("postgres://u@h/d?user=v", "both the user before @ and the parameter user"),
            ("postgres://u:hunter2@h/d?password=hunter2", "both the password"),
            ("postgres://u@h/d?host=g", "host twice"),
            ("postgres://u@h/d?port=1", "port without"),
            ("postgres:///d?host=a,b&port=1,2,3", "2 hosts but 3 ports"),
            ("postgres://u@localhost/d?sslrootcert=/x", "no TLS is used"),
            ("postgres://u@h/d?connect_timeout=x", "0 to 86400"),
            ("postgres://u@h/d?keepalives=2", "0 to 1"),
            ("postgres://u@h/d?target_session_attrs=read-only", "needs the primary"),
            ("postgres://u@h h/d", "no host has"),
        ] {
            let error = PgUrl::parse(url).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{url}: {error}");
        }
    }

    #[test]
    fn display_and_debug_mask_the_password() {
        let url = parse("postgres://u:hunter2@h,[::1]:7/d");
        assert_eq!(url.to_string(), "postgres://u:***@h:5432,[::1]:7/d?sslmode=verify-full");
        assert!(!format!("{url:?}").contains("hunter2"));
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(postgres://)?[a:@/?&=%\\[\\],.0-9é]{0,40}") {
            let _result = PgUrl::parse(&text).map(|url| url.to_string());
        }
    }
}
