//! Reads `[handlers.NAME]`, and checks each against the type of its sink.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::section::{Section, Text};
use super::sinks::{KINDS, Kind, required};
use super::{Format, Handler, OnDead, Order, Pattern, Template, validate};
use crate::backoff::Retry;

/// With the two waits below one to two hours: time for a person to notice a destination that refuses.
const MAX_ATTEMPTS: u64 = 20;
const RETRY_INITIAL: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(600);

const MS: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(86_400);

const DESTINATIONS: [(Kind, &str); 3] = [(Kind::Kafka, "topic"), (Kind::Nats, "subject"), (Kind::Redis, "stream")];

const FORMATS: [(&str, Format); 3] =
    [("cloudevents", Format::CloudEvents), ("cloudevents-json", Format::CloudEventsJson), ("raw", Format::Raw)];
const ORDERS: [(&str, Order); 2] = [("key", Order::Key), ("none", Order::None)];
const ON_DEAD: [(&str, OnDead); 2] = [("block", OnDead::Block), ("skip", OnDead::Skip)];

pub(super) fn read(root: &mut Section<'_>, kinds: &BTreeMap<String, Option<Kind>>) -> BTreeMap<String, Handler> {
    let mut handlers = BTreeMap::new();
    for (name, mut section) in root.tables("handlers") {
        if let Err(rule) = validate::name(&name) {
            section.report.problem(section.at, format!("{}: {rule}", section.path));
        }
        if let Some(handler) = handler(&name, &mut section, kinds) {
            handlers.insert(name, handler);
        }
        section.finish();
    }
    handlers
}

/// `None` after a problem.
fn handler(name: &str, section: &mut Section<'_>, kinds: &BTreeMap<String, Option<Kind>>) -> Option<Handler> {
    let events = events(section);
    let sink = required(section, "sink", "sink = \"NAME\", for a [sinks.NAME]");
    let kind = sink.as_ref().and_then(|sink| sink_kind(section, sink, kinds));
    let destination = destination(name, section, kind);
    let stream_name = section.text("stream_name");
    if let Some(stream) = &stream_name {
        if let Some(kind) = kind.filter(|kind| *kind != Kind::Nats) {
            let what = format!("is for nats sinks; the sink of this handler is {}", kind_name(kind));
            section.problem(stream.at, "stream_name", what);
        } else if let Err(rule) = validate::nats_stream(&stream.value) {
            section.problem(stream.at, "stream_name", format!("{} {rule}", stream.shown()));
        }
    }
    let format = section.choice("format", &FORMATS).unwrap_or(Format::CloudEvents);
    let order = section.choice("order", &ORDERS).unwrap_or(Order::Key);
    let on_dead = section.choice("on_dead", &ON_DEAD).unwrap_or(OnDead::Block);
    let retry = retry(section);
    Some(Handler {
        name: name.to_owned(),
        events,
        sink: sink?.value,
        destination: destination?,
        format,
        order,
        on_dead,
        retry,
        nats_stream: stream_name.map(|text| text.value),
    })
}

fn events(section: &mut Section<'_>) -> Vec<Pattern> {
    let texts = section.texts("events");
    let hint = "events = [\"order.*\"], or [\">\"] for all";
    if !section.has("events") {
        section.missing("events", hint);
    }
    if section.has_empty_list("events") {
        section.problem(section.at_key("events"), "events", format!("is empty, so nothing would arrive; hint: {hint}"));
    }
    let mut patterns: Vec<Pattern> = Vec::new();
    for text in texts.unwrap_or_default() {
        match Pattern::parse(&text.value) {
            Ok(pattern) if patterns.contains(&pattern) => {
                section.problem(text.at, "events", format!("has {} twice", text.shown()));
            }
            Ok(pattern) => patterns.push(pattern),
            // The rule quotes the pattern, which the environment may have filled in.
            Err(_) if text.filled => section.problem(text.at, "events", format!("{} is no pattern", text.shown())),
            Err(rule) => section.problem(text.at, "events", rule),
        }
    }
    patterns
}

fn sink_kind(section: &Section<'_>, sink: &Text, kinds: &BTreeMap<String, Option<Kind>>) -> Option<Kind> {
    let found = kinds.get(&sink.value);
    if found.is_none() {
        let mut hint = validate::nearest(&sink.written, kinds.keys().map(String::as_str));
        if hint.is_empty() {
            hint = match kinds.len() {
                0 => "; there is no [sinks.NAME] at all".to_owned(),
                _ => format!("; sinks are {}", kinds.keys().take(20).cloned().collect::<Vec<_>>().join(", ")),
            };
        }
        section.problem(sink.at, "sink", format!("{} is no sink{hint}", sink.shown()));
    }
    found.copied().flatten()
}

