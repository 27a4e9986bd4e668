//! What real brokers refuse while they run: each time no attempt is spent, the deliveries wait, and all arrive in order.

use std::time::Duration;

use async_nats::jetstream::stream::DiscardPolicy;
use tokio_postgres::Client;

use crate::broker::Broker;
use crate::consumers::{Destination, jetstream_at, redis_at};
use crate::drain::drained;
use crate::ledger::judge;
use crate::stage::Stage;

const SOON: Duration = Duration::from_secs(20);

async fn publish(client: &Client, id: &str) {
    let sql = "insert into truth select $1, 'k', lanebridge.publish('order.x', 'p', 'k', id => $1::text), 'p'";
    client.execute(sql, &[&id]).await.unwrap();
}

/// An event that meets the trouble is refused with `code`.
async fn refused(stage: &Stage, code: &str) {
    publish(&stage.client, code).await;
    stage.setup.says(code, SOON).await;
    let spent = "select count(*) from lanebridge.deliveries where attempts > 0";
    let spent: i64 = stage.client.query_one(spent, &[]).await.unwrap().get(0);
    assert_eq!(spent, 0, "{code}: {}", stage.setup.log());
}

/// H80, H82: no memory, a replica now, a right taken away, a key of another type in the stream's place.
#[tokio::test(flavor = "multi_thread")]
async fn what_redis_refuses_waits() {
    let broker = Broker::start("redis").await;
    let stage = Stage::new([Destination::redis_at(broker.url())]).await;
    let Destination::Redis { stream, server } = &stage.destinations[0] else { panic!("a stream of Redis") };
    let mut redis = redis_at(server).await;
    let bridge = stage.setup.start();
    publish(&stage.client, "before").await;
    drained(&stage.client, SOON).await;
    let troubles = [
        ("OOM", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("READONLY", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("NOPERM", "ACL SETUSER default -xadd", "ACL SETUSER default +xadd"),
        ("WRONGTYPE", "RENAME {} aside;SET {} x", "RENAME aside {}"),
    ];
    for (code, begin, end) in troubles {
        for (commands, refuses) in [(begin, true), (end, false)] {
            for command in commands.replace("{}", stream).split(';') {
                let words: Vec<&str> = command.split(' ').collect();
                redis::cmd(words[0]).arg(&words[1..]).exec_async(&mut redis).await.unwrap();
            }
            if refuses {
                refused(&stage, code).await;
            }
        }
        drained(&stage.client, SOON).await;
    }
    assert!(bridge.terminate().await.success());
    judge(&stage.client, &stage.destinations[0].read().await).await.must_be_clean("redis", 0);
    stage.end().await;
}

/// H76, H77: a stream that is deleted and made again, then one that is full and discards what is new.
#[tokio::test(flavor = "multi_thread")]
async fn what_nats_refuses_waits() {
    // One subject for all: where each event names its own, a missing stream is that delivery's trouble.
    let stage = Stage::with([Destination::nats().await], |setup| setup.with("{type}", "x")).await;
    let Destination::Nats { subject, server } = &stage.destinations[0] else { panic!("a stream of NATS") };
    let js = jetstream_at(server).await;
    let mut config = js.get_stream(subject).await.unwrap().cached_info().config.clone();
    let bridge = stage.setup.start();
    // Known to the bridge before it goes.
    publish(&stage.client, "before").await;
    drained(&stage.client, SOON).await;
    js.delete_stream(subject).await.unwrap();
    stage.client.batch_execute("delete from truth").await.unwrap();
    refused(&stage, "STREAM_NOT_FOUND").await;
    js.create_stream(config.clone()).await.unwrap();
    drained(&stage.client, SOON).await;

    let room = config.max_messages;
    (config.max_messages, config.discard) = (1, DiscardPolicy::New);
    js.update_stream(config.clone()).await.unwrap();
    refused(&stage, "10077").await;
    config.max_messages = room;
    js.update_stream(config).await.unwrap();
    drained(&stage.client, SOON).await;
    assert!(bridge.terminate().await.success());
    judge(&stage.client, &stage.destinations[0].read().await).await.must_be_clean("nats", 0);
    stage.end().await;
}
