// Definitions for kernels of several files. NVRTC has no headers, so everything is defined here.
#pragma once

#define KERNEL extern "C" __global__ void

// An enumeration, because variables would be in GPU memory.
enum : unsigned { WARP = 32, ALL_LANES = 0xffffffff };
#define INFINITE __int_as_float(0x7f800000)

// Sum over a warp, returned in every lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Sum over a block of up to 1024 threads, returned in every thread.
__device__ inline float block_sum(float x) {
    __shared__ float of_warp[WARP];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? of_warp[lane] : 0.0f);
}

// Maximum over a warp, returned in every lane.
__device__ inline float warp_max(float x) {
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
__device__ inline unsigned warp_max(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, x);
#else
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
#endif
}

// Sums over lanes 0 to 15 and over lanes 16 to 31, returned in every lane.
__device__ inline int2 sums_of_halves(int x) {
    const bool second = threadIdx.x & 16;
#if __CUDA_ARCH__ >= 800
    return {__reduce_add_sync(ALL_LANES, second ? 0 : x), __reduce_add_sync(ALL_LANES, second ? x : 0)};
#else
#pragma unroll
    for (unsigned step = WARP / 4; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    const int other = __shfl_xor_sync(ALL_LANES, x, 16);
    return {second ? other : x, second ? x : other};
#endif
}

// Sums over a warp: of `a`, returned in lanes 0 to 15, and of `b`, returned in lanes 16 to 31.
__device__ inline float warp_sum_of_two(float a, float b) {
    const bool second = threadIdx.x & 16;
    float mine = second ? b : a;
    mine += __shfl_xor_sync(ALL_LANES, second ? a : b, 16);
#pragma unroll
    for (unsigned step = 8; step > 0; step /= 2) mine += __shfl_xor_sync(ALL_LANES, mine, step);
    return mine;
}

// Makes the compiler compute a value here, not later.
__device__ inline void compute_now(unsigned& x) { asm volatile("" : "+r"(x)); }
