//! Keyed events: seq order is commit order, at a bounded price in locks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::installation::{Installation, all, one, pid, refusal, run, said, waits};
use crate::services::unique;

on_every_server!(
    a_publish_that_began_after_a_commit_has_the_higher_seq,
    publishing_a_key_waits_for_open_transactions_of_that_key_only,
    batches_with_opposite_key_orders_do_not_deadlock,
    a_call_with_100_000_distinct_keys_works_with_default_settings,
    single_calls_with_300_distinct_keys_in_a_transaction_work,
    publishing_few_keys_often_never_takes_whole_lanes,
    a_transaction_past_the_limit_excludes_one_below_it,
    a_key_locked_in_a_rolled_back_savepoint_is_locked_again,
    a_key_is_locked_again_in_the_next_transaction,
    a_forged_setting_is_no_lock,
    a_function_with_settings_of_its_own_may_publish,
    the_locks_of_a_key_are_not_those_of_others,
    the_transaction_has_its_number_before_the_event_has_its_seq,
);

/// Per transaction, however many keys it publishes: 256 keys, their lanes shared, and every lane exclusively.
const MOST_LOCKS: i64 = 3 * 256;

/// One committed event. `began` and `ended` come from one counter: ticks before the publish and after the COMMIT.
struct Committed {
    key: usize,
    began: i64,
    ended: i64,
    seq: i64,
}

