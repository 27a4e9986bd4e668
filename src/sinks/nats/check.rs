//! Preflight: whether a stream takes each handler's subject, and which of its settings may lose what it acknowledged.
//!
//! Never sees the server's `sync_interval` (2 min by default): no request shows it.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::context::{GetStreamByNameErrorKind, GetStreamErrorKind, RequestError, RequestErrorKind};
use async_nats::jetstream::stream::{DiscardPolicy, Info, RetentionPolicy, StorageType};

use super::streams::takes;
use super::{Nats, link, subject, text};
use crate::error::{Error, Result};
use crate::sinks::{Finding, Route, Severity, too_small};

const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// A retry after a lost answer comes within the server's default window; a shorter one stores it twice.
const MIN_DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

pub(super) async fn check(sink: &Nats, routes: &[Route], max_payload_bytes: u64) -> Result<Vec<Finding>> {
    link::connected(&sink.client, &sink.link, CONNECT_WAIT.min(sink.send_timeout)).await.map_err(|why| {
        Error::transient(format!("connect to NATS at {}: {why}", sink.addresses))
            .hint(format!("is it running, and are url, tls and credentials of [sinks.{}] right?", sink.name))
    })?;
    let mut findings = Vec::new();
    // Of all handlers together: the limit is the server's.
    let most = routes.iter().map(|route| route.needed_bytes(max_payload_bytes)).max();
    let limit = u64::try_from(sink.client.server_info().max_payload).unwrap_or(u64::MAX);
    if let Some(needed) = most.filter(|needed| limit < *needed) {
        let subject = format!("NATS at {}", sink.addresses);
        let raise = format!("max_payload: {needed} in the servers' configuration");
        findings.push(too_small(&subject, limit, needed, max_payload_bytes, &raise));
    }
    let mut seen = BTreeSet::new();
    for route in routes {
        let handler = &route.handler.name;
        let fixed = route.handler.destination.fixed(handler);
        if let Some(Err(rule)) = fixed.as_deref().map(subject::check) {
            findings.push(Finding {
                severity: Severity::Missing,
                what: format!("handler {handler} cannot publish to {:?}: {rule}", fixed.unwrap_or_default()),
                hint: "change subject to dot-separated tokens without wildcards".into(),
            });
            continue;
        }
        let stream = match &fixed {
            Some(subject) => bound(sink, route, subject, &mut findings).await?,
            // Which subjects a template makes is known only with the events.
            None => route.handler.nats_stream.clone(),
        };
        let Some(stream) = stream else { continue };
        match sink.jetstream.get_stream(&stream).await {
            Ok(found) => {
                let info = found.cached_info();
                findings.extend(small(info, handler, route.needed_bytes(max_payload_bytes), max_payload_bytes));
                if seen.insert(stream) {
                    findings.extend(weak(info));
                }
            }
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(answer) if answer.error_code().0 == 10059 => {
                    findings.push(missing_stream(handler, &stream, fixed.as_deref()));
                }
                GetStreamErrorKind::JetStream(answer) => {
                    findings.push(unusable(handler, &stream, &answer.to_string()));
                }
                GetStreamErrorKind::InvalidStreamName | GetStreamErrorKind::EmptyName => {
                    findings.push(unusable(handler, &stream, "no stream can have that name"));
                }
                GetStreamErrorKind::Request => return Err(unanswered(sink, &stream, &error)),
            },
        }
    }
    Ok(findings)
}

/// The stream that takes a fixed subject, or `None` with its finding.
async fn bound(sink: &Nats, route: &Route, subject: &str, findings: &mut Vec<Finding>) -> Result<Option<String>> {
    let handler = &route.handler.name;
    let wanted = route.handler.nats_stream.as_deref();
    let name = match sink.jetstream.stream_by_subject(subject).await {
        Ok(name) => name,
        Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
            let stream = wanted.map_or_else(|| handler.to_uppercase(), str::to_owned);
            if let Some(wanted) = wanted
                && let Ok(found) = sink.jetstream.get_stream(wanted).await
                && !found.cached_info().config.subjects.iter().any(|pattern| takes(pattern, subject))
            {
                findings.push(Finding {
                    severity: Severity::Missing,
                    what: format!("handler {handler} publishes to {subject}, which its stream {wanted} does not take"),
                    hint: format!("nats stream edit {wanted} --subjects … and add '{subject}'"),
                });
                return Ok(None);
            }
            findings.push(missing_stream(handler, &stream, Some(subject)));
            return Ok(None);
        }
        Err(error) if no_jetstream(&error) => {
            findings.push(Finding {
                severity: Severity::Missing,
                what: format!(
                    "handler {handler} needs JetStream, which is off at {} or for this account",
                    sink.addresses
                ),
                hint: "start the server with -js, and give the account `jetstream: enabled`".into(),
            });
            return Ok(None);
        }
        Err(error) => return Err(unanswered(sink, subject, &error)),
    };
    if let Some(wanted) = wanted.filter(|wanted| *wanted != name) {
        findings.push(Finding {
            severity: Severity::Missing,
            what: format!("handler {handler} expects the stream {wanted}, but {subject} goes to the stream {name}"),
            hint: format!("set stream_name = \"{name}\", or let {wanted} take the subject"),
        });
        return Ok(None);
    }
    Ok(Some(name))
}

