// The block formats of GGUF files. Products process a unit of 32 weights at a time, in two halves of 16.
//
// A format F has
//   BLOCK, SIZE          weights and bytes per block
//   SCALES               the groups of activations and the scales of a unit
//   OFFSET               subtracted from each code
//   MIN                  whether weight = scale * code - min
//   Raw, load(row, u)    the bytes of unit u of a row
//   first(u), STRIDE     index of the first weight of the unit in the row, and distance of its second half
//   decode(raw, u, unit) the 32 codes and the scales
#pragma once
#include "intrinsics.cuh"

// 32 decoded weights.
struct Unit {
    unsigned codes[8];  // bytes: the first half, then the second
    float scale[2];
    float min[2];
};

// The groups of activations that belong to the halves of a unit, and its scales.
enum class Scales {
    One,     // both halves belong to one group of 32
    Halves,  // the halves belong to two groups of 32
    Quarters // as Halves, and each group of 16 has its own scale
};

// `N` aligned words that contain the bytes at `p`, whose alignment is ALIGN. `at<B>` is the word that starts at byte B; B % 4
// plus the misalignment must be at most 4.
template <unsigned N, unsigned ALIGN>
struct Words {
    unsigned words[N];
    unsigned shift;

    __device__ explicit Words(const byte* p) {
        const size_t address = size_t(p);
        const unsigned* from = (const unsigned*)(address & ~size_t(3));
        shift = ALIGN < 4 ? (address & 3) * 8 : 0;
#pragma unroll
        for (unsigned i = 0; i < N; i++) words[i] = __ldg(from + i);
    }
    // The words that contain byte `from` of `memory` and the following bytes.
    __device__ Words(const unsigned* memory, unsigned from) : shift(ALIGN < 4 ? from % 4 * 8 : 0) {
#pragma unroll
        for (unsigned i = 0; i < N; i++) words[i] = memory[from / 4 + i];
    }
    __device__ Words() {}
    __device__ unsigned at(unsigned b) const {
        const unsigned i = b / 4;
        if (ALIGN >= 4 && b % 4 == 0) return words[i];
        return __funnelshift_rc(words[i], words[i + 1 < N ? i + 1 : i], b % 4 * 8 + shift);
    }
};

// Loads 16 bytes from an even address.
struct Sixteen {
    unsigned words[5];
    unsigned shift;
    __device__ explicit Sixteen(const byte* p) {
        const size_t address = size_t(p);
        const unsigned* from = (const unsigned*)(address & ~size_t(3));
        shift = (address & 3) * 8;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) words[i] = __ldg(from + i);
        // This word is only read if it is needed: it may be after the end.
        words[4] = shift ? __ldg(from + 4) : 0;
    }
    __device__ Sixteen() {}
    __device__ unsigned operator[](unsigned i) const { return __funnelshift_r(words[i], words[i + 1], shift); }
};

// Looks up each 4-bit code of `nibbles` in a table of sixteen bytes: first the low nibbles of all bytes, then the high nibbles.
__device__ inline void look_up(const unsigned (&table)[4], unsigned nibbles, unsigned& low, unsigned& high) {
    // A permutation uses three bits of each nibble; the fourth bit selects one of two permutations.
    const unsigned choose = 0x32103210 | (nibbles & 0x88888888) >> 1;
    const unsigned three = nibbles & 0x77777777;
    unsigned found[2];
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        const unsigned below = __byte_perm(table[0], table[1], three >> 16 * i);
        const unsigned above = __byte_perm(table[2], table[3], three >> 16 * i);
        found[i] = __byte_perm(below, above, choose >> 16 * i);
    }
    low = __byte_perm(found[0], found[1], 0x6420);
    high = __byte_perm(found[0], found[1], 0x7531);
}

// Formats with blocks of 32: a unit is a block.
struct Block32 {
    static constexpr unsigned BLOCK = 32, OFFSET = 0, STRIDE = 16;
    static constexpr Scales SCALES = Scales::One;
    static constexpr bool MIN = false;
    __device__ static unsigned first(unsigned u) { return 32 * u; }
};

struct Q4_0 : Block32 {
    static constexpr unsigned SIZE = 18, OFFSET = 8;
    using Raw = Words<5, 2>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0] >> raw.shift);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned qs = raw.at(2 + 4 * i);
            out.codes[i] = qs & 0x0f0f0f0f;
            out.codes[4 + i] = qs >> 4 & 0x0f0f0f0f;
        }
    }
};

