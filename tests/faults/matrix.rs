//! The matrix: every fault against every sink, by poll and by stream, with one bridge and with three. Each cell ends by
//! reading the ledger.
//!
//! `make test` runs a few small cells of it, chosen by the seed; `make faults` runs all and writes docs/reliability.md.
//! `LB_SEED` and `LB_CELL` replay one.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::arena::{Arena, Source, within};
use crate::bridge::{BATCH, BATCHES};
use crate::broker::Broker;
use crate::consumers::Destination;
use crate::drain::{deliveries_left, seed};
use crate::injuries::{Fault, pause};
use crate::ledger::{Verdict, judge};
use crate::publishers::{Load, Pace, publish_with};
use crate::reliability;
use crate::services::shared;

/// I5: all is delivered so long after the last fault was healed.
const HEALED: Duration = Duration::from_secs(30);
/// What is stuck gets this long to arrive after all, so that what is slow and what is lost are told apart.
const MERCY: Duration = Duration::from_secs(60);
/// The server notices sessions that are gone within this.
const NOTICED: Duration = Duration::from_secs(10);
/// I6: log that is kept for a bridge, beyond what the server keeps for its own recovery.
const KEPT_BYTES: i64 = 64 << 20;
/// About 200 events a second in bursts: enough to fill a window, little enough to drain in debug builds.
const PACE: Pace = Pace::Bursts { transactions: 30, rest: Duration::from_secs(1) };
/// Cells at once: most of a cell is waiting.
const AT_ONCE: usize = 3;
/// For `make test`: so many cells of each sink, with so many injections each.
const FEW: (usize, usize) = (1, 3);
const FEW_AT_ONCE: usize = 3;

const SINKS: [&str; 3] = ["kafka", "nats", "redis"];

#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub fault: Fault,
    pub sink: &'static str,
    pub source: Source,
    pub bridges: usize,
}

impl Cell {
    /// In an order in which half of a run has every fault on every sink already.
    pub fn all() -> Vec<Self> {
        let mut cells = Vec::new();
        for (source, bridges) in [(Source::Wal, 3), (Source::Poll, 1), (Source::Poll, 3), (Source::Wal, 1)] {
            for fault in Fault::ALL {
                cells.extend(SINKS.map(|sink| Self { fault, sink, source, bridges }));
            }
        }
        // Without the stream nobody reads the publication.
        cells.retain(|cell| cell.fault != Fault::PublicationDropped || cell.source == Source::Wal);
        // A Kafka for one cell takes more memory than all the rest.
        cells.retain(|cell| !cell.fault.needs_own_broker() || cell.sink != "kafka");
        cells
    }

    pub fn name(&self) -> String {
        format!("{}/{}/{}/{}", self.fault.name(), self.sink, self.source.name(), self.bridges)
    }

    /// I4: per fault the window of every bridge, and once more where a batch without an answer is tried again meanwhile.
    fn duplicates(&self, faults: usize) -> usize {
        if self.fault.repeats_nothing() { 0 } else { 2 * faults * self.bridges * BATCH * BATCHES }
    }

    async fn open(&self) -> Arena {
        let broker = if self.fault.needs_own_broker() { Some(Broker::start(self.sink).await) } else { None };
        let url = broker.as_ref().map(Broker::url);
        let destination = match (self.sink, url) {
            ("kafka", _) => Destination::kafka(3).await,
            ("nats", None) => Destination::nats().await,
            ("nats", Some(url)) => Destination::nats_at(url).await,
            (_, None) => Destination::redis(),
            (_, Some(url)) => Destination::redis_at(url),
        };
        Arena::open(destination, broker, self.source, self.bridges).await
    }
}

/// What a cell came to; kept as a file, so that a run that was interrupted goes on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub cell: String,
    pub faults: usize,
    pub verdict: Verdict,
    pub recovery_ms: Vec<u64>,
    pub takeover_ms: Vec<u64>,
    pub seconds: u64,
    /// Empty for a clean cell.
    pub wrong: String,
}

/// What was seen while it happened.
#[derive(Default)]
struct Seen {
    recovery: Vec<Duration>,
    takeover: Vec<Duration>,
    /// Promises that were broken at once.
    broken: Vec<String>,
    harm: usize,
}

