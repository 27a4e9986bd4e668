//! Deliveries that the stream showed and no read has seen yet. A commit is in the log before it is visible (H1, H2):
//! whoever reads at once may find nothing, and must look again soon, but not for ever and not without pause.
//!
//! Pure: time and the end of transactions come in as arguments. Forgetting one costs a poll interval, no more.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use crate::sources::{Row, Touch};

/// Between looks at a delivery that is not visible yet: doubled from the first to the longest.
const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(500);
/// Looks before it is left to the poll; about five seconds.
const LOOKS: u32 = 18;
/// Deliveries remembered per lane and handler.
const MOST: usize = 512;

#[derive(Debug, Default)]
pub(crate) struct Awaited {
    pairs: HashMap<(i16, i32), Wait>,
}

#[derive(Debug)]
struct Wait {
    /// By seq (`None`: some), the transaction that brings it.
    seqs: BTreeSet<(Option<i64>, u32)>,
    /// The next look is due.
    due: Instant,
    looks: u32,
    /// More came after the read that is under way was asked.
    came_since: bool,
}

impl Awaited {
    pub(crate) fn clear(&mut self) {
        self.pairs.clear();
    }

    /// False when it was too much to remember.
    pub(crate) fn add(&mut self, touch: &Touch, now: Instant) -> bool {
        let wait = self.pairs.entry((touch.lane, touch.handler)).or_insert_with(|| Wait {
            seqs: BTreeSet::new(),
            due: now,
            looks: 0,
            came_since: true,
        });
        wait.due = now;
        wait.came_since = true;
        let room = wait.seqs.len() < MOST;
        if room {
            wait.seqs.insert((touch.seq, touch.xid));
        }
        room
    }

    pub(crate) fn is_due(&self, lane: i16, handler: i32, now: Instant) -> bool {
        self.pairs.get(&(lane, handler)).is_some_and(|wait| wait.due <= now)
    }

    pub(crate) fn due(&self, now: Instant) -> impl Iterator<Item = (i16, i32)> {
        self.pairs.iter().filter(move |(_, wait)| wait.due <= now).map(|(pair, _)| *pair)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.pairs.values().map(|wait| wait.due).min()
    }

    /// A read of this lane and handler is asked now.
    pub(crate) fn asked(&mut self, lane: i16, handler: i32) {
        if let Some(wait) = self.pairs.get_mut(&(lane, handler)) {
            wait.came_since = false;
        }
    }

    /// No room for it: the read that comes with the next free place finds it.
    pub(crate) fn forget(&mut self, lane: i16, handler: i32) {
        self.pairs.remove(&(lane, handler));
    }

    /// Takes what a read above `after` saw: what it found, or what cannot come any more, is not waited for.
    /// `cut`: the read ended at its limit. `ended_below`: all transactions below this number had ended.
    pub(crate) fn seen(
        &mut self,
        (lane, handler): (i16, i32),
        after: i64,
        rows: &[Row],
        read_to: i64,
        ended_below: i64,
        now: Instant,
    ) {
        let Some(wait) = self.pairs.get_mut(&(lane, handler)) else { return };
        wait.seqs.retain(|&(seq, xid)| {
            let found = seq.is_some_and(|seq| {
                seq <= after || seq > read_to || rows.binary_search_by_key(&seq, |row| row.id.seq).is_ok()
            });
            !found && !ended(xid, ended_below)
        });
        if wait.seqs.is_empty() && !wait.came_since {
            self.pairs.remove(&(lane, handler));
            return;
        }
        if wait.came_since {
            wait.due = now;
            return;
        }
        wait.looks += 1;
        if wait.looks >= LOOKS {
            self.pairs.remove(&(lane, handler));
            return;
        }
        wait.due = now + (FIRST * 2_u32.saturating_pow(wait.looks - 1)).min(LONGEST);
    }
}

