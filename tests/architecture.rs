//! The import levels of the code base: a file imports lower levels and siblings of its own folder, nothing else; a
//! broker's crate stays in its sink, SQL in `db` and `publish`, clap in the command line.

#![allow(clippy::unwrap_used, reason = "a failed test ends with the line that failed")]

use std::path::{Path, PathBuf};

/// Module and level; see the layout in docs/architecture.md.
const LEVELS: &[(&str, u8)] = &[
    ("error", 0),
    ("event", 0),
    ("delivery", 0),
    ("backoff", 0),
    ("controls", 0),
    ("publish", 1),
    ("config", 1),
    ("health", 1),
    ("metrics", 2),
    ("db", 2),
    ("lanes", 3),
    ("sources", 3),
    ("sinks", 3),
    ("completion", 3),
    ("dispatch", 4),
    ("janitor", 4),
    ("backlog", 4),
    ("bridge", 5),
    ("http", 6),
    ("cli", 7),
    ("main", 8),
    ("lib", 8),
];

/// A word that may appear only in files under these places.
const CONFINED: [(&str, &[&str]); 8] = [
    ("hyper::", &["src/http"]),
    ("prometheus_client::", &["src/metrics"]),
    ("rdkafka", &["src/sinks/kafka"]),
    ("async_nats", &["src/sinks/nats"]),
    ("redis::", &["src/sinks/redis"]),
    ("clap::", &["src/cli", "src/main.rs"]),
    ("tokio_postgres_rustls", &["src/db"]),
    ("postgres_protocol", &["src/db"]),
];

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

fn all() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    assert!(files.len() > 30, "the sources were found");
    files
        .into_iter()
        .map(|file| {
            let name = file.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(&file).unwrap())
        })
        .collect()
}

fn module(file: &str) -> &str {
    file.strip_prefix("src/").unwrap().split(['/', '.']).next().unwrap()
}

fn level(module: &str) -> u8 {
    let found = LEVELS.iter().find(|(name, _)| *name == module);
    found.unwrap_or_else(|| panic!("{module} has no level; give it one here and in docs/architecture.md")).1
}

/// The modules that a source names after `crate::`.
fn imports(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split("crate::").skip(1))
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(group) => group.split(',').map(|part| part.split("::").next().unwrap_or("").to_owned()).collect(),
            None => vec![rest.to_owned()],
        })
        .map(|rest| rest.trim().chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect::<String>())
        .filter(|name| !name.is_empty())
        .collect()
}

/// A row of docs/bad-input.md is worth as much as its test.
#[test]
fn the_tests_that_the_table_of_bad_input_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("tests"), &mut files);
    let code: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let page = std::fs::read_to_string(root.join("docs/bad-input.md")).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| B")).collect();
    for row in &rows {
        // The last column; a bar inside a cell is escaped.
        let tests = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap();
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty() || tests.starts_with("none"), "no test and no reason: {row}");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "no test is called {name}: {row}");
        }
    }
    let number = |row: &&str| row.split([' ', '|']).find_map(|word| word.strip_prefix('B')?.parse::<u32>().ok());
    let mut numbers: Vec<u32> = rows.iter().filter_map(number).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(1..=55), "each row once: {numbers:?}");
}

#[test]
fn a_file_imports_lower_levels_and_its_own_folder() {
    let mut wrong = Vec::new();
    for (file, text) in all() {
        let own = module(&file);
        for import in imports(&text) {
            // The nouns of level 0 lie in one folder, so they are siblings.
            let siblings = level(own) == 0 && level(&import) == 0;
            if import != own && !siblings && level(&import) >= level(own) {
                wrong.push(format!("{file} (level {}) imports {import} (level {})", level(own), level(&import)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_brokers_crate_stays_in_its_sink() {
    let mut wrong = Vec::new();
    for (file, text) in all() {
        for (word, places) in CONFINED {
            let used = text.lines().any(|line| {
                let line = line.trim_start();
                !line.starts_with("//") && (line.contains(&format!("use {word}")) || line.contains(&format!(" {word}")))
            });
            if used && !places.iter().any(|place| file.starts_with(place)) {
                wrong.push(format!("{file} uses {word}, which belongs to {}", places.join(", ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
