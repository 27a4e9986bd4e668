//! Where the schema and the table prefix enter SQL: the only text that is ever spliced into a statement.
//!
//! Both come from a validated configuration (`[a-z_][a-z0-9_]*`); everything else travels as a parameter.

use crate::config;

/// Schema and table prefix, ready to be written into statements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    schema: String,
    prefix: String,
}

impl Names {
    pub fn new(postgres: &config::Postgres) -> Self {
        Self { schema: postgres.schema.clone(), prefix: postgres.table_prefix.clone() }
    }

    pub fn schema(&self) -> &str {
        &self.schema
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The publication of the events, unquoted; as migration 4 names it.
    pub fn publication(&self) -> String {
        let name = format!("{}_{}wal", self.schema, self.prefix);
        name.chars().take(63).collect()
    }

    /// The statement with its placeholders filled in; render once at start and keep the result.
    ///
    /// `{schema}` becomes the double-quoted schema and `{p}` the prefix, so that `{schema}.{p}events` reads
    /// `"lanebridge".events`. `{schema_text}` and `{p_text}` are for the inside of a string literal. Any other
    /// brace stays as it is: SQL has array literals and JSON of its own.
    pub fn render(&self, sql: &str) -> String {
        let quoted = format!("\"{}\"", self.schema.replace('"', "\"\""));
        let placeholders = [
            ("{schema}", quoted),
            ("{p}", self.prefix.clone()),
            ("{schema_text}", self.schema.replace('\'', "''")),
            ("{p_text}", self.prefix.replace('\'', "''")),
        ];
        let mut rendered = String::with_capacity(sql.len() + 256);
        let mut rest = sql;
        // One pass from left to right: what was put in is never looked at again.
        while let Some(brace) = rest.find('{') {
            rendered.push_str(&rest[..brace]);
            rest = &rest[brace..];
            let (taken, value) = placeholders
                .iter()
                .find(|(placeholder, _)| rest.starts_with(placeholder))
                .map_or((1, "{"), |(placeholder, value)| (placeholder.len(), value.as_str()));
            rendered.push_str(value);
            rest = &rest[taken..];
        }
        rendered.push_str(rest);
        rendered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(schema: &str, prefix: &str) -> Names {
        Names { schema: schema.into(), prefix: prefix.into() }
    }

    #[test]
    fn the_four_placeholders_are_filled_in() {
        let sql = "select '{schema_text}.{p_text}x' from {schema}.{p}events";
        assert_eq!(names("lanebridge", "").render(sql), r#"select 'lanebridge.x' from "lanebridge".events"#);
        assert_eq!(names("app", "lb_").render(sql), r#"select 'app.lb_x' from "app".lb_events"#);
    }

    #[test]
    fn other_braces_stay() {
        let sql = "select '{}'::int[], '{\"a\": {}}', '{schemas}', '{ p }', '{é', '{";
        assert_eq!(names("s", "t_").render(sql), sql);
    }

    #[test]
    fn a_placeholder_inside_a_value_is_not_filled_in_again() {
        assert_eq!(names("{p}", "x").render("{schema}{p}"), r#""{p}"x"#);
    }

    #[test]
    fn quotes_cannot_leave_their_place() {
        assert_eq!(names("a\"b'c", "").render("{schema} '{schema_text}'"), "\"a\"\"b'c\" 'a\"b''c'");
    }
}
