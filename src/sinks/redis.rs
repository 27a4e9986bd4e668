//! Redis Streams: a batch becomes calls of one script that adds entries in order and stops a key at its first failure.
//!
//! I1: `Acked` needs an entry id from `XADD` in a reply that carries the delivery's own position in the batch; a
//! pipeline's or a script's success says nothing about one entry (H83).
//! I2: after a failed entry no later one of its key is added, in this call or in a later one of the batch (R3). Those
//! were not tried, so they are `Unreachable` with the code [`BEHIND`]: no attempt is spent on them.
//! I3: a connection of which one answer is in doubt is dropped.
//!
//! Never trims unless `max_len` says so. One call names one key, so a cluster's proxy can route it.

mod check;
mod link;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::LazyLock;
use std::time::Duration;

use redis::{ErrorKind, Pipeline, RedisError, RedisResult, Script, Value};
use tokio::time::{Instant, timeout_at};

use self::link::Link;
use self::plan::{Call, Entry};
use super::cloudevents::{self, Names};
use super::{BEHIND, Finding, Route};
use crate::config;
use crate::delivery::{Failure, Outcome, Parcel};
use crate::error::Result;

/// Lua's `unpack` gives up at 8,000 values; a field takes two, and `XADD` itself some.
const MAX_FIELDS: usize = 3_900;

/// `proto-max-bulk-len`: a longer argument is a protocol error that closes the connection.
const MAX_VALUE_BYTES: usize = 512 * 1024 * 1024;

