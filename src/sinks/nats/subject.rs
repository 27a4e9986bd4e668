//! Subjects and headers from publishers' values: escaped reversibly, or refused before they reach the client.
//!
//! A value fills a subject as text in which every `%`, `.`, `*`, `>`, white space and control character, and a `$`
//! at the start of a token, is `%XX` for each byte of its UTF-8; an empty token is `%00`, which no value can
//! contain, since Postgres text has no NUL. `{type}` keeps its dots: its tokens are escaped one by one. Percent
//! decoding gives the value back.
//!
//! I1: no value can break the protocol's framing, add a wildcard, or reach the server's own subjects (B13, B14, B17).

use std::str::FromStr;

use async_nats::{HeaderMap, HeaderName, HeaderValue};

use crate::config::Placeholder;
use crate::delivery::{Failure, Parcel};
use crate::sinks::Route;

/// Subject, reply and sizes share one protocol line, which the server cuts at 4,096 bytes by default, and then
/// closes the connection with every unacknowledged publish on it.
const MAX_SUBJECT_BYTES: usize = 3_500;

/// Requests to these are obeyed by the server, or answer somebody else's request.
const RESERVED_SUBJECTS: [&str; 4] = ["$JS.", "$SYS.", "_INBOX.", "_R_."];

/// The subject of a delivery.
///
/// # Errors
/// Why there is none, for this delivery and for ever.
pub(super) fn subject(route: &Route, parcel: &Parcel) -> Result<String, Failure> {
    let handler = &route.handler;
    let subject = handler
        .destination
        .render_with(&parcel.event, &handler.name, |placeholder, value| match placeholder {
            Placeholder::Type => value.split('.').map(escape).collect::<Vec<_>>().join("."),
            Placeholder::Key | Placeholder::Header => escape(value),
        })
        .map_err(|why| Failure::new("NO_SUBJECT", why))?;
    check(&subject).map_err(|why| Failure::new("INVALID_SUBJECT", why))?;
    Ok(subject)
}

/// Whether a subject can be published to.
///
/// # Errors
/// A sentence that names the rule it breaks.
pub(super) fn check(subject: &str) -> Result<(), String> {
    if subject.len() > MAX_SUBJECT_BYTES {
        return Err(format!("the subject has {} bytes, the limit is {MAX_SUBJECT_BYTES}", subject.len()));
    }
    if let Some(reserved) = RESERVED_SUBJECTS.iter().find(|reserved| subject.starts_with(**reserved)) {
        return Err(format!("subjects under {reserved} belong to the server"));
    }
    if subject.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("the subject has white space or a control character".into());
    }
    for token in subject.split('.') {
        match token {
            "" => return Err("the subject has an empty token".into()),
            "*" | ">" => return Err("the subject has a wildcard".into()),
            _ => {}
        }
    }
    Ok(())
}

/// One token from any text; see the module's doc.
fn escape(value: &str) -> String {
    if value.is_empty() {
        return "%00".into();
    }
    let mut token = String::with_capacity(value.len());
    for (at, c) in value.char_indices() {
        let special = matches!(c, '%' | '.' | '*' | '>') || c.is_whitespace() || c.is_control();
        if special || (c == '$' && at == 0) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                token.push_str(&format!("%{byte:02X}"));
            }
        } else {
            token.push(c);
        }
    }
    token
}

/// Headers as the client takes them, with the publisher's checked and ours (`Nats-…`) behind them.
///
/// # Errors
/// The name of the first header that NATS cannot carry, or that would command the server.
pub(super) fn headers(attributes: &[(impl AsRef<str>, String)], ours: &[(&str, &str)]) -> Result<HeaderMap, Failure> {
    let mut map = HeaderMap::new();
    for (name, value) in attributes {
        let name = name.as_ref();
        // `Nats-Rollup` would purge the stream, `Nats-TTL` delete the event, `Nats-Msg-Id` swallow another one.
        if name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-")) {
            return Err(Failure::new("RESERVED_HEADER", format!("the header {name:?} is reserved by NATS")));
        }
        append(&mut map, name, value)?;
    }
    for (name, value) in ours {
        append(&mut map, name, value)?;
    }
    Ok(map)
}

