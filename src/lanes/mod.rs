//! Ownership of lanes: a session advisory lock per lane on one pinned session, an epoch that fences, a heartbeat. By lease
//! the heartbeat takes the place of the locks, and the session that of any connection.
//!
//! I1: a lane is announced as gained only after its lock is held, its former owner is fenced and the new owner is
//! committed, in that order (H54). I2: when no heartbeat is answered for [`Setup::limit`], every lane is announced as lost;
//! locks live and die with the session, so they are lost together. A lease is up only when others saw its heartbeat
//! stand still for `frozen_after`, at least twice as long, and they began to count later than we did (H36).
//! Never: the session of the locks runs nothing else, and it never goes through a pool.

mod share;

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use share::{Moves, Peer, Watch, share, surplus};

use crate::db::{Client, Connector, FENCED, Names, Prepared, Session, sqlstate};
use crate::delivery::DeliveryId;
use crate::error::{Error, Result};

/// Between two proofs that the locks are held.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Without an answer to a heartbeat for longer the session counts as lost.
const LIVENESS: Duration = Duration::from_secs(5);
/// First and longest wait before registering again after a loss; doubled in between. Short, since nothing is delivered
/// meanwhile.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

const LAST_LANE: i16 = 255;

/// $1 name, $2 instance, $3 version.
const REGISTER: &str = "select {schema}.{p}register_bridge($1, $2, $3)";
const REGISTER_LEASE: &str = "select {schema}.{p}register_lease($1, $2, $3)";
/// $1 lanes, $2 most.
const LOCK: &str = "select * from {schema}.{p}lock_lanes($1, $2)";
/// $1 epoch, $2 lanes.
const TAKE: &str = "select {schema}.{p}take_lanes($1, $2)";
/// $1 epoch, $2 lanes, $3 most.
const LEASE: &str = "select lane, left_behind from {schema}.{p}lease_lanes($1, $2, $3)";
/// $1 epoch, $2 lanes; before `TAKE`.
const LEFT_BEHIND: &str = "select {schema}.{p}left_behind($1, $2)";
/// $1 lanes.
const SUSPECTS: &str = "select lane, handler, seq, attempts, together from {schema}.{p}suspects($1)";
/// $1 epoch, $2 lanes; then, committed, $1 lanes.
const RELEASE: &str = "select {schema}.{p}release_lanes($1, $2)";
const UNLOCK: &str = "select {schema}.{p}unlock_lanes($1)";
/// $1 epoch.
const HEARTBEAT_SQL: &str = "select alive, locks, last_seq, xid from {schema}.{p}heartbeat($1)";
const PEERS: &str = "select epoch, name, beat, lanes from {schema}.{p}peers()";
/// $1 epoch, $2 the frozen one's, $3 its beat.
const END_FROZEN: &str = "select {schema}.{p}end_frozen($1, $2, $3)";
/// $1 epoch.
const LEAVE: &str = "select {schema}.{p}leave($1)";

/// What the owner of the session tells dispatch.
#[derive(Debug)]
pub(crate) enum Ownership {
    Gained {
        epoch: i64,
        lanes: Vec<i16>,
        left: LeftBehind,
    },
    /// Every event with a seq up to `last_seq` belongs to a transaction below `xid`.
    Mark {
        xid: i64,
        last_seq: i64,
    },
    /// These lanes go to another bridge: nothing new for them, and word when they are drained.
    Release {
        lanes: Vec<i16>,
    },
    /// All lanes of the epoch are gone; nothing may be sent or written for them.
    Lost,
    /// The first round ended without a lane; these bridges hold them.
    NoneFree {
        owners: Vec<String>,
    },
}

/// What a dead owner left of lanes that are ours now (D9).
#[derive(Clone, Debug, Default)]
pub(crate) struct LeftBehind {
    pub lanes: Vec<i16>,
    /// It can have sent nothing above.
    pub last_seq: i64,
    /// What was sent under record and not settled, in `lanes` and in others that were gained.
    pub records: Vec<Record>,
}

/// A delivery that was sent under record and is not settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub id: DeliveryId,
    /// Its attempts when it was sent.
    pub attempts: i16,
    /// How many were sent together.
    pub together: usize,
}

/// Who this process is.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub name: String,
    /// Random per process.
    pub instance: String,
}

/// What holding lanes needs.
pub(crate) struct Setup {
    pub connector: Connector,
    pub names: Names,
    pub identity: Identity,
    /// By lease instead of locks.
    pub lease: bool,
    /// A bridge whose heartbeat stands still for so long is ended.
    pub frozen_after: Duration,
    /// Where news goes.
    pub tell: mpsc::Sender<Ownership>,
    /// Lanes that dispatch drained after [`Ownership::Release`].
    pub drained: mpsc::UnboundedReceiver<Vec<i16>>,
}

