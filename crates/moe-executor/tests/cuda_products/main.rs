//! Products on the GPU against f64 and against the CPU's kernels. Without a GPU the tests say so and pass.

#[path = "../device/mod.rs"]
mod device;
mod experts;
mod grouped;
mod operands;
mod plain;
mod timings;
mod token;
