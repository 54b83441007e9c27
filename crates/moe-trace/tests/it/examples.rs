//! The programs in `examples/` write and read a run.

#[allow(dead_code)] // `main`
#[path = "../../examples/read_trace.rs"]
mod read_trace;
#[allow(dead_code)] // `main`
#[path = "../../examples/write_run.rs"]
mod write_run;

use moe_trace::{Run, check};

#[test]
fn written_run_is_read() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    let model = moe_testkit::fixture("random-gpt-oss-F16.gguf");
    let routing = [[3, 1], [0, 3], [3, 2]];
    assert_eq!(write_run::write(&model, &dir, &routing).unwrap(), 3);
    let run = Run::open(&dir).unwrap();
    assert_eq!(check::check(&run), []);
    let counts = read_trace::records_by_operation(&run);
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), [("MUL_MAT_ID", 3)]);
    let operations = run.routing().flat_map(|operation| operation.tokens());
    let first = operations.map(|token| token.experts().next().unwrap().expert_id.0);
    assert_eq!(first.collect::<Vec<_>>(), [3, 0, 3]);
}