struct Q4_1 : Block32 {
    static constexpr unsigned SIZE = 20;
    static constexpr bool MIN = true;
    using Raw = Words<5, 4>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0]);
        out.min[0] = -half_to_float(raw.words[0] >> 16);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            out.codes[i] = raw.words[1 + i] & 0x0f0f0f0f;
            out.codes[4 + i] = raw.words[1 + i] >> 4 & 0x0f0f0f0f;
        }
    }
};

// Moves the four low bits of `bits` to bit 4 of four bytes.
__device__ inline unsigned fifth_bits(unsigned bits) {
    return (bits << 4 & 0x10) | (bits << 11 & 0x1000) | (bits << 18 & 0x100000) | (bits << 25 & 0x10000000);
}

struct Q5_0 : Block32 {
    static constexpr unsigned SIZE = 22, OFFSET = 16;
    using Raw = Words<6, 2>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0] >> raw.shift);
        const unsigned qh = raw.at(2);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned qs = raw.at(6 + 4 * i);
            out.codes[i] = (qs & 0x0f0f0f0f) | fifth_bits(qh >> 4 * i);
            out.codes[4 + i] = (qs >> 4 & 0x0f0f0f0f) | fifth_bits(qh >> (16 + 4 * i));
        }
    }
};

struct Q5_1 : Block32 {
    static constexpr unsigned SIZE = 24;
    static constexpr bool MIN = true;
    using Raw = Words<6, 4>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0]);
        out.min[0] = -half_to_float(raw.words[0] >> 16);
        const unsigned qh = raw.words[1];
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned qs = raw.words[2 + i];
            out.codes[i] = (qs & 0x0f0f0f0f) | fifth_bits(qh >> 4 * i);
            out.codes[4 + i] = (qs >> 4 & 0x0f0f0f0f) | fifth_bits(qh >> (16 + 4 * i));
        }
    }
};

struct Q8_0 : Block32 {
    static constexpr unsigned SIZE = 34;
    using Raw = Words<9, 2>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0] >> raw.shift);
#pragma unroll
        for (unsigned i = 0; i < 8; i++) out.codes[i] = raw.at(2 + 4 * i);
    }
};

struct MXFP4 : Block32 {
    static constexpr unsigned SIZE = 17;
    using Raw = Words<5, 1>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    // Codes are twice the value, so the scale is half of 2^(e - 127). The two smallest scales are subnormal.
    __device__ static float scale(const Raw& raw) {
        const unsigned e = raw.words[0] >> raw.shift & 255;
        return __uint_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23);
    }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = scale(raw);
        const unsigned table[4] = {0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) look_up(table, raw.at(1 + 4 * i), out.codes[i], out.codes[4 + i]);
    }
};

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define IQ4_VALUES {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535}

struct IQ4_NL : Block32 {
    static constexpr unsigned SIZE = 18;
    using Raw = Words<5, 2>;
    __device__ static Raw load(const byte* row, unsigned u) { return Raw(row + u * SIZE); }
    __device__ static void decode(const Raw& raw, unsigned, Unit& out) {
        out.scale[0] = half_to_float(raw.words[0] >> raw.shift);
        const unsigned table[4] = IQ4_VALUES;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) look_up(table, raw.at(2 + 4 * i), out.codes[i], out.codes[4 + i]);
    }
};

struct IQ4_XS {
    static constexpr unsigned BLOCK = 256, SIZE = 136, OFFSET = 0, STRIDE = 16;
    static constexpr Scales SCALES = Scales::One;
    static constexpr bool MIN = false;
    struct Raw {
        uint2 head, qs[2];
    };
    __device__ static unsigned first(unsigned u) { return 32 * u; }
    __device__ static Raw load(const byte* row, unsigned u) {
        const uint2* block = (const uint2*)(row + size_t(u / 8) * SIZE);
        return {__ldg(block), {__ldg(block + 1 + 2 * (u % 8)), __ldg(block + 2 + 2 * (u % 8))}};
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        const unsigned g = u % 8;
        const unsigned low = raw.head.y >> 4 * g & 15, high = raw.head.x >> (16 + 2 * g) & 3;
        out.scale[0] = half_to_float(raw.head.x) * (int(low | high << 4) - 32);
        const unsigned table[4] = IQ4_VALUES;
        const unsigned qs[4] = {raw.qs[0].x, raw.qs[0].y, raw.qs[1].x, raw.qs[1].y};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) look_up(table, qs[i], out.codes[i], out.codes[4 + i]);
    }
};

