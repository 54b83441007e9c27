// Weights for the kernels of token.cuh: a lane processes one unit at a time. Units are as large as registers allow, because lanes that
// share a block would each read and decode its scales.
//
// A type V has
//   UNIT, SIZE                   weights per unit; bytes per block
//   stage, Staged, at            quantized activations in shared memory, in the order of the products
//   dot(words, at, u, x, ux)     product of unit u of a row that starts at byte `at` of `words`, with unit `ux` of x
#pragma once
#include "pipeline.cuh"
#include "weights.cuh"

// Selects bytes of (a, b) by the nibbles of `choice`. If bit 3 of a nibble is set, all bits of the result byte are the sign of the
// selected byte.
__device__ inline unsigned permute(unsigned a, unsigned b, unsigned choice) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(choice));
    return bytes;
}

__device__ inline int dot_four(unsigned a, int b, int sum) { return __dp4a(int(a), b, sum); }

// The same with unsigned bytes in a.
__device__ inline int dot_four_unsigned(unsigned a, int b, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

// Interleaves the bytes of a and b, then those of c and d.
__device__ inline int4 take_turns(int a, int b, int c, int d) {
    const auto low = [](int x, int y) { return int(permute(x, y, 0x5140)); };
    const auto high = [](int x, int y) { return int(permute(x, y, 0x7362)); };
    return {low(a, b), high(a, b), low(c, d), high(c, d)};
}

// Activations as codes and groups. Each of several planes has sixteen codes of every unit, so that the lanes of a warp read consecutive
// addresses.
struct StagedCodes {
    const int4* codes;
    const Group* groups;
    unsigned plane;  // chunks of sixteen codes per plane
};

// The index of chunk `i` of a row, for units of PLANES chunks.
template <unsigned PLANES>
struct Straight {
    static constexpr bool INTERLEAVED = false;
    __device__ static unsigned place(unsigned i, unsigned plane) { return i % PLANES * plane + i / PLANES; }
};
// The codes of the first and of the second half of a group are interleaved.
struct Interleaved : Straight<2> {
    static constexpr bool INTERLEAVED = true;
};
// Units of four chunks with a stride of two.
struct Strided {
    static constexpr bool INTERLEAVED = false;
    __device__ static unsigned place(unsigned i, unsigned plane) { return i % 8 / 2 * plane + i / 8 * 2 + i % 2; }
};

template <unsigned PIECE, class P>
struct Codes {
    static constexpr unsigned UNIT = PIECE;
    using Staged = StagedCodes;
    // Row `row` of the staged rows, which have `n` activations in total.
    __device__ static Staged at(const int4* shared, unsigned n, unsigned row, unsigned n_in) {
        return {shared + row * (n_in / UNIT), (const Group*)((const signed char*)shared + n) + row * (n_in / 32), n / UNIT};
    }
    // Copies quantized rows of `n` activations in total, a multiple of the unit, to shared memory. Loads bypass L1, which may be stale if
    // the kernel started early.
    __device__ static void stage(const void* quantized, unsigned n, int4* shared) {
        const int4* codes = (const int4*)quantized;
        const Group* groups = (const Group*)((const signed char*)quantized + n);
        Group* to_groups = (Group*)((signed char*)shared + n);
        for (unsigned i = threadIdx.x; i < n / 32; i += blockDim.x) {
            int4 a = __ldcg(codes + 2 * i), b = __ldcg(codes + 2 * i + 1);
            if (P::INTERLEAVED) {
                const int4 first = take_turns(a.x, b.x, a.y, b.y);
                b = take_turns(a.z, b.z, a.w, b.w);
                a = first;
            }
            shared[P::place(2 * i, n / UNIT)] = a;
            shared[P::place(2 * i + 1, n / UNIT)] = b;
            ((uint2*)to_groups)[i] = __ldcg((const uint2*)groups + i);
        }
    }
    // Quantizes a row of `n` activations, a multiple of the unit, with the same result in shared memory.
    __device__ static void quantize(const float* x, unsigned n, int4* shared) {
        Group* groups = (Group*)((signed char*)shared + n);
        for (unsigned i = threadIdx.x; i - threadIdx.x % WARP < n / 4; i += blockDim.x) {
            FourOfGroup four = quantize_four(4 * i < n ? __ldcg((const float4*)x + i) : float4{});
            unsigned chunk = i / 4, word = i % 4;
            if (P::INTERLEAVED) {
                const bool second = i & 4;
                const unsigned other = __shfl_xor_sync(ALL_LANES, four.codes, 4);
                four.codes = second ? permute(other, four.codes, 0x7362) : permute(four.codes, other, 0x5140);
                chunk = i / 8 * 2 + word / 2;
                word = word % 2 * 2 + second;
            }
            if (4 * i >= n) continue;
            ((int*)(shared + P::place(chunk, n / UNIT)))[word] = four.codes;
            if (i % 8 == 0) groups[i / 8] = four.group;
        }
    }
};

// Blocks of 32 weights.
template <class F>
struct LaneBlock : Codes<32, Straight<2>> {
    static constexpr unsigned SIZE = F::SIZE;
    __device__ float dot(const unsigned* words, unsigned at, unsigned u, const Staged& x, unsigned ux) const {
        const typename F::Raw raw(words, at + u * SIZE);
        Unit unit;
        F::decode(raw, u, unit);
        const int4 a = x.codes[ux], b = x.codes[x.plane + ux];
        const int codes[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const Group group = x.groups[ux];
        int sum = -int(F::OFFSET) * group.sum();
#pragma unroll
        for (unsigned i = 0; i < 8; i++) sum = dot_four(unit.codes[i], codes[i], sum);
        float product = unit.scale[0] * sum;
        if (F::MIN) product -= unit.min[0] * group.sum();
        return group.scale * product;
    }
};

// 64 weights in the low and the high nibbles of 32 bytes, in two groups.
struct LanePairK : Codes<64, Straight<4>> {
    // Scales of both groups, then their minima, one byte each; see `scale_and_min`.
    __device__ static unsigned scales(const uint4& head, unsigned pair) {
        const unsigned low = permute(head.y, head.z, pair % 2 ? 0x7632 : 0x5410);
        const unsigned four = permute(head.w, head.w, pair % 2 ? 0x3232 : 0x1010);
        const unsigned later = (four & 0x00000f0f) | (four >> 4 & 0x0f0f0000) | (low >> 2 & 0x30303030);
        return pair < 2 ? low & 0x3f3f3f3f : later;
    }
    // The product, from the sums of both groups.
    __device__ static float scale(const uint4& head, unsigned pair, int first, int second, const Staged& x, unsigned ux) {
        const uint4 both = *(const uint4*)(x.groups + 2 * ux);
        const Group group[2] = {{__uint_as_float(both.x), both.y}, {__uint_as_float(both.z), both.w}};
        const unsigned of = scales(head, pair);
        const float plus = group[0].scale * (first * int(of & 255)) + group[1].scale * (second * int(of >> 8 & 255));
        const float minus = group[0].scale * (group[0].sum() * int(of >> 16 & 255)) + group[1].scale * (group[1].sum() * int(of >> 24));
        return half_to_float(head.x) * plus - half_to_float(head.x >> 16) * minus;
    }
};

struct LaneQ4_K : LanePairK {
    static constexpr unsigned SIZE = 144;
    __device__ float dot(const unsigned* words, unsigned at, unsigned u, const Staged& x, unsigned ux) const {
        const uint4* block = (const uint4*)words + (at + u / 4 * SIZE) / 16;
        const uint4 head = block[0], a = block[1 + u % 4 * 2], b = block[2 + u % 4 * 2];
        const unsigned qs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        int low[2] = {}, high[2] = {};
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const int4 c = x.codes[half * x.plane + ux], d = x.codes[(2 + half) * x.plane + ux];
            const int first[4] = {c.x, c.y, c.z, c.w}, second[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                low[half] = dot_four(qs[4 * half + i] & 0x0f0f0f0f, first[i], low[half]);
                // The sum is 16 times too large, which saves a shift per word.
                high[half] = dot_four_unsigned(qs[4 * half + i] & 0xf0f0f0f0, second[i], high[half]);
            }
        }
        return scale(head, u % 4, low[0] + low[1], (high[0] + high[1]) >> 4, x, ux);
    }
};

struct LaneQ5_K : LanePairK {
    static constexpr unsigned SIZE = 176;
    __device__ float dot(const unsigned* words, unsigned at, unsigned u, const Staged& x, unsigned ux) const {
        const uint4* block = (const uint4*)words + (at + u / 4 * SIZE) / 16;
        const uint4 head = block[0], e = block[1], f = block[2], a = block[3 + u % 4 * 2], b = block[4 + u % 4 * 2];
        const unsigned qs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const unsigned fifth[8] = {e.x, e.y, e.z, e.w, f.x, f.y, f.z, f.w};
        int low[2] = {}, high[2] = {};
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const int4 c = x.codes[half * x.plane + ux], d = x.codes[(2 + half) * x.plane + ux];
            const int first[4] = {c.x, c.y, c.z, c.w}, second[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned four = qs[4 * half + i], bits = fifth[4 * half + i] >> u % 4 * 2;
                low[half] = dot_four((four & 0x0f0f0f0f) | (bits << 4 & 0x10101010), first[i], low[half]);
                high[half] = dot_four((four >> 4 & 0x0f0f0f0f) | (bits << 3 & 0x10101010), second[i], high[half]);
            }
        }
        return scale(head, u % 4, low[0] + low[1], high[0] + high[1], x, ux);
    }
};

