pub mod backoff;
#[cfg(feature = "bridge")]
pub mod config;
pub mod delivery;
pub mod error;
pub mod event;
#[cfg(feature = "bridge")]
pub mod sinks;
