//! Sizes of KV caches and recurrent states, compared with sizes computed by hand.

use moe_gguf::kv_cache::{Cells, KvError, KvShape, KvTypes, LayerBytes};
use moe_gguf::{GgmlType, Gguf, LayerId};
use moe_testkit::gguf::{ARRAY, F32, Raw, U32};

use crate::opened::{Opened, fixture};

/// A value of a hand-built header.
enum V<'a> {
    One(u32),
    List(&'a [u32]),
    /// Booleans.
    Flags(&'a [bool]),
}

use V::{Flags, List, One};

/// A header of an architecture without tensors except one vector.
fn header(arch: &str, keys: &[(&str, V)]) -> Gguf {
    const BOOL: u32 = 7;
    let mut raw = Raw::new(1, keys.len() as u64 + 1).kv_string("general.architecture", arch);
    for (suffix, value) in keys {
        let key = format!("{arch}.{suffix}");
        raw = match value {
            One(value) => raw.kv_u32(&key, *value),
            List(values) => {
                let list = raw
                    .string(&key)
                    .u32(ARRAY)
                    .u32(U32)
                    .u64(values.len() as u64);
                values.iter().fold(list, |raw, &value| raw.u32(value))
            }
            Flags(flags) => {
                let list = raw
                    .string(&key)
                    .u32(ARRAY)
                    .u32(BOOL)
                    .u64(flags.len() as u64);
                let flags: Vec<u8> = flags.iter().map(|&flag| u8::from(flag)).collect();
                list.raw(&flags)
            }
        };
    }
    raw.tensor("output_norm.weight", &[8], F32, 0)
        .data(32, 32)
        .open()
        .unwrap()
}

/// Keys of two layers of 64 elements with two heads.
const TWO_LAYERS: [(&str, V); 3] = [
    ("block_count", One(2)),
    ("embedding_length", One(64)),
    ("attention.head_count", One(2)),
];

/// `(k, v, state)` of each layer for `n` positions of one sequence.
fn bytes(gguf: &Gguf, types: KvTypes, n: u64) -> Vec<(u64, u64, u64)> {
    let shape = KvShape::of(gguf).unwrap();
    let layers = shape.bytes(types, Cells::uniform(n, 1)).unwrap();
    let ids: Vec<LayerId> = layers.iter().map(|layer| layer.layer).collect();
    assert_eq!(ids, (0..).map(LayerId).take(ids.len()).collect::<Vec<_>>());
    layers
        .iter()
        .map(|&LayerBytes { k, v, state, .. }| (k, v, state))
        .collect()
}

fn of(ty: GgmlType) -> KvTypes {
    KvTypes { k: ty, v: ty }
}

/// Two heads of keys and values with 64 elements in six layers.
#[test]
fn sizes_depend_on_the_type() {
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    for (ty, row) in [
        (GgmlType::F32, 512),
        (GgmlType::F16, 256),
        (GgmlType::Q8_0, 128 / 32 * 34),
    ] {
        assert_eq!(
            bytes(&gguf, of(ty), 10),
            [(10 * row, 10 * row, 0); 6],
            "{ty}"
        );
    }
    let mixed = KvTypes {
        k: GgmlType::F32,
        v: GgmlType::F16,
    };
    assert_eq!(bytes(&gguf, mixed, 10), [(5120, 2560, 0); 6]);
    assert_eq!(KvTypes::default(), of(GgmlType::F16));
}

#[test]
fn head_width_defaults_to_embedding_length_divided_by_heads() {
    assert_eq!(
        bytes(&header("llama", &TWO_LAYERS), KvTypes::default(), 1),
        [(128, 128, 0); 2]
    );
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.key_length", One(48)));
    keys.push(("attention.head_count_kv", One(1)));
    let of_number = [(96, 64, 0); 2];
    assert_eq!(
        bytes(&header("llama", &keys), KvTypes::default(), 1),
        of_number
    );
    keys.retain(|(key, _)| *key != "attention.key_length");
    keys.push(("attention.key_length", List(&[48, 48])));
    assert_eq!(
        bytes(&header("llama", &keys), KvTypes::default(), 1),
        of_number
    );
}

#[test]
fn layers_have_their_own_number_of_heads() {
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.head_count_kv", List(&[2, 0])));
    assert_eq!(
        bytes(&header("llama", &keys), KvTypes::default(), 3),
        [(3 * 128, 3 * 128, 0), (0, 0, 0)]
    );
}

#[test]
fn latent_attention_stores_no_values() {
    let keys = [
        ("block_count", One(3)),
        ("nextn_predict_layers", One(1)),
        ("embedding_length", One(64)),
        ("attention.head_count", One(16)),
        ("attention.head_count_kv", One(1)),
        ("attention.key_length", One(576)),
        ("attention.value_length", One(512)),
        ("attention.key_length_mla", One(192)),
        ("attention.value_length_mla", One(128)),
    ];
    assert_eq!(
        bytes(&header("deepseek2", &keys), KvTypes::default(), 1),
        [(1152, 0, 0); 2]
    );
}

/// Every second layer of gpt-oss has a window of 128 positions.
#[test]
fn windowed_layers_are_limited_to_window_and_batch() {
    let shape = KvShape::of(&fixture("tiny-gpt-oss-MXFP4.gguf")).unwrap();
    assert_eq!(shape.window(), Some(128));
    let windowed: Vec<bool> = shape
        .layers()
        .iter()
        .map(|layer| layer.is_windowed)
        .collect();
    assert_eq!(windowed, [true, false, true, false, true, false]);
    let cells = Cells::of_llama_cpp(4096, 1, 512, shape.window());
    assert_eq!(
        cells,
        Cells {
            full: 4096,
            windowed: 768,
            n_streams: 1
        }
    );
    let layers = shape.bytes(KvTypes::default(), cells).unwrap();
    let k: Vec<u64> = layers.iter().map(|layer| layer.k).collect();
    let (windowed, full) = (768 * 256, 4096 * 256);
    assert_eq!(k, [windowed, full, windowed, full, windowed, full]);
    assert_eq!(layers[0].kv(), 2 * windowed);
}

#[test]
fn window_patterns_are_periods_or_lists() {
    let windowed = |arch, more: &[(&'static str, V<'static>)], pattern: Option<V<'static>>| {
        let mut keys = vec![
            ("block_count", One(5)),
            ("embedding_length", One(64)),
            ("attention.head_count", One(2)),
        ];
        keys.extend(more.iter().map(|(key, value)| match value {
            One(value) => (*key, One(*value)),
            List(values) => (*key, List(values)),
            Flags(flags) => (*key, Flags(flags)),
        }));
        keys.extend(pattern.map(|pattern| ("attention.sliding_window_pattern", pattern)));
        let shape = KvShape::of(&header(arch, &keys)).unwrap();
        let layers = shape.layers().iter();
        let flags: String = layers
            .map(|layer| if layer.is_windowed { 'w' } else { '-' })
            .collect();
        (flags, shape.window())
    };
    let window = || vec![("attention.sliding_window", One(9))];
    let w = |flags: &str, n| (flags.to_owned(), n);
    assert_eq!(windowed("gpt-oss", &window(), None), w("w-w-w", Some(9)));
    assert_eq!(windowed("mellum", &window(), None), w("www-w", Some(9)));
    assert_eq!(
        windowed("mellum", &window(), Some(One(3))),
        w("ww-ww", Some(9))
    );
    assert_eq!(
        windowed("mellum", &window(), Some(One(0))),
        w("wwwww", Some(9))
    );
    assert_eq!(windowed("cohere2moe", &window(), None), w("-www-", Some(9)));
    let list = Some(Flags(&[true, false, false, true]));
    assert_eq!(windowed("gemma4", &window(), list), w("w--w-", Some(9)));
    let list = Some(List(&[0, 1, 1]));
    assert_eq!(windowed("mimo2", &window(), list), w("-ww--", Some(9)));
    // Architectures with their own length, without a window, and with a window that llama.cpp does not use.
    assert_eq!(windowed("llama4", &window(), None), w("www-w", Some(8192)));
    assert_eq!(windowed("llama4", &[], None), w("www-w", Some(8192)));
    assert_eq!(windowed("mellum", &[], None), w("-----", None));
    assert_eq!(windowed("qwen2moe", &window(), None), w("-----", None));
}

