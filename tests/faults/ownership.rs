//! Who may send: a second bridge stands by, takes over at once, and a fenced one changes nothing.

use std::process::Command;
use std::time::Duration;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::drained;
use crate::proxy::Proxy;
use crate::services::{Database, address, eventually, redis_address, shared};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(20);

/// D5, H47: the standby takes over when the owner is killed, and the old epoch is fenced.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_from_a_killed_owner() {
    let stage = Stage::new([Destination::redis()]).await;
    let Stage { client, destinations: _, setup, .. } = &stage;
    let first = setup.start();
    let owned = || async {
        let sql = "select count(*), count(distinct epoch), coalesce(max(epoch), 0) from lanebridge.lanes where epoch is not null";
        let row = client.query_one(sql, &[]).await.unwrap();
        (row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2))
    };
    eventually("the first owns every lane", SOON, || async { owned().await.0 == 256 }).await;
    let (_, _, epoch) = owned().await;
    let second = setup.start();
    eventually("the second is there", SOON, || async {
        let alive = "select count(*) from lanebridge.bridges where fenced_at is null";
        client.query_one(alive, &[]).await.unwrap().get::<_, i64>(0) == 2
    })
    .await;
    first.kill();
    eventually("the second owns every lane", SOON, || async {
        let (lanes, owners, newest) = owned().await;
        (lanes, owners) == (256, 1) && newest > epoch
    })
    .await;
    let fenced: bool = client
        .query_one("select fenced_at is not null from lanebridge.bridges where epoch = $1", &[&epoch])
        .await
        .unwrap()
        .get(0);
    assert!(fenced, "the killed owner's epoch");

    // R4: whatever the old owner still wanted to write is refused.
    for write in ["complete($1, '{0}', '{1}', '{1}')", "promote($1, '{0}', 1)"] {
        let refused = client.query(&format!("select * from lanebridge.{write}"), &[&epoch]).await;
        if write.starts_with("complete") {
            assert_eq!(refused.unwrap_err().code().unwrap().code(), "LB001", "{write}");
        }
    }
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e')").await.unwrap();
    drained(client, SOON).await;
    assert!(second.terminate().await.success(), "{}", setup.log());
    let left: i64 =
        client.query_one("select count(*) from lanebridge.lanes where epoch is not null", &[]).await.unwrap().get(0);
    assert_eq!(left, 0, "a drained bridge leaves no owner behind");
    stage.end().await;
}

/// H53: a fence that a takeover can pass between check and write is no fence. The takeover waits for who is inside,
/// and who waited for the takeover finds nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_and_a_write_exclude_each_other() {
    let database = Database::create("LB_POSTGRES_URL").await;
    let setup = Setup::new(&database.url(), &[Destination::redis()], "");
    setup.run(&["migrate"]);
    let (mut old, mut new) = (database.connect().await, database.connect().await);
    let register = "select lanebridge.register_bridge('b', 'i', 'v')";
    let e1: i64 = old.query_one(register, &[]).await.unwrap().get(0);
    let e2: i64 = new.query_one(register, &[]).await.unwrap().get(0);
    old.execute("select lanebridge.take_lanes($1, '{0}')", &[&e1]).await.unwrap();

    // The old owner is inside: the takeover waits.
    let inside = old.transaction().await.unwrap();
    inside.execute("select lanebridge.fence($1)", &[&e1]).await.unwrap();
    new.batch_execute("set lock_timeout = '200ms'").await.unwrap();
    let waited = new.execute("select lanebridge.take_lanes($1, '{0}')", &[&e2]).await.unwrap_err();
    assert_eq!(waited.code().unwrap().code(), "55P03", "the takeover must wait: {waited}");
    inside.commit().await.unwrap();

    // The takeover is under way: the old owner waits, and then finds itself fenced.
    let takeover = new.transaction().await.unwrap();
    takeover.execute("select lanebridge.take_lanes($1, '{0}')", &[&e2]).await.unwrap();
    let (write, commit) = tokio::join!(async { old.execute("select lanebridge.fence($1)", &[&e1]).await }, async {
        takeover.commit().await
    });
    commit.unwrap();
    assert_eq!(write.unwrap_err().code().unwrap().code(), "LB001");
    database.drop().await;
}

/// H107: a second signal ends the process at once, with a status that does not claim a drain.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_ends_at_once() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    // What is sent stays in flight, for nobody gets it and nobody answers.
    let destinations = [Destination::redis()];
    let mut proxy = Proxy::holding(redis_address(), "never-answered").await;
    let setup = Setup::new(&database.url(), &destinations, "")
        .with(&address("LB_REDIS_URL"), &format!("redis://{}", proxy.address));
    setup.run(&["migrate"]);
    client.batch_execute("select lanebridge.publish('order.x', 'p', id => 'never-answered')").await.unwrap();
    let mut bridge = setup.start();
    proxy.held().await;
    bridge.signal("TERM");
    eventually("it drains", SOON, || std::future::ready(setup.log().contains("draining"))).await;
    // At once it would count as the same signal, which some supervisors send twice.
    bridge.signal("TERM");
    tokio::time::sleep_until(tokio::time::Instant::now() + Duration::from_millis(400)).await;
    assert!(!setup.log().contains("a second signal"), "{}", setup.log());
    bridge.signal("TERM");
    let status = bridge.ended(Duration::from_secs(5)).await;
    assert_eq!(status.code(), Some(1), "{}", setup.log());
    database.drop().await;
}

