//! Asks the cluster about the topics of the routes before the first send: are they there, may we, how safe are acks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, OwnedResourceSpecifier, ResourceSpecifier};
use rdkafka::config::FromClientConfigAndContext as _;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::Producer as _;
use rdkafka::types::RDKafkaRespErr;

use super::super::{Finding, Route, Severity, too_small};
use super::classify::{Verdict, classify};
use super::producer::{Events, Live, Settings, Signs};
use crate::error::{Error, Result};

/// Longest wait for one answer about one topic.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// What a topic's configuration says.
pub(super) struct Limits {
    pub(super) max_message_bytes: usize,
    /// `None` when the broker does not say.
    pub(super) min_insync_replicas: Option<u32>,
}

/// What the metadata says about one topic.
struct Topic {
    error: Option<RDKafkaErrorCode>,
    partitions: usize,
    leaderless: usize,
    replicas: usize,
    brokers: usize,
}

/// Findings, and the size limit of each topic that could be asked for it.
///
/// # Errors
/// Transient, naming the brokers, when none of them answered.
pub(super) async fn check(
    settings: &Settings,
    live: &Arc<Live>,
    routes: &[Route],
    max_payload_bytes: u64,
) -> Result<(Vec<Finding>, Vec<(String, usize)>)> {
    let mut handlers: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut needed: BTreeMap<String, u64> = BTreeMap::new();
    for route in routes {
        let name = route.handler.name.as_str();
        // A topic made from the event is known only with the event.
        if let Some(topic) = route.handler.destination.fixed(name) {
            let most = needed.entry(topic.clone()).or_default();
            *most = route.needed_bytes(max_payload_bytes).max(*most);
            handlers.entry(topic).or_default().push(name);
        }
    }
    let mut findings = Vec::new();
    handlers.retain(|topic, names| {
        let valid = super::valid_topic(topic);
        if !valid {
            findings.push(Finding {
                severity: Severity::Missing,
                what: format!("{}: \"{topic}\" is no topic name", who(names)),
                hint: "use 1 to 249 of a-z A-Z 0-9 . _ -".to_owned(),
            });
        }
        valid
    });
    let mut seen = Vec::with_capacity(handlers.len());
    for topic in handlers.keys() {
        seen.push(ask(settings, live, topic.clone()).await?);
    }
    let limits = limits(settings, handlers.keys().cloned().collect()).await;
    for ((topic, names), seen) in handlers.iter().zip(&seen) {
        findings.extend(judge(settings, topic, &who(names), seen, limits.get(topic)));
        if let (Some(limits), Some(needed)) = (limits.get(topic), needed.get(topic)) {
            findings.extend(small(settings, topic, &who(names), limits, *needed, max_payload_bytes));
        }
    }
    // A sink without a fixed topic is still asked whether it is there at all.
    if handlers.is_empty() {
        reach(settings, live).await?;
    }
    Ok((findings, limits.into_iter().map(|(topic, limits)| (topic, limits.max_message_bytes)).collect()))
}

/// `handler "a"`, or `handlers "a", "b"`.
fn who(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
    format!("{} {}", if names.len() == 1 { "handler" } else { "handlers" }, quoted.join(", "))
}

fn judge(settings: &Settings, topic: &str, who: &str, seen: &Topic, limits: Option<&Limits>) -> Vec<Finding> {
    let finding =
        |severity, what: String, hint: String| vec![Finding { severity, what: format!("{who}: {what}"), hint }];
    let brokers = settings.brokers();
    match seen.error {
        Some(RDKafkaErrorCode::TopicAuthorizationFailed) => {
            let user = settings.user().unwrap_or("ANONYMOUS");
            return finding(
                Severity::Missing,
                format!("user {user} may not see topic {topic}"),
                format!(
                    "kafka-acls --bootstrap-server {brokers} --add --allow-principal User:{user} \
                     --operation Describe --operation Write --topic {topic}"
                ),
            );
        }
        Some(RDKafkaErrorCode::LeaderNotAvailable) => {
            return finding(
                Severity::Missing,
                format!("topic {topic} has no leader"),
                "it may be new; else look at the brokers that hold it".to_owned(),
            );
        }
        Some(code) if classify(code) != Verdict::Destination => {
            return finding(Severity::Missing, format!("topic {topic}: {code}"), "look at the brokers' log".to_owned());
        }
        Some(_) => {}
        None if seen.partitions > 0 => return weak(settings, topic, who, seen, limits),
        None => {}
    }
    let replicas = seen.brokers.clamp(1, 3);
    finding(
        Severity::Missing,
        format!("topic {topic} does not exist"),
        format!(
            "kafka-topics --bootstrap-server {brokers} --create --topic {topic} --partitions 12 --replication-factor {replicas}{}",
            if replicas == 3 { " --config min.insync.replicas=2" } else { "" }
        ),
    )
}

/// An existing topic: whether its acks survive the loss of one broker.
fn weak(settings: &Settings, topic: &str, who: &str, seen: &Topic, limits: Option<&Limits>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if seen.leaderless > 0 {
        findings.push(Finding {
            severity: Severity::Missing,
            what: format!(
                "{who}: {} of {} partitions of topic {topic} have no leader",
                seen.leaderless, seen.partitions
            ),
            hint: "look at the brokers that hold them".to_owned(),
        });
    }
    let in_sync = limits.and_then(|limits| limits.min_insync_replicas);
    let what = if seen.replicas < 2 {
        format!("topic {topic} has one replica: a lost disk loses what was acknowledged")
    } else if in_sync.is_some_and(|in_sync| in_sync < 2) {
        format!("topic {topic} has min.insync.replicas 1: an ack may come from one broker alone and be lost with it")
    } else {
        return findings;
    };
    findings.push(Finding {
        severity: Severity::Weak,
        what: format!("{who}: {what}"),
        hint: format!(
            "three replicas, and: kafka-configs --bootstrap-server {} --alter --topic {topic} --add-config min.insync.replicas=2",
            settings.brokers()
        ),
    });
    findings
}

