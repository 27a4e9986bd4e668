//! The bridge: wiring, start order, drain order. The only file that sees every stage.
//!
//! Start: schema → handlers → sinks and their destinations → lanes → dispatch. Stop (R13): intake, drain, delete what
//! was acknowledged, close the broker connections, release the lanes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Handler, OnDead, Order, Ownership, SourceKind, WakeUp};
use crate::controls::breaks;
use crate::db::{self, Client, Connector, Names, Session};
use crate::dispatch::{self, Ended, Hints, Links, Observer, Outlet, Rules, Settings};
use crate::error::{Class, Error, Result};
use crate::health::{Health, Phase};
use crate::lanes::{self, Identity};
use crate::metrics::Metrics;
use crate::sinks::{KeyWindow, Route, Severity, Sink};
use crate::sources::{self, Feed, wal};

/// Ownership news that dispatch has not read yet; more makes the lock session wait, not lose.
const NEWS: usize = 64;
/// What a sink gets to close once nothing is in flight.
const CLOSE: Duration = Duration::from_secs(2);

/// $1 handlers as JSON.
const REGISTER_HANDLERS: &str = "select name, id from {schema}.{p}register_handlers($1)";
/// $1 names of the configuration.
const OTHER_HANDLERS: &str = "select name from {schema}.{p}handlers where name <> all ($1) order by name";
/// Where it was recorded to live if that is elsewhere, and where this is.
const SETTLE: &str = "select {schema}.{p}settle(), {schema}.{p}here()";
/// Names this set of tables until `adopt`.
const INSTALLATION: &str = "select id::text from {schema}.{p}installation";
/// $1 payload limit; writes only what differs, so that a restart locks nothing.
const SETTINGS: &str = "
update {schema}.{p}installation set max_payload_bytes = $1 where max_payload_bytes is distinct from $1";

/// How `run` was asked to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub once: bool,
    pub migrate: bool,
}

/// What a bridge says of itself while it runs, for those who ask.
#[derive(Clone)]
pub(crate) struct Signs {
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
}

impl Signs {
    pub(crate) fn new(config: &Config) -> Self {
        Self { metrics: Arc::new(Metrics::new(config)), health: Arc::new(Health::new(config.http.stuck_after)) }
    }
}

