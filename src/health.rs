//! Whether this bridge lives and may count as ready: what /healthz and /readyz answer.
//!
//! I1: nothing here asks a database or a broker. One that is away makes no bridge unhealthy: a restart would not help.
//! I2: the writers never wait: an atomic store a turn, and a lock that is held for an assignment only.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How far a bridge has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    WaitsForDatabase,
    ConnectsSinks,
    WaitsForLanes,
    OwnsLanes,
    StandsBy,
    LostLanes,
    Drains,
}

/// Deliveries that could go and do not move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stuck {
    pub what: String,
    pub reason: &'static str,
    pub since: Duration,
}

/// Shared by the loop, which writes it, and by HTTP, which reads it.
#[derive(Debug)]
pub(crate) struct Health {
    started: Instant,
    stuck_after: Duration,
    /// Milliseconds from `started` to the loop's last turn; 0 while it has not begun, or has ended.
    turned: AtomicU64,
    state: Mutex<(Phase, Option<Stuck>)>,
}

impl Health {
    pub(crate) fn new(stuck_after: Duration) -> Self {
        Self {
            started: Instant::now(),
            stuck_after,
            turned: AtomicU64::new(0),
            state: Mutex::new((Phase::WaitsForDatabase, None)),
        }
    }

    pub(crate) fn stuck_after(&self) -> Duration {
        self.stuck_after
    }

    /// The loop is alive; call at least once a second.
    pub(crate) fn turned(&self, now: Instant) {
        let millis = u64::try_from(now.duration_since(self.started).as_millis()).unwrap_or(u64::MAX);
        self.turned.store(millis.max(1), Ordering::Relaxed);
    }

    /// The loop ended as it should; there is nothing to watch any more.
    pub(crate) fn ended(&self) {
        self.turned.store(0, Ordering::Relaxed);
        self.is_stuck(None);
    }

    /// A bridge that drains stays so.
    pub(crate) fn enters(&self, phase: Phase) {
        self.change(|(current, _)| {
            if *current != Phase::Drains {
                *current = phase;
            }
        });
    }

    pub(crate) fn is_stuck(&self, stuck: Option<Stuck>) {
        self.change(|(_, current)| *current = stuck);
    }

    /// # Errors
    /// Why the process should be restarted, in one line.
    pub(crate) fn alive(&self, now: Instant) -> Result<(), String> {
        let turned = self.turned.load(Ordering::Relaxed);
        let still = now.duration_since(self.started).saturating_sub(Duration::from_millis(turned));
        if turned > 0 && still > self.stuck_after {
            return Err(format!("the loop stands still for {} s", still.as_secs()));
        }
        match self.state().1 {
            None => Ok(()),
            Some(Stuck { what, reason, since }) => {
                Err(format!("{what} made no progress for {} s: {reason}", since.as_secs()))
            }
        }
    }

    /// What it is ready for.
    ///
    /// # Errors
    /// Why it is not, in one line.
    pub(crate) fn ready(&self) -> Result<&'static str, &'static str> {
        match self.state().0 {
            Phase::OwnsLanes => Ok("owns lanes"),
            Phase::StandsBy => Ok("stands by: other bridges own every lane"),
            Phase::WaitsForDatabase => Err("waits for the database, and for a schema that fits"),
            Phase::ConnectsSinks => Err("connects to the brokers"),
            Phase::WaitsForLanes => Err("waits for its first lanes"),
            Phase::LostLanes => Err("the lock session is lost, and every lane with it; it connects again"),
            Phase::Drains => Err("drains"),
        }
    }

    fn state(&self) -> (Phase, Option<Stuck>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut (Phase, Option<Stuck>))) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn a_loop_that_stands_still_is_not_alive_but_one_that_has_not_begun_is() {
        let health = Health::new(LIMIT);
        let start = Instant::now();
        assert_eq!(health.alive(start + LIMIT * 9), Ok(()), "it waits for the database");
        health.turned(start);
        assert_eq!(health.alive(start + LIMIT), Ok(()));
        let still = Err("the loop stands still for 21 s".to_owned());
        assert_eq!(health.alive(start + LIMIT * 2 + Duration::from_millis(1500)), still);
        health.turned(start + LIMIT * 2);
        assert_eq!(health.alive(start + LIMIT * 2), Ok(()));
        health.ended();
        assert_eq!(health.alive(start + LIMIT * 9), Ok(()));
    }

    #[test]
    fn a_stuck_lane_is_named() {
        let health = Health::new(LIMIT);
        let what = "lane 7 of handler billing".to_owned();
        let stuck = Stuck { what, reason: "queued and not sent", since: LIMIT };
        health.is_stuck(Some(stuck));
        let said = "lane 7 of handler billing made no progress for 10 s: queued and not sent";
        assert_eq!(health.alive(Instant::now()), Err(said.to_owned()));
        health.is_stuck(None);
        assert_eq!(health.alive(Instant::now()), Ok(()));
    }

    #[test]
    fn who_owns_lanes_or_stands_by_is_ready_until_it_drains() {
        let health = Health::new(LIMIT);
        assert!(health.ready().is_err());
        for (phase, ready) in [
            (Phase::ConnectsSinks, false),
            (Phase::WaitsForLanes, false),
            (Phase::StandsBy, true),
            (Phase::OwnsLanes, true),
            (Phase::LostLanes, false),
            (Phase::OwnsLanes, true),
            (Phase::Drains, false),
            (Phase::OwnsLanes, false),
        ] {
            health.enters(phase);
            assert_eq!(health.ready().is_ok(), ready, "{phase:?}");
        }
    }
}
