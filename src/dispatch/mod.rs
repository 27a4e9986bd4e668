//! THE loop: poll → order windows → confirm → sink → completion. The rules are in `plan`, `window` and `breaker`,
//! pure; here is the I/O around them.
//!
//! I1: an answer that does not come (a panic, a lost task, a short list) is never an acknowledgement. I2: rows reach a
//! sink only through `Confirmer::confirm`. I5: every failure here ends in a later retry; nothing waits for ever,
//! since every database and broker call has a deadline of its own.

mod awaited;
mod breaker;
mod link;
mod observe;
mod plan;
mod progress;
#[cfg(test)]
mod simulation;
mod suspects;
mod window;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng;
use time::OffsetDateTime;
use tokio::sync::{Notify, mpsc};
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

pub(crate) use link::Links;
pub(crate) use observe::Observer;
pub(crate) use plan::{Rules, Totals};

use crate::completion::{FENCED, Missing, Outcomes};
use crate::controls::breaks;
use crate::db;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::{Class, Error, Result};
use crate::health::Phase;
use crate::lanes::Ownership;
use crate::metrics::{Metrics, OfHandler, unix_now};
use crate::sinks::{BEHIND, Route, Sink};
use crate::sources::{Ask, Feed, Page, Promoted, Row, Standing, Verdict};
use plan::{Answer, Batch, Plan};

/// Wait after a failed database call before the next of its kind.
const DATABASE_PAUSE: Duration = Duration::from_millis(250);
/// Outcomes that are written without a rest.
const MANY_OUTCOMES: usize = 500;
/// Longest rest between two polls that the stream causes, and between two writes of outcomes.
const LONGEST_REST: Duration = Duration::from_millis(20);
/// Held deliveries promoted per poll.
const PROMOTE: i32 = 1000;
/// How often refusals of one handler and code are reported, and how many such pairs are remembered.
const REPORT_EVERY: Duration = Duration::from_secs(60);
const REPORTED: usize = 1000;
/// Trials that must fail before `--once` gives up on a broker.
const ONCE_PATIENCE: Duration = Duration::from_secs(30);

/// A handler with everything that a send needs.
pub(crate) struct Outlet {
    pub rules: Rules,
    pub route: Route,
    pub sink: Arc<Sink>,
    pub metrics: Arc<OfHandler>,
}

pub(crate) struct Settings {
    pub poll_interval: Duration,
    pub sweep_interval: Duration,
    pub shutdown_timeout: Duration,
    /// Drain what is due, then end.
    pub once: bool,
}

/// What wakes the loop early; none of it decides anything.
pub(crate) struct Hints {
    /// Poll everything.
    pub wake: Arc<Notify>,
    /// The stream of the write-ahead log, rung by `touched`; silent where there is none.
    pub feed: Arc<Feed>,
    pub touched: Arc<Notify>,
}

/// The two ways to whoever holds the lanes.
pub(crate) struct Holder {
    pub news: mpsc::Receiver<Ownership>,
    /// Where lanes are reported that were drained for another bridge.
    pub left: mpsc::UnboundedSender<Vec<i16>>,
}

/// How the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything that was in flight is settled and written.
    Drained,
    /// The shutdown timeout passed first; this many deliveries may be sent again.
    Undrained(usize),
}

/// What a finished task brings back.
enum Done {
    Polled { asks: Vec<Ask>, all: bool, result: Result<(Vec<Promoted>, Page)> },
    Promoted { all: bool, result: Result<Vec<Promoted>> },
    Sent { batch: Batch, answers: Vec<Answer> },
    Written { epoch: i64, outcomes: Outcomes, result: Result<Vec<Missing>> },
}

/// What to make of a task that panicked.
enum Doing {
    Poll,
    Send(Batch),
    Write { epoch: i64, outcomes: Outcomes },
}