/// Runs a bridge until `stop`, or with `once` until nothing is due.
///
/// # Errors
/// When it cannot start, or met a failure that no retry ends, or could not drain in time.
pub(crate) async fn run(config: Config, options: Options, signs: Signs, stop: CancellationToken) -> Result<()> {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let connector = Connector::of(&config)?;
    let names = Names::new(&config.postgres);
    let registered = tokio::select! {
        registered = prepare_with_patience(&config, &connector, &names, options) => registered?,
        () = stop.cancelled() => return Ok(()),
    };
    let Signs { metrics, health } = signs;
    health.enters(Phase::ConnectsSinks);
    let sinks = connect_sinks(&config).await?;
    let outlets = outlets(&config, &registered, &sinks, &metrics)?;
    check_destinations(&config, &sinks, &outlets, &stop).await;
    health.enters(Phase::WaitsForLanes);

    let (tell, news) = mpsc::channel(NEWS);
    let wake = Arc::new(Notify::new());
    let release = CancellationToken::new();
    let touched = Arc::new(Notify::new());
    let cache = usize::try_from(config.wal.cache_bytes).unwrap_or(usize::MAX);
    let handlers = registered.handlers.values().copied();
    let feed = Arc::new(Feed::new(handlers, cache, Arc::clone(&touched), metrics.cache.clone()));
    let instance = uuid::Uuid::new_v4().to_string();
    let identity = Identity { name: config.bridge.name.clone(), instance: instance.clone() };
    tracing::info!(bridge = %identity.name, instance = %identity.instance, version = env!("CARGO_PKG_VERSION"),
        handlers = outlets.len(), "bridge starts");
    let (left, drained) = mpsc::unbounded_channel();
    let hold = lanes::Setup {
        connector: connector.clone(),
        names: names.clone(),
        identity,
        lease: config.bridge.ownership == Ownership::Lease,
        frozen_after: config.bridge.frozen_after,
        tell,
        drained,
    };
    let mut holder = tokio::spawn(lanes::hold(hold, release.clone()));
    // A bridge that only drains would make publishers notify after it is gone.
    let notify = config.bridge.wake_up == WakeUp::Notify && !options.once;
    let without_stream = if notify { "notify" } else { "poll" };
    metrics.source.is(without_stream);
    let listener = notify
        .then(|| tokio::spawn(sources::listen(connector.clone(), names.clone(), Arc::clone(&wake), release.clone())));
    let janitor = tokio::spawn(crate::janitor::run(
        connector.clone(),
        names.clone(),
        config.retention.clone(),
        Arc::clone(&metrics),
        release.clone(),
    ));
    // Nobody asks one that only drains.
    let backlog = (config.http.listen.is_some() && !options.once).then(|| {
        tokio::spawn(crate::backlog::run(connector.clone(), names.clone(), Arc::clone(&metrics), release.clone()))
    });

    let stream = match config.bridge.source {
        SourceKind::Poll => None,
        // What is due is in the table; making a slot would take longer than reading it.
        _ if options.once => None,
        // No pooler passes a replication connection on in transaction mode; with "wal" that is refused as a configuration.
        _ if connector.is_pooled() => {
            tracing::info!("no way past the pooler is configured (postgres.direct_url); the bridge polls");
            None
        }
        kind => Some(wal::start(
            wal::Setup {
                connector: connector.clone(),
                names: names.clone(),
                settings: config.wal.clone(),
                kind,
                instance,
                feed: Arc::clone(&feed),
                metrics: Arc::clone(&metrics),
                without: without_stream,
            },
            release.clone(),
        )?),
    };
    let hints = Hints { wake, feed: Arc::clone(&feed), touched };

    let settings = Settings {
        poll_interval: config.bridge.poll_interval,
        sweep_interval: config.bridge.sweep_interval,
        shutdown_timeout: config.bridge.shutdown_timeout,
        once: options.once,
    };
    let links = Links::new(connector.clone(), names.clone());
    let early = breaks("drain-then-release");
    if early {
        let (stop, release) = (stop.clone(), release.clone());
        tokio::spawn(async move {
            stop.cancelled().await;
            release.cancel();
        });
    }
    let observer = Observer::new(metrics, Arc::clone(&health));
    let dispatch = dispatch::run(outlets, links, settings, dispatch::Holder { news, left }, hints, observer, stop);
    // The holder ends by itself only on a failure that no retry ends.
    let ended = tokio::select! {
        ended = dispatch => ended,
        held = &mut holder, if !early => Err(match held {
            Ok(Err(error)) => Error::new("hold lanes").source_is(error),
            Ok(Ok(())) => Error::new("the lock session ended while the bridge was running"),
            Err(panic) => Error::new("the lock session's task failed").source_is(panic),
        }),
    };
    health.ended();
    close_sinks(sinks).await;
    release.cancel();
    if !holder.is_finished()
        && let Ok(Err(error)) = holder.await
    {
        tracing::warn!(error = %error.report(), "releasing the lanes failed; the server releases them with the session");
    }
    if let Some(stream) = stream {
        stream.await;
    }
    for task in [Some(janitor), backlog, listener].into_iter().flatten() {
        if let Err(error) = task.await {
            tracing::warn!(%error, "a background task ended badly");
        }
    }
    let (ended, totals) = ended?;
    tracing::info!(
        acked = totals.acked,
        completed = totals.completed,
        refused = totals.refused,
        rejected = totals.rejected,
        unreachable = totals.unreachable,
        not_there = totals.missing,
        swept = totals.swept,
        streamed = feed.taken(),
        "bridge stops"
    );
    match ended {
        Ended::Drained => Ok(()),
        Ended::Undrained(n) => {
            Err(Error::new(format!("stopped before {n} deliveries were settled; they may be sent again"))
                .hint("raise [bridge] shutdown_timeout, or see which broker did not answer"))
        }
    }
}

/// [`prepare`] until it succeeds: a bridge that starts together with its database waits for it. What is not a matter of
/// time is an error at once.
async fn prepare_with_patience(
    config: &Config,
    connector: &Connector,
    names: &Names,
    options: Options,
) -> Result<Registered> {
    let mut wait = Duration::from_millis(250);
    loop {
        match prepare(config, connector, names, options).await {
            Err(error) if error.class() == Class::Transient => {
                tracing::warn!(error = %error.report(), "the database is not ready yet; trying again");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_secs(5));
            }
            other => return other,
        }
    }
}

