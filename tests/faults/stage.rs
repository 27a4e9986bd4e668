//! What most fault tests begin with and end with: a migrated database, destinations, a configuration for them.

use tokio_postgres::Client;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::publishers::TRUTH;
use crate::services::{Database, shared};

/// Taken down by [`Stage::end`]; no test stops a broker while it stands.
pub struct Stage {
    pub database: Database,
    pub client: Client,
    pub destinations: Vec<Destination>,
    pub setup: Setup,
    _shared: tokio::sync::RwLockReadGuard<'static, ()>,
}

impl Stage {
    /// On the server that `LB_POSTGRES_URL` names, with the table of the truth.
    pub async fn new(destinations: impl Into<Vec<Destination>>) -> Self {
        Self::with(destinations, |setup| setup).await
    }

    /// The same with a changed configuration.
    pub async fn with(destinations: impl Into<Vec<Destination>>, change: impl FnOnce(Setup) -> Setup) -> Self {
        let guard = shared().await;
        let destinations = destinations.into();
        let database = Database::create("LB_POSTGRES_URL").await;
        let client = database.connect().await;
        client.batch_execute(TRUTH).await.unwrap();
        let setup = change(Setup::new(&database.url(), &destinations, ""));
        setup.run(&["migrate"]);
        Self { database, client, destinations, setup, _shared: guard }
    }

    pub async fn end(self) {
        for destination in &self.destinations {
            destination.remove().await;
        }
        self.database.drop().await;
    }
}
