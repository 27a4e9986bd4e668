//! The command line as a user meets it: tables, JSON, exit statuses, and no secret anywhere.

#![allow(clippy::unwrap_used, reason = "a failed test ends with the line that failed")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::NoTls;

/// A database of its own, a configuration for it, and the binary.
struct Installation {
    folder: TempDir,
    server: String,
    database: String,
}

fn address(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set; run scripts/services up and load target/services/env"))
}

async fn sql(url: &str, text: &str) {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let driven = tokio::spawn(connection);
    client.batch_execute(text).await.unwrap();
    drop(client);
    driven.await.unwrap().unwrap();
}

impl Installation {
    async fn new(handlers: &str) -> Self {
        let server = address("LB_POSTGRES_URL");
        let database = format!("lb_cli_{}_{}", std::process::id(), rand::random::<u32>());
        sql(&server, &format!("create database {database}")).await;
        let this = Self { folder: tempfile::tempdir().unwrap(), server, database };
        let toml = format!("[postgres]\nurl = \"{}\"\n[http]\nlisten = \"\"\n{handlers}", this.url());
        std::fs::write(this.folder.path().join("lanebridge.toml"), toml).unwrap();
        this
    }

    fn url(&self) -> String {
        format!("{}/{}", self.server.rsplit_once('/').unwrap().0, self.database)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lanebridge"));
        command.arg("-c").arg(self.folder.path().join("lanebridge.toml")).args(arguments);
        command.output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).unwrap()
    }

    async fn drop(self) {
        sql(&self.server, &format!("drop database {} with (force)", self.database)).await;
    }
}

fn handlers() -> String {
    let redis = address("LB_REDIS_URL");
    let stream = format!("cli-{}", rand::random::<u32>());
    format!(
        "[sinks.s]\ntype = \"redis\"\nurl = \"{redis}\"\n\
         [handlers.h]\nevents = [\"order.*\"]\nsink = \"s\"\nstream = \"{stream}\"\n"
    )
}

#[tokio::test]
async fn what_was_published_is_listed_shown_and_counted() {
    let it = Installation::new(&handlers()).await;
    assert!(it.ok(&["migrate"]).contains("applied"));
    assert_eq!(it.ok(&["migrate"]), "the schema is current\n");
    let states = it.json(&["migrate", "--status", "--json"]);
    assert!(states.as_array().unwrap().iter().all(|row| row["state"] == "applied"), "{states}");

    assert_eq!(it.ok(&["publish", "order.paid", "--payload", "one", "--key", "k", "--id", "e1"]), "1\n");
    let delayed = ["publish", "order.paid", "--payload", "two", "--key", "k", "--deliver-at", "2100-01-01T00:00:00Z"];
    it.ok(&delayed);
    it.ok(&["publish", "order.paid", "--payload", "three", "--key", "k"]);
    it.ok(&["publish", "nobody.cares", "--payload", "four"]);

    let listed = it.json(&["deliveries", "list", "--json"]);
    let states: Vec<_> = listed.as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["pending", "scheduled", "blocked"]);
    let page = it.ok(&["deliveries", "list", "--limit", "1"]);
    assert!(page.contains("more: --after 1:h"), "{page}");
    let rest = it.json(&["deliveries", "list", "--after", "1:h", "--json"]);
    assert_eq!(rest.as_array().unwrap().len(), 2);

    let shown = it.ok(&["deliveries", "show", "h", "1"]);
    assert!(shown.contains("e1") && !shown.contains("one"), "no payload unless asked for: {shown}");
    assert_eq!(it.json(&["deliveries", "show", "h", "1", "--payload", "--json"])["payload"], "one");

    let status = it.json(&["status", "--json"]);
    let handler = &status["handlers"][0];
    let counts = ["pending", "scheduled", "retrying", "blocked", "blocked_keys", "dead"].map(|state| &handler[state]);
    assert_eq!(counts, [1, 1, 0, 1, 1, 0]);
    assert!(handler["blocked_seconds"].is_number(), "{handler}");
    assert_eq!(status["unrouted_events"], 1);
    assert_eq!(it.json(&["lanes", "--json"])[0]["lanes"], "0-255");
    it.drop().await;
}

