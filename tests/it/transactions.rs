//! Publishing belongs to the caller's transaction, whatever kind that is, and to nothing of the caller's session.

use tokio_postgres::NoTls;

use crate::installation::{Installation, all, handler, listening, one, refusal, run, script};

on_every_server!(
    a_rollback_publishes_nothing,
    a_rolled_back_savepoint_publishes_nothing,
    a_prepared_transaction_publishes_when_it_commits,
    serializable_publishers_of_different_keys_do_not_fail,
    a_read_only_transaction_is_refused_clearly,
    replica_role_changes_nothing,
    temporary_tables_and_a_hostile_search_path_swallow_nothing,
    settings_of_the_session_change_nothing,
    row_level_security_hides_nothing_from_publishing,
    triggers_and_cursors_may_publish,
    nothing_is_notified_unless_asked_for,
    a_notification_comes_with_the_commit_when_asked_for,
    publishers_notify_only_while_somebody_listens,
    two_phase_commit_is_refused_only_while_somebody_listens,
    a_listener_makes_no_publisher_wait,
    publishers_together_notify_at_most_every_ten_milliseconds,
    other_names_and_two_installations_do_not_meet,
    a_pooler_in_transaction_mode_is_no_obstacle,
);

const COUNTS: &str =
    "select (select count(*) from lanebridge.events) * 100 + (select count(*) from lanebridge.deliveries) * 10
                           + (select count(*) from lanebridge.event_ids)";

async fn a_rollback_publishes_nothing(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    run(
        &client,
        r#"begin; select lanebridge.publish('t', 'p', 'k', id => 'x');
           select lanebridge.publish_many('[{"type": "t", "payload": 1, "id": "y"}]'); rollback"#,
    )
    .await;
    assert_eq!(one::<i64>(&client, COUNTS).await, 0);
}

// H15.
async fn a_rolled_back_savepoint_publishes_nothing(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    run(
        &client,
        "begin; select lanebridge.publish('t', '1', 'k', id => 'a');
         savepoint s; select lanebridge.publish('t', '2', 'k', id => 'b'); rollback to s;
         savepoint s; select lanebridge.publish('t', '3', 'k', id => 'c'); release s;
         do $$ begin perform lanebridge.publish('t', '4', 'k', id => 'd'); raise exception 'x'; exception when others then end $$;
         commit",
    )
    .await;
    assert_eq!(all::<String>(&client, "select id from lanebridge.events order by seq").await, ["a", "c"]);
    assert_eq!(one::<i64>(&client, COUNTS).await, 222);
}

// H96.
async fn a_prepared_transaction_publishes_when_it_commits(db: &Installation) {
    let (client, other) = (db.connect().await, db.connect().await);
    handler(&client, "h", &[">"]).await;
    // Names of prepared transactions are the server's, not the database's.
    let gid = crate::services::unique("two_phase");
    let publish = r#"begin; select lanebridge.publish('t', 'p', 'k', id => 'x');
                     select lanebridge.publish_many('[{"type": "t", "payload": 1, "key": "k"}]')"#;
    run(&client, &format!("{publish}; prepare transaction '{gid}'")).await;
    assert_eq!(one::<i64>(&other, COUNTS).await, 0);
    // The key stays locked by it, across sessions.
    let said = refusal(&other, "set lock_timeout = '1ms'; select lanebridge.publish('t', 'p', 'k')").await;
    assert!(said.starts_with("55P03 "), "{said}");
    run(&other, &format!("commit prepared '{gid}'")).await;
    assert_eq!(one::<i64>(&other, COUNTS).await, 221);
    run(&client, &format!("{}; prepare transaction '{gid}'", publish.replace("'x'", "'y'"))).await;
    run(&client, &format!("rollback prepared '{gid}'")).await;
    assert_eq!(one::<i64>(&other, COUNTS).await, 221);
}

