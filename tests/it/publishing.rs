//! What is stored for what is published, and who gets a delivery.

use crate::installation::{Installation, all, handler, one, refusal, run, said};

on_every_server!(
    an_untyped_literal_or_parameter_is_text,
    text_json_and_bytea_are_stored_as_they_are_and_jsonb_in_its_own_text_form,
    json_that_the_server_can_read_is_stored_however_deep_it_is_nested,
    keys_are_bytes_and_two_spellings_are_two_keys,
    the_return_value_is_the_seq_of_the_event,
    the_payload_may_be_empty_but_not_null,
    an_empty_key_is_a_key_and_no_key_is_none,
    a_key_lives_in_one_lane_whatever_collation_it_comes_with,
    every_matching_handler_gets_a_delivery,
    a_star_is_one_token_and_a_greater_than_sign_the_rest,
    patterns_with_special_characters_match_themselves_only,
    handlers_override_the_match,
    an_event_without_a_handler_is_stored_and_counted_as_unrouted,
    a_handler_registered_in_mid_transaction_counts_from_the_next_publish,
    a_delivery_is_held_until_its_time,
    many_events_are_one_call,
    an_event_at_midnight_belongs_to_the_day_that_begins,
);

async fn payload(client: &tokio_postgres::Client, publish: &str) -> (String, Vec<u8>) {
    let seq: i64 = one(client, &format!("select {publish}")).await;
    let row =
        client.query_one("select format::text, payload from lanebridge.events where seq = $1", &[&seq]).await.unwrap();
    (row.get(0), row.get(1))
}

async fn an_untyped_literal_or_parameter_is_text(db: &Installation) {
    let client = db.connect().await;
    assert_eq!(payload(&client, "lanebridge.publish('t', '{\"a\": 1}')").await.0, "t");
    assert_eq!(payload(&client, "lanebridge.publish(type => 't', payload => '{}')").await.0, "t");
    assert_eq!(payload(&client, "lanebridge.publish('t', 'v'::varchar)").await.0, "t");
    let statement = client.prepare("select lanebridge.publish($1, $2)").await.unwrap();
    assert_eq!(statement.params(), [tokio_postgres::types::Type::TEXT, tokio_postgres::types::Type::TEXT]);
}

