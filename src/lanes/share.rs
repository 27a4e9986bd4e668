//! Who should own how many lanes, and who gives up how many now. Pure: what the database shows comes in, as does time.
//!
//! I1: the shares of all live bridges add up to all lanes, so that none is left over and none is wanted twice.
//! I2: nobody gives up more than others lack, so that no lane moves for nothing; nobody takes more than its share.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// All lanes of an installation.
pub(super) const LANES: usize = 256;
/// A lane stays at least this long, so that bridges that come and go do not pass it around.
const MIN_HOLD: Duration = Duration::from_secs(5);
/// Lanes that one bridge gives up in a minute, at most.
const MOVES: f64 = 256.0;
/// Heartbeats of a bridge before others make room for it.
const PROVEN: i64 = 3;
/// Reads that must have shown a heartbeat standing still, besides the time: a server that answers nobody must not look
/// like a frozen bridge.
const STILL: u32 = 4;

/// A bridge that is not fenced and whose lock session is there, as the database shows it; our own among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub epoch: i64,
    pub beat: i64,
    pub lanes: usize,
}

/// How many lanes `own` should have: as equal as they divide, the older bridges one more.
pub(super) fn share(own: i64, peers: &[Peer]) -> usize {
    let mut epochs: Vec<i64> = peers.iter().filter(|peer| counts(own, peer)).map(|peer| peer.epoch).collect();
    epochs.push(own);
    epochs.sort_unstable();
    epochs.dedup();
    let rank = epochs.iter().position(|epoch| *epoch == own).unwrap_or(0);
    LANES / epochs.len() + usize::from(rank < LANES % epochs.len())
}

/// How many lanes `own` should give up to others: what it has too much, as far as others lack it and no free lane
/// serves them.
pub(super) fn surplus(own: i64, held: usize, peers: &[Peer]) -> usize {
    let proven: Vec<Peer> = peers.iter().copied().filter(|peer| counts(own, peer)).collect();
    let taken: usize = held + peers.iter().filter(|peer| peer.epoch != own).map(|peer| peer.lanes).sum::<usize>();
    let lack: usize = proven
        .iter()
        .filter(|peer| peer.epoch != own)
        .map(|peer| share_of(peer.epoch, own, &proven).saturating_sub(peer.lanes))
        .sum();
    let too_many = held.saturating_sub(share(own, peers));
    too_many.min(lack.saturating_sub(LANES.saturating_sub(taken)))
}

/// The share of another, in the eyes of `own`.
fn share_of(epoch: i64, own: i64, proven: &[Peer]) -> usize {
    let mut all = proven.to_vec();
    all.push(Peer { epoch: own, beat: PROVEN, lanes: 0 });
    share(epoch, &all)
}

fn counts(own: i64, peer: &Peer) -> bool {
    peer.epoch == own || peer.beat >= PROVEN
}

/// Which lanes may be given up now, and how many more in this minute.
#[derive(Debug)]
pub(super) struct Moves {
    since: HashMap<i16, Instant>,
    budget: f64,
    at: Instant,
}

impl Moves {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: HashMap::new(), budget: MOVES, at: now }
    }

    pub(super) fn gained(&mut self, lanes: &[i16], now: Instant) {
        self.since.extend(lanes.iter().map(|lane| (*lane, now)));
    }

    /// Up to `surplus` of `held` that were held long enough; counted as moved.
    pub(super) fn choose(&mut self, held: &[i16], surplus: usize, now: Instant) -> Vec<i16> {
        let passed = now.duration_since(std::mem::replace(&mut self.at, now));
        self.budget = (self.budget + passed.as_secs_f64() * MOVES / 60.0).min(MOVES);
        let old = |lane: &&i16| self.since.get(lane).is_none_or(|since| now.duration_since(*since) >= MIN_HOLD);
        let mut chosen: Vec<i16> = held.iter().filter(old).copied().collect();
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        let mut left = self.budget;
        chosen.truncate(surplus);
        chosen.retain(|_| {
            left -= 1.0;
            left >= 0.0
        });
        self.budget -= chosen.len() as f64;
        for lane in &chosen {
            self.since.remove(lane);
        }
        chosen
    }
}

/// Watches heartbeats on our own clock, so that no two clocks are ever compared.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// By epoch: the beat, since when and for how many reads it stands still.
    seen: HashMap<i64, (i64, Instant, u32)>,
}

