//! What an operator does to failing and dead deliveries: which it may touch, what becomes of them and of those behind
//! them, and that it is written down.

use tokio_postgres::Client;

use crate::installation::{Installation, all, handler, one, pid, refusal, run, waits};

on_every_server!(
    a_skipped_delivery_holds_its_key_until_the_owner_reads_again,
    a_follower_that_commits_during_a_skip_waits_with_the_others,
    a_requeued_delivery_takes_the_place_of_its_mark,
    a_burial_that_is_repeated_leaves_a_requeued_delivery_alone,
    requeue_tries_a_retrying_one_now_and_a_scheduled_one_only_when_named,
    bury_keeps_the_reason_and_the_attempts,
    what_may_be_in_flight_is_left_alone,
    a_lane_whose_lock_is_held_is_left_alone,
    a_row_that_a_bridge_writes_is_passed_over,
    a_burial_that_is_written_again_does_not_undo_a_skip,
    what_has_no_key_leaves_no_mark,
    a_filter_takes_what_it_says_and_nothing_else,
    a_filter_that_is_none_is_refused,
    every_batch_leaves_one_audit_row_and_the_second_call_none,
    two_operators_at_once_change_each_delivery_once,
    a_dry_run_counts_what_would_be_changed,
    what_was_dead_for_too_long_is_given_up_unless_it_holds_a_key,
);

/// Handler `h`, an epoch that owns the lane of key k, and `n` events of that key, seqs 1 to n.
async fn setup(client: &Client, n: i32) -> (i64, i32) {
    let id = handler(client, "h", &[">"]).await;
    publish(client, n).await;
    let epoch: i64 = one(client, "select lanebridge.register_bridge('b', 'instance', 'version')").await;
    run(client, &format!("select lanebridge.take_lanes({epoch}, array[{LANE}])")).await;
    (epoch, id)
}

async fn publish(client: &Client, n: i32) {
    run(client, &format!("select lanebridge.publish('t', 'p', 'k') from generate_series(1, {n})")).await;
}

/// The lane of key k.
const LANE: &str = "(hashtextextended('k', 0) & 255)::smallint";

async fn retry(client: &Client, epoch: i64, handler: i32, seq: i64, delay_ms: i64) {
    let sql = format!(
        "select * from lanebridge.retry({epoch}, array[{LANE}], '{{{handler}}}', '{{{seq}}}', '{{0}}', '{{{delay_ms}}}', '{{CODE}}', '{{no space}}')"
    );
    assert_eq!(all::<i32>(client, &sql).await, [1]);
}

async fn kill(client: &Client, epoch: i64, handler: i32, seq: i64) -> Vec<i32> {
    let sql = format!(
        "select * from lanebridge.bury({epoch}, array[{LANE}], '{{{handler}}}', '{{{seq}}}', '{{0}}', '{{rejected}}', '{{TOO_BIG}}', '{{too big}}')"
    );
    all(client, &sql).await
}

async fn promote(client: &Client, epoch: i64) -> Vec<i64> {
    all(client, &format!("select first_seq from lanebridge.promote({epoch}, array[{LANE}], 1000)")).await
}

/// Seqs that the bridge's poll would see of key k: the same conditions, for a handler that blocks or not.
async fn visible(client: &Client, blocks: bool) -> Vec<i64> {
    let sql = format!(
        "select d.seq from lanebridge.deliveries d where d.due_at is null
            and not exists (select from lanebridge.deliveries h where (h.lane, h.handler, h.key_hash) = (d.lane, d.handler, d.key_hash)
                               and h.due_at is not null and h.seq < d.seq)
            and (not {blocks} or not exists (select from lanebridge.dead x where (x.lane, x.handler, x.key_hash) = (d.lane, d.handler, d.key_hash)
                               and x.seq < d.seq))
          order by 1"
    );
    all(client, &sql).await
}

const STATES: &str = "select concat_ws(' ', seq, attempts, generation, due_at <= clock_timestamp())
                        from lanebridge.deliveries order by seq";

