//! The life of streams: made in the background, watched by a canary, given up when they cost more than they give, and
//! made again. Delivery goes on by polling all the while.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::Rng;
use tokio::time::{MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;

use super::feed::Feed;
use super::pgoutput::Decoder;
use super::reader::{self, Sight};
use crate::config::{SourceKind, Wal};
use crate::db::{Client, Connector, Names, Replication, Session, sqlstate};
use crate::error::{Class, Error, Result};
use crate::metrics::Metrics;

/// Waits between streams: first and longest, for what may pass by itself and for what a person has to change.
const SOON: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
const LATER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A stream that lived this long ends a series of connections that broke.
const STEADY: Duration = Duration::from_secs(10);
/// One reason is said once in this time, however often it comes.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// Canaries that may be missing in a row: one may wait behind a large transaction.
const MISSING: u32 = 3;
/// Owned lanes that are behind: above the first the stream is of no use, below the second it is again.
const BEHIND: (f64, f64) = (0.9, 0.1);

/// What is wrong with the server or the publication, in one row; `null` for each thing that is right.
/// $1 name of the publication.
const CHECK: &str = "
select current_setting('wal_level') as wal_level, p.oid is not null as there, coalesce(p.pubinsert, false) as inserts,
       coalesce(p.pubviaroot, false) as via_root,
       coalesce(p.puballtables, false) or r.prrelid is not null
       or exists (select from pg_publication_tables t where t.pubname = $1 and t.schemaname = '{schema_text}'
                     and t.tablename = '{p_text}events') as has_table,
       to_jsonb(r) ->> 'prqual' is not null as filtered, to_jsonb(r) ->> 'prattrs' is not null as some_columns
  from (select '{schema}.{p}events'::regclass::oid as oid) e
  left join pg_publication p on p.pubname = $1
  left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = e.oid";
/// $1 mark.
const CANARY: &str = "select {schema}.{p}canary($1)";
/// What a slot costs: bytes of log that the server would have removed without it (what came after the last checkpoint
/// stays anyway), and bytes that its decoding wrote to disk so far. $1 name of the slot.
const WEIGH: &str = "
select ((select redo_lsn from pg_control_checkpoint()) - s.restart_lsn)::bigint,
       coalesce((select t.spill_bytes from pg_stat_replication_slots t where t.slot_name = s.slot_name), 0)
  from pg_replication_slots s where s.slot_name = $1";
/// Who keeps a slot from being made: the transactions that its maker waits for. $1 pid of the maker.
const BLOCKER: &str = "
select coalesce(
    (select format('pid %s (%s, %s)', a.pid, coalesce(nullif(a.application_name, ''), a.usename, '?'), a.state)
       from unnest(pg_blocking_pids($1)) b join pg_stat_activity a on a.pid = b limit 1),
    (select format('the prepared transaction %L, open since %s', x.gid, x.prepared)
       from pg_locks l join pg_prepared_xacts x on x.transaction = l.transactionid
      where l.pid = $1 and not l.granted and l.locktype = 'transactionid' limit 1))";
/// $1 pid.
const END: &str = "select pg_terminate_backend($1)";
/// $1 instance, $2 source, $3 note.
const REPORT: &str = "select {schema}.{p}report_source($1, $2, $3)";

/// Everything that a supply of streams needs.
pub(crate) struct Setup {
    pub connector: Connector,
    pub names: Names,
    pub settings: Wal,
    pub kind: SourceKind,
    /// As in `bridges`.
    pub instance: String,
    pub feed: Arc<Feed>,
    pub metrics: Arc<Metrics>,
    /// What wakes the poll while there is no stream.
    pub without: &'static str,
}

/// How long to wait before the next stream.
enum Wait {
    Soon,
    Later,
    /// Until most lanes are read to their end, but no less than `Later`.
    CaughtUp,
}

/// Runs streams until `stop`, on a thread of its own: at one row a transaction, a runtime of several threads took
/// twice the CPU. The returned future ends with it.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn start(setup: Setup, stop: CancellationToken) -> Result<impl Future<Output = ()>> {
    let (done, ended) = tokio::sync::oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::new("start the runtime of the stream").source_is(source))?;
    let thread = std::thread::Builder::new().name("wal".to_owned()).spawn(move || {
        runtime.block_on(supply(setup, &stop));
        // Nobody waits any more if the process is on its way out.
        let _sent = done.send(());
    });
    thread.map_err(|source| Error::new("start the thread of the stream").source_is(source))?;
    Ok(async {
        // An error means that the thread panicked, which is an end as well.
        let _ended = ended.await;
    })
}

