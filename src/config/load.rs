//! From a path to a checked [`Config`], or to one error that lists everything that is wrong.
//!
//! - I1: what is wrong with the file itself (missing, unreadable, no text, no TOML) has its own message; everything
//!   after that is collected, so that a second run never finds what the first could have said.
//! - I2: `parse` is pure; the environment comes in as a function, and only `load` looks at files.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use toml::de::DeTable;

use super::section::{Report, Section};
use super::{Config, handlers, sections, sinks};
use crate::error::{Error, Result};

/// A configuration of ten thousand handlers fits; what is larger is some other file.
const MAX_FILE_BYTES: u64 = 1 << 20;

const EXAMPLE_HINT: &str = "start from config/lanebridge.toml";

/// Reads and checks the file at `path`, with the variables of this process.
///
/// # Errors
/// Class `Config`: one error with every problem of the file, each with its line and column.
pub fn load(path: &Path) -> Result<Config> {
    let name = path.display().to_string();
    let text = read(path, &name)?;
    let mut config = parse(&text, &name, &environment)?;
    config.warnings.extend(weak_files(path, &name, &config));
    Ok(config)
}

/// Checks `text`; `file_name` is only for messages, `env` is the environment.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, file_name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, Error> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(Error::config(format!("read configuration {file_name}: the file is empty")).hint(EXAMPLE_HINT));
    }
    let (document, errors) = DeTable::parse_recoverable(text);
    let report = Report::new(file_name, text, env);
    for error in &errors {
        syntax_problem(&report, text, error);
    }
    // After anything worse than a second definition the table is a guess, and its problems would be too.
    if errors.iter().any(|error| !is_duplicate(error)) {
        return Err(report.finish().expect_err("a problem was just reported"));
    }
    // Stands for every section that is not there.
    let nothing = DeTable::new();
    let config = read_sections(&report, document.get_ref(), &nothing);
    let warnings = report.finish()?;
    Ok(Config { warnings, ..config })
}

fn read_sections<'a>(report: &'a Report<'a>, document: &'a DeTable<'a>, nothing: &'a DeTable<'a>) -> Config {
    let mut root = Section::new(report, document, 0, "", "");
    let section = |root: &mut Section<'a>, key: &'static str| {
        root.table(key).unwrap_or_else(|| Section::new(report, nothing, 0, key, key))
    };
    let postgres = sections::postgres(section(&mut root, "postgres"));
    let bridge = sections::bridge(section(&mut root, "bridge"), &postgres.schema, postgres.max_payload_bytes);
    let http = sections::http(section(&mut root, "http"));
    let retention = sections::retention(section(&mut root, "retention"));
    let (sinks, kinds) = sinks::read(&mut root);
    let handlers = handlers::read(&mut root, &kinds);
    if !root.has("handlers") || handlers.is_empty() {
        report.warn_elsewhere("there is no [handlers.NAME]: events are stored, but nothing is delivered".to_owned());
    }
    root.finish();
    Config { postgres, bridge, sinks, handlers, http, retention, warnings: Vec::new() }
}

fn is_duplicate(error: &toml::de::Error) -> bool {
    error.message().starts_with("duplicate key")
}

/// The line is shown up to its `=`: what comes after may be half of a password.
fn syntax_problem(report: &Report<'_>, text: &str, error: &toml::de::Error) {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let start = text.as_bytes()[..at].iter().rposition(|b| *b == b'\n').map_or(0, |newline| newline + 1);
    let end = text.as_bytes()[start..].iter().position(|b| *b == b'\n').map_or(text.len(), |length| start + length);
    let line = text.get(start..end).unwrap_or_default().trim();
    let shown = match line.split_once('=') {
        Some((key, _)) => format!("{} = …", key.trim()),
        None if line.starts_with('[') => line.to_owned(),
        None => String::new(),
    };
    let place = if shown.is_empty() { String::new() } else { format!(" in {}", super::section::shown(&shown)) };
    let hint = if is_duplicate(error) { "; keep one" } else { "; hint: strings stand in quotes, one key a line" };
    report.problem(at, format!("{}{place}{hint}", error.message()));
}

fn read(path: &Path, name: &str) -> Result<String> {
    let fail = |what: &str| Error::config(format!("read configuration {name}: {what}"));
    let explain = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => fail("there is no such file").hint("-c FILE, or LANEBRIDGE_CONFIG"),
        ErrorKind::PermissionDenied => {
            fail("permission denied").hint("make it readable for the user that runs the bridge")
        }
        _ => fail("reading failed").source_is(error),
    };
    // Asked first: opening a pipe would wait for a writer.
    let kind = std::fs::metadata(path).map_err(explain)?;
    if kind.is_dir() {
        return Err(fail("it is a directory").hint("name the file inside it"));
    }
    let too_large = || fail("it is larger than 1 MiB, which no configuration is").hint("is it the right file?");
    if kind.len() > MAX_FILE_BYTES {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(explain)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(too_large());
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..good].iter().filter(|b| **b == b'\n').count() + 1;
        fail(&format!("line {line} is not UTF-8")).hint("save it as UTF-8")
    })
}

/// `HOSTNAME` is a shell variable that services rarely have, so the kernel is asked.
fn environment(name: &str) -> Option<String> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    if name != "HOSTNAME" {
        return value;
    }
    value.or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok()).map(|name| name.trim().to_owned())
}

/// Files with secrets that others can read, or that nobody can.
#[cfg(unix)]
fn weak_files(path: &Path, name: &str, config: &Config) -> Vec<String> {
    use std::os::unix::fs::PermissionsExt;
    let others_read = |path: &Path| std::fs::metadata(path).map(|file| file.permissions().mode() & 0o044 != 0);
    let mut warnings = Vec::new();
    let inline = config.warnings.iter().any(|warning| warning.contains("inside the file"));
    if inline && others_read(path).is_ok_and(|others| others) {
        warnings.push(format!("{name}: holds a secret and is readable by other users; hint: chmod 600 {name}"));
    }
    let password = config.postgres.password_file.as_deref().map(|path| ("postgres.password_file".to_owned(), path));
    for (key, path) in password.into_iter().chain(sinks::secret_files(&config.sinks)) {
        let shown = path.display();
        match others_read(path) {
            Ok(true) => warnings.push(format!("{key}: {shown} is readable by other users; hint: chmod 600 {shown}")),
            Ok(false) => {}
            Err(error) => warnings.push(format!("{key}: {shown} cannot be read now: {error}")),
        }
    }
    warnings
}

#[cfg(not(unix))]
fn weak_files(_: &Path, _: &str, _: &Config) -> Vec<String> {
    Vec::new()
}
