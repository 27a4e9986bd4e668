//! From a path to a checked [`Config`], or to one error that lists everything that is wrong.
//!
//! - I1: what is wrong with the file itself (missing, unreadable, no text, no TOML) has its own message; everything
//!   after that is collected, so that a second run never finds what the first could have said.
//! - I2: `parse` is pure; the environment comes in as a function, and only `load` looks at files.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::Duration;

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
    let bridge = sections::bridge(
        section(&mut root, "bridge"),
        &postgres.schema,
        postgres.max_payload_bytes,
        postgres.direct_url.is_some(),
    );
    let wal = sections::wal(section(&mut root, "wal"));
    let retention = sections::retention(section(&mut root, "retention"));
    let (sinks, kinds) = sinks::read(&mut root);
    let database = postgres.connect_timeout + postgres.statement_timeout;
    let longest = sinks.values().map(|sink| sink.send_timeout).fold(database, Duration::max);
    let http = sections::http(section(&mut root, "http"), longest);
    let handlers = handlers::read(&mut root, &kinds);
    if !root.has("handlers") || handlers.is_empty() {
        report.warn_elsewhere("there is no [handlers.NAME]: events are stored, but nothing is delivered".to_owned());
    }
    root.finish();
    Config { postgres, bridge, wal, sinks, handlers, http, retention, warnings: Vec::new() }
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

#[cfg(test)]
mod tests {
    use super::super::describe;
    use super::super::testing::{SMALLEST, bad, env, good, read as parsed};
    use super::*;

    const EXAMPLE: &str = include_str!("../../config/lanebridge.toml");
    const REFERENCE: &str = include_str!("../../docs/configuration.md");

    #[test]
    fn all_problems_come_in_one_report_in_the_order_of_the_file() {
        let report = parsed(
            "[postgres]\r\nurl = \"postgres://u@h/d?sslmode=prefer\"\r\nshema = \"x\"\r\n[bridge]\r\npoll_interval = 30\r\n\
             [sinks.\"é\"]\r\ntype = \"stdout\"\r\n[handlers.h]\r\nevents = [\"a\", \"b..c\"]\r\nsink = \"${UNSET}\"\r\n[htpt]\r\n",
        )
        .unwrap_err();
        let lines: Vec<&str> = report.lines().collect();
        assert_eq!(lines[0], "read configuration lanebridge.toml: 7 problems");
        for (line, start) in lines[1..].iter().zip([
            "  lanebridge.toml:2:7: postgres.url: has sslmode=prefer",
            "  lanebridge.toml:3:1: postgres.shema: is no known key; did you mean \"schema\"?",
            "  lanebridge.toml:5:17: bridge.poll_interval: must be a duration with its unit, not 30; hint: \"30s\"",
            "  lanebridge.toml:6:",
            "  lanebridge.toml:9:16: handlers.h.events: \"b..c\" has an empty token",
            "  lanebridge.toml:10:8: handlers.h.sink: needs the environment variable UNSET",
            "  lanebridge.toml:11:2: htpt: is no known key; did you mean \"http\"?",
        ]) {
            assert!(line.starts_with(start), "{line}\nis not\n{start}");
        }
        assert_eq!(lines.len(), 8, "{report}");
    }

    #[test]
    fn a_syntax_error_has_its_place_and_never_a_value() {
        let report = bad("password_file = hunter2\n");
        assert!(report.contains("lanebridge.toml:3:17: ") && report.contains("password_file = …"), "{report}");
        let report = bad("schema = \"a\nb = \"\"\"hunter2\n");
        assert!(report.contains("lanebridge.toml:3:"), "{report}");
        assert!(!report.contains("hunter2"), "{report}");
    }

    #[test]
    fn duplicates_are_refused_and_do_not_hide_other_problems() {
        let report = bad("schema = \"a\"\nschema = \"b\"\n[bridge]\nnam = 1\n");
        assert!(report.contains("lanebridge.toml:4:1: duplicate key in \"schema = …\""), "{report}");
        assert!(report.contains("bridge.nam: is no known key"), "{report}");
        assert!(bad("[handlers.h]\n[handlers.h]\n").contains("duplicate key in \"[handlers.h]\""));
    }

    #[test]
    fn a_flood_of_problems_stays_readable() {
        let keys: String = (0..60).map(|i| format!("zz{i} = 1\n")).collect();
        let report = bad(&keys);
        assert!(report.contains(": 60 problems\n") && report.ends_with("and 10 more"), "{report}");
    }