struct LaneQ6_K : Codes<64, Strided> {
    static constexpr unsigned SIZE = 210;
    __device__ float dot(const unsigned* words, unsigned at, unsigned u, const Staged& x, unsigned ux) const {
        const unsigned block = at + u / 4 * SIZE, half = u / 2 % 2, side = u % 2;
        const Words<5, 2> ql[2] = {{words, block + half * 64 + side * 16}, {words, block + half * 64 + 32 + side * 16}};
        const Words<5, 2> qh(words, block + 128 + half * 32 + side * 16);
        const signed char* scales = (const signed char*)words + block + 192 + half * 8 + side;
        const float d = half_to_float(((const unsigned short*)words)[(block + 208) / 2]);
        const unsigned group = ux / 2 * 4;
        int sum[4];
        float by[4];
#pragma unroll
        for (unsigned q = 0; q < 4; q++) {
            const Group g = x.groups[group + q];
            sum[q] = -32 * g.sum(side);
            by[q] = g.scale;
        }
#pragma unroll
        for (unsigned q = 0; q < 4; q++) {
            const int4 c = x.codes[q * x.plane + ux];
            const int codes[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned low = ql[q % 2].at(4 * i), high = qh.at(4 * i);
                const unsigned l = q < 2 ? low & 0x0f0f0f0f : low >> 4 & 0x0f0f0f0f;
                const unsigned h = q == 0 ? high << 4 : q == 1 ? high << 2 : q == 2 ? high : high >> 2;
                sum[q] = dot_four(l | (h & 0x30303030), codes[i], sum[q]);
            }
        }
        float total = 0;
#pragma unroll
        for (unsigned q = 0; q < 4; q++) total += by[q] * (sum[q] * int(scales[2 * q]));
        return d * total;
    }
};