// B9: signatures over the text break when it is rewritten, so only jsonb, which has none, is.
async fn text_json_and_bytea_are_stored_as_they_are_and_jsonb_in_its_own_text_form(db: &Installation) {
    let client = db.connect().await;
    let text = r#"{"b": 1,  "a": 1.10, "a": 2e3, "n": "\u0000"} "#;
    for (cast, format) in [("text", "t"), ("json", "j")] {
        let stored = payload(&client, &format!("lanebridge.publish('t', $p${text}$p$::{cast})")).await;
        assert_eq!(stored, (format.into(), text.as_bytes().to_vec()));
    }
    let stored = payload(&client, r#"lanebridge.publish('t', '{"bb": 1,  "a": 1.10, "a": 2e3}'::jsonb)"#).await;
    assert_eq!(stored, ("j".into(), br#"{"a": 2000, "bb": 1}"#.to_vec()));
    let stored = payload(&client, r"lanebridge.publish('t', '\x00ff0d0a'::bytea)").await;
    assert_eq!(stored, ("b".into(), vec![0, 255, 13, 10]));
    let stored = payload(&client, "lanebridge.publish('t', 'é€😀')").await;
    assert_eq!(stored.1, "é€😀".as_bytes());
}

// B10. The limit is the server's, for json and jsonb alike; text and bytea have none.
async fn json_that_the_server_can_read_is_stored_however_deep_it_is_nested(db: &Installation) {
    let client = db.connect().await;
    let nested = |depth: usize| format!("repeat('[', {depth}) || repeat(']', {depth})");
    for (cast, depth) in [("json", 5_000), ("jsonb", 5_000), ("text", 200_000)] {
        let stored = payload(&client, &format!("lanebridge.publish('t', ({})::{cast})", nested(depth))).await;
        assert_eq!(stored.1.len(), 2 * depth, "{cast}");
    }
    for cast in ["json", "jsonb"] {
        let said = refusal(&client, &format!("select lanebridge.publish('t', ({})::{cast})", nested(200_000))).await;
        assert_eq!(said, "54001 stack depth limit exceeded");
    }
}

// B16: e with an accent as one character and as two, a trailing space, another case.
async fn keys_are_bytes_and_two_spellings_are_two_keys(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    let keys = [r"U&'\00e9'", r"U&'e\0301'", "'k'", "'k '", "'K'", "'😀'"];
    for key in keys {
        run(&client, &format!("select lanebridge.publish('t', 'p', {key})")).await;
    }
    let spellings = "select count(distinct (key_hash, convert_to(key, 'UTF8'))) from lanebridge.deliveries join lanebridge.events using (seq)";
    assert_eq!(one::<i64>(&client, spellings).await, 6);
    let stored: Vec<String> = all(&client, "select key from lanebridge.events order by seq").await;
    assert_eq!(stored, ["é", "e\u{301}", "k", "k ", "K", "😀"]);
}

async fn the_return_value_is_the_seq_of_the_event(db: &Installation) {
    let client = db.connect().await;
    let first: i64 = one(&client, "select lanebridge.publish('t', 'first')").await;
    let second: i64 = one(&client, "select lanebridge.publish('t', 'second', 'k')").await;
    assert!(first < second);
    let seqs: Vec<i64> = all(&client, "select seq from lanebridge.events order by payload").await;
    assert_eq!(seqs, [first, second]);
}

async fn the_payload_may_be_empty_but_not_null(db: &Installation) {
    let client = db.connect().await;
    assert_eq!(payload(&client, "lanebridge.publish('t', '')").await.1, b"");
    assert_eq!(payload(&client, "lanebridge.publish('t', ''::bytea)").await.1, b"");
    for cast in ["", "::text", "::json", "::jsonb", "::bytea"] {
        let said = refusal(&client, &format!("select lanebridge.publish('t', null{cast})")).await;
        assert_eq!(said, "22023 publish: payload must not be null");
    }
}

// H94.
async fn an_empty_key_is_a_key_and_no_key_is_none(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    run(&client, "select lanebridge.publish('t', 'p', '') from generate_series(1, 3)").await;
    run(&client, "select lanebridge.publish('t', 'p') from generate_series(1, 3)").await;
    let keyed: i64 =
        one(&client, "select count(distinct lane) from lanebridge.deliveries where key_hash is not null").await;
    let spread: i64 =
        one(&client, "select count(distinct lane) from lanebridge.deliveries where key_hash is null").await;
    assert_eq!((keyed, spread), (1, 3));
    let keys: Vec<Option<String>> = all(&client, "select distinct key from lanebridge.events order by 1").await;
    assert_eq!(keys, [Some(String::new()), None]);
}

// A hash follows the collation of its argument, and a nondeterministic one also forbids regular expressions: a column
// that ignores case must not send a key to another lane, nor fail to publish.
async fn a_key_lives_in_one_lane_whatever_collation_it_comes_with(db: &Installation) {
    let client = db.connect().await;
    let collation = "create collation ignore_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)";
    if let Err(error) = client.batch_execute(collation).await {
        assert!(said(&error).starts_with("0A000 "), "{}", said(&error));
        eprintln!("skipped: this server was built without ICU, and has no nondeterministic collation");
        return;
    }
    handler(&client, "h", &["order.*"]).await;
    run(
        &client,
        "create table customers (name text collate ignore_case);
         insert into customers values ('Ann');
         select lanebridge.publish('order.x', 'p', 'Ann');
         select lanebridge.publish('order.x', 'p', name) from customers;
         select lanebridge.publish('order.x', 'p', 'ann' collate ignore_case);
         select lanebridge.publish('order.x'::text collate ignore_case, 'p', id => name) from customers;
         select lanebridge.publish_batch(array['order.x', 'order.x'], array['p', 'p']::bytea[], array['t', 't'],
            array[name, 'ann'], null, null, null, null) from customers",
    )
    .await;
    let lanes = "select count(distinct (lane, key_hash)) from lanebridge.deliveries join lanebridge.events using (seq, lane) where key =";
    assert_eq!(one::<i64>(&client, &format!("{lanes} 'Ann'")).await, 1);
    assert_eq!(one::<i64>(&client, &format!("{lanes} 'ann'")).await, 1);
    let deliveries: i64 = one(&client, "select count(*) from lanebridge.deliveries").await;
    assert_eq!(deliveries, 6);
}

async fn every_matching_handler_gets_a_delivery(db: &Installation) {
    let client = db.connect().await;
    let a = handler(&client, "a", &["order.*", "invoice.paid"]).await;
    let b = handler(&client, "b", &[">"]).await;
    let c = handler(&client, "c", &["invoice.>"]).await;
    for (kind, ids) in [("order.paid", vec![a, b]), ("invoice.paid", vec![a, b, c]), ("invoice.a.b", vec![b, c])] {
        let publish = format!("select lanebridge.publish('{kind}', 'pp', 'kkk', '{{\"h\": \"v\"}}')");
        let seq: i64 = one(&client, &publish).await;
        let row = client.query_one("select handlers from lanebridge.events where seq = $1", &[&seq]).await.unwrap();
        assert_eq!(row.get::<_, Vec<i32>>(0), ids, "{kind}");
        let rows = client
            .query(
                "select d.handler, d.size_bytes, d.attempts, d.due_at is null and d.created_at = e.created_at
                        and d.lane = e.lane and d.key_hash = hashtextextended('kkk', 0)
                   from lanebridge.deliveries d join lanebridge.events e using (seq) where seq = $1 order by 1",
                &[&seq],
            )
            .await
            .unwrap();
        assert_eq!(rows.iter().map(|row| row.get::<_, i32>(0)).collect::<Vec<_>>(), ids, "{kind}");
        for row in rows {
            let size = "pp".len() + "kkk".len() + r#"{"h": "v"}"#.len();
            assert_eq!((row.get::<_, i32>(1), row.get::<_, i16>(2), row.get::<_, bool>(3)), (size as i32, 0, true));
        }
    }
}

/// The database's answer must be that of `Pattern::matches`, which `check` uses.
async fn matches_as_in_rust(client: &tokio_postgres::Client, patterns: &[&str], kinds: &[&str]) {
    for pattern in patterns {
        let id = handler(client, "h", &[pattern]).await;
        let rust = lanebridge::config::Pattern::parse(pattern).unwrap();
        for kind in kinds {
            client.query_one("select lanebridge.publish($1::text, ''::text)", &[kind]).await.unwrap();
            let row = client
                .query_one("select $1 = any (handlers) from lanebridge.events order by seq desc limit 1", &[&id])
                .await
                .unwrap();
            assert_eq!(row.get::<_, bool>(0), rust.matches(kind), "{pattern} on {kind}");
        }
    }
}

async fn a_star_is_one_token_and_a_greater_than_sign_the_rest(db: &Installation) {
    let client = db.connect().await;
    let patterns = ["order.*", "order.>", "*.paid", "*", ">", "a.*.c", "a.*.c.>", "*.*", "*.>", "a.b", "a.*.>"];
    let kinds = [
        "order",
        "order.",
        ".order",
        "order.paid",
        "order.paid.eu",
        "invoice.paid",
        "a.b.c",
        "a.b.d.c",
        "a.b.c.d",
        "a..c",
        "a.b",
        "a.b.x.c.d",
        ".",
        "..",
        "a..b.c",
        "é.ü",
        "orderxpaid",
    ];
    matches_as_in_rust(&client, &patterns, &kinds).await;
}

async fn patterns_with_special_characters_match_themselves_only(db: &Installation) {
    let client = db.connect().await;
    let patterns = [
        "a+b.(c)",
        "a|b",
        "^a$",
        "[a]",
        "a{2}",
        r"a\d",
        r"\Aa",
        "(?i)a",
        "***=a",
        "a_b",
        "a%b",
        "a b",
        "é",
        "€.*",
        "?",
        "$",
        "100%",
        r"back\\slash",
        "a'b",
        "a\"b",
        "(",
        "😀",
    ];
    let patterns: Vec<&str> = patterns.into_iter().filter(|p| lanebridge::config::Pattern::parse(p).is_ok()).collect();
    let kinds = ["a", "b", "A", "aa", "ab", "a1", "d", "axb", "ac", "aab.c", "anything"];
    matches_as_in_rust(&client, &patterns, &[&patterns[..], &kinds].concat()).await;
}

async fn handlers_override_the_match(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "a", &["order.*"]).await;
    let b = handler(&client, "b", &["invoice.*"]).await;
    run(&client, "select lanebridge.publish('order.x', 'p', handlers => '{b,b}')").await;
    run(&client, "select lanebridge.publish('order.x', 'p', handlers => '{}')").await;
    run(&client, r#"select lanebridge.publish_many('[{"type": "order.x", "payload": 1, "handlers": ["b"]}]')"#).await;
    assert_eq!(all::<i32>(&client, "select handler from lanebridge.deliveries").await, [b, b]);
    for (names, unknown) in [("{b,nobody}", "'nobody'"), ("{B}", "'B'"), ("{null}", "null"), ("{b,null}", "null")] {
        let said = refusal(&client, &format!("select lanebridge.publish('t', 'p', handlers => '{names}')")).await;
        assert_eq!(said, format!("22023 publish: unknown handler {unknown}"));
    }
    let many = r#"select lanebridge.publish_many('[{"type": "t", "payload": 1}, {"type": "t", "payload": 1, "handlers": ["x"]}]')"#;
    assert_eq!(refusal(&client, many).await, "22023 publish: event 1: unknown handler 'x'");
}

async fn an_event_without_a_handler_is_stored_and_counted_as_unrouted(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "a", &["order.*"]).await;
    run(&client, "select lanebridge.publish('other', 'p', 'k', id => 'unrouted')").await;
    run(&client, "select lanebridge.publish('order.x', 'p')").await;
    let unrouted: Vec<String> = all(&client, "select id from lanebridge.events where handlers = '{}'").await;
    assert_eq!(unrouted, ["unrouted"]);
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.deliveries").await, 1);
}

// A cached plan must not remember who the handlers were.
async fn a_handler_registered_in_mid_transaction_counts_from_the_next_publish(db: &Installation) {
    let mut publisher = db.connect().await;
    let other = db.connect().await;
    let transaction = publisher.transaction().await.unwrap();
    for _ in 0..10 {
        transaction.batch_execute("select lanebridge.publish('order.x', 'p')").await.unwrap();
    }
    let id = handler(&other, "a", &["order.*"]).await;
    transaction.batch_execute("select lanebridge.publish('order.x', 'p')").await.unwrap();
    handler(&other, "a", &["invoice.*"]).await;
    transaction.batch_execute("select lanebridge.publish('order.x', 'p')").await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(all::<i32>(&other, "select handler from lanebridge.deliveries").await, [id]);
}

async fn a_delivery_is_held_until_its_time(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "a", &[">"]).await;
    let held = "select due_at = '2999-01-01 00:00Z' from lanebridge.deliveries where seq = ";
    for publish in [
        "lanebridge.publish('t', 'p', deliver_at => '2999-01-01 00:00Z')",
        "seq from lanebridge.publish_batch('{t}', '{p}', '{t}', '{k}', '{null}', '{null}', '{2999-01-01 00:00Z}', '{null}')",
    ] {
        let seq: i64 = one(&client, &format!("select {publish}")).await;
        assert_eq!(one::<Option<bool>>(&client, &format!("{held}{seq}")).await, Some(true));
    }
    // A time that has passed delays nothing, nor does any time in the past.
    for past in ["2001-01-01", "-infinity", "epoch"] {
        let seq: i64 = one(&client, &format!("select lanebridge.publish('t', 'p', deliver_at => '{past}')")).await;
        let due: Option<bool> = one(&client, &format!("{held}{seq}")).await;
        assert_eq!(due, None, "{past}");
    }
    let said = refusal(&client, "select lanebridge.publish('t', 'p', 'k', deliver_at => 'infinity')").await;
    assert_eq!(said, "22023 publish: deliver_at must be a time, not infinity");
    let said = refusal(&client, "select lanebridge.publish('t', 'p', 'k', deliver_at => '10000-01-01')").await;
    assert_eq!(said, "22023 publish: deliver_at must be before the end of the year 9999");
    let many = r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "deliver_at": "infinity"}]')"#;
    assert_eq!(refusal(&client, many).await, "22023 publish: event 0: deliver_at must be a time, not infinity");
}

