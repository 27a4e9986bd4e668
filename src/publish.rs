//! Publishing from Rust, in the caller's own `tokio_postgres` transaction: commit publishes, rollback leaves nothing.
//!
//! The same SQL functions serve every language; this is a thin, typed way to call them. It needs nothing of the
//! bridge: an application that only publishes turns default features off and builds no broker client.
//!
//! ```no_run
//! # async fn example(client: &mut tokio_postgres::Client) -> Result<(), tokio_postgres::Error> {
//! use lanebridge::publish::{NewEvent, Publisher};
//!
//! let publisher = Publisher::default();
//! let transaction = client.transaction().await?;
//! transaction.execute("UPDATE orders SET paid = true WHERE id = 7", &[]).await?;
//! let event = NewEvent::json("order.paid", &serde_json::json!({"order": 7})).key("order-7");
//! publisher.publish(&transaction, event).await?;
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

use serde_json::Value;
use time::OffsetDateTime;
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;

use crate::event::PayloadFormat;

/// An event to publish. Limits and rules are the database's; a refusal names the one that was broken.
#[derive(Clone, Debug)]
pub struct NewEvent {
    kind: String,
    payload: Vec<u8>,
    format: PayloadFormat,
    key: Option<String>,
    headers: Option<Value>,
    id: Option<String>,
    deliver_at: Option<OffsetDateTime>,
    handlers: Option<Vec<String>>,
}

/// What became of a published event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Position in publishing order; for an id that was published before, the position it had.
    pub seq: i64,
    /// False when the id had been published before.
    pub is_new: bool,
}

/// Calls the publish functions of one schema and table prefix.
#[derive(Clone, Debug)]
pub struct Publisher {
    one: String,
    batch: String,
}

impl NewEvent {
    /// Stored as its JSON text, `content-type: application/json`.
    pub fn json(kind: impl Into<String>, payload: &Value) -> Self {
        Self::new(kind, payload.to_string().into_bytes(), PayloadFormat::Json)
    }

    /// JSON that is text already: stored as it is, to the last space and digit. Must be JSON; `content-type` says so.
    pub fn json_text(kind: impl Into<String>, payload: impl Into<String>) -> Self {
        Self::new(kind, payload.into().into_bytes(), PayloadFormat::Json)
    }

    /// Stored as it is, `content-type: text/plain; charset=utf-8`.
    pub fn text(kind: impl Into<String>, payload: impl Into<String>) -> Self {
        Self::new(kind, payload.into().into_bytes(), PayloadFormat::Text)
    }

    /// Stored as it is, `content-type: application/octet-stream`.
    pub fn bytes(kind: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        Self::new(kind, payload.into(), PayloadFormat::Bytes)
    }

    fn new(kind: impl Into<String>, payload: Vec<u8>, format: PayloadFormat) -> Self {
        let kind = kind.into();
        Self { kind, payload, format, key: None, headers: None, id: None, deliver_at: None, handlers: None }
    }

    /// Events of one key arrive in the order of their commits. Publishing a key waits for other open transactions
    /// that published it.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header; a second one of the same name replaces the first. `content-type` overrides the payload's.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let headers = self.headers.get_or_insert_with(|| Value::Object(serde_json::Map::new()));
        if let Value::Object(map) = headers {
            map.insert(name.into(), Value::String(value.into()));
        }
        self
    }

    /// Makes publishing idempotent: a second event of this id is not stored again.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Not delivered before this time, by the database's clock; later events of its key wait behind it.
    pub fn deliver_at(mut self, at: OffsetDateTime) -> Self {
        self.deliver_at = Some(at);
        self
    }

    /// Goes to these handlers, whatever their patterns say.
    pub fn handlers(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.handlers = Some(names.into_iter().map(Into::into).collect());
        self
    }
}

impl Default for Publisher {
    /// The schema `lanebridge` without a table prefix.
    fn default() -> Self {
        Self::new("lanebridge", "")
    }
}

impl Publisher {
    /// `schema` and `table_prefix` as in the bridge's configuration.
    pub fn new(schema: &str, table_prefix: &str) -> Self {
        let function = |name: &str| format!("{}.{}", quote(schema), quote(&format!("{table_prefix}{name}")));
        Self {
            one: format!("select {}($1, $2, $3, $4, $5, $6, $7)", function("publish")),
            batch: format!(
                "select seq, is_new from {}($1, $2, $3, $4, $5, $6, $7, $8) order by ord",
                function("publish_batch")
            ),
        }
    }

