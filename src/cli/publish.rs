//! `publish` and `demo`: the same functions that applications call.

use std::io::Read;
use std::path::PathBuf;

use clap::Args;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{Session, print};
use crate::config::Config;
use crate::error::{Context, Error, Result};
use crate::publish::{NewEvent, Publisher};

#[derive(Args)]
pub(super) struct Publish {
    /// The event's type, e.g. order.paid.
    #[arg(value_name = "TYPE")]
    kind: String,
    /// The payload as text.
    #[arg(long, conflicts_with = "file")]
    payload: Option<String>,
    /// The payload from a file, as bytes; - is standard input.
    #[arg(long)]
    file: Option<PathBuf>,
    /// The payload is JSON: refused if it is not, stored as it is.
    #[arg(long)]
    json_payload: bool,
    #[arg(long)]
    key: Option<String>,
    /// May be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    header: Vec<String>,
    /// Makes publishing idempotent.
    #[arg(long)]
    id: Option<String>,
    /// RFC 3339, e.g. 2026-12-24T18:00:00Z.
    #[arg(long, value_name = "TIME")]
    deliver_at: Option<String>,
    /// Only to these handlers, whatever their patterns say; may be given several times.
    #[arg(long)]
    handler: Vec<String>,
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct Demo {
    /// Business transactions to run; one of them rolls back.
    #[arg(long, default_value_t = 12)]
    orders: u32,
    /// Drop the demo's table again and publish nothing.
    #[arg(long)]
    clean: bool,
}

impl Publish {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let event = self.event()?;
        let mut session = Session::open(config).await?;
        let publisher = Publisher::new(&config.postgres.schema, &config.postgres.table_prefix);
        let transaction = session.client.transaction().await?;
        let seq = publisher.publish(transaction.raw(), event).await.map_err(|error| match error.as_db_error() {
            // The function's own words; the rest of the server's answer repeats them.
            Some(answer) => Error::new(answer.message()),
            None => Error::new("publish").source_is(error),
        })?;
        transaction.commit().await?;
        if self.json { print(&format!("{{\"seq\": {seq}}}\n")) } else { print(&format!("{seq}\n")) }
    }

    fn event(&self) -> Result<NewEvent> {
        let bytes = match (&self.payload, &self.file) {
            (Some(text), _) => text.clone().into_bytes(),
            (None, Some(file)) if file.as_os_str() == "-" => {
                let mut bytes = Vec::new();
                std::io::stdin().read_to_end(&mut bytes).context(|| "read standard input".into())?;
                bytes
            }
            (None, Some(file)) => std::fs::read(file).context(|| format!("read {}", file.display()))?,
            (None, None) => {
                return Err(Error::config("publish needs a payload").hint("--payload TEXT, --file FILE or --file -"));
            }
        };
        let mut event = match (self.json_payload, String::from_utf8(bytes)) {
            (true, Ok(text)) => {
                serde_json::from_str::<serde::de::IgnoredAny>(&text)
                    .map_err(|error| Error::config("the payload is not JSON").source_is(error))?;
                NewEvent::json_text(&self.kind, text)
            }
            (true, Err(_)) => return Err(Error::config("the payload is not UTF-8, so it is not JSON")),
            (false, Ok(text)) => NewEvent::text(&self.kind, text),
            (false, Err(error)) => NewEvent::bytes(&self.kind, error.into_bytes()),
        };
        if let Some(key) = &self.key {
            event = event.key(key);
        }
        for header in &self.header {
            let (name, value) = header
                .split_once('=')
                .ok_or_else(|| Error::config(format!("--header {header} has no =")).hint("use NAME=VALUE"))?;
            event = event.header(name, value);
        }
        if let Some(id) = &self.id {
            event = event.id(id);
        }
        if let Some(at) = &self.deliver_at {
            let at = OffsetDateTime::parse(at, &Rfc3339).map_err(|error| {
                Error::config(format!("--deliver-at {at}")).source_is(error).hint("use 2026-12-24T18:00:00Z")
            })?;
            event = event.deliver_at(at);
        }
        if !self.handler.is_empty() {
            event = event.handlers(self.handler.iter());
        }
        Ok(event)
    }
}

impl Demo {
    pub(super) async fn run(&self, config: &Config) -> Result<()> {
        let mut session = Session::open(config).await?;
        if self.clean {
            session.client.batch_execute(crate::db::operate::DEMO_DROP).await?;
            return print("dropped the table lanebridge_demo_orders\n");
        }
        session.client.batch_execute(crate::db::operate::DEMO_TABLE).await?;
        let insert = session.names.render(crate::db::operate::DEMO_ORDER);
        let rolled_back = self.orders / 2 + 1;
        for n in 1..=self.orders {
            let customer = format!("customer-{}", n % 4);
            let transaction = session.client.transaction().await?;
            let row = transaction.query_one(&insert, &[&customer, &i64::from(n * 100)]).await?;
            let order: i64 = super::cell(&row, 0)?;
            if n == rolled_back {
                transaction.rollback().await?;
                print(&format!("order {order} of {customer}: rolled back, so its event must never arrive\n"))?;
            } else {
                transaction.commit().await?;
                print(&format!("order {order} of {customer}: committed with its event\n"))?;
            }
        }
        Ok(())
    }
}