fn destination(name: &str, section: &mut Section<'_>, kind: Option<Kind>) -> Option<Template> {
    let own = kind.and_then(|kind| DESTINATIONS.iter().find(|(other, _)| *other == kind)).map(|(_, key)| *key);
    let mut template = None;
    let mut misplaced = false;
    for (_, key) in DESTINATIONS {
        let Some(text) = section.text(key) else { continue };
        match (kind, own) {
            (Some(_), Some(own)) if own == key => template = parse_destination(name, section, key, &text, kind),
            (Some(kind), Some(own)) => {
                misplaced = true;
                let what = format!("is not what a {} sink calls it; hint: {own} = {}", kind_name(kind), text.shown());
                section.problem(text.at, key, what);
            }
            (Some(kind), None) => {
                let what =
                    format!("has no meaning: a {} sink has no destinations; hint: leave it out", kind_name(kind));
                section.problem(text.at, key, what);
            }
            // The sink is unknown, which is already reported.
            (None, _) => template = parse_destination(name, section, key, &text, None),
        }
    }
    match own {
        Some(own) if !section.has(own) && !misplaced => section.missing(own, &format!("{own} = \"billing.{{type}}\"")),
        None if kind == Some(Kind::Stdout) => return Template::parse("").ok(),
        _ => {}
    }
    template
}

fn parse_destination(
    name: &str,
    section: &Section<'_>,
    key: &str,
    text: &Text,
    kind: Option<Kind>,
) -> Option<Template> {
    if text.value.is_empty() {
        section.problem(text.at, key, "is empty");
        return None;
    }
    let template = match Template::parse(&text.value) {
        Ok(template) => template,
        Err(_) if text.filled => {
            section.problem(text.at, key, format!("{} is no destination once filled in", text.shown()));
            return None;
        }
        Err(rule) => {
            section.problem(text.at, key, rule);
            return None;
        }
    };
    // What a publisher sends is escaped when it is filled in; one plain letter stands for it here.
    let sample = template.sample(name, "x");
    let rule = match kind {
        Some(Kind::Kafka) => validate::kafka_topic(&sample),
        Some(Kind::Nats) => validate::nats_subject(&sample),
        _ => Ok(()),
    };
    if let Err(rule) = rule {
        section.problem(text.at, key, format!("{} {rule}", text.shown()));
    }
    Some(template)
}

fn retry(section: &mut Section<'_>) -> Retry {
    let count = |n: u64| NonZeroU32::new(u32::try_from(n).expect("in range")).expect("not zero");
    let mut retry = Retry { max_attempts: count(MAX_ATTEMPTS), initial: RETRY_INITIAL, max: RETRY_MAX };
    let Some(mut table) = section.table("retry") else { return retry };
    if let Some(attempts) = table.integer("max_attempts", 1..=1_000_000_000) {
        retry.max_attempts = count(attempts);
    }
    retry.initial = table.duration("initial", MS..=DAY).unwrap_or(RETRY_INITIAL);
    retry.max = table.duration("max", MS..=7 * DAY).unwrap_or(RETRY_MAX);
    if retry.max < retry.initial {
        let place = if table.has("max") { "max" } else { "initial" };
        let shown = super::units::show_duration;
        let what = format!(
            "max = \"{}\" is below initial = \"{}\": no wait would ever be the initial one",
            shown(retry.max),
            shown(retry.initial)
        );
        table.problem(table.at_key(place), place, what);
    }
    table.finish();
    retry
}

