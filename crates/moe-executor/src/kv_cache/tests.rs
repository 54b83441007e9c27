use moe_gguf::GgmlType;

use super::*;
use crate::cpu::quant::dequantize_row;
use crate::hparams::StateShape;

fn params(ty: CacheType, n_seq: usize) -> CacheParams {
    CacheParams::of_type(ty, 1000).with_sequences(n_seq)
}

/// A cache of three layers with two heads of 32 elements.
fn cache(params: CacheParams) -> KvCache {
    KvCache::with_shape(&[LayerCache::KeysAndValues; 3], vec![[64; 2]; 3], params)
}

/// A cache of a layer with attention, two recurrent layers, and a layer with neither.
fn hybrid(params: CacheParams) -> KvCache {
    let [short, long] = [(4, 2, 0), (6, 3, 10)].map(|(channels, n_past, state)| {
        LayerCache::State(StateShape {
            channels,
            n_past,
            state,
        })
    });
    let layers = [LayerCache::KeysAndValues, short, LayerCache::Nothing, long];
    let widths = vec![[64; 2], [0; 2], [0; 2], [0; 2]];
    KvCache::with_shape(&layers, widths, params)
}

fn pass(cache: &mut KvCache, sequence: usize, n: usize) {
    let run = Run {
        sequence,
        tokens: 0..n,
    };
    cache.begin_pass([run], cache.len(sequence) + n).unwrap();
    cache.end_pass();
}

#[test]
fn names_are_parsed() {
    for ty in CacheType::ALL {
        assert_eq!(ty.name().parse(), Ok(ty));
    }
    let error = "q4_0".parse::<CacheType>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the type of a KV cache is f32, f16 or q8_0, not `q4_0`"
    );
}