async fn many_events_are_one_call(db: &Installation) {
    let client = db.connect().await;
    let b = handler(&client, "b", &["never"]).await;
    let events = serde_json::json!([
        {"type": "a", "payload": {"n": 1}},
        {"type": "a", "payload": "text", "key": "k", "headers": {"traceparent": "00"}, "id": "x",
         "deliver_at": "2999-01-01T00:00:00Z", "handlers": ["b"]},
        {"type": "a", "payload": [1, null], "key": null, "headers": null, "id": null, "deliver_at": null, "handlers": null},
        {"type": "a", "payload": "again", "id": "x"},
        {"type": "a", "payload": false},
    ]);
    let new: i64 = client.query_one("select lanebridge.publish_many($1)", &[&events]).await.unwrap().get(0);
    assert_eq!(new, 4);
    let stored: Vec<String> = all(
        &client,
        "select format::text || convert_from(payload, 'UTF8') || coalesce(key, '') || coalesce(headers::text, '')
           from lanebridge.events order by seq",
    )
    .await;
    assert_eq!(stored, [r#"j{"n": 1}"#, r#"ttextk{"traceparent": "00"}"#, "j[1, null]", "jfalse"]);
    let delayed: i64 = one(
        &client,
        &format!("select count(*) from lanebridge.deliveries where handler = {b} and due_at = '2999-01-01 00:00Z'"),
    )
    .await;
    assert_eq!(delayed, 1);
    assert_eq!(one::<i64>(&client, "select lanebridge.publish_many('[]')").await, 0);
}

// Partition bounds are half open; the event of midnight has exactly one home.
async fn an_event_at_midnight_belongs_to_the_day_that_begins(db: &Installation) {
    let client = db.connect().await;
    run(
        &client,
        "insert into lanebridge.events (seq, created_at, lane, format, id, type, handlers, payload)
         select 0, (date_trunc('day', clock_timestamp() at time zone 'UTC') + interval '1 day') at time zone 'UTC',
                0, 't', 'x', 't', '{}', 'p'",
    )
    .await;
    let at_home: bool = one(
        &client,
        "select tableoid::regclass::text = 'lanebridge.events_' || to_char(created_at at time zone 'UTC', 'YYYY_MM_DD')
           from lanebridge.events",
    )
    .await;
    assert!(at_home);
}