/// Runs until `stop`, or with `once` until nothing is due.
///
/// # Errors
/// A failure that no retry ends; the deliveries stay in the database.
pub(crate) async fn run(
    outlets: Vec<Outlet>,
    links: Links,
    settings: Settings,
    mut holder: Holder,
    hints: Hints,
    observer: Observer,
    stop: CancellationToken,
) -> Result<(Ended, Totals)> {
    let plan = Plan::new(outlets.iter().map(|outlet| outlet.rules.clone()).collect());
    let mut run = Loop {
        plan,
        outlets: outlets.into_iter().map(|outlet| (outlet.rules.id, Arc::new(outlet))).collect(),
        links: Arc::new(links),
        observer,
        feed: hints.feed,
        left: holder.left,
        tasks: JoinSet::new(),
        doing: HashMap::new(),
        polling: false,
        writing: false,
        woken: true,
        wrote_at: Instant::now(),
        write_after: Instant::now(),
        polled_at: Instant::now(),
        look_after: Instant::now(),
        pause_until: None,
        complete_rounds: 0,
        none_free: None,
        sick_since: None,
        reported: HashMap::new(),
    };
    let mut poll_tick = tokio::time::interval(settings.poll_interval);
    poll_tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sweep_tick = tokio::time::interval(settings.sweep_interval);
    sweep_tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut deadline: Option<tokio::time::Instant> = None;

    loop {
        let now = Instant::now();
        let draining = deadline.is_some();
        run.observe(now);
        run.report_left();
        run.start_writing(now, draining);
        if draining {
            if run.plan.is_drained() && !run.writing {
                return Ok((Ended::Drained, run.plan.totals()));
            }
        } else {
            run.start_sending(now);
            run.start_polling(now);
            if settings.once
                && let Some(ended) = run.once_is_done(now)?
            {
                return Ok((ended, run.plan.totals()));
            }
        }
        let alarm = run.next_alarm(now, draining);
        tokio::select! {
            Some(news) = holder.news.recv() => run.ownership(news),
            Some(done) = run.tasks.join_next_with_id(), if !run.tasks.is_empty() => run.done(done)?,
            () = hints.wake.notified(), if !draining => run.woken = true,
            () = hints.touched.notified(), if !draining => run.touched(),
            _ = poll_tick.tick(), if !draining => run.woken = true,
            _ = sweep_tick.tick(), if !draining => {
                run.plan.start_sweep();
                run.woken = true;
            }
            () = tokio::time::sleep_until(alarm.into()) => {}
            () = stop.cancelled(), if !draining => {
                tracing::info!(in_flight = run.plan.in_flight(), "draining: nothing new is taken");
                run.observer.health.enters(Phase::Drains);
                deadline = Some(tokio::time::Instant::now() + settings.shutdown_timeout);
            }
            () = tokio::time::sleep_until(deadline.unwrap_or_else(tokio::time::Instant::now)), if draining => {
                run.tasks.abort_all();
                return Ok((Ended::Undrained(run.plan.in_flight()), run.plan.totals()));
            }
        }
    }
}

struct Loop {
    plan: Plan,
    outlets: HashMap<i32, Arc<Outlet>>,
    links: Arc<Links>,
    observer: Observer,
    feed: Arc<Feed>,
    /// Where lanes are reported that were drained for another bridge.
    left: mpsc::UnboundedSender<Vec<i16>>,
    tasks: JoinSet<Done>,
    /// By task, what it does: a panic must not lose it.
    doing: HashMap<Id, Doing>,
    polling: bool,
    writing: bool,
    /// A full poll is wanted.
    woken: bool,
    /// When the write that is under way, or the last one, began, and when the next may: like the polls.
    wrote_at: Instant,
    write_after: Instant,
    /// When the poll that is under way, or the last one, began.
    polled_at: Instant,
    /// The stream alone causes no poll before: as long as the last one took, so that under load each finds many
    /// deliveries instead of one, and the server is not asked without a pause.
    look_after: Instant,
    /// No database call that can wait is begun before.
    pause_until: Option<Instant>,
    /// Full polls with a finished sweep that found nothing, in a row.
    complete_rounds: u32,
    /// Bridges that hold every lane, if that is so.
    none_free: Option<Vec<String>>,
    /// Since when a breaker has been open without a break.
    sick_since: Option<Instant>,
    /// Handler and code of refusals, and when they were last reported.
    reported: HashMap<(i32, String), Instant>,
}