#[test]
fn stored_rows_have_the_layout_of_gguf_files() {
    let values: Vec<f32> = (0..64)
        .map(|i| ((i * 37 % 64) as f32 - 30.0) / 7.0)
        .collect();
    for (ty, tolerance) in [
        (CacheType::F32, 0.0),
        (CacheType::F16, 1.0 / 512.0),
        // Half a step between codes, and the rounding of the scale.
        (CacheType::Q8_0, 33.0 / 7.0 * (0.5 / 127.0 + 1.0 / 2048.0)),
    ] {
        let mut tensor = CacheTensor::new(ty, 64);
        tensor.grow(3).unwrap();
        tensor.store(1, &values);
        let mut row = vec![0.0; 64];
        let words = tensor.words.host();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let size = tensor.row_size();
        dequantize_row(ty.ggml(), &bytes[size..2 * size], &mut row).unwrap();
        for (got, want) in row.iter().zip(&values) {
            assert!((got - want).abs() <= tolerance, "{ty}: {got} {want}");
        }
        assert!(bytes[..size].iter().all(|byte| *byte == 0));
        assert!(bytes[2 * size..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn rounds_half_precision_to_the_nearest_even_number() {
    let mut tensor = CacheTensor::new(CacheType::F16, 4);
    tensor.grow(1).unwrap();
    // Between 2048 and 2050, between 2050 and 2052, beyond the largest number, not a number.
    tensor.store(0, &[2049.0, 2051.0, 7e4, f32::NAN]);
    let crate::cpu::attention::Rows::F16(bits) = tensor.rows_from(0) else {
        panic!("the type is F16")
    };
    let values: Vec<f32> = bits
        .iter()
        .map(|bits| half::f16::from_bits(*bits).to_f32())
        .collect();
    assert_eq!(values[..3], [2048.0, 2052.0, f32::INFINITY]);
    assert!(values[3].is_nan());
}

#[test]
fn size_is_that_of_the_rows_in_all_layers() {
    for (ty, bytes) in [
        (CacheType::F32, 256),
        (CacheType::F16, 128),
        (CacheType::Q8_0, 68),
    ] {
        assert_eq!(ty.ggml().row_size(64), Some(bytes), "{ty}");
        let params = params(ty, 5);
        let layers = [[64; 2]; 3];
        assert_eq!(params.bytes(&layers, 10), 3 * 2 * bytes * 5 * 10, "{ty}");
        assert_eq!(params.bytes(&layers, usize::MAX), u64::MAX);
        assert_eq!(params.bytes(&[[64, 0]], 10), bytes * 5 * 10, "{ty}");
        // Layers with other widths, and a layer that reads the cache of another layer.
        let layers = [[64, 128], [128, 64], [0, 0]];
        assert_eq!(params.bytes(&layers, 10), 2 * 3 * bytes * 5 * 10, "{ty}");
    }
    assert_eq!(CacheType::Q8_0.ggml(), GgmlType::Q8_0);
}

#[test]
fn memory_grows_in_steps_up_to_the_expected_number_of_positions() {
    let mut cache = cache(CacheParams {
        n_positions: 100,
        ..params(CacheType::F16, 2)
    });
    let mut sizes = Vec::new();
    for n in [10, 5, 1, 30, 40, 20] {
        pass(&mut cache, 1, n);
        let mut inventory = Inventory::default();
        cache.buffers(&mut inventory);
        let total: u64 = inventory.sizes().sum();
        let expected = cache.params.bytes(&[[64; 2]; 3], cache.reserved());
        assert_eq!(total, expected);
        sizes.push(cache.reserved());
    }
    assert_eq!(sizes, [10, 20, 20, 46, 92, 106]);
    assert_eq!((cache.len(0), cache.len(1)), (0, 106));
}

#[test]
fn truncation_keeps_the_first_positions() {
    let mut cache = cache(params(CacheType::F32, 3));
    pass(&mut cache, 0, 4);
    pass(&mut cache, 2, 7);
    cache.truncate(2, 5).unwrap();
    cache.truncate(0, 9).unwrap();
    cache.truncate(7, 0).unwrap();
    assert_eq!(
        [0, 1, 2, 7].map(|sequence| cache.len(sequence)),
        [4, 0, 5, 0]
    );
}

#[test]
fn growth_keeps_the_rows_of_all_sequences() {
    for ty in CacheType::ALL {
        let mut tensor = CacheTensor::new(ty, 32);
        tensor.grow(6).unwrap();
        for row in 0..6 {
            tensor.store(row, &[row as f32 + 1.0; 32]);
        }
        let before = tensor.words.host().to_vec();
        tensor.grow(20).unwrap();
        assert_eq!(tensor.words.host()[..before.len()], before);
    }
}

#[test]
fn memory_that_cannot_be_allocated_is_an_error_with_its_size() {
    let mut cache = cache(CacheParams {
        n_ctx: usize::MAX,
        n_positions: usize::MAX,
        ..params(CacheType::F16, 1)
    });
    let run = Run {
        sequence: 0,
        tokens: 0..1 << 50,
    };
    let error = cache.begin_pass([run], 1 << 50).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "the memory of the KV cache cannot be allocated: {} positions of 1 sequence need {} bytes; use a shorter context, \
             fewer sequences, or a cache of a smaller type",
            1u64 << 50,
            3 * 2 * 128 * (1u64 << 50)
        )
    );
    assert_eq!((cache.reserved(), cache.len(0)), (0, 0));
}

#[test]
fn recurrent_states_have_constant_sizes_and_names() {
    let mut cache = hybrid(params(CacheType::F16, 3));
    let mut sizes = Vec::new();
    for n in [4, 50] {
        pass(&mut cache, 1, n);
        let mut inventory = Inventory::default();
        cache.buffers(&mut inventory);
        // Keys, values, then the convolution states of both layers, and the states of one.
        sizes = inventory.sizes().collect::<Vec<_>>();
        assert_eq!(sizes[2..], [4 * 2 * 3 * 4, 6 * 3 * 3 * 4, 10 * 3 * 4]);
    }
    assert_eq!(sizes[0] + sizes[1], cache.params.bytes(&[[64; 2]], 54));
}

#[test]
fn states_are_reset_when_a_sequence_starts() {
    let mut cache = hybrid(params(CacheType::F32, 3));
    let long = LayerId(3);
    for sequence in 0..3 {
        pass(&mut cache, sequence, 2);
        let state = cache.state_mut(long).1;
        state.convolution_of(sequence).fill(sequence as f32 + 1.0);
        state.state_of(sequence).fill(-1.0);
    }
    cache.clear(1);
    for sequence in 0..3 {
        pass(&mut cache, sequence, 1);
    }
    let mut first = |sequence| {
        let state = cache.state_mut(long).1;
        let convolution = state.convolution_of(sequence).to_vec();
        assert_eq!(
            (convolution.len(), state.state_of(sequence).len()),
            (18, 10)
        );
        [convolution[17], state.state_of(sequence)[9]]
    };
    assert_eq!(
        [0, 1, 2].map(&mut first),
        [[1.0, -1.0], [0.0, 0.0], [3.0, -1.0]]
    );
    assert_eq!(cache.state_mut(long).1.shape().n_past, 3);
}

#[test]
fn states_cannot_be_truncated_to_a_prefix() {
    let mut cache = hybrid(params(CacheType::F32, 2));
    pass(&mut cache, 1, 7);
    let error = cache.truncate(1, 5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "slot 1 cannot be truncated from 7 to 5 positions, because the recurrent states of the model cannot be rewound; \
         truncate it to 0 positions, and evaluate its tokens again"
    );
    cache.truncate(1, 7).unwrap();
    assert_eq!(cache.len(1), 7);
    cache.truncate(1, 0).unwrap();
    assert_eq!(cache.len(1), 0);
}
