//! What is refused, with the limit or the rule in the message. Every limit is tried at and beyond.

use tokio_postgres::Client;

use crate::installation::{Installation, one, refusal, run};

on_every_server!(
    a_type_is_needed_and_has_limits,
    a_payload_has_the_configured_limit,
    a_key_has_a_limit,
    an_id_is_not_empty_and_has_limits,
    headers_are_an_object_of_strings,
    a_header_name_is_a_token_and_not_ours,
    a_header_value_has_no_control_character,
    headers_have_limits,
    a_nul_is_refused_wherever_it_is,
    a_batch_names_the_event_and_stores_nothing,
    a_batch_of_arrays_must_be_complete,
    an_element_of_publish_many_is_named_by_its_index,
);

/// `problem` from every way to publish: `event` is `type, payload, key, headers, id` in SQL.
async fn refused(client: &Client, event: [&str; 5], problem: &str) {
    let [kind, payload, key, headers, id] = event;
    let one = format!("select lanebridge.publish({kind}, {payload}, {key}, {headers}, {id})");
    assert_eq!(refusal(client, &one).await, format!("22023 publish: {problem}"));
    let batch = format!(
        "select lanebridge.publish_batch(array['t', {kind}], array['p', convert_to({payload}, 'UTF8')], '{{t,t}}',
            array[null, {key}], array[null, {headers}]::jsonb[], array[null, {id}], null, null)"
    );
    assert_eq!(refusal(client, &batch).await, format!("22023 publish: event 1: {problem}"));
}

async fn passes(client: &Client, event: [&str; 5]) {
    let [kind, payload, key, headers, id] = event;
    run(client, &format!("select lanebridge.publish({kind}, {payload}, {key}, {headers}, {id})")).await;
}

async fn a_type_is_needed_and_has_limits(db: &Installation) {
    let client = db.connect().await;
    let with = |kind: &'static str| [kind, "'p'", "null", "null", "null"];
    refused(&client, with("null::text"), "type must not be null or empty").await;
    refused(&client, with("''"), "type must not be null or empty").await;
    passes(&client, with("repeat('é', 127) || 'x'")).await;
    refused(&client, with("repeat('é', 128)"), "type has 256 bytes; the limit is 255").await;
    for control in [r"E'a\nb'", r"E'a\x01'", r"E'\x7f'", r"E'a\t'", r"E'a\n'"] {
        refused(&client, with(control), "type holds a control character").await;
    }
}

async fn a_payload_has_the_configured_limit(db: &Installation) {
    let client = db.connect().await;
    let with = |payload: &'static str| ["'t'", payload, "null", "null", "null"];
    refused(&client, with("null::text"), "payload must not be null").await;
    passes(&client, with("repeat('x', 1048576)")).await;
    refused(&client, with("repeat('x', 1048577)"), "payload has 1048577 bytes; max_payload_bytes is 1048576").await;
    let said = refusal(&client, "select lanebridge.publish('t', convert_to(repeat('x', 1048577), 'UTF8'))").await;
    assert_eq!(said, "22023 publish: payload has 1048577 bytes; max_payload_bytes is 1048576");
    // B5.
    refused(&client, with("repeat('x', 104857600)"), "payload has 104857600 bytes; max_payload_bytes is 1048576").await;
    // Bytes, not characters; and what the bridge's configuration says counts from the next publish on.
    run(&client, "update lanebridge.installation set max_payload_bytes = 4").await;
    passes(&client, with("'éé'")).await;
    refused(&client, with("'ééé'"), "payload has 6 bytes; max_payload_bytes is 4").await;
    let many = r#"select lanebridge.publish_many('[{"type": "t", "payload": [1, 2]}]')"#;
    let said = refusal(&client, many).await;
    assert_eq!(said, "22023 publish: event 0: payload has 6 bytes; max_payload_bytes is 4");
}

