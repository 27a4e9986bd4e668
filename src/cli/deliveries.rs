//! `deliveries`: list and show; what changes them is in `operate`.

use clap::{Args, Subcommand};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio_postgres::Row;

use super::operate::{Bury, Requeue, Skip};
use super::{Session, cell, objects, print, table, text};
use crate::config::Config;
use crate::db::operate;
use crate::error::{Error, Result};

#[derive(Args)]
pub(super) struct Deliveries {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Deliveries that are not completed, oldest first, a page at a time.
    List(List),
    /// One delivery with its attempts.
    Show(Show),
    /// Give dead deliveries another chance, in order, and try retrying ones now.
    Requeue(Requeue),
    /// Stop trying: retrying, scheduled and, without a bridge, pending deliveries become dead.
    Bury(Bury),
    /// Let the key go on: deliveries are gone for good, and their followers come in order.
    Skip(Skip),
}

#[derive(Args)]
struct List {
    #[arg(long, value_parser = ["pending", "scheduled", "retrying", "blocked", "dead"])]
    state: Option<String>,
    #[arg(long)]
    handler: Option<String>,
    #[arg(long)]
    key: Option<String>,
    #[arg(long)]
    event_id: Option<String>,
    #[arg(long = "type")]
    kind: Option<String>,
    #[arg(long, default_value_t = 50)]
    limit: u16,
    /// Go on after this one: SEQ:HANDLER, as the last line says.
    #[arg(long, value_name = "SEQ:HANDLER")]
    after: Option<String>,
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Show {
    handler: String,
    seq: i64,
    /// The payload too, as text where it is UTF-8.
    #[arg(long)]
    payload: bool,
    #[arg(long)]
    json: bool,
}

const COLUMNS: [&str; 10] =
    ["seq", "handler", "state", "event_id", "type", "key", "attempts", "due_at", "published_at", "last_error"];

/// Positions in [`COLUMNS`] of what a table for people shows.
const FOR_PEOPLE: [usize; 8] = [0, 1, 2, 4, 5, 6, 7, 9];

/// A name that no handler has is a typo, not an empty answer.
pub(super) async fn known(session: &Session, handler: &str) -> Result<()> {
    let rows = session.query(operate::HANDLER_NAMES, &[]).await?;
    let names = rows.iter().map(|row| cell::<String>(row, 0)).collect::<Result<Vec<_>>>()?;
    if names.iter().any(|name| name == handler) {
        return Ok(());
    }
    Err(Error::config(format!("unknown handler \"{handler}\"")).hint(format!("there are: {}", names.join(", "))))
}

impl Deliveries {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        match &self.command {
            Command::List(list) => list.run(&session).await,
            Command::Show(show) => show.run(&session).await,
            Command::Requeue(requeue) => requeue.run(config, &session).await,
            Command::Bury(bury) => bury.run(config, &session).await,
            Command::Skip(skip) => skip.run(config, &session).await,
        }
    }
}

impl List {
    async fn run(&self, session: &Session) -> Result<()> {
        if let Some(handler) = &self.handler {
            known(session, handler).await?;
        }
        let (seq, handler) = match &self.after {
            None => (None, None),
            Some(after) => {
                let (seq, handler) = after.split_once(':').unwrap_or((after, ""));
                let seq: i64 = seq.parse().map_err(|_| {
                    Error::config(format!("--after {after} does not begin with a number")).hint("use SEQ:HANDLER")
                })?;
                (Some(seq), Some(handler.to_owned()))
            }
        };
        let rows = session
            .query(
                operate::LIST,
                &[
                    &self.handler,
                    &self.state,
                    &self.key,
                    &self.event_id,
                    &self.kind,
                    &i64::from(self.limit),
                    &None::<i64>,
                    &seq,
                    &handler,
                ],
            )
            .await?;
        let lines = rows.iter().map(line).collect::<Result<Vec<_>>>()?;
        let full = lines.len() == usize::from(self.limit);
        let next = lines.last().filter(|_| full).map(|last| format!("{}:{}", text(&last[0]), text(&last[1])));
        if self.json {
            return table(&COLUMNS, lines, true);
        }
        // What fits a terminal; `show` has the rest.
        let some = |row: Vec<Value>| FOR_PEOPLE.iter().map(|at| row[*at].clone()).collect();
        let names: Vec<&str> = FOR_PEOPLE.iter().map(|at| COLUMNS[*at]).collect();
        table(&names, lines.into_iter().map(some).collect(), false)?;
        match next {
            Some(next) => print(&format!("more: --after {next}\n")),
            None => Ok(()),
        }
    }
}

