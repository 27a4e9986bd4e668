//! The window of one (lane, handler): what was read, what is in flight, where the next read begins.
//!
//! I3: a delivery leaves only while no earlier one of its key is queued or in flight; a released one goes back to its
//! place before its followers. I1: the lower bound never passes a delivery that is neither here nor held in the
//! database, and never a seq that an open transaction may still commit.
//! Pure: no clock, no I/O; memory is bounded by what the asks allow.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::controls::breaks;
use crate::sinks::KeyWindow;
use crate::sources::Row;

#[derive(Debug, Default)]
pub(crate) struct Window {
    /// The next read begins above it.
    bound: i64,
    /// Changes when a read that is on its way may show what is not true any more; such a read is thrown away.
    version: u64,
    queued: BTreeMap<i64, Row>,
    in_flight: BTreeMap<i64, Row>,
    /// Keys with deliveries in flight, and how many; a key leaves only after its outcome is settled.
    busy: HashMap<i64, u32>,
    /// Acknowledged, not deleted yet: still in the table, not to be taken again.
    completing: BTreeSet<i64>,
    /// Completed since the last read was asked: that read may still show them.
    just_completed: HashSet<i64>,
    /// Where a sweep goes on; `None` when none is under way.
    sweep: Option<i64>,
    /// The sweep passes what is hidden behind held or dead deliveries: it may be long, and takes its time.
    slow: bool,
    /// The last read ended at its limit: there is more.
    more: bool,
}

impl Window {
    /// `version` must differ from that of any earlier window of this lane and handler.
    pub(crate) fn new(version: u64) -> Self {
        Self { version, ..Self::default() }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn bound(&self) -> i64 {
        self.bound
    }

    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queued.is_empty() && self.in_flight.is_empty() && self.completing.is_empty()
    }

