//! The ledger: what was committed against what a broker holds, with a verdict by name for every way to be wrong.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use tokio_postgres::Client;

use crate::consumers::Received;

/// Counts per way to be wrong; all but `duplicates` and `regress` must be 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    pub committed: usize,
    pub received: usize,
    pub lost: usize,
    pub phantom: usize,
    pub corrupt: usize,
    /// First occurrences of a key out of order.
    pub reorder_first: usize,
    pub duplicates: usize,
    /// Those of the duplicates that came after a newer event of their key.
    pub regress: usize,
    /// Where no event of its key belongs: another partition, subject or stream than the first of the key.
    pub wrong_place: usize,
    /// One event id, or one dedup id, under which two different events arrived.
    pub id_collision: usize,
    /// Deliveries not completed in time after the last fault was healed.
    pub stuck: usize,
    /// What bridges that ended left behind: sessions, locks, owned lanes, failures of deliveries that arrived.
    pub leftover: usize,
    /// What others suffered: a slot that survived its bridge, log kept beyond the cap, a publisher that failed.
    pub harm: usize,
}

/// A committed event.
struct Truth {
    key: Option<String>,
    seq: i64,
    payload: Vec<u8>,
}

/// Compares `received` with the truth table.
pub async fn judge(database: &Client, received: &[Received]) -> Verdict {
    let truth: HashMap<String, Truth> = database
        .query("select id, key, seq, payload from truth", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| {
            (row.get(0), Truth { key: row.get(1), seq: row.get(2), payload: row.get::<_, String>(3).into_bytes() })
        })
        .collect();
    verdict(&truth, received)
}

fn verdict(truth: &HashMap<String, Truth>, received: &[Received]) -> Verdict {
    let mut verdict = Verdict { committed: truth.len(), received: received.len(), ..Verdict::default() };
    let mut seen = HashSet::new();
    let mut last: HashMap<&str, i64> = HashMap::new();
    let mut first_of: HashMap<&str, &Received> = HashMap::new();
    let mut places: HashMap<&str, &str> = HashMap::new();
    let mut names: HashMap<&str, &str> = HashMap::new();
    for got in received {
        let first = first_of.entry(&got.id).or_insert(got);
        verdict.id_collision += usize::from((first.seq, &first.payload) != (got.seq, &got.payload));
        if let Some(name) = &got.dedup_id {
            verdict.id_collision += usize::from(*names.entry(name).or_insert(&got.id) != got.id);
        }
        let Some(event) = truth.get(&got.id) else {
            verdict.phantom += 1;
            continue;
        };
        if let Some(key) = &event.key {
            verdict.wrong_place += usize::from(*places.entry(key).or_insert(&got.place) != got.place);
        }
        if !seen.insert(&got.id) {
            verdict.duplicates += 1;
            let newest = event.key.as_deref().and_then(|key| last.get(key));
            verdict.regress += usize::from(newest.is_some_and(|newest| event.seq < *newest));
            continue;
        }
        if got.payload != event.payload || got.key != event.key || got.seq != event.seq {
            verdict.corrupt += 1;
        }
        // The publishers lock a key until commit, so its seqs are in commit order.
        if let Some(key) = &event.key {
            let last = last.entry(key).or_insert(0);
            if event.seq < *last {
                verdict.reorder_first += 1;
            }
            *last = event.seq.max(*last);
        }
    }
    verdict.lost = truth.len() - seen.len();
    verdict
}

impl Verdict {
    /// Every verdict that must be 0, by name.
    pub fn wrongs(&self) -> [(&'static str, usize); 9] {
        [
            ("lost", self.lost),
            ("phantom", self.phantom),
            ("reorder-first", self.reorder_first),
            ("corrupt", self.corrupt),
            ("wrong-place", self.wrong_place),
            ("id-collision", self.id_collision),
            ("stuck", self.stuck),
            ("leftover", self.leftover),
            ("harm", self.harm),
        ]
    }

    /// What is wrong, by name; empty when nothing is, and duplicates stay within `duplicates`.
    pub fn faults(&self, duplicates: usize) -> String {
        let mut found: Vec<String> =
            self.wrongs().iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
        if self.duplicates > duplicates {
            found.push(format!("duplicates {} of at most {duplicates}", self.duplicates));
        }
        found.join(", ")
    }

    /// Panics unless nothing was lost, invented, changed, reordered or misplaced, and duplicates stay within `duplicates`.
    pub fn must_be_clean(&self, what: &str, duplicates: usize) {
        eprintln!("{what}: {self:?}");
        assert_eq!(self.faults(duplicates), "", "{what}: {self:?}");
    }
}

/// The checker itself is checked: each verdict is named when its fault is there.
#[test]
fn every_way_to_be_wrong_has_its_verdict() {
    let event = |seq| Truth { key: Some("k".into()), seq, payload: vec![1] };
    let truth = HashMap::from([("a".to_owned(), event(1)), ("b".to_owned(), event(2)), ("c".to_owned(), event(3))]);
    let at = |place: &str, id: &str, seq, payload| Received {
        id: id.into(),
        key: Some("k".into()),
        seq,
        payload: vec![payload],
        place: place.into(),
        dedup_id: None,
    };
    let got = |id: &str, seq, payload| at("p", id, seq, payload);
    let verdict = |received: &[Received]| verdict(&truth, received);
    let good = [got("a", 1, 1), got("b", 2, 1), got("c", 3, 1)];
    assert_eq!(verdict(&good), Verdict { committed: 3, received: 3, ..Verdict::default() });
    assert_eq!(verdict(&good[..2]).lost, 1);
    assert_eq!(verdict(&[got("x", 9, 1)]).phantom, 1);
    assert_eq!(verdict(&[got("a", 1, 2)]).corrupt, 1);
    assert_eq!(verdict(&[got("b", 2, 1), got("a", 1, 1)]).reorder_first, 1);
    let repeated = verdict(&[got("a", 1, 1), got("b", 2, 1), got("b", 2, 1)]);
    assert_eq!((repeated.duplicates, repeated.regress), (1, 0));
    let late = verdict(&[got("a", 1, 1), got("b", 2, 1), got("a", 1, 1)]);
    assert_eq!((late.duplicates, late.regress), (1, 1));
    assert_eq!(verdict(&[got("a", 1, 1), at("q", "b", 2, 1)]).wrong_place, 1);
    assert_eq!(verdict(&[got("a", 1, 1), got("a", 2, 1)]).id_collision, 1);
    let named = |id: &str, seq| Received { dedup_id: Some("1".into()), ..got(id, seq, 1) };
    assert_eq!(verdict(&[named("a", 1), named("b", 2)]).id_collision, 1);
    assert_eq!(verdict(&[named("a", 1), named("a", 1)]).id_collision, 0);
    assert_eq!(verdict(&good[1..]).faults(0), "lost 1");
    assert_eq!(late.faults(0), "lost 1, duplicates 1 of at most 0");
}
