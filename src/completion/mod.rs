//! Writes outcomes back: fenced batches, every id accounted for.
//!
//! I1: a row is deleted only for an id that a sink acknowledged. I4: a write whose answer was lost is repeated as it
//! was; it changes nothing the second time (R6). Every write begins by locking the owner's row (R4): a bridge that
//! was fenced changes nothing.

use std::time::Duration;

pub(crate) use crate::db::FENCED;
use crate::db::{Client, Names, Prepared, deliveries};
use crate::delivery::{DeliveryId, Failure};
use crate::error::{Error, Result};

/// Most ids in one statement; larger ones measured no gain.
pub(crate) const BATCH: usize = 1000;

/// A session with the writes prepared.
pub(crate) struct Writer {
    client: Client,
    complete: Prepared,
    retry: Prepared,
    bury: Prepared,
    record: Prepared,
    clear: Prepared,
}

/// What is to be written, kept until the database said that it was.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    pub acked: Vec<DeliveryId>,
    pub refused: Vec<Refusal>,
    pub buried: Vec<Burial>,
    /// Sent under record, and the process is alive: their records go.
    pub cleared: Vec<DeliveryId>,
}

/// An attempt was spent; the delivery is held for `delay`.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub id: DeliveryId,
    /// Failed attempts before this one, as the poll saw them.
    pub attempts: i16,
    pub delay: Duration,
    pub failure: Failure,
}

/// The last attempt, or a delivery that can never go.
#[derive(Clone, Debug)]
pub(crate) struct Burial {
    pub id: DeliveryId,
    /// As the poll saw it: one that was requeued since is not buried.
    pub generation: i32,
    /// `rejected` or `refused`.
    pub outcome: &'static str,
    pub failure: Failure,
}

/// An id that was acknowledged but not deleted, and the database's word why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub id: DeliveryId,
    pub reason: String,
}

impl Outcomes {
    pub(crate) fn is_empty(&self) -> bool {
        self.acked.is_empty() && self.refused.is_empty() && self.buried.is_empty() && self.cleared.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.acked.len() + self.refused.len() + self.buried.len() + self.cleared.len()
    }

    fn is_empty_but_for_cleared(&self) -> bool {
        self.acked.is_empty() && self.refused.is_empty() && self.buried.is_empty()
    }

    /// Splits off the next batch.
    pub(crate) fn next_batch(&mut self) -> Outcomes {
        fn front<T>(all: &mut Vec<T>) -> Vec<T> {
            let n = all.len().min(BATCH);
            all.drain(..n).collect()
        }
        Outcomes {
            acked: front(&mut self.acked),
            refused: front(&mut self.refused),
            buried: front(&mut self.buried),
            // Its record goes after what became of a delivery is written, or a crash in between is blamed on it.
            cleared: if self.is_empty_but_for_cleared() { front(&mut self.cleared) } else { Vec::new() },
        }
    }
}

