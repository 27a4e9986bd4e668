//! The schema as numbered SQL files, applied once, in order, by whichever process comes first.
//!
//! I1: a database that is current costs one read: no lock, no transaction.
//! I2: all missing files are applied in one transaction, or none; racing processes apply each file once.
//! I3: an applied file never changes: a different checksum, or a schema newer than this binary, is refused (H118).
//! I4: waiting for a lock ends after seconds and is tried again, so that publishers do not queue up behind
//! a migration that itself waits (H106).
//!
//! A file is a template over [`Names`]; its checksum is taken before rendering, so that it does not depend on them.

use std::time::Duration;

use super::client::{Client, Transaction};
use super::failure::sqlstate;
use super::names::Names;
use crate::error::{Context, Error, Result};

/// What this binary needs, oldest first. A file that was released is never edited: add one.
pub const MIGRATIONS: &[Migration] = &[
    Migration { version: 1, name: "tables", sql: include_str!("../../migrations/0001_tables.sql") },
    Migration { version: 2, name: "publish", sql: include_str!("../../migrations/0002_publish.sql") },
    Migration { version: 3, name: "bridge", sql: include_str!("../../migrations/0003_bridge.sql") },
    Migration { version: 4, name: "wal", sql: include_str!("../../migrations/0004_wal.sql") },
    Migration { version: 5, name: "operate", sql: include_str!("../../migrations/0005_operate.sql") },
    Migration { version: 6, name: "suspects", sql: include_str!("../../migrations/0006_suspects.sql") },
    Migration { version: 7, name: "home", sql: include_str!("../../migrations/0007_home.sql") },
    Migration { version: 8, name: "lease", sql: include_str!("../../migrations/0008_lease.sql") },
    Migration { version: 9, name: "bury", sql: include_str!("../../migrations/0009_bury.sql") },
    Migration { version: 10, name: "purge", sql: include_str!("../../migrations/0010_purge.sql") },
];

/// How often a migration that ran into `lock_timeout` is tried; with the waits, about a minute.
const ATTEMPTS: u32 = 8;
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(4);
/// Longest time for one file; the server's limit is the same.
const FILE_DEADLINE: Duration = Duration::from_secs(600);
/// First half of the advisory lock's key: "lbmg". The second half is a hash of the schema, without the prefix: two
/// prefixes of one schema would otherwise race for CREATE SCHEMA, which IF NOT EXISTS does not prevent.
const LOCK_CLASS: i32 = 0x6c62_6d67;

const SETTINGS: &str = "SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = '10min'; \
     SET LOCAL search_path = pg_catalog, pg_temp;";

/// False also for a schema that is not there.
const TABLE_EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = $2)";

const SCHEMA_EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)";

/// Written by `migrate` alone; a row is never updated.
const CREATE_TABLE: &str = "\
CREATE TABLE IF NOT EXISTS {schema}.{p}migrations (
    version    integer     PRIMARY KEY CHECK (version > 0),
    name       text        NOT NULL,
    checksum   text        NOT NULL, -- of the template, before schema and prefix are filled in
    applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    applied_by text        NOT NULL DEFAULT pg_catalog.quote_ident(session_user)
);";

const READ: &str = "SELECT version, name, checksum FROM {schema}.{p}migrations ORDER BY version";

const RECORD: &str = "INSERT INTO {schema}.{p}migrations (version, name, checksum) VALUES ($1, $2, $3)";

/// Who holds the migration lock, or a lock on a table of the schema, for the hint of a lock timeout.
const BLOCKERS: &str = "\
SELECT DISTINCT a.pid, coalesce(a.application_name, ''), coalesce(a.state, '')
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND ((l.locktype = 'advisory' AND l.classid::bigint = $1 AND l.objid::bigint = $2)
    OR l.relation IN (SELECT oid FROM pg_catalog.pg_class
                      WHERE relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $3)))
ORDER BY 1 LIMIT 5";

/// One numbered file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// 1, 2, 3… without a gap.
    pub version: u32,
    pub name: &'static str,
    /// A template, see [`Names::render`].
    pub sql: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Applied,
    Pending,
    /// Applied with another text than this binary holds.
    Changed,
    /// Applied by a newer binary.
    Unknown,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Applied => "applied",
            State::Pending => "pending",
            State::Changed => "changed",
            State::Unknown => "newer than this program",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub version: u32,
    pub name: String,
    pub state: State,
}