/// Brings the database in order.
async fn prepare(config: &Config, connector: &Connector, names: &Names, options: Options) -> Result<Registered> {
    // Before any session of ours sets anything: through a pooler the settings would stay with the application's.
    connector.detect_pooler().await?;
    let mut session = connector.connect("start", Session::Work).await?;
    if options.migrate {
        for applied in db::migrate(&mut session, names, db::MIGRATIONS).await? {
            tracing::info!(version = applied.version, name = applied.name, "applied a migration");
        }
    } else {
        db::require_current(&session, names, db::MIGRATIONS).await?;
    }
    settle(&session, names).await?;
    register(config, &session, names).await
}

/// Refuses a copy of the database (H33).
///
/// # Errors
/// When the installation was recorded to live elsewhere.
async fn settle(session: &Client, names: &Names) -> Result<()> {
    let row = session.query_one(&names.render(SETTLE), &[]).await?;
    let broken = |source| Error::new("read where the installation lives").source_is(source);
    let home: Option<serde_json::Value> = row.try_get(0).map_err(broken)?;
    let Some(home) = home else { return Ok(()) };
    let here: serde_json::Value = row.try_get(1).map_err(broken)?;
    Err(Error::new(format!(
        "this database looks like a copy: the installation lives in {}, and this is {}; nothing is sent from here",
        place(&home),
        place(&here)
    ))
    .hint(
        "if the original is gone (restored, moved, upgraded) or this one has brokers of its own: lanebridge adopt; \
         see docs/runbooks/restore-from-backup.md",
    ))
}

fn place(home: &serde_json::Value) -> String {
    let part = |name: &str| home.get(name).and_then(serde_json::Value::as_str).unwrap_or("?").to_owned();
    format!("database {} of the server with the system identifier {}", part("database"), part("system"))
}

/// What the database says of this configuration.
pub(crate) struct Registered {
    /// Ids of its handlers by name.
    handlers: BTreeMap<String, i32>,
    installation: Arc<str>,
}

/// Writes handlers and settings; returns ids by name.
///
/// # Errors
/// When the database refused, e.g. for lack of a privilege.
pub(crate) async fn register(config: &Config, session: &Client, names: &Names) -> Result<Registered> {
    let limit = i32::try_from(config.postgres.max_payload_bytes).unwrap_or(i32::MAX);
    session.execute(&names.render(SETTINGS), &[&limit]).await?;
    let handlers: Vec<serde_json::Value> = config.handlers.values().map(describe).collect();
    let rows = session.query(&names.render(REGISTER_HANDLERS), &[&serde_json::Value::from(handlers)]).await?;
    let mut ids = BTreeMap::new();
    for row in &rows {
        let broken = |source| Error::new("read a handler's id").source_is(source);
        ids.insert(row.try_get::<_, String>(0).map_err(broken)?, row.try_get::<_, i32>(1).map_err(broken)?);
    }
    let ours: Vec<&str> = config.handlers.keys().map(String::as_str).collect();
    for row in session.query(&names.render(OTHER_HANDLERS), &[&ours]).await? {
        let handler: String = row.try_get(0).unwrap_or_default();
        tracing::warn!(
            handler,
            "the database knows a handler that this configuration does not have; its deliveries wait"
        );
    }
    let row = session.query_one(&names.render(INSTALLATION), &[]).await?;
    let installation: String =
        row.try_get(0).map_err(|source| Error::new("read the installation's id").source_is(source))?;
    Ok(Registered { handlers: ids, installation: installation.into() })
}

fn describe(handler: &Handler) -> serde_json::Value {
    let events: Vec<&str> = handler.events.iter().map(crate::config::Pattern::as_str).collect();
    let regex: Vec<String> = handler.events.iter().map(crate::config::Pattern::to_regex).collect();
    json!({
        "name": handler.name,
        "events": events,
        "type_regex": format!("^(?:{})$", regex.join("|")),
        "ordered": handler.order == Order::Key,
        "blocks": handler.on_dead == OnDead::Block,
        "sink": handler.sink,
        "destination": handler.destination.as_str(),
    })
}

