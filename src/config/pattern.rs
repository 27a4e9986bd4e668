//! Event patterns: dot-separated tokens, `*` is exactly one token, `>` at the end is one or more.

use std::fmt;

/// A checked pattern. The database matches it as a regular expression, from [`Pattern::to_regex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    /// # Errors
    /// A sentence that names the rule that `text` breaks.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("an empty pattern matches nothing".into());
        }
        let tokens: Vec<&str> = text.split('.').collect();
        for (i, token) in tokens.iter().enumerate() {
            match *token {
                "" => return Err(format!("\"{text}\" has an empty token")),
                ">" if i + 1 < tokens.len() => return Err(format!("\"{text}\" has > before its last token")),
                "*" | ">" => {}
                token if token.contains(['*', '>']) => {
                    return Err(format!("\"{text}\" mixes a wildcard with text in the token \"{token}\""));
                }
                token if token.contains('\0') => return Err(format!("\"{}\" holds a NUL", text.escape_debug())),
                _ => {}
            }
        }
        Ok(Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The same rule as a POSIX regular expression without anchors, e.g. `order\.[^.]+`.
    pub fn to_regex(&self) -> String {
        let tokens = self.0.split('.').map(|token| match token {
            "*" => "[^.]+".to_owned(),
            ">" => ".+".to_owned(),
            text => text
                .chars()
                .flat_map(|c| {
                    let plain = c.is_alphanumeric() || c == '_' || c == '-';
                    (!plain).then_some('\\').into_iter().chain([c])
                })
                .collect(),
        });
        tokens.collect::<Vec<_>>().join("\\.")
    }

    /// Whether an event type matches; the twin of the regular expression, for `check` and tests.
    pub fn matches(&self, kind: &str) -> bool {
        let mut tokens = kind.split('.');
        for rule in self.0.split('.') {
            match (rule, tokens.next()) {
                (">", Some(first)) => return !first.is_empty() || tokens.next().is_some(),
                ("*", Some(token)) if !token.is_empty() => {}
                (text, Some(token)) if text == token && text != "*" => {}
                _ => return false,
            }
        }
        tokens.next().is_none()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_one_token_and_a_greater_than_sign_the_rest() {
        let rule = |pattern: &str, kind: &str| Pattern::parse(pattern).unwrap().matches(kind);
        assert!(rule("order.*", "order.paid"));
        assert!(!rule("order.*", "order.paid.eu"));
        assert!(!rule("order.*", "order."));
        assert!(rule("invoice.>", "invoice.a.b"));
        assert!(!rule("invoice.>", "invoice"));
        assert!(rule(">", "anything"));
        assert!(rule("a.b", "a.b"));
        assert!(!rule("a.b", "a.c"));
    }

    #[test]
    fn a_regex_escapes_all_that_is_special() {
        assert_eq!(Pattern::parse("a+b.*.>").unwrap().to_regex(), r"a\+b\.[^.]+\..+");
    }

    #[test]
    fn a_bad_pattern_is_named() {
        for (bad, part) in [("", "empty"), ("a..b", "empty token"), (">.a", "before its last"), ("a*", "mixes")] {
            assert!(Pattern::parse(bad).unwrap_err().contains(part), "{bad}");
        }
    }
}