async fn run(cell: Cell, seed: u64, times: usize) -> Outcome {
    let began = Instant::now();
    // FNV's prime: cells of one seed have nothing in common.
    let mix = |sum: u64, byte: u8| sum.wrapping_mul(1_099_511_628_211).wrapping_add(u64::from(byte));
    let mut rng = StdRng::seed_from_u64(cell.name().bytes().fold(seed, mix));
    let arena = cell.open().await;
    let mut seen = suffer(&arena, cell, times, &mut rng).await;
    let mut verdict = settle(&arena, cell).await;
    verdict.harm += seen.harm;

    let faults = times * cell.fault.weight();
    let found = verdict.faults(cell.duplicates(faults));
    seen.broken.extend((!found.is_empty()).then_some(found));
    let replayed = std::env::var("LB_CELL").is_ok_and(|wanted| wanted == cell.name());
    if replayed || !seen.broken.is_empty() {
        eprintln!("{}: {:?}: {}", cell.name(), seen.broken, arena.logs());
    }
    arena.close().await;
    let millis = |times: &[Duration]| times.iter().map(|t| u64::try_from(t.as_millis()).unwrap()).collect();
    let outcome = Outcome {
        cell: cell.name(),
        faults,
        verdict,
        recovery_ms: millis(&seen.recovery),
        takeover_ms: millis(&seen.takeover),
        seconds: began.elapsed().as_secs(),
        wrong: seen.broken.join(", "),
    };
    eprintln!("{outcome:?}");
    outcome
}

/// Injures the bridges `times` while publishers publish and a watcher watches the server.
async fn suffer(arena: &Arena, cell: Cell, times: usize, rng: &mut StdRng) -> Seen {
    let mut seen = Seen::default();
    let load = Load { seed: rng.random(), writers: 3, keys: 40, events: usize::MAX / 2 };
    let committed = Arc::new(AtomicUsize::new(0));
    let hurting = async {
        for n in 1..=times {
            pause(100..1_200, rng).await;
            if rng.random_bool(0.5) {
                // When something is under way, which at a random moment it mostly is not.
                let busy = rng.random_range(1..60);
                within(Duration::from_secs(2), || async { deliveries_left(&arena.client).await > busy }).await;
            }
            let injury = arena.injure(cell.fault, cell.source, rng).await;
            seen.takeover.extend(injury.takeover);
            seen.broken.extend(injury.broken);
            // Sometimes the next one comes before this one is got over.
            if n == times || rng.random_bool(0.5) {
                seen.recovery.extend(arena.recovered(HEALED).await);
            }
        }
        committed.fetch_add(load.events, Ordering::Relaxed);
    };
    let mut most_kept = 0;
    let watching = async {
        let sql = "select coalesce(max((select redo_lsn from pg_control_checkpoint()) - restart_lsn), 0)::bigint
                     from pg_replication_slots where database = current_database()";
        let watcher = arena.database.connect().await;
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        while committed.load(Ordering::Relaxed) < load.events {
            tick.tick().await;
            most_kept = most_kept.max(watcher.query_one(sql, &[]).await.unwrap().get::<_, i64>(0));
        }
    };
    let publishing = publish_with(&arena.database, load, Arc::clone(&committed), PACE);
    let (published, (), ()) = tokio::join!(AssertUnwindSafe(publishing).catch_unwind(), hurting, watching);
    seen.harm = usize::from(published.is_err()) + usize::from(most_kept > KEPT_BYTES);
    seen
}

/// Waits for the drain, stops the bridges, and reads the ledger and what they left behind.
async fn settle(arena: &Arena, cell: Cell) -> Verdict {
    let left = if arena.recovered(HEALED).await.is_some() { 0 } else { deliveries_left(&arena.client).await };
    if left > 0 {
        eprintln!("{}: {left} stuck after {HEALED:?}: {}", cell.name(), arena.logs());
        arena.recovered(MERCY).await;
    }
    arena.settled().await;
    let mut undrained = 0;
    for place in &arena.places {
        undrained += usize::from(!place.terminate().await);
    }
    let mut verdict = judge(&arena.client, &arena.destination.read().await).await;
    verdict.stuck = usize::try_from(left).unwrap();
    verdict.leftover = undrained;
    if within(NOTICED, || async { arena.leftovers().await == 0 }).await.is_none() {
        verdict.leftover += usize::try_from(arena.leftovers().await).unwrap();
    }
    verdict.harm = usize::from(within(NOTICED, || async { arena.slots().await == 0 }).await.is_none());
    verdict
}

