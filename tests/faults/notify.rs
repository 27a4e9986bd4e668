//! NOTIFY is a hint (D1): it wakes the poll, whatever happens to the listening session, and only who listens asks for it.

use std::time::Duration;

use tokio_postgres::Client;

use crate::bridge::{Bridge, Setup};
use crate::consumers::Destination;
use crate::drain::drained;
use crate::services::eventually;
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(30);
/// What a poll every minute cannot do.
const WOKEN: Duration = Duration::from_secs(10);
const LOST: &str = "listening for notifications failed";
const BACK: &str = "listening for notifications again";
/// Sessions that listen, and are not in a transaction: that would hold the queue of the whole server (H97).
const LISTENERS: &str = "select count(*), coalesce(bool_and(xact_start is null or state = 'active'), true)
    from pg_stat_activity where datname = current_database() and application_name like 'lanebridge/%/listen'";

/// A bridge that only notifications wake.
fn woken(setup: Setup) -> Setup {
    setup
        .with("poll_interval = \"50ms\"", "poll_interval = \"60s\"\nsource = \"poll\"\nwake_up = \"notify\"")
        .with("sweep_interval = \"1s\"", "sweep_interval = \"60s\"")
}

async fn is_notified_for(client: &Client) -> bool {
    let sql = "select listening_until > clock_timestamp() from lanebridge.installation";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// A bridge that listens and owns every lane, so that nothing but a notification makes it poll.
async fn listening(stage: &Stage) -> Bridge {
    let bridge = stage.setup.start();
    eventually("it listens", SOON, || is_notified_for(&stage.client)).await;
    wakes(&stage.client, "first").await;
    bridge
}

async fn wakes(client: &Client, id: &str) {
    client.execute("select lanebridge.publish('order.x', 'p', 'k', id => $1)", &[&id]).await.unwrap();
    drained(client, WOKEN).await;
}

async fn says(setup: &Setup, what: &str, times: usize) {
    eventually(what, SOON, || std::future::ready(setup.log().matches(what).count() >= times)).await;
    assert_eq!(setup.log().matches(what).count(), times, "{what}: {}", setup.log());
}

/// wake_up = "notify": an event is there long before the next poll, and the heartbeat keeps it so.
#[tokio::test(flavor = "multi_thread")]
async fn a_notification_wakes_the_poll_for_as_long_as_the_bridge_runs() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, setup, .. } = &stage;
    let bridge = listening(&stage).await;
    for n in 0..20 {
        wakes(client, &format!("e{n}")).await;
    }
    let row = client.query_one(LISTENERS, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, bool>(1)), (1, true), "one listener, in no transaction");
    client.batch_execute("update lanebridge.installation set listening_until = '-infinity'").await.unwrap();
    eventually("the heartbeat moves the lease ahead", SOON, || is_notified_for(client)).await;
    assert_eq!(setup.log().matches(LOST).count(), 0, "on the session that it had: {}", setup.log());
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// F27: an administrator ends the session. It comes back by itself and finds what came meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_is_ended_comes_back_and_finds_what_it_missed() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, setup, .. } = &stage;
    let bridge = listening(&stage).await;
    client.batch_execute("update lanebridge.installation set listening_until = '-infinity'").await.unwrap();
    let end = "select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name like 'lanebridge/%/listen'";
    assert_eq!(client.execute(end, &[]).await.unwrap(), 1);
    wakes(client, "unheard").await;
    says(setup, BACK, 1).await;
    says(setup, LOST, 1).await;
    wakes(client, "heard").await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// A session that lives and does not listen any more hears nothing for ever, and nothing fails: only the heartbeat
