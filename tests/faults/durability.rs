//! What a crash of the database server can undo must never have been sent.

use std::process::Command;

use crate::bridge::Setup;
use crate::consumers::Destination;
use crate::proxy::Proxy;
use crate::services::{Database, address, alone, connect, redis_address};

/// H4, R2: a publisher with `synchronous_commit = off` commits before its WAL is on disk. The moment the event leaves
/// the bridge the server is killed; when it is back, the event must be there: no phantom.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_that_a_crash_of_the_server_can_undo() {
    let _alone = alone().await;
    let server = address("LB_POSTGRES18_URL");
    let admin = connect(&server).await;
    admin.batch_execute("alter system set wal_writer_delay = '10s'").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
    for round in 0..3 {
        let database = Database::create("LB_POSTGRES18_URL").await;
        let destination = Destination::redis();
        let marker = format!("sent-before-flushed-{round}-{}", rand::random::<u32>());
        let redis = address("LB_REDIS_URL");
        let mut proxy = Proxy::holding(redis_address(), &marker).await;
        let setup = Setup::new(&database.url(), std::slice::from_ref(&destination), "");
        let setup = setup.with(&redis, &format!("redis://{}", proxy.address)).with("\"50ms\"", "\"10ms\"");
        setup.run(&["migrate"]);
        let bridge = setup.start();
        crate::services::eventually("it owns lanes", std::time::Duration::from_secs(20), || {
            std::future::ready(setup.log().contains("own lanes"))
        })
        .await;

        let client = database.connect().await;
        let row = client.query_one("select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)", &[]).await.unwrap();
        let postmaster: String = row.get(0);
        client.batch_execute("set synchronous_commit = off").await.unwrap();
        let publish = "select lanebridge.publish('order.x', 'p', 'k', id => $1)";
        client.execute(publish, &[&marker]).await.unwrap();
        proxy.held().await;
        assert!(Command::new("kill").args(["-9", &postmaster]).status().unwrap().success());
        let started = Command::new(address("LB_SERVICES")).args(["start", "postgres18"]).status().unwrap();
        assert!(started.success(), "scripts/services start postgres18");

        let after = database.connect().await;
        let sql = "select count(*) from lanebridge.events where id = $1";
        let kept: i64 = after.query_one(sql, &[&marker]).await.unwrap().get(0);
        assert_eq!(kept, 1, "round {round}: sent, and then undone by the crash: a phantom");
        bridge.kill();
        database.drop().await;
    }
    let admin = connect(&server).await;
    admin.batch_execute("alter system reset wal_writer_delay").await.unwrap();
    admin.batch_execute("select pg_reload_conf()").await.unwrap();
}
