//! The rules of dispatch as one state machine: what to read, what to send next, what an answer means.
//!
//! I3: see `window`. I4: at most `batches_in_flight` batches per handler, of `batch` deliveries each, are unsettled.
//! One failing key never stops another; one failing handler never stops another: each has its own windows, breaker
//! and share of the memory. Pure: time and randomness come in as arguments.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Instant;

use super::awaited::Awaited;
use super::breaker::{Breaker, Permit};
use super::progress::First;
use super::suspects::{Leave, Suspects};
use super::window::Window;
use crate::backoff::Retry;
use crate::completion::{Burial, Missing, Outcomes, Refusal};
use crate::controls::breaks;
use crate::delivery::{DeliveryId, Failure, Outcome};
use crate::lanes::LeftBehind;
use crate::sinks::{BEHIND, KeyWindow};
use crate::sources::{Ask, Page, Promoted, Row, Standing, Touch};

/// Rows without payload that wait per lane and handler; about 100 bytes each.
const QUEUE: usize = 128;
/// Rows that one poll looks at, over all its asks, hidden ones among them; each ask at least as many as it may take.
/// About a tenth of a second of the server.
const LOOKS: usize = 20_000;
/// Acknowledged ids of a lost epoch that are remembered, to be deleted first should their lanes come back.
const REMEMBERED: usize = 100_000;

/// Versions that one window may go through before the next one's begin.
const VERSIONS: u64 = 1 << 32;

/// A handler as the rules see it.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub id: i32,
    pub ordered: bool,
    pub blocks: bool,
    pub keys: KeyWindow,
    pub retry: Retry,
    pub batch: usize,
    pub batches_in_flight: usize,
    /// Payload bytes in one batch; one delivery may pass it alone.
    pub batch_bytes: u64,
}

#[derive(Debug)]
struct Handler {
    rules: Rules,
    breaker: Breaker,
    batches: usize,
    /// Batches begun so far.
    begun: u64,
    /// Lanes with queued rows.
    ready: BTreeSet<i16>,
    /// The lane the last batch ended with: the next one begins after it.
    cursor: i16,
}

/// Deliveries of one handler to confirm and send now.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub handler: i32,
    pub epoch: i64,
    pub trial: bool,
    /// One of them may have killed a bridge: to be recorded before they are sent, with this number of those together.
    pub record: Option<usize>,
    pub rows: Vec<Row>,
}

/// What became of one row of a batch.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Outcome(Outcome),
    Gone,
    Held,
    EventMissing,
    /// Nothing was asked or handed over, e.g. the database could not confirm it.
    NotTried,
}

/// What a batch's answers changed that a person may want to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub opened: bool,
    pub closed: bool,
}

/// Counted since the start; for logs and `status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub acked: u64,
    pub refused: u64,
    pub rejected: u64,
    pub unreachable: u64,
    pub completed: u64,
    pub missing: u64,
    pub swept: u64,
}

/// How many rows this window may ask for.
fn room(handler: &Handler, window: &Window) -> usize {
    let most = if handler.breaker.is_open() { 1 } else { QUEUE };
    // Half empty, so that a trickle of free places does not become a query each.
    if window.queued() * 2 <= most { most - window.queued().min(most) } else { 0 }
}

fn burial(row: &Row, outcome: &'static str, failure: Failure) -> Burial {
    Burial { id: row.id, generation: row.generation, outcome, failure }
}

/// An attempt is spent: it waits, or is buried if it was the last.
fn refuse(pending: &mut Outcomes, retry: Retry, row: &Row, failure: Failure, jitter: f64) {
    let attempts = u32::try_from(row.attempts).unwrap_or(0) + 1;
    match retry.delay(attempts, jitter) {
        Some(delay) => pending.refused.push(Refusal { id: row.id, attempts: row.attempts, delay, failure }),
        None => pending.buried.push(burial(row, "refused", failure)),
    }
}

/// A batch under record as it grows.
struct Gather<'a> {
    rows: &'a mut Vec<Row>,
    most: &'a mut usize,
    bytes: &'a mut u64,
}

