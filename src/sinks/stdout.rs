//! Standard output: one CloudEvents JSON object a line, for `type = "stdout"`, pipes and first steps.
//!
//! I1: a batch is acked after all of its lines were written and flushed; any error makes all of it unreachable, so
//! that lines may come twice but never go missing. A closed descriptor is such an error.
//! I2: a line is one delivery: line breaks of a pretty-printed payload become spaces, which JSON does not tell apart.
//! A reader that stops reading holds one thread at most, never one that runs tasks.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::{Route, cloudevents};
use crate::delivery::{Failure, Outcome, Parcel};

pub struct Stdout {
    /// Locked by the thread that writes, also when the `send` it works for was dropped.
    to: Arc<Mutex<io::Result<Box<dyn Write + Send>>>>,
    send_timeout: Duration,
}

impl Stdout {
    pub(super) fn new(send_timeout: Duration) -> Self {
        let to = standard_output().map(|file| Box::new(file) as Box<dyn Write + Send>);
        Self { to: Arc::new(Mutex::new(to)), send_timeout }
    }

    #[cfg(test)]
    fn to(writer: impl Write + Send + 'static, send_timeout: Duration) -> Self {
        Self { to: Arc::new(Mutex::new(Ok(Box::new(writer)))), send_timeout }
    }

    pub(super) async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let mut lines = Vec::new();
        for parcel in parcels {
            let mut line = cloudevents::structured(parcel, route);
            // Inside a JSON string a line break is always escaped: these are white space between tokens.
            line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
            lines.append(&mut line);
            lines.push(b'\n');
        }
        let outcome = match self.write(lines).await {
            Ok(()) => Outcome::Acked,
            Err(error) => {
                let code = if error.kind() == io::ErrorKind::BrokenPipe { "EPIPE" } else { "WRITE_FAILED" };
                Outcome::Unreachable(Failure::new(code, error.to_string()))
            }
        };
        vec![outcome; parcels.len()]
    }

    async fn write(&self, lines: Vec<u8>) -> io::Result<()> {
        let deadline = Instant::now() + self.send_timeout;
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "nobody reads standard output");
        let mut to = timeout_at(deadline, self.to.clone().lock_owned()).await.map_err(late)?;
        let written = tokio::task::spawn_blocking(move || {
            let to = to.as_mut().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
            to.write_all(&lines)?;
            to.flush()
        });
        timeout_at(deadline, written).await.map_err(late)?.map_err(io::Error::other)?
    }
}

/// Standard output without the library's own writer, which says that all is well when the descriptor cannot be written
/// to (EBADF). Nor was it closed: the runtime then puts /dev/null there before `main`, readable and writable, whereas
/// who throws output away on purpose (`> /dev/null`) opens it for writing.
fn standard_output() -> io::Result<File> {
    let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let (ours, null) = (file.metadata()?, std::fs::metadata("/dev/null")?);
    let is_null = ours.file_type().is_char_device() && ours.rdev() == null.rdev();
    if is_null && (&file).read(&mut [0]).is_ok() {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, "standard output is closed"));
    }
    Ok(file)
}

impl fmt::Debug for Stdout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stdout")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parcel, route};
    use super::*;
    use crate::config::Format;

    #[derive(Clone, Default)]
    struct Shared(Arc<std::sync::Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Blocks its thread until the test ends.
    struct Stuck(std::sync::mpsc::Receiver<()>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().ok();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn each_delivery_is_one_line_in_order_whatever_its_payload() {
        let written = Shared::default();
        let sink = Stdout::to(written.clone(), Duration::from_secs(5));
        let mut parcels = vec![parcel(1, Some("k")), parcel(2, None)];
        Arc::make_mut(&mut parcels[0].event).payload.bytes = b"{\n \"a\":\r\n \"x\\ny\"}\n".to_vec();
        let route = route("h", "", Format::Raw);
        assert_eq!(sink.send(&route, &parcels).await, [Outcome::Acked, Outcome::Acked]);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["data"]["a"], "x\ny");
        assert_eq!((&lines[0]["sequence"], &lines[1]["sequence"]), (&"1".into(), &"2".into()));
    }

    #[tokio::test]
    async fn a_reader_that_left_spends_no_attempt() {
        let sink = Stdout::to(Closed, Duration::from_secs(5));
        let outcomes = sink.send(&route("h", "", Format::Raw), &[parcel(1, None)]).await;
        assert!(matches!(&outcomes[..], [Outcome::Unreachable(failure)] if failure.code == "EPIPE"), "{outcomes:?}");
    }

    #[tokio::test]
    async fn a_reader_that_stopped_holds_one_thread_and_no_send() {
        let (end, wait) = std::sync::mpsc::channel();
        let sink = Stdout::to(Stuck(wait), Duration::from_millis(50));
        for _ in 0..3 {
            let outcomes = sink.send(&route("h", "", Format::Raw), &[parcel(1, None)]).await;
            assert!(matches!(&outcomes[..], [Outcome::Unreachable(_)]), "{outcomes:?}");
        }
        drop(end);
    }
}
