//! The table of measurements.

use std::io::{self, Write};

use moe_trace::manifest::Gpu;

use super::Test;
use super::paired::PairedRatio;
use crate::output::{Format, Table};

/// Measurements of a test.
pub struct Measured {
    /// File name of the model.
    pub model: String,
    /// Size of the model's tensors in bytes.
    pub model_bytes: u64,
    pub n_batch: usize,
    pub n_threads: usize,
    pub test: Test,
    /// Mean and standard deviation of the time of a repetition, nanoseconds.
    pub ns: (f64, f64),
    /// Mean and standard deviation.
    pub tokens_per_s: (f64, f64),
    /// Bytes of weights read per token.
    pub bytes_per_token: f64,
    /// Bandwidth of the memory that contains the weights, bytes/s; `None` if they are in several memories.
    pub bandwidth: Option<f64>,
    pub engine: String,
    pub policy: &'static str,
    /// Fraction of the expert slots that hot lanes computed in all runs of the test; `None` without a hot cache.
    pub hit_rate: Option<f64>,
    pub gpus: Vec<Gpu>,
    /// Size of the hot cache in percent of the size of all experts, with `--hot-cache-percent`.
    pub percent: Option<f64>,
    /// Value of `--perf`, if there are several.
    pub perf: Option<&'static str>,
    /// Value of `--trace`, if it is given.
    pub trace: Option<String>,
    /// Ratio of the times to those of the first variant, if there are several.
    pub ratio: Option<PairedRatio>,
}

impl Measured {
    /// Returns the bytes of weights read per second.
    fn bytes_per_s(&self) -> f64 {
        self.bytes_per_token * self.tokens_per_s.0
    }

    /// Returns the names of the GPUs, separated by commas.
    fn gpu_names(&self) -> String {
        let names: Vec<&str> = self.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        names.join(", ")
    }

    /// Returns the number of operations that the CPU ran because a GPU could not, in all repetitions; `None` without a GPU.
    fn fallbacks(&self) -> Option<u64> {
        let counts = self.gpus.iter().filter_map(|gpu| gpu.fallbacks.as_ref());
        counts
            .map(|fallbacks| fallbacks.operations)
            .reduce(|sum, n| sum + n)
    }
}

/// Prints one row per test. Columns have llama-bench's names where they exist.
pub fn print(out: &mut dyn Write, format: Format, rows: &[Measured]) -> io::Result<()> {
    let round = |value: f64, digits: i32| (value * 10f64.powi(digits)).round() / 10f64.powi(digits);
    let mut table = Table::of(rows)
        .column("model_filename", "model", |row| row.model.as_str())
        .column("model_size", "size (bytes)", |row| row.model_bytes)
        .column("n_batch", "batch (tokens)", |row| row.n_batch)
        .column("n_threads", "threads", |row| row.n_threads)
        .column("n_prompt", "prompt (tokens)", |row| row.test.n_prompt)
        .column("n_gen", "generated (tokens)", |row| row.test.n_gen)
        .column("avg_ns", "time, mean (ns)", |row| row.ns.0 as u64)
        .column("stddev_ns", "time, std. dev. (ns)", |row| row.ns.1 as u64)
        .column("avg_ts", "tokens/s, mean", move |row| {
            round(row.tokens_per_s.0, 2)
        })
        .column("stddev_ts", "tokens/s, std. dev.", move |row| {
            round(row.tokens_per_s.1, 2)
        })
        .column("weight_bytes_per_token", "weights (bytes/token)", |row| {
            row.bytes_per_token as u64
        })
        .column("gb_per_s", "read (GB/s)", move |row| {
            round(row.bytes_per_s() / 1e9, 3)
        })
        .column(
            "bandwidth_gb_per_s",
            "memory bandwidth (GB/s)",
            move |row| row.bandwidth.map(|bandwidth| round(bandwidth / 1e9, 3)),
        )
        .column("bandwidth_share", "bandwidth used (fraction)", move |row| {
            let share = row.bandwidth.map(|bandwidth| row.bytes_per_s() / bandwidth);
            share.map(|share| round(share, 4))
        })
        .column("engine", "engine", |row| row.engine.as_str())
        .column("gpu_info", "GPU", |row| row.gpu_names())
        .column("policy", "policy", |row| row.policy)
        .column("fallbacks", "CPU fallbacks", |row| row.fallbacks())
        .column("hit_rate", "hit rate (fraction)", move |row| {
            row.hit_rate.map(|rate| round(rate, 4))
        });
    if rows.iter().any(|row| row.test.n_depth > 0) {
        table = table.column("n_depth", "depth (tokens)", |row| row.test.n_depth);
    }
    if rows.iter().any(|row| row.test.n_parallel > 1) {
        table = table.column("n_parallel", "sequences", |row| row.test.n_parallel);
    }
    if rows.iter().any(|row| row.percent.is_some()) {
        table = table.column(
            "hot_cache_percent",
            "cache (% of the size of all experts)",
            |row| row.percent,
        );
    }
    if rows.iter().any(|row| row.trace.is_some()) {
        table = table.column("trace", "recorded", |row| row.trace.clone());
    }
    if rows.iter().any(|row| row.perf.is_some()) {
        table = table.column("perf", "counters", |row| row.perf);
    }
    if rows.iter().any(|row| row.ratio.is_some()) {
        let bound = |row: &Measured, of: fn((f64, f64)) -> f64| row.ratio?.interval.map(of);
        table = table
            .column("time_ratio", "time, paired ratio (×)", move |row| {
                row.ratio.map(|ratio| round(ratio.median, 4))
            })
            .column("time_ratio_low", "95 % interval, low (×)", move |row| {
                bound(row, |(low, _)| low).map(|low| round(low, 4))
            })
            .column("time_ratio_high", "95 % interval, high (×)", move |row| {
                bound(row, |(_, high)| high).map(|high| round(high, 4))
            });
    }
    table.write(out, format)
}

/// Returns the mean and the sample standard deviation.
pub fn mean(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let squares: f64 = values.map(|v| (v - mean).powi(2)).sum();
    (
        mean,
        if n > 1.0 {
            (squares / (n - 1.0)).sqrt()
        } else {
            0.0
        },
    )
}

#[cfg(test)]
mod tests {
    use super::mean;

    #[test]
    fn returns_mean_and_sample_deviation() {
        let (m, s) = mean([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0].into_iter());
        assert_eq!(m, 5.0);
        assert!((s - 2.138).abs() < 1e-3);
        assert_eq!(mean([3.0].into_iter()), (3.0, 0.0));
    }
}