/// A topic, or our own option, that takes less than publishing does.
pub(super) fn small(
    settings: &Settings,
    topic: &str,
    who: &str,
    limits: &Limits,
    needed: u64,
    max_payload_bytes: u64,
) -> Option<Finding> {
    let ours = settings.message_max_bytes;
    let (limit, raise) = if ours < limits.max_message_bytes {
        (ours, format!("[sinks.{}.options] \"message.max.bytes\" = {needed}", settings.name))
    } else {
        let brokers = settings.brokers();
        let raise = format!(
            "kafka-configs --bootstrap-server {brokers} --alter --topic {topic} --add-config max.message.bytes={needed}"
        );
        (limits.max_message_bytes, raise)
    };
    let limit = u64::try_from(limit).unwrap_or(u64::MAX);
    let subject = format!("{who}: topic {topic}");
    (limit < needed).then(|| too_small(&subject, limit, needed, max_payload_bytes, &raise))
}

async fn ask(settings: &Settings, live: &Arc<Live>, topic: String) -> Result<Topic> {
    blocking(settings, live, move |live, timeout| {
        let metadata = live.client().client().fetch_metadata(Some(&topic), timeout)?;
        let brokers = metadata.brokers().len();
        let Some(topic) = metadata.topics().iter().find(|seen| seen.name() == topic) else {
            return Ok(Topic { error: None, partitions: 0, leaderless: 0, replicas: 0, brokers });
        };
        let partitions = topic.partitions();
        Ok(Topic {
            error: topic.error().filter(|e| *e != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR).map(Into::into),
            partitions: partitions.len(),
            leaderless: partitions.iter().filter(|partition| partition.leader() < 0).count(),
            replicas: partitions.iter().map(|partition| partition.replicas().len()).min().unwrap_or_default(),
            brokers,
        })
    })
    .await
}

async fn reach(settings: &Settings, live: &Arc<Live>) -> Result<()> {
    // The name of a topic, so that not the whole cluster's metadata is asked for.
    blocking(settings, live, |live, timeout| {
        live.client().client().fetch_metadata(Some("lanebridge"), timeout).map(drop)
    })
    .await
}

/// Runs a call that blocks up to the timeout it is given.
async fn blocking<T: Send + 'static>(
    settings: &Settings,
    live: &Arc<Live>,
    call: impl FnOnce(&Live, Duration) -> Result<T, KafkaError> + Send + 'static,
) -> Result<T> {
    let (held, timeout) = (live.clone(), settings.send_timeout.min(ASK_TIMEOUT));
    let answer = tokio::task::spawn_blocking(move || call(&held, timeout)).await;
    let trouble = live.trouble();
    let unreachable = || {
        let reason = if trouble.is_empty() { String::new() } else { format!(" ({trouble})") };
        Error::transient(format!("ask the brokers {} of [sinks.{}]{reason}", settings.brokers(), settings.name))
            .hint("are they running, and is this the right address, protocol and login?")
    };
    match answer {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(unreachable().source_is(error)),
        Err(error) => Err(unreachable().source_is(error)),
    }
}

/// What topics allow, as far as this user may read it; empty when the cluster does not say.
pub(super) async fn limits(settings: &Settings, topics: Vec<String>) -> HashMap<String, Limits> {
    if topics.is_empty() {
        return HashMap::new();
    }
    let Ok((mut config, _)) = settings.client_config().await else { return HashMap::new() };
    // This client produces nothing, so it needs no producer id, which a restricted user may not even get.
    config.set("enable.idempotence", "false");
    let events = Events { sink: settings.name.clone(), signs: Arc::new(Signs::default()) };
    let timeout = settings.send_timeout.min(ASK_TIMEOUT);
    let runtime = tokio::runtime::Handle::current();
    // The client is made and dropped where blocking is allowed: its drop joins a thread.
    let asked = tokio::task::spawn_blocking(move || {
        let admin = AdminClient::from_config_and_context(&config, events)?;
        let resources: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
        let options = AdminOptions::new().request_timeout(Some(timeout));
        runtime.block_on(admin.describe_configs(&resources, &options))
    });
    let answers = match asked.await {
        Ok(Ok(answers)) => answers,
        Ok(Err(error)) => {
            tracing::debug!(sink = %settings.name, %error, "topic limits not known");
            return HashMap::new();
        }
        Err(error) => {
            tracing::debug!(sink = %settings.name, %error, "topic limits not known");
            return HashMap::new();
        }
    };
    let mut all = HashMap::new();
    for resource in answers.into_iter().flatten() {
        let number = |name: &str| resource.get(name).and_then(|entry| entry.value.as_deref()?.parse::<usize>().ok());
        if let (OwnedResourceSpecifier::Topic(topic), Some(max_message_bytes)) =
            (&resource.specifier, number("max.message.bytes"))
        {
            let min_insync_replicas = number("min.insync.replicas").and_then(|n| u32::try_from(n).ok());
            all.insert(topic.clone(), Limits { max_message_bytes, min_insync_replicas });
        }
    }
    all
}
