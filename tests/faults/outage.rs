//! Brokers that are really stopped, under load, and come back.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::ledger::judge;
use crate::publishers::{Load, TRUTH, publish};
use crate::services::{Database, address, alone, eventually};

/// How long each broker is away.
const OUTAGE: Duration = Duration::from_secs(60);
/// Between the stops of two brokers: long enough to see that those still up get everything.
const APART: Duration = Duration::from_secs(20);

async fn waiting(client: &Client, handler: &str) -> i64 {
    let sql =
        "select count(*) from lanebridge.deliveries d join lanebridge.handlers h on h.id = d.handler where h.name = $1";
    client.query_one(sql, &[&handler]).await.unwrap().get(0)
}

fn service(command: &str, name: &str) {
    let status = Command::new(address("LB_SERVICES")).args([command, name]).status().expect("run scripts/services");
    assert!(status.success(), "scripts/services {command} {name}: {status}");
}

/// I1-I5 and R12 under an outage of each broker: no attempt is spent, those that are up go on, memory stays, and all
/// is delivered after.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_spends_no_attempt_and_stops_nobody_else() {
    let _alone = alone().await;
    let database = Database::create("LB_POSTGRES_URL").await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destinations = Destination::all().await;
    let setup = Setup::new(&database.url(), &destinations, "");
    setup.run(&["migrate"]);
    let bridge = setup.start();
    let names: Vec<&str> = destinations.iter().map(Destination::name).collect();

    let start = Instant::now();
    let committed = Arc::new(AtomicUsize::new(0));
    let mut highest_memory = 0;
    let outage = async {
        let at = |moment: Duration| tokio::time::sleep_until((start + moment).into());
        for (n, name) in (0..).zip(&names) {
            at(Duration::from_secs(5) + APART * n).await;
            service("stop", name);
            let up: Vec<&&str> = names.iter().skip(usize::try_from(n).unwrap() + 1).collect();
            for other in up {
                let handler = format!("to-{other}");
                // Publishing goes on, so "all of what was there" is what can be asked for.
                let newest: i64 =
                    client.query_one("select coalesce(max(seq), 0) from truth", &[]).await.unwrap().get(0);
                eventually(&format!("{other} gets its events while {name} is away"), APART, || async {
                    let sql =
                        "select count(*) from lanebridge.deliveries d join lanebridge.handlers h on h.id = d.handler
                               where h.name = $1 and d.seq <= $2";
                    client.query_one(sql, &[&handler, &newest]).await.unwrap().get::<_, i64>(0) == 0
                })
                .await;
            }
            eventually(&format!("deliveries wait for {name}"), APART, || async {
                waiting(&client, &format!("to-{name}")).await > 0
            })
            .await;
        }
        for (n, name) in (0..).zip(&names) {
            at(Duration::from_secs(5) + APART * n + OUTAGE).await;
            highest_memory = highest_memory.max(bridge.resident_mib());
            let spent = "select count(*) from lanebridge.deliveries where attempts > 0 or due_at is not null";
            assert_eq!(client.query_one(spent, &[]).await.unwrap().get::<_, i64>(0), 0, "attempts were spent");
            service("start", name);
        }
    };
    let publishing = async {
        // In portions, so that load lasts through the outages whatever the machine's speed.
        let mut events = 0;
        while start.elapsed() < OUTAGE + APART * 2 {
            events += 500;
            let load = Load { seed: rand::random(), writers: 4, keys: 200, events };
            publish(&database, load, Arc::clone(&committed)).await;
            let due = start + Duration::from_secs(events as u64 / 500);
            tokio::time::sleep_until(due.into()).await;
        }
    };
    tokio::join!(outage, publishing);
    eventually("every delivery is completed", Duration::from_secs(90), || async {
        client.query_one("select count(*) from lanebridge.deliveries", &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    for table in ["failures", "dead"] {
        let rows: i64 =
            client.query_one(&format!("select count(*) from lanebridge.{table}"), &[]).await.unwrap().get(0);
        assert_eq!(rows, 0, "an outage wrote to {table}");
    }
    eprintln!("highest resident memory: {highest_memory} MiB");
    assert!(highest_memory < 256, "{highest_memory} MiB resident");
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let log_bytes = setup.log().len();
    assert!(log_bytes < 100_000, "an outage filled the log: {log_bytes} bytes");
    for destination in &destinations {
        // What was in flight when the broker went away is the window; each failed trial may add one.
        let verdict = judge(&client, &destination.read().await).await;
        verdict.must_be_clean(destination.name(), 2 * BATCH * BATCHES);
        destination.remove().await;
    }
    database.drop().await;
}
