// Entries of a product of selected experts: entry token * k + slot is one selected expert of one token.
#pragma once
#include "intrinsics.cuh"

// The entries sorted by expert, as `group_entries` stores them; or, without a list, the rows of a plain product.
struct Entries {
    const void* list;        // null: entry i is row i
    const unsigned* bounds;  // (n_expert + 1): first entry of each expert in the list
    bool wide;               // whether entries have 64 bits instead of 32
    unsigned k, rows_per, n_rows;

    __device__ unsigned begin(unsigned expert) const { return list ? bounds[expert] : 0; }
    __device__ unsigned end(unsigned expert) const { return list ? bounds[expert + 1] : n_rows; }
    // Entry number of element `i` of the list.
    __device__ unsigned at(unsigned i) const {
        if (!list) return i;
        if (wide) {
            const uint2 code = ((const uint2*)list)[i];
            return code.x * k + code.y;
        }
        const unsigned code = ((const unsigned*)list)[i];
        return (code & 0x3fffff) * k + (code >> 22);
    }
    // The activation row that an entry reads.
    __device__ unsigned row(unsigned entry) const { return entry / rows_per; }
};

// The gated activation of a product. 1: SwiGLU; 2: the clamped variant of gpt-oss.
__device__ inline float activate(unsigned glu, float gate, float up) {
    const bool oai = glu == 2;
    const float limit = oai ? 7 : INFINITE;
    // Comparisons propagate NaN.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1 + expf((oai ? -1.702f : -1) * gate)) * (up + oai);
}

// GELU with the hyperbolic tangent. Like on the CPU, numbers between -10 and 10 are rounded to half precision before and after.
__device__ inline float gelu(float x) {
    if (x <= -10) return 0;
    if (x >= 10) return x;
    x = round_to_half(x);
    return round_to_half(0.5f * x * (1 + tanhf(0.7978846f * x * (1 + 0.044715f * x * x))));
}

// Any gated activation: those of `activate`; 3: ReGLU; 4: GEGLU; otherwise, the bits of the limit of a SwiGLU,
// min(silu(gate), limit) · clamp(up, -limit, limit).
__device__ inline float activate_any(unsigned glu, float gate, float up) {
    if (glu <= 2) return activate(glu, gate, up);
    // Comparisons propagate NaN.
    if (glu == 3) return (gate < 0 ? 0 : gate) * up;
    if (glu == 4) return gelu(gate) * up;
    const float limit = __uint_as_float(glu), silu = gate / (1 + expf(-gate));
    return (silu > limit ? limit : silu) * (up > limit ? limit : up < -limit ? -limit : up);
}

// Stores a product, or its activation as `up` with the stored value as gate.
__device__ inline void store(float* at, float value, unsigned glu) { *at = glu ? activate(glu, *at, value) : value; }
