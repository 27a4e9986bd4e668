//! What a consumer sees of a delivery: CloudEvents 1.0 in binary or structured mode, or the payload alone.
//!
//! I1: a payload's bytes are never changed; a JSON payload inside the structured form is copied as text, never
//! parsed into numbers, so that 0.1 and 2^63 arrive as they were written.
//! I2: a name is never given twice: an attribute of ours wins over a publisher's header of the same name.
//! Never checks what a broker allows in a header; that is the sink's own rule.

// Each broker's sink uses its part of this file, so a build without one of them leaves a part unused.
#![cfg_attr(not(all(feature = "kafka", feature = "nats", feature = "redis")), allow(dead_code))]

use std::borrow::Cow;

use base64::Engine as _;
use serde::Serialize;
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;

use super::Route;
use crate::config::Format;
use crate::delivery::Parcel;

const CONTENT_TYPE: &str = "content-type";
const STRUCTURED: &str = "application/cloudevents+json";

/// How a broker spells attribute names, and what its binding allows in their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `ce_id`; values are UTF-8 (CloudEvents Kafka binding 3.2.3).
    Kafka,
    /// `ce-id`; values are percent-encoded (CloudEvents NATS binding, by the rules of HTTP binding 3.1.3.2).
    Nats,
    /// `ce_id` as a field of the entry; `data` is the payload's, so no header may take it.
    Redis,
}

/// A delivery as a broker carries it: attributes in a fixed order, no name twice, then the publisher's headers.
#[derive(Debug)]
pub(super) struct Encoded<'a> {
    pub attributes: Vec<(Cow<'static, str>, String)>,
    pub body: Cow<'a, [u8]>,
}

/// The delivery in the format its handler asks for. Never fails: what a format cannot carry is left out (a time
/// outside the years 0 to 9999) or carried as base64 (bytes that are no text, in the structured form).
pub(super) fn encode<'a>(parcel: &'a Parcel, route: &Route, names: Names) -> Encoded<'a> {
    let event = &*parcel.event;
    let mut attributes: Vec<(Cow<'static, str>, String)> = Vec::with_capacity(9 + event.headers.len());
    let body = match route.handler.format {
        Format::CloudEvents => {
            for (name, value) in context(parcel, route) {
                attributes.push((names.attribute(name), names.value(value)));
            }
            attributes.push((CONTENT_TYPE.into(), event.content_type().to_owned()));
            Cow::Borrowed(event.payload.bytes.as_slice())
        }
        Format::CloudEventsJson => {
            attributes.push((CONTENT_TYPE.into(), STRUCTURED.to_owned()));
            Cow::Owned(structured(parcel, route))
        }
        Format::Raw => {
            attributes.push((CONTENT_TYPE.into(), event.content_type().to_owned()));
            Cow::Borrowed(event.payload.bytes.as_slice())
        }
    };
    let ours = attributes.len();
    for (name, value) in &event.headers {
        let payload_field = names == Names::Redis && name == "data";
        if !payload_field && !attributes[..ours].iter().any(|(own, _)| own.eq_ignore_ascii_case(name)) {
            attributes.push((name.clone().into(), value.clone()));
        }
    }
    Encoded { attributes, body }
}

/// The delivery as one CloudEvents JSON object (CloudEvents JSON format 1.0), without a trailing newline.
///
/// `data` is the payload itself when its content type is JSON and it is valid JSON, a string when it is text,
/// and `data_base64` otherwise.
pub(super) fn structured(parcel: &Parcel, route: &Route) -> Vec<u8> {
    let event = &*parcel.event;
    let bytes = event.payload.bytes.as_slice();
    let json = if is_json(event.content_type()) { serde_json::from_slice::<&RawValue>(bytes).ok() } else { None };
    let (data, data_base64) = match (json, std::str::from_utf8(bytes)) {
        (Some(json), _) => (Some(Data::Json(json)), None),
        (None, Ok(text)) => (Some(Data::Text(text)), None),
        (None, Err(_)) => (None, Some(base64::engine::general_purpose::STANDARD.encode(bytes))),
    };
    let attributes = context(parcel, route).into_iter().collect();
    let whole = Structured { attributes, datacontenttype: event.content_type(), data, data_base64 };
    serde_json::to_vec(&whole).expect("maps with string keys, strings and checked raw JSON always serialise")
}

/// `application/json` or `…+json`, with or without parameters, in any case.
fn is_json(content_type: &str) -> bool {
    let media = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    media == "application/json" || media.ends_with("+json")
}