// Two witnesses that do not trust us: a counter ticked before a publish begins and after its COMMIT returned, and a row
// per key that every transaction counts up under the row lock, which commits in order.
async fn a_publish_that_began_after_a_commit_has_the_higher_seq(db: &Installation) {
    let setup = db.connect().await;
    run(&setup, "create table witness (key int primary key, n int not null default 0)").await;
    run(&setup, "insert into witness (key) select generate_series(0, 19)").await;
    run(&setup, "create table seen (key int, n int, seq bigint)").await;
    let seed: u64 = std::env::var("LB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    eprintln!("LB_SEED={seed}");
    let clock = Arc::new(AtomicI64::new(0));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..8 {
        let mut client = db.connect().await;
        let clock = Arc::clone(&clock);
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(writer));
        writers.spawn(async move {
            let mut committed = Vec::new();
            for _ in 0..60 {
                let key = rng.random_range(0..20_usize);
                let transaction = client.transaction().await.unwrap();
                let began = clock.fetch_add(1, Ordering::SeqCst);
                let publish = match rng.random_range(0..3) {
                    0 => format!(r#"with many as (select lanebridge.publish_many('[{{"type": "t", "payload": 1, "key": "{key}"}}]') n)
                                    select currval('lanebridge.events_seq') from many where n = 1"#),
                    1 => format!("select seq from lanebridge.publish_batch('{{t}}', '{{p}}', '{{t}}', '{{{key}}}', null, null, null, null)"),
                    _ => format!("select lanebridge.publish('t', 'p', '{key}')"),
                };
                let seq: i64 = transaction.query_one(&publish, &[]).await.unwrap().get(0);
                let count = format!("with w as (update witness set n = n + 1 where key = {key} returning n)
                                     insert into seen select {key}, w.n, {seq} from w");
                transaction.batch_execute(&count).await.unwrap();
                transaction.commit().await.unwrap();
                committed.push(Committed { key, began, ended: clock.fetch_add(1, Ordering::SeqCst), seq });
            }
            committed
        });
    }
    let mut by_key: HashMap<usize, Vec<Committed>> = HashMap::new();
    for committed in writers.join_all().await.into_iter().flatten() {
        by_key.entry(committed.key).or_default().push(committed);
    }
    for (key, events) in &by_key {
        for a in events {
            for b in events.iter().filter(|b| a.ended < b.began) {
                assert!(a.seq < b.seq, "key {key}: {} committed before {} began", a.seq, b.seq);
            }
        }
    }
    let disorder: i64 =
        one(&setup, "select count(*) from seen a join seen b on a.key = b.key and a.n < b.n and a.seq > b.seq").await;
    assert_eq!(disorder, 0);
    assert_eq!(one::<i64>(&setup, "select count(*) from seen").await, 480);
}

async fn publishing_a_key_waits_for_open_transactions_of_that_key_only(db: &Installation) {
    let (holder, waiter, observer) = (db.connect().await, db.connect().await, db.connect().await);
    run(&holder, "begin; select lanebridge.publish('t', 'p', 'k')").await;
    // Another key of the same lane, and no key at all.
    let neighbour: String = one(
        &observer,
        "select 'n' || n from generate_series(1, 100000) n
          where hashtextextended('n' || n, 0) & 255 = hashtextextended('k', 0) & 255 limit 1",
    )
    .await;
    run(&observer, &format!("select lanebridge.publish('t', 'p', '{neighbour}')")).await;
    run(&observer, "select lanebridge.publish('t', 'p')").await;
    let waiting = pid(&waiter).await;
    let (seq, held) = tokio::join!(one::<i64>(&waiter, "select lanebridge.publish('t', 'p', 'k')"), async {
        waits(&observer, waiting).await;
        let held: i64 = one(&holder, "select currval('lanebridge.events_seq')").await;
        run(&holder, "commit").await;
        held
    });
    assert!(held < seq);
}

async fn batches_with_opposite_key_orders_do_not_deadlock(db: &Installation) {
    // Below, at and above the limit of key locks, so that all modes meet.
    let mut sessions = tokio::task::JoinSet::new();
    for n in 0..8_usize {
        let client = db.connect().await;
        let mut keys: Vec<String> = (0..[100, 256, 300, 1000][n / 2]).map(|key| format!("k{key}")).collect();
        if n % 2 == 1 {
            keys.reverse();
        }
        sessions.spawn(async move {
            let (kinds, payloads) = (vec!["t"; keys.len()], vec![b"p".as_slice(); keys.len()]);
            let sql = "select count(*) from lanebridge.publish_batch($1, $2, $1, $3, null, null, null, null)";
            for _ in 0..10 {
                client.query_one(sql, &[&kinds, &payloads, &keys]).await.map_err(|error| said(&error))?;
            }
            Ok::<(), String>(())
        });
    }
    for done in sessions.join_all().await {
        assert_eq!(done, Ok(()));
    }
}

async fn a_call_with_100_000_distinct_keys_works_with_default_settings(db: &Installation) {
    let client = db.connect().await;
    assert_eq!(one::<String>(&client, "show max_locks_per_transaction").await, "64");
    let publish = "with k as (select array_agg('k' || n) keys, array_agg('t'::text) types, array_agg('p'::bytea) payloads
                                from generate_series(1, 100000) n)
                   select count(*) from k, lanebridge.publish_batch(types, payloads, types, keys, null, null, null, null)";
    run(&client, "begin").await;
    assert_eq!(one::<i64>(&client, publish).await, 100_000);
    let locks: i64 =
        one(&client, "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()").await;
    assert_eq!(locks, 256);
    run(&client, "rollback").await;
    let many =
        "select lanebridge.publish_many(jsonb_agg(jsonb_build_object('type', 't', 'payload', 1, 'key', 'k' || n)))
                  from generate_series(1, 10000) n";
    assert_eq!(one::<i64>(&client, many).await, 10_000);
}

async fn single_calls_with_300_distinct_keys_in_a_transaction_work(db: &Installation) {
    let client = db.connect().await;
    run(&client, "begin").await;
    for n in 0..300 {
        run(&client, &format!("select lanebridge.publish('t', 'p', 'k{n}')")).await;
    }
    let locks: i64 =
        one(&client, "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()").await;
    assert!(locks <= MOST_LOCKS, "{locks}");
    // One more, in one statement with many.
    run(&client, "select lanebridge.publish('t', 'p', 'x' || n) from generate_series(1, 5000) n").await;
    run(&client, "commit").await;
    assert_eq!(one::<i64>(&client, "select count(distinct key) from lanebridge.events").await, 5300);
}

// A loader that alternates between a few keys must not pass for one with thousands: from whole lanes on, it would wait
// for, and deadlock with, other loaders of other keys.
async fn publishing_few_keys_often_never_takes_whole_lanes(db: &Installation) {
    let client = db.connect().await;
    run(
        &client,
        "begin;
         select lanebridge.publish('t', 'p', 'k' || n % 3) from generate_series(1, 2000) n;
         select lanebridge.publish_batch('{t,t}', '{p,p}', '{t,t}', '{k0,k4}', null, null, null, null) from generate_series(1, 300)",
    )
    .await;
    let exclusive: Vec<i64> = all(
        &client,
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid() and mode = 'ExclusiveLock' group by objsubid",
    )
    .await;
    assert_eq!(exclusive, [4], "four keys, no lane");
    run(&client, "commit").await;
}

async fn a_transaction_past_the_limit_excludes_one_below_it(db: &Installation) {
    let observer = db.connect().await;
    let many = "with k as (select array_agg('k' || n) keys, array_agg('t'::text) types, array_agg('p'::bytea) payloads
                             from generate_series(1, 1000) n)
                select count(*) from k, lanebridge.publish_batch(types, payloads, types, keys, null, null, null, null)";
    let loop_of_calls = "select count(lanebridge.publish('t', 'p', 'k' || n)) from generate_series(1, 1000) n";
    let exact = "select count(lanebridge.publish('t', 'p', 'k7'))";
    // In the loop, k1000 comes after the limit, k7 before.
    let late = "select count(lanebridge.publish('t', 'p', 'k1000'))";
    for (first, second) in [
        (many, exact),
        (exact, many),
        (loop_of_calls, exact),
        (loop_of_calls, late),
        (late, loop_of_calls),
        (many, many),
    ] {
        let (holder, waiter) = (db.connect().await, db.connect().await);
        run(&holder, "begin").await;
        one::<i64>(&holder, first).await;
        let last: i64 = one(&holder, "select last_value from lanebridge.events_seq").await;
        let waiting = pid(&waiter).await;
        tokio::join!(one::<i64>(&waiter, second), async {
            waits(&observer, waiting).await;
            run(&holder, "commit").await;
        });
        let after: i64 = one(
            &observer,
            "select min(seq) from (select seq from lanebridge.events where key in ('k7', 'k1000')
                order by seq desc limit 1) e",
        )
        .await;
        assert!(after > last, "{first} then {second}");
    }
}

