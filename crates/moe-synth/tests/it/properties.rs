//! Properties of random files: round trips, correct reports, no panics.

use moe_gguf::check::{Refusal, check};
use moe_gguf::layers::layer_order;
use moe_gguf::map::OffsetMap;
use moe_gguf::tensor_tracer::{memory_map, write_gguf_dump_csv};
use moe_gguf::{Array, Error, GgmlType, Gguf, Value, ValueType};
use moe_synth::write::{Header, Writer};
use moe_testkit::gguf::Raw;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::{Index, select};

type Shape = (GgmlType, Vec<u64>);

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".{0,8}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
    ]
}

fn array(ty: ValueType, values: Vec<Value>) -> Value {
    Value::Array(Box::new(Array::new(ty, values).unwrap()))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => scalar(),
        1 => (scalar(), 0_usize..5).prop_map(|(v, n)| array(v.value_type(), vec![v; n])),
        1 => vec(".{0,8}", 0..5).prop_map(|texts| {
            array(ValueType::String, texts.into_iter().map(Value::String).collect())
        }),
    ]
}

fn shape() -> impl Strategy<Value = Shape> {
    (select(GgmlType::ALL), 0_u64..3, vec(0_u64..4, 0..4)).prop_map(|(ty, blocks, rest)| {
        let ne = std::iter::once(blocks * ty.block_size())
            .chain(rest)
            .collect();
        (ty, ne)
    })
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z_.0-9é]{0,20}",
        "blk\\.[0-9]{1,6}\\.ffn_(gate|up|down|gate_up)(_exps|_shexp|_chexps)?(\\.[0-9]{1,2})?\\.(weight|bias)",
    ]
}

prop_compose! {
    /// Generates a valid header, and its data.
    fn file()(
        alignment in proptest::option::of(0_u32..13),
        values in btree_map("[a-z.]{1,12}", value(), 0..6),
        tensors in btree_map(name(), shape(), 0..6),
        seed in any::<u8>(),
    ) -> (Header, Vec<u8>) {
        let mut header = Header::new();
        if let Some(bits) = alignment {
            header.set("general.alignment", &Value::U32(1 << bits)).unwrap();
        }
        for (key, value) in &values {
            header.set(key, value).unwrap();
        }
        for (name, (ty, ne)) in &tensors {
            header.tensor(name, *ty, ne).unwrap();
        }
        let n: u64 = header.tensors().iter().map(|t| t.size_bytes).sum();
        let data = (0..n).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        (header, data)
    }
}

/// Opens bytes as if they were the file `test.gguf`.
fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::from_bytes("test.gguf", bytes)
}

fn write(header: &Header, data: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), header.clone()).unwrap();
    for chunk in data.chunks(1000) {
        writer.write(chunk).unwrap();
    }
    writer.finish().unwrap()
}

/// Calls all functions that read a model, to detect panics.
fn use_all(gguf: &Gguf) {
    let map = OffsetMap::new(gguf);
    let total: u128 = gguf
        .tensors()
        .iter()
        .map(|t| u128::from(t.size_bytes))
        .sum();
    assert_eq!(
        map.rows
            .iter()
            .map(|r| u128::from(r.size_bytes))
            .sum::<u128>(),
        total
    );
    let report = check(gguf);
    report.overlaps.iter().for_each(|f| drop(f.describe(gguf)));
    report.gaps.iter().for_each(|f| drop(f.describe(gguf)));
    report.past_end.iter().for_each(|f| drop(f.describe(gguf)));
    report
        .llama_cpp_refuses
        .iter()
        .for_each(|f| drop(f.describe(gguf)));
    for tensor in gguf.tensors() {
        let _ = gguf.data(tensor);
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
    }
    for (key, value) in gguf.metadata().iter() {
        let _ = (
            gguf.metadata().u32(key),
            gguf.metadata().strings(key),
            value.to_string(),
        );
    }
    gguf.header_xxh3();
    layer_order(gguf);
    write_gguf_dump_csv(&mut std::io::sink(), gguf, &map).unwrap();
    assert_eq!(
        memory_map(gguf, &map).tensors.iter().count(),
        map.rows.len()
    );
}

