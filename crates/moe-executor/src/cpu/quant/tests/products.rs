//! Products compared with a reference in `f64` and with ggml.

use moe_gguf::GgmlType;

use super::{FLOATS, GOLDEN_N, Random, activation_rows, convert, golden, quantized_types};
use crate::cpu::quant::activation::{Q8Row, floats};
use crate::cpu::quant::format::{Format, Unpacked};
use crate::cpu::quant::portable::blocks;
use crate::cpu::quant::{ActivationType, Isa, Kernel, Product, Scratch, dequantize_row};

/// `n_rows` rows of random blocks of the golden row, without blocks whose products overflow.
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

/// The product of a row and activations in `f64`, and the sum of the magnitudes of the terms.
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

/// Like [`reference`], for rows without blocks.
fn float_reference(row: &[f32], act: &[u8]) -> (f64, f64) {
    let values = floats(row.len(), act).iter().map(|v| f64::from(v.get()));
    let products = row.iter().zip(values).map(|(&w, a)| f64::from(w) * a);
    products.fold((0.0, 0.0), |(total, magnitude), p| {
        (total + p, magnitude + p.abs())
    })
}

/// The error of a sum of `terms` numbers in `f32` is at most about `terms * 2^-24` times the sum of their magnitudes.
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
        "{what}: {found}, expected {expected}; error {error:e}, tolerance {tolerance:e}"
    );
}

/// Calls `check` with the products of each row with several activations, for each instruction set.
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
            let act = convert(kernel.activation(), act);
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
fn products_of_quantized_rows_agree_with_f64() {
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

/// `fixtures/quants/vec_dot.cpp` computed the products of slices of the golden rows with these activations.
#[test]
fn products_agree_with_ggml() {
    let table = std::fs::read_to_string(moe_testkit::fixture("quants/vec_dot.csv")).unwrap();
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
            let act = convert(kernel.activation(), &values.clone().collect::<Vec<f32>>());
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
fn products_of_float_rows_agree_with_f64() {
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
fn products_with_several_tokens_agree_with_f64() {
    let mut random = Random(3);
    for ty in GgmlType::ALL
        .iter()
        .copied()
        .filter(|ty| Kernel::for_type(*ty).is_ok())
    {
        for (n, n_rows, n_tokens) in [
            (256, 3, 1),
            (256, 1, 2),
            (512, 67, 2),
            (512, 6, 3),
            (256, 1, 4),
            (512, 33, 5),
            (2304, 70, 13),
            (4352, 32, 6),
        ] {
            let rows = if FLOATS.contains(&ty) {
                float_rows(ty, n_rows, n, &mut random)
            } else {
                rows_of_blocks(ty, n_rows, n, &mut random)
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
        .map(|act| convert(kernel.activation(), act))
        .collect();
    let row_size = rows.len() / n_rows;
    let mut found = vec![f32::NAN; n_tokens * n_rows];
    let mut put = |token: usize, first: usize, products: &[f32]| {
        found[token * n_rows + first..][..products.len()].copy_from_slice(products);
    };
    let act = |t: usize| acts[t].as_slice();
    let product = Product {
        rows,
        row_size,
        n,
        n_tokens,
        act: &act,
    };
    kernel.gemm(&product, &mut Scratch::default(), &mut put);
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