impl Gather<'_> {
    /// Adds what goes next of a window under suspicion; one that killed its bridge when it was alone is charged instead.
    fn suspects_of(&mut self, window: &mut Window, suspects: &mut Suspects, pending: &mut Outcomes, rules: &Rules) {
        let mut taken = window.take(self.most.saturating_sub(self.rows.len()), *self.bytes, rules.keys).into_iter();
        for row in taken.by_ref() {
            let may = match suspects.leave(&row, *self.most) {
                Leave::Charge => {
                    suspects.charged(row.id);
                    let failure = Failure::new("CRASHED", "the bridge died while it sent this delivery alone");
                    refuse(pending, rules.retry, &row, failure, 0.5);
                    if pending.buried.last().is_some_and(|burial| burial.id == row.id) {
                        pending.cleared.push(row.id);
                    }
                    // Later ones of its key were taken with it.
                    break;
                }
                Leave::Recorded(may) => may,
                Leave::Free => *self.most,
            };
            if !self.rows.is_empty() && self.rows.len() >= may {
                // Another part of what is suspected: the next batch's.
                *self.most = self.rows.len();
                window.released(row.id.seq);
                break;
            }
            *self.most = may.min(*self.most);
            *self.bytes = self.bytes.saturating_sub(u64::from(row.size_bytes));
            self.rows.push(row);
        }
        for row in taken {
            window.released(row.id.seq);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Plan {
    epoch: i64,
    handlers: BTreeMap<i32, Handler>,
    windows: HashMap<(i16, i32), Window>,
    /// Where the newest window's versions began.
    versions: u64,
    lanes: BTreeSet<i16>,
    /// Those of them that go to another bridge: nothing new is read or sent for them.
    leaving: BTreeSet<i16>,
    /// Windows that a read at once would bring something for, apart from room: more rows, or a sweep under way.
    hungry: BTreeSet<(i16, i32)>,
    /// What the stream showed and no read has seen yet.
    awaited: Awaited,
    /// (xid, last_seq) pairs whose transactions have not all ended yet, oldest first.
    marks: VecDeque<(i64, i64)>,
    settled: i64,
    /// What has to be written, beyond what is being written.
    pending: Outcomes,
    /// Acknowledged under a lost epoch, and not deleted as far as known.
    remembered: HashSet<DeliveryId>,
    suspects: Suspects,
    /// Batches of a lost epoch that are still out; nothing is sent until they are back.
    strays: usize,
    totals: Totals,
}

impl Plan {
    pub(crate) fn new(handlers: Vec<Rules>) -> Self {
        let handlers = handlers.into_iter().map(|rules| {
            let handler = Handler {
                breaker: Breaker::default(),
                batches: 0,
                begun: 0,
                ready: BTreeSet::new(),
                cursor: -1,
                rules,
            };
            (handler.rules.id, handler)
        });
        Self {
            epoch: 0,
            handlers: handlers.collect(),
            windows: HashMap::new(),
            versions: 0,
            lanes: BTreeSet::new(),
            leaving: BTreeSet::new(),
            hungry: BTreeSet::new(),
            awaited: Awaited::default(),
            marks: VecDeque::new(),
            settled: 0,
            pending: Outcomes::default(),
            remembered: HashSet::new(),
            suspects: Suspects::default(),
            strays: 0,
            totals: Totals::default(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    pub(crate) fn epoch(&self) -> i64 {
        self.epoch
    }

    pub(crate) fn owns_none(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Outcomes that wait to be written.
    pub(crate) fn unwritten_outcomes(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn lanes(&self) -> Vec<i16> {
        self.lanes.iter().copied().collect()
    }

    pub(crate) fn gained(&mut self, epoch: i64, lanes: &[i16]) {
        if epoch != self.epoch {
            self.lost();
            self.epoch = epoch;
        }
        for &lane in lanes {
            self.lanes.insert(lane);
            self.leaving.remove(&lane);
            for &handler in self.handlers.keys() {
                self.versions += VERSIONS;
                self.windows.insert((lane, handler), Window::new(self.versions));
            }
        }
    }

    /// The former owner of these lanes, which were just gained, died.
    pub(crate) fn left_behind(&mut self, left: &LeftBehind) {
        for handler in self.handlers.values() {
            let Rules { id, batch, batches_in_flight, .. } = handler.rules;
            let windows = left.lanes.iter().map(|lane| (*lane, id));
            self.suspects.left_behind(windows, left.last_seq, 2 * QUEUE + batch * batches_in_flight);
        }
        for record in &left.records {
            self.suspects.recorded(*record, left.lanes.contains(&record.id.lane));
        }
    }

    /// Everything known of the lanes is dropped, except what brokers acknowledged: that stays true.
    pub(crate) fn lost(&mut self) {
        let acked: Vec<DeliveryId> = self.pending.acked.drain(..).collect();
        self.remember(acked);
        self.pending = Outcomes::default();
        self.lanes.clear();
        self.leaving.clear();
        self.windows.clear();
        self.hungry.clear();
        self.awaited.clear();
        self.suspects.clear();
        self.marks.clear();
        self.settled = 0;
        for handler in self.handlers.values_mut() {
            self.strays += handler.batches;
            handler.batches = 0;
            handler.ready.clear();
            handler.breaker.trial_void(Instant::now());
        }
    }

    /// These lanes go to another bridge: what is in flight of them is settled, nothing else begins.
    pub(crate) fn leave(&mut self, lanes: &[i16]) {
        for lane in lanes.iter().filter(|lane| self.lanes.contains(lane)) {
            self.leaving.insert(*lane);
            self.suspects.forget_lane(*lane);
            for &handler in self.handlers.keys() {
                self.awaited.forget(*lane, handler);
            }
        }
    }

    /// Lanes that left and are drained; they are forgotten.
    pub(crate) fn take_left(&mut self) -> Vec<i16> {
        let drained = |lane: &i16| {
            self.handlers.keys().all(|handler| self.windows.get(&(*lane, *handler)).is_none_or(Window::is_drained))
        };
        let left: Vec<i16> = self.leaving.iter().copied().filter(drained).collect();
        for lane in &left {
            self.leaving.remove(lane);
            self.lanes.remove(lane);
            for (&id, handler) in &mut self.handlers {
                handler.ready.remove(lane);
                self.windows.remove(&(*lane, id));
                self.hungry.remove(&(*lane, id));
            }
        }
        left
    }

    /// Ids that are to be deleted first if their lanes come back. Bounded: past the limit the oldest knowledge goes,
    /// which costs duplicates, never a loss.
    pub(crate) fn remember(&mut self, acked: Vec<DeliveryId>) {
        if self.remembered.len() + acked.len() > REMEMBERED {
            self.remembered.clear();
        }
        self.remembered.extend(acked);
    }

    pub(crate) fn mark(&mut self, xid: i64, last_seq: i64) {
        self.marks.push_back((xid, last_seq));
        // A writer that stays open for hours keeps all of them; the newest ones are worth the most.
        if self.marks.len() > 256 {
            self.marks.remove(128);
        }
    }

    fn settle_marks(&mut self, ended_below: i64) {
        while let Some(&(xid, last_seq)) = self.marks.front() {
            if xid >= ended_below {
                break;
            }
            self.settled = self.settled.max(last_seq);
            self.marks.pop_front();
        }
    }

    pub(crate) fn start_sweep(&mut self) {
        for (pair, window) in &mut self.windows {
            window.start_sweep();
            self.hungry.insert(*pair);
        }
    }

    /// Call after what may have made a window want more, or no more.
    fn look_at(&mut self, pair: (i16, i32)) {
        let wants = self.windows.get(&pair).is_some_and(|window| window.has_more() || window.sweeps_at_once());
        if wants {
            self.hungry.insert(pair);
        } else {
            self.hungry.remove(&pair);
        }
    }

    /// The stream showed these; the next reads look for them.
    pub(crate) fn touched(&mut self, touches: &[Touch], now: Instant) {
        for touch in touches {
            if !self.leaving.contains(&touch.lane)
                && let Some(window) = self.windows.get_mut(&(touch.lane, touch.handler))
                && !self.awaited.add(touch, now)
            {
                window.expect_more();
                self.hungry.insert((touch.lane, touch.handler));
            }
        }
    }

    /// When a delivery that the stream showed is to be looked for, if there is one.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        self.awaited.next_due()
    }

    /// How far the reads of a lane have come, for the stream.
    pub(crate) fn standing(&self, lane: i16, handler: i32) -> Standing {
        match self.windows.get(&(lane, handler)) {
            None => Standing::Foreign,
            Some(_) if self.leaving.contains(&lane) => Standing::Foreign,
            Some(window) if window.has_more() => Standing::Behind,
            Some(_) => Standing::Current,
        }
    }

    /// Whether reading again at once would bring something: a page was cut, or a sweep is under way.
    pub(crate) fn wants_more(&self) -> bool {
        let wanting = self
            .hungry
            .iter()
            .filter(|(lane, _)| !self.leaving.contains(lane))
            .filter_map(|pair| Some((pair.1, self.windows.get(pair)?)));
        wanting.into_iter().any(|(handler, window)| {
            (window.sweeps_at_once() && window.queued() < 2 * QUEUE)
                || (window.has_more() && self.handlers.get(&handler).is_some_and(|state| room(state, window) > 0))
        })
    }

    /// What to read: every window with room, or with `all` false only those known to have more or touched by the
    /// stream.
    pub(crate) fn asks(&mut self, all: bool, now: Instant) -> Vec<Ask> {
        let pairs: BTreeSet<(i16, i32)> = match all {
            true => self.windows.keys().copied().collect(),
            false => self.hungry.iter().copied().chain(self.awaited.due(now)).collect(),
        };
        let (mut asks, mut more) = (Vec::new(), Vec::new());
        for (lane, handler) in pairs.into_iter().filter(|(lane, _)| !self.leaving.contains(lane)) {
            let (Some(state), Some(window)) = (self.handlers.get(&handler), self.windows.get_mut(&(lane, handler)))
            else {
                continue;
            };
            window.asked();
            let due = self.awaited.is_due(lane, handler, now);
            let ask = |after, limit, sweep| Ask {
                lane,
                handler,
                after,
                limit: i32::try_from(limit).unwrap_or(i32::MAX),
                looks: 0,
                ordered: state.rules.ordered && !breaks("followers-wait"),
                blocks: state.rules.blocks,
                version: window.version(),
                sweep,
            };
            let room = room(state, window);
            if room > 0 && (all || window.has_more() || due) {
                self.awaited.asked(lane, handler);
                asks.push(ask(window.bound(), window.limit(room), false));
            } else if due {
                // No room now: the read that comes with the next free place finds it.
                self.awaited.forget(lane, handler);
                more.push((lane, handler));
            }
            if let Some(after) = window.sweep()
                && window.queued() < 2 * QUEUE
            {
                asks.push(ask(after, QUEUE, true));
            }
        }
        for pair in more {
            if let Some(window) = self.windows.get_mut(&pair) {
                window.expect_more();
            }
            self.hungry.insert(pair);
        }
        let looks = i32::try_from(LOOKS / asks.len().max(1)).unwrap_or(i32::MAX);
        asks.iter_mut().for_each(|ask| ask.looks = ask.limit.saturating_add(1).max(looks));
        asks
    }

    pub(crate) fn promoted(&mut self, promoted: &[Promoted]) {
        for p in promoted {
            if let Some(window) = self.windows.get_mut(&(p.lane, p.handler)) {
                window.rewind(p.first_seq);
                self.hungry.insert((p.lane, p.handler));
            }
        }
    }

    /// Takes what a read of `asks` saw.
    pub(crate) fn page(&mut self, asks: &[Ask], page: Page, now: Instant) {
        self.settle_marks(page.ended_below);
        let mut by_ask: HashMap<(i16, i32), Vec<Row>> = HashMap::new();
        let mut swept: HashMap<(i16, i32), Vec<Row>> = HashMap::new();
        // A lane and handler may be asked twice, from the bound and in a sweep; seqs tell the answers apart.
        let bounds: HashMap<(i16, i32), i64> =
            asks.iter().filter(|ask| !ask.sweep).map(|ask| ((ask.lane, ask.handler), ask.after)).collect();
        for row in page.rows {
            let pair = (row.id.lane, row.id.handler);
            let target = match bounds.get(&pair) {
                Some(&after) if row.id.seq > after => &mut by_ask,
                Some(_) | None => &mut swept,
            };
            target.entry(pair).or_default().push(row);
        }
        let mut cuts: HashMap<(i16, i32, bool), i64> = HashMap::new();
        for (lane, handler, seq) in page.cuts {
            let swept = bounds.get(&(lane, handler)).is_none_or(|after| seq <= *after);
            let cut = cuts.entry((lane, handler, swept)).or_insert(seq);
            *cut = seq.max(*cut);
        }
        for ask in asks {
            let pair = (ask.lane, ask.handler);
            let (Some(window), Some(handler)) = (self.windows.get_mut(&pair), self.handlers.get_mut(&ask.handler))
            else {
                continue;
            };
            let limit = usize::try_from(ask.limit).unwrap_or(0);
            let source = if ask.sweep { &mut swept } else { &mut by_ask };
            let mut rows = source.remove(&pair).unwrap_or_default();
            rows.sort_unstable_by_key(|row| row.id.seq);
            rows.dedup_by_key(|row| row.id.seq);
            if !handler.rules.ordered {
                rows.iter_mut().for_each(|row| row.key = None);
            }
            for row in &rows {
                if self.remembered.remove(&row.id) {
                    self.pending.acked.push(row.id);
                    window.already_acked(row.id.seq);
                }
            }
            let full = rows.last().filter(|_| rows.len() >= limit).map(|row| row.id.seq);
            let cut = cuts.get(&(ask.lane, ask.handler, ask.sweep)).copied();
            let read_to = full.into_iter().chain(cut).min().unwrap_or(i64::MAX);
            if ask.sweep {
                self.totals.swept += window.offer_swept(ask.version, read_to, &rows) as u64;
            } else if window.offer(ask.version, read_to, &rows, self.settled) {
                self.awaited.seen(pair, ask.after, &rows, read_to, page.ended_below, now);
            }
            if window.queued() > 0 {
                handler.ready.insert(ask.lane);
            }
            self.look_at(pair);
        }
    }

    /// The next batch to send, if any handler may send one.
    pub(crate) fn next_batch(&mut self, now: Instant) -> Option<Batch> {
        let in_flight = self.batches();
        if self.strays > 0 || self.suspects.need_rest(in_flight, now) {
            return None;
        }
        let ids: Vec<i32> = self.handlers.keys().copied().collect();
        ids.into_iter().find_map(|id| self.batch_of(id, now))
    }

    fn batches(&self) -> usize {
        self.handlers.values().map(|handler| handler.batches).sum()
    }

    fn batch_of(&mut self, id: i32, now: Instant) -> Option<Batch> {
        let in_flight = self.batches();
        let handler = self.handlers.get_mut(&id)?;
        let mut most = match handler.breaker.permit(now) {
            Permit::Nothing => return None,
            Permit::One => 1,
            Permit::All => handler.rules.batch,
        };
        if handler.batches >= handler.rules.batches_in_flight {
            return None;
        }
        let mut rows: Vec<Row> = Vec::new();
        let mut bytes = handler.rules.batch_bytes;
        let mut recorded = false;
        let after: Vec<i16> = handler.ready.range(handler.cursor + 1..).copied().collect();
        let before: Vec<i16> = handler.ready.range(..=handler.cursor).copied().collect();
        for lane in after.into_iter().chain(before) {
            let Some(window) = self.windows.get_mut(&(lane, id)) else {
                handler.ready.remove(&lane);
                continue;
            };
            if self.leaving.contains(&lane) {
                handler.ready.remove(&lane);
                continue;
            }
            if bytes == 0 && !rows.is_empty() {
                break;
            }
            if self.suspects.concern((lane, id), window.lowest()) {
                if self.suspects.are_out(id) || (!rows.is_empty() && !recorded) {
                    continue;
                }
                let mut gather = Gather { rows: &mut rows, most: &mut most, bytes: &mut bytes };
                gather.suspects_of(window, &mut self.suspects, &mut self.pending, &handler.rules);
                recorded = !rows.is_empty();
                handler.cursor = lane;
                if window.queued() == 0 {
                    handler.ready.remove(&lane);
                }
                if rows.len() >= most {
                    break;
                }
                continue;
            }
            if recorded {
                continue;
            }
            let taken = window.take(most - rows.len(), bytes, handler.rules.keys);
            bytes = bytes.saturating_sub(taken.iter().map(|row| u64::from(row.size_bytes)).sum());
            if window.queued() == 0 {
                handler.ready.remove(&lane);
            }
            handler.cursor = lane;
            rows.extend(taken);
            if rows.len() >= most {
                break;
            }
        }
        if rows.is_empty() {
            return None;
        }
        if let ([row], true, 1..) = (rows.as_slice(), recorded, in_flight)
            && self.suspects.is_alone(row.id)
        {
            self.suspects.wait(now);
            if let Some(window) = self.windows.get_mut(&(row.id.lane, id)) {
                window.released(row.id.seq);
                handler.ready.insert(row.id.lane);
            }
            return None;
        }
        let record = recorded.then(|| self.suspects.sent(&rows, now));
        handler.batches += 1;
        handler.begun += 1;
        let trial = handler.breaker.is_open();
        if trial {
            handler.breaker.trial_started();
        }
        Some(Batch { handler: id, epoch: self.epoch, trial, record, rows })
    }

    /// Takes a batch's answers, one per row in order; a missing one counts as not tried.
    pub(crate) fn answered(&mut self, batch: &Batch, answers: Vec<Answer>, now: Instant, jitter: f64) -> Changes {
        let mut changes = Changes::default();
        if batch.epoch != self.epoch || self.lanes.is_empty() {
            self.strays = self.strays.saturating_sub(1);
            let acked = batch.rows.iter().zip(&answers);
            let acked = acked.filter(|(_, answer)| matches!(answer, Answer::Outcome(Outcome::Acked)));
            let acked = acked.map(|(row, _)| row.id).collect();
            self.remember(acked);
            return changes;
        }
        let Some(handler) = self.handlers.get_mut(&batch.handler) else { return changes };
        handler.batches = handler.batches.saturating_sub(1);
        if batch.record.is_some() {
            let not_tried = answers.iter().all(|answer| matches!(answer, Answer::NotTried));
            self.suspects.came_back(if not_tried { &[] } else { &batch.rows });
            self.pending.cleared.extend(batch.rows.iter().map(|row| row.id));
        }
        let mut reached = false;
        let mut unreachable = false;
        let mut answers = answers.into_iter();
        for row in &batch.rows {
            let Some(window) = self.windows.get_mut(&(row.id.lane, row.id.handler)) else { continue };
            let seq = row.id.seq;
            match answers.next().unwrap_or(Answer::NotTried) {
                Answer::Outcome(Outcome::Acked) => {
                    reached = true;
                    self.totals.acked += 1;
                    window.acked(seq);
                    self.pending.acked.push(row.id);
                }
                Answer::Outcome(Outcome::Rejected(failure)) => {
                    reached = true;
                    self.totals.rejected += 1;
                    self.pending.buried.push(burial(row, "rejected", failure));
                }
                Answer::Outcome(Outcome::Refused(failure)) => {
                    reached = true;
                    self.totals.refused += 1;
                    refuse(&mut self.pending, handler.rules.retry, row, failure, jitter);
                }
                // It waited behind another of its key: nobody asked the broker about it.
                Answer::Outcome(Outcome::Unreachable(failure)) if failure.code == BEHIND => window.released(seq),
                Answer::Outcome(Outcome::Unreachable(failure)) if breaks("outages-count-nothing") => {
                    refuse(&mut self.pending, handler.rules.retry, row, failure, jitter);
                }
                Answer::Outcome(Outcome::Unreachable(_)) => {
                    unreachable = true;
                    self.totals.unreachable += 1;
                    window.released(seq);
                }
                Answer::NotTried => window.released(seq),
                Answer::Gone => window.gone(seq),
                Answer::Held => window.held(seq),
                Answer::EventMissing => {
                    self.totals.rejected += 1;
                    let failure =
                        Failure::new("EVENT_MISSING", "the event is not in its partition; it was removed by hand");
                    self.pending.buried.push(burial(row, "rejected", failure));
                }
            }
            if window.queued() > 0 {
                handler.ready.insert(row.id.lane);
            }
            if window.has_more() {
                self.hungry.insert((row.id.lane, row.id.handler));
            }
        }
        if unreachable {
            changes.opened = handler.breaker.unreachable(now);
        } else if reached {
            changes.closed = handler.breaker.answered();
        } else if batch.trial {
            handler.breaker.trial_void(now);
        }
        changes
    }

    /// The next outcomes to write; put back with [`Plan::unwritten`] when they could not be.
    pub(crate) fn outcomes(&mut self) -> Outcomes {
        self.pending.next_batch()
    }

    pub(crate) fn unwritten(&mut self, epoch: i64, mut outcomes: Outcomes) {
        if epoch != self.epoch || self.lanes.is_empty() {
            self.remember(outcomes.acked);
            return;
        }
        outcomes.acked.append(&mut self.pending.acked);
        outcomes.refused.append(&mut self.pending.refused);
        outcomes.buried.append(&mut self.pending.buried);
        outcomes.cleared.append(&mut self.pending.cleared);
        self.pending = outcomes;
    }

    /// The database has them.
    pub(crate) fn written(&mut self, epoch: i64, outcomes: &Outcomes, missing: &[Missing]) {
        self.totals.completed += (outcomes.acked.len() - missing.len()) as u64;
        self.totals.missing += missing.len() as u64;
        if epoch != self.epoch {
            return;
        }
        self.suspects.cleared(&outcomes.cleared);
        for id in &outcomes.acked {
            if let Some(window) = self.windows.get_mut(&(id.lane, id.handler)) {
                window.completed(id.seq);
            }
        }
        for refusal in &outcomes.refused {
            if let Some(window) = self.windows.get_mut(&(refusal.id.lane, refusal.id.handler)) {
                window.held(refusal.id.seq);
                self.hungry.insert((refusal.id.lane, refusal.id.handler));
            }
        }
        for burial in &outcomes.buried {
            let pair = (burial.id.lane, burial.id.handler);
            let blocks = self.handlers.get(&pair.1).is_some_and(|h| h.rules.blocks && h.rules.ordered);
            if let Some(window) = self.windows.get_mut(&pair) {
                if blocks {
                    window.held(burial.id.seq);
                } else {
                    // What was hidden behind it comes back.
                    window.gone(burial.id.seq);
                    window.rewind(burial.id.seq);
                }
                self.hungry.insert(pair);
            }
        }
    }

    /// What is first to move in every (lane, handler) that has something to do, but for what a broker that is away holds
    /// up.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = ((i16, i32), First)> {
        self.windows.iter().filter_map(|(&(lane, id), window)| {
            let handler = self.handlers.get(&id)?;
            let leaves = self.leaving.contains(&lane);
            let first = match window.first() {
                (Some(seq), _, _) => First::InFlight(seq),
                (None, Some(seq), _) => First::Unwritten(seq),
                (None, None, Some(_)) if leaves => return None,
                (None, None, Some(_)) if handler.ready.contains(&lane) => First::Queued(handler.begun),
                (None, None, Some(seq)) => First::Forgotten(seq),
                (None, None, None) => return None,
            };
            let away = handler.breaker.is_open() && !matches!(first, First::Unwritten(_));
            (!away).then_some(((lane, id), first))
        })
    }

    /// A sweep is under way.
    pub(crate) fn is_sweeping(&self) -> bool {
        self.windows.values().any(|window| window.sweep().is_some())
    }

    /// Nothing is queued, in flight or to be written.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.strays == 0 && self.windows.values().all(Window::is_idle)
    }

    /// Nothing is in flight or to be written; what is queued was never taken.
    pub(crate) fn is_drained(&self) -> bool {
        self.pending.is_empty() && self.strays == 0 && self.handlers.values().all(|handler| handler.batches == 0)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.windows.values().map(Window::in_flight).sum::<usize>() + self.pending.len()
    }

    /// When the earliest open breaker allows its trial.
    pub(crate) fn next_trial(&self) -> Option<Instant> {
        self.handlers.values().filter_map(|handler| handler.breaker.next_trial()).min()
    }

    pub(crate) fn open_breakers(&self) -> Vec<i32> {
        self.handlers.values().filter(|handler| handler.breaker.is_open()).map(|handler| handler.rules.id).collect()
    }
}