// Without the mark, what was hidden behind the dead one would become visible before its owner reads the lane again from
// there: it would come after what is published next.
async fn a_skipped_delivery_holds_its_key_until_the_owner_reads_again(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 6).await;
    kill(&client, epoch, h, 1).await;
    assert_eq!(visible(&client, true).await, [0; 0]);
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1}')").await, 1);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.dead").await, [0; 0]);
    assert_eq!(visible(&client, true).await, [0; 0], "before the owner knows");
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1}')").await, 0);
    assert_eq!(promote(&client, epoch).await, [1]);
    assert_eq!(visible(&client, true).await, [2, 3, 4, 5, 6]);
    assert_eq!(promote(&client, epoch).await, [0; 0]);

    // The same for one that is retried, and for a burial, with which a handler that does not block goes on.
    retry(&client, epoch, h, 2, 3_600_000).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{2}')").await, 1);
    assert_eq!(visible(&client, true).await, [0; 0]);
    assert_eq!(promote(&client, epoch).await, [2]);
    assert_eq!(visible(&client, true).await, [3, 4, 5, 6]);
    retry(&client, epoch, h, 3, 3_600_000).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.bury('h', '{3}')").await, 1);
    assert_eq!(visible(&client, false).await, [0; 0]);
    assert_eq!(promote(&client, epoch).await, [3]);
    assert_eq!((visible(&client, false).await, visible(&client, true).await), (vec![4, 5, 6], vec![]));
    // Of the skipped one nothing is left but the audit.
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.failures where seq in (1, 2)").await, [0; 0]);
}

// The next follower could have been marked instead; but nobody knows it while its transaction is open.
async fn a_follower_that_commits_during_a_skip_waits_with_the_others(db: &Installation) {
    let (client, mut operator) = (db.connect().await, db.connect().await);
    let (epoch, h) = setup(&client, 1).await;
    kill(&client, epoch, h, 1).await;
    let skipping = operator.transaction().await.unwrap();
    skipping.batch_execute("select lanebridge.skip('h', '{1}')").await.unwrap();
    publish(&client, 1).await;
    assert_eq!(visible(&client, true).await, [0; 0], "the owner's read passes it here");
    skipping.commit().await.unwrap();
    publish(&client, 1).await;
    assert_eq!(visible(&client, true).await, [0; 0], "and may not see what comes after it");
    assert_eq!(promote(&client, epoch).await, [1], "before it is told to begin here");
    assert_eq!(visible(&client, true).await, [2, 3]);
}

// The bridge repeats a burial whose answer was lost; meanwhile an operator saw it and requeued.
async fn a_burial_that_is_repeated_leaves_a_requeued_delivery_alone(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 1).await;
    assert_eq!(kill(&client, epoch, h, 1).await, [1]);
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{1}')").await, 1);
    assert_eq!(kill(&client, epoch, h, 1).await, [0; 0]);
    assert_eq!(promote(&client, epoch).await, [1]);
    assert_eq!(visible(&client, true).await, [1]);
}

// Its row is there already; were it left as it is, the delivery would be lost with its mark.
async fn a_requeued_delivery_takes_the_place_of_its_mark(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 2).await;
    retry(&client, epoch, h, 1, 3_600_000).await;
    run(&client, "select lanebridge.bury('h', '{1}')").await;
    assert_eq!(all::<String>(&client, STATES).await, ["1 -1 0 t", "2 0 0"]);
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{1}')").await, 1);
    assert_eq!(all::<String>(&client, STATES).await, ["1 0 1 t", "2 0 0"]);
    assert_eq!(promote(&client, epoch).await, [1]);
    assert_eq!(visible(&client, true).await, [1, 2]);
    // One that is in both tables by whatever hand stays as it is.
    run(
        &client,
        "insert into lanebridge.dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
         select lane, handler, seq, created_at, key_hash, size_bytes, 1, 7, 'X', 'x' from lanebridge.deliveries where seq = 1",
    )
    .await;
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{1}')").await, 1);
    assert_eq!(all::<String>(&client, STATES).await, ["1 0 1", "2 0 0"]);
}

async fn requeue_tries_a_retrying_one_now_and_a_scheduled_one_only_when_named(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 1).await;
    run(&client, "select lanebridge.publish('t', 'p', 'k', deliver_at => '2999-01-01')").await;
    retry(&client, epoch, h, 1, 3_600_000).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{1,2}')").await, 1);
    assert_eq!(all::<String>(&client, STATES).await, ["1 1 0 t", "2 0 0 f"], "its attempts still count");
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{1,2}')").await, 0);
    let scheduled = r#"select lanebridge.requeue('h', p_filter => '{"state": "scheduled"}')"#;
    assert_eq!(one::<i64>(&client, scheduled).await, 1);
    assert_eq!(all::<String>(&client, STATES).await, ["1 1 0 t", "2 0 0 t"]);
    assert_eq!(one::<i64>(&client, scheduled).await, 0);
}