// H102: we only insert, and read the handler list, which no publisher writes.
async fn serializable_publishers_of_different_keys_do_not_fail(db: &Installation) {
    let observer = db.connect().await;
    handler(&observer, "h", &[">"]).await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..8 {
        let client = db.connect().await;
        writers.spawn(async move {
            for n in 0..50 {
                run(
                    &client,
                    &format!(
                        "begin isolation level serializable;
                         select lanebridge.publish('t', 'p', 'k{writer}');
                         select lanebridge.publish('t', 'p', id => 'i{writer}-{n}');
                         select lanebridge.publish_batch('{{t,t}}', '{{p,p}}', '{{t,t}}', '{{k{writer},null}}', null, null, null, null);
                         commit"
                    ),
                )
                .await;
            }
        });
    }
    writers.join_all().await;
    assert_eq!(one::<i64>(&observer, "select count(*) from lanebridge.events").await, 8 * 50 * 4);
}

async fn a_read_only_transaction_is_refused_clearly(db: &Installation) {
    let client = db.connect().await;
    for publish in ["lanebridge.publish('t', 'p', 'k')", r#"lanebridge.publish_many('[{"type": "t", "payload": 1}]')"#]
    {
        let said = refusal(&client, &format!("begin read only; select {publish}")).await;
        assert!(said.starts_with("25006 ") && said.ends_with("in a read-only transaction"), "{said}");
        run(&client, "rollback").await;
    }
}

// H100.
async fn replica_role_changes_nothing(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    run(&client, "set session_replication_role = replica; select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
    assert_eq!(one::<i64>(&client, COUNTS).await, 111);
}

/// Things named like ours, and like what we use, in a schema that the caller looks in first.
const HOSTILE: &str = "
create schema hostile;
create function hostile.eq(text, text) returns boolean language sql immutable as $$ select false $$;
create operator hostile.= (leftarg = text, rightarg = text, function = hostile.eq);
create operator hostile.<> (leftarg = text, rightarg = text, function = hostile.eq);
create operator hostile.~ (leftarg = text, rightarg = text, function = hostile.eq);
create function hostile.cat(text, text) returns text language sql immutable as $$ select 'hostile'::text $$;
create operator hostile.|| (leftarg = text, rightarg = text, function = hostile.cat);
create function hostile.gt(timestamptz, timestamptz) returns boolean language sql immutable as $$ select true $$;
create operator hostile.> (leftarg = timestamptz, rightarg = timestamptz, function = hostile.gt);
create function hostile.clock_timestamp() returns timestamptz language sql as $$ select '2001-01-01'::timestamptz $$;
create function hostile.nextval(regclass) returns bigint language sql as $$ select 666::bigint $$;
create function hostile.octet_length(text) returns integer language sql as $$ select 99999999 $$;
create function hostile.octet_length(bytea) returns integer language sql as $$ select 99999999 $$;
create function hostile.hashtextextended(text, bigint) returns bigint language sql as $$ select 1::bigint $$;
create function hostile.gen_random_uuid() returns uuid language sql as $$ select '00000000-0000-0000-0000-000000000000'::uuid $$;
create function hostile.pg_advisory_xact_lock(bigint) returns void language sql as $$ select $$;
create function hostile.unnest(anyarray) returns setof anyelement language sql as $$ select $1[1] where false $$;
create function hostile.convert_to(text, name) returns bytea language sql as $$ select 'hostile'::bytea $$;
create function hostile.jsonb_array_elements(jsonb) returns setof jsonb language sql as $$ select '1'::jsonb where false $$;
create function hostile.count(anyelement) returns bigint language sql as $$ select 0::bigint $$;
create domain hostile.text as pg_catalog.int4;
create domain hostile.bytea as pg_catalog.int4;
create table hostile.events (like lanebridge.events);
create table hostile.deliveries (like lanebridge.deliveries);
create table hostile.handlers (like lanebridge.handlers)";

// H99: CVE-2007-2138's class. The temporary schema is searched first for tables unless it is named last.
async fn temporary_tables_and_a_hostile_search_path_swallow_nothing(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &["order.*"]).await;
    run(&client, HOSTILE).await;
    run(
        &client,
        "create temp table events (like lanebridge.events); create temp table deliveries (like lanebridge.deliveries);
         create temp table handlers (like lanebridge.handlers); create temp table installation (like lanebridge.installation);
         create temp table event_ids (like lanebridge.event_ids); create temp sequence events_seq start 666;
         create temp table pg_class (like pg_catalog.pg_class); create temp table pg_type (like pg_catalog.pg_type)",
    )
    .await;
    for path in ["hostile, pg_catalog", "pg_temp, hostile, pg_catalog, lanebridge", "''", "nowhere"] {
        let before: i64 = one(&client, COUNTS).await;
        run(
            &client,
            &format!(
                r#"set search_path = {path};
                   select lanebridge.publish('order.x', 'p', 'k', '{{"h": "v"}}', id => pg_catalog.gen_random_uuid()::pg_catalog.text);
                   select lanebridge.publish_many('[{{"type": "order.x", "payload": 1, "key": "k"}}]');
                   reset search_path"#
            ),
        )
        .await;
        assert_eq!(one::<i64>(&client, COUNTS).await - before, 221, "{path}");
    }
    let strange: i64 = one(
        &client,
        "select count(*) from lanebridge.events where seq >= 666 or created_at < '2020-01-01' or key <> 'k'
             or lane <> hashtextextended('k', 0) & 255 or payload not in ('p', '1')",
    )
    .await;
    assert_eq!(strange, 0);
    let swallowed: i64 =
        one(&client, "select (select count(*) from pg_temp.events) + (select count(*) from hostile.events)").await;
    assert_eq!(swallowed, 0);
}

// B41.
async fn settings_of_the_session_change_nothing(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &["order.*"]).await;
    for setting in [
        "standard_conforming_strings = off",
        "bytea_output = escape",
        "datestyle = 'SQL, DMY'",
        "timezone = 'Asia/Kathmandu'",
        "intervalstyle = sql_standard",
        "transform_null_equals = on",
        "default_transaction_isolation = 'serializable'",
        "plpgsql.variable_conflict = use_variable",
        "plpgsql.extra_errors = 'all'",
        "check_function_bodies = off",
        "jit_above_cost = 0",
        "enable_indexscan = off",
        "plan_cache_mode = force_generic_plan",
        "row_security = off",
        "client_min_messages = error",
        "extra_float_digits = 0",
        "backslash_quote = off",
        "array_nulls = off",
    ] {
        let client = db.connect().await;
        let before: i64 = one(&client, COUNTS).await;
        run(
            &client,
            &format!(
                r#"set {setting};
                   select lanebridge.publish('order.x', 'p', 'k', '{{"h": "v"}}', id => gen_random_uuid()::text);
                   select lanebridge.publish_many('[{{"type": "order.x", "payload": 1, "key": "k", "headers": {{"h": "v"}}}}]')"#
            ),
        )
        .await;
        assert_eq!(one::<i64>(&client, COUNTS).await - before, 221, "{setting}");
        let said = refusal(&client, r"select lanebridge.publish('t', 'p', id => chr(10))").await;
        assert_eq!(said, "22023 publish: id holds a control character", "{setting}");
    }
}

