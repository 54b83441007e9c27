//! The description of a GPU in the manifest.

use moe_trace::manifest;

use super::Device;
use crate::cuda::Result;
use crate::cuda::post_fetch::Settings;

impl Device {
    /// Returns the properties, the memory usage and the fallbacks so far. `min_batch` is the smallest number of tokens for which
    /// a matrix in CPU memory is copied to the GPU.
    pub(crate) fn describe(&self, min_batch: Option<usize>) -> manifest::Gpu {
        let info = self.gpu().info();
        let (_, peak, limit) = self.gpu().memory();
        let scratchpad = self.scratchpad_bytes() as u64;
        manifest::Gpu {
            device: Some(self.id().to_string()),
            ordinal: Some(info.ordinal as u64),
            name: info.name.clone(),
            memory_bytes: info.memory_bytes,
            driver: Some(format!(
                "CUDA {}.{}",
                info.driver / 1000,
                info.driver % 1000 / 10
            )),
            limit_bytes: Some(limit),
            peak_bytes: Some(peak),
            scratchpad_bytes: (scratchpad > 0).then_some(scratchpad),
            fallbacks: Some(manifest::Fallbacks {
                operations: self.fallbacks.ops,
                tensors: self.fallbacks.tensors.len() as u64,
                first_error: self.fallbacks.first.clone(),
            }),
            offload_min_batch: Some(min_batch.unwrap_or(0) as u64),
            post_fetch: self.post_fetch_settings().map(settings),
        }
    }

    /// Measured memory bandwidth in bytes/s; see [`Gpu::bandwidth`](crate::cuda::Gpu::bandwidth).
    ///
    /// # Errors
    /// Two buffers of 1 GiB do not fit into GPU memory, or the GPU failed.
    pub fn bandwidth(&self) -> Result<f64> {
        const BYTES: usize = 1 << 30;
        self.gpu().bandwidth(BYTES)
    }
}

fn settings(settings: &Settings) -> manifest::PostFetch {
    manifest::PostFetch {
        enable: settings.enable,
        force_cpu: settings.force_cpu,
        block_on_miss: settings.block_on_miss,
        max_transfers: settings.max_transfers as u64,
        scratchpad_mb: settings.scratchpad_bytes.map_or(0, |bytes| bytes >> 20) as u64,
        use_dedicated_streams: settings.dedicated_streams,
        cpu_limit: settings.cpu_limit.unwrap_or(0) as u64,
    }
}
