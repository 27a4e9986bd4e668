//! What failed, with which value, what follows, and what to do next.
//!
//! Context is added in verb form, so that a chain reads as one sentence:
//! `start bridge: lock lanes: role "app" may not ...; hint: GRANT ...`. The source is attached, never
//! formatted into the text; [`Error::report`] prints the chain once, with every hint at its end.

use std::error::Error as StdError;
use std::fmt;

/// A failure with its context, and where one exists, the next step for the person who reads it.
pub struct Error {
    what: String,
    hint: Option<String>,
    class: Class,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Who can end this failure; decides the exit status and whether a retry makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The configuration or the command line is wrong: exit status 2, a retry changes nothing.
    Config,
    /// It may pass by itself (a lost connection, a server that starts): retry with backoff.
    Transient,
    /// Everything else: exit status 1, a person must act.
    Failure,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), hint: None, class: Class::Failure, source: None }
    }

    pub fn config(what: impl Into<String>) -> Self {
        Self { class: Class::Config, ..Self::new(what) }
    }

    pub fn transient(what: impl Into<String>) -> Self {
        Self { class: Class::Transient, ..Self::new(what) }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn source_is(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// The class of the innermost [`Error`]: context added on the way up does not change what it is.
    pub fn class(&self) -> Class {
        match self.inner() {
            Some(inner) => inner.class(),
            None => self.class,
        }
    }

    /// The whole chain as one line, hints last: `a: b: c; hint: d`.
    pub fn report(&self) -> String {
        let mut text = self.what.clone();
        let mut hints: Vec<&str> = self.hint.iter().map(String::as_str).collect();
        let mut next = StdError::source(self);
        while let Some(error) = next {
            match error.downcast_ref::<Error>() {
                Some(ours) => {
                    text.push_str(": ");
                    text.push_str(&ours.what);
                    hints.extend(ours.hint.as_deref());
                }
                None => {
                    let part = error.to_string();
                    // Some libraries print their source inside their own text; once is enough.
                    if !text.ends_with(&part) {
                        text.push_str(": ");
                        text.push_str(&part);
                    }
                }
            }
            next = error.source();
        }
        for hint in hints {
            text.push_str("; hint: ");
            text.push_str(hint);
        }
        text
    }

    fn inner(&self) -> Option<&Error> {
        self.source.as_deref()?.downcast_ref::<Error>()
    }
}

/// Adds what was being done to a failure on its way up.
pub trait Context<T> {
    /// # Errors
    /// The failure itself, behind `what`.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: StdError + Send + Sync + 'static> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::new(what()).source_is(source))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.report())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_reads_as_one_sentence_with_its_hints_last() {
        let inner = Error::transient("connect to 127.0.0.1:1").hint("is it running?");
        let outer = Err::<(), _>(inner).context(|| "start bridge".into()).unwrap_err().hint("see doctor");
        assert_eq!(outer.report(), "start bridge: connect to 127.0.0.1:1; hint: see doctor; hint: is it running?");
        assert_eq!(outer.class(), Class::Transient);
    }
}
