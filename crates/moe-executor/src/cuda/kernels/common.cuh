// What kernels of several files use. NVRTC brings no headers: everything is here.
#pragma once

#define KERNEL extern "C" __global__ void

// An enumeration, not variables: those would lie in the device's memory.
enum : unsigned { WARP = 32, ALL_LANES = 0xffffffff };
#define INFINITE __int_as_float(0x7f800000)

// The sum over a warp, in every lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The largest value of a warp, in every lane.
__device__ inline float warp_max(float x) {
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
