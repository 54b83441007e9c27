//! Measures kernel times: `cargo test -p moe-executor --release --lib kernels::timings -- --ignored --nocapture`.

use std::sync::OnceLock;

use crate::cpu::attention::Shape;
use crate::cpu::delta_net::{Heads, KeyHeads};
use crate::cpu::state_space::SsmHeads;
use crate::cuda::launch::{Attention, Cached, DeltaNet, Route, Runs, SsmScan};
use crate::cuda::{DriverStatus, Error, Ptr, Result};
use crate::hparams::{Gating, Groups};
use crate::kv_cache::testing::filled;
use crate::kv_cache::{CacheParams, CacheType};
use cudarc::driver::LaunchConfig;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::nvrtc::Ptx;

use crate::cuda::tests::device::{Device, Memory, noise};

/// Size of a copy that runs until all measured launches are queued after it.
const BYTES: usize = 2 << 30;

/// Mean GPU time of a call in µs, over many consecutive calls.
fn time(device: &Device, mut call: impl FnMut() -> Result<()>) -> f64 {
    const CALLS: usize = 200;
    for _ in 0..10 {
        call().unwrap();
    }
    static COPIED: OnceLock<[Memory<u8>; 2]> = OnceLock::new();
    let [from, to] = COPIED.get_or_init(|| [device.zeros(BYTES), device.zeros(BYTES)]);
    let now = || device.stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
    device.copy(from, to);
    let start = now();
    for _ in 0..CALLS {
        call().unwrap();
    }
    f64::from(start.elapsed_ms(&now()).unwrap()) * 1e3 / CALLS as f64
}

/// An empty kernel.
const EMPTY: &str =
    ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry empty() { ret; }\n";

/// GPU time in µs of an empty kernel with one block.
fn time_empty(device: &Device) -> f64 {
    let context = device.stream.context();
    let module = context.load_module(Ptx::from_src(EMPTY)).unwrap();
    let empty = module.load_function("empty").unwrap();
    time(device, || {
        let mut launch = device.stream.launch_builder(&empty);
        // SAFETY: the kernel has no parameters and accesses no memory.
        let launched = unsafe { launch.launch(LaunchConfig::for_num_elems(32)) };
        let what = "an empty kernel";
        launched.map(|_| ()).map_err(|source| Error::Driver {
            what,
            status: DriverStatus(source),
        })
    })
}

#[test]
#[ignore = "a measurement"]
fn timings() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let buffer = device.nan_output(1 << 16);
    let x = device.at(&buffer);
    let empty = time_empty(device);
    println!("empty kernel: {empty:.2} µs");
    let almost_empty = time(device, || kernels.add(stream, x, x, 1, x));
    println!("add, one element: {almost_empty:.2} µs");
    let norm = time(device, || {
        kernels.rms_norm(stream, x, x, 1e-5, 2048, 1, x, Ptr::NULL)
    });
    println!("rms_norm 1 × 2048: {norm:.2} µs");

    let of_deepseek = Some(Groups { n: 8, n_used: 4 });
    for (tokens, n_expert, k, groups) in [
        (1, 128, 8, None),
        (1, 512, 10, None),
        (512, 128, 8, None),
        (512, 512, 10, None),
        (1, 256, 8, None),
        (1, 256, 8, of_deepseek),
        (512, 256, 8, of_deepseek),
    ] {
        let logits = device.upload(&noise(tokens * n_expert, 1));
        let it = Route {
            logits: device.at(&logits),
            selection_bias: Ptr::NULL,
            gating: Gating::Softmax,
            norm: true,
            scale: 1.0,
            tokens,
            n_expert,
            k,
            groups,
            log: Ptr::NULL,
        };
        let (ids, weights) = (x, x.offset(1 << 16));
        let took = time(device, || kernels.route(stream, &it, ids, weights));
        println!(
            "route {tokens} × {k} of {n_expert}, {groups:?}: {took:.2} µs, {:.2} of an empty kernel, {:.2} of one element added",
            took / empty,
            took / almost_empty
        );
    }

    // The last one is latent attention, whose values are in the keys.
    let shapes = [
        (32, 4, [128; 2]),
        (64, 8, [64; 2]),
        (16, 16, [128; 2]),
        (128, 1, [576, 512]),
    ];
    let shapes = shapes
        .into_iter()
        .flat_map(|shape| CacheType::ALL.map(|ty| (ty, shape)));
    for (ty, (n_head, n_head_kv, [head_dim, value_dim])) in shapes {
        for (n_tokens, past) in [
            (1, 100),
            (1, 1023),
            (1, 4095),
            (1, 16383),
            (8, 1016),
            (512, 0),
        ] {
            let shape = Shape {
                n_head,
                n_head_kv,
                head_dim,
                value_dim,
                window: None,
                chunk: None,
                scale: 0.1,
                softcap: None,
            };
            let last = past + n_tokens - 1;
            let width = n_head_kv * head_dim;
            let [k, v] = [1, 2].map(|seed| {
                let (rows, _) = filled(ty, width, &noise((last + 1) * width, seed), [0, 1]);
                device.upload(rows.words.host())
            });
            let in_keys = value_dim < head_dim;
            let v = if in_keys { &k } else { &v };
            let cached = |memory| Cached {
                at: device.at(memory),
                ty,
            };
            let q = device.upload(&noise(n_tokens * n_head * head_dim, 3));
            let positions: Vec<u32> = (past as u32..=last as u32).collect();
            let positions = device.upload(&positions);
            let out = device.nan_output(n_tokens * n_head * value_dim);
            let size = kernels
                .attention_scratch_size(&shape, [ty; 2], n_tokens, last)
                .unwrap();
            let scratch = device.nan_output(size / 4);
            let it = Attention {
                shape: &shape,
                q: device.at(&q),
                k: cached(&k),
                v: cached(v),
                strides: [width; 2],
                positions: device.at(&positions),
                sequences: Ptr::NULL,
                sinks: Ptr::NULL,
                n_tokens,
                last_position: last,
                out: device.at(&out),
                scratch: device.at(&scratch),
            };
            let took = time(device, || kernels.attention(stream, &it));
            let params = CacheParams::of_type(ty, last + 1);
            let v_width = if in_keys { 0 } else { width };
            let cache_bytes = params.bytes(&[[width, v_width]], last + 1);
            let seen: usize = (past..=last).map(|p| p + 1).sum();
            println!(
                "attention {n_head} heads, {n_head_kv} KV heads of {head_dim} in {ty}, {n_tokens} tokens after {past}: {took:.2} µs, \
                 {:.0} GB/s of the cache, {:.2} TFLOP/s",
                cache_bytes as f64 / took / 1e3,
                (2 * seen * n_head * (head_dim + value_dim)) as f64 / took / 1e6
            );
        }
    }
}

