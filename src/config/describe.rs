//! The effective configuration, defaults filled in and secrets masked, for `check`.

use std::fmt::{self, Write};

use super::address::masked;
use super::pg_url::PgUrl;
use super::units::{show_duration, show_size};
use super::{
    Config, Format, Handler, NatsAuth, OnDead, Order, Ownership, SaslMechanism, SecretSource, Sink, SinkKind,
    SourceKind, Tls, WakeUp,
};

/// The configuration as TOML-like text. It never holds a secret: URLs lose their passwords, the rest is `***`.
pub fn describe(config: &Config) -> String {
    let mut out = String::new();
    write(config, &mut out).expect("a String takes everything");
    out
}

fn write(config: &Config, out: &mut String) -> fmt::Result {
    let postgres = &config.postgres;
    writeln!(out, "[postgres]")?;
    for (key, url) in [("url", Some(&postgres.url)), ("direct_url", postgres.direct_url.as_ref())] {
        if let Some(url) = url {
            let shown = PgUrl::parse(url.expose()).map_or_else(|_| "***".to_owned(), |url| url.to_string());
            line(out, key, &shown)?;
        }
    }
    path(out, "password_file", postgres.password_file.as_deref())?;
    line(out, "schema", &postgres.schema)?;
    line(out, "table_prefix", &postgres.table_prefix)?;
    line(out, "connect_timeout", &show_duration(postgres.connect_timeout))?;
    line(out, "statement_timeout", &show_duration(postgres.statement_timeout))?;
    line(out, "max_payload_bytes", &show_size(postgres.max_payload_bytes.into()))?;

    let bridge = &config.bridge;
    writeln!(out, "\n[bridge]")?;
    line(out, "name", &bridge.name)?;
    let source = match bridge.source {
        SourceKind::Auto => "auto",
        SourceKind::Wal => "wal",
        SourceKind::Poll => "poll",
    };
    line(out, "source", source)?;
    let wake_up = match bridge.wake_up {
        WakeUp::Auto => "auto",
        WakeUp::Notify => "notify",
        WakeUp::Poll => "poll",
    };
    line(out, "wake_up", wake_up)?;
    let ownership = match bridge.ownership {
        Ownership::Advisory => "advisory",
        Ownership::Lease => "lease",
    };
    line(out, "ownership", ownership)?;
    line(out, "poll_interval", &show_duration(bridge.poll_interval))?;
    line(out, "sweep_interval", &show_duration(bridge.sweep_interval))?;
    line(out, "shutdown_timeout", &show_duration(bridge.shutdown_timeout))?;
    line(out, "frozen_after", &show_duration(bridge.frozen_after))?;
    line(out, "max_in_flight_bytes", &show_size(bridge.max_in_flight_bytes))?;
    line(out, "ce_source", &bridge.ce_source)?;

    let wal = &config.wal;
    writeln!(out, "\n[wal]")?;
    line(out, "cache_bytes", &show_size(wal.cache_bytes))?;
    line(out, "max_transaction", &show_size(wal.max_transaction))?;
    line(out, "max_retained", &show_size(wal.max_retained))?;
    line(out, "max_spill", &show_size(wal.max_spill))?;
    line(out, "max_behind", &show_duration(wal.max_behind))?;
    line(out, "canary_interval", &show_duration(wal.canary_interval))?;
    line(out, "slot_timeout", &show_duration(wal.slot_timeout))?;
    line(out, "sender_timeout", &show_duration(wal.sender_timeout))?;

    writeln!(out, "\n[http]")?;
    line(out, "listen", &config.http.listen.map(|address| address.to_string()).unwrap_or_default())?;
    writeln!(out, "allowed_hosts = {:?}", config.http.allowed_hosts)?;
    line(out, "stuck_after", &show_duration(config.http.stuck_after))?;

    writeln!(out, "\n[retention]")?;
    line(out, "events", &config.retention.events.map_or_else(|| "0".to_owned(), show_duration))?;
    line(out, "dead", &config.retention.dead.map_or_else(|| "0".to_owned(), show_duration))?;
    writeln!(out, "history = {}", config.retention.history)?;

    for (name, sink) in &config.sinks {
        write_sink(name, sink, out)?;
    }
    config.handlers.values().try_for_each(|handler| write_handler(handler, config, out))
}

