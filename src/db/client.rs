//! One connection whose every call has a deadline.
//!
//! I1: a call that gets no answer in time closes the connection, and a closed connection is never used again: what
//! the server did with that statement is unknown, and its late answer would be taken for the next one's.
//! I2: the server ends the same statement one second earlier (`statement_timeout`), so that a client deadline
//! means that the server or the way to it is gone, not that a statement is slow.
//!
//! I3: behind a pooler nothing outlives a transaction. Every call is one, with its settings, and no statement has a name:
//! the next transaction may run on another server connection, where that name is not there, or is somebody else's.
//!
//! Dropping a call's future neither cancels its statement nor closes the connection: the next call waits behind
//! it. Do not race calls in `select!`; let them run into their deadline.

use std::future::{Future, poll_fn};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Connection, IsolationLevel, Notification, Row, Statement};
use tokio_util::sync::CancellationToken;

use super::failure::failure;
use crate::error::{Error, Result};

/// Notifications kept until somebody reads them; a full channel loses further ones, which are only hints (D1).
const NOTIFICATIONS: usize = 1024;

/// A connection to Postgres and the task that drives it; dropping it closes both.
#[derive(Debug)]
pub struct Client {
    inner: tokio_postgres::Client,
    guard: Guard,
    notifications: Option<mpsc::Receiver<Notification>>,
    /// Behind a pooler a session setting would stay on a server connection that others use next, so each
    /// transaction sets its own.
    local_settings: Option<String>,
}

/// A statement that [`Client::prepare`] made: kept by the server, or sent with every call behind a pooler.
#[derive(Clone, Debug)]
pub enum Prepared {
    Kept(Statement),
    Text(String),
}

/// What can be called: text, or what was prepared.
pub trait Callable: Sync {
    #[doc(hidden)]
    fn sql(&self) -> Sql<'_>;
}

#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Sql<'a> {
    Kept(&'a Statement),
    Text(&'a str),
}

impl Callable for str {
    fn sql(&self) -> Sql<'_> {
        Sql::Text(self)
    }
}

impl Callable for String {
    fn sql(&self) -> Sql<'_> {
        Sql::Text(self)
    }
}

impl Callable for Prepared {
    fn sql(&self) -> Sql<'_> {
        match self {
            Prepared::Kept(statement) => Sql::Kept(statement),
            Prepared::Text(sql) => Sql::Text(sql),
        }
    }
}

/// An open transaction; dropping it rolls back.
pub struct Transaction<'a> {
    inner: tokio_postgres::Transaction<'a>,
    guard: &'a Guard,
}

/// Deadline and end of one connection.
#[derive(Debug)]
struct Guard {
    /// `host:port`, for errors.
    server: String,
    deadline: Duration,
    closed: CancellationToken,
    /// Why the connection ended, where the server said so.
    reason: Arc<OnceLock<String>>,
    task: AbortHandle,
}

/// The calls that a client and a transaction have in common. Each ends within the session's deadline.
macro_rules! calls {
    () => {
        /// # Errors
        /// The server's answer, a lost connection, or no answer within the deadline.
        pub async fn query(
            &self,
            statement: &(impl Callable + ?Sized),
            params: &[&(dyn ToSql + Sync)],
        ) -> Result<Vec<Row>> {
            match statement.sql() {
                Sql::Kept(statement) => self.run(self.inner.query(statement, params)).await,
                Sql::Text(sql) => self.run(self.whole(Box::pin(self.inner.query_typed(sql, &typed(params))))).await,
            }
        }

        /// # Errors
        /// As `query`; more than one row is a failure.
        pub async fn query_opt(
            &self,
            statement: &(impl Callable + ?Sized),
            params: &[&(dyn ToSql + Sync)],
        ) -> Result<Option<Row>> {
            match statement.sql() {
                Sql::Kept(statement) => self.run(self.inner.query_opt(statement, params)).await,
                Sql::Text(sql) => self.run(self.whole(Box::pin(self.inner.query_typed_opt(sql, &typed(params))))).await,
            }
        }

        /// # Errors
        /// As `query`; any other number of rows than one is a failure.
        pub async fn query_one(
            &self,
            statement: &(impl Callable + ?Sized),
            params: &[&(dyn ToSql + Sync)],
        ) -> Result<Row> {
            match statement.sql() {
                Sql::Kept(statement) => self.run(self.inner.query_one(statement, params)).await,
                Sql::Text(sql) => self.run(self.whole(Box::pin(self.inner.query_typed_one(sql, &typed(params))))).await,
            }
        }

        /// How many rows the statement touched.
        ///
        /// # Errors
        /// As `query`.
        pub async fn execute(
            &self,
            statement: &(impl Callable + ?Sized),
            params: &[&(dyn ToSql + Sync)],
        ) -> Result<u64> {
            match statement.sql() {
                Sql::Kept(statement) => self.run(self.inner.execute(statement, params)).await,
                Sql::Text(sql) => self.run(self.whole(Box::pin(self.inner.execute_typed(sql, &typed(params))))).await,
            }
        }

        /// Runs any number of statements without parameters, all within one deadline.
        ///
        /// # Errors
        /// As `query`.
        pub async fn batch_execute(&self, sql: &str) -> Result<()> {
            self.run(self.inner.batch_execute(sql)).await
        }

        /// Runs calls on the client itself under this session's deadline, several of them pipelined when the
        /// future polls them together.
        ///
        /// # Errors
        /// As `query`.
        pub async fn run<T>(&self, call: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
            self.guard().run(self.guard().deadline, call).await
        }

        /// As [`Self::run`], for statements that may take longer; the caller raises `statement_timeout` to fit.
        ///
        /// # Errors
        /// As `query`.
        pub async fn run_for<T>(
            &self,
            deadline: Duration,
            call: impl Future<Output = Result<T, tokio_postgres::Error>>,
        ) -> Result<T> {
            self.guard().run(deadline, call).await
        }
    };
}

