//! Destination templates: `billing.{type}`, with `{type}`, `{key}`, `{handler}` and `{header:NAME}`.

use crate::event::Event;

/// A destination with placeholders, parsed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Kind,
    Key,
    Handler,
    Header(String),
}

/// Which placeholder a publisher's value fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    Type,
    Key,
    Header,
}

impl Template {
    /// # Errors
    /// A sentence that names the bad placeholder or the unbalanced brace.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find(['{', '}']) {
            if rest.as_bytes()[open] == b'}' {
                return Err(format!("\"{text}\" has a }} without its {{"));
            }
            if open > 0 {
                parts.push(Part::Literal(rest[..open].to_owned()));
            }
            let inside = &rest[open + 1..];
            let close = inside.find('}').ok_or_else(|| format!("\"{text}\" has a {{ without its }}"))?;
            parts.push(match &inside[..close] {
                "type" => Part::Kind,
                "key" => Part::Key,
                "handler" => Part::Handler,
                name => match name.strip_prefix("header:") {
                    Some(header) if !header.is_empty() => Part::Header(header.to_owned()),
                    _ => {
                        return Err(format!(
                            "\"{text}\" has the unknown placeholder {{{name}}}; known are {{type}}, {{key}}, {{handler}} and {{header:NAME}}"
                        ));
                    }
                },
            });
            rest = &inside[close + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(Self { parts, text: text.to_owned() })
    }

    /// As written in the configuration.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The destination when it is the same for every event of `handler`, else `None`.
    pub fn fixed(&self, handler: &str) -> Option<String> {
        let mut out = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(text) => out.push_str(text),
                Part::Handler => out.push_str(handler),
                Part::Kind | Part::Key | Part::Header(_) => return None,
            }
        }
        Some(out)
    }

    /// The destination with `value` for whatever a publisher decides, to check the rest against a broker's rules.
    pub(super) fn sample(&self, handler: &str, value: &str) -> String {
        let part = |part: &Part| match part {
            Part::Literal(text) => text.clone(),
            Part::Handler => handler.to_owned(),
            Part::Kind | Part::Key | Part::Header(_) => value.to_owned(),
        };
        self.parts.iter().map(part).collect()
    }

    /// Fills the placeholders; `escape` rewrites each value that came from a publisher for the broker's rules.
    ///
    /// # Errors
    /// A sentence that names the placeholder the event has no value for.
    pub fn render(&self, event: &Event, handler: &str, escape: impl Fn(&str) -> String) -> Result<String, String> {
        self.render_with(event, handler, |_, value| escape(value))
    }

    /// [`render`](Self::render) for brokers that treat a type's dots unlike those of a key.
    ///
    /// # Errors
    /// A sentence that names the placeholder the event has no value for.
    pub fn render_with(
        &self,
        event: &Event,
        handler: &str,
        escape: impl Fn(Placeholder, &str) -> String,
    ) -> Result<String, String> {
        let mut out = String::with_capacity(self.text.len() + 16);
        for part in &self.parts {
            match part {
                Part::Literal(text) => out.push_str(text),
                Part::Handler => out.push_str(handler),
                Part::Kind => out.push_str(&escape(Placeholder::Type, &event.kind)),
                Part::Key => {
                    let key = event.key.as_deref().ok_or("the event has no key for {key}")?;
                    out.push_str(&escape(Placeholder::Key, key));
                }
                Part::Header(name) => {
                    let value =
                        event.header(name).ok_or_else(|| format!("the event has no header for {{header:{name}}}"))?;
                    out.push_str(&escape(Placeholder::Header, value));
                }
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Payload, PayloadFormat};

    fn event(key: Option<&str>) -> Event {
        Event {
            seq: 1,
            id: "e1".into(),
            kind: "order.paid".into(),
            key: key.map(Into::into),
            headers: vec![("Region".into(), "eu".into())],
            payload: Payload { bytes: Vec::new(), format: PayloadFormat::Text },
            created_at: time::OffsetDateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn every_placeholder_is_filled_and_only_values_are_escaped() {
        let template = Template::parse("a.{type}/{key}/{handler}/{header:region}").unwrap();
        let escape = |value: &str| value.replace('.', "_");
        assert_eq!(template.render(&event(Some("k.1")), "h", escape).unwrap(), "a.order_paid/k_1/h/eu");
        assert!(template.render(&event(None), "h", escape).unwrap_err().contains("{key}"));
        assert_eq!(template.fixed("h"), None);
        assert_eq!(Template::parse("x-{handler}").unwrap().fixed("h").as_deref(), Some("x-h"));
    }

    #[test]
    fn a_bad_template_is_named() {
        assert!(Template::parse("a{tpye}").unwrap_err().contains("{tpye}"));
        assert!(Template::parse("a{type").unwrap_err().contains("without its }"));
        assert!(Template::parse("a}").unwrap_err().contains("without its {"));
        assert!(Template::parse("{header:}").unwrap_err().contains("{header:}"));
    }
}
