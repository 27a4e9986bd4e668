//! Connections: from the configured URL to a session on a writable primary whose every setting is ours.
//!
//! I1: the whole of one attempt (resolve, connect, TLS, authenticate, set up) ends within `connect_timeout` per address.
//! I2: the session that comes back fits, and its settings are ours (`session.rs`).
//! I3: a vanished peer is noticed within seconds by both ends (H46).
//!
//! It never retries: the caller knows whether a retry makes sense, by the error's class.

use std::future::Future;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::{Instant, timeout_at};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::client::Client;
use super::failure::failure;
use super::replication::{Login, Replication};
use super::session::{Session, check_server, sessions_are_shared, settings, settings_sql};
use super::tls::{Progress, Step, Watched, client_config};
use crate::config::pg_url::{PgUrl, SslMode};
use crate::config::{self, Secret};
use crate::error::{Class, Error, Result};

/// Silence before the first TCP keepalive probe. With the next two, a peer that vanished is noticed after 5 s; the
/// defaults of the operating system take 2 hours, and locks stay held that long (H46).
const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEPALIVE_RETRIES: u32 = 3;
/// The same for bytes that were sent and never confirmed.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer the client waits than `statement_timeout`: time for the server's own answer to arrive.
const GRACE: Duration = Duration::from_secs(1);
/// NAMEDATALEN - 1: the server cuts `application_name` here.
const APPLICATION_NAME_BYTES: usize = 63;

/// Opens sessions; cheap to clone.
#[derive(Clone, Debug)]
pub struct Connector {
    shared: Arc<Shared>,
    direct: bool,
    pooled: bool,
}

#[derive(Debug)]
struct Shared {
    target: PgUrl,
    direct: Option<PgUrl>,
    password_file: Option<PathBuf>,
    connect_timeout: Duration,
    statement_timeout: Duration,
    bridge: String,
}

fn target(url: &Secret) -> Result<PgUrl> {
    PgUrl::parse(url.expose()).map_err(|problem| Error::config(format!("the Postgres URL {problem}")))
}

impl Connector {
    /// # Errors
    /// A URL that does not parse; class `Config`.
    pub fn new(postgres: &config::Postgres, bridge: &str) -> Result<Self> {
        let direct = postgres.direct_url.as_ref().map(target).transpose()?;
        let shared = Shared {
            target: target(&postgres.url)?,
            password_file: postgres.password_file.clone(),
            connect_timeout: postgres.connect_timeout,
            statement_timeout: postgres.statement_timeout,
            bridge: bridge.to_owned(),
            direct,
        };
        // Who names a direct way says that the other one is not direct.
        let pooled = shared.direct.is_some();
        Ok(Self { shared: Arc::new(shared), direct: false, pooled })
    }

    /// The same by `direct_url` where one is given: for locks, LISTEN, migrations.
    pub fn direct(&self) -> Self {
        Self { direct: true, pooled: self.pooled && self.shared.direct.is_none(), ..self.clone() }
    }

