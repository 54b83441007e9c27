//! Arithmetic on the CPU: quantized blocks, matrix products, attention, threads.

pub mod attention;
pub mod bandwidth;
mod disjoint;
pub mod glu;
pub mod matmul;
pub mod quant;
pub mod rope;
mod simd;
pub mod threads;
