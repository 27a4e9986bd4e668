//! The ledger of a bridge that streams: killed, restarted, cut off from its walsender, given savepoints and one huge
//! transaction. The stream is proved to be up each time; without that, the poll alone would pass these tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::bridge::{BATCH, BATCHES, Setup};
use crate::consumers::Destination;
use crate::drain::{drained, seed};
use crate::ledger::judge;
use crate::publishers::{Load, TRUTH, publish};
use crate::server::Server;
use crate::services::{Database, eventually, shared};
use crate::stage::Stage;
use crate::wal::{patient, soak, source, streamed, streams, watchful};

const SOON: Duration = Duration::from_secs(20);
/// Far below the polls and sweeps of a patient bridge, far above what the stream takes on a machine that is busy.
const BY_THE_STREAM: Duration = Duration::from_secs(8);
const IS_UP: &str = "the stream of the write-ahead log is up";

/// $1 id, $2 key, $3 payload; with its line of the truth, in one transaction.
const PUBLISH: &str = "with p as (select lanebridge.publish('order.x', $3::text, $2::text, id => $1::text) as seq)
    insert into truth select $1, $2, seq, $3 from p";

fn only_by_the_stream(setup: Setup) -> Setup {
    watchful(setup.with("[http]", "source = \"wal\"\n[http]"))
}