async fn bury_keeps_the_reason_and_the_attempts(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 2).await;
    retry(&client, epoch, h, 1, 3_600_000).await;
    run(&client, "select lanebridge.publish('t', 'p', 'k', deliver_at => '2999-01-01')").await;
    assert_eq!(one::<i64>(&client, "select lanebridge.bury('h', '{1}', p_reason => 'wrong address')").await, 1);
    assert_eq!(one::<i64>(&client, "select lanebridge.bury('h', '{1,3}')").await, 1);
    let dead =
        "select concat_ws(' ', x.seq, attempts, generation, code, error, size_bytes, x.created_at = e.created_at,
                                 x.key_hash = hashtextextended('k', 0))
                  from lanebridge.dead x join lanebridge.events e using (seq) order by x.seq";
    assert_eq!(
        all::<String>(&client, dead).await,
        ["1 1 0 BURIED wrong address 2 t t", "3 0 0 BURIED buried by hand 2 t t"]
    );
    assert_eq!(
        all::<String>(&client, "select code from lanebridge.failures").await,
        ["CODE"],
        "the broker's word stays, and no attempt was made"
    );
}

// H44. Nothing says that it is not on its way to the broker.
async fn what_may_be_in_flight_is_left_alone(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 3).await;
    retry(&client, epoch, h, 2, 3_600_000).await;
    let before: Vec<String> = all(&client, STATES).await;
    for action in ["bury", "skip"] {
        let call = format!("select lanebridge.{action}('h', '{{1,3}}')");
        assert_eq!(one::<i64>(&client, &call).await, 0, "{action}");
    }
    assert_eq!(all::<String>(&client, STATES).await, before);
    // Its owner left, and nothing was in flight any more.
    run(&client, &format!("select lanebridge.leave({epoch})")).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1}')").await, 1);
    assert_eq!(one::<i64>(&client, "select lanebridge.bury('h', '{3}')").await, 1);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.dead").await, [3]);
}

// A bridge that has just got the lock reads before it is written down as the owner, and the other way round.
async fn a_lane_whose_lock_is_held_is_left_alone(db: &Installation) {
    let (client, mut other) = (db.connect().await, db.connect().await);
    let (epoch, _) = setup(&client, 3).await;
    run(&client, &format!("select lanebridge.leave({epoch})")).await;
    let lock = format!("select * from lanebridge.lock_lanes(array[{LANE}], 1)");
    assert_eq!(all::<i16>(&other, &lock).await.len(), 1);
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1}')").await, 0);
    run(&other, "select pg_advisory_unlock_all()").await;
    let skipping = other.transaction().await.unwrap();
    skipping.batch_execute("select lanebridge.skip('h', '{1}')").await.unwrap();
    assert_eq!(all::<i16>(&client, &lock).await, [0; 0], "nobody takes the lane before it is committed");
    skipping.commit().await.unwrap();
    assert_eq!(all::<i16>(&client, &lock).await.len(), 1);
}

// Waiting for a bridge that waits for another of our rows would end one of the two.
async fn a_row_that_a_bridge_writes_is_passed_over(db: &Installation) {
    let (client, mut bridge) = (db.connect().await, db.connect().await);
    let (epoch, h) = setup(&client, 2).await;
    for seq in [1, 2] {
        retry(&client, epoch, h, seq, 0).await;
    }
    let promoting = bridge.transaction().await.unwrap();
    let one_of_them = format!("select first_seq from lanebridge.promote({epoch}, array[{LANE}], 0)");
    let promoted: i64 = promoting.query_one(&one_of_them, &[]).await.unwrap().get(0);
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1,2}')").await, 1);
    promoting.commit().await.unwrap();
    let ordinary: Vec<i64> = all(&client, "select seq from lanebridge.deliveries where due_at is null").await;
    assert_eq!(ordinary, [promoted], "it may be in flight now");
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1,2}')").await, 0);
}

