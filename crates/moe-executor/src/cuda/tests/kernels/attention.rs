//! Attention, and stores to the KV cache.

use crate::cpu::attention::{Inputs, Rows, Shape, attention};
use crate::cpu::threads::Threads;
use crate::cuda::launch::{Attention, Cached, Store};
use crate::cuda::{Error, Ptr};
use crate::kv_cache::testing::filled;
use crate::kv_cache::{CacheTensor, CacheType};

use crate::cuda::tests::device::{Device, Memory, noise, wide};
use moe_testkit::Report;

fn shape(n_head: usize, n_head_kv: usize, head_dim: usize, window: Option<usize>) -> Shape {
    Shape {
        n_head,
        n_head_kv,
        head_dim,
        value_dim: head_dim,
        window,
        chunk: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
    }
}

/// The same with values of another width.
fn with_values(value_dim: usize, shape: Shape) -> Shape {
    Shape { value_dim, ..shape }
}

/// Attention by its definition, in f64, with keys `k` and values `v` `(position, n_head_kv, width of a head)`.
fn reference(shape: &Shape, inputs: &Inputs, [k, v]: [&[f32]; 2]) -> Vec<f64> {
    let (d, [k_width, v_width]) = (shape.head_dim, inputs.strides);
    let mut out = Vec::new();
    for (t, &position) in inputs.positions.iter().enumerate() {
        for head in 0..shape.n_head {
            let kv_head = head * shape.n_head_kv / shape.n_head;
            let q = &inputs.q[(t * shape.n_head + head) * d..][..d];
            let weight = |p: usize| {
                let key = &k[p * k_width + kv_head * d..][..d];
                let products = q
                    .iter()
                    .zip(key)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b));
                let score = products.sum::<f64>() * f64::from(shape.scale);
                let bound = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                shape.softcap.map_or(score, bound).exp()
            };
            let seen = shape.visible(position as usize);
            let weights: Vec<f64> = seen.clone().map(weight).collect();
            let sink = inputs.sinks.map_or(0.0, |s| f64::from(s[head]).exp());
            let total = weights.iter().sum::<f64>() + sink;
            for i in 0..shape.value_dim {
                let at = kv_head * shape.value_dim + i;
                let value = |(p, w): (usize, &f64)| w * f64::from(v[p * v_width + at]);
                out.push(seen.clone().zip(&weights).map(value).sum::<f64>() / total);
            }
        }
    }
    out
}

/// A cache of one sequence in F32.
const F32: Cache = Cache {
    types: [CacheType::F32; 2],
    slot: [0, 1],
    in_keys: false,
};

/// The same in F16.
const F16: Cache = Cache {
    types: [CacheType::F16; 2],
    ..F32
};

/// The cache of a call.
#[derive(Clone, Copy, Debug)]
struct Cache {
    /// Types of keys and values.
    types: [CacheType; 2],
    /// The sequence, and the number of sequences.
    slot: [usize; 2],
    /// Whether the values are the first elements of the keys.
    in_keys: bool,
}

impl Cache {
    /// Largest error. Without F32, kernels may round queries and weights to F16.
    fn tolerance(&self) -> f64 {
        if self.types.contains(&CacheType::F32) {
            2e-5
        } else {
            2e-3
        }
    }
}

/// The keys or values of a sequence whose rows are in `memory`.
fn sequence(
    device: &Device,
    tensor: &CacheTensor,
    memory: &Memory<u32>,
    sequence: usize,
) -> Cached {
    Cached {
        at: device.at(memory).offset(sequence * tensor.row_size()),
        ty: tensor.ty(),
    }
}

