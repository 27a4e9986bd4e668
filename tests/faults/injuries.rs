//! The faults of the matrix: each is done to a running arena at a random moment, and healed.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;

use crate::arena::{Arena, Place, Source, within};
use crate::wal::MAKE_PUBLICATION;
use crate::wire::{Mode, Wire};

/// A takeover that lasts longer is no takeover.
const TAKEOVER: Duration = Duration::from_secs(30);
/// A server notices a peer that is gone within this.
const NOTICED: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    KillOne,
    KillAll,
    Terminate,
    Freeze,
    DatabaseGone,
    BrokerGone,
    AnswersHeld,
    Reset,
    Slow,
    SessionsEnded,
    BrokerAway,
    BrokerKilled,
    BrokerFrozen,
    PublicationDropped,
    Pairs,
}

impl Fault {
    pub const ALL: [Self; 15] = [
        Self::KillOne,
        Self::KillAll,
        Self::Terminate,
        Self::Freeze,
        Self::DatabaseGone,
        Self::BrokerGone,
        Self::AnswersHeld,
        Self::Reset,
        Self::Slow,
        Self::SessionsEnded,
        Self::BrokerAway,
        Self::BrokerKilled,
        Self::BrokerFrozen,
        Self::PublicationDropped,
        Self::Pairs,
    ];

    /// As in the name of a cell.
    pub fn name(self) -> &'static str {
        match self {
            Self::KillOne => "kill",
            Self::KillAll => "kill-all",
            Self::Terminate => "sigterm",
            Self::Freeze => "freeze",
            Self::DatabaseGone => "database-gone",
            Self::BrokerGone => "broker-gone",
            Self::AnswersHeld => "answers-held",
            Self::Reset => "reset",
            Self::Slow => "slow",
            Self::SessionsEnded => "sessions-ended",
            Self::BrokerAway => "broker-away",
            Self::BrokerKilled => "broker-killed",
            Self::BrokerFrozen => "broker-frozen",
            Self::PublicationDropped => "publication-dropped",
            Self::Pairs => "pairs",
        }
    }

    /// As in the table of docs/reliability.md.
    pub fn description(self) -> &'static str {
        match self {
            Self::KillOne => "`kill -9` of one bridge, started again after the takeover",
            Self::KillAll => "`kill -9` of every bridge at once, started again",
            Self::Terminate => "SIGTERM under load: it drains, exits 0 and is started again",
            Self::Freeze => "SIGSTOP for 1-12 s, then SIGCONT",
            Self::DatabaseGone => "bridge and Postgres parted for 0.5-10 s: nothing passes, nothing is closed",
            Self::BrokerGone => "bridge and broker parted for 0.5-8 s",
            Self::AnswersHeld => "requests reach the broker or Postgres for 0.5-6 s, answers come late or never",
            Self::Reset => "connections reset after a random byte of a request",
            Self::Slow => "200 ms of latency for each piece and 10 kB/s, for 1-4 s",
            Self::SessionsEnded => "`pg_terminate_backend` of a lock, poll, confirm, complete, wal or listen session",
            Self::BrokerAway => "every connection to the broker reset, new ones refused for 0.2-4 s",
            Self::BrokerKilled => "`kill -9` of the broker, started again 0.2-2 s later with its data",
            Self::BrokerFrozen => "SIGSTOP of the broker for 0.5-6 s, then SIGCONT",
            Self::PublicationDropped => "publication dropped under load, made again 0-1 s later",
            Self::Pairs => "two of the above at once, chosen at random",
        }
    }

    /// How often in one cell: more where it is cheap.
    pub fn times(self) -> usize {
        match self {
            Self::SessionsEnded => 16,
            Self::KillOne | Self::Reset => 12,
            Self::KillAll | Self::Terminate | Self::BrokerKilled | Self::PublicationDropped => 8,
            Self::Pairs => 6,
            Self::AnswersHeld | Self::BrokerAway | Self::BrokerFrozen => 5,
            Self::DatabaseGone | Self::BrokerGone | Self::Slow => 4,
            Self::Freeze => 3,
        }
    }

    /// Faults that one injection counts as.
    pub fn weight(self) -> usize {
        if self == Self::Pairs { 2 } else { 1 }
    }

    /// Whether it is done to a broker that others use as well, unless the cell has one of its own.
    pub fn needs_own_broker(self) -> bool {
        matches!(self, Self::BrokerKilled | Self::BrokerFrozen)
    }

    /// Whether nothing may be repeated: the path of delivery is not hurt, or drains before it ends.
    pub fn repeats_nothing(self) -> bool {
        matches!(self, Self::Terminate | Self::PublicationDropped)
    }
}