/// KEYS: the stream. ARGV: MAXLEN or "", then for each entry its position, its key with a leading "k" or "", the
/// number of its following values, and these. Answers {position, 1, id}, {position, 0, error} or {position, 2, ""} (behind).
const ADD: &str = r"
local stream, maxlen = KEYS[1], ARGV[1]
local answers, stopped, i = {}, {}, 2
while i <= #ARGV do
  local position, key, n = tonumber(ARGV[i]), ARGV[i + 1], tonumber(ARGV[i + 2])
  local first, last = i + 3, i + 2 + n
  if key ~= '' and stopped[key] then
    answers[#answers + 1] = {position, 2, ''}
  else
    local reply
    if maxlen == '' then
      reply = redis.pcall('XADD', stream, '*', unpack(ARGV, first, last))
    else
      reply = redis.pcall('XADD', stream, 'MAXLEN', '~', maxlen, '*', unpack(ARGV, first, last))
    end
    if type(reply) == 'string' then
      answers[#answers + 1] = {position, 1, reply}
    else
      stopped[key] = true
      answers[#answers + 1] = {position, 0, type(reply) == 'table' and reply.err or 'no answer'}
    end
  end
  i = last + 1
end
return answers
";

/// What `EVALSHA` knows the script by.
static ADD_HASH: LazyLock<String> = LazyLock::new(|| Script::new(ADD).get_hash().to_owned());

#[derive(Debug)]
pub struct Redis {
    name: String,
    link: Link,
    max_len: Option<u64>,
    send_timeout: Duration,
}

impl Redis {
    /// Nothing is contacted before the first send or check.
    ///
    /// # Errors
    /// [`Class::Config`](crate::error::Class::Config) for an address, a secret or a certificate that cannot be used.
    #[allow(clippy::unused_async, reason = "one signature for every sink")]
    pub(super) async fn connect(name: &str, config: &config::Redis, common: &config::Sink) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            link: Link::new(name, config, common.send_timeout)?,
            max_len: config.max_len,
            send_timeout: common.send_timeout,
        })
    }

    /// What is wrong or weak at the streams of `routes` and at the server.
    ///
    /// # Errors
    /// [`Class::Transient`](crate::error::Class::Transient) when the server could not be asked.
    pub(super) async fn check(&self, routes: &[Route], max_payload_bytes: u64) -> Result<Vec<Finding>> {
        check::check(self, routes, max_payload_bytes).await
    }

    /// One outcome for each parcel, in their order, within the sink's `send_timeout`.
    pub(super) async fn send(&self, route: &Route, parcels: &[Parcel]) -> Vec<Outcome> {
        let deadline = Instant::now() + self.send_timeout;
        let mut outcomes: Vec<Option<Outcome>> = vec![None; parcels.len()];
        // Keys of which the parcels from here on cannot go; what came before them still does.
        let mut unfit: HashSet<&str> = HashSet::new();
        let mut entries = Vec::with_capacity(parcels.len());
        for (at, parcel) in parcels.iter().enumerate() {
            let key = ordered_key(route, parcel);
            if key.is_some_and(|key| unfit.contains(key)) {
                outcomes[at] = Some(behind());
                continue;
            }
            match entry(route, parcel, at, key) {
                Ok(entry) => entries.push(entry),
                Err(failure) => {
                    outcomes[at] = Some(Outcome::Rejected(failure));
                    unfit.extend(key);
                }
            }
        }
        // Keys of which an entry was sent and not added.
        let mut stopped: HashSet<&str> = HashSet::new();
        for mut wave in plan::plan(entries) {
            for call in &mut wave {
                call.entries.retain(|entry| {
                    let waits = entry.key.as_deref().is_some_and(|key| stopped.contains(key));
                    if waits {
                        outcomes[entry.at] = Some(behind());
                    }
                    !waits
                });
            }
            wave.retain(|call| !call.entries.is_empty());
            for (at, outcome) in self.run(&wave, deadline).await {
                if outcome != Outcome::Acked {
                    stopped.extend(ordered_key(route, &parcels[at]));
                }
                outcomes[at] = Some(outcome);
            }
        }
        let no_answer = || Outcome::Refused(Failure::new("NO_ANSWER", "no answer"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(no_answer)).collect()
    }

    /// An outcome for every entry of the wave's calls, with its position in the batch.
    async fn run(&self, wave: &[Call], deadline: Instant) -> Vec<(usize, Outcome)> {
        let all = |calls: &[Call], outcome: &Outcome| -> Vec<_> {
            calls.iter().flat_map(|call| &call.entries).map(|entry| (entry.at, outcome.clone())).collect()
        };
        let (number, mut connection) = match timeout_at(deadline, self.link.connection()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return all(wave, &self.not_connected(&error)),
            Err(_elapsed) => return all(wave, &unreachable("NOT_CONNECTED", &self.link.address())),
        };
        let mut answers = match query(&self.pipeline(wave.iter(), false), &mut connection, deadline).await {
            Ok(answers) => answers,
            Err(outcome) => {
                self.link.drop_connection(number).await;
                return all(wave, &outcome);
            }
        };
        // A restarted or failed-over server has lost the script. It ran nothing, and no two calls share a key.
        let unknown = |answer: &RedisResult<Value>| matches!(answer, Err(error) if error.code() == Some("NOSCRIPT"));
        let again: Vec<usize> = (0..answers.len().min(wave.len())).filter(|&call| unknown(&answers[call])).collect();
        if !again.is_empty() {
            let pipeline = self.pipeline(again.iter().map(|&call| &wave[call]), true);
            match query(&pipeline, &mut connection, deadline).await {
                Ok(second) => {
                    for (&call, answer) in again.iter().zip(second) {
                        answers[call] = answer;
                    }
                }
                // Their first answers, which say that nothing was added, are replaced by the doubt.
                Err(Outcome::Unreachable(why)) => {
                    for call in again {
                        answers[call] = Err(RedisError::from((ErrorKind::Io, "script", why.to_string())));
                    }
                }
                Err(_) => {}
            }
        }
        let mut outcomes = Vec::new();
        let mut answers = answers.into_iter();
        for call in wave {
            match answers.next() {
                Some(Ok(reply)) => outcomes.extend(judge(call, &reply)),
                Some(Err(error)) => outcomes.extend(all(std::slice::from_ref(call), &classify_error(&error))),
                None => {
                    outcomes.extend(all(std::slice::from_ref(call), &refused("NO_ANSWER", "the answer is too short")))
                }
            }
        }
        // After a failover the same name may lead to the new primary; after a rotated password a login is needed.
        let doubt = |outcome: &Outcome| match outcome {
            Outcome::Unreachable(failure) => !matches!(failure.code.as_str(), BEHIND | "OOM" | "WRONGTYPE" | "NOPERM"),
            Outcome::Refused(failure) => matches!(failure.code.as_str(), "NO_ANSWER" | "BAD_ANSWER"),
            Outcome::Acked | Outcome::Rejected(_) => false,
        };
        if outcomes.iter().any(|(_, outcome)| doubt(outcome)) {
            self.link.drop_connection(number).await;
        }
        outcomes
    }

    fn pipeline<'a>(&self, calls: impl Iterator<Item = &'a Call>, with_source: bool) -> Pipeline {
        let mut pipeline = Pipeline::new();
        // Otherwise one error hides the answers of calls that were executed (H83).
        pipeline.ignore_errors();
        for call in calls {
            let command = if with_source {
                pipeline.cmd("EVAL").arg(ADD)
            } else {
                pipeline.cmd("EVALSHA").arg(ADD_HASH.as_str())
            };
            let stream = call.entries.first().map_or("", |entry| entry.stream.as_str());
            command.arg(1).arg(stream).arg(self.max_len.map_or_else(String::new, |most| most.to_string()));
            for entry in &call.entries {
                command.arg(entry.at).arg(entry.key.as_ref().map_or_else(String::new, |key| format!("k{key}")));
                command.arg(entry.fields.len());
                for field in &entry.fields {
                    command.arg(field.as_slice());
                }
            }
        }
        pipeline
    }

    fn not_connected(&self, error: &RedisError) -> Outcome {
        unreachable("NOT_CONNECTED", &format!("{}: {}", self.link.address(), shown(error)))
    }

    /// Every answer was awaited by `send`; dropping the connection closes it.
    #[allow(clippy::unused_async, reason = "one signature for every sink")]
    pub(super) async fn close(self, _deadline: Duration) {
        tracing::debug!(sink = %self.name, "redis is closed");
    }
}

