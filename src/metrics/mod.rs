//! What is counted, under which names and labels; docs/metrics.md says what each means.
//!
//! I1: every series is there from the start, at zero. I2: no label value comes from a publisher or a broker: handlers and
//! sinks of the configuration, and words of ours. I3: what a delivery touches is an atomic add; labels are looked up once.

mod latency;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::SystemTime;

use prometheus_client::encoding::{EncodeMetric, prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use time::OffsetDateTime;

pub(crate) use latency::Latency;

use crate::config::Config;
use crate::delivery::Outcome;

type Labels = Vec<(&'static str, String)>;
/// A gauge of seconds: an age, or a time since 1970, where 0 is never.
pub(crate) type Seconds = Gauge<f64, AtomicU64>;

/// Everything that one bridge counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    /// By name.
    handlers: BTreeMap<String, Arc<OfHandler>>,
    pub lanes: Lanes,
    pub polls: Polls,
    pub source: Source,
    pub cache: Cache,
    pub write: Latency,
    /// Acknowledged deliveries that were not there to complete.
    pub missing: Counter,
    pub default_partition_rows: Gauge,
    /// 1 while /healthz names deliveries that do not move.
    pub stuck: Gauge,
    pub backlog_read: Seconds,
    clock_offset: Seconds,
    /// The same in microseconds, for arithmetic.
    clock_offset_micros: AtomicI64,
}

#[derive(Debug)]
pub(crate) struct Lanes {
    pub owned: Gauge,
    pub epoch: Gauge,
    pub gained: Counter,
    pub taken_over: Counter,
    pub released: Counter,
    pub lost: Counter,
    pub heartbeat: Seconds,
}

#[derive(Debug)]
pub(crate) struct Polls {
    pub took: Latency,
    pub rows: Counter,
    pub cut: Counter,
    pub swept: Counter,
    pub failed_polls: Counter,
    pub failed_confirms: Counter,
    pub failed_writes: Counter,
}

/// What wakes the poll.
#[derive(Debug)]
pub(crate) struct Source {
    modes: [(&'static str, Gauge, Counter); 3],
    since: Seconds,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Cache {
    pub hits: Counter,
    pub misses: Counter,
    pub bytes: Gauge,
    pub events: Gauge,
}

/// Everything about one handler.
#[derive(Debug)]
pub(crate) struct OfHandler {
    acked: Counter,
    refused: Counter,
    rejected: Counter,
    unreachable: Counter,
    pub completed: Counter,
    pub buried: Counter,
    pub in_flight: Gauge,
    pub in_flight_bytes: Gauge,
    breaker_open: Gauge,
    breaker_opened: Counter,
    pub last_ack: Seconds,
    pub commit_to_ack: Latency,
    pub publish_to_ack: Latency,
    pub backlog: Backlog,
}

/// What waits in the database for one handler; counts end at a limit.
#[derive(Debug)]
pub(crate) struct Backlog {
    pub pending: Gauge,
    pub scheduled: Gauge,
    pub retrying: Gauge,
    pub blocked: Gauge,
    pub dead: Gauge,
    pub blocked_keys: Gauge,
    pub oldest_pending: Seconds,
    pub oldest_blocked: Seconds,
}

/// In which form a scrape is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exposition {
    /// The Prometheus text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Metrics {
    pub(crate) fn new(config: &Config) -> Self {
        let mut registry = Registry::with_prefix("lanebridge");
        let r = &mut registry;
        r.register("build", "The version that runs", Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]));
        let started: Seconds = add(r, "start_timestamp_seconds", "When this process started, since 1970");
        started.set(unix_now());
        let lanes = Lanes::register(r);
        let polls = Polls::register(r);
        let source = Source::register(r);
        let cache = Cache {
            hits: add(r, "cache_hits", "Payloads that the stream had brought when they were needed"),
            misses: add(r, "cache_misses", "Payloads that had to be read from the table"),
            bytes: add(r, "cache_bytes", "Memory of payloads that wait for their delivery"),
            events: add(r, "cache_events", "Events whose payload waits for its delivery"),
        };
        let write = add(r, "write_seconds", "How long writing a batch of outcomes back took");
        let missing = add(r, "missing", "Acknowledged deliveries that were not there to complete");
        let rows = "Rows in the default partition of the events, counted up to 1,000";
        let default_partition_rows = add(r, "default_partition_rows", rows);
        let stuck = add(r, "stuck", "1 while deliveries that could go do not move, as /healthz says");
        let backlog_read = add(r, "backlog_read_timestamp_seconds", "When the figures of the backlog were read");
        let clock_offset = add(r, "clock_offset_seconds", "The database's clock less this machine's");
        let handlers = handlers(r, config);
        Self {
            registry,
            handlers,
            lanes,
            polls,
            source,
            cache,
            write,
            missing,
            default_partition_rows,
            stuck,
            backlog_read,
            clock_offset,
            clock_offset_micros: AtomicI64::new(0),
        }
    }

    /// Of a handler of the configuration.
    pub(crate) fn handler(&self, name: &str) -> Option<&Arc<OfHandler>> {
        self.handlers.get(name)
    }

    /// All series as text.
    pub(crate) fn expose(&self, as_what: Exposition) -> String {
        let mut out = String::new();
        let written = match as_what {
            Exposition::Prometheus => prometheus_text::encode(&mut out, &self.registry),
            Exposition::OpenMetrics => text::encode(&mut out, &self.registry),
        };
        written.expect("a String takes everything");
        out
    }

    pub(crate) fn set_clock_offset(&self, seconds: f64) {
        self.clock_offset.set(seconds);
        #[allow(clippy::cast_possible_truncation, reason = "a cast of a float saturates")]
        self.clock_offset_micros.store((seconds * 1e6) as i64, Ordering::Relaxed);
    }

    /// Now by the database's clock, as far as it is known.
    pub(crate) fn database_now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc() + time::Duration::microseconds(self.clock_offset_micros.load(Ordering::Relaxed))
    }
}

