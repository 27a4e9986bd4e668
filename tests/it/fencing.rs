//! What a bridge writes: only under a live epoch, and with an answer for every id.

use tokio_postgres::Client;

use crate::installation::{Installation, all, handler, one, pid, refusal, run, said, waits};

on_every_server!(
    a_fenced_epoch_writes_nothing,
    a_takeover_waits_for_a_write_and_a_write_that_waited_is_refused,
    complete_accounts_for_every_id,
    complete_forgets_the_failures,
    retry_counts_once_and_holds,
    bury_moves_a_delivery_with_its_error,
    promote_frees_what_is_due_of_its_lanes,
    a_lane_that_alone_has_something_due_has_the_whole_limit,
    requeue_brings_back_with_a_new_generation,
    taking_lanes_fences_their_owner,
    a_heartbeat_counts_the_locks_that_are_left,
    a_heartbeat_promises_no_seq_that_was_not_given,
    handlers_are_registered_without_writing_twice,
    rows_that_cannot_be_delivered_are_refused,
);

/// Two handlers, an epoch, and `n` events of one key, seqs 1 to n.
async fn setup(client: &Client, n: i32) -> (i64, i32) {
    let id = handler(client, "h", &[">"]).await;
    run(client, &format!("select lanebridge.publish('t', 'p', 'k') from generate_series(1, {n})")).await;
    (register(client, "first").await, id)
}

async fn register(client: &Client, name: &str) -> i64 {
    one(client, &format!("select lanebridge.register_bridge('{name}', 'instance', 'version')")).await
}

/// The lane of key k.
const LANE: &str = "(hashtextextended('k', 0) & 255)::smallint";

/// Arguments `lanes, handlers, seqs` for deliveries of that key.
fn ids(handler: i32, seqs: &[i64]) -> String {
    let seqs: Vec<String> = seqs.iter().map(ToString::to_string).collect();
    let n = seqs.len();
    format!("array_fill({LANE}, array[{n}]), array_fill({handler}, array[{n}]), '{{{}}}'::bigint[]", seqs.join(","))
}

fn complete(epoch: i64, handler: i32, seqs: &[i64]) -> String {
    format!("select ord from lanebridge.complete({epoch}, {})", ids(handler, seqs))
}

fn retry(epoch: i64, handler: i32, seq: i64, attempts: i32, delay_ms: i64) -> String {
    format!(
        "select * from lanebridge.retry({epoch}, {}, '{{{attempts}}}', '{{{delay_ms}}}', '{{CODE}}', '{{no space}}')",
        ids(handler, &[seq])
    )
}

fn bury(epoch: i64, handler: i32, seq: i64) -> String {
    bury_generation(0, epoch, handler, seq)
}

fn bury_generation(generation: i32, epoch: i64, handler: i32, seq: i64) -> String {
    format!(
        "select * from lanebridge.bury({epoch}, {}, '{{{generation}}}', '{{rejected}}', '{{TOO_BIG}}', '{{too big}}')",
        ids(handler, &[seq])
    )
}

fn promote(epoch: i64) -> String {
    format!("select first_seq from lanebridge.promote({epoch}, array[{LANE}], 1000)")
}

const STATE: &str =
    "select coalesce(string_agg(d::text, ' ' order by seq), '') || (select count(*) from lanebridge.dead)
                        || (select count(*) from lanebridge.failures) from lanebridge.deliveries d";

