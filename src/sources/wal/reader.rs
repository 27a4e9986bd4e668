//! One stream, from its slot to its end: frames into transactions, transactions into the feed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use time::OffsetDateTime;
use tokio::sync::Notify;

use super::feed::{Feed, Standing, Touch};
use super::pgoutput::{Decoder, Insert, Message};
use crate::db::{Frame, Replication};
use crate::error::Result;
use crate::event::Event;

/// Deliveries of one transaction that are remembered one by one; of a larger one, only which lanes it touched.
const TOUCHES: usize = 4_096;
/// Confirming costs the server little, and what is not confirmed is kept.
const CONFIRM: Duration = Duration::from_secs(1);

/// What the stream showed, for those who watch it.
#[derive(Debug, Default)]
pub(super) struct Sight {
    /// The last mark that came through.
    mark: AtomicI64,
    seen: Notify,
    /// Events of lanes that are ours, and those of them whose payload was of use.
    pub(super) events: AtomicU64,
    pub(super) useful: AtomicU64,
}

impl Sight {
    /// Returns once `mark` came through.
    pub(super) async fn sees(&self, mark: i64) {
        while self.mark.load(Ordering::Relaxed) != mark {
            self.seen.notified().await;
        }
    }
}

/// Reads the stream until it breaks; never ends well.
///
/// # Errors
/// Whatever ended it.
pub(super) async fn read(
    stream: &mut Replication,
    feed: &Arc<Feed>,
    sight: &Sight,
    mut decoder: Decoder,
    largest: usize,
) -> Result<std::convert::Infallible> {
    let mut transaction = Transaction::new(largest);
    let mut confirmed = Instant::now();
    let mut received = 0;
    let mut ticks = tokio::time::interval(CONFIRM);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let frame = tokio::select! {
            biased;
            frame = stream.next(largest) => Some(frame?),
            _ = ticks.tick() => None,
        };
        let mut now = false;
        match frame {
            None => now = true,
            Some(Frame::Keepalive { wal_end, reply }) => {
                received = received.max(wal_end);
                now = reply;
            }
            Some(Frame::Oversized) => transaction.lost_one(),
            Some(Frame::Data { wal_end, message }) => {
                received = received.max(wal_end);
                match decoder.read(&message)? {
                    Message::Begin { xid, committed_at } => transaction.begin(xid, committed_at),
                    Message::Insert(insert) => transaction.add(&insert, feed, sight)?,
                    Message::Commit => transaction.commit(feed),
                    Message::Other => {}
                }
            }
        }
        // Also in the middle of a burst that leaves the ticks no turn.
        if now || confirmed.elapsed() >= CONFIRM {
            stream.confirm(received).await?;
            confirmed = Instant::now();
        }
    }
}

/// What one transaction brought so far.
struct Transaction {
    xid: u32,
    committed_at: OffsetDateTime,
    touches: Vec<Touch>,
    /// When they are too many, or one could not be read.
    lanes: HashSet<(i16, i32)>,
    everything: bool,
    events: Vec<(Event, u32, usize)>,
    bytes: usize,
    largest: usize,
}

impl Transaction {
    fn new(largest: usize) -> Self {
        Self {
            xid: 0,
            committed_at: OffsetDateTime::UNIX_EPOCH,
            touches: Vec::new(),
            lanes: HashSet::new(),
            everything: false,
            events: Vec::new(),
            bytes: 0,
            largest,
        }
    }

    fn begin(&mut self, xid: u32, committed_at: OffsetDateTime) {
        *self = Self { xid, committed_at, ..Self::new(self.largest) };
    }

    /// A row too large to be read: which lane it is in, nobody knows.
    fn lost_one(&mut self) {
        self.everything = true;
    }

    fn add(&mut self, insert: &Insert<'_>, feed: &Feed, sight: &Sight) -> Result<()> {
        if insert.seq < 0 {
            sight.mark.store(insert.seq, Ordering::Relaxed);
            sight.seen.notify_one();
            return Ok(());
        }
        let (mut ours, mut current) = (false, 0);
        for &handler in &insert.handlers {
            let standing = feed.standing(insert.lane, handler);
            if standing == Standing::Foreign {
                continue;
            }
            ours = true;
            current += u32::from(standing == Standing::Current);
            if self.touches.len() < TOUCHES {
                self.touches.push(Touch { lane: insert.lane, handler, seq: Some(insert.seq), xid: self.xid });
            } else {
                self.lanes.insert((insert.lane, handler));
            }
        }
        sight.events.fetch_add(u64::from(ours), Ordering::Relaxed);
        if current == 0 {
            return Ok(());
        }
        sight.useful.fetch_add(1, Ordering::Relaxed);
        let size = insert.size_bytes();
        if self.bytes + size <= self.largest {
            self.bytes += size;
            self.events.push((insert.event()?, current, size));
        } else {
            // Its beginning alone would be of little use, and the memory is better used for others.
            self.bytes = usize::MAX / 2;
            self.events = Vec::new();
        }
        Ok(())
    }

    fn commit(&mut self, feed: &Feed) {
        if self.everything {
            feed.missed();
        }
        let xid = self.xid;
        let lanes = self.lanes.drain().map(|(lane, handler)| Touch { lane, handler, seq: None, xid });
        self.touches.extend(lanes);
        feed.committed(self.committed_at, &self.touches, std::mem::take(&mut self.events), Instant::now());
        *self = Self::new(self.largest);
    }
}
