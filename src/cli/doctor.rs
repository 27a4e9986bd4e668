//! `check` reads the file only; `doctor` connects to everything and names the line that fixes each problem.

use clap::Args;

use super::{cell, counted, print, table};
use crate::bridge;
use crate::config::{self, Config, SourceKind};
use crate::db::{self, Client, Connector, Names, Session, operate};
use crate::error::{Error, Result};
use crate::sinks::Severity;
use crate::sources::wal;

/// Partitions are made three days ahead; a day less is a sign that nobody makes them.
const DAYS_AHEAD: i32 = 2;

/// SQLSTATE of a missing privilege.
const FORBIDDEN: &str = "42501";

#[derive(Args)]
pub(super) struct Check {
    /// Print the effective configuration, secrets masked.
    #[arg(long)]
    print: bool,
}

#[derive(Args)]
pub(super) struct Doctor {
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(super) fn run(&self, config: &Config) -> Result<()> {
        for warning in &config.warnings {
            eprintln!("warning: {warning}");
        }
        if self.print {
            return print(&config::describe(config));
        }
        print(&format!("ok: {}, {}\n", counted(config.handlers.len(), "handler"), counted(config.sinks.len(), "sink")))
    }
}

/// What was looked at and how it is.
struct Report {
    rows: Vec<Vec<serde_json::Value>>,
    problems: usize,
}

impl Report {
    fn add(&mut self, what: &str, state: &str, detail: impl Into<String>, fix: impl Into<String>) {
        self.problems += usize::from(state == "problem");
        self.rows.push(vec![what.into(), state.into(), detail.into().into(), fix.into().into()]);
    }

    /// A failure becomes a row; the rest of the examination goes on.
    fn take<T>(&mut self, what: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let report = error.report();
                let (detail, fix) = report.split_once("; hint: ").unwrap_or((&report, ""));
                self.add(what, "problem", detail, fix);
                None
            }
        }
    }
}

impl Doctor {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let mut report = Report { rows: Vec::new(), problems: 0 };
        for warning in &config.warnings {
            let (detail, fix) = warning.split_once("; hint: ").unwrap_or((warning, ""));
            report.add("configuration", "weak", detail, fix);
        }
        let connector = Connector::of(config)?;
        // The pooler first: behind one, the settings of a session of ours would stay with the application's.
        let direct = report.take("database", connector.detect_pooler().await);
        let connected = match direct {
            Some(()) => report.take("database", connector.connect("doctor", Session::Work).await),
            None => None,
        };
        if let Some(client) = connected {
            let way = if client.is_pooled() { "taken for a pooler" } else { "sessions are our own" };
            report.add("database", "ok", format!("{}; {way}", client.server()), "");
            let names = Names::new(&config.postgres);
            let current = db::require_current(&client, &names, db::MIGRATIONS).await;
            // Without the right to look, what else is missing would come to light one by one.
            let forbidden = current.as_ref().is_err_and(|error| db::sqlstate(error) == Some(FORBIDDEN));
            if report.take("schema", current).is_some() {
                report.add("schema", "ok", "current", "");
                let granted = grants(&client, &names, &mut report).await;
                if report.take("privileges", granted) == Some(true) {
                    let examined = examine(&client, &names, config, &mut report).await;
                    report.take("schema", examined);
                }
                stream(&connector, &client, &names, config, &mut report).await;
            } else if forbidden {
                let granted = grants(&client, &names, &mut report).await;
                report.take("privileges", granted);
            }
        }
        sinks(config, &mut report).await;
        table(&["what", "state", "detail", "fix"], report.rows, self.json)?;
        match report.problems {
            0 => Ok(()),
            n => Err(Error::new(counted(n, "problem"))),
        }
    }
}

/// Whether the bridge's role may do all that it has to.
async fn grants(client: &Client, names: &Names, report: &mut Report) -> Result<bool> {
    let missing = client.query(&names.render(operate::MISSING_GRANTS), &[]).await?;
    for row in &missing {
        report.add("privileges", "problem", "the bridge's role lacks one", cell::<String>(row, 0)?);
    }
    for row in client.query(&names.render(operate::FOREIGN_OWNER), &[]).await? {
        let owner: String = cell(&row, 0)?;
        let detail = format!("\"{owner}\" owns the tables: only it may make and drop partitions");
        let fix = names.render("every day, as the owner: select {schema}.{p}ensure_partitions(3);");
        report.add("privileges", "weak", detail, fix);
    }
    Ok(missing.is_empty())
}

