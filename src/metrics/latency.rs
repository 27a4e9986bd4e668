//! A histogram of durations whose observation is three atomic adds: the library's own takes a lock for each.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Upper ends of the buckets, in microseconds: from a poll of an idle table to a delivery that waited for an operator.
const BOUNDS: [u64; 16] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    60_000_000,
    600_000_000,
    3_600_000_000,
];
const MICROS: f64 = 1e6;

#[derive(Clone, Debug, Default)]
pub(crate) struct Latency(Arc<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    /// The last one has no upper end.
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Latency {
    pub(crate) fn observe(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|bound| *bound < micros);
        if let Some(count) = self.0.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.0.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }
}

impl TypedMetric for Latency {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Latency {
    #[allow(clippy::cast_precision_loss, reason = "a sum of 2^53 microseconds is 285 years")]
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        let bounds = BOUNDS.iter().map(|bound| *bound as f64 / MICROS).chain([f64::INFINITY]);
        let counts = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        // From the buckets, so that the two agree whatever is observed meanwhile.
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = self.0.sum_micros.load(Ordering::Relaxed) as f64 / MICROS;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn an_observation_counts_in_its_bucket_and_those_above() {
        let latency = Latency::default();
        let mut registry = Registry::default();
        registry.register("x_seconds", "X", latency.clone());
        for micros in [1_000, 1_001, 4_000_000_000] {
            latency.observe(Duration::from_micros(micros));
        }
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "x_seconds_bucket{le=\"0.001\"} 1",
            "x_seconds_bucket{le=\"0.0025\"} 2",
            "x_seconds_bucket{le=\"3600.0\"} 2",
            "x_seconds_bucket{le=\"+Inf\"} 3",
            "x_seconds_count 3",
            "x_seconds_sum 4000.002001",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
