//! What keeps a bridge from streaming: it polls on, says in one line what is wrong and who mends it, and streams once
//! that is mended, by itself.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio_postgres::Client;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::drain::drained;
use crate::server::Server;
use crate::services::{address, eventually, shared};
use crate::wal::{MAKE_PUBLICATION, source, streams, watchful};

const SOON: Duration = Duration::from_secs(30);

/// A server with one slot and one walsender, and a bridge's configuration for it.
struct Scene {
    server: Server,
    client: Client,
    setup: Setup,
    _shared: tokio::sync::RwLockReadGuard<'static, ()>,
}

impl Scene {
    async fn new(settings: &[(&str, &str)], role: &str) -> Self {
        let guard = shared().await;
        let few = [("max_replication_slots", "1"), ("max_wal_senders", "1"), ("max_prepared_transactions", "5")];
        let settings: Vec<_> = few.iter().chain(settings).copied().collect();
        let server = Server::start(&settings).await;
        let client = server.connect().await;
        // It owns what the owner owns, and may not replicate.
        client.batch_execute("create role plain login; grant postgres to plain").await.unwrap();
        let setup = watchful(Setup::new(&server.url_of(role), &[Destination::redis()], ""));
        let setup = setup.with("[http]", "slot_timeout = \"300ms\"\n[http]");
        setup.run(&["migrate"]);
        Self { server, client, setup, _shared: guard }
    }

    /// A new bridge cannot stream for a reason that its line names by `parts`; it delivers; after `mend` it streams.
    async fn refuses(&self, parts: &[&str], mend: impl AsyncFnOnce(&Client)) {
        let before = self.setup.log().len();
        let bridge = self.setup.start();
        let line = |log: &str| log.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        eventually(&format!("a line says {parts:?}"), SOON, || std::future::ready(line(&self.setup.log()[before..])))
            .await;
        eventually("status knows", SOON, || async {
            let status: serde_json::Value = serde_json::from_str(&self.setup.run(&["status", "--json"])).unwrap();
            let bridge = &status["bridges"][0];
            let note = bridge["source_note"].as_str().unwrap_or_default();
            bridge["source"] == "poll" && parts.iter().all(|part| note.contains(part))
        })
        .await;
        self.client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
        drained(&self.client, SOON).await;
        mend(&self.client).await;
        streams(&self.client).await;
        let log = self.setup.log();
        // A busy server may take longer than slot_timeout for the slot after that, which is another line.
        let said = log[before..].lines().filter(|said| line(said)).count();
        assert_eq!(said, 1, "once is enough: {}", &log[before..]);
        assert!(bridge.terminate().await.success(), "{log}");
        assert_eq!(source(&self.client).await, None);
    }

    async fn refuses_after(&self, damage: &str, parts: &[&str], mend: &str) {
        self.client.batch_execute(damage).await.unwrap();
        self.refuses(parts, async |client: &Client| client.batch_execute(mend).await.unwrap()).await;
    }
}

/// H19, H22, H29. Each hint is the statement that mends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_was_changed_is_named_with_the_statement_that_mends_it() {
    let scene = Scene::new(&[], "postgres").await;
    let dropped = "drop publication lanebridge_wal";
    scene.refuses_after(dropped, &["is not there", "CREATE PUBLICATION"], MAKE_PUBLICATION).await;
    let set = "alter publication lanebridge_wal set table only lanebridge.events";
    let without = "alter publication lanebridge_wal drop table lanebridge.events";
    scene.refuses_after(without, &["does not have the table", "ADD TABLE"], set).await;
    let options = |publish: &str, root: bool| {
        format!("alter publication lanebridge_wal set (publish = '{publish}', publish_via_partition_root = {root})")
    };
    let good = options("insert", true);
    scene.refuses_after(&options("update", true), &["was altered", "SET (publish"], &good).await;
    scene.refuses_after(&options("insert", false), &["was altered", "SET (publish"], &good).await;
    let filter = "alter publication lanebridge_wal set table lanebridge.events where (lane < 10)";
    scene.refuses_after(filter, &["row filter", "SET TABLE"], set).await;
    let columns = "alter publication lanebridge_wal set table lanebridge.events (seq, lane)";
    scene.refuses_after(columns, &["list of columns", "SET TABLE"], set).await;
}

