//! Medians and spreads over the repeats: a table for people, and target/bench/latency.json for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use crate::brokers::PARTITIONS;
use crate::publishers::{CONNECTIONS, KEYS};
use crate::run::{Published, Sample};
use crate::{Broker, Mode, Plan};

const FILE: &str = "target/bench/latency.json";
/// A publisher that is later than this at p99 does not keep to the rate any more.
const HELD_MS: f64 = 1000.0;

struct Figure {
    name: &'static str,
    unit: &'static str,
    head: &'static str,
    of: fn(&Sample) -> f64,
}

const FIGURES: [Figure; 6] = [
    Figure { name: "latency.p50_ms", unit: "ms", head: "p50 ms", of: |sample| sample.p50_ms },
    Figure { name: "latency.p99_ms", unit: "ms", head: "p99 ms", of: |sample| sample.p99_ms },
    Figure { name: "publish.p99_ms", unit: "ms", head: "publish p99 ms", of: |sample| sample.publish_p99_ms },
    Figure { name: "cpu.server_us", unit: "us", head: "server µs", of: |sample| sample.server_us },
    Figure { name: "cpu.server_total_us", unit: "us", head: "server in all µs", of: |sample| sample.server_total_us },
    Figure { name: "cpu.bridge_us", unit: "us", head: "bridge µs", of: |sample| sample.bridge_us },
];

pub struct Report {
    conditions: String,
    published: Vec<Published>,
    samples: BTreeMap<(Broker, Mode), Vec<Sample>>,
    events: usize,
}

impl Report {
    pub fn new(plan: &Plan, machine: String) -> Self {
        let conditions = format!(
            "{} events/s of 300 bytes, one a transaction, {CONNECTIONS} connections, {KEYS} keys, {PARTITIONS} Kafka partitions; \
             {} s measured after {} s; {} repeats; poll_interval {} ms in mode poll, as the naive poller; {machine}",
            plan.rate, plan.seconds, plan.warm_up, plan.repeats, plan.poll_ms
        );
        Self { conditions, published: Vec::new(), samples: BTreeMap::new(), events: plan.events() }
    }

    pub fn published(&mut self, published: &Published) {
        self.published.push(*published);
    }

    pub fn add(&mut self, broker: Broker, mode: Mode, sample: Sample) {
        self.samples.entry((broker, mode)).or_default().push(sample);
    }

    /// None when the mode was not measured.
    fn values(&self, broker: Broker, mode: Mode, figure: &Figure) -> Option<Values> {
        self.samples.get(&(broker, mode)).map(|samples| Values::new(samples.iter().map(figure.of)))
    }

    /// Microseconds of the server per event, for publishing alone: by Lanebridge, and into the naive poller's table.
    fn publishing(&self) -> (Values, Values) {
        let of = |figure: fn(&Published) -> f64| Values::new(self.published.iter().map(figure));
        (of(|published| published.lanebridge_us), of(|published| published.naive_us))
    }

    /// Writes the figures, each with the naive poller's and the ratio to it; returns where.
    pub fn write(&self) -> String {
        let (lanebridge, naive) = self.publishing();
        let mut results = vec![self.entry("cpu.publish_us", "us", &lanebridge, Some(&naive))];
        for &(broker, mode) in self.samples.keys() {
            for figure in &FIGURES {
                let name = format!("{}.{}.{}", figure.name, broker.name(), mode.name());
                let baseline = self.values(broker, Mode::Naive, figure).filter(|_| mode != Mode::Naive);
                if let Some(values) = self.values(broker, mode, figure) {
                    results.push(self.entry(&name, figure.unit, &values, baseline.as_ref()));
                }
            }
        }
        // Cargo starts a bench in the package's folder.
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, format!("{:#}\n", Value::from(results))).unwrap();
        FILE.to_owned()
    }

    fn entry(&self, name: &str, unit: &str, values: &Values, baseline: Option<&Values>) -> Value {
        let value = values.median();
        let baseline = baseline.map(Values::median);
        json!({
            "name": name,
            "value": rounded(value),
            "unit": unit,
            "baseline": baseline.map(rounded),
            // What is lost in the noise has no ratio.
            "ratio": baseline.filter(|baseline| *baseline > 0.0 && value > 0.0).map(|baseline| rounded(value / baseline)),
            "spread": rounded(values.spread()),
            "conditions": self.conditions,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = FIGURES.map(|figure| figure.head);
        writeln!(f, "\n{}\n\n| broker | mode | {} |", self.conditions, heads.join(" | "))?;
        writeln!(f, "|---|---|{}", "--:|".repeat(heads.len()))?;
        for &(broker, mode) in self.samples.keys() {
            write!(f, "| {} | {} |", broker.name(), mode.name())?;
            for figure in &FIGURES {
                if let Some(values) = self.values(broker, mode, figure) {
                    write!(f, " {values} |")?;
                }
            }
            writeln!(f)?;
        }
        let (lanebridge, naive) = self.publishing();
        writeln!(
            f,
            "\nMedian (least to most). Publishing alone: {lanebridge} µs of the server, {naive} µs into the naive table."
        )?;
        let samples = || self.samples.values().flatten();
        let early: usize = samples().map(|sample| sample.early).sum();
        writeln!(f, "{early} events arrived before their COMMIT had returned, and count as 0 ms.")?;
        let late = samples().filter(|sample| sample.publish_p99_ms > HELD_MS).count();
        if late > 0 {
            writeln!(
                f,
                "NOT HELD: in {late} runs the publishers fell behind the rate; the machine has too little left."
            )?;
        }
        let foreign = samples().map(|sample| sample.foreign).max().unwrap_or(0);
        if usize::try_from(foreign).unwrap_or(0) > self.events / 100 {
            writeln!(f, "NOISE: other databases of the server committed up to {foreign} transactions during a run.")?;
        }
        Ok(())
    }
}

/// Of one figure, one per repeat, in order.
struct Values(Vec<f64>);

impl Values {
    fn new(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        Self(values)
    }

    fn median(&self) -> f64 {
        let n = self.0.len();
        f64::midpoint(self.0[(n - 1) / 2], self.0[n / 2])
    }

    fn spread(&self) -> f64 {
        self.0[self.0.len() - 1] - self.0[0]
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}", self.median())?;
        match &self.0[..] {
            [least, .., most] => write!(f, " ({least:.1}–{most:.1})"),
            _ => Ok(()),
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