/// A row of the migrations table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    version: u32,
    name: String,
    checksum: String,
}

impl Migration {
    /// FNV-1a, 64 bits, in hex: it notices an edit, it does not resist an attacker.
    fn checksum(&self) -> String {
        format!("{:016x}", fnv1a(self.sql.as_bytes()))
    }
}

/// Applies what is missing and returns it, oldest first; empty when the schema was current.
///
/// # Errors
/// A schema newer than `migrations` or with other files (class `Failure`), a lock that stays held, a file that fails.
pub async fn migrate(
    client: &mut Client,
    names: &Names,
    migrations: &'static [Migration],
) -> Result<Vec<&'static Migration>> {
    let result = migrate_patiently(client, names, migrations).await;
    result.context(|| format!("migrate schema \"{}\"", names.schema()))
}

async fn migrate_patiently(
    client: &mut Client,
    names: &Names,
    migrations: &'static [Migration],
) -> Result<Vec<&'static Migration>> {
    if missing(&read(client, names).await?, migrations)?.is_empty() {
        return Ok(Vec::new());
    }
    let mut wait = FIRST_WAIT;
    for attempt in 1.. {
        let error = match apply(client, names, migrations).await {
            Ok(applied) => return Ok(applied),
            Err(error) => error,
        };
        // A lock timeout or a deadlock; anything else does not pass by waiting here.
        if !matches!(sqlstate(&error), Some("55P03" | "40P01")) || client.is_closed() {
            return Err(error);
        }
        if attempt == ATTEMPTS {
            let blockers = blockers(client, names).await?;
            return Err(error).context(|| format!("wait for a lock, {ATTEMPTS} times")).map_err(|e| e.hint(blockers));
        }
        tracing::warn!(attempt, wait_ms = wait.as_millis(), "migration waits for a lock that another session holds");
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    unreachable!("the loop returns at its last attempt")
}

async fn apply(
    client: &mut Client,
    names: &Names,
    migrations: &'static [Migration],
) -> Result<Vec<&'static Migration>> {
    let transaction = client.transaction().await?;
    transaction.batch_execute(SETTINGS).await?;
    transaction.batch_execute(&lock(names)).await?;
    // CREATE SCHEMA IF NOT EXISTS asks for CREATE on the database even when the schema is there.
    let schema_exists: bool =
        transaction.query_one(SCHEMA_EXISTS, &[&names.schema()]).await?.try_get(0).context(read_back)?;
    if !schema_exists {
        transaction.batch_execute(&create_schema(names)).await?;
    }
    if !table_exists(&transaction, names).await? {
        transaction.batch_execute(&names.render(CREATE_TABLE)).await?;
    }
    // Read again under the lock: another process may have been faster.
    let rows = transaction.query(&names.render(READ), &[]).await?;
    let missing = missing(&parse(&rows)?, migrations)?;
    for migration in &missing {
        let sql = names.render(migration.sql);
        let step = || format!("apply migration {} ({})", migration.version, migration.name);
        transaction.run_for(FILE_DEADLINE, transaction.raw().batch_execute(&sql)).await.context(step)?;
        let version = version_column(migration.version)?;
        let record = names.render(RECORD);
        transaction.execute(&record, &[&version, &migration.name, &migration.checksum()]).await.context(step)?;
    }
    transaction.commit().await?;
    Ok(missing)
}

/// Every known and every applied migration, oldest first.
///
/// # Errors
/// The database's.
pub async fn status(client: &Client, names: &Names, migrations: &[Migration]) -> Result<Vec<Status>> {
    let rows = read(client, names).await.context(|| format!("read migrations of schema \"{}\"", names.schema()))?;
    Ok(states(&rows, migrations))
}

