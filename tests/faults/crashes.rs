//! D9: a delivery that kills its bridge is found, charged and buried; those beside it are not.

use std::time::Duration;

use crate::consumers::Destination;
use crate::drain::deliveries_left;
use crate::proxy::Proxy;
use crate::services::{address, eventually, redis_address};
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(60);
const ATTEMPTS: u32 = 2;

/// Whoever sends the marked payload is killed at that moment, each time. Bridges come and go until it is dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_kills_every_bridge_is_buried_and_no_other_is_charged() {
    let marker = format!("kills-{}", rand::random::<u32>());
    let mut proxy = Proxy::holding(redis_address(), &marker).await;
    let redis = address("LB_REDIS_URL");
    let stage = Stage::with([Destination::redis()], |setup| {
        setup
            .with(&redis, &format!("redis://{}", proxy.address))
            .with("max_attempts = 20", &format!("max_attempts = {ATTEMPTS}"))
    })
    .await;
    let Stage { client, destinations, setup, .. } = &stage;
    client
        .execute(
            "select lanebridge.publish('order.x', case when n = 70 then $1 else 'p' end, 'k' || n % 30, id => n::text)
               from generate_series(1, 150) n order by n",
            &[&marker],
        )
        .await
        .unwrap();
    let dead =
        || async { client.query_one("select count(*) from lanebridge.dead", &[]).await.unwrap().get::<_, i64>(0) };
    let mut killed = 0;
    let last = loop {
        let bridge = setup.start();
        tokio::select! {
            () = proxy.held() => {}
            () = eventually("it is dead", SOON, || async { dead().await == 1 }) => break bridge,
        }
        bridge.kill();
        killed += 1;
        assert!(killed < 20, "{}", setup.log());
        proxy.rearm();
    };
    // Behind the dead one, of its key: 100 and 130.
    eventually("all others are delivered", SOON, || async { deliveries_left(client).await == 2 }).await;
    eprintln!("{killed} bridges were killed");
    assert!(last.terminate().await.success(), "{}", setup.log());
    let sql = "select (select string_agg(e.id || ' ' || x.attempts || ' ' || x.code, ',') from lanebridge.dead x
                         join lanebridge.events e using (seq)),
                      (select count(*) from lanebridge.deliveries where attempts > 0),
                      (select string_agg(distinct e.id, ',') from lanebridge.failures join lanebridge.events e using (seq)),
                      (select count(*) from lanebridge.suspects where seq not in (select seq from lanebridge.deliveries))";
    let row = client.query_one(sql, &[]).await.unwrap();
    let found: (String, i64, String, i64) = (row.get(0), row.get(1), row.get(2), row.get(3));
    assert_eq!(found, (format!("70 {ATTEMPTS} CRASHED"), 0, "70".to_owned(), 0));
    let received: std::collections::BTreeSet<String> =
        destinations[0].read().await.into_iter().map(|received| received.id).collect();
    assert_eq!(received.len(), 147, "{received:?}");
    stage.end().await;
}
