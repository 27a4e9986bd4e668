//! `deliveries requeue|bury|skip`: what is asked for, how much that is and where, then batches until it is done.
//!
//! The rules are the database's: each batch is one call of the function of that name, a transaction with its own audit
//! row. Stopped half-way, what was done is done, and running it again does the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};

use super::{Session, ask, cell, print};
use crate::config::{self, Config, OnDead, Order, Pattern};
use crate::db::operate;
use crate::error::{Error, Result};

/// Changed in one transaction: short enough that a bridge which wants the same rows waits some tens of milliseconds.
const BATCH: i64 = 1000;
/// Counted up to here per state before anything is done; beyond it stands a plus.
const COUNT_LIMIT: i64 = 100_000;
/// From then on a line a second says how far it is.
const QUIET: Duration = Duration::from_secs(1);
/// What `count_matching` calls pending deliveries that a bridge may have in flight.
const OWNED: &str = "owned";

#[derive(Args)]
pub(super) struct Requeue {
    #[command(flatten)]
    which: Which,
    /// Every dead delivery of the handler; as --state dead.
    #[arg(long, conflicts_with_all = ["seqs", "state"])]
    all_dead: bool,
}

#[derive(Args)]
pub(super) struct Bury {
    #[command(flatten)]
    which: Which,
}

#[derive(Args)]
pub(super) struct Skip {
    #[command(flatten)]
    which: Which,
}

/// Which deliveries, and how to go about it. What is given narrows together.
#[derive(Args)]
struct Which {
    handler: String,
    seqs: Vec<i64>,
    #[arg(long, value_parser = ["dead", "retrying", "scheduled", "pending"])]
    state: Option<String>,
    /// Event types, as in a handler: order.*, invoice.>
    #[arg(long = "type", value_name = "PATTERN", value_parser = Pattern::parse)]
    kind: Option<Pattern>,
    #[arg(long)]
    key: Option<String>,
    /// The event's id.
    #[arg(long)]
    id: Option<String>,
    /// A part of the last error, as `deliveries list` shows it.
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// Published longer ago than this: 90s, 10m, 2h, 7d.
    #[arg(long, value_name = "AGE", value_parser = config::duration)]
    older_than: Option<Duration>,
    /// Published at most this long ago.
    #[arg(long, value_name = "AGE", value_parser = config::duration)]
    newer_than: Option<Duration>,
    /// At most so many.
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    limit: Option<i64>,
    /// Why, for the audit; of a buried delivery also its error.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Only say how many.
    #[arg(long)]
    dry_run: bool,
    /// Do it without asking.
    #[arg(long)]
    yes: bool,
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Requeue,
    Bury,
    Skip,
}

impl Action {
    fn name(self) -> &'static str {
        match self {
            Self::Requeue => "requeue",
            Self::Bury => "bury",
            Self::Skip => "skip",
        }
    }

    fn done(self) -> &'static str {
        match self {
            Self::Requeue => "requeued",
            Self::Bury => "buried",
            Self::Skip => "skipped",
        }
    }

    fn statement(self) -> &'static str {
        match self {
            Self::Requeue => operate::REQUEUE,
            Self::Bury => operate::BURY,
            Self::Skip => operate::SKIP,
        }
    }
}

impl Requeue {
    pub(super) async fn run(&self, config: &Config, session: &Session) -> Result<()> {
        let mut filter = self.which.filter();
        if self.all_dead {
            filter.insert("state".into(), "dead".into());
        }
        self.which.run(Action::Requeue, config, session, filter).await
    }
}

impl Bury {
    pub(super) async fn run(&self, config: &Config, session: &Session) -> Result<()> {
        self.which.run(Action::Bury, config, session, self.which.filter()).await
    }
}

impl Skip {
    pub(super) async fn run(&self, config: &Config, session: &Session) -> Result<()> {
        self.which.run(Action::Skip, config, session, self.which.filter()).await
    }
}