    #[test]
    fn every_bad_file_has_its_own_message() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let padded = |length: usize| format!("{SMALLEST}#{}", "x".repeat(length - SMALLEST.len() - 1));
        for (path, part) in [
            (folder.path().join("none"), "no such file"),
            (folder.path().to_owned(), "is a directory"),
            (write("empty", b""), "file is empty"),
            (write("blank", b"\xef\xbb\xbf\r\n \n"), "file is empty"),
            (write("latin1", b"# a\n# \xe9\n"), "line 2 is not UTF-8"),
            (write("large", padded((1 << 20) + 1).as_bytes()), "larger than 1 MiB"),
        ] {
            let error = load(&path).unwrap_err();
            assert!(error.report().contains(part), "{}", error.report());
            assert_eq!(error.class(), crate::error::Class::Config);
        }
        load(&write("fits", padded(1 << 20).as_bytes())).unwrap();
        load(&write("bom", format!("\u{feff}{}", SMALLEST.replace('\n', "\r\n")).as_bytes())).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn files_that_others_can_read_are_warnings() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (file, secret) = (folder.path().join("c.toml"), folder.path().join("secret"));
        let text = format!(
            "{SMALLEST}password_file = {secret:?}\n[sinks.n]\ntype = \"nats\"\nurl = \"nats://tok@localhost\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let weak = || load(&file).unwrap().warnings.join("\n");
        assert!(weak().contains("cannot be read now"));
        std::fs::write(&secret, "x").unwrap();
        for (mode, expected) in [(0o644, 2), (0o640, 2), (0o600, 0)] {
            for path in [&file, &secret] {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
            }
            assert_eq!(weak().matches("readable by other users").count(), expected, "{mode:o}: {}", weak());
        }
    }

    #[test]
    fn a_planted_secret_is_in_no_output() {
        let text = "[postgres]\nurl = \"postgres://u:hunter2@h/d\"\ndirect_url = \"postgres://u:${SET}@h/d\"\n\
            [sinks.k]\ntype = \"kafka\"\nbrokers = \"b\"\ntls.enabled = true\noptions.ssl.key.password = \"hunter2\"\n\
            sasl = { mechanism = \"PLAIN\", username = \"u\", password = \"hunter2\" }\n\
            [sinks.n]\ntype = \"nats\"\nurl = \"nats://u:hunter2@n,nats://hunter2@m\"\n\
            [sinks.t]\ntype = \"nats\"\nurl = \"nats://n\"\ntoken = \"hunter2\"\n\
            [sinks.r]\ntype = \"redis\"\nurl = \"redis://u:hunter2@r\"\n";
        let config = parsed(text).unwrap();
        for output in [describe(&config), format!("{config:?}"), format!("{config:#?}"), config.warnings.join("\n")] {
            assert!(!output.contains("hunter2"), "{output}");
        }
        // Every value in turn becomes wrong in every way a typing error makes it.
        for broken in ["hunter2", "[\"hunter2\"]", "\"x://hunter2@h\"", "\"${SET}\"", "\"${hunter2 }\"", "\"hunter2"] {
            for (at, _) in text.match_indices(" = \"") {
                let end = at + 4 + text[at + 4..].find('"').unwrap() + 1;
                let key = text[..at].rsplit(['\n', ' ']).next().unwrap();
                if let Err(report) = parsed(&format!("{} = {broken}{}", &text[..at], &text[end..])) {
                    // A plain value of a key that holds no secret is shown, so that it can be found.
                    let shows = ["type", "mechanism", "brokers", "username"].contains(&key) && !broken.contains("${");
                    assert!(shows || !report.contains("hunter2"), "{key} = {broken}: {report}");
                }
            }
        }
    }