impl Setup {
    /// How long lanes are ours after a heartbeat was sent that was answered.
    fn limit(&self) -> Duration {
        if self.lease { LIVENESS.min(self.frozen_after / 2) } else { LIVENESS }
    }
}

/// Holds a fair share of the lanes until `stop`, then gives them back; reconnects by itself. `stop` is for after the
/// drain.
///
/// # Errors
/// A failure that no retry ends, such as a schema that does not fit.
pub(crate) async fn hold(mut setup: Setup, stop: CancellationToken) -> Result<()> {
    let mut wait = RECONNECT.0;
    loop {
        let began = Instant::now();
        let ended = term(&mut setup, &stop).await;
        if stop.is_cancelled() {
            return ended;
        }
        // A full channel cannot lose this: dispatch must know before anything else is announced.
        if setup.tell.send(Ownership::Lost).await.is_err() {
            return Ok(());
        }
        match ended {
            Ok(()) => return Ok(()),
            // A login that is refused now was accepted at the start: a password is being rotated, a role locked for a while.
            // Fenced: a bridge that stood still without a lane keeps its session, and learns of it when it wants one (H45).
            Err(error) if error.class() != crate::error::Class::Failure || sqlstate(&error) == Some(FENCED) => {
                tracing::warn!(error = %error.report(), "the lock session ended; all lanes are given up until it is back");
            }
            Err(error) => return Err(error),
        }
        if began.elapsed() > RECONNECT.1 {
            wait = RECONNECT.0;
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(wait) => {}
        }
        wait = (wait * 2).min(RECONNECT.1);
    }
}

/// One session from its registration to its end.
async fn term(setup: &mut Setup, stop: &CancellationToken) -> Result<()> {
    let mut term = Term::begin(setup).await?;
    let mut ticks = tokio::time::interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut first_round = true;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = term.session.closed() => return Err(Error::transient("the server closed the lock session")),
            Some(lanes) = setup.drained.recv() => {
                term.release(&lanes).await?;
                continue;
            }
            _ = ticks.tick() => {}
        }
        let limit = setup.limit();
        let Ok(round) = tokio::time::timeout_at(term.proven + limit, term.round(&setup.names)).await else {
            return Err(Error::transient(format!("no answer to a heartbeat within {limit:?}")));
        };
        let Round { peers, gained, left, mark } = round?;
        let mut news = vec![mark];
        if !gained.is_empty() {
            news.push(Ownership::Gained { epoch: term.epoch, lanes: gained, left });
        }
        if first_round && term.held.is_empty() {
            let owners: Vec<String> = peers.names;
            tracing::info!(owners = ?owners, "every lane is owned by another bridge; standing by");
            news.push(Ownership::NoneFree { owners });
        }
        let leaving = term.give_up(&peers.all);
        if !leaving.is_empty() {
            tracing::info!(lanes = leaving.len(), "other bridges lack lanes; giving some up");
            news.push(Ownership::Release { lanes: leaving });
        }
        for news in news {
            if setup.tell.send(news).await.is_err() {
                // Dispatch has ended; what it sent is settled only when the brokers are closed.
                stop.cancelled().await;
            }
        }
        if stop.is_cancelled() {
            break;
        }
        if term.end_frozen(&peers.all, setup.frozen_after).await? {
            // Its lanes are free as soon as its session has ended.
            ticks.reset_after(HEARTBEAT / 10);
        }
        first_round = false;
    }
    term.session.execute(&setup.names.render(LEAVE), &[&term.epoch]).await?;
    Ok(())
}

/// What a heartbeat brought.
struct Round {
    peers: Peers,
    gained: Vec<i16>,
    left: LeftBehind,
    mark: Ownership,
}

/// The other bridges, and ours, at one moment.
struct Peers {
    all: Vec<Peer>,
    /// Names of those that own lanes.
    names: Vec<String>,
}

/// A registered session and what it holds.
struct Term {
    session: Client,
    lease: bool,
    epoch: i64,
    /// When the last heartbeat was sent that was answered.
    proven: Instant,
    held: Vec<i16>,
    /// Given up, and not drained yet.
    leaving: Vec<i16>,
    moves: Moves,
    watch: Watch,
    lock: Prepared,
    lease_lanes: Prepared,
    take: Prepared,
    release: Prepared,
    unlock: Prepared,
    heartbeat: Prepared,
    peers: Prepared,
    end_frozen: Prepared,
}