async fn a_fenced_epoch_writes_nothing(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 3).await;
    run(&client, &retry(epoch, h, 1, 0, 0)).await;
    run(&client, &format!("select lanebridge.take_lanes({epoch}, array[{LANE}])")).await;
    let next = register(&client, "next").await;
    let fenced: Vec<i64> = one(&client, &format!("select lanebridge.take_lanes({next}, array[{LANE}])")).await;
    assert_eq!(fenced, [epoch]);
    let before: String = one(&client, STATE).await;
    for epoch in [epoch, 0, 999] {
        for write in [
            complete(epoch, h, &[2]),
            complete(epoch, h, &[]).replace("array[0]", "array[1]"),
            retry(epoch, h, 2, 0, 0),
            bury(epoch, h, 2),
            promote(epoch),
            format!("select lanebridge.take_lanes({epoch}, array[{LANE}])"),
        ] {
            let said = refusal(&client, &write).await;
            assert_eq!(said, format!("LB001 epoch {epoch} is fenced: another bridge took over its lanes"), "{write}");
        }
    }
    assert_eq!(one::<String>(&client, STATE).await, before);
    assert_eq!(all::<i32>(&client, &complete(next, h, &[2])).await, [0; 0]);
    // One that left is fenced as well, and its lanes are nobody's.
    run(&client, &format!("select lanebridge.leave({next})")).await;
    assert!(refusal(&client, &complete(next, h, &[3])).await.starts_with("LB001 "));
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.lanes where epoch is not null").await, 0);
}

// H53, in both orders. FOR KEY SHARE, or EXISTS, would let the takeover pass.
async fn a_takeover_waits_for_a_write_and_a_write_that_waited_is_refused(db: &Installation) {
    let (mut old, mut new, observer) = (db.connect().await, db.connect().await, db.connect().await);
    let (first, h) = setup(&observer, 10).await;
    let take = |epoch: i64| format!("select lanebridge.take_lanes({epoch}, array[{LANE}])");
    observer.query(&take(first), &[]).await.unwrap();
    run(&observer, &retry(first, h, 9, 0, 0)).await;
    let mut owner = first;
    for (n, write) in [complete(0, h, &[1]), retry(0, h, 2, 0, 1000), bury(0, h, 3), promote(0)].into_iter().enumerate()
    {
        let write_of = |epoch: i64| write.replacen("(0, ", &format!("({epoch}, "), 1);
        // The write comes first: the takeover waits for its commit.
        let next = register(&observer, "next").await;
        let takeover = take(next);
        let new_pid = pid(&new).await;
        let writing = old.transaction().await.unwrap();
        writing.query(&write_of(owner), &[]).await.unwrap();
        let (taken, ()) = tokio::join!(new.batch_execute(&takeover), async {
            waits(&observer, new_pid).await;
            writing.commit().await.unwrap();
        });
        taken.unwrap();
        // The takeover comes first: the write waits, and is refused.
        run(&observer, &format!("update lanebridge.deliveries set due_at = '-infinity' where seq = {}", n + 5)).await;
        let last = register(&observer, "last").await;
        let old_pid = pid(&old).await;
        let taking = new.transaction().await.unwrap();
        taking.query(&take(last), &[]).await.unwrap();
        let late = write_of(next);
        let (written, ()) = tokio::join!(old.query(&late, &[]), async {
            waits(&observer, old_pid).await;
            taking.commit().await.unwrap();
        });
        let said = said(&written.unwrap_err());
        assert!(said.starts_with("LB001 "), "{write}: {said}");
        owner = last;
    }
}

// R6.
async fn complete_accounts_for_every_id(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 5).await;
    run(&client, &bury(epoch, h, 2)).await;
    let row = format!(
        "select string_agg(ord || ' ' || reason, ', ' order by ord) from lanebridge.complete({epoch}, {})",
        ids(h, &[1, 2, 99, 3, 3])
    );
    let said: String = one(&client, &row).await;
    // Of the doubled one, whichever position was matched, exactly one is left over.
    assert!(
        said == "2 dead, 3 gone already, 5 gone already" || said == "2 dead, 3 gone already, 4 gone already",
        "{said}"
    );
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.deliveries order by 1").await, [4, 5]);
    assert_eq!(all::<i32>(&client, &complete(epoch, h, &[4, 5])).await, [0; 0]);
    // Another handler's, another lane's.
    assert_eq!(all::<i32>(&client, &complete(epoch, h + 1, &[4])).await, [1]);
}