#[test]
fn windowed_layers_have_their_own_head_width() {
    let keys = [
        ("block_count", One(3)),
        ("embedding_length", One(64)),
        ("attention.head_count", One(2)),
        ("attention.head_count_kv", List(&[1, 1, 1])),
        ("attention.key_length", One(64)),
        ("attention.value_length", One(64)),
        ("attention.key_length_swa", One(32)),
        ("attention.value_length_swa", One(16)),
        ("attention.sliding_window", One(512)),
        (
            "attention.sliding_window_pattern",
            Flags(&[true, false, true]),
        ),
        ("attention.shared_kv_layers", One(1)),
    ];
    // The last layer uses the keys and values of another one.
    assert_eq!(
        bytes(&header("gemma4", &keys), KvTypes::default(), 1),
        [(64, 32, 0), (128, 128, 0), (0, 0, 0)]
    );
}

/// The recurrent state of a layer: `(4 - 1) · (4096 + 2 · 16 · 128)` elements of the convolution and `128 · 4096` of the state.
#[test]
fn hybrid_models_have_recurrent_layers() {
    let state = 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096);
    let ssm = || {
        vec![
            ("block_count", One(4)),
            ("embedding_length", One(64)),
            ("attention.head_count", One(2)),
            ("ssm.conv_kernel", One(4)),
            ("ssm.inner_size", One(4096)),
            ("ssm.group_count", One(16)),
            ("ssm.state_size", One(128)),
        ]
    };
    let attention = (128, 128, 0);
    let recurrent = (0, 0, state);
    let of = |arch, more: Vec<(&'static str, V<'static>)>| {
        let mut keys = ssm();
        keys.extend(more);
        bytes(&header(arch, &keys), KvTypes::default(), 1)
    };
    assert_eq!(
        of("qwen3next", vec![]),
        [recurrent, recurrent, recurrent, attention]
    );
    let interval = vec![("full_attention_interval", One(2))];
    assert_eq!(
        of("qwen35moe", interval),
        [recurrent, attention, recurrent, attention]
    );
    let listed = vec![(
        "attention.recurrent_layers",
        Flags(&[false, true, true, false]),
    )];
    assert_eq!(
        of("qwen35moe", listed),
        [attention, recurrent, recurrent, attention]
    );
    let heads = || ("attention.head_count_kv", List(&[0, 2, 0, 2]));
    let hybrid = [recurrent, attention, recurrent, attention];
    assert_eq!(of("granitehybrid", vec![heads()]), hybrid);
    // A layer with a feed-forward block has neither.
    let mixers = vec![heads(), ("feed_forward_length", List(&[0, 0, 9, 9]))];
    assert_eq!(
        of("nemotron_h_moe", mixers),
        [recurrent, attention, (0, 0, 0), (0, 0, 0)]
    );
    assert_eq!(of("falcon-h1", vec![]), [(128, 128, state); 4]);
    let short = [
        ("block_count", One(2)),
        ("embedding_length", One(64)),
        ("attention.head_count", One(2)),
        ("attention.head_count_kv", List(&[0, 2])),
        ("shortconv.l_cache", One(3)),
    ];
    assert_eq!(
        bytes(&header("lfm2moe", &short), KvTypes::default(), 1),
        [(0, 0, 4 * 2 * 64), attention]
    );
    // Queries, keys and values of 2 heads are convolved. The cache of the attention has one row for keys and values.
    let delta = [
        ("block_count", One(2)),
        ("embedding_length", One(64)),
        ("attention.head_count", One(2)),
        ("attention.head_count_kv", List(&[0, 1])),
        ("attention.key_length", One(40)),
        ("attention.value_length", One(32)),
        ("attention.key_length_mla", One(24)),
        ("attention.value_length_mla", One(16)),
        ("ssm.conv_kernel", One(4)),
        ("kda.head_dim", One(16)),
    ];
    let state_of_heads = 4 * (3 * 3 * 2 * 16 + 16 * 16 * 2);
    assert_eq!(
        bytes(&header("kimi-linear", &delta), KvTypes::default(), 1),
        [(0, 0, state_of_heads), (2 * 40, 0, 0)]
    );
    // Each sequence has its own state.
    let shape = KvShape::of(&header("qwen3next", &ssm())).unwrap();
    let layers = shape
        .bytes(KvTypes::default(), Cells::uniform(5, 3))
        .unwrap();
    assert_eq!((layers[0].state, layers[3].k), (3 * state, 3 * 5 * 128));
    assert_eq!(layers[3].total(), 2 * 3 * 5 * 128);
}

