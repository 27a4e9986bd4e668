//! The command line: the clap tree, logging, exit codes. Tables for people, `--json` for programs.
//!
//! Exit status: 0 done (for `run`: drained), 1 a failure while running, 2 a bad configuration or command line.

mod adopt;
mod deliveries;
mod doctor;
mod operate;
mod publish;
mod run;
mod status;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::Value;

use crate::config::{self, Config};
use crate::db;
use crate::error::{Class, Error, Result};

#[derive(Parser)]
#[command(name = "lanebridge", version, about, long_about = None, max_term_width = 100)]
struct Cli {
    /// The configuration file.
    #[arg(
        short,
        long,
        value_name = "FILE",
        env = "LANEBRIDGE_CONFIG",
        default_value = "lanebridge.toml",
        global = true
    )]
    config: PathBuf,
    /// Log lines as JSON, one object each.
    #[arg(long, global = true)]
    log_json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring the schema up to date.
    Migrate(run::Migrate),
    /// Check the configuration file, without connecting to anything.
    Check(doctor::Check),
    /// Connect to everything and list every problem with the line that fixes it.
    Doctor(doctor::Doctor),
    /// Carry deliveries to their brokers until stopped.
    Run(run::Run),
    /// Publish one event.
    Publish(publish::Publish),
    /// Bridges and handlers, what waits and since when.
    Status(status::Status),
    /// Who owns which lane.
    Lanes(status::Lanes),
    /// See deliveries; requeue, bury or skip them.
    Deliveries(deliveries::Deliveries),
    /// Make this database, a copy or one that was moved, the home of an installation of its own.
    Adopt(adopt::Adopt),
    /// Run example business transactions, one of which rolls back.
    Demo(publish::Demo),
}

impl Cli {
    fn config(&self) -> Result<Config> {
        config::load(&self.config)
    }
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let status = if error.use_stderr() { 2 } else { 0 };
            // Nobody reads any more when this fails.
            let _printed = error.print();
            return ExitCode::from(status);
        }
    };
    log_to_stderr(cli.log_json);
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        tracing::debug!("a TLS provider was installed before");
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit(&Error::new("start the runtime").source_is(error)),
    };
    let done = runtime.block_on(command(&cli));
    // A broker client may still sit in a blocking call; the process does not wait for it.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit(&error),
    }
}

async fn command(cli: &Cli) -> Result<()> {
    match &cli.command {
        Command::Migrate(migrate) => migrate.run(&cli.config()?).await,
        Command::Check(check) => check.run(&cli.config()?),
        Command::Doctor(doctor) => doctor.run(&cli.config()?).await,
        Command::Run(run) => run.run(cli.config()?).await,
        Command::Publish(publish) => publish.run(&cli.config()?).await,
        Command::Status(status) => status.run(&cli.config()?).await,
        Command::Lanes(lanes) => lanes.run(&cli.config()?).await,
        Command::Deliveries(deliveries) => deliveries.run(&cli.config()?).await,
        Command::Adopt(adopt) => adopt.run(&cli.config()?).await,
        Command::Demo(demo) => demo.run(&cli.config()?).await,
    }
}

fn exit(error: &Error) -> ExitCode {
    eprintln!("lanebridge: {}", error.report());
    ExitCode::from(if error.class() == Class::Config { 2 } else { 1 })
}

/// Logs go to stderr, so that stdout stays for answers; `RUST_LOG` filters. The NATS client repeats a refused login every
/// second without naming the sink; ours says it once, with the name.
fn log_to_stderr(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,async_nats=off,librdkafka=warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if json {
        log.json().flatten_event(true).init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()).init();
    }
}

/// A database session of one command, and the names its statements need.
struct Session {
    client: db::Client,
    names: db::Names,
}

impl Session {
    async fn open(config: &Config) -> Result<Self> {
        let client = connect(config, "cli").await?;
        let names = db::Names::new(&config.postgres);
        db::require_current(&client, &names, db::MIGRATIONS).await?;
        Ok(Self { client, names })
    }

    /// `app on db.example:5432`, so that nobody changes what they did not mean to.
    async fn database(&self) -> Result<String> {
        let rows = self.query("select current_database()", &[]).await?;
        let name: Option<String> = rows.first().map(|row| cell(row, 0)).transpose()?;
        Ok(format!("{} on {}", name.unwrap_or_default(), self.client.server()))
    }

    async fn query(
        &self,
        sql: &str,
        values: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<tokio_postgres::Row>> {
        self.client.query(&self.names.render(sql), values).await
    }
}

/// A session of our own. A pooler is refused first: our settings would stay on a connection that the application uses next.
async fn connect(config: &Config, purpose: &str) -> Result<db::Client> {
    let connector = db::Connector::of(config)?;
    connector.detect_pooler().await?;
    connector.connect(purpose, db::Session::Work).await
}

/// `1 handler`, `2 handlers`.
fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A column of an answer.
fn cell<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a tokio_postgres::Row, column: usize) -> Result<T> {
    row.try_get(column).map_err(|source| Error::new("read the database's answer").source_is(source))
}

/// The answer to `question` on the terminal; `None` when nobody can be asked.
fn ask(question: &str, json: bool) -> Result<Option<bool>> {
    if json || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(None);
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush().map_err(|error| Error::new("ask on stderr").source_is(error))?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(|error| Error::new("read the answer").source_is(error))?;
    Ok(Some(matches!(answer.trim(), "y" | "Y" | "yes")))
}

/// Writes to stdout; a reader that went away (a closed pipe) ends the program quietly.
fn print(text: &str) -> Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Error::new("write to stdout").source_is(error)),
        Ok(()) => Ok(()),
    }
}

/// A table that fits the terminal, or with `json` an array of objects with the same columns.
fn table(columns: &[&str], rows: Vec<Vec<Value>>, json: bool) -> Result<()> {
    if json {
        return print(&format!("{:#}\n", Value::Array(objects(columns, rows))));
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    table.set_header(columns);
    if !std::io::stdout().is_terminal() {
        table.set_content_arrangement(comfy_table::ContentArrangement::Disabled);
    }
    table.add_rows(rows.iter().map(|row| row.iter().map(text).collect::<Vec<_>>()));
    let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
    print(&lines.collect::<String>())
}

/// Rows as objects with the columns' names.
fn objects(columns: &[&str], rows: Vec<Vec<Value>>) -> Vec<Value> {
    let object = |row: Vec<Value>| Value::Object(columns.iter().map(|c| (*c).to_owned()).zip(row).collect());
    rows.into_iter().map(object).collect()
}

/// A value as people read it: no quotes, nothing for null, yes and no.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        other => other.to_string(),
    }
}