async fn complete_forgets_the_failures(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 3).await;
    run(&client, &retry(epoch, h, 1, 0, 0)).await;
    run(&client, &bury(epoch, h, 2)).await;
    run(&client, "select lanebridge.requeue('h', '{2}')").await;
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.failures").await, 2);
    assert_eq!(all::<i32>(&client, &complete(epoch, h, &[1, 2, 3])).await, [0; 0]);
    assert_eq!(one::<i64>(&client, "select count(*) from lanebridge.failures").await, 0);
}

async fn retry_counts_once_and_holds(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 2).await;
    let state = "select attempts || ' ' || (due_at - clock_timestamp() between '59 min' and '60 min') from lanebridge.deliveries where seq = 1";
    assert_eq!(all::<i32>(&client, &retry(epoch, h, 1, 0, 3_600_000)).await, [1]);
    assert_eq!(one::<String>(&client, state).await, "1 true");
    let before: String = one(&client, STATE).await;
    // An answer was lost and the write is repeated.
    assert_eq!(all::<i32>(&client, &retry(epoch, h, 1, 0, 7_200_000)).await, [0; 0]);
    assert_eq!(one::<String>(&client, STATE).await, before);
    assert_eq!(all::<i32>(&client, &retry(epoch, h, 1, 1, 3_600_000)).await, [1]);
    assert_eq!(one::<String>(&client, state).await, "2 true");
    let failures: Vec<String> =
        all(&client, "select attempt || outcome || code || error from lanebridge.failures order by attempt").await;
    assert_eq!(failures, ["1refusedCODEno space", "2refusedCODEno space"]);
    // The counter has an end, and does not fall over it.
    run(&client, "update lanebridge.deliveries set attempts = 32767 where seq = 1").await;
    assert_eq!(all::<i32>(&client, &retry(epoch, h, 1, 32767, 0)).await, [1]);
    // Positions, when only some change.
    let some = format!(
        "select * from lanebridge.retry({epoch}, {}, '{{0,0,0}}', '{{0,0,0}}', '{{A,B,C}}', '{{a,b,c}}')",
        ids(h, &[99, 2, 1])
    );
    assert_eq!(all::<i32>(&client, &some).await, [2]);
}

async fn bury_moves_a_delivery_with_its_error(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 2).await;
    run(&client, &retry(epoch, h, 1, 0, 0)).await;
    assert_eq!(all::<i32>(&client, &bury(epoch, h, 1)).await, [1]);
    assert_eq!(all::<i32>(&client, &bury(epoch, h, 1)).await, [0; 0]);
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.deliveries").await, [2]);
    let dead: String = one(
        &client,
        "select concat_ws(' ', d.seq, d.attempts, d.generation, d.code, d.error, d.size_bytes,
                d.key_hash = hashtextextended('k', 0), d.created_at = e.created_at)
           from lanebridge.dead d join lanebridge.events e using (seq)",
    )
    .await;
    assert_eq!(dead, "1 2 0 TOO_BIG too big 2 t t");
    assert_eq!(all::<i32>(&client, "select attempt from lanebridge.failures order by 1").await, [1, 2]);
    // A row that is in both tables, by whatever hand, must not stop the batch for ever.
    run(
        &client,
        "insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes) select lane, handler, seq, created_at, 1 from lanebridge.dead",
    )
    .await;
    assert_eq!(all::<i32>(&client, &bury(epoch, h, 1)).await, [1]);
}

