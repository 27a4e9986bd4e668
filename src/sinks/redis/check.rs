//! Preflight: whether each handler's stream can take entries, and which settings may lose what Redis acknowledged.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, cmd};

use super::{ADD_HASH, Redis, shown};
use crate::error::{Error, Result};
use crate::sinks::{Finding, Route, Severity, too_small};

/// The longest value that the server takes.
const LONGEST: &str = "proto-max-bulk-len";

const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) async fn check(sink: &Redis, routes: &[Route], max_payload_bytes: u64) -> Result<Vec<Finding>> {
    let unanswered = |why: String| {
        Error::transient(format!("ask Redis at {}: {why}", sink.link.address()))
            .hint(format!("is it running, and are url, tls and credentials of [sinks.{}] right?", sink.name))
    };
    let asking = async {
        let (number, mut connection) = sink.link.connection().await?;
        let findings = ask(sink, routes, max_payload_bytes, &mut connection).await;
        if findings.is_err() {
            sink.link.drop_connection(number).await;
        }
        findings
    };
    match tokio::time::timeout(CHECK_TIMEOUT.min(sink.send_timeout), asking).await {
        Ok(found) => found.map_err(|error: redis::RedisError| unanswered(shown(&error))),
        Err(_elapsed) => Err(unanswered("no answer in time".into())),
    }
}

async fn ask(
    sink: &Redis,
    routes: &[Route],
    max_payload_bytes: u64,
    connection: &mut MultiplexedConnection,
) -> RedisResult<Vec<Finding>> {
    cmd("PING").query_async::<String>(connection).await?;
    let mut findings = Vec::new();
    for route in routes {
        // Which streams a template makes is known only with the events.
        if let Some(stream) = route.handler.destination.fixed(&route.handler.name) {
            findings.extend(of_stream(connection, &route.handler.name, &stream).await?);
        }
    }
    findings.extend(of_server(sink, connection).await?);
    let most = routes.iter().map(|route| route.needed_bytes(max_payload_bytes)).max();
    let limit = cmd("CONFIG").arg("GET").arg(LONGEST).query_async::<BTreeMap<String, u64>>(connection).await;
    let limit = optional(limit, "CONFIG GET")?.and_then(|answer| answer.get(LONGEST).copied());
    if let (Some(needed), Some(limit)) = (most, limit)
        && limit < needed
    {
        let subject = format!("Redis at {}", sink.link.address());
        let raise = format!("CONFIG SET {LONGEST} {needed}");
        findings.push(too_small(&subject, limit, needed, max_payload_bytes, &raise));
    }
    Ok(findings)
}

async fn of_stream(connection: &mut MultiplexedConnection, handler: &str, stream: &str) -> RedisResult<Vec<Finding>> {
    let mut findings = Vec::new();
    let kind = optional(cmd("TYPE").arg(stream).query_async::<String>(connection).await, "TYPE")?;
    match kind.as_deref() {
        None | Some("stream") => {}
        Some("none") => findings.push(Finding {
            severity: Severity::Weak,
            what: format!("the stream {stream:?} of handler {handler} does not exist: its first delivery makes it"),
            hint: "check its name; consumers should make their groups with MKSTREAM before that".into(),
        }),
        Some(other) => findings.push(Finding {
            severity: Severity::Missing,
            what: format!("handler {handler} sends to the stream {stream:?}, which is a {other} (WRONGTYPE)"),
            hint: "name another stream, or rename that key".into(),
        }),
    }
    for command in [&["XADD", stream, "*", "data", ""][..], &["EVALSHA", ADD_HASH.as_str(), "1", stream]] {
        if let Some(why) = forbidden(connection, command).await? {
            findings.push(Finding {
                severity: Severity::Missing,
                what: format!("handler {handler} may not run {} on {stream:?}: {why}", command[0]),
                hint: format!("ACL SETUSER … +xadd +evalsha +eval ~{stream}"),
            });
        }
    }
    Ok(findings)
}

/// Why our user may not run `command`; `None` when it may or when nobody can say (before Redis 7, or no right to ask).
async fn forbidden(connection: &mut MultiplexedConnection, command: &[&str]) -> RedisResult<Option<String>> {
    let user = optional(cmd("ACL").arg("WHOAMI").query_async::<String>(connection).await, "ACL WHOAMI")?;
    let Some(user) = user else { return Ok(None) };
    let dry_run = cmd("ACL").arg("DRYRUN").arg(user).arg(command).query_async::<String>(connection).await;
    Ok(optional(dry_run, "ACL DRYRUN")?.filter(|answer| answer != "OK"))
}