// The answer to a write was lost, an operator was quicker than the connection.
async fn a_burial_that_is_written_again_does_not_undo_a_skip(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 2).await;
    assert_eq!(kill(&client, epoch, h, 1).await, [1]);
    run(&client, "select lanebridge.skip('h', '{1}')").await;
    assert_eq!(kill(&client, epoch, h, 1).await, [0; 0]);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.dead").await, [0; 0]);
    assert_eq!(promote(&client, epoch).await, [1]);
    assert_eq!(visible(&client, true).await, [2]);
}

async fn what_has_no_key_leaves_no_mark(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    let publish = "select lanebridge.publish('t', 'p', deliver_at => '2999-01-01') from generate_series(1, 3)";
    run(&client, publish).await;
    assert_eq!(one::<i64>(&client, "select lanebridge.bury('h', '{1,2}')").await, 2);
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{1,3}')").await, 2);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.deliveries").await, [0; 0]);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.dead").await, [2]);
}

async fn a_filter_takes_what_it_says_and_nothing_else(db: &Installation) {
    let client = db.connect().await;
    handler(&client, "h", &[">"]).await;
    handler(&client, "other", &[">"]).await;
    // Seqs 1 to 6, scheduled; 5 and 6 dead, 4 retrying, 3 pending; no bridge.
    run(
        &client,
        "select lanebridge.publish('order.paid', 'p', 'k', id => 'e1', deliver_at => '2999-01-01');
         select lanebridge.publish('order.paid.late', 'p', 'l', id => 'e2', deliver_at => '2999-01-01');
         select lanebridge.publish('orderXpaid', 'p', null, id => 'e3');
         select lanebridge.publish('invoice', 'p', 'k', id => 'e4', deliver_at => '2999-01-01');
         select lanebridge.publish('invoice', 'p', 'k', id => 'e5');
         select lanebridge.publish('invoice', 'p', 'm', id => 'e6');
         update lanebridge.deliveries set attempts = 2 where seq = 4;
         insert into lanebridge.failures (lane, handler, seq, attempt, outcome, code, error)
         select lane, handler, seq, n, 'refused', 'CODE', case n when 2 then 'no space' else 'other' end
           from lanebridge.deliveries, generate_series(1, 2) n where seq = 4;
         insert into lanebridge.dead (lane, handler, seq, created_at, key_hash, size_bytes, attempts, generation, code, error)
         select lane, handler, seq, created_at, key_hash, size_bytes, 1, 0, 'TOO_BIG', 'seq ' || seq from lanebridge.deliveries where seq in (5, 6);
         delete from lanebridge.deliveries where seq in (5, 6);
         update lanebridge.deliveries set created_at = created_at - interval '1 hour' where seq = 2;
         alter table lanebridge.events disable trigger all;
         update lanebridge.events set created_at = created_at - interval '1 hour' where seq = 2",
    )
    .await;
    for (filter, seqs) in [
        (r#"{"state": "dead"}"#, &[5, 6][..]),
        (r#"{"state": "retrying"}"#, &[4]),
        (r#"{"state": "scheduled"}"#, &[1, 2]),
        (r#"{"state": "pending"}"#, &[3]),
        (r#"{"type": "order.*"}"#, &[1]),
        (r#"{"type": "order.>"}"#, &[1, 2]),
        (r#"{"type": "*.paid.late"}"#, &[2]),
        (r#"{"type": ">"}"#, &[1, 2, 3, 4, 5, 6]),
        (r#"{"type": "order"}"#, &[]),
        (r#"{"key": "k"}"#, &[1, 4, 5]),
        (r#"{"key": "k", "state": "dead"}"#, &[5]),
        (r#"{"id": "e3"}"#, &[3]),
        (r#"{"error": "no space"}"#, &[4]),
        (r#"{"error": "CODE: other"}"#, &[]),
        (r#"{"error": "TOO_BIG: seq"}"#, &[5, 6]),
        (r#"{"older_than": "30 minutes"}"#, &[2]),
        (r#"{"newer_than": "30 minutes", "state": "scheduled"}"#, &[1]),
        (r#"{"older_than": "2 hours"}"#, &[]),
    ] {
        run(&client, "begin").await;
        let changed: i64 = one(&client, &format!("select lanebridge.skip('h', p_filter => '{filter}')")).await;
        let skipped: Vec<i64> =
            all(&client, "select (d ->> 'seq')::bigint from lanebridge.audit, jsonb_array_elements(detail -> 'deliveries') d order by 1")
                .await;
        assert_eq!((changed, &skipped[..]), (seqs.len() as i64, seqs), "{filter}");
        let others: i64 = one(
            &client,
            "select (select count(*) from lanebridge.deliveries d where handler = (select id from lanebridge.handlers where name = 'other'))
                  + (select count(*) from lanebridge.dead d where handler = (select id from lanebridge.handlers where name = 'other'))",
        )
        .await;
        assert_eq!(others, 6, "{filter}");
        run(&client, "rollback").await;
    }
    // With seqs besides, both narrow; and a seq is found though its event is gone.
    let both = r#"select lanebridge.skip('h', '{4,5}', '{"state": "dead"}')"#;
    assert_eq!(one::<i64>(&client, both).await, 1);
    run(&client, "delete from lanebridge.events where seq = 6").await;
    assert_eq!(one::<i64>(&client, "select lanebridge.skip('h', '{6}')").await, 1);
}

async fn a_filter_that_is_none_is_refused(db: &Installation) {
    let client = db.connect().await;
    setup(&client, 1).await;
    for (call, said) in [
        ("skip('nobody', '{1}')", "unknown handler 'nobody'"),
        ("skip('h')", "skip: seqs or a filter are needed"),
        ("bury('h', p_filter => null)", "bury: the filter must be a JSON object"),
        ("skip('h', p_filter => '[]')", "skip: the filter must be a JSON object"),
        (
            r#"skip('h', p_filter => '{"kind": "x"}')"#,
            "skip: unknown filter 'kind'; there are state, type, key, id, error, older_than, newer_than",
        ),
        (r#"skip('h', p_filter => '{"key": 1}')"#, "skip: the filter 'key' must be a string, not number"),
        (
            r#"requeue('h', p_filter => '{"state": "pending"}')"#,
            "requeue: the state must be one of dead, retrying, scheduled, not 'pending'",
        ),
        (
            r#"bury('h', p_filter => '{"state": "dead"}')"#,
            "bury: the state must be one of retrying, scheduled, pending, not 'dead'",
        ),
        (
            r#"skip('h', p_filter => '{"type": "a*"}')"#,
            "skip: the type pattern 'a*' is not made of tokens, * and a last >",
        ),
        ("skip('h', '{1}', p_limit => 0)", "skip: the limit must be between 1 and 10000, not 0"),
        ("skip('h', '{1}', p_limit => 10001)", "skip: the limit must be between 1 and 10000, not 10001"),
        ("operate('lose', 'h', '{1}', '{}', 1, null)", "lose: unknown action 'lose'"),
        ("count_matching('skip', 'nobody', '{1}')", "unknown handler 'nobody'"),
    ] {
        let refused = refusal(&client, &format!("select lanebridge.{call}")).await;
        assert_eq!(refused, format!("22023 {said}"), "{call}");
    }
}

async fn every_batch_leaves_one_audit_row_and_the_second_call_none(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 5).await;
    run(&client, "update lanebridge.events set id = 'e' || seq").await;
    for seq in 1..=5 {
        kill(&client, epoch, h, seq).await;
    }
    let call = r#"select lanebridge.skip('h', p_filter => '{"state": "dead"}', p_limit => 3, p_reason => 'a test')"#;
    let mut changed = Vec::new();
    for _ in 0..4 {
        changed.push(one::<i64>(&client, call).await);
    }
    assert_eq!(changed, [3, 2, 0, 0]);
    let audit: Vec<String> = all(
        &client,
        "select concat_ws(' ', action, who = session_user, changed, detail - 'deliveries') from lanebridge.audit order by id",
    )
    .await;
    let detail = r#"{"filter": {"state": "dead"}, "reason": "a test", "handler": "h"}"#;
    assert_eq!(audit, [format!("skip t 3 {detail}"), format!("skip t 2 {detail}")]);
    let deliveries: Vec<String> = all(
        &client,
        "select d ->> 'seq' || (d ->> 'id') from lanebridge.audit, jsonb_array_elements(detail -> 'deliveries') d order by 1",
    )
    .await;
    assert_eq!(deliveries, ["1e1", "2e2", "3e3", "4e4", "5e5"]);
}

// B46.
async fn two_operators_at_once_change_each_delivery_once(db: &Installation) {
    let (client, mut first, second) = (db.connect().await, db.connect().await, db.connect().await);
    let (epoch, h) = setup(&client, 20).await;
    for seq in 1..=20 {
        kill(&client, epoch, h, seq).await;
    }
    let call = r#"select lanebridge.requeue('h', p_filter => '{"state": "dead"}', p_limit => 15)"#;
    let pid = pid(&second).await;
    let open = first.transaction().await.unwrap();
    let mine: i64 = open.query_one(call, &[]).await.unwrap().get(0);
    let (theirs, ()) = tokio::join!(one::<i64>(&second, call), async {
        waits(&client, pid).await;
        open.commit().await.unwrap();
    });
    assert_eq!((mine, theirs), (15, 5));
    assert_eq!(all::<i32>(&client, "select distinct generation from lanebridge.deliveries").await, [1]);
}

async fn a_dry_run_counts_what_would_be_changed(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 6).await;
    for seq in [1, 2] {
        kill(&client, epoch, h, seq).await;
    }
    retry(&client, epoch, h, 3, 3_600_000).await;
    retry(&client, epoch, h, 4, 0).await;
    let count = async |arguments: &str| {
        let sql = format!("select state || ' ' || deliveries from lanebridge.count_matching({arguments}) order by 1");
        all::<String>(&client, &sql).await
    };
    assert_eq!(count("'requeue', 'h', '{1,2,3,4,5}'").await, ["dead 2", "retrying 1"], "4 is due already");
    assert_eq!(count("'skip', 'h', '{1,2,3,4,5}'").await, ["dead 2", "owned 1", "retrying 2"]);
    assert_eq!(count(r#"'bury', 'h', p_filter => '{"key": "k"}'"#).await, ["owned 2", "retrying 2"]);
    assert_eq!(count(r#"'skip', 'h', p_filter => '{"state": "dead"}', p_limit => 1"#).await, ["dead 1"]);
    run(&client, &format!("select lanebridge.leave({epoch})")).await;
    assert_eq!(count(r#"'bury', 'h', p_filter => '{"key": "k"}'"#).await, ["pending 2", "retrying 2"]);
}

async fn what_was_dead_for_too_long_is_given_up_unless_it_holds_a_key(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 3).await;
    let keyless: i64 = one(&client, "select lanebridge.publish('t', 'p')").await;
    let lane = format!("(select lane from lanebridge.deliveries where seq = {keyless})");
    kill(&client, epoch, h, 1).await;
    kill(&client, epoch, h, 3).await;
    let of_no_key = format!(
        "select * from lanebridge.bury({epoch}, array[{lane}], '{{{h}}}', '{{{keyless}}}', '{{0}}', '{{rejected}}', '{{X}}', '{{x}}')"
    );
    assert_eq!(all::<i32>(&client, &of_no_key).await, [1]);
    run(&client, "update lanebridge.dead set buried_at = buried_at - interval '2 hours' where seq <> 3").await;
    let purge = "select handler || ' ' || purged from lanebridge.purge_dead(3600)";
    let dead = "select seq from lanebridge.dead order by 1";
    assert_eq!(all::<String>(&client, purge).await, ["h 1"]);
    assert_eq!(all::<i64>(&client, dead).await, [1, 3], "what holds back its key waits for a person");
    assert_eq!(all::<String>(&client, purge).await, [""; 0]);
    // A handler that goes on without its dead needs them no longer; those behind come in order all the same.
    run(&client, "update lanebridge.handlers set blocks = false").await;
    assert_eq!(all::<String>(&client, purge).await, ["h 1"]);
    assert_eq!(all::<i64>(&client, dead).await, [3], "the one that died just now stays");
    assert_eq!(promote(&client, epoch).await, [1]);
    assert_eq!(visible(&client, false).await, [2]);
    let audited = "select detail ->> 'reason' from lanebridge.audit where action = 'skip' order by 1";
    assert_eq!(all::<String>(&client, audited).await, ["dead for longer than 01:00:00"; 2]);
}