async fn a_key_locked_in_a_rolled_back_savepoint_is_locked_again(db: &Installation) {
    let (holder, waiter, observer) = (db.connect().await, db.connect().await, db.connect().await);
    run(
        &holder,
        "begin; savepoint a; select lanebridge.publish('t', 'p', 'k'); savepoint b; select lanebridge.publish('t', 'p', 'j');
         rollback to a; select lanebridge.publish('t', 'p', 'k'); release a;
         do $$ begin
            begin perform lanebridge.publish('t', 'p', 'i'); raise exception 'undone'; exception when raise_exception then end;
            perform lanebridge.publish('t', 'p', 'i');
         end $$",
    )
    .await;
    for key in ["k", "i"] {
        let said =
            refusal(&waiter, &format!("set lock_timeout = '1ms'; select lanebridge.publish('t', 'p', '{key}')")).await;
        assert!(said.starts_with("55P03 "), "{said}");
    }
    run(&waiter, "select lanebridge.publish('t', 'p', 'j')").await;
    run(&holder, "commit").await;
    assert_eq!(all::<String>(&observer, "select key from lanebridge.events order by seq").await, ["k", "i", "j"]);
}

async fn a_key_is_locked_again_in_the_next_transaction(db: &Installation) {
    let (holder, waiter) = (db.connect().await, db.connect().await);
    let gid = unique("next");
    let (prepare, rollback) = (format!("prepare transaction '{gid}'"), format!("rollback prepared '{gid}'"));
    let ends: [&[&str]; 5] =
        [&["commit"], &["rollback"], &["commit", "discard all"], &["commit", "reset all"], &[&prepare, &rollback]];
    for end in ends {
        run(&holder, "begin; select lanebridge.publish('t', 'p', 'k')").await;
        for statement in end {
            run(&holder, statement).await;
        }
        run(&holder, "begin; select lanebridge.publish('t', 'p', 'k')").await;
        let said = refusal(&waiter, "set lock_timeout = '1ms'; select lanebridge.publish('t', 'p', 'k')").await;
        assert!(said.starts_with("55P03 "), "after {end:?}: {said}");
        run(&holder, "rollback").await;
    }
    // A procedure that commits in between.
    run(&holder, "do $$ begin perform lanebridge.publish('t', 'p', 'k'); commit; perform lanebridge.publish('t', 'p', 'k'); end $$").await;
    run(&holder, "begin; select lanebridge.publish('t', 'p', 'k') from generate_series(1, 2); reset all; select lanebridge.publish('t', 'p', 'k')").await;
    let said = refusal(&waiter, "set lock_timeout = '1ms'; select lanebridge.publish('t', 'p', 'k')").await;
    assert!(said.starts_with("55P03 "), "{said}");
}