impl Client {
    /// Takes over a fresh connection and spawns the task that drives it.
    pub(super) fn start<S, T>(
        inner: tokio_postgres::Client,
        connection: Connection<S, T>,
        server: String,
        deadline: Duration,
        local_settings: Option<String>,
    ) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, notifications) = mpsc::channel(NOTIFICATIONS);
        let closed = CancellationToken::new();
        let reason = Arc::new(OnceLock::new());
        let task = tokio::spawn(drive(connection, sender, Arc::clone(&reason), closed.clone())).abort_handle();
        let guard = Guard { server, deadline, closed, reason, task };
        Self { inner, guard, notifications: Some(notifications), local_settings }
    }

    /// The client itself, for calls that go through [`Client::run`].
    pub fn raw(&self) -> &tokio_postgres::Client {
        &self.inner
    }

    /// `host:port` of the server this session is on.
    pub fn server(&self) -> &str {
        &self.guard.server
    }

    /// True once the connection ended, for whatever reason; it never becomes usable again.
    pub fn is_closed(&self) -> bool {
        self.guard.closed.is_cancelled() || self.inner.is_closed()
    }

    /// Resolves when the connection ends. Cancel-safe.
    pub async fn closed(&self) {
        self.guard.closed.cancelled().await;
    }

    /// What `LISTEN` brings, once; later calls get `None`. A reader that lags more than 1,024 behind loses some.
    pub fn take_notifications(&mut self) -> Option<mpsc::Receiver<Notification>> {
        self.notifications.take()
    }

    /// Starts a READ COMMITTED transaction that may write, whatever the role's defaults are (H66).
    ///
    /// # Errors
    /// As [`Client::query`].
    pub async fn transaction(&mut self) -> Result<Transaction<'_>> {
        let guard = &self.guard;
        let start =
            self.inner.build_transaction().isolation_level(IsolationLevel::ReadCommitted).read_only(false).start();
        let inner = guard.run(guard.deadline, start).await?;
        let transaction = Transaction { inner, guard };
        if let Some(settings) = &self.local_settings {
            transaction.batch_execute(settings).await?;
        }
        Ok(transaction)
    }

    /// # Errors
    /// As `query`; behind a pooler none, until it is called.
    pub async fn prepare(&self, sql: &str) -> Result<Prepared> {
        match self.local_settings {
            Some(_) => Ok(Prepared::Text(sql.to_owned())),
            None => self.run(self.inner.prepare(sql)).await.map(Prepared::Kept),
        }
    }

    /// True behind a pooler: every call is a transaction of its own.
    pub fn is_pooled(&self) -> bool {
        self.local_settings.is_some()
    }

    /// I3. All of it is sent at once: a call that is dropped leaves no transaction open. A failed statement makes the commit
    /// a rollback.
    async fn whole<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, tokio_postgres::Error> {
        let Some(settings) = &self.local_settings else { return call.await };
        let begin = format!("begin isolation level read committed read write;{settings}");
        let (begin, commit) = (self.inner.batch_execute(&begin), self.inner.batch_execute("commit"));
        let (begun, answer, ended) = Box::pin(futures_util::future::join3(begin, call, commit)).await;
        begun?;
        let answer = answer?;
        ended.map(|()| answer)
    }

    calls!();

    fn guard(&self) -> &Guard {
        &self.guard
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.guard.close();
    }
}