impl Show {
    async fn run(&self, session: &Session) -> Result<()> {
        known(session, &self.handler).await?;
        let none = None::<String>;
        let handler = Some(&self.handler);
        let rows = session
            .query(operate::LIST, &[&handler, &none, &none, &none, &none, &1_i64, &Some(self.seq), &None::<i64>, &none])
            .await?;
        let Some(row) = rows.first() else {
            return Err(Error::new(format!("no delivery of event {} to {} is left", self.seq, self.handler))
                .hint("it may be completed already; completed deliveries are not kept"));
        };
        let attempts = session.query(operate::ATTEMPTS, &[&self.handler, &self.seq]).await?;
        let attempts = attempts
            .iter()
            .map(|row| {
                Ok(vec![
                    cell::<i32>(row, 0)?.into(),
                    moment(cell(row, 1)?).into(),
                    cell::<String>(row, 2)?.into(),
                    cell::<String>(row, 3)?.into(),
                    cell::<String>(row, 4)?.into(),
                ])
            })
            .collect::<Result<Vec<_>>>()?;
        let payload = match self.payload {
            false => None,
            true => {
                let rows = session.query(operate::PAYLOAD, &[&self.seq]).await?;
                let bytes: Option<Vec<u8>> = rows.first().map(|row| cell(row, 0)).transpose()?;
                bytes.map(|bytes| String::from_utf8(bytes).unwrap_or_else(|e| format!("{:02x?}", e.as_bytes())))
            }
        };
        let line = line(row)?;
        let columns = ["attempt", "at", "outcome", "code", "error"];
        if self.json {
            let mut object: serde_json::Map<String, Value> =
                COLUMNS.iter().map(|c| (*c).to_owned()).zip(line).collect();
            object.insert("attempt_history".into(), objects(&columns, attempts).into());
            if let Some(payload) = payload {
                object.insert("payload".into(), payload.into());
            }
            return print(&format!("{:#}\n", Value::Object(object)));
        }
        for (name, value) in COLUMNS.iter().zip(&line) {
            print(&format!("{name:<14}{}\n", text(value)))?;
        }
        if !attempts.is_empty() {
            print("\n")?;
            table(&columns, attempts, false)?;
        }
        match payload {
            Some(payload) => print(&format!("\n{payload}\n")),
            None => Ok(()),
        }
    }
}

/// A row of [`operate::LIST`], in the order of [`COLUMNS`].
fn line(row: &Row) -> Result<Vec<Value>> {
    let code: Option<String> = cell(row, 9)?;
    let error: Option<String> = cell(row, 10)?;
    Ok(vec![
        cell::<i64>(row, 0)?.into(),
        cell::<String>(row, 1)?.into(),
        cell::<String>(row, 2)?.into(),
        cell::<Option<String>>(row, 3)?.into(),
        cell::<Option<String>>(row, 4)?.into(),
        cell::<Option<String>>(row, 5)?.into(),
        cell::<i32>(row, 6)?.into(),
        cell::<Option<OffsetDateTime>>(row, 7)?.map(moment).into(),
        moment(cell(row, 8)?).into(),
        code.map(|code| format!("{code}: {}", error.unwrap_or_default())).into(),
    ])
}

fn moment(at: OffsetDateTime) -> String {
    at.replace_nanosecond(0).unwrap_or(at).format(&Rfc3339).unwrap_or_default()
}
