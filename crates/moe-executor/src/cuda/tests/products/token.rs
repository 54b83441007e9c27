//! The experts of one token: gate, up and activation, and down with the weighted sum.

use crate::cpu::glu::Glu;
use crate::cuda::Ptr;
use crate::cuda::launch::{Down, GateUp, Kernels, Rows};
use moe_gguf::GgmlType;

use super::experts::{TestRouting, wanted};
use super::operands::{Bias, Matrices, Wanted, compare, tolerance, types};
use crate::cuda::tests::device::{Device, noise};
use moe_testkit::Report;

/// Experts of the token, experts, width of the layer, width of an expert, rows of down.
type Shape = (usize, usize, usize, usize, usize);

/// Whole rows and rows in stages, an expert alone and as many as lanes; widths that no 16 bytes divide where blocks allow it,
/// and rows that no block of warps divides.
fn shapes(ty: GgmlType) -> Vec<Shape> {
    let is_super = ty.block_size() == 256;
    // Room for the rows of 32 experts there is with small blocks.
    let many = if is_super {
        (16, 16, 256, 256, 80)
    } else {
        (32, 32, 256, 64, 80)
    };
    let odd = if is_super {
        (3, 5, 1280, 768, 88)
    } else {
        // Matrices are whole times 16 bytes apart.
        let n_out = if ty == GgmlType::MXFP4 { 80 } else { 88 };
        (3, 5, 2880, 352, n_out)
    };
    // Almost as much shared memory as a block has without asking.
    let asking = if is_super {
        (6, 6, 256, 1024, 80)
    } else {
        (4, 4, 256, 672, 80)
    };
    vec![
        asking,
        (4, 8, 512, 512, 80),
        (1, 1, 256, 256, 88),
        many,
        (2, 2, 3072, 6144, 24),
        odd,
    ]
}

#[test]
fn one_token() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let alike = types().filter(|ty| Kernels::supports_token(*ty));
    let cases = alike.map(|ty| (ty, ty)).chain([
        (GgmlType::Q4_K, GgmlType::Q6_K),
        (GgmlType::MXFP4, GgmlType::Q5_0),
    ]);
    for (i, (ty, down_ty)) in cases.enumerate() {
        for (j, (k, n_expert, n_in, n_ff, n_out)) in shapes(down_ty).into_iter().enumerate() {
            let choice = TestRouting::random(1, k, n_expert);
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
            let glu = [Glu::Swiglu, Glu::SwigluOai][i % 2];
            // A norm's; small: what is squared must stay far from the largest f16, which a group's scale is kept in.
            let (kernels, stream) = (&device.kernels, &device.stream);
            let by = device.upload(&vec![1.0f32 / 4096.0; n_in]);
            let (before, normed) = (device.upload(&noise(n_in, 2)), device.room(n_in));
            let twin = device.upload(&vec![0xa5u8; Kernels::scratch_size(1, n_in)]);
            let [from, by, at, quantized] = [
                device.at(&before),
                device.at(&by),
                device.at(&normed),
                device.at(&twin),
            ];
            let done = kernels.rms_norm(stream, from, by, 0.0, n_in, 1, at, quantized);
            let x = device.after(done, &normed).unwrap();
            // By the norm, or by a kernel of its own.
            let x_quantized = if with_bias { quantized } else { Ptr::NULL };
            let router = noise(k, 3);
            let (ids, work) = (device.upload(&choice.ids), choice.work(device));
            let drouter = device.upload(&router);
            let (hidden, out) = (device.room(k * n_ff), device.room(n_out));
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
            // Both at once: the second may begin early.
            let case = format!("token {ty} {down_ty} {glu:?} {n_out} × {n_ff} × {n_in}, {choice}");
            let done = kernels
                .experts_gate_up(stream, &gate_up)
                .and_then(|quantized| {
                    assert!(quantized, "{case}: another way");
                    let did = kernels.down(stream, &product)?;
                    assert!(did, "{case}: no kernel or no room");
                    Ok(())
                });
            let got = device.after(done, &out);
            let hidden = device.read(&hidden).unwrap();
            let gate = wanted(&gates, &x, k, &choice, gate_bias);
            let up = wanted(&ups, &x, k, &choice, up_bias);
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
            let products = wanted(&downs, &hidden, 1, &choice, down_bias);
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
