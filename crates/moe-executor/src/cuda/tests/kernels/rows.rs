//! Norms, sums, activations, rotary embedding, and copies of rows.

use crate::cpu::glu::Glu;
use crate::cpu::rope::rotate;
use crate::cuda::Ptr;
use crate::cuda::launch::Kernels;
use crate::cuda::launch::{HeadPart, JoinHeads, Rope};
use crate::hparams::RopeLayout;
use half::f16;

use crate::cuda::tests::device::{Device, Memory, noise, wide};
use moe_testkit::Report;

const EPS: f32 = 1e-5;

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let groups = x.chunks_exact(weight.len()).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        row.iter()
            .zip(weight)
            .map(move |(x, w)| x * scale * f64::from(*w))
    });
    groups.collect()
}

#[test]
fn rms_norm() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let mut report = Report::default();
    for (width, rows) in [
        (2048, 1),
        (2880, 5),
        (4096, 33),
        (8192, 2),
        (8192, 1),
        (8224, 1),
        (2880, 1),
        (96, 1),
        (128, 200),
        (64, 7),
        (20, 3),
        (33, 2),
        (5, 1),
        (1, 1),
    ] {
        let n = width * rows;
        let (x, y, weight) = (noise(n, 1), noise(n, 2), noise(width, 3));
        let (dx, dw) = (device.upload(&x), device.upload(&weight));
        let (px, pw) = (device.at(&dx), device.at(&dw));
        let out = device.nan_output(n);

        let case = format!("rms_norm {rows} × {width}");
        let done = kernels.rms_norm(stream, px, pw, EPS, width, rows, device.at(&out), Ptr::NULL);
        let got = device.after(done, &out);
        report.compare(&case, got, &norm(&wide(&x), &weight), 2e-6);

        let case = format!("rms_norm {rows} × {width}, in place");
        let place = device.output(&y);
        let at = device.at(&place);
        let done = kernels.rms_norm(stream, at, pw, EPS, width, rows, at, Ptr::NULL);
        let got = device.after(done, &place);
        report.compare(&case, got, &norm(&wide(&y), &weight), 2e-6);
    }
    report.finish();
}

/// Each group of 32 bytes has a scale of amax / 127 in half precision, and the sums of its halves.
#[test]
fn rms_norm_quantizes_a_single_row() {
    let Some(device) = Device::open() else { return };
    // The last one is too large for the kernel of one row.
    for width in [32, 64, 800, 2048, 2880, 5120, 8192, 8224] {
        let (x, weight) = (noise(width, 1), noise(width, 2));
        let (dx, dw, out) = (
            device.upload(&x),
            device.upload(&weight),
            device.nan_output(width),
        );
        let quantized = device.upload(&vec![0xa5u8; Kernels::scratch_size(1, width) + 8]);
        let [px, pw, pout, pquantized] = [
            device.at(&dx),
            device.at(&dw),
            device.at(&out),
            device.at(&quantized),
        ];
        let done = device
            .kernels
            .rms_norm(&device.stream, px, pw, EPS, width, 1, pout, pquantized);
        let out = device.after(done, &out).unwrap();
        let quantized = device.download(&quantized).unwrap();
        let (codes, groups) = quantized.split_at(width);
        for (g, row) in out.chunks_exact(32).enumerate() {
            let amax = row.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
            let inverse = 127.0 / amax;
            let wanted: Vec<i8> = row
                .iter()
                .map(|x| (x * inverse).round_ties_even() as i8)
                .collect();
            let got: Vec<i8> = codes[32 * g..][..32].iter().map(|c| *c as i8).collect();
            assert_eq!(got, wanted, "group {g} of {width}");
            let group = &groups[8 * g..][..8];
            let scale = f32::from_le_bytes(group[..4].try_into().unwrap());
            assert_eq!(scale, f16::from_f32(amax / 127.0).to_f32(), "group {g}");
            for half in 0..2 {
                let sum: i16 = wanted[16 * half..][..16]
                    .iter()
                    .map(|c| i16::from(*c))
                    .sum();
                let bytes = group[4 + 2 * half..][..2].try_into().unwrap();
                assert_eq!(i16::from_le_bytes(bytes), sum, "group {g} of {width}");
            }
        }
        assert!(groups[width / 32 * 8..].iter().all(|byte| *byte == 0xa5));
    }
}

