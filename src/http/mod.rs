//! HTTP on the address of `[http] listen`: /metrics, /healthz and /readyz.
//!
//! I1: it runs on a thread and a runtime of its own (H114), shares no lock with a lane, and its end ends nothing else.
//! I2: what one client can cost is bounded: connections, header bytes, seconds; a body is never read.
//! I3: a name in `Host` that is not ours is refused, so that no page in a browser gets here by a name of its own.
//! Never: a question to a database or a broker for an answer; a payload or a secret in one.

mod answer;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::error::{Error, Result};
use crate::health::Health;
use crate::metrics::Metrics;

/// Each holds one small buffer; a scraper or a probe needs one. More wait in the kernel's queue.
const CONNECTIONS: usize = 64;
/// From the first byte to the end of the headers.
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
/// From the connection to the last byte of the answer; one request each.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
const HEADER_BYTES: usize = 16 << 10;
/// Wait after a connection could not be accepted, as when there are no file descriptors left.
const PAUSE: Duration = Duration::from_secs(1);

/// What there is to tell.
pub(crate) struct Site {
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    pub allowed_hosts: Vec<String>,
}

/// Serves `site` until the process ends; returns the address.
///
/// # Errors
/// When the address cannot be listened on.
pub(crate) fn start(address: SocketAddr, site: Site) -> Result<SocketAddr> {
    let listen = || -> std::io::Result<(std::net::TcpListener, SocketAddr)> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen().map_err(|source| {
        let hint = match source.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another process, perhaps another bridge, has it: stop that one, give [http] listen another port, or \"\" \
                 for no HTTP"
            }
            std::io::ErrorKind::AddrNotAvailable => "no interface of this machine has this address; see [http] listen",
            std::io::ErrorKind::PermissionDenied => "ports below 1024 need a privilege; see [http] listen",
            _ => "see [http] listen",
        };
        Error::new(format!("listen on {address} for HTTP")).source_is(source).hint(hint)
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::new("start the runtime of HTTP").source_is(source))?;
    let thread = std::thread::Builder::new().name("http".to_owned()).spawn(move || {
        runtime.block_on(serve(listener, site));
        tracing::error!("HTTP ended: no metrics and no health until the next start; delivery goes on");
    });
    thread.map_err(|source| Error::new("start the thread of HTTP").source_is(source))?;
    Ok(bound)
}

/// Returns only when nothing can be accepted any more.
async fn serve(listener: std::net::TcpListener, site: Site) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "HTTP cannot accept connections"),
    };
    let site = Arc::new(site);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut failing = false;
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                if !failing {
                    tracing::warn!(%error, "HTTP could not accept a connection; trying again");
                }
                failing = true;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        failing = false;
        let site = Arc::clone(&site);
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(|request| {
                let answer = answer::answer(&site, &request);
                std::future::ready(Ok::<_, Infallible>(answer))
            });
            let mut server = http1::Builder::new();
            server
                .timer(TokioTimer::new())
                .header_read_timeout(HEADERS_WITHIN)
                .max_buf_size(HEADER_BYTES)
                .keep_alive(false);
            let connection = server.serve_connection(TokioIo::new(stream), service);
            // A client that sends nonsense or goes away is its own affair.
            let _ended = tokio::time::timeout(ANSWER_WITHIN, connection).await;
        });
    }
}

#[cfg(test)]
mod tests;
