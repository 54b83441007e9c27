//! Which entry of the map an access is: by index, by name, by place, or none.

use moe_trace::correlation::{Correlation, Unresolved, unresolved};
use moe_trace::ops::MUL_MAT;
use moe_trace::record::{EXT_NONE, set_name};
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::{NO_TENSOR, TensorAccessLog};

use super::common::{expert_layer, gpt_oss, read_buffer, read_tensor, record, run_of};
use super::read_tables::{ints, names, read};

/// A plain v4 record, as other tools write them, that reads a tensor under some name.
fn foreign(tensor: &str, name: &str) -> TensorAccessLog {
    let (gguf, _) = gpt_oss();
    let mut record = record(1, MUL_MAT, "x");
    read_tensor(&mut record, &gguf, tensor);
    record.ext_version = EXT_NONE;
    record.sources[0].tensor_idx.set(NO_TENSOR);
    set_name(&mut record.sources[0].name, name);
    record
}

const UP: &str = "blk.1.ffn_up_exps.weight";

#[test]
fn names_resolve_whatever_ggml_appends() {
    let (gguf, map) = gpt_oss();
    let correlation = Correlation::new(&map);
    let index = gguf.tensor(UP).unwrap().index;
    for suffix in [
        "",
        " (view)",
        " (reshaped) (permuted)",
        " (transposed)",
        " (cont)",
        " (copy)",
    ] {
        let record = foreign(UP, &format!("{UP}{suffix}"));
        assert_eq!(correlation.resolve(&record, 0), Some(index), "{suffix}");
    }
    // Another tool's own index is no reason to doubt the name.
    let mut record = foreign(UP, UP);
    record.sources[0].tensor_idx.set(0);
    assert_eq!(correlation.resolve(&record, 0), Some(index));
    // A place that was not known.
    record.sources[0].offset_or_buffer_id.set(0);
    assert_eq!(correlation.resolve(&record, 0), Some(index));
}

#[test]
fn a_name_that_is_no_tensors_is_found_by_its_place() {
    let (gguf, map) = gpt_oss();
    let correlation = Correlation::new(&map);
    let index = gguf.tensor(UP).unwrap().index;
    assert_eq!(correlation.resolve(&foreign(UP, "(view)"), 0), Some(index));
    let mut part = foreign(UP, "slice");
    let offset = gguf.tensor(UP).unwrap().offset;
    part.sources[0].offset_or_buffer_id.set(offset + 64);
    part.set_source_size(0, 128);
    assert_eq!(correlation.resolve(&part, 0), Some(index));
    // Beyond the tensor's end: it is in none.
    part.set_source_size(0, gguf.tensor(UP).unwrap().size_bytes);
    assert_eq!(correlation.resolve(&part, 0), None);
}

#[test]
fn a_name_whose_place_is_elsewhere_is_of_another_model() {
    let (_, map) = gpt_oss();
    let correlation = Correlation::new(&map);
    let record = foreign("blk.0.ffn_up_exps.weight", UP);
    assert_eq!(correlation.resolve(&record, 0), None);
    let mut buffer = record;
    read_buffer(&mut buffer, UP, 7, 64);
    assert_eq!(correlation.resolve(&buffer, 1), None, "a buffer is no file");
    assert_eq!(
        correlation.resolve(&buffer, 2),
        None,
        "there is no third source"
    );
}

#[test]
fn what_does_not_resolve_is_listed_and_stays_in_the_tables() {
    let tmp = tempfile::tempdir().unwrap();
    let (gguf, _) = gpt_oss();
    let mut records = vec![foreign(UP, &format!("{UP} (view)"))];
    let mut elsewhere = foreign("output.weight", "lora.weight");
    elsewhere.sources[0].offset_or_buffer_id.set(1 << 40);
    elsewhere.set_source_size(0, 77);
    records.extend([elsewhere, elsewhere]);
    // The experts of an operation of another tool, by the name of its tensor.
    let mut experts = expert_layer(&gguf, 10, 1, 0, &[&[5, 2, 9, 3]])[1];
    experts.ext_version = EXT_NONE;
    experts.sources[0].tensor_idx.set(NO_TENSOR);
    records.push(experts);
    for (timestamp, record) in (1..).zip(&mut records) {
        record.timestamp_ns.set(timestamp);
    }
    let run = run_of(&tmp.path().join("run"), &records);
    let expected = Unresolved {
        name: "lora.weight".into(),
        file_offset: 1 << 40,
        size_bytes: 77,
        n_accesses: 2,
    };
    assert_eq!(unresolved(&run), (vec![expected], 4));
    let remark = run.unresolved_remark().unwrap();
    assert!(
        remark.starts_with("2 of 4 accesses to the model's file are not in its map: lora.weight;"),
        "{remark}"
    );

    write_tables(&run, tmp.path(), TableOptions::default()).unwrap();
    let accesses = read(&tmp.path().join("accesses.parquet"));
    let rows: Vec<_> = names(&accesses, "tensor")
        .into_iter()
        .zip(ints(&accesses, "expert_id"))
        .collect();
    let expect = |name: &str, expert| (name.to_owned(), expert);
    assert_eq!(
        rows[..3],
        [
            expect(&format!("{UP} (view)"), -1),
            expect("lora.weight", -1),
            expect("lora.weight", -1)
        ]
    );
    assert_eq!(rows[3..7], [2, 3, 5, 9].map(|expert| expect(UP, expert)));
}

#[test]
fn without_a_map_nothing_is_looked_at() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(tmp.path(), &[foreign(UP, "anything")]);
    std::fs::remove_file(tmp.path().join("gguf-map.parquet")).unwrap();
    let bare = moe_trace::Run::open(run.path.join("trace.bin")).unwrap();
    assert_eq!(unresolved(&bare), (Vec::new(), 0));
    assert_eq!(bare.unresolved_remark(), None);
}
