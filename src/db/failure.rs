//! What Postgres answered, as a [`crate::error::Error`]: the text, its SQLSTATE, and who can end it.
//!
//! DETAIL and CONTEXT are dropped, because they hold the contents of rows: no payload reaches a log (5.7).

use std::error::Error as StdError;
use std::fmt;

use crate::error::{Class, Error};

/// SQLSTATE of a write by an epoch that was fenced.
pub(crate) const FENCED: &str = "LB001";

/// The answer of the server, kept in the chain so that [`sqlstate`] finds its code.
#[derive(Debug)]
struct Answer {
    message: String,
    code: String,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.code)
    }
}

impl StdError for Answer {}

/// The SQLSTATE of the server's answer somewhere in this chain, five characters.
pub fn sqlstate(error: &Error) -> Option<&str> {
    let mut next = StdError::source(error);
    while let Some(source) = next {
        if let Some(answer) = source.downcast_ref::<Answer>() {
            return Some(&answer.code);
        }
        next = source.source();
    }
    None
}

/// `what` was being done when Postgres, or the way to it, failed.
pub(super) fn failure(what: String, source: tokio_postgres::Error) -> Error {
    if let Some(answer) = source.as_db_error() {
        let (message, code) = (answer.message().to_owned(), answer.code().code().to_owned());
        return answered(what, message, code, answer.hint().map(str::to_owned));
    }
    match class(&source) {
        Class::Config => Error::config(what),
        Class::Transient => Error::transient(what),
        Class::Failure => Error::new(what),
    }
    .source_is(source)
}

/// `what` was being done when the server answered with an error on a connection of our own.
pub(super) fn answered(what: String, message: String, code: String, hint: Option<String>) -> Error {
    let base = match class_of_code(&code) {
        Class::Config => Error::config(what),
        Class::Transient => Error::transient(what),
        Class::Failure => Error::new(what),
    };
    let base = match hint {
        Some(hint) => base.hint(hint),
        None => base,
    };
    base.source_is(Answer { message, code })
}

/// The same for what the socket said.
pub(super) fn broken(what: String, source: std::io::Error) -> Error {
    match class_of_io(&source) {
        Class::Failure => Error::new(what).source_is(source),
        _ => Error::transient(what).source_is(source),
    }
}

fn class_of_io(io: &std::io::Error) -> Class {
    // A certificate that does not verify stays that way until a person acts; every other failure of the connection
    // may pass.
    let tls = io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(_)) => Class::Failure,
        _ => Class::Transient,
    }
}

fn class(error: &tokio_postgres::Error) -> Class {
    if let Some(code) = error.code() {
        return class_of_code(code.code());
    }
    if error.is_closed() {
        return Class::Transient;
    }
    let mut next = StdError::source(error);
    while let Some(source) = next {
        if let Some(io) = source.downcast_ref::<std::io::Error>() {
            return class_of_io(io);
        }
        next = source.source();
    }
    Class::Failure
}

/// Source: the appendix "PostgreSQL Error Codes" of the manual.
fn class_of_code(code: &str) -> Class {
    match code {
        // Serialization failure, deadlock, lock timeout, statement timeout or cancel.
        "40001" | "40P01" | "55P03" | "57014" => Class::Transient,
        // Shut down, crashed, still starting; read only, which is what a failover looks like from inside.
        "57P01" | "57P02" | "57P03" | "25006" => Class::Transient,
        // Ended for idling: by a setting that was changed while we ran.
        "57P05" | "25P03" | "25P04" => Class::Transient,
        // A database that accepts no connections: ALTER DATABASE ... ALLOW_CONNECTIONS false, while it is moved, say.
        "55000" => Class::Transient,
        // Connection exceptions; too many connections, disk full, out of memory.
        _ if code.starts_with("08") || code.starts_with("53") => Class::Transient,
        // Wrong password, unknown role, no line in pg_hba.conf; no such database.
        "3D000" => Class::Config,
        _ if code.starts_with("28") => Class::Config,
        _ => Class::Failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Context;

    #[test]
    fn what_may_pass_is_transient_and_what_needs_a_person_is_not() {
        let transient = [
            "08006", "08P01", "53300", "53100", "57P01", "57P02", "57P03", "40001", "40P01", "55P03", "57014", "25006",
            "55000",
        ];
        for code in transient {
            assert_eq!(class_of_code(code), Class::Transient, "{code}");
        }
        for code in ["28P01", "28000", "3D000"] {
            assert_eq!(class_of_code(code), Class::Config, "{code}");
        }
        for code in ["42501", "42P01", "23505", "25001", "57000", "XX000"] {
            assert_eq!(class_of_code(code), Class::Failure, "{code}");
        }
    }

    #[test]
    fn the_sqlstate_is_found_through_added_context() {
        let answer = Answer { message: "permission denied for table events".into(), code: "42501".into() };
        let error = Error::new("Postgres at h:1").source_is(answer);
        let error = Err::<(), _>(error).context(|| "poll lane 3".into()).unwrap_err();
        assert_eq!(sqlstate(&error), Some("42501"));
        assert_eq!(error.report(), "poll lane 3: Postgres at h:1: permission denied for table events (SQLSTATE 42501)");
        assert_eq!(sqlstate(&Error::new("no answer at all")), None);
    }
}