impl Transaction<'_> {
    /// # Errors
    /// As `query`. A lost connection or a deadline leaves it unknown whether the transaction was committed.
    pub async fn commit(self) -> Result<()> {
        self.guard.run(self.guard.deadline, self.inner.commit()).await
    }

    /// # Errors
    /// As `query`.
    pub async fn rollback(self) -> Result<()> {
        self.guard.run(self.guard.deadline, self.inner.rollback()).await
    }

    /// The transaction itself, for calls that go through [`Transaction::run`].
    pub fn raw(&self) -> &tokio_postgres::Transaction<'_> {
        &self.inner
    }

    calls!();

    async fn whole<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, tokio_postgres::Error> {
        call.await
    }

    fn guard(&self) -> &Guard {
        self.guard
    }
}

/// What a parameter of ours may be, the usual ones first.
const TYPES: [Type; 16] = [
    Type::INT8,
    Type::INT4,
    Type::INT2,
    Type::TEXT,
    Type::BOOL,
    Type::INT8_ARRAY,
    Type::INT4_ARRAY,
    Type::INT2_ARRAY,
    Type::TEXT_ARRAY,
    Type::BOOL_ARRAY,
    Type::TIMESTAMPTZ,
    Type::TIMESTAMPTZ_ARRAY,
    Type::FLOAT8,
    Type::JSONB,
    Type::JSONB_ARRAY,
    Type::BYTEA,
];

/// Parameters with their types, so that no statement need be prepared to learn them. A value encodes as one of them only.
fn typed<'a>(params: &[&'a (dyn ToSql + Sync)]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    let mut encoded = bytes::BytesMut::new();
    let mut of = |param: &(dyn ToSql + Sync)| {
        let mut fits = |ty: &&Type| {
            encoded.clear();
            param.to_sql_checked(ty, &mut encoded).is_ok()
        };
        // Of a type that is none of ours the server decides, and the call fails if it decides otherwise.
        TYPES.iter().find(|ty| fits(ty)).cloned().unwrap_or(Type::UNKNOWN)
    };
    params.iter().map(|param| (*param, of(*param))).collect()
}

impl Guard {
    async fn run<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        if self.closed.is_cancelled() {
            return Err(self.lost("connection is closed"));
        }
        match timeout(deadline, call).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) if error.is_closed() => Err(self.lost("connection closed")),
            Ok(Err(error)) => Err(failure(format!("Postgres at {}", self.server), error)),
            Err(_) => {
                self.reason.get_or_init(|| format!("no answer within {deadline:?}"));
                self.close();
                Err(self.lost("connection closed by its deadline"))
            }
        }
    }

    fn lost(&self, what: &str) -> Error {
        match self.reason.get() {
            Some(reason) => Error::transient(format!("Postgres at {}: {what}: {reason}", self.server)),
            None => Error::transient(format!("Postgres at {}: {what}", self.server)),
        }
    }

    fn close(&self) {
        self.closed.cancel();
        self.task.abort();
    }
}

