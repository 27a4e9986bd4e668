//! Placeholder: every delivery is refused until this sink is written.

use std::time::Duration;

use super::{Finding, Route};
use crate::config;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::{Error, Result};

#[derive(Debug)]
pub struct Redis;

impl Redis {
    pub(super) async fn connect(_name: &str, _config: &config::Redis, _sink: &config::Sink) -> Result<Self> {
        Ok(Self)
    }

    pub(super) async fn check(&self, _routes: &[Route]) -> Result<Vec<Finding>> {
        Err(Error::new("not built"))
    }

    pub(super) async fn send(&self, _route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        parcels.iter().map(|_| Outcome::Refused(Failure::new("NOT_BUILT", "not built"))).collect()
    }

    pub(super) async fn close(self, _deadline: Duration) {}
}
