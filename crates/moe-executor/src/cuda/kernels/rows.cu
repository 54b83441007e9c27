// Norms, sums, activations, rotations: row by row, all f32.
#include "common.cuh"

KERNEL add(const float* a, const float* b, size_t n, float* out) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
