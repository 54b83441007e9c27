//! Products of the selected experts, gate and up with their activation, and the weighted sum.

use std::fmt::{self, Display, Formatter};

use crate::cuda::Ptr;
use crate::cuda::launch::{Fetched, GateUp, Kernels, MulMatId, Weights};
use moe_gguf::GgmlType;

use super::operands::{Bias, GLUS, Matrices, Wanted, compare, rounded, tolerance, types};
use crate::cuda::tests::device::{Device, Memory, noise, wide};
use moe_testkit::Report;

/// Routing decisions of a layer.
pub struct TestRouting {
    pub tokens: usize,
    pub k: usize,
    pub n_expert: usize,
    pub ids: Vec<i32>,
}

impl TestRouting {
    /// `k` random experts for every token. The first experts are selected more often than the last ones.
    pub fn random(tokens: usize, k: usize, n_expert: usize) -> TestRouting {
        let of_token = |t: usize| {
            let mut experts: Vec<(f32, i32)> = noise(n_expert, t as u32)
                .iter()
                .enumerate()
                .map(|(e, x)| (x + e as f32 / n_expert as f32, e as i32))
                .collect();
            experts.sort_by(|a, b| a.0.total_cmp(&b.0));
            experts.into_iter().take(k).map(|(_, e)| e)
        };
        TestRouting {
            tokens,
            k,
            n_expert,
            ids: (0..tokens).flat_map(of_token).collect(),
        }
    }

    pub fn work(&self, device: &Device) -> Memory<u8> {
        let bytes = Kernels::work_size(self.tokens, self.k, self.n_expert);
        device.upload(&vec![0xa5u8; bytes])
    }
}

impl Display for TestRouting {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        write!(f, "{} × {} of {}", self.tokens, self.k, self.n_expert)
    }
}

/// From decoding, with separate entries, to a prompt.
fn routings() -> Vec<TestRouting> {
    [
        (1, 4, 8),
        (1, 1, 1),
        (2, 3, 5),
        (7, 4, 32),
        (40, 2, 5),
        (300, 4, 8),
        (70, 8, 128),
    ]
    .map(|(tokens, k, n_expert)| TestRouting::random(tokens, k, n_expert))
    .into()
}

/// The expected product of every entry with the matrix of its expert.
pub fn wanted(
    matrices: &Matrices,
    x: &[f32],
    rows_per: usize,
    routing: &TestRouting,
    bias: &Bias,
) -> Vec<Wanted> {
    let (n_in, n_out) = (matrices.n_in, matrices.n_out);
    let x: Vec<Vec<f32>> = x
        .chunks_exact(n_in)
        .map(|x| rounded(matrices.ty, x))
        .collect();
    let entry = |(e, id): (usize, &i32)| {
        let (expert, x) = (*id as usize, &x[e / rows_per]);
        let product = |o| {
            let bias = bias.value(expert * n_out + o);
            Wanted::product(matrices.row(expert, o), x, bias)
        };
        (0..n_out).map(product).collect::<Vec<_>>()
    };
    routing.ids.iter().enumerate().flat_map(entry).collect()
}

/// `(n_in, n_out)`
fn shape(ty: GgmlType) -> (usize, usize) {
    match ty.block_size() {
        1 => (104, 66),
        32 => (416, 66),
        _ => (768, 66),
    }
}

/// Computes the product of every entry with the matrix of its expert. `rows_per` entries read the same row of `x`. `work`
/// receives the sorted entries.
pub fn product_of(
    device: &Device,
    routing: &TestRouting,
    (weights, bias): (Weights, &Bias),
    (x, rows_per): (&[f32], usize),
    work: &Memory<u8>,
) -> Result<Vec<f32>, String> {
    let rows = x.len() / weights.n_in;
    let out = device.nan_output(routing.ids.len() * weights.n_out);
    let (x, ids) = (device.upload(x), device.upload(&routing.ids));
    let scratch = device.upload(&vec![0xa5u8; Kernels::converted_size(rows, weights.n_in)]);
    let product = MulMatId {
        weights,
        bias: bias.at(device),
        x: device.at(&x).into(),
        rows_per,
        ids: device.at(&ids),
        tokens: routing.tokens,
        k: routing.k,
        n_expert: routing.n_expert,
        out: device.at(&out),
        scratch: device.at(&scratch),
        work: device.at(work),
    };
    let done = device.kernels.mul_mat_id(&device.stream, &product);
    device.after(done, &out)
}