    /// The way that the bridge and the commands take: `direct_url` where there is one, since locks and LISTEN need it and
    /// a transaction pooler keeps no statement prepared. With `ownership = "lease"` and no such way, whatever `url` leads
    /// to is taken for a pooler.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(config: &config::Config) -> Result<Self> {
        let way = Self::new(&config.postgres, &config.bridge.name)?.direct();
        let leased = config.bridge.ownership == config::Ownership::Lease;
        Ok(if leased && config.postgres.direct_url.is_none() { way.behind_pooler() } else { way })
    }

    /// Nothing is set for a session, only for transactions.
    pub fn behind_pooler(&self) -> Self {
        Self { pooled: true, ..self.clone() }
    }

    /// Sessions are not our own.
    pub fn is_pooled(&self) -> bool {
        self.pooled
    }

    fn target(&self) -> &PgUrl {
        match &self.shared.direct {
            Some(direct) if self.direct => direct,
            _ => &self.shared.target,
        }
    }

    /// A session on the first host of the URL that is a writable primary. `purpose` is one word for
    /// `application_name`, which becomes `lanebridge/<bridge>/<purpose>`. Cancel-safe: a dropped
    /// attempt leaves nothing open.
    ///
    /// # Errors
    /// Names host, port and step. Of several hosts, the first failure that a person must end, else the last one.
    pub async fn connect(&self, purpose: &str, session: Session) -> Result<Client> {
        self.first(|address, password| self.connect_address(address, purpose, session, password)).await
    }

    /// A replication connection to the primary, by the same way and with the same checks as [`Self::connect`].
    /// `settings` are given at its start, as they are written in `postgresql.conf`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub(crate) async fn replicate(&self, purpose: &str, settings: &[(&str, String)]) -> Result<Replication> {
        self.first(|address, password| self.replicate_from(address, purpose, settings, password)).await
    }

    /// The first address of the URL at which `attempt` succeeds.
    async fn first<T, F>(&self, attempt: impl Fn(Address, Option<Secret>) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let target = self.target();
        let password = self.password(target).await?;
        let mut last = Error::config("connect to Postgres: the URL names no host");
        for (host, port) in &target.hosts {
            let addresses = match self.resolve(host, *port).await {
                Ok(addresses) => addresses,
                Err(error) => {
                    last = error;
                    continue;
                }
            };
            for ip in addresses {
                match attempt(Address { host: host.clone(), ip, port: *port }, password.clone()).await {
                    Ok(opened) => return Ok(opened),
                    Err(error) if error.class() == Class::Transient => last = error,
                    Err(error) => return Err(error),
                }
            }
        }
        Err(last)
    }

    /// Read again at every connect, so that a rotated password is picked up.
    async fn password(&self, target: &PgUrl) -> Result<Option<Secret>> {
        let Some(file) = &self.shared.password_file else { return Ok(target.password.clone()) };
        let text = tokio::fs::read_to_string(file)
            .await
            .map_err(|source| Error::config(format!("read password_file \"{}\"", file.display())).source_is(source))?;
        let line = text.strip_suffix('\n').unwrap_or(&text);
        Ok(Some(Secret::new(line.strip_suffix('\r').unwrap_or(line))))
    }

    /// `[None]` for a socket.
    async fn resolve(&self, host: &str, port: u16) -> Result<Vec<Option<IpAddr>>> {
        if host.starts_with('/') {
            return Ok(vec![None]);
        }
        let what = || format!("resolve \"{host}\"");
        match timeout_at(Instant::now() + self.shared.connect_timeout, lookup_host((host, port))).await {
            Ok(Ok(addresses)) => {
                let addresses: Vec<_> = addresses.map(|address| Some(address.ip())).collect();
                match addresses.is_empty() {
                    true => Err(Error::transient(format!("{}: no address", what()))),
                    false => Ok(addresses),
                }
            }
            Ok(Err(source)) => Err(Error::transient(what()).source_is(source)),
            Err(_) => Err(self.out_of_time(what())),
        }
    }

    async fn replicate_from(
        &self,
        address: Address,
        purpose: &str,
        settings: &[(&str, String)],
        password: Option<Secret>,
    ) -> Result<Replication> {
        let target = self.target();
        let mode = address.sslmode(target);
        let progress = Progress::default();
        let tls = Watched {
            inner: MakeRustlsConnect::new(client_config(mode, target.sslrootcert.as_deref())?),
            encrypted: mode != SslMode::Disable,
            progress: progress.clone(),
        };
        let alive = &target.keepalives;
        let login = Login {
            server: address.server(),
            user: &target.user,
            dbname: &target.dbname,
            password: password.as_ref(),
            application_name: application_name(&self.shared.bridge, purpose),
            options: target.options.as_deref(),
            settings,
            keepalive: alive.enabled.unwrap_or(true).then(|| {
                socket2::TcpKeepalive::new()
                    .with_time(alive.idle.unwrap_or(KEEPALIVE_IDLE))
                    .with_interval(alive.interval.unwrap_or(KEEPALIVE_INTERVAL))
                    .with_retries(alive.count.unwrap_or(KEEPALIVE_RETRIES))
            }),
            user_timeout: alive.user_timeout.unwrap_or(TCP_USER_TIMEOUT),
        };
        let has_password = password.is_some();
        let end = Instant::now() + self.shared.connect_timeout;
        match timeout_at(end, Replication::open(&address, &login, tls)).await {
            Ok(Ok(opened)) => Ok(opened),
            Ok(Err(error)) => Err(hinted(progress.step(), error, has_password)),
            Err(_) => Err(self.out_of_time(step(&progress, &login.server, &target.user))),
        }
    }

    async fn connect_address(
        &self,
        address: Address,
        purpose: &str,
        session: Session,
        password: Option<Secret>,
    ) -> Result<Client> {
        let target = self.target();
        let server = address.server();
        let mode = address.sslmode(target);

        let mut config = tokio_postgres::Config::new();
        config.user(&target.user).dbname(&target.dbname).host(&address.host).port(address.port);
        config.application_name(application_name(&self.shared.bridge, purpose));
        let alive = &target.keepalives;
        config.keepalives(alive.enabled.unwrap_or(true));
        config.keepalives_idle(alive.idle.unwrap_or(KEEPALIVE_IDLE));
        config.keepalives_interval(alive.interval.unwrap_or(KEEPALIVE_INTERVAL));
        config.keepalives_retries(alive.count.unwrap_or(KEEPALIVE_RETRIES));
        config.tcp_user_timeout(alive.user_timeout.unwrap_or(TCP_USER_TIMEOUT));
        if let Some(options) = &target.options {
            config.options(options);
        }
        config.ssl_mode(match mode {
            SslMode::Disable => tokio_postgres::config::SslMode::Disable,
            SslMode::VerifyCa | SslMode::VerifyFull => tokio_postgres::config::SslMode::Require,
        });
        if let Some(ip) = address.ip {
            config.hostaddr(ip);
        }
        if let Some(password) = &password {
            config.password(password.expose());
        }

        let progress = Progress::default();
        let tls = Watched {
            inner: MakeRustlsConnect::new(client_config(mode, target.sslrootcert.as_deref())?),
            encrypted: mode != SslMode::Disable,
            progress: progress.clone(),
        };
        let end = Instant::now() + self.shared.connect_timeout;
        let (inner, connection) = match timeout_at(end, config.connect(tls)).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => {
                let what = step(&progress, &server, &target.user);
                return Err(explain(progress.step(), what, error, password.is_some()));
            }
            Err(_) => return Err(self.out_of_time(step(&progress, &server, &target.user))),
        };
        let settings = settings(session, self.shared.statement_timeout);
        let local = self.pooled.then(|| settings_sql(true, &settings));
        let deadline = self.shared.statement_timeout + GRACE;
        let client = Client::start(inner, connection, server.clone(), deadline, local);

        let set_up = async {
            check_server(&client, &server).await?;
            if !self.pooled && !settings.is_empty() {
                client.batch_execute(&settings_sql(false, &settings)).await?;
            }
            Ok(())
        };
        match timeout_at(end, set_up).await {
            Ok(Ok(())) => Ok(client),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.out_of_time(format!("set up a session at {server}"))),
        }
    }

    fn out_of_time(&self, what: String) -> Error {
        Error::transient(format!("{what}: no answer within {:?}", self.shared.connect_timeout))
    }

    /// Passes when this connector leads to sessions of its own, or does without. Behind PgBouncer's transaction mode a lock
    /// belongs to a server connection that everybody shares: two bridges both got it, and after both left it stayed (H48).
    ///
    /// # Errors
    /// A pooler (class `Failure`), or whatever ends a connect.
    pub async fn detect_pooler(&self) -> Result<()> {
        if self.pooled {
            return Ok(());
        }
        let one = self.connect("probe", Session::Probe).await?;
        let two = self.connect("probe", Session::Probe).await?;
        if sessions_are_shared(&one, &two).await? {
            return Err(Error::new(format!(
                "Postgres at {} is behind a pooler in transaction mode (PgBouncer?): sessions are shared, \
                 so locks and LISTEN do not work there",
                one.server()
            ))
            .hint(
                "set direct_url to the server's own port, or, if there is no way past the pooler, \
                 [bridge] ownership = \"lease\"",
            ));
        }
        Ok(())
    }
}

