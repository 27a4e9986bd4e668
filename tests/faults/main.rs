//! Faults against real servers. Every test ends by reading the ledger: what was committed, from a table written in
//! the publishers' own transactions, against what each broker holds.

#![allow(clippy::unwrap_used, reason = "a failed test ends with the line that failed")]

mod arena;
mod bridge;
mod broker;
mod chaos;
mod consumers;
#[cfg(feature = "break-rules")]
mod controls;
mod copies;
mod crashes;
mod drain;
mod durability;
mod http;
mod injuries;
mod leases;
mod ledger;
mod logins;
mod matrix;
mod memory;
mod notify;
mod operate;
mod order;
mod outage;
mod ownership;
mod partitions;
mod proxy;
mod publishers;
mod refusals;
mod reliability;
mod server;
mod services;
mod sharing;
mod sizes;
mod stage;
mod trouble;
mod versions;
mod wal;
mod wal_costs;
mod wal_ledger;
mod wal_refusals;
mod wire;