/// A graph computes a sum and its norm with one kernel. The results are those of two kernels.
#[test]
fn sum_and_norm_are_the_same_in_a_graph() {
    let Some(device) = Device::open() else { return };
    let stream = &device.stream;
    // Other tests launch kernels at the same time, which must not be collected.
    let kernels = Kernels::load(stream.context()).unwrap();
    let launches = kernels.launches();
    for width in [32, 800, 2048, 2880, 5120, 8192] {
        let [a, b, weight] = [1, 2, 3].map(|seed| device.upload(&noise(width, seed)));
        let [sum, out] = [(); 2].map(|()| device.nan_output(width));
        let quantized = device.upload(&vec![0xa5u8; Kernels::scratch_size(1, width)]);
        let [a, b, weight] = [&a, &b, &weight].map(|it| device.at(it));
        let (to, at, codes) = (device.at(&sum), device.at(&out), device.at(&quantized));
        let run = |repeats| {
            launches.begin_pass(stream, 1, repeats);
            // More launches than the smallest graph has.
            for _ in 0..8 {
                kernels.add(stream, a, b, width, to).unwrap();
                kernels
                    .rms_norm(stream, to, weight, EPS, width, 1, at, codes)
                    .unwrap();
            }
            launches.flush();
            launches.check().unwrap();
            let [sum, out] = [&sum, &out].map(|it| device.read(it).unwrap());
            let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            (bits(sum), bits(out), device.download(&quantized).unwrap())
        };
        let (single, before) = (run(false), launches.n_graphs());
        run(true);
        assert!(run(true) == single, "{width}");
        assert!(launches.n_graphs() > before, "{width}");
    }
}

#[test]
fn add_and_scale_rows() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let mut report = Report::default();
    for (rows, width) in [
        (1, 1),
        (3, 85),
        (1, 256),
        (1, 257),
        (70, 300),
        (2, 2880),
        (513, 64),
    ] {
        let n = rows * width;
        let (a, b) = (noise(n, 4), noise(n, 5));
        let score = noise(rows, 7);
        let (da, db) = (device.upload(&a), device.upload(&b));
        let dscore = device.upload(&score);

        let out = device.nan_output(n);
        let done = kernels.add(stream, device.at(&da), device.at(&db), n, device.at(&out));
        let got = device.after(done, &out);
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a + b)).collect();
        report.compare(&format!("add {n}"), got, &want, 0.0);

        let x = device.output(&a);
        let done =
            kernels.scale_rows_by_sigmoid(stream, device.at(&x), device.at(&dscore), rows, width);
        let got = device.after(done, &x);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let scaled = |i: usize| f64::from(a[i]) * sigmoid(score[i / width]);
        let want: Vec<f64> = (0..n).map(scaled).collect();
        report.compare(
            &format!("scale_rows_by_sigmoid {rows} × {width}"),
            got,
            &want,
            1e-6,
        );
    }
    report.finish();
}

#[test]
fn activations() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for n in [1, 255, 256, 1000, 100_003] {
        let mut gate: Vec<f32> = noise(n, 8).iter().map(|x| x * 12.0).collect();
        let mut up: Vec<f32> = noise(n, 9).iter().map(|x| x * 12.0).collect();
        if n > 4 {
            (gate[0], up[1]) = (f32::NAN, f32::NAN);
            (gate[2], gate[3]) = (-200.0, 200.0);
        }
        let dup = device.upload(&up);
        for glu in [
            Glu::Swiglu,
            Glu::SwigluOai,
            Glu::Reglu,
            Glu::Geglu,
            Glu::SwigluLimited(1.5),
        ] {
            let want = |(g, u): (&f32, &f32)| {
                let (g, u) = (f64::from(*g), f64::from(*u));
                // Unlike `f64::min`, this propagates NaN.
                let at_most = |x: f64, limit: f64| if x > limit { limit } else { x };
                match glu {
                    Glu::Swiglu => g * sigmoid(g) * u,
                    Glu::SwigluOai => {
                        let g = at_most(g, 7.0);
                        g * sigmoid(1.702 * g) * (u.clamp(-7.0, 7.0) + 1.0)
                    }
                    Glu::Reglu if g < 0.0 => 0.0 * u,
                    Glu::Reglu => g * u,
                    Glu::Geglu => {
                        let y = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                        0.5 * g * (1.0 + y.tanh()) * u
                    }
                    Glu::SwigluLimited(limit) => {
                        let limit = f64::from(limit);
                        at_most(g * sigmoid(g), limit) * u.clamp(-limit, limit)
                    }
                }
            };
            let want: Vec<f64> = gate.iter().zip(&up).map(want).collect();
            let x = device.output(&gate);
            let (stream, at) = (&device.stream, device.at(&x));
            let done = device.kernels.glu(stream, glu, at, device.at(&dup), n);
            let got = device.after(done, &x);
            // Rounded to half precision before and after.
            let tolerance = if glu == Glu::Geglu { 4e-3 } else { 2e-6 };
            report.compare(&format!("glu {glu:?} {n}"), got, &want, tolerance);
        }
    }
    report.finish();
}

