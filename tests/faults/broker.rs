//! A broker for one test, to be killed and frozen without anybody else noticing. It keeps what it acknowledged.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::AsyncReadExt;

use crate::services::{address, eventually};

/// Killed when dropped.
pub struct Broker {
    sink: &'static str,
    folder: TempDir,
    port: u16,
    child: Mutex<Child>,
}

impl Broker {
    /// Of the kind of a sink, `nats` or `redis`.
    pub async fn start(sink: &'static str) -> Self {
        let folder = tempfile::Builder::new().prefix("lb-broker-").tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Mutex::new(launch(sink, &folder, port));
        let broker = Self { sink, folder, port, child };
        broker.answers().await;
        broker
    }

    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.sink, self.port)
    }

    pub fn kill(&self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// On the port and the data that it had.
    pub async fn start_again(&self) {
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = launch(self.sink, &self.folder, self.port);
        self.answers().await;
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.lock().unwrap_or_else(PoisonError::into_inner).id().to_string();
        assert!(Command::new("kill").arg(format!("-{name}")).arg(pid).status().unwrap().success(), "kill -{name}");
    }

    /// Both say something to a client that says PING.
    async fn answers(&self) {
        eventually("the broker answers", Duration::from_secs(30), || async {
            let Ok(mut stream) = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await else { return false };
            let mut answer = [0; 5];
            let asked = tokio::io::AsyncWriteExt::write_all(&mut stream, b"PING\r\n").await;
            asked.is_ok() && stream.read_exact(&mut answer).await.is_ok() && matches!(&answer, b"+PONG" | b"INFO ")
        })
        .await;
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Already dead is as good.
        let _killed = child.kill();
        let _waited = child.wait();
    }
}

fn launch(sink: &str, folder: &TempDir, port: u16) -> Child {
    let port = port.to_string();
    let mut command = match sink {
        "nats" => {
            let config = folder.path().join("nats.conf");
            let text = format!("jetstream {{ store_dir: {:?}, sync_interval: always }}", folder.path().join("data"));
            std::fs::write(&config, text).unwrap();
            let mut command = Command::new(nats_server());
            command.args(["-a", "127.0.0.1", "-p", &port, "-c"]).arg(config);
            command
        }
        _ => {
            let mut command = Command::new("redis-server");
            command.args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--appendonly", "yes"]);
            command.args(["--appendfsync", "always", "--dir"]).arg(folder.path());
            command
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start the broker")
}

/// The one that `scripts/services` brought.
fn nats_server() -> PathBuf {
    let dist = PathBuf::from(address("LB_SERVICES_DIR")).join("dist");
    let found = std::fs::read_dir(dist).unwrap().map(|entry| entry.unwrap().path().join("nats-server"));
    found.filter(|file| file.exists()).max().expect("scripts/services downloads nats-server")
}
