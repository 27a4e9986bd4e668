//! A cursor over one table of the file: it reads typed keys, remembers their names, and collects what is wrong.
//!
//! - I1: every problem carries its line and column, and a bad value never stops the reading, so that one report
//!   holds all problems. A getter that finds a bad value reports it and goes on with the default.
//! - I2: every key is read by a getter, so that [`Section::finish`] knows which ones nobody asked for.
//! - I3: no secret and no value from the environment is ever part of a problem; what the file says is shown.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::interpolate::interpolate;
use super::units::{self, show_duration, show_size};
use super::validate::nearest;
use super::{Secret, SecretSource};
use crate::error::Error;

/// A report of a file that is no configuration at all stays readable.
const SHOWN_PROBLEMS: usize = 50;
const SHOWN_CHARS: usize = 80;

pub(super) type Env<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// What is wrong and what is weak, over the whole file.
pub(super) struct Report<'a> {
    file: &'a str,
    text: &'a str,
    env: &'a Env<'a>,
    problems: RefCell<Vec<(usize, String)>>,
    warnings: RefCell<Vec<String>>,
    /// (section, key) of all keys that were asked for; the documentation is checked against it.
    keys: RefCell<BTreeSet<(String, &'static str)>>,
}

impl<'a> Report<'a> {
    pub(super) fn new(file: &'a str, text: &'a str, env: &'a Env<'a>) -> Self {
        Self { file, text, env, problems: RefCell::default(), warnings: RefCell::default(), keys: RefCell::default() }
    }

    /// A variable that is set and not empty.
    pub(super) fn env(&self, name: &str) -> Option<String> {
        (self.env)(name).filter(|value| !value.is_empty())
    }

    /// Records a problem at byte `at` of the file; `what` starts with its key path.
    pub(super) fn problem(&self, at: usize, what: impl AsRef<str>) {
        let text = format!("{}: {}", self.place(at), what.as_ref());
        self.problems.borrow_mut().push((at, text));
    }

    /// Records a problem that is not in the file.
    pub(super) fn problem_elsewhere(&self, what: String) {
        self.problems.borrow_mut().push((0, what));
    }

    pub(super) fn warn(&self, at: usize, what: impl AsRef<str>) {
        let text = format!("{}: {}", self.place(at), what.as_ref());
        self.warnings.borrow_mut().push(text);
    }

    pub(super) fn warn_elsewhere(&self, what: String) {
        self.warnings.borrow_mut().push(what);
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> BTreeSet<(String, &'static str)> {
        self.keys.borrow().clone()
    }

    /// The warnings, or all problems in the order of the file as one error.
    pub(super) fn finish(self) -> Result<Vec<String>, Error> {
        let mut problems = self.problems.into_inner();
        if problems.is_empty() {
            return Ok(self.warnings.into_inner());
        }
        problems.sort_by_key(|(at, _)| *at);
        let count = problems.len();
        let plural = if count == 1 { "problem" } else { "problems" };
        let mut text = format!("read configuration {}: {count} {plural}", self.file);
        for (_, problem) in problems.iter().take(SHOWN_PROBLEMS) {
            text.push_str("\n  ");
            text.push_str(problem);
        }
        if count > SHOWN_PROBLEMS {
            text.push_str(&format!("\n  and {} more", count - SHOWN_PROBLEMS));
        }
        Err(Error::config(text))
    }

    fn place(&self, at: usize) -> String {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.matches('\n').count() + 1;
        format!("{}:{line}:{}", self.file, before[line_start..].chars().count() + 1)
    }
}

/// A string of the file with its variables filled in.
pub(super) struct Text {
    pub(super) value: String,
    /// As the file has it: shown in problems instead of the value (I3).
    pub(super) written: String,
    pub(super) at: usize,
    /// Whether a part of it came from the environment.
    pub(super) filled: bool,
}

impl Text {
    pub(super) fn shown(&self) -> String {
        shown(&self.written)
    }
}

/// Quoted, escaped and cut.
pub(super) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS).collect();
    let more = if cut.len() < text.len() { "…" } else { "" };
    format!("\"{}{more}\"", cut.escape_debug())
}