    #[test]
    fn the_example_loads_and_shows_the_defaults() {
        let example = parse(EXAMPLE, "config/lanebridge.toml", &env).unwrap();
        assert_eq!(example.warnings, [] as [String; 0]);
        let head = |config: &Config| describe(config).split("\n[sinks.").next().unwrap().to_owned();
        let url = "[postgres]\nurl = \"postgres://bridge@localhost:5432/app\"\n";
        assert_eq!(head(&example), head(&parsed(url).unwrap()));
        let plain = "[sinks.orders-kafka]\ntype = \"kafka\"\nbrokers = \"localhost:9092\"\noptions.compression.type = \"lz4\"\n\
                     [handlers.billing]\nevents = [\"order.*\", \"invoice.>\"]\nsink = \"orders-kafka\"\ntopic = \"billing.{type}\"";
        let section = |config: &Config, name: &str| {
            describe(config).split("\n\n").find(|section| section.contains(name)).unwrap().trim().to_owned()
        };
        for name in ["[sinks.orders-kafka]", "[handlers.billing]"] {
            assert_eq!(section(&example, name), section(&good(plain), name));
        }
    }

    #[test]
    fn what_describe_prints_is_a_configuration_again() {
        let example = parse(EXAMPLE, "f", &env).unwrap();
        let again =
            describe(&example).replace("options.\"compression.type\" = \"***\"", "options.compression.type = \"lz4\"");
        assert_eq!(describe(&parse(&again, "f", &env).unwrap()), describe(&example));
    }

    #[test]
    fn every_key_is_in_the_reference_and_in_the_example_and_no_other_is() {
        // GIVEN a text in which the parser meets every table
        let text = format!(
            "{EXAMPLE}\n[sinks.all]\ntype = \"kafka\"\nbrokers = \"localhost\"\ntls = {{}}\n\
             sasl = {{ mechanism = \"PLAIN\", username = \"u\", password_file = \"/p\" }}\n"
        );
        let (document, nothing) = (DeTable::parse(&text).unwrap(), DeTable::new());
        let report = Report::new("f", &text, &env);
        read_sections(&report, document.get_ref(), &nothing);
        let known: std::collections::BTreeSet<(String, String)> = report
            .keys()
            .into_iter()
            .filter(|(doc, _)| !doc.is_empty())
            .map(|(doc, key)| (doc, key.to_owned()))
            .collect();
        // WHEN the tables of the reference are read
        let mut section = String::new();
        let mut documented = std::collections::BTreeSet::new();
        for line in REFERENCE.lines() {
            if let Some(heading) = line.strip_prefix("## ") {
                section = heading.trim_matches('`').to_owned();
            } else if let Some(row) = line.strip_prefix("| `") {
                documented.insert((section.clone(), row.split('`').next().unwrap().to_owned()));
            }
        }
        // THEN they are the same, and the example has a line for each
        assert_eq!(known, documented);
        for (section, key) in &known {
            let shown = EXAMPLE.lines().map(|line| line.trim_start_matches("# "));
            let table = |line: &str| line.starts_with('[') && line.contains(&format!(".{key}]"));
            let found = shown.clone().any(|line| line.starts_with(&format!("{key} =")) || table(line));
            let inline = section.ends_with("retry") && EXAMPLE.contains(&format!("{key} ="));
            assert!(found || inline, "{section} {key}");
        }
    }

    fn boundary(at: usize) -> usize {
        (0..=at).rev().find(|at| EXAMPLE.is_char_boundary(*at)).unwrap()
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,200}") {
            let _result = parsed(&text);
        }

        #[test]
        fn no_changed_example_makes_it_panic(at in 0..EXAMPLE.len(), cut in 0usize..40, text in "[\\[\\]{}=\"'\\\\$.,#\n\0é0-9a-z]{0,12}") {
            let start = boundary(at);
            let end = boundary((at + cut).min(EXAMPLE.len()));
            let _result = parsed(&format!("{}{text}{}", &EXAMPLE[..start], &EXAMPLE[end.max(start)..])).map(|config| describe(&config));
        }
    }

    proptest::proptest! {
        // Each case reads the example once for each of its keys.
        #![proptest_config(proptest::test_runner::Config::with_cases(32))]

        #[test]
        fn no_value_of_any_key_makes_it_panic(value in "\"(\\$\\{[A-Z]{0,3}(:-)?\\}?|[a-z0-9:/@.%?&=,-]){0,20}\"|-?[0-9]{1,30}|\\[\\]|\\{\\}|true|1979-05-27") {
            for (at, _) in EXAMPLE.match_indices(" = ") {
                let end = at + EXAMPLE[at..].find('\n').unwrap();
                let _result = parsed(&format!("{} = {value}{}", &EXAMPLE[..at], &EXAMPLE[end..])).map(|config| describe(&config));
            }
        }
    }
}