/// The context attributes of a delivery, in the order in which they are sent, without `datacontenttype`.
fn context(parcel: &Parcel, route: &Route) -> Vec<(&'static str, String)> {
    let event = &*parcel.event;
    let mut all = Vec::with_capacity(8);
    all.push(("id", event.id.clone()));
    all.push(("type", event.kind.clone()));
    all.push(("source", route.source.to_string()));
    // RFC 3339 has no year beyond 9999; `time` is optional in CloudEvents, a wrong one would not be.
    if let Ok(time) = event.created_at.format(&Rfc3339) {
        all.push(("time", time));
    }
    all.push(("specversion", "1.0".to_owned()));
    if let Some(key) = &event.key {
        all.push(("partitionkey", key.clone()));
    }
    all.push(("sequence", event.seq.to_string()));
    all.push(("lanebridgehandler", route.handler.name.clone()));
    all
}

#[derive(Serialize)]
struct Structured<'a> {
    #[serde(flatten, serialize_with = "in_order")]
    attributes: Vec<(&'static str, String)>,
    datacontenttype: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Data<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_base64: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Data<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

fn in_order<S: serde::Serializer>(attributes: &[(&'static str, String)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(attributes.iter().map(|(name, value)| (name, value)))
}

impl Names {
    fn attribute(self, name: &str) -> Cow<'static, str> {
        match self {
            Names::Kafka | Names::Redis => format!("ce_{name}").into(),
            Names::Nats => format!("ce-{name}").into(),
        }
    }

    fn value(self, value: String) -> String {
        match self {
            Names::Kafka | Names::Redis => value,
            Names::Nats => percent_encode(value),
        }
    }
}

/// HTTP binding 3.1.3.2: space, double quote, percent and all outside U+0021..=U+007E become `%XX` per UTF-8 byte.
fn percent_encode(value: String) -> String {
    let plain = |byte: u8| (0x21..=0x7E).contains(&byte) && byte != b'"' && byte != b'%';
    if value.bytes().all(plain) {
        return value;
    }
    let mut out = String::with_capacity(value.len() + 16);
    for byte in value.bytes() {
        if plain(byte) {
            out.push(char::from(byte));
        } else {
            const HEX: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
            out.extend(['%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parcel, route};
    use super::*;
    use crate::delivery::Parcel;
    use crate::event::PayloadFormat;
    use std::sync::Arc;

    fn change(mut parcel: Parcel, with: impl FnOnce(&mut crate::event::Event)) -> Parcel {
        with(Arc::make_mut(&mut parcel.event));
        parcel
    }

    fn pairs(encoded: &Encoded<'_>) -> Vec<(String, String)> {
        encoded.attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect()
    }

    #[test]
    fn binary_mode_has_every_attribute_then_content_type_then_headers_as_they_are() {
        let parcel = change(parcel(7, Some("k")), |event| {
            event.headers = vec![("traceparent".into(), "00-é".into()), ("X-A".into(), String::new())];
        });
        let encoded = encode(&parcel, &route("billing", "t", Format::CloudEvents), Names::Kafka);
        let expected = [
            ("ce_id", "e7"),
            ("ce_type", "order.paid"),
            ("ce_source", "/lanebridge/test"),
            ("ce_time", "1970-01-01T00:00:00Z"),
            ("ce_specversion", "1.0"),
            ("ce_partitionkey", "k"),
            ("ce_sequence", "7"),
            ("ce_lanebridgehandler", "billing"),
            ("content-type", "application/json"),
            ("traceparent", "00-é"),
            ("X-A", ""),
        ];
        assert_eq!(pairs(&encoded), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(&*encoded.body, br#"{"seq":7}"#);
    }

    #[test]
    fn an_event_without_key_has_no_partitionkey_and_an_empty_key_has_an_empty_one() {
        let route = route("billing", "t", Format::CloudEvents);
        let has = |key| {
            let parcel = parcel(1, key);
            let encoded = encode(&parcel, &route, Names::Redis);
            encoded.attributes.iter().find(|(name, _)| name == "ce_partitionkey").map(|(_, value)| value.clone())
        };
        assert_eq!(has(None), None);
        assert_eq!(has(Some("")).as_deref(), Some(""));
    }

    #[test]
    fn a_publishers_content_type_replaces_ours_and_no_name_comes_twice() {
        let parcel = change(parcel(1, None), |event| {
            event.headers = vec![
                ("Content-Type".into(), "text/csv".into()),
                ("CE_ID".into(), "forged".into()),
                ("data".into(), "x".into()),
            ];
        });
        for format in [Format::CloudEvents, Format::Raw, Format::CloudEventsJson] {
            let encoded = encode(&parcel, &route("h", "t", format), Names::Redis);
            let mut names: Vec<_> = encoded.attributes.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all, "{format:?}");
            assert!(!names.contains(&"data".to_owned()));
        }
        let raw = encode(&parcel, &route("h", "t", Format::Raw), Names::Kafka);
        let expected = [("content-type", "text/csv"), ("CE_ID", "forged"), ("data", "x")];
        assert_eq!(pairs(&raw), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn nats_attribute_values_are_percent_encoded_and_headers_are_not() {
        let parcel = change(parcel(1, Some("a b\"%\u{7f}é")), |event| {
            event.headers = vec![("note".into(), "a b".into())];
        });
        let encoded = encode(&parcel, &route("h", "s", Format::CloudEvents), Names::Nats);
        let get = |name: &str| encoded.attributes.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        assert_eq!(get("ce-partitionkey"), Some("a%20b%22%25%7F%C3%A9"));
        assert_eq!(get("ce-source"), Some("/lanebridge/test"));
        assert_eq!(get("note"), Some("a b"));
    }

    #[test]
    fn structured_json_data_is_copied_digit_by_digit() {
        let parcel = change(parcel(1, Some("k")), |event| {
            event.payload.bytes = br#" {"n":1.10,"big":18446744073709551617,"a":1,"a":2} "#.to_vec();
            event.headers = vec![("traceparent".into(), "00".into())];
        });
        let encoded = encode(&parcel, &route("h", "t", Format::CloudEventsJson), Names::Kafka);
        let body = std::str::from_utf8(&encoded.body).unwrap();
        assert_eq!(
            body,
            concat!(
                r#"{"id":"e1","type":"order.paid","source":"/lanebridge/test","time":"1970-01-01T00:00:00Z","#,
                r#""specversion":"1.0","partitionkey":"k","sequence":"1","lanebridgehandler":"h","#,
                r#""datacontenttype":"application/json","data":{"n":1.10,"big":18446744073709551617,"a":1,"a":2}}"#
            )
        );
        let expected = [("content-type", "application/cloudevents+json"), ("traceparent", "00")];
        assert_eq!(pairs(&encoded), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    // B10: it is scanned, not built, so that no depth overflows a stack.
    #[test]
    fn structured_json_data_is_copied_however_deep_it_is_nested() {
        let deep = "[".repeat(200_000) + &"]".repeat(200_000);
        let parcel = change(parcel(1, None), |event| event.payload.bytes = deep.clone().into_bytes());
        let encoded = encode(&parcel, &route("h", "t", Format::CloudEventsJson), Names::Kafka);
        assert!(encoded.body.ends_with(format!("\"data\":{deep}}}").as_bytes()));
    }

    #[test]
    fn structured_data_is_a_string_for_text_and_base64_for_bytes() {
        let tail = |format, bytes: &[u8]| {
            let parcel = change(parcel(1, None), |event| {
                event.payload.format = format;
                event.payload.bytes = bytes.to_vec();
            });
            let body = String::from_utf8(structured(&parcel, &route("h", "t", Format::CloudEventsJson))).unwrap();
            body.split_once("\"datacontenttype\":").unwrap().1.split_once(',').unwrap().1.to_owned()
        };
        assert_eq!(tail(PayloadFormat::Text, b"1"), r#""data":"1"}"#);
        assert_eq!(tail(PayloadFormat::Text, b""), r#""data":""}"#);
        assert_eq!(tail(PayloadFormat::Json, b"{broken"), r#""data":"{broken"}"#);
        assert_eq!(tail(PayloadFormat::Bytes, &[0xff, 0]), r#""data_base64":"/wA="}"#);
        assert_eq!(tail(PayloadFormat::Json, &[b'"', 0xff, b'"']), r#""data_base64":"Iv8i"}"#);
    }

    #[test]
    fn json_content_types_are_known_by_suffix_and_without_case() {
        assert!(is_json("Application/JSON; charset=utf-8"));
        assert!(is_json("application/vnd.acme+json"));
        assert!(!is_json("application/jsonp"));
        assert!(!is_json("text/plain"));
    }

    #[test]
    fn a_time_that_rfc3339_cannot_say_is_left_out() {
        let parcel = change(parcel(1, None), |event| {
            event.created_at =
                time::Date::from_calendar_date(-43, time::Month::May, 1).unwrap().midnight().assume_utc();
        });
        let encoded = encode(&parcel, &route("h", "t", Format::CloudEvents), Names::Kafka);
        assert!(!encoded.attributes.iter().any(|(name, _)| name == "ce_time"));
    }
}
