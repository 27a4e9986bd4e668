//! A PostgreSQL server for one test: settings that others must not see, signals that others must not feel.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::services::{address, eventually};

/// Killed when dropped.
pub struct Server {
    folder: TempDir,
    binaries: PathBuf,
    port: u16,
    settings: Vec<(String, String)>,
    child: Child,
}

impl Server {
    /// Debian's PostgreSQL with logical replication and these settings.
    pub async fn start(settings: &[(&str, &str)]) -> Self {
        let binaries = PathBuf::from(address("LB_PG_BIN"));
        let folder = tempfile::Builder::new().prefix("lb-postgres-").tempdir().unwrap();
        if let Some((user, group)) = unprivileged() {
            std::os::unix::fs::chown(folder.path(), Some(user), Some(group)).unwrap();
        }
        let made = command(&binaries.join("initdb"))
            .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale", "C", "--no-sync", "-D"])
            .arg(folder.path().join("data"))
            .stdout(Stdio::null())
            .status();
        assert!(made.unwrap().success(), "initdb");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let settings: Vec<_> = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let child = launch(&binaries, folder.path(), port, &settings);
        let server = Self { folder, binaries, port, settings, child };
        server.answers().await;
        server
    }

    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// For another role.
    pub fn url_of(&self, role: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/postgres", self.port)
    }

    /// From now on everybody but the superuser logs in by `method`.
    pub async fn ask_for(&self, method: &str) {
        let lines = format!("host all postgres all trust\nhost all all all {method}\n");
        std::fs::write(self.folder.path().join("data/pg_hba.conf"), lines).unwrap();
        self.connect().await.batch_execute("select pg_reload_conf()").await.unwrap();
    }

    pub async fn connect(&self) -> tokio_postgres::Client {
        crate::services::connect(&self.url()).await
    }

    /// Stops as a power failure would.
    pub fn crash(&mut self) {
        // SIGQUIT: no checkpoint, no buffer written.
        self.signal(self.child.id(), "QUIT");
        self.child.wait().unwrap();
    }

    /// The same server again, with `changes` to its settings.
    pub async fn start_again(&mut self, changes: &[(&str, &str)]) {
        for (name, value) in changes {
            self.settings.retain(|(known, _)| known != name);
            self.settings.push(((*name).to_owned(), (*value).to_owned()));
        }
        self.child = launch(&self.binaries, self.folder.path(), self.port, &self.settings);
        self.answers().await;
    }

    pub fn signal(&self, pid: impl std::fmt::Display, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status();
        assert!(sent.unwrap().success(), "kill -{name} {pid}");
    }

    async fn answers(&self) {
        let url = self.url();
        eventually("the server answers", Duration::from_secs(30), || async {
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok()
        })
        .await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _sent = Command::new("kill").arg("-QUIT").arg(self.child.id().to_string()).status();
        let _ended = self.child.wait();
    }
}

fn launch(binaries: &Path, folder: &Path, port: u16, settings: &[(String, String)]) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).unwrap();
    let mut command = command(&binaries.join("postgres"));
    command.arg("-D").arg(folder.join("data")).arg("-k").arg(folder).args(["-p", &port.to_string()]);
    for (name, value) in [("listen_addresses", "127.0.0.1"), ("wal_level", "logical"), ("shared_buffers", "32MB")] {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    for (name, value) in settings {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// As a user that Postgres is willing to run as.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).current_dir("/");
    if let Some((user, group)) = unprivileged() {
        command.uid(user).gid(group);
    }
    command
}

/// User and group of `postgres`, when this process is root, which Postgres refuses to run as.
fn unprivileged() -> Option<(u32, u32)> {
    use std::os::unix::fs::MetadataExt;
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        return None;
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = users.lines().find(|line| line.starts_with("postgres:")).expect("a user postgres, as Debian makes it");
    let mut fields = line.split(':').skip(2).map(|field| field.parse().unwrap());
    Some((fields.next()?, fields.next()?))
}