/// I1-I4: a bridge that streams is killed in the middle, and the next one streams as well.
async fn a_kill_of_a_bridge_that_streams_repeats_at_most_the_window(server: &str) {
    let _shared = shared().await;
    let database = Database::create(server).await;
    let client = database.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destinations = Destination::all().await;
    let setup = only_by_the_stream(Setup::new(&database.url(), &destinations, ""));
    setup.run(&["migrate"]);
    let load = Load { seed: seed(), writers: 4, keys: 200, events: 8_000 };
    let committed = Arc::new(AtomicUsize::new(0));
    let first = setup.start();
    streams(&client).await;
    let killing = async {
        eventually("half is committed", Duration::from_secs(120), || {
            std::future::ready(committed.load(Ordering::Relaxed) > load.events / 2)
        })
        .await;
        streams(&client).await;
        first.kill();
        let second = setup.start();
        // The killed one's line says "wal" until it is fenced.
        eventually("the next one streams", SOON, || std::future::ready(setup.log().matches(IS_UP).count() >= 2)).await;
        streams(&client).await;
        second
    };
    let (rolled_back, second) = tokio::join!(publish(&database, load, Arc::clone(&committed)), killing);
    assert!(!rolled_back.is_empty());
    // Whatever the machine's speed, some events are published while the second one streams.
    for n in 0..50 {
        let id = format!("late-{n}");
        client.execute(PUBLISH, &[&id, &format!("late-key-{n}"), &"p"]).await.unwrap();
    }
    drained(&client, Duration::from_secs(120)).await;
    assert_eq!(source(&client).await.as_deref(), Some("wal"));
    assert!(second.terminate().await.success(), "{}", setup.log());
    assert!(streamed(&setup.log()) > 0, "the stream was of no use: {}", setup.log());
    for destination in &destinations {
        let verdict = judge(&client, &destination.read().await).await;
        verdict.must_be_clean(&format!("{server} {}", destination.name()), BATCH * BATCHES);
        destination.remove().await;
    }
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_of_a_bridge_that_streams_repeats_at_most_the_window_on_debians_postgres() {
    a_kill_of_a_bridge_that_streams_repeats_at_most_the_window("LB_POSTGRES_URL").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_of_a_bridge_that_streams_repeats_at_most_the_window_on_postgres_18() {
    a_kill_of_a_bridge_that_streams_repeats_at_most_the_window("LB_POSTGRES18_URL").await;
}

/// H18: the walsender is ended as soon as there is one, at most once in half a second. Nothing of the path of delivery
/// is hurt by that, so nothing is repeated.
#[tokio::test(flavor = "multi_thread")]
async fn a_walsender_that_is_ended_again_and_again_duplicates_nothing() {
    let stage = Stage::with(Destination::all().await, only_by_the_stream).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let ends = if soak() { 60 } else { 7 };
    let load = Load { seed: seed(), writers: 4, keys: 100, events: usize::MAX / 2 };
    let committed = Arc::new(AtomicUsize::new(0));
    let bridge = setup.start();
    streams(client).await;
    let mut published = 0;
    let ending = async {
        let mut ended = 0;
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        while ended < ends {
            tick.tick().await;
            // Only one that sends: while its slot is made, ending it is another fault.
            let sql = "select count(pg_terminate_backend(r.pid)) from pg_stat_replication r join pg_stat_activity a
                        on a.pid = r.pid where a.datname = current_database() and r.state = 'streaming'";
            ended += client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
        }
        published = committed.load(Ordering::Relaxed);
        committed.fetch_add(load.events, Ordering::Relaxed);
    };
    tokio::join!(publish(database, load, Arc::clone(&committed)), ending);
    assert!(published > 300, "{published} events are no load");
    drained(client, Duration::from_secs(60)).await;
    streams(client).await;
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    for destination in destinations {
        let verdict = judge(client, &destination.read().await).await;
        verdict.must_be_clean(&format!("{} after {ends} ends", destination.name()), 0);
    }
    stage.end().await;
}

/// H8: what commits between the first poll and the first row of the stream is in neither. The bridge looks again when
/// the stream has begun, so nothing waits for the next poll, which here is 20 s away.
#[tokio::test(flavor = "multi_thread")]
async fn a_join_leaves_no_event_to_the_next_poll() {
    let stage = Stage::with([Destination::redis()], patient).await;
    let Stage { database, client, destinations, setup, .. } = &stage;
    let rounds = if soak() { 100 } else { 8 };
    let publisher = database.connect().await;
    let statement = publisher.prepare(PUBLISH).await.unwrap();
    let (mut n, mut slowest) = (0, Duration::ZERO);
    for round in 0..rounds {
        let up = setup.log().matches(IS_UP).count();
        let bridge = setup.start();
        // Each key once: a later event of its lane would wake the bridge for what was missed there.
        while setup.log().matches(IS_UP).count() == up {
            n += 1;
            let (id, key) = (format!("e{n}"), format!("key-{n}"));
            publisher.execute(&statement, &[&id, &key, &"p"]).await.unwrap();
        }
        let began = Instant::now();
        drained(client, SOON).await;
        slowest = slowest.max(began.elapsed());
        assert!(slowest < BY_THE_STREAM, "round {round}: {slowest:?}, which is a poll, not the join");
        assert!(bridge.terminate().await.success(), "{}", setup.log());
    }
    let verdict = judge(client, &destinations[0].read().await).await;
    verdict.must_be_clean(&format!("{rounds} joins, slowest {slowest:?}"), 0);
    stage.end().await;
}

/// H10, H15: rows whose xmin is a subtransaction's, beside such that were undone, nested both ways.
#[tokio::test(flavor = "multi_thread")]
async fn of_savepoints_exactly_what_was_committed_arrives() {
    let stage = Stage::with([Destination::redis()], patient).await;
    let Stage { client, destinations, setup, .. } = &stage;
    let bridge = setup.start();
    streams(client).await;
    let rounds = 20;
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let event = |name: &str| {
            format!(
                "insert into truth select '{round}-{name}', 'k', lanebridge.publish('order.x', '{name}', 'k',
                   id => '{round}-{name}'), '{name}';"
            )
        };
        // Of ten in blocks with a handler for exceptions, seven stay.
        let blocks = format!(
            "do $$ declare id text; begin for n in 1..10 loop begin
               id := '{round}-block-' || n;
               insert into truth select id, 'key-' || n % 4, lanebridge.publish('order.x', id, 'key-' || n % 4, id => id), id;
               if n % 3 = 0 then raise exception 'undone'; end if;
             exception when raise_exception then null; end; end loop; end $$;"
        );
        let sql = format!(
            "begin; savepoint a; {} rollback to a; savepoint b; savepoint c; {} release c; savepoint d; {} rollback to d;
             {blocks} release b; savepoint e; savepoint f; {} release f; rollback to e; {} commit;
             begin; savepoint g; {} release g; rollback;",
            event("undone-1"),
            event("kept-1"),
            event("undone-2"),
            event("undone-3"),
            event("kept-2"),
            event("undone-4"),
        );
        client.batch_execute(&sql).await.unwrap();
        let began = Instant::now();
        drained(client, SOON).await;
        slowest = slowest.max(began.elapsed());
    }
    eprintln!("slowest {slowest:?}");
    assert!(slowest < BY_THE_STREAM, "{slowest:?}, which is a poll, not the stream");
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    let verdict = judge(client, &destinations[0].read().await).await;
    assert_eq!(verdict.committed, rounds * 9);
    verdict.must_be_clean("savepoints", 0);
    stage.end().await;
}

