//! Durations and sizes with their unit, as the configuration file writes them.
//!
//! One whole number and one unit, nothing else: `"500ms"`, `"1s"`, `"10m"`, `"1h"`, `"7d"`; `"64KiB"`, `"1MiB"`,
//! `"10MB"`. A number alone is refused, because nobody can tell later whether 30 meant seconds or milliseconds.

use std::time::Duration;

const DURATION_UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 24 * 3_600_000)];

const SIZE_UNITS: [(&str, u64); 7] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// `"500ms"` as a duration; `"0"` is zero, the one value that needs no unit.
///
/// # Errors
/// A sentence without the value, which the caller knows how to show.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    quantity(text, &DURATION_UNITS, "30s").map(Duration::from_millis)
}

/// `"64KiB"` as bytes.
///
/// # Errors
/// A sentence without the value, which the caller knows how to show.
pub(super) fn size(text: &str) -> Result<u64, String> {
    quantity(text, &SIZE_UNITS, "64KiB")
}

fn quantity(text: &str, units: &[(&str, u64)], example: &str) -> Result<u64, String> {
    if text.is_empty() {
        return Err(format!("is empty; hint: \"{example}\""));
    }
    if text.starts_with('-') {
        return Err(format!("is negative; hint: \"{example}\""));
    }
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let names = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    if number.is_empty() || unit.starts_with(['.', ',', '_']) {
        return Err(format!("is not a whole number and a unit ({}); hint: \"{example}\"", names()));
    }
    if unit.is_empty() {
        return Err(format!("has no unit ({}); hint: \"{example}\"", names()));
    }
    let factor = units.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor);
    let factor = factor.ok_or_else(|| format!("has an unknown unit; units are {}", names()))?;
    let number: Option<u64> = number.parse().ok();
    number.and_then(|n| n.checked_mul(factor)).ok_or_else(|| "is too large".to_owned())
}

/// The shortest exact writing with one unit, which [`duration`] reads back.
pub(super) fn show_duration(value: Duration) -> String {
    show(u64::try_from(value.as_millis()).unwrap_or(u64::MAX), DURATION_UNITS.iter())
}

/// The shortest exact writing with one binary unit, which [`size`] reads back.
pub(super) fn show_size(bytes: u64) -> String {
    show(bytes, SIZE_UNITS.iter().filter(|(name, _)| *name == "B" || name.contains('i')))
}

fn show<'a>(value: u64, units: impl DoubleEndedIterator<Item = &'a (&'a str, u64)>) -> String {
    if value == 0 {
        return "0".to_owned();
    }
    let (name, factor) = units.rev().find(|(_, factor)| value.is_multiple_of(*factor)).expect("the first factor is 1");
    format!("{}{name}", value / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read_and_written_back() {
        for (text, millis) in [("500ms", 500), ("1s", 1_000), ("10m", 600_000), ("1h", 3_600_000), ("7d", 604_800_000)]
        {
            assert_eq!(duration(text).unwrap(), Duration::from_millis(millis));
            assert_eq!(show_duration(Duration::from_millis(millis)), text);
        }
        for (text, bytes) in [("1B", 1), ("64KiB", 65_536), ("1MiB", 1_048_576), ("2GiB", 2_147_483_648)] {
            assert_eq!(size(text).unwrap(), bytes);
            assert_eq!(show_size(bytes), text);
        }
        assert_eq!(
            (size("10MB").unwrap(), size("1KB").unwrap(), size("1GB").unwrap()),
            (10_000_000, 1_000, 1_000_000_000)
        );
        assert_eq!(duration("0").unwrap(), Duration::ZERO);
        assert_eq!(duration("0s").unwrap(), Duration::ZERO);
        assert_eq!(show_duration(Duration::ZERO), "0");
    }

    #[test]
    fn anything_but_a_whole_number_and_a_unit_is_refused() {
        for (text, part) in [
            ("", "empty"),
            ("30", "no unit"),
            ("-5s", "negative"),
            ("1.5s", "whole number"),
            ("s", "whole number"),
            (" 5s", "whole number"),
            ("5 s", "unknown unit"),
            ("5S", "unknown unit"),
            ("5min", "unknown unit"),
            ("1h30m", "unknown unit"),
            ("٣s", "whole number"),
            ("100000000000000000000s", "too large"),
            ("18446744073709551615d", "too large"),
        ] {
            let error = duration(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(size("0").unwrap_err().contains("no unit"));
        assert!(size("1mb").unwrap_err().contains("units are B, KB"));
    }
}
