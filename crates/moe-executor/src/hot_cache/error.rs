//! Errors of the contents of a hot cache.

use moe_files::text::counted;
use moe_gguf::{ExpertId, LayerId};
use moe_placement::plan::MAX_LANES;

use crate::device_id::DeviceId;

/// Why a model cannot have a hot cache with the requested contents.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There are too many lanes.
    #[error("a hot cache has at most {MAX_LANES} lanes, but {n} were requested")]
    TooManyLanes {
        /// Requested lanes.
        n: usize,
    },
    /// The device of a lane does not exist.
    #[error(
        "lane {lane} of the hot cache is on {device}, which is not in the list of devices ({})",
        counted(*.n_gpus, "GPU")
    )]
    NoSuchDevice {
        /// Lane, from 0.
        lane: usize,
        /// Its device.
        device: DeviceId,
        /// Number of GPUs in the list.
        n_gpus: usize,
    },
    /// A layer has no experts in the model.
    #[error(
        "lane {lane} of the hot cache contains experts of layer {layer}, which has no experts in the model; the plan is of \
         another model"
    )]
    NoExperts {
        /// Lane, from 0.
        lane: usize,
        /// The layer.
        layer: LayerId,
    },
    /// An expert does not exist.
    #[error(
        "lane {lane} of the hot cache contains expert {expert} of layer {layer}, which is out of range (0..={}); the \
         plan is of another model",
        .n_expert.saturating_sub(1)
    )]
    ExpertOutOfRange {
        /// Lane, from 0.
        lane: usize,
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
        /// Experts of the layer.
        n_expert: usize,
    },
    /// An expert is in the cache twice.
    #[error("the hot cache contains expert {expert} of layer {layer} twice; remove one of them")]
    Repeated {
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
    },
}
