use super::*;
use crate::kv_cache::CacheType;
use crate::kv_cache::testing::filled;

/// The definition of attention, in f64. `k (position, n_head_kv, head_dim)`, `v (position, n_head_kv, value_dim)`.
fn reference(
    shape: &Shape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    positions: &[u32],
    sinks: Option<&[f32]>,
) -> Vec<f64> {
    let (d, n_value) = (shape.head_dim, shape.value_dim);
    let [width, value_width] = [d, n_value].map(|width| shape.n_head_kv * width);
    let mut out = Vec::new();
    for (t, &position) in positions.iter().enumerate() {
        for head in 0..shape.n_head {
            let kv_head = head * shape.n_head_kv / shape.n_head;
            let column = kv_head * d;
            let q = &q[(t * shape.n_head + head) * d..][..d];
            let windowed = shape
                .window
                .map_or(0, |w| (position as usize + 1).saturating_sub(w));
            let first = match shape.chunk {
                Some(n) => (0..=position as usize).rfind(|p| p % n == 0).unwrap(),
                None => windowed,
            };
            let score = |p: usize| -> f64 {
                let k = &k[p * width + column..][..d];
                q.iter()
                    .zip(k)
                    .map(|(a, b)| *a as f64 * *b as f64)
                    .sum::<f64>()
                    * shape.scale as f64
            };
            let weights: Vec<f64> = (first..=position as usize)
                .map(|p| score(p).exp())
                .collect();
            let sum = weights.iter().sum::<f64>() + sinks.map_or(0.0, |s| (s[head] as f64).exp());
            for i in 0..n_value {
                let value = weights.iter().enumerate();
                let at = kv_head * n_value + i;
                out.push(
                    value
                        .map(|(p, w)| w * v[(first + p) * value_width + at] as f64)
                        .sum::<f64>()
                        / sum,
                );
            }
        }
    }
    out
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// n_head, n_head_kv, widths of keys and values, window, sinks, tokens, earlier positions
type Case = (usize, usize, [usize; 2], Option<usize>, bool, u32, u32);

const CASES: [Case; 13] = [
    (4, 2, [20; 2], None, false, 20, 150),
    (4, 2, [20; 2], Some(128), true, 20, 150),
    (4, 4, [64; 2], Some(3), false, 70, 0),
    (8, 1, [33; 2], None, true, 1, 130),
    (8, 2, [128; 2], None, false, 130, 7),
    (4, 1, [8; 2], Some(64), false, 1, 200),
    (8, 2, [32; 2], Some(40), true, 1, 100),
    (2, 2, [96; 2], None, true, 5, 60),
    (16, 2, [64; 2], None, false, 3, 190),
    (4, 4, [96, 64], None, false, 30, 40),
    (6, 2, [24, 40], Some(50), true, 1, 90),
    (4, 2, [96, 64], None, true, 40, 90),
    (4, 1, [24, 40], Some(70), false, 1, 120),
];

/// Compares all cases and instruction sets for a cache with keys and values of two types.
fn check([k_type, v_type]: [CacheType; 2], slot @ [_, n_seq]: [usize; 2]) {
    let threads = Threads::new(2).unwrap();
    let all_sinks: Vec<f32> = (0..16).map(|i| [0.5, -1.0, 3.0, 0.0][i % 4]).collect();
    let mut checked = 0;
    for (n_head, n_head_kv, dims, window, with_sinks, n, past) in CASES {
        let is_blocks = [k_type, v_type].contains(&CacheType::Q8_0);
        if is_blocks && !dims.iter().all(|dim| dim.is_multiple_of(32)) {
            continue;
        }
        let [head_dim, value_dim] = dims;
        let shape = Shape {
            n_head,
            n_head_kv,
            head_dim,
            value_dim,
            window,
            chunk: None,
            scale: 0.7,
            softcap: None,
        };
        let sinks = with_sinks.then(|| &all_sinks[..n_head]);
        let positions: Vec<u32> = (past..past + n).collect();
        let widths = dims.map(|dim| n_head_kv * dim);
        let q = noise(n as usize * n_head * head_dim, 1);
        let [n_k, n_v] = widths.map(|width| (past + n) as usize * width);
        let (k, k_values) = filled(k_type, widths[0], &noise(n_k, 2), slot);
        let (v, v_values) = filled(v_type, widths[1], &noise(n_v, 3), slot);
        let expected = reference(&shape, &q, &k_values, &v_values, &positions, sinks);
        let inputs = Inputs {
            q: &q,
            k: k.rows_from(slot[0]),
            v: v.rows_from(slot[0]),
            strides: widths.map(|width| n_seq * width),
            positions: &positions,
            sinks,
        };
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; expected.len()];
            attention_with(isa, &threads, &shape, &inputs, &mut out);
            for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
                assert!(
                    (*got as f64 - want).abs() < 2e-5,
                    "{got} {want} at {i}, {isa:?}, {n_head} heads of {dims:?}, window {window:?}, {k_type} and {v_type}"
                );
            }
        }
        checked += 1;
    }
    assert!(checked >= 4, "{checked} cases");
}

