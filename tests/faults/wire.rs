//! A TCP proxy with a switch: what passes can be held, slowed or cut at any moment, and passes again afterwards.
//!
//! What was held arrives late, as after a partition that heals, even when its sender has given up on it long ago.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

/// Bytes that are passed on at once; while slowed this is what a delay is added to.
const PIECE: usize = 64 * 1024;
/// No cut is wanted: more than a test ever sends.
const NEVER: i64 = i64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Nothing passes either way and nobody is told; a connection can be opened, and that is all.
    Hold,
    /// Requests pass, answers do not.
    HoldAnswers,
    /// Each piece is late by `latency`, and by what its size takes at this rate.
    Slow {
        latency: Duration,
        bytes_per_second: u32,
    },
    /// Connections are reset as soon as they are opened, and those that were open at once: nobody is there.
    Refuse,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Requests,
    Answers,
}

impl Mode {
    fn passes(self, direction: Direction) -> bool {
        match self {
            Self::Hold => false,
            Self::HoldAnswers => direction == Direction::Requests,
            Self::Pass | Self::Slow { .. } | Self::Refuse => true,
        }
    }
}

/// Listens on a port of its own; ends with the test.
pub struct Wire {
    port: u16,
    rest: Mode,
    inner: Arc<Inner>,
    task: tokio::task::JoinHandle<()>,
}

struct Inner {
    target: String,
    /// In answers these bytes become those: a broker that says its own address must say the proxy's.
    rewrite: Option<(Vec<u8>, Vec<u8>)>,
    mode: watch::Sender<Mode>,
    /// Rises when all connections are to be reset.
    cuts: watch::Sender<u64>,
    /// Bytes of requests that still pass before the next cut.
    left: AtomicI64,
}

impl Wire {
    /// To `target` (`host:port`), which is `rest` away when nothing is wrong.
    pub async fn to(target: &str, rest: Mode) -> Self {
        Self::start(target, rest, |_| None).await
    }

    /// To a Kafka broker, which tells its clients where to connect: its metadata says host and port.
    pub async fn to_kafka(target: &str, rest: Mode) -> Self {
        let (host, port) = target.rsplit_once(':').unwrap();
        let address = |port: u16| {
            // A string, and its port as an INT32 behind it.
            let mut bytes = host.as_bytes().to_vec();
            bytes.extend(i32::from(port).to_be_bytes());
            bytes
        };
        Self::start(target, rest, |own| Some((address(port.parse().unwrap()), address(own)))).await
    }

    async fn start(target: &str, rest: Mode, rewrite: impl FnOnce(u16) -> Option<(Vec<u8>, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let inner = Arc::new(Inner {
            target: target.to_owned(),
            rewrite: rewrite(port),
            mode: watch::Sender::new(rest),
            cuts: watch::Sender::new(0),
            left: AtomicI64::new(NEVER),
        });
        let shared = Arc::clone(&inner);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let inner = Arc::clone(&shared);
                tokio::spawn(async move { inner.carry(client).await });
            }
        });
        Self { port, rest, inner, task }
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn set(&self, mode: Mode) {
        self.inner.mode.send_replace(mode);
        if mode == Mode::Refuse {
            self.inner.cut();
        }
    }

    pub fn heal(&self) {
        self.inner.mode.send_replace(self.rest);
    }

    /// Resets all connections, and with them what they hold.
    pub fn cut(&self) {
        self.inner.cut();
    }

    /// Resets all connections when `bytes` more of requests have passed, wherever in a request that is; at the latest
    /// after `deadline`.
    pub async fn cut_after(&self, bytes: i64, deadline: Duration) {
        let mut cuts = self.inner.cuts.subscribe();
        self.inner.left.store(bytes, Ordering::Relaxed);
        if tokio::time::timeout(deadline, cuts.changed()).await.is_err() {
            self.inner.left.store(NEVER, Ordering::Relaxed);
            self.inner.cut();
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
        self.inner.cut();
    }
}

impl Inner {
    fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    async fn carry(&self, mut client: TcpStream) {
        let mut mode = self.mode.subscribe();
        let Ok(now) = mode.wait_for(|mode| *mode != Mode::Hold).await.map(|mode| *mode) else { return };
        let server = if now == Mode::Refuse { None } else { TcpStream::connect(&self.target).await.ok() };
        let Some(mut server) = server else {
            let _reset = client.set_zero_linger();
            return;
        };
        let mut cuts = self.cuts.subscribe();
        let cut = {
            let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
            tokio::select! {
                () = self.pump(from_client, to_server, Direction::Requests) => false,
                () = self.pump(from_server, to_client, Direction::Answers) => false,
                _ = cuts.changed() => true,
            }
        };
        if cut {
            // A connection that is gone needs no reset.
            let _resets = (client.set_zero_linger(), server.set_zero_linger());
        }
    }

    /// Until one side closes, breaks, or the cut is due.
    async fn pump(&self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, direction: Direction) {
        let mut mode = self.mode.subscribe();
        let mut piece = vec![0; PIECE];
        loop {
            if mode.wait_for(|mode| mode.passes(direction)).await.is_err() {
                return;
            }
            let Ok(n @ 1..) = from.read(&mut piece).await else { return };
            // What arrives after the switch was turned waits for it to be turned back.
            let Ok(now) = mode.wait_for(|mode| mode.passes(direction)).await.map(|mode| *mode) else { return };
            if let Mode::Slow { latency, bytes_per_second } = now {
                let late = latency + Duration::from_secs_f64(n as f64 / f64::from(bytes_per_second));
                tokio::time::sleep_until(Instant::now() + late).await;
            }
            let mut passing = &mut piece[..n];
            let mut last = false;
            if direction == Direction::Requests {
                let n = i64::try_from(n).expect("a piece is small");
                let left = self.left.fetch_sub(n, Ordering::Relaxed);
                if (0..=n).contains(&left) {
                    passing = &mut passing[..usize::try_from(left).expect("not negative")];
                    last = true;
                }
            } else if let Some((own, other)) = &self.rewrite {
                replace(passing, own, other);
            }
            if to.write_all(passing).await.is_err() {
                return;
            }
            if last {
                self.left.store(NEVER, Ordering::Relaxed);
                self.cut();
                // Ended by the cut, with a reset.
                return std::future::pending().await;
            }
        }
    }
}

/// Of one length, so that whatever frames the bytes stays true.
fn replace(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(old.len()).position(|window| window == old) {
        at += found;
        bytes[at..at + new.len()].copy_from_slice(new);
        at += new.len();
    }
}