impl Term {
    async fn begin(setup: &mut Setup) -> Result<Self> {
        let session = setup.connector.connect("lock", Session::Lock).await?;
        let Identity { name, instance } = &setup.identity;
        let register = setup.names.render(if setup.lease { REGISTER_LEASE } else { REGISTER });
        let proven = Instant::now();
        let epoch: i64 = one(session.query_one(&register, &[name, instance, &env!("CARGO_PKG_VERSION")]).await?)?;
        // Words of an earlier term are about lanes that are lost.
        while setup.drained.try_recv().is_ok() {}
        let prepare = async |sql: &str| session.prepare(&setup.names.render(sql)).await;
        Ok(Self {
            lease: setup.lease,
            epoch,
            proven,
            held: Vec::new(),
            leaving: Vec::new(),
            moves: Moves::new(Instant::now().into_std()),
            watch: Watch::default(),
            lock: prepare(LOCK).await?,
            lease_lanes: prepare(LEASE).await?,
            take: prepare(TAKE).await?,
            release: prepare(RELEASE).await?,
            unlock: prepare(UNLOCK).await?,
            heartbeat: prepare(HEARTBEAT_SQL).await?,
            peers: prepare(PEERS).await?,
            end_frozen: prepare(END_FROZEN).await?,
            session,
        })
    }

    /// Looks around, takes what is free and ours to take, and proves that all of it is.
    async fn round(&mut self, names: &Names) -> Result<Round> {
        let peers = self.peers().await?;
        let (gained, mut left) = self.take(&peers, names).await?;
        let (last_seq, mark) = self.beat().await?;
        left.last_seq = last_seq;
        Ok(Round { peers, gained, left, mark })
    }

    async fn peers(&self) -> Result<Peers> {
        let rows = self.session.query(&self.peers, &[]).await?;
        let broken = |source| Error::new("read the other bridges").source_is(source);
        let mut peers = Peers { all: Vec::with_capacity(rows.len()), names: Vec::new() };
        for row in &rows {
            let lanes: i64 = row.try_get(3).map_err(broken)?;
            let peer = Peer {
                epoch: row.try_get(0).map_err(broken)?,
                beat: row.try_get(2).map_err(broken)?,
                lanes: usize::try_from(lanes).unwrap_or(0),
            };
            if peer.lanes > 0 && peer.epoch != self.epoch {
                peers.names.push(row.try_get(1).map_err(broken)?);
            }
            peers.all.push(peer);
        }
        peers.names.sort_unstable();
        peers.names.dedup();
        Ok(peers)
    }

    /// Takes free lanes up to our share; those of a bridge that is gone are fenced before they are ours.
    async fn take(&mut self, peers: &Peers, names: &Names) -> Result<(Vec<i16>, LeftBehind)> {
        let mut left = LeftBehind::default();
        let most = share(self.epoch, &peers.all).saturating_sub(self.held.len());
        if most == 0 {
            return Ok((Vec::new(), left));
        }
        let mut wanted: Vec<i16> = (0..=LAST_LANE).filter(|lane| !self.held.contains(lane)).collect();
        // In another order at every bridge, so that two that look for lanes at once do not try the same ones.
        let begin = usize::try_from(self.epoch).unwrap_or(0) * 37 % wanted.len().max(1);
        wanted.rotate_left(begin);
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let gained = if self.lease {
            self.lease(&wanted, most, &mut left).await?
        } else {
            self.lock(&wanted, most, &mut left, names).await?
        };
        if !gained.is_empty() {
            for row in self.session.query(&names.render(SUSPECTS), &[&gained]).await? {
                left.records.push(record(&row)?);
            }
            self.held.extend(&gained);
            self.moves.gained(&gained, Instant::now().into_std());
            tracing::info!(epoch = self.epoch, lanes = self.held.len(), "own lanes");
        }
        Ok((gained, left))
    }

    /// Those whose locks were free; a bridge that is gone is fenced before its lanes are ours.
    async fn lock(&self, wanted: &[i16], most: i32, left: &mut LeftBehind, names: &Names) -> Result<Vec<i16>> {
        let rows = self.session.query(&self.lock, &[&wanted, &most]).await?;
        let gained = rows.into_iter().map(one).collect::<Result<Vec<i16>>>()?;
        if !gained.is_empty() {
            let behind = names.render(LEFT_BEHIND);
            left.lanes = one(self.session.query_one(&behind, &[&self.epoch, &gained]).await?)?;
            let fenced: Vec<i64> = one(self.session.query_one(&self.take, &[&self.epoch, &gained]).await?)?;
            if !fenced.is_empty() {
                tracing::info!(epoch = self.epoch, fenced = ?fenced, lanes = gained.len(), "took over lanes of a bridge that left without saying so");
            }
        }
        Ok(gained)
    }