#[tokio::test]
async fn a_refused_event_names_the_rule_and_stores_nothing() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    let refused = it.run(&["publish", "order.x", "--payload", "p", "--header", "Nats-Rollup=all"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("reserved"), "{refused:?}");
    let refused = it.run(&["publish", "order.x", "--json-payload", "--payload", "{"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(it.json(&["deliveries", "list", "--json"]), Value::Array(Vec::new()));
    it.drop().await;
}

/// What a bridge writes when the broker refuses a delivery for the last time.
const KILL: &str = "insert into lanebridge.dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
    select lane, handler, seq, created_at, key_hash, size_bytes, 20, 0, 'X', 'no' from lanebridge.deliveries where seq = 1;
    delete from lanebridge.deliveries where seq = 1";

#[tokio::test]
async fn requeue_says_what_it_did_and_does_it_once() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p", "--key", "k"]);
    sql(&it.url(), KILL).await;
    let dead = it.json(&["deliveries", "list", "--state", "dead", "--json"]);
    assert_eq!((&dead[0]["attempts"], &dead[0]["last_error"]), (&20.into(), &"X: no".into()));
    let unasked = it.run(&["deliveries", "requeue", "h", "--all-dead"]);
    assert_eq!(unasked.status.code(), Some(2), "many without --yes");
    let dry = it.json(&["deliveries", "requeue", "h", "--all-dead", "--dry-run", "--json"]);
    assert_eq!((&dry["matching"]["dead"], &dry["changed"]), (&1.into(), &0.into()));
    assert_eq!(it.json(&["deliveries", "requeue", "h", "1", "99", "--json"])["changed"], 1);
    let again = it.ok(&["deliveries", "requeue", "h", "1"]);
    assert!(again.contains("requeued 0 of 1") && again.contains("1 are not there to requeue"), "{again}");
    it.drop().await;
}

/// B47: what will be done and on which database comes first; without an answer nothing is.
#[tokio::test]
async fn bury_and_skip_say_where_and_ask_first() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    for event in ["order.paid", "order.paid", "order.sent"] {
        it.ok(&["publish", event, "--payload", "p", "--key", "k", "--deliver-at", "2100-01-01T00:00:00Z"]);
    }
    sql(&it.url(), KILL).await;
    for action in [&["bury", "h", "2"][..], &["skip", "h", "1"], &["skip", "h", "--key", "k"]] {
        let unasked = it.run(&[&["deliveries"], action].concat());
        let (stdout, stderr) = (String::from_utf8_lossy(&unasked.stdout), String::from_utf8_lossy(&unasked.stderr));
        assert_eq!(unasked.status.code(), Some(2), "{stderr}");
        assert!(stdout.contains(&format!("to {} for h in {} on ", action[0], it.database)), "{stdout}");
        assert!(stderr.contains("--yes"), "{stderr}");
    }
    let refused = it.run(&["deliveries", "skip", "h", "--yes"]);
    assert_eq!(refused.status.code(), Some(2), "all of a handler is never meant by saying nothing: {refused:?}");
    let refused = it.run(&["deliveries", "skip", "nobody", "1", "--yes"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there are: h"), "{refused:?}");
    let refused = it.run(&["deliveries", "bury", "h", "--state", "dead", "--yes"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the state must be one of"), "{refused:?}");
    assert_eq!(it.json(&["deliveries", "list", "--json"]).as_array().unwrap().len(), 3, "nothing was changed");

    let none = ["deliveries", "bury", "h", "--type", "order.*", "--older-than", "1h", "--yes"];
    assert!(it.ok(&none).contains("none\nburied 0 of 0"), "{}", it.ok(&none));
    let buried = ["deliveries", "bury", "h", "--type", "order.*", "--newer-than", "1h", "--limit", "1", "--yes"];
    let buried = it.ok(&[&buried[..], &["--reason", "wrong address"]].concat());
    assert!(buried.contains("2 scheduled\nburied 1 of 2"), "{buried}");
    let skipped = it.json(&["deliveries", "skip", "h", "--error", "wrong addr", "--yes", "--json"]);
    assert_eq!((&skipped["matching"]["dead"], &skipped["changed"]), (&1.into(), &1.into()));
    assert_eq!(it.json(&["deliveries", "skip", "h", "1", "2", "3", "--yes", "--json"])["changed"], 2);
    assert_eq!(it.json(&["deliveries", "skip", "h", "1", "2", "3", "--yes", "--json"])["changed"], 0);
    assert_eq!(it.json(&["deliveries", "list", "--json"]), Value::Array(Vec::new()), "marks are no deliveries");
    it.drop().await;
}

#[tokio::test]
async fn a_pending_delivery_is_taken_only_when_no_bridge_may_have_it() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p", "--key", "k"]);
    let own = "select lanebridge.take_lanes(lanebridge.register_bridge('b', 'i', 'v'),
                                            array(select n::smallint from generate_series(0, 255) n))";
    sql(&it.url(), own).await;
    let left = it.ok(&["deliveries", "bury", "h", "1", "--yes"]);
    assert!(left.contains("1 pending ones are left alone, since a bridge may have them in flight"), "{left}");
    sql(&it.url(), "select lanebridge.leave(epoch) from lanebridge.bridges").await;
    assert!(it.ok(&["deliveries", "bury", "h", "1", "--yes"]).contains("buried 1 of 1"));
    it.drop().await;
}

/// Thousands go in batches, one audit row each, and what is blocked behind them is counted.
#[tokio::test]
async fn thousands_are_changed_in_batches() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    let events = "select lanebridge.publish('order.x', 'p', 'k' || n % 3000) from generate_series(1, 5000) n;
        insert into lanebridge.dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
        select lane, handler, seq, created_at, key_hash, size_bytes, 20, 0, 'X', 'no' from lanebridge.deliveries where seq <= 2500;
        delete from lanebridge.deliveries where seq <= 2500";
    sql(&it.url(), events).await;
    let status = it.json(&["status", "--json"]);
    let counts = ["pending", "blocked", "blocked_keys", "dead"].map(|state| &status["handlers"][0][state]);
    // Keys 1 to 2000 have their second event behind a dead first one.
    assert_eq!(counts, [500, 2000, 2000, 2500], "{status}");
    assert_eq!(it.json(&["deliveries", "requeue", "h", "--all-dead", "--yes", "--json"])["changed"], 2500);
    let batches =
        "do $$ begin assert (select array_agg(changed order by id) from lanebridge.audit) = '{1000,1000,500}'; end $$";
    sql(&it.url(), batches).await;
    let status = it.json(&["status", "--json"]);
    let counts = ["pending", "scheduled", "blocked", "dead"].map(|state| &status["handlers"][0][state]);
    assert_eq!(counts, [500, 2500, 2000, 0], "{status}");
    it.drop().await;
}

#[tokio::test]
async fn doctor_names_what_is_wrong_and_the_line_that_fixes_it() {
    let it = Installation::new(&handlers()).await;
    let unready = it.run(&["doctor"]);
    assert_eq!(unready.status.code(), Some(1));
    let text = String::from_utf8_lossy(&unready.stdout).into_owned();
    assert!(text.contains("schema") && text.contains("migrate"), "{text}");
    it.ok(&["migrate"]);
    sql(
        &it.url(),
        "drop table lanebridge.events_default; do $$ begin execute (select format('drop table lanebridge.%I',
        'events_' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY_MM_DD'))); end $$;
        create table lanebridge.events_default partition of lanebridge.events default",
    )
    .await;
    let doctor = async || serde_json::from_slice::<Value>(&it.run(&["doctor", "--json"]).stdout).unwrap();
    let rows = doctor().await;
    let state = |rows: &Value, what: &str| {
        let row = rows.as_array().unwrap().iter().find(|row| row["what"] == what).unwrap().clone();
        (row["state"].as_str().unwrap().to_owned(), row["fix"].as_str().unwrap().to_owned())
    };
    assert_eq!(state(&rows, "stream"), ("ok".to_owned(), String::new()));
    sql(&it.url(), "drop publication lanebridge_wal").await;
    // Polling works as well, so it is no problem unless the log was asked for.
    let (stream, fix) = state(&doctor().await, "stream");
    assert!(stream == "weak" && fix.starts_with("CREATE PUBLICATION"), "{stream}: {fix}");
    let problem = rows.as_array().unwrap().iter().find(|row| row["state"] == "problem").unwrap();
    assert_eq!(problem["what"], "partitions");
    assert!(problem["fix"].as_str().unwrap().contains("ensure_partitions"), "{problem}");
    it.drop().await;
}

/// B35: all at once, and they are enough.
#[tokio::test]
async fn the_grants_that_doctor_prints_are_all_that_a_role_needs() {
    let it = Installation::new(&handlers()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p"]);
    let role = format!("{}_role", it.database);
    sql(&it.server, &format!("create role {role} login")).await;
    let file = it.folder.path().join("lanebridge.toml");
    let toml = std::fs::read_to_string(&file).unwrap();
    let server = it.server.split_once('@').unwrap().1.rsplit_once('/').unwrap().0.to_owned();
    let bridges = toml.replacen(&it.url(), &format!("postgres://{role}@{server}/{}", it.database), 1);
    std::fs::write(&file, bridges + "[bridge]\nsource = \"poll\"\n").unwrap();
    let privileges = || {
        let rows: Value = serde_json::from_slice(&it.run(&["doctor", "--json"]).stdout).unwrap();
        let row = |row: &Value| (row["state"].as_str().unwrap().to_owned(), row["fix"].as_str().unwrap().to_owned());
        rows.as_array().unwrap().iter().filter(|row| row["what"] == "privileges").map(row).collect::<Vec<_>>()
    };
    let (owner, grants): (Vec<_>, Vec<_>) = privileges().into_iter().partition(|(state, _)| state == "weak");
    assert!(matches!(&owner[..], [(_, fix)] if fix.contains("ensure_partitions")), "{owner:?}");
    assert!(grants.len() > 40, "{grants:?}");
    sql(&it.url(), &grants.iter().map(|(_, grant)| grant.as_str()).collect::<Vec<_>>().join("\n")).await;
    assert_eq!(privileges(), owner);
    it.ok(&["run", "--no-migrate", "--once"]);
    it.ok(&["status"]);
    it.ok(&["lanes"]);
    assert_eq!(it.json(&["deliveries", "list", "--json"]), Value::Array(Vec::new()));
    let server = it.server.clone();
    it.drop().await;
    sql(&server, &format!("drop role {role}")).await;
}

/// B23, B24, 5.3: every problem at once, with line and suggestion; the secret in none of them.
#[test]
fn a_bad_configuration_is_reported_whole_and_without_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    let toml = "[postgres]\nurl = \"postgres://u:canary-secret@db.example/d?sslmod=x\"\n[bridge]\npoll_intervall = \"1s\"\n\
                [sinks.k]\ntype = \"kafka\"\nbrokers = \"localhost:9092\"\n\
                [handlers.h]\nevents = [\"a*\"]\nsink = \"kk\"\ntopic = \"t\"\n";
    std::fs::write(&file, toml).unwrap();
    for command in [&["check"][..], &["run"], &["doctor"], &["status"]] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_lanebridge")).arg("-c").arg(&file).args(command).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        for part in ["sslmode", "poll_interval", ":4:", "\"kk\"", "a*"] {
            assert!(stderr.contains(part), "{part} is not in {stderr}");
        }
        assert!(!stderr.contains("canary"), "{stderr}");
    }
}

