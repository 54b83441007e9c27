//! Measurement of the memory read bandwidth, which limits the speed of decoding.

use std::hint::black_box;
use std::time::Instant;

use crate::cpu::threads::Threads;

/// Measured memory read bandwidth of `threads` in bytes per second: the maximum of five passes over a buffer of `bytes` bytes. The
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
    let best = (0..5).map(|_| pass()).fold(f64::INFINITY, f64::min);
    size_of_val(buffer.as_slice()) as f64 / best
}

/// The wrapping sum, in 32 independent partial sums.
fn sum(values: &[u64]) -> u64 {
    let mut lanes = [0u64; 32];
    let chunks = values.chunks_exact(32);
    let rest = chunks.remainder().iter().sum::<u64>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*value);
        }
    }
    lanes.iter().fold(rest, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_values() {
        for n in [0, 1, 31, 32, 33, 1000] {
            assert_eq!(sum(&vec![3; n]), 3 * n as u64);
        }
    }

    #[test]
    fn bandwidth_is_positive() {
        let bandwidth = read_bandwidth(&Threads::new(2).unwrap(), 1 << 20);
        assert!(bandwidth.is_finite() && bandwidth > 0.0);
    }
}
