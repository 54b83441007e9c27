//! Kernels on a GPU against the CPU's and against f64. Without a GPU the tests are skipped.

mod device;
mod kernels;
mod mirrored;
mod products;
