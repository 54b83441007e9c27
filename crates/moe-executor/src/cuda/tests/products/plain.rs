//! One matrix and rows of activations.

use crate::cpu::quant::Kernel;
use crate::cuda::Ptr;
use crate::cuda::launch::{Kernels, Rows, Weights};
use moe_gguf::GgmlType;

use super::operands::{Bias, Matrices, Wanted, compare, rounded, tolerance, types};
use crate::cuda::tests::device::{Device, Memory, noise};
use moe_testkit::Report;

/// Shapes `(n_in, n_out)` for a type: single blocks, a number of units that no warp divides, real layers.
fn shapes(ty: GgmlType) -> Vec<(usize, usize)> {
    match ty.block_size() {
        1 => vec![(1, 1), (33, 7), (64, 64), (1003, 66), (2048, 130)],
        32 => vec![(32, 1), (96, 7), (800, 66), (2880, 130), (4096, 256)],
        _ => vec![(256, 1), (768, 7), (2304, 66), (2048, 130), (4096, 256)],
    }
}

/// The product of every row of `x`, computed into `out`.
fn product(
    device: &Device,
    weights: &Weights,
    bias: Ptr,
    x: &[f32],
    out: &Memory<f32>,
) -> Result<Vec<f32>, String> {
    let rows = x.len() / weights.n_in;
    let dx = device.upload(x);
    let scratch = device.upload(&vec![0xa5u8; Kernels::scratch_size(rows, weights.n_in)]);
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
            for rows in [1, 2, 4, 7, 8, 9, 65, 150] {
                let x = noise(rows * n_in, rows as u32);
                let bias = Bias::new(device, rows.is_multiple_of(2).then_some(n_out), 5);
                let out = device.room(rows * n_out);
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

/// The CPU rounds activations to other steps: both products lie within half a step of either from the exact one.
#[test]
fn products_of_the_cpu() {
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

        let out = device.room(n_out);
        let got = product(device, &weights, Ptr::NULL, &x, &out);
        let quantized = ty.block_size() > 1;
        let wanted: Vec<Wanted> = (0..n_out)
            .map(|o| {
                let row = matrix.row(0, o);
                let sum: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
                // Steps of 1/127 at most, and scales of the CPU in half precision, of groups and of their sums.
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
fn no_number_stays_none() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let (n_in, n_out) = (256, 2);
        let matrix = Matrices::random(ty, 1, n_in, n_out, 3);
        let (_memory, weights) = matrix.upload(device);
        for rows in [1, 3, 20] {
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

/// A row that its norm has quantized gives what the product gives that quantizes it.
#[test]
fn a_quantized_row_gives_the_same() {
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
        let normed = device.room(n_in);
        let bytes = || device.upload(&vec![0xa5u8; Kernels::scratch_size(1, n_in)]);
        let (twin, scratch) = (bytes(), bytes());
        let [px, pby, at, quantized] = [
            device.at(&x),
            device.at(&by),
            device.at(&normed),
            device.at(&twin),
        ];
        let both = Rows { x: at, quantized };
        let results = [both, at.into()].map(|rows| {
            let out = device.room(n_out);
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
