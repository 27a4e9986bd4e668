//! The database sessions of dispatch: one to poll, one to confirm, one to write. Each is opened when first needed and
//! opened again after it broke; the loop's pauses are the backoff.

use std::sync::Arc;

use tokio::sync::Mutex;

use crate::completion::Writer;
use crate::db::{Connector, Names, Session};
use crate::error::Result;
use crate::sources::{Confirmer, Poller};

pub(crate) struct Links {
    connector: Connector,
    names: Names,
    poller: Mutex<Option<Arc<Poller>>>,
    confirmer: Mutex<Option<Arc<Confirmer>>>,
    writer: Mutex<Option<Arc<Writer>>>,
}

impl Links {
    pub(crate) fn new(connector: Connector, names: Names) -> Self {
        Self { connector, names, poller: Mutex::default(), confirmer: Mutex::default(), writer: Mutex::default() }
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn poller(&self) -> Result<Arc<Poller>> {
        let mut slot = self.poller.lock().await;
        if let Some(open) = slot.as_ref().filter(|open| !open.is_closed()) {
            return Ok(Arc::clone(open));
        }
        let client = self.connector.connect("poll", Session::Poll).await?;
        let open = Arc::new(Poller::new(Arc::new(client), &self.names).await?);
        Ok(Arc::clone(slot.insert(open)))
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn confirmer(&self) -> Result<Arc<Confirmer>> {
        let mut slot = self.confirmer.lock().await;
        if let Some(open) = slot.as_ref().filter(|open| !open.is_closed()) {
            return Ok(Arc::clone(open));
        }
        let client = self.connector.connect("confirm", Session::Poll).await?;
        let open = Arc::new(Confirmer::new(Arc::new(client), &self.names).await?);
        Ok(Arc::clone(slot.insert(open)))
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn writer(&self) -> Result<Arc<Writer>> {
        let mut slot = self.writer.lock().await;
        if let Some(open) = slot.as_ref().filter(|open| !open.is_closed()) {
            return Ok(Arc::clone(open));
        }
        let client = self.connector.connect("complete", Session::Poll).await?;
        let open = Arc::new(Writer::new(client, &self.names).await?);
        Ok(Arc::clone(slot.insert(open)))
    }
}