impl Loop {
    fn spawn(&mut self, doing: Doing, task: impl Future<Output = Done> + Send + 'static) {
        let handle = self.tasks.spawn(task);
        self.doing.insert(handle.id(), doing);
    }

    fn paused(&self, now: Instant) -> bool {
        self.pause_until.is_some_and(|until| until > now)
    }

    /// When the loop must look again although nothing happened.
    fn next_alarm(&self, now: Instant, draining: bool) -> Instant {
        let far = now + Duration::from_secs(1);
        let trial = self.plan.next_trial().filter(|trial| *trial > now).unwrap_or(far);
        let pause = self.pause_until.filter(|until| *until > now).unwrap_or(far);
        let look = self.plan.next_look().filter(|_| !self.polling && !draining);
        let unpaused = self.pause_until.unwrap_or(now).max(now);
        let look = look.map_or(far, |due| due.max(self.look_after).max(unpaused));
        let write =
            if self.writing || self.plan.unwritten_outcomes() == 0 { far } else { self.write_after.max(unpaused) };
        trial.min(pause).min(look).min(write).min(far)
    }

    fn observe(&mut self, now: Instant) {
        let polling = self.polling.then_some(self.polled_at);
        let paused = self.paused(now);
        self.observer.turn(&self.plan, &self.outlets, polling, paused, now);
    }

    fn ownership(&mut self, news: Ownership) {
        self.observer.ownership(&news, &self.plan);
        match news {
            Ownership::Gained { epoch, lanes, left } => {
                self.plan.gained(epoch, &lanes);
                self.plan.left_behind(&left);
                for &lane in &lanes {
                    for &handler in self.outlets.keys() {
                        self.feed.set_standing(lane, handler, Standing::Behind);
                    }
                }
                self.none_free = None;
                self.woken = true;
            }
            Ownership::Release { lanes } => {
                self.plan.leave(&lanes);
                for &lane in &lanes {
                    for &handler in self.outlets.keys() {
                        self.feed.set_standing(lane, handler, Standing::Foreign);
                    }
                }
            }
            Ownership::Mark { xid, last_seq } => self.plan.mark(xid, last_seq),
            Ownership::Lost => self.forget_lanes(),
            Ownership::NoneFree { owners } => self.none_free = Some(owners),
        }
        self.observer.owned(&self.plan);
    }

    fn report_left(&mut self) {
        let left = self.plan.take_left();
        if !left.is_empty() {
            self.observer.released(left.len());
            self.observer.owned(&self.plan);
        }
        if !left.is_empty() && self.left.send(left).is_err() {
            tracing::debug!("nobody waits for lanes that were drained");
        }
    }

    /// Found out by ourselves.
    fn lost(&mut self) {
        self.observer.lost(&self.plan);
        self.forget_lanes();
        self.observer.owned(&self.plan);
    }

    fn forget_lanes(&mut self) {
        self.plan.lost();
        self.feed.all_foreign();
    }

    /// The stream has something to say.
    fn touched(&mut self) {
        let touched = self.feed.take();
        if touched.all {
            self.plan.start_sweep();
            self.woken = true;
        }
        self.plan.touched(&touched.touches, Instant::now());
    }

    fn start_polling(&mut self, now: Instant) {
        if self.polling || self.paused(now) || self.plan.owns_none() {
            return;
        }
        let all = self.woken;
        let look = self.plan.next_look().is_some_and(|due| due <= now) && self.look_after <= now;
        if !all && !look && !self.plan.wants_more() {
            return;
        }
        self.woken = false;
        self.polling = true;
        self.polled_at = now;
        let links = Arc::clone(&self.links);
        if all {
            // What became due is made ordinary first, so that the read that follows begins below it.
            let epoch = self.plan.epoch();
            let lanes = self.plan.lanes();
            self.spawn(Doing::Poll, async move {
                let result = async { links.poller().await?.promote(epoch, &lanes, PROMOTE).await }.await;
                Done::Promoted { all, result }
            });
        } else {
            self.read(false);
        }
    }

