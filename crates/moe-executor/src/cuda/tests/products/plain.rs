//! Products of one matrix with rows of activations.

use crate::cpu::quant::Kernel;
use crate::cuda::Ptr;
use crate::cuda::launch::{Kernels, Rows, Weights};
use moe_gguf::GgmlType;

use super::operands::{Bias, Matrices, Wanted, compare, rounded, tolerance, types};
use crate::cuda::tests::device::{Device, Memory, noise};
use moe_testkit::Report;

/// Shapes `(n_in, n_out)` for a type: single blocks, sizes that are not a multiple of a warp, sizes of real layers.
fn shapes(ty: GgmlType) -> Vec<(usize, usize)> {
    match ty.block_size() {
        // On tensor cores, steps have 64 elements, and rows have a multiple of 8.
        1 => vec![
            (1, 1),
            (8, 1),
            (33, 7),
            (64, 64),
            (1000, 130),
            (1003, 66),
            (2048, 130),
            (5000, 3),
            (288, 3001),
        ],
        32 => vec![
            (32, 1),
            (96, 7),
            (800, 66),
            (2880, 130),
            (4096, 256),
            (288, 3001),
        ],
        _ => vec![
            (256, 1),
            (768, 7),
            (2304, 66),
            (2048, 130),
            (4096, 256),
            (512, 3001),
        ],
    }
}

/// Computes the product of every row of `x` into `out`, and returns it.
fn product(
    device: &Device,
    weights: &Weights,
    bias: Ptr,
    x: &[f32],
    out: &Memory<f32>,
) -> Result<Vec<f32>, String> {
    let rows = x.len() / weights.n_in;
    let dx = device.upload(x);
    let scratch = device.upload(&vec![0xa5u8; Kernels::converted_size(rows, weights.n_in)]);
    let done = device.kernels.mul_mat(
        &device.stream,
        weights,
        bias,
        device.at(&dx).into(),
        rows,
        device.at(out),
        device.at(&scratch),
    );
    device.after(done, out)
}

#[test]
fn products() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        for (n_in, n_out) in shapes(ty) {
            let matrix = Matrices::random(ty, 1, n_in, n_out, 1);
            let (_memory, weights) = matrix.upload(device);
            let batches: &[usize] = match n_out {
                // For the kernel of one row, which has blocks of several sizes.
                1000.. => &[1],
                _ => &[1, 2, 4, 7, 8, 9, 65, 150],
            };
            for &rows in batches {
                let x = noise(rows * n_in, rows as u32);
                let bias = Bias::new(device, rows.is_multiple_of(2).then_some(n_out), 5);
                let out = device.nan_output(rows * n_out);
                let got = product(device, &weights, bias.at(device), &x, &out);
                let wanted: Vec<Wanted> = x
                    .chunks_exact(n_in)
                    .flat_map(|x| {
                        let x = rounded(ty, x);
                        let product = |o| Wanted::product(matrix.row(0, o), &x, bias.value(o));
                        (0..n_out).map(product).collect::<Vec<_>>()
                    })
                    .collect();
                let case = format!("mul_mat {ty} {n_out} × {n_in}, {rows} rows");
                compare(&mut report, &case, got, &wanted, tolerance(n_in));
            }
        }
    }
    report.finish();
}

/// A matrix with enough rows for the largest tiles. Every 13th result is compared.
#[test]
fn products_in_large_tiles() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let n_in = if ty.block_size() == 256 { 512 } else { 416 };
        let n_out = 10_000;
        let matrix = Matrices::random(ty, 1, n_in, n_out, 1);
        let (_memory, weights) = matrix.upload(device);
        let bias = Bias::new(device, Some(n_out), 5);
        for rows in [10, 40, 65, 150] {
            let x = noise(rows * n_in, rows as u32);
            let out = device.nan_output(rows * n_out);
            let got = product(device, &weights, bias.at(device), &x, &out);
            let got = got.map(|got| got.into_iter().step_by(13).collect());
            let x: Vec<Vec<f32>> = x.chunks_exact(n_in).map(|x| rounded(ty, x)).collect();
            let sampled = (0..rows * n_out).step_by(13);
            let value = |i: usize| {
                let (row, o) = (i / n_out, i % n_out);
                Wanted::product(matrix.row(0, o), &x[row], bias.value(o))
            };
            let wanted: Vec<Wanted> = sampled.map(value).collect();
            let case = format!("mul_mat {ty} {n_out} × {n_in}, {rows} rows");
            compare(&mut report, &case, got, &wanted, tolerance(n_in));
        }
    }
    report.finish();
}

