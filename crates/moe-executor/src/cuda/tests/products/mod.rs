//! Products on the GPU against f64 and against the CPU's kernels. Without a GPU the tests are skipped.

mod experts;
mod grouped;
mod operands;
mod plain;
mod timings;
mod token;
