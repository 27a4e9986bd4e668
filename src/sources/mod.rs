//! Sources: how a bridge learns of deliveries. The poll decides what is sent; everything else only hints.
//!
//! I2: a delivery leaves this module as a `Parcel` only after an ordinary read saw it (R1) and the write-ahead log
//! that committed it was flushed (R2). Nothing here remembers a position across restarts.

mod confirm;
mod notify;
mod poll;

pub(crate) use confirm::{Confirmer, Verdict};
pub(crate) use notify::listen;
pub(crate) use poll::{Poller, Promoted};

use time::OffsetDateTime;

use crate::delivery::DeliveryId;

/// One (lane, handler) to read, from above `after`, at most `limit` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub lane: i16,
    pub handler: i32,
    pub after: i64,
    pub limit: i32,
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
    /// The write-ahead log position after which its commit is surely written; sent only once that is flushed (R2).
    pub written: u64,
}

/// What one poll saw, in one snapshot.
#[derive(Debug)]
pub(crate) struct Page {
    /// By ask in the order of the asks, then by seq.
    pub rows: Vec<Row>,
    /// All transactions below this number had ended.
    pub ended_below: i64,
}
