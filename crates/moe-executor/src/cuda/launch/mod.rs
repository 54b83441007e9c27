//! One method for each kernel: what it reads, what it writes, how its grid is cut.
//!
//! Activations are f32, row after row, contiguous. Nothing waits: a method starts kernels on the stream that it is given. The
//! caller promises that the pointers show to device memory of the told shapes.

mod attention;
mod experts;
mod products;
mod router;
mod rows;
mod token;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
};
use cudarc::driver::{CudaContext, LaunchConfig};
use moe_gguf::GgmlType;

use super::module::{self, Embedded, Module};
use super::{Error, Ptr, Result};

pub use attention::Attention;
pub use experts::{Fetched, GateUp, MulMatId};
pub use products::Weights;
pub use router::{MAX_EXPERTS, Route};
pub use rows::Rope;
pub use token::Down;

/// Rows of activations.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// f32 `(rows, n_in)`.
    pub x: Ptr,
    /// The same quantized, [`Kernels::scratch_size`] bytes, if whoever made them did that, too; or none.
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

/// All kernels on one device, translated for it when first used.
pub struct Kernels {
    /// Multiprocessors of the device.
    multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    shared: usize,
    /// Whether the next kernel must start after all that the stream was given.
    in_order: Arc<AtomicBool>,
    attention: Module,
    router: Module,
    rows: Module,
    experts: Module,
    /// Products, by the type of the weights.
    products: Vec<(GgmlType, Module)>,
    /// The experts of one token, by the type of the weights.
    token: Vec<(GgmlType, Module)>,
}

impl Kernels {
    /// The kernels for the device of `context`.
    ///
    /// # Errors
    /// The device is too old.
    pub fn load(context: &Arc<CudaContext>) -> Result<Kernels> {
        let attribute = |attribute, what| {
            let value = context.attribute(attribute);
            let value = value.map_err(|error| Error::driver(what, error))?;
            Ok::<_, Error>(value.max(1) as usize)
        };
        let in_order = Arc::new(AtomicBool::new(false));
        let module = |embedded: &'static Embedded| Module::new(context, embedded, &in_order);
        let modules = |embedded: &'static [(GgmlType, Embedded)]| {
            let modules = embedded.iter();
            let modules = modules.map(|(ty, ptx)| Ok((*ty, module(ptx)?)));
            modules.collect::<Result<_>>()
        };
        Ok(Kernels {
            multiprocessors: attribute(
                CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                "the GPU's multiprocessors",
            )?,
            shared: attribute(
                CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                "the GPU's shared memory",
            )?,
            attention: module(&module::ATTENTION)?,
            router: module(&module::ROUTER)?,
            rows: module(&module::ROWS)?,
            experts: module(&module::EXPERTS)?,
            products: modules(&module::PRODUCTS)?,
            token: modules(&module::TOKEN)?,
            in_order,
        })
    }

    /// Set where the next kernel must start after all that its stream was given.
    pub(super) fn in_order(&self) -> &Arc<AtomicBool> {
        &self.in_order
    }

    /// Has the next kernel start after all that its stream was given, above all of copies on that stream. Whether a kernel that may
    /// start early waits for a copy before it, no text of the driver's says.
    pub(crate) fn follow_copy(&self) {
        self.in_order.store(true, Ordering::Relaxed);
    }
}

/// The one for weights of a type.
fn of_type<T>(all: &[(GgmlType, T)], ty: GgmlType) -> Option<&T> {
    all.iter().find(|(known, _)| *known == ty).map(|(_, it)| it)
}

/// A grid of `blocks` of `threads` each, without dynamic shared memory.
fn grid(blocks: usize, threads: usize) -> LaunchConfig {
    // More blocks than a grid takes are refused by the driver, not cut.
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}
