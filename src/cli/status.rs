//! `status` and `lanes`.

use clap::Args;

use super::{Session, cell, print, table};
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

const BRIDGES: [&str; 7] = ["bridge", "instance", "epoch", "version", "lanes", "alive", "up_seconds"];
const HANDLERS: [&str; 8] =
    ["handler", "sink", "destination", "pending", "scheduled", "retrying", "dead", "lag_seconds"];

impl Status {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        let mut bridges = Vec::new();
        for row in session.query(operate::BRIDGES, &[]).await? {
            bridges.push(vec![
                cell(&row, 0)?,
                cell::<String>(&row, 1)?,
                cell::<i64>(&row, 2)?.to_string(),
                cell(&row, 3)?,
                cell::<i64>(&row, 4)?.to_string(),
                if cell(&row, 5)? { "yes".into() } else { "no".into() },
                cell::<i64>(&row, 6)?.to_string(),
            ]);
        }
        let mut handlers = Vec::new();
        for row in session.query(operate::HANDLERS, &[&COUNT_LIMIT]).await? {
            handlers.push(vec![
                cell(&row, 0)?,
                cell(&row, 1)?,
                cell(&row, 2)?,
                count(cell(&row, 3)?),
                count(cell(&row, 4)?),
                count(cell(&row, 5)?),
                count(cell(&row, 6)?),
                cell::<Option<f64>>(&row, 7)?.map(|lag| format!("{lag:.1}")).unwrap_or_default(),
            ]);
        }
        let strays = session.query(operate::STRAYS, &[&COUNT_LIMIT]).await?;
        let strays = |column| strays.first().map(|row| cell::<i64>(row, column)).transpose();
        let (unrouted, in_default) = (strays(0)?.unwrap_or(0), strays(1)?.unwrap_or(0));
        if self.json {
            let objects = |columns: &[&str], rows: Vec<Vec<String>>| -> Vec<serde_json::Value> {
                let object = |row: Vec<String>| {
                    columns.iter().map(|c| (*c).to_owned()).zip(row.into_iter().map(serde_json::Value::from)).collect()
                };
                rows.into_iter().map(object).collect()
            };
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
            table(&BRIDGES, bridges, false)?;
        }
        print("\n")?;
        table(&HANDLERS, handlers, false)?;
        print(&format!("\n{} events went to no handler\n", count(unrouted)))?;
        if in_default > 0 {
            print(&format!("{} events are in the default partition; see: lanebridge doctor\n", count(in_default)))?;
        }
        Ok(())
    }
}

impl Lanes {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        let mut rows: Vec<Vec<String>> = Vec::new();
        // Neighbours of one owner, taken at about one time, become one line.
        let mut last: Option<(Option<i64>, i16)> = None;
        for row in session.query(operate::LANES, &[]).await? {
            let (lane, epoch): (i16, Option<i64>) = (cell(&row, 0)?, cell(&row, 2)?);
            if let (Some((owner, first)), Some(line)) = (last, rows.last_mut())
                && owner == epoch
            {
                line[0] = format!("{first}-{lane}");
                continue;
            }
            last = Some((epoch, lane));
            rows.push(vec![
                lane.to_string(),
                cell::<Option<String>>(&row, 1)?.unwrap_or_else(|| "none".into()),
                epoch.map(|epoch| epoch.to_string()).unwrap_or_default(),
                cell::<Option<i64>>(&row, 3)?.map(|seconds| seconds.to_string()).unwrap_or_default(),
            ]);
        }
        table(&["lanes", "owner", "epoch", "held_seconds"], rows, self.json)
    }
}

fn count(n: i64) -> String {
    if n >= COUNT_LIMIT { format!("{COUNT_LIMIT}+") } else { n.to_string() }
}
