//! Kernels of the GPU against what the CPU executor or plain f64 gives. Without a GPU the tests are skipped.

mod attention;
mod router;
mod rows;
mod timings;
