//! Measures the speed of products: `cargo test -p moe-executor --release --lib products::timings -- --ignored --nocapture`. Times
//! are GPU times without launch overhead: all launches are queued after a long copy.

use crate::cpu::glu::Glu;
use crate::cuda::launch::{Down, GateUp, Kernels, MulMatId, Rows, Weights};
use crate::cuda::{Ptr, Result};
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use moe_gguf::GgmlType;

use super::operands::types;
use crate::cuda::tests::device::{Device, Memory};

/// Size of the weights in bytes. Consecutive calls read different parts, so that no cache holds them.
const BYTES: usize = 2 << 30;

struct Bench {
    device: &'static Device,
    weights: Memory<u8>,
    other: Memory<u8>,
    /// Activations, results and scratch memory.
    buffer: Memory<f32>,
    /// Memory bandwidth of a copy of [`BYTES`] in bytes/s, reads plus writes.
    bandwidth: f64,
}

impl Bench {
    fn new(device: &'static Device) -> Bench {
        let mut bench = Bench {
            device,
            weights: device.zeros(BYTES),
            other: device.zeros(BYTES),
            buffer: device.nan_output(64 << 20),
            bandwidth: 0.0,
        };
        let times: Vec<f64> = (0..5).map(|_| bench.time(1, |_| bench.copy())).collect();
        let best = times.into_iter().fold(f64::INFINITY, f64::min);
        bench.bandwidth = 2.0 * BYTES as f64 / best;
        println!("copy of 2 GiB: {:.0} GB/s", bench.bandwidth / 1e9);
        bench
    }

    fn copy(&self) -> Result<()> {
        self.device.copy(&self.weights, &self.other);
        Ok(())
    }

    /// GPU time of a call in seconds: the median of five rounds of `calls` calls.
    fn time(&self, calls: usize, mut call: impl FnMut(usize) -> Result<()>) -> f64 {
        let now = || {
            let stream = &self.device.stream;
            stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap()
        };
        call(0).unwrap();
        let mut rounds = [0.0; 5];
        for round in &mut rounds {
            self.copy().unwrap();
            let start = now();
            for i in 0..calls {
                call(i).unwrap();
            }
            *round = f64::from(start.elapsed_ms(&now()).unwrap()) / 1e3 / calls as f64;
        }
        rounds.sort_by(f64::total_cmp);
        rounds[2]
    }

    /// Part `i` of `buffer`. Parts do not overlap.
    fn part(&self, i: usize) -> Ptr {
        self.device.at(&self.buffer).offset(i * (32 << 20))
    }

    fn matrices(&self, ty: GgmlType, n_in: usize, n_out: usize, at: usize) -> Weights {
        let row_size = ty.row_size(n_in as u64).unwrap() as usize;
        Weights {
            ptr: self.device.at(&self.weights).offset(at),
            ty,
            n_in,
            n_out,
            row_size,
            expert_size: row_size * n_out,
        }
    }

    fn report(&self, what: &str, bytes: usize, operations: usize, seconds: f64) {
        let rate = bytes as f64 / seconds;
        println!(
            "{what}: {:.2} µs, {:.1} MB, {:.0} GB/s, {:.0} % of the copy, {:.2} TOP/s",
            seconds * 1e6,
            bytes as f64 / 1e6,
            rate / 1e9,
            rate / self.bandwidth * 100.0,
            operations as f64 / seconds / 1e12
        );
    }

