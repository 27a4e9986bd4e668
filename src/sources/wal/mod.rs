//! The write-ahead log as a hint: a temporary slot on a connection of its own, read on a thread of its own.
//!
//! The stream wakes the poll for the lanes that a commit touched, and fills a cache with payloads. It decides nothing
//! (D1): what is sent was seen by the poll, and whatever the stream misses, the poll and the sweep find.
//! I6: the slot is temporary and what is received is confirmed at once, never when it is delivered, so that neither
//! a dead bridge nor a dead broker keeps any log (D2). What costs more than it gives is given up until it does not.
//! Never: anything else on the streaming connection (H18); a wait in the read loop for anything but the socket (H26).

mod feed;
mod pgoutput;
mod reader;
mod supply;

pub(crate) use feed::{Feed, Standing, Touch};
pub(crate) use supply::{Setup, can_stream, start};
