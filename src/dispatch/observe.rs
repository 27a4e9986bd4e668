//! What the loop tells metrics and health: outside of the rules, so that these know nothing of counters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use time::OffsetDateTime;

use super::Outlet;
use super::plan::{Answer, Batch, Plan};
use super::progress::Progress;
use crate::completion::{Missing, Outcomes};
use crate::delivery::Outcome;
use crate::health::{Health, Phase, Stuck};
use crate::lanes::Ownership;
use crate::metrics::{Metrics, OfHandler, unix_now};
use crate::sinks::BEHIND;
use crate::sources::Page;

/// Between two looks for what does not move.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Who is told.
pub(crate) struct Observer {
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    progress: Progress,
    looked: Option<Instant>,
}

impl Observer {
    pub(crate) fn new(metrics: Arc<Metrics>, health: Arc<Health>) -> Self {
        Self { metrics, health, progress: Progress::default(), looked: None }
    }

    /// One turn of the loop. `polling`: since when a poll is out. `database_away`: nothing can move, and that is no fault
    /// of ours.
    pub(super) fn turn(
        &mut self,
        plan: &Plan,
        outlets: &HashMap<i32, Arc<Outlet>>,
        polling: Option<Instant>,
        database_away: bool,
        now: Instant,
    ) {
        self.health.turned(now);
        if database_away {
            self.progress.forget();
        }
        if self.looked.is_some_and(|looked| now.duration_since(looked) < LOOK_EVERY) {
            return;
        }
        self.looked = Some(now);
        let limit = self.health.stuck_after();
        let poll = polling.map(|since| now.duration_since(since)).filter(|out| *out > limit);
        let stuck = match poll {
            Some(since) => Some(Stuck { what: "the poll".to_owned(), reason: "its session does not answer", since }),
            None => self.progress.look(plan.firsts(), limit, now).map(|((lane, handler), first, since)| {
                let handler = outlets.get(&handler).map_or("?", |outlet| &outlet.route.handler.name);
                Stuck { what: format!("lane {lane} of handler {handler}"), reason: first.reason(), since }
            }),
        };
        if let (0, Some(Stuck { what, reason, since })) = (self.metrics.stuck.get(), &stuck) {
            tracing::error!(what, reason, for_seconds = since.as_secs(), "deliveries that could go do not move");
        }
        self.metrics.stuck.set(i64::from(stuck.is_some()));
        self.health.is_stuck(stuck);
    }

    /// Before `plan` takes the news.
    pub(super) fn ownership(&self, news: &Ownership, plan: &Plan) {
        let lanes = &self.metrics.lanes;
        match news {
            Ownership::Gained { epoch, lanes: gained, left } => {
                lanes.epoch.set(*epoch);
                lanes.gained.inc_by(gained.len() as u64);
                lanes.taken_over.inc_by(left.lanes.len() as u64);
                self.health.enters(Phase::OwnsLanes);
            }
            Ownership::Mark { .. } => {
                lanes.heartbeat.set(unix_now());
            }
            Ownership::Lost => self.lost(plan),
            Ownership::NoneFree { .. } => self.health.enters(Phase::StandsBy),
            Ownership::Release { .. } => {}
        }
    }

    /// Before `plan` forgets its lanes.
    pub(super) fn lost(&self, plan: &Plan) {
        self.metrics.lanes.lost.inc_by(plan.lanes().len() as u64);
        self.health.enters(Phase::LostLanes);
    }

    pub(super) fn released(&self, lanes: usize) {
        self.metrics.lanes.released.inc_by(lanes as u64);
    }

    /// After whatever changed it.
    pub(super) fn owned(&self, plan: &Plan) {
        self.metrics.lanes.owned.set(plan.lanes().len().try_into().unwrap_or(i64::MAX));
    }

    pub(super) fn polled(&self, took: Duration, page: &Page) {
        self.metrics.polls.took.observe(took);
        self.metrics.polls.rows.inc_by(page.rows.len() as u64);
        self.metrics.polls.cut.inc_by(page.cuts.len() as u64);
    }

    pub(super) fn written(
        &self,
        took: Duration,
        outcomes: &Outcomes,
        missing: &[Missing],
        outlets: &HashMap<i32, Arc<Outlet>>,
    ) {
        self.metrics.write.observe(took);
        self.metrics.missing.inc_by(missing.len() as u64);
        let mut completed: HashMap<i32, u64> = HashMap::new();
        for id in &outcomes.acked {
            *completed.entry(id.handler).or_default() += 1;
        }
        for missing in missing {
            completed.entry(missing.id.handler).and_modify(|count| *count -= 1);
        }
        for (handler, count) in completed {
            if let Some(outlet) = outlets.get(&handler) {
                outlet.metrics.completed.inc_by(count);
            }
        }
        for burial in &outcomes.buried {
            if let Some(outlet) = outlets.get(&burial.id.handler) {
                outlet.metrics.buried.inc();
            }
        }
    }
}

fn sizes(batch: &Batch) -> (i64, i64) {
    let bytes: u64 = batch.rows.iter().map(|row| u64::from(row.size_bytes)).sum();
    (i64::try_from(batch.rows.len()).unwrap_or(i64::MAX), i64::try_from(bytes).unwrap_or(i64::MAX))
}

pub(super) fn taken(metrics: &OfHandler, batch: &Batch) {
    let (deliveries, bytes) = sizes(batch);
    metrics.in_flight.inc_by(deliveries);
    metrics.in_flight_bytes.inc_by(bytes);
}

pub(super) fn answered(metrics: &OfHandler, batch: &Batch, answers: &[Answer]) {
    let (deliveries, bytes) = sizes(batch);
    metrics.in_flight.dec_by(deliveries);
    metrics.in_flight_bytes.dec_by(bytes);
    for answer in answers {
        match answer {
            // It waited behind another of its key: nobody asked the broker about it.
            Answer::Outcome(Outcome::Unreachable(failure)) if failure.code == BEHIND => {}
            Answer::Outcome(outcome) => metrics.answered(outcome),
            Answer::Gone | Answer::Held | Answer::EventMissing | Answer::NotTried => {}
        }
    }
}

/// An acknowledgement, by the database's clock; `committed_at` where the stream said it.
pub(super) fn acked(
    metrics: &OfHandler,
    created_at: OffsetDateTime,
    committed_at: Option<OffsetDateTime>,
    now: OffsetDateTime,
) {
    // A clock that was set back, or is known less exactly than a broker is fast: zero.
    let age = |at: OffsetDateTime| Duration::try_from(now - at).unwrap_or_default();
    metrics.publish_to_ack.observe(age(created_at));
    if let Some(at) = committed_at {
        metrics.commit_to_ack.observe(age(at));
    }
}
