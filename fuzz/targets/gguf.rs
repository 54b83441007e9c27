//! Models: header, offset map, checks, reports and data.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_gguf::Gguf;
use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::map::OffsetMap;
use moe_gguf::tensor_tracer::{memory_map, write_gguf_dump_csv};
use moe_gguf::verify::{Algorithm, compare, manifest, parse_manifest, verify};
use moe_synth::write::Header;

fuzz_target!(|bytes: &[u8]| {
    let gguf = match Gguf::from_bytes("fuzz.gguf", bytes) {
        Ok(gguf) => gguf,
        Err(error) => {
            assert!(!error.to_string().contains('\n'));
            return;
        }
    };
    for (key, value) in gguf.metadata().iter() {
        let metadata = gguf.metadata();
        let _ = (
            metadata.u64(key),
            metadata.f32s(key),
            metadata.i64s(key),
            metadata.strings(key),
        );
        let _ = (metadata.str(key), value.to_string());
    }

    let map = OffsetMap::new(&gguf);
    // A few bytes can declare many experts. All are processed in the same way, and would take most of the time.
    if map.rows.len() > 1 << 10 {
        return;
    }
    let mut rows = map.rows.iter().peekable();
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
        let mut end = tensor.offset;
        while let Some(row) = rows.next_if(|row| row.tensor_idx == tensor.index) {
            assert_eq!(row.file_offset, end);
            end += row.size_bytes;
        }
        assert_eq!(end, tensor.offset + tensor.size_bytes);
    }

    let report = check(&gguf);
    report
        .overlaps
        .iter()
        .for_each(|found| drop(found.describe(&gguf)));
    report
        .gaps
        .iter()
        .for_each(|found| drop(found.describe(&gguf)));
    report
        .past_end
        .iter()
        .for_each(|found| drop(found.describe(&gguf)));
    report
        .llama_cpp_refuses
        .iter()
        .for_each(|found| drop(found.describe(&gguf)));
    layer_order(&gguf);
    memory_map(&gguf, &map).tensors.iter().for_each(drop);
    write_gguf_dump_csv(&mut std::io::sink(), &gguf, &map).unwrap();

    assert!(report.past_end.is_empty() == gguf.tensors().iter().all(|t| gguf.data(t).is_ok()));
    // Overlapping tensors can have much more data than the file.
    if report.tensor_bytes <= 1 << 20
        && let Ok(verified) = verify(&gguf, Algorithm::Xxh3, |_| ())
    {
        let text = manifest(&gguf, Algorithm::Xxh3, &verified);
        if let Ok(entries) = parse_manifest(&gguf, &text) {
            compare(&gguf, Algorithm::Xxh3, &verified, &entries);
        }
    }

    // The writer reproduces the header, unless the offsets of tensors are unusual.
    let mut copy = Header::like(&gguf, |_| false).unwrap();
    for tensor in gguf.tensors() {
        copy.tensor(
            &tensor.name,
            tensor.ty,
            &tensor.ne[..tensor.n_dims as usize],
        )
        .unwrap();
    }
    if report.llama_cpp_refuses.is_empty() {
        let copy = copy.encode().unwrap();
        let n = gguf.files()[0].header_size as usize;
        assert_eq!(copy[..n], bytes[..n]);
    }
});
