//! What librdkafka's codes mean for a delivery (D8): one table, and the outcomes made from it.
//!
//! I1: only a code that speaks of this record alone can reject it, and [`super::Kafka::send`] makes it speak of the
//! record alone first.
//! I2: an outage spends no attempt (R12), also when the record's fate is unknown: it is sent again under the same
//! dedup id, so the worst is a duplicate, which consumers must bear anyway.

use rdkafka::error::RDKafkaErrorCode as Code;

use super::producer::Answer;
use crate::delivery::{Failure, Outcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// This record, or another one of its MessageSet, can never be stored.
    Message,
    /// The topic is not there or not ours. A fixed topic fails all events of the handler alike: unreachable, and no
    /// other handler is stopped, since a breaker belongs to one handler and sink. A topic made from the event may fail
    /// while its siblings work: refused, so that one bad type cannot stop the others (D8).
    Destination,
    /// No broker, no leader, no quorum, no login, too slow, purged: nothing about this record.
    Away,
    /// Nothing this table knows.
    Doubt,
}

pub(super) fn classify(code: Code) -> Verdict {
    match code {
        // Larger than the topic's limit, or refused by the broker's validation (a record without key for a compacted
        // topic). INVALID_DIFFERENT_RECORD says that another one of the set was.
        Code::MessageSizeTooLarge
        | Code::MessageBatchTooLarge
        | Code::InvalidMessageSize
        | Code::InvalidRecord
        | Code::InvalidDifferentRecord => Verdict::Message,

        // UnknownTopic is librdkafka's own, after topic.metadata.propagation.max.ms without the topic.
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownTopicId
        | Code::UnknownPartition
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed
        | Code::InvalidTimestamp
        | Code::UnsupportedForMessageFormat
        | Code::UnsupportedCompressionType => Verdict::Destination,

        // The network and librdkafka's own queue. MessageTimedOut may have been stored: see I2.
        Code::MessageTimedOut
        | Code::TimedOutQueue
        | Code::OperationTimedOut
        | Code::BrokerTransportFailure
        | Code::AllBrokersDown
        | Code::Resolve
        | Code::SSL
        | Code::QueueFull
        | Code::WaitCache
        | Code::Retry
        | Code::BrokerDestroy
        | Code::DestroyBroker
        | Code::NodeUpdate
        | Code::CriticalSystemResource
        | Code::NetworkException => Verdict::Away,
        // The login, or the right to use the cluster at all: every handler of the sink, and no event, is concerned.
        Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::UnsupportedSASLMechanism
        | Code::IllegalSASLState
        | Code::SecurityDisabled
        | Code::ClusterAuthorizationFailed
        | Code::TransactionalIdAuthorizationFailed
        | Code::UnsupportedVersion
        | Code::UnsupportedFeature
        | Code::InvalidRequiredAcks => Verdict::Away,
        // The cluster is there but cannot take anything now: elections, min.insync.replicas, full disks, quotas.
        Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::FencedLeaderEpoch
        | Code::UnknownLeaderEpoch
        | Code::BrokerNotAvailable
        | Code::ReplicaNotAvailable
        | Code::RequestTimedOut
        | Code::NotEnoughReplicas
        | Code::NotEnoughReplicasAfterAppend
        | Code::ISRInsufficient
        | Code::KafkaStorageError
        | Code::LogDirNotFound
        | Code::ThrottlingQuotaExceeded
        | Code::StaleBrokerEpoch
        | Code::CoordinatorNotAvailable
        | Code::CoordinatorLoadInProgress
        | Code::NotCoordinator
        | Code::RebootstrapRequired => Verdict::Away,
        // The producer is dead or was replaced: the next one sends these again.
        Code::Fatal
        | Code::GaplessGuarantee
        | Code::Inconsistent
        | Code::PurgeQueue
        | Code::PurgeInflight
        | Code::Fenced
        | Code::ProducerFenced
        | Code::State
        | Code::OutOfOrderSequenceNumber
        | Code::DuplicateSequenceNumber
        | Code::UnknownProducerId
        | Code::InvalidProducerEpoch
        | Code::InvalidProducerIdMapping => Verdict::Away,

        _ => Verdict::Doubt,
    }
}

