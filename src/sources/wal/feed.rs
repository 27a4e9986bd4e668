//! What the stream tells dispatch, and what dispatch tells the stream: touched deliveries one way, payloads in a
//! bounded cache, and back which lanes are owned and which are too far behind for a payload to be of use.
//!
//! Everything here is a hint. Bounded in bytes and in number (R14); neither side ever waits for the other.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use time::OffsetDateTime;
use tokio::sync::Notify;

use crate::event::Event;
use crate::metrics;

/// Touches that wait for dispatch; more become "poll everything".
const TOUCHES: usize = 20_000;
/// A payload that nobody asked for in this time never will be: its row is gone, or was never there.
const UNWANTED: Duration = Duration::from_secs(5);
/// Looking for such costs a walk over all of them.
const CLEAN_EVERY: Duration = Duration::from_secs(1);
/// What an entry takes besides its event's bytes.
const OVERHEAD: usize = 300;

/// A delivery that a commit brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub lane: i16,
    pub handler: i32,
    /// `None`: some; they were too many to remember.
    pub seq: Option<i64>,
    /// The transaction's number, without its upper half.
    pub xid: u32,
}

/// What happened since dispatch last looked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    pub touches: Vec<Touch>,
    /// Something may have been missed: poll every lane, and sweep.
    pub all: bool,
}

/// What dispatch makes of one handler's deliveries in one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Standing {
    /// Another bridge's, or nobody's.
    Foreign = 0,
    /// Read to the end: a new delivery goes out next.
    Current = 1,
    /// There is more in the table than in memory: a new delivery's turn comes later.
    Behind = 2,
}

/// Shared by the reader of the stream and by dispatch.
pub(crate) struct Feed {
    touched: Mutex<Touched>,
    cache: Mutex<Cache>,
    standings: HashMap<i32, Vec<AtomicU8>>,
    wake: Arc<Notify>,
    counts: metrics::Cache,
}

struct Cache {
    /// By seq: what is highest is wanted last.
    entries: BTreeMap<i64, Entry>,
    bytes: usize,
    most: usize,
    cleaned: Option<Instant>,
}

struct Entry {
    event: Arc<Event>,
    created_at: OffsetDateTime,
    committed_at: OffsetDateTime,
    /// Handlers that have not fetched it yet.
    wanted: u32,
    since: Instant,
    bytes: usize,
}

impl Feed {
    /// For these handlers, with a cache of `most` bytes; `wake` is rung when there is something to take.
    pub(crate) fn new(
        handlers: impl IntoIterator<Item = i32>,
        most: usize,
        wake: Arc<Notify>,
        counts: metrics::Cache,
    ) -> Self {
        let lanes = || (0..256).map(|_| AtomicU8::new(Standing::Foreign as u8)).collect();
        Self {
            touched: Mutex::default(),
            cache: Mutex::new(Cache { entries: BTreeMap::new(), bytes: 0, most, cleaned: None }),
            standings: handlers.into_iter().map(|handler| (handler, lanes())).collect(),
            wake,
            counts,
        }
    }

    /// How many payloads the table was spared so far.
    pub(crate) fn taken(&self) -> u64 {
        self.counts.hits.get()
    }

    pub(crate) fn set_standing(&self, lane: i16, handler: i32, standing: Standing) {
        if let Some(cell) = self.cell(lane, handler) {
            cell.store(standing as u8, Ordering::Relaxed);
        }
    }

    pub(crate) fn all_foreign(&self) {
        self.standings.values().flatten().for_each(|cell| cell.store(Standing::Foreign as u8, Ordering::Relaxed));
    }

    pub(super) fn standing(&self, lane: i16, handler: i32) -> Standing {
        match self.cell(lane, handler).map(|cell| cell.load(Ordering::Relaxed)) {
            Some(1) => Standing::Current,
            Some(2) => Standing::Behind,
            _ => Standing::Foreign,
        }
    }

    /// The share of owned (lane, handler) pairs that are behind, 0 to 1.
    pub(super) fn behind(&self) -> f64 {
        let (mut owned, mut behind) = (0_u32, 0_u32);
        for cell in self.standings.values().flatten() {
            let standing = cell.load(Ordering::Relaxed);
            owned += u32::from(standing != Standing::Foreign as u8);
            behind += u32::from(standing == Standing::Behind as u8);
        }
        if owned == 0 { 0.0 } else { f64::from(behind) / f64::from(owned) }
    }