/// Passes when the schema is exactly what this binary needs.
///
/// # Errors
/// Class `Failure`, naming both versions.
pub async fn require_current(client: &Client, names: &Names, migrations: &[Migration]) -> Result<()> {
    let check = async {
        let rows = read(client, names).await?;
        if missing(&rows, migrations)?.is_empty() {
            return Ok(());
        }
        let at = rows.last().map_or(0, |row| row.version);
        Err(Error::new(format!("it is at version {at}, this binary needs {}", newest(migrations)))
            .hint("run `lanebridge migrate`, or `lanebridge migrate --print` for a DBA"))
    };
    check.await.context(|| format!("check schema \"{}\"", names.schema()))
}

/// The whole schema as one script for psql on a fresh database; `migrate` then finds it current.
///
/// Applied a second time it fails at its first INSERT, and its COMMIT rolls back.
pub fn print(names: &Names, migrations: &[Migration]) -> String {
    let mut script = format!(
        "-- Lanebridge schema, version {}. For a database without it; an older one needs `lanebridge migrate`.\nBEGIN;\n{SETTINGS}\n{}\n{}\n{}\n",
        newest(migrations),
        lock(names),
        create_schema(names),
        names.render(CREATE_TABLE),
    );
    for migration in migrations {
        script.push_str(&format!(
            "\n-- {:04} {}\nINSERT INTO {} (version, name, checksum) VALUES ({}, '{}', '{}');\n{}\n",
            migration.version,
            migration.name,
            names.render("{schema}.{p}migrations"),
            migration.version,
            migration.name.replace('\'', "''"),
            migration.checksum(),
            names.render(migration.sql).trim_end(),
        ));
    }
    script.push_str("\nCOMMIT;\n");
    script
}

/// What is applied, oldest first; empty where there is no table yet.
async fn read(client: &Client, names: &Names) -> Result<Vec<Row>> {
    let table = format!("{}migrations", names.prefix());
    let exists = client.query_one(TABLE_EXISTS, &[&names.schema(), &table]).await?;
    if !exists.try_get::<_, bool>(0).context(read_back)? {
        return Ok(Vec::new());
    }
    parse(&client.query(&names.render(READ), &[]).await?)
}

async fn table_exists(transaction: &Transaction<'_>, names: &Names) -> Result<bool> {
    let table = format!("{}migrations", names.prefix());
    transaction.query_one(TABLE_EXISTS, &[&names.schema(), &table]).await?.try_get(0).context(read_back)
}

fn parse(rows: &[tokio_postgres::Row]) -> Result<Vec<Row>> {
    let row = |row: &tokio_postgres::Row| {
        let version = u32::try_from(row.try_get::<_, i32>(0).context(read_back)?).context(read_back)?;
        Ok(Row { version, name: row.try_get(1).context(read_back)?, checksum: row.try_get(2).context(read_back)? })
    };
    rows.iter().map(row).collect()
}

fn read_back() -> String {
    "read the migrations table".into()
}

/// What is still to be applied, or why nothing may be (I3).
fn missing<'a>(applied: &[Row], migrations: &'a [Migration]) -> Result<Vec<&'a Migration>> {
    let newest = newest(migrations);
    if let Some(row) = applied.iter().find(|row| row.version > newest) {
        let at = applied.last().map_or(row.version, |row| row.version);
        return Err(Error::new(format!("it is at version {at}, this binary knows {newest}"))
            .hint("run a lanebridge at least as new as the one that migrated it"));
    }
    for status in states(applied, migrations) {
        let Status { version, name, state } = status;
        match state {
            State::Applied | State::Pending => {}
            State::Changed => {
                return Err(Error::new(format!("migration {version} ({name}) was applied with another text"))
                    .hint("a released migration never changes: is this a build from another branch?"));
            }
            State::Unknown => {
                return Err(Error::new(format!(
                    "migration {version} ({name}) is applied, this binary does not know it"
                ))
                .hint("run the lanebridge that migrated it"));
            }
        }
    }
    // Applied files are the first ones, without a gap; otherwise a later file would run before an earlier one.
    let (done, pending) = migrations.split_at(applied.len());
    match done.last() {
        Some(last) if applied.last().is_some_and(|row| row.version != last.version) => {
            Err(Error::new(format!("its migrations table lacks version {} or an earlier one", last.version))
                .hint("restore the row, or the schema, from a backup"))
        }
        _ => Ok(pending.iter().collect()),
    }
}