/// One place to connect to.
pub(super) struct Address {
    pub(super) host: String,
    /// `None`: `host` is the directory of a socket.
    pub(super) ip: Option<IpAddr>,
    pub(super) port: u16,
}

impl Address {
    /// For messages.
    fn server(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// A socket never leaves the machine; Postgres offers no TLS there.
    fn sslmode(&self, target: &PgUrl) -> SslMode {
        if self.ip.is_none() { SslMode::Disable } else { target.sslmode }
    }
}

/// What was being done, for an error.
fn step(progress: &Progress, server: &str, user: &str) -> String {
    match progress.step() {
        Step::Connect => format!("connect to {server}"),
        Step::Tls => format!("agree on TLS with {server}"),
        Step::Authenticate => format!("authenticate at {server} as \"{user}\""),
    }
}

/// For a server that declined to speak TLS.
const NO_TLS: &str = "set ssl = on in the server, or sslmode=disable where the network is trusted";

fn explain(step: Step, what: String, source: tokio_postgres::Error, has_password: bool) -> Error {
    let is_database_answer = source.as_db_error().is_some();
    // The client library's own refusals (no password to send, a method it does not speak) are no I/O.
    let is_io = std::error::Error::source(&source).is_some_and(|source| source.is::<std::io::Error>());
    let error = match step {
        Step::Authenticate if !is_database_answer && !is_io && !source.is_closed() => {
            Error::config(what).source_is(source)
        }
        _ => failure(what, source),
    };
    match (step, error.class()) {
        (Step::Tls, Class::Failure) if !is_io => error.hint(NO_TLS),
        _ => hinted(step, error, has_password),
    }
}

fn hinted(step: Step, error: Error, has_password: bool) -> Error {
    match (step, error.class()) {
        // Whoever the server refuses by name, host or right to log in (28000, 3D000) would be refused with one, too.
        (Step::Authenticate, Class::Config)
            if !has_password && matches!(super::sqlstate(&error), None | Some("28P01")) =>
        {
            error.hint("no password is configured: put it into the URL or name a password_file")
        }
        (Step::Tls, Class::Failure) if std::error::Error::source(&error).is_none() => error.hint(NO_TLS),
        (Step::Tls, Class::Failure) => {
            error.hint("sslrootcert must name the CA that signed the server's certificate, and the host its name")
        }
        _ => error,
    }
}

/// `lanebridge/<bridge>/<purpose>`; a long bridge name is cut, the purpose never.
fn application_name(bridge: &str, purpose: &str) -> String {
    let room = APPLICATION_NAME_BYTES.saturating_sub("lanebridge//".len() + purpose.len());
    let end = (0..=room.min(bridge.len())).rev().find(|&end| bridge.is_char_boundary(end)).unwrap_or(0);
    format!("lanebridge/{}/{purpose}", &bridge[..end])
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::test_postgres;
    use super::*;

    pub(in crate::db) fn connector(change: impl FnOnce(&mut config::Postgres)) -> Connector {
        let mut postgres = test_postgres();
        change(&mut postgres);
        Connector::new(&postgres, "test").unwrap()
    }

    /// The test server's URL with another user, host or query.
    pub(in crate::db) fn url(user: &str, host: &str, query: &str) -> Secret {
        let target = target(&test_postgres().url).unwrap();
        let port = target.hosts[0].1;
        Secret::new(format!("postgres://{user}@{host}:{port}/{}?{query}", target.dbname))
    }

    pub(in crate::db) fn verified(mode: &str, ca: &str) -> String {
        format!("sslmode={mode}&sslrootcert={ca}")
    }

    pub(in crate::db) fn address(name: &str) -> String {
        std::env::var(name)
            .unwrap_or_else(|_| panic!("{name} is not set; run scripts/services up and load target/services/env"))
    }

    pub(in crate::db) fn tls_ca() -> String {
        address("LB_TLS_CA")
    }

    /// A way to the server whose name its certificate does not hold.
    pub(in crate::db) async fn relay() -> std::net::SocketAddr {
        let target = target(&test_postgres().url).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
        let relay = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (host, port) = target.hosts[0].clone();
                tokio::spawn(async move {
                    let mut server = tokio::net::TcpStream::connect((host, port)).await.unwrap();
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        relay
    }

    pub(in crate::db) fn relayed(relay: &std::net::SocketAddr, query: &str) -> Secret {
        let dbname = target(&test_postgres().url).unwrap().dbname;
        Secret::new(format!("postgres://postgres@{relay}/{dbname}?{query}"))
    }

    async fn is_encrypted(client: &Client) -> bool {
        let sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        client.query_one(sql, &[]).await.unwrap().get(0)
    }

    #[test]
    fn off_this_machine_tls_is_verified_unless_the_url_says_otherwise() {
        let mode = |url: &str| target(&Secret::new(url)).map(|target| target.sslmode);
        for local in ["localhost", "127.0.0.1", "%2Fvar%2Frun"] {
            assert_eq!(mode(&format!("postgres://u@{local}/d")).unwrap(), SslMode::Disable, "{local}");
        }
        assert_eq!(mode("postgres://u@db.example/d").unwrap(), SslMode::VerifyFull);
        assert_eq!(mode("postgres://u@localhost,db.example/d").unwrap(), SslMode::VerifyFull);
        assert_eq!(mode("postgres://u@db.example/d?sslmode=disable").unwrap(), SslMode::Disable);
        assert_eq!(mode("postgres://u@db.example/d?sslmode=prefer").unwrap_err().class(), Class::Config);
    }

    #[test]
    fn a_long_bridge_name_never_cuts_the_purpose() {
        assert_eq!(application_name("b1", "poll"), "lanebridge/b1/poll");
        let name = application_name(&"é".repeat(60), "complete");
        assert!(name.len() <= APPLICATION_NAME_BYTES && name.ends_with("é/complete"), "{name}");
    }

    #[tokio::test]
    async fn a_direct_way_is_no_pooler() {
        connector(|_| {}).direct().detect_pooler().await.unwrap();
    }

    // H48, with the real one in transaction mode: two bridges both got the lock.
    #[tokio::test]
    async fn pgbouncer_in_transaction_mode_is_found_and_left_clean() {
        let url = Secret::new(address("LB_PGBOUNCER_URL"));
        let pooled = connector(|p| p.url = url);
        let error = pooled.detect_pooler().await.unwrap_err();
        assert_eq!(error.class(), Class::Failure);
        assert!(error.report().contains("hint: set direct_url"), "{error:?}");

        let mut client = pooled.behind_pooler().connect("complete", Session::Poll).await.unwrap();
        for _ in 0..10 {
            let transaction = client.transaction().await.unwrap();
            transaction.query_one("SELECT 1", &[]).await.unwrap();
            transaction.commit().await.unwrap();
        }
        let other = pooled.connect("cli", Session::Probe).await.unwrap();
        assert_eq!(super::super::session::ask(&other, "SHOW enable_seqscan").await.unwrap(), "on");
    }

    // H16.
    #[tokio::test]
    async fn a_standby_is_refused_and_the_primary_behind_it_is_taken() {
        let standby = address("LB_STANDBY_URL");
        let error = connector(|p| p.url = Secret::new(&standby)).connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().contains("is a standby"), "{error:?}");
        let target = target(&test_postgres().url).unwrap();
        let (host, port) = &target.hosts[0];
        let (head, dbname) = standby.rsplit_once('/').unwrap();
        let both = format!("{head},{host}:{port}/{dbname}");
        let client = connector(|p| p.url = Secret::new(both)).connect("cli", Session::Work).await.unwrap();
        assert_eq!(client.server(), format!("{host}:{port}"));
    }

    #[tokio::test]
    async fn nobody_listens_names_host_port_and_step() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = Secret::new(format!("postgres://u:canary@127.0.0.1:{free}/d"));
        let error = connector(|p| p.url = url).connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().starts_with(&format!("connect to 127.0.0.1:{free}: ")), "{error:?}");
        assert!(!error.report().contains("canary"), "{error:?}");
    }

