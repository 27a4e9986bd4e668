//! The rules of dispatch against a model of the database and of a broker, in thousands of random schedules.
//!
//! The model commits late, answers late and in any order, refuses, rejects, loses its broker, fences and restarts the
//! bridge. Checked: nothing is lost, nothing is sent that was not committed, first occurrences of a key are in order,
//! and when the faults end everything is delivered. Every failure prints its seed; `LB_SEED` replays it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::plan::{Answer, Batch, Plan, Rules};
use super::progress::{First, Progress};
use crate::backoff::Retry;
use crate::completion::Outcomes;
use crate::delivery::{DeliveryId, Failure, Outcome};
use crate::sinks::{BEHIND, KeyWindow};
use crate::sources::{Ask, Page, Promoted, Row, Touch};

const HANDLER: i32 = 1;
const LANE: i16 = 0;
/// Two thousand steps.
const STILL: Duration = Duration::from_secs(40);

/// A row of `deliveries`, as the model keeps it.
#[derive(Clone, Copy, Debug)]
struct Stored {
    key: Option<i64>,
    attempts: i16,
    due_at: Option<u64>,
}

/// A publisher's open transaction.
#[derive(Debug)]
struct Open {
    xid: i64,
    seqs: Vec<(i64, Option<i64>)>,
}

/// What is on its way between the plan and the outside.
enum Message {
    Page(Vec<Ask>, Page),
    Answers(Batch, Vec<Answer>),
    Write(i64, Outcomes),
}

