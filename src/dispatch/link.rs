//! The database sessions of dispatch: one to poll, one to confirm, one to write. Each is opened when first needed and
//! opened again after it broke; the loop's pauses are the backoff.

use std::sync::Arc;

use tokio::sync::Mutex;

use crate::completion::Writer;
use crate::db::{Client, Connector, Names, Session};
use crate::error::Result;
use crate::sources::{Confirmer, Poller};

pub(crate) struct Links {
    connector: Connector,
    names: Names,
    poller: Slot<Poller>,
    confirmer: Slot<Confirmer>,
    writer: Slot<Writer>,
}

/// A session that is open, or will be when it is next asked for.
struct Slot<T>(Mutex<Option<Arc<T>>>);

impl<T> Slot<T> {
    fn empty() -> Self {
        Self(Mutex::new(None))
    }

    async fn get(&self, is_closed: fn(&T) -> bool, open: impl Future<Output = Result<T>>) -> Result<Arc<T>> {
        // Held while it opens: whoever asks meanwhile waits for this one instead of opening a second.
        let mut slot = self.0.lock().await;
        if let Some(session) = slot.as_ref().filter(|session| !is_closed(session)) {
            return Ok(Arc::clone(session));
        }
        Ok(Arc::clone(slot.insert(Arc::new(open.await?))))
    }
}

impl Links {
    pub(crate) fn new(connector: Connector, names: Names) -> Self {
        Self { connector, names, poller: Slot::empty(), confirmer: Slot::empty(), writer: Slot::empty() }
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn poller(&self) -> Result<Arc<Poller>> {
        let open = async { Poller::new(self.connect("poll").await?, &self.names).await };
        self.poller.get(Poller::is_closed, open).await
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn confirmer(&self) -> Result<Arc<Confirmer>> {
        let open = async { Confirmer::new(self.connect("confirm").await?, &self.names).await };
        self.confirmer.get(Confirmer::is_closed, open).await
    }

    /// # Errors
    /// When the session cannot be opened.
    pub(crate) async fn writer(&self) -> Result<Arc<Writer>> {
        let open = async { Writer::new(self.connect("complete").await?, &self.names).await };
        self.writer.get(Writer::is_closed, open).await
    }

    async fn connect(&self, purpose: &str) -> Result<Client> {
        self.connector.connect(purpose, Session::Poll).await
    }
}
