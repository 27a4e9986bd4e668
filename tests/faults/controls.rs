//! The test of the tests: bridges and databases with one rule broken, each of which the checker must name.
//!
//! Every scenario runs with the rule first, and must be clean then; so it is the broken rule that is named, and nothing
//! else. `make controls` runs them; they need bridges built with `break-rules`.

use std::process::{Command, Stdio};
use std::time::Duration;

use tokio_postgres::Client;

use crate::arena::{host_and_port, within};
use crate::bridge::{Bridge, Setup};
use crate::consumers::{Destination, jetstream_at};
use crate::drain::{deliveries_left, drained};
use crate::durability;
use crate::ledger::{Verdict, judge};
use crate::proxy::Proxy;
use crate::services::{Database, eventually, redis_address, unique};
use crate::stage::Stage;
use crate::wire::{Mode, Wire};

const SOON: Duration = Duration::from_secs(20);
/// What has not come by then will not come.
const STUCK: Duration = Duration::from_secs(5);
/// A fence that checks nothing, and one that a takeover passes (H53).
const NO_FENCE: &str = "begin end";
const KEY_SHARE: &str = "begin
    perform 1 from lanebridge.bridges b where b.epoch = p_epoch and b.fenced_at is null for key share;
    if not found then raise exception 'fenced' using errcode = 'LB001'; end if;
end";
/// Told to whoever publishes, at every publish (H96, H98).
const NOTIFY_ALWAYS: &str = "update lanebridge.installation set listening_until = 'infinity';
    create or replace function lanebridge.notify() returns void language sql as $$ select pg_notify('c', '') $$";

/// The scenario is clean with the rule, and without it has this verdict.
async fn caught<F: Future<Output = Verdict>>(rule: &'static str, name: &str, scenario: impl Fn(&'static str) -> F) {
    scenario("").await.must_be_clean(&format!("with {rule}"), 0);
    let found = scenario(rule).await.faults(0);
    eprintln!("without {rule}: {found}");
    assert!(found.contains(name), "without {rule} the checker must find {name}, and found {found:?}");
}

async fn publish(client: &Client, id: &str, key: &str, payload: &str) {
    let sql = "with p as (select lanebridge.publish('order.x', $3::text, $2::text, id => $1::text) as seq)
               insert into truth select $1, $2, seq, $3 from p";
    client.execute(sql, &[&id, &key, &payload]).await.unwrap();
}

async fn dead(client: &Client) -> i64 {
    client.query_one("select count(*) from lanebridge.dead", &[]).await.unwrap().get(0)
}

