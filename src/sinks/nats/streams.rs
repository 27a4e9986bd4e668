//! Which stream takes a subject: asked once, then matched here against what each stream said it takes.

use std::sync::{Arc, Mutex, PoisonError};

use async_nats::jetstream::Context;
use async_nats::jetstream::context::GetStreamByNameErrorKind;

use super::text;
use crate::delivery::Failure;

/// Streams beyond this many are asked for again.
const MAX_STREAMS: usize = 256;

/// The streams that this sink has met.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Vec<Known>>);

#[derive(Debug)]
struct Known {
    name: Arc<str>,
    /// Patterns as in the stream's configuration.
    subjects: Vec<String>,
}

/// Subjects of one batch for which there is no stream, so that each is asked for once in a batch.
#[derive(Debug, Default)]
pub(super) struct Missing {
    subjects: Vec<(String, Failure)>,
    /// Asking itself failed: it would for the next subject too, and each time cost a timeout.
    unanswered: Option<Failure>,
}

impl Streams {
    /// The stream that takes `subject`.
    ///
    /// # Errors
    /// Why it is not known; never the message's fault.
    pub async fn of(&self, jetstream: &Context, subject: &str, missing: &mut Missing) -> Result<Arc<str>, Failure> {
        if let Some(name) = self.known(subject) {
            return Ok(name);
        }
        if let Some(failure) = &missing.unanswered {
            return Err(failure.clone());
        }
        if let Some((_, failure)) = missing.subjects.iter().find(|(missing, _)| missing == subject) {
            return Err(failure.clone());
        }
        let name = match jetstream.stream_by_subject(subject).await {
            Ok(name) => name,
            Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
                let failure = Failure::new("STREAM_NOT_FOUND", format!("no stream takes the subject {subject}"));
                missing.subjects.push((subject.to_owned(), failure.clone()));
                return Err(failure);
            }
            Err(error) => {
                let failure =
                    Failure::new("STREAM_LOOKUP", format!("ask for the stream of {subject}: {}", text(&error)));
                missing.unanswered = Some(failure.clone());
                return Err(failure);
            }
        };
        let name: Arc<str> = name.into();
        // Without the right to read the stream's configuration, only this very subject is remembered.
        let subjects = match jetstream.get_stream(&*name).await {
            Ok(stream) if stream.cached_info().config.subjects.iter().any(|pattern| takes(pattern, subject)) => {
                stream.cached_info().config.subjects.clone()
            }
            _ => vec![subject.to_owned()],
        };
        self.learn(name.clone(), subjects);
        Ok(name)
    }

    /// Everything is asked for again: a stream was deleted, or gave a subject to another.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn known(&self, subject: &str) -> Option<Arc<str>> {
        let streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = streams.iter().find(|known| known.subjects.iter().any(|pattern| takes(pattern, subject)))?;
        Some(known.name.clone())
    }

    fn learn(&self, name: Arc<str>, subjects: Vec<String>) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.len() >= MAX_STREAMS {
            streams.clear();
        }
        streams.push(Known { name, subjects });
    }
}

/// Whether a stream's subject pattern matches a subject: `*` is one token, `>` at the end one or more.
pub(super) fn takes(pattern: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for rule in pattern.split('.') {
        match (rule, tokens.next()) {
            (_, None) => return false,
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (text, Some(token)) if text == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streams_patterns_match_as_the_server_matches_them() {
        assert!(takes("a.*", "a.b"));
        assert!(!takes("a.*", "a.b.c"));
        assert!(!takes("a.*", "a"));
        assert!(takes("a.>", "a.b.c"));
        assert!(!takes("a.>", "a"));
        assert!(takes(">", "a"));
        assert!(!takes("a.b", "a.c"));
    }

    #[test]
    fn the_streams_that_are_remembered_are_limited_and_can_be_forgotten() {
        let streams = Streams::default();
        for i in 0..MAX_STREAMS {
            streams.learn(format!("s{i}").into(), vec![format!("{i}.>")]);
        }
        assert_eq!(streams.known("7.x").as_deref(), Some("s7"));
        streams.learn("one more".into(), vec!["x".into()]);
        assert_eq!(streams.known("7.x"), None);
        assert!(streams.known("x").is_some());
        streams.forget();
        assert_eq!(streams.known("x"), None);
    }
}