/// What an injection showed.
#[derive(Debug, Default)]
pub struct Injury {
    /// From the fault until others own all lanes of the bridge that was hurt.
    pub takeover: Option<Duration>,
    /// A promise that did not wait for the end of the cell to be broken.
    pub broken: Option<String>,
}

impl Arena {
    /// Does it, and heals it.
    pub async fn injure(&self, fault: Fault, source: Source, rng: &mut StdRng) -> Injury {
        let place = self.places.choose(rng).expect("an arena has bridges");
        match fault {
            Fault::KillOne => self.kill_one(place, rng).await,
            Fault::KillAll => self.kill_all(rng).await,
            Fault::Terminate => self.stop_one(place).await,
            Fault::Freeze => self.freeze(place, rng).await,
            Fault::DatabaseGone => self.part(|place| &place.to_database, Mode::Hold, 500..10_000, rng).await,
            Fault::BrokerGone => self.part(|place| &place.to_broker, Mode::Hold, 500..8_000, rng).await,
            Fault::AnswersHeld => self.part(mostly_broker(rng), Mode::HoldAnswers, 500..6_000, rng).await,
            Fault::BrokerAway => self.part(|place| &place.to_broker, Mode::Refuse, 200..4_000, rng).await,
            Fault::Slow => {
                let mode = Mode::Slow { latency: Duration::from_millis(200), bytes_per_second: 10_000 };
                self.part(mostly_broker(rng), mode, 1_000..4_000, rng).await
            }
            Fault::Reset => {
                let wire = mostly_broker(rng)(place);
                wire.cut_after(rng.random_range(0..20_000), Duration::from_secs(2)).await;
                Injury::default()
            }
            Fault::SessionsEnded => self.end_session(rng).await,
            Fault::BrokerKilled => {
                let broker = self.broker.as_ref().expect("the cell has a broker of its own");
                broker.kill();
                pause(200..2_000, rng).await;
                broker.start_again().await;
                Injury::default()
            }
            Fault::BrokerFrozen => {
                let broker = self.broker.as_ref().expect("the cell has a broker of its own");
                broker.signal("STOP");
                pause(500..6_000, rng).await;
                broker.signal("CONT");
                Injury::default()
            }
            Fault::PublicationDropped => {
                self.client.batch_execute("drop publication if exists lanebridge_wal").await.unwrap();
                pause(0..1_000, rng).await;
                // Of a pair that drops it twice, the other may have made it meanwhile.
                let _made = self.client.batch_execute(MAKE_PUBLICATION).await;
                Injury::default()
            }
            Fault::Pairs => self.injure_twice(source, rng).await,
        }
    }

    async fn kill_one(&self, place: &Place, rng: &mut StdRng) -> Injury {
        let epoch = self.epoch(place).await;
        let counts = self.places.len() > 1 && self.lanes_of(epoch).await > 0;
        place.kill();
        let mut injury = Injury::default();
        if counts {
            injury = self.taken_over(epoch).await;
        } else {
            pause(0..500, rng).await;
        }
        place.start();
        injury
    }

    /// H18, H50: no slot outlives its bridge, for it would keep the server's log.
    async fn kill_all(&self, rng: &mut StdRng) -> Injury {
        for place in &self.places {
            place.kill();
        }
        let gone = within(NOTICED, || async { self.slots().await == 0 }).await;
        pause(0..500, rng).await;
        for place in &self.places {
            place.start();
        }
        Injury { broken: gone.is_none().then(|| "a slot outlived its bridge".to_owned()), ..Injury::default() }
    }

    async fn stop_one(&self, place: &Place) -> Injury {
        // Before it listens for signals, a SIGTERM just ends it.
        self.settled().await;
        let drained = place.terminate().await;
        place.start();
        Injury { broken: (!drained).then(|| "a bridge did not drain".to_owned()), ..Injury::default() }
    }

