//! CPU kernels: quantized matrix products, attention, RoPE, gated activations, recurrent layers; the thread pool.

pub(crate) mod attention;
pub mod bandwidth;
pub(crate) mod convolution;
pub(crate) mod delta_net;
pub(crate) mod disjoint;
pub(crate) mod glu;
pub(crate) mod heads;
pub(crate) mod map;
pub(crate) mod matmul;
mod prefetch;
pub mod quant;
pub(crate) mod rope;
mod simd;
pub(crate) mod state_space;
pub mod threads;