    fn read(&mut self, all: bool) {
        let asks = self.plan.asks(all, Instant::now());
        if asks.is_empty() {
            // Without a handler there is nothing to ask, and that is all.
            self.polling = false;
            self.complete_rounds += u32::from(all && self.plan.is_idle());
            return;
        }
        let links = Arc::clone(&self.links);
        let epoch = self.plan.epoch();
        self.spawn(Doing::Poll, async move {
            let result = async { links.poller().await?.read(epoch, &asks).await }.await;
            Done::Polled { asks, all, result: result.map(|page| (Vec::new(), page)) }
        });
    }

    fn start_sending(&mut self, now: Instant) {
        if self.paused(now) {
            return;
        }
        while let Some(batch) = self.plan.next_batch(now) {
            let Some(outlet) = self.outlets.get(&batch.handler).map(Arc::clone) else { continue };
            let (links, feed) = (Arc::clone(&self.links), Arc::clone(&self.feed));
            let metrics = Arc::clone(&self.observer.metrics);
            observe::taken(&outlet.metrics, &batch);
            let doing = Doing::Send(batch.clone());
            self.spawn(doing, async move {
                let answers = send(&outlet, &links, &feed, &metrics, &batch).await;
                Done::Sent { batch, answers }
            });
        }
    }

    fn start_writing(&mut self, now: Instant, draining: bool) {
        if self.writing || self.paused(now) {
            return;
        }
        if now < self.write_after && !draining && self.plan.unwritten_outcomes() < MANY_OUTCOMES {
            return;
        }
        let outcomes = self.plan.outcomes();
        if outcomes.is_empty() {
            return;
        }
        self.writing = true;
        self.wrote_at = now;
        let epoch = self.plan.epoch();
        let links = Arc::clone(&self.links);
        let doing = Doing::Write { epoch, outcomes: outcomes.clone() };
        self.spawn(doing, async move {
            let result = async { links.writer().await?.write(epoch, &outcomes).await }.await;
            Done::Written { epoch, outcomes, result }
        });
    }