fn missing_stream(handler: &str, stream: &str, subject: Option<&str>) -> Finding {
    let subjects = subject.unwrap_or("SUBJECTS");
    Finding {
        severity: Severity::Missing,
        what: match subject {
            Some(subject) => format!("handler {handler} publishes to {subject}, which no stream takes"),
            None => format!("handler {handler} expects the stream {stream}, which does not exist"),
        },
        hint: format!("nats stream add {stream} --subjects '{subjects}' --storage file --retention limits --defaults"),
    }
}

fn unusable(handler: &str, stream: &str, why: &str) -> Finding {
    Finding {
        severity: Severity::Missing,
        what: format!("handler {handler} cannot use the stream {stream:?}: {why}"),
        hint: "nats stream info, and the permissions of our user".into(),
    }
}

fn unanswered(sink: &Nats, about: &str, error: &(dyn std::error::Error + 'static)) -> Error {
    Error::transient(format!("ask NATS at {} for {about}: {}", sink.addresses, text(error)))
        .hint("our user needs to publish to $JS.API.STREAM.NAMES and $JS.API.STREAM.INFO.*")
}

/// No server answers JetStream requests, or it answers that they are off.
fn no_jetstream(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(request) = error.downcast_ref::<RequestError>()
            && request.kind() == RequestErrorKind::NoResponders
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// A stream that takes less than publishing does; 0 and -1 are no limit.
fn small(info: &Info, handler: &str, needed: u64, max_payload_bytes: u64) -> Option<Finding> {
    let limit = u64::try_from(info.config.max_message_size).ok().filter(|limit| (1..needed).contains(limit))?;
    let name = &info.config.name;
    let raise = format!("nats stream edit {name} --max-msg-size {needed}");
    Some(too_small(&format!("handler {handler}: stream {name}"), limit, needed, max_payload_bytes, &raise))
}

/// One finding for each setting with which the stream may lose or repeat what it acknowledged (H77).
fn weak(info: &Info) -> Vec<Finding> {
    let config = &info.config;
    let name = &config.name;
    let mut found = Vec::new();
    let mut add = |what: String, hint: String| found.push(Finding { severity: Severity::Weak, what, hint });
    if config.storage == StorageType::Memory {
        add(format!("stream {name} is in memory: a restart of its server loses it"), "use file storage".into());
    }
    if config.num_replicas <= 1 {
        let what = format!("stream {name} has one replica: a lost disk loses it");
        add(what, format!("on a cluster: nats stream edit {name} --replicas 3"));
    }
    let limited = config.max_messages > 0 || config.max_bytes > 0 || config.max_messages_per_subject > 0;
    if config.discard == DiscardPolicy::Old && (limited || !config.max_age.is_zero()) {
        let what = format!("stream {name} discards its oldest messages at its limits, whether consumed or not");
        add(what, format!("nats stream edit {name} --discard new, or limits beyond any consumer's lag"));
    }
    if config.duplicate_window < MIN_DUPLICATE_WINDOW {
        let seconds = config.duplicate_window.as_secs_f64();
        let what = format!("stream {name} remembers message ids for {seconds} s: a later retry is stored twice");
        add(what, format!("nats stream edit {name} --dupe-window 2m"));
    }
    if config.retention != RetentionPolicy::Limits {
        let what = format!("stream {name} has {:?} retention: it drops messages by its consumers", config.retention);
        add(what, "make every consumer before the first event, or use limits retention".into());
    }
    if config.no_ack {
        let what = format!("stream {name} never acknowledges: every delivery would time out");
        found.push(Finding { severity: Severity::Missing, what, hint: "make it without --no-ack".into() });
    }
    found
}
