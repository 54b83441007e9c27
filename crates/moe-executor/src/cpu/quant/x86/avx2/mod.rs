//! Kernels for AVX2 with FMA and F16C.
