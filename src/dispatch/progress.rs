//! Finds deliveries that could go and do not move: what a person would call a stuck lane.
//!
//! Pure: looks come in with their time. A standstill that a broker or the database causes is none: the caller leaves out
//! what waits for a broker, and forgets everything while the database does not answer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What is first to move in one (lane, handler), and why it has not yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum First {
    /// Handed to its sink, with this seq.
    InFlight(i64),
    /// Acknowledged, and its row is not deleted.
    Unwritten(i64),
    /// Read, in a lane whose turn comes; its handler has begun this many batches.
    Queued(u64),
    /// Read, and nobody is to take it.
    Forgotten(i64),
}

impl First {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            First::InFlight(_) => "in flight, and neither answered nor settled",
            First::Unwritten(_) => "acknowledged, and not written back",
            First::Queued(_) => "queued, and its handler sends nothing",
            First::Forgotten(_) => "queued, and never taken",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Progress {
    seen: HashMap<(i16, i32), (First, Instant)>,
}

impl Progress {
    /// Takes what is first in every (lane, handler) that has something to do; the one that has stood
    /// still longest, if that is longer than `limit`.
    pub(crate) fn look(
        &mut self,
        firsts: impl Iterator<Item = ((i16, i32), First)>,
        limit: Duration,
        now: Instant,
    ) -> Option<((i16, i32), First, Duration)> {
        let mut seen = HashMap::new();
        for (pair, first) in firsts {
            let since = self.seen.get(&pair).filter(|(before, _)| *before == first).map_or(now, |(_, since)| *since);
            seen.insert(pair, (first, since));
        }
        self.seen = seen;
        let (pair, (first, since)) = self.seen.iter().min_by_key(|(_, (_, since))| *since)?;
        let still = now.duration_since(*since);
        (still > limit).then_some((*pair, *first, still))
    }

    pub(crate) fn forget(&mut self) {
        self.seen.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn what_stands_still_for_longer_than_the_limit_is_stuck_and_the_oldest_is_named() {
        let (mut progress, start) = (Progress::default(), Instant::now());
        let old = ((1, 1), First::InFlight(5));
        let young = ((2, 1), First::Unwritten(6));
        assert!(progress.look([old].into_iter(), LIMIT, start).is_none());
        assert!(progress.look([old, young].into_iter(), LIMIT, start + LIMIT).is_none());
        let now = start + LIMIT * 3;
        assert_eq!(progress.look([old, young].into_iter(), LIMIT, now), Some((old.0, old.1, LIMIT * 3)));
    }

    #[test]
    fn what_moves_is_not_stuck_however_long_there_is_more() {
        let (mut progress, start) = (Progress::default(), Instant::now());
        for n in 0..20 {
            let first = ((1, 1), First::InFlight(n.into()));
            assert!(progress.look([first].into_iter(), LIMIT, start + LIMIT * n).is_none());
        }
    }

    #[test]
    fn a_lane_waits_its_turn_as_long_as_its_handler_sends() {
        let (mut progress, start) = (Progress::default(), Instant::now());
        for n in 0..20_u32 {
            let first = ((1, 1), First::Queued(n.into()));
            assert!(progress.look([first].into_iter(), LIMIT, start + LIMIT * n).is_none());
        }
        assert!(progress.look([((1, 1), First::Queued(19))].into_iter(), LIMIT, start + LIMIT * 30).is_some());
    }

    #[test]
    fn an_outage_ends_every_wait() {
        let (mut progress, start) = (Progress::default(), Instant::now());
        let first = ((1, 1), First::InFlight(5));
        progress.look([first].into_iter(), LIMIT, start);
        progress.look([].into_iter(), LIMIT, start + LIMIT * 2);
        assert!(progress.look([first].into_iter(), LIMIT, start + LIMIT * 3).is_none());
        progress.forget();
        assert!(progress.look([first].into_iter(), LIMIT, start + LIMIT * 9).is_none());
    }
}