/// Moves bytes until the connection ends. Never waits for a reader of notifications.
async fn drive<S, T>(
    mut connection: Connection<S, T>,
    notifications: mpsc::Sender<Notification>,
    reason: Arc<OnceLock<String>>,
    closed: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    // Also when the task is aborted.
    let _closed = closed.drop_guard();
    while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
        match message {
            Ok(AsyncMessage::Notification(notification)) => drop(notifications.try_send(notification)),
            Ok(AsyncMessage::Notice(notice)) => tracing::debug!(message = notice.message(), "notice from Postgres"),
            Ok(_) => {}
            Err(error) => {
                // Set before the connection is dropped, so that the calls it fails can say why.
                reason.get_or_init(|| match error.as_db_error() {
                    Some(answer) => format!("{} (SQLSTATE {})", answer.message(), answer.code().code()),
                    None => failure("read from the server".to_owned(), error).report(),
                });
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Connector, Session, sqlstate, test_postgres};
    use super::*;
    use crate::error::Class;

    async fn connect(statement_timeout: Duration) -> Client {
        let postgres = crate::config::Postgres { statement_timeout, ..test_postgres() };
        Connector::new(&postgres, "test").unwrap().connect("test", Session::Work).await.unwrap()
    }

    async fn pid(client: &Client) -> i32 {
        client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
    }

    // A statement that outlives its deadline on a server that does not end it: the late answer must not become
    // the answer of the next call.
    #[tokio::test]
    async fn a_missed_deadline_closes_the_connection_for_good() {
        let client = connect(Duration::from_secs(30)).await;
        client.batch_execute("SET statement_timeout = 0").await.unwrap();
        let sleep = client.raw().batch_execute("SELECT pg_sleep(60)");
        let error = client.run_for(Duration::from_millis(50), sleep).await.unwrap_err();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().contains("no answer within 50ms"), "{error:?}");
        assert!(client.is_closed());
        client.closed().await;
        let error = client.query_one("SELECT 1", &[]).await.unwrap_err();
        assert!(error.report().contains("connection is closed: no answer within 50ms"), "{error:?}");
    }

    #[tokio::test]
    async fn the_server_ends_a_slow_statement_first_and_the_connection_lives() {
        let client = connect(Duration::from_millis(50)).await;
        let error = client.batch_execute("SELECT pg_sleep(60)").await.unwrap_err();
        assert_eq!(sqlstate(&error), Some("57014"));
        assert_eq!(error.class(), Class::Transient);
        client.batch_execute("SELECT 1").await.unwrap();
    }

    #[tokio::test]
    async fn a_terminated_backend_is_transient_and_says_why() {
        let (client, other) = (connect(Duration::from_secs(10)).await, connect(Duration::from_secs(10)).await);
        let victim = pid(&client).await;
        other.execute("SELECT pg_terminate_backend($1)", &[&victim]).await.unwrap();
        timeout(Duration::from_secs(5), client.closed()).await.unwrap();
        assert!(client.is_closed());
        let error = client.batch_execute("SELECT 1").await.unwrap_err();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().contains("SQLSTATE 57P01"), "{error:?}");
    }

    #[tokio::test]
    async fn a_dropped_client_gives_its_locks_back() {
        let (client, other) = (connect(Duration::from_secs(10)).await, connect(Duration::from_secs(10)).await);
        client.batch_execute("SELECT pg_advisory_lock(77, 4711)").await.unwrap();
        drop(client);
        other.batch_execute("SELECT pg_advisory_lock(77, 4711)").await.unwrap();
    }

    #[tokio::test]
    async fn the_contents_of_a_row_stay_out_of_errors() {
        let client = connect(Duration::from_secs(10)).await;
        client.batch_execute("CREATE TEMP TABLE t (secret text PRIMARY KEY)").await.unwrap();
        client.execute("INSERT INTO pg_temp.t VALUES ($1)", &[&"canary"]).await.unwrap();
        let error = client.execute("INSERT INTO pg_temp.t VALUES ($1)", &[&"canary"]).await.unwrap_err();
        assert_eq!(sqlstate(&error), Some("23505"));
        assert_eq!(error.class(), Class::Failure);
        assert!(!error.report().contains("canary"), "{error:?}");
        assert!(!format!("{error:?}").contains("canary"));
    }

    #[tokio::test]
    async fn a_dropped_transaction_rolls_back_and_a_committed_one_stays() {
        let mut client = connect(Duration::from_secs(10)).await;
        client.batch_execute("CREATE TEMP TABLE t (n int)").await.unwrap();
        let transaction = client.transaction().await.unwrap();
        transaction.execute("INSERT INTO pg_temp.t VALUES (1)", &[]).await.unwrap();
        drop(transaction);
        let transaction = client.transaction().await.unwrap();
        transaction.execute("INSERT INTO pg_temp.t VALUES (2)", &[]).await.unwrap();
        transaction.commit().await.unwrap();
        let rows = client.query("SELECT n FROM pg_temp.t", &[]).await.unwrap();
        assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<i32>>(), [2]);
    }

    #[tokio::test]
    async fn notifications_arrive_and_a_reader_that_lags_blocks_nothing() {
        let (mut client, other) = (connect(Duration::from_secs(10)).await, connect(Duration::from_secs(10)).await);
        let mut notifications = client.take_notifications().unwrap();
        assert!(client.take_notifications().is_none());
        client.batch_execute("LISTEN lanebridge_test").await.unwrap();
        let many = "DO $$ BEGIN FOR i IN 1..2000 LOOP PERFORM pg_notify('lanebridge_test', i::text); END LOOP; END $$";
        other.batch_execute(many).await.unwrap();
        let first = timeout(Duration::from_secs(5), notifications.recv()).await.unwrap().unwrap();
        assert_eq!((first.channel(), first.payload()), ("lanebridge_test", "1"));
        client.batch_execute("SELECT 1").await.unwrap();
    }
}