// A pooler hands a session's settings to the next client.
async fn a_forged_setting_is_no_lock(db: &Installation) {
    let (forger, waiter) = (db.connect().await, db.connect().await);
    for forged in ["", "x", ":", "1:1:,", "0:999:,", "99999999999999999999999:1:,", "1:999999999999:"] {
        run(&forger, &format!("set lanebridge.held = '{forged}'")).await;
        run(
            &forger,
            "begin; select set_config('lanebridge.held', current_setting('lanebridge.held') || hashtextextended('k', 0) || ',', false);
             select lanebridge.publish('t', 'p', 'k'), lanebridge.publish('t', 'p', 'j')",
        )
        .await;
        let said = refusal(&waiter, "set lock_timeout = '1ms'; select lanebridge.publish('t', 'p', 'k')").await;
        assert!(said.starts_with("55P03 "), "{forged}: {said}");
        run(&forger, "commit").await;
    }
}

async fn a_function_with_settings_of_its_own_may_publish(db: &Installation) {
    let client = db.connect().await;
    run(
        &client,
        "create function app(k text) returns bigint language plpgsql set search_path = public set work_mem = '1MB'
             as $$ begin return lanebridge.publish('t', 'p', k); end $$;
         begin; select app('k' || n) from generate_series(1, 1000) n",
    )
    .await;
    let locks: i64 =
        one(&client, "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()").await;
    assert!(locks <= MOST_LOCKS, "the count outlives the function: {locks}");
    run(&client, "commit").await;
}

// An application that locks hashtextextended(key, 0) itself, as many do, must not meet our locks; nor must a second
// installation.
async fn the_locks_of_a_key_are_not_those_of_others(db: &Installation) {
    let (application, publisher) = (db.connect().await, db.connect().await);
    run(&publisher, &crate::installation::script("second", "x_")).await;
    run(
        &application,
        "select pg_advisory_lock(hashtextextended('k', 0)); begin; select lanebridge.publish('t', 'p', 'k')",
    )
    .await;
    run(&publisher, "set lock_timeout = '1s'; select second.x_publish('t', 'p', 'k')").await;
    run(&application, "commit").await;
    run(&publisher, "select lanebridge.publish('t', 'p', 'k')").await;
    // "cannot PREPARE while holding both session-level and transaction-level locks on the same object"
    let gid = unique("own_lock");
    run(&application, &format!("begin; select lanebridge.publish('t', 'p', 'k'); prepare transaction '{gid}'")).await;
    run(&application, &format!("commit prepared '{gid}'")).await;
}

// H6. A bridge reads the last seq, then takes a number, and passes that seq for good once all transactions below the
// number have ended. So the publisher must hold a number by the time it asks for a seq. A lock on the sequence stops it
// right there; without the line in publish_one, or in insert_batch, it has none.
async fn the_transaction_has_its_number_before_the_event_has_its_seq(db: &Installation) {
    let (publisher, bridge) = (db.connect().await, db.connect().await);
    let epoch: i64 = one(&bridge, "select lanebridge.register_bridge('b', 'i', 'v')").await;
    for publish in [
        "select lanebridge.publish('t', 'p')",
        "select lanebridge.publish('t', 'p', 'k')",
        "select lanebridge.publish_batch('{t}', '{p}', '{t}', null, null, null, null, null)",
    ] {
        let stopper = db.connect().await;
        run(&stopper, "begin; alter sequence lanebridge.events_seq cache 1").await;
        let waiting = pid(&publisher).await;
        let (published, number) = tokio::join!(publisher.query_one(publish, &[]), async {
            waits(&bridge, waiting).await;
            let number: Option<i64> =
                one(&bridge, &format!("select backend_xid::text::bigint from pg_stat_activity where pid = {waiting}"))
                    .await;
            run(&stopper, "rollback").await;
            number
        });
        published.unwrap();
        assert!(number.is_some(), "{publish}: asked for a seq before its transaction had a number");
    }

    // And so, while a publisher is open, what a heartbeat noted is not passed.
    run(&publisher, "begin; select lanebridge.publish('t', 'p')").await;
    let open: i64 = one(&publisher, "select pg_current_xact_id()::text::bigint").await;
    let seq: i64 = one(&publisher, "select currval('lanebridge.events_seq')").await;
    let row = bridge.query_one("select last_seq, xid from lanebridge.heartbeat($1)", &[&epoch]).await.unwrap();
    let (last_seq, xid): (i64, i64) = (row.get(0), row.get(1));
    assert!(last_seq >= seq && open < xid);
    let ended_below = "select pg_snapshot_xmin(pg_current_snapshot())::text::bigint";
    assert!(one::<i64>(&bridge, ended_below).await <= open);
    run(&publisher, "commit").await;
}