impl Lanes {
    fn register(r: &mut Registry) -> Self {
        let changes: Family<Labels, Counter> = add(r, "lane_changes", "Lanes that changed hands");
        let change = |what: &str| changes.get_or_create_owned(&vec![("change", what.to_owned())]);
        Self {
            owned: add(r, "lanes_owned", "Lanes that this bridge owns"),
            epoch: add(r, "epoch", "The number that fences this bridge; 0 before the first lane"),
            heartbeat: add(r, "heartbeat_timestamp_seconds", "When the locks were last proven to be held"),
            gained: change("gained"),
            taken_over: change("taken_over"),
            released: change("released"),
            lost: change("lost"),
        }
    }
}

impl Polls {
    fn register(r: &mut Registry) -> Self {
        let failures: Family<Labels, Counter> = add(r, "database_failures", "Calls of the database that failed");
        let failed = |call: &str| failures.get_or_create_owned(&vec![("call", call.to_owned())]);
        Self {
            took: add(r, "poll_seconds", "How long reading the deliveries that may go took"),
            rows: add(r, "poll_rows", "Deliveries that polls returned"),
            cut: add(r, "poll_cuts", "Reads that ended at the rows they may look at, most of them hidden"),
            swept: add(r, "swept", "Deliveries that only a sweep found"),
            failed_polls: failed("poll"),
            failed_confirms: failed("confirm"),
            failed_writes: failed("write"),
        }
    }
}

impl Source {
    fn register(r: &mut Registry) -> Self {
        let modes: Family<Labels, Gauge> = add(r, "source", "1 for what wakes the poll now");
        let switches: Family<Labels, Counter> = add(r, "source_switches", "Changes to this source, the first included");
        let since = add(r, "source_timestamp_seconds", "Since when the source is what it is");
        let modes = ["wal", "notify", "poll"].map(|mode| {
            let labels = vec![("mode", mode.to_owned())];
            (mode, modes.get_or_create_owned(&labels), switches.get_or_create_owned(&labels))
        });
        Self { modes, since }
    }