struct World {
    rng: StdRng,
    blocks: bool,
    keys: KeyWindow,
    clock: u64,
    next_xid: i64,
    next_seq: i64,
    open: Vec<Open>,
    table: BTreeMap<i64, Stored>,
    dead: BTreeMap<i64, Option<i64>>,
    committed: BTreeMap<i64, Option<i64>>,
    /// What the broker holds, in its order.
    broker: Vec<i64>,
    broker_up: bool,
    poison: HashSet<i64>,
    epoch: i64,
    on_the_way: Vec<Message>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let keys = if rng.random_bool(0.5) { KeyWindow::One } else { KeyWindow::Batch };
        Self {
            blocks: rng.random_bool(0.5),
            keys,
            rng,
            clock: 0,
            next_xid: 10,
            next_seq: 1,
            open: Vec::new(),
            table: BTreeMap::new(),
            dead: BTreeMap::new(),
            committed: BTreeMap::new(),
            broker: Vec::new(),
            broker_up: true,
            poison: HashSet::new(),
            epoch: 1,
            on_the_way: Vec::new(),
        }
    }

    fn plan(&self) -> Plan {
        let retry = Retry {
            max_attempts: NonZeroU32::new(4).unwrap(),
            initial: Duration::from_millis(2),
            max: Duration::from_millis(8),
        };
        Plan::new(vec![Rules {
            id: HANDLER,
            ordered: true,
            blocks: self.blocks,
            keys: self.keys,
            retry,
            batch: 4,
            batches_in_flight: 3,
            batch_bytes: 1000,
        }])
    }

    /// As in `publish`: the transaction's number first, then the key's lock, then the seq.
    fn publish(&mut self) {
        let key = self.rng.random_bool(0.8).then(|| self.rng.random_range(0..4));
        if key.is_some() && self.open.iter().any(|open| open.seqs.iter().any(|(_, held)| *held == key)) {
            return;
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        if self.rng.random_bool(0.05) {
            self.poison.insert(seq);
        }
        if self.rng.random_bool(0.3)
            && let Some(open) = self.open.last_mut()
        {
            open.seqs.push((seq, key));
            return;
        }
        self.open.push(Open { xid: self.next_xid, seqs: vec![(seq, key)] });
        self.next_xid += 1;
    }

    fn end_a_transaction(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.open.len());
        let open = self.open.remove(at);
        if self.rng.random_bool(0.2) {
            return;
        }
        for (seq, key) in open.seqs {
            let due_at = self.rng.random_bool(0.05).then(|| self.clock + self.rng.random_range(1..30));
            self.table.insert(seq, Stored { key, attempts: 0, due_at });
            self.committed.insert(seq, key);
        }
    }

    fn ended_below(&self) -> i64 {
        self.open.iter().map(|open| open.xid).min().unwrap_or(self.next_xid)
    }

    fn hidden(&self, seq: i64, key: Option<i64>) -> bool {
        let Some(key) = key else { return false };
        let held = |(_, row): (&i64, &Stored)| row.key == Some(key) && row.due_at.is_some();
        let dead = |(_, dead): (&i64, &Option<i64>)| *dead == Some(key);
        self.table.range(..seq).any(held) || (self.blocks && self.dead.range(..seq).any(dead))
    }

    fn read(&self, asks: &[Ask], now: Instant) -> Page {
        let (mut rows, mut cuts) = (Vec::new(), Vec::new());
        for ask in asks {
            assert!(ask.looks > ask.limit);
            // As few as the poll may look at, so that reads are cut often.
            let limit = usize::try_from(ask.limit).unwrap();
            let ordinary = self.table.range(ask.after + 1..).filter(|(_, row)| row.due_at.is_none());
            let mut looked: Vec<(&i64, &Stored)> = ordinary.take(limit + 1).collect();
            if looked.len() > limit {
                cuts.extend(looked.pop().map(|(seq, _)| (LANE, HANDLER, *seq - 1)));
            }
            let seen = looked.into_iter().filter(|(seq, row)| !self.hidden(**seq, row.key));
            rows.extend(seen.map(|(seq, row)| Row {
                key: row.key,
                attempts: row.attempts,
                read_at: Some(now),
                ..Row::plain(DeliveryId { lane: LANE, handler: HANDLER, seq: *seq })
            }));
        }
        Page { rows, cuts, ended_below: self.ended_below() }
    }

    fn promote(&mut self) -> Vec<Promoted> {
        let clock = self.clock;
        let due = self.table.iter_mut().filter(|(_, row)| row.due_at.is_some_and(|due| due <= clock));
        let first = due
            .map(|(seq, row)| {
                row.due_at = None;
                *seq
            })
            .min();
        first.map(|first_seq| Promoted { lane: LANE, handler: HANDLER, first_seq }).into_iter().collect()
    }

    /// Sends a batch at one moment, as the sink's kind would; confirms it, unless the stream brought the payload and the
    /// read that saw the delivery is fresh.
    fn send(&mut self, batch: &Batch, now: Instant) -> Vec<Answer> {
        let mut stopped = HashSet::new();
        let mut answers = Vec::new();
        for row in &batch.rows {
            let seq = row.id.seq;
            if row.key.is_some_and(|key| stopped.contains(&key)) {
                answers.push(Answer::Outcome(Outcome::Unreachable(Failure::new(BEHIND, ""))));
                continue;
            }
            let streamed = self.rng.random_bool(0.5) && row.is_fresh(now);
            let answer = match self.table.get(&seq) {
                None if !streamed => Answer::Gone,
                Some(stored) if !streamed && (stored.due_at.is_some() || self.hidden(seq, stored.key)) => Answer::Held,
                _ if !self.broker_up => Answer::Outcome(Outcome::Unreachable(Failure::new("DOWN", ""))),
                _ if self.poison.contains(&seq) && self.rng.random_bool(0.3) => {
                    Answer::Outcome(Outcome::Rejected(Failure::new("POISON", "")))
                }
                _ if self.poison.contains(&seq) || self.rng.random_bool(0.05) => {
                    Answer::Outcome(Outcome::Refused(Failure::new("REFUSED", "")))
                }
                _ => {
                    self.broker.push(seq);
                    // Stored, but the answer got lost: doubt.
                    if self.rng.random_bool(0.05) {
                        Answer::Outcome(Outcome::Refused(Failure::new("TIMEOUT", "")))
                    } else {
                        Answer::Outcome(Outcome::Acked)
                    }
                }
            };
            if !matches!(answer, Answer::Outcome(Outcome::Acked) | Answer::Gone) {
                stopped.extend(row.key);
            }
            answers.push(answer);
        }
        answers
    }

    fn write(&mut self, outcomes: &Outcomes) {
        for id in &outcomes.acked {
            self.table.remove(&id.seq);
        }
        for refusal in &outcomes.refused {
            if let Some(row) = self.table.get_mut(&refusal.id.seq)
                && row.attempts == refusal.attempts
            {
                row.attempts += 1;
                row.due_at = Some(self.clock + u64::try_from(refusal.delay.as_millis()).unwrap());
            }
        }
        for burial in &outcomes.buried {
            if let Some(row) = self.table.remove(&burial.id.seq) {
                self.dead.insert(burial.id.seq, row.key);
            }
        }
    }

    fn requeue_one(&mut self) {
        if let Some((&seq, &key)) = self.dead.iter().next() {
            self.dead.remove(&seq);
            self.poison.remove(&seq);
            self.table.insert(seq, Stored { key, attempts: 0, due_at: Some(self.clock) });
        }
    }

    /// One thing happens.
    fn step(&mut self, plan: &mut Plan, now: Instant, faults: bool) {
        self.clock += 1;
        match self.rng.random_range(0..12) {
            0 | 1 if faults => self.publish(),
            2 => self.end_a_transaction(),
            3 => {
                plan.mark(self.next_xid, self.next_seq - 1);
                self.next_xid += 1;
            }
            4 => {
                let polling = self.on_the_way.iter().any(|m| matches!(m, Message::Page(..)));
                if !polling {
                    let promoted = self.promote();
                    plan.promoted(&promoted);
                    // All lanes, or those that the stream touched; it may show what is not visible, or never will be.
                    let all = self.rng.random_bool(0.7);
                    let touch = Touch { lane: LANE, handler: HANDLER, seq: Some(self.next_seq), xid: 5 };
                    plan.touched(&[touch], now);
                    let asks = plan.asks(all, now);
                    let page = self.read(&asks, now);
                    self.on_the_way.push(Message::Page(asks, page));
                }
            }
            5 | 6 => {
                if let Some(batch) = plan.next_batch(now) {
                    let answers = self.send(&batch, now);
                    self.on_the_way.push(Message::Answers(batch, answers));
                }
            }
            7 => {
                let writing = self.on_the_way.iter().any(|m| matches!(m, Message::Write(..)));
                if !writing {
                    let outcomes = plan.outcomes();
                    if !outcomes.is_empty() {
                        self.on_the_way.push(Message::Write(plan.epoch(), outcomes));
                    }
                }
            }
            8..=10 => self.arrive(plan, now, faults),
            _ if faults => match self.rng.random_range(0..40) {
                0..=3 => self.broker_up = !self.broker_up,
                4 => plan.start_sweep(),
                5 => self.requeue_one(),
                6 => {
                    // The lock session broke and came back: what is on its way arrives late, under the old epoch.
                    plan.lost();
                    self.epoch += 1;
                    plan.gained(self.epoch, &[LANE]);
                }
                7 => {
                    // kill -9: nothing that was on its way arrives.
                    self.on_the_way.clear();
                    *plan = self.plan();
                    self.epoch += 1;
                    plan.gained(self.epoch, &[LANE]);
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn arrive(&mut self, plan: &mut Plan, now: Instant, faults: bool) {
        if self.on_the_way.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.on_the_way.len());
        match self.on_the_way.swap_remove(at) {
            Message::Page(asks, page) => plan.page(&asks, page, now),
            Message::Answers(batch, answers) => {
                plan.answered(&batch, answers, now, 0.5);
            }
            Message::Write(epoch, outcomes) => {
                if epoch != self.epoch {
                    plan.remember(outcomes.acked);
                } else if faults && self.rng.random_bool(0.1) {
                    // The connection broke: before the commit, or after it.
                    if self.rng.random_bool(0.5) {
                        self.write(&outcomes);
                    }
                    plan.unwritten(epoch, outcomes);
                } else {
                    self.write(&outcomes);
                    plan.written(epoch, &outcomes, &[]);
                }
            }
        }
    }

    fn check(&self, seed: u64) {
        let mut last: HashMap<i64, i64> = HashMap::new();
        let mut seen = HashSet::new();
        for &seq in &self.broker {
            let Some(key) = self.committed.get(&seq) else { panic!("seed {seed}: phantom {seq}") };
            if seen.insert(seq)
                && let Some(key) = key
            {
                // A dead delivery that does not block is overtaken by design.
                let last = last.entry(*key).or_default();
                assert!(
                    !self.blocks || seq > *last,
                    "seed {seed}: key {key}: {seq} came first after {last}: {:?}",
                    self.broker
                );
                *last = seq.max(*last);
            }
        }
        for &seq in self.committed.keys() {
            let waits = self.dead.contains_key(&seq) || self.table.contains_key(&seq);
            assert!(seen.contains(&seq) || waits, "seed {seed}: lost {seq}");
        }
    }
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    let mut plan = world.plan();
    plan.gained(world.epoch, &[LANE]);
    let start = Instant::now();
    let at = |world: &World| start + Duration::from_millis(world.clock * 20);
    for _ in 0..600 {
        let now = at(&world);
        world.step(&mut plan, now, true);
    }
    world.check(seed);
    // The faults end: all that can be delivered must be (I5).
    world.broker_up = true;
    world.poison.clear();
    while !world.dead.is_empty() {
        world.requeue_one();
    }
    let mut progress = Progress::default();
    for round in 0.. {
        let now = at(&world);
        world.step(&mut plan, now, false);
        // What moves, however slowly, is never called stuck: a batch here takes some hundred steps at most.
        let stuck = progress.look(plan.firsts(), STILL, now);
        assert!(stuck.is_none(), "seed {seed}: {stuck:?} in {plan:?}");
        if world.dead.len() + world.table.len() + world.open.len() == 0 {
            break;
        }
        if !world.dead.is_empty() {
            world.requeue_one();
        }
        assert!(round < 50_000, "seed {seed}: stuck with {:?} open {:?}, plan {plan:?}", world.table, world.open);
    }
    world.check(seed);
}

/// I1, I2, I3, I5 in 3,000 schedules.
#[test]
fn no_schedule_loses_invents_or_reorders() {
    if let Some(seed) = std::env::var("LB_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return run(seed);
    }
    let first: u64 = rand::random();
    for seed in (0..3000).map(|n| first.wrapping_add(n)) {
        run(seed);
    }
}

/// The other way round: each place where a delivery can stop is found.
#[test]
fn what_stops_at_any_place_is_named() {
    let mut world = World::new(1);
    let mut plan = world.plan();
    plan.gained(world.epoch, &[LANE]);
    world.table.insert(1, Stored { key: Some(1), attempts: 0, due_at: None });
    let now = Instant::now();
    let first = |plan: &Plan| plan.firsts().next().map(|(_, first)| first);
    assert_eq!(first(&plan), None);
    let asks = plan.asks(true, now);
    let page = world.read(&asks, now);
    plan.page(&asks, page, now);
    assert_eq!(first(&plan), Some(First::Queued(0)));
    let batch = plan.next_batch(now).unwrap();
    assert_eq!(first(&plan), Some(First::InFlight(1)));
    plan.answered(&batch, vec![Answer::Outcome(Outcome::Acked)], now, 0.5);
    assert_eq!(first(&plan), Some(First::Unwritten(1)));
    let outcomes = plan.outcomes();
    assert_eq!(first(&plan), Some(First::Unwritten(1)));
    plan.written(world.epoch, &outcomes, &[]);
    assert_eq!(first(&plan), None);
}

/// A broker that is away is no standstill of ours, but what it acknowledged before is.
#[test]
fn what_waits_for_a_broker_is_not_stuck() {
    let mut world = World::new(1);
    let mut plan = world.plan();
    plan.gained(world.epoch, &[LANE]);
    world.table.insert(1, Stored { key: Some(1), attempts: 0, due_at: None });
    let now = Instant::now();
    let asks = plan.asks(true, now);
    let page = world.read(&asks, now);
    plan.page(&asks, page, now);
    let batch = plan.next_batch(now).unwrap();
    let away = Answer::Outcome(Outcome::Unreachable(Failure::new("DOWN", "")));
    assert!(plan.answered(&batch, vec![away], now, 0.5).opened);
    assert_eq!(plan.firsts().next(), None);
}
