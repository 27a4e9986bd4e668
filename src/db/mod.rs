//! Postgres: connections with deadlines, TLS, migrations, and every SQL text of the bridge, one file per table family.
//!
//! I1: every call ends within its deadline; a connection that missed one is closed and never used again.
//! I2: a session is usable only on a writable primary of PostgreSQL 14 or newer with UTF-8, with every setting our
//! statements rely on set by us, whatever the role or the database defaults are.
//! I3: no password, no row contents and no payload appear in an error.
//! SQL is written here, in `migrations/` and in `publish.rs`, nowhere else.

mod client;
mod connect;
pub(crate) mod deliveries;
mod failure;
mod migrate;
mod names;
pub(crate) mod operate;
mod replication;
mod session;
mod tls;

pub use client::{Client, Prepared, Transaction};
pub use connect::Connector;
pub(crate) use failure::FENCED;
pub use failure::sqlstate;
pub use migrate::{MIGRATIONS, Migration, State, Status, migrate, print, require_current, status};
pub use names::Names;
pub(crate) use replication::{Frame, Replication};
pub use session::Session;

/// The server that `scripts/services up` starts, as a configuration.
#[cfg(test)]
pub(crate) fn test_postgres() -> crate::config::Postgres {
    use std::time::Duration;
    let url = std::env::var("LB_POSTGRES_URL")
        .expect("LB_POSTGRES_URL is not set; run scripts/services up and load target/services/env");
    crate::config::Postgres {
        url: crate::config::Secret::new(url),
        direct_url: None,
        password_file: None,
        schema: "lanebridge".into(),
        table_prefix: String::new(),
        connect_timeout: Duration::from_secs(5),
        statement_timeout: Duration::from_secs(10),
        max_payload_bytes: 1 << 20,
    }
}
