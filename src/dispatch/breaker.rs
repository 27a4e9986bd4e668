//! The breaker of one handler: an unreachable broker stops its sends, spends no attempt, and is tried again with one
//! delivery. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

/// First pause after the broker went away; short, since most outages are restarts.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause between two trials: how long after its return a broker may wait for its first delivery.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Breaker {
    state: State,
    /// Trials in a row that failed.
    failures: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    /// One trial is on its way.
    Trial,
}

/// What may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permit {
    All,
    /// One delivery, to see whether the broker is back.
    One,
    Nothing,
}

impl Breaker {
    pub(crate) fn permit(&self, now: Instant) -> Permit {
        match self.state {
            State::Closed => Permit::All,
            State::Open { until } if now >= until => Permit::One,
            State::Open { .. } | State::Trial => Permit::Nothing,
        }
    }

    /// Call when the one delivery of [`Permit::One`] is handed over.
    pub(crate) fn trial_started(&mut self) {
        self.state = State::Trial;
    }

    /// The trial ended without asking the broker anything (its delivery was gone): the next one may try at once.
    pub(crate) fn trial_void(&mut self, now: Instant) {
        if self.state == State::Trial {
            self.state = State::Open { until: now };
        }
    }

    /// The broker answered. Returns true when that closed an open breaker.
    pub(crate) fn answered(&mut self) -> bool {
        let was_open = self.state != State::Closed;
        *self = Self::default();
        was_open
    }

    /// The broker was not there. Returns true when that opened a closed breaker. Late answers of the same outage, from
    /// batches sent before it opened, do not lengthen the pause.
    pub(crate) fn unreachable(&mut self, now: Instant) -> bool {
        match self.state {
            State::Open { .. } => false,
            State::Closed | State::Trial => {
                let opened = self.state == State::Closed;
                let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE);
                self.failures = self.failures.saturating_add(1);
                self.state = State::Open { until: now + pause };
                opened
            }
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state != State::Closed
    }

    /// When a trial may start; `None` while closed or while one is on its way.
    pub(crate) fn next_trial(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed | State::Trial => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_allows_one_trial_at_a_time_with_growing_pauses() {
        let t0 = Instant::now();
        let mut breaker = Breaker::default();
        assert_eq!(breaker.permit(t0), Permit::All);
        assert!(breaker.unreachable(t0));
        assert!(!breaker.unreachable(t0), "late answers of one outage count once");
        assert_eq!(breaker.permit(t0), Permit::Nothing);
        assert_eq!(breaker.permit(t0 + FIRST_PAUSE), Permit::One);
        breaker.trial_started();
        assert_eq!(breaker.permit(t0 + FIRST_PAUSE), Permit::Nothing);
        assert!(!breaker.unreachable(t0 + FIRST_PAUSE));
        assert_eq!(breaker.next_trial(), Some(t0 + FIRST_PAUSE * 3));
        breaker.trial_started();
        assert!(breaker.answered());
        assert_eq!(breaker.permit(t0), Permit::All);
    }

    #[test]
    fn the_pause_is_capped() {
        let t0 = Instant::now();
        let mut breaker = Breaker::default();
        for _ in 0..40 {
            breaker.unreachable(t0);
            breaker.trial_started();
        }
        breaker.unreachable(t0);
        assert_eq!(breaker.next_trial(), Some(t0 + LONGEST_PAUSE));
    }
}
