//! The connection to Redis: opened at the first send or check, dropped at doubt, opened again by the next one.
//!
//! `MultiplexedConnection` never reconnects, which is wanted here: after a failover or a lost connection the next
//! attempt resolves the name again, reads the password again, and is somebody's trial, not a background guess.

use std::path::Path;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    RedisConnectionInfo, TlsCertificates,
};
use tokio::sync::Mutex;

use crate::config::{self, SecretSource};
use crate::error::{Error, Result};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Link {
    info: ConnectionInfo,
    certificates: Option<TlsCertificates>,
    password: Option<SecretSource>,
    options: AsyncConnectionConfig,
    /// The number rises with every connection, so that only the one that failed is dropped.
    current: Mutex<(u64, Option<MultiplexedConnection>)>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({})", self.address())
    }
}

impl Link {
    /// Nothing is contacted.
    ///
    /// # Errors
    /// [`Class::Config`](crate::error::Class::Config) for an address that is none and for files that cannot be read.
    pub fn new(name: &str, config: &config::Redis, response_timeout: Duration) -> Result<Self> {
        // The parser's message may quote the address, which may hold a password.
        let mut info = config.url.expose().into_connection_info().map_err(|_| {
            Error::config(format!("[sinks.{name}] url is not an address of Redis"))
                .hint("redis://host:6379, or rediss://host:6379 for TLS")
        })?;
        match info.addr().clone() {
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err(Error::config(format!("[sinks.{name}] url ends in #insecure, which trusts anybody"))
                    .hint("name the server's certificate authority in tls.ca_file"));
            }
            ConnectionAddr::Tcp(host, port) if config.tls.enabled => {
                info = info.set_addr(ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None });
            }
            _ => {}
        }
        let certificates = certificates(name, &config.tls)?;
        let mut user = info.redis_settings().clone().set_lib_name("lanebridge", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &config.username {
            user = user.set_username(username);
        }
        info = info.set_redis_settings(user).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let link = Self {
            info,
            certificates,
            password: config.password.clone(),
            options: AsyncConnectionConfig::new()
                .set_connection_timeout(Some(CONNECT_TIMEOUT))
                .set_response_timeout(Some(response_timeout)),
            current: Mutex::new((0, None)),
        };
        let unusable =
            |error| Error::config(format!("[sinks.{name}] cannot use its url and TLS settings")).source_is(error);
        if let Some(SecretSource::File(path)) = &link.password {
            secret(path).map_err(|error| unreadable(name, "password", path).source_is(error))?;
        }
        link.client(link.info.redis_settings().clone()).map_err(unusable)?;
        Ok(link)
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        self.info.addr().to_string()
    }

    /// The connection with its number for [`drop_connection`](Self::drop_connection), opened if there is none.
    ///
    /// # Errors
    /// Why there is none, in about 5 s. Cancel safe.
    pub async fn connection(&self) -> redis::RedisResult<(u64, MultiplexedConnection)> {
        let mut current = self.current.lock().await;
        if let (number, Some(connection)) = &*current {
            return Ok((*number, connection.clone()));
        }
        let mut user = self.info.redis_settings().clone();
        match &self.password {
            Some(SecretSource::Inline(password)) => user = user.set_password(password.expose()),
            Some(SecretSource::File(path)) => user = user.set_password(secret(path)?),
            None => {}
        }
        let connection = self.client(user)?.get_multiplexed_async_connection_with_config(&self.options).await?;
        *current = (current.0 + 1, Some(connection.clone()));
        Ok((current.0, connection))
    }

    /// The next caller opens a new one.
    pub async fn drop_connection(&self, number: u64) {
        let mut current = self.current.lock().await;
        if current.0 == number {
            current.1 = None;
        }
    }

    fn client(&self, user: RedisConnectionInfo) -> redis::RedisResult<Client> {
        let info = self.info.clone().set_redis_settings(user);
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }
}

/// `None` without any file: then the public roots are trusted, where the address asks for TLS.
fn certificates(name: &str, tls: &config::Tls) -> Result<Option<TlsCertificates>> {
    let read =
        |what: &str, path: &Path| std::fs::read(path).map_err(|error| unreadable(name, what, path).source_is(error));
    let root_cert = tls.ca_file.as_deref().map(|path| read("certificate", path)).transpose()?;
    let client_tls = match (&tls.cert_file, &tls.key_file) {
        (Some(certificate), Some(key)) => Some(ClientTlsConfig {
            client_cert: read("client certificate", certificate)?,
            client_key: read("key", key)?,
        }),
        (None, None) => None,
        _ => return Err(Error::config(format!("[sinks.{name}] has only one of tls.cert_file and tls.key_file"))),
    };
    Ok((root_cert.is_some() || client_tls.is_some()).then_some(TlsCertificates { client_tls, root_cert }))
}

/// Blocks for one small file, once per connect.
fn secret(path: &Path) -> std::io::Result<String> {
    Ok(std::fs::read_to_string(path)?.trim_end_matches(['\r', '\n']).to_owned())
}

fn unreadable(name: &str, what: &str, path: &Path) -> Error {
    Error::config(format!("[sinks.{name}] cannot use the {what} in {}", path.display()))
}
