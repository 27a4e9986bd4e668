//! `${NAME}` and `${NAME:-default}` inside a string of the configuration.
//!
//! It works on parsed strings only, never on the file's text, so that no value can change the structure. It runs
//! once: what comes out of the environment is taken as it is. `$$` is one `$`; a `$` before anything else is itself.
//! A variable that is set but empty counts as unset, because that is what a missing secret looks like in most shells.

/// The string with its variables filled in, and whether there were any.
///
/// # Errors
/// A sentence that names the variable or the broken syntax; it never holds a value from the environment.
pub(super) fn interpolate(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<(String, bool), String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut filled = false;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some(inside) = rest.strip_prefix('{') {
            let close = inside.find('}').ok_or("has a ${ without its }; hint: write $$ for a literal $")?;
            out.push_str(&variable(&inside[..close], env)?);
            filled = true;
            rest = &inside[close + 1..];
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    Ok((out, filled))
}

fn variable(inside: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !plain || name.is_empty() || name.as_bytes()[0].is_ascii_digit() {
        // Not shown: what stands here by mistake may be part of a password that holds "${".
        return Err("has a ${...} whose name is not letters, digits and _; hint: write $$ for a literal $".to_owned());
    }
    env(name).filter(|value| !value.is_empty()).or_else(|| default.map(str::to_owned)).ok_or_else(|| {
        format!("needs the environment variable {name}, which is unset or empty; hint: set it, or write ${{{name}:-default}}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(text: &str) -> Result<(String, bool), String> {
        interpolate(text, &|name| match name {
            "A" => Some("a\"\n${B}".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn a_value_is_taken_as_it_is_and_only_once() {
        assert_eq!(filled("x${A}y").unwrap(), ("xa\"\n${B}y".to_owned(), true));
        assert_eq!(filled("${B:-d}${EMPTY:-e}${B:-}").unwrap(), ("de".to_owned(), true));
        assert_eq!(filled("pa$$$$w$0rd$$").unwrap(), ("pa$$w$0rd$".to_owned(), false));
        assert_eq!(filled("$${A}").unwrap(), ("${A}".to_owned(), false));
    }

    #[test]
    fn an_unset_or_empty_variable_without_default_is_named() {
        for text in ["${MISSING}", "${EMPTY}"] {
            let name = &text[2..text.len() - 1];
            assert!(filled(text).unwrap_err().contains(name));
        }
        for text in ["${A", "${}", "${1A}", "${A B}", "${:-x}"] {
            assert!(filled(text).unwrap_err().contains("${"), "{text}");
        }
    }
}