async fn a_key_has_a_limit(db: &Installation) {
    let client = db.connect().await;
    let with = |key: &'static str| ["'t'", "'p'", key, "null", "null"];
    passes(&client, with("repeat('x', 4096)")).await;
    passes(&client, with(r"E'😀 \n\t .*> '")).await;
    refused(&client, with("repeat('x', 4097)"), "key has 4097 bytes; the limit is 4096").await;
}

async fn an_id_is_not_empty_and_has_limits(db: &Installation) {
    let client = db.connect().await;
    let with = |id: &'static str| ["'t'", "'p'", "null", "null", id];
    passes(&client, with("repeat('x', 512)")).await;
    refused(&client, with("''"), "id must not be empty").await;
    refused(&client, with("repeat('x', 513)"), "id has 513 bytes; the limit is 512").await;
    refused(&client, with(r"E'a\r'"), "id holds a control character").await;
}

async fn headers_are_an_object_of_strings(db: &Installation) {
    let client = db.connect().await;
    let with = |headers: &'static str| ["'t'", "'p'", "null", headers, "null"];
    for (json, kind) in [("[]", "array"), ("\"x\"", "string"), ("1", "number"), ("true", "boolean"), ("null", "null")] {
        let problem = format!("headers must be a JSON object of strings, not {kind}");
        let headers: &'static str = format!("'{json}'::jsonb").leak();
        refused(&client, with(headers), &problem).await;
    }
    for (json, kind) in [("1", "number"), ("null", "null"), ("{}", "object"), ("[\"x\"]", "array"), ("true", "boolean")]
    {
        let headers: &'static str = format!("'{{\"h\": {json}}}'::jsonb").leak();
        refused(&client, with(headers), &format!("header 'h' must be a string, not {kind}")).await;
    }
    passes(&client, with("'{}'::jsonb")).await;
    passes(
        &client,
        with(r#"'{"traceparent": "00-4bf9", "empty": "", "content-type": "text/plain", "é": "x"}'::jsonb - 'é'"#),
    )
    .await;
}

async fn a_header_name_is_a_token_and_not_ours(db: &Installation) {
    let client = db.connect().await;
    let with = |name: &str| -> [&'static str; 5] {
        ["'t'", "'p'", "null", format!("jsonb_build_object({name}, 'v')").leak(), "null"]
    };
    for name in ["''", "'a b'", "'a:b'", r"E'a\r\nb'", r"E'a\n'", "'é'", "'a\"'", "'(a)'"] {
        let problem = "header name {} is not 1 to 128 of letters, digits and !#$%&'*+.^_`|~-";
        let quoted: String = one(&client, &format!("select quote_literal({name})")).await;
        refused(&client, with(name), &problem.replace("{}", &quoted)).await;
    }
    passes(&client, with("repeat('x', 128)")).await;
    passes(&client, with("'!#$%&''*+.^_`|~-09azAZ'")).await;
    let long = format!("header name '{}' is not 1 to 128 of letters, digits and !#$%&'*+.^_`|~-", "x".repeat(60));
    refused(&client, with("repeat('x', 129)"), &long).await;
    for name in [
        "ce_id",
        "CE-type",
        "ce-",
        "Nats-Msg-Id",
        "nats-rollup",
        "NATS-x",
        "lanebridge",
        "LaneBridge-x",
        "LANEBRIDGE",
        "data",
        "Data",
    ] {
        let problem = format!("header name '{name}' is reserved (ce_, ce-, nats-, lanebridge, data)");
        refused(&client, with(&format!("'{name}'")), &problem).await;
    }
    for name in ["ce", "cex", "nats", "x-nats-y", "database", "x-lanebridge"] {
        passes(&client, with(&format!("'{name}'"))).await;
    }
}

// B13: a line break in a value is another header on NATS, or a panic of its client.
async fn a_header_value_has_no_control_character(db: &Installation) {
    let client = db.connect().await;
    for value in [r"E'a\r\nNats-Rollup: all'", r"E'a\n'", r"E'\t'", r"E'\x7f'", r"E'\x01'"] {
        let headers: &'static str = format!("jsonb_build_object('h', {value})").leak();
        let problem = "the value of header 'h' holds a control character";
        refused(&client, ["'t'", "'p'", "null", headers, "null"], problem).await;
    }
    passes(&client, ["'t'", "'p'", "null", r#"'{"h": " é€😀 \" : "}'::jsonb"#, "null"]).await;
}

async fn headers_have_limits(db: &Installation) {
    let client = db.connect().await;
    let with = |headers: &str| -> [&'static str; 5] { ["'t'", "'p'", "null", headers.to_owned().leak(), "null"] };
    let many = |n: i32| format!("(select jsonb_object_agg('h' || i, '') from generate_series(1, {n}) i)");
    passes(&client, with(&many(64))).await;
    let problem = "65 headers of 186 bytes; the limits are 64 headers and 16384 bytes";
    refused(&client, with(&many(65)), problem).await;
    passes(&client, with("jsonb_build_object('h', repeat('x', 16383))")).await;
    let problem = "1 headers of 16385 bytes; the limits are 64 headers and 16384 bytes";
    refused(&client, with("jsonb_build_object('h', repeat('x', 16384))"), problem).await;
}

// B7, B8. The server refuses them before we are called; json, which keeps the six characters, is a payload like any.
async fn a_nul_is_refused_wherever_it_is(db: &Installation) {
    let client = db.connect().await;
    let nul = "a\0b";
    let ok = "x";
    for (kind, payload, key, id) in [(nul, ok, ok, ok), (ok, nul, ok, ok), (ok, ok, nul, ok), (ok, ok, ok, nul)] {
        let error = client
            .query_one("select lanebridge.publish($1::text, $2::text, $3, id => $4)", &[&kind, &payload, &key, &id])
            .await
            .unwrap_err();
        assert_eq!(error.code().map(|code| code.code()), Some("22021"), "{error}");
    }
    for event in [
        r#"{"type": "t", "payload": "\u0000"}"#,
        r#"{"type": "t", "payload": 1, "key": "\u0000"}"#,
        r#"{"type": "t", "payload": 1, "headers": {"h": "\u0000"}}"#,
    ] {
        let said = refusal(&client, &format!("select lanebridge.publish_many('[{event}]')")).await;
        assert!(said.starts_with("22P05 "), "{said}");
    }
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.events").await, 0);
}

async fn a_batch_names_the_event_and_stores_nothing(db: &Installation) {
    let client = db.connect().await;
    let many =
        r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "x"}, {"type": "", "payload": 1}]')"#;
    assert_eq!(refusal(&client, many).await, "22023 publish: event 1: type must not be null or empty");
    assert_eq!(
        one::<i64>(
            &client,
            "select (select count(*) from lanebridge.events) + (select count(*) from lanebridge.event_ids)"
        )
        .await,
        0
    );
}

async fn a_batch_of_arrays_must_be_complete(db: &Installation) {
    let client = db.connect().await;
    let batch = |arguments: &str| format!("select count(*) from lanebridge.publish_batch({arguments})");
    for missing in ["null, '{p}', '{t}'", "'{t}', null, '{t}'", "'{t}', '{p}', null"] {
        let said = refusal(&client, &batch(&format!("{missing}, null, null, null, null, null"))).await;
        assert_eq!(said, "22023 publish_batch: types, payloads and formats must not be null");
    }
    for short in [
        "'{t,t}', '{p}', '{t,t}', null, null, null, null, null",
        "'{}', '{p}', '{}', null, null, null, null, null",
        "'{t}', '{p}', '{t}', '{}', null, null, null, null",
        "'{t}', '{p}', '{t}', null, '{null,null}', null, null, null",
        "'{t}', '{p}', '{t}', null, null, '{a,b}', null, null",
        "'{t}', '{p}', '{t}', null, null, null, '{}', null",
        "'{t}', '{p}', '{t}', null, null, null, null, '{}'",
    ] {
        assert_eq!(refusal(&client, &batch(short)).await, "22023 publish_batch: the arrays differ in length");
    }
    for format in ["x", "json", "", "null"] {
        let said =
            refusal(&client, &batch(&format!("'{{t}}', '{{p}}', array['{format}'], null, null, null, null, null")))
                .await;
        assert_eq!(said, "22023 publish: event 0: format must be j, t or b");
    }
    let said = refusal(&client, &batch("'{t}', '{p}', '{t}', null, null, null, null, array['1'::jsonb]")).await;
    assert_eq!(said, "22023 publish: event 0: handlers must be an array of names");
    assert_eq!(one::<i64>(&client, &batch("'{}', '{}', '{}', null, null, null, null, null")).await, 0);
    // Where an array begins does not matter.
    run(&client, &batch("'[0:1]={t,t}', '[3:4]={p,q}', '{t,t}', '[0:1]={k,l}', null, '[7:8]={x,y}', null, null")).await;
    let seqs: i64 = one(&client, &batch("'{t,t}', '{p,q}', '{t,t}', null, null, '[0:1]={x,y}', null, null")).await;
    assert_eq!((seqs, one::<i64>(&client, "select count(*) from lanebridge.events").await), (2, 2));
}

async fn an_element_of_publish_many_is_named_by_its_index(db: &Installation) {
    let client = db.connect().await;
    let good = r#"{"type": "t", "payload": 1}"#;
    for (element, problem) in [
        ("1", "an object is expected, not number"),
        ("null", "an object is expected, not null"),
        ("[]", "an object is expected, not array"),
        (r#"{"type": "t"}"#, "payload is missing"),
        (r#"{"type": "t", "payload": null}"#, "payload must not be null"),
        (r#"{"type": "t", "payload": 1, "topic": "x"}"#, "unknown field 'topic'"),
        (r#"{"type": 1, "payload": 1}"#, "type must be a string, not number"),
        (r#"{"type": "t", "payload": 1, "key": 7}"#, "key must be a string, not number"),
        (r#"{"type": "t", "payload": 1, "id": {}}"#, "id must be a string, not object"),
        (r#"{"type": "t", "payload": 1, "deliver_at": 1}"#, "deliver_at must be a string, not number"),
        (r#"{"type": "t", "payload": 1, "handlers": "h"}"#, "handlers must be an array of names"),
        (
            r#"{"type": "t", "payload": 1, "deliver_at": "soon"}"#,
            "deliver_at: invalid input syntax for type timestamp with time zone: \"soon\"",
        ),
        (
            r#"{"type": "t", "payload": 1, "deliver_at": "2026-02-31"}"#,
            "deliver_at: date/time field value out of range: \"2026-02-31\"",
        ),
    ] {
        let said = refusal(&client, &format!("select lanebridge.publish_many('[{good}, {element}, {good}]')")).await;
        assert_eq!(said, format!("22023 publish_many: event 1: {problem}"));
    }
    for (element, problem) in [
        (r#"{"payload": 1}"#, "type must not be null or empty"),
        (r#"{"type": null, "payload": 1}"#, "type must not be null or empty"),
        (r#"{"type": "t", "payload": 1, "headers": []}"#, "headers must be a JSON object of strings, not array"),
        (r#"{"type": "t", "payload": 1, "handlers": [1]}"#, "unknown handler '1'"),
        (r#"{"type": "t", "payload": 1, "handlers": [null]}"#, "unknown handler null"),
    ] {
        let said = refusal(&client, &format!("select lanebridge.publish_many('[{good}, {element}, {good}]')")).await;
        assert_eq!(said, format!("22023 publish: event 1: {problem}"));
    }
    for (events, kind) in [("'{}'", "object"), ("'1'", "number"), ("null", "null"), ("'null'", "null")] {
        let said = refusal(&client, &format!("select lanebridge.publish_many({events})")).await;
        assert_eq!(said, format!("22023 publish_many: events must be a JSON array, not {kind}"));
    }
}
