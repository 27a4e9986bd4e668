//! An event: an immutable row that an application published in its own transaction, as sinks see it.

use time::OffsetDateTime;

/// Default of `max_payload_bytes`: what one event may weigh, 1 MiB.
pub const MAX_PAYLOAD_BYTES: usize = 1024 * 1024;

/// A stored event. Field meanings follow CloudEvents 1.0 where they have a name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Position in publishing order; for one key, also the order of commits.
    pub seq: i64,
    /// `ce_id`: the publisher's id, or a random UUID made by the database.
    pub id: String,
    /// `ce_type`: dot-separated tokens that handlers match.
    pub kind: String,
    /// The ordering key; `None` has no order, `Some("")` is a key like any other.
    pub key: Option<String>,
    /// The publisher's headers in name order, as they are.
    pub headers: Vec<(String, String)>,
    pub payload: Payload,
    /// `ce_time`: when it was published, by the database's clock.
    pub created_at: OffsetDateTime,
}

/// The bytes of an event and how the publisher gave them.
#[derive(Clone, PartialEq, Eq)]
pub struct Payload {
    pub bytes: Vec<u8>,
    pub format: PayloadFormat,
}

/// Which overload of `publish` stored the payload; decides `content-type` unless a header says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadFormat {
    Json,
    Text,
    Bytes,
}

impl PayloadFormat {
    pub fn content_type(self) -> &'static str {
        match self {
            PayloadFormat::Json => "application/json",
            PayloadFormat::Text => "text/plain; charset=utf-8",
            PayloadFormat::Bytes => "application/octet-stream",
        }
    }

    /// As stored in `events.format`: `j`, `t` or `b`.
    pub fn from_code(code: i8) -> Option<Self> {
        match u8::try_from(code).ok()? {
            b'j' => Some(PayloadFormat::Json),
            b't' => Some(PayloadFormat::Text),
            b'b' => Some(PayloadFormat::Bytes),
            _ => None,
        }
    }
}

impl Event {
    /// A header `content-type` (any case) of the publisher, else what the payload's format says.
    pub fn content_type(&self) -> &str {
        self.header("content-type").unwrap_or_else(|| self.payload.format.content_type())
    }

    /// The first header of that name, compared without case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

impl std::fmt::Debug for Payload {
    /// Length only: payloads are never logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes, {:?})", self.bytes.len(), self.format)
    }
}