/// The CPU quantizes activations differently. The product of either is within half a quantization step of the exact one.
#[test]
fn products_are_close_to_the_cpu() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let (n_in, n_out) = (2048, 96);
        let matrix = Matrices::random(ty, 1, n_in, n_out, 3);
        let (_memory, weights) = matrix.upload(device);
        let x = noise(n_in, 4);
        let kernel = Kernel::for_type(ty).unwrap();
        let mut act = vec![0; kernel.activation().row_size(n_in)];
        kernel.activation().quantize(&x, &mut act);
        let mut cpu = vec![0.0; n_out];
        kernel.gemv(&matrix.bytes, matrix.row_size(), n_in, &act, &mut cpu);

        let out = device.nan_output(n_out);
        let got = product(device, &weights, Ptr::NULL, &x, &out);
        let quantized = ty.block_size() > 1;
        let wanted: Vec<Wanted> = (0..n_out)
            .map(|o| {
                let row = matrix.row(0, o);
                let sum: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
                // Quantization steps of at most 1/127 of the largest value, plus scales in half precision on the CPU.
                let magnitude = if quantized { sum / 50.0 } else { sum };
                Wanted {
                    value: cpu[o].into(),
                    magnitude,
                }
            })
            .collect();
        let allowed = if quantized { 1.0 } else { tolerance(n_in) };
        compare(&mut report, &format!("CPU {ty}"), got, &wanted, allowed);
    }
    report.finish();
}

#[test]
fn nan_propagates() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let (n_in, n_out) = (256, 2);
        let matrix = Matrices::random(ty, 1, n_in, n_out, 3);
        let (_memory, weights) = matrix.upload(device);
        for rows in [1, 3, 20, 40] {
            let mut x = noise(rows * n_in, 4);
            x.iter_mut().step_by(n_in).for_each(|x| *x = f32::NAN);
            let out = device.output(&vec![0.0; rows * n_out]);
            let got = product(device, &weights, Ptr::NULL, &x, &out);
            let case = format!("NaN {ty}, {rows} rows");
            report.compare(&case, got, &vec![f64::NAN; rows * n_out], 0.0);
        }
    }
    report.finish();
}

/// A row that `rms_norm` quantized and a row that the product quantizes yield the same result.
#[test]
fn quantized_row_yields_the_same_product() {
    let Some(device) = Device::open() else { return };
    let (kernels, stream) = (&device.kernels, &device.stream);
    for ty in types() {
        let (n_in, n_out) = match ty.block_size() {
            256 => (2304, 66),
            _ => (2880, 66),
        };
        let matrix = Matrices::random(ty, 1, n_in, n_out, 1);
        let (_memory, weights) = matrix.upload(device);
        let (x, by) = (
            device.upload(&noise(n_in, 3)),
            device.upload(&noise(n_in, 4)),
        );
        let normed = device.nan_output(n_in);
        let bytes = || device.upload(&vec![0xa5u8; Kernels::scratch_size(1, n_in)]);
        let (quantized_row, scratch) = (bytes(), bytes());
        let [px, pby, at, quantized] = [
            device.at(&x),
            device.at(&by),
            device.at(&normed),
            device.at(&quantized_row),
        ];
        let both = Rows { x: at, quantized };
        let results = [both, at.into()].map(|rows| {
            let out = device.nan_output(n_out);
            let norm = kernels.rms_norm(stream, px, pby, 1e-6, n_in, 1, at, quantized);
            let (to, scratch) = (device.at(&out), device.at(&scratch));
            let done = norm
                .and_then(|()| kernels.mul_mat(stream, &weights, Ptr::NULL, rows, 1, to, scratch));
            let out = device.after(done, &out).unwrap();
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert_eq!(results[0], results[1], "{ty}");
    }
}
