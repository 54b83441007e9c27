// What a product of chosen experts reads and writes: an entry is a pair (token, slot), its number token * k + slot.
#pragma once
#include "common.cuh"

// The entries of each expert, in their order, as `group_entries` sorts them; or, without a list, the rows of a plain product.
struct Entries {
    const void* list;        // null: entry i is row i
    const unsigned* bounds;  // (n_expert + 1): where each expert's entries begin
    bool wide;               // whether the list has 64 bits an entry
    unsigned k, rows_per, n_rows;

    __device__ unsigned begin(unsigned expert) const { return list ? bounds[expert] : 0; }
    __device__ unsigned end(unsigned expert) const { return list ? bounds[expert + 1] : n_rows; }
    // Number of the `i`th entry of the list.
    __device__ unsigned at(unsigned i) const {
        if (!list) return i;
        if (wide) {
            const uint2 code = ((const uint2*)list)[i];
            return code.x * k + code.y;
        }
        const unsigned code = ((const unsigned*)list)[i];
        return (code & 0x3fffff) * k + (code >> 22);
    }
    // The row of activations that an entry reads.
    __device__ unsigned row(unsigned entry) const { return entry / rows_per; }
};

// The gated activation: 1 is SwiGLU, 2 that of gpt-oss, with limits.
__device__ inline float activate(unsigned glu, float gate, float up) {
    const bool oai = glu == 2;
    const float limit = oai ? 7 : INFINITE;
    // Comparisons, so that a NaN stays one.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1 + expf((oai ? -1.702f : -1) * gate)) * (up + oai);
}

// Stores a product: plain, or as the `up` of the gate that is there.
__device__ inline void store(float* at, float value, unsigned glu) { *at = glu ? activate(glu, *at, value) : value; }