impl Writer {
    /// # Errors
    /// When a statement does not fit the schema, or the session broke.
    pub(crate) async fn new(client: Client, names: &Names) -> Result<Self> {
        let complete = client.prepare(&names.render(deliveries::COMPLETE)).await?;
        let retry = client.prepare(&names.render(deliveries::RETRY)).await?;
        let bury = client.prepare(&names.render(deliveries::BURY)).await?;
        let record = client.prepare(&names.render(deliveries::RECORD)).await?;
        let clear = client.prepare(&names.render(deliveries::CLEAR)).await?;
        Ok(Self { client, complete, retry, bury, record, clear })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Writes a batch and returns the acknowledged ids that were not there to delete.
    ///
    /// # Errors
    /// SQLSTATE [`FENCED`]: nothing more may be written under this epoch. Transient: it is unknown what was written;
    /// the same batch is to be written again.
    pub(crate) async fn write(&self, epoch: i64, outcomes: &Outcomes) -> Result<Vec<Missing>> {
        let missing = self.complete(epoch, &outcomes.acked).await?;
        if !outcomes.refused.is_empty() {
            self.retry(epoch, &outcomes.refused).await?;
        }
        if !outcomes.buried.is_empty() {
            self.bury(epoch, &outcomes.buried).await?;
        }
        if !outcomes.cleared.is_empty() {
            let (lanes, handlers, seqs) = columns(outcomes.cleared.iter().copied());
            self.client.query(&self.clear, &[&epoch, &lanes, &handlers, &seqs]).await?;
        }
        Ok(missing)
    }

    /// Says that these are about to be sent, `together`; each with its attempts so far.
    ///
    /// # Errors
    /// As [`Self::write`]; they are not to be sent then.
    pub(crate) async fn record(
        &self,
        epoch: i64,
        suspects: impl Iterator<Item = (DeliveryId, i16)>,
        together: usize,
    ) -> Result<()> {
        let together = i32::try_from(together).unwrap_or(i32::MAX);
        let (ids, attempts): (Vec<DeliveryId>, Vec<i16>) = suspects.unzip();
        let (lanes, handlers, seqs) = columns(ids.into_iter());
        self.client.query(&self.record, &[&epoch, &lanes, &handlers, &seqs, &attempts, &together]).await?;
        Ok(())
    }

    async fn complete(&self, epoch: i64, acked: &[DeliveryId]) -> Result<Vec<Missing>> {
        if acked.is_empty() {
            return Ok(Vec::new());
        }
        let (lanes, handlers, seqs) = columns(acked.iter().copied());
        let rows = self.client.query(&self.complete, &[&epoch, &lanes, &handlers, &seqs]).await?;
        rows.iter()
            .map(|row| {
                let broken = |source| Error::new("read the answer of a completion").source_is(source);
                let ord: i32 = row.try_get(0).map_err(broken)?;
                let reason: String = row.try_get(1).map_err(broken)?;
                let at = usize::try_from(ord - 1).ok().and_then(|at| acked.get(at));
                let id =
                    *at.ok_or_else(|| Error::new(format!("completion answered position {ord} of {}", acked.len())))?;
                Ok(Missing { id, reason })
            })
            .collect()
    }

    async fn retry(&self, epoch: i64, refused: &[Refusal]) -> Result<()> {
        let (lanes, handlers, seqs) = columns(refused.iter().map(|r| r.id));
        let attempts: Vec<i16> = refused.iter().map(|r| r.attempts).collect();
        let delays: Vec<i64> = refused.iter().map(|r| i64::try_from(r.delay.as_millis()).unwrap_or(i64::MAX)).collect();
        let codes: Vec<&str> = refused.iter().map(|r| r.failure.code.as_str()).collect();
        let errors: Vec<&str> = refused.iter().map(|r| r.failure.text()).collect();
        self.client
            .query(&self.retry, &[&epoch, &lanes, &handlers, &seqs, &attempts, &delays, &codes, &errors])
            .await?;
        Ok(())
    }

    async fn bury(&self, epoch: i64, buried: &[Burial]) -> Result<()> {
        let (lanes, handlers, seqs) = columns(buried.iter().map(|b| b.id));
        let generations: Vec<i32> = buried.iter().map(|b| b.generation).collect();
        let outcomes: Vec<&str> = buried.iter().map(|b| b.outcome).collect();
        let codes: Vec<&str> = buried.iter().map(|b| b.failure.code.as_str()).collect();
        let errors: Vec<&str> = buried.iter().map(|b| b.failure.text()).collect();
        self.client
            .query(&self.bury, &[&epoch, &lanes, &handlers, &seqs, &generations, &outcomes, &codes, &errors])
            .await?;
        Ok(())
    }
}

/// Ids as the three parallel arrays that SQL takes, of one length.
fn columns(ids: impl Iterator<Item = DeliveryId>) -> (Vec<i16>, Vec<i32>, Vec<i64>) {
    let mut out = (Vec::new(), Vec::new(), Vec::new());
    for id in ids {
        out.0.push(id.lane);
        out.1.push(id.handler);
        out.2.push(id.seq);
    }
    out
}