fn states(applied: &[Row], migrations: &[Migration]) -> Vec<Status> {
    let mut states: Vec<Status> = migrations
        .iter()
        .map(|migration| Status {
            version: migration.version,
            name: migration.name.to_owned(),
            state: match applied.iter().find(|row| row.version == migration.version) {
                None => State::Pending,
                Some(row) if row.checksum == migration.checksum() => State::Applied,
                Some(_) => State::Changed,
            },
        })
        .collect();
    let known = |row: &&Row| migrations.iter().any(|migration| migration.version == row.version);
    states.extend(applied.iter().filter(|row| !known(row)).map(|row| Status {
        version: row.version,
        name: row.name.clone(),
        state: State::Unknown,
    }));
    states.sort_by_key(|status| status.version);
    states
}

fn newest(migrations: &[Migration]) -> u32 {
    migrations.last().map_or(0, |migration| migration.version)
}

fn version_column(version: u32) -> Result<i32> {
    i32::try_from(version).context(|| format!("number migration {version}"))
}

fn create_schema(names: &Names) -> String {
    names.render("CREATE SCHEMA IF NOT EXISTS {schema};")
}

fn lock_key(names: &Names) -> i32 {
    let hash = fnv1a(names.schema().as_bytes());
    // Folded to the 32 bits that the lock has left.
    ((hash >> 32) ^ hash) as u32 as i32
}

fn lock(names: &Names) -> String {
    format!("SELECT pg_catalog.pg_advisory_xact_lock({LOCK_CLASS}, {});", lock_key(names))
}

