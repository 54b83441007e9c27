// Overlap: of a kernel with the previous one on its stream, and of memory reads with computation.
#pragma once
#include "common.cuh"

using byte = unsigned char;

// Where a kernel stores the time at which it started, ns on the clock of the GPU; null: nowhere.
using Start = unsigned long long*;

// Stores the time, in the first block.
__device__ inline void store_start(Start start) {
    if (start && (blockIdx.x | blockIdx.y | threadIdx.x) == 0) asm volatile("{\n.reg .u64 now;\nmov.u64 now, %globaltimer;\nst.global.u64 [%0], now;\n}" ::"l"(start) : "memory");
}

// A kernel may start while the previous one on its stream still runs. Before this call, it may only access weights and data that
// was complete before the previous kernel started. After it, all earlier work on the stream is complete. Every thread must call
// it, because kernels that wait for this kernel rely on that, too.
//
// Results of the previous kernel must not be read as constants (`__ldg`, `const __restrict__`): the compiler may move such a load
// before the wait.
//
// The start of a kernel is the end of this wait in its first block.
__device__ inline void wait_for_previous(Start start) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    store_start(start);
}

// Allows the next kernel to start as soon as multiprocessors have room. Call it only after `wait_for_previous`.
__device__ inline void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For the start of a kernel that does nothing early.
__device__ inline void follow_previous(Start start) {
    wait_for_previous(start);
    start_next();
}

// The starts of the operations of a kernel that computes several.
template <unsigned N>
struct StartsOf {
    Start of[N];
};

// All starts get the same time.
template <unsigned N>
__device__ inline void follow_previous(const StartsOf<N>& starts) {
    wait_for_previous(nullptr);
    if ((blockIdx.x | blockIdx.y | threadIdx.x) == 0) {
        unsigned long long now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
#pragma unroll
        for (unsigned i = 0; i < N; i++) {
            if (starts.of[i]) *starts.of[i] = now;
        }
    }
    start_next();
}

// Copies `bytes` bytes to shared memory, extended to 16-byte boundaries on both sides. `to` is a multiple of 16, and the first
// byte keeps its offset within 16 bytes. The lanes of a warp share the copy.
__device__ inline void copy_ahead(unsigned to, const byte* from, unsigned bytes) {
    const unsigned shift = unsigned(size_t(from)) % 16, end = to + shift + bytes, lane = threadIdx.x % WARP;
    from += 16 * int(lane) - int(shift);
    to += 16 * lane;
#pragma unroll 1
    for (; to < end; to += 32 * WARP, from += 32 * WARP) {
#pragma unroll
        for (unsigned i = 0; i < 32 * WARP; i += 16 * WARP) {
            if (to + i >= end) continue;
#if __CUDA_ARCH__ >= 800
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
#else
            const uint4 v = __ldg((const uint4*)(from + i));
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + i), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
        }
    }
}

// Ends a batch of copies of this thread.
__device__ inline void end_batch() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last N batches of the warp are complete.
template <unsigned N>
__device__ inline void wait_for_batches() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
    __syncwarp();
}

// From 9.0 on, the copy engine can copy, too. It takes one instruction instead of many, but has less bandwidth than all threads.
#if __CUDA_ARCH__ >= 900
#define HAS_ENGINE 1
#else
#define HAS_ENGINE 0
#endif

// A barrier in shared memory that opens once, when the expected number of bytes has been copied.
struct Arrival {
    unsigned long long state;

    __device__ unsigned at() const { return unsigned(__cvta_generic_to_shared(this)); }
    // Called by one thread, before the next barrier of the block.
    __device__ void begin() {
#if HAS_ENGINE
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    // Called by one thread, before the copies.
    __device__ void expect(unsigned bytes) {
#if HAS_ENGINE
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
#endif
    }
    // Starts the same copy as `copy_ahead` on the copy engine: `around(from, bytes)` bytes. Called by one thread.
    __device__ void copy(unsigned to, const byte* from, unsigned bytes) {
#if HAS_ENGINE
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(to), "l"(from - unsigned(size_t(from)) % 16), "r"(around(from, bytes)), "r"(at()) : "memory");
#endif
    }
    // Size of `bytes` bytes at `from`, extended to 16-byte boundaries on both sides.
    __device__ static unsigned around(const byte* from, unsigned bytes) {
        return (unsigned(size_t(from)) % 16 + bytes + 15) / 16 * 16;
    }
    __device__ void wait() {
#if HAS_ENGINE
        asm volatile(
            "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}"
            ::"r"(at()) : "memory");
#endif
    }
};
