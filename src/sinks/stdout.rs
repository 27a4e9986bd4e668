//! Placeholder.
use super::Route;
use crate::delivery::{Failure, Outcome, Parcel};

#[derive(Debug)]
pub struct Stdout;

impl Stdout {
    pub(super) fn new() -> Self {
        Self
    }

    pub(super) async fn send(&self, _route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        parcels.iter().map(|_| Outcome::Refused(Failure::new("NOT_BUILT", "not built"))).collect()
    }
}