/// I1 where nobody can read: the runtime turns a closed standard output into /dev/null, and its own writer takes a
/// descriptor that cannot be written to for success.
#[tokio::test]
async fn what_cannot_be_written_to_standard_output_is_not_acknowledged() {
    let it = Installation::new(stdout_handler()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p"]);
    let file = it.folder.path().join("lanebridge.toml");
    for (redirection, said) in [(">&-", "EPIPE"), ("1</etc/passwd", "WRITE_FAILED"), (">/dev/full", "WRITE_FAILED")] {
        let mut bridge = Command::new("sh")
            .args(["-c", &format!("exec \"$0\" -c \"$1\" run {redirection}"), env!("CARGO_BIN_EXE_lanebridge")])
            .arg(&file)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(bridge.stderr.take().unwrap());
        let line = log.lines().map(Result::unwrap).find(|line| line.contains("unreachable; deliveries wait"));
        let line = line.unwrap_or_else(|| panic!("it ended with {redirection}"));
        assert!(line.contains(said), "{redirection}: {line}");
        bridge.kill().unwrap();
        bridge.wait().unwrap();
        assert_eq!(it.json(&["deliveries", "list", "--json"]).as_array().unwrap().len(), 1, "{redirection}");
    }
    let lines = it.ok(&["run", "--once"]);
    assert_eq!(serde_json::from_str::<Value>(&lines).unwrap()["data"], "p");
    assert_eq!(it.json(&["deliveries", "list", "--json"]), Value::Array(Vec::new()));
    it.drop().await;
}

fn stdout_handler() -> &'static str {
    "[sinks.s]\ntype = \"stdout\"\n[handlers.h]\nevents = [\"order.*\"]\nsink = \"s\"\n"
}