    /// Publishes one event and returns its seq; for an id that was published before, the seq it had.
    ///
    /// # Errors
    /// What the database refused, as it said it: SQLSTATE `22023` for a broken rule, `40P01` for a deadlock between
    /// publishers that lock keys in opposite orders, and so on. The transaction is aborted, as after any error.
    pub async fn publish(&self, client: &impl GenericClient, event: NewEvent) -> Result<i64, tokio_postgres::Error> {
        let payload_type = match event.format {
            PayloadFormat::Json => Type::JSON,
            PayloadFormat::Text => Type::TEXT,
            PayloadFormat::Bytes => Type::BYTEA,
        };
        let bytes = event.payload;
        let text = String::from_utf8_lossy(&bytes);
        let raw = RawJson(&bytes);
        let payload: &(dyn tokio_postgres::types::ToSql + Sync) = match event.format {
            PayloadFormat::Json => &raw,
            PayloadFormat::Text => &text,
            PayloadFormat::Bytes => &bytes,
        };
        let row = client
            .query_typed(
                &self.one,
                &[
                    (&event.kind, Type::TEXT),
                    (payload, payload_type),
                    (&event.key, Type::TEXT),
                    (&event.headers, Type::JSONB),
                    (&event.id, Type::TEXT),
                    (&event.deliver_at, Type::TIMESTAMPTZ),
                    (&event.handlers, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        row.first().map(|row| row.try_get(0)).transpose().map(Option::unwrap_or_default)
    }

    /// Publishes many events in one statement, in the order given; much cheaper per event than one call each.
    ///
    /// Returns one [`Published`] per event, in the same order. Keys are locked in one fixed order, so batches cannot
    /// deadlock with each other.
    ///
    /// # Errors
    /// As [`Publisher::publish`]; the message names the position of the refused event, from 0. Nothing is stored.
    pub async fn publish_batch(
        &self,
        client: &impl GenericClient,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Published>, tokio_postgres::Error> {
        let mut columns = Columns::with_capacity(events.len());
        for event in events {
            columns.push(event);
        }
        let rows = client
            .query_typed(
                &self.batch,
                &[
                    (&columns.kinds, Type::TEXT_ARRAY),
                    (&columns.payloads, Type::BYTEA_ARRAY),
                    (&columns.formats, Type::TEXT_ARRAY),
                    (&columns.keys, Type::TEXT_ARRAY),
                    (&columns.headers, Type::JSONB_ARRAY),
                    (&columns.ids, Type::TEXT_ARRAY),
                    (&columns.deliver_at, Type::TIMESTAMPTZ_ARRAY),
                    (&columns.handlers, Type::JSONB_ARRAY),
                ],
            )
            .await?;
        rows.iter().map(|row| Ok(Published { seq: row.try_get(0)?, is_new: row.try_get(1)? })).collect()
    }
}

/// The events of a batch as the parallel arrays that SQL takes.
struct Columns {
    kinds: Vec<String>,
    payloads: Vec<Vec<u8>>,
    formats: Vec<&'static str>,
    keys: Vec<Option<String>>,
    headers: Vec<Option<Value>>,
    ids: Vec<Option<String>>,
    deliver_at: Vec<Option<OffsetDateTime>>,
    handlers: Vec<Option<Value>>,
}

impl Columns {
    fn with_capacity(n: usize) -> Self {
        Self {
            kinds: Vec::with_capacity(n),
            payloads: Vec::with_capacity(n),
            formats: Vec::with_capacity(n),
            keys: Vec::with_capacity(n),
            headers: Vec::with_capacity(n),
            ids: Vec::with_capacity(n),
            deliver_at: Vec::with_capacity(n),
            handlers: Vec::with_capacity(n),
        }
    }

    fn push(&mut self, event: NewEvent) {
        self.kinds.push(event.kind);
        self.payloads.push(event.payload);
        self.formats.push(match event.format {
            PayloadFormat::Json => "j",
            PayloadFormat::Text => "t",
            PayloadFormat::Bytes => "b",
        });
        self.keys.push(event.key);
        self.headers.push(event.headers);
        self.ids.push(event.id);
        self.deliver_at.push(event.deliver_at);
        self.handlers.push(event.handlers.map(Value::from));
    }
}

/// JSON text that is sent as it is, for the `json` type.
#[derive(Debug)]
struct RawJson<'a>(&'a [u8]);

impl tokio_postgres::types::ToSql for RawJson<'_> {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut tokio_postgres::types::private::BytesMut,
    ) -> Result<tokio_postgres::types::IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(self.0);
        Ok(tokio_postgres::types::IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }

    tokio_postgres::types::to_sql_checked!();
}

fn quote(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_whatever_they_hold() {
        let publisher = Publisher::new("we\"ird", "x_");
        assert!(publisher.one.starts_with("select \"we\"\"ird\".\"x_publish\"("), "{}", publisher.one);
    }
}
