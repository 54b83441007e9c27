//! Matching accesses with tensors of the map by index, by name and by file offset.

use moe_trace::correlation::{Correlation, Unresolved, unresolved};
use moe_trace::ops::MUL_MAT;
use moe_trace::record::{EXT_NONE, set_name};
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::{NO_TENSOR, TensorAccessLog};

use super::common::{expert_layer, gpt_oss, read_buffer, read_tensor, record, run_of};
use super::read_tables::{ints, names, read};

/// A record without extension, like those of other tools, that reads `tensor` under the name `name`.
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
fn resolves_names_with_suffixes_of_ggml() {
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
    // The tensor indices of other tools differ and are ignored.
    let mut record = foreign(UP, UP);
    record.sources[0].tensor_idx.set(0);
    assert_eq!(correlation.resolve(&record, 0), Some(index));
    // An unknown file offset.
    record.sources[0].offset_or_buffer_id.set(0);
    assert_eq!(correlation.resolve(&record, 0), Some(index));
}

#[test]
fn resolves_unknown_names_by_file_offset() {
    let (gguf, map) = gpt_oss();
    let correlation = Correlation::new(&map);
    let index = gguf.tensor(UP).unwrap().index;
    assert_eq!(correlation.resolve(&foreign(UP, "(view)"), 0), Some(index));
    let mut part = foreign(UP, "slice");
    let offset = gguf.tensor(UP).unwrap().offset;
    part.sources[0].offset_or_buffer_id.set(offset + 64);
    part.set_source_size(0, 128);
    assert_eq!(correlation.resolve(&part, 0), Some(index));
    // The range exceeds the end of the tensor.
    part.set_source_size(0, gguf.tensor(UP).unwrap().size_bytes);
    assert_eq!(correlation.resolve(&part, 0), None);
}

#[test]
fn does_not_resolve_a_name_with_the_offset_of_another_tensor() {
    let (_, map) = gpt_oss();
    let correlation = Correlation::new(&map);
    let record = foreign("blk.0.ffn_up_exps.weight", UP);
    assert_eq!(correlation.resolve(&record, 0), None);
    let mut buffer = record;
    read_buffer(&mut buffer, UP, 7, 64);
    assert_eq!(
        correlation.resolve(&buffer, 1),
        None,
        "a buffer is not a file"
    );
    assert_eq!(
        correlation.resolve(&buffer, 2),
        None,
        "there is no third source"
    );
}

#[test]
fn lists_unresolved_accesses_and_keeps_them_in_tables() {
    let tmp = tempfile::tempdir().unwrap();
    let (gguf, _) = gpt_oss();
    let mut records = vec![foreign(UP, &format!("{UP} (view)"))];
    let mut elsewhere = foreign("output.weight", "lora.weight");
    elsewhere.sources[0].offset_or_buffer_id.set(1 << 40);
    elsewhere.set_source_size(0, 77);
    records.extend([elsewhere, elsewhere]);
    // An expert operation of another tool, found by the name of its tensor.
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
    let warning = run.unresolved_warning().unwrap();
    assert!(
        warning.starts_with(
            "the offset map does not contain 2 of 4 accesses to the model's files: lora.weight;"
        ),
        "{warning}"
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
fn lists_nothing_without_a_map() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(tmp.path(), &[foreign(UP, "anything")]);
    std::fs::remove_file(tmp.path().join("gguf-map.parquet")).unwrap();
    let bare = moe_trace::Run::open(run.path.join("trace.bin")).unwrap();
    assert_eq!(unresolved(&bare), (Vec::new(), 0));
    assert_eq!(bare.unresolved_warning(), None);
}
