//! The command line: the clap tree, logging, exit codes. Tables for people, `--json` for programs.
//!
//! Exit status: 0 done (for `run`: drained), 1 a failure while running, 2 a bad configuration or command line.

mod run;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{self, Config};
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
    /// Carry deliveries to their brokers until stopped.
    Run(run::Run),
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
        Command::Run(run) => run.run(cli.config()?).await,
    }
}

fn exit(error: &Error) -> ExitCode {
    eprintln!("lanebridge: {}", error.report());
    ExitCode::from(if error.class() == Class::Config { 2 } else { 1 })
}

/// Logs go to stderr, so that stdout stays for answers; `RUST_LOG` filters.
fn log_to_stderr(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,async_nats=warn,librdkafka=warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if json {
        log.json().flatten_event(true).init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()).init();
    }
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
fn table(columns: &[&str], rows: Vec<Vec<String>>, json: bool) -> Result<()> {
    if json {
        let objects = rows.into_iter().map(|row| {
            let fields = columns.iter().map(|c| (*c).to_owned()).zip(row.into_iter().map(serde_json::Value::from));
            serde_json::Value::Object(fields.collect())
        });
        return print(&format!("{:#}\n", serde_json::Value::Array(objects.collect())));
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    table.set_header(columns);
    table.add_rows(rows);
    print(&format!("{table}\n"))
}