#[test]
fn agrees_with_the_definition_in_f64() {
    check([CacheType::F32; 2], [0, 1]);
}

#[test]
fn agrees_with_the_definition_for_all_cache_types() {
    for k in CacheType::ALL {
        for v in CacheType::ALL {
            check([k, v], [0, 1]);
        }
    }
}

#[test]
fn reads_only_the_rows_of_its_sequence() {
    for ty in CacheType::ALL {
        for sequence in 0..3 {
            check([ty, ty], [sequence, 3]);
        }
    }
}

/// The values of a position are the first elements of its keys, and all heads share them.
#[test]
fn reads_values_from_the_rows_of_keys() {
    const N_SEQ: usize = 2;
    let (n_head, head_dim, value_dim) = (20, 96, 64);
    let threads = Threads::new(2).unwrap();
    let shape = Shape {
        n_head,
        n_head_kv: 1,
        head_dim,
        value_dim,
        window: None,
        chunk: None,
        scale: 0.3,
        softcap: None,
    };
    for ty in CacheType::ALL {
        for (n, past) in [(1, 70), (9, 3)] {
            let positions: Vec<u32> = (past..past + n).collect();
            let q = noise(n as usize * n_head * head_dim, 4);
            let rows = noise((past + n) as usize * head_dim, 5);
            let (k, k_values) = filled(ty, head_dim, &rows, [1, N_SEQ]);
            let values = k_values.chunks_exact(head_dim);
            let v_values: Vec<f32> = values.flat_map(|row| row[..value_dim].to_vec()).collect();
            let expected = reference(&shape, &q, &k_values, &v_values, &positions, None);
            let inputs = Inputs {
                q: &q,
                k: k.rows_from(1),
                v: k.rows_from(1),
                strides: [N_SEQ * head_dim; 2],
                positions: &positions,
                sinks: None,
            };
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; expected.len()];
                attention_with(isa, &threads, &shape, &inputs, &mut out);
                for (got, want) in out.iter().zip(&expected) {
                    assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}, {ty}");
                }
            }
        }
    }
}

#[test]
fn tokens_attend_to_their_own_chunk_only() {
    let shape = Shape {
        n_head: 2,
        n_head_kv: 1,
        head_dim: 16,
        value_dim: 16,
        window: None,
        chunk: Some(50),
        scale: 0.7,
        softcap: None,
    };
    assert_eq!(shape.visible(49), 0..50);
    assert_eq!(shape.visible(50), 50..51);
    assert_eq!(shape.visible(149), 100..150);
    let threads = Threads::new(2).unwrap();
    for (past, n) in [(0u32, 120u32), (95, 20), (100, 1)] {
        let positions: Vec<u32> = (past..past + n).collect();
        let q = noise(n as usize * 32, 1);
        let n_cached = (past + n) as usize * 16;
        let (k, k_values) = filled(CacheType::F32, 16, &noise(n_cached, 2), [0, 1]);
        let (v, v_values) = filled(CacheType::F32, 16, &noise(n_cached, 3), [0, 1]);
        let expected = reference(&shape, &q, &k_values, &v_values, &positions, None);
        let inputs = Inputs {
            q: &q,
            k: k.rows_from(0),
            v: v.rows_from(0),
            strides: [16; 2],
            positions: &positions,
            sinks: None,
        };
        let mut out = vec![f32::NAN; q.len()];
        attention(&threads, &shape, &inputs, &mut out);
        for (got, want) in out.iter().zip(&expected) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
        }
    }
}