    /// The products of a MoE layer, with different experts at every call. `down_ty` is the type of down.
    fn layer(
        &self,
        [ty, down_ty]: [GgmlType; 2],
        (n_embd, n_ff): (usize, usize),
        (tokens, k, n_expert): Shape,
    ) {
        let kernels = &self.device.kernels;
        let stream = &self.device.stream;
        let size = |ty, n_in, n_out| self.matrices(ty, n_in, n_out, 0).expert_size * n_expert;
        let (up, down) = (size(ty, n_embd, n_ff), size(down_ty, n_ff, n_embd));
        let layer = (2 * up + down).next_multiple_of(256);
        let layers = (BYTES / layer).max(1);
        // The experts of each token are spread over all experts.
        let selected = |i: usize| {
            (0..tokens * k)
                .map(move |e| ((e / k * 7 + e % k * n_expert / k + i * 3) % n_expert) as i32)
        };
        let n_routings = layers.max(8);
        let ids: Vec<i32> = (0..n_routings).flat_map(selected).collect();
        let ids = self.device.upload(&ids);
        let [
            x,
            hidden,
            out,
            scratch,
            work,
            sum,
            weights,
            quantized,
            x_quantized,
        ] = [0, 1, 3, 5, 6, 7, 0, 2, 4].map(|i| self.part(i));
        let base = |i: usize| i % layers * layer;
        let ids = |i: usize| self.device.at(&ids).offset(i % n_routings * tokens * k * 4);
        let gate_up = |i: usize| {
            let product = GateUp {
                gate: self.matrices(ty, n_embd, n_ff, base(i)),
                up: self.matrices(ty, n_embd, n_ff, base(i) + up),
                gate_bias: Ptr::NULL,
                up_bias: Ptr::NULL,
                glu: Glu::Swiglu,
                // A session passes a row that the norm has quantized.
                x: Rows {
                    x,
                    quantized: x_quantized,
                },
                ids: ids(i),
                tokens,
                k,
                n_expert,
                out: hidden,
                up_out: Ptr::NULL,
                quantized,
                scratch,
                work,
            };
            kernels.experts_gate_up(stream, &product)
        };
        let is_one = tokens == 1 && Kernels::supports_token(ty);
        let down_weights = |i| self.matrices(down_ty, n_ff, n_embd, base(i) + 2 * up);
        let down_product = |i: usize| {
            if is_one {
                let product = Down {
                    weights: down_weights(i),
                    bias: Ptr::NULL,
                    ids: ids(i),
                    router: weights,
                    k,
                    quantized,
                    out: sum,
                };
                return kernels.down(stream, &product).map(|_| ());
            }
            let product = MulMatId {
                weights: down_weights(i),
                bias: Ptr::NULL,
                x: hidden.into(),
                rows_per: 1,
                ids: ids(i),
                tokens,
                k,
                n_expert,
                out,
                scratch,
                work,
            };
            kernels.mul_mat_id(stream, &product)
        };
        // The down kernel for one token also computes the weighted sum.
        let merge = |_| {
            if is_one {
                Ok(())
            } else {
                kernels.merge(stream, out, weights, tokens, k, n_embd, sum)
            }
        };
        let n_selected = (tokens * k).min(n_expert);
        let operations = 2 * tokens * k * n_embd * n_ff;
        let what = |part| {
            let types = if ty == down_ty {
                ty.to_string()
            } else {
                format!("{ty} down {down_ty}")
            };
            format!("{part} {types}, {tokens} × {k} of {n_expert} experts of {n_embd} × {n_ff}")
        };
        let calls = if tokens == 1 { 100 } else { 10 };
        let (up, down) = (up / n_expert * n_selected, down / n_expert * n_selected);
        let parts = [
            (
                "gate_up",
                2 * up,
                2,
                self.time(calls, |i| gate_up(i).map(|_| ())),
            ),
            ("down", down, 1, self.time(calls, down_product)),
            ("merge", 0, 0, self.time(calls, merge)),
        ];
        for (part, bytes, products, seconds) in parts {
            self.report(&what(part), bytes, products * operations, seconds);
        }
        let all = self.time(calls, |i| {
            gate_up(i)?;
            down_product(i)?;
            merge(i)
        });
        self.report(&what("layer"), 2 * up + down, 3 * operations, all);
    }

    /// The product of one matrix with `rows` rows.
    fn matrix(&self, ty: GgmlType, n_in: usize, n_out: usize, rows: usize) {
        let size = self.matrices(ty, n_in, n_out, 0).expert_size;
        let step = size.next_multiple_of(256);
        let turns = (BYTES / step).max(1);
        let [x, out, scratch] = [0, 1, 5].map(|i| self.part(i));
        let seconds = self.time(if rows == 1 { 100 } else { 10 }, |i| {
            let weights = self.matrices(ty, n_in, n_out, i % turns * step);
            let (kernels, stream) = (&self.device.kernels, &self.device.stream);
            kernels.mul_mat(stream, &weights, Ptr::NULL, x.into(), rows, out, scratch)
        });
        let what = format!("mul_mat {ty} {n_out} × {n_in}, {rows} rows");
        self.report(&what, size, 2 * rows * n_in * n_out, seconds);
    }
}

/// `(tokens, k, n_expert)`
type Shape = (usize, usize, usize);

#[test]
#[ignore = "a measurement"]
fn timings() {
    let Some(device) = Device::open() else { return };
    let bench = Bench::new(device);
    let empty = bench.time(100, |_| {
        let x = bench.part(0);
        device.kernels.add(&device.stream, x, x, 1, x)
    });
    println!("add, one element: {:.2} µs", empty * 1e6);
    // Decoding: layers of qwen3-30b-a3b with every type, then of gpt-oss-20b and Mixtral 8x7B.
    for ty in types().filter(|ty| ty.block_size() > 1 || *ty == GgmlType::F16) {
        if 768 % ty.block_size() == 0 {
            bench.layer([ty; 2], (2048, 768), (1, 8, 128));
        }
    }
    // Q4_K_M has down matrices of type Q6_K in half of the layers.
    bench.layer([GgmlType::Q4_K, GgmlType::Q6_K], (2048, 768), (1, 8, 128));
    bench.layer([GgmlType::MXFP4; 2], (2880, 2880), (1, 4, 32));
    bench.layer([GgmlType::Q4_K; 2], (4096, 14336), (1, 2, 8));
    // Several tokens, and prompts.
    for tokens in [4, 16, 64, 512] {
        bench.layer([GgmlType::Q4_K; 2], (2048, 768), (tokens, 8, 128));
        bench.layer([GgmlType::MXFP4; 2], (2880, 2880), (tokens, 4, 32));
    }
    // Projections of attention, the router, the output matrix.
    for rows in [1, 4, 8, 512] {
        for (ty, n_in, n_out) in [
            (GgmlType::Q4_K, 2048, 4096),
            (GgmlType::Q4_K, 2048, 512),
            (GgmlType::Q6_K, 2048, 512),
            (GgmlType::Q8_0, 2880, 4096),
            (GgmlType::F16, 2048, 4096),
            (GgmlType::BF16, 2880, 4096),
            (GgmlType::F32, 2048, 128),
        ] {
            bench.matrix(ty, n_in, n_out, rows);
        }
    }
    bench.matrix(GgmlType::Q6_K, 2048, 151_936, 1);
    bench.matrix(GgmlType::Q8_0, 2880, 201_088, 1);
}