/// The kernels that update states, with the shapes of Qwen3-Next and Nemotron 3. The states of 64 sequences do not fit into the L2 cache.
#[test]
#[ignore = "a measurement"]
fn recurrent_layers() {
    let Some(device) = Device::open() else { return };
    let (stream, kernels) = (&device.stream, &device.kernels);
    let delta_net = Heads {
        n_k: 16,
        n_v: 32,
        width: 128,
        keys: KeyHeads::Grouped,
    };
    let scan = SsmHeads {
        n: 64,
        dim: 64,
        n_group: 8,
        n_state: 128,
    };
    let n_state = delta_net.state();
    assert_eq!(n_state, scan.width() * scan.n_state);
    for (n_seq, n_tokens) in [(1, 1), (8, 1), (64, 1), (1, 512)] {
        let rows = n_seq * n_tokens;
        let run = |sequence| [sequence, sequence * n_tokens, n_tokens].map(|n| n as u32);
        let runs: Vec<u32> = (0..n_seq).flat_map(run).collect();
        let runs = device.upload(&runs);
        let runs = Runs {
            at: device.at(&runs),
            n: n_seq,
            longest: n_tokens,
        };
        let width = delta_net.qkv_width().max(scan.channels());
        let x = device.upload(&noise(rows * width, 1));
        let negative = device.upload(&vec![-0.5f32; rows * delta_net.v_width()]);
        let states = device.zeros(n_seq * n_state * size_of::<f32>());
        let out = device.nan_output(rows * delta_net.v_width());
        let states = device.at(&states);
        let [x, negative, out] = [device.at(&x), device.at(&negative), device.at(&out)];
        let delta_net = DeltaNet {
            qkv: x,
            decay: negative,
            by_element: false,
            beta: negative,
            heads: delta_net,
            eps: 1e-6,
            runs,
            states,
            out,
        };
        let by_element = DeltaNet {
            by_element: true,
            ..delta_net
        };
        let scan = SsmScan {
            xbc: x,
            dt: negative,
            a: negative,
            heads: scan,
            runs,
            states,
            out,
        };
        let times = [
            (
                "delta_net",
                time(device, || kernels.delta_net(stream, &delta_net)),
            ),
            (
                "delta_net by element",
                time(device, || kernels.delta_net(stream, &by_element)),
            ),
            ("ssm_scan", time(device, || kernels.ssm_scan(stream, &scan))),
        ];
        let bytes = 2 * n_seq * n_state * size_of::<f32>();
        for (kernel, took) in times {
            println!(
                "{kernel} {n_seq} sequences of {n_tokens} tokens: {took:.2} µs, states of {bytes} bytes read and written, {:.0} GB/s",
                bytes as f64 / took / 1e3
            );
        }
    }
}
