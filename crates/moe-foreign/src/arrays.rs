//! Arrays that inference servers write: counts `[layers, experts]` and routing `[tokens, layers, top_k]`.

mod counts;
mod routing;

use moe_trace::LayerId;

pub use counts::CountError;
pub(crate) use counts::{CountSums, PhysicalMap, warn_if_routing};
pub use routing::RoutingError;
pub(crate) use routing::{Tokens, import_tokens, n_used_slots, use_of_layer};

use crate::layers::{RowBlocks, RowUse, blocks_of_rows};
use crate::{ForeignError, ImportOptions, Location, Missing, Output};

/// The location of an element in an array without a name, or of the array if `index` is empty.
pub(crate) fn element(index: &[usize]) -> Location {
    element_of("", index)
}

/// The location of an element in the array `name`, or of the array if `index` is empty.
pub(crate) fn element_of(name: &str, index: &[usize]) -> Location {
    Location::Element(match index {
        [] => name.to_owned(),
        _ => format!("{name}{index:?}"),
    })
}

/// The block of each row of a server's array; `None` for the empty row of a dense layer. If the numbering is an assumption, this
/// reports [`Missing::Layers`].
pub(crate) fn row_blocks(
    options: &ImportOptions,
    n_rows: usize,
    row_use: impl Fn(usize) -> RowUse,
    at: impl Fn() -> Location,
    output: &mut Output<'_>,
) -> Result<Vec<Option<LayerId>>, ForeignError> {
    let RowBlocks { blocks, is_assumed } = blocks_of_rows(options.model.as_ref(), n_rows, row_use)
        .map_err(|error| output.layers(at(), error))?;
    if is_assumed {
        output.missing(Missing::Layers);
    }
    Ok(blocks)
}