/// Only the client's fallible constructors: its conversions from strings panic on what a publisher may have sent.
fn append(map: &mut HeaderMap, name: &str, value: &str) -> Result<(), Failure> {
    let bad = |what: &str| Failure::new("INVALID_HEADER", format!("the header {name:?} has {what}"));
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_graphic() && b != b':') {
        return Err(bad("a name that is not printable ASCII without space and colon"));
    }
    if value.contains(['\r', '\n', '\0']) {
        return Err(bad("a line break or NUL in its value"));
    }
    let key = HeaderName::from_str(name).map_err(|_| bad("a name that NATS refuses"))?;
    let value = HeaderValue::from_str(value).map_err(|_| bad("a value that NATS refuses"))?;
    map.append(key, value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Format;
    use crate::sinks::tests::{parcel, route};

    fn unescape(token: &str) -> String {
        if token == "%00" {
            return String::new();
        }
        let mut bytes = Vec::new();
        let mut rest = token.as_bytes();
        while let Some((first, tail)) = rest.split_first() {
            if *first == b'%' {
                bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
                rest = &tail[2..];
            } else {
                bytes.push(*first);
                rest = tail;
            }
        }
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn an_escaped_value_is_one_valid_token_and_can_be_read_back() {
        for value in ["", "a", "$JS", "a.b", "*", ">", "a b", "%", "%41", "\t\r\n", "é\u{2028}", "\u{7f}", "a$b"] {
            let token = escape(value);
            assert!(!token.contains('.') && check(&token).is_ok(), "{value:?} became {token:?}");
            assert!(!token.starts_with('$'));
            assert_eq!(unescape(&token), value);
        }
        assert_eq!(escape("a$b"), "a$b");
        assert_eq!(escape("$JS.API"), "%24JS%2EAPI");
    }

    #[test]
    fn a_type_keeps_its_dots_and_a_key_does_not() {
        let mut parcel = parcel(1, Some("eu.42"));
        std::sync::Arc::make_mut(&mut parcel.event).kind = "order..$paid".into();
        let subject = subject(&route("h", "x.{type}.{key}.{handler}", Format::Raw), &parcel).unwrap();
        assert_eq!(subject, "x.order.%00.%24paid.eu%2E42.h");
    }

    #[test]
    fn a_subject_that_cannot_be_published_to_is_refused_with_its_rule() {
        for (bad, part) in [
            ("", "empty token"),
            ("a..b", "empty token"),
            ("a.*", "wildcard"),
            ("a.>", "wildcard"),
            ("a b", "white space"),
            ("$JS.API.STREAM.DELETE.X", "belong"),
            ("_INBOX.x", "belong"),
        ] {
            assert!(check(bad).unwrap_err().contains(part), "{bad}");
        }
        assert!(check(&"a".repeat(MAX_SUBJECT_BYTES)).is_ok());
        assert!(check(&"a".repeat(MAX_SUBJECT_BYTES + 1)).unwrap_err().contains("limit"));
        assert!(check("$KV.bucket.key").is_ok());
    }

    #[test]
    fn a_delivery_without_the_value_its_subject_needs_is_refused() {
        let failure = subject(&route("h", "x.{key}", Format::Raw), &parcel(1, None)).unwrap_err();
        assert_eq!(failure.code, "NO_SUBJECT");
    }

    #[test]
    fn no_header_of_a_publisher_breaks_the_framing_or_commands_the_server() {
        let code = |name: &str, value: &str| headers(&[(name, value.to_owned())], &[]).unwrap_err().code;
        for (name, value) in
            [("", "x"), ("a b", "x"), ("a:b", "x"), ("é", "x"), ("a\r\nb", "x"), ("a", "x\r\ny: z"), ("a", "\0")]
        {
            assert_eq!(code(name, value), "INVALID_HEADER", "{name:?}: {value:?}");
        }
        for name in ["Nats-Rollup", "nats-ttl", "NATS-Msg-Id", "Nats-"] {
            assert_eq!(code(name, "all"), "RESERVED_HEADER", "{name}");
        }
        let map = headers(&[("a", " é ".to_owned())], &[("Nats-Msg-Id", "e1/h")]).unwrap();
        assert_eq!(map.get("a").map(|value| value.as_str()), Some(" é "));
        assert_eq!(map.get("Nats-Msg-Id").map(|value| value.as_str()), Some("e1/h"));
    }
}