impl Watch {
    /// Peers whose heartbeat stood still for `limit`, each with that beat.
    pub(super) fn frozen(&mut self, own: i64, peers: &[Peer], limit: Duration, now: Instant) -> Vec<(i64, i64)> {
        self.seen.retain(|epoch, _| peers.iter().any(|peer| peer.epoch == *epoch));
        let mut frozen = Vec::new();
        for peer in peers.iter().filter(|peer| peer.epoch != own) {
            let seen = self.seen.entry(peer.epoch).or_insert((peer.beat, now, 0));
            if seen.0 == peer.beat {
                seen.2 += 1;
            } else {
                *seen = (peer.beat, now, 0);
            }
            if seen.2 >= STILL && now.duration_since(seen.1) >= limit {
                frozen.push((peer.epoch, peer.beat));
            }
        }
        frozen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(epoch: i64, lanes: usize) -> Peer {
        Peer { epoch, beat: 100, lanes }
    }

    #[test]
    fn one_bridge_has_all_and_two_have_half() {
        assert_eq!(share(7, &[]), 256);
        assert_eq!(share(7, &[peer(7, 256)]), 256);
        assert_eq!((share(7, &[peer(8, 0)]), share(8, &[peer(7, 0)])), (128, 128));
        assert_eq!(surplus(7, 256, &[peer(7, 256), peer(8, 0)]), 128);
        assert_eq!(surplus(7, 128, &[peer(7, 128), peer(8, 128)]), 0);
    }

    #[test]
    fn a_free_lane_serves_a_newcomer_before_anybody_gives_one_up() {
        assert_eq!(surplus(7, 200, &[peer(7, 200), peer(8, 0)]), 72);
        assert_eq!(surplus(7, 130, &[peer(7, 130), peer(8, 0)]), 2);
    }

    #[test]
    fn nobody_makes_room_for_a_bridge_that_has_not_proven_itself() {
        let newcomer = Peer { epoch: 8, beat: PROVEN - 1, lanes: 0 };
        assert_eq!(surplus(7, 256, &[peer(7, 256), newcomer]), 0);
        assert_eq!(surplus(7, 256, &[peer(7, 256), Peer { beat: PROVEN, ..newcomer }]), 128);
    }

    proptest! {
        // I1, I2.
        #[test]
        fn shares_add_up_and_moves_end_in_them(bridges in 1_usize..9, split in proptest::collection::vec(0_usize..9, 256)) {
            let mut lanes = vec![0; bridges];
            split.iter().for_each(|owner| lanes[owner % bridges] += 1);
            let peers = |lanes: &[usize]| -> Vec<Peer> {
                lanes.iter().enumerate().map(|(n, lanes)| peer(i64::try_from(n).unwrap() + 1, *lanes)).collect()
            };
            let epoch = |n: usize| i64::try_from(n).unwrap() + 1;
            let shares: Vec<usize> = (0..bridges).map(|n| share(epoch(n), &peers(&lanes))).collect();
            prop_assert_eq!(shares.iter().sum::<usize>(), LANES);
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            let before = lanes.clone();
            let mut moved = 0;
            // Each gives up what it has too much, then each takes up to its share.
            for _ in 0..3 {
                let now = peers(&lanes);
                let given: Vec<usize> = (0..bridges).map(|n| surplus(epoch(n), lanes[n], &now)).collect();
                for n in 0..bridges {
                    lanes[n] -= given[n];
                    moved += given[n];
                }
                for n in 0..bridges {
                    let free = LANES - lanes.iter().sum::<usize>();
                    lanes[n] += free.min(shares[n].saturating_sub(lanes[n]));
                }
            }
            prop_assert_eq!(&lanes, &shares);
            // Not one more than had to.
            let least: usize = before.iter().zip(&shares).map(|(had, share)| had.saturating_sub(*share)).sum();
            prop_assert_eq!(moved, least);
        }
    }

    #[test]
    fn a_lane_stays_for_a_while_and_a_minute_moves_only_so_many() {
        let start = Instant::now();
        let held: Vec<i16> = (0..256).collect();
        let mut moves = Moves::new(start);
        moves.gained(&held, start);
        assert!(moves.choose(&held, 10, start + MIN_HOLD - Duration::from_millis(1)).is_empty());
        let now = start + MIN_HOLD;
        assert_eq!(moves.choose(&held, 3, now), [255, 254, 253]);
        assert_eq!(moves.choose(&held, 1000, now).len(), 253);
        assert!(moves.choose(&held, 1000, now).is_empty());
        assert!(moves.choose(&held, 1000, now + Duration::from_secs(30)).len() <= 129);
    }

    #[test]
    fn a_bridge_is_frozen_when_its_beat_stood_still_long_enough_and_was_read_often_enough() {
        let (start, limit) = (Instant::now(), Duration::from_secs(10));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut watch = Watch::default();
        let still = [peer(7, 128), peer(8, 128)];
        for second in 0..10 {
            assert!(watch.frozen(7, &still, limit, at(second)).is_empty(), "{second}");
        }
        assert_eq!(watch.frozen(7, &still, limit, at(10)), [(8, 100)]);
        let beats = [peer(7, 128), Peer { beat: 101, ..peer(8, 128) }];
        assert!(watch.frozen(7, &beats, limit, at(11)).is_empty());
        // The server answered nobody for a minute: that is no sign of anything.
        assert!(watch.frozen(7, &beats, limit, at(71)).is_empty());
    }
}