/// The key whose order matters, if any.
fn ordered_key<'a>(route: &Route, parcel: &'a Parcel) -> Option<&'a str> {
    match route.handler.order {
        config::Order::Key => parcel.event.key.as_deref(),
        config::Order::None => None,
    }
}

/// # Errors
/// Why this delivery can never be an entry.
fn entry(route: &Route, parcel: &Parcel, at: usize, key: Option<&str>) -> Result<Entry, Failure> {
    let handler = &route.handler;
    let stream = handler
        .destination
        .render(&parcel.event, &handler.name, str::to_owned)
        .map_err(|why| Failure::new("NO_STREAM", why))?;
    if stream.is_empty() {
        return Err(Failure::new("NO_STREAM", "the name of its stream is empty"));
    }
    let encoded = cloudevents::encode(parcel, route, Names::Redis);
    let count = encoded.attributes.len() + 1;
    if count > MAX_FIELDS {
        let text = format!("{count} fields with its headers, the limit is {MAX_FIELDS}");
        return Err(Failure::new("TOO_MANY_FIELDS", text));
    }
    let mut fields = Vec::with_capacity(count * 2);
    for (name, value) in encoded.attributes {
        fields.push(name.into_owned().into_bytes());
        fields.push(value.into_bytes());
    }
    fields.push(b"data".to_vec());
    fields.push(encoded.body.into_owned());
    if let Some(field) = fields.iter().find(|field| field.len() > MAX_VALUE_BYTES) {
        let text = format!("a value of {} bytes, the limit is {MAX_VALUE_BYTES}", field.len());
        return Err(Failure::new("VALUE_TOO_LARGE", text));
    }
    Ok(Entry { at, stream, key: key.map(str::to_owned), fields })
}

/// As many answers as the pipeline has commands, or what became of all of them.
async fn query(
    pipeline: &Pipeline,
    connection: &mut redis::aio::MultiplexedConnection,
    deadline: Instant,
) -> Result<Vec<RedisResult<Value>>, Outcome> {
    match timeout_at(deadline, pipeline.query_async(connection)).await {
        Ok(Ok(answers)) => Ok(answers),
        Ok(Err(error)) => Err(classify_error(&error)),
        Err(_elapsed) => Err(unreachable("TIMED_OUT", "no answer in time, it may be stored")),
    }
}