async fn of_server(sink: &Redis, connection: &mut MultiplexedConnection) -> RedisResult<Vec<Finding>> {
    let mut settings = BTreeMap::new();
    for name in ["maxmemory", "maxmemory-policy", "appendonly", "save"] {
        let answer = cmd("CONFIG").arg("GET").arg(name).query_async::<BTreeMap<String, String>>(connection).await;
        settings.extend(optional(answer, "CONFIG GET")?.unwrap_or_default());
    }
    let info = cmd("INFO").arg("replication").query_async::<String>(connection).await;
    let info = optional(info, "INFO")?;
    Ok(weak(&sink.link.address(), &settings, info.as_deref(), sink.max_len))
}

/// One finding for each setting that may lose acknowledged entries (H80, H81). Absent settings could not be read.
fn weak(
    address: &str,
    settings: &BTreeMap<String, String>,
    replication: Option<&str>,
    max_len: Option<u64>,
) -> Vec<Finding> {
    let get = |name: &str| settings.get(name).map(String::as_str);
    let info = |name: &str| replication?.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'));
    let mut found = Vec::new();
    let mut add = |severity, what: String, hint: &str| found.push(Finding { severity, what, hint: hint.into() });
    if info("role") == Some("slave") {
        let what = format!("Redis at {address} is a replica, which takes no entries");
        add(Severity::Missing, what, "name the primary");
    }
    if let Some(policy) = get("maxmemory-policy").filter(|policy| policy.starts_with("allkeys-")) {
        // Without a limit nothing is evicted yet.
        let limited = get("maxmemory").is_none_or(|most| most != "0");
        let severity = if limited { Severity::Missing } else { Severity::Weak };
        let what = format!(
            "Redis at {address} has maxmemory-policy {policy}: it evicts whole streams with acknowledged entries"
        );
        add(severity, what, "CONFIG SET maxmemory-policy noeviction");
    }
    let alone = info("connected_slaves") == Some("0");
    if get("appendonly") == Some("no") {
        let snapshots = get("save").is_some_and(|save| !save.is_empty());
        let what = match snapshots {
            true => format!("Redis at {address} has appendonly off: a crash loses entries back to its last snapshot"),
            false => format!("Redis at {address} writes nothing to disk: a restart loses every entry"),
        };
        add(Severity::Weak, what, "CONFIG SET appendonly yes");
    }
    if alone && info("role") == Some("master") {
        let what = format!("Redis at {address} has no replica: a lost disk loses every entry");
        add(Severity::Weak, what, "add a replica, and min-replicas-to-write 1");
    }
    if let Some(max_len) = max_len {
        let what = format!("max_len = {max_len} trims streams at {address}: consumers that lag further lose entries");
        add(Severity::Weak, what, "leave max_len out and trim with XTRIM MINID behind the slowest group");
    }
    found
}

/// `None` when the server refuses to say or does not know the command.
///
/// # Errors
/// Only when the connection failed.
fn optional<T>(answer: RedisResult<T>, command: &str) -> RedisResult<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_io_error() => Err(error),
        Err(error) => {
            tracing::debug!(command, error = shown(&error), "redis would not say");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(settings: &[(&str, &str)], replication: &str, max_len: Option<u64>) -> Vec<(Severity, String)> {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let found = weak("r:1", &settings, Some(replication), max_len);
        found.into_iter().map(|finding| (finding.severity, finding.what)).collect()
    }

    #[test]
    fn each_weak_setting_is_one_finding_and_a_strong_server_has_none() {
        let strong = [("maxmemory", "1"), ("maxmemory-policy", "noeviction"), ("appendonly", "yes"), ("save", "")];
        let replicated = "# Replication\r\nrole:master\r\nconnected_slaves:1\r\n";
        assert_eq!(findings(&strong, replicated, None), []);
        for (setting, value, severity, part) in [
            ("maxmemory-policy", "allkeys-lru", Severity::Missing, "evicts"),
            ("maxmemory-policy", "volatile-lru", Severity::Weak, ""),
            ("appendonly", "no", Severity::Weak, "nothing to disk"),
        ] {
            let mut weak = strong.to_vec();
            weak.retain(|(name, _)| *name != setting);
            weak.push((setting, value));
            let found = findings(&weak, replicated, None);
            assert_eq!(found.len(), usize::from(!part.is_empty()), "{found:?}");
            assert!(found.iter().all(|(s, what)| *s == severity && what.contains(part)), "{found:?}");
        }
        let unlimited = [("maxmemory", "0"), ("maxmemory-policy", "allkeys-lfu")];
        assert_eq!(findings(&unlimited, replicated, None)[0].0, Severity::Weak);
        assert!(findings(&strong, "role:master\r\nconnected_slaves:0", None)[0].1.contains("no replica"));
        assert!(findings(&strong, "role:slave\r\nconnected_slaves:0", None)[0].1.contains("is a replica"));
        assert!(findings(&strong, replicated, Some(5))[0].1.contains("max_len = 5"));
        let snapshots = [("appendonly", "no"), ("save", "3600 1")];
        assert!(findings(&snapshots, replicated, None)[0].1.contains("last snapshot"));
    }
}