/// Compares one call with [`reference`] if that is fast enough, else with the CPU implementation.
fn check(
    (device, threads): (&Device, &Threads),
    shape: &Shape,
    with_sinks: bool,
    positions: &[u32],
    cache: Cache,
    report: &mut Report,
) {
    let (n, last) = (
        positions.len(),
        positions.iter().max().map_or(0, |p| *p as usize),
    );
    let case = format!(
        "attention, {} heads, {} KV heads of {} and {}, window {:?}, sinks {with_sinks}, {n} tokens at {}..={last}, {cache:?}",
        shape.n_head, shape.n_head_kv, shape.head_dim, shape.value_dim, shape.window, positions[0]
    );
    let [width, own] = [shape.head_dim, shape.value_dim].map(|d| shape.n_head_kv * d);
    let v_width = if cache.in_keys { width } else { own };
    let q: Vec<f32> = noise(n * shape.n_head * shape.head_dim, 1)
        .iter()
        .map(|x| x * 6.0)
        .collect();
    let ([k_type, v_type], slot) = (cache.types, cache.slot);
    let cached = |width, seed| noise((last + 1) * width, seed);
    let (k_rows, k) = filled(k_type, width, &cached(width, 2), slot);
    let v_seed = if cache.in_keys { 2 } else { 3 };
    let (v_rows, v) = filled(v_type, v_width, &cached(v_width, v_seed), slot);
    let sinks: Vec<f32> = noise(shape.n_head, 4).iter().map(|x| x * 4.0).collect();
    let inputs = Inputs {
        q: &q,
        k: Rows::F32(&k),
        v: Rows::F32(&v),
        strides: [width, v_width],
        positions,
        sinks: with_sinks.then_some(&sinks),
    };
    let want = if n * shape.n_head * shape.head_dim * last < 1 << 22 {
        reference(shape, &inputs, [&k, &v])
    } else {
        let mut out = vec![0.0; n * shape.n_head * shape.value_dim];
        attention(threads, shape, &inputs, &mut out);
        wide(&out)
    };
    let size = device
        .kernels
        .attention_scratch_size(shape, cache.types, n, last);
    let size = match size {
        Ok(size) => size,
        Err(error) => return report.fail(format!("{case}: {error}")),
    };
    let dq = device.upload(&q);
    let [dk, own] = [&k_rows, &v_rows].map(|rows| device.upload(rows.words.host()));
    let dv = if cache.in_keys { &dk } else { &own };
    let (dp, ds) = (device.upload(positions), device.upload(&sinks));
    let (out, scratch) = (device.nan_output(want.len()), device.nan_output(size / 4));
    let places = vec![slot[0] as u32; n];
    let sequences = device.upload(&places);
    // The same tokens as those of several sequences, one by one.
    for of_several in [false, true] {
        let first = if of_several { 0 } else { slot[0] };
        let it = Attention {
            shape,
            q: device.at(&dq),
            k: sequence(device, &k_rows, &dk, first),
            v: sequence(device, &v_rows, dv, first),
            strides: [width * slot[1], v_width * slot[1]],
            positions: device.at(&dp),
            sequences: if of_several {
                device.at(&sequences)
            } else {
                Ptr::NULL
            },
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
        report.compare(
            &format!("{case}, of several: {of_several}"),
            got,
            &want,
            cache.tolerance(),
        );
    }
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
            for cache in [F32, F16] {
                check(
                    (device, &threads),
                    &shape,
                    sinks,
                    &[position],
                    cache,
                    &mut report,
                );
            }
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
        for cache in [F32, F16] {
            check(
                (device, &threads),
                &shape,
                sinks,
                &positions,
                cache,
                &mut report,
            );
        }
    }
    // Positions that are not consecutive.
    let scattered: Vec<u32> = (0..40).map(|i| (i * 37) % 400).collect();
    for (d, n) in [(64, 3), (64, 40), (128, 40), (256, 40)] {
        let shape = shape(8, 2, d, Some(90));
        for cache in [F32, F16] {
            check(
                (device, &threads),
                &shape,
                true,
                &scattered[..n],
                cache,
                &mut report,
            );
        }
    }
    report.finish();
}

/// All head sizes of the kernels on tensor cores, with token counts around those of a tile.
#[test]
fn head_sizes_in_f16() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for d in [8, 24, 56, 64, 72, 104, 128, 136, 200, 256] {
        for (n_head, n_head_kv, window, sinks, n, past) in [
            (8, 1, None, true, 1, 700),
            (12, 4, Some(33), false, 1, 150),
            (8, 1, None, false, 15, 0),
            (8, 1, None, true, 16, 49),
            (8, 2, Some(20), true, 33, 64),
            (6, 2, None, true, 43, 65),
            (5, 1, Some(64), false, 130, 0),
            (4, 4, None, false, 65, 500),
            (20, 1, None, true, 8, 2000),
            (150, 1, Some(7), false, 9, 30),
        ] {
            let positions: Vec<u32> = (past..past + n).collect();
            check(
                (device, &threads),
                &shape(n_head, n_head_kv, d, window),
                sinks,
                &positions,
                F16,
                &mut report,
            );
        }
    }
    report.finish();
}

