//! A replication connection: the protocol of a stream, frame by frame, over the same sockets, TLS and log-in as every
//! other connection.
//!
//! `tokio-postgres` cannot start a stream, so this speaks the protocol with the crate below it, which it logs in with:
//! the same SCRAM, the same preparation of passwords, and through `tls.rs` the same host names.
//! I1: a frame larger than the caller allows is skipped, never buffered (R14).
//! I2: an error, or anything unexpected, ends the connection; nobody may go on with it (H18).
//! I3: whatever the peer sends, memory stays within a few times [`LONGEST_MESSAGE`], or the caller's limit for a frame.

use std::time::{Duration, SystemTime};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use postgres_protocol::message::backend::{self, Header, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_postgres::fallible_iterator::FallibleIterator;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect::Address;
use super::failure::{answered, broken};
use super::tls::{Step, Watched};
use crate::config::Secret;
use crate::error::{Error, Result};

/// For one write: the peer reads these few bytes at once, or is not there.
const WRITE: Duration = Duration::from_secs(5);
/// For the server to close a connection that took leave.
const LEAVE: Duration = Duration::from_secs(1);
/// Between the epochs of Unix and of Postgres.
const POSTGRES_EPOCH_SECONDS: u64 = 946_684_800;
/// Longest message other than a frame, and the most that all rows of one answer may take.
const LONGEST_MESSAGE: usize = 1 << 20;
/// What a row takes besides its values.
const ROW: usize = 64;
/// Read at once.
const READ: usize = 64 << 10;
/// The start of a stream; `postgres-protocol` does not know it.
const COPY_BOTH_RESPONSE: u8 = b'W';

/// What a replication connection says of itself when it logs in.
pub(super) struct Login<'a> {
    pub(super) server: String,
    pub(super) user: &'a str,
    pub(super) dbname: &'a str,
    pub(super) password: Option<&'a Secret>,
    pub(super) application_name: String,
    pub(super) options: Option<&'a str>,
    pub(super) settings: &'a [(&'a str, String)],
    pub(super) keepalive: Option<socket2::TcpKeepalive>,
    pub(super) user_timeout: Duration,
}

trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// One connection that streams; dropping it closes it, and the server drops its temporary slot.
pub(crate) struct Replication {
    wire: Box<dyn Wire>,
    input: BytesMut,
    server: String,
    pid: i32,
    /// Bytes of an oversized frame that are still to come.
    skipping: usize,
}

/// What a stream brings.
#[derive(Debug)]
pub(crate) enum Frame {
    /// One message of the output plugin.
    Data { wal_end: u64, message: Bytes },
    /// Nothing new; `reply`: the server wants to hear from us at once.
    Keepalive { wal_end: u64, reply: bool },
    /// A message that was larger than allowed, and was thrown away.
    Oversized,
}

impl Replication {
    pub(super) async fn open(address: &Address, login: &Login<'_>, mut tls: Watched) -> Result<Self> {
        let server = login.server.clone();
        let encrypted = tls.encrypted;
        let progress = tls.progress.clone();
        let connecting = |source| broken(format!("connect to {server}"), source);
        let wire: Box<dyn Wire> = match address.ip {
            None => {
                let path = format!("{}/.s.PGSQL.{}", address.host, address.port);
                Box::new(UnixStream::connect(path).await.map_err(connecting)?)
            }
            Some(ip) => {
                let tcp = TcpStream::connect((ip, address.port)).await.map_err(connecting)?;
                tcp.set_nodelay(true).map_err(connecting)?;
                let socket = socket2::SockRef::from(&tcp);
                if let Some(keepalive) = &login.keepalive {
                    socket.set_tcp_keepalive(keepalive).map_err(connecting)?;
                }
                socket.set_tcp_user_timeout(Some(login.user_timeout)).map_err(connecting)?;
                if encrypted {
                    progress.reach(Step::Tls);
                    encrypt(tcp, &address.host, &server, &mut tls.inner).await?
                } else {
                    Box::new(tcp)
                }
            }
        };
        progress.reach(Step::Authenticate);
        let mut this = Self { wire, input: BytesMut::new(), server, pid: 0, skipping: 0 };
        this.log_in(login).await?;
        // A standby may be among the hosts; its log runs behind what our reads see (H16).
        let recovery = this.ask("SELECT pg_catalog.pg_is_in_recovery()").await?;
        if recovery.first().and_then(|row| row.first()).and_then(Option::as_deref) != Some("f") {
            return Err(Error::transient(format!("Postgres at {} is a standby", this.server))
                .hint("point the URL at the primary, or list all hosts: the one that is primary is taken"));
        }
        Ok(this)
    }

