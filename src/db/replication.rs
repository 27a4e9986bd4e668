//! A replication connection: the protocol of a stream, frame by frame, over the same sockets, TLS and log-in as every
//! other connection.
//!
//! `tokio-postgres` cannot start a stream, so this speaks the protocol with the crate below it, which it logs in with:
//! the same SCRAM, the same preparation of passwords, and through `tls.rs` the same host names.
//! I1: a frame larger than the caller allows is skipped, never buffered (R14).
//! I2: an error, or anything unexpected, ends the connection; nobody may go on with it (H18).

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
/// Longest message other than a row; an error has no use for more.
const LONGEST_MESSAGE: usize = 1 << 20;
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
                    let state = scram.as_mut().ok_or_else(|| self.unexpected("a SCRAM signature"))?;
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
        let mut rows = Vec::new();
        loop {
            match self.message(&|| what.clone()).await? {
                Message::ReadyForQuery(_) => return Ok(rows),
                Message::DataRow(row) => {
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
            if let Some((tag, length)) = self.header()?
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
        if self.skipping > 0 {
            let here = self.skipping.min(self.input.len());
            self.input.advance(here);
            self.skipping -= here;
            return Ok((self.skipping == 0).then_some(Frame::Oversized));
        }
        let Some((tag, length)) = self.header()? else { return Ok(None) };
        if tag != backend::COPY_DATA_TAG {
            let what = format!("Postgres at {}", self.server);
            return match self.try_message(&what)? {
                None => Ok(None),
                // There may be more behind it already.
                Some(Message::NoticeResponse(_) | Message::ParameterStatus(_)) => self.frame(most),
                Some(Message::CopyDone) => Err(Error::transient(format!("{what} ended the stream"))),
                Some(_) => Err(self.unexpected("a message that is no part of a stream")),
            };
        }
        if length > most {
            self.skipping = length;
            return self.frame(most);
        }
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
        let Some(header) = header else { return Ok(None) };
        let length = usize::try_from(header.len()).unwrap_or(0) + 1;
        if header.tag() != backend::COPY_DATA_TAG && length > LONGEST_MESSAGE {
            return Err(self.unexpected(&format!("a message of {length} bytes")));
        }
        Ok(Some((header.tag(), length)))
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
        self.header()?;
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
        return Err(Error::new(format!("{}: the server does not support it", what()))
            .hint("set ssl = on in the server, or sslmode=disable where the network is trusted"));
    }
    let Ok(tls) = MakeTlsConnect::<TcpStream>::make_tls_connect(tls, host);
    let stream = TlsConnect::<TcpStream>::connect(tls, tcp).await.map_err(|e| broken(what(), e))?;
    Ok(Box::new(stream))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::DuplexStream;

    use super::super::{Connector, sqlstate, test_postgres};
    use super::*;
    use crate::config::Postgres;
    use crate::error::Class;

    const LARGEST: usize = 1000;

    /// A stream that has begun, and its server's side.
    fn pair() -> (Replication, DuplexStream) {
        let (ours, server) = tokio::io::duplex(1 << 20);
        let stream =
            Replication { wire: Box::new(ours), input: BytesMut::new(), server: "h:1".into(), pid: 7, skipping: 0 };
        (stream, server)
    }

    fn copy_data(body: &[u8]) -> Vec<u8> {
        let mut out = vec![b'd'];
        out.extend(u32::try_from(body.len() + 4).unwrap().to_be_bytes());
        out.extend(body);
        out
    }

    /// A row of the log that ends at `wal_end`.
    fn row(wal_end: u64, message: &[u8]) -> Vec<u8> {
        let mut body = vec![b'w'];
        body.extend(1_u64.to_be_bytes());
        body.extend(wal_end.to_be_bytes());
        body.extend(0_u64.to_be_bytes());
        body.extend(message);
        copy_data(&body)
    }

    fn keepalive(wal_end: u64, reply: bool) -> Vec<u8> {
        let mut body = vec![b'k'];
        body.extend(wal_end.to_be_bytes());
        body.extend(0_u64.to_be_bytes());
        body.push(reply.into());
        copy_data(&body)
    }

    /// What comes of these bytes, sent in pieces of `piece`, when the connection ends behind them.
    async fn frames(bytes: &[u8], piece: usize) -> (Vec<Frame>, Error) {
        let (mut stream, mut server) = pair();
        let mut frames = Vec::new();
        let sending = async {
            for piece in bytes.chunks(piece.max(1)) {
                server.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            drop(server);
        };
        let reading = async {
            loop {
                match stream.next(LARGEST).await {
                    Ok(frame) => frames.push(frame),
                    Err(error) => return error,
                }
            }
        };
        let ((), error) = tokio::join!(sending, reading);
        (frames, error)
    }

    #[tokio::test]
    async fn frames_come_whole_however_the_network_cuts_them() {
        let bytes = [row(5, b"abc"), keepalive(9, true), b"N\0\0\0\x05\0".to_vec(), row(6, b"")].concat();
        for piece in [1, 2, 7, 1000] {
            let (frames, error) = frames(&bytes, piece).await;
            assert!(
                matches!(&frames[..], [
                Frame::Data { wal_end: 5, message },
                Frame::Keepalive { wal_end: 9, reply: true },
                Frame::Data { wal_end: 6, .. },
            ] if message[..] == b"abc"[..]),
                "{frames:?}"
            );
            assert_eq!(error.class(), Class::Transient);
        }
    }

    // R14, H23: a row of a gigabyte must not become a gigabyte here.
    #[tokio::test]
    async fn what_is_too_large_is_skipped_and_the_next_frame_is_read() {
        let bytes = [row(5, &[b'x'; 300_000]), row(6, b"y")].concat();
        let (mut stream, mut server) = pair();
        server.write_all(&bytes).await.unwrap();
        assert!(matches!(stream.next(LARGEST).await.unwrap(), Frame::Oversized));
        assert!(matches!(stream.next(LARGEST).await.unwrap(), Frame::Data { wal_end: 6, .. }));
        assert!(stream.input.capacity() <= 4 * READ, "{} bytes are held", stream.input.capacity());
    }

    #[tokio::test]
    async fn an_error_in_the_middle_keeps_its_code_and_its_class() {
        let mut error = b"E".to_vec();
        let fields = b"SERROR\0C57P01\0Mterminating connection\0\0";
        error.extend(u32::try_from(fields.len() + 4).unwrap().to_be_bytes());
        error.extend(fields);
        let (frames, error) = frames(&[row(5, b"a"), error].concat(), 3).await;
        assert_eq!(frames.len(), 1);
        assert_eq!((sqlstate(&error), error.class()), (Some("57P01"), Class::Transient));
    }

    #[tokio::test]
    async fn what_no_stream_holds_ends_it() {
        for (bytes, says) in [
            (b"c\0\0\0\x04".to_vec(), "ended the stream"),
            (b"Z\0\0\0\x05I".to_vec(), "no part of a stream"),
            (copy_data(b"?"), "a frame of kind 0x3f"),
            (copy_data(b"w123"), "cut off"),
            (b"N\x7f\xff\xff\xff".to_vec(), "bytes"),
            (b"N\0\0\0\x03".to_vec(), "invalid"),
        ] {
            let (frames, error) = frames(&bytes, 1).await;
            assert!(frames.is_empty() && error.report().contains(says), "{says}: {error:?}");
        }
    }

    proptest! {
        // A peer that is no Postgres: an error in the end, never a panic or a wait for what does not come.
        #[test]
        fn any_bytes_end_in_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300), tag in 0_usize..5) {
            let mut bytes = bytes;
            bytes.insert(0, b"dENcS"[tag]);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (frames, _error) = runtime.block_on(frames(&bytes, 64));
            prop_assert!(frames.len() <= bytes.len());
        }
    }

    fn connector(change: impl FnOnce(&mut Postgres)) -> Connector {
        let mut postgres = test_postgres();
        change(&mut postgres);
        Connector::new(&postgres, "test").unwrap()
    }

    /// The test server's address with another user in front and query behind.
    fn url(user: &str, host: &str, query: &str) -> Secret {
        let url = test_postgres().url.expose().to_owned();
        let (_, at) = url.split_once("@127.0.0.1:").expect("the test server is on 127.0.0.1");
        Secret::new(format!("postgres://{user}@{host}:{at}?{query}"))
    }

    const SCRAM: &str = "scram_user:p%40ss%3Aw%2Frd%231";

    async fn identified(connector: &Connector) -> Vec<Option<String>> {
        let mut stream = connector.replicate("wal", &[("wal_sender_timeout", "7000".into())]).await.unwrap();
        assert!(stream.pid() > 0);
        let shown = stream.ask("SHOW wal_sender_timeout").await.unwrap();
        assert_eq!(shown, [[Some("7s".to_owned())]], "the settings are the session's");
        stream.ask("IDENTIFY_SYSTEM").await.unwrap().remove(0)
    }

    #[tokio::test]
    async fn it_logs_in_as_every_other_connection_does() {
        let ca = std::env::var("LB_TLS_CA").expect("LB_TLS_CA is not set; run scripts/services up");
        let tls = |mode: &str| format!("sslmode={mode}&sslrootcert={ca}");
        let plain = identified(&connector(|_| {})).await;
        assert_eq!(plain.len(), 4);
        for url in [
            url(SCRAM, "127.0.0.1", "sslmode=disable"),
            url(SCRAM, "localhost", &tls("verify-full")),
            // The certificate holds the address, and that is enough, as it is for the other connections.
            url(SCRAM, "127.0.0.1", &tls("verify-full")),
            url(SCRAM, "127.0.0.1", &tls("verify-ca")),
        ] {
            assert_eq!(identified(&connector(|p| p.url = url)).await[0], plain[0]);
        }
    }

    #[tokio::test]
    async fn a_socket_is_a_way_too() {
        let client = connector(|_| {}).connect("test", super::super::Session::Work).await.unwrap();
        let sql = "select current_setting('unix_socket_directories'), current_setting('port'), current_database()";
        let row = client.query_one(sql, &[]).await.unwrap();
        let (folder, port, database): (String, String, String) = (row.get(0), row.get(1), row.get(2));
        let url = format!("postgres://postgres@/{database}?host={folder}&port={port}");
        identified(&connector(|p| p.url = Secret::new(url))).await;
    }

    #[tokio::test]
    async fn what_cannot_log_in_says_why_and_shows_no_password() {
        let wrong = connector(|p| p.url = url("scram_user:canary", "127.0.0.1", "sslmode=disable"));
        let none = connector(|p| p.url = url("scram_user", "127.0.0.1", "sslmode=disable"));
        let unknown_ca = connector(|p| p.url = url("postgres", "localhost", "sslmode=verify-full"));
        let standby = std::env::var("LB_STANDBY_URL").expect("LB_STANDBY_URL is not set; run scripts/services up");
        let standby = connector(|p| p.url = Secret::new(standby));
        for (connector, class, says) in [
            (wrong, Class::Config, "SQLSTATE 28P01"),
            (none, Class::Config, "hint: no password is configured"),
            (unknown_ca, Class::Failure, "UnknownIssuer"),
            (standby, Class::Transient, "is a standby"),
        ] {
            let error = connector.replicate("wal", &[]).await.err().expect("it must not log in");
            assert_eq!(error.class(), class, "{error:?}");
            assert!(error.report().contains(says) && !error.report().contains("canary"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn silence_ends_by_the_connect_timeout_and_names_the_step() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for (query, step) in [("sslmode=disable", "authenticate at"), ("sslmode=verify-full", "agree on TLS with")] {
            let connector = connector(|p| {
                p.url = Secret::new(format!("postgres://u@{address}/d?{query}"));
                p.connect_timeout = Duration::from_millis(100);
            });
            let error = connector.replicate("wal", &[]).await.err().expect("nobody answers");
            assert_eq!(error.class(), Class::Transient);
            assert!(error.report().starts_with(&format!("{step} {address}")), "{error:?}");
        }
    }
}
