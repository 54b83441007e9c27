//! Rows of a cache for tests.

use super::{CacheTensor, CacheType};

/// Rows `(position, width)` of `values` in a cache of type `ty` as sequence `sequence` of `n_seq`, and the values that they
/// decode to. The other sequences have large values, which would change any result.
pub(crate) fn filled(
    ty: CacheType,
    width: usize,
    values: &[f32],
    [sequence, n_seq]: [usize; 2],
) -> (CacheTensor, Vec<f32>) {
    let mut tensor = CacheTensor::new(ty, width);
    tensor.grow(values.len() / width * n_seq).unwrap();
    let other = vec![1e4; width];
    for (position, values) in values.chunks_exact(width).enumerate() {
        for other_sequence in 0..n_seq {
            let is_other = other_sequence != sequence;
            let row = if is_other { &other } else { values };
            tensor.store(position * n_seq + other_sequence, row);
        }
    }
    let half = |x: f32| half::f16::from_f32(x).to_f32();
    let decoded = match ty {
        CacheType::F32 => values.to_vec(),
        CacheType::F16 => values.iter().map(|x| half(*x)).collect(),
        CacheType::Q8_0 => {
            let decode = |block: &[f32; 32]| {
                let amax = block.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                let scale = half(amax / 127.0);
                block.map(|x| scale * (x * (127.0 / amax)).round_ties_even())
            };
            let blocks = values.as_chunks::<32>().0.iter();
            blocks.flat_map(decode).collect()
        }
    };
    (tensor, decoded)
}
