//! Medians and spreads, as a table for people and as JSON for programs.

use std::collections::BTreeMap;

use serde_json::json;

use crate::run::{Bench, Sample};
use crate::{Broker, Mode, Plan};

const FILE: &str = "target/bench/latency.json";

pub struct Report {
    head: String,
    samples: BTreeMap<(Broker, Mode), Vec<Sample>>,
    /// What publishing alone takes of the server, by `lanebridge.publish` and by a plain INSERT.
    publish_us: [Vec<f64>; 2],
}

/// One number of a sample: its name, its unit, and how to get it.
type Figure = (&'static str, &'static str, fn(&Sample) -> f64);

const FIGURES: [Figure; 4] = [
    ("latency.p50_ms", "ms", |sample| sample.p50_ms),
    ("latency.p99_ms", "ms", |sample| sample.p99_ms),
    ("cpu.server_us", "us", |sample| sample.server_us),
    ("cpu.bridge_us", "us", |sample| sample.bridge_us),
];

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

fn spread(values: &[f64]) -> f64 {
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), &v| (low.min(v), high.max(v)));
    high - low
}

impl Report {
    pub fn new(plan: &Plan, bench: &Bench) -> Self {
        let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        let head = format!(
            "{} events/s of 300 bytes, one a transaction, 8 publishers, 500 keys; {:?} after {:?} of warm-up; \
             {cores} cores; {}",
            plan.rate,
            plan.measured,
            plan.warm_up,
            bench.versions.join(", ")
        );
        println!("{head}");
        Self { head, samples: BTreeMap::new(), publish_us: Default::default() }
    }

    /// Seconds per event.
    pub fn baseline(&mut self, ours: f64, naive: f64) {
        self.publish_us[0].push(ours * 1e6);
        self.publish_us[1].push(naive * 1e6);
    }

    pub fn add(&mut self, broker: Broker, mode: Mode, sample: Sample) {
        self.samples.entry((broker, mode)).or_default().push(sample);
    }

    fn values(&self, broker: Broker, mode: Mode, figure: fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.get(&(broker, mode)).into_iter().flatten().map(figure).collect()
    }

    pub fn print(&self) {
        println!(
            "\n| broker | mode | p50 ms | p99 ms | server µs/event | bridge µs/event |\n|---|---|---|---|---|---|"
        );
        for (broker, mode) in self.samples.keys() {
            let cells = FIGURES.map(|(_, _, figure)| {
                let values = self.values(*broker, *mode, figure);
                format!("{:.1} ± {:.1}", median(&values), spread(&values) / 2.0)
            });
            println!("| {} | {} | {} |", broker.name(), mode.name(), cells.join(" | "));
        }
        let [ours, naive] = &self.publish_us;
        println!(
            "\npublishing alone takes {:.0} µs of the server per event, a plain INSERT {:.0}; not in the columns above",
            median(ours),
            median(naive)
        );
    }

    /// Writes the figures, each with its ratio to the naive poller of the same run; returns where.
    pub fn write(&self) -> &'static str {
        let mut results = Vec::new();
        for (broker, mode) in self.samples.keys() {
            for (name, unit, figure) in FIGURES {
                let values = self.values(*broker, *mode, figure);
                let naive = self.values(*broker, Mode::Naive, figure);
                let baseline = (!naive.is_empty()).then(|| median(&naive));
                results.push(json!({
                    "name": format!("{name}.{}.{}", broker.name(), mode.name()),
                    "value": median(&values),
                    "unit": unit,
                    "baseline": baseline,
                    "ratio": baseline.filter(|baseline| *baseline > 0.0).map(|baseline| median(&values) / baseline),
                    "spread": spread(&values),
                    "conditions": self.head,
                }));
            }
        }
        std::fs::create_dir_all("target/bench").unwrap();
        std::fs::write(FILE, serde_json::to_string_pretty(&results).unwrap()).unwrap();
        FILE
    }
}