// Scale (low byte) and minimum (second byte) of group g of Q4_K and Q5_K. The first two words contain the scales and the minima
// of four groups in the low six bits of each byte. The third word contains the low four bits of (scale, minimum) of the other
// four groups; their upper two bits are the upper two bits of the bytes in the first two words.
__device__ inline void scale_and_min(const uint4& head, unsigned g, unsigned& scale, unsigned& min) {
    const unsigned shift = g % 4 * 8;
    const unsigned first = head.y >> shift, second = head.z >> shift, third = head.w >> shift;
    scale = g < 4 ? first & 63 : (third & 15) | (first >> 2 & 0x30);
    min = g < 4 ? second & 63 : (third >> 4 & 15) | (second >> 2 & 0x30);
}

// The halves of a unit of Q4_K and Q5_K are the low and the high nibbles of the same sixteen bytes; they belong to consecutive
// groups.
struct FourBitK {
    static constexpr unsigned BLOCK = 256, OFFSET = 0, STRIDE = 32;
    static constexpr Scales SCALES = Scales::Halves;
    static constexpr bool MIN = true;
    __device__ static unsigned first(unsigned u) { return u / 2 * 64 + u % 2 * 16; }
    __device__ static void decode_scales(const uint4& head, unsigned u, Unit& out) {
        const float d = half_to_float(head.x), dmin = half_to_float(head.x >> 16);
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            unsigned scale, min;
            scale_and_min(head, u % 8 / 2 * 2 + half, scale, min);
            out.scale[half] = d * scale;
            out.min[half] = dmin * min;
        }
    }
};

struct Q4_K : FourBitK {
    static constexpr unsigned SIZE = 144;
    struct Raw {
        uint4 head, qs;
    };
    __device__ static Raw load(const byte* row, unsigned u) {
        const uint4* block = (const uint4*)(row + size_t(u / 8) * SIZE);
        return {__ldg(block), load_once(block + 1 + u % 8)};
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        decode_scales(raw.head, u, out);
        const unsigned qs[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            out.codes[i] = qs[i] & 0x0f0f0f0f;
            out.codes[4 + i] = qs[i] >> 4 & 0x0f0f0f0f;
        }
    }
};

struct Q5_K : FourBitK {
    static constexpr unsigned SIZE = 176;
    struct Raw {
        uint4 head, qh, qs;
    };
    __device__ static Raw load(const byte* row, unsigned u) {
        const uint4* block = (const uint4*)(row + size_t(u / 8) * SIZE);
        return {__ldg(block), __ldg(block + 1 + u % 2), load_once(block + 3 + u % 8)};
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        decode_scales(raw.head, u, out);
        const unsigned bit = u % 8 / 2 * 2;
        const unsigned qs[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
        const unsigned qh[4] = {raw.qh.x, raw.qh.y, raw.qh.z, raw.qh.w};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned fifth = qh[i] >> bit;
            out.codes[i] = (qs[i] & 0x0f0f0f0f) | (fifth << 4 & 0x10101010);
            out.codes[4 + i] = (qs[i] >> 4 & 0x0f0f0f0f) | (fifth << 3 & 0x10101010);
        }
    }
};

struct Q6_K {
    static constexpr unsigned BLOCK = 256, SIZE = 210, OFFSET = 32, STRIDE = 64;
    static constexpr Scales SCALES = Scales::Quarters;
    static constexpr bool MIN = false;
    // Each half of the super-block has 64 bytes with the low four bits; a unit uses 16 of them.
    struct Raw {
        Sixteen low, high;
        unsigned scales, d;
    };
    __device__ static unsigned first(unsigned u) { return u / 4 * 128 + u % 4 * 16; }
    __device__ static Raw load(const byte* row, unsigned u) {
        const byte* block = row + size_t(u / 8) * SIZE;
        const byte* scales = block + 192 + first(u % 8) / 16;
        Raw raw;
        raw.low = Sixteen(block + u % 8 * 16);
        raw.high = Sixteen(block + 128 + u % 8 / 4 * 32 + u % 2 * 16);
        raw.scales = __ldg(scales) | __ldg(scales + 4) << 8;
        raw.d = __ldg((const unsigned short*)(block + 208));
        return raw;
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        const float d = half_to_float(raw.d);
        out.scale[0] = d * (signed char)(raw.scales);
        out.scale[1] = d * (signed char)(raw.scales >> 8);
        // Two bits for each quarter of a half.
        const unsigned part = u % 4 / 2;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned low = raw.low[i], high = raw.high[i] >> 2 * part;
            out.codes[i] = (low & 0x0f0f0f0f) | (high << 4 & 0x30303030);
            out.codes[4 + i] = (low >> 4 & 0x0f0f0f0f) | (high & 0x30303030);
        }
    }
};