/// B40: what no CHECK refuses is dead with its reason, and its neighbours go.
#[tokio::test]
async fn a_delivery_without_its_event_is_dead_and_stops_no_other() {
    let it = Installation::new(stdout_handler()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p"]);
    let rows = "insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes, due_at)
                values (7, 1, 100, now(), 1, null), (7, 1, 101, now(), -5, '-infinity')";
    sql(&it.url(), rows).await;
    let lines = it.ok(&["run", "--once"]);
    assert_eq!(lines.lines().count(), 1, "{lines}");
    let dead = it.json(&["deliveries", "list", "--json"]);
    let dead = dead.as_array().unwrap();
    assert_eq!(dead.len(), 2, "{dead:?}");
    for row in dead {
        assert!(row["state"] == "dead" && row["last_error"].as_str().unwrap().starts_with("EVENT_MISSING"), "{row}");
    }
    let unreadable = || {
        let rows: Value = serde_json::from_slice(&it.run(&["doctor", "--json"]).stdout).unwrap();
        rows.as_array()
            .unwrap()
            .iter()
            .find(|row| row["what"] == "deliveries")
            .map(|row| row["fix"].as_str().unwrap().to_owned())
    };
    assert_eq!(unreadable(), None);
    for row in ["7, 77, 5", "255, 0, 5", "0, 1, 0"] {
        let insert = format!(
            "insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes) values ({row}, now(), 1)"
        );
        sql(&it.url(), &insert).await;
        sql(&it.url(), &unreadable().unwrap()).await;
        assert_eq!(unreadable(), None, "{row}");
    }
    it.drop().await;
}

/// B41, B42: whatever the database has as its defaults.
#[tokio::test]
async fn defaults_of_the_database_change_nothing_on_the_way() {
    let it = Installation::new(stdout_handler()).await;
    let set = |setting: &str| format!("alter database {} set {setting};", it.database);
    let settings = [
        "datestyle = 'German'",
        "timezone = 'Australia/Lord_Howe'",
        "intervalstyle = 'sql_standard'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
        "extra_float_digits = -15",
        "client_encoding = 'latin1'",
        "default_transaction_isolation = 'serializable'",
    ];
    sql(&it.server, &settings.map(set).concat()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", r"é\n€ ", "--key", "ü😀 ", "--deliver-at", "2026-03-29T02:30:00+01:00"]);
    let status = it.json(&["status", "--json"]);
    assert_eq!(status["handlers"][0]["pending"], 1, "{status}");
    let event: Value = serde_json::from_str(&it.ok(&["run", "--once"])).unwrap();
    assert_eq!((event["data"].as_str(), event["partitionkey"].as_str()), (Some(r"é\n€ "), Some("ü😀 ")));
    it.drop().await;
}

/// B50: no HOME, no PATH, a working folder that nobody may write to, no temporary folder.
#[tokio::test]
async fn it_needs_no_disk_and_no_environment() {
    let it = Installation::new(stdout_handler()).await;
    it.ok(&["migrate"]);
    it.ok(&["publish", "order.x", "--payload", "p"]);
    let bare = Command::new(env!("CARGO_BIN_EXE_lanebridge"))
        .arg("-c")
        .arg(it.folder.path().join("lanebridge.toml"))
        .args(["run", "--once"])
        .env_clear()
        .env("TMPDIR", "/nowhere")
        .current_dir("/proc")
        .output()
        .unwrap();
    assert!(bare.status.success(), "{}", String::from_utf8_lossy(&bare.stderr));
    assert_eq!(bare.stdout.iter().filter(|byte| **byte == b'\n').count(), 1);
    it.drop().await;
}

#[test]
fn a_bad_command_line_ends_with_2_and_a_closed_pipe_quietly() {
    let run = |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_lanebridge")).args(arguments).output().unwrap();
    assert_eq!(run(&["nonsense"]).status.code(), Some(2));
    assert_eq!(run(&["deliveries", "list", "--state", "lost"]).status.code(), Some(2));
    for usage in [&["deliveries", "list", "--limit"][..], &["run", "--twice"], &["deliveries"], &[]] {
        let refused = run(usage);
        assert_eq!(refused.status.code(), Some(2), "{usage:?}");
        assert!(refused.stdout.is_empty() && String::from_utf8_lossy(&refused.stderr).contains("help"), "{usage:?}");
    }
    for help in [&["--help"][..], &["deliveries", "--help", "list"]] {
        assert_eq!(run(help).status.code(), Some(0));
        assert!(!run(help).stdout.contains(&0x1b), "no colour where no terminal is");
    }
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/config/docker.toml");
    let piped = Command::new("sh")
        .args(["-c", "\"$0\" -c \"$1\" migrate --print | head -n 1", env!("CARGO_BIN_EXE_lanebridge"), example])
        .output()
        .unwrap();
    assert!(piped.stderr.is_empty(), "{}", String::from_utf8_lossy(&piped.stderr));
    assert!(!piped.stdout.is_empty());
}
