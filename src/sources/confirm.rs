//! The last read before a send: payloads come with proof that each delivery still stands and is on disk (R1, R2).
//!
//! I2: what a sink gets was seen by an ordinary read in this very call, and its commit is flushed; a crash of the
//! server cannot take it back. I3: a delivery whose key got held meanwhile is answered [`Verdict::Held`], not sent.

use std::sync::Arc;

use super::Row;
use crate::controls::breaks;
use crate::db::{Client, Names, Prepared, deliveries};
use crate::delivery::Parcel;
use crate::error::{Error, Result};
use crate::event::{Event, Payload, PayloadFormat};

/// A session with the statement prepared; several calls at once share it as a pipeline.
pub(crate) struct Confirmer {
    client: Client,
    confirm: Prepared,
}

/// What the read said of one row.
#[derive(Debug)]
pub(crate) enum Verdict {
    Send(Parcel),
    /// Not there any more: completed by another owner, or taken away by an operator.
    Gone,
    /// It, or an earlier one of its key, is held until later.
    Held,
    /// The delivery stands but its event is not where it should be; it can never be sent.
    EventMissing,
}

impl Confirmer {
    /// # Errors
    /// When the statement does not fit the schema, or the session broke.
    pub(crate) async fn new(client: Client, names: &Names) -> Result<Self> {
        let confirm = client.prepare(&names.render(deliveries::CONFIRM)).await?;
        Ok(Self { client, confirm })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Reads `rows` of one handler again, with their payloads, and answers each in the same order; waits for their flush
    /// when it is not certain.
    ///
    /// # Errors
    /// Transient when the session broke: nothing was confirmed.
    pub(crate) async fn confirm(&self, epoch: i64, rows: &[Row], ordered: bool, blocks: bool) -> Result<Vec<Verdict>> {
        let lanes: Vec<i16> = rows.iter().map(|row| row.id.lane).collect();
        let handlers: Vec<i32> = rows.iter().map(|row| row.id.handler).collect();
        let seqs: Vec<i64> = rows.iter().map(|row| row.id.seq).collect();
        let created: Vec<time::OffsetDateTime> = rows.iter().map(|row| row.created_at).collect();
        let found =
            self.client.query(&self.confirm, &[&lanes, &handlers, &seqs, &created, &ordered, &blocks, &epoch]).await?;
        if found.is_empty() {
            return Err(Error::transient(format!("epoch {epoch} is fenced: nothing is sent under it")));
        }
        if found.len() != rows.len() {
            return Err(Error::new(format!("confirm deliveries: {} asked, {} answered", rows.len(), found.len())));
        }
        let written = rows.iter().map(|row| row.written).max().unwrap_or(0);
        let flushed = match found.first() {
            Some(first) => u64::try_from(get::<i64>(first, 0)?).unwrap_or(0),
            None => return Ok(Vec::new()),
        };
        if flushed < written && !breaks("flush") {
            self.client.query_one(deliveries::FLUSH, &[]).await?;
        }
        rows.iter().zip(&found).map(|(row, answer)| verdict(row, answer)).collect()
    }
}

fn verdict(row: &Row, answer: &tokio_postgres::Row) -> Result<Verdict> {
    let present = get::<bool>(answer, 1)?;
    if !present && !breaks("confirm") {
        return Ok(Verdict::Gone);
    }
    if get::<bool>(answer, 2)? {
        return Ok(Verdict::Held);
    }
    let Some(id) = get::<Option<String>>(answer, 4)? else { return Ok(Verdict::EventMissing) };
    let headers = match get::<Option<&str>>(answer, 7)? {
        None => Vec::new(),
        Some(text) => match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text) {
            Ok(map) => headers(map),
            Err(_) => return Ok(Verdict::EventMissing),
        },
    };
    let Some(format) = PayloadFormat::from_code(get::<i8>(answer, 8)?) else { return Ok(Verdict::EventMissing) };
    let event = Event {
        seq: row.id.seq,
        id,
        kind: get(answer, 5)?,
        key: get(answer, 6)?,
        headers,
        payload: Payload { bytes: get(answer, 9)?, format },
        created_at: get(answer, 10)?,
    };
    Ok(Verdict::Send(Parcel {
        id: row.id,
        event: Arc::new(event),
        generation: if present { get(answer, 3)? } else { row.generation },
    }))
}

/// Headers as sinks get them.
pub(super) fn headers(map: serde_json::Map<String, serde_json::Value>) -> Vec<(String, String)> {
    map.into_iter()
        .map(|(name, value)| match value {
            serde_json::Value::String(text) => (name, text),
            // Publishing refuses these; a row written by hand is carried as its JSON text.
            other => (name, other.to_string()),
        })
        .collect()
}

fn get<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a tokio_postgres::Row, column: usize) -> Result<T> {
    row.try_get(column).map_err(|source| Error::new("read a confirmed delivery").source_is(source))
}
