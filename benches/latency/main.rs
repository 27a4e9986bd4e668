//! Question: how long after its commit does a consumer have an event, and what does that cost the database server and
//! the bridge? For each way in which a bridge learns of deliveries and each broker, beside the poller that a team would
//! write itself, in one run. docs/benchmarks.md says how to read the answer.
//!
//! I1: open loop. Event n is due at start + n / rate, whatever became of those before it. I2: a bench that loses
//! fails: each event arrives, once, within the run, else there are no figures. I3: CPU of the server is that of all its
//! processes, less what the same events cost when they are only published, measured in the same repeat.

#![allow(clippy::unwrap_used, reason = "a failed bench ends with the line that failed")]

mod brokers;
mod cpu;
mod ledger;
mod naive;
mod publishers;
mod report;
mod run;
mod servers;

use clap::{Parser, ValueEnum};

use report::Report;
use run::Bench;

/// How events get from the table to the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Mode {
    /// A bridge woken by the write-ahead log.
    Wal,
    /// A bridge woken by NOTIFY.
    Notify,
    /// A bridge that nothing wakes before its poll_interval.
    Poll,
    /// The poller that a team would write itself, on a table of its own.
    Naive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Broker {
    Kafka,
    Nats,
    Redis,
}

/// Commit-to-consumer latency, and CPU per event. Run it with `make bench-latency ARGS="…"`.
#[derive(Clone, Debug, Parser)]
#[command(name = "latency")]
pub struct Plan {
    /// Events a second.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: u32,
    /// Seconds of load before anything is measured.
    #[arg(long, default_value_t = 5)]
    pub warm_up: u32,
    /// Seconds of load that are measured.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// How often all of it is measured, each time in another order.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeats: u32,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "wal,notify,poll,naive")]
    pub modes: Vec<Mode>,
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kafka,nats,redis")]
    pub brokers: Vec<Broker>,
    /// The bridge's poll_interval in mode poll; the naive poller rests as long when it found nothing.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..))]
    pub poll_ms: u32,
    /// One repeat of 1 + 2 seconds: shows that the bench works, and nothing else.
    #[arg(long)]
    pub quick: bool,
    /// What cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Wal => "wal",
            Self::Notify => "notify",
            Self::Poll => "poll",
            Self::Naive => "naive",
        }
    }
}

impl Broker {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Nats => "nats",
            Self::Redis => "redis",
        }
    }
}

impl Plan {
    fn from_arguments() -> Self {
        let mut plan = Self::parse();
        if plan.quick {
            (plan.repeats, plan.warm_up, plan.seconds) = (1, 1, 2);
        }
        plan
    }

    pub fn warm_up_events(&self) -> usize {
        self.rate as usize * self.warm_up as usize
    }

    pub fn events(&self) -> usize {
        self.warm_up_events() + self.rate as usize * self.seconds as usize
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    // The naive poller is this program once more, so that its CPU is that of a process, as the bridge's is.
    if std::env::args().nth(1).as_deref() == Some(naive::COMMAND) {
        return runtime.block_on(naive::run(std::env::args().skip(2)));
    }
    let plan = Plan::from_arguments();
    runtime.block_on(measure(plan));
}

async fn measure(plan: Plan) {
    let bench = Bench::new(plan.clone()).await;
    let mut report = Report::new(&plan, bench.machine().await);
    for repeat in 0..plan.repeats as usize {
        let publishing = bench.publish_only().await;
        report.published(&publishing);
        for (turn, &broker) in plan.brokers.iter().enumerate() {
            // Each time in another order: what a neighbour does at one moment must not always hit the same mode.
            let mut modes = plan.modes.clone();
            modes.rotate_left((repeat + turn) % plan.modes.len());
            for mode in modes {
                let sample = bench.measure(mode, broker, &publishing).await;
                eprintln!("{}/{} {:<5} {:<6} {sample}", repeat + 1, plan.repeats, broker.name(), mode.name());
                report.add(broker, mode, sample);
            }
        }
    }
    println!("{report}");
    println!("written to {}", report.write());
}
