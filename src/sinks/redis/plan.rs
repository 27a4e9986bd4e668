//! How one batch becomes script calls: one stream each, bounded in bytes and entries, in waves that keep key order.
//!
//! I3: two entries of one key are in the same call in their order, or the later one's call is in a later wave. A
//! wave's calls share no key, so they may be pipelined; the next wave starts when every answer of this one is known.

use std::collections::HashMap;

/// A script call blocks the server for every other client; more than this gains nothing.
const MAX_CALL_BYTES: usize = 1 << 20;
const MAX_CALL_ENTRIES: usize = 500;

/// One delivery that can be sent.
pub(super) struct Entry {
    /// Its position in the batch.
    pub at: usize,
    pub stream: String,
    /// `None` when nothing waits for it and it waits for nothing.
    pub key: Option<String>,
    /// Field, value, field, value …
    pub fields: Vec<Vec<u8>>,
}

/// The entries of one script call, all for one stream.
#[derive(Default)]
pub(super) struct Call {
    pub entries: Vec<Entry>,
    bytes: usize,
}

impl Entry {
    pub fn bytes(&self) -> usize {
        self.fields.iter().map(Vec::len).sum()
    }
}

/// Every entry once, in waves of calls (I3).
pub(super) fn plan(entries: Vec<Entry>) -> Vec<Vec<Call>> {
    let mut calls: Vec<(usize, Call)> = Vec::new();
    // The call that still takes entries of a stream, and the call that holds a key's latest entry.
    let mut open: HashMap<String, usize> = HashMap::new();
    let mut latest: HashMap<String, usize> = HashMap::new();
    for entry in entries {
        let before = entry.key.as_ref().and_then(|key| latest.get(key)).copied();
        let fits = open.get(&entry.stream).copied().filter(|&call| {
            let (wave, full) = (calls[call].0, &calls[call].1);
            full.entries.len() < MAX_CALL_ENTRIES
                && full.bytes + entry.bytes() <= MAX_CALL_BYTES
                && before.is_none_or(|before| before == call || calls[before].0 < wave)
        });
        let call = fits.unwrap_or_else(|| {
            calls.push((before.map_or(0, |before| calls[before].0 + 1), Call::default()));
            calls.len() - 1
        });
        open.insert(entry.stream.clone(), call);
        if let Some(key) = &entry.key {
            latest.insert(key.clone(), call);
        }
        calls[call].1.bytes += entry.bytes();
        calls[call].1.entries.push(entry);
    }
    let mut waves: Vec<Vec<Call>> = Vec::new();
    for (wave, call) in calls {
        if waves.len() <= wave {
            waves.resize_with(wave + 1, Vec::new);
        }
        waves[wave].push(call);
    }
    waves
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(at: usize, stream: &str, key: Option<&str>, bytes: usize) -> Entry {
        Entry { at, stream: stream.into(), key: key.map(Into::into), fields: vec![vec![b'x'; bytes]] }
    }

    fn shape(waves: &[Vec<Call>]) -> Vec<Vec<Vec<usize>>> {
        let call = |call: &Call| call.entries.iter().map(|entry| entry.at).collect();
        waves.iter().map(|wave| wave.iter().map(call).collect()).collect()
    }

    #[test]
    fn one_stream_is_one_call_whatever_its_keys() {
        let entries = vec![entry(0, "s", Some("a"), 1), entry(1, "s", Some("a"), 1), entry(2, "s", None, 1)];
        assert_eq!(shape(&plan(entries)), [[[0, 1, 2]]]);
    }

    #[test]
    fn a_key_that_changes_its_stream_waits_for_the_answer() {
        let entries = vec![
            entry(0, "s", Some("a"), 1),
            entry(1, "t", Some("b"), 1),
            entry(2, "t", Some("a"), 1),
            entry(3, "s", Some("a"), 1),
        ];
        let expected: Vec<Vec<Vec<usize>>> = vec![vec![vec![0], vec![1]], vec![vec![2]], vec![vec![3]]];
        assert_eq!(shape(&plan(entries)), expected);
    }

    #[test]
    fn a_call_is_bounded_in_entries_and_bytes_and_takes_one_oversized_entry_alone() {
        let many = (0..MAX_CALL_ENTRIES + 1).map(|at| entry(at, "s", None, 1)).collect();
        assert_eq!(plan(many)[0].iter().map(|call| call.entries.len()).collect::<Vec<_>>(), [MAX_CALL_ENTRIES, 1]);
        let half = MAX_CALL_BYTES / 2;
        let entries = vec![
            entry(0, "s", Some("a"), half),
            entry(1, "s", Some("a"), half),
            entry(2, "s", Some("a"), MAX_CALL_BYTES * 2),
        ];
        let expected: Vec<Vec<Vec<usize>>> = vec![vec![vec![0, 1]], vec![vec![2]]];
        assert_eq!(shape(&plan(entries)), expected);
    }

    proptest! {
        #[test]
        fn no_plan_loses_an_entry_or_lets_a_key_overtake_itself(
            batch in prop::collection::vec((0..4u8, prop::option::of(0..4u8), 0..MAX_CALL_BYTES / 3), 0..60)
        ) {
            let name = |n: &u8| n.to_string();
            let entries = batch.iter().enumerate().map(|(at, (stream, key, bytes))| {
                entry(at, &name(stream), key.as_ref().map(name).as_deref(), *bytes)
            });
            // Where each entry went: (wave, call, position).
            let mut places = vec![None; batch.len()];
            for (w, wave) in plan(entries.collect()).iter().enumerate() {
                for (c, call) in wave.iter().enumerate() {
                    for (p, entry) in call.entries.iter().enumerate() {
                        prop_assert!(places[entry.at].replace((w, c, p)).is_none());
                        prop_assert_eq!(&entry.stream, &call.entries[0].stream);
                    }
                }
            }
            for (late, (_, key, _)) in batch.iter().enumerate() {
                let (w, c, p) = places[late].unwrap();
                for (early, (_, other, _)) in batch[..late].iter().enumerate() {
                    if key.is_some() && key == other {
                        let (ew, ec, ep) = places[early].unwrap();
                        prop_assert!(ew < w || (ew == w && ec == c && ep < p), "{early} and {late}");
                    }
                }
            }
        }
    }
}