    /// `mode` is `wal`, `notify` or `poll`; what is so already changes nothing.
    pub(crate) fn is(&self, mode: &str) {
        for (name, gauge, switches) in &self.modes {
            let now = i64::from(*name == mode);
            if gauge.set(now) == 0 && now == 1 {
                switches.inc();
                self.since.set(unix_now());
            }
        }
    }
}

impl OfHandler {
    /// One answer of the broker.
    pub(crate) fn answered(&self, outcome: &Outcome) {
        let counter = match outcome {
            Outcome::Acked => &self.acked,
            Outcome::Rejected(_) => &self.rejected,
            Outcome::Refused(_) => &self.refused,
            Outcome::Unreachable(_) => &self.unreachable,
        };
        counter.inc();
    }

    pub(crate) fn breaker(&self, opened: bool, closed: bool) {
        if opened {
            self.breaker_opened.inc();
            self.breaker_open.set(1);
        } else if closed {
            self.breaker_open.set(0);
        }
    }
}

fn handlers(r: &mut Registry, config: &Config) -> BTreeMap<String, Arc<OfHandler>> {
    let outcomes: Family<Labels, Counter> = add(r, "outcomes", "Answers of the broker by their class");
    let completed: Family<Labels, Counter> = add(r, "completed", "Acknowledged deliveries that were deleted");
    let buried: Family<Labels, Counter> = add(r, "buried", "Deliveries that became dead");
    let in_flight: Family<Labels, Gauge> =
        add(r, "in_flight_deliveries", "Deliveries between being taken and answered");
    let in_flight_bytes: Family<Labels, Gauge> = add(r, "in_flight_bytes", "Payload bytes of those in flight");
    let open: Family<Labels, Gauge> = add(r, "breaker_open", "1 while the broker counts as away");
    let opened: Family<Labels, Counter> = add(r, "breaker_opened", "How often the broker went away");
    let last_ack: Family<Labels, Seconds> = add(r, "last_ack_timestamp_seconds", "When the broker last acknowledged");
    let commit: Family<Labels, Latency> = add(
        r,
        "commit_to_ack_seconds",
        "From the publisher's commit to the acknowledgement, where the stream said when",
    );
    let publish: Family<Labels, Latency> = add(
        r,
        "publish_to_ack_seconds",
        "From the call of publish to the acknowledgement, delays and retries included",
    );
    let deliveries: Family<Labels, Gauge> =
        add(r, "deliveries", "Deliveries in the database by their state, counted up to 10,000");
    let keys: Family<Labels, Gauge> = add(r, "blocked_keys", "Keys with deliveries behind one that is held");
    let lag: Family<Labels, Seconds> = add(r, "lag_seconds", "Age of the oldest delivery that is due");
    let waited: Family<Labels, Seconds> = add(r, "blocked_seconds", "Age of the oldest blocked delivery");
    let of = |handler: &crate::config::Handler| {
        let name = || vec![("handler", handler.name.clone())];
        let and = |key, value: &str| vec![("handler", handler.name.clone()), (key, value.to_owned())];
        let outcome = |class| outcomes.get_or_create_owned(&and("outcome", class));
        let state = |state| deliveries.get_or_create_owned(&and("state", state));
        let sink = and("sink", &handler.sink);
        OfHandler {
            acked: outcome("acked"),
            refused: outcome("refused"),
            rejected: outcome("rejected"),
            unreachable: outcome("unreachable"),
            completed: completed.get_or_create_owned(&name()),
            buried: buried.get_or_create_owned(&name()),
            in_flight: in_flight.get_or_create_owned(&name()),
            in_flight_bytes: in_flight_bytes.get_or_create_owned(&name()),
            breaker_open: open.get_or_create_owned(&sink),
            breaker_opened: opened.get_or_create_owned(&sink),
            last_ack: last_ack.get_or_create_owned(&name()),
            commit_to_ack: commit.get_or_create_owned(&name()),
            publish_to_ack: publish.get_or_create_owned(&name()),
            backlog: Backlog {
                pending: state("pending"),
                scheduled: state("scheduled"),
                retrying: state("retrying"),
                blocked: state("blocked"),
                dead: state("dead"),
                blocked_keys: keys.get_or_create_owned(&name()),
                oldest_pending: lag.get_or_create_owned(&name()),
                oldest_blocked: waited.get_or_create_owned(&name()),
            },
        }
    };
    config.handlers.values().map(|handler| (handler.name.clone(), Arc::new(of(handler)))).collect()
}