/// I1 for one call: each answer is matched to its entry by the position it carries.
fn judge(call: &Call, reply: &Value) -> Vec<(usize, Outcome)> {
    let mut outcomes: Vec<_> =
        call.entries.iter().map(|entry| (entry.at, refused("NO_ANSWER", "the script did not answer for it"))).collect();
    let Value::Array(answers) = reply else { return outcomes };
    let mut judged = HashSet::new();
    for answer in answers {
        let Value::Array(parts) = answer else { continue };
        let [Value::Int(position), Value::Int(kind), Value::BulkString(text)] = parts.as_slice() else { continue };
        let position = usize::try_from(*position).ok();
        // A call's entries are in the order of their positions.
        let Some(found) = position.and_then(|at| outcomes.binary_search_by_key(&at, |(at, _)| *at).ok()) else {
            continue;
        };
        let (at, outcome) = &mut outcomes[found];
        let text = String::from_utf8_lossy(text);
        *outcome = match kind {
            _ if !judged.insert(*at) => refused("BAD_ANSWER", "two answers for one entry"),
            1 if is_entry_id(&text) => Outcome::Acked,
            0 => classify_text(&text),
            2 => behind(),
            _ => refused("BAD_ANSWER", "the answer is not the id of an entry"),
        };
    }
    outcomes
}

/// `1700000000000-0`
fn is_entry_id(text: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    text.split_once('-').is_some_and(|(time, sequence)| number(time) && number(sequence))
}

fn classify_error(error: &RedisError) -> Outcome {
    match (error.kind(), error.code()) {
        (ErrorKind::Io, _) if error.is_timeout() => unreachable("TIMED_OUT", "no answer in time, it may be stored"),
        (ErrorKind::Io, _) => unreachable("IO", &shown(error)),
        (ErrorKind::AuthenticationFailed, _) => unreachable("AUTH", &shown(error)),
        (_, Some(code)) => classify(code, &shown(error)),
        _ => refused("BAD_ANSWER", &shown(error)),
    }
}

/// An error reply as the server wrote it: a code in capitals, then text.
fn classify_text(reply: &str) -> Outcome {
    let reply = reply.trim_start_matches('-');
    let (code, text) = reply.split_once(' ').unwrap_or((reply, ""));
    classify(code, text)
}

/// The table from Redis' error codes to outcomes.
fn classify(code: &str, text: &str) -> Outcome {
    let failure = Failure::new(code, without_arguments(text));
    match code {
        // The server has no room, starts, fails over, or does not store as it was told to.
        "OOM" | "BUSY" | "LOADING" | "READONLY" | "MASTERDOWN" | "MISCONF" | "NOREPLICAS" => {
            Outcome::Unreachable(failure)
        }
        // A cluster moves: whoever is asked next knows more.
        "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "CROSSSLOT" => Outcome::Unreachable(failure),
        // The destination or our rights are wrong, not this message.
        "WRONGTYPE" | "NOPERM" | "NOAUTH" | "WRONGPASS" | "UNKILLABLE" => Outcome::Unreachable(failure),
        // Nobody logged in, and the server says so by refusing long commands.
        _ if text.contains("unauthenticated") => Outcome::Unreachable(Failure::new("NOAUTH", text)),
        // A command inside a script that our user may not run comes as ERR in words that change with versions.
        _ if text.contains("ACL failure in script") || text.contains("user executing the script can't run") => {
            Outcome::Unreachable(Failure::new("NOPERM", text))
        }
        _ if text.contains("exceeds maximum allowed size") || text.contains("too large to be stored") => {
            Outcome::Rejected(failure)
        }
        // Nobody knows what it says about this message.
        _ => Outcome::Refused(failure),
    }
}

/// `unknown command … with args beginning with: …` quotes the arguments, and so the payload.
fn without_arguments(text: &str) -> &str {
    text.find("with args beginning with").map_or(text, |quoted| text.get(..quoted).unwrap_or_default())
}

fn shown(error: &RedisError) -> String {
    without_arguments(&error.to_string()).to_owned()
}

fn behind() -> Outcome {
    unreachable(BEHIND, "an earlier delivery of its key failed, it was not tried")
}

fn unreachable(code: &str, text: &str) -> Outcome {
    Outcome::Unreachable(Failure::new(code, text))
}