    /// The server process that streams.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    async fn log_in(&mut self, login: &Login<'_>) -> Result<()> {
        let what = || format!("authenticate at {} as \"{}\"", login.server, login.user);
        let mut parameters = vec![
            ("user", login.user),
            ("database", login.dbname),
            ("replication", "database"),
            ("client_encoding", "UTF8"),
            ("application_name", &login.application_name),
        ];
        parameters.extend(login.options.map(|options| ("options", options)));
        parameters.extend(login.settings.iter().map(|(name, value)| (*name, value.as_str())));
        let mut out = BytesMut::new();
        frontend::startup_message(parameters, &mut out).map_err(|e| Error::config(what()).source_is(e))?;
        self.write(&out).await?;
        let mut scram = None;
        loop {
            let mut out = BytesMut::new();
            let password = || {
                login.password.ok_or_else(|| Error::config(what()).source_is(std::io::Error::other("password missing")))
            };
            let refused = |source| Error::config(what()).source_is(source);
            match self.message(&what).await? {
                // Whoever cannot prove that it knows the password is not the server that was meant.
                Message::AuthenticationOk if scram.is_some() => {
                    return Err(self.unexpected("a welcome before its SCRAM signature"));
                }
                Message::AuthenticationOk | Message::ParameterStatus(_) | Message::NoticeResponse(_) => continue,
                Message::BackendKeyData(key) => self.pid = key.process_id(),
                Message::ReadyForQuery(_) => return Ok(()),
                Message::AuthenticationCleartextPassword => {
                    frontend::password_message(password()?.expose().as_bytes(), &mut out).map_err(refused)?;
                }
                Message::AuthenticationMd5Password(body) => {
                    let hashed = postgres_protocol::authentication::md5_hash(
                        login.user.as_bytes(),
                        password()?.expose().as_bytes(),
                        body.salt(),
                    );
                    frontend::password_message(hashed.as_bytes(), &mut out).map_err(refused)?;
                }
                Message::AuthenticationSasl(body) => {
                    if !body.mechanisms().any(|mechanism| Ok(mechanism == SCRAM_SHA_256)).map_err(refused)? {
                        return Err(Error::config(format!("{}: the server offers no SCRAM-SHA-256", what())));
                    }
                    let binding = ChannelBinding::unsupported();
                    let state = ScramSha256::new(password()?.expose().as_bytes(), binding);
                    frontend::sasl_initial_response(SCRAM_SHA_256, state.message(), &mut out).map_err(refused)?;
                    scram = Some(state);
                }
                Message::AuthenticationSaslContinue(body) => {
                    let state = scram.as_mut().ok_or_else(|| self.unexpected("a SCRAM challenge"))?;
                    state.update(body.data()).map_err(refused)?;
                    frontend::sasl_response(state.message(), &mut out).map_err(refused)?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    let mut state = scram.take().ok_or_else(|| self.unexpected("a SCRAM signature"))?;
                    state.finish(body.data()).map_err(refused)?;
                }
                _ => return Err(Error::config(format!("{}: a method that is not supported", what()))),
            }
            self.write(&out).await?;
        }
    }

    /// Runs one statement by the simple protocol; its rows as text.
    ///
    /// # Errors
    /// The server's answer, or a broken connection; either ends this connection.
    pub(crate) async fn ask(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        let what = || format!("Postgres at {}", self.server);
        let what = what();
        let mut out = BytesMut::new();
        frontend::query(sql, &mut out).map_err(|e| Error::new(what.clone()).source_is(e))?;
        self.write(&out).await?;
        let (mut rows, mut bytes) = (Vec::new(), 0);
        loop {
            match self.message(&|| what.clone()).await? {
                Message::ReadyForQuery(_) => return Ok(rows),
                Message::DataRow(row) => {
                    bytes += row.buffer().len() + ROW;
                    if bytes > LONGEST_MESSAGE {
                        return Err(self.unexpected("more rows than anybody asked for"));
                    }
                    let text = |range: Option<std::ops::Range<usize>>| {
                        Ok(range.map(|range| String::from_utf8_lossy(&row.buffer()[range]).into_owned()))
                    };
                    rows.push(row.ranges().map(text).collect().map_err(|e| broken(what.clone(), e))?);
                }
                _ => {}
            }
        }
    }

    /// Starts the stream; from here on only [`Self::next`] and [`Self::confirm`].
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub(crate) async fn start(&mut self, sql: &str) -> Result<()> {
        let what = format!("Postgres at {}", self.server);
        let mut out = BytesMut::new();
        frontend::query(sql, &mut out).map_err(|e| Error::new(what.clone()).source_is(e))?;
        self.write(&out).await?;
        loop {
            if let Some((tag, length)) = self.short()?
                && tag == COPY_BOTH_RESPONSE
            {
                self.fill(length).await?;
                self.input.advance(length);
                return Ok(());
            }
            match self.try_message(&what)? {
                Some(Message::NoticeResponse(_) | Message::ParameterStatus(_)) => {}
                Some(_) => return Err(self.unexpected("an answer that starts no stream")),
                None => self.read().await?,
            }
        }
    }

    /// The next frame; a message above `most` bytes is skipped. Cancel-safe.
    ///
    /// # Errors
    /// As [`Self::ask`]; also when the server ended the stream.
    pub(crate) async fn next(&mut self, most: usize) -> Result<Frame> {
        loop {
            if let Some(frame) = self.frame(most)? {
                return Ok(frame);
            }
            self.read().await?;
        }
    }

    fn frame(&mut self, most: usize) -> Result<Option<Frame>> {
        // A loop, for a peer can send thousands of notices in a row, and a stack has an end.
        let length = loop {
            if self.skipping > 0 {
                let here = self.skipping.min(self.input.len());
                self.input.advance(here);
                self.skipping -= here;
                return Ok((self.skipping == 0).then_some(Frame::Oversized));
            }
            let Some((tag, length)) = self.header()? else { return Ok(None) };
            if tag == backend::COPY_DATA_TAG && length <= most {
                break length;
            }
            if tag == backend::COPY_DATA_TAG {
                self.skipping = length;
                continue;
            }
            let what = format!("Postgres at {}", self.server);
            match self.try_message(&what)? {
                None => return Ok(None),
                Some(Message::NoticeResponse(_) | Message::ParameterStatus(_)) => {}
                Some(Message::CopyDone) => return Err(Error::transient(format!("{what} ended the stream"))),
                Some(_) => return Err(self.unexpected("a message that is no part of a stream")),
            }
        };
        if self.input.len() < length {
            self.input.reserve(length - self.input.len());
            return Ok(None);
        }
        let mut body = self.input.split_to(length).freeze();
        body.advance(5);
        let broken = |_| Error::transient("the stream holds a frame that is cut off");
        match body.try_get_u8().map_err(broken)? {
            b'w' => {
                let _start = body.try_get_u64().map_err(broken)?;
                let wal_end = body.try_get_u64().map_err(broken)?;
                let _sent_at = body.try_get_i64().map_err(broken)?;
                Ok(Some(Frame::Data { wal_end, message: body }))
            }
            b'k' => {
                let wal_end = body.try_get_u64().map_err(broken)?;
                let _sent_at = body.try_get_i64().map_err(broken)?;
                let reply = body.try_get_u8().map_err(broken)? != 0;
                Ok(Some(Frame::Keepalive { wal_end, reply }))
            }
            other => Err(self.unexpected(&format!("a frame of kind {other:#04x}"))),
        }
    }

    /// Tells the server that everything up to `lsn` is done with, so that it keeps no log for us.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub(crate) async fn confirm(&mut self, lsn: u64) -> Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = now.saturating_sub(Duration::from_secs(POSTGRES_EPOCH_SECONDS));
        let mut status = BytesMut::with_capacity(34);
        status.put_u8(b'r');
        // Written, flushed, applied.
        for _ in 0..3 {
            status.put_u64(lsn);
        }
        status.put_i64(i64::try_from(now.as_micros()).unwrap_or(0));
        status.put_u8(0);
        let mut out = BytesMut::with_capacity(64);
        frontend::CopyData::new(status.freeze())
            .map_err(|e| Error::new("write a status").source_is(e))?
            .write(&mut out);
        self.write(&out).await
    }

    /// Takes leave, so that slot and walsender are gone when this returns, unless the server does not answer.
    pub(crate) async fn end(mut self) {
        let mut out = BytesMut::new();
        frontend::copy_done(&mut out);
        frontend::terminate(&mut out);
        let leave = async {
            self.write(&out).await?;
            loop {
                self.input.clear();
                self.read().await?;
            }
        };
        // It ends by an error in any case: the connection is closed.
        let _ended: std::result::Result<Result<()>, _> = timeout(LEAVE, leave).await;
    }

    /// Tag and length, its tag included, of the message that comes next.
    fn header(&self) -> Result<Option<(u8, usize)>> {
        let header = Header::parse(&self.input).map_err(|e| broken(format!("read from {}", self.server), e))?;
        Ok(header.map(|header| (header.tag(), usize::try_from(header.len()).unwrap_or(0) + 1)))
    }

    /// The same for a message that will be stored whole.
    fn short(&self) -> Result<Option<(u8, usize)>> {
        match self.header()? {
            Some((_, length)) if length > LONGEST_MESSAGE => {
                Err(self.unexpected(&format!("a message of {length} bytes")))
            }
            header => Ok(header),
        }
    }

    async fn fill(&mut self, length: usize) -> Result<()> {
        while self.input.len() < length {
            self.read().await?;
        }
        Ok(())
    }

    async fn message(&mut self, what: &impl Fn() -> String) -> Result<Message> {
        loop {
            if let Some(message) = self.try_message(&what())? {
                return Ok(message);
            }
            self.read().await?;
        }
    }

    /// The next message if it is whole; an error response is an error.
    fn try_message(&mut self, what: &str) -> Result<Option<Message>> {
        self.short()?;
        let message = Message::parse(&mut self.input).map_err(|e| broken(what.to_owned(), e))?;
        let Some(Message::ErrorResponse(body)) = message else { return Ok(message) };
        let (mut text, mut code, mut hint) = (String::new(), String::new(), None);
        let mut fields = body.fields();
        while let Some(field) = fields.next().map_err(|e| broken(what.to_owned(), e))? {
            match field.type_() {
                b'M' => text = String::from_utf8_lossy(field.value_bytes()).into_owned(),
                b'C' => code = String::from_utf8_lossy(field.value_bytes()).into_owned(),
                b'H' => hint = Some(String::from_utf8_lossy(field.value_bytes()).into_owned()),
                _ => {}
            }
        }
        Err(answered(what.to_owned(), text, code, hint))
    }

    async fn read(&mut self) -> Result<()> {
        self.input.reserve(READ);
        match self.wire.read_buf(&mut self.input).await {
            Ok(0) => Err(Error::transient(format!("Postgres at {}: connection closed", self.server))),
            Ok(_) => Ok(()),
            Err(source) => Err(broken(format!("read from Postgres at {}", self.server), source)),
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let what = || format!("write to Postgres at {}", self.server);
        let all = async {
            self.wire.write_all(bytes).await?;
            self.wire.flush().await
        };
        match timeout(WRITE, all).await {
            Ok(written) => written.map_err(|source| broken(what(), source)),
            Err(_) => Err(Error::transient(format!("{}: not taken within {WRITE:?}", what()))),
        }
    }

    fn unexpected(&self, what: &str) -> Error {
        Error::transient(format!("Postgres at {} sent {what}", self.server))
    }
}

async fn encrypt(mut tcp: TcpStream, host: &str, server: &str, tls: &mut MakeRustlsConnect) -> Result<Box<dyn Wire>> {
    let what = || format!("agree on TLS with {server}");
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    tcp.write_all(&request).await.map_err(|e| broken(what(), e))?;
    // One byte and no more: what came after it in clear would be taken for the encrypted server's word.
    let answer = tcp.read_u8().await.map_err(|e| broken(what(), e))?;
    if answer != b'S' {
        return Err(Error::new(format!("{}: the server does not support it", what())));
    }
    let Ok(tls) = MakeTlsConnect::<TcpStream>::make_tls_connect(tls, host);
    let stream = TlsConnect::<TcpStream>::connect(tls, tcp).await.map_err(|e| broken(what(), e))?;
    Ok(Box::new(stream))
}

#[cfg(test)]
mod tests;
