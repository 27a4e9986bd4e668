//! A sink in memory for tests: it answers by script, remembers all it was given, and holds answers on demand.
//!
//! Clones share one state, so a test keeps a clone while the bridge owns the sink. It acks what no script speaks of.
//! I1: it watches its giver: two unanswered parcels of one (handler, key) are a violation of R3, kept for the test.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{Finding, KeyWindow, Route};
use crate::config::Order;
use crate::delivery::{Outcome, Parcel};
use crate::error::{Error, Result};

type Answerer = Box<dyn Fn(&Route, &Parcel) -> Outcome + Send + Sync>;

#[derive(Clone)]
pub struct Scripted {
    state: Arc<Mutex<State>>,
    /// Bumped at every change that a waiter may wait for.
    changed: watch::Sender<u64>,
}

/// One parcel as it was given.
#[derive(Clone, Debug)]
pub struct Given {
    pub handler: String,
    pub parcel: Parcel,
    /// Counts calls of `send`, from 0.
    pub batch: usize,
}

struct State {
    key_window: KeyWindow,
    /// By handler and event id; each answer serves one send.
    script: HashMap<(String, String), VecDeque<Outcome>>,
    otherwise: Answerer,
    held: HashSet<String>,
    /// The next answers are cut to this length, once.
    cut: Option<usize>,
    findings: Vec<Finding>,
    unreachable: bool,
    given: Vec<Given>,
    batches: usize,
    /// (handler, key) of parcels without an answer.
    open: Vec<(String, String)>,
    violations: Vec<String>,
}

impl Default for Scripted {
    fn default() -> Self {
        Self::new(KeyWindow::One)
    }
}