    #[tokio::test]
    async fn a_name_that_does_not_resolve_is_named() {
        let url = Secret::new("postgres://u:canary@no-such-host.invalid:1/d");
        let error = connector(|p| p.url = url).connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(error.class(), Class::Transient);
        assert!(error.report().starts_with("resolve \"no-such-host.invalid\""), "{error:?}");
    }

    // A blackhole: the kernel accepts, nobody answers.
    #[tokio::test]
    async fn silence_ends_by_the_connect_timeout_and_names_the_step() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for (query, step) in [("sslmode=disable", "authenticate at"), ("sslmode=verify-full", "agree on TLS with")] {
            let connector = connector(|p| {
                p.url = Secret::new(format!("postgres://u@{address}/d?{query}"));
                p.connect_timeout = Duration::from_millis(100);
            });
            let error = connector.connect("cli", Session::Work).await.unwrap_err();
            assert_eq!(error.class(), Class::Transient);
            assert!(error.report().starts_with(&format!("{step} {address}")), "{error:?}");
            assert!(error.report().contains("no answer within 100ms"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn the_next_host_is_tried_when_one_is_down() {
        let target = target(&test_postgres().url).unwrap();
        let (host, port) = &target.hosts[0];
        let url = Secret::new(format!("postgres://{}@127.0.0.1:1,{host}:{port}/{}", target.user, target.dbname));
        connector(|p| p.url = url).connect("cli", Session::Work).await.unwrap();
    }

    #[tokio::test]
    async fn a_missing_database_is_a_matter_of_configuration() {
        let mut target = target(&test_postgres().url).unwrap();
        target.dbname = "no_such_database".into();
        let (host, port) = &target.hosts[0];
        let url = Secret::new(format!("postgres://{}@{host}:{port}/no_such_database", target.user));
        let error = connector(|p| p.url = url).connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(super::super::sqlstate(&error), Some("3D000"));
        assert_eq!(error.class(), Class::Config);
    }

    // B34.
    #[tokio::test]
    async fn who_is_refused_by_name_is_not_told_to_give_a_password() {
        let connector = connector(|p| p.url = url("no_such_role", "127.0.0.1", "sslmode=disable"));
        let error = connector.connect("cli", Session::Work).await.unwrap_err();
        assert_eq!((error.class(), super::super::sqlstate(&error)), (Class::Config, Some("28000")));
        assert!(error.report().contains("role \"no_such_role\" does not exist"), "{error:?}");
        assert!(!error.report().contains("password"), "{error:?}");
    }

    // B32.
    #[tokio::test]
    async fn a_server_that_speaks_http_is_named_with_the_step() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let _asked = client.read(&mut [0; 512]).await;
                let _answered = client.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
            }
        });
        for (query, step) in [("sslmode=disable", "authenticate at"), ("sslmode=verify-full", "agree on TLS with")] {
            let connector = connector(|p| p.url = Secret::new(format!("postgres://u:canary@{address}/d?{query}")));
            let error = connector.connect("cli", Session::Work).await.unwrap_err();
            assert!(error.report().starts_with(&format!("{step} {address}")), "{error:?}");
            assert!(!error.report().contains("canary"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_password_with_special_characters_works_from_url_and_file() {
        let encoded = "scram_user:p%40ss%3Aw%2Frd%231";
        let client = connector(|p| p.url = url(encoded, "127.0.0.1", "sslmode=disable"));
        client.connect("cli", Session::Work).await.unwrap();

        let file = tempfile::NamedTempFile::new().unwrap();
        let connector = connector(|p| {
            p.url = url("scram_user", "127.0.0.1", "sslmode=disable");
            p.password_file = Some(file.path().to_owned());
        });
        std::fs::write(file.path(), "p@ss:w/rd#1\n").unwrap();
        connector.connect("cli", Session::Work).await.unwrap();
        // Rotated while we run: the same connector reads it again.
        std::fs::write(file.path(), "canary\n").unwrap();
        let error = connector.connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(super::super::sqlstate(&error), Some("28P01"));
        assert_eq!(error.class(), Class::Config);
        assert!(error.report().starts_with("authenticate at 127.0.0.1:"), "{error:?}");
        assert!(!error.report().contains("canary"), "{error:?}");
    }

    #[tokio::test]
    async fn no_password_where_one_is_asked_for_is_a_matter_of_configuration() {
        let connector = connector(|p| p.url = url("scram_user", "127.0.0.1", "sslmode=disable"));
        let error = connector.connect("cli", Session::Work).await.unwrap_err();
        assert_eq!(error.class(), Class::Config);
        assert!(error.report().contains("hint: no password is configured"), "{error:?}");
    }

    #[tokio::test]
    async fn verify_full_encrypts_and_carries_scram_with_channel_binding() {
        let encoded = "scram_user:p%40ss%3Aw%2Frd%231";
        let connector = connector(|p| p.url = url(encoded, "localhost", &verified("verify-full", &tls_ca())));
        let client = connector.connect("cli", Session::Work).await.unwrap();
        assert!(is_encrypted(&client).await);
    }

    #[tokio::test]
    async fn an_unknown_ca_is_refused_in_every_mode() {
        for mode in ["verify-full", "verify-ca"] {
            // Mozilla's roots did not sign the test server's certificate.
            let connector = connector(|p| p.url = url("postgres", "localhost", &format!("sslmode={mode}")));
            let error = connector.connect("cli", Session::Work).await.unwrap_err();
            assert_eq!(error.class(), Class::Failure, "{error:?}");
            assert!(error.report().starts_with("agree on TLS with localhost:"), "{error:?}");
            assert!(error.report().contains("UnknownIssuer"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn verify_ca_ignores_the_name_and_verify_full_does_not() {
        let relay = relay().await;
        let url = |mode: &str| relayed(&relay, &verified(mode, &tls_ca()));
        let strict = connector(|p| p.url = url("verify-full"));
        let error = strict.connect("cli", Session::Work).await.unwrap_err();
        assert!(error.report().contains("not valid for name"), "{error:?}");
        let chain_only = connector(|p| p.url = url("verify-ca"));
        let client = chain_only.connect("cli", Session::Work).await.unwrap();
        assert!(is_encrypted(&client).await);
    }
}
