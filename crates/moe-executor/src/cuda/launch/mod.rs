//! One method per kernel: operands, results and grid.
//!
//! Activations are f32 in contiguous rows. The methods launch kernels on the given stream and do not wait. The caller must ensure
//! that pointers refer to device memory of the documented shapes.

mod attention;
mod experts;
pub(super) mod fusion;
mod mat_mul;
mod product_tiles;
mod products;
mod recurrent;
mod router;
mod rows;
mod store;
mod tiles;
mod token;
mod token_rows;
mod wide;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
};
use cudarc::driver::{CudaContext, LaunchConfig};
use moe_gguf::GgmlType;

use super::launches::Launches;
use super::module::{self, Embedded, Module};
use super::{Error, Ptr, Result};
use crate::kv_cache::CacheType;

pub use attention::Attention;
pub use experts::{Fetched, FindSlots, GateUp, MulMatId};
pub use products::{Weights, ends_products};
pub use router::{MAX_EXPERTS, Route};
pub use rows::{GroupNorm, HeadPart, JoinHeads, Multiply, Rope};
pub use store::{Cached, Store};
pub use token::Down;

pub use recurrent::{Columns, Convolution, DeltaNet, Runs, SsmScan, check_state};

/// Rows of activations.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// f32 `(rows, n_in)`.
    pub x: Ptr,
    /// The same rows quantized, [`Kernels::scratch_size`] bytes, if the kernel that computed them quantized them; otherwise null.
    pub quantized: Ptr,
}

impl From<Ptr> for Rows {
    fn from(x: Ptr) -> Rows {
        Rows {
            x,
            quantized: Ptr::NULL,
        }
    }
}

/// All kernels on one GPU. Each module is loaded at the first launch of one of its kernels.
pub struct Kernels {
    /// Number of multiprocessors.
    multiprocessors: usize,
    /// Limit of shared memory per block in bytes.
    shared: usize,
    launches: Arc<Launches>,
    /// Stores to the KV cache, and the combination of partial results of attention.
    attention: Module,
    /// Attention by the type of keys and values; `None` for any types.
    attention_of: Vec<(Option<CacheType>, Module)>,
    /// Attention of wide heads, of caches of any types.
    attention_wide: Module,
    router: Module,
    rows: Module,
    experts: Module,
    /// Matrix products by type of the weights.
    products: Vec<(GgmlType, Module)>,
    /// Products of one token and fused kernels for its experts by type of the weights.
    token: Vec<(GgmlType, Module)>,
    recurrent: Module,
}

impl Kernels {
    /// The kernels for the GPU of `context`.
    ///
    /// # Errors
    /// [`Error::Capability`], or a driver error.
    pub fn load(context: &Arc<CudaContext>) -> Result<Kernels> {
        let attribute = |attribute, what| {
            let value = context.attribute(attribute);
            let value = value.map_err(|error| Error::driver(what, error))?;
            Ok::<_, Error>(value.max(1) as usize)
        };
        let launches = Arc::new(Launches::default());
        let module = |embedded: &'static Embedded| Module::new(context, embedded, &launches);
        Ok(Kernels {
            multiprocessors: attribute(
                CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                "reading the number of multiprocessors",
            )?,
            shared: attribute(
                CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                "reading the size of shared memory",
            )?,
            attention: module(&module::ATTENTION)?,
            attention_of: modules(&module::ATTENTION_OF, module)?,
            attention_wide: module(&module::ATTENTION_WIDE)?,
            router: module(&module::ROUTER)?,
            rows: module(&module::ROWS)?,
            experts: module(&module::EXPERTS)?,
            products: modules(&module::PRODUCTS, module)?,
            token: modules(&module::TOKEN, module)?,
            recurrent: module(&module::RECURRENT)?,
            launches,
        })
    }

    /// Makes the next kernel start after everything that its stream was given, like [`Launches::follow_copy`].
    pub fn follow_launches(&self) {
        self.launches.follow_copy();
    }

    /// The launches of the GPU.
    pub(super) fn launches(&self) -> &Arc<Launches> {
        &self.launches
    }
}

/// The modules of a list of types.
fn modules<K: Copy>(
    embedded: &'static [(K, Embedded)],
    module: impl Fn(&'static Embedded) -> Result<Module>,
) -> Result<Vec<(K, Module)>> {
    let modules = embedded.iter();
    let modules = modules.map(|(ty, ptx)| Ok((*ty, module(ptx)?)));
    modules.collect()
}

/// The entry for weights or a cache of type `ty`.
fn of_type<T, K: PartialEq>(all: &[(K, T)], ty: K) -> Option<&T> {
    all.iter().find(|(known, _)| *known == ty).map(|(_, it)| it)
}

/// A grid of `blocks` blocks of `threads` threads, without dynamic shared memory.
fn grid(blocks: usize, threads: usize) -> LaunchConfig {
    // The driver rejects grids that are too large, so the number must not be truncated.
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}
