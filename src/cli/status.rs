//! `status` and `lanes`.

use clap::Args;
use serde_json::Value;

use super::{Session, cell, objects, print, table, text};
use crate::config::Config;
use crate::db::operate;
use crate::error::Result;

/// Counted up to here; beyond it stands a plus.
const COUNT_LIMIT: i64 = 100_000;

#[derive(Args)]
pub(super) struct Status {
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct Lanes {
    #[arg(long)]
    json: bool,
}

const BRIDGES: [&str; 10] = [
    "bridge",
    "instance",
    "epoch",
    "version",
    "lanes",
    "alive",
    "up_seconds",
    "source",
    "source_seconds",
    "source_note",
];
/// Columns of people's table; the note is a sentence, and comes below.
const SHOWN: usize = BRIDGES.len() - 1;
const HANDLERS: [&str; 11] = [
    "handler",
    "sink",
    "destination",
    "pending",
    "scheduled",
    "retrying",
    "blocked",
    "blocked_keys",
    "blocked_seconds",
    "dead",
    "lag_seconds",
];

impl Status {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        let mut bridges = Vec::new();
        for row in session.query(operate::BRIDGES, &[]).await? {
            bridges.push(vec![
                cell::<String>(&row, 0)?.into(),
                cell::<String>(&row, 1)?.into(),
                cell::<i64>(&row, 2)?.into(),
                cell::<String>(&row, 3)?.into(),
                cell::<i64>(&row, 4)?.into(),
                cell::<bool>(&row, 5)?.into(),
                cell::<i64>(&row, 6)?.into(),
                cell::<String>(&row, 7)?.into(),
                cell::<i64>(&row, 8)?.into(),
                cell::<Option<String>>(&row, 9)?.into(),
            ]);
        }
        let mut handlers = Vec::new();
        for row in session.query(operate::HANDLERS, &[&COUNT_LIMIT]).await? {
            let (ordinary, blocked, cut): (i64, i64, bool) = (cell(&row, 3)?, cell(&row, 8)?, cell(&row, 11)?);
            handlers.push(vec![
                cell::<String>(&row, 0)?.into(),
                cell::<String>(&row, 1)?.into(),
                cell::<String>(&row, 2)?.into(),
                at_least((ordinary - blocked).max(0), ordinary >= COUNT_LIMIT),
                count(cell(&row, 4)?),
                count(cell(&row, 5)?),
                at_least(blocked, cut),
                at_least(cell(&row, 9)?, cut),
                seconds(cell(&row, 10)?),
                count(cell(&row, 6)?),
                seconds(cell(&row, 7)?),
            ]);
        }
        let strays = session.query(operate::STRAYS, &[&COUNT_LIMIT]).await?;
        let strays = |column| strays.first().map(|row| cell::<i64>(row, column)).transpose();
        let (unrouted, in_default) = (strays(0)?.unwrap_or(0), strays(1)?.unwrap_or(0));
        if self.json {
            let answer = serde_json::json!({
                "bridges": objects(&BRIDGES, bridges),
                "handlers": objects(&HANDLERS, handlers),
                "unrouted_events": count(unrouted),
                "events_in_default_partition": count(in_default),
            });
            return print(&format!("{answer:#}\n"));
        }
        if bridges.is_empty() {
            print("no bridge is running\n")?;
        } else {
            let notes: Vec<String> = bridges.iter().filter_map(|bridge| note(bridge)).collect();
            bridges.iter_mut().for_each(|bridge| bridge.truncate(SHOWN));
            table(&BRIDGES[..SHOWN], bridges, false)?;
            print(&notes.concat())?;
        }
        print("\n")?;
        table(&HANDLERS, handlers, false)?;
        print(&format!("\n{} events went to no handler\n", text(&count(unrouted))))?;
        if in_default > 0 {
            print(&format!(
                "{} events are in the default partition; see: lanebridge doctor\n",
                text(&count(in_default))
            ))?;
        }
        Ok(())
    }
}

impl Lanes {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        let mut rows: Vec<Vec<Value>> = Vec::new();
        // Neighbours of one owner, taken at about one time, become one line.
        let mut last: Option<(Option<i64>, i16)> = None;
        for row in session.query(operate::LANES, &[]).await? {
            let (lane, epoch): (i16, Option<i64>) = (cell(&row, 0)?, cell(&row, 2)?);
            if let (Some((owner, first)), Some(line)) = (last, rows.last_mut())
                && owner == epoch
            {
                line[0] = format!("{first}-{lane}").into();
                continue;
            }
            last = Some((epoch, lane));
            rows.push(vec![
                lane.to_string().into(),
                cell::<Option<String>>(&row, 1)?.into(),
                epoch.into(),
                cell::<Option<i64>>(&row, 3)?.into(),
            ]);
        }
        table(&["lanes", "owner", "epoch", "held_seconds"], rows, self.json)
    }
}

/// Why a bridge does without the write-ahead log, as a line.
fn note(bridge: &[Value]) -> Option<String> {
    let (name, note) = (bridge.first()?.as_str()?, bridge.last()?.as_str()?);
    Some(format!("{name} polls: {note}\n"))
}

/// A number, or a text with a plus at the limit.
fn count(n: i64) -> Value {
    at_least(n, n >= COUNT_LIMIT)
}

/// A number, or where there may be more a text with a plus.
fn at_least(n: i64, more: bool) -> Value {
    if more { format!("{n}+").into() } else { n.into() }
}

/// To a tenth.
fn seconds(age: Option<f64>) -> Value {
    age.map(|age| (age * 10.0).round() / 10.0).into()
}
