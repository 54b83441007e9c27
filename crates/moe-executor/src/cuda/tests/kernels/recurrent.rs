//! Recurrent layers, compared with the kernels of the CPU, and the products and copies around them.

use std::ops::Range;

use moe_testkit::Report;

use crate::cpu::convolution;
use crate::cpu::delta_net::{self, Heads, KeyHeads, Tokens};
use crate::cpu::state_space::{self, ScanInputs, SsmHeads};
use crate::cpu::threads::Threads;
use crate::cuda::Ptr;
use crate::cuda::launch::{Columns, Convolution, DeltaNet, Runs, SsmScan, check_state};
use crate::cuda::tests::device::{Device, Memory, noise, wide};

/// Sequences in the buffers of states.
const N_SEQ: usize = 4;
/// Passes: sequence and number of tokens of each run.
const PASSES: [&[(usize, usize)]; 4] = [
    &[(0, 1)],
    &[(1, 1), (3, 1), (0, 1)],
    &[(3, 40), (0, 1), (2, 7)],
    &[(1, 100)],
];

/// The runs of a pass on the GPU.
struct Pass {
    memory: Memory<u32>,
    /// Sequence and tokens of each run.
    runs: Vec<(usize, Range<usize>)>,
}

impl Pass {
    fn new(device: &Device, lengths: &[(usize, usize)]) -> Pass {
        let mut end = 0;
        let run = |&(sequence, n): &(usize, usize)| {
            end += n;
            (sequence, end - n..end)
        };
        let runs: Vec<_> = lengths.iter().map(run).collect();
        let values = runs.iter().flat_map(|(sequence, tokens)| {
            [*sequence, tokens.start, tokens.len()].map(|n| n as u32)
        });
        Pass {
            memory: device.upload(&values.collect::<Vec<_>>()),
            runs,
        }
    }

    fn n_tokens(&self) -> usize {
        self.runs.last().map_or(0, |(_, tokens)| tokens.end)
    }

    fn operand(&self, device: &Device) -> Runs {
        let longest = self.runs.iter().map(|(_, tokens)| tokens.len()).max();
        Runs {
            at: device.at(&self.memory),
            n: self.runs.len(),
            longest: longest.unwrap_or(0),
        }
    }
}

/// The elements of tokens with `width` elements each.
fn part(tokens: &Range<usize>, width: usize) -> Range<usize> {
    tokens.start * width..tokens.end * width
}

#[test]
fn causal_convolution() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(2).unwrap();
    let mut report = Report::default();
    for lengths in PASSES {
        let pass = Pass::new(device, lengths);
        // The convolution is the middle one of `n_parts`, whose states and results alternate.
        for (channels, n, has_bias, silu, n_parts) in [
            (64, 3, false, false, 1),
            (300, 4, true, true, 1),
            (1000, 4, false, true, 1),
            (33, 40, true, false, 1),
            (300, 4, false, true, 3),
            (36, 9, true, true, 3),
        ] {
            let of_state = (n - 1) * channels;
            let (before, stride) = (n_parts / 2, n_parts * of_state);
            let x = noise(pass.n_tokens() * channels, 1);
            let (kernel, bias) = (noise(n * channels, 2), noise(channels, 3));
            let mut states = noise(N_SEQ * stride, 4);
            let mut want = vec![f32::NAN; pass.n_tokens() * n_parts * channels];
            let [dx, dkernel, dbias] = [&x, &kernel, &bias].map(|values| device.upload(values));
            let (dstates, out) = (device.output(&states), device.output(&want));
            let after = |memory: &Memory<f32>, n: usize| {
                device.at(memory).offset(before * n * size_of::<f32>())
            };
            let call = Convolution {
                x: device.at(&dx),
                kernel: device.at(&dkernel),
                bias: if has_bias {
                    device.at(&dbias)
                } else {
                    Ptr::NULL
                },
                channels,
                n,
                silu,
                runs: pass.operand(device),
                states: after(&dstates, of_state),
                state_stride: stride,
                out: Columns {
                    at: after(&out, channels),
                    row: n_parts * channels,
                },
            };
            let done = device.kernels.convolution(&device.stream, &call);
            let got = device.after(done, &out);

            for (sequence, tokens) in &pass.runs {
                let first = sequence * stride + before * of_state;
                let past = &mut states[first..][..of_state];
                let width = n_parts * channels;
                let columns = before * channels..(before + 1) * channels;
                let (x, out) = (&x[part(tokens, channels)], part(tokens, width));
                let out = (&mut want[out], width);
                convolution::convolve_to_columns(&threads, columns, &kernel, past, x, out);
            }
            let finished = |(i, sum): (usize, &f32)| {
                let bias = if has_bias { bias[i % channels] } else { 0.0 };
                let sum = f64::from(*sum) + f64::from(bias);
                if silu {
                    sum / (1.0 + (-sum).exp())
                } else {
                    sum
                }
            };
            let want: Vec<f64> = want.iter().enumerate().map(finished).collect();
            let case = format!("convolution {channels} × {n} of {n_parts}, {lengths:?}");
            report.compare(&case, got, &want, 1e-5);
            let got = device.read(&dstates);
            report.compare(&format!("states of {case}"), got, &wide(&states), 0.0);
        }
    }
    report.finish();
}

