//! Addresses of the real servers, and a database of its own for every test.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio_postgres::{Client, NoTls};

/// The value of `name`, as `scripts/services up` wrote it.
pub fn address(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set; run `scripts/services up` and load target/services/env, or run `make test`")
    })
}

/// Held for writing by a test that stops brokers, for reading by all others.
static BROKERS: tokio::sync::RwLock<()> = tokio::sync::RwLock::const_new(());

/// No test stops a broker while this is held.
pub async fn shared() -> tokio::sync::RwLockReadGuard<'static, ()> {
    BROKERS.read().await
}

/// No other test uses a broker while this is held.
pub async fn alone() -> tokio::sync::RwLockWriteGuard<'static, ()> {
    BROKERS.write().await
}

/// Host and port of the Redis server.
pub fn redis_address() -> String {
    address("LB_REDIS_URL").trim_start_matches("redis://").trim_end_matches('/').to_owned()
}

/// Unique within a machine: tests of one run, and of runs side by side, must not meet at a broker.
pub fn unique(what: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{what}_{}_{n}_{}", std::process::id(), rand::random::<u16>())
}

/// A database of its own on the server that `variable` names; dropped with [`Database::drop`].
pub struct Database {
    server: String,
    name: String,
}

impl Database {
    pub async fn create(variable: &str) -> Self {
        let database = Self { server: address(variable), name: unique("lb") };
        let admin = connect(&database.server).await;
        admin.batch_execute(&format!("create database {}", database.name)).await.unwrap();
        database
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn url(&self) -> String {
        let (server, _) = self.server.rsplit_once('/').expect("the address names a database");
        format!("{server}/{}", self.name)
    }

    /// By way of the transaction pooler, which leads to the server of `LB_POSTGRES_URL`.
    pub fn pooled_url(&self) -> String {
        let pooler = address("LB_PGBOUNCER_URL");
        let (pooler, _) = pooler.rsplit_once('/').expect("the address names a database");
        format!("{pooler}/{}", self.name)
    }

    pub async fn connect(&self) -> Client {
        connect(&self.url()).await
    }

    pub async fn drop(self) {
        let admin = connect(&self.server).await;
        let sql = format!("drop database {} with (force)", self.name);
        // Not while it has a slot, and the slot of a bridge that was killed goes when the server notices.
        eventually("the database can be dropped", Duration::from_secs(30), || async {
            match admin.batch_execute(&sql).await {
                Ok(()) => true,
                Err(error) if error.code() == Some(&tokio_postgres::error::SqlState::OBJECT_IN_USE) => false,
                Err(error) => panic!("{sql}: {error:?}"),
            }
        })
        .await;
    }
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|e| panic!("connect to {url}: {e}"));
    tokio::spawn(connection);
    client
}

/// Asks until the answer is yes; panics with `what` after `deadline`.
pub async fn eventually<F: Future<Output = bool>>(what: &str, deadline: Duration, mut ask: impl FnMut() -> F) {
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    let asked = tokio::time::timeout(deadline, async {
        loop {
            tick.tick().await;
            if ask().await {
                return;
            }
        }
    });
    asked.await.unwrap_or_else(|_| panic!("not within {deadline:?}: {what}"));
}