/// Exit status: 2 for a configuration that cannot be, 1 for a failure, 0 for a drained stop.
#[tokio::test(flavor = "multi_thread")]
async fn exit_statuses_tell_what_happened() {
    let _shared = shared().await;
    let run = |toml: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        std::fs::write(&file, toml).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_lanebridge"))
            .arg("-c")
            .arg(&file)
            .args(["run", "--once"])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, stderr) = run("[postgress]\nurl = \"x\"\n");
    assert_eq!(status, Some(2), "{stderr}");
    assert!(stderr.contains("postgres") && stderr.contains(":1:"), "the nearest name and the line: {stderr}");
    let database = Database::create("LB_POSTGRES_URL").await;
    let url = database.url();
    let (status, stderr) = run(&format!("[postgres]\nurl = \"{url}\"\n[http]\nlisten = \"\"\n"));
    assert_eq!(status, Some(0), "{stderr}");
    database.drop().await;
    let (status, stderr) = run(&format!("[postgres]\nurl = \"{url}\"\n[http]\nlisten = \"\"\n"));
    assert_eq!(status, Some(2), "a database that is not there: {stderr}");
    // A port where nobody listens, for a command that does not wait.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "[postgres]\nurl = \"postgres://u@127.0.0.1:1/d\"\n").unwrap();
    let mut migrate = Command::new(env!("CARGO_BIN_EXE_lanebridge"));
    let output = migrate.arg("-c").arg(&file).arg("migrate").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
}

/// H48: behind PgBouncer in transaction mode the bridge refuses to start and names the fix; the fix works.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_transaction_pooler_the_direct_way_is_taken() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let destinations = [Destination::redis()];
    let direct = database.url();
    let pooled = database.pooled_url();
    let setup = Setup::new(&direct, &destinations, "").with(&direct, &pooled);
    let refused =
        Command::new(env!("CARGO_BIN_EXE_lanebridge")).arg("-c").arg(setup.config()).arg("run").output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("direct_url"), "{stderr}");

    let setup = setup.with(&pooled, &format!("{pooled}\"\ndirect_url = \"{direct}"));
    setup.run(&["migrate"]);
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k', id => 'e')").await.unwrap();
    setup.run(&["run", "--once"]);
    drained(&client, SOON).await;
    destinations[0].remove().await;
    database.drop().await;
}

/// A standby that was killed owned nothing, so no takeover fences it; the next bridge that starts does.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_standby_does_not_haunt_the_status() {
    let _shared = shared().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    let setup = Setup::new(&database.url(), &[], "");
    setup.run(&["migrate"]);
    let alive = || async {
        let sql = "select count(*) from lanebridge.bridges where fenced_at is null";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let owner = setup.start();
    eventually("the owner is there", SOON, || async { alive().await == 1 }).await;
    let standby = setup.start();
    eventually("the standby is there", SOON, || async { alive().await == 2 }).await;
    standby.kill();
    let third = setup.start();
    eventually("the third is there, the killed one is not", SOON, || async {
        let sql = "select count(*) from lanebridge.bridges";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 3 && alive().await == 2
    })
    .await;
    assert!(owner.terminate().await.success());
    assert!(third.terminate().await.success());
    database.drop().await;
}

/// A role that may not log in for a while (a password that is rotated) is no reason to end: the bridge waits, and goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_is_refused_for_a_while_does_not_end_the_bridge() {
    let stage = Stage::with([Destination::redis()], |setup| setup).await;
    let Stage { client, setup, database, .. } = &stage;
    let role = format!("{}_role", database.url().rsplit('/').next().unwrap());
    client.batch_execute(&format!("create role {role} login superuser")).await.unwrap();
    let (head, tail) = database.url().split_once("postgres@").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let limited = Setup::new(&format!("{head}{role}@{tail}"), &stage.destinations, "");
    let mut bridge = limited.start();
    eventually("it owns lanes", SOON, || std::future::ready(limited.log().contains("own lanes"))).await;
    client.batch_execute(&format!("alter role {role} nologin")).await.unwrap();
    let end = "select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name like 'lanebridge/%'";
    client.execute(end, &[]).await.unwrap();
    eventually("it is refused", SOON, || std::future::ready(limited.log().contains("SQLSTATE 28000"))).await;
    client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
    client.batch_execute(&format!("alter role {role} login")).await.unwrap();
    drained(client, SOON).await;
    let early = tokio::time::timeout(Duration::from_millis(100), bridge.ended(SOON)).await;
    assert!(early.is_err(), "{}", limited.log());
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    client.batch_execute(&format!("drop role {role}")).await.unwrap();
    stage.end().await;
}
