//! The figures of docs/reliability.md, from what the cells of the matrix came to.

use std::fmt::Write;
use std::path::Path;

use crate::consumers::{jetstream_at, redis_at};
use crate::injuries::Fault;
use crate::matrix::{Cell, Outcome};
use crate::services::{address, connect};

/// What is between these lines is replaced; all else in the document is written by people.
const MARKS: [&str; 2] = ["<!-- figures: written by make faults -->\n", "<!-- end of figures -->"];

/// Puts the figures of a run into docs/reliability.md.
pub async fn write(seed: u64, outcomes: &[Outcome]) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reliability.md");
    let text = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = text.split_once(MARKS[0]).expect("the mark before the figures");
    let (_, after) = rest.split_once(MARKS[1]).expect("the mark behind the figures");
    let figures = format!("{}\n{}", circumstances(seed, outcomes).await, tables(outcomes));
    std::fs::write(&file, [before, MARKS[0], &figures, MARKS[1], after].concat()).unwrap();
}

/// When, where and of what the figures are.
async fn circumstances(seed: u64, outcomes: &[Outcome]) -> String {
    let database = connect(&address("LB_POSTGRES_URL")).await;
    let row = database.query_one("select current_date::text, current_setting('server_version')", &[]).await.unwrap();
    let (date, postgres): (String, String) = (row.get(0), row.get(1));
    let postgres = postgres.split(' ').next().unwrap_or_default();
    let mut redis = redis_at(&address("LB_REDIS_URL")).await;
    let info: String = redis::cmd("INFO").arg("server").query_async(&mut redis).await.unwrap();
    let redis = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap_or_default();
    let nats = jetstream_at(&address("LB_NATS_URL")).await.client().server_info().version;
    let services = std::fs::read_to_string(address("LB_SERVICES")).unwrap();
    let kafka = services.lines().find_map(|line| line.strip_prefix("KAFKA_VERSION = ")).unwrap_or_default();
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let field = |text: &str, name: &str, mark: char| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
        line.split(mark).nth(1).unwrap_or_default().trim().trim_matches('"').to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = field(&read("/proc/meminfo"), "MemTotal", ':');
    let memory: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
    let minutes = outcomes.iter().map(|outcome| outcome.seconds).sum::<u64>() / 60;
    format!(
        "Measured {date} on {cores} shared cores ({}, {} GiB, {}), other work on both; PostgreSQL {postgres}, Apache Kafka {}, \
         NATS {nats}, Redis {redis} on the same machine; lanebridge {}, debug build. `LB_SEED={seed} make faults`: {} of {} cells, \
         {minutes} minutes of cells, three at a time.\n",
        field(&read("/proc/cpuinfo"), "model name", ':'),
        memory >> 20,
        field(&read("/etc/os-release"), "PRETTY_NAME", '='),
        kafka.trim().trim_matches('"'),
        env!("CARGO_PKG_VERSION"),
        outcomes.len(),
        Cell::all().len(),
    )
}

fn tables(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    let head =
        "faults | events | lost | phantom | reorder-first | other wrongs | duplicates (late) | slowest recovery |";
    let _row = writeln!(text, "| fault | sink | {head}\n|---|---|{}", "---:|".repeat(8));
    for fault in Fault::ALL {
        for sink in ["kafka", "nats", "redis"] {
            let of = of(outcomes, |parts| parts[0] == fault.name() && parts[1] == sink);
            if !of.is_empty() {
                let _row = writeln!(text, "| {} | {sink} | {}", fault.description(), figures(&of));
            }
        }
    }
    let _row = writeln!(text, "| **all** | | {}\n", figures(&outcomes.iter().collect::<Vec<_>>()));
    let _row = writeln!(text, "| source | bridges | {head}\n|---|---:|{}", "---:|".repeat(8));
    for source in ["poll", "wal"] {
        for bridges in ["1", "3"] {
            let of = of(outcomes, |parts| parts[2] == source && parts[3] == bridges);
            let _row = writeln!(text, "| {source} | {bridges} | {}", figures(&of));
        }
    }
    let _row = writeln!(
        text,
        "\n| takeover by a peer, three bridges | takeovers | p50 | p99 | slowest |\n|---|---:|---:|---:|---:|"
    );
    for (fault, name) in
        [(Fault::KillOne, "after `kill -9`"), (Fault::Freeze, "after SIGSTOP, `frozen_after = \"5s\"`")]
    {
        let mut times: Vec<u64> =
            of(outcomes, |parts| parts[0] == fault.name()).iter().flat_map(|o| o.takeover_ms.clone()).collect();
        times.sort_unstable();
        let at = |part: f64| percentile(&times, part).map_or("-".to_owned(), seconds);
        let _row = writeln!(text, "| {name} | {} | {} | {} | {} |", times.len(), at(0.5), at(0.99), at(1.0));
    }
    let unclean: Vec<&Outcome> = outcomes.iter().filter(|outcome| !outcome.wrong.is_empty()).collect();
    let _row = writeln!(text, "\nCells that were not clean: {}.\n", unclean.len());
    for outcome in unclean {
        let _row = writeln!(text, "- `LB_CELL={}`: {}", outcome.cell, outcome.wrong);
    }
    text
}

fn of(outcomes: &[Outcome], belongs: impl Fn(&[&str]) -> bool) -> Vec<&Outcome> {
    outcomes.iter().filter(|outcome| belongs(&outcome.cell.split('/').collect::<Vec<_>>())).collect()
}

fn figures(outcomes: &[&Outcome]) -> String {
    let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(|outcome| of(outcome)).sum::<usize>();
    let wrongs = sum(|o| o.verdict.wrongs().iter().map(|(_, n)| n).sum());
    let named = [sum(|o| o.verdict.lost), sum(|o| o.verdict.phantom), sum(|o| o.verdict.reorder_first)];
    let slowest = outcomes.iter().flat_map(|outcome| &outcome.recovery_ms).max();
    format!(
        "{} | {} | {} | {} | {} | {} | {} ({}) | {} |",
        sum(|o| o.faults),
        sum(|o| o.verdict.committed),
        named[0],
        named[1],
        named[2],
        wrongs - named.iter().sum::<usize>(),
        sum(|o| o.verdict.duplicates),
        sum(|o| o.verdict.regress),
        slowest.map_or("-".to_owned(), |ms| seconds(*ms)),
    )
}

fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

/// The smallest of `sorted` that is not below `part` of them.
fn percentile(sorted: &[u64], part: f64) -> Option<u64> {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[test]
fn a_percentile_is_one_of_the_values() {
    let hundred: Vec<u64> = (1..=100).collect();
    assert_eq!([0.5, 0.99, 1.0].map(|part| percentile(&hundred, part).unwrap()), [50, 99, 100]);
    assert_eq!(percentile(&[7], 0.5), Some(7));
    assert_eq!(percentile(&[], 0.5), None);
}