/// Shapes with sinks, token counts and earlier positions that reach all kernels, with heads of complete blocks.
fn typed_cases() -> [(Shape, bool, u32, u32); 10] {
    [
        (shape(16, 16, 128, None), false, 1, 300),
        (shape(12, 4, 96, Some(70)), true, 1, 200),
        (shape(64, 8, 64, Some(128)), true, 1, 4095),
        (shape(4, 4, 256, Some(100)), true, 1, 500),
        (shape(8, 2, 192, None), false, 1, 77),
        (shape(32, 4, 128, None), false, 3, 700),
        (shape(32, 4, 128, None), true, 130, 5),
        (shape(64, 8, 64, Some(128)), true, 70, 500),
        (shape(8, 2, 256, None), false, 40, 100),
        (shape(8, 8, 32, Some(40)), true, 65, 0),
    ]
}

#[test]
fn cache_types() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for k in CacheType::ALL {
        for v in CacheType::ALL {
            let cache = Cache {
                types: [k, v],
                ..F32
            };
            for (shape, sinks, n, past) in typed_cases() {
                let positions: Vec<u32> = (past..past + n).collect();
                check(
                    (device, &threads),
                    &shape,
                    sinks,
                    &positions,
                    cache,
                    &mut report,
                );
            }
        }
    }
    // Heads of incomplete blocks in F16.
    for (d, n) in [(20, 1), (20, 40), (4, 1), (100, 9)] {
        let positions: Vec<u32> = (90..90 + n).collect();
        let shape = shape(4, 2, d, None);
        check(
            (device, &threads),
            &shape,
            true,
            &positions,
            F16,
            &mut report,
        );
    }
    report.finish();
}

#[test]
fn values_of_another_width() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for ty in CacheType::ALL {
        for (n_head, n_head_kv, dims, window) in [
            (8, 2, [192, 128], None),
            (4, 4, [96, 64], Some(70)),
            (16, 16, [64, 96], None),
            (6, 1, [64, 256], Some(33)),
        ] {
            let shape = with_values(dims[1], shape(n_head, n_head_kv, dims[0], window));
            for (n, past) in [(1, 0), (1, 700), (5, 60), (70, 0), (130, 500)] {
                let positions: Vec<u32> = (past..past + n).collect();
                let cache = Cache {
                    types: [ty; 2],
                    ..F32
                };
                check(
                    (device, &threads),
                    &shape,
                    n % 2 == 0,
                    &positions,
                    cache,
                    &mut report,
                );
            }
        }
    }
    report.finish();
}

/// Latent attention: heads of up to 576 elements, whose values are the first elements of the only KV head.
#[test]
fn values_in_keys() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for ty in CacheType::ALL {
        for (n_head, dims, window) in [
            (128, [576, 512], None),
            (16, [576, 512], None),
            (20, [320, 256], Some(50)),
            (5, [288, 160], None),
            (4, [64, 32], None),
            (70, [128, 96], None),
        ] {
            let shape = with_values(dims[1], shape(n_head, 1, dims[0], window));
            for (n, past, slot) in [
                (1, 0, [0, 1]),
                (1, 31, [2, 3]),
                (1, 1000, [0, 1]),
                (3, 200, [1, 2]),
                (9, 30, [0, 1]),
                (70, 0, [1, 2]),
                (33, 500, [0, 1]),
            ] {
                let positions: Vec<u32> = (past..past + n).collect();
                let cache = Cache {
                    types: [ty; 2],
                    slot,
                    in_keys: true,
                };
                check(
                    (device, &threads),
                    &shape,
                    n == 9,
                    &positions,
                    cache,
                    &mut report,
                );
            }
        }
    }
    // Widths that are no multiples of 16 or 8, and positions that are not consecutive.
    let scattered: Vec<u32> = (0..40).map(|i| (i * 37) % 400).collect();
    for dims in [[568, 504], [264, 40], [300, 260], [40, 32]] {
        let shape = with_values(dims[1], shape(12, 1, dims[0], None));
        let cache = Cache {
            in_keys: true,
            ..F16
        };
        for n in [1, 40] {
            check(
                (device, &threads),
                &shape,
                true,
                &scattered[..n],
                cache,
                &mut report,
            );
        }
    }
    report.finish();
}

#[test]
fn several_sequences() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for ty in CacheType::ALL {
        for sequence in 0..3 {
            let cache = Cache {
                types: [ty; 2],
                slot: [sequence, 3],
                in_keys: false,
            };
            for (shape, sinks, n, past) in typed_cases() {
                let positions: Vec<u32> = (past..past + n).collect();
                check(
                    (device, &threads),
                    &shape,
                    sinks,
                    &positions,
                    cache,
                    &mut report,
                );
            }
        }
    }
    report.finish();
}