/// The outcome of an answer; `trouble` is what librdkafka last said about its brokers, empty when nothing.
pub(super) fn outcome(answer: Answer, fixed_topic: bool, trouble: &str) -> Outcome {
    let code = match answer {
        Answer::Acked => return Outcome::Acked,
        Answer::Decided(outcome) => return outcome,
        Answer::None => {
            return Outcome::Unreachable(Failure::new("NO_REPORT", with("no answer within send_timeout", trouble)));
        }
        Answer::Reported(code) => code,
    };
    match classify(code) {
        Verdict::Message => Outcome::Refused(failure(code, "refused together with others, not yet tried alone")),
        Verdict::Destination if fixed_topic => Outcome::Unreachable(failure(code, "")),
        Verdict::Destination | Verdict::Doubt => Outcome::Refused(failure(code, "")),
        Verdict::Away => Outcome::Unreachable(failure(code, trouble)),
    }
}

/// `code`'s name as Kafka spells it, and its description.
pub(super) fn failure(code: Code, detail: &str) -> Failure {
    // `MessageTimedOut (Local: Message timed out)`: the name is in the code already.
    let whole = code.to_string();
    let text = whole.split_once(" (").map_or(whole.as_str(), |(_, text)| text.trim_end_matches(')'));
    Failure::new(name(code), with(text, detail))
}

fn with(text: &str, detail: &str) -> String {
    if detail.is_empty() { text.to_owned() } else { format!("{text}; {detail}") }
}

/// `MSG_SIZE_TOO_LARGE` for `MessageSizeTooLarge`, and so on.
fn name(code: Code) -> String {
    if code == Code::MessageSizeTooLarge {
        return "MSG_SIZE_TOO_LARGE".to_owned();
    }
    let mut out = String::new();
    let mut lower = false;
    for c in format!("{code:?}").chars() {
        if lower && c.is_ascii_uppercase() {
            out.push('_');
        }
        lower = c.is_ascii_lowercase();
        out.push(c.to_ascii_uppercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: Code, fixed_topic: bool) -> Outcome {
        outcome(Answer::Reported(code), fixed_topic, "")
    }

    #[test]
    fn an_outage_spends_no_attempt_and_what_nobody_knows_spends_one() {
        for code in [Code::MessageTimedOut, Code::AllBrokersDown, Code::NotEnoughReplicas, Code::PurgeInflight] {
            assert!(matches!(of(code, true), Outcome::Unreachable(_)), "{code:?}");
            assert!(matches!(of(code, false), Outcome::Unreachable(_)), "{code:?}");
        }
        assert!(matches!(of(Code::PolicyViolation, true), Outcome::Refused(_)));
        assert!(matches!(of(Code::Unknown, true), Outcome::Refused(_)));
        assert!(matches!(outcome(Answer::None, true, ""), Outcome::Unreachable(_)));
    }

    #[test]
    fn no_reported_code_rejects_by_itself() {
        for code in [Code::MessageSizeTooLarge, Code::InvalidRecord, Code::InvalidDifferentRecord] {
            assert!(matches!(of(code, true), Outcome::Refused(_)), "{code:?}");
        }
    }

    #[test]
    fn a_missing_topic_stops_its_handler_only_when_all_its_events_go_there() {
        assert!(matches!(of(Code::UnknownTopic, true), Outcome::Unreachable(_)));
        assert!(matches!(of(Code::UnknownTopic, false), Outcome::Refused(_)));
    }

    #[test]
    fn a_failure_has_kafkas_name_and_the_last_trouble() {
        let failure = failure(Code::MessageTimedOut, "127.0.0.1:1: refused");
        assert_eq!(failure.to_string(), "MESSAGE_TIMED_OUT: Local: Message timed out; 127.0.0.1:1: refused");
        assert_eq!(name(Code::MessageSizeTooLarge), "MSG_SIZE_TOO_LARGE");
        assert_eq!(name(Code::ISRInsufficient), "ISRINSUFFICIENT");
    }
}
