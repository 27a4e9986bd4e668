//! A migrated database, and short ways to ask it.

use std::time::Duration;

use lanebridge::config::{Pattern, Postgres, Secret};
use lanebridge::db::{MIGRATIONS, Names, print};
use tokio_postgres::types::FromSqlOwned;
use tokio_postgres::{Client, Error};

use crate::services::{Database, connect, eventually};

/// For what must happen, given time; never waited out by a test that passes.
pub const SOON: Duration = Duration::from_secs(20);

/// Runs each named test on the oldest, the most common and the newest server version.
macro_rules! on_every_server {
    ($($rule:ident),+ $(,)?) => {
        on_every_server!(postgres_14 "LB_POSTGRES14_URL" $($rule)+);
        on_every_server!(postgres_15 "LB_POSTGRES_URL" $($rule)+);
        on_every_server!(postgres_18 "LB_POSTGRES18_URL" $($rule)+);
    };
    ($version:ident $variable:literal $($rule:ident)+) => {
        mod $version {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $rule() {
                let installation = crate::installation::Installation::create($variable).await;
                super::$rule(&installation).await;
                installation.drop().await;
            })+
        }
    };
}

pub struct Installation {
    database: Database,
}

impl Installation {
    pub async fn create(variable: &str) -> Self {
        let installation = Self { database: Database::create(variable).await };
        installation.connect().await.batch_execute(&script("lanebridge", "")).await.unwrap();
        installation
    }

    pub fn url(&self) -> String {
        self.database.url()
    }

    pub async fn connect(&self) -> Client {
        self.database.connect().await
    }

    /// A session of another role, which must be able to log in without a password.
    pub async fn connect_as(&self, role: &str) -> Client {
        let url = self.url();
        let (_, host) = url.split_once('@').expect("the address names a user");
        connect(&format!("postgres://{role}@{host}")).await
    }

    pub async fn drop(self) {
        self.database.drop().await;
    }
}

/// The released migrations as one script.
pub fn script(schema: &str, prefix: &str) -> String {
    let names = Names::new(&Postgres {
        url: Secret::new(String::new()),
        direct_url: None,
        password_file: None,
        schema: schema.into(),
        table_prefix: prefix.into(),
        connect_timeout: SOON,
        statement_timeout: SOON,
        max_payload_bytes: 1 << 20,
    });
    print(&names, MIGRATIONS)
}

/// Registers a handler as a bridge does; its id.
pub async fn handler(client: &Client, name: &str, events: &[&str]) -> i32 {
    let regex: Vec<String> = events.iter().map(|event| Pattern::parse(event).unwrap().to_regex()).collect();
    let registration = serde_json::json!([{
        "name": name, "events": events, "type_regex": format!("^(?:{})$", regex.join("|")),
        "ordered": true, "blocks": true, "sink": "sink", "destination": "somewhere",
    }]);
    client.query_one("select id from lanebridge.register_handlers($1)", &[&registration]).await.unwrap().get(0)
}

/// Makes publishers notify for a while, as the heartbeat of a bridge that listens does.
pub async fn listening(client: &Client, seconds: i32) {
    run(client, r#"listen "lanebridge.deliveries""#).await;
    assert!(one::<bool>(client, &format!("select lanebridge.listening({seconds})")).await, "the session listens");
}

/// The one value that `sql` returns.
pub async fn one<T: FromSqlOwned>(client: &Client, sql: &str) -> T {
    match client.query_one(sql, &[]).await {
        Ok(row) => row.get(0),
        Err(error) => panic!("{sql:.2000}: {}", said(&error)),
    }
}

/// The first column of every row.
pub async fn all<T: FromSqlOwned>(client: &Client, sql: &str) -> Vec<T> {
    match client.query(sql, &[]).await {
        Ok(rows) => rows.iter().map(|row| row.get(0)).collect(),
        Err(error) => panic!("{sql:.2000}: {}", said(&error)),
    }
}

pub async fn run(client: &Client, sql: &str) {
    if let Err(error) = client.batch_execute(sql).await {
        panic!("{sql:.2000}: {}", said(&error));
    }
}

/// SQLSTATE and message of what `sql` must be refused with.
pub async fn refusal(client: &Client, sql: &str) -> String {
    match client.batch_execute(sql).await {
        Ok(()) => panic!("not refused: {sql}"),
        Err(error) => said(&error),
    }
}

/// `22023 publish: type must not be null or empty`
pub fn said(error: &Error) -> String {
    match error.as_db_error() {
        Some(error) => format!("{} {}", error.code().code(), error.message()),
        None => error.to_string(),
    }
}

pub async fn pid(client: &Client) -> i32 {
    one(client, "select pg_backend_pid()").await
}

/// Until the session `pid` waits for a lock, as `observer` sees it.
pub async fn waits(observer: &Client, pid: i32) {
    eventually("the session waits for a lock", SOON, || async {
        one(observer, &format!("select cardinality(pg_blocking_pids({pid})) > 0")).await
    })
    .await;
}
