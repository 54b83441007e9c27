//! Decoding against the `gguf` package, products against a reference in `f64`.

use std::path::Path;

use moe_gguf::GgmlType;

use super::activation::{Q8Row, floats};
use super::format::{Format, Unpacked, bf16_to_f32, f16_to_f32};
use super::fp4::{E8M0_HALVED, UE4M3_HALVED};
use super::portable::blocks;
use super::{ActivationType, Error, Isa, Kernel, Scratch, dequantize_row};

/// Elements of the row in each file of `fixtures/quants`.
const GOLDEN_N: usize = 2048;

const FLOATS: [GgmlType; 3] = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];

fn quantized_types() -> Vec<GgmlType> {
    let has_kernel = |ty: &GgmlType| Kernel::for_type(*ty).is_ok() && !FLOATS.contains(ty);
    GgmlType::ALL.iter().copied().filter(has_kernel).collect()
}

/// A row of blocks and its elements, decoded by the `gguf` package.
fn golden(ty: GgmlType) -> (Vec<u8>, Vec<f32>) {
    let path = format!(
        "{}/../../fixtures/quants/{ty}.bin",
        env!("CARGO_MANIFEST_DIR")
    );
    let mut bytes = std::fs::read(Path::new(&path)).unwrap_or_else(|e| panic!("{path}: {e}"));
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

/// A small generator of numbers that look random (xorshift64*).
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

/// Rows of activations that stress a product in different ways.
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

/// `n_rows` rows of blocks picked from the golden row, without those whose products overflow.
fn rows_of_blocks(ty: GgmlType, n_rows: usize, n: usize, random: &mut Random) -> Vec<u8> {
    let (bytes, values) = golden(ty);
    let (block, size) = (ty.block_size() as usize, ty.type_size() as usize);
    let mut rows = Vec::new();
    while rows.len() < n_rows * n / block * size {
        let b = random.next() as usize % (GOLDEN_N / block);
        if values[b * block..][..block].iter().all(|v| v.abs() < 1e30) {
            rows.extend_from_slice(&bytes[b * size..][..size]);
        }
    }
    rows
}

/// `n_rows` rows of a type without blocks.
fn float_rows(ty: GgmlType, n_rows: usize, n: usize, random: &mut Random) -> Vec<u8> {
    let mut rows = Vec::new();
    for _ in 0..n_rows * n {
        let value = random.unit() * [1.0, 1e-6][usize::from(random.next().is_multiple_of(50))];
        match ty {
            GgmlType::F32 => rows.extend(value.to_le_bytes()),
            GgmlType::F16 => rows.extend(half::f16::from_f32(value).to_le_bytes()),
            _ => rows.extend(half::bf16::from_f32(value).to_le_bytes()),
        }
    }
    rows
}

/// The product of a row and activations in `f64`, and the sum of the magnitudes of what is summed.
fn reference<F: Format>(row: &[u8], n: usize, act: &[u8]) -> (f64, f64) {
    let act = Q8Row::new(F::ACTIVATION, n, act);
    let act_block = n / act.scale.len();
    let (mut total, mut magnitude) = (0.0, 0.0);
    let mut weights = Unpacked::new();
    for (b, block) in blocks::<F>(row).iter().enumerate() {
        block.unpack(&mut weights);
        for group in 0..F::BLOCK / F::GROUP {
            let first = b * F::BLOCK + group * F::GROUP;
            let scale = f64::from(act.scale[first / act_block].get());
            let mut sum = 0.0;
            for j in 0..F::GROUP {
                let value = f64::from(act.q[first + j]) * scale;
                let weight =
                    f64::from(weights.scale[group]) * f64::from(weights.q[group * F::GROUP + j]);
                total += weight * value;
                magnitude += (weight * value).abs();
                sum += value;
            }
            if F::MIN {
                let sum = if F::ACTIVATION == ActivationType::Q8_1 {
                    act.scaled_sum[first / 32].get().into()
                } else {
                    sum
                };
                total -= f64::from(weights.min[group]) * sum;
                magnitude += (f64::from(weights.min[group]) * sum).abs();
            }
        }
    }
    (total, magnitude)
}

/// As [`reference`], for rows without blocks.
fn float_reference(row: &[f32], act: &[u8]) -> (f64, f64) {
    let values = floats(row.len(), act).iter().map(|v| f64::from(v.get()));
    let products = row.iter().zip(values).map(|(&w, a)| f64::from(w) * a);
    products.fold((0.0, 0.0), |(total, magnitude), p| {
        (total + p, magnitude + p.abs())
    })
}

/// Sums of `terms` numbers in `f32` err by at most about `terms * 2^-24` times the sum of their magnitudes.
fn assert_close(
    found: f32,
    (expected, magnitude): (f64, f64),
    terms: usize,
    what: std::fmt::Arguments,
) {
    let tolerance = (terms + 4) as f64 * magnitude * f64::from(f32::EPSILON) / 2.0
        + f64::from(f32::MIN_POSITIVE);
    let error = (f64::from(found) - expected).abs();
    assert!(
        error <= tolerance,
        "{what}: {found} instead of {expected}, {error:e} off, allowed {tolerance:e}"
    );
}

/// Calls `check` for each instruction set with its products of the rows with several activations.
fn for_each_product(
    ty: GgmlType,
    n: usize,
    n_rows: usize,
    rows: &[u8],
    random: &mut Random,
    check: impl Fn(f32, &[u8], &[u8], std::fmt::Arguments),
) {
    let row_size = rows.len() / n_rows;
    for (a, act) in activation_rows(n, random).iter().enumerate() {
        for isa in Isa::available() {
            let kernel = Kernel::for_isa(ty, isa).unwrap();
            let act = convert(kernel.activation, act);
            let mut out = vec![f32::NAN; n_rows];
            kernel.gemv(rows, row_size, n, &act, &mut out);
            for (r, &found) in out.iter().enumerate() {
                let row = &rows[r * row_size..][..row_size];
                check(
                    found,
                    row,
                    &act,
                    format_args!("{ty} {isa:?} n = {n} row {r} of {n_rows} activations {a}"),
                );
            }
        }
    }
}

#[test]
fn decodes_like_the_gguf_package() {
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
fn products_of_quantized_rows() {
    let mut random = Random(1);
    for ty in quantized_types() {
        let block = ty.block_size() as usize;
        for (n_blocks, n_rows) in [
            (1, 1),
            (2, 3),
            (3, 4),
            (5, 9),
            (8, 2),
            (GOLDEN_N / block, 5),
        ] {
            let n = n_blocks * block;
            let rows = rows_of_blocks(ty, n_rows, n, &mut random);
            for_each_product(
                ty,
                n,
                n_rows,
                &rows,
                &mut random,
                |found, row, act, what| {
                    let expected = with_format!(ty, F => reference::<F>(row, n, act)).unwrap();
                    assert_close(found, expected, n / 8, what);
                },
            );
        }
    }
}

/// `fixtures/quants/vec_dot.cpp` wrote the products of slices of the golden rows with these activations.
#[test]
fn products_are_ggmls() {
    let path = format!(
        "{}/../../fixtures/quants/vec_dot.csv",
        env!("CARGO_MANIFEST_DIR")
    );
    let table = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let n = 256;
    let mut compared = 0;
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let ty = *GgmlType::ALL
            .iter()
            .find(|ty| ty.name() == fields[0])
            .unwrap();
        let slice: usize = fields[1].parse().unwrap();
        let expected: f32 = fields[2].parse().unwrap();
        if !expected.is_finite() {
            continue;
        }
        let activation = |i: usize| (i * 37 % 251) as f32 - 125.0;
        let values =
            (slice * n..(slice + 1) * n).map(|i| activation(i) / 16.0 + (i % 7) as f32 / 1024.0);
        let row_size = ty.row_size(n as u64).unwrap() as usize;
        let (bytes, _) = golden(ty);
        let row = &bytes[slice * row_size..][..row_size];
        for isa in Isa::available() {
            let kernel = Kernel::for_isa(ty, isa).unwrap();
            let act = convert(kernel.activation, &values.clone().collect::<Vec<f32>>());
            let mut found = [0.0];
            kernel.gemv(row, row_size, n, &act, &mut found);
            let (_, magnitude) = with_format!(ty, F => reference::<F>(row, n, &act)).unwrap();
            assert_close(
                found[0],
                (expected.into(), magnitude),
                n / 4,
                format_args!("{ty} {isa:?} slice {slice}"),
            );
            compared += 1;
        }
    }
    assert!(compared > 150, "only {compared} products compared");
}

#[test]
fn products_of_float_rows() {
    let mut random = Random(2);
    for ty in FLOATS {
        for n in [1, 15, 16, 31, 64, 100, 255, 1024] {
            let n_rows = 6;
            let rows = float_rows(ty, n_rows, n, &mut random);
            for_each_product(
                ty,
                n,
                n_rows,
                &rows,
                &mut random,
                |found, row, act, what| {
                    let mut decoded = vec![0.0; n];
                    dequantize_row(ty, row, &mut decoded).unwrap();
                    assert_close(found, float_reference(&decoded, act), n / 8 + 16, what);
                },
            );
        }
    }
}

#[test]
fn products_with_many_tokens_are_those_with_each() {
    let mut random = Random(3);
    for ty in GgmlType::ALL
        .iter()
        .copied()
        .filter(|ty| Kernel::for_type(*ty).is_ok())
    {
        for (n, n_rows, n_tokens) in [(256, 1, 4), (512, 33, 5), (2304, 70, 13), (4352, 32, 6)] {
            let rows = match FLOATS.contains(&ty) {
                true => float_rows(ty, n_rows, n, &mut random),
                false => rows_of_blocks(ty, n_rows, n, &mut random),
            };
            let acts: Vec<_> = (0..n_tokens)
                .map(|t| activation_rows(n, &mut random).swap_remove(t % 4))
                .collect();
            for isa in Isa::available() {
                check_gemm(
                    Kernel::for_isa(ty, isa).unwrap(),
                    &rows,
                    n,
                    n_rows,
                    &acts,
                    isa,
                );
            }
        }
    }
}

fn check_gemm(kernel: Kernel, rows: &[u8], n: usize, n_rows: usize, acts: &[Vec<f32>], isa: Isa) {
    let (ty, n_tokens) = (kernel.ty(), acts.len());
    let acts: Vec<_> = acts
        .iter()
        .map(|act| convert(kernel.activation, act))
        .collect();
    let row_size = rows.len() / n_rows;
    let mut found = vec![f32::NAN; n_tokens * n_rows];
    let mut put = |token: usize, first: usize, products: &[f32]| {
        found[token * n_rows + first..][..products.len()].copy_from_slice(products);
    };
    let act = |t: usize| acts[t].as_slice();
    kernel.gemm(
        rows,
        row_size,
        n,
        n_rows,
        n_tokens,
        &act,
        &mut put,
        &mut Scratch::default(),
    );
    for (t, act) in acts.iter().enumerate() {
        for r in 0..n_rows {
            let row = &rows[r * row_size..][..row_size];
            let expected =
                with_format!(ty, F => reference::<F>(row, n, act)).unwrap_or_else(|| {
                    let mut decoded = vec![0.0; n];
                    dequantize_row(ty, row, &mut decoded).unwrap();
                    float_reference(&decoded, act)
                });
            let what =
                format_args!("{ty} {isa:?} n = {n} row {r} of {n_rows} token {t} of {n_tokens}");
            assert_close(found[t * n_rows + r], expected, n / 8 + 16, what);
        }
    }
}

#[test]
fn half_precision_numbers_widen_exactly() {
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
fn scales_of_4_bit_floats() {
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
fn q8_0_rounds_to_even_and_keeps_a_half_precision_scale() {
    let mut row = vec![0.0; 64];
    // 127 / 254 = 0.5 for each unit: 1, 3 and 5 lie half way.
    row[..6].copy_from_slice(&[254.0, 1.0, 3.0, 5.0, -1.0, -254.0]);
    row[32] = 0.1;
    let bytes = convert(ActivationType::Q8_1, &row);
    let found = Q8Row::new(ActivationType::Q8_1, 64, &bytes);
    assert_eq!(found.q[..7], [127, 0, 2, 2, 0, -127, 0]);
    assert_eq!(found.scale[0].get(), 2.0);
    assert_eq!(found.scaled_sum[0].get(), 8.0);
    assert_eq!(
        (found.sum[0].get(), found.sum[1].get(), found.sum[2].get()),
        (4, 0, 127)
    );
    // 0.1 / 127 = 7.874e-4 in half precision: 1651 * 2^-21.
    assert_eq!(found.scale[1].get(), 1651.0 / 2_097_152.0);
    assert_eq!(found.scaled_sum[1].get(), half::f16::from_f32(0.1).to_f32());
}

#[test]
fn q8_k_makes_the_largest_magnitude_minus_127() {
    let mut row = vec![0.0; 512];
    row[3] = 254.0;
    row[4] = -254.0;
    row[255] = 3.0;
    let bytes = convert(ActivationType::Q8K, &row);
    let found = Q8Row::new(ActivationType::Q8K, 512, &bytes);
    assert_eq!(found.q[..6], [0, 0, 0, -127, 127, 0]);
    assert_eq!(found.q[255], -2);
    assert_eq!(found.scale[0].get(), -2.0);
    assert_eq!(found.scale[1].get(), 0.0);
    assert_eq!(found.sum[15].get(), -2);
}

#[test]
fn activations_are_the_same_bytes_on_every_processor() {
    let mut random = Random(4);
    for n in [256, 512, 1280] {
        for row in activation_rows(n, &mut random) {
            for ty in [
                ActivationType::F16,
                ActivationType::Bf16,
                ActivationType::Q8_0,
                ActivationType::Q8_1,
                ActivationType::Q8K,
            ] {
                let mut expected = vec![0xa5; ty.row_size(n)];
                ty.convert(&row, &mut expected);
                assert_eq!(convert(ty, &row), expected, "{ty:?} n = {n}");
            }
        }
    }
    let odd = [0.1, 70000.0, -1e-8, 3.0e-5, 2049.0];
    let mut expected = vec![0xa5; ActivationType::F16.row_size(5)];
    ActivationType::F16.convert(&odd, &mut expected);
    assert_eq!(convert(ActivationType::F16, &odd), expected);
}

#[test]
fn what_is_not_a_number_stays_visible() {
    let mut row = vec![1.0; 256];
    row[100] = f32::NAN;
    for ty in [
        ActivationType::Q8_0,
        ActivationType::Q8_1,
        ActivationType::Q8K,
    ] {
        let bytes = convert(ty, &row);
        let found = Q8Row::new(ty, 256, &bytes);
        assert_eq!(
            found.scale.iter().filter(|s| s.get().is_nan()).count(),
            1,
            "{ty:?}"
        );
    }
}

#[test]
fn floats_are_rounded_to_the_type_of_the_weights() {
    let row = [1.0 / 3.0, -65504.0, 1e-7, 1e6];
    let bits = |ty| {
        floats(4, &convert(ty, &row))
            .iter()
            .map(|v| v.get())
            .collect::<Vec<f32>>()
    };
    assert_eq!(bits(ActivationType::F32), row);
    assert_eq!(
        bits(ActivationType::F16),
        [1365.0 / 4096.0, -65504.0, 2f32.powi(-23), f32::INFINITY]
    );
    assert_eq!(
        bits(ActivationType::Bf16),
        [171.0 / 512.0, -65536.0, 215.0 * 2f32.powi(-31), 999424.0]
    );
}

#[test]
fn errors_say_what_works() {
    let error = Kernel::for_type(GgmlType::I32).err().unwrap();
    assert!(
        error
            .to_string()
            .starts_with("no kernel for type I32; there are kernels for F32, F16, Q4_0"),
        "{error}"
    );
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
        error.to_string(),
        "a row of 32 Q8_0 elements takes 34 bytes, not 33"
    );
}