fn refused(code: &str, text: &str) -> Outcome {
    Outcome::Refused(Failure::new(code, text))
}

#[cfg(test)]
mod table {
    use super::*;

    #[test]
    fn every_code_has_its_outcome() {
        let unreachable = [
            "OOM",
            "BUSY",
            "LOADING",
            "READONLY",
            "MASTERDOWN",
            "MISCONF",
            "NOREPLICAS",
            "MOVED",
            "ASK",
            "TRYAGAIN",
            "CLUSTERDOWN",
            "CROSSSLOT",
            "WRONGTYPE",
            "NOPERM",
            "NOAUTH",
            "WRONGPASS",
            "UNKILLABLE",
        ];
        for code in unreachable {
            let outcome = classify_text(&format!("-{code} says so"));
            assert!(
                matches!(&outcome, Outcome::Unreachable(why) if why.code == code && why.text() == "says so"),
                "{code}"
            );
        }
        for no_right in [
            "ERR ACL failure in script: User lb has no permissions to run the 'xadd' command",
            "ERR The user executing the script can't run this command or subcommand",
        ] {
            assert!(matches!(classify_text(no_right), Outcome::Unreachable(why) if why.code == "NOPERM"), "{no_right}");
        }
        for too_large in
            ["string exceeds maximum allowed size (proto-max-bulk-len)", "Elements are too large to be stored"]
        {
            assert!(matches!(classify("ERR", too_large), Outcome::Rejected(_)), "{too_large}");
        }
        for unknown in ["ERR what", "NEWCODE what", "", "x"] {
            assert!(matches!(classify_text(unknown), Outcome::Refused(_)), "{unknown:?}");
        }
    }

    #[test]
    fn a_quoted_payload_is_cut_from_an_error() {
        let Outcome::Refused(why) = classify("ERR", "unknown command 'x', with args beginning with: 'secret'") else {
            panic!("not refused")
        };
        assert!(!why.text().contains("secret"));
    }

    fn call(positions: &[usize]) -> Call {
        let entry = |&at: &usize| Entry { at, stream: "s".into(), key: None, fields: Vec::new() };
        let mut call = Call::default();
        call.entries.extend(positions.iter().map(entry));
        call
    }

    fn answer(position: i64, kind: i64, text: &str) -> Value {
        Value::Array(vec![Value::Int(position), Value::Int(kind), Value::BulkString(text.as_bytes().to_vec())])
    }

    /// A reply that is short, shuffled, doubled or foreign acknowledges nothing that it does not name.
    #[test]
    fn an_answer_counts_for_its_own_position_only() {
        let judged = |answers: Vec<Value>| {
            let outcomes = judge(&call(&[3, 5, 9]), &Value::Array(answers));
            outcomes.into_iter().map(|(at, outcome)| (at, outcome == Outcome::Acked)).collect::<Vec<_>>()
        };
        assert_eq!(judged(vec![answer(9, 1, "1-0"), answer(3, 1, "1-1")]), [(3, true), (5, false), (9, true)]);
        assert_eq!(judged(vec![answer(5, 1, "1-0"), answer(5, 1, "1-1")]), [(3, false), (5, false), (9, false)]);
        assert_eq!(judged(vec![answer(4, 1, "1-0"), answer(-3, 1, "1-1")]), [(3, false), (5, false), (9, false)]);
        assert_eq!(
            judged(vec![answer(3, 1, "OK"), answer(5, 2, ""), answer(9, 7, "1-0")]),
            [(3, false), (5, false), (9, false)]
        );
        assert_eq!(judged(vec![Value::Nil, Value::Array(Vec::new())]), [(3, false), (5, false), (9, false)]);
        assert!(judge(&call(&[0]), &Value::Okay).iter().all(|(_, outcome)| *outcome != Outcome::Acked));
    }

    #[test]
    fn an_entry_id_is_two_numbers() {
        assert!(is_entry_id("1700000000000-0"));
        for bad in ["", "-", "1-", "-1", "1", "1-a", "1-0-0", "OK"] {
            assert!(!is_entry_id(bad), "{bad:?}");
        }
    }
}