async fn promote_frees_what_is_due_of_its_lanes(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 5).await;
    // Nothing due: no lock, no fence, no rows.
    assert_eq!(all::<i64>(&client, &promote(epoch)).await, [0; 0]);
    for (seq, delay) in [(2, 0), (3, 0), (4, 0), (5, 3_600_000)] {
        run(&client, &retry(epoch, h, seq, 0, delay)).await;
    }
    let elsewhere = promote(epoch).replace(LANE, &format!("(({LANE} + 1) & 255)::smallint"));
    assert_eq!(all::<i64>(&client, &elsewhere).await, [0; 0]);
    // The limit is shared by the lanes, and gives each at least one.
    assert_eq!(all::<i64>(&client, &promote(epoch).replace("1000", "1")).await, [2]);
    let held = "select seq from lanebridge.deliveries where due_at is not null order by 1";
    assert_eq!(all::<i64>(&client, held).await.last(), Some(&5));
    run(&client, "update lanebridge.deliveries set due_at = '-infinity' where seq = 4").await;
    assert_eq!(all::<i64>(&client, &promote(epoch)).await, [4]);
    assert_eq!(all::<i64>(&client, held).await, [5]);
}

// Thousands that are due in one lane must not leave four at a time because 255 other lanes have nothing due.
async fn a_lane_that_alone_has_something_due_has_the_whole_limit(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 1).await;
    let many = format!(
        "insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes, due_at)
         select {LANE}, {h}, n, clock_timestamp(), 1, clock_timestamp() from generate_series(1000, 1999) n"
    );
    run(&client, &many).await;
    let all_lanes = format!(
        "select promoted from lanebridge.promote({epoch}, array(select generate_series(0, 255)::smallint), 1000)"
    );
    assert_eq!(all::<i64>(&client, &all_lanes).await, [1000]);
}

async fn requeue_brings_back_with_a_new_generation(db: &Installation) {
    let client = db.connect().await;
    let (epoch, h) = setup(&client, 3).await;
    for seq in [1, 2] {
        run(&client, &bury(epoch, h, seq)).await;
    }
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{2,3,99}')").await, 1);
    assert_eq!(one::<i64>(&client, "select lanebridge.requeue('h', '{2}')").await, 0);
    let row: String = one(
        &client,
        "select concat_ws(' ', attempts, generation, due_at <= clock_timestamp(), key_hash = hashtextextended('k', 0), size_bytes)
           from lanebridge.deliveries where seq = 2",
    )
    .await;
    assert_eq!(row, "0 1 t t 2");
    assert_eq!(all::<i64>(&client, "select seq from lanebridge.dead").await, [1]);
    run(&client, &bury_generation(1, epoch, h, 2)).await;
    run(&client, "select lanebridge.requeue('h', '{2}')").await;
    assert_eq!(one::<i32>(&client, "select generation from lanebridge.deliveries where seq = 2").await, 2);
    let audited: Vec<i64> =
        all(&client, "select changed from lanebridge.audit where action = 'requeue' and who = session_user").await;
    assert_eq!(audited, [1, 1]);
    assert_eq!(refusal(&client, "select lanebridge.requeue('nobody', '{1}')").await, "22023 unknown handler 'nobody'");
}

async fn taking_lanes_fences_their_owner(db: &Installation) {
    let (a, b) = (db.connect().await, db.connect().await);
    let (first, second) = (register(&a, "a").await, register(&b, "b").await);
    let lock = "select * from lanebridge.lock_lanes('{1,2,3}', 256)";
    assert_eq!(all::<i16>(&a, lock).await, [1, 2, 3]);
    assert_eq!(all::<i16>(&b, "select * from lanebridge.lock_lanes('{3,4}', 256)").await, [4]);
    let take = |epoch: i64, lanes: &str| format!("select lanebridge.take_lanes({epoch}, '{{{lanes}}}')");
    assert_eq!(one::<Vec<i64>>(&a, &take(first, "1,2,3")).await, [0; 0]);
    assert_eq!(one::<Vec<i64>>(&b, &take(second, "4")).await, [0; 0]);
    assert_eq!(one::<Vec<i64>>(&a, &take(first, "1")).await, [0; 0], "nobody fences itself");
    run(&a, "select pg_advisory_unlock_all()").await;
    assert_eq!(all::<i16>(&b, lock).await, [1, 2, 3]);
    assert_eq!(one::<Vec<i64>>(&b, &take(second, "1,2")).await, [first]);
    assert_eq!(one::<Vec<i64>>(&b, &take(second, "3")).await, [0; 0], "fenced already");
    let owned: i64 = one(&b, &format!("select count(*) from lanebridge.lanes where epoch = {second}")).await;
    assert_eq!(owned, 4);
}