/// Runs a cell to its end, whatever comes of it.
async fn survive(cell: Cell, seed: u64, times: usize) -> Outcome {
    let outcome = tokio::spawn(run(cell, seed, times)).await;
    outcome.unwrap_or_else(|panic| Outcome {
        cell: cell.name(),
        wrong: format!("did not come to its end: {panic}"),
        ..Outcome::default()
    })
}

/// What is wrong in each cell that is not clean, and how to see it again; empty when all are.
fn complaint(seed: u64, outcomes: &[Outcome]) -> String {
    let unclean = outcomes.iter().filter(|outcome| !outcome.wrong.is_empty());
    let lines =
        unclean.map(|o| format!("{}: {}\n    LB_SEED={seed} LB_CELL={} make faults\n", o.cell, o.wrong, o.cell));
    lines.collect()
}

/// A few cells of every sink, other ones in every run.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_few_cells_of_the_matrix_are_clean() {
    let _shared = shared().await;
    let seed = seed();
    eprintln!("LB_SEED={seed}");
    let mut cells = Cell::all();
    cells.shuffle(&mut StdRng::seed_from_u64(seed));
    let mut of_sink: BTreeMap<&str, usize> = BTreeMap::new();
    cells.retain(|cell| {
        let count = of_sink.entry(cell.sink).or_default();
        *count += 1;
        *count <= FEW.0
    });
    let runs = futures_util::stream::iter(cells).map(|cell| survive(cell, seed, FEW.1));
    let outcomes: Vec<Outcome> = runs.buffer_unordered(FEW_AT_ONCE).collect().await;
    assert_eq!(complaint(seed, &outcomes), "");
}

/// All cells, with `LB_ROUNDS` times the usual injections, or those whose name contains `LB_CELL`; with `LB_MINUTES` none
/// is begun after these. What a run with this seed has finished is not run again, unless it is named in full.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "takes most of an hour; `make faults` runs it"]
async fn every_cell_of_the_matrix_is_clean() {
    let _shared = shared().await;
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let (seed, rounds, minutes) = (seed(), number("LB_ROUNDS", 1), number("LB_MINUTES", u64::MAX / 60));
    let wanted = std::env::var("LB_CELL").unwrap_or_default();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/faults").join(seed.to_string());
    std::fs::create_dir_all(&folder).unwrap();
    eprintln!("LB_SEED={seed} LB_ROUNDS={rounds}");
    let file = |cell: &str| folder.join(cell.replace('/', "-") + ".json");
    // Named in full it is a replay, whose outcome replaces no other.
    let replays = Cell::all().iter().any(|cell| cell.name() == wanted);
    let cells = Cell::all().into_iter().filter(|cell| cell.name().contains(&wanted));
    let cells = cells.filter(|cell| replays || !file(&cell.name()).exists());
    let began = Instant::now();
    let runs = futures_util::stream::iter(cells)
        .take_while(|_| std::future::ready(began.elapsed() < Duration::from_secs(minutes * 60)))
        .map(|cell| survive(cell, seed, cell.fault.times() * usize::try_from(rounds).unwrap()))
        .buffer_unordered(AT_ONCE)
        .inspect(|outcome| {
            if !replays {
                std::fs::write(file(&outcome.cell), serde_json::to_string_pretty(outcome).unwrap()).unwrap();
            }
        });
    let mut outcomes: Vec<Outcome> = runs.collect().await;
    if !replays {
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        outcomes = files.map(|bytes| serde_json::from_slice(&bytes).unwrap()).collect();
    }
    if wanted.is_empty() {
        reliability::write(seed, &outcomes).await;
    }
    assert_eq!(complaint(seed, &outcomes), "");
}