    fn cell(&self, lane: i16, handler: i32) -> Option<&AtomicU8> {
        self.standings.get(&handler)?.get(usize::try_from(lane).ok()?)
    }

    /// One committed transaction: what it touched, and the events that are worth keeping, each with how many handlers
    /// want it.
    pub(super) fn committed(
        &self,
        committed_at: OffsetDateTime,
        touches: &[Touch],
        events: Vec<(Event, u32, usize)>,
        now: Instant,
    ) {
        if !events.is_empty() {
            let mut cache = lock(&self.cache);
            for (event, wanted, bytes) in events {
                cache.insert(event, committed_at, wanted, bytes, now);
            }
            self.count(&cache);
        }
        if touches.is_empty() {
            return;
        }
        {
            let mut touched = lock(&self.touched);
            if touched.touches.len() + touches.len() > TOUCHES {
                *touched = Touched { touches: Vec::new(), all: true };
            } else if !touched.all {
                touched.touches.extend_from_slice(touches);
            }
        }
        self.wake.notify_one();
    }

    /// The stream begins or ended: what it said before is forgotten.
    pub(super) fn resync(&self) {
        {
            let mut cache = lock(&self.cache);
            cache.entries.clear();
            cache.bytes = 0;
            self.count(&cache);
        }
        self.missed();
    }

    /// The stream did not say what it saw.
    pub(super) fn missed(&self) {
        *lock(&self.touched) = Touched { touches: Vec::new(), all: true };
        self.wake.notify_one();
    }

    pub(crate) fn take(&self) -> Touched {
        std::mem::take(&mut *lock(&self.touched))
    }

    /// The event of a delivery that a poll saw, if the stream brought it, and when it was committed. Each handler gets it
    /// once; a second try reads the table.
    pub(crate) fn event(&self, seq: i64, created_at: OffsetDateTime) -> Option<(Arc<Event>, OffsetDateTime)> {
        let event = {
            let mut cache = lock(&self.cache);
            let event = cache.take(seq, created_at);
            self.count(&cache);
            event
        };
        if event.is_some() { &self.counts.hits } else { &self.counts.misses }.inc();
        event
    }

    fn count(&self, cache: &Cache) {
        self.counts.bytes.set(i64::try_from(cache.bytes).unwrap_or(i64::MAX));
        self.counts.events.set(i64::try_from(cache.entries.len()).unwrap_or(i64::MAX));
    }
}

impl Cache {
    fn insert(&mut self, event: Event, committed_at: OffsetDateTime, wanted: u32, size: usize, now: Instant) {
        let bytes = size + OVERHEAD;
        if bytes > self.most {
            return;
        }
        if self.bytes + bytes > self.most && self.cleaned.is_none_or(|at| now.duration_since(at) >= CLEAN_EVERY) {
            self.cleaned = Some(now);
            self.entries.retain(|_, entry| {
                let keep = now.duration_since(entry.since) < UNWANTED;
                self.bytes -= if keep { 0 } else { entry.bytes };
                keep
            });
        }
        let seq = event.seq;
        while self.bytes + bytes > self.most {
            match self.entries.last_key_value() {
                Some((&last, _)) if last > seq => self.remove(last),
                _ => return,
            }
        }
        self.remove(seq);
        self.bytes += bytes;
        let created_at = event.created_at;
        let event = Arc::new(event);
        self.entries.insert(seq, Entry { event, created_at, committed_at, wanted, since: now, bytes });
    }

    fn remove(&mut self, seq: i64) {
        if let Some(entry) = self.entries.remove(&seq) {
            self.bytes -= entry.bytes;
        }
    }

    /// The time has to fit as well: after a failover a seq may name another event (H5, H31).
    fn take(&mut self, seq: i64, created_at: OffsetDateTime) -> Option<(Arc<Event>, OffsetDateTime)> {
        let entry = self.entries.get_mut(&seq).filter(|entry| entry.created_at == created_at)?;
        entry.wanted -= 1;
        let event = (Arc::clone(&entry.event), entry.committed_at);
        if entry.wanted == 0 {
            self.remove(seq);
        }
        Some(event)
    }
}