// H101. Not to see the handlers would lose events in silence, so where the policies bind the owner too, publishing fails.
async fn row_level_security_hides_nothing_from_publishing(db: &Installation) {
    let admin = db.connect().await;
    let owner = crate::services::unique("owner");
    let publisher = crate::services::unique("publisher");
    run(
        &admin,
        &format!(
            "create role {owner}; create role {publisher} login; create schema secured authorization {owner};
             do $$ begin execute format('grant create on database %I to {owner}', current_database()); end $$"
        ),
    )
    .await;
    run(&admin, &format!("set role {owner}")).await;
    run(&admin, &script("secured", "")).await;
    run(
        &admin,
        "insert into secured.handlers (name, events, type_regex, sink, destination) values ('h', '{>}', '.', 's', 'd')",
    )
    .await;
    run(
        &admin,
        &format!(
            "grant execute on function secured.publish(text, text, text, jsonb, text, timestamptz, text[]), secured.publish_many to {publisher};
             reset role"
        ),
    )
    .await;
    let client = db.connect_as(&publisher).await;
    let publish = r#"select secured.publish('t', 'p', 'k', id => 'x'); select secured.publish_many('[{"type": "t", "payload": 1}]')"#;
    for table in ["installation", "handlers", "events", "deliveries", "event_ids"] {
        run(&admin, &format!("alter table secured.{table} enable row level security")).await;
    }
    run(&client, publish).await;
    assert_eq!(one::<i64>(&admin, "select count(*) from secured.deliveries").await, 2);
    for table in ["installation", "handlers", "events", "deliveries", "event_ids"] {
        run(&admin, &format!("alter table secured.{table} force row level security")).await;
        let said = refusal(&client, "select secured.publish('t', 'p', 'k', id => 'y')").await;
        assert!(said.starts_with("42501 ") && said.contains("row-level security"), "{table}: {said}");
        run(&admin, &format!("alter table secured.{table} no force row level security")).await;
    }
    run(&admin, &format!("drop owned by {owner} cascade; drop owned by {publisher}; drop role {owner}, {publisher}"))
        .await;
}