async fn supply(setup: Setup, stop: &CancellationToken) {
    let mut supply = Supply { setup, said: None, report: Report::default(), was_up: false };
    let (mut soon, mut later) = (SOON.0, LATER.0);
    loop {
        let began = Instant::now();
        let Some((error, wait)) = supply.stream(stop).await else { return };
        supply.setup.feed.resync();
        if began.elapsed() >= STEADY {
            soon = SOON.0;
        }
        // It came up, so what a person had to change was changed.
        if std::mem::take(&mut supply.was_up) {
            later = LATER.0;
        }
        let (pause, most) = match wait {
            Wait::Soon => (&mut soon, SOON.1),
            Wait::Later | Wait::CaughtUp => (&mut later, LATER.1),
        };
        let jittered = pause.mul_f64(rand::rng().random_range(0.8..1.2));
        *pause = (*pause * 2).min(most);
        let rest = async {
            supply.polls(&error).await;
            tokio::time::sleep(jittered).await;
            while matches!(wait, Wait::CaughtUp) && supply.setup.feed.behind() > BEHIND.1 {
                tokio::time::sleep(LATER.0).await;
            }
        };
        if stop.run_until_cancelled(rest).await.is_none() {
            return;
        }
    }
}

struct Supply {
    setup: Setup,
    /// The reason that was logged last, and when.
    said: Option<(String, Instant)>,
    report: Report,
    /// A canary came back from the last stream.
    was_up: bool,
}

/// What the slot cost when it was weighed last.
#[derive(Default)]
struct Weights {
    /// It kept more log than it may.
    over: bool,
    spilled: u64,
}

