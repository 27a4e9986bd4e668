//! EXECUTE is the only grant that a publisher needs, and all that it gives.

use crate::installation::{Installation, all, handler, listening, one, refusal, run};
use crate::services::unique;

on_every_server!(a_role_may_do_nothing_until_it_is_granted, execute_is_enough_to_publish_and_for_nothing_else);

const OURS: &str = "p.pronamespace = 'lanebridge'::regnamespace";

async fn a_role_may_do_nothing_until_it_is_granted(db: &Installation) {
    let admin = db.connect().await;
    let role = unique("nobody");
    run(&admin, &format!("create role {role} login")).await;
    let executable: Vec<String> = all(
        &admin,
        &format!("select p.oid::regprocedure::text from pg_proc p where {OURS} and has_function_privilege('{role}', p.oid, 'execute')"),
    )
    .await;
    assert_eq!(executable, [""; 0], "a function that the migration forgot to revoke from PUBLIC");
    let client = db.connect_as(&role).await;
    let said = refusal(&client, "select lanebridge.publish('t', 'p')").await;
    assert_eq!(said, "42501 permission denied for function publish");
    run(&admin, &format!("drop role {role}")).await;
}

async fn execute_is_enough_to_publish_and_for_nothing_else(db: &Installation) {
    let admin = db.connect().await;
    let role = unique("publisher");
    handler(&admin, "h", &[">"]).await;
    run(&admin, &format!("create role {role} login")).await;
    let publishing = format!("{OURS} and p.proname in ('publish', 'publish_many', 'publish_batch')");
    let grants: Vec<String> = all(
        &admin,
        &format!("select format('grant execute on function %s to {role}', p.oid::regprocedure) from pg_proc p where {publishing}"),
    )
    .await;
    assert_eq!(grants.len(), 6);
    run(&admin, &grants.join(";")).await;

    let client = db.connect_as(&role).await;
    run(
        &client,
        r#"select lanebridge.publish('t', 'p', 'k', '{"h": "v"}', 'x', '2999-01-01', '{h}');
           select lanebridge.publish('t', 'p'::bytea), lanebridge.publish('t', '1'::json), lanebridge.publish('t', '1'::jsonb);
           select lanebridge.publish_many('[{"type": "t", "payload": 1, "key": "k", "headers": {"h": "v"}, "id": "y", "handlers": ["h"]}]');
           select lanebridge.publish_batch('{t,t}', '{p,p}', '{t,t}', '{k,l}', null, '{x,z}', null, null)"#,
    )
    .await;
    listening(&admin, 60).await;
    run(&client, "select lanebridge.publish('t', 'p', 'k', id => 'x')").await;
    let others: Vec<String> = all(
        &admin,
        &format!("select p.oid::regprocedure::text from pg_proc p where {OURS} and not ({publishing}) and has_function_privilege('{role}', p.oid, 'execute')"),
    )
    .await;
    assert_eq!(others, [""; 0]);
    let relations: Vec<String> = all(
        &admin,
        "select c.oid::regclass::text from pg_class c where c.relnamespace = 'lanebridge'::regnamespace and c.relkind in ('r', 'p', 'S', 'v')",
    )
    .await;
    assert!(relations.len() > 15, "{relations:?}");
    for relation in relations {
        for statement in
            [format!("select * from {relation}"), format!("truncate {relation}"), format!("drop table {relation}")]
        {
            let said = refusal(&client, &statement).await;
            assert!(said.starts_with("42501 ") || said.starts_with("42809 "), "{statement}: {said}");
        }
        let granted: bool = one(
            &admin,
            &format!("select has_table_privilege('{role}', '{relation}', 'insert, update, delete, truncate, references, trigger') or has_any_column_privilege('{role}', '{relation}', 'select, insert, update')"),
        )
        .await;
        assert!(!granted, "{relation}");
    }
    let said = refusal(&client, "create table lanebridge.mine (a int)").await;
    assert_eq!(said, "42501 permission denied for schema lanebridge");
    run(&admin, &format!("drop owned by {role}; drop role {role}")).await;
}