async fn triggers_and_cursors_may_publish(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    run(
        &client,
        "create table orders (id int primary key);
         create function announce() returns trigger language plpgsql as $$ begin
            perform lanebridge.publish('order.placed', to_jsonb(new), 'order-' || new.id); return null; end $$;
         create trigger announce after insert on orders for each row execute function announce();
         create constraint trigger late after insert on orders deferrable initially deferred for each row execute function announce();
         insert into orders select generate_series(1, 10);
         begin; declare c cursor for select lanebridge.publish('t', 'p', 'c' || n) from generate_series(1, 5) n;
         fetch 2 from c; commit",
    )
    .await;
    assert_eq!(one::<i64>(&client, COUNTS).await, 2420);
}

/// Channels that `sql` notified, as a listening session sees them.
async fn notified(db: &Installation, sql: &str) -> Vec<String> {
    notified_during(db, async { sql }).await
}

/// Channels that were notified by `publishing` and by the last statement, which it returns.
async fn notified_during(db: &Installation, publishing: impl Future<Output = &str>) -> Vec<String> {
    let (client, mut connection) = tokio_postgres::connect(&db.url(), NoTls).await.unwrap();
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(message) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let Ok(tokio_postgres::AsyncMessage::Notification(notification)) = message {
                sender.send(notification.channel().to_owned()).unwrap();
            }
        }
    });
    let channel: String = one(&client, "select lanebridge.channel()").await;
    run(&client, &format!(r#"listen "{channel}"; listen fence"#)).await;
    let last = publishing.await;
    run(&db.connect().await, last).await;
    // Notifications come in order, so that all there are come before this one.
    run(&client, "notify fence").await;
    let mut channels = Vec::new();
    loop {
        match receiver.recv().await.unwrap() {
            channel if channel == "fence" => return channels,
            channel => channels.push(channel),
        }
    }
}

async fn nothing_is_notified_unless_asked_for(db: &Installation) {
    let publish =
        r#"select lanebridge.publish('t', 'p', 'k'); select lanebridge.publish_many('[{"type": "t", "payload": 1}]')"#;
    assert_eq!(notified(db, publish).await, [""; 0]);
}

async fn a_notification_comes_with_the_commit_when_asked_for(db: &Installation) {
    listening(&db.connect().await, 60).await;
    assert_eq!(notified(db, "select lanebridge.publish('t', 'p', 'k')").await, ["lanebridge.deliveries"]);
    run(&db.connect().await, "select setval('lanebridge.notify_clock', 0)").await;
    let many = r#"select lanebridge.publish_many('[{"type": "t", "payload": 1}, {"type": "t", "payload": 1}]')"#;
    assert_eq!(notified(db, many).await, ["lanebridge.deliveries"]);
    let rolled_back =
        "begin; select setval('lanebridge.notify_clock', 0); select lanebridge.publish('t', 'p'); rollback";
    assert_eq!(notified(db, rolled_back).await, [""; 0]);
    run(&db.connect().await, "select setval('lanebridge.notify_clock', 0)").await;
    let delayed = r#"select lanebridge.publish('t', 'p', deliver_at => now() + interval '1 h');
        select lanebridge.publish_many('[{"type": "t", "payload": 1, "deliver_at": "2999-01-01"}]')"#;
    assert_eq!(notified(db, delayed).await, [""; 0], "nobody is woken for what is delayed");
    let mixed = r#"select lanebridge.publish_many('[{"type": "t", "payload": 1, "deliver_at": "2999-01-01"}, {"type": "t", "payload": 1}]')"#;
    assert_eq!(notified(db, mixed).await, ["lanebridge.deliveries"]);
    run(&db.connect().await, "select setval('lanebridge.notify_clock', 0)").await;
    let no_times = "select lanebridge.publish_batch('{t}', '{p}', '{t}', null, null, null, null, null)";
    assert_eq!(notified(db, no_times).await, ["lanebridge.deliveries"]);
    // A clock that was set back must not silence everybody until it has caught up.
    let soon =
        "select setval('lanebridge.notify_clock', (extract(epoch from clock_timestamp()) * 1000)::bigint + 60000);
                select lanebridge.publish('t', 'p')";
    assert_eq!(notified(db, soon).await, ["lanebridge.deliveries"]);
}

// The lease lapses when nobody moves it ahead, nobody shortens it for another, and only who listens moves it: otherwise
// a listener that loses every session would make publishers pay for nothing.
async fn publishers_notify_only_while_somebody_listens(db: &Installation) {
    let client = db.connect().await;
    let publish = "select lanebridge.publish('t', 'p'); select setval('lanebridge.notify_clock', 0)";
    assert!(!one::<bool>(&client, "select lanebridge.listening(60)").await, "this session does not listen");
    assert_eq!(notified(db, publish).await, [""; 0]);
    listening(&client, 600).await;
    listening(&client, 1).await;
    assert_eq!(notified(db, publish).await, ["lanebridge.deliveries"]);
    assert!(
        one::<bool>(
            &client,
            "select listening_until > clock_timestamp() + interval '500 s' from lanebridge.installation"
        )
        .await,
        "the longer lease holds"
    );
    run(&client, "update lanebridge.installation set listening_until = clock_timestamp()").await;
    assert_eq!(notified(db, publish).await, [""; 0]);
    run(&client, "discard all").await;
    assert!(!one::<bool>(&client, "select lanebridge.listening(60)").await);
    assert_eq!(notified(db, publish).await, [""; 0]);
}

// What the documentation says it costs, and that it costs nothing while nobody listens.
async fn two_phase_commit_is_refused_only_while_somebody_listens(db: &Installation) {
    let client = db.connect().await;
    let gid = crate::services::unique("notify");
    let prepare = format!("begin; select lanebridge.publish('t', 'p'); prepare transaction '{gid}'");
    run(&client, &prepare).await;
    run(&client, &format!("rollback prepared '{gid}'")).await;
    listening(&client, 600).await;
    run(&client, "select setval('lanebridge.notify_clock', 0)").await;
    let said = refusal(&client, &prepare).await;
    assert_eq!(said, "0A000 cannot PREPARE a transaction that has executed LISTEN, UNLISTEN, or NOTIFY");
}

// A publisher reads the lease; the one who moves it ahead must never make it wait.
async fn a_listener_makes_no_publisher_wait(db: &Installation) {
    let mut client = db.connect().await;
    run(&client, r#"listen "lanebridge.deliveries""#).await;
    let moving = client.transaction().await.unwrap();
    let moved: bool = moving.query_one("select lanebridge.listening(60)", &[]).await.unwrap().get(0);
    assert!(moved);
    run(&db.connect().await, "set lock_timeout = '100ms'; select lanebridge.publish('t', 'p', 'k')").await;
    moving.rollback().await.unwrap();
}

// At most a hundred a second over all sessions, whatever they publish.
async fn publishers_together_notify_at_most_every_ten_milliseconds(db: &Installation) {
    listening(&db.connect().await, 600).await;
    let began = std::time::Instant::now();
    let publishing = async {
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let client = db.connect().await;
            clients.spawn(async move {
                for _ in 0..150 {
                    client.batch_execute("select lanebridge.publish('t', 'p')").await.unwrap();
                }
            });
        }
        clients.join_all().await;
        "select 1"
    };
    let count = notified_during(db, publishing).await.len();
    let most = began.elapsed().as_millis() / 10 + 1;
    // Two that look at the same moment both speak, which is rare.
    assert!(count > 0 && count as u128 <= most + most / 4 + 3, "{count} notifications, {most} at most");
}

// B20.
async fn other_names_and_two_installations_do_not_meet(db: &Installation) {
    let client = db.connect().await;
    let long = "s".repeat(63);
    let names = [("select", "table_"), ("lanebridge", "b_"), (long.as_str(), ""), ("_1", "user")];
    for (schema, prefix) in names {
        run(&client, &script(schema, prefix)).await;
    }
    for (n, (schema, prefix)) in names.iter().enumerate() {
        let at = |name: &str| format!("\"{schema}\".\"{prefix}{name}\"");
        let registration = r#"[{"name": "h", "events": [">"], "type_regex": ".", "ordered": true, "blocks": true, "sink": "s", "destination": "d"}]"#;
        run(&client, &format!("select {}('{registration}')", at("register_handlers"))).await;
        for event in 0..=n {
            run(&client, &format!("select {}('t', 'p', 'k', id => 'x{event}')", at("publish"))).await;
        }
        run(
            &client,
            &format!(
                r#"select {}('[{{"type": "t", "payload": 1, "key": "j", "handlers": ["h"]}}]')"#,
                at("publish_many")
            ),
        )
        .await;
        let epoch: i64 = one(&client, &format!("select {}('b', 'i', 'v')", at("register_bridge"))).await;
        run(
            &client,
            &format!(
                "select {}({epoch}, '{{0}}'); select {}({epoch}); select {}('{{0}}', 256); select {}(10); select {}('0 days');
                 select {}({epoch}, '{{0}}', 10); select {}('h', '{{1}}'); select count(*) from {}();
                 select {}({epoch}, '{{0}}'); select {}('{{0}}'); select {}({epoch}, 0, 0); select {}({epoch})",
                at("take_lanes"), at("heartbeat"), at("lock_lanes"), at("ensure_partitions"), at("drop_partitions"),
                at("promote"), at("requeue"), at("peers"), at("release_lanes"), at("unlock_lanes"), at("end_frozen"),
                at("leave"),
            ),
        )
        .await;
    }
    for (n, (schema, prefix)) in names.iter().enumerate() {
        let deliveries = format!("select count(*) from \"{schema}\".\"{prefix}deliveries\"");
        assert_eq!(one::<i64>(&client, &deliveries).await, n as i64 + 2, "{schema}.{prefix}");
    }
    let channels: i64 = one(
        &client,
        &format!("select count(distinct octet_length(c)) from (values (\"select\".table_channel()), ({long}.channel())) v(c) where octet_length(c) <= 63"),
    )
    .await;
    assert_eq!(channels, 2);
}

// A pooler gives every transaction another session; a simulated one, that hands the session's settings on.
async fn a_pooler_in_transaction_mode_is_no_obstacle(db: &Installation) {
    let sessions = [db.connect().await, db.connect().await];
    handler(&sessions[0], "h", &[">"]).await;
    for n in 0..20 {
        run(&sessions[n % 2], &format!("begin; select lanebridge.publish('t', 'p', 'k{}'); commit", n % 3)).await;
        run(&sessions[(n / 2) % 2], "select lanebridge.publish('t', 'p', 'k0')").await;
    }
    let disorder: i64 = one(
        &sessions[0],
        "select count(*) from lanebridge.events where seq not in (select seq from lanebridge.deliveries)",
    )
    .await;
    assert_eq!((disorder, one::<i64>(&sessions[1], COUNTS).await), (0, 4400));
}