#[test]
fn gated_delta_rule() {
    const EPS: f32 = 1e-6;
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(2).unwrap();
    let mut report = Report::default();
    for lengths in PASSES {
        let pass = Pass::new(device, lengths);
        for (n_k, n_v, width, keys, by_element) in [
            (2, 4, 16, KeyHeads::Grouped, false),
            (2, 4, 20, KeyHeads::InTurn, false),
            (4, 8, 64, KeyHeads::Grouped, false),
            (3, 6, 128, KeyHeads::InTurn, false),
            (2, 4, 20, KeyHeads::Grouped, true),
            (4, 4, 16, KeyHeads::InTurn, true),
            (3, 3, 128, KeyHeads::InTurn, true),
        ] {
            let heads = Heads {
                n_k,
                n_v,
                width,
                keys,
            };
            let n = pass.n_tokens();
            let mut qkv = noise(n * heads.qkv_width(), 1);
            let n_decay = if by_element { heads.v_width() } else { n_v };
            let decay = noise(n * n_decay, 2);
            let decay: Vec<f32> = decay.iter().map(|x| x - 1.0).collect();
            let beta: Vec<f32> = noise(n * n_v, 3).iter().map(|x| x.abs()).collect();
            let mut states = noise(N_SEQ * heads.state(), 4);
            let [dqkv, ddecay, dbeta] = [&qkv, &decay, &beta].map(|values| device.upload(values));
            let (dstates, out) = (
                device.output(&states),
                device.nan_output(n * heads.v_width()),
            );
            let call = DeltaNet {
                qkv: device.at(&dqkv),
                decay: device.at(&ddecay),
                by_element,
                beta: device.at(&dbeta),
                heads,
                eps: EPS,
                runs: pass.operand(device),
                states: device.at(&dstates),
                out: device.at(&out),
            };
            let done = device.kernels.delta_net(&device.stream, &call);
            let got = device.after(done, &out);

            delta_net::normalize(&threads, heads, EPS, &mut qkv);
            let mut want = vec![0.0; n * heads.v_width()];
            for (sequence, tokens) in &pass.runs {
                let inputs = Tokens {
                    qkv: &qkv[part(tokens, heads.qkv_width())],
                    decay: &decay[part(tokens, n_decay)],
                    beta: &beta[part(tokens, n_v)],
                };
                let state = &mut states[sequence * heads.state()..][..heads.state()];
                let out = &mut want[part(tokens, heads.v_width())];
                delta_net::delta_net(&threads, heads, inputs, state, out);
            }
            let case = format!("delta_net {heads:?}, by element {by_element}, {lengths:?}");
            report.compare(&case, got, &wide(&want), 1e-5);
            let got = device.read(&dstates);
            report.compare(&format!("states of {case}"), got, &wide(&states), 1e-5);
        }
    }
    report.finish();
}