    fn done(&mut self, done: std::result::Result<(Id, Done), tokio::task::JoinError>) -> Result<()> {
        let (id, done) = match done {
            Ok((id, done)) => (id, Some(done)),
            Err(failed) => (failed.id(), None),
        };
        let doing = self.doing.remove(&id);
        match (done, doing) {
            (Some(done), _) => self.finished(done),
            (None, Some(doing)) => {
                self.panicked(doing);
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    fn finished(&mut self, done: Done) -> Result<()> {
        match done {
            Done::Promoted { all, result } => match result {
                Ok(promoted) => {
                    // Perhaps not all that is due: look again after this read.
                    self.woken |= !promoted.is_empty();
                    self.plan.promoted(&promoted);
                    self.read(all);
                }
                Err(error) => {
                    self.observer.metrics.polls.failed_polls.inc();
                    self.polling = false;
                    self.woken = true;
                    self.database_trouble("promote due deliveries", error)?;
                }
            },
            Done::Polled { asks, all, result } => {
                self.polling = false;
                let now = Instant::now();
                self.look_after = now + now.duration_since(self.polled_at).min(LONGEST_REST);
                match result {
                    Ok((_, page)) => {
                        self.observer.polled(now.duration_since(self.polled_at), &page);
                        let empty = page.rows.is_empty();
                        let swept = self.plan.totals().swept;
                        self.plan.page(&asks, page, now);
                        self.observer.metrics.polls.swept.inc_by(self.plan.totals().swept - swept);
                        for ask in &asks {
                            self.feed.set_standing(ask.lane, ask.handler, self.plan.standing(ask.lane, ask.handler));
                        }
                        let complete =
                            all && empty && self.plan.is_idle() && !self.plan.wants_more() && !self.plan.is_sweeping();
                        self.complete_rounds = if complete { self.complete_rounds + 1 } else { 0 };
                    }
                    Err(error) => {
                        self.observer.metrics.polls.failed_polls.inc();
                        self.woken |= all;
                        self.database_trouble("poll deliveries", error)?;
                    }
                }
            }
            Done::Sent { batch, answers } => {
                let failed = answers.iter().find_map(|answer| match answer {
                    Answer::Outcome(Outcome::Unreachable(failure)) if failure.code != BEHIND => Some(failure.clone()),
                    _ => None,
                });
                if answers.iter().any(|answer| matches!(answer, Answer::NotTried)) {
                    self.pause_until = Some(Instant::now() + DATABASE_PAUSE);
                }
                self.report_refusals(&batch, &answers);
                self.count_answers(&batch, &answers);
                let changes = self.plan.answered(&batch, answers, Instant::now(), rand::rng().random());
                if let Some(outlet) = self.outlets.get(&batch.handler) {
                    outlet.metrics.breaker(changes.opened, changes.closed);
                }
                let handler = self.name(batch.handler);
                if let (true, Some(failure)) = (changes.opened, failed) {
                    tracing::warn!(handler, error = %failure, "broker or destination unreachable; deliveries wait, no attempt is spent");
                }
                if changes.closed {
                    tracing::info!(handler, "the broker is back");
                }
            }
            Done::Written { epoch, outcomes, result } => {
                self.writing = false;
                let now = Instant::now();
                self.write_after = now + now.duration_since(self.wrote_at).min(LONGEST_REST);
                match result {
                    Ok(missing) => {
                        let took = now.duration_since(self.wrote_at);
                        self.observer.written(took, &outcomes, &missing, &self.outlets);
                        for missing in &missing {
                            tracing::warn!(lane = missing.id.lane, handler = missing.id.handler, seq = missing.id.seq,
                                reason = %missing.reason, "an acknowledged delivery was not there to complete");
                        }
                        for burial in &outcomes.buried {
                            tracing::error!(handler = self.name(burial.id.handler), seq = burial.id.seq, error = %burial.failure,
                                "a delivery is dead; see: lanebridge deliveries list --state dead");
                        }
                        self.plan.written(epoch, &outcomes, &missing);
                    }
                    Err(error) if db::sqlstate(&error) == Some(FENCED) => {
                        tracing::warn!(epoch, "this epoch is fenced; its lanes belong to another bridge");
                        self.lost();
                        self.plan.remember(outcomes.acked);
                    }
                    Err(error) => {
                        self.observer.metrics.polls.failed_writes.inc();
                        self.plan.unwritten(epoch, outcomes);
                        self.database_trouble("write outcomes", error)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn name(&self, handler: i32) -> &str {
        self.outlets.get(&handler).map_or("?", |outlet| &outlet.route.handler.name)
    }

    fn count_answers(&self, batch: &Batch, answers: &[Answer]) {
        if let Some(outlet) = self.outlets.get(&batch.handler) {
            observe::answered(&outlet.metrics, batch, answers);
        }
    }

    /// One line per handler and code a minute: enough to see trouble long before a delivery is dead.
    fn report_refusals(&mut self, batch: &Batch, answers: &[Answer]) {
        for (row, answer) in batch.rows.iter().zip(answers) {
            let Answer::Outcome(Outcome::Refused(failure)) = answer else { continue };
            let key = (batch.handler, failure.code.clone());
            let now = Instant::now();
            if self.reported.get(&key).is_some_and(|last| now.duration_since(*last) < REPORT_EVERY) {
                continue;
            }
            if self.reported.len() >= REPORTED {
                self.reported.clear();
            }
            self.reported.insert(key, now);
            tracing::warn!(handler = self.name(batch.handler), seq = row.id.seq, attempts = row.attempts + 1, error = %failure,
                "a delivery was refused; it is tried again later, and its key waits");
        }
    }

    /// A bug in us must not lose a delivery or stop its lane mates: the rows count as refused, so that one that makes
    /// every attempt panic is buried in the end.
    fn panicked(&mut self, doing: Doing) {
        match doing {
            Doing::Poll => {
                self.polling = false;
                self.woken = true;
            }
            Doing::Send(batch) => {
                tracing::error!(handler = batch.handler, deliveries = batch.rows.len(), "sending a batch panicked");
                let refused = || Answer::Outcome(Outcome::Refused(Failure::new("PANIC", "the sink panicked")));
                let answers: Vec<Answer> = batch.rows.iter().map(|_| refused()).collect();
                self.count_answers(&batch, &answers);
                self.plan.answered(&batch, answers, Instant::now(), rand::rng().random());
            }
            Doing::Write { epoch, outcomes } => {
                self.writing = false;
                self.plan.unwritten(epoch, outcomes);
            }
        }
        self.pause_until = Some(Instant::now() + DATABASE_PAUSE);
    }

    /// Waits a moment after what may pass; returns what cannot.
    fn database_trouble(&mut self, what: &str, error: Error) -> Result<()> {
        if db::sqlstate(&error) == Some(FENCED) {
            self.lost();
            return Ok(());
        }
        // A login that is refused now was accepted at the start.
        if error.class() == Class::Failure {
            return Err(Error::new(what).source_is(error));
        }
        if !self.paused(Instant::now()) {
            tracing::warn!(error = %error.report(), "{what} failed; trying again");
        }
        self.pause_until = Some(Instant::now() + DATABASE_PAUSE);
        Ok(())
    }

    /// For `--once`: two full rounds in a row that found nothing and left nothing.
    fn once_is_done(&mut self, now: Instant) -> Result<Option<Ended>> {
        if let Some(owners) = &self.none_free {
            return Err(Error::new(format!(
                "every lane is owned by another bridge ({}); nothing was drained",
                owners.join(", ")
            ))
            .hint("stop it, or let it do the work"));
        }
        let open = self.plan.open_breakers();
        let since = if open.is_empty() { None } else { Some(*self.sick_since.get_or_insert(now)) };
        self.sick_since = since;
        if since.is_some_and(|since| now.duration_since(since) > ONCE_PATIENCE) {
            let names = open.iter().filter_map(|id| self.outlets.get(id)).map(|o| o.route.handler.name.as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            return Err(Error::new(format!(
                "the broker of {names} stayed unreachable for {ONCE_PATIENCE:?}; deliveries remain"
            ))
            .hint("run again when it is back; nothing is lost"));
        }
        if self.complete_rounds >= 2 && !self.writing {
            return Ok(Some(Ended::Drained));
        }
        if self.plan.is_idle() && !self.polling && !self.plan.owns_none() {
            if self.complete_rounds == 0 {
                self.plan.start_sweep();
            }
            self.woken = true;
        }
        Ok(None)
    }
}

/// Confirms rows and hands them to the sink; one answer per row, in order.
async fn send(outlet: &Outlet, links: &Links, feed: &Feed, metrics: &Metrics, batch: &Batch) -> Vec<Answer> {
    let rows = &batch.rows;
    if let Some(together) = batch.record {
        let record = async {
            let suspects = rows.iter().map(|row| (row.id, row.attempts));
            links.writer().await?.record(batch.epoch, suspects, together).await
        };
        if let Err(error) = record.await {
            tracing::warn!(error = %error.report(), "recording deliveries that may have killed a bridge failed; trying again");
            return rows.iter().map(|_| Answer::NotTried).collect();
        }
    }
    let verdicts = match confirm(outlet, links, feed, batch).await {
        Ok(verdicts) => verdicts,
        Err(error) => {
            metrics.polls.failed_confirms.inc();
            tracing::warn!(error = %error.report(), "confirming deliveries failed; trying again");
            return rows.iter().map(|_| Answer::NotTried).collect();
        }
    };
    let mut parcels = Vec::with_capacity(rows.len());
    let mut commits = Vec::with_capacity(rows.len());
    let mut answers: Vec<Option<Answer>> = Vec::with_capacity(rows.len());
    // In a batch that may hold a key several times, what follows a held one waits with it.
    let mut held = std::collections::HashSet::new();
    for (row, (verdict, committed_at)) in rows.iter().zip(verdicts) {
        let waits = row.key.is_some_and(|key| held.contains(&key));
        answers.push(match verdict {
            _ if waits => Some(Answer::Held),
            Verdict::Send(parcel) => {
                parcels.push(parcel);
                commits.push(committed_at);
                None
            }
            Verdict::Gone => Some(Answer::Gone),
            Verdict::Held => {
                held.extend(row.key);
                Some(Answer::Held)
            }
            Verdict::EventMissing => {
                held.extend(row.key);
                Some(Answer::EventMissing)
            }
        });
    }
    #[cfg(feature = "break-rules")]
    if breaks("ack-then-delete") {
        let acked = parcels.iter().map(|parcel| parcel.id).collect();
        let outcomes = Outcomes { acked, ..Outcomes::default() };
        let deleted = async { links.writer().await?.write(batch.epoch, &outcomes).await };
        deleted.await.expect("a control has a database that answers");
    }
    let outcomes = if parcels.is_empty() { Vec::new() } else { outlet.sink.send(&outlet.route, &parcels).await };
    let now = metrics.database_now();
    for ((outcome, parcel), committed_at) in outcomes.iter().zip(&parcels).zip(commits) {
        if *outcome == Outcome::Acked {
            observe::acked(&outlet.metrics, parcel.event.created_at, committed_at, now);
        }
    }
    if outcomes.contains(&Outcome::Acked) {
        outlet.metrics.last_ack.set(unix_now());
    }
    let mut outcomes = outcomes.into_iter();
    answers
        .into_iter()
        .map(|answer| match answer {
            Some(answer) => answer,
            None => match outcomes.next() {
                Some(outcome) => Answer::Outcome(outcome),
                None => Answer::Outcome(Outcome::Refused(Failure::new("NO_ANSWER", "the sink gave no answer"))),
            },
        })
        .collect()
}

/// A verdict per row, in order, and when it was committed where the stream said it. A fresh read whose payload the stream
/// brought needs no other: the poll saw the row (R1), and the log that holds it was flushed before the server sent it (R2).
async fn confirm(
    outlet: &Outlet,
    links: &Links,
    feed: &Feed,
    batch: &Batch,
) -> Result<Vec<(Verdict, Option<OffsetDateTime>)>> {
    let now = Instant::now();
    let streamed = batch.rows.iter().map(|row| {
        let (event, committed_at) = feed.event(row.id.seq, row.created_at).filter(|_| row.is_fresh(now))?;
        Some((Parcel { id: row.id, event, generation: row.generation }, committed_at))
    });
    let streamed: Vec<Option<(Parcel, OffsetDateTime)>> = streamed.collect();
    let rest: Vec<Row> =
        batch.rows.iter().zip(&streamed).filter(|(_, parcel)| parcel.is_none()).map(|(row, _)| *row).collect();
    let mut confirmed = Vec::new().into_iter();
    if !rest.is_empty() {
        let confirmer = links.confirmer().await?;
        let ordered = outlet.rules.ordered && !breaks("followers-wait");
        let verdicts = confirmer.confirm(batch.epoch, &rest, ordered, outlet.rules.blocks).await?;
        confirmed = verdicts.into_iter();
    }
    let verdict = |streamed: Option<(Parcel, OffsetDateTime)>| match streamed {
        Some((parcel, committed_at)) => Some((Verdict::Send(parcel), Some(committed_at))),
        None => confirmed.next().map(|verdict| (verdict, None)),
    };
    Ok(streamed.into_iter().filter_map(verdict).collect())
}