fn kind_name(kind: Kind) -> &'static str {
    KINDS.iter().find(|(_, other)| *other == kind).map_or("", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bad, good};
    use super::*;

    const SINKS: &str = "[sinks.k]\ntype = \"kafka\"\nbrokers = \"b\"\n[sinks.n]\ntype = \"nats\"\nurl = \"nats://n\"\n\
                         [sinks.r]\ntype = \"redis\"\nurl = \"redis://r\"\n[sinks.o]\ntype = \"stdout\"\n[handlers.h]\n";

    fn with(extra: &str) -> String {
        let events = if extra.contains("events") { "" } else { "events = [\"a.*\"]\n" };
        format!("{SINKS}{events}{extra}")
    }

    fn handler(extra: &str) -> Handler {
        good(&with(extra)).handlers.remove("h").expect("it is there")
    }

    fn each_is_refused(cases: &[(&str, &str)]) {
        let cases: Vec<_> = cases.iter().map(|(extra, part)| (with(extra), *part)).collect();
        let cases: Vec<_> = cases.iter().map(|(text, part)| (text.as_str(), *part)).collect();
        super::super::testing::each_is_refused(&cases);
    }

    #[test]
    fn a_handler_gets_every_default() {
        let handler = handler("sink = \"k\"\ntopic = \"t.{type}\"");
        assert_eq!((handler.format, handler.order, handler.on_dead), (Format::CloudEvents, Order::Key, OnDead::Block));
        assert_eq!((handler.retry.max_attempts.get(), handler.retry.max), (20, RETRY_MAX));
        assert_eq!(handler.destination.as_str(), "t.{type}");
    }

    #[test]
    fn the_destination_key_is_the_one_of_the_sinks_kind() {
        each_is_refused(&[
            ("sink = \"n\"\ntopic = \"t\"", "topic: is not what a nats sink calls it; hint: subject = \"t\""),
            ("sink = \"k\"\nstream = \"t\"", "hint: topic = \"t\""),
            ("sink = \"r\"\nsubject = \"t\"", "hint: stream = \"t\""),
            ("sink = \"o\"\ntopic = \"t\"", "a stdout sink has no destinations"),
            ("sink = \"k\"", "handlers.h.topic: is missing"),
            ("sink = \"n\"", "handlers.h.subject: is missing"),
            ("sink = \"r\"", "handlers.h.stream: is missing"),
            ("sink = \"k\"\ntopic = \"t\"\nstream_name = \"S\"", "stream_name: is for nats sinks"),
            ("sink = \"n\"\nsubject = \"t\"\nstream_name = \"a.b\"", "no stream name"),
        ]);
        assert_eq!(handler("sink = \"o\"").destination.as_str(), "");
        assert_eq!(handler("sink = \"n\"\nsubject = \"t\"\nstream_name = \"S\"").nats_stream.as_deref(), Some("S"));
    }

    #[test]
    fn literal_parts_follow_the_brokers_rules() {
        each_is_refused(&[
            ("sink = \"k\"\ntopic = \"a b.{type}\"", "\"a b.{type}\" is no Kafka topic"),
            ("sink = \"k\"\ntopic = \"\"", "topic: is empty"),
            ("sink = \"n\"\nsubject = \"a..{key}\"", "empty token"),
            ("sink = \"n\"\nsubject = \"a.*\"", "wildcard"),
            ("sink = \"n\"\nsubject = \"$JS.{key}\"", "keeps for its own"),
            ("sink = \"k\"\ntopic = \"a{tpye}\"", "unknown placeholder {tpye}"),
            ("sink = \"r\"\nstream = \"\"", "stream: is empty"),
        ]);
        handler("sink = \"r\"\nstream = \"any {type} \\\"text\\n\"");
        handler("sink = \"k\"\ntopic = \"{handler}.{header:region}\"");
    }

    #[test]
    fn what_a_handler_names_must_exist() {
        each_is_refused(&[
            ("topic = \"t\"", "handlers.h.sink: is missing"),
            ("sink = \"x\"\ntopic = \"t\"", "\"x\" is no sink; sinks are k, n, o, r"),
            ("sink = \"o\"\nevents = []", "events: is empty"),
            ("sink = \"o\"\nevents = \"a\"", "must be a list of strings"),
            ("sink = \"o\"\nevents = [1]", "must be a string in quotes, not 1"),
            ("sink = \"o\"\nevents = [\"a..b\"]", "empty token"),
            ("sink = \"o\"\nevents = [\"a\", \"a\"]", "\"a\" twice"),
            ("sink = \"o\"\nformat = \"json\"", "allowed: cloudevents, cloudevents-json, raw"),
            ("sink = \"o\"\norder = \"keys\"", "did you mean \"key\"?"),
            ("sink = \"o\"\non_dead = \"drop\"", "allowed: block, skip"),
            ("sink = \"o\"\nevnts = 1", "handlers.h.evnts: is no known key; did you mean \"events\"?"),
        ]);
        assert!(bad(&format!("{SINKS}sink = \"o\"")).contains("handlers.h.events: is missing"));
        assert!(
            bad("[sinks.orders]\ntype = \"stdout\"\n[handlers.h]\nevents = [\">\"]\nsink = \"order\"")
                .contains("did you mean \"orders\"?")
        );
        // A broken sink is one problem, not one more for each handler that names it.
        super::super::testing::each_is_refused(&[(
            "[sinks.s]\ntype = \"x\"\n[handlers.h]\nevents = [\">\"]\nsink = \"s\"\ntopic = \"t\"",
            "unknown value \"x\"",
        )]);
    }

    #[test]
    fn retry_is_bounded() {
        let retry = handler("sink = \"o\"\nretry = { max_attempts = 1, initial = \"1ms\", max = \"1ms\" }").retry;
        assert_eq!((retry.max_attempts.get(), retry.initial, retry.max), (1, MS, MS));
        handler("sink = \"o\"\nretry = { max_attempts = 1000000000, initial = \"1d\", max = \"7d\" }");
        each_is_refused(&[
            (
                "sink = \"o\"\nretry = { max_attempts = 0 }",
                "handlers.h.retry.max_attempts: must be a whole number from 1",
            ),
            ("sink = \"o\"\nretry = { max_attempts = 1000000001 }", "not 1000000001"),
            ("sink = \"o\"\nretry = { initial = \"0\" }", "from \"1ms\" to \"1d\""),
            ("sink = \"o\"\nretry = { max = \"8d\" }", "from \"1ms\" to \"7d\""),
            ("sink = \"o\"\nretry = { initial = \"11m\" }", "is below initial = \"11m\""),
            ("sink = \"o\"\nretry = { attempts = 1 }", "did you mean \"max_attempts\"?"),
        ]);
    }
}
