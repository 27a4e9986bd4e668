//! A bridge as a user runs it: the binary, a configuration file, signals.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::consumers::Destination;
use crate::services::{address, eventually};

/// Deliveries per batch and batches per handler: together the window that a kill may repeat, per handler.
pub const BATCH: usize = 100;
pub const BATCHES: usize = 2;

pub struct Setup {
    folder: TempDir,
    /// The rule that its bridges break, where they are built to; empty for none.
    breaks: &'static str,
}

impl Setup {
    /// One handler per destination, each on a sink of its own, all taking `events`.
    pub fn new(database_url: &str, destinations: &[Destination], extra: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut toml = format!(
            "[postgres]\nurl = \"{database_url}\"\n[bridge]\nname = \"test\"\npoll_interval = \"50ms\"\n\
             sweep_interval = \"1s\"\n[http]\nlisten = \"\"\n{extra}\n"
        );
        for destination in destinations {
            toml.push_str(&destination.toml(BATCH, BATCHES));
        }
        std::fs::write(folder.path().join("lanebridge.toml"), toml).expect("write the configuration");
        Self { folder, breaks: "" }
    }

    /// The same with a text of the configuration replaced.
    pub fn with(self, old: &str, new: &str) -> Self {
        let file = self.folder.path().join("lanebridge.toml");
        let text = std::fs::read_to_string(&file).expect("read the configuration");
        assert!(text.contains(old), "{old} is not in {text}");
        std::fs::write(&file, text.replace(old, new)).expect("write the configuration");
        self
    }

    /// A negative control.
    #[cfg(feature = "break-rules")]
    pub fn breaking(mut self, rule: &'static str) -> Self {
        self.breaks = rule;
        self
    }

    pub fn config(&self) -> PathBuf {
        self.folder.path().join("lanebridge.toml")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lanebridge"));
        command.arg("-c").arg(self.folder.path().join("lanebridge.toml")).args(arguments);
        if !self.breaks.is_empty() {
            command.env("LANEBRIDGE_BREAK", self.breaks);
        }
        command.stdin(Stdio::null());
        command
    }

    pub fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Runs to the end; stdout, or a panic with stderr.
    /// Waits until the log has this.
    pub async fn says(&self, what: &str, deadline: Duration) {
        let said = eventually(what, deadline * 2, || std::future::ready(self.log().contains(what)));
        if tokio::time::timeout(deadline, said).await.is_err() {
            panic!("{what:?} was not logged within {deadline:?}: {}", self.log());
        }
    }

    pub fn run(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().expect("start lanebridge");
        assert!(output.status.success(), "lanebridge {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn start(&self) -> Bridge {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log_path()).expect("open the log");
        let child = self.command(&["run"]).stdout(Stdio::null()).stderr(log).spawn().expect("start lanebridge");
        Bridge { child }
    }
}

/// A running bridge; killed when dropped.
pub struct Bridge {
    child: Child,
}

impl Bridge {
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.expect("run kill").success(), "kill -{name}");
    }

    /// Resident memory in MiB.
    pub fn resident_mib(&self) -> u64 {
        self.memory_mib("VmRSS:")
    }

    /// The highest resident memory so far, in MiB.
    pub fn peak_mib(&self) -> u64 {
        self.memory_mib("VmHWM:")
    }

    fn memory_mib(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the bridge runs");
        let line = status.lines().find(|line| line.starts_with(field)).expect("the field is there");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number of KiB") / 1024
    }

    pub fn kill(mut self) {
        self.signal("KILL");
        self.child.wait().expect("wait for the killed bridge");
    }

    pub async fn ended(&mut self, deadline: Duration) -> ExitStatus {
        let mut status = None;
        eventually("the bridge ends", deadline, || {
            status = self.child.try_wait().expect("ask for the bridge");
            std::future::ready(status.is_some())
        })
        .await;
        status.expect("eventually saw it")
    }

    pub async fn terminate(mut self) -> ExitStatus {
        self.signal("TERM");
        self.ended(Duration::from_secs(30)).await
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Already dead is as good.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

pub fn kafka_brokers() -> String {
    address("LB_KAFKA_BROKERS")
}
