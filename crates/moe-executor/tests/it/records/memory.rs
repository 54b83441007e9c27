//! The buffers of a session, compared with the sizes that are computed before it starts.

use std::collections::HashSet;

use moe_engine::{Limits, Mode};
use moe_executor::{CacheParams, CacheType, Model};
use moe_gguf::Gguf;
use moe_gguf::kv_cache::{Cells, KvShape, KvTypes};
use moe_testkit::fixture;
use moe_trace::RunOptions;
use moe_trace::buffers::{Buffer, Change, usage};

use super::{LIMITS, described, record_with};

const MODELS: [&str; 8] = [
    "random-dots1-F16.gguf",
    "random-gpt-oss-F16.gguf",
    "random-llama-F16.gguf",
    "random-olmoe-F16.gguf",
    "random-qwen2moe-F16.gguf",
    "random-qwen3moe-F16.gguf",
    "tiny-gpt-oss-MXFP4.gguf",
    "tiny-qwen3moe-Q4_K_M.gguf",
];

/// The buffers that a session allocates for a prompt of `n` tokens in one pass. The caches grow for the token after it, and are
/// allocated a second time.
fn allocated(file: &str, n: u32, cache: CacheParams) -> Vec<Buffer> {
    let prompt: Vec<u32> = (300..300 + n).map(|token| token % 400).collect();
    let limits = Limits {
        n_predict: 1,
        ..LIMITS
    };
    let recorded = record_with(
        file,
        &prompt,
        limits,
        RunOptions::default(),
        Mode::All,
        cache,
    );
    let mut seen = HashSet::new();
    let allocations = recorded
        .buffers
        .into_iter()
        .filter_map(|event| match event.change {
            Change::Alloc(buffer) => Some(buffer),
            Change::Dealloc { .. } => None,
        })
        .filter(|buffer| seen.insert(buffer.buffer_id));
    allocations.collect()
}

#[test]
fn compute_buffers_have_the_computed_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let described = described::models(dir.path());
    let described = described.iter().map(|path| path.to_str().unwrap());
    for file in MODELS.into_iter().chain(described) {
        let gguf = Gguf::open(fixture(file)).unwrap();
        let model = Model::load(&gguf).unwrap();
        for n in [1, 7, 100] {
            let memory = model.compute_memory(n as usize);
            let computed = memory.buffers.iter();
            let mut computed: Vec<(&str, u64)> = computed.map(|b| (b.name, b.bytes)).collect();
            // One integer or factor for each token, for each wanted row, or for each group of experts.
            let small = [
                "token ids",
                "wanted rows",
                "positions",
                "expert groups",
                "sums of weights",
                "factors of tokens",
            ];
            let buffers = allocated(file, n, CacheParams::new(1024));
            let mut actual: Vec<(&str, u64)> = buffers
                .iter()
                .filter(|buffer| buffer.usage == usage::COMPUTE)
                .filter(|buffer| !small.contains(&buffer.name.as_str()))
                .map(|buffer| (buffer.name.as_str(), buffer.size))
                .collect();
            computed.sort_unstable();
            actual.sort_unstable();
            assert_eq!(actual, computed, "{file}, {n} tokens");
            assert_eq!(
                memory.cpu_bytes(),
                computed.iter().map(|(_, bytes)| bytes).sum::<u64>()
            );
        }
    }
}