#[test]
fn products() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let (n_in, n_out) = shape(ty);
        for routing in routings() {
            let entries = routing.ids.len();
            let matrices = Matrices::random(ty, routing.n_expert, n_in, n_out, 1);
            let (_memory, weights) = matrices.upload(device);
            let work = routing.work(device);
            for rows_per in [routing.k, 1] {
                let rows = entries / rows_per;
                let x = noise(rows * n_in, 2);
                let with_bias = (rows_per == 1).then_some(routing.n_expert * n_out);
                let bias = Bias::new(device, with_bias, 6);
                let got = product_of(device, &routing, (weights, &bias), (&x, rows_per), &work);
                let want = wanted(&matrices, &x, rows_per, &routing, &bias);
                let case = format!("mul_mat_id {ty} {n_out} × {n_in}, {routing}, {rows} rows");
                compare(&mut report, &case, got, &want, tolerance(n_in));
            }
        }
    }
    report.finish();
}

#[test]
fn fetched_matrices() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in types() {
        let (n_in, n_out) = shape(ty);
        let routing = TestRouting::random(3, 4, 8);
        let entries = routing.ids.len();
        let matrices = Matrices::random(ty, routing.n_expert, n_in, n_out, 1);
        // Each expert has its own buffer; one entry has no matrix.
        let size = matrices.row_size() * n_out;
        let buffers: Vec<Memory<u8>> = matrices
            .bytes
            .chunks_exact(size)
            .map(|expert| device.upload(&[expert, &[0; 4]].concat()))
            .collect();
        let missing = 5;
        let address = |(e, id): (usize, &i32)| {
            if e == missing {
                0
            } else {
                device.at(&buffers[*id as usize]).0
            }
        };
        let table: Vec<u64> = routing.ids.iter().enumerate().map(address).collect();
        let (table, ids) = (device.upload(&table), device.upload(&routing.ids));
        let x = noise(entries * n_in, 2);
        let bias = Bias::new(device, Some(routing.n_expert * n_out), 6);
        let (dx, out) = (
            device.upload(&x),
            device.output(&vec![0.25; entries * n_out]),
        );
        let product = Fetched {
            table: device.at(&table),
            ty,
            n_in,
            n_out,
            row_size: matrices.row_size(),
            bias: bias.at(device),
            x: device.at(&dx),
            rows_per: 1,
            ids: device.at(&ids),
            entries,
            out: device.at(&out),
        };
        let done = device.kernels.mul_mat_fetched(&device.stream, &product);
        let got = device.after(done, &out);
        let mut want = wanted(&matrices, &x, 1, &routing, &bias);
        want[missing * n_out..][..n_out].fill(Wanted {
            value: 0.25,
            magnitude: 1.0,
        });
        let case = format!("fetched {ty}");
        compare(&mut report, &case, got, &want, tolerance(n_in));
    }
    report.finish();
}