async fn examine(client: &Client, names: &Names, config: &Config, report: &mut Report) -> Result<()> {
    let missing = client.query(&names.render(operate::MISSING_PARTITIONS), &[&DAYS_AHEAD]).await?;
    for row in &missing {
        let fix = names.render("select {schema}.{p}ensure_partitions(3);");
        report.add("partitions", "problem", format!("none for {}", cell::<String>(row, 0)?), fix);
    }
    if missing.is_empty() {
        report.add("partitions", "ok", "made ahead", "");
    }
    for row in client.query(&names.render(operate::STRAYS), &[&1000_i64]).await? {
        let (unrouted, in_default): (i64, i64) = (cell(&row, 0)?, cell(&row, 1)?);
        if in_default > 0 {
            let fix = names.render("select {schema}.{p}ensure_partitions(3);");
            report.add("partitions", "problem", format!("{in_default} events or more in the default partition"), fix);
        }
        if unrouted > 0 {
            let fix = "compare the events of [handlers.*] with the types that are published";
            report.add("routing", "weak", format!("{unrouted} events or more went to no handler"), fix);
        }
    }
    if cell(&client.query_one(&names.render(operate::UNREADABLE), &[]).await?, 0)? {
        let detail = "some were made by hand, for no handler that exists or with a seq below 1: no bridge reads them";
        let fix = names.render(
            "delete from {schema}.{p}deliveries d where d.seq < 1 or not exists (select from {schema}.{p}handlers h where h.id = d.handler);",
        );
        report.add("deliveries", "problem", detail, fix);
    }
    for row in client.query(&names.render(operate::STRANGERS), &[]).await? {
        let (pid, user, application): (i32, String, String) = (cell(&row, 0)?, cell(&row, 1)?, cell(&row, 2)?);
        let detail =
            format!("pid {pid} ({user}, {application}) holds {} lane locks and is no bridge", cell::<i64>(&row, 3)?);
        report.add("lanes", "problem", detail, format!("select pg_terminate_backend({pid});"));
    }
    for row in client.query(&names.render(operate::OLD_TRANSACTIONS), &[]).await? {
        let (pid, user, application): (i32, String, String) = (cell(&row, 0)?, cell(&row, 1)?, cell(&row, 2)?);
        let detail =
            format!("pid {pid} ({user}, {application}) has been in a transaction for {} s", cell::<i64>(&row, 3)?);
        report.add("vacuum", "weak", detail, format!("end it, or: select pg_terminate_backend({pid});"));
    }
    let bridges = client.query(&names.render(operate::BRIDGES), &[]).await?;
    for row in &bridges {
        let (name, lanes, alive): (String, i64, bool) = (cell(row, 0)?, cell(row, 4)?, cell(row, 5)?);
        let state = if alive { "ok" } else { "weak" };
        let fix = if alive { "" } else { "its session ended without a word; the next bridge takes its lanes over" };
        report.add("bridges", state, format!("{name} owns {lanes} lanes"), fix);
    }
    if bridges.is_empty() {
        report.add("bridges", "weak", "none is running", "lanebridge run");
    }
    for row in client.query(&names.render(operate::HANDLERS), &[&1000_i64]).await? {
        let (name, dead): (String, i64) = (cell(&row, 0)?, cell(&row, 6)?);
        if !config.handlers.contains_key(&name) {
            let detail = format!("{name} is in the database but not in this configuration; its deliveries wait");
            report.add("handlers", "weak", detail, "add it, or see whether another bridge serves it");
        }
        if dead > 0 {
            let fix = format!("lanebridge deliveries list --state dead --handler {name}");
            report.add("handlers", "problem", format!("{name} has {dead} dead deliveries or more"), fix);
        }
    }
    Ok(())
}

/// Whether the write-ahead log can wake the bridge. Polling works as well, so its lack is a problem only where it was
/// asked for.
async fn stream(connector: &Connector, client: &Client, names: &Names, config: &Config, report: &mut Report) {
    if config.bridge.source == SourceKind::Poll {
        return;
    }
    if connector.is_pooled() {
        let fix = "postgres.direct_url to the server's own port, if there is a way";
        report.add("stream", "weak", "a pooler passes no stream on; the bridge polls", fix);
        return;
    }
    match wal::can_stream(connector, client, names).await {
        Ok(()) => report.add("stream", "ok", "the write-ahead log can be read", ""),
        Err(error) => {
            let text = error.report();
            let (detail, fix) = text.split_once("; hint: ").unwrap_or((&text, ""));
            let state = if config.bridge.source == SourceKind::Wal { "problem" } else { "weak" };
            report.add("stream", state, format!("{detail}; the bridge polls"), fix);
        }
    }
}

async fn sinks(config: &Config, report: &mut Report) {
    let Some(sinks) = report.take("sinks", bridge::connect_sinks(config).await) else { return };
    for (name, sink) in &sinks {
        let what = format!("sink {name}");
        // Nothing is sent, so it does not matter for whom.
        let routes = bridge::routes(config, name, &"".into());
        if let Some(findings) = report.take(&what, sink.check(&routes, config.postgres.max_payload_bytes).await) {
            if findings.is_empty() {
                let open = routes.iter().filter(|r| r.handler.destination.fixed(&r.handler.name).is_none()).count();
                let detail = match open {
                    0 => "every destination is there".to_owned(),
                    n => format!(
                        "reached; {} with a destination made from the event cannot be checked ahead",
                        counted(n, "handler")
                    ),
                };
                report.add(&what, "ok", detail, "");
            }
            for finding in findings {
                let state = if finding.severity == Severity::Weak { "weak" } else { "problem" };
                report.add(&what, state, finding.what, finding.hint);
            }
        }
    }
}