/// One table; `path` is how problems name it, `doc` how the documentation does (`sinks.NAME`).
pub(super) struct Section<'a> {
    pub(super) report: &'a Report<'a>,
    pub(super) path: String,
    pub(super) doc: String,
    /// Byte offset of the table, for problems about what is missing.
    pub(super) at: usize,
    table: &'a DeTable<'a>,
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    pub(super) fn new(
        report: &'a Report<'a>,
        table: &'a DeTable<'a>,
        at: usize,
        path: impl Into<String>,
        doc: impl Into<String>,
    ) -> Self {
        Self { report, path: path.into(), doc: doc.into(), at, table, known: Vec::new() }
    }

    pub(super) fn problem(&self, at: usize, key: &str, what: impl AsRef<str>) {
        self.report.problem(at, format!("{}: {}", self.key_path(key), what.as_ref()));
    }

    pub(super) fn missing(&self, key: &str, hint: &str) {
        self.problem(self.at, key, format!("is missing; hint: {hint}"));
    }

    pub(super) fn warn(&self, at: usize, key: &str, what: impl AsRef<str>) {
        self.report.warn(at, format!("{}: {}", self.key_path(key), what.as_ref()));
    }

    /// Where the value of `key` stands, or the table when it is not there.
    pub(super) fn at_key(&self, key: &str) -> usize {
        self.table.get(key).map_or(self.at, |value| value.span().start)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Makes `key` a known one whose value does not matter here.
    pub(super) fn ask(&mut self, key: &'static str) {
        let _ = self.value(key);
    }

    pub(super) fn has_empty_list(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(|value| matches!(value.get_ref(), DeValue::Array(items) if items.is_empty()))
    }

    /// Reports every key that nobody asked for, with the nearest one that exists.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            let name = key.get_ref().as_ref();
            if self.known.contains(&name) {
                continue;
            }
            let mut hint = nearest(name, self.known.iter().copied());
            if hint.is_empty() && !self.known.is_empty() {
                hint = format!("; keys here are {}", self.known.join(", "));
            }
            self.report.problem(key.span().start, format!("{}: is no known key{hint}", self.key_path(name)));
        }
    }

    pub(super) fn text(&mut self, key: &'static str) -> Option<Text> {
        let value = self.value(key)?;
        self.as_text(key, value, false)
    }

    /// As [`Section::text`]; a secret written into the file is a warning.
    pub(super) fn secret(&mut self, key: &'static str) -> Option<Text> {
        let value = self.value(key)?;
        let text = self.as_text(key, value, true)?;
        if !text.filled {
            self.warn(text.at, key, "is a secret inside the file; hint: a key ending in _file, or \"${NAME}\"");
        }
        Some(text)
    }

    /// A secret from `key` or from the file that `file_key` names; both together are a problem.
    pub(super) fn secret_source(&mut self, key: &'static str, file_key: &'static str) -> Option<SecretSource> {
        let inline = self.secret(key);
        let file = self.text(file_key);
        match (inline, file) {
            (Some(_), Some(file)) => {
                self.problem(file.at, file_key, format!("and {key} are both given; keep one"));
                None
            }
            (Some(text), None) if text.value.is_empty() => {
                self.problem(text.at, key, "is empty");
                None
            }
            (Some(text), None) => Some(SecretSource::Inline(Secret::new(text.value))),
            (None, file) => file.and_then(|text| self.as_path(file_key, &text)).map(SecretSource::File),
        }
    }

    pub(super) fn path(&mut self, key: &'static str) -> Option<std::path::PathBuf> {
        let text = self.text(key)?;
        self.as_path(key, &text)
    }

    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        let Some(value) = self.value(key) else { return default };
        match value.get_ref() {
            DeValue::Boolean(flag) => *flag,
            DeValue::String(_) => {
                let Some(text) = self.as_text(key, value, false) else { return default };
                match text.value.as_str() {
                    "true" if text.filled => true,
                    "false" if text.filled => false,
                    _ => {
                        self.problem(
                            text.at,
                            key,
                            format!("must be true or false without quotes, not {}", text.shown()),
                        );
                        default
                    }
                }
            }
            other => {
                self.problem(value.span().start, key, format!("must be true or false, not {}", describe(other)));
                default
            }
        }
    }

    pub(super) fn integer(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.value(key)?;
        let at = value.span().start;
        let (low, high) = (*range.start(), *range.end());
        let expected = format!("must be a whole number from {low} to {high}");
        let (number, shown) = match value.get_ref() {
            DeValue::Integer(n) => (i128::from_str_radix(n.as_str(), n.radix()).ok(), describe(value.get_ref())),
            DeValue::String(_) => {
                let text = self.as_text(key, value, false)?;
                (text.value.parse().ok().filter(|_| text.filled), text.shown())
            }
            other => (None, describe(other)),
        };
        let number = number.and_then(|n| u64::try_from(n).ok()).filter(|n| range.contains(n));
        if number.is_none() {
            self.problem(at, key, format!("{expected}, not {shown}"));
        }
        number
    }

    /// `None` when absent, or when bad and reported; [`Duration::ZERO`] only if the range holds it.
    pub(super) fn duration(&mut self, key: &'static str, range: RangeInclusive<Duration>) -> Option<Duration> {
        let value = self.value(key)?;
        let expected = format!("from \"{}\" to \"{}\"", show_duration(*range.start()), show_duration(*range.end()));
        self.quantity(key, value, "duration", "30s", &expected, &range, units::duration)
    }

    /// As [`Section::duration`], and zero means never.
    pub(super) fn duration_or_never(
        &mut self,
        key: &'static str,
        range: RangeInclusive<Duration>,
        default: Duration,
    ) -> Option<Duration> {
        let Some(value) = self.value(key) else { return Some(default) };
        let (low, high) = (*range.start(), *range.end());
        let expected = format!("\"0\" (never) or from \"{}\" to \"{}\"", show_duration(low), show_duration(high));
        // Zero passes the range here, what lies between it and the lowest value does not.
        let read = |text: &str| {
            let value = units::duration(text)?;
            let inside = value.is_zero() || range.contains(&value);
            if inside { Ok(value) } else { Err(format!("must be {expected}")) }
        };
        let whole = Duration::ZERO..=Duration::MAX;
        let value = self.quantity(key, value, "duration", "7d", &expected, &whole, read).unwrap_or(default);
        (!value.is_zero()).then_some(value)
    }

    /// Bytes, as `"64KiB"` or as a plain number, for keys whose name ends in `_bytes`.
    pub(super) fn bytes(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.value(key)?;
        if matches!(value.get_ref(), DeValue::Integer(_)) {
            return self.integer(key, range);
        }
        let expected = format!("from \"{}\" to \"{}\"", show_size(*range.start()), show_size(*range.end()));
        self.quantity(key, value, "size", "64KiB", &expected, &range, units::size)
    }

    pub(super) fn choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(key)?;
        let found = choices.iter().find(|(name, _)| *name == text.value);
        if found.is_none() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let hint = nearest(&text.written, names.iter().copied());
            let names = names.join(", ");
            self.problem(text.at, key, format!("has the unknown value {}; allowed: {names}{hint}", text.shown()));
        }
        found.map(|(_, value)| *value)
    }

    pub(super) fn texts(&mut self, key: &'static str) -> Option<Vec<Text>> {
        let value = self.value(key)?;
        match value.get_ref() {
            DeValue::Array(items) => Some(items.iter().filter_map(|item| self.as_text(key, item, false)).collect()),
            other => {
                let what = format!("must be a list of strings such as [\"order.*\"], not {}", describe(other));
                self.problem(value.span().start, key, what);
                None
            }
        }
    }

    pub(super) fn table(&mut self, key: &'static str) -> Option<Section<'a>> {
        let value = self.value(key)?;
        let doc = if self.doc.is_empty() { key.to_owned() } else { format!("{}.{key}", self.doc) };
        self.as_table(key, value, doc)
    }

    /// Every entry of the table `key` as a table of its own, by name: `[sinks.NAME]`.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<(String, Section<'a>)> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let Some(section) = self.as_table(key, value, String::new()) else { return Vec::new() };
        let entry = |(name, value): (&'a Spanned<_>, &'a Spanned<DeValue<'a>>)| {
            let name: &std::borrow::Cow<'_, str> = name.get_ref();
            Some((name.to_string(), section.as_table(name, value, format!("{key}.NAME"))?))
        };
        section.table.iter().filter_map(entry).collect()
    }

    /// Every value as text, under its dotted name: `compression.type = "lz4"` needs no quotes around the key.
    pub(super) fn scalars(&self) -> Vec<(String, Text)> {
        let mut found = Vec::new();
        for (name, value) in self.table {
            let name = name.get_ref().as_ref();
            let at = value.span().start;
            let plain = |value: String| Text { written: value.clone(), value, at, filled: false };
            match value.get_ref() {
                DeValue::String(_) => found.extend(self.as_text(name, value, true).map(|text| (name.to_owned(), text))),
                DeValue::Integer(n) if n.radix() == 10 => found.push((name.to_owned(), plain(n.as_str().to_owned()))),
                DeValue::Float(n) => found.push((name.to_owned(), plain(n.as_str().to_owned()))),
                DeValue::Boolean(flag) => found.push((name.to_owned(), plain(flag.to_string()))),
                DeValue::Table(table) => {
                    let inner = Section::new(self.report, table, at, self.key_path(name), "");
                    found.extend(inner.scalars().into_iter().map(|(key, text)| (format!("{name}.{key}"), text)));
                }
                _ => self.problem(at, name, "must be a string, a whole decimal number, true or false"),
            }
        }
        found
    }

    fn value(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        self.report.keys.borrow_mut().insert((self.doc.clone(), key));
        self.table.get(key)
    }

    fn as_text(&self, key: &str, value: &Spanned<DeValue<'a>>, secret: bool) -> Option<Text> {
        let at = value.span().start;
        let DeValue::String(written) = value.get_ref() else {
            let found = if secret { kind(value.get_ref()).to_owned() } else { describe(value.get_ref()) };
            self.problem(at, key, format!("must be a string in quotes, not {found}"));
            return None;
        };
        match interpolate(written, self.report.env) {
            Ok((value, _)) if value.contains('\0') => {
                self.problem(at, key, "holds a NUL");
                None
            }
            Ok((value, filled)) => Some(Text { value, written: written.to_string(), at, filled }),
            Err(what) => {
                self.problem(at, key, what);
                None
            }
        }
    }

    fn as_path(&self, key: &str, text: &Text) -> Option<std::path::PathBuf> {
        if text.value.is_empty() {
            self.problem(text.at, key, "is empty; hint: leave it out");
            return None;
        }
        Some(std::path::PathBuf::from(&text.value))
    }

    fn as_table(&self, key: &str, value: &'a Spanned<DeValue<'a>>, doc: String) -> Option<Section<'a>> {
        match value.get_ref() {
            DeValue::Table(table) => {
                Some(Section::new(self.report, table, value.span().start, self.key_path(key), doc))
            }
            other => {
                let path = self.key_path(key);
                self.problem(value.span().start, key, format!("must be a table, not {}; hint: [{path}]", kind(other)));
                None
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one message for durations and sizes")]
    fn quantity<T: PartialOrd>(
        &self,
        key: &str,
        value: &Spanned<DeValue<'a>>,
        what: &str,
        example: &str,
        expected: &str,
        range: &RangeInclusive<T>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        let at = value.span().start;
        if !matches!(value.get_ref(), DeValue::String(_)) {
            let found = describe(value.get_ref());
            self.problem(at, key, format!("must be a {what} with its unit, not {found}; hint: \"{example}\""));
            return None;
        }
        let text = self.as_text(key, value, false)?;
        match read(&text.value) {
            Ok(value) if range.contains(&value) => return Some(value),
            Ok(_) => self.problem(at, key, format!("must be {expected}, not {}", text.shown())),
            Err(what) => self.problem(at, key, format!("{} {what}", text.shown())),
        }
        None
    }

    fn key_path(&self, key: &str) -> String {
        let plain = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        let key = if plain { key.chars().take(SHOWN_CHARS).collect() } else { shown(key) };
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The kind and, where it is short, the value.
fn describe(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the string {}", shown(text)),
        DeValue::Integer(n) => shown(&n.to_string()).trim_matches('"').to_owned(),
        DeValue::Float(n) => shown(n.as_str()).trim_matches('"').to_owned(),
        DeValue::Boolean(flag) => flag.to_string(),
        other => kind(other).to_owned(),
    }
}