#[test]
fn gate_and_up() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let same_type = types().map(|ty| (ty, ty));
    let mixed = [
        (GgmlType::Q4_K, GgmlType::Q6_K),
        (GgmlType::F16, GgmlType::Q8_0),
        (GgmlType::Q5_K, GgmlType::F32),
    ];
    for (i, (gate_ty, up_ty)) in same_type.chain(mixed).enumerate() {
        let (n_in, n_ff) = if gate_ty == up_ty {
            shape(gate_ty)
        } else {
            (512, 66)
        };
        let glu = GLUS[i % GLUS.len()];
        for routing in routings() {
            let entries = routing.ids.len();
            let matrices = |ty, seed| Matrices::random(ty, routing.n_expert, n_in, n_ff, seed);
            let (gates, ups) = (matrices(gate_ty, 1), matrices(up_ty, 9));
            let ((_gate, gate), (_up, up)) = (gates.upload(device), ups.upload(device));
            let (ids, work) = (device.upload(&routing.ids), routing.work(device));
            let x = noise(routing.tokens * n_in, 2);
            let with_bias = routing
                .tokens
                .is_multiple_of(2)
                .then_some(routing.n_expert * n_ff);
            let gate_bias = Bias::new(device, with_bias, 6);
            let up_bias = Bias::new(device, with_bias, 7);
            let (dx, out) = (device.upload(&x), device.nan_output(entries * n_ff));
            let up_out = device.nan_output(entries * n_ff);
            let bytes = Kernels::converted_size(routing.tokens, n_in);
            let scratch = device.upload(&vec![0xa5u8; bytes]);
            let quantized = device.upload(&vec![0xa5u8; Kernels::scratch_size(routing.k, n_ff)]);
            let product = GateUp {
                gate,
                up,
                gate_bias: gate_bias.at(device),
                up_bias: up_bias.at(device),
                glu,
                x: device.at(&dx).into(),
                ids: device.at(&ids),
                tokens: routing.tokens,
                k: routing.k,
                n_expert: routing.n_expert,
                out: device.at(&out),
                up_out: device.at(&up_out),
                quantized: device.at(&quantized),
                scratch: device.at(&scratch),
                work: device.at(&work),
            };
            let done = device.kernels.experts_gate_up(&device.stream, &product);
            // The number of rows is not a multiple of 32, so the results cannot be quantized.
            assert!(
                !matches!(done, Ok(true)),
                "quantized {n_ff} rows in groups of 32"
            );
            let untouched = device.download(&quantized).unwrap();
            assert!(untouched.iter().all(|byte| *byte == 0xa5));
            let got = device.after(done.map(|_| ()), &out);
            let gate = wanted(&gates, &x, routing.k, &routing, &gate_bias);
            let up = wanted(&ups, &x, routing.k, &routing, &up_bias);
            let want: Vec<Wanted> = gate
                .iter()
                .zip(&up)
                .map(|(gate, up)| Wanted::activated(glu, *gate, *up))
                .collect();
            let case = format!("gate_up {gate_ty} {up_ty} {glu:?} {n_ff} × {n_in}, {routing}");
            compare(&mut report, &case, got, &want, tolerance(n_in));
        }
    }
    report.finish();
}

#[test]
fn merge_sums_in_the_order_of_slots() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for (tokens, k, width) in [(1, 8, 2048), (1, 1, 7), (5, 2, 33), (300, 4, 100)] {
        let (experts, weights) = (noise(tokens * k * width, 1), noise(tokens * k, 2));
        let (de, dw) = (device.upload(&experts), device.upload(&weights));
        for is_weighted in [true, false] {
            let out = device.nan_output(tokens * width);
            let by = if is_weighted {
                device.at(&dw)
            } else {
                Ptr::NULL
            };
            let (from, to) = (device.at(&de), device.at(&out));
            let done = device
                .kernels
                .merge(&device.stream, from, by, tokens, k, width, to);
            let got = device.after(done, &out);
            let value = |i: usize| {
                let (token, column) = (i / width, i % width);
                let product = |slot: usize| {
                    let weight = if is_weighted {
                        weights[token * k + slot]
                    } else {
                        1.0
                    };
                    experts[(token * k + slot) * width + column] * weight
                };
                (1..k).fold(product(0), |sum, slot| sum + product(slot))
            };
            let want: Vec<f32> = (0..tokens * width).map(value).collect();
            let case = format!("merge {tokens} × {k} of {width}, weights {is_weighted}");
            report.compare(&case, got, &wide(&want), 0.0);
        }
    }
    report.finish();
}