/// What the database was told last.
#[derive(Default)]
struct Report(Option<(&'static str, Option<String>)>);

impl Supply {
    /// One stream from its check to its end, and how long to wait before the next; `None` when stopped.
    async fn stream(&mut self, stop: &CancellationToken) -> Option<(Error, Wait)> {
        let slot = format!("lanebridge_{:016x}", rand::rng().random::<u64>());
        let (control, mut stream) = match stop.run_until_cancelled(self.begin(&slot)).await? {
            Ok(begun) => begun,
            Err(ended) => return Some(ended),
        };
        self.setup.feed.resync();
        let sight = Sight::default();
        let feed = Arc::clone(&self.setup.feed);
        let largest = usize::try_from(self.setup.settings.max_transaction).unwrap_or(usize::MAX);
        let decoder = Decoder::new(&self.setup.names);
        let ended = tokio::select! {
            ended = reader::read(&mut stream, &feed, &sight, decoder, largest) => {
                let Err(error) = ended;
                let wait = if error.class() == Class::Transient { Wait::Soon } else { Wait::Later };
                return Some((error, wait));
            }
            ended = self.watch(&control, &slot, &sight) => Some(ended),
            () = stop.cancelled() => None,
        };
        stream.end().await;
        ended
    }

    /// A stream that has just begun, and a session to watch it with.
    async fn begin(&self, slot: &str) -> std::result::Result<(Client, Replication), (Error, Wait)> {
        let control = self.setup.connector.connect("stream", Session::Work).await;
        let control = control.map_err(|error| (error, Wait::Soon))?;
        check(&control, &self.setup.names).await.map_err(|error| (error, Wait::Later))?;
        let stream = self.open(&control, slot).await?;
        Ok((control, stream))
    }

    /// A connection with its slot, streaming.
    async fn open(&self, control: &Client, slot: &str) -> std::result::Result<Replication, (Error, Wait)> {
        let wal = &self.setup.settings;
        let ms = |duration: Duration| duration.as_millis().to_string();
        let settings = [
            // The server's own may be 0, and then a frozen bridge would keep its log for ever (H27).
            ("wal_sender_timeout", ms(wal.sender_timeout)),
            ("tcp_keepalives_idle", "2".to_owned()),
            ("tcp_keepalives_interval", "1".to_owned()),
            ("tcp_keepalives_count", "3".to_owned()),
            ("tcp_user_timeout", "5000".to_owned()),
            ("statement_timeout", "0".to_owned()),
            // Making a slot waits for open transactions; the server itself gives up as well (H17), but later than we
            // do: whom it waits for can be asked only while it waits.
            ("lock_timeout", ms(wal.slot_timeout + LATER.1)),
            ("idle_session_timeout", "0".to_owned()),
            ("idle_in_transaction_session_timeout", "0".to_owned()),
            ("search_path", "pg_catalog, pg_temp".to_owned()),
        ];
        let mut stream = self.setup.connector.replicate("wal", &settings).await.map_err(explain)?;
        let pid = stream.pid();
        let create = format!("CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT");
        match timeout(wal.slot_timeout, stream.ask(&create)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) if sqlstate(&error) == Some("55P03") => return Err(self.blocked(control, pid).await),
            Ok(Err(error)) => return Err(explain(error)),
            Err(_) => {
                let blocked = self.blocked(control, pid).await;
                // It waits for a lock and does not notice that nobody waits for it.
                if let Err(error) = control.query_one(END, &[&pid]).await {
                    tracing::debug!(error = %error.report(), pid, "could not end a walsender that waits");
                }
                return Err(blocked);
            }
        }
        let publication = quote(&self.setup.names.publication()).replace('\'', "''");
        let start = format!(
            "START_REPLICATION SLOT {slot} LOGICAL 0/0 \
             (proto_version '1', publication_names '{publication}', binary 'true')"
        );
        stream.start(&start).await.map_err(explain)?;
        Ok(stream)
    }

    async fn blocked(&self, control: &Client, pid: i32) -> (Error, Wait) {
        let blocker = control.query_one(BLOCKER, &[&pid]).await;
        let blocker = blocker.ok().and_then(|row| row.try_get::<_, Option<String>>(0).ok().flatten());
        let who = blocker.unwrap_or_else(|| "an open transaction".to_owned());
        let waited = self.setup.settings.slot_timeout;
        let error = Error::transient(format!("a slot could not be made within {waited:?}: it waits for {who}"))
            .hint("end that transaction; a slot begins when all that were open have ended");
        (error, Wait::Later)
    }

    /// Sends canaries and weighs the slot, until something is wrong.
    async fn watch(&mut self, control: &Client, slot: &str, sight: &Sight) -> (Error, Wait) {
        let wal = self.setup.settings.clone();
        let mut ticks = tokio::time::interval(wal.canary_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut missing = 0;
        let mut weights = Weights::default();
        let mut useless_since: Option<Instant> = None;
        let mut counted = (0, 0);
        loop {
            ticks.tick().await;
            if let Err(error) = check(control, &self.setup.names).await {
                return (error, Wait::Later);
            }
            let mark = -rand::rng().random_range(1..i64::MAX);
            let sent = control.execute(&self.setup.names.render(CANARY), &[&mark]).await;
            match sent {
                Err(error) if control.is_closed() || error.class() != Class::Transient => {
                    let wait = if control.is_closed() { Wait::Soon } else { Wait::Later };
                    return (error, wait);
                }
                // A lock on the table, say; it proves nothing about the stream.
                Err(error) => tracing::debug!(error = %error.report(), "a canary could not be sent"),
                Ok(_) => match timeout(wal.canary_interval, sight.sees(mark)).await {
                    Ok(()) => {
                        missing = 0;
                        self.streams(control).await;
                    }
                    Err(_) => missing += 1,
                },
            }
            // Before the canaries: a walsender that is late because it decodes a large transaction is that, not broken.
            if let Some(problem) = self.too_heavy(control, slot, &mut weights).await {
                return problem;
            }
            if missing >= MISSING {
                let waited = wal.canary_interval * MISSING;
                let error = Error::transient(format!("nothing came through the stream in {waited:?}"))
                    .hint("was the publication or the table changed? does the server decode a large transaction?");
                return (error, Wait::Soon);
            }
            let now = (sight.events.load(Ordering::Relaxed), sight.useful.load(Ordering::Relaxed));
            let (events, useful) = (now.0 - counted.0, now.1 - counted.1);
            counted = now;
            // Events that are not wanted yet, or none at all while everything is behind: a broker that is away.
            let useless = self.setup.feed.behind() > BEHIND.0 && useful * 10 <= events;
            useless_since = useless.then(|| useless_since.unwrap_or_else(Instant::now));
            if useless_since.is_some_and(|since| since.elapsed() >= wal.max_behind) {
                let error = Error::transient(format!(
                    "nearly all lanes are behind, and the stream was of no use for {:?}",
                    wal.max_behind
                ));
                return (error, Wait::CaughtUp);
            }
        }
    }

    async fn too_heavy(&self, control: &Client, slot: &str, weights: &mut Weights) -> Option<(Error, Wait)> {
        let wal = &self.setup.settings;
        let row = match control.query_opt(WEIGH, &[&slot]).await {
            Ok(Some(row)) => row,
            Ok(None) => return Some((Error::transient("the slot is gone"), Wait::Soon)),
            Err(error) => return Some((error, Wait::Soon)),
        };
        let retained = row.try_get::<_, i64>(0).ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        let spilled = row.try_get::<_, i64>(1).ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        let grown = spilled.saturating_sub(std::mem::replace(&mut weights.spilled, spilled));
        let was_over = std::mem::replace(&mut weights.over, retained > wal.max_retained);
        // Twice: a slot moves some moments after the checkpoint that lets it.
        if was_over && weights.over {
            let error = Error::transient(format!("the slot keeps {retained} bytes of log, more than max_retained"))
                .hint("a long transaction, or more load than one walsender decodes");
            return Some((error, Wait::CaughtUp));
        }
        if grown > wal.max_spill {
            let error = Error::transient(format!("decoding wrote {grown} bytes to disk, more than max_spill"))
                .hint("large transactions, perhaps of other tables; each stream decodes them all");
            return Some((error, Wait::CaughtUp));
        }
        None
    }

    async fn streams(&mut self, control: &Client) {
        self.was_up = true;
        self.setup.metrics.source.is("wal");
        if self.report.0 != Some(("wal", None)) {
            tracing::info!("the stream of the write-ahead log is up");
            self.said = None;
        }
        self.tell(control, "wal", None).await;
    }

    /// Polling from now on, because of `error`.
    async fn polls(&mut self, error: &Error) {
        self.setup.metrics.source.is(self.setup.without);
        let reason = error.report();
        let said = self.said.as_ref().is_some_and(|(said, at)| is_same(said, &reason) && at.elapsed() < SAY_EVERY);
        if !said {
            let auto_cannot = self.setup.kind == SourceKind::Auto && error.class() != Class::Transient;
            if auto_cannot {
                tracing::info!(%reason, "polling: the write-ahead log cannot be streamed; trying again at times");
            } else {
                tracing::warn!(%reason, "polling: there is no stream of the write-ahead log; trying again");
            }
            self.said = Some((reason.clone(), Instant::now()));
        }
        if let Ok(control) = self.setup.connector.connect("stream", Session::Work).await {
            self.tell(&control, "poll", Some(reason)).await;
        }
    }

    async fn tell(&mut self, control: &Client, source: &'static str, note: Option<String>) {
        // Each time: the row may be a new epoch's by now.
        let sql = self.setup.names.render(REPORT);
        match control.execute(&sql, &[&self.setup.instance, &source, &note]).await {
            Ok(_) => self.report.0 = Some((source, note)),
            Err(error) => tracing::debug!(error = %error.report(), "could not report the source"),
        }
    }
}

/// Two reasons that differ in their figures only.
fn is_same(one: &str, other: &str) -> bool {
    let words = |text: &str| text.chars().filter(|c| !c.is_ascii_digit()).collect::<String>();
    words(one) == words(other)
}

/// Whether the server and the publication can give us events at all.
///
/// # Errors
/// What is wrong, and the statement that mends it.
async fn check(control: &Client, names: &Names) -> Result<()> {
    let publication = names.publication();
    let row = control.query_one(&names.render(CHECK), &[&publication]).await?;
    let is = |column: usize| row.try_get::<_, bool>(column).unwrap_or(false);
    let level: &str = row.try_get(0).unwrap_or("?");
    let table = names.render("{schema}.{p}events");
    let quoted = quote(&publication);
    let problem = |what: String, hint: String| Err(Error::new(what).hint(hint));
    if level != "logical" {
        let hint = "ALTER SYSTEM SET wal_level = logical, then restart the server".to_owned();
        return problem(format!("wal_level is {level}"), hint);
    }
    let options = "(publish = 'insert', publish_via_partition_root = true)";
    if !is(1) {
        return problem(
            format!("the publication {quoted} is not there"),
            format!("CREATE PUBLICATION {quoted} FOR TABLE ONLY {table} WITH {options}"),
        );
    }
    if !is(4) {
        return problem(
            format!("the publication {quoted} does not have the table {table}"),
            format!("ALTER PUBLICATION {quoted} ADD TABLE ONLY {table}"),
        );
    }
    if !is(2) || !is(3) {
        return problem(
            format!("the publication {quoted} was altered: it publishes no inserts, or not as rows of the parent"),
            format!("ALTER PUBLICATION {quoted} SET {options}"),
        );
    }
    if is(5) || is(6) {
        return problem(
            format!("the publication {quoted} has a row filter or a list of columns"),
            format!("ALTER PUBLICATION {quoted} SET TABLE ONLY {table}"),
        );
    }
    Ok(())
}

/// Tries what a stream needs, as far as that leaves nothing behind: server, publication, and the right to log in.
///
/// # Errors
/// What is missing, and the statement or setting that gives it.
pub(crate) async fn can_stream(connector: &Connector, control: &Client, names: &Names) -> Result<()> {
    check(control, names).await?;
    let stream = connector.replicate("doctor", &[]).await.map_err(|error| explain(error).0)?;
    stream.end().await;
    Ok(())
}

/// What a person has to change, for answers that say so.
fn explain(error: Error) -> (Error, Wait) {
    let hint = match sqlstate(&error) {
        Some("42501") => "ALTER ROLE ... REPLICATION, or the role that your provider has for it (rds_replication)",
        Some("53400") => "raise max_replication_slots; every bridge takes one",
        Some("53300") => "raise max_wal_senders; every bridge takes one",
        Some("55000") => "ALTER SYSTEM SET wal_level = logical, then restart the server",
        Some("28000") => "pg_hba.conf must let the role connect to the database for replication",
        _ if error.class() == Class::Transient => return (error, Wait::Soon),
        _ => return (error, Wait::Later),
    };
    (error.hint(hint), Wait::Later)
}

fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::is_same;

    /// The figures of a reason change each time; that is no reason to say it again.
    #[test]
    fn reasons_are_the_same_apart_from_their_figures() {
        assert!(is_same("the slot keeps 70000000 bytes", "the slot keeps 8 bytes"));
        assert!(!is_same("the slot keeps 7 bytes", "decoding wrote 7 bytes"));
    }
}