    async fn freeze(&self, place: &Place, rng: &mut StdRng) -> Injury {
        let epoch = self.epoch(place).await;
        let counts = self.places.len() > 1 && self.lanes_of(epoch).await > 0;
        let seconds = rng.random_range(1.0..12.0);
        let thaw = Instant::now() + Duration::from_secs_f64(seconds);
        place.signal("STOP");
        let taken = tokio::time::timeout_at(thaw, self.taken_over(epoch)).await;
        tokio::time::sleep_until(thaw).await;
        place.signal("CONT");
        match taken {
            Ok(injury) if counts => injury,
            // It went on before anybody had to take over.
            _ => Injury::default(),
        }
    }

    async fn taken_over(&self, epoch: i64) -> Injury {
        let taken =
            within(TAKEOVER, || async { self.lanes_of(epoch).await == 0 && self.owned_without(epoch).await == 256 })
                .await;
        let broken = taken.is_none().then(|| format!("the lanes of epoch {epoch} were not taken over"));
        Injury { takeover: taken, broken }
    }

    /// One bridge, or all of them, for a while.
    async fn part(
        &self,
        wire: impl Fn(&Place) -> &Wire,
        mode: Mode,
        millis: std::ops::Range<u64>,
        rng: &mut StdRng,
    ) -> Injury {
        let all = rng.random_bool(0.3);
        let one = rng.random_range(0..self.places.len());
        let hurt: Vec<&Wire> =
            self.places.iter().enumerate().filter(|(n, _)| all || *n == one).map(|(_, place)| wire(place)).collect();
        for wire in &hurt {
            wire.set(mode);
        }
        pause(millis, rng).await;
        // The answers that were held may come late, or never.
        let never = mode == Mode::HoldAnswers && rng.random_bool(0.5);
        for wire in &hurt {
            if never {
                wire.cut();
            }
            wire.heal();
        }
        Injury::default()
    }

    /// One of a random kind, or several at once: of bridges, never of publishers.
    async fn end_session(&self, rng: &mut StdRng) -> Injury {
        let kinds = ["lock", "poll", "confirm", "complete", "stream", "listen", "walsender", "%"];
        let kind = kinds.choose(rng).expect("a list of kinds");
        let salt = rng.random::<u32>().to_string();
        let most = rng.random_range(1..=3_i64);
        let sql = "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity
            where datname = current_database() and application_name like 'lanebridge/%'
              and (application_name like '%/' || $1 or backend_type = $1)
            order by md5(pid::text || $2) limit $3) x";
        within(Duration::from_secs(2), || async { self.count(sql, &[kind, &salt, &most]).await > 0 }).await;
        Injury::default()
    }

    async fn injure_twice(&self, source: Source, rng: &mut StdRng) -> Injury {
        let single: Vec<Fault> = Fault::ALL
            .into_iter()
            .filter(|fault| *fault != Fault::Pairs && (*fault != Fault::PublicationDropped || source == Source::Wal))
            .filter(|fault| !fault.needs_own_broker())
            // What waits for bridges to be well would wait for the other fault.
            .filter(|fault| *fault != Fault::Terminate)
            .collect();
        let pair: Vec<Fault> = single.choose_multiple(rng, 2).copied().collect();
        let (mut one, mut other) = (StdRng::seed_from_u64(rng.random()), StdRng::seed_from_u64(rng.random()));
        let second = async {
            pause(0..2_000, &mut other).await;
            Box::pin(self.injure(pair[1], source, &mut other)).await
        };
        // What a fault shows beside another is nobody's figure.
        let (_first, _second) = tokio::join!(Box::pin(self.injure(pair[0], source, &mut one)), second);
        for place in &self.places {
            place.signal("CONT");
        }
        Injury::default()
    }
}

/// Of the two ways that of the broker in three cases of four: there the duplicates come from.
fn mostly_broker(rng: &mut StdRng) -> impl Fn(&Place) -> &Wire + use<> {
    let broker = rng.random_bool(0.75);
    move |place| if broker { &place.to_broker } else { &place.to_database }
}

/// A random moment: the time between faults is part of what is tried.
pub async fn pause(millis: std::ops::Range<u64>, rng: &mut StdRng) {
    let moment = Instant::now() + Duration::from_millis(rng.random_range(millis));
    tokio::time::sleep_until(moment).await;
}
