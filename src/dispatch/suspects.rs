//! Who may have killed a bridge (D9). After one died, what it may have been sending goes out under record: together at
//! first, in ever smaller parts of what was on its way when the next one died, and alone in the end. Only one that was
//! alone is charged with an attempt, so its lane mates never are. Pure.
//!
//! Never: a record for deliveries that are under no suspicion; the hot path writes nothing for crashes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::delivery::DeliveryId;
use crate::lanes::Record;
use crate::sources::Row;

/// A batch that killed its bridge is sent in parts of this fraction by the next: 500, 62, 7, 1.
const PARTS: usize = 8;
/// So long nothing else is sent beside one that is alone, and so long it waits for what is in flight. A sink that hangs
/// must not stop the others: after that they go on, and a crash is blamed on the one that was alone, if wrongly with one
/// attempt.
const ALONE: Duration = Duration::from_secs(1);
/// When something was in flight for so long, one that must be alone waits before it is tried again.
const LATER: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
struct Known {
    /// With how many it may go.
    together: usize,
    /// It was alone when its bridge died, with these attempts.
    charged_at: Option<i16>,
}

/// A window whose owner died without a record of it.
#[derive(Clone, Copy, Debug)]
struct Unknown {
    /// Later ones were not there yet.
    last_seq: i64,
    /// How many may still have been in flight.
    left: usize,
}

#[derive(Clone, Copy, Debug)]
struct Out {
    alone: bool,
    last: DeliveryId,
    since: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Suspects {
    known: HashMap<DeliveryId, Known>,
    unknown: HashMap<(i16, i32), Unknown>,
    /// By handler, the batch whose record we wrote.
    out: HashMap<i32, Out>,
    /// Since when one that must be alone waits.
    waiting: Option<Instant>,
}

/// How a row may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// As any other.
    Free,
    /// Under record, with at most so many in its batch.
    Recorded(usize),
    /// Not now: it killed a bridge, and that is to be counted first.
    Charge,
}

impl Suspects {
    /// The owner of these windows died; up to `most` deliveries of each may have been in flight, none above `last_seq`.
    pub(super) fn left_behind(&mut self, windows: impl Iterator<Item = (i16, i32)>, last_seq: i64, most: usize) {
        self.unknown.extend(windows.map(|pair| (pair, Unknown { last_seq, left: most })));
    }

