// Entries of a product of selected experts: entry token * k + slot is one selected expert of one token.
#pragma once
#include "common.cuh"

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

// The gated activation. 1: SwiGLU; 2: the clamped variant of gpt-oss.
__device__ inline float activate(unsigned glu, float gate, float up) {
    const bool oai = glu == 2;
    const float limit = oai ? 7 : INFINITE;
    // Comparisons propagate NaN.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1 + expf((oai ? -1.702f : -1) * gate)) * (up + oai);
}

// Stores a product, or its activation as `up` with the stored value as gate.
__device__ inline void store(float* at, float value, unsigned glu) { *at = glu ? activate(glu, *at, value) : value; }
