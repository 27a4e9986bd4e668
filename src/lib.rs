pub mod backoff;
#[cfg(feature = "bridge")]
pub mod config;
#[cfg(feature = "bridge")]
pub mod db;
pub mod delivery;
pub mod error;
pub mod event;
