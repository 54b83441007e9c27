//! Errors of layouts.

use moe_files::text::counted;
use moe_gguf::{ExpertId, Fault, LayerId};

/// Why a model cannot be written in the requested order. The message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model cannot be read.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// The new header would violate a rule of the format.
    #[error("the new header would be invalid: {0}")]
    Header(#[from] Fault),
    /// There is an order for a layer without experts.
    #[error(
        "there is an order for the experts of layer {layer}, but the layer has no experts; the order may belong to another model"
    )]
    NoExperts {
        /// The layer.
        layer: LayerId,
    },
    /// Tensors overlap. The new file would contain the shared bytes twice and hide the damage.
    #[error(
        "the model is damaged: {overlap} ({} in total); download the model again",
        counted(*count, "overlap")
    )]
    Overlap {
        /// Description of the first overlap.
        overlap: String,
        /// Number of overlaps.
        count: usize,
    },
    /// An order is not a permutation of the experts of its layer.
    #[error(
        "the order of the experts of layer {layer} is invalid: {fault}; list each expert from 0 to {} once",
        n_expert.saturating_sub(1)
    )]
    InvalidOrder {
        /// The layer.
        layer: LayerId,
        /// Number of experts of the layer.
        n_expert: u32,
        /// What is wrong with the order.
        fault: OrderFault,
    },
    /// An order separates experts of a group, but the router selects groups first.
    #[error(
        "the router selects from {n_group} groups of experts first, but the order for layer {layer} separates experts of a group; keep the experts of each group together"
    )]
    Groups {
        /// The layer.
        layer: LayerId,
        /// Number of groups.
        n_group: u32,
    },
    /// The number of groups differs between layers.
    #[error("metadata key {key:?} is {values}, but must be one number for all layers")]
    GroupCount {
        /// The key.
        key: String,
        /// Its values.
        values: String,
    },
    /// A layer has no router with a known name.
    #[error(
        "the experts of layer {layer} cannot be permuted: the model has no router blk.{layer}.ffn_gate_inp.weight; omit the layer from the order"
    )]
    NoRouter {
        /// The layer.
        layer: LayerId,
    },
    /// The parts of a tensor that belong to each expert are unknown or cannot be moved.
    #[error(
        "the experts of tensor {tensor:?} cannot be permuted: {reason}; omit its layer from the order"
    )]
    Immovable {
        /// The tensor.
        tensor: String,
        /// Why the tensor cannot be permuted.
        reason: ImmovableReason,
    },
}

/// Why an order is not a permutation of the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderFault {
    /// The length differs from the number of experts.
    #[error("it contains {}, but the layer has {n_expert}", counted(*found, "expert"))]
    Length {
        /// Length of the order.
        found: usize,
        /// Number of experts of the layer.
        n_expert: u32,
    },
    /// An expert occurs twice.
    #[error("it contains expert {expert} twice")]
    Repeated {
        /// The expert.
        expert: ExpertId,
    },
    /// An expert does not exist.
    #[error("expert {expert} is out of range (0..={})", .n_expert.saturating_sub(1))]
    OutOfRange {
        /// The expert.
        expert: ExpertId,
        /// Number of experts of the layer.
        n_expert: u32,
    },
}

/// Why the experts of a tensor cannot be permuted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImmovableReason {
    /// The router selects from groups, and has outputs for experts without weights, whose groups are unknown.
    #[error("the router selects from groups and has more rows than the layer has experts")]
    GroupedRouter,
    /// Chunk experts (`_chexps`).
    #[error("it contains chunks that belong to several experts each")]
    ChunkExperts,
    /// A table of expert ids (`ffn_gate_tid2eid`).
    #[error("it contains expert ids")]
    ExpertIds,
    /// The name is unknown, and suggests that the tensor belongs to experts.
    #[error("its name is unknown, so that its relation to experts is unknown")]
    UnknownName,
    /// The tensor has dimensions after that of the experts.
    #[error("it has more dimensions than expected")]
    Dimensions,
    /// The number of slices differs from the number of experts.
    #[error("it does not have one slice for each expert of its layer")]
    SliceCount,
    /// A router has fewer rows than the layer has experts, or too many.
    #[error("its number of rows is less than the number of experts, or greater than 65,536")]
    RouterRows,
    /// Blocks contain elements of several experts.
    #[error("its blocks contain elements of several experts")]
    SharedBlocks,
    /// The type interleaves rows.
    #[error("its type interleaves the rows of several experts")]
    InterleavedRows,
}
