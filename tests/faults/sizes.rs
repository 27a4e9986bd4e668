//! B3, B4: what publishing lets through has to fit the brokers with its key, its headers and its attributes.

use std::time::Duration;

use serde_json::Value;

use crate::consumers::Destination;
use crate::drain::drained;
use crate::services::eventually;
use crate::stage::Stage;

/// Of `$1` bytes that no compression makes smaller, with the largest key, id, type and headers that publishing takes.
const PUBLISH: &str = "
select lanebridge.publish('order.' || repeat('x', 249), substring(p.bytes for $1), repeat('k', 4096),
           (select jsonb_object_agg(lpad(n::text, 6, 'h'), repeat('v', 250)) from generate_series(1, 64) n), repeat('i', 512))
  from (select string_agg(sha512(n::text::bytea), '') as bytes from generate_series(1, 16384) n) p";

/// What doctor says about the limits of each sink, and what to do.
fn limits(stage: &Stage) -> Vec<(String, String)> {
    let rows: Vec<Value> = serde_json::from_str(&stage.setup.run(&["doctor", "--json"])).unwrap();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let about = rows.iter().filter(|row| row["detail"].as_str().unwrap().contains("max_payload_bytes"));
    about.map(|row| (text(row, "what"), text(row, "fix"))).collect()
}

/// A payload of exactly max_payload_bytes was accepted, and dead at brokers with default settings: headers come on top.
#[tokio::test(flavor = "multi_thread")]
async fn the_largest_event_arrives_where_doctor_sees_no_limit_in_its_way() {
    let mut stage = Stage::new(Destination::all().await).await;
    let said = limits(&stage);
    let sinks: Vec<&str> = said.iter().map(|(what, _)| what.as_str()).collect();
    assert_eq!(sinks, ["sink kafka", "sink nats"], "Redis takes 512 MiB: {said:?}");
    let raise = ["--add-config max.message.bytes=1114112;", "max_payload: 1114112 in"];
    for ((_, fix), raise) in said.iter().zip(raise) {
        assert!(fix.contains(raise), "{fix}");
    }

    // GIVEN the default limits THEN it is as doctor says.
    stage.client.execute(PUBLISH, &[&1_048_576]).await.unwrap();
    let bridge = stage.setup.start();
    eventually("two of three are dead", Duration::from_secs(20), || async {
        let row = stage.client.query_one("select count(*) from lanebridge.dead", &[]).await.unwrap();
        row.get::<_, i64>(0) == 2
    })
    .await;
    drained(&stage.client, Duration::from_secs(20)).await;
    assert!(bridge.terminate().await.success());
    stage.client.batch_execute("truncate lanebridge.dead, lanebridge.event_ids").await.unwrap();

    // WHEN its last words are followed THEN everything arrives.
    let fits: i32 = said.iter().map(|(_, fix)| fix.rsplit(' ').next().unwrap().parse().unwrap()).min().unwrap();
    assert!((900_000..1_000_000).contains(&fits), "{fits}");
    stage.setup = stage.setup.with("[postgres]\n", &format!("[postgres]\nmax_payload_bytes = {fits}\n"));
    assert_eq!(limits(&stage), []);
    // It writes the new limit, too.
    stage.setup.run(&["migrate"]);
    let bridge = stage.setup.start();
    stage.client.execute(PUBLISH, &[&fits]).await.unwrap();
    drained(&stage.client, Duration::from_secs(20)).await;
    for destination in &stage.destinations {
        let held = destination.read().await;
        let whole = held.last().filter(|last| last.payload.len() == usize::try_from(fits).unwrap());
        assert!(whole.is_some(), "{destination:?} holds {}", held.len());
    }
    assert!(bridge.terminate().await.success());
    stage.end().await;
}