impl Scripted {
    pub fn new(key_window: KeyWindow) -> Self {
        let state = State {
            key_window,
            script: HashMap::new(),
            otherwise: Box::new(|_, _| Outcome::Acked),
            held: HashSet::new(),
            cut: None,
            findings: Vec::new(),
            unreachable: false,
            given: Vec::new(),
            batches: 0,
            open: Vec::new(),
            violations: Vec::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), changed: watch::Sender::new(0) }
    }

    /// The next sends of event `id` to `handler` get these answers, one each, after those scripted before.
    pub fn script(&self, handler: &str, id: &str, outcomes: impl IntoIterator<Item = Outcome>) {
        self.state().script.entry((handler.to_owned(), id.to_owned())).or_default().extend(outcomes);
    }

    /// Answers what no script speaks of, in place of `Acked`.
    pub fn otherwise(&self, answer: impl Fn(&Route, &Parcel) -> Outcome + Send + Sync + 'static) {
        self.state().otherwise = Box::new(answer);
    }

    /// Lets no `send` of `handler` end until [`Scripted::release`]; what it is given is remembered all the same.
    pub fn hold(&self, handler: &str) {
        self.state().held.insert(handler.to_owned());
    }

    /// Answers are taken from the script now, not when the parcels came.
    pub fn release(&self, handler: &str) {
        self.state().held.remove(handler);
        self.bump();
    }

    /// The next `send` answers only its first `answers` parcels, as a defective sink would.
    pub fn cut_next(&self, answers: usize) {
        self.state().cut = Some(answers);
    }

    /// What `check` says from now on.
    pub fn find(&self, findings: Vec<Finding>) {
        self.state().findings = findings;
    }

    /// Whether `check` fails as if the broker were down.
    pub fn unreachable(&self, unreachable: bool) {
        self.state().unreachable = unreachable;
    }

    /// Everything given so far, in order.
    pub fn given(&self) -> Vec<Given> {
        self.state().given.clone()
    }

    /// Waits until `count` parcels were given in all.
    pub async fn given_at_least(&self, count: usize) -> Vec<Given> {
        let mut changed = self.changed.subscribe();
        loop {
            let given = self.given();
            if given.len() >= count {
                return given;
            }
            // The sender lives in `self`.
            changed.changed().await.unwrap_or_default();
        }
    }

    /// Sentences about parcels that were given while an earlier one of their key had no answer; empty when R3 held.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    pub(super) fn check(&self, _routes: &[Route]) -> Result<Vec<Finding>> {
        let state = self.state();
        if state.unreachable {
            return Err(Error::transient("ask the scripted sink"));
        }
        Ok(state.findings.clone())
    }

    pub(super) fn key_window(&self) -> KeyWindow {
        self.state().key_window
    }

    pub(super) async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let handler = route.handler.name.as_str();
        let mut changed = self.changed.subscribe();
        let _open = self.take_in(route, parcels);
        self.bump();
        while self.state().held.contains(handler) {
            // The sender lives in `self`.
            changed.changed().await.unwrap_or_default();
        }
        let mut state = self.state();
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(parcels.len());
        for parcel in parcels {
            let slot = (handler.to_owned(), parcel.event.id.clone());
            let scripted = state.script.get_mut(&slot).and_then(VecDeque::pop_front);
            outcomes.push(scripted.unwrap_or_else(|| (state.otherwise)(route, parcel)));
        }
        outcomes.truncate(state.cut.take().unwrap_or(usize::MAX));
        outcomes
    }

    fn take_in(&self, route: &Route, parcels: &[Parcel]) -> Open<'_> {
        let handler = &route.handler.name;
        let mut state = self.state();
        let batch = state.batches;
        state.batches += 1;
        let mut keys: Vec<(String, String)> = Vec::new();
        for parcel in parcels {
            state.given.push(Given { handler: handler.clone(), parcel: parcel.clone(), batch });
            let Some(key) = parcel.event.key.as_ref().filter(|_| route.handler.order == Order::Key) else { continue };
            let key = (handler.clone(), key.clone());
            let in_batch = state.key_window == KeyWindow::One && keys.contains(&key);
            if in_batch || state.open.contains(&key) {
                state.violations.push(format!("event {} came while its key was open: {key:?}", parcel.event.id));
            }
            keys.push(key);
        }
        state.open.extend(keys.iter().cloned());
        Open { sink: self, keys }
    }

    fn bump(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes its keys when the `send` ends or is dropped.
struct Open<'a> {
    sink: &'a Scripted,
    keys: Vec<(String, String)>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut state = self.sink.state();
        for key in &self.keys {
            if let Some(at) = state.open.iter().position(|open| open == key) {
                state.open.swap_remove(at);
            }
        }
    }
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scripted")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parcel, route};
    use super::*;
    use crate::config::Format;
    use crate::delivery::Failure;

    fn to() -> Route {
        route("h", "t", Format::CloudEvents)
    }

    #[tokio::test]
    async fn a_script_is_followed_by_position_and_then_ends_in_acks() {
        let sink = Scripted::default();
        let refused = Outcome::Refused(Failure::new("X", "later"));
        sink.script("h", "e2", [refused.clone()]);
        let parcels = [parcel(1, Some("a")), parcel(2, Some("b"))];
        assert_eq!(sink.send(&to(), &parcels).await, [Outcome::Acked, refused.clone()]);
        assert_eq!(sink.send(&to(), &parcels).await, [Outcome::Acked, Outcome::Acked]);
        sink.otherwise(move |_, _| refused.clone());
        assert!(matches!(sink.send(&to(), &parcels[..1]).await[..], [Outcome::Refused(_)]));
        let given: Vec<_> = sink.given().iter().map(|given| (given.parcel.id.seq, given.batch)).collect();
        assert_eq!(given, [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]);
        assert!(sink.violations().is_empty());
    }

    #[tokio::test]
    async fn a_held_answer_waits_for_its_release_and_a_second_of_its_key_is_a_violation() {
        let sink = Scripted::default();
        sink.hold("h");
        let held = tokio::spawn({
            let sink = sink.clone();
            async move { sink.send(&to(), &[parcel(1, Some("a"))]).await }
        });
        sink.given_at_least(1).await;
        assert!(!held.is_finished());
        let other = route("other", "t", Format::CloudEvents);
        assert_eq!(sink.send(&other, &[parcel(1, Some("a"))]).await, [Outcome::Acked]);
        assert!(sink.violations().is_empty());
        let second = tokio::spawn({
            let sink = sink.clone();
            async move { sink.send(&to(), &[parcel(2, Some("a"))]).await }
        });
        sink.given_at_least(3).await;
        assert_eq!(sink.violations().len(), 1);
        sink.release("h");
        assert_eq!(held.await.unwrap(), [Outcome::Acked]);
        assert_eq!(second.await.unwrap(), [Outcome::Acked]);
    }

    #[tokio::test]
    async fn a_cut_answer_is_filled_with_refusals_by_the_sink() {
        let scripted = Scripted::new(KeyWindow::Batch);
        scripted.cut_next(1);
        let sink = super::super::Sink::Scripted(scripted.clone());
        let outcomes = sink.send(&to(), &[parcel(1, Some("a")), parcel(2, Some("a"))]).await;
        assert!(matches!(&outcomes[..], [Outcome::Acked, Outcome::Refused(f)] if f.code == "NO_ANSWER"));
        assert!(scripted.violations().is_empty());
    }
}
