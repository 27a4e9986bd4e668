//! Placeholder.
use super::{Finding, KeyWindow, Route};
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::Result;

#[derive(Debug)]
pub struct Scripted;

impl Scripted {
    pub(super) fn check(&self, _routes: &[Route]) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    pub(super) fn key_window(&self) -> KeyWindow {
        KeyWindow::One
    }

    pub(super) async fn send(&self, _route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        parcels.iter().map(|_| Outcome::Refused(Failure::new("NOT_BUILT", "not built"))).collect()
    }
}
