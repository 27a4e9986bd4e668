//! R14, H109: bytes, not rows, bound what a bridge holds.

use std::time::Duration;

use crate::consumers::Destination;
use crate::drain::drained;
use crate::stage::Stage;

/// 150 payloads of 1 MiB wait; a batch could take 100 of them, twice. The memory is what the configuration says.
#[tokio::test(flavor = "multi_thread")]
async fn large_payloads_are_read_up_to_the_byte_budget() {
    let stage = Stage::with([Destination::redis()], |setup| {
        setup.with("name = \"test\"", "name = \"test\"\nmax_in_flight_bytes = \"8MiB\"")
    })
    .await;
    let Stage { client, destinations, setup, .. } = &stage;
    let publish = "select lanebridge.publish('order.x', repeat(md5(n::text), 32768), 'k' || n, id => 'e' || n)
                     from generate_series(1, 150) n";
    client.execute(publish, &[]).await.unwrap();
    let bridge = setup.start();
    drained(client, Duration::from_secs(60)).await;
    let peak = bridge.peak_mib();
    eprintln!("peak memory: {peak} MiB");
    assert!(peak < 160, "{peak} MiB at the peak");
    assert_eq!(destinations[0].read().await.len(), 150);
    assert!(bridge.terminate().await.success());
    stage.end().await;
}
