//! Replaces [`crate::cuda`] in builds without the feature `cuda`. It has the same items for the rest of the crate, but the types
//! for a GPU have no values. So the rest of the crate is the same in both builds, and its GPU branches are unreachable.
#![allow(
    missing_docs,
    reason = "the items are documented in the modules that these replace"
)]

#[path = "absent/caches.rs"]
mod caches;
#[path = "absent/device.rs"]
mod device;
mod fallbacks;
#[path = "absent/gpu.rs"]
mod gpu;
mod gpu_info;
mod handles;
#[path = "absent/ops.rs"]
mod ops;
mod policy;
#[path = "absent/recurrent.rs"]
mod recurrent;

pub(crate) use caches::Found;
pub use device::Device;
pub use fallbacks::Fallbacks;
pub use gpu::Gpu;
pub(crate) use gpu::{DeviceBuffer, Download, Registered};
pub use gpu_info::{GpuInfo, GpuSpec};
pub(crate) use handles::{Event, Ptr, Wanted};
pub(crate) use ops::{Entries, HotCall, HotInput};
pub use policy::Policy;

/// Post-Fetch, which needs a GPU.
pub mod post_fetch {
    mod settings;
    mod transfer;

    pub use settings::{InjectedFault, Settings};
    pub use transfer::{Observer, Reason, Sample, State, Transfer};
}

/// Why no GPU can be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error(
        "this program was built without support for NVIDIA GPUs: build it with the feature `cuda`"
    )]
    NotBuilt,
}

impl Error {
    pub fn contains_advice(&self) -> bool {
        true
    }

    pub fn is_out_of_memory(&self) -> bool {
        false
    }
}

pub type Result<T> = std::result::Result<T, Error>;

/// A type without values.
#[derive(Clone, Copy)]
enum Never {}
