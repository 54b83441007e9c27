//! Values of every type in every format.

use super::*;
use crate::support::expect_golden;

/// A row with a value of each type, and one without values.
const TYPES: &str = "SELECT op_index AS \"unsigned\", op_index - 5 AS \"signed\", duration_ns / 1000 AS \"float\", \
     CAST(0.1 AS REAL) AS \"real\", cpu_fallback AS \"bool\", dst_name AS \"text\", NULL AS \"null\", \
     DATE '2026-11-29' AS \"date\" FROM ops WHERE op_index < 2 ORDER BY op_index";
const LISTS: &str = "SELECT token_id, ARRAY_AGG(expert_id) AS experts, ARRAY_AGG(lane) AS lanes, ARRAY_AGG(weight) AS weights \
     FROM routing WHERE layer_id = 2 AND token_id < 2 GROUP BY token_id ORDER BY token_id";

#[test]
fn prints_every_type_in_every_format() {
    let (dir, run) = fixture();
    let mut text = String::new();
    for query in [TYPES, LISTS, "SELECT op FROM ops WHERE op_index < 0"] {
        for format in ["table", "csv", "json", "jsonl", "md"] {
            let printed = run!["--quiet", "sql", query, run, "-o", format];
            text += &format!("-o {format}\n{printed}\n");
            if format == "table" {
                assert_eq!(run!["--quiet", "sql", query, run], printed);
                continue;
            }
            let out = dir.path().join(format!("out.{format}"));
            assert_eq!(run!["--quiet", "sql", query, run, "--out", out, "--force"], "");
            assert_eq!(std::fs::read_to_string(out).unwrap(), printed);
        }
    }
    expect_golden("sql/types.txt", &text);
}

#[test]
fn json_preserves_types() {
    let (_dir, run) = fixture();
    let json = |query: &str| -> serde_json::Value {
        serde_json::from_str(&run!["--quiet", "sql", query, run, "-o", "json"]).unwrap()
    };
    assert_eq!(
        json(TYPES)[0],
        serde_json::json!({
            "unsigned": 0, "signed": -5, "float": 0.5, "real": 0.1, "bool": false, "text": "Qcur-0", "null": null,
            "date": "2026-11-29"
        })
    );
    assert_eq!(
        json(LISTS),
        serde_json::json!([
            {"token_id": 0, "experts": [3, 20, 8, 26], "lanes": ["cpu", "cpu", "cpu", "cpu"], "weights": [0.5, 0.25, 0.125, 0.125]},
            {"token_id": 1, "experts": [3, 21, 13, 31], "lanes": ["cpu", "cpu", "cpu", "cpu"], "weights": [0.5, 0.25, 0.125, 0.125]},
        ])
    );
    assert_eq!(
        json("SELECT buffer_id FROM accesses WHERE buffer_id IS NOT NULL LIMIT 1")[0]["buffer_id"],
        1
    );
    assert_eq!(json("SELECT op FROM ops LIMIT 0"), serde_json::json!([]));
}
