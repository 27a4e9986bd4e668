//! The narrow poll: which deliveries of the owned lanes may go, in seq order, without their payloads.

use std::time::Instant;

use tokio_postgres::types::ToSql;

use super::{Ask, Page, Row};
use crate::db::{Client, Names, Prepared, deliveries};
use crate::delivery::DeliveryId;
use crate::error::{Error, Result};

/// A session with the poll's statements prepared.
pub(crate) struct Poller {
    client: Client,
    poll: Prepared,
    promote: Prepared,
}

/// Deliveries of one lane and handler whose time had come; they are read again from `first_seq` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promoted {
    pub lane: i16,
    pub handler: i32,
    pub first_seq: i64,
}

impl Poller {
    /// # Errors
    /// When a statement does not fit the schema, or the session broke.
    pub(crate) async fn new(client: Client, names: &Names) -> Result<Self> {
        let poll = client.prepare(&names.render(deliveries::POLL)).await?;
        let promote = client.prepare(&names.render(deliveries::PROMOTE)).await?;
        Ok(Self { client, poll, promote })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Reads every ask in one snapshot, for `epoch`.
    ///
    /// # Errors
    /// Transient when the session broke or the epoch is fenced; the caller connects again and asks again.
    pub(crate) async fn read(&self, epoch: i64, asks: &[Ask]) -> Result<Page> {
        let lanes: Vec<i16> = asks.iter().map(|ask| ask.lane).collect();
        let handlers: Vec<i32> = asks.iter().map(|ask| ask.handler).collect();
        let after: Vec<i64> = asks.iter().map(|ask| ask.after).collect();
        let limits: Vec<i32> = asks.iter().map(|ask| ask.limit).collect();
        let ordered: Vec<bool> = asks.iter().map(|ask| ask.ordered).collect();
        let blocks: Vec<bool> = asks.iter().map(|ask| ask.blocks).collect();
        let looks: Vec<i32> = asks.iter().map(|ask| ask.looks).collect();
        // Before it is asked: what it sees is no older.
        let read_at = Instant::now();
        let values: [&(dyn ToSql + Sync); 8] = [&lanes, &handlers, &after, &limits, &ordered, &blocks, &epoch, &looks];
        let found = self.client.query(&self.poll, &values).await?;
        let first = found.first().ok_or_else(|| Error::new("poll: the server answered no row; one is always sent"))?;
        let ended_below = get(first, 0)?;
        if !get::<bool>(first, 2)? {
            return Err(Error::transient(format!("epoch {epoch} is fenced: nothing is read for it")));
        }
        let (mut rows, mut cuts) = (Vec::with_capacity(found.len()), Vec::new());
        for row in &found {
            let Some(seq) = get::<Option<i64>>(row, 5)? else { continue };
            let id = DeliveryId { lane: get(row, 3)?, handler: get(row, 4)?, seq };
            if get(row, 11)? {
                cuts.push((id.lane, id.handler, seq - 1));
                continue;
            }
            rows.push(Row {
                id,
                key: get(row, 6)?,
                size_bytes: u32::try_from(get::<i32>(row, 7)?).unwrap_or(0),
                created_at: get(row, 8)?,
                attempts: get(row, 9)?,
                generation: get(row, 10)?,
                read_at: Some(read_at),
                written: u64::try_from(get::<i64>(row, 1)?).unwrap_or(u64::MAX),
            });
        }
        Ok(Page { rows, cuts, ended_below })
    }

    /// Makes due deliveries of `lanes` ordinary again, at most `limit` at a time.
    ///
    /// # Errors
    /// SQLSTATE LB001 when `epoch` is fenced; transient when the session broke.
    pub(crate) async fn promote(&self, epoch: i64, lanes: &[i16], limit: i32) -> Result<Vec<Promoted>> {
        let rows = self.client.query(&self.promote, &[&epoch, &lanes, &limit]).await?;
        rows.iter()
            .map(|row| Ok(Promoted { lane: get(row, 0)?, handler: get(row, 1)?, first_seq: get(row, 2)? }))
            .collect()
    }
}

fn get<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a tokio_postgres::Row, column: usize) -> Result<T> {
    row.try_get(column).map_err(|source| Error::new("read a row of the poll").source_is(source))
}
