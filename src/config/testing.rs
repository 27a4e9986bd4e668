//! What the tests of this folder share: a smallest good file, and ways to add to it.

use super::{Config, load::parse};

/// Two lines that are enough.
pub(super) const SMALLEST: &str = "[postgres]\nurl = \"postgres://u@localhost/d\"\n";

/// `SET` is `hunter2`, `EMPTY` is empty, `HOSTNAME` is a host; nothing else is set.
pub(super) fn env(name: &str) -> Option<String> {
    match name {
        "SET" => Some("hunter2".to_owned()),
        "EMPTY" => Some(String::new()),
        "BATCH" => Some("7".to_owned()),
        "YES" => Some("true".to_owned()),
        "HOSTNAME" => Some("host 1".to_owned()),
        _ => None,
    }
}

pub(super) fn read(text: &str) -> Result<Config, String> {
    parse(text, "lanebridge.toml", &env).map_err(|error| error.report())
}

/// The smallest file with `extra` below it (line 3 is its first).
pub(super) fn good(extra: &str) -> Config {
    read(&format!("{SMALLEST}{extra}")).unwrap_or_else(|report| panic!("{extra}\n{report}"))
}

pub(super) fn bad(extra: &str) -> String {
    match read(&format!("{SMALLEST}{extra}")) {
        Ok(_) => panic!("accepted:\n{extra}"),
        Err(report) => report,
    }
}

/// Every case is refused with exactly one problem, which holds the text beside it.
pub(super) fn each_is_refused(cases: &[(&str, &str)]) {
    for (extra, part) in cases {
        let report = bad(extra);
        assert!(report.contains(part), "{extra}\nlacks {part:?}:\n{report}");
        assert!(report.contains(": 1 problem\n"), "{extra}\n{report}");
    }
}
