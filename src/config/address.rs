//! Hosts, ports and percent-encoding, for every URL of the file.
//!
//! No error text holds a part of what was read: a badly encoded password moves the borders between the parts, so
//! that a "port" may be half of it.

use super::validate::is_loopback;

pub(super) const ENCODE_HINT: &str = "hint: percent-encode @ : / ? # and % in the user and password (@ is %40)";

/// What the rules need of a broker's URL; the client library reads the URL itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BrokerUrl {
    /// Position in the list of allowed schemes.
    pub(super) scheme: usize,
    pub(super) user: bool,
    pub(super) password: bool,
    pub(super) loopback: bool,
    pub(super) path: bool,
    pub(super) query: bool,
}

impl BrokerUrl {
    /// # Errors
    /// A sentence without any part of `url`.
    pub(super) fn parse(url: &str, schemes: &[&str], default_port: u16) -> Result<Self, String> {
        let allowed = || schemes.iter().map(|scheme| format!("{scheme}://")).collect::<Vec<_>>().join(" or ");
        let (scheme, rest) = url.split_once("://").ok_or_else(|| format!("has no scheme; hint: {}", allowed()))?;
        let scheme = schemes.iter().position(|known| *known == scheme);
        let scheme = scheme.ok_or_else(|| format!("has an unknown scheme; hint: {}", allowed()))?;
        if rest.ends_with("#insecure") {
            return Err("has #insecure, which lets anybody on the way pose as the broker; hint: tls.ca_file".to_owned());
        }
        if rest.contains('#') {
            return Err(format!("has a #, which this URL has no use for; {ENCODE_HINT}"));
        }
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before.split_once('/').unwrap_or((before, ""));
        if path.contains('@') || query.contains('@') {
            return Err(format!("has an @ after the host; {ENCODE_HINT}"));
        }
        let (user_info, host) = authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        let user_info = user_info.unwrap_or_default();
        if user_info.contains('@') {
            return Err(format!("has more than one @ before the host; {ENCODE_HINT}"));
        }
        decode(user_info, "user or password")?;
        let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
        let (host, _) = host_and_port(host, default_port)?;
        if host.starts_with('/') {
            return Err("names a socket, which is not supported; hint: a host".to_owned());
        }
        Ok(Self {
            scheme,
            user: !user.is_empty(),
            password: !password.is_empty(),
            loopback: is_loopback(&host),
            path: !path.is_empty(),
            query: !query.is_empty(),
        })
    }
}

/// A URL, or several with commas between, with everything before each @ hidden.
pub(super) fn masked(urls: &str) -> String {
    let one = |url: &str| match url.rsplit_once('@') {
        Some((before, host)) => {
            format!("{}***@{host}", before.split_once("://").map_or(String::new(), |(s, _)| format!("{s}://")))
        }
        None => url.to_owned(),
    };
    urls.split(',').map(one).collect::<Vec<_>>().join(",")
}

/// `host`, `host:port` or `[address]:port`; the host comes back decoded and without brackets.
///
/// # Errors
/// A sentence without any part of `text`.
pub(super) fn host_and_port(text: &str, default_port: u16) -> Result<(String, u16), String> {
    let (host, port) = match text.strip_prefix('[') {
        Some(inside) => {
            let (address, after) = inside.split_once(']').ok_or("has a [ without its ] in a host")?;
            address
                .parse::<std::net::Ipv6Addr>()
                .map_err(|_| "has a host in [ ] that is no IPv6 address".to_owned())?;
            let port = after.strip_prefix(':');
            if port.is_none() && !after.is_empty() {
                return Err("has text after the ] of a host".to_owned());
            }
            (address.to_owned(), port)
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            if port.is_some_and(|port| port.contains(':')) {
                return Err(format!(
                    "has a host with several colons; hint: write an IPv6 address as [::1]:5432, or {}",
                    &ENCODE_HINT[6..]
                ));
            }
            (decode(host, "host")?, port)
        }
    };
    Ok((host_name(&host)?, port.map_or(Ok(default_port), port_number)?))
}

pub(super) fn host_name(host: &str) -> Result<String, String> {
    if host.is_empty() {
        return Err("names no host".to_owned());
    }
    let odd = |c: char| c.is_control() || c.is_whitespace() || (!host.starts_with('/') && "/@?#\\\"'".contains(c));
    if host.contains(odd) {
        return Err(format!("has a character in its host that no host has; {ENCODE_HINT}"));
    }
    Ok(host.to_owned())
}

pub(super) fn port_number(text: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = digits.then(|| text.parse::<u16>().ok()).flatten().filter(|port| *port > 0);
    port.ok_or_else(|| format!("has a port that is not a number from 1 to 65535; {ENCODE_HINT}"))
}

/// Percent-decoding, strict: a lone % is more often a raw password than a wish.
pub(super) fn decode(text: &str, part: &str) -> Result<String, String> {
    let broken = || format!("has a % in its {part} that is not followed by two hex digits; {ENCODE_HINT}");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, after @ ..] = rest else { return Err(broken()) };
        let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        bytes.push(digit(high).ok_or_else(broken)? * 16 + digit(low).ok_or_else(broken)?);
        rest = after;
    }
    if bytes.contains(&0) {
        return Err(format!("has a NUL in its {part}"));
    }
    String::from_utf8(bytes).map_err(|_| format!("has a {part} that is not UTF-8 once decoded"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_url_is_taken_apart() {
        let parse = |url: &str| BrokerUrl::parse(url, &["redis", "rediss"], 6379).unwrap();
        let url = parse("rediss://u:p%40@h:1/0?protocol=resp3");
        assert_eq!(
            (url.scheme, url.user, url.password, url.loopback, url.path, url.query),
            (1, true, true, false, true, true)
        );
        let url = parse("redis://:p@[::1]");
        assert_eq!((url.scheme, url.user, url.password, url.loopback, url.path), (0, false, true, true, false));
    }

    #[test]
    fn a_bad_broker_url_names_the_part_and_never_the_password() {
        for (url, part) in [
            ("h:6379", "no scheme"),
            ("http://h", "unknown scheme"),
            ("redis://", "names no host"),
            ("redis://u:hunter2@", "names no host"),
            ("redis://h:0", "1 to 65535"),
            ("redis://h:65536", "1 to 65535"),
            ("redis://u:hunter2@h/#insecure", "#insecure"),
            ("redis://u:hunter2#@h", "has a #"),
            ("redis://u:hunter2/x@h", "@ after the host"),
            ("redis://u:hunter2@x@h", "more than one @"),
            ("redis://u:hunter2%@h", "two hex digits"),
            ("redis://%2Frun", "socket"),
            ("redis://::1", "several colons"),
        ] {
            let error = BrokerUrl::parse(url, &["redis"], 6379).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{url}: {error}");
        }
        assert!(BrokerUrl::parse("redis://h:65535", &["redis"], 6379).is_ok());
    }

    #[test]
    fn masking_hides_tokens_as_well_as_passwords() {
        assert_eq!(masked("nats://tok@a:1,nats://u:p@b,nats://c"), "nats://***@a:1,nats://***@b,nats://c");
    }
}
