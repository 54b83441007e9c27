//! Dot products and decoded rows of the executor's kernels and of ggml agree for all types.

use llama_cpp_sys_2 as sys;
use moe_executor::cpu::quant::{Isa, Kernel, dequantize_row};
use moe_gguf::GgmlType;
use zerocopy::IntoBytes;

use crate::models::quantize;

const TYPES: [GgmlType; 26] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2_K,
    GgmlType::Q3_K,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::IQ4_NL,
    GgmlType::IQ4_XS,
    GgmlType::IQ3_S,
    GgmlType::IQ3_XXS,
    GgmlType::IQ2_XXS,
    GgmlType::IQ2_XS,
    GgmlType::IQ2_S,
    GgmlType::IQ1_S,
    GgmlType::IQ1_M,
    GgmlType::MXFP4,
    GgmlType::NVFP4,
    GgmlType::TQ1_0,
    GgmlType::TQ2_0,
];

/// Elements of a row.
const N: usize = 1024;
const N_ROWS: usize = 24;

/// Pseudorandom values from -1 to 1, some of them larger, the same in every run.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let tokens = crate::compare::some_tokens(n, 1 << 16, seed);
    let value = |(i, token): (usize, u32)| {
        let value = token as f32 / 32768.0 - 1.0;
        if i % 97 == 0 { value * 6.0 } else { value }
    };
    tokens.into_iter().enumerate().map(value).collect()
}

/// A row decoded by ggml.
fn ggml_values(ty: GgmlType, row: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; N];
    // SAFETY: the traits of a type are constants.
    match unsafe { (*sys::ggml_get_type_traits(ty.id())).to_float } {
        // SAFETY: a row of `N` elements is decoded into `N` values.
        Some(to_float) => unsafe {
            to_float(row.as_ptr().cast(), out.as_mut_ptr(), N as i64);
        },
        None => IntoBytes::as_mut_bytes(out.as_mut_slice()).copy_from_slice(row),
    }
    out
}

/// ggml's dot product of a row with activations, which it quantizes.
fn ggml_product(ty: GgmlType, row: &[u8], x: &[f32]) -> f32 {
    let mut product = 0.0;
    // SAFETY: the traits of types are constants; the buffer is large enough for `N` activations of the type that the dot
    // product takes, and both rows have `N` elements.
    unsafe {
        let traits = &*sys::ggml_get_type_traits_cpu(ty.id());
        let mut act = vec![0u8; sys::ggml_row_size(traits.vec_dot_type, N as i64)];
        match (*sys::ggml_get_type_traits_cpu(traits.vec_dot_type)).from_float {
            Some(from_float) => from_float(x.as_ptr(), act.as_mut_ptr().cast(), N as i64),
            None => act.copy_from_slice(IntoBytes::as_bytes(x)),
        }
        traits.vec_dot.unwrap()(
            N as i32,
            &mut product,
            0,
            row.as_ptr().cast(),
            0,
            act.as_ptr().cast(),
            0,
            1,
        );
    }
    product
}

#[test]
fn decoded_rows_agree() {
    // SAFETY: the function has no preconditions.
    unsafe { sys::ggml_cpu_init() };
    for ty in TYPES {
        let rows = quantize(ty, &values(N_ROWS * N, 3), N);
        for row in rows.chunks_exact(rows.len() / N_ROWS) {
            let mut ours = vec![0.0; N];
            dequantize_row(ty, row, &mut ours).unwrap();
            let theirs = ggml_values(ty, row);
            let largest = theirs.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (a, b) in ours.iter().zip(&theirs) {
                assert!((a - b).abs() <= 1e-6 * largest, "{}: {a} {b}", ty.name());
            }
        }
    }
}

#[test]
fn dot_products_agree() {
    // SAFETY: the function has no preconditions.
    unsafe { sys::ggml_cpu_init() };
    let x = values(N, 5);
    for ty in TYPES {
        let rows = quantize(ty, &values(N_ROWS * N, 4), N);
        let row_size = rows.len() / N_ROWS;
        let theirs: Vec<f32> = rows
            .chunks_exact(row_size)
            .map(|row| ggml_product(ty, row, &x))
            .collect();
        for isa in Isa::available() {
            let kernel = Kernel::for_isa(ty, isa).unwrap();
            let mut act = vec![0; kernel.activation().row_size(N)];
            kernel.activation().quantize(&x, &mut act);
            let mut ours = vec![0.0; N_ROWS];
            kernel.gemv(&rows, row_size, N, &act, &mut ours);
            for ((a, b), row) in ours.iter().zip(&theirs).zip(rows.chunks_exact(row_size)) {
                // Only the order of summation may differ. Each partial sum, over at least 16 elements, is rounded.
                let rounding = (N / 16) as f32 * f32::EPSILON / 2.0;
                let terms = ggml_values(ty, row);
                let size: f32 = terms.iter().zip(&x).map(|(w, x)| (w * x).abs()).sum();
                assert!(
                    (a - b).abs() <= rounding * size,
                    "{} {isa:?}: {a} {b}, terms {size}",
                    ty.name()
                );
            }
        }
    }
}