    /// `died`: the bridge that wrote it did.
    pub(super) fn recorded(&mut self, record: Record, died: bool) {
        let charged_at = (died && record.together == 1).then_some(record.attempts);
        let together = (record.together / PARTS).max(1);
        self.known.insert(record.id, Known { together, charged_at });
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// It goes to another bridge, which reads the records itself.
    pub(super) fn forget_lane(&mut self, lane: i16) {
        self.known.retain(|id, _| id.lane != lane);
        self.unknown.retain(|(of, _), _| *of != lane);
    }

    /// Whether some of this window are under suspicion. `lowest`: everything below it was read and is settled.
    pub(super) fn concern(&mut self, pair: (i16, i32), lowest: i64) -> bool {
        if let Some(unknown) = self.unknown.get(&pair)
            && (unknown.left == 0 || lowest > unknown.last_seq)
        {
            self.unknown.remove(&pair);
        }
        self.unknown.contains_key(&pair)
            || (!self.known.is_empty() && self.known.keys().any(|id| (id.lane, id.handler) == pair))
    }

    pub(super) fn leave(&self, row: &Row, batch: usize) -> Leave {
        match self.known.get(&row.id) {
            Some(known) if known.charged_at == Some(row.attempts) => Leave::Charge,
            Some(known) => Leave::Recorded(known.together.min(batch)),
            None => match self.unknown.get(&(row.id.lane, row.id.handler)) {
                Some(unknown) if row.id.seq <= unknown.last_seq => Leave::Recorded(batch),
                _ => Leave::Free,
            },
        }
    }

    /// Its crash was counted; from now on it goes alone.
    pub(super) fn charged(&mut self, id: DeliveryId) {
        self.known.insert(id, Known { together: 1, charged_at: None });
    }

    pub(super) fn are_out(&self, handler: i32) -> bool {
        self.out.contains_key(&handler)
    }

    /// Nothing may be sent now: one is alone on its way, or waits until nothing of `in_flight` is.
    pub(super) fn need_rest(&mut self, in_flight: usize, now: Instant) -> bool {
        if in_flight == 0 || self.waiting.is_some_and(|since| now.duration_since(since) >= ALONE + LATER) {
            self.waiting = None;
        }
        let waits = self.waiting.is_some_and(|since| now.duration_since(since) < ALONE);
        let alone = self.out.values().any(|out| out.alone && now.duration_since(out.since) < ALONE);
        waits || alone
    }

    /// Whether it must go alone: a bridge died while it was on its way with few others.
    pub(super) fn is_alone(&self, id: DeliveryId) -> bool {
        self.known.get(&id).is_some_and(|known| known.together == 1)
    }

    /// One is ready that must be alone, and something is in flight.
    pub(super) fn wait(&mut self, now: Instant) {
        self.waiting.get_or_insert(now);
    }

    /// These go under record now. Returns how many are together for whoever reads it: 1 only for one that had to be
    /// alone, since another may be on its way beside one that just had no company.
    pub(super) fn sent(&mut self, rows: &[Row], now: Instant) -> usize {
        let Some(last) = rows.last() else { return 0 };
        let alone = rows.len() == 1 && self.is_alone(last.id);
        self.out.insert(last.id.handler, Out { alone, last: last.id, since: now });
        for row in rows {
            if let Some(unknown) = self.unknown.get_mut(&(row.id.lane, row.id.handler)) {
                unknown.left = unknown.left.saturating_sub(1);
            }
        }
        if alone { 1 } else { rows.len().max(2) }
    }

    /// The batch came back, whatever the answers, and the process is alive: `tried` are innocent.
    pub(super) fn came_back(&mut self, tried: &[Row]) {
        for row in tried {
            self.known.remove(&row.id);
        }
    }

    /// These records are gone. Not before may the next batch go: a crash would be blamed on both.
    pub(super) fn cleared(&mut self, ids: &[DeliveryId]) {
        if !self.out.is_empty() {
            self.out.retain(|_, out| !ids.contains(&out.last));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::num::NonZeroU32;

    use super::super::plan::{Answer, Batch, Plan, Rules};
    use super::*;
    use crate::backoff::Retry;
    use crate::delivery::Outcome;
    use crate::lanes::LeftBehind;
    use crate::sinks::KeyWindow;
    use crate::sources::Page;

    const HANDLER: i32 = 1;
    const ATTEMPTS: u32 = 3;
    const BATCH: usize = 100;

    fn plan() -> Plan {
        Plan::new(vec![Rules {
            id: HANDLER,
            ordered: true,
            blocks: true,
            keys: KeyWindow::Batch,
            retry: Retry {
                max_attempts: NonZeroU32::new(ATTEMPTS).unwrap(),
                initial: Duration::from_millis(1),
                max: Duration::from_millis(1),
            },
            batch: BATCH,
            batches_in_flight: 2,
            batch_bytes: 1_000_000,
        }])
    }

    /// What the database keeps while bridges die.
    #[derive(Default)]
    struct World {
        /// Deliveries and their attempts.
        table: BTreeMap<DeliveryId, i16>,
        records: HashMap<DeliveryId, Record>,
        dead: BTreeSet<DeliveryId>,
        charged: BTreeMap<DeliveryId, u32>,
        recorded_writes: usize,
    }

    impl World {
        fn with(lanes: i16, each: i64) -> Self {
            let ids = (0..lanes).flat_map(|lane| {
                (0..each).map(move |n| DeliveryId {
                    lane,
                    handler: HANDLER,
                    seq: n * i64::from(lanes) + i64::from(lane) + 1,
                })
            });
            Self { table: ids.map(|id| (id, 0)).collect(), ..Self::default() }
        }

        fn read(&self, plan: &mut Plan, now: Instant) {
            let asks = plan.asks(true, now);
            let mut rows = Vec::new();
            for ask in &asks {
                let of_window = self.table.iter().filter(|(id, _)| id.lane == ask.lane && id.seq > ask.after);
                rows.extend(of_window.take(usize::try_from(ask.limit).unwrap()).map(|(id, attempts)| Row {
                    key: Some(id.seq),
                    attempts: *attempts,
                    ..Row::plain(*id)
                }));
            }
            plan.page(&asks, Page { rows, cuts: Vec::new(), ended_below: i64::MAX }, now);
        }

        fn send(&mut self, batch: &Batch) {
            if let Some(together) = batch.record {
                self.recorded_writes += 1;
                for row in &batch.rows {
                    self.records.insert(row.id, Record { id: row.id, attempts: row.attempts, together });
                }
            }
        }

        fn write(&mut self, plan: &mut Plan) {
            loop {
                let outcomes = plan.outcomes();
                if outcomes.is_empty() {
                    return;
                }
                for id in &outcomes.acked {
                    self.table.remove(id);
                }
                for refusal in &outcomes.refused {
                    assert_eq!(refusal.failure.code, "CRASHED");
                    *self.table.get_mut(&refusal.id).unwrap() += 1;
                    *self.charged.entry(refusal.id).or_default() += 1;
                }
                for burial in &outcomes.buried {
                    self.table.remove(&burial.id);
                    self.dead.insert(burial.id);
                    *self.charged.entry(burial.id).or_default() += 1;
                }
                for id in &outcomes.cleared {
                    self.records.remove(id);
                }
                plan.written(plan.epoch(), &outcomes, &[]);
            }
        }

        /// One life of a bridge, on all of `lanes`; whether it died of `poison`.
        fn live(&mut self, epoch: i64, lanes: i16, poison: Option<DeliveryId>) -> bool {
            let now = Instant::now();
            let lanes: Vec<i16> = (0..lanes).collect();
            let mut plan = plan();
            plan.gained(epoch, &lanes);
            if epoch > 1 {
                let records = self.records.values().filter(|record| self.table.contains_key(&record.id)).copied();
                plan.left_behind(&LeftBehind { lanes, last_seq: i64::MAX - 1, records: records.collect() });
            }
            for _ in 0..10_000 {
                self.read(&mut plan, now);
                while let Some(batch) = plan.next_batch(now) {
                    self.send(&batch);
                    if batch.rows.iter().any(|row| Some(row.id) == poison) {
                        return true;
                    }
                    let answers = batch.rows.iter().map(|_| Answer::Outcome(Outcome::Acked)).collect();
                    plan.answered(&batch, answers, now, 0.5);
                }
                self.write(&mut plan);
                if self.table.is_empty() {
                    return false;
                }
            }
            panic!("no end: {:?}", self.table);
        }
    }

    /// D9: it is buried after its attempts, and no other is charged with one.
    #[test]
    fn one_that_kills_every_bridge_is_buried_and_its_lane_mates_are_not_charged() {
        let seed = std::env::var("LB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random::<u64>);
        eprintln!("LB_SEED={seed}");
        for round in 0..25_u64 {
            let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed.wrapping_add(round));
            let lanes = rand::Rng::random_range(&mut rng, 1..20);
            let mut world = World::with(lanes, rand::Rng::random_range(&mut rng, 1..200));
            let all: Vec<DeliveryId> = world.table.keys().copied().collect();
            let poison = all[rand::Rng::random_range(&mut rng, 0..all.len())];
            let mut lives = 1;
            while world.live(lives, lanes, Some(poison)) {
                lives += 1;
                assert!(lives < 20, "{lives} lives, {:?}", world.records);
            }
            assert_eq!(world.dead, BTreeSet::from([poison]));
            assert_eq!(world.charged, BTreeMap::from([(poison, ATTEMPTS)]), "seed {seed} round {round}");
            assert!(world.records.is_empty(), "{:?}", world.records);
        }
    }

    #[test]
    fn where_no_bridge_died_nothing_is_recorded() {
        let mut world = World::with(10, 100);
        assert!(!world.live(1, 10, None));
        assert_eq!(world.recorded_writes, 0);
    }

    /// Else a crash would be blamed on one for what another did.
    #[test]
    fn one_that_was_alone_when_its_bridge_died_goes_out_with_nothing_beside_it() {
        let now = Instant::now();
        let mut world = World::with(2, 3);
        let mut plan = plan();
        plan.gained(1, &[0, 1]);
        let alone = DeliveryId { lane: 1, handler: HANDLER, seq: 2 };
        let record = Record { id: alone, attempts: -1, together: 1 };
        plan.left_behind(&LeftBehind { lanes: Vec::new(), last_seq: 0, records: vec![record] });
        world.read(&mut plan, now);
        let mut batches: Vec<Batch> = std::iter::from_fn(|| plan.next_batch(now)).collect();
        assert!(!batches.is_empty() && batches.iter().all(|batch| batch.record.is_none()), "{batches:?}");
        assert!(batches.iter().all(|batch| batch.rows.iter().all(|row| row.id != alone)));
        let answer = |plan: &mut Plan, batch: &Batch| {
            let answers = batch.rows.iter().map(|_| Answer::Outcome(Outcome::Acked)).collect();
            plan.answered(batch, answers, now, 0.5);
        };
        for batch in batches.drain(..) {
            answer(&mut plan, &batch);
        }
        let batch = plan.next_batch(now).unwrap();
        assert_eq!(batch.record, Some(1));
        assert_eq!(batch.rows.iter().map(|row| row.id).collect::<Vec<_>>(), [alone]);
        world.write(&mut plan);
        world.table.insert(DeliveryId { lane: 0, handler: HANDLER, seq: 99 }, 0);
        world.read(&mut plan, now);
        assert!(plan.next_batch(now).is_none(), "it is alone");
        let late = now + ALONE;
        assert!(plan.next_batch(late).is_some(), "a sink that hangs stops the others for a moment only");
        answer(&mut plan, &batch);
        assert!(plan.next_batch(now).is_none(), "its record is still there");
        world.write(&mut plan);
        world.read(&mut plan, now);
        assert!(plan.next_batch(now).is_some_and(|batch| batch.record.is_none()));
    }
}
