//! Functions of one value, products with factors, copies of columns, and norms of groups.

use crate::cpu::map::Map;
use crate::cuda::Ptr;
use crate::cuda::launch::{GroupNorm, Multiply};
use crate::cuda::tests::device::{Device, noise, wide};
use crate::hparams::NormKind;
use moe_testkit::Report;

const EPS: f32 = 1e-5;

#[test]
fn functions_of_one_value() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for n in [1, 255, 256, 1000, 100_003] {
        let mut x: Vec<f32> = noise(n, 20).iter().map(|x| x * 12.0).collect();
        x[0] = f32::NAN;
        for map in [
            Map::Scale(-0.75),
            Map::Clamp(2.5),
            Map::AtMost(1.5),
            Map::Sigmoid,
            Map::Silu,
            Map::Tanh,
        ] {
            let want = |x: f64| match map {
                Map::Scale(factor) => x * f64::from(factor),
                Map::Clamp(limit) => x.clamp(-f64::from(limit), f64::from(limit)),
                // Unlike `f64::min`, this propagates NaN.
                Map::AtMost(limit) if x > f64::from(limit) => f64::from(limit),
                Map::AtMost(_) => x,
                Map::Sigmoid => sigmoid(x),
                Map::Silu => x * sigmoid(x),
                Map::Tanh => x.tanh(),
            };
            let want: Vec<f64> = wide(&x).into_iter().map(want).collect();
            let place = device.output(&x);
            let done = device
                .kernels
                .map(&device.stream, map, device.at(&place), n);
            let got = device.after(done, &place);
            report.compare(&format!("{map:?} of {n}"), got, &want, 2e-6);
        }
    }
    report.finish();
}

#[test]
fn rows_times_factors() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    // rows, width, elements with the same factor, whether rows have factors of their own, by ids
    for (rows, width, group, own, by_ids) in [
        (3, 300, 1, true, false),
        (70, 64, 16, true, false),
        (5, 257, 257, true, false),
        (4, 300, 1, false, false),
        (2, 64, 64, false, false),
        (9, 2048, 2048, true, true),
    ] {
        let per_row = width / group;
        let factors = noise(8.max(rows) * per_row, 21);
        let ids: Vec<i32> = (0..rows).map(|row| (5 * row % 8) as i32).collect();
        let (dfactors, dids) = (device.upload(&factors), device.upload(&ids));
        // Into other rows than those of `x`, several for each; and in place.
        for rows_per in [3, 1] {
            let (n_in, n_out) = (rows.div_ceil(rows_per), rows);
            let x = noise(n_in * width, 22);
            let dx = device.output(&x);
            let out = device.nan_output(n_out * width);
            let to = if rows_per == 1 { &dx } else { &out };
            let it = Multiply {
                x: device.at(&dx),
                factors: device.at(&dfactors),
                ids: if by_ids { device.at(&dids) } else { Ptr::NULL },
                rows_per,
                rows,
                width,
                group,
                per_row: if own { per_row } else { 0 },
                out: device.at(to),
            };
            let done = device.kernels.multiply(&device.stream, &it);
            let got = device.after(done, to);
            let product = |i: usize| {
                let (row, column) = (i / width, i % width);
                let of = if by_ids { ids[row] as usize } else { row };
                let first = if own { of * per_row } else { 0 };
                let factor = factors[first + column / group];
                f64::from(x[row / rows_per * width + column] * factor)
            };
            let want: Vec<f64> = (0..n_out * width).map(product).collect();
            let case = format!("multiply {rows} × {width}, {group}, {rows_per}, {own}, {by_ids}");
            report.compare(&case, got, &want, 0.0);
        }
    }
    report.finish();
}

#[test]
fn copies_of_columns() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for (rows, row_width, first, width) in [(1, 128, 96, 32), (33, 1000, 3, 700), (2, 5, 0, 5)] {
        let x = noise(rows * row_width, 23);
        let (dx, out) = (device.upload(&x), device.nan_output(rows * width));
        let (from, to) = (device.at(&dx), device.at(&out));
        let columns = (first, width);
        let done =
            device
                .kernels
                .copy_columns(&device.stream, from, (rows, row_width), columns, to);
        let got = device.after(done, &out);
        let row = |row: &[f32]| wide(&row[first..][..width]);
        let want: Vec<f64> = x.chunks_exact(row_width).flat_map(row).collect();
        report.compare(&format!("columns {first} ..+ {width}"), got, &want, 0.0);
    }
    report.finish();
}

#[test]
fn norms_of_groups() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for (width, groups, n_weights, has_weight, has_bias) in [
        (2048, 3, 1, true, false),
        (4096, 1, 1, true, true),
        (128, 200, 1, false, false),
        (64, 12, 4, true, false),
        (33, 2, 1, true, true),
        (16, 7, 1, false, false),
        (1, 1, 1, true, true),
    ] {
        let n = width * groups;
        // The mean differs from 0.
        let x: Vec<f32> = noise(n, 24).iter().map(|x| x + 0.5).collect();
        let (weight, bias) = (noise(n_weights * width, 25), noise(width, 26));
        let (dx, out) = (device.upload(&x), device.nan_output(n));
        let (dweight, dbias) = (device.upload(&weight), device.upload(&bias));
        for kind in [NormKind::Rms, NormKind::Layer] {
            let it = GroupNorm {
                x: device.at(&dx),
                kind,
                weight: if has_weight {
                    device.at(&dweight)
                } else {
                    Ptr::NULL
                },
                n_weights,
                bias: if has_bias {
                    device.at(&dbias)
                } else {
                    Ptr::NULL
                },
                eps: EPS,
                width,
                groups,
                out: device.at(&out),
            };
            let done = device.kernels.group_norm(&device.stream, &it);
            let got = device.after(done, &out);
            let mut want = Vec::new();
            for (group, row) in wide(&x).chunks_exact(width).enumerate() {
                let mean = match kind {
                    NormKind::Rms => 0.0,
                    NormKind::Layer => row.iter().sum::<f64>() / width as f64,
                };
                let squares = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
                let scale = 1.0 / (squares / width as f64 + f64::from(EPS)).sqrt();
                want.extend(row.iter().enumerate().map(|(i, x)| {
                    let weight = f64::from(weight[group % n_weights * width + i]);
                    let bias = f64::from(bias[i]);
                    let factor = if has_weight { weight } else { 1.0 };
                    (x - mean) * scale * factor + if has_bias { bias } else { 0.0 }
                }));
            }
            let case = format!("{kind:?} norm {groups} × {width}, {has_weight}, {has_bias}");
            report.compare(&case, got, &want, 4e-6);
        }
    }
    report.finish();
}