// Each half of a super-block of Q2_K and Q3_K has 32 bytes with 4 x 32 codes of two bits; a unit has 2 x 16 of them.
struct TwoBitK {
    static constexpr unsigned BLOCK = 256, STRIDE = 32;
    static constexpr Scales SCALES = Scales::Quarters;
    __device__ static unsigned first(unsigned u) { return u / 2 * 64 + u % 2 * 16; }
    // Offset of the bytes of a unit, and shift of its bits.
    __device__ static unsigned bytes(unsigned u) { return u % 8 / 4 * 32 + u % 2 * 16; }
    __device__ static unsigned shift(unsigned u) { return u % 4 / 2 * 4; }
};

struct Q2_K : TwoBitK {
    static constexpr unsigned SIZE = 84, OFFSET = 0;
    static constexpr bool MIN = true;
    struct Raw {
        unsigned qs[4], scales, d;
    };
    __device__ static Raw load(const byte* row, unsigned u) {
        const byte* block = row + size_t(u / 8) * SIZE;
        const unsigned* qs = (const unsigned*)(block + 16 + bytes(u));
        const byte* scales = block + first(u % 8) / 16;
        Raw raw;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) raw.qs[i] = __ldg(qs + i);
        raw.scales = __ldg(scales) | __ldg(scales + 2) << 8;
        raw.d = __ldg((const unsigned*)(block + 80));
        return raw;
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        const float d = half_to_float(raw.d), dmin = half_to_float(raw.d >> 16);
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            out.scale[half] = d * (raw.scales >> 8 * half & 15);
            out.min[half] = dmin * (raw.scales >> (8 * half + 4) & 15);
        }
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned qs = raw.qs[i] >> shift(u);
            out.codes[i] = qs & 0x03030303;
            out.codes[4 + i] = qs >> 2 & 0x03030303;
        }
    }
};

struct Q3_K : TwoBitK {
    static constexpr unsigned SIZE = 110, OFFSET = 4;
    static constexpr bool MIN = false;
    struct Raw {
        Sixteen low, high;
        unsigned scales, d;
    };
    __device__ static Raw load(const byte* row, unsigned u) {
        const byte* block = row + size_t(u / 8) * SIZE;
        Raw raw;
        raw.low = Sixteen(block + 32 + bytes(u));
        raw.high = Sixteen(block + u % 2 * 16);
        // For the sixteen scales, 8 bytes contain the low four bits, and 4 bytes the upper two bits.
        raw.scales = 0;
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const unsigned j = first(u % 8) / 16 + 2 * half;
            const unsigned low = __ldg(block + 96 + j % 8) >> j / 8 * 4 & 15;
            const unsigned high = __ldg(block + 104 + j % 4) >> j / 4 * 2 & 3;
            raw.scales |= (low | high << 4) << 8 * half;
        }
        raw.d = __ldg((const unsigned short*)(block + 108));
        return raw;
    }
    __device__ static void decode(const Raw& raw, unsigned u, Unit& out) {
        const float d = half_to_float(raw.d);
        out.scale[0] = d * (int(raw.scales & 255) - 32);
        out.scale[1] = d * (int(raw.scales >> 8) - 32);
        // Bit i of the high bytes belongs to codes 32 i ..+ 32.
        const unsigned part = u % 8 / 2 * 2;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            const unsigned low = raw.low[i] >> shift(u), high = raw.high[i] >> part;
            out.codes[i] = (low & 0x03030303) | (high << 2 & 0x04040404);
            out.codes[4 + i] = (low >> 2 & 0x03030303) | (high << 1 & 0x04040404);
        }
    }
};