impl Which {
    /// As the functions take it; ages as intervals, since the database's clock counts.
    fn filter(&self) -> Map<String, Value> {
        let age = |age: Duration| format!("{} milliseconds", age.as_millis());
        let filter = [
            ("state", self.state.clone()),
            ("type", self.kind.as_ref().map(|kind| kind.as_str().to_owned())),
            ("key", self.key.clone()),
            ("id", self.id.clone()),
            ("error", self.error.clone()),
            ("older_than", self.older_than.map(age)),
            ("newer_than", self.newer_than.map(age)),
        ];
        filter.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into()))).collect()
    }

    async fn run(&self, action: Action, config: &Config, session: &Session, filter: Map<String, Value>) -> Result<()> {
        let name = action.name();
        if self.seqs.is_empty() && filter.is_empty() {
            return Err(Error::config(format!("{name} needs seqs, or a filter such as --state retrying")));
        }
        super::deliveries::known(session, &self.handler).await?;
        let seqs = (!self.seqs.is_empty()).then_some(&self.seqs);
        let filter = Value::Object(filter);
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&name, &self.handler, &seqs, &filter, &COUNT_LIMIT];
        let mut matching = BTreeMap::new();
        for row in session.query(operate::COUNT_MATCHING, &values).await? {
            matching.insert(cell::<String>(&row, 0)?, cell::<i64>(&row, 1)?);
        }
        let left_alone = matching.remove(OWNED).unwrap_or(0);
        let found: i64 = matching.values().sum();
        let database = session.database().await?;
        if !self.json {
            let states: Vec<String> = matching.iter().map(|(state, n)| format!("{} {state}", counted(*n))).collect();
            let states = if states.is_empty() { "none".to_owned() } else { states.join(", ") };
            print(&format!("to {name} for {} in {database}: {states}\n", self.handler))?;
            self.warn(action, config, left_alone)?;
        }
        let mut changed = 0;
        if !self.dry_run && found > 0 {
            if !self.confirmed(action)? {
                return print("nothing was changed\n");
            }
            // What comes back meanwhile is not done twice, unless more was found than was counted.
            let all = if matching.values().any(|n| *n >= COUNT_LIMIT) { i64::MAX } else { found };
            changed = self.batches(action, session, &filter, all.min(self.limit.unwrap_or(all)), found).await?;
        }
        if self.json {
            let answer = json!({
                "action": name, "handler": self.handler, "database": database, "dry_run": self.dry_run,
                "matching": matching, "left_alone": left_alone, "changed": changed,
            });
            return print(&format!("{answer}\n"));
        }
        if self.dry_run {
            return print("nothing was changed, as --dry-run says\n");
        }
        let given = i64::try_from(self.seqs.iter().collect::<BTreeSet<_>>().len()).unwrap_or(i64::MAX);
        let asked = if given > 0 { given.to_string() } else { counted(found) };
        print(&format!("{} {changed} of {asked}\n", action.done()))?;
        if given > found {
            let others = given - found;
            print(&format!("{others} are not there to {name}: completed, changed before, or never there\n"))?;
        }
        Ok(())
    }

    /// What a person may not expect.
    fn warn(&self, action: Action, config: &Config, left_alone: i64) -> Result<()> {
        if left_alone > 0 {
            print(&format!(
                "{} pending ones are left alone, since a bridge may have them in flight; once it is stopped they can be taken\n",
                counted(left_alone)
            ))?;
        }
        let handler = config.handlers.get(&self.handler);
        if action == Action::Requeue && handler.is_some_and(|h| h.order == Order::Key && h.on_dead == OnDead::Skip) {
            print("later events of their keys did not wait (on_dead = \"skip\"): dead ones will come after them\n")?;
        }
        Ok(())
    }

    /// Deliveries that are named one by one come back without a question; what takes away, or many, is asked for.
    fn confirmed(&self, action: Action) -> Result<bool> {
        if self.yes || (action == Action::Requeue && !self.seqs.is_empty()) {
            return Ok(true);
        }
        ask(&format!("{} them?", action.name()), self.json)?.ok_or_else(|| {
            Error::config(format!("{} changes deliveries and nobody can be asked", action.name()))
                .hint("--dry-run counts them, --yes does it")
        })
    }

    async fn batches(&self, action: Action, session: &Session, filter: &Value, most: i64, found: i64) -> Result<i64> {
        let seqs = (!self.seqs.is_empty()).then_some(&self.seqs);
        let mut changed = 0;
        let mut said = Instant::now();
        while changed < most {
            let limit = i32::try_from(BATCH.min(most - changed)).unwrap_or(i32::MAX);
            let rows = session.query(action.statement(), &[&self.handler, &seqs, filter, &limit, &self.reason]).await?;
            let batch: i64 = rows.first().map(|row| cell(row, 0)).transpose()?.unwrap_or(0);
            if batch == 0 {
                break;
            }
            changed += batch;
            if said.elapsed() >= QUIET {
                eprintln!("{} {changed} of {}", action.done(), counted(found));
                said = Instant::now();
            }
        }
        Ok(changed)
    }
}

/// With a plus at the limit.
fn counted(n: i64) -> String {
    if n >= COUNT_LIMIT { format!("{n}+") } else { n.to_string() }
}