    /// Those that nobody holds; the same in one transaction.
    async fn lease(&self, wanted: &[i16], most: i32, left: &mut LeftBehind) -> Result<Vec<i16>> {
        let broken = |source| Error::new("read the leased lanes").source_is(source);
        let mut gained = Vec::new();
        for row in self.session.query(&self.lease_lanes, &[&self.epoch, &wanted, &most]).await? {
            let lane = row.try_get(0).map_err(broken)?;
            gained.push(lane);
            if row.try_get(1).map_err(broken)? {
                left.lanes.push(lane);
            }
        }
        if !left.lanes.is_empty() {
            tracing::info!(
                epoch = self.epoch,
                lanes = left.lanes.len(),
                "took over lanes of a bridge that left without saying so"
            );
        }
        Ok(gained)
    }

    /// Lanes that others lack, to be drained.
    fn give_up(&mut self, peers: &[Peer]) -> Vec<i16> {
        let staying = self.held.len() - self.leaving.len();
        let surplus = surplus(self.epoch, self.held.len(), peers).saturating_sub(self.leaving.len()).min(staying);
        if surplus == 0 {
            return Vec::new();
        }
        let candidates: Vec<i16> = self.held.iter().copied().filter(|lane| !self.leaving.contains(lane)).collect();
        let chosen = self.moves.choose(&candidates, surplus, Instant::now().into_std());
        self.leaving.extend(&chosen);
        chosen
    }

    /// Lanes that are drained become free; first in the table, then, committed, by their locks.
    async fn release(&mut self, lanes: &[i16]) -> Result<()> {
        let lanes: Vec<i16> = lanes.iter().copied().filter(|lane| self.leaving.contains(lane)).collect();
        self.session.execute(&self.release, &[&self.epoch, &lanes]).await?;
        if !self.lease {
            self.session.execute(&self.unlock, &[&lanes]).await?;
        }
        self.held.retain(|lane| !lanes.contains(lane));
        self.leaving.retain(|lane| !lanes.contains(lane));
        tracing::info!(epoch = self.epoch, lanes = self.held.len(), "own lanes");
        Ok(())
    }

    /// True when it ended one.
    async fn end_frozen(&mut self, peers: &[Peer], limit: Duration) -> Result<bool> {
        let mut any = false;
        for (epoch, beat) in self.watch.frozen(self.epoch, peers, limit, Instant::now().into_std()) {
            let ended = self.session.query_one(&self.end_frozen, &[&self.epoch, &epoch, &beat]).await;
            match ended.and_then(one::<bool>) {
                Ok(true) => {
                    any = true;
                    tracing::warn!(
                        epoch,
                        "the heartbeat of a bridge stood still for {limit:?}; its session is ended and its epoch fenced"
                    );
                }
                // It moved after all.
                Ok(false) => {}
                Err(error) if self.session.is_closed() => return Err(error),
                Err(error) => {
                    tracing::warn!(epoch, error = %error.report(), hint = "bridges need one role, or pg_signal_backend",
                        "the heartbeat of a bridge stands still, and its session cannot be ended");
                }
            }
        }
        Ok(any)
    }
}

impl Term {
    /// One proof that the lanes are still ours; the last seq that was given to an event, and the mark of that moment.
    async fn beat(&mut self) -> Result<(i64, Ownership)> {
        let (epoch, held, sent) = (self.epoch, self.held.len(), Instant::now());
        let row = self.session.query_one(&self.heartbeat, &[&epoch]).await?;
        let broken = |source| Error::new("read a heartbeat").source_is(source);
        let alive: bool = row.try_get(0).map_err(broken)?;
        let locks: i32 = row.try_get(1).map_err(broken)?;
        if !alive {
            return Err(Error::transient(format!("epoch {epoch} was fenced by another bridge")));
        }
        if !self.lease && usize::try_from(locks).ok() != Some(held) {
            return Err(Error::transient(format!("the session holds {locks} lane locks of {held}"))
                .hint("something ran DISCARD ALL or pg_advisory_unlock_all on it, or a pooler is in between"));
        }
        self.proven = sent;
        let last_seq = row.try_get(2).map_err(broken)?;
        Ok((last_seq, Ownership::Mark { last_seq, xid: row.try_get(3).map_err(broken)? }))
    }
}

fn record(row: &tokio_postgres::Row) -> Result<Record> {
    let broken = |source| Error::new("read what was sent under record").source_is(source);
    let together: i32 = row.try_get(4).map_err(broken)?;
    Ok(Record {
        id: DeliveryId {
            lane: row.try_get(0).map_err(broken)?,
            handler: row.try_get(1).map_err(broken)?,
            seq: row.try_get(2).map_err(broken)?,
        },
        attempts: row.try_get(3).map_err(broken)?,
        together: usize::try_from(together).unwrap_or(1),
    })
}

fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(row: tokio_postgres::Row) -> Result<T> {
    row.try_get(0).map_err(|source| Error::new("read the lock session's answer").source_is(source))
}
