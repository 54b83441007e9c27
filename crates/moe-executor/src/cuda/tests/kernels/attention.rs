//! Attention.

use crate::cpu::attention::{Inputs, Shape, attention};
use crate::cpu::threads::Threads;
use crate::cuda::launch::Attention;
use crate::cuda::{Error, Ptr};

use crate::cuda::tests::device::{Device, noise, wide};
use moe_testkit::Report;

fn shape(n_head: usize, n_head_kv: usize, head_dim: usize, window: Option<usize>) -> Shape {
    Shape {
        n_head,
        n_head_kv,
        head_dim,
        window,
        scale: 1.0 / (head_dim as f32).sqrt(),
    }
}

/// Attention by its definition, in f64.
fn reference(shape: &Shape, inputs: &Inputs) -> Vec<f64> {
    let (d, width) = (shape.head_dim, shape.n_head_kv * shape.head_dim);
    let mut out = Vec::new();
    for (t, &position) in inputs.positions.iter().enumerate() {
        for head in 0..shape.n_head {
            let column = head * shape.n_head_kv / shape.n_head * d;
            let q = &inputs.q[(t * shape.n_head + head) * d..][..d];
            let weight = |p: usize| {
                let key = &inputs.k[p * width + column..][..d];
                let products = q
                    .iter()
                    .zip(key)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b));
                (products.sum::<f64>() * f64::from(shape.scale)).exp()
            };
            let seen = shape.visible(position as usize);
            let weights: Vec<f64> = seen.clone().map(weight).collect();
            let sink = inputs.sinks.map_or(0.0, |s| f64::from(s[head]).exp());
            let total = weights.iter().sum::<f64>() + sink;
            for i in 0..d {
                let value = |(p, w): (usize, &f64)| w * f64::from(inputs.v[p * width + column + i]);
                out.push(seen.clone().zip(&weights).map(value).sum::<f64>() / total);
            }
        }
    }
    out
}

/// Compares one call with [`reference`] if that is fast enough, else with the CPU implementation.
fn check(
    device: &Device,
    threads: &Threads,
    shape: &Shape,
    with_sinks: bool,
    positions: &[u32],
    report: &mut Report,
) {
    let (n, last) = (
        positions.len(),
        positions.iter().max().map_or(0, |p| *p as usize),
    );
    let case = format!(
        "attention, {} heads, {} KV heads of {}, window {:?}, sinks {with_sinks}, {n} tokens at {}..={last}",
        shape.n_head, shape.n_head_kv, shape.head_dim, shape.window, positions[0]
    );
    let cached = (last + 1) * shape.n_head_kv * shape.head_dim;
    let q: Vec<f32> = noise(n * shape.n_head * shape.head_dim, 1)
        .iter()
        .map(|x| x * 6.0)
        .collect();
    let (k, v) = (noise(cached, 2), noise(cached, 3));
    let sinks: Vec<f32> = noise(shape.n_head, 4).iter().map(|x| x * 4.0).collect();
    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        positions,
        sinks: with_sinks.then_some(&sinks),
    };
    let want = if n * shape.n_head * shape.head_dim * last < 1 << 22 {
        reference(shape, &inputs)
    } else {
        let mut out = vec![0.0; q.len()];
        attention(threads, shape, &inputs, &mut out);
        wide(&out)
    };
    let size = match device.kernels.attention_scratch_size(shape, n, last) {
        Ok(size) => size,
        Err(error) => return report.fail(format!("{case}: {error}")),
    };
    let (dq, dk, dv) = (device.upload(&q), device.upload(&k), device.upload(&v));
    let (dp, ds) = (device.upload(positions), device.upload(&sinks));
    let (out, scratch) = (device.nan_output(q.len()), device.nan_output(size / 4));
    let it = Attention {
        shape,
        q: device.at(&dq),
        k: device.at(&dk),
        v: device.at(&dv),
        positions: device.at(&dp),
        sinks: if with_sinks {
            device.at(&ds)
        } else {
            Ptr::NULL
        },
        n_tokens: n,
        last_position: last,
        out: device.at(&out),
        scratch: device.at(&scratch),
    };
    let done = device.kernels.attention(&device.stream, &it);
    let got = device.after(done, &out);
    report.compare(&case, got, &want, 2e-5);
    if let Err(error) = device.read(&scratch) {
        report.fail(format!("{case}: scratch of {size} bytes: {error}"));
    }
}

#[test]
fn single_tokens() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(4).unwrap();
    let mut report = Report::default();
    for (shape, sinks) in [
        (shape(32, 4, 128, None), false),
        (shape(64, 8, 64, Some(128)), true),
        (shape(64, 8, 64, None), true),
        (shape(16, 16, 128, None), false),
        (shape(4, 2, 20, None), true),
        (shape(12, 4, 96, Some(3)), false),
        (shape(48, 4, 128, None), false),
        (shape(7, 1, 40, None), true),
        (shape(8, 1, 256, None), false),
        (shape(4, 4, 256, Some(100)), true),
        (shape(8, 2, 192, None), false),
        (shape(2, 2, 4, None), true),
    ] {
        for position in [0, 1, 62, 63, 64, 65, 127, 128, 300, 1000, 4095] {
            check(device, &threads, &shape, sinks, &[position], &mut report);
        }
    }
    report.finish();
}

#[test]
fn many_tokens() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    // n_head, n_head_kv, head_dim, window, sinks, tokens, positions before
    for (n_head, n_head_kv, d, window, sinks, n, past) in [
        (32, 4, 128, None, false, 512, 0),
        (32, 4, 128, None, false, 8, 4000),
        (32, 4, 128, None, false, 3, 700),
        (32, 4, 128, None, true, 61, 5),
        (64, 8, 64, Some(128), true, 300, 0),
        (64, 8, 64, Some(128), true, 70, 500),
        (64, 8, 64, None, true, 33, 90),
        (16, 16, 128, None, false, 100, 0),
        (16, 16, 128, None, false, 20, 1000),
        (28, 4, 128, None, false, 61, 5),
        (80, 1, 64, None, true, 9, 20),
        (80, 1, 128, None, false, 2, 20),
        (6, 2, 20, Some(3), false, 50, 0),
        (12, 4, 96, Some(17), true, 40, 30),
        (8, 2, 256, None, false, 40, 100),
        (8, 1, 256, Some(30), true, 130, 0),
        (40, 1, 256, None, false, 9, 64),
        (4, 1, 192, None, true, 9, 3000),
        (8, 8, 4, None, false, 65, 0),
    ] {
        let positions: Vec<u32> = (past..past + n).collect();
        let shape = shape(n_head, n_head_kv, d, window);
        check(device, &threads, &shape, sinks, &positions, &mut report);
    }
    // Positions that are not consecutive.
    let shape = shape(8, 2, 64, Some(90));
    let scattered: Vec<u32> = (0..40).map(|i| (i * 37) % 400).collect();
    check(device, &threads, &shape, true, &scattered[..3], &mut report);
    check(device, &threads, &shape, true, &scattered, &mut report);
    report.finish();
}

#[test]
fn rejects_unsupported_head_sizes() {
    let Some(device) = Device::open() else { return };
    for d in [0, 33, 260] {
        let size = device
            .kernels
            .attention_scratch_size(&shape(4, 2, d, None), 1, 10);
        assert!(matches!(size, Err(Error::Unsupported { .. })), "{d}");
    }
}
