// How kernels overlap: with the one before them on their stream, and reading with computing.
#pragma once
#include "common.cuh"

using byte = unsigned char;

// A kernel may be started while the one before it on its stream still runs. Until this it may touch nothing but weights and what
// was complete before that one began; behind it, all that the stream was given before is complete. Every thread calls it: who
// waits for this kernel relies on it too.
//
// What the kernel before may have made is never read as constant (`__ldg`, `const __restrict__`): such a load may be moved before
// the wait.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as there is room. Only behind `wait_for_previous`.
__device__ inline void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// At the top of a kernel that has nothing to do early.
__device__ inline void follow_previous() {
    wait_for_previous();
    start_next();
}

// Copies the sixteens around `bytes` bytes to an address in shared memory, a multiple of 16: the bytes begin there at the same
// distance from a multiple of 16 as in memory. The lanes of a warp take turns.
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

// Ends a batch of copies of a thread.
__device__ inline void end_batch() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits till all but the last N batches of the warp have arrived.
template <unsigned N>
__device__ inline void wait_for_batches() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
    __syncwarp();
}

// From 9.0 on an engine copies, too: one instruction where threads take many, but less at a time than all threads together.
#if __CUDA_ARCH__ >= 900
#define HAS_ENGINE 1
#else
#define HAS_ENGINE 0
#endif

// Tells, once, that the bytes have arrived that it was told to expect. In shared memory.
struct Arrival {
    unsigned long long state;

    __device__ unsigned at() const { return unsigned(__cvta_generic_to_shared(this)); }
    // One thread, before the block's next barrier.
    __device__ void begin() {
#if HAS_ENGINE
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    // One thread, before the copies.
    __device__ void expect(unsigned bytes) {
#if HAS_ENGINE
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
#endif
    }
    // Has the engine do what `copy_ahead` does; `around(from, bytes)` bytes come. One thread.
    __device__ void copy(unsigned to, const byte* from, unsigned bytes) {
#if HAS_ENGINE
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(to), "l"(from - unsigned(size_t(from)) % 16), "r"(around(from, bytes)), "r"(at()) : "memory");
#endif
    }
    // The sixteens around bytes, in bytes.
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