/// Whether transaction `xid` ended, given that all below `ended_below` did. Modulo 2^32, as the server compares (H11).
fn ended(xid: u32, ended_below: i64) -> bool {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the lower half is what is compared")]
    let below = ended_below as u32;
    let distance = below.wrapping_sub(xid);
    distance != 0 && distance < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::DeliveryId;

    fn row(seq: i64) -> Row {
        Row::plain(DeliveryId { lane: 1, handler: 2, seq })
    }

    fn touch(seq: i64, xid: u32) -> Touch {
        Touch { lane: 1, handler: 2, seq: Some(seq), xid }
    }

    const PAIR: (i16, i32) = (1, 2);

    #[test]
    fn what_a_read_found_is_not_waited_for() {
        let (mut awaited, now) = (Awaited::default(), Instant::now());
        awaited.add(&touch(5, 100), now);
        assert!(awaited.is_due(1, 2, now) && !awaited.is_due(1, 3, now));
        awaited.asked(1, 2);
        awaited.seen(PAIR, 0, &[row(5)], i64::MAX, 50, now);
        assert!(awaited.next_due().is_none());
    }

    // H1, H2.
    #[test]
    fn what_is_not_visible_yet_is_looked_for_again_with_growing_pauses_and_then_left_to_the_poll() {
        let (mut awaited, mut now) = (Awaited::default(), Instant::now());
        awaited.add(&touch(5, 100), now);
        let mut pauses = Vec::new();
        while let Some(due) = awaited.next_due() {
            assert!(awaited.is_due(1, 2, due) && !awaited.is_due(1, 2, due - Duration::from_micros(1)));
            pauses.push(due - now);
            now = due;
            awaited.asked(1, 2);
            awaited.seen(PAIR, 0, &[], i64::MAX, 50, now);
        }
        assert_eq!(pauses[..4], [0, 1, 2, 4].map(Duration::from_millis));
        assert_eq!(pauses.len(), LOOKS as usize);
        assert!(pauses.iter().sum::<Duration>() < Duration::from_secs(6));
    }

    // H14: the row was deleted in the transaction that inserted it.
    #[test]
    fn what_cannot_come_any_more_is_not_waited_for() {
        let (mut awaited, now) = (Awaited::default(), Instant::now());
        awaited.add(&touch(5, 100), now);
        awaited.add(&Touch { seq: None, ..touch(0, 100) }, now);
        awaited.asked(1, 2);
        awaited.seen(PAIR, 0, &[], i64::MAX, 100, now);
        assert!(awaited.next_due().is_some(), "100 itself may still be running");
        awaited.asked(1, 2);
        awaited.seen(PAIR, 0, &[], i64::MAX, 101, now);
        assert!(awaited.next_due().is_none());
    }

    #[test]
    fn what_came_while_a_read_was_under_way_is_looked_for_at_once() {
        let (mut awaited, now) = (Awaited::default(), Instant::now());
        awaited.add(&touch(5, 100), now);
        awaited.asked(1, 2);
        awaited.add(&touch(6, 101), now);
        awaited.seen(PAIR, 0, &[row(5)], i64::MAX, 50, now);
        assert!(awaited.is_due(1, 2, now));
        awaited.asked(1, 2);
        awaited.seen(PAIR, 0, &[row(5), row(6)], i64::MAX, 50, now);
        assert!(awaited.next_due().is_none());
    }

    #[test]
    fn a_read_that_was_cut_leaves_the_rest_to_the_reads_that_follow_it() {
        let (mut awaited, now) = (Awaited::default(), Instant::now());
        awaited.add(&touch(5, 100), now);
        awaited.add(&touch(9, 100), now);
        awaited.asked(1, 2);
        awaited.seen(PAIR, 3, &[row(4), row(5)], 5, 50, now);
        assert!(awaited.next_due().is_none());
    }

    // H11.
    #[test]
    fn transactions_are_compared_across_the_wrap() {
        assert!(ended(100, 101) && !ended(100, 100) && !ended(101, 100));
        let wrapped = (1_i64 << 32) + 5;
        assert!(ended(u32::MAX, wrapped) && ended(4, wrapped) && !ended(5, wrapped) && !ended(6, wrapped));
    }

    #[test]
    fn it_remembers_no_more_than_its_share() {
        let (mut awaited, now) = (Awaited::default(), Instant::now());
        let kept = (0..2 * i64::try_from(MOST).unwrap()).filter(|seq| awaited.add(&touch(*seq, 1), now)).count();
        assert_eq!(kept, MOST);
    }
}