/// can notice. UNLISTEN reaches the session through a trigger, as DISCARD ALL does through a pooler.
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_was_made_to_unlisten_comes_back() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, setup, .. } = &stage;
    let bridge = listening(&stage).await;
    client
        .batch_execute(
            "create function deafen() returns trigger language plpgsql as $$ begin execute 'unlisten *'; return null; end $$;
             create trigger deafen after update on lanebridge.installation for each row
                when (old.listening_until = '-infinity') execute function deafen();
             update lanebridge.installation set listening_until = '-infinity'",
        )
        .await
        .unwrap();
    says(setup, "does not listen any more", 1).await;
    says(setup, BACK, 1).await;
    eventually("it listens", SOON, || is_notified_for(client)).await;
    wakes(client, "heard").await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// An outage of an hour is one line when it begins and one when it ends, and its tries become rarer.
#[tokio::test(flavor = "multi_thread")]
async fn tries_become_rarer_and_are_not_said_one_by_one() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, setup, .. } = &stage;
    let bridge = listening(&stage).await;
    let sql = "select pg_get_functiondef('lanebridge.listening(integer)'::regprocedure)";
    let healthy: String = client.query_one(sql, &[]).await.unwrap().get(0);
    client
        .batch_execute(
            "create table tries (at timestamptz not null default clock_timestamp());
             create or replace function lanebridge.listening(p_seconds integer) returns boolean language plpgsql as
                $$ begin insert into public.tries default values; return false; end $$",
        )
        .await
        .unwrap();
    let count = "select count(*) from tries";
    eventually("it tries six times", SOON, || async {
        client.query_one(count, &[]).await.unwrap().get::<_, i64>(0) >= 6
    })
    .await;
    // Waits of 100, 200, 400, 800 and 1600 ms, a fifth less by jitter.
    let sql = "select extract(epoch from max(at) - min(at))::float8 from (select at from tries order by at limit 6) t";
    let took: f64 = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!(took > 3.1 * 0.8, "six tries within {took} s");
    assert_eq!((setup.log().matches(LOST).count(), setup.log().matches(BACK).count()), (1, 0), "{}", setup.log());
    client.batch_execute(&healthy).await.unwrap();
    says(setup, BACK, 1).await;
    says(setup, LOST, 1).await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// Two bridges of different minds: the one that polls neither asks publishers to notify nor stops them.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_polls_neither_starts_nor_stops_notifications() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, database, destinations, .. } = &stage;
    let polls = Setup::new(&database.url(), destinations, "").with("[bridge]\n", "[bridge]\nsource = \"poll\"\n");
    let alone = polls.start();
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'polled')").await.unwrap();
    drained(client, SOON).await;
    assert!(!is_notified_for(client).await, "publishers would pay for nobody");
    assert!(alone.terminate().await.success());

    let bridge = listening(&stage).await;
    // A lease that is shortened is refused, and the bridge that does it does not start.
    client
        .batch_execute(
            "create function refuse() returns trigger language plpgsql as $$ begin raise 'shortened'; end $$;
             create trigger refuse before update on lanebridge.installation for each row
                when (new.listening_until < old.listening_until) execute function refuse()",
        )
        .await
        .unwrap();
    let second = polls.start();
    eventually("the second is there", SOON, || async {
        let alive = "select count(*) from lanebridge.bridges where fenced_at is null";
        client.query_one(alive, &[]).await.unwrap().get::<_, i64>(0) == 2
    })
    .await;
    wakes(client, "beside").await;
    assert!(second.terminate().await.success(), "{}", polls.log());
    assert!(is_notified_for(client).await);
    wakes(client, "after").await;
    assert!(bridge.terminate().await.success());
    stage.end().await;
}

/// A run from cron would make publishers notify for half a minute after it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_only_drains_asks_for_no_notification() {
    let stage = Stage::with([Destination::redis()], woken).await;
    let Stage { client, setup, .. } = &stage;
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e')").await.unwrap();
    setup.run(&["run", "--once"]);
    drained(client, SOON).await;
    let sql = "select listening_until = '-infinity' from lanebridge.installation";
    assert!(client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0), "publishers would pay for nobody");
    stage.end().await;
}
