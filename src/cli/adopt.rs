//! `adopt`: a copy of a database, or one that was moved, becomes an installation of its own (H33).

use clap::Args;
use serde_json::json;

use super::{Session, ask, cell, print};
use crate::config::Config;
use crate::db::operate;
use crate::error::{Error, Result};

#[derive(Args)]
pub(super) struct Adopt {
    /// Do it without asking.
    #[arg(long)]
    yes: bool,
    #[arg(long)]
    json: bool,
}

impl Adopt {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let session = Session::open(config).await?;
        let database = session.database().await?;
        let sinks: Vec<String> = config.sinks.keys().cloned().collect();
        if !self.json {
            print(&format!(
                "{database} gets a new installation id, and with it new dedup ids. What waits in it will be sent to the sinks of \
                 this configuration: {}\n",
                sinks.join(", ")
            ))?;
        }
        let nobody = || Error::config("adopt changes the installation and nobody can be asked").hint("--yes does it");
        if !self.yes && !ask("adopt it?", self.json)?.ok_or_else(nobody)? {
            return print("nothing was changed\n");
        }
        let rows = session.query(operate::ADOPT, &[]).await?;
        let waiting: i64 = rows.first().map(|row| cell(row, 0)).transpose()?.unwrap_or(0);
        if self.json {
            return print(&format!("{}\n", json!({ "action": "adopt", "database": database, "waiting": waiting })));
        }
        print(&format!("adopted; {waiting} deliveries wait\n"))
    }
}
