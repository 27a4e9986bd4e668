//! Sources: how a bridge learns of deliveries. The poll decides what is sent; everything else only hints.
//!
//! I2: a delivery leaves this module as a `Parcel` only after an ordinary read saw it (R1) and the write-ahead log
//! that committed it was flushed (R2). Nothing here remembers a position across restarts.

mod confirm;
mod notify;
mod poll;
pub(crate) mod wal;

pub(crate) use confirm::{Confirmer, Verdict};
pub(crate) use notify::listen;
pub(crate) use poll::{Poller, Promoted};
pub(crate) use wal::{Feed, Standing, Touch};

use std::time::{Duration, Instant};

use time::OffsetDateTime;

use crate::delivery::DeliveryId;

/// A read older than this permits no send by itself. Shorter than any takeover of a bridge that is alive, and than what
/// an operator who skips a delivery expects to be obeyed in.
const FRESH: Duration = Duration::from_millis(500);

/// One (lane, handler) to read, from above `after`, at most `limit` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub lane: i16,
    pub handler: i32,
    pub after: i64,
    pub limit: i32,
    /// Rows looked at, hidden ones among them; more than `limit`, since the last is only looked at.
    pub looks: i32,
    /// Whether order holds per key: hides what waits behind a held delivery of its key.
    pub ordered: bool,
    /// Whether a dead delivery hides what waits behind it.
    pub blocks: bool,
    /// The window's version when it asked.
    pub version: u64,
    /// A sweep, not a read from the lower bound.
    pub sweep: bool,
}

/// A delivery as the narrow poll sees it: no payload yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub id: DeliveryId,
    /// Hash of the event's key.
    pub key: Option<i64>,
    pub size_bytes: u32,
    pub created_at: OffsetDateTime,
    /// Failed attempts so far.
    pub attempts: i16,
    /// Rises with every requeue and replay.
    pub generation: i32,
    /// When the read that saw it was asked; `None` in tests of the pure rules.
    pub read_at: Option<Instant>,
    /// The write-ahead log position after which its commit is surely written; sent only once that is flushed (R2).
    pub written: u64,
}

impl Row {
    /// Whether what was seen then may still be acted on without another read.
    pub(crate) fn is_fresh(&self, now: Instant) -> bool {
        self.read_at.is_some_and(|at| now.duration_since(at) < FRESH)
    }
}

#[cfg(test)]
impl Row {
    /// A delivery without a key, freshly published.
    pub(crate) fn plain(id: DeliveryId) -> Self {
        Self {
            id,
            key: None,
            size_bytes: 1,
            created_at: OffsetDateTime::UNIX_EPOCH,
            attempts: 0,
            generation: 0,
            read_at: None,
            written: 0,
        }
    }
}

/// What one poll saw, in one snapshot.
#[derive(Debug)]
pub(crate) struct Page {
    /// By ask in the order of the asks, then by seq.
    pub rows: Vec<Row>,
    /// Where reads ended that had looked at as many rows as they may: lane, handler, and the last seq that was judged.
    pub cuts: Vec<(i16, i32, i64)>,
    /// All transactions below this number had ended.
    pub ended_below: i64,
}