    /// Nothing is in flight or to be written; what is queued was never taken.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight.is_empty() && self.completing.is_empty()
    }

    /// Every seq below it was read and is settled, as far as it is not held.
    pub(crate) fn lowest(&self) -> i64 {
        let first =
            self.queued.keys().next().into_iter().chain(self.in_flight.keys().next()).chain(self.completing.first());
        first.copied().min().map_or(self.bound + 1, |seq| seq.min(self.bound + 1))
    }

    pub(crate) fn queued(&self) -> usize {
        self.queued.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The first seq in flight, the first acknowledged one that is not deleted, and the first in the queue.
    pub(crate) fn first(&self) -> (Option<i64>, Option<i64>, Option<i64>) {
        let of = |rows: &BTreeMap<i64, Row>| rows.keys().next().copied();
        (of(&self.in_flight), self.completing.first().copied(), of(&self.queued))
    }

    /// The limit for a read of `room` new rows: those above the bound that are here already would fill it otherwise.
    pub(crate) fn limit(&self, room: usize) -> usize {
        let from = self.bound + 1;
        room + self.queued.range(from..).count()
            + self.in_flight.range(from..).count()
            + self.completing.range(from..).count()
    }

    pub(crate) fn start_sweep(&mut self) {
        if self.sweep.is_none() && !breaks("sweep") {
            self.sweep = Some(0);
            self.slow = false;
        }
    }

    /// Whether the next page of a sweep is worth a poll of its own.
    pub(crate) fn sweeps_at_once(&self) -> bool {
        self.sweep.is_some() && !self.slow
    }

    pub(crate) fn sweep(&self) -> Option<i64> {
        self.sweep
    }

    /// Takes the rows of a read that began at the bound, and saw everything above it up to `read_to`; `i64::MAX` when
    /// there was no more.
    ///
    /// `settled`: no seq up to it can still appear. False when the read was asked at another `version`: a hold that
    /// began or ended meanwhile must be seen first, or its followers in `rows` would overtake it.
    pub(crate) fn offer(&mut self, version: u64, read_to: i64, rows: &[Row], settled: i64) -> bool {
        if version != self.version {
            self.more = true;
            return false;
        }
        self.more = read_to < i64::MAX;
        for row in rows {
            self.add(*row);
        }
        let settled = match rows.last() {
            Some(last) if breaks("sweep") => last.id.seq,
            _ => settled,
        };
        self.bound = self.bound.max(read_to.min(settled));
        true
    }

    /// Takes the rows of one page of a sweep, which saw everything up to `read_to`; returns how many had been missed.
    pub(crate) fn offer_swept(&mut self, version: u64, read_to: i64, rows: &[Row]) -> usize {
        if version != self.version {
            return 0;
        }
        let bound = self.bound;
        let missed = rows.iter().filter(|row| row.id.seq <= bound && self.add(**row)).count();
        self.sweep = (read_to < self.bound).then_some(read_to);
        self.slow = missed == 0 && rows.last().is_none_or(|last| last.id.seq < read_to);
        missed
    }

    /// Call when a read is asked: it begins now, so what was completed before is not in it.
    pub(crate) fn asked(&mut self) {
        self.just_completed.clear();
    }

    fn add(&mut self, row: Row) -> bool {
        let seq = row.id.seq;
        let here = self.in_flight.contains_key(&seq) || self.completing.contains(&seq);
        if here || self.just_completed.contains(&seq) {
            return false;
        }
        self.queued.insert(seq, row).is_none()
    }

    /// Takes deliveries to send, in seq order: at most `most`, and `bytes` together, though always one if any may go.
    pub(crate) fn take(&mut self, most: usize, bytes: u64, keys: KeyWindow) -> Vec<Row> {
        let mut taken = Vec::new();
        let mut left = bytes;
        // Keys that this call passed over or took: their later deliveries wait.
        let mut closed = HashSet::new();
        let mut opened = HashSet::new();
        for row in self.queued.values() {
            if taken.len() >= most {
                break;
            }
            if let Some(key) = row.key {
                let mine = keys == KeyWindow::Batch && opened.contains(&key);
                if closed.contains(&key) || (!mine && self.busy.contains_key(&key)) {
                    continue;
                }
            }
            let size = u64::from(row.size_bytes);
            if size > left && !taken.is_empty() {
                if let Some(key) = row.key {
                    closed.insert(key);
                }
                continue;
            }
            left = left.saturating_sub(size);
            if let Some(key) = row.key {
                match keys {
                    KeyWindow::Batch => opened.insert(key),
                    KeyWindow::One => closed.insert(key),
                };
            }
            taken.push(*row);
        }
        for row in &taken {
            self.queued.remove(&row.id.seq);
            self.in_flight.insert(row.id.seq, *row);
            if let Some(key) = row.key {
                *self.busy.entry(key).or_default() += 1;
            }
        }
        taken
    }

    /// The broker acknowledged it: its key may go on, its row is to be deleted.
    pub(crate) fn acked(&mut self, seq: i64) {
        if self.settle(seq).is_some() {
            self.completing.insert(seq);
        }
    }

    /// Acknowledged before this bridge lost and regained the lane: only its row is still to be deleted.
    pub(crate) fn already_acked(&mut self, seq: i64) {
        self.queued.remove(&seq);
        self.completing.insert(seq);
    }

    /// Its row is gone from the table.
    pub(crate) fn completed(&mut self, seq: i64) {
        if self.completing.remove(&seq) {
            self.just_completed.insert(seq);
        }
    }

    /// It goes back to its place, nothing was decided about it.
    pub(crate) fn released(&mut self, seq: i64) {
        if let Some(row) = self.settle(seq) {
            self.queued.insert(seq, row);
        }
    }

    /// It is not there any more; its key goes on.
    pub(crate) fn gone(&mut self, seq: i64) {
        self.settle(seq);
    }

    /// It, or an earlier one of its key, is held in the database: those behind it are dropped from the queue, and the
    /// end of the hold brings them back. It may have ended already, before this news of its beginning came, so the
    /// next read begins here in any case.
    pub(crate) fn held(&mut self, seq: i64) {
        if let Some(Row { key: Some(key), .. }) = self.settle(seq) {
            self.queued.retain(|other, row| *other < seq || row.key != Some(key));
        }
        self.rewind(seq);
    }

    /// A hold ended at `seq`: the next read begins there, and one that is on its way comes too late.
    pub(crate) fn rewind(&mut self, seq: i64) {
        self.version += 1;
        self.bound = self.bound.min(seq - 1);
        self.more = true;
    }

    /// Something came that there is no room for now.
    pub(crate) fn expect_more(&mut self) {
        self.more = true;
    }

    fn settle(&mut self, seq: i64) -> Option<Row> {
        let row = self.in_flight.remove(&seq)?;
        if let Some(key) = row.key
            && let Some(count) = self.busy.get_mut(&key)
        {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&key);
            }
        }
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::DeliveryId;

    /// A read that was not cut.
    const ALL: i64 = i64::MAX;

    fn row(seq: i64, key: Option<i64>) -> Row {
        Row { key, size_bytes: 10, ..Row::plain(DeliveryId { lane: 0, handler: 1, seq }) }
    }

    fn seqs(rows: &[Row]) -> Vec<i64> {
        rows.iter().map(|row| row.id.seq).collect()
    }

    fn window(rows: &[Row]) -> Window {
        let mut window = Window::default();
        assert!(window.offer(0, ALL, rows, i64::MAX));
        window
    }

    #[test]
    fn one_delivery_of_a_key_is_in_flight_at_a_time() {
        let mut w = window(&[row(1, Some(7)), row(2, Some(7)), row(3, Some(8)), row(4, None), row(5, None)]);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [1, 3, 4, 5]);
        assert!(w.take(10, 1000, KeyWindow::One).is_empty());
        w.acked(1);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [2]);
    }

    #[test]
    fn a_batch_sink_takes_a_key_in_order_but_only_within_one_batch() {
        let mut w = window(&[row(1, Some(7)), row(2, Some(7)), row(3, Some(7))]);
        assert_eq!(seqs(&w.take(2, 1000, KeyWindow::Batch)), [1, 2]);
        assert!(w.take(2, 1000, KeyWindow::Batch).is_empty());
        w.acked(1);
        assert!(w.take(2, 1000, KeyWindow::Batch).is_empty(), "2 is still in flight");
        w.acked(2);
        assert_eq!(seqs(&w.take(2, 1000, KeyWindow::Batch)), [3]);
    }

    #[test]
    fn a_released_delivery_goes_out_again_before_its_followers() {
        let mut w = window(&[row(1, Some(7)), row(2, Some(7))]);
        w.take(10, 1000, KeyWindow::One);
        w.released(1);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [1]);
    }

    #[test]
    fn a_held_delivery_takes_its_followers_out_and_a_rewind_brings_them_back() {
        let mut w = window(&[row(1, Some(7)), row(2, Some(8)), row(3, Some(7))]);
        w.take(1, 1000, KeyWindow::One);
        w.held(1);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [2]);
        assert_eq!(w.bound(), 0);
        assert!(w.offer(w.version(), ALL, &[row(1, Some(7)), row(2, Some(8)), row(3, Some(7))], i64::MAX));
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [1]);
    }

    #[test]
    fn a_read_that_began_before_a_rewind_is_thrown_away() {
        // Its rows may hold followers of what the rewind is about.
        let mut w = window(&[]);
        let version = w.version();
        w.rewind(5);
        assert!(!w.offer(version, ALL, &[row(9, Some(7))], i64::MAX));
        assert_eq!(w.queued(), 0);
        assert!(w.has_more());
    }

    #[test]
    fn a_read_that_began_before_a_hold_is_thrown_away() {
        // Found by the simulator: the read saw the follower while its head was not held yet and arrived after; the
        // head's hold ended, and the follower went out first.
        let mut w = window(&[row(1, Some(7))]);
        w.take(1, 1000, KeyWindow::One);
        let version = w.version();
        w.held(1);
        assert!(!w.offer(version, ALL, &[row(2, Some(7))], i64::MAX));
        assert_eq!(w.queued(), 0);
    }

    #[test]
    fn the_bound_stays_below_what_an_open_transaction_may_commit() {
        let mut w = Window::default();
        assert!(w.offer(0, ALL, &[row(1, None), row(9, None)], 4));
        assert_eq!(w.bound(), 4);
        assert_eq!(w.limit(10), 11, "9 is here already and will be read again");
        assert!(w.offer(0, ALL, &[row(6, None), row(9, None)], 20));
        assert_eq!(w.bound(), 20);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [1, 6, 9]);
    }

    #[test]
    fn a_full_page_moves_the_bound_no_further_than_its_last_row() {
        let mut w = Window::default();
        assert!(w.offer(0, 2, &[row(1, None), row(2, None)], i64::MAX));
        assert_eq!((w.bound(), w.has_more()), (2, true));
    }

    #[test]
    fn an_acknowledged_row_is_not_taken_again_while_it_is_still_in_the_table() {
        let mut w = Window::default();
        assert!(w.offer(0, ALL, &[row(1, Some(7))], 0));
        w.take(1, 100, KeyWindow::One);
        w.acked(1);
        assert!(w.offer(0, ALL, &[row(1, Some(7))], 0));
        assert!(w.take(1, 100, KeyWindow::One).is_empty());
        w.completed(1);
        assert!(w.is_idle());
    }

    #[test]
    fn a_read_that_began_before_a_completion_does_not_bring_the_row_back() {
        let mut w = window(&[row(1, Some(7))]);
        w.take(1, 100, KeyWindow::One);
        w.asked();
        w.acked(1);
        w.completed(1);
        assert!(w.offer(w.version(), ALL, &[row(1, Some(7))], 0));
        assert_eq!(w.queued(), 0);
        w.asked();
        assert!(w.offer(w.version(), ALL, &[row(1, Some(7))], 0), "an id that comes back, e.g. by requeue");
        assert_eq!(w.queued(), 1);
    }

    #[test]
    fn a_sweep_finds_what_the_bound_passed_and_ends_at_the_bound() {
        let mut w = Window::default();
        assert!(w.offer(0, ALL, &[row(5, None)], 10));
        w.start_sweep();
        assert_eq!(w.sweep(), Some(0));
        assert_eq!(w.offer_swept(0, 5, &[row(3, None), row(5, None)]), 1);
        assert_eq!(w.sweep(), Some(5));
        assert_eq!(w.offer_swept(0, ALL, &[]), 0);
        assert_eq!(w.sweep(), None);
        assert_eq!(seqs(&w.take(10, 1000, KeyWindow::One)), [3, 5]);
    }

    #[test]
    fn bytes_bound_a_batch_but_one_always_goes() {
        let mut w = window(&[row(1, Some(1)), row(2, Some(2)), row(3, Some(3))]);
        assert_eq!(seqs(&w.take(10, 5, KeyWindow::One)), [1]);
        assert_eq!(seqs(&w.take(10, 20, KeyWindow::One)), [2, 3]);
    }

    #[test]
    fn a_read_that_saw_only_hidden_ones_moves_the_bound_past_them() {
        let mut w = Window::default();
        assert!(w.offer(0, 700, &[], i64::MAX));
        assert_eq!((w.bound(), w.has_more()), (700, true));
    }

    #[test]
    fn a_sweep_of_hidden_ones_goes_on_but_not_at_once() {
        let mut w = Window::default();
        assert!(w.offer(0, ALL, &[], 900));
        w.start_sweep();
        assert!(w.sweeps_at_once());
        assert_eq!(w.offer_swept(0, 700, &[]), 0);
        assert_eq!((w.sweep(), w.sweeps_at_once()), (Some(700), false));
        assert_eq!(w.offer_swept(0, 800, &[row(750, None)]), 1);
        assert!(w.sweeps_at_once(), "where one was missed there may be more");
        w.start_sweep();
        assert_eq!(w.sweep(), Some(800), "it goes on where it is");
        assert_eq!(w.offer_swept(0, 900, &[]), 0);
        assert_eq!(w.sweep(), None);
    }
}
