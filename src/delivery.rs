//! A delivery: one event owed to one handler, its states, and what a sink may answer for it.
//!
//! I1: a delivery goes away only after [`Outcome::Acked`] or an operator's recorded decision. Doubt
//! (a timeout, a lost connection after the bytes left, a reply nobody understands) is never `Acked`.

use std::fmt;
use std::sync::Arc;

use crate::event::Event;

/// Longest error text that is stored or logged, in bytes (brokers can answer with pages).
const FAILURE_TEXT_BYTES: usize = 512;

/// Where a delivery lives: the primary key of `deliveries`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeliveryId {
    /// 0..=255.
    pub lane: i16,
    /// The handler's number in the database, not its name.
    pub handler: i32,
    pub seq: i64,
}

/// The states of design 1.1; `InFlight` exists only in a bridge's memory, `Completed` only in a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Scheduled,
    Pending,
    InFlight,
    Retrying,
    Blocked,
    Dead,
    Completed,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Scheduled => "scheduled",
            State::Pending => "pending",
            State::InFlight => "in_flight",
            State::Retrying => "retrying",
            State::Blocked => "blocked",
            State::Dead => "dead",
            State::Completed => "completed",
        }
    }
}

/// What a sink is handed: a delivery whose row an ordinary, flushed read has just seen (R1, R2).
#[derive(Clone, Debug)]
pub struct Parcel {
    pub id: DeliveryId,
    pub event: Arc<Event>,
    /// Rises with every requeue and replay, so that a broker's dedup window cannot swallow them (R7).
    pub generation: i32,
}

impl Parcel {
    /// Installation, handler, generation and event id: names this delivery and no other (I7, R7). The id comes last, since
    /// it alone may hold a slash; white space in it is percent-encoded, because brokers trim header values.
    pub fn dedup_id(&self, installation: &str, handler: &str) -> String {
        let mut text = format!("{installation}/{handler}/{}/", self.generation);
        for c in self.event.id.chars() {
            if c.is_whitespace() || c == '%' {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    text.push_str(&format!("%{byte:02X}"));
                }
            } else {
                text.push(c);
            }
        }
        text
    }
}

/// A sink's answer for one parcel (D8). Each sink classifies its broker's codes in one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The broker stored exactly this delivery.
    Acked,
    /// This delivery can never go (too large, a subject that is no subject): dead at once.
    Rejected(Failure),
    /// Not now, or unknown: an attempt is spent, the retry schedule decides when.
    Refused(Failure),
    /// The broker was not there: no attempt is spent, the sink's breaker opens.
    Unreachable(Failure),
}

/// Why a delivery did not go, fit to be stored, logged and shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The broker's own code or name for it, e.g. `MSG_SIZE_TOO_LARGE`, `10071`, `WRONGTYPE`.
    pub code: String,
    text: String,
}

impl Failure {
    /// `text` is cut to 512 bytes and its control characters are escaped; it must not hold payload or secrets.
    pub fn new(code: impl Into<String>, text: impl AsRef<str>) -> Self {
        let mut escaped = String::with_capacity(text.as_ref().len().min(FAILURE_TEXT_BYTES));
        for c in text.as_ref().chars() {
            let before = escaped.len();
            if c.is_control() {
                escaped.extend(c.escape_default())
            } else {
                escaped.push(c)
            }
            if escaped.len() > FAILURE_TEXT_BYTES {
                escaped.truncate(before);
                break;
            }
        }
        Self { code: code.into(), text: escaped }
    }

    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // I7: two deliveries, two names, whatever ids publishers choose and however a broker trims.
    #[test]
    fn no_two_deliveries_have_one_dedup_id() {
        let dedup_id = |installation: &str, handler: &str, generation, id: &str| {
            let event = Event {
                seq: 1,
                id: id.into(),
                kind: "t".into(),
                key: None,
                headers: Vec::new(),
                payload: crate::event::Payload { bytes: Vec::new(), format: crate::event::PayloadFormat::Json },
                created_at: time::OffsetDateTime::UNIX_EPOCH,
            };
            let id = DeliveryId { lane: 0, handler: 1, seq: 1 };
            Parcel { id, event: Arc::new(event), generation }.dedup_id(installation, handler).trim().to_owned()
        };
        let mut names = Vec::new();
        for installation in ["a", "b"] {
            for handler in ["h", "1", "h.1"] {
                for generation in [0, 1, 11] {
                    for id in ["x", "x/h", "x/h/1", "/x", "1/x", "h/1/x", " x", "x ", "x\u{a0}", "%20x", "x%20", "é"] {
                        names.push(dedup_id(installation, handler, generation, id));
                    }
                }
            }
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(dedup_id("i", "h", 0, "order-7 é"), "i/h/0/order-7%20é");
    }

    #[test]
    fn a_failure_text_is_bounded_and_has_no_control_characters() {
        let failure = Failure::new("X", format!("a\nb\u{1b}[31m{}", "é".repeat(600)));
        assert!(failure.text().len() <= FAILURE_TEXT_BYTES);
        assert!(failure.text().starts_with("a\\nb\\u{1b}[31m"));
        assert!(!failure.text().chars().any(char::is_control));
    }
}
