//! `run` and `migrate`.

use std::time::{Duration, Instant};

use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::bridge;
use crate::config::Config;
use crate::db::{self, Names};
use crate::error::{Context, Result};
use crate::http;

/// A signal that comes again within this time is the same one: some supervisors signal the process and then its group.
const SAME_SIGNAL: Duration = Duration::from_millis(250);

#[derive(Args)]
pub(super) struct Run {
    /// Drain what is due, then exit.
    #[arg(long)]
    once: bool,
    /// Leave the schema alone; refuse one that does not fit.
    #[arg(long)]
    no_migrate: bool,
}

#[derive(Args)]
pub(super) struct Migrate {
    /// Print the whole schema as one SQL script, for a migration tool of your own.
    #[arg(long, conflicts_with = "status")]
    print: bool,
    /// Show which migrations are applied.
    #[arg(long)]
    status: bool,
    /// For programs (with --status).
    #[arg(long, requires = "status")]
    json: bool,
}

impl Run {
    pub(super) async fn run(&self, config: Config) -> Result<()> {
        let stop = CancellationToken::new();
        watch_signals(stop.clone())?;
        let signs = bridge::Signs::new(&config);
        // One that only drains is gone before anybody asks, and must not need the port of one that runs.
        if let (Some(address), false) = (config.http.listen, self.once) {
            let bridge::Signs { metrics, health } = signs.clone();
            let site = http::Site { metrics, health, allowed_hosts: config.http.allowed_hosts.clone() };
            let address = http::start(address, site)?;
            tracing::info!(%address, "HTTP: /metrics, /healthz, /readyz");
        }
        bridge::run(config, bridge::Options { once: self.once, migrate: !self.no_migrate }, signs, stop).await
    }
}

impl Migrate {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let names = Names::new(&config.postgres);
        if self.print {
            super::print(&db::print(&names, db::MIGRATIONS))?;
            return Ok(());
        }
        let mut session = super::connect(config, "migrate").await?;
        if self.status {
            let status = db::status(&session, &names, db::MIGRATIONS).await?;
            let rows = status.iter().map(|s| vec![s.version.into(), s.name.as_str().into(), s.state.as_str().into()]);
            return super::table(&["version", "name", "state"], rows.collect(), self.json);
        }
        let applied = db::migrate(&mut session, &names, db::MIGRATIONS).await?;
        for migration in &applied {
            super::print(&format!("applied {} {}\n", migration.version, migration.name))?;
        }
        if applied.is_empty() {
            super::print("the schema is current\n")?;
        }
        bridge::register(config, &session, &names).await?;
        Ok(())
    }
}

/// SIGTERM and SIGINT drain; a second one ends the process at once.
fn watch_signals(stop: CancellationToken) -> Result<()> {
    let mut term = signal(SignalKind::terminate()).context(|| "listen for SIGTERM".into())?;
    let mut int = signal(SignalKind::interrupt()).context(|| "listen for SIGINT".into())?;
    tokio::spawn(async move {
        either(&mut term, &mut int).await;
        stop.cancel();
        let first = Instant::now();
        loop {
            either(&mut term, &mut int).await;
            if first.elapsed() >= SAME_SIGNAL {
                break;
            }
        }
        tracing::warn!("a second signal: stopping at once; what is in flight may be sent again");
        std::process::exit(1);
    });
    Ok(())
}

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! {
        _ = a.recv() => {}
        _ = b.recv() => {}
    }
}