/// A metric, registered.
fn add<M: Metric + Default + Clone + EncodeMetric>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Seconds since 1970 by this machine's clock.
pub(crate) fn unix_now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const PAGE: &str = include_str!("../../docs/metrics.md");

    fn metrics() -> Metrics {
        let text = "[postgres]\nurl = \"postgres://u@localhost/d\"\n[sinks.out]\ntype = \"stdout\"\n\
                    [handlers.one]\nevents = [\"a\"]\nsink = \"out\"\n[handlers.two]\nevents = [\"a\"]\nsink = \"out\"\n";
        Metrics::new(&crate::config::parse(text, "f", &|_| None).unwrap())
    }

    /// Name and type of each metric, as OpenMetrics has them.
    fn described(text: &str) -> BTreeSet<(String, String)> {
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        types.filter_map(|line| line.split_once(' ')).map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
    }

    #[test]
    fn every_metric_is_on_its_page_and_no_other_is() {
        let suffix = |(name, kind): (String, String)| match kind.as_str() {
            "counter" => (format!("{name}_total"), kind),
            "info" => (format!("{name}_info"), kind),
            _ => (name, kind),
        };
        let registered: BTreeSet<_> =
            described(&metrics().expose(Exposition::OpenMetrics)).into_iter().map(suffix).collect();
        let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `lanebridge_"));
        let documented: BTreeSet<_> = rows
            .map(|row| {
                let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`'));
                (format!("lanebridge_{}", cells.next().unwrap()), cells.next().unwrap().to_owned())
            })
            .collect();
        assert_eq!(registered, documented);
    }

    // I1.
    #[test]
    fn every_series_is_there_from_the_start() {
        let metrics = metrics();
        for as_what in [Exposition::Prometheus, Exposition::OpenMetrics] {
            let text = metrics.expose(as_what);
            for handler in ["one", "two"] {
                for outcome in ["acked", "refused", "rejected", "unreachable"] {
                    let line = format!("lanebridge_outcomes_total{{handler=\"{handler}\",outcome=\"{outcome}\"}} 0");
                    assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
                }
            }
            for name in described(&text).into_iter().map(|(name, _)| name) {
                assert!(text.lines().any(|line| line.starts_with(&name)), "{name} has no series");
            }
        }
    }

    #[test]
    fn both_formats_say_what_they_are() {
        let metrics = metrics();
        let (old, new) = (metrics.expose(Exposition::Prometheus), metrics.expose(Exposition::OpenMetrics));
        assert!(new.ends_with("# EOF\n") && !old.contains("# EOF"));
        assert!(old.contains("# TYPE lanebridge_outcomes_total counter"), "{old}");
        assert!(new.contains("# TYPE lanebridge_outcomes counter"), "{new}");
    }

    #[test]
    fn a_source_that_stays_is_no_switch() {
        let metrics = metrics();
        for mode in ["poll", "wal", "wal", "poll"] {
            metrics.source.is(mode);
        }
        let text = metrics.expose(Exposition::Prometheus);
        for line in [
            "lanebridge_source{mode=\"poll\"} 1",
            "lanebridge_source{mode=\"wal\"} 0",
            "lanebridge_source_switches_total{mode=\"poll\"} 2",
            "lanebridge_source_switches_total{mode=\"wal\"} 1",
            "lanebridge_source_switches_total{mode=\"notify\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    // D10.
    #[test]
    fn ages_are_by_the_clock_of_the_database() {
        let metrics = metrics();
        for seconds in [60.0, -60.0] {
            metrics.set_clock_offset(seconds);
            let ahead = metrics.database_now() - OffsetDateTime::now_utc();
            assert!((ahead.as_seconds_f64() - seconds).abs() < 1.0, "{ahead}");
        }
    }
}