/// Nothing panics while it holds one of these; if it did, what is in there is still only hints.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Payload, PayloadFormat};

    const AT: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn event(seq: i64) -> Event {
        Event {
            seq,
            id: seq.to_string(),
            kind: "t".into(),
            key: None,
            headers: Vec::new(),
            payload: Payload { bytes: Vec::new(), format: PayloadFormat::Json },
            created_at: AT,
        }
    }

    /// Room for three events.
    fn feed() -> Feed {
        Feed::new([1, 2], 3 * (OVERHEAD + 100), Arc::new(Notify::new()), metrics::Cache::default())
    }

    fn commit(feed: &Feed, seqs: &[i64], wanted: u32, now: Instant) {
        feed.committed(AT, &[], seqs.iter().map(|seq| (event(*seq), wanted, 100)).collect(), now);
    }

    #[test]
    fn an_event_is_there_once_for_each_handler_that_wants_it() {
        let feed = feed();
        commit(&feed, &[7], 2, Instant::now());
        assert_eq!(feed.event(7, AT).unwrap().0.seq, 7);
        assert!(feed.event(7, AT).is_some());
        assert!(feed.event(7, AT).is_none());
        assert_eq!(lock(&feed.cache).bytes, 0);
        let counts = &feed.counts;
        assert_eq!((counts.hits.get(), counts.misses.get(), counts.bytes.get(), counts.events.get()), (2, 1, 0, 0));
    }

    // H5, H31: a number that names another event now.
    #[test]
    fn an_event_of_another_time_is_not_taken_for_this_one() {
        let feed = feed();
        commit(&feed, &[7], 1, Instant::now());
        assert!(feed.event(7, AT + time::Duration::microseconds(1)).is_none());
        assert!(feed.event(7, AT).is_some());
    }

    #[test]
    fn when_it_is_full_what_is_wanted_last_goes_first() {
        let feed = feed();
        let now = Instant::now();
        commit(&feed, &[10, 11, 12], 1, now);
        commit(&feed, &[13], 1, now);
        assert!(feed.event(13, AT).is_none(), "its turn would come after all the others'");
        commit(&feed, &[9], 1, now);
        assert!(feed.event(12, AT).is_none());
        assert!(feed.event(9, AT).is_some() && feed.event(10, AT).is_some() && feed.event(11, AT).is_some());
    }

    // H14: rows that were deleted in the transaction that inserted them are never asked for.
    #[test]
    fn what_nobody_asked_for_makes_room() {
        let feed = feed();
        let now = Instant::now();
        commit(&feed, &[10, 11, 12], 1, now);
        commit(&feed, &[13], 1, now + UNWANTED);
        assert!(feed.event(13, AT).is_some() && feed.event(10, AT).is_none());
    }

    #[test]
    fn an_event_larger_than_the_cache_stays_out_and_harms_nothing() {
        let feed = feed();
        commit(&feed, &[1], 1, Instant::now());
        feed.committed(AT, &[], vec![(event(2), 1, 10_000)], Instant::now());
        assert!(feed.event(1, AT).is_some() && feed.event(2, AT).is_none());
    }

    #[test]
    fn touches_that_nobody_takes_become_one_word() {
        let feed = feed();
        let touch = Touch { lane: 1, handler: 1, seq: Some(1), xid: 5 };
        feed.committed(AT, &vec![touch; TOUCHES], Vec::new(), Instant::now());
        assert_eq!(feed.take().touches.len(), TOUCHES);
        feed.committed(AT, &vec![touch; TOUCHES], Vec::new(), Instant::now());
        feed.committed(AT, &[touch], Vec::new(), Instant::now());
        feed.committed(AT, &[touch], Vec::new(), Instant::now());
        assert_eq!(feed.take(), Touched { touches: Vec::new(), all: true });
        assert_eq!(feed.take(), Touched::default());
    }

    #[test]
    fn a_resync_forgets_everything_and_asks_for_a_look_at_all_lanes() {
        let feed = feed();
        commit(&feed, &[1], 1, Instant::now());
        feed.resync();
        assert!(feed.event(1, AT).is_none());
        assert!(feed.take().all);
        assert_eq!(lock(&feed.cache).bytes, 0);
    }

    #[test]
    fn the_share_of_lanes_behind_counts_owned_ones_only() {
        let feed = feed();
        assert_eq!(feed.behind(), 0.0);
        for lane in 0..4 {
            feed.set_standing(lane, 1, Standing::Current);
        }
        feed.set_standing(0, 1, Standing::Behind);
        assert_eq!(feed.behind(), 0.25);
        assert_eq!((feed.standing(0, 1), feed.standing(1, 1)), (Standing::Behind, Standing::Current));
        assert_eq!((feed.standing(1, 2), feed.standing(1, 9)), (Standing::Foreign, Standing::Foreign));
        feed.all_foreign();
        assert_eq!(feed.standing(1, 1), Standing::Foreign);
    }
}
