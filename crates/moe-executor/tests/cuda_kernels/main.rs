//! Kernels of the GPU against what the CPU executor or plain f64 gives. Without a GPU the tests say so and pass.

mod attention;
#[path = "../device/mod.rs"]
mod device;
mod router;
mod rows;
mod timings;