fn write_sink(name: &str, sink: &Sink, out: &mut String) -> fmt::Result {
    writeln!(out, "\n[sinks.{}]", table_key(name))?;
    line(out, "type", sink.kind.name())?;
    match &sink.kind {
        SinkKind::Kafka(kafka) => {
            line(out, "brokers", &kafka.brokers)?;
            write_tls(&kafka.tls, out)?;
            if let Some(sasl) = &kafka.sasl {
                let mechanism = match sasl.mechanism {
                    SaslMechanism::Plain => "PLAIN",
                    SaslMechanism::ScramSha256 => "SCRAM-SHA-256",
                    SaslMechanism::ScramSha512 => "SCRAM-SHA-512",
                };
                line(out, "sasl.mechanism", mechanism)?;
                line(out, "sasl.username", &sasl.username)?;
                secret(out, "sasl.password", &sasl.password)?;
            }
            // Any of them may be a secret, and the bridge does not know them all.
            for option in kafka.options.keys() {
                writeln!(out, "options.{option:?} = \"***\"")?;
            }
        }
        SinkKind::Nats(nats) => {
            line(out, "url", &masked(nats.url.expose()))?;
            write_tls(&nats.tls, out)?;
            match &nats.auth {
                NatsAuth::Url => {}
                NatsAuth::User { username, password } => {
                    line(out, "username", username)?;
                    secret(out, "password", password)?;
                }
                NatsAuth::Token(token) => secret(out, "token", token)?,
                NatsAuth::Nkey(nkey) => secret(out, "nkey", nkey)?,
                NatsAuth::CredsFile(file) => path(out, "creds_file", Some(file))?,
            }
        }
        SinkKind::Redis(redis) => {
            line(out, "url", &masked(redis.url.expose()))?;
            write_tls(&redis.tls, out)?;
            if let Some(username) = &redis.username {
                line(out, "username", username)?;
            }
            if let Some(password) = &redis.password {
                secret(out, "password", password)?;
            }
            if let Some(max_len) = redis.max_len {
                writeln!(out, "max_len = {max_len}")?;
            }
        }
        SinkKind::Stdout => {}
    }
    line(out, "send_timeout", &show_duration(sink.send_timeout))?;
    writeln!(out, "batch = {}\nbatches_in_flight = {}", sink.batch, sink.batches_in_flight)
}

fn write_tls(tls: &Tls, out: &mut String) -> fmt::Result {
    writeln!(out, "tls.enabled = {}", tls.enabled)?;
    path(out, "tls.ca_file", tls.ca_file.as_deref())?;
    path(out, "tls.cert_file", tls.cert_file.as_deref())?;
    path(out, "tls.key_file", tls.key_file.as_deref())
}

fn write_handler(handler: &Handler, config: &Config, out: &mut String) -> fmt::Result {
    writeln!(out, "\n[handlers.{}]", table_key(&handler.name))?;
    let events: Vec<&str> = handler.events.iter().map(super::Pattern::as_str).collect();
    writeln!(out, "events = {events:?}")?;
    line(out, "sink", &handler.sink)?;
    if let Some(key) = config.sinks.get(&handler.sink).and_then(|sink| sink.kind.destination_key()) {
        line(out, key, handler.destination.as_str())?;
    }
    if let Some(stream) = &handler.nats_stream {
        line(out, "stream_name", stream)?;
    }
    let format = match handler.format {
        Format::CloudEvents => "cloudevents",
        Format::CloudEventsJson => "cloudevents-json",
        Format::Raw => "raw",
    };
    line(out, "format", format)?;
    line(out, "order", if handler.order == Order::Key { "key" } else { "none" })?;
    line(out, "on_dead", if handler.on_dead == OnDead::Block { "block" } else { "skip" })?;
    let (initial, max) = (show_duration(handler.retry.initial), show_duration(handler.retry.max));
    let attempts = handler.retry.max_attempts;
    writeln!(out, "retry = {{ max_attempts = {attempts}, initial = \"{initial}\", max = \"{max}\" }}")
}

fn line(out: &mut String, key: &str, value: &str) -> fmt::Result {
    writeln!(out, "{key} = {value:?}")
}

fn path(out: &mut String, key: &str, value: Option<&std::path::Path>) -> fmt::Result {
    value.map_or(Ok(()), |value| writeln!(out, "{key} = {value:?}"))
}

fn secret(out: &mut String, key: &str, source: &SecretSource) -> fmt::Result {
    match source {
        SecretSource::Inline(secret) => writeln!(out, "{key} = \"{secret}\""),
        SecretSource::File(file) => writeln!(out, "{key}_file = {file:?}"),
    }
}

fn table_key(name: &str) -> String {
    if name.contains('.') { format!("{name:?}") } else { name.to_owned() }
}