/// The size that is printed before a session starts is that of the buffers, for keys and values of every type.
#[test]
fn cache_has_the_computed_size() {
    for file in MODELS {
        let gguf = Gguf::open(fixture(file)).unwrap();
        let shape = KvShape::of(&gguf).unwrap();
        let hp = Model::load(&gguf).unwrap().hparams().clone();
        let all = CacheType::ALL;
        let types = all.into_iter().flat_map(|k| all.map(|v| [k, v]));
        let types = types.filter(|[k, v]| {
            let head = hp.head_dim as u64;
            [k, v]
                .map(|ty| ty.ggml().block_size())
                .iter()
                .all(|&n| head.is_multiple_of(n))
        });
        for ([k, v], n) in types.flat_map(|types| [(types, 1), (types, 100)]) {
            let cache = CacheParams {
                k,
                v,
                ..CacheParams::new(1024)
            };
            let of_types = KvTypes {
                k: k.ggml(),
                v: v.ggml(),
            };
            let computed = shape.bytes(of_types, Cells::uniform(n.into(), 1)).unwrap();
            let buffers = allocated(file, n, cache);
            let caches = buffers
                .iter()
                .filter(|buffer| buffer.name.starts_with("cache_"));
            let actual: Vec<(&str, u64)> = caches.map(|b| (b.name.as_str(), b.size)).collect();
            let names: Vec<[String; 2]> = computed
                .iter()
                .map(|layer| ["k", "v"].map(|half| format!("cache_{half}_l{}", layer.layer)))
                .collect();
            let expected: Vec<(&str, u64)> = computed
                .iter()
                .zip(&names)
                .flat_map(|(layer, [k, v])| [(k.as_str(), layer.k), (v.as_str(), layer.v)])
                .collect();
            assert_eq!(actual, expected, "{file}, {k} and {v}, {n} tokens");
            let sum = expected.iter().map(|(_, bytes)| bytes).sum::<u64>();
            assert_eq!(
                cache.size_bytes(&hp, n as usize),
                sum,
                "{file}, {k} and {v}"
            );
        }
    }
}

/// With latent attention, the cache has one row of keys for each token, which also contains the values.
#[test]
fn cache_of_latent_attention_has_the_computed_size() {
    let dir = tempfile::tempdir().unwrap();
    let formats = [
        described::description("deepseek2"),
        described::with_decompressed_keys(),
    ];
    for (path, halves) in described::write(dir.path(), formats).iter().zip([1, 2]) {
        let gguf = Gguf::open(path).unwrap();
        let hp = Model::load(&gguf).unwrap().hparams().clone();
        let shape = KvShape::of(&gguf).unwrap();
        for n in [1, 100] {
            let cells = Cells::uniform(n.into(), 1);
            let computed = shape.bytes(KvTypes::default(), cells).unwrap();
            let expected: Vec<(String, u64)> = computed
                .iter()
                .flat_map(|layer| {
                    let name = |half| format!("cache_{half}_l{}", layer.layer);
                    [(name("k"), layer.k), (name("v"), layer.v)]
                })
                .filter(|(_, bytes)| *bytes > 0)
                .collect();
            assert_eq!(expected.len(), halves * hp.n_layer);
            let cache = CacheParams::new(1024);
            let buffers = allocated(path.to_str().unwrap(), n, cache).into_iter();
            let caches = buffers.filter(|buffer| buffer.name.starts_with("cache_"));
            let actual: Vec<(String, u64)> = caches.map(|b| (b.name, b.size)).collect();
            assert_eq!(actual, expected, "{path:?}, {n} tokens");
            let sum: u64 = expected.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(cache.size_bytes(&hp, n as usize), sum, "{path:?}");
        }
    }
}

/// A GPU needs at least the memory of the buffers, and at most twice that and the scratch memory.
#[test]
fn gpu_estimate_covers_the_buffers() {
    for file in MODELS {
        let gguf = Gguf::open(fixture(file)).unwrap();
        let model = Model::load(&gguf).unwrap();
        let memory = model.compute_memory(512);
        let quantized = memory
            .buffers
            .iter()
            .find(|b| b.name == "quantized activations");
        let quantized = quantized.map_or(0, |buffer| buffer.bytes);
        assert!(
            memory.gpu_bytes > memory.cpu_bytes() - quantized,
            "{file}: {memory:?}"
        );
        assert!(
            memory.gpu_bytes < 2 * memory.cpu_bytes() + (1 << 20),
            "{file}: {memory:?}"
        );
        let experts = gguf
            .tensors()
            .iter()
            .filter(|t| t.name.ends_with("_exps.weight"));
        let of_layer = experts
            .filter(|t| t.name.starts_with("blk.1."))
            .map(|t| t.size_bytes);
        assert!(
            memory.expert_copy_bytes >= of_layer.sum::<u64>(),
            "{file}: {memory:?}"
        );
    }
}
