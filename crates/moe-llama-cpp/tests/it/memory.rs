//! Sizes of the KV cache that llama.cpp logs, compared with the sizes computed from the header.

use moe_gguf::kv_cache::{Cells, KvShape, KvTypes, LayerBytes};
use moe_gguf::{GgmlType, Gguf, Value};
use moe_llama_cpp::{Context, Model, Params};

use crate::models::{changed, described, fixture, make, small};

/// Parameters of a context.
fn params(n_ctx: u32, n_seq: u32, n_batch: u32, kv_types: KvTypes) -> Params {
    Params {
        n_ctx,
        n_seq,
        n_batch,
        n_threads: 1,
        flash_attention: Some(true),
        kv_types,
    }
}

/// The sizes in MiB of the lines `llama_kv_cache: size = …` and `llama_memory_recurrent: size = …`, without and with a window.
fn logged(model: &Model, params: Params, source: &str) -> Vec<String> {
    let context = Context::new(model, params, ()).unwrap();
    let prefix = format!("{source}: size = ");
    let lines = context
        .sizes()
        .iter()
        .filter_map(|line| line.strip_prefix(&prefix));
    lines
        .map(|line| line.split(" MiB").next().unwrap().trim().to_owned())
        .collect()
}

/// Bytes in MiB, as llama.cpp prints them.
fn mib(bytes: impl Iterator<Item = u64>) -> String {
    format!("{:.2}", bytes.sum::<u64>() as f32 / (1024.0 * 1024.0))
}

/// The sizes in MiB that are computed: of the layers without a window, then of those with one.
fn computed(shape: &KvShape, params: Params) -> Vec<String> {
    let [n_ctx, n_seq, n_batch] = [params.n_ctx, params.n_seq, params.n_batch].map(u64::from);
    let cells = Cells::of_llama_cpp(n_ctx, n_seq, n_batch, shape.window());
    let bytes = shape.bytes(params.kv_types, cells).unwrap();
    let layers = || shape.layers().iter().zip(&bytes);
    let of = |windowed| {
        let layers = layers().filter(move |(layer, _)| layer.is_windowed == windowed);
        mib(layers.map(|(_, bytes)| bytes.kv()))
    };
    let mut sizes = vec![of(false)];
    if shape.window().is_some() {
        sizes.push(of(true));
    }
    sizes
}

#[track_caller]
fn compare(gguf: &Gguf, settings: &[(u32, u32, u32, KvTypes)]) {
    let model = Model::load(gguf).unwrap();
    let shape = KvShape::of(gguf).unwrap();
    for &(n_ctx, n_seq, n_batch, types) in settings {
        let params = params(n_ctx, n_seq, n_batch, types);
        let actual = logged(&model, params, "llama_kv_cache");
        assert_eq!(actual, computed(&shape, params), "{params:?}");
        assert!(actual.iter().all(|size| size != "0.00"), "{actual:?}");
    }
}

fn of(ty: GgmlType) -> KvTypes {
    KvTypes { k: ty, v: ty }
}

#[test]
fn logged_kv_sizes_equal_computed_ones() {
    let mixed = KvTypes {
        k: GgmlType::Q8_0,
        v: GgmlType::F16,
    };
    let settings = [
        (4096, 1, 512, KvTypes::default()),
        (5000, 1, 512, of(GgmlType::F32)),
        (4096, 1, 512, of(GgmlType::Q8_0)),
        (4096, 4, 128, KvTypes::default()),
        (3000, 3, 64, mixed),
    ];
    for file in ["tiny-qwen3moe-Q4_K_M.gguf", "tiny-gpt-oss-MXFP4.gguf"] {
        compare(&Gguf::open(fixture(file)).unwrap(), &settings);
    }
    let few = [
        (8192, 1, 512, KvTypes::default()),
        (8192, 2, 2048, of(GgmlType::F32)),
    ];
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        compare(
            &Gguf::open(fixture(format!("random-{arch}-F16.gguf"))).unwrap(),
            &few,
        );
    }
}

/// With latent attention, the cache has one row for each token.
#[test]
fn logged_kv_sizes_of_latent_attention_equal_computed_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = described(dir.path(), "deepseek2", GgmlType::F16);
    let settings = [
        (4096, 1, 512, KvTypes::default()),
        (8192, 2, 512, of(GgmlType::F32)),
    ];
    compare(&Gguf::open(path).unwrap(), &settings);
}

#[test]
fn logged_kv_sizes_follow_the_window_of_the_header() {
    let dir = tempfile::tempdir().unwrap();
    for (window, pattern) in [(1000, 3), (4096, 2), (7, 4)] {
        let keys = [
            ("gpt-oss.attention.sliding_window", Value::U32(window)),
            (
                "gpt-oss.attention.sliding_window_pattern",
                Value::U32(pattern),
            ),
        ];
        let gguf = Gguf::open(changed(dir.path(), "tiny-gpt-oss-MXFP4", &keys)).unwrap();
        let model = Model::load(&gguf).unwrap();
        let shape = KvShape::of(&gguf).unwrap();
        let params = params(8192, 1, 512, KvTypes::default());
        assert_eq!(
            logged(&model, params, "llama_kv_cache"),
            computed(&shape, params)
        );
    }
}

/// A hybrid model has a KV cache in every fourth layer, and a recurrent state in the others.
#[test]
fn logged_state_size_equals_the_computed_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = make(
        dir.path(),
        "qwen3-next-80b",
        &small("qwen3-next-80b", "F16"),
    );
    let gguf = Gguf::open(path).unwrap();
    let model = Model::load(&gguf).unwrap();
    let shape = KvShape::of(&gguf).unwrap();
    for n_seq in [1, 3] {
        let params = params(4096, n_seq, 512, KvTypes::default());
        assert_eq!(
            logged(&model, params, "llama_kv_cache"),
            computed(&shape, params)
        );
        let cells = Cells::of_llama_cpp(4096, n_seq.into(), 512, None);
        let bytes: Vec<LayerBytes> = shape.bytes(KvTypes::default(), cells).unwrap();
        let state = mib(bytes.iter().map(|layer| layer.state));
        assert_eq!(logged(&model, params, "llama_memory_recurrent"), [state]);
    }
}
