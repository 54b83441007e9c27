//! Decoding compared with the Python package `gguf`, and items shared by the other tests.

mod activations;
mod products;

use moe_gguf::GgmlType;

use super::format::{bf16_to_f32, f16_to_f32};
use super::fp4::{E8M0_HALVED, UE4M3_HALVED};
use super::{ActivationType, Error, Kernel, dequantize_row};

/// Elements of the row in each file of `fixtures/quants`.
const GOLDEN_N: usize = 2048;

const FLOATS: [GgmlType; 3] = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];

fn quantized_types() -> Vec<GgmlType> {
    let has_kernel = |ty: &GgmlType| Kernel::for_type(*ty).is_ok() && !FLOATS.contains(ty);
    GgmlType::ALL.iter().copied().filter(has_kernel).collect()
}

/// A row of blocks, and its elements decoded by the `gguf` package.
fn golden(ty: GgmlType) -> (Vec<u8>, Vec<f32>) {
    let path = moe_testkit::fixture(format!("quants/{ty}.bin.zst"));
    let mut bytes = moe_testkit::reference::decompressed(&path);
    let values = bytes.split_off(ty.row_size(GOLDEN_N as u64).unwrap() as usize);
    assert_eq!(values.len(), 4 * GOLDEN_N);
    (
        bytes,
        values
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
    )
}

/// A pseudo-random generator (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() % 20_001) as f32 / 10_000.0 - 1.0
    }
}

/// Rows of activations with different ranges and signs.
fn activation_rows(n: usize, random: &mut Random) -> Vec<Vec<f32>> {
    vec![
        (0..n).map(|_| random.unit()).collect(),
        (0..n).map(|_| random.unit().powi(9) * 1e4).collect(),
        vec![1.0; n],
        vec![-3.5; n],
        (0..n)
            .map(|i| if i % 2 == 0 { 1.0 } else { -1.0 })
            .collect(),
        (0..n)
            .map(|i| if i % 32 == 7 { -1e-3 } else { 0.0 })
            .collect(),
        vec![0.0; n],
    ]
}

fn convert(ty: ActivationType, row: &[f32]) -> Vec<u8> {
    let mut out = vec![0xa5; ty.row_size(row.len())];
    ty.quantize(row, &mut out);
    out
}

#[test]
fn decoding_agrees_with_the_gguf_package() {
    for ty in quantized_types() {
        let (bytes, expected) = golden(ty);
        let mut found = vec![f32::NAN; GOLDEN_N];
        dequantize_row(ty, &bytes, &mut found).unwrap();
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "{ty} element {i}");
        }
    }
}

#[test]
fn converts_half_precision_exactly() {
    for bits in 0..=u16::MAX {
        let (found, expected) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
        assert!(
            found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
            "{bits:#06x}"
        );
    }
    assert_eq!(bf16_to_f32(0x3fc0), 1.5);
    assert_eq!(bf16_to_f32(0xc2f7), -123.5);
}

#[test]
fn scales_of_fp4_formats_agree_with_ggml() {
    assert_eq!(E8M0_HALVED[0], 2f32.powi(-64) * 2f32.powi(-64));
    assert_eq!(E8M0_HALVED[1], 2f32.powi(-64) * 2f32.powi(-63));
    assert_eq!(E8M0_HALVED[2], f32::MIN_POSITIVE);
    assert_eq!(E8M0_HALVED[127], 0.5);
    assert_eq!(E8M0_HALVED[254], 2f32.powi(126));
    assert_eq!(E8M0_HALVED[255], 2f32.powi(127));
    assert_eq!(UE4M3_HALVED[0], 0.0);
    assert_eq!(UE4M3_HALVED[1], 2f32.powi(-10));
    assert_eq!(UE4M3_HALVED[0x38], 0.5);
    assert_eq!(UE4M3_HALVED[0x3b], 1.375 / 2.0);
    assert_eq!(UE4M3_HALVED[0x7e], 224.0);
    assert_eq!(UE4M3_HALVED[0x7f], 0.0);
}

#[test]
fn rejects_types_without_kernel_and_wrong_lengths() {
    let error = Kernel::for_type(GgmlType::I32).err().unwrap();
    assert_eq!(error, Error::Unsupported { ty: GgmlType::I32 });
    assert!(error.to_string().contains("F32, F16, Q4_0"), "{error}");
    let mut out = [0.0; 31];
    let error = dequantize_row(GgmlType::Q8_0, &[0; 34], &mut out).unwrap_err();
    assert_eq!(
        error,
        Error::PartialBlock {
            ty: GgmlType::Q8_0,
            n: 31
        }
    );
    let mut out = [0.0; 32];
    let error = dequantize_row(GgmlType::Q8_0, &[0; 33], &mut out).unwrap_err();
    assert_eq!(
        error,
        Error::RowSize {
            ty: GgmlType::Q8_0,
            n: 32,
            expected: 34,
            found: 33
        }
    );
}