#[test]
fn positions_are_padded_and_divided_by_sequences() {
    let cells = |n_ctx, n_seq, n_ubatch, window| {
        let cells = Cells::of_llama_cpp(n_ctx, n_seq, n_ubatch, window);
        (cells.full, cells.windowed, cells.n_streams)
    };
    assert_eq!(cells(1, 1, 512, None), (256, 256, 1));
    assert_eq!(cells(4096, 1, 512, None), (4096, 4096, 1));
    assert_eq!(cells(4097, 1, 512, None), (4352, 4352, 1));
    assert_eq!(cells(4096, 4, 512, None), (1024, 1024, 4));
    assert_eq!(cells(1000, 3, 512, Some(128)), (512, 512, 3));
    // The batch is at most the context.
    assert_eq!(cells(8192, 1, 512, Some(1000)), (8192, 1536, 1));
    assert_eq!(cells(300, 1, 9000, Some(1)), (512, 512, 1));
    assert_eq!(cells(8192, 2, 1, Some(127)), (4096, 256, 2));
    assert_eq!(cells(1, 1000, 1, None), (256, 256, 1000));
    assert_eq!(cells(5, 0, 1, None), (256, 256, 1));
    let most = u64::MAX / 256 * 256;
    assert_eq!(cells(u64::MAX, 1, 1, Some(u64::MAX)), (most, most, 1));
}

