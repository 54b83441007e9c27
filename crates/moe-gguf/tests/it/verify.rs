//! Hashes, manifests, and values that are not finite.

use moe_gguf::verify::{
    Algorithm, Difference, ManifestProblem, compare, manifest, parse_manifest, verify,
};
use moe_gguf::{Error, GgmlType, Gguf, NonFinite};
use moe_testkit::gguf::Raw;

use crate::opened::{Opened, fixture, open};

fn abc() -> Gguf {
    Raw::new(1, 0)
        .tensor("t", &[3], 24, 0)
        .data(32, 0)
        .raw(b"abc")
        .open()
        .unwrap()
}

#[test]
fn hashes_match_published_test_vectors() {
    let hash = |algorithm| verify(&abc(), algorithm, |_| ()).unwrap()[0].hash.clone();
    // The example of FIPS 180-4, and the value of the xxHash reference implementation for "abc".
    assert_eq!(
        hash(Algorithm::Sha256),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
    assert_eq!(hash(Algorithm::Xxh3), "78af5f94892f3950");
}

#[test]
fn progress_reports_every_byte() {
    let gguf = fixture("tiny-gpt-oss-MXFP4.gguf");
    let mut read = 0;
    verify(&gguf, Algorithm::Xxh3, |n| read += n).unwrap();
    assert_eq!(
        read,
        gguf.tensors().iter().map(|t| t.size_bytes).sum::<u64>()
    );
}

#[test]
fn fixtures_have_only_finite_values() {
    for name in [
        "random-gpt-oss-F16.gguf",
        "random-qwen3moe-F16.gguf",
        "tiny-gpt-oss-MXFP4.gguf",
        "tiny-qwen3moe-Q4_K_M.gguf",
    ] {
        let verified = verify(&fixture(name), Algorithm::Xxh3, |_| ()).unwrap();
        assert!(
            verified
                .iter()
                .all(|v| v.values_checked && v.non_finite.is_none()),
            "{name}"
        );
    }
}

#[test]
fn comparison_with_a_manifest_reports_the_changed_tensor() {
    let path = moe_testkit::fixture("random-qwen3moe-F16.gguf");
    let gguf = Gguf::open(&path).unwrap();
    let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
    let text = manifest(&gguf, Algorithm::Xxh3, &verified);
    assert_eq!(text.lines().count(), gguf.tensors().len());
    assert!(
        text.lines().all(|line| line.starts_with("xxh3  ")),
        "{text}"
    );

    let entries = parse_manifest(&gguf, &format!("# a comment\n\n{text}")).unwrap();
    assert_eq!(compare(&gguf, Algorithm::Xxh3, &verified, &entries), []);

    let mut bytes = std::fs::read(&path).unwrap();
    let changed = gguf.tensor("blk.2.ffn_up_exps.weight").unwrap();
    bytes[changed.offset as usize + 77] ^= 4;
    let broken = open(&bytes).unwrap();
    let verified = verify(&broken, Algorithm::Xxh3, |_| ()).unwrap();
    // The file has another name than in the manifest; tensors are identified by tensor name.
    let entries = parse_manifest(&broken, &text).unwrap();
    let differences = compare(&broken, Algorithm::Xxh3, &verified, &entries);
    assert_eq!(differences.len(), 1);
    assert!(
        matches!(&differences[0], Difference::Changed { tensor, .. } if *tensor == changed.name)
    );
}

#[test]
fn reports_a_manifest_of_another_model() {
    let gguf = abc();
    let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
    let entries = parse_manifest(&gguf, "xxh3  00  other.gguf:u\n").unwrap();
    let differences = compare(&gguf, Algorithm::Xxh3, &verified, &entries);
    let missing = Difference::Missing { tensor: "u".into() };
    assert_eq!(
        differences,
        [missing, Difference::Unlisted { tensor: "t".into() }]
    );
}

/// Names with line breaks, with the extension of a model, and with colons.
#[test]
fn manifest_identifies_tensors_with_unusual_names() {
    for name in ["a\nb", "a\r", "t.gguf", "f:t", "a\nxxh3  00  f:b"] {
        let raw = || Raw::new(1, 0).tensor(name, &[3], 24, 0).data(32, 0);
        let gguf = raw().raw(b"abc").open().unwrap();
        let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
        let text = manifest(&gguf, Algorithm::Xxh3, &verified);
        assert_eq!(text.lines().count(), 1, "{text}");
        let entries = parse_manifest(&gguf, &text).unwrap();
        assert_eq!(
            compare(&gguf, Algorithm::Xxh3, &verified, &entries),
            [],
            "{text}"
        );
        let other = raw().raw(b"abd").open().unwrap();
        let verified = verify(&other, Algorithm::Xxh3, |_| ()).unwrap();
        assert_eq!(
            compare(&other, Algorithm::Xxh3, &verified, &entries).len(),
            1
        );
    }
}

#[test]
fn reports_the_line_of_an_invalid_manifest() {
    let error = parse_manifest(&abc(), "xxh3  00  f.gguf:t\nmd5  00  f.gguf:t\n").unwrap_err();
    assert_eq!(error.line, 2);
    assert!(matches!(&error.problem, ManifestProblem::Algorithm(unknown) if unknown.name == "md5"));
    let error = parse_manifest(&abc(), "nonsense").unwrap_err();
    assert_eq!((error.line, error.problem), (1, ManifestProblem::Format));
}

/// The output of llama.cpp's `gguf-hash --all`.
#[test]
fn reads_manifests_of_gguf_hash() {
    let text = "\
xxh64     44bc2cf5ad770999  models/m.gguf:t
sha1      a9993e364706816aba3e25717850c26c9cd0d89d  models/m.gguf:t
sha256    ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  models/m.gguf:t
xxh64     0000000000000000  models/m.gguf
sha256    0000000000000000000000000000000000000000000000000000000000000000  models/m.gguf
uuid      00000000-0000-5000-8000-000000000000  models/m.gguf
";
    let gguf = abc();
    let entries = parse_manifest(&gguf, text).unwrap();
    assert_eq!(entries.len(), 1);
    let verified = verify(&gguf, Algorithm::Sha256, |_| ()).unwrap();
    assert_eq!(compare(&gguf, Algorithm::Sha256, &verified, &entries), []);
}

#[test]
fn rejects_truncated_data() {
    let gguf = Raw::new(1, 0)
        .tensor("t", &[3], 24, 0)
        .data(32, 2)
        .open()
        .unwrap();
    let error = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
}

/// Returns a tensor of two rows of two blocks, zero except for `bytes` at `offset` in the last block, and the offset of these
/// bytes in the file.
fn with_bytes(ty: GgmlType, offset: usize, bytes: &[u8]) -> (Gguf, u64) {
    let ne = [2 * ty.block_size(), 2];
    let size = 2 * ty.row_size(ne[0]).unwrap() as usize;
    let at = size - ty.type_size() as usize + offset;
    let mut data = vec![0; size];
    data[at..at + bytes.len()].copy_from_slice(bytes);
    let raw = Raw::new(1, 0).tensor("t", &ne, ty.id(), 0).data(32, 0);
    let gguf = raw.raw(&data).open().unwrap();
    let first_offset = gguf.tensors()[0].offset + at as u64;
    (gguf, first_offset)
}

/// The offsets of scales are those of ggml's structs.
#[test]
fn finds_scales_that_are_not_finite() {
    use GgmlType::*;
    const F16_NAN: &[u8] = &[0x00, 0x7E];
    const F16_INF: &[u8] = &[0x00, 0xFC];
    const F32_NAN: &[u8] = &[0x00, 0x00, 0xC0, 0x7F];
    let scales: [(GgmlType, usize, &[u8]); 26] = [
        (F32, 0, F32_NAN),
        (F16, 0, F16_INF),
        (BF16, 0, &[0x80, 0x7F]),
        (F64, 0, &[0, 0, 0, 0, 0, 0, 0xF0, 0x7F]),
        (Q4_0, 0, F16_NAN),
        (Q4_1, 2, F16_NAN),
        (Q5_0, 0, F16_INF),
        (Q5_1, 2, F16_NAN),
        (Q8_0, 0, F16_NAN),
        (Q2_K, 80, F16_NAN),
        (Q2_K, 82, F16_NAN),
        (Q3_K, 108, F16_NAN),
        (Q4_K, 2, F16_NAN),
        (Q5_K, 0, F16_NAN),
        (Q6_K, 208, F16_NAN),
        (Q8_K, 0, F32_NAN),
        (IQ1_S, 0, F16_NAN),
        (IQ2_XXS, 0, F16_NAN),
        (IQ3_S, 0, F16_NAN),
        (IQ4_NL, 0, F16_NAN),
        (IQ4_XS, 0, F16_NAN),
        (TQ1_0, 52, F16_NAN),
        (TQ2_0, 64, F16_NAN),
        (MXFP4, 0, &[0xFF]),
        (Q1_0, 0, F16_NAN),
        (IQ4_K, 0, F16_NAN),
    ];
    for (ty, offset, bytes) in scales {
        let (gguf, first_offset) = with_bytes(ty, offset, bytes);
        let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
        assert_eq!(
            verified[0].non_finite,
            Some(NonFinite {
                count: 1,
                first_offset
            }),
            "{ty}"
        );
    }
}

/// The scales 2^127 and 2^126 are finite, but their products from 2^128 on are not.
#[test]
fn finds_mxfp4_scales_that_make_elements_infinite() {
    let count = |block: &[u8]| {
        let (gguf, _) = with_bytes(GgmlType::MXFP4, 0, block);
        let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
        verified[0].non_finite.map(|found| found.count)
    };
    // Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8 is the sign.
    for (scale, finite, infinite) in [(254, 0xB3, 0x0C), (253, 0x5D, 0x60)] {
        assert_eq!(count(&[scale, finite]), None, "{scale}");
        assert_eq!(count(&[scale, infinite]), Some(1), "{scale}");
    }
    assert_eq!(count(&[252, 0xFF]), None);
}

#[test]
fn assembles_the_scale_of_iq1_m() {
    // 0x7E00 (NaN): a nibble in the top four bits of each of four words, lowest first.
    let (gguf, _) = with_bytes(GgmlType::IQ1_M, 48, &[0, 0, 0, 0, 0, 0xE0, 0, 0x70]);
    assert_eq!(
        verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap()[0]
            .non_finite
            .unwrap()
            .count,
        1
    );
    let (gguf, _) = with_bytes(
        GgmlType::IQ1_M,
        48,
        &[0xFF, 0x0F, 0xFF, 0x0F, 0xFF, 0x0F, 0xFF, 0x0F],
    );
    assert_eq!(
        verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap()[0].non_finite,
        None
    );
}

#[test]
fn checks_values_of_all_types_of_ggml() {
    for &ty in GgmlType::ALL.iter().filter(|ty| !ty.is_ik()) {
        let (gguf, _) = with_bytes(ty, 0, &[]);
        let verified = verify(&gguf, Algorithm::Xxh3, |_| ()).unwrap();
        assert!(
            verified[0].values_checked && verified[0].non_finite.is_none(),
            "{ty}"
        );
    }
}
