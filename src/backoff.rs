//! The retry schedule: exponential, capped, jittered. Pure: randomness comes in as an argument.

use std::num::NonZeroU32;
use std::time::Duration;

/// `retry = { max_attempts, initial, max }` of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Attempts before a delivery is buried, the first one included.
    pub max_attempts: NonZeroU32,
    /// Wait after the first failed attempt.
    pub initial: Duration,
    /// Longest wait between two attempts.
    pub max: Duration,
}

impl Retry {
    /// The wait after `attempts` failed attempts (1 = the first), or `None` when the delivery is to be buried.
    ///
    /// Doubles from `initial` up to `max`, then takes a share between one half and the whole of it by `jitter`
    /// (0.0..=1.0), so that deliveries that failed together do not come back together.
    pub fn delay(&self, attempts: u32, jitter: f64) -> Option<Duration> {
        if attempts >= self.max_attempts.get() {
            return None;
        }
        let doublings = attempts.saturating_sub(1).min(32);
        let full = self.initial.checked_mul(1 << doublings.min(30)).unwrap_or(self.max).min(self.max);
        Some(full.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry() -> Retry {
        Retry {
            max_attempts: NonZeroU32::new(5).unwrap(),
            initial: Duration::from_secs(1),
            max: Duration::from_secs(5),
        }
    }

    #[test]
    fn the_schedule_doubles_up_to_its_cap_and_then_ends() {
        let waits: Vec<_> = (1..=5).map(|attempts| retry().delay(attempts, 1.0)).collect();
        let secs = |s| Some(Duration::from_secs(s));
        assert_eq!(waits, [secs(1), secs(2), secs(4), secs(5), None]);
    }

    #[test]
    fn jitter_takes_at_most_half_away() {
        assert_eq!(retry().delay(2, 0.0), Some(Duration::from_secs(1)));
        assert_eq!(retry().delay(2, 1.0), Some(Duration::from_secs(2)));
        let endless = Retry { max_attempts: NonZeroU32::MAX, ..retry() };
        assert_eq!(endless.delay(4_000_000_000, 1.0), Some(Duration::from_secs(5)));
    }
}
