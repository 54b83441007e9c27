// The entries of a tile of a matrix-matrix product.
#pragma once
#include "entries.cuh"

// `N` entries and the rows that they read. After the end, the last entry is repeated.
template <unsigned N>
struct TileEntries {
    unsigned entry[N], row[N];

    __device__ void fill(const Entries& entries, unsigned first, unsigned end) {
        for (unsigned i = threadIdx.x; i < N; i += blockDim.x) {
            entry[i] = entries.at(min(first + i, end - 1));
            row[i] = entries.row(entry[i]);
        }
    }
};
