//! Kernels and copies on a GPU, compared with f64 and with the kernels of the CPU. Without a GPU the tests are skipped.

mod device;
mod kernels;
mod mirrored;
mod products;