/// Keys of the lanes below 128 only; `n` numbers the events.
async fn publish_huge(client: &Client, events: i32) {
    let sql = "
    with k as (select key, row_number() over () - 1 as at
                 from (select 'huge-key-' || n as key from generate_series(1, 2000) n) x
                where hashtextextended(key, 0) & 255 < 128),
         b as (select n, 'huge-' || n as id, k.key, repeat(md5(n::text), 10) as payload
                 from generate_series(1, $1::integer) n join k on k.at = n % (select count(*) from k)),
         a as (select array_agg('order.x'::text order by n) types, array_agg(convert_to(payload, 'UTF8') order by n) payloads,
                      array_agg('t'::text order by n) formats, array_agg(key order by n) keys, array_agg(id order by n) ids
                 from b),
         p as (select p.ord, p.seq
                 from a, lanebridge.publish_batch(a.types, a.payloads, a.formats, a.keys, null, a.ids, null, null) p)
    insert into truth select b.id, b.key, p.seq, b.payload from p join b on b.n = p.ord";
    assert_eq!(client.execute(sql, &[&events]).await.unwrap(), u64::try_from(events).unwrap());
}

/// H25, R14: one transaction with 200,000 events of which the bridge remembers little; the lanes that it does not touch
/// go on while it is written, decoded and delivered. On a server of its own: no slot can be made on one where such a
/// transaction is open (H17).
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_of_200_000_events_stops_no_other_lane() {
    let _shared = shared().await;
    let server = Server::start(&[]).await;
    let client = server.connect().await;
    client.batch_execute(TRUTH).await.unwrap();
    let destination = Destination::redis();
    let setup = only_by_the_stream(Setup::new(&server.url(), std::slice::from_ref(&destination), ""));
    setup.run(&["migrate"]);
    let bridge = setup.start();
    streams(&client).await;
    let others = "select 'other-key-' || n from generate_series(1, 4000) n
                   where hashtextextended('other-key-' || n, 0) & 255 >= 128";
    let others: Vec<String> = client.query(others, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let writer = server.connect().await;
    let writing = tokio::spawn(async move { publish_huge(&writer, 200_000).await });
    let began = Instant::now();
    let huge_left = "select exists (select from lanebridge.deliveries where lane < 128)";
    let left = "select exists (select from lanebridge.deliveries where lane >= 128)";
    let (mut during, mut after) = (Vec::new(), Vec::new());
    for (n, key) in others.iter().cycle().enumerate() {
        let writes = !writing.is_finished();
        if !writes && !client.query_one(huge_left, &[]).await.unwrap().get::<_, bool>(0) {
            break;
        }
        let asked = Instant::now();
        client.execute(PUBLISH, &[&format!("other-{n}"), key, &"p"]).await.unwrap();
        eventually("another lane's event is delivered", SOON, || async {
            !client.query_one(left, &[]).await.unwrap().get::<_, bool>(0)
        })
        .await;
        if writes { &mut during } else { &mut after }.push(asked.elapsed());
    }
    writing.await.unwrap();
    let took = began.elapsed();
    drained(&client, SOON).await;
    let peak = bridge.peak_mib();
    let of = |name, times: &[Duration]| format!("{} {name} at most {:?}", times.len(), times.iter().max());
    eprintln!("all in {took:?}: {}, {}; peak memory: {peak} MiB", of("during", &during), of("after", &after));
    assert!(during.len() > 5 && after.len() > 5, "there was no meanwhile");
    assert!(peak < 160, "{peak} MiB at the peak");
    assert!(bridge.terminate().await.success(), "{}", setup.log());
    judge(&client, &destination.read().await).await.must_be_clean("200,000 in one transaction", 0);
    destination.remove().await;
}