async fn blockers(client: &Client, names: &Names) -> Result<String> {
    // pg_locks shows both halves as unsigned.
    let (class, key) = (i64::from(LOCK_CLASS as u32), i64::from(lock_key(names) as u32));
    let rows = client.query(BLOCKERS, &[&class, &key, &names.schema()]).await?;
    let mut held = Vec::new();
    for row in &rows {
        let (pid, name, state): (i32, String, String) = (
            row.try_get(0).context(read_back)?,
            row.try_get(1).context(read_back)?,
            row.try_get(2).context(read_back)?,
        );
        held.push(format!("pid {pid} ({name}, {state})"));
    }
    if held.is_empty() {
        return Ok("the session that held the lock is gone; run it again".into());
    }
    Ok(format!("held by {}; let it finish, or end it by SELECT pg_terminate_backend(pid)", held.join(", ")))
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Connector, Session, test_postgres};
    use super::*;
    use crate::config;
    use crate::error::Class;

    const FIRST: Migration = Migration {
        version: 1,
        name: "things",
        sql: "CREATE TABLE {schema}.{p}things (id bigint PRIMARY KEY, text text DEFAULT '{schema_text}.{p_text}');",
    };
    const SECOND: Migration =
        Migration { version: 2, name: "more", sql: "ALTER TABLE {schema}.{p}things ADD COLUMN more text;\n" };
    const BROKEN: Migration = Migration { version: 2, name: "broken", sql: "CREATE TABLE {schema}.{p}x (a nonsense);" };
    const ONE: &[Migration] = &[FIRST];
    const TWO: &[Migration] = &[FIRST, SECOND];

    /// A schema of this test alone, dropped when it ends.
    struct Schema {
        names: Names,
        postgres: config::Postgres,
    }

    impl Schema {
        fn new() -> Self {
            let postgres =
                config::Postgres { schema: format!("test_{}", uuid::Uuid::new_v4().simple()), ..test_postgres() };
            Self { names: Names::new(&postgres), postgres }
        }

        async fn connect(&self) -> Client {
            Connector::new(&self.postgres, "test").unwrap().connect("test", Session::Work).await.unwrap()
        }

        fn with_prefix(&self, prefix: &str) -> Names {
            Names::new(&config::Postgres { table_prefix: prefix.into(), ..self.postgres.clone() })
        }

        async fn drop(self) {
            let sql = self.names.render("DROP SCHEMA IF EXISTS {schema} CASCADE");
            self.connect().await.batch_execute(&sql).await.unwrap();
        }
    }

    fn versions(applied: &[&Migration]) -> Vec<u32> {
        applied.iter().map(|migration| migration.version).collect()
    }

    fn row(migration: Migration) -> Row {
        Row { version: migration.version, name: migration.name.into(), checksum: migration.checksum() }
    }

    #[test]
    fn what_is_missing_is_the_rest_and_a_gap_is_refused() {
        assert_eq!(versions(&missing(&[], TWO).unwrap()), [1, 2]);
        assert_eq!(versions(&missing(&[row(FIRST)], TWO).unwrap()), [2]);
        assert!(missing(&[row(FIRST), row(SECOND)], TWO).unwrap().is_empty());
        assert!(missing(&[row(SECOND)], TWO).unwrap_err().report().contains("lacks version 1"));
        let newer = missing(&[row(FIRST), row(SECOND)], ONE).unwrap_err();
        assert!(newer.report().contains("it is at version 2, this binary knows 1"), "{newer:?}");
        let changed = Row { checksum: "0".into(), ..row(FIRST) };
        assert!(missing(&[changed], TWO).unwrap_err().report().contains("(things) was applied with another text"));
    }

    #[test]
    fn the_checksum_is_the_published_fnv_1a() {
        // Source: the FNV reference, test vectors for "" and "foobar".
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn the_released_migrations_count_up_from_one() {
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version as usize, index + 1, "{}", migration.name);
        }
    }

    #[tokio::test]
    async fn migrate_applies_once_then_only_what_is_new() {
        let schema = Schema::new();
        let mut client = schema.connect().await;
        let names = &schema.names;
        let error = require_current(&client, names, ONE).await.unwrap_err();
        assert!(error.report().contains("it is at version 0, this binary needs 1; hint: run `lanebridge migrate`"));
        assert_eq!(versions(&migrate(&mut client, names, ONE).await.unwrap()), [1]);
        assert!(migrate(&mut client, names, ONE).await.unwrap().is_empty());
        require_current(&client, names, ONE).await.unwrap();
        assert_eq!(versions(&migrate(&mut client, names, TWO).await.unwrap()), [2]);
        let text: String = client
            .query_one(&names.render("INSERT INTO {schema}.{p}things VALUES (1) RETURNING text"), &[])
            .await
            .unwrap()
            .get(0);
        assert_eq!(text, format!("{}.", names.schema()));
        let error = migrate(&mut client, names, ONE).await.unwrap_err();
        assert_eq!(error.class(), Class::Failure);
        assert!(error.report().contains("it is at version 2, this binary knows 1"), "{error:?}");
        schema.drop().await;
    }

    // I1: a session that holds the migration lock, or a table of the schema, must not stop the start of a bridge.
    #[tokio::test]
    async fn a_current_schema_waits_for_no_lock() {
        let schema = Schema::new();
        let mut client = schema.connect().await;
        migrate(&mut client, &schema.names, TWO).await.unwrap();
        let mut holder = schema.connect().await;
        let held = holder.transaction().await.unwrap();
        held.batch_execute(&lock(&schema.names)).await.unwrap();
        let waited = std::time::Instant::now();
        assert!(migrate(&mut client, &schema.names, TWO).await.unwrap().is_empty());
        assert!(waited.elapsed() < Duration::from_secs(3));
        held.rollback().await.unwrap();
        schema.drop().await;
    }

    // I2.
    #[tokio::test]
    async fn racing_processes_apply_each_file_once() {
        let schema = Schema::new();
        let (plain, prefixed) = (schema.names.clone(), schema.with_prefix("b_"));
        let race = (0..16).map(|racer| {
            let names = if racer % 2 == 0 { plain.clone() } else { prefixed.clone() };
            let connect = Connector::new(&schema.postgres, "test").unwrap();
            tokio::spawn(async move {
                let mut client = connect.connect("test", Session::Work).await.unwrap();
                let applied = versions(&migrate(&mut client, &names, TWO).await.unwrap());
                (names.prefix().to_owned(), applied)
            })
        });
        let mut winners = HashSet::new();
        for racer in race.collect::<Vec<_>>() {
            let (prefix, applied) = racer.await.unwrap();
            if !applied.is_empty() {
                assert_eq!(applied, [1, 2]);
                assert!(winners.insert(prefix.clone()), "\"{prefix}\" was migrated twice");
            }
        }
        assert_eq!(winners.len(), 2);
        schema.drop().await;
    }

    #[tokio::test]
    async fn a_file_that_fails_leaves_nothing_behind_and_is_named() {
        const HALF: &[Migration] = &[FIRST, BROKEN];
        let schema = Schema::new();
        let mut client = schema.connect().await;
        let error = migrate(&mut client, &schema.names, HALF).await.unwrap_err();
        assert!(error.report().contains("apply migration 2 (broken)"), "{error:?}");
        assert_eq!(sqlstate(&error), Some("42704"));
        assert!(read(&client, &schema.names).await.unwrap().is_empty());
        assert_eq!(versions(&migrate(&mut client, &schema.names, TWO).await.unwrap()), [1, 2]);
        schema.drop().await;
    }

    #[tokio::test]
    async fn a_changed_file_is_refused_and_shown() {
        const EDITED: &[Migration] = &[Migration { sql: "SELECT 1;", ..FIRST }, SECOND];
        let schema = Schema::new();
        let mut client = schema.connect().await;
        migrate(&mut client, &schema.names, ONE).await.unwrap();
        let error = migrate(&mut client, &schema.names, EDITED).await.unwrap_err();
        assert_eq!(error.class(), Class::Failure);
        assert!(error.report().contains("migration 1 (things) was applied with another text"), "{error:?}");
        let status = status(&client, &schema.names, EDITED).await.unwrap();
        assert_eq!(status.iter().map(|s| s.state).collect::<Vec<_>>(), [State::Changed, State::Pending]);
        schema.drop().await;
    }

    #[tokio::test]
    async fn the_printed_script_leaves_a_current_schema_and_fails_as_a_whole_the_second_time() {
        let schema = Schema::new();
        let mut client = schema.connect().await;
        let script = print(&schema.names, TWO);
        client.batch_execute(&script).await.unwrap();
        assert!(migrate(&mut client, &schema.names, TWO).await.unwrap().is_empty());
        let states = status(&client, &schema.names, TWO).await.unwrap();
        assert!(states.iter().all(|status| status.state == State::Applied), "{states:?}");
        let again = client.batch_execute(&script).await.unwrap_err();
        assert_eq!(sqlstate(&again), Some("23505"));
        schema.drop().await;
    }

    // Two installations in one schema, one in another: no name may be used without schema and prefix.
    #[tokio::test]
    async fn the_released_migrations_apply_under_any_names_and_as_a_script() {
        let schema = Schema::new();
        let mut client = schema.connect().await;
        for names in [schema.names.clone(), schema.with_prefix("b_")] {
            assert_eq!(migrate(&mut client, &names, MIGRATIONS).await.unwrap().len(), MIGRATIONS.len());
            assert!(migrate(&mut client, &names, MIGRATIONS).await.unwrap().is_empty());
        }
        let printed = schema.with_prefix("c_");
        client.batch_execute(&print(&printed, MIGRATIONS)).await.unwrap();
        require_current(&client, &printed, MIGRATIONS).await.unwrap();
        schema.drop().await;
    }

    // H106. The table's holder outlasts one attempt, so the second one must succeed.
    #[tokio::test]
    async fn a_lock_that_is_held_is_tried_again() {
        let schema = Schema::new();
        let mut client = schema.connect().await;
        migrate(&mut client, &schema.names, ONE).await.unwrap();
        let mut holder = schema.connect().await;
        let held = holder.transaction().await.unwrap();
        held.batch_execute(&schema.names.render("SELECT FROM {schema}.{p}things")).await.unwrap();
        let error = apply(&mut client, &schema.names, TWO).await.unwrap_err();
        assert_eq!(sqlstate(&error), Some("55P03"));
        let hint = blockers(&client, &schema.names).await.unwrap();
        assert!(hint.contains("lanebridge/test/test, idle in transaction"), "{hint}");
        let names = schema.names.clone();
        let migration = tokio::spawn(async move { migrate(&mut client, &names, TWO).await.map(|a| versions(&a)) });
        held.rollback().await.unwrap();
        assert_eq!(migration.await.unwrap().unwrap(), [2]);
        schema.drop().await;
    }
}
