//! Aggregates that are computed in steps and merged.

use super::*;

/// Queries that run in steps, and their results.
fn stepped() -> Vec<(&'static str, Vec<Vec<Value>>)> {
    vec![
        ("SELECT COUNT(*) FROM t", vec![vec![Int(100)]]),
        (
            "SELECT COUNT(weight) AS n, SUM(weight) AS s, AVG(weight) AS a, MIN(weight) AS b, MAX(id) AS c FROM t",
            // 80 weights: 20 times each of 0, 0.25, 0.5 and 0.75.
            vec![vec![
                Int(80),
                Float(30.0),
                Float(0.375),
                Float(0.0),
                Int(99),
            ]],
        ),
        (
            "SELECT layer_id, COUNT(*) AS n, SUM(id) AS s FROM t GROUP BY layer_id ORDER BY layer_id",
            vec![
                vec![Int(0), Int(34), Int(1683)],
                vec![Int(1), Int(33), Int(1617)],
                vec![Int(2), Int(33), Int(1650)],
            ],
        ),
        (
            "SELECT layer_id AS l FROM t GROUP BY layer_id HAVING COUNT(*) > 33 AND MAX(id) = 99",
            vec![vec![Int(0)]],
        ),
        (
            "SELECT layer_id * 2 AS d, ROUND(SUM(id) / COUNT(*), 1) AS mean FROM t WHERE id >= 50 GROUP BY layer_id * 2 ORDER BY d DESC LIMIT 1",
            // 50, 53, …, 98
            vec![vec![Int(4), Float(74.0)]],
        ),
        (
            "SELECT SUM(is_late) AS a, SUM(CASE WHEN is_late THEN id ELSE 0 END) AS b FROM t",
            vec![vec![Int(10), Int(540)]],
        ),
        (
            "SELECT SUM(id) AS s, COUNT(*) AS n, AVG(id) AS a, MAX(phase) AS p FROM t WHERE id > 1000",
            vec![vec![Null, Int(0), Null, Null]],
        ),
        (
            "SELECT DISTINCT layer_id, phase FROM t WHERE layer_id < 1",
            // In the order of their first rows: 0, 3 and 9.
            vec![
                vec![Int(0), text("PROMPT")],
                vec![Int(0), Null],
                vec![Int(0), text("GENERATE")],
            ],
        ),
        (
            "SELECT id FROM t ORDER BY weight DESC NULLS LAST, id DESC LIMIT 2 OFFSET 1",
            vec![vec![Int(91)], vec![Int(87)]],
        ),
        (
            "SELECT l.label, COUNT(*) AS n FROM t JOIN labels AS l ON t.expert_id = l.expert_id GROUP BY l.label ORDER BY l.label",
            // id * 7 % 8 is 0 for 13 ids, and 1, 2 and 3 for 12 ids each.
            vec![vec![text("even"), Int(25)], vec![text("odd"), Int(24)]],
        ),
        (
            "SELECT COUNT(*) AS n FROM labels AS l JOIN t ON t.expert_id = l.expert_id",
            vec![vec![Int(49)]],
        ),
        (
            "SELECT COUNT(*) AS n, COUNT(l.label) AS labelled FROM t LEFT JOIN labels AS l ON t.expert_id = l.expert_id",
            vec![vec![Int(100), Int(49)]],
        ),
        (
            "WITH c AS (SELECT layer_id, COUNT(*) AS n FROM t GROUP BY layer_id) SELECT SUM(n) FROM c",
            vec![vec![Int(100)]],
        ),
    ]
}

#[test]
fn aggregates_of_steps_match_those_of_entire_table() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    for (sql, expected) in stepped() {
        for step_rows in [u64::MAX, GROUP_ROWS, 2 * GROUP_ROWS + 1] {
            let rows = result(&database, sql, &in_steps_of(step_rows));
            assert_eq!(rows, expected, "{sql} in steps of {step_rows} rows");
        }
    }
}

/// After the aggregates are computed, the plan reads no table.
#[test]
fn aggregates_do_not_hold_the_table_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let database = database(dir.path());
    let session = Arc::new(Session::new(&QueryOptions::default()));
    let left = |sql: &str, step_rows| {
        let mut context = SQLContext::new();
        for (name, table) in &database.tables {
            context.register(name, scan::frame(table, &session).unwrap());
        }
        let plan = plan::prepared(&context.execute(sql).unwrap().logical_plan);
        n_rows_read(&merge::reduced(plan, step_rows).unwrap())
    };
    for (sql, _) in stepped() {
        assert!(left(sql, u64::MAX) >= N_ROWS, "{sql}");
        assert_eq!(left(sql, GROUP_ROWS), 0, "{sql}");
    }
    for sql in [
        "SELECT COUNT(DISTINCT expert_id) FROM t",
        "SELECT MEDIAN(id) FROM t",
        "SELECT id, SUM(id) OVER (PARTITION BY layer_id) AS s FROM t",
        "SELECT id FROM t ORDER BY id",
    ] {
        assert_eq!(left(sql, GROUP_ROWS), N_ROWS, "{sql}");
    }
}

/// Rows of the tables in a plan.
fn n_rows_read(plan: &DslPlan) -> u64 {
    if let Some(scan) = scan::Scan::of(plan) {
        return scan.n_rows();
    }
    let mut plan = plan.clone();
    let inputs: u64 = plan::inputs_mut(&mut plan)
        .into_iter()
        .map(|input| n_rows_read(input))
        .sum();
    let list: u64 = plan::input_list_mut(&mut plan)
        .iter()
        .map(n_rows_read)
        .sum();
    inputs + list
}
