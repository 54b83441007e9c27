//! Measurement of the memory read bandwidth, which limits the speed of decoding.

use std::hint::black_box;
use std::time::Instant;

use crate::cpu::prefetch::prefetch;
use crate::cpu::threads::Threads;

/// Measured memory read bandwidth of `threads` in bytes per second: the maximum of ten passes over a buffer of `bytes` bytes. The
/// buffer should be several times as large as the last-level cache.
pub fn read_bandwidth(threads: &Threads, bytes: usize) -> f64 {
    let buffer = vec![1u64; (bytes / size_of::<u64>()).max(1)];
    let pass = || {
        let start = Instant::now();
        threads.split(buffer.len(), size_of_val(buffer.as_slice()), |range| {
            black_box(sum(&buffer[range]));
        });
        start.elapsed().as_secs_f64()
    };
    let best = (0..10).map(|_| pass()).fold(f64::INFINITY, f64::min);
    size_of_val(buffer.as_slice()) as f64 / best
}

/// The wrapping sum. It reads `values` as several streams, like the product of one token reads weights.
fn sum(values: &[u64]) -> u64 {
    const STREAMS: usize = 4;
    let (lines, rest) = values.as_chunks::<8>();
    let part = lines.len() / STREAMS;
    let mut lanes = [0u64; 8];
    for i in 0..part {
        for stream in 0..STREAMS {
            let line = &lines[stream * part + i];
            prefetch::<STREAMS, _>(line, 1);
            for (lane, value) in lanes.iter_mut().zip(line) {
                *lane = lane.wrapping_add(*value);
            }
        }
    }
    let rest = lines[STREAMS * part..].as_flattened().iter().chain(rest);
    lanes.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_values() {
        for n in [0, 1, 31, 32, 33, 64, 1000] {
            assert_eq!(sum(&vec![3; n]), 3 * n as u64);
        }
    }

    #[test]
    fn bandwidth_is_positive() {
        let bandwidth = read_bandwidth(&Threads::new(2).unwrap(), 1 << 20);
        assert!(bandwidth.is_finite() && bandwidth > 0.0);
    }
}
