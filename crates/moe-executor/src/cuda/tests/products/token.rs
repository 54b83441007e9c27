//! The fused kernels for the experts of one token: gate, up and activation; down and the weighted sum.

use crate::cuda::Ptr;
use crate::cuda::launch::{Down, GateUp, Kernels, Rows};
use moe_gguf::GgmlType;

use super::experts::{TestRouting, wanted};
use super::operands::{Bias, GLUS, Matrices, Wanted, compare, tolerance, types};
use crate::cuda::tests::device::{Device, noise};
use moe_testkit::Report;

/// `(k, n_expert, n_in, n_ff, n_out)`
type Shape = (usize, usize, usize, usize, usize);

/// Shapes for whole rows and for staged rows, from one expert to one per lane. They include row sizes that are not a multiple of
/// 16 bytes if the type allows it, and numbers of rows that are not a multiple of the rows per block.
fn shapes(ty: GgmlType) -> Vec<Shape> {
    let is_super = ty.block_size() == 256;
    // The rows of 32 experts only fit into shared memory if they are short.
    let many = if is_super {
        (16, 16, 256, 256, 80)
    } else {
        (32, 32, 256, 64, 80)
    };
    let odd = if is_super {
        (3, 5, 1280, 768, 88)
    } else {
        // The size of a matrix must be a multiple of 16 bytes.
        let n_out = if ty == GgmlType::MXFP4 { 80 } else { 88 };
        (3, 5, 2880, 352, n_out)
    };
    // Slightly less shared memory than a block may use without a function attribute.
    let default_limit = if is_super {
        (6, 6, 256, 1024, 80)
    } else {
        (4, 4, 256, 672, 80)
    };
    vec![
        default_limit,
        (4, 8, 512, 512, 80),
        (1, 1, 256, 256, 88),
        many,
        (2, 2, 3072, 6144, 24),
        odd,
    ]
}

#[test]
fn fused_experts_of_one_token() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let same_type = types().filter(|ty| Kernels::supports_token(*ty));
    let cases = same_type.map(|ty| (ty, ty)).chain([
        (GgmlType::Q4_K, GgmlType::Q6_K),
        (GgmlType::MXFP4, GgmlType::Q5_0),
    ]);
    for (i, (ty, down_ty)) in cases.enumerate() {
        for (j, (k, n_expert, n_in, n_ff, n_out)) in shapes(down_ty).into_iter().enumerate() {
            let routing = TestRouting::random(1, k, n_expert);
            let matrices = |ty, n_in, n_out, seed| {
                let it = Matrices::random(ty, n_expert, n_in, n_out, seed);
                let uploaded = it.upload(device);
                (it, uploaded)
            };
            let n_in = if ty.block_size() == 256 {
                n_in.next_multiple_of(256)
            } else {
                n_in
            };
            let (gates, (_gate, gate)) = matrices(ty, n_in, n_ff, 1);
            let (ups, (_up, up)) = matrices(ty, n_in, n_ff, 9);
            let (downs, (_down, down)) = matrices(down_ty, n_ff, n_out, 4);
            let with_bias = j % 2 == 0;
            let bias = |n, seed| Bias::new(device, with_bias.then_some(n_expert * n), seed);
            let biases = [bias(n_ff, 6), bias(n_ff, 7), bias(n_out, 8)];
            let [gate_bias, up_bias, down_bias] = &biases;
            let glu = GLUS[i % GLUS.len()];
            // Small values: after the activation, the scale of a group must be far below the largest f16.
            let (kernels, stream) = (&device.kernels, &device.stream);
            let by = device.upload(&vec![1.0f32 / 4096.0; n_in]);
            let (before, normed) = (device.upload(&noise(n_in, 2)), device.nan_output(n_in));
            let x_bytes = device.upload(&vec![0xa5u8; Kernels::scratch_size(1, n_in)]);
            let [from, by, at, quantized] = [
                device.at(&before),
                device.at(&by),
                device.at(&normed),
                device.at(&x_bytes),
            ];
            let done = kernels.rms_norm(stream, from, by, 0.0, n_in, 1, at, quantized);
            let x = device.after(done, &normed).unwrap();
            // Quantized by the norm, or by a separate kernel.
            let x_quantized = if with_bias { quantized } else { Ptr::NULL };
            let router = noise(k, 3);
            let (ids, work) = (device.upload(&routing.ids), routing.work(device));
            let drouter = device.upload(&router);
            let (hidden, out) = (device.nan_output(k * n_ff), device.nan_output(n_out));
            let bytes = |rows, n| device.upload(&vec![0xa5u8; Kernels::scratch_size(rows, n)]);
            let (quantized, scratch) = (bytes(k, n_ff), bytes(1, n_in));
            let gate_up = GateUp {
                gate,
                up,
                gate_bias: gate_bias.at(device),
                up_bias: up_bias.at(device),
                glu,
                x: Rows {
                    x: at,
                    quantized: x_quantized,
                },
                ids: device.at(&ids),
                tokens: 1,
                k,
                n_expert,
                out: device.at(&hidden),
                up_out: Ptr::NULL,
                quantized: device.at(&quantized),
                scratch: device.at(&scratch),
                work: device.at(&work),
            };
            let product = Down {
                weights: down,
                bias: down_bias.at(device),
                ids: device.at(&ids),
                router: device.at(&drouter),
                k,
                quantized: device.at(&quantized),
                out: device.at(&out),
            };
            // Launched without a wait in between: the second kernel may start early.
            let case = format!("token {ty} {down_ty} {glu:?} {n_out} × {n_ff} × {n_in}, {routing}");
            let done = kernels
                .experts_gate_up(stream, &gate_up)
                .and_then(|quantized| {
                    assert!(quantized, "{case}: results are not quantized");
                    let done = kernels.down(stream, &product)?;
                    assert!(done, "{case}: no kernel");
                    Ok(())
                });
            let got = device.after(done, &out);
            let hidden = device.read(&hidden).unwrap();
            let gate = wanted(&gates, &x, k, &routing, gate_bias);
            let up = wanted(&ups, &x, k, &routing, up_bias);
            let pairs = gate.iter().zip(&up);
            let want: Vec<Wanted> = pairs
                .map(|(gate, up)| Wanted::activated(glu, *gate, *up))
                .collect();
            compare(
                &mut report,
                &format!("{case}: gate and up"),
                Ok(hidden.clone()),
                &want,
                tolerance(n_in),
            );
            let products = wanted(&downs, &hidden, 1, &routing, down_bias);
            let sum = |column: usize| {
                let slots =
                    (0..k).map(|slot| (products[slot * n_out + column], f64::from(router[slot])));
                slots.fold(
                    Wanted {
                        value: 0.0,
                        magnitude: 0.0,
                    },
                    |sum, (product, weight)| Wanted {
                        value: sum.value + weight * product.value,
                        magnitude: sum.magnitude + weight.abs() * product.magnitude,
                    },
                )
            };
            let want: Vec<Wanted> = (0..n_out).map(sum).collect();
            compare(
                &mut report,
                &format!("{case}: down"),
                got,
                &want,
                tolerance(k * n_ff),
            );
        }
    }
    report.finish();
}