/// H17: a slot waits for transactions that are open; the line names who holds it up.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_that_keeps_a_slot_from_being_made_is_named() {
    let scene = Scene::new(&[], "postgres").await;
    scene.client.batch_execute("create table other (n int)").await.unwrap();
    let open = scene.server.connect().await;
    let pid: i32 = open.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    open.batch_execute("begin; insert into other values (1)").await.unwrap();
    let named = format!("pid {pid} ");
    scene.refuses(&["could not be made", &named], async |_: &Client| open.batch_execute("commit").await.unwrap()).await;
    let prepare = "begin; insert into other values (1); prepare transaction 'orphan-7'";
    scene
        .refuses_after(
            prepare,
            &["could not be made", "prepared transaction", "orphan-7"],
            "rollback prepared 'orphan-7'",
        )
        .await;
}

/// H29: no free slot, no free walsender, no right to replicate.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_does_not_grant_is_named_with_the_setting_that_grants_it() {
    let scene = Scene::new(&[], "plain").await;
    scene.refuses_after("select 1", &["ALTER ROLE", "REPLICATION"], "alter role plain replication").await;
    let take = "select pg_create_logical_replication_slot('taken', 'pgoutput')";
    scene.refuses_after(take, &["max_replication_slots"], "select pg_drop_replication_slot('taken')").await;
    let mut receiver = Receiver::start(&scene.server);
    eventually("the walsender is taken", SOON, || async {
        let sql = "select count(*) from pg_stat_replication";
        scene.client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    scene.refuses(&["max_wal_senders"], async |_: &Client| receiver.stop()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_logical_decoding_is_told_how_to_get_it() {
    let mut scene = Scene::new(&[("wal_level", "replica")], "postgres").await;
    let bridge = scene.setup.start();
    eventually("a line says so", SOON, || {
        std::future::ready(scene.setup.log().contains("wal_level is replica; hint: ALTER SYSTEM SET wal_level"))
    })
    .await;
    scene.client.batch_execute("select lanebridge.publish('order.x', 'p', 'k')").await.unwrap();
    drained(&scene.client, SOON).await;
    scene.server.crash();
    scene.server.start_again(&[("wal_level", "logical")]).await;
    scene.client = scene.server.connect().await;
    streams(&scene.client).await;
    assert!(bridge.terminate().await.success(), "{}", scene.setup.log());
}

/// The stream logs in by every method that the other sessions know, and with a password that has to be prepared.
#[tokio::test(flavor = "multi_thread")]
async fn the_stream_logs_in_as_the_other_sessions_do() {
    let scene = Scene::new(&[], "postgres").await;
    for (role, method, stored) in
        [("one", "scram-sha-256", "scram-sha-256"), ("two", "md5", "md5"), ("three", "password", "md5")]
    {
        scene.server.ask_for(method).await;
        let sql = format!(
            "set password_encryption = '{stored}'; create role {role} login superuser password 'p\u{fb01}\u{a0}x'"
        );
        scene.client.batch_execute(&sql).await.unwrap();
        // Percent-encoded: a ligature and a space that does not break.
        let url = scene.server.url_of(&format!("{role}:p%EF%AC%81%C2%A0x"));
        let setup = Setup::new(&url, &[Destination::redis()], "");
        let bridge = setup.start();
        streams(&scene.client).await;
        assert!(bridge.terminate().await.success(), "{}", setup.log());
    }
}

/// Somebody else's walsender.
struct Receiver {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Receiver {
    fn start(server: &Server) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let child = Command::new(format!("{}/pg_receivewal", address("LB_PG_BIN")))
            .args(["--no-sync", "-d", &server.url(), "-D"])
            .arg(folder.path())
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, _folder: folder }
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Already stopped is as good.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}
