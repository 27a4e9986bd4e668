//! A TCP proxy that passes bytes on until it sees what it was told to wait for, and then holds everything.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Listens on a port of its own; ends with the test.
pub struct Proxy {
    pub address: SocketAddr,
    seen: watch::Receiver<bool>,
    tell: watch::Sender<bool>,
    release: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// Passes on to `target` (`host:port`) until a client sends `marker`: that chunk and all after it are held back.
    pub async fn holding(target: String, marker: &str) -> Self {
        Self::start(TcpListener::bind("127.0.0.1:0").await.unwrap(), target, marker)
    }

    /// Passes everything on, from a port that was chosen before: a broker that appears.
    pub async fn at(port: u16, target: String) -> Self {
        // No client sends this.
        Self::start(TcpListener::bind(("127.0.0.1", port)).await.unwrap(), target, "\u{1}never\u{1}")
    }

    fn start(listener: TcpListener, target: String, marker: &str) -> Self {
        let address = listener.local_addr().unwrap();
        let (tell, seen) = watch::channel(false);
        let (release, released) = watch::channel(false);
        let marker = marker.as_bytes().to_vec();
        let told = tell.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, target.clone(), marker.clone(), told.clone(), released.clone()));
            }
        });
        Self { address, seen, tell, release, task }
    }

    /// Passes on what was held, and everything after it.
    pub fn release(&self) {
        self.release.send_replace(true);
    }

    /// Waits for the marker anew; what is held stays so.
    pub fn rearm(&self) {
        self.tell.send_replace(false);
    }

    /// Returns as soon as the marker was seen.
    pub async fn held(&mut self) {
        self.seen.wait_for(|seen| *seen).await.unwrap();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(
    client: TcpStream,
    target: String,
    marker: Vec<u8>,
    tell: watch::Sender<bool>,
    mut released: watch::Receiver<bool>,
) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let back = tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
        if buffer[..n].windows(marker.len()).any(|window| window == marker) {
            tell.send_replace(true);
            // Held, not closed: the client learns nothing.
            if released.wait_for(|released| *released).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        if to_server.write_all(&buffer[..n]).await.is_err() {
            break;
        }
    }
    back.abort();
}
