//! The contract against real servers, one module per subject. Every test is named after the rule that it proves, and
//! runs on PostgreSQL 14, 15 and 18, in a database of its own; the versions between have `tests/faults/versions.rs`.

#![allow(clippy::unwrap_used, reason = "a failed test ends with the line that failed")]

#[macro_use]
mod installation;

mod fencing;
mod grants;
mod identity;
mod key_order;
mod operate;
mod partitions;
mod publisher;
mod publishing;
mod refusals;
#[allow(dead_code, reason = "shared with the fault tests, which use all of it")]
#[path = "../faults/services.rs"]
mod services;
mod transactions;
