//! How long after its commit is an event at the consumer, and what does that cost? For each way to learn of deliveries
//! (`wal`, `notify`, `poll`) and each broker, beside the poller that a team would write itself (`naive`), in one run.
//!
//!   scripts/services up && cargo bench --bench latency            (or: make bench-latency)
//!   cargo bench --bench latency -- --quick                        one short round of each
//!   cargo bench --bench latency -- --modes wal,naive --brokers redis --rate 5000
//!
//! Open loop: event n is published at start + n / rate whatever became of those before it, one transaction each, by
//! plain SQL. Latency runs from the return of COMMIT to the arrival at a consumer in this process, on one clock. A
//! missing event fails the run. CPU is that of the bridge, and of all processes of the database server less what they
//! take for publishing alone; both from /proc, per event.

#![allow(clippy::unwrap_used, reason = "a failed bench ends with the line that failed")]

mod consumers;
mod naive;
mod report;
mod run;

use std::time::Duration;

use report::Report;
use run::{Bench, Sample};

/// How a run learns of what to deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    Wal,
    Notify,
    Poll,
    /// SELECT … FOR UPDATE SKIP LOCKED, send, DELETE.
    Naive,
}

impl Mode {
    const ALL: [Self; 4] = [Self::Wal, Self::Notify, Self::Poll, Self::Naive];

    pub fn name(self) -> &'static str {
        match self {
            Self::Wal => "wal",
            Self::Notify => "notify",
            Self::Poll => "poll",
            Self::Naive => "naive",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Broker {
    Kafka,
    Nats,
    Redis,
}

impl Broker {
    const ALL: [Self; 3] = [Self::Kafka, Self::Nats, Self::Redis];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Nats => "nats",
            Self::Redis => "redis",
        }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rate: usize,
    pub warm_up: Duration,
    pub measured: Duration,
    pub repeats: usize,
    pub modes: Vec<Mode>,
    pub brokers: Vec<Broker>,
}

fn plan() -> Plan {
    let mut plan = Plan {
        rate: 1000,
        warm_up: Duration::from_secs(3),
        measured: Duration::from_secs(12),
        repeats: 3,
        modes: Mode::ALL.to_vec(),
        brokers: Broker::ALL.to_vec(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} needs a value"));
        let names = |value: String| value.split(',').map(str::to_owned).collect::<Vec<_>>();
        match argument.as_str() {
            // What cargo itself adds.
            "--bench" => {}
            "--quick" => {
                plan.repeats = 1;
                plan.warm_up = Duration::from_secs(1);
                plan.measured = Duration::from_secs(2);
            }
            "--rate" => plan.rate = value().parse().expect("events a second"),
            "--seconds" => plan.measured = Duration::from_secs(value().parse().expect("seconds")),
            "--repeats" => plan.repeats = value().parse().expect("a number"),
            "--modes" => {
                let wanted = names(value());
                plan.modes.retain(|mode| wanted.iter().any(|name| name == mode.name()));
            }
            "--brokers" => {
                let wanted = names(value());
                plan.brokers.retain(|broker| wanted.iter().any(|name| name == broker.name()));
            }
            other => panic!("{other}: see the head of benches/latency/main.rs"),
        }
    }
    plan
}

fn main() {
    let plan = plan();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let bench = runtime.block_on(Bench::new(plan.clone()));
    let mut report = Report::new(&plan, &bench);
    for repeat in 0..plan.repeats {
        let ours = runtime.block_on(bench.publish_only(Mode::Wal));
        let naive = runtime.block_on(bench.publish_only(Mode::Naive));
        report.baseline(ours, naive);
        for (turn, &broker) in plan.brokers.iter().enumerate() {
            // Each time in another order: what a neighbour does at one moment must not always hit the same one.
            let mut modes = plan.modes.clone();
            let turn = (repeat + turn) % modes.len();
            modes.rotate_left(turn);
            for mode in modes {
                let alone = if mode == Mode::Naive { naive } else { ours };
                let sample: Sample = runtime.block_on(bench.measure(mode, broker, alone));
                eprintln!("{repeat} {:<6} {:<6} {sample}", broker.name(), mode.name());
                report.add(broker, mode, sample);
            }
        }
    }
    report.print();
    let file = report.write();
    println!("written to {file}; medians of {} repeats", plan.repeats);
}