#[test]
fn scan_of_mamba_2() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(2).unwrap();
    let mut report = Report::default();
    for lengths in PASSES {
        let pass = Pass::new(device, lengths);
        for (n, dim, n_group, n_state) in [(6, 16, 2, 16), (4, 12, 1, 20), (8, 64, 4, 128)] {
            let heads = SsmHeads {
                n,
                dim,
                n_group,
                n_state,
            };
            let n_tokens = pass.n_tokens();
            let of_state = heads.width() * n_state;
            let xbc = noise(n_tokens * heads.channels(), 1);
            let mut dt: Vec<f32> = noise(n_tokens * n, 2).iter().map(|x| 3.0 * x).collect();
            dt[1] = 25.0;
            let a: Vec<f32> = noise(n, 3).iter().map(|x| x - 1.5).collect();
            let mut states = noise(N_SEQ * of_state, 4);
            let [dxbc, ddt, da] = [&xbc, &dt, &a].map(|values| device.upload(values));
            let (dstates, out) = (
                device.output(&states),
                device.nan_output(n_tokens * heads.width()),
            );
            let call = SsmScan {
                xbc: device.at(&dxbc),
                dt: device.at(&ddt),
                a: device.at(&da),
                heads,
                runs: pass.operand(device),
                states: device.at(&dstates),
                out: device.at(&out),
            };
            let done = device.kernels.ssm_scan(&device.stream, &call);
            let got = device.after(done, &out);

            let mut want = vec![0.0; n_tokens * heads.width()];
            for (sequence, tokens) in &pass.runs {
                let inputs = ScanInputs {
                    xbc: &xbc[part(tokens, heads.channels())],
                    dt: &dt[part(tokens, n)],
                    a: &a,
                };
                let state = &mut states[sequence * of_state..][..of_state];
                let out = &mut want[part(tokens, heads.width())];
                state_space::scan(&threads, heads, inputs, state, out);
            }
            let case = format!("ssm_scan {heads:?}, {lengths:?}");
            report.compare(&case, got, &wide(&want), 1e-5);
            let got = device.read(&dstates);
            report.compare(&format!("states of {case}"), got, &wide(&states), 1e-5);
        }
    }
    report.finish();
}

#[test]
fn rejects_states_without_a_kernel() {
    assert!(check_state("delta_net", 128, 128).is_ok());
    for (rows, width) in [(128, 132), (6, 128), (128, 30)] {
        let error = check_state("delta_net", rows, width).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "kernel `delta_net`: a state of {rows} × {width} elements per head is not supported"
            )
        );
    }
}

#[test]
fn decays_and_biases() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let mut report = Report::default();
    for (rows, width) in [(1, 32), (70, 48), (3, 1000)] {
        let n = rows * width;
        let x: Vec<f32> = noise(n, 1).iter().map(|x| 30.0 * x).collect();
        let (bias, factors) = (noise(width, 2), noise(width, 3));
        let [dbias, dfactors] = [&bias, &factors].map(|values| device.upload(values));
        let constants = [device.at(&dbias), device.at(&dfactors)];

        let out = device.output(&x);
        let done = kernels.decay(stream, device.at(&out), constants, rows, width);
        let softplus = |i: usize| f64::from(x[i] + bias[i % width]).exp().ln_1p();
        let want = (0..n).map(|i| softplus(i) * f64::from(factors[i % width]));
        let want: Vec<f64> = want.collect();
        let case = format!("decay {rows} × {width}");
        report.compare(&case, device.after(done, &out), &want, 1e-6);

        let out = device.output(&x);
        let done = kernels.add_bias(stream, device.at(&out), constants[0], rows, width);
        let sum = |i: usize| f64::from(x[i] + bias[i % width]);
        let want: Vec<f64> = (0..n).map(sum).collect();
        let case = format!("add_bias {rows} × {width}");
        report.compare(&case, device.after(done, &out), &want, 0.0);
    }
    report.finish();
}