/// Clients for every sink that a handler names, by name.
///
/// # Errors
/// A configuration that can never work; a broker that is down is no error here.
pub(crate) async fn connect_sinks(config: &Config) -> Result<BTreeMap<String, Arc<Sink>>> {
    let mut sinks = BTreeMap::new();
    for (name, sink) in &config.sinks {
        if config.handlers.values().any(|handler| handler.sink == *name) {
            sinks.insert(name.clone(), Arc::new(Sink::connect(name, sink).await?));
        }
    }
    Ok(sinks)
}

/// The routes of a configuration by sink, for checks.
pub(crate) fn routes(config: &Config, sink: &str, installation: &Arc<str>) -> Vec<Route> {
    let source: Arc<str> = config.bridge.ce_source.as_str().into();
    let handlers = config.handlers.values().filter(|handler| handler.sink == sink);
    handlers.map(|handler| route(handler, &source, installation)).collect()
}

fn route(handler: &Handler, source: &Arc<str>, installation: &Arc<str>) -> Route {
    Route { handler: Arc::new(handler.clone()), source: Arc::clone(source), installation: Arc::clone(installation) }
}

fn outlets(
    config: &Config,
    known: &Registered,
    sinks: &BTreeMap<String, Arc<Sink>>,
    metrics: &Metrics,
) -> Result<Vec<Outlet>> {
    let share = config.bridge.max_in_flight_bytes / config.handlers.len().max(1) as u64;
    let mut outlets = Vec::with_capacity(config.handlers.len());
    for (name, sink) in sinks {
        let Some(settings) = config.sinks.get(name) else { continue };
        for route in routes(config, name, &known.installation) {
            let handler = Arc::clone(&route.handler);
            let id = known
                .handlers
                .get(&handler.name)
                .ok_or_else(|| Error::new(format!("the database gave no id for handler {}", handler.name)))?;
            let counts = metrics
                .handler(&handler.name)
                .ok_or_else(|| Error::new(format!("there are no metrics for handler {}", handler.name)))?;
            let ordered = handler.order == Order::Key;
            let batches = settings.batches_in_flight.get();
            outlets.push(Outlet {
                rules: Rules {
                    id: *id,
                    ordered,
                    blocks: handler.on_dead == OnDead::Block,
                    keys: if ordered { sink.key_window() } else { KeyWindow::Batch },
                    retry: handler.retry,
                    batch: usize::try_from(settings.batch.get()).unwrap_or(usize::MAX),
                    batches_in_flight: usize::try_from(batches).unwrap_or(usize::MAX),
                    batch_bytes: share / u64::from(batches),
                },
                route,
                sink: Arc::clone(sink),
                metrics: Arc::clone(counts),
            });
        }
    }
    Ok(outlets)
}

/// Says once per start what is missing or weak at the destinations. Nothing here stops the start: a handler without
/// its topic must not stop the others, and its deliveries wait.
async fn check_destinations(
    config: &Config,
    sinks: &BTreeMap<String, Arc<Sink>>,
    outlets: &[Outlet],
    stop: &CancellationToken,
) {
    let checks = sinks.iter().map(|(name, sink)| async move {
        let ours = outlets.iter().filter(|outlet| outlet.route.handler.sink == *name);
        let routes: Vec<Route> = ours.map(|outlet| outlet.route.clone()).collect();
        (name, sink.check(&routes, config.postgres.max_payload_bytes).await)
    });
    // All at once: a broker that does not answer must not hold up the others' start longer than its own check takes.
    let checks = tokio::select! {
        checks = futures_util::future::join_all(checks) => checks,
        () = stop.cancelled() => return,
    };
    for (name, found) in checks {
        match found {
            Ok(findings) => {
                for finding in findings {
                    match finding.severity {
                        Severity::Weak => tracing::warn!(sink = %name, hint = %finding.hint, "{}", finding.what),
                        Severity::Missing => tracing::error!(sink = %name, hint = %finding.hint, "{}", finding.what),
                    }
                }
            }
            Err(error) => {
                tracing::warn!(sink = %name, error = %error.report(), "could not check the destinations; deliveries wait for the broker");
            }
        }
    }
}

async fn close_sinks(sinks: BTreeMap<String, Arc<Sink>>) {
    for sink in sinks.into_values() {
        // A batch that was given up on may still hold the client; it goes with the process then.
        if let Ok(sink) = Arc::try_unwrap(sink) {
            sink.close(CLOSE).await;
        }
    }
}