// Nibbles in the order of the file: codes of the first and of the second half alternate, and so do the activations.
struct LaneMXFP4 : Codes<32, Interleaved> {
    static constexpr unsigned SIZE = 17;
    // Twice the magnitudes. `threadIdx.y` is 0. It prevents the compiler from treating the values as constants, which it would move into
    // a register before each permutation.
    unsigned table[2];
    __device__ LaneMXFP4() : table{0x03020100 + threadIdx.y, 0x0c080604 + threadIdx.y} {}
    __device__ float dot(const unsigned* words, unsigned at, unsigned u, const Staged& x, unsigned ux) const {
        const Words<5, 1> raw(words, at + u * SIZE);
        const int4 a = x.codes[ux], b = x.codes[x.plane + ux];
        const int codes[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        int positive = 0, negative = 0;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            // The permutation yields 0 if bit 3, the sign, is set. So it is done once for each sign.
            const unsigned qs = raw.at(1 + 4 * i), flipped = qs ^ 0x88888888;
            positive = dot_four(permute(table[0], table[1], qs), codes[2 * i], positive);
            negative = dot_four(permute(table[0], table[1], flipped), codes[2 * i], negative);
            positive = dot_four(permute(table[0], table[1], qs >> 16), codes[2 * i + 1], positive);
            negative = dot_four(permute(table[0], table[1], flipped >> 16), codes[2 * i + 1], negative);
        }
        return x.groups[ux].scale * (MXFP4::scale(raw) * (positive - negative));
    }
};