#[test]
fn skip_connection_of_mamba_2() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for (n, dim, tokens) in [(6, 16, 1), (48, 64, 5)] {
        let heads = SsmHeads {
            n,
            dim,
            n_group: 2,
            n_state: 20,
        };
        let (width, channels) = (heads.width(), heads.channels());
        let (y, xbc, factors) = (
            noise(tokens * width, 1),
            noise(tokens * channels, 2),
            noise(n, 3),
        );
        let [dxbc, dfactors] = [&xbc, &factors].map(|values| device.upload(values));
        let out = device.output(&y);
        let done = device.kernels.add_scaled_heads(
            &device.stream,
            device.at(&out),
            device.at(&dxbc),
            device.at(&dfactors),
            heads,
            tokens,
        );
        let sum = |i: usize| {
            let x = xbc[i / width * channels + i % width];
            f64::from(y[i]) + f64::from(x) * f64::from(factors[i % width / dim])
        };
        let want: Vec<f64> = (0..tokens * width).map(sum).collect();
        let case = format!("add_scaled_heads {n} × {dim}");
        report.compare(&case, device.after(done, &out), &want, 1e-6);
    }
    report.finish();
}

#[test]
fn products_and_copies_of_columns() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let mut report = Report::default();
    for (rows, width) in [(1, 64), (70, 300)] {
        let x = noise(rows * 3 * width, 1);
        let dx = device.upload(&x);
        let columns = |start: usize| Columns {
            at: device.at(&dx).offset(start * size_of::<f32>()),
            row: 3 * width,
        };
        let element = |i: usize, start: usize| x[i / width * 3 * width + start + i % width];

        let out = device.nan_output(rows * width);
        let factors = [columns(0), columns(2 * width)];
        let done = kernels.multiply_columns(stream, factors, rows, width, device.at(&out));
        let product = |i: usize| f64::from(element(i, 0) * element(i, 2 * width));
        let want: Vec<f64> = (0..rows * width).map(product).collect();
        let case = format!("multiply_columns {rows} × {width}");
        report.compare(&case, device.after(done, &out), &want, 0.0);

        let y = noise(rows * width, 2);
        let out = device.output(&y);
        let own = Columns {
            at: device.at(&out),
            row: width,
        };
        let factors = [own, columns(width)];
        let done = kernels.multiply_columns(stream, factors, rows, width, own.at);
        let product = |i: usize| f64::from(y[i] * element(i, width));
        let want: Vec<f64> = (0..rows * width).map(product).collect();
        let case = format!("multiply_columns {rows} × {width}, in place");
        report.compare(&case, device.after(done, &out), &want, 0.0);
    }
    for (rows, groups, group, ranges) in [
        (1, 1, 100, vec![30..90, 5..6]),
        (5, 4, 7, vec![0..2, 2..4, 4..6]),
        (70, 3, 300, vec![256..300, 0..5]),
    ] {
        let x = noise(rows * groups * group, 3);
        let dx = device.upload(&x);
        let mut want = Vec::new();
        for row in x.chunks_exact(groups * group) {
            for range in &ranges {
                let parts = row.chunks_exact(group);
                want.extend(parts.flat_map(|group| wide(&group[range.clone()])));
            }
        }
        let out = device.nan_output(want.len());
        let columns = Columns {
            at: device.at(&dx),
            row: groups * group,
        };
        let at = device.at(&out);
        let done = kernels.copy_groups(stream, columns, rows, group, &ranges, at);
        let case = format!("copy_groups {rows} × {groups} × {group}, {ranges:?}");
        report.compare(&case, device.after(done, &out), &want, 0.0);
    }
    report.finish();
}

#[test]
fn squared_relu() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for n in [1, 257, 100_003] {
        let mut x: Vec<f32> = noise(n, 14).iter().map(|x| x * 12.0).collect();
        if n > 1 {
            x[1] = f32::NAN;
        }
        let out = device.output(&x);
        let done = device
            .kernels
            .squared_relu(&device.stream, device.at(&out), n);
        let square = |x: &f32| if *x < 0.0 { 0.0 } else { f64::from(*x).powi(2) };
        let want: Vec<f64> = x.iter().map(square).collect();
        let got = device.after(done, &out);
        report.compare(&format!("squared_relu {n}"), got, &want, 1e-6);
    }
    report.finish();
}