/// Stored rows have the same bytes as on the CPU, and other rows do not change.
#[test]
fn stores() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for ty in CacheType::ALL {
        for (width, positions, slot) in [
            (1024, vec![8u32, 0, 3], [0, 1]),
            (32, vec![0], [1, 2]),
            (96, (0..40).rev().collect(), [2, 3]),
            (64, vec![5, 7], [0, 4]),
        ] {
            let case = format!("{ty}, rows of {width} at {positions:?}, {slot:?}");
            let [sequence_index, n_seq] = slot;
            let mut x = noise(positions.len() * width, 10);
            // A block of zeros, and halves between two codes of Q8_0.
            x[..32].fill(0.0);
            if positions.len() > 1 {
                let between = |i: usize| if i == 0 { 127.0 } else { i as f32 - 0.5 };
                x[width..width + 32]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = between(i));
            }
            let last = positions.iter().max().map_or(0, |p| *p as usize);
            let (mut want, _) = filled(ty, width, &noise((last + 1) * width, 11), slot);
            let row = |at: &u32| at * n_seq as u32 + sequence_index as u32;
            let at: Vec<u32> = positions.iter().map(row).collect();
            let (dx, at) = (device.upload(&x), device.upload(&at));
            let out = device.upload(want.words.host());
            let store = Store {
                x: device.at(&dx),
                at: device.at(&at),
                rows: positions.len(),
                width,
                out: sequence(device, &want, &out, 0),
            };
            let done = device.kernels.store_rows(&device.stream, &store);
            for (row, position) in x.chunks_exact(width).zip(&positions) {
                want.store(*position as usize * n_seq + sequence_index, row);
            }
            let read = || {
                done.map_err(|error| error.to_string())?;
                device.download(&out)
            };
            match read() {
                Ok(got) if got == want.words.host() => {}
                Ok(_) => report.fail(format!("{case}: the rows differ from those of the CPU")),
                Err(error) => report.fail(format!("{case}: {error}")),
            }
        }
    }
    report.finish();
}

#[test]
fn rejects_unsupported_head_sizes() {
    let Some(device) = Device::open() else { return };
    for dims in [
        [0, 4],
        [33, 32],
        [580, 512],
        [576, 516],
        [300, 304],
        [64, 30],
    ] {
        let shape = with_values(dims[1], shape(4, 1, dims[0], None));
        let size = device
            .kernels
            .attention_scratch_size(&shape, F32.types, 1, 10);
        assert!(matches!(size, Err(Error::Unsupported { .. })), "{dims:?}");
    }
}

#[test]
fn chunks_of_positions() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for d in [64, 128, 256] {
        // Tokens in one chunk, at its start and its end, and in several chunks.
        for (n, past) in [(1, 95), (1, 96), (1, 1000), (3, 95), (40, 80), (130, 0)] {
            let positions: Vec<u32> = (past..past + n).collect();
            let shape = Shape {
                chunk: Some(48),
                ..shape(8, 2, d, None)
            };
            for cache in [F32, F16] {
                let devices = (device, &threads);
                check(devices, &shape, true, &positions, cache, &mut report);
            }
        }
    }
    report.finish();
}

#[test]
fn bounded_scores() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for d in [20, 64, 128, 256] {
        for (n, past) in [(1, 0), (1, 700), (3, 95), (60, 30), (130, 500)] {
            let positions: Vec<u32> = (past..past + n).collect();
            let shape = Shape {
                softcap: Some(1.5),
                ..shape(8, 2, d, Some(90))
            };
            for cache in [F32, F16] {
                let devices = (device, &threads);
                check(devices, &shape, n == 3, &positions, cache, &mut report);
            }
        }
    }
    report.finish();
}

#[test]
fn wide_heads_with_values_of_their_own() {
    let Some(device) = Device::open() else { return };
    let threads = Threads::new(8).unwrap();
    let mut report = Report::default();
    for (n_head, n_head_kv, d) in [(16, 2, 512), (4, 4, 320), (6, 1, 512)] {
        for (n, past) in [(1, 0), (1, 700), (5, 60), (40, 100)] {
            let positions: Vec<u32> = (past..past + n).collect();
            let shape = shape(n_head, n_head_kv, d, None);
            for ty in CacheType::ALL {
                let cache = Cache {
                    types: [ty; 2],
                    ..F32
                };
                let devices = (device, &threads);
                check(devices, &shape, n == 5, &positions, cache, &mut report);
            }
        }
    }
    report.finish();
}
