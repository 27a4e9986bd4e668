//! A session: what must be true of its server, what is set for it, and whether it is one at all.
//!
//! I1: a standby, a server older than 14 and a database that is not UTF-8 are refused (H16, B37).
//! I2: no role or database default reaches our statements (H66, H67, H99); the settings below win.

use std::time::Duration;

use tokio_postgres::SimpleQueryMessage;

use super::client::Client;
use crate::error::{Error, Result};

/// PostgreSQL 14, the oldest whose settings and functions we rely on.
const OLDEST_SERVER: u32 = 140_000;

/// What the server is, asked before anything is set. Simple protocol: it must also pass through a pooler.
const ASK_SERVER: &str = "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('server_version_num'), \
     pg_catalog.current_setting('server_encoding')";

/// What a session is for; decides its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Session {
    /// Short transactions: completion, janitor, CLI.
    Work,
    /// Reads of the queue tables, whose statistics are always wrong.
    Poll,
    /// Holds session locks or listens; may idle for ever.
    Lock,
    /// Sets nothing, so that it harms no one if a pooler turns out to be in between.
    Probe,
}

/// For a session of our own or, `local`, for the start of each transaction behind a pooler: there the transaction itself
/// says what is only a default for it, and the pooler keeps its own connections alive.
pub(super) fn settings_sql(local: bool, settings: &[(&'static str, String)]) -> String {
    let within =
        |name: &str| !["tcp_", "default_", "idle_session"].iter().any(|of_session| name.starts_with(of_session));
    let set = if local { "SET LOCAL" } else { "SET" };
    let chosen = settings.iter().filter(|(name, _)| !local || within(name));
    let set_all = chosen.map(|(name, value)| format!("{set} {name} = {value};"));
    // PostgreSQL 17 has one more limit that a role may bring along; older servers do not know its name.
    let newer = format!(
        "SELECT pg_catalog.set_config('transaction_timeout', '0', {local}) \
          WHERE pg_catalog.current_setting('server_version_num')::pg_catalog.int4 >= 170000;"
    );
    set_all.chain([newer]).collect()
}

/// Every setting our statements rely on, values as SQL. A role's or a database's own defaults must never decide (I2).
pub(super) fn settings(session: Session, statement_timeout: Duration) -> Vec<(&'static str, String)> {
    if session == Session::Probe {
        return Vec::new();
    }
    let statement_timeout = format!("'{}ms'", statement_timeout.as_millis().max(1));
    // A frozen bridge must not hold row locks for ever; a lock session never sits in a transaction (H49).
    let idle_in_transaction = if session == Session::Lock { "0".to_owned() } else { statement_timeout.clone() };
    // Below what a heartbeat may take, so that it is said what was in the way.
    let lock_timeout = if session == Session::Lock { "'2s'" } else { "'5s'" };
    let mut settings: Vec<(&'static str, String)> = vec![
        ("statement_timeout", statement_timeout),
        ("idle_in_transaction_session_timeout", idle_in_transaction),
        ("lock_timeout", lock_timeout.to_owned()),
    ];
    let fixed = [
        ("idle_session_timeout", "0"),
        ("default_transaction_isolation", "'read committed'"),
        ("default_transaction_read_only", "off"),
        // Every name in our SQL is qualified; a temporary schema that is not named would be searched first (H99).
        ("search_path", "pg_catalog, pg_temp"),
        // Row-level security that would hide deliveries is an error instead (silence would be loss).
        ("row_security", "off"),
        ("timezone", "'UTC'"),
        ("client_encoding", "'UTF8'"),
        ("bytea_output", "'hex'"),
        ("datestyle", "'ISO, YMD'"),
        ("standard_conforming_strings", "on"),
        // A role default of off would let a completion, or a fence, be lost in a crash, and flushed here is what R2 asks
        // for. "on" would wait for a synchronous standby too, and one that is away would
        // stop the heartbeat, and with it every lane.
        ("synchronous_commit", "local"),
        ("jit", "off"),
        ("tcp_keepalives_idle", "2"),
        ("tcp_keepalives_interval", "1"),
        ("tcp_keepalives_count", "3"),
        ("tcp_user_timeout", "5000"),
    ];
    settings.extend(fixed.map(|(name, value)| (name, value.to_owned())));
    if session == Session::Poll {
        // The queue tables are empty when analysed and full when read, or the other way round; only the plan along
        // the primary key is right at every size.
        for name in ["enable_seqscan", "enable_hashjoin", "enable_mergejoin", "enable_bitmapscan"] {
            settings.push((name, "off".to_owned()));
        }
        settings.push(("plan_cache_mode", "force_generic_plan".to_owned()));
    }
    settings
}

/// Whether two connections lead to sessions that others use too. Simple protocol only, and what it leaves behind
/// in a shared session (a setting of our own name, at worst a lock on a random key) is in nobody's way.
pub(super) async fn sessions_are_shared(one: &Client, two: &Client) -> Result<bool> {
    let pid = async |client: &Client| ask(client, "SELECT pg_catalog.pg_backend_pid()").await;
    let (first, second) = (pid(one).await?, pid(two).await?);
    if first == second {
        return Ok(true);
    }
    let mark: u64 = rand::random();
    ask(one, &format!("SELECT pg_catalog.set_config('lanebridge.probe', '{mark}', false)")).await?;
    ask(two, "SELECT pg_catalog.set_config('lanebridge.probe', 'two', false)").await?;
    for _ in 0..3 {
        let read = ask(one, "SELECT pg_catalog.current_setting('lanebridge.probe', true)").await?;
        if read != mark.to_string() || pid(one).await? != first || pid(two).await? != second {
            return Ok(true);
        }
    }
    // A random key: if a pooler keeps this lock after we left, it stands in nobody's way.
    let key = format!("({}, {})", rand::random::<i32>(), rand::random::<i32>());
    let locked = ask(one, &format!("SELECT pg_catalog.pg_try_advisory_lock{key}")).await?;
    let locked_twice = ask(two, &format!("SELECT pg_catalog.pg_try_advisory_lock{key}")).await?;
    ask(one, &format!("SELECT pg_catalog.pg_advisory_unlock{key}")).await?;
    Ok(locked != "t" || locked_twice != "f")
}

/// The first column of the first row, by the simple protocol; empty for NULL or no row.
pub(super) async fn ask(client: &Client, sql: &str) -> Result<String> {
    Ok(ask_row(client, sql).await?.into_iter().next().unwrap_or_default())
}

async fn ask_row(client: &Client, sql: &str) -> Result<Vec<String>> {
    let answer = client.run(client.raw().simple_query(sql)).await?;
    let row = answer.into_iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let Some(row) = row else { return Ok(Vec::new()) };
    Ok((0..row.len()).map(|column| row.get(column).unwrap_or_default().to_owned()).collect())
}

pub(super) async fn check_server(client: &Client, server: &str) -> Result<()> {
    let row = ask_row(client, ASK_SERVER).await?;
    let [recovery, version, encoding] = row.as_slice() else {
        return Err(Error::new(format!("Postgres at {server} did not say what it is")));
    };
    fits(server, recovery, version, encoding)
}

/// I1.
fn fits(server: &str, recovery: &str, version: &str, encoding: &str) -> Result<()> {
    if recovery != "f" {
        return Err(Error::transient(format!("Postgres at {server} is a standby, which cannot be written to"))
            .hint("point the URL at the primary, or list all hosts: the one that is primary is taken"));
    }
    if version.parse::<u32>().unwrap_or(0) < OLDEST_SERVER {
        return Err(Error::new(format!("Postgres at {server} has server_version_num {version}, too old"))
            .hint("PostgreSQL 14 or newer is needed"));
    }
    if encoding != "UTF8" {
        return Err(Error::new(format!(
            "the database at {server} is encoded in {encoding}: keys and payloads could change on their way"
        ))
        .hint("create a database with ENCODING 'UTF8' and publish there"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Connector, test_postgres};
    use super::*;
    use crate::config::{Postgres, Secret};
    use crate::error::Class;

    fn connector() -> Connector {
        Connector::new(&test_postgres(), "test").unwrap()
    }

    #[test]
    fn a_standby_an_old_server_and_another_encoding_are_refused() {
        assert!(fits("h:1", "f", "140000", "UTF8").is_ok());
        let standby = fits("h:1", "t", "150000", "UTF8").unwrap_err();
        assert_eq!(standby.class(), Class::Transient);
        assert!(standby.report().contains("is a standby"));
        let old = fits("h:1", "f", "130099", "UTF8").unwrap_err();
        assert_eq!(old.class(), Class::Failure);
        assert!(fits("h:1", "f", "150000", "SQL_ASCII").unwrap_err().report().contains("SQL_ASCII"));
    }

    // H66, H67, H99: what an ALTER ROLE ... SET says must not reach our statements.
    #[tokio::test]
    async fn the_session_is_ours_whatever_the_role_defaults_are() {
        let admin = connector().connect("cli", Session::Work).await.unwrap();
        let role = format!("test_{}", uuid::Uuid::new_v4().simple());
        let hostile = [
            "search_path = public",
            "statement_timeout = '1s'",
            "lock_timeout = '1s'",
            "idle_session_timeout = '1s'",
            "default_transaction_isolation = serializable",
            "default_transaction_read_only = on",
            "synchronous_commit = off",
            "datestyle = 'SQL, DMY'",
            "timezone = 'Asia/Kolkata'",
            "standard_conforming_strings = off",
            "bytea_output = escape",
        ];
        let alter = hostile.map(|setting| format!("ALTER ROLE {role} SET {setting};")).concat();
        admin.batch_execute(&format!("CREATE ROLE {role} LOGIN; {alter}")).await.unwrap();
        let url = test_postgres().url.expose().replace("//postgres@", &format!("//{role}@"));
        let postgres = Postgres { url: Secret::new(url), ..test_postgres() };
        let connector = Connector::new(&postgres, "test").unwrap();
        let client = connector.connect("poll", Session::Poll).await.unwrap();
        for (name, value) in [
            ("application_name", "lanebridge/test/poll"),
            ("search_path", "pg_catalog, pg_temp"),
            ("statement_timeout", "10s"),
            ("lock_timeout", "5s"),
            ("idle_session_timeout", "0"),
            ("idle_in_transaction_session_timeout", "10s"),
            ("TimeZone", "UTC"),
            ("DateStyle", "ISO, YMD"),
            ("default_transaction_isolation", "read committed"),
            ("synchronous_commit", "local"),
            ("row_security", "off"),
            ("enable_seqscan", "off"),
            ("plan_cache_mode", "force_generic_plan"),
            ("tcp_keepalives_idle", "2"),
            ("tcp_user_timeout", "5000"),
        ] {
            let found: String = client.query_one("SELECT current_setting($1)", &[&name]).await.unwrap().get(0);
            assert_eq!(found, value, "{name}");
        }
        let lock = connector.connect("lock", Session::Lock).await.unwrap();
        let sql = "SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('enable_seqscan')";
        let row = lock.query_one(sql, &[]).await.unwrap();
        assert_eq!((row.get(0), row.get(1)), ("0", "on"));
        admin.batch_execute(&format!("DROP ROLE {role}")).await.unwrap();
    }

    // H66: a limit that only newer servers have; behind a pooler too.
    #[tokio::test]
    async fn a_role_cannot_limit_our_transactions() {
        let server = std::env::var("LB_POSTGRES18_URL").expect("LB_POSTGRES18_URL; run scripts/services up");
        let at = |url: String| Connector::new(&Postgres { url: Secret::new(url), ..test_postgres() }, "test").unwrap();
        let admin = at(server.clone()).connect("cli", Session::Work).await.unwrap();
        let role = format!("test_{}", uuid::Uuid::new_v4().simple());
        let create = format!("CREATE ROLE {role} LOGIN; ALTER ROLE {role} SET transaction_timeout = '1s'");
        admin.batch_execute(&create).await.unwrap();
        let ours = at(server.replace("//postgres@", &format!("//{role}@")));
        for connector in [ours.clone(), ours.behind_pooler()] {
            let client = connector.connect("poll", Session::Poll).await.unwrap();
            let limit = client.query_one("SELECT current_setting('transaction_timeout')", &[]).await.unwrap();
            assert_eq!(limit.get::<_, &str>(0), "0", "pooled: {}", client.is_pooled());
        }
        admin.batch_execute(&format!("DROP ROLE {role}")).await.unwrap();
    }

    // A session setting behind a pooler stays on a server connection that the application uses next (I6: no harm).
    #[tokio::test]
    async fn behind_a_pooler_settings_end_with_their_transaction() {
        let mut client = connector().behind_pooler().connect("complete", Session::Poll).await.unwrap();
        let sql = "SELECT current_setting('enable_seqscan')";
        let transaction = client.transaction().await.unwrap();
        assert_eq!(transaction.query_one(sql, &[]).await.unwrap().get::<_, &str>(0), "off");
        transaction.commit().await.unwrap();
        assert_eq!(ask(&client, sql).await.unwrap(), "on");
        // A single call is a transaction too.
        assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, &str>(0), "off");
        assert_eq!(ask(&client, sql).await.unwrap(), "on");
    }

    #[tokio::test]
    async fn one_session_behind_two_connections_is_a_pooler() {
        let one = connector().connect("probe", Session::Probe).await.unwrap();
        assert!(sessions_are_shared(&one, &one).await.unwrap());
    }
}
