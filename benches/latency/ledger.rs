//! When each event was committed and when it arrived, on one monotonic clock.
//!
//! An event's payload begins with its number, which is all that a consumer needs to know.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PAYLOAD_BYTES: usize = 300;
const HEAD: &str = "{\"n\":";

/// Times are nanoseconds since `origin`; 0 is not yet.
pub struct Ledger {
    origin: Instant,
    committed: Vec<AtomicU64>,
    arrived: Vec<AtomicU64>,
    missing: AtomicUsize,
    repeated: AtomicUsize,
}

/// Latencies in order, in milliseconds, of the events from one number on.
pub struct Latencies {
    pub sorted_ms: Vec<f64>,
    /// Arrived before their COMMIT had returned; they count as 0.
    pub early: usize,
}

pub fn payload(n: usize) -> String {
    let head = format!("{HEAD}{n},\"pad\":\"");
    format!("{head}{}\"}}", "x".repeat(PAYLOAD_BYTES - head.len() - 2))
}

impl Ledger {
    pub fn new(events: usize) -> Self {
        let blank = || (0..events).map(|_| AtomicU64::new(0)).collect();
        Self {
            origin: Instant::now(),
            committed: blank(),
            arrived: blank(),
            missing: AtomicUsize::new(events),
            repeated: AtomicUsize::new(0),
        }
    }

    pub fn events(&self) -> usize {
        self.committed.len()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap()
    }

    pub fn commit(&self, n: usize) {
        self.committed[n].store(self.now(), Ordering::Relaxed);
    }

    /// # Panics
    /// At a payload that no publisher of this run made.
    pub fn arrive(&self, payload: &[u8]) {
        let now = self.now();
        let text = std::str::from_utf8(payload).unwrap();
        let digits = text.strip_prefix(HEAD).and_then(|rest| rest.split_once(','));
        let n: usize = digits.unwrap_or_else(|| panic!("nobody published {text}")).0.parse().unwrap();
        if self.arrived[n].swap(now, Ordering::Relaxed) == 0 {
            self.missing.fetch_sub(1, Ordering::Relaxed);
        } else {
            self.repeated.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn missing(&self) -> usize {
        self.missing.load(Ordering::Relaxed)
    }

    pub fn repeated(&self) -> usize {
        self.repeated.load(Ordering::Relaxed)
    }

    /// From COMMIT's return to arrival, of the events from `first` on.
    pub fn latencies(&self, first: usize) -> Latencies {
        let (mut sorted_ms, mut early) = (Vec::with_capacity(self.events() - first), 0);
        for (committed, arrived) in self.committed.iter().zip(&self.arrived).skip(first) {
            let (committed, arrived) = (committed.load(Ordering::Relaxed), arrived.load(Ordering::Relaxed));
            early += usize::from(arrived < committed);
            sorted_ms.push(arrived.saturating_sub(committed) as f64 / 1e6);
        }
        sorted_ms.sort_unstable_by(f64::total_cmp);
        Latencies { sorted_ms, early }
    }

    /// From the moment an event was due to COMMIT's return, in order, in milliseconds; event 0 was due at `start`.
    pub fn delays_ms(&self, first: usize, start: Instant, interval: Duration) -> Vec<f64> {
        let start = start.duration_since(self.origin).as_secs_f64() * 1e3;
        let due = |n: usize| start + interval.as_secs_f64() * 1e3 * n as f64;
        let committed = self.committed.iter().enumerate().skip(first);
        let mut sorted: Vec<f64> = committed.map(|(n, at)| at.load(Ordering::Relaxed) as f64 / 1e6 - due(n)).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted
    }
}

/// The value below which `share` of the sorted values lie.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