async fn a_heartbeat_counts_the_locks_that_are_left(db: &Installation) {
    let (client, other) = (db.connect().await, db.connect().await);
    let epoch = register(&client, "a").await;
    let beat = async |client: &Client| {
        let row = client.query_one("select alive, locks from lanebridge.heartbeat($1)", &[&epoch]).await.unwrap();
        (row.get::<_, bool>(0), row.get::<_, i32>(1))
    };
    assert_eq!(beat(&client).await, (true, 0));
    run(&client, "select lanebridge.lock_lanes(array(select generate_series(0, 255)::smallint), 256)").await;
    // Locks that are not ours: an application's, and one taken twice.
    run(&client, "select pg_advisory_lock(1, 1), pg_advisory_lock(7)").await;
    run(&client, "select lanebridge.lock_lanes('{0}', 256)").await;
    assert_eq!(beat(&client).await, (true, 256));
    assert_eq!(beat(&other).await, (true, 0), "another session holds none");
    run(&client, "select pg_advisory_unlock_all()").await;
    assert_eq!(beat(&client).await, (true, 0));
    assert_eq!(one::<i64>(&client, &format!("select beat from lanebridge.bridges where epoch = {epoch}")).await, 4);
    run(&client, "update lanebridge.bridges set fenced_at = now()").await;
    assert_eq!(beat(&client).await, (false, 0));
}

async fn a_heartbeat_promises_no_seq_that_was_not_given(db: &Installation) {
    let client = db.connect().await;
    let epoch = register(&client, "a").await;
    let last_seq = format!("select last_seq from lanebridge.heartbeat({epoch})");
    assert_eq!(one::<i64>(&client, &last_seq).await, 0, "the first event is still to get seq 1");
    for seq in 1..3 {
        assert_eq!(one::<i64>(&client, "select lanebridge.publish('t', 'p')").await, seq);
        assert_eq!(one::<i64>(&client, &last_seq).await, seq);
    }
}

async fn handlers_are_registered_without_writing_twice(db: &Installation) {
    let client = db.connect().await;
    let first = handler(&client, "h", &["a"]).await;
    let version = "select xmin::text || ctid::text from lanebridge.handlers";
    let before: String = one(&client, version).await;
    assert_eq!(handler(&client, "h", &["a"]).await, first);
    assert_eq!(one::<String>(&client, version).await, before);
    assert_eq!(handler(&client, "h", &["b"]).await, first);
    assert_ne!(one::<String>(&client, version).await, before);
    let mut sessions = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let client = db.connect().await;
        sessions.spawn(async move { handler(&client, "new", &["b"]).await });
    }
    let ids = sessions.join_all().await;
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

// B40.
async fn rows_that_cannot_be_delivered_are_refused(db: &Installation) {
    let client = db.connect().await;
    for (values, code) in [
        ("-1, 1, 1, now(), 1", "23514"),
        ("256, 1, 1, now(), 1", "23514"),
        ("999999, 1, 1, now(), 1", "22003"),
        ("1, 1, 1, null, 1", "23502"),
        ("1, null, 1, now(), 1", "23502"),
    ] {
        let insert =
            format!("insert into lanebridge.deliveries (lane, handler, seq, created_at, size_bytes) values ({values})");
        let said = refusal(&client, &insert).await;
        assert!(said.starts_with(code), "{said}");
    }
}