async fn fence_with(client: &Client, body: &str) {
    let sql = format!(
        "create or replace function lanebridge.fence(p_epoch bigint) returns void language plpgsql as $$ {body} $$"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// Sessions of bridges, or those of one purpose, that wait for a lock.
async fn waiting(client: &Client, purpose: &str) -> i64 {
    let sql = "select count(*) from pg_stat_activity where datname = current_database()
                  and application_name like 'lanebridge/%' || $1 and wait_event_type = 'Lock'";
    client.query_one(sql, &[&purpose]).await.unwrap().get(0)
}

/// Gives what is left its time, ends the bridge, and reads the ledger.
async fn settle(stage: &Stage, bridge: Bridge) -> Verdict {
    let Stage { client, destinations, setup, .. } = stage;
    let owned = "select count(*) from lanebridge.lanes l join lanebridge.bridges b using (epoch)
                   join pg_stat_activity a on a.pid = b.lock_pid where b.fenced_at is null";
    eventually("it owns the lanes", SOON, || async {
        client.query_one(owned, &[]).await.unwrap().get::<_, i64>(0) == 256
    })
    .await;
    within(STUCK, || async { deliveries_left(client).await == 0 }).await;
    let stuck = deliveries_left(client).await;
    let status = bridge.terminate().await;
    assert!(status.success(), "{status}: {}", setup.log());
    let mut verdict = judge(client, &destinations[0].read().await).await;
    verdict.stuck = usize::try_from(stuck).unwrap();
    verdict.leftover = usize::try_from(dead(client).await).unwrap();
    verdict
}

/// A way to Redis that nobody passes until it is healed.
async fn no_way() -> Wire {
    let wire = Wire::to(&redis_address(), Mode::Pass).await;
    wire.set(Mode::Refuse);
    wire
}

/// Largest message of a stream, in bytes, and how long it remembers ids.
async fn limit(destination: &Destination, max_message_size: i32, remembers: Duration) {
    let Destination::Nats { subject, server } = destination else { panic!("not at NATS: {destination:?}") };
    let js = jetstream_at(server).await;
    let mut config = js.get_stream(subject).await.unwrap().cached_info().config.clone();
    config.max_message_size = max_message_size;
    config.duplicate_window = remembers;
    js.update_stream(config).await.unwrap();
}

const REMEMBERS: Duration = Duration::from_secs(120);

/// R1: an operator takes away what waits in a bridge's memory.
async fn taken_away_while_it_waits(rule: &'static str) -> Verdict {
    let wire = no_way().await;
    let stage = Stage::with([Destination::redis()], |setup| {
        let setup = setup.breaking(rule).with(&redis_address(), &wire.address());
        setup.with("[http]", "source = \"poll\"\n[http]")
    })
    .await;
    let Stage { client, setup, .. } = &stage;
    for id in ["e1", "e2", "e3"] {
        publish(client, id, "k", "p").await;
    }
    let bridge = setup.start();
    setup.says("unreachable", SOON).await;
    let taken = "delete from lanebridge.deliveries where seq in (select seq from truth where id <> 'e3');
                 delete from truth where id <> 'e3'";
    client.batch_execute(taken).await.unwrap();
    wire.heal();
    let verdict = settle(&stage, bridge).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn sending_without_the_confirming_read_is_a_phantom() {
    caught("confirm", "phantom", taken_away_while_it_waits).await;
}

/// R2: a race with the server's own flushes, so it may be lost a few times.
#[tokio::test(flavor = "multi_thread")]
async fn sending_before_the_flush_is_a_phantom() {
    let _alone = crate::services::alone().await;
    durability::crash_while_sending("poll", |setup| setup).await.must_be_clean("with flush", 1);
    let mut found = String::new();
    for _ in 0..5 {
        found = durability::crash_while_sending("poll", |setup| setup.breaking("flush")).await.faults(0);
        if found.contains("phantom") {
            break;
        }
    }
    assert!(found.contains("phantom"), "{found:?}");
}

/// I7: two databases, as a restored one and what became of the original, feed one stream.
async fn two_databases_feed_one_stream(rule: &'static str, remembers: Duration) -> Verdict {
    let stage = Stage::with([Destination::nats().await], |setup| setup.breaking(rule)).await;
    let Stage { client, destinations, setup, .. } = &stage;
    limit(&destinations[0], -1, remembers).await;
    let other = Database::create("LB_POSTGRES_URL").await;
    let there = other.connect().await;
    there.batch_execute(crate::publishers::TRUTH).await.unwrap();
    let second = Setup::new(&other.url(), destinations, "").breaking(rule);
    second.run(&["migrate"]);
    publish(&there, "theirs", "j", "q").await;
    second.run(&["run", "--once"]);
    other.drop().await;

    publish(client, "ours", "k", "p").await;
    client.batch_execute("insert into truth values ('theirs', 'j', 1, 'q')").await.unwrap();
    let verdict = settle(&stage, setup.start()).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_id_as_dedup_id_is_a_collision_and_a_loss() {
    caught("dedup-id", "id-collision", |rule| two_databases_feed_one_stream(rule, Duration::from_millis(100))).await;
    caught("dedup-id", "lost", |rule| two_databases_feed_one_stream(rule, REMEMBERS)).await;
}

/// R4: a burial that was sent by an owner comes to the server when its lanes are long another's, and the delivery has
/// been requeued.
async fn a_burial_comes_late(rule: &'static str) -> Verdict {
    let stage = Stage::new([Destination::nats().await]).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    if rule == "fence" {
        fence_with(client, NO_FENCE).await;
    }
    limit(&destinations[0], 512, REMEMBERS).await;
    let server = host_and_port(&database.url());
    let mut proxy = Proxy::holding(server.clone(), "exceeds maximum").await;
    let slow = Setup::new(&database.url(), destinations, "").with(&server, &proxy.address.to_string());
    publish(client, "e", "k", &"x".repeat(600)).await;
    let first = slow.start();
    proxy.held().await;
    first.kill();

    let second = setup.start();
    eventually("its heir buries it", SOON, || async { dead(client).await == 1 }).await;
    assert!(second.terminate().await.success());
    limit(&destinations[0], -1, REMEMBERS).await;
    let requeued = "select lanebridge.requeue('to-nats', array[1])";
    client.batch_execute(requeued).await.unwrap();
    proxy.release();
    let late = "select count(*) from pg_stat_activity where datname = current_database()
                   and application_name like 'lanebridge/%'";
    eventually("the late burial is over", SOON, || async {
        client.query_one(late, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    let verdict = settle(&stage, setup.start()).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn writing_without_a_fence_is_a_loss() {
    caught("fence", "lost", a_burial_comes_late).await;
}

/// R4, H53: the owner dies while its completion waits inside the database; who takes over must wait for it.
async fn a_takeover_meets_a_completion(rule: &'static str) -> Verdict {
    let stage = Stage::with([Destination::redis()], |setup| setup.with("[http]", "source = \"poll\"\n[http]")).await;
    let Stage { database, client, setup, .. } = &stage;
    if rule == "fence-share" {
        fence_with(client, KEY_SHARE).await;
    }
    publish(client, "e", "k", "p").await;
    let mut blocker = database.connect().await;
    let blocks = blocker.transaction().await.unwrap();
    blocks.batch_execute("select from lanebridge.deliveries for update").await.unwrap();
    let first = setup.start();
    eventually("a completion waits", SOON, || async { waiting(client, "/complete").await == 1 }).await;
    first.kill();
    let second = setup.start();
    // For the first one, or with its own completion.
    eventually("its heir waits as well", SOON, || async { waiting(client, "").await == 2 }).await;
    blocks.rollback().await.unwrap();
    let verdict = settle(&stage, second).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_that_a_takeover_passes_is_a_duplicate() {
    caught("fence-share", "duplicates", a_takeover_meets_a_completion).await;
}

/// R3, H87: the first of a key is too large for the stream, and requeued when the stream takes it.
async fn a_head_fails(rule: &'static str) -> Verdict {
    let stage = Stage::with([Destination::nats().await], |setup| setup.breaking(rule)).await;
    let Stage { client, destinations, setup, .. } = &stage;
    limit(&destinations[0], 512, REMEMBERS).await;
    publish(client, "head", "k", &"x".repeat(600)).await;
    publish(client, "follower", "k", "p").await;
    let bridge = setup.start();
    eventually("the head is dead", SOON, || async { dead(client).await == 1 }).await;
    within(Duration::from_secs(2), || async { deliveries_left(client).await == 0 }).await;
    limit(&destinations[0], -1, REMEMBERS).await;
    client.batch_execute("select lanebridge.requeue('to-nats', array[1])").await.unwrap();
    let verdict = settle(&stage, bridge).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn several_of_a_key_in_flight_are_reordered() {
    caught("one-per-key", "reorder-first", a_head_fails).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_that_do_not_wait_are_reordered() {
    caught("followers-wait", "reorder-first", a_head_fails).await;
}

/// R11, H6: an early seq of a lane is committed after a later one was delivered.
async fn a_commit_comes_late(rule: &'static str) -> Verdict {
    let stage =
        Stage::with([Destination::redis()], |setup| setup.breaking(rule).with("[http]", "source = \"poll\"\n[http]"))
            .await;
    let Stage { database, client, setup, .. } = &stage;
    let bridge = setup.start();
    let mut late = database.connect().await;
    let open = late.transaction().await.unwrap();
    let publish_late =
        "insert into truth select 'late', 'k', lanebridge.publish('order.x', 'p', 'k', id => 'late'), 'p'";
    open.batch_execute(publish_late).await.unwrap();
    let same_lane = "select 'j' || n from generate_series(1, 10000) n
                      where (hashtextextended('j' || n, 0) & 255) = (hashtextextended('k', 0) & 255) limit 1";
    let other: String = client.query_one(same_lane, &[]).await.unwrap().get(0);
    publish(client, "soon", &other, "p").await;
    drained(client, SOON).await;
    open.commit().await.unwrap();
    let verdict = settle(&stage, bridge).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_without_a_sweep_is_a_loss() {
    caught("sweep", "lost 1, stuck 1", a_commit_comes_late).await;
}

/// R12: the broker is away for longer than the attempts of a delivery would last.
async fn the_broker_is_away(rule: &'static str) -> Verdict {
    let wire = no_way().await;
    let stage = Stage::with([Destination::redis()], |setup| {
        let setup = setup.breaking(rule).with(&redis_address(), &wire.address());
        setup.with("max_attempts = 20", "max_attempts = 2")
    })
    .await;
    let Stage { client, setup, .. } = &stage;
    publish(client, "e", "k", "p").await;
    let bridge = setup.start();
    within(Duration::from_secs(3), || async { dead(client).await == 1 }).await;
    wire.heal();
    let verdict = settle(&stage, bridge).await;
    stage.end().await;
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn outages_that_count_as_attempts_are_a_loss() {
    caught("outages-count-nothing", "lost 1", the_broker_is_away).await;
}

/// R15, H96: an application that commits in two phases.
async fn somebody_commits_in_two_phases(rule: &'static str) -> Verdict {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { client, setup, .. } = &stage;
    if rule == "publish-is-silent" {
        client.batch_execute(NOTIFY_ALWAYS).await.unwrap();
    }
    let bridge = setup.start();
    let name = unique("two");
    client.batch_execute("begin").await.unwrap();
    publish(client, "e", "k", "p").await;
    let prepared = client.batch_execute(&format!("prepare transaction '{name}'")).await;
    let harm = usize::from(prepared.is_err());
    if prepared.is_ok() {
        client.batch_execute(&format!("commit prepared '{name}'")).await.unwrap();
    }
    let verdict = settle(&stage, bridge).await;
    stage.end().await;
    Verdict { harm, ..verdict }
}

#[tokio::test(flavor = "multi_thread")]
async fn notifying_at_every_publish_is_harm() {
    caught("publish-is-silent", "harm", somebody_commits_in_two_phases).await;
}

/// A cell of the matrix, by this binary with every bridge breaking `rule`; what it says is wrong.
fn cell(cell: &str, rule: &str) -> String {
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["matrix::every_cell_of_the_matrix_is_clean", "--exact", "--ignored", "--nocapture"])
        .env("LB_CELL", cell)
        .env("LANEBRIDGE_BREAK", rule)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
    let said = text.lines().find(|line| line.contains("right: ") || line.contains("left: ")).unwrap_or("");
    assert!(run.status.success() == said.is_empty(), "{cell} without {rule} did not come to its end: {text}");
    said.to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_before_the_ack_is_a_loss() {
    let found = cell("broker-away/redis/poll/1", "ack-then-delete");
    assert!(found.contains("lost"), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn releasing_lanes_before_the_drain_duplicates() {
    let found = cell("sigterm/redis/poll/1", "drain-then-release");
    assert!(found.contains("duplicates"), "{found:?}");
}
