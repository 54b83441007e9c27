//! The table of tensor types, compared with sizes from the sources of ggml and ik_llama.cpp.

use moe_gguf::{GgmlType, TypeError};

/// Id, name, block size in elements and block size in bytes of all types in ggml.h.
const GGML: [(u32, &str, u64, u64); 35] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

#[test]
fn knows_all_types_of_ggml() {
    for (id, name, block_size, type_size) in GGML {
        let ty = GgmlType::from_id(id).unwrap();
        assert_eq!((ty.id(), ty.name()), (id, name));
        assert_eq!(
            (ty.block_size(), ty.type_size()),
            (block_size, type_size),
            "{name}"
        );
        assert_eq!((ty.row_meta_size(), ty.is_ik()), (0, false), "{name}");
    }
    for id in (0..43).filter(|id| GGML.iter().all(|row| row.0 != *id)) {
        let error = GgmlType::from_id(id).unwrap_err();
        assert!(
            matches!(
                error,
                TypeError::Removed { .. } | TypeError::RemovedButIk { .. }
            ),
            "{id}: {error}"
        );
    }
    assert_eq!(GgmlType::from_id(43), Err(TypeError::Unknown { id: 43 }));
}

/// Bytes of a row of 4096 elements (IQ1_BN and IQ2_BN: 64), computed from the bits per weight in the documentation of
/// ik_llama.cpp and the row metadata of its pull request 61.
#[test]
fn row_sizes_of_ik_llama_cpp_types_include_metadata() {
    let rows = [
        (133, "Q6_0", 4096, 4096 / 32 * 26),
        (134, "IQ1_BN", 64, 13 + 2),
        (135, "IQ2_BN", 64, 16 + 4),
        (139, "IQ4_K", 4096, 4096 * 9 / 16),
        (144, "IQ4_KS", 4096, 4096 * 17 / 32 + 4),
        (145, "IQ2_KS", 4096, 4096 * 35 / 128 + 2),
        (146, "IQ4_KSS", 4096, 4096 / 2 + 4),
        (152, "IQ5_KS", 4096, 4096 * 21 / 32 + 4),
        (153, "IQ2_KT", 4096, 4096 * 17 / 64 + 4),
        (154, "IQ3_KT", 4096, 4096 * 25 / 64 + 4),
        (155, "IQ4_KT", 4096, 4096 / 2 + 4),
        (156, "IQ3_KS", 4096, 4096 * 51 / 128 + 2),
        (157, "IQ2_KL", 4096, 4096 * 43 / 128 + 2),
        (158, "IQ1_KT", 4096, 4096 * 7 / 32 + 4),
        (151, "Q8_KV", 4096, 4096 + 8),
        (398, "Q8_KV_R8", 4096, 4096 + 4),
        (344, "IQ4_KS_R4", 4096, 4096 * 17 / 32 + 4),
        (229, "IQ1_M_R4", 4096, 4096 * 7 / 32 + 2),
        (219, "IQ1_S_R4", 4096, 4096 * 3 / 16 + 2),
    ];
    for (id, name, ne0, bytes) in rows {
        let ty = GgmlType::from_id(id).unwrap();
        assert_eq!((ty.name(), ty.row_size(ne0)), (name, Some(bytes)));
        assert!(ty.is_ik());
    }
}

#[test]
fn interleaved_types_have_the_size_of_their_base_type() {
    let plain = |name: &str| GgmlType::ALL.iter().find(|ty| ty.name() == name);
    let mut compared = 0;
    for ty in GgmlType::ALL {
        let Some((base, _)) = ty.name().rsplit_once("_R") else {
            continue;
        };
        // These interleaved types have a different block layout.
        let differs = ["IQ1_S", "IQ1_M", "Q8_K", "Q8_KV"].contains(&base);
        if let Some(base) = plain(base).filter(|_| !differs) {
            assert_eq!(ty.row_size(2048), base.row_size(2048), "{ty}");
            compared += 1;
        }
    }
    assert_eq!(compared, 24);
}

#[test]
fn rejects_ik_llama_cpp_types_of_unknown_size() {
    let name = "Q8_K16";
    assert_eq!(
        GgmlType::from_id(147),
        Err(TypeError::Unsized { id: 147, name })
    );
    let name = "IQ4_NL_4_4";
    assert_eq!(
        GgmlType::from_id(36),
        Err(TypeError::RemovedButIk {
            id: 36,
            name,
            ik: "I2_S"
        })
    );
}

#[test]
fn row_size_requires_complete_blocks() {
    assert_eq!(GgmlType::Q4_K.row_size(512), Some(288));
    assert_eq!(GgmlType::Q4_K.row_size(511), None);
    assert_eq!(GgmlType::F64.row_size(u64::MAX), None);
    assert_eq!(
        GgmlType::MXFP4.row_size(2880).map(|row| row * 2880),
        Some(4_406_400)
    );
}