/// Compares the report of `check` with a count of tensors for each byte.
fn assert_report_is_correct(gguf: &Gguf) {
    let file = &gguf.files()[0];
    let full = || gguf.tensors().iter().filter(|t| t.size_bytes > 0);
    let end = full().map(|t| t.offset + t.size_bytes).max().unwrap_or(0);
    let mut n_tensors = vec![0_u32; end.max(file.size_bytes) as usize];
    for tensor in full() {
        let range = tensor.offset as usize..(tensor.offset + tensor.size_bytes) as usize;
        n_tensors[range].iter_mut().for_each(|n| *n += 1);
    }
    let report = check(gguf);
    let has_overlap = n_tensors.iter().any(|&n| n > 1);
    assert_eq!(has_overlap, !report.overlaps.is_empty());
    let mut past_end = n_tensors.iter().skip(file.size_bytes as usize);
    assert_eq!(past_end.any(|&n| n > 0), !report.past_end.is_empty());

    // Every byte of the file is counted once.
    let sum = |sizes: Vec<u64>| sizes.iter().sum::<u64>();
    let overlaps = sum(report.overlaps.iter().map(|o| o.size_bytes).collect());
    let gaps = sum(report.gaps.iter().map(|g| g.size_bytes).collect());
    let within = report.header_bytes
        + report.padding_bytes
        + report.tensor_bytes
        + gaps
        + report.trailing_bytes;
    assert_eq!(within - overlaps, n_tensors.len() as u64);

    // The bytes of a gap belong to no tensor.
    for gap in &report.gaps {
        let range = gap.offset as usize..(gap.offset + gap.size_bytes) as usize;
        assert!(n_tensors[range].iter().all(|&n| n == 0));
    }
}

proptest! {
    #[test]
    fn reads_back_written_files((header, data) in file()) {
        let bytes = write(&header, &data);
        let gguf = open(&bytes).unwrap();
        prop_assert_eq!(gguf.tensors().len(), header.tensors().len());
        let mut rest = &data[..];
        for (read, written) in gguf.tensors().iter().zip(header.tensors()) {
            prop_assert_eq!(&read.name, &written.name);
            prop_assert_eq!(read.ty, written.ty);
            prop_assert_eq!(&read.ne[..read.n_dims as usize], &written.ne[..]);
            prop_assert_eq!(read.offset, gguf.files()[0].data_offset + written.offset);
            let (now, later) = rest.split_at(written.size_bytes as usize);
            prop_assert_eq!(gguf.data(read).unwrap(), now);
            rest = later;
        }
        let report = check(&gguf);
        prop_assert!(report.is_sound());
        let misplaced = |r: &Refusal| !matches!(r, Refusal::IkType { .. });
        prop_assert!(!report.llama_cpp_refuses.iter().any(misplaced));
        prop_assert_eq!(report.trailing_bytes, 0);
        use_all(&gguf);
        assert_report_is_correct(&gguf);
    }

    #[test]
    fn copied_headers_are_exact((header, data) in file()) {
        let bytes = write(&header, &data);
        let gguf = open(&bytes).unwrap();
        let mut copy = Header::like(&gguf, |_| false).unwrap();
        for tensor in gguf.tensors() {
            copy.tensor(&tensor.name, tensor.ty, &tensor.ne[..tensor.n_dims as usize]).unwrap();
        }
        prop_assert_eq!(write(&copy, &data), bytes);
    }

    #[test]
    fn rows_cover_their_tensor_exactly((header, data) in file()) {
        let gguf = open(&write(&header, &data)).unwrap();
        let map = OffsetMap::new(&gguf);
        for tensor in gguf.tensors() {
            let mut end = tensor.offset;
            for row in map.rows.iter().filter(|r| r.tensor_idx == tensor.index) {
                prop_assert_eq!(row.file_offset, end);
                end += row.size_bytes;
            }
            prop_assert_eq!(end, tensor.offset + tensor.size_bytes);
        }
    }

    #[test]
    fn damaged_files_do_not_panic(
        (header, data) in file(),
        edits in vec((any::<Index>(), any::<u8>()), 0..8),
        end in proptest::option::of(any::<Index>()),
    ) {
        let mut bytes = write(&header, &data);
        let n = header.encode().unwrap().len();
        for (index, byte) in edits {
            bytes[index.index(n)] = byte;
        }
        if let Some(end) = end {
            bytes.truncate(end.index(bytes.len()));
        }
        if let Ok(gguf) = open(&bytes) {
            use_all(&gguf);
        }
    }

    #[test]
    fn reports_gaps_and_overlaps_correctly(
        tensors in vec((0_u64..40, 0_u64..12), 0..6),
        size in 0_usize..300,
        bits in 0_u32..6,
    ) {
        let mut raw = Raw::new(tensors.len() as u64, 1).kv_u32("general.alignment", 1 << bits);
        for (i, (ne, offset)) in tensors.iter().enumerate() {
            raw = raw.tensor(&format!("t{i}"), &[*ne], 24, offset * 16); // I8
        }
        let gguf = open(&raw.data(1 << bits, size).bytes).unwrap();
        use_all(&gguf);
        assert_report_is_correct(&gguf);
    }
}
