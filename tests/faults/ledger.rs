//! The ledger: what was committed against what a broker holds, with a verdict by name for every way to be wrong.

use std::collections::{HashMap, HashSet};

use tokio_postgres::Client;

use crate::consumers::Received;

/// Counts per verdict; see hazards for the names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub committed: usize,
    pub received: usize,
    pub lost: usize,
    pub phantom: usize,
    pub corrupt: usize,
    /// First occurrences of a key out of order.
    pub reorder_first: usize,
    pub duplicates: usize,
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
    for got in received {
        let Some(event) = truth.get(&got.id) else {
            verdict.phantom += 1;
            continue;
        };
        if !seen.insert(&got.id) {
            verdict.duplicates += 1;
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
    /// Panics unless nothing was lost, invented, changed or reordered, and duplicates stay within `duplicates`.
    pub fn must_be_clean(&self, what: &str, duplicates: usize) {
        eprintln!("{what}: {self:?}");
        let wrong = (self.lost, self.phantom, self.corrupt, self.reorder_first);
        assert_eq!(wrong, (0, 0, 0, 0), "{what}: (lost, phantom, corrupt, reorder-first) of {self:?}");
        assert!(self.duplicates <= duplicates, "{what}: {} duplicates, at most {duplicates}", self.duplicates);
    }
}

/// The checker itself is checked: each verdict is named when its fault is there.
#[test]
fn every_way_to_be_wrong_has_its_verdict() {
    let event = |seq| Truth { key: Some("k".into()), seq, payload: vec![1] };
    let truth = HashMap::from([("a".to_owned(), event(1)), ("b".to_owned(), event(2)), ("c".to_owned(), event(3))]);
    let got = |id: &str, seq, payload| Received { id: id.into(), key: Some("k".into()), seq, payload: vec![payload] };
    let verdict = |received: &[Received]| verdict(&truth, received);
    let good = [got("a", 1, 1), got("b", 2, 1), got("c", 3, 1)];
    assert_eq!(verdict(&good), Verdict { committed: 3, received: 3, ..Verdict::default() });
    assert_eq!(verdict(&good[..2]).lost, 1);
    assert_eq!(verdict(&[got("x", 9, 1)]).phantom, 1);
    assert_eq!(verdict(&[got("a", 1, 2)]).corrupt, 1);
    assert_eq!(verdict(&[got("b", 2, 1), got("a", 1, 1)]).reorder_first, 1);
    assert_eq!(verdict(&[got("a", 1, 1), got("b", 2, 1), got("a", 1, 1)]).duplicates, 1);
}