#[test]
fn reports_unknown_and_incomplete_headers() {
    let error = |arch, keys: &[(&str, V)]| KvShape::of(&header(arch, keys)).unwrap_err();
    assert!(
        matches!(error("kimi-k3", &TWO_LAYERS), KvError::Architecture { arch } if arch == "kimi-k3")
    );
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.indexer.key_length", One(128)));
    assert!(matches!(
        error("deepseek32", &keys),
        KvError::Architecture { .. }
    ));
    let text = error("llama", &TWO_LAYERS[..2]).to_string();
    assert!(
        text.starts_with("test.gguf: metadata key \"llama.attention.head_count\" is missing"),
        "{text}"
    );
    assert!(matches!(
        error("llama", &TWO_LAYERS[1..]),
        KvError::MissingKey { .. }
    ));
    for n in [0, 65_536] {
        let keys = [("block_count", One(n)), ("attention.head_count", One(1))];
        assert!(matches!(error("llama", &keys), KvError::Layers { .. }));
    }
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.sliding_window", One(8)));
    assert!(
        matches!(error("step35", &keys), KvError::MissingKey { key, .. } if key.ends_with("_pattern"))
    );
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.key_length", List(&[1, 2])));
    assert!(matches!(error("llama", &keys), KvError::Metadata(_)));
}

#[test]
fn reports_sizes_that_cannot_be_computed() {
    let mut keys = Vec::from(TWO_LAYERS);
    keys.push(("attention.key_length", One(20)));
    let shape = KvShape::of(&header("llama", &keys)).unwrap();
    let error = shape
        .bytes(of(GgmlType::Q8_0), Cells::uniform(1, 1))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer 0: a cache of type Q8_0 needs rows of a multiple of 32 elements, but they have 40; use f16"
    );
    let error = shape
        .bytes(KvTypes::default(), Cells::uniform(u64::MAX, 2))
        .unwrap_err();
    assert!(
        matches!(error, KvError::TooLarge { layer: LayerId(0) }),
        "{error}"
    );
}