#[test]
fn get_rows() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let mut report = Report::default();
    for (rows, width, indices) in [
        (9, 2048, vec![8u32, 0, 3, 3]),
        (1, 1, vec![0]),
        (40, 300, (0..40).rev().collect()),
    ] {
        let (n, x) = (indices.len(), noise(rows * width, 10));
        let (dx, dc) = (device.upload(&x), device.upload(&indices));
        let out = device.nan_output(n * width);
        let done = kernels.get_rows(
            stream,
            device.at(&dx),
            device.at(&dc),
            n,
            width,
            device.at(&out),
        );
        let got = device.after(done, &out);
        let row = |i: u32| &x[i as usize * width..][..width];
        let want: Vec<f64> = indices.iter().flat_map(|&i| wide(row(i))).collect();
        report.compare(
            &format!("get_rows {n} of {rows} × {width}"),
            got,
            &want,
            0.0,
        );
    }
    report.finish();
}

#[test]
fn rotary_embedding() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for layout in [RopeLayout::Halves, RopeLayout::Neighbours] {
        for (rows, heads, head_dim, n_dims) in [
            (1, 32, 128, 128),
            (5, 4, 128, 64),
            (70, 8, 64, 64),
            (3, 2, 20, 20),
            (2, 1, 6, 2),
        ] {
            let (x, angles) = (noise(rows * heads * head_dim, 12), noise(rows * n_dims, 13));
            let mut want = x.clone();
            for (row, angles) in want
                .chunks_exact_mut(heads * head_dim)
                .zip(angles.chunks_exact(n_dims))
            {
                for head in row.chunks_exact_mut(head_dim) {
                    rotate(layout, &mut head[..n_dims], angles);
                }
            }
            let (dx, da) = (device.output(&x), device.upload(&angles));
            let it = Rope {
                x: device.at(&dx),
                angles: device.at(&da),
                rows,
                row_width: heads * head_dim,
                head_dim,
                n_dims,
                layout,
            };
            let done = device.kernels.rope(&device.stream, &it);
            let got = device.after(done, &dx);
            let case = format!("rope {layout:?} {rows} × {heads} × {head_dim}, {n_dims} rotated");
            report.compare(&case, got, &wide(&want), 1e-6);
        }
    }
    report.finish();
}

#[test]
fn joins_starts_and_ends_of_heads() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    // Rows, heads, elements of starts and ends, and whether the ends are rotated, and the same in all heads.
    for (rows, n_head, n, is_rotated, is_shared) in [
        (1, 128, [512, 64], true, false),
        (70, 4, [16, 8], true, false),
        (3, 16, [128, 64], false, true),
        (9, 5, [0, 10], true, true),
        (2, 1, [32, 8], true, true),
        (7, 4, [32, 8], false, false),
        (5, 3, [7, 0], false, false),
    ] {
        for layout in [RopeLayout::Halves, RopeLayout::Neighbours] {
            // The parts are in the middle of wider heads.
            let head = [n[0] + 3, n[1] + 6];
            let starts = noise(rows * n_head * head[0], 1);
            let ends_row = if is_shared { head[1] } else { n_head * head[1] };
            let ends = noise(rows * ends_row, 2);
            let angles = noise(rows * n[1] + 1, 3);
            let stride = if is_shared { 0 } else { head[1] };
            let mut want: Vec<f32> = Vec::new();
            for row in 0..rows {
                for at in 0..n_head {
                    let first = (row * n_head + at) * head[0] + 1;
                    want.extend(&starts[first..][..n[0]]);
                    let first = row * ends_row + at * stride + 2;
                    let mut end = ends[first..][..n[1]].to_vec();
                    if is_rotated {
                        rotate(layout, &mut end, &angles[row * n[1]..][..n[1]]);
                    }
                    want.extend(end);
                }
            }
            let [starts, ends, angles] = [&starts, &ends, &angles].map(|x| device.upload(x));
            let out = device.nan_output(want.len());
            let part = |memory: &Memory<f32>, first: usize, n, row, head| HeadPart {
                at: device.at(memory).offset(first * size_of::<f32>()),
                n,
                row,
                head,
            };
            let it = JoinHeads {
                starts: part(&starts, 1, n[0], n_head * head[0], head[0]),
                ends: part(&ends, 2, n[1], ends_row, stride),
                angles: if is_rotated {
                    device.at(&angles)
                } else {
                    Ptr::NULL
                },
                layout,
                rows,
                n_head,
                out: device.at(&out),
            };
            let done = device.kernels.join_heads(&device.stream, &it);
            let case = format!(
                "{rows} rows of {n_head} heads of {n:?}, rotated {is_rotated}, shared {is_shared}, {layout:?}"
            );
            report.compare(&case, device.after(done, &out), &wide(&want), 2e-6);
        }
    }
    report.finish();
}
