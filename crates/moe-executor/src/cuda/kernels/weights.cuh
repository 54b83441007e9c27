// Products of weights and activations, a unit at a time. Quantized weights are multiplied with quantized activations in integer
// arithmetic, floating-point weights with activations that are rounded to the same type, like in ggml.
//
// A type of weights W has
//   UNIT               weights per unit
//   Raw, load          a unit in the format of the file
//   Source, Input      a row of activations, and a unit of it in registers
//   input, dot         loads a unit of activations; multiplies it with a decoded unit of weights
#pragma once
#include "activations.cuh"
#include "formats.cuh"

template <class F>
struct Quantized {
    using Format = F;
    static constexpr bool QUANTIZED = true;
    static constexpr unsigned UNIT = 32;
    using Raw = typename F::Raw;

    struct Source {
        const int4* codes;
        const Group* groups;
    };

    struct Input {
        int codes[8];
        float scale[2];
        int sum[2];
    };

    __device__ static Raw load(const byte* row, unsigned u, unsigned) { return F::load(row, u); }

    __device__ static Source source(const float*, const Activations& quantized, size_t row) {
        return {quantized.codes_of(row), quantized.groups_of(row)};
    }

    __device__ static Input input(const Source& source, unsigned u, unsigned) {
        const unsigned a = F::first(u), b = a + F::STRIDE;
        const int4 first = source.codes[a / 16], second = source.codes[b / 16];
        const Group group = source.groups[a / 32];
        Input in = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}, {}, {}};
        in.scale[0] = group.scale;
        in.sum[0] = group.sum(a / 16 % 2);
        if (F::SCALES == Scales::One) {
            in.sum[1] = group.sum(1);
        } else {
            const Group other = source.groups[b / 32];
            in.scale[1] = other.scale;
            in.sum[1] = other.sum(b / 16 % 2);
        }
        return in;
    }

    using Decoded = Unit;
    __device__ static void decode(const Raw& raw, unsigned u, Unit& unit) { F::decode(raw, u, unit); }

    __device__ static float dot(const Unit& unit, const Input& in) {
        int sum[2];
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            sum[half] = -int(F::OFFSET) * in.sum[half];
#pragma unroll
            for (unsigned i = 4 * half; i < 4 * half + 4; i++) sum[half] = __dp4a(int(unit.codes[i]), in.codes[i], sum[half]);
        }
        if (F::SCALES == Scales::One) {
            float product = unit.scale[0] * (sum[0] + sum[1]);
            if (F::MIN) product -= unit.min[0] * (in.sum[0] + in.sum[1]);
            return in.scale[0] * product;
        }
        float total = 0;
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float product = unit.scale[half] * sum[half];
            if (F::MIN) product -= unit.min[half] * in.sum[half];
            total += in.scale[half] * product;
        }
        return total;
    }
};

// Floating-point elements: size in bytes, conversion to f32, conversion from f32, and rounding.
struct Half {
    static constexpr unsigned SIZE = 2;
    __device__ static float value(unsigned bits) { return half_to_float(bits); }
    __device__ static unsigned bits(float x) { return half_of(x); }
    __device__ static float round(float x) { return round_to_half(x); }
};

struct Brain {
    static constexpr unsigned SIZE = 2;
    __device__ static float value(unsigned bits) { return __uint_as_float(bits << 16); }
    __device__ static unsigned bits(float x) {
        const unsigned bits = __float_as_uint(x);
        return (x != x ? bits | 0x00400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    __device__ static float round(float x) { return value(bits(x)); }
};

struct Single {
    static constexpr unsigned SIZE = 4;
    __device__ static float value(unsigned bits) { return __uint_as_float(bits); }
    __device__ static float round(float x) { return x; }
};

template <class E>
struct Floating {
    using Element = E;
    static constexpr bool QUANTIZED = false;
    static constexpr unsigned UNIT = 8;

    struct Raw {
        unsigned words[2 * E::SIZE];
    };
    struct Source {
        const float* x;
    };
    struct Input {
        float x[8];
    };

    // Bits of element i of a row with any alignment.
    __device__ static unsigned element(const byte* row, unsigned i) {
        return E::SIZE == 2 ? __ldg((const unsigned short*)row + i) : __ldg((const unsigned*)row + i);
    }

    __device__ static Raw load(const byte* row, unsigned u, unsigned n_in) {
        Raw raw;
        if (n_in % 8 == 0) {
#pragma unroll
            for (unsigned i = 0; i < E::SIZE / 2; i++) {
                const uint4 v = load_once(row + size_t(u * 8 * E::SIZE) + 16 * i);
                raw.words[4 * i] = v.x;
                raw.words[4 * i + 1] = v.y;
                raw.words[4 * i + 2] = v.z;
                raw.words[4 * i + 3] = v.w;
            }
            return raw;
        }
#pragma unroll
        for (unsigned i = 0; i < 2 * E::SIZE; i++) {
            const unsigned per_word = 4 / E::SIZE;
            raw.words[i] = 0;
#pragma unroll
            for (unsigned j = 0; j < per_word; j++) {
                const unsigned at = 8 * u + i * per_word + j;
                if (at < n_in) raw.words[i] |= element(row, at) << 16 * j;
            }
        }
        return raw;
    }

    __device__ static Source source(const float* x, const Activations& at, size_t row) { return {x + row * at.n_in}; }

    __device__ static Input input(const Source& source, unsigned u, unsigned n_in) {
        Input in;
#pragma unroll
        for (unsigned i = 0; i < 8; i += 4) {
            float4 x = {};
            const unsigned at = 8 * u + i;
            if (n_in % 8 == 0) {
                x = *(const float4*)(source.x + at);
            } else {
                if (at < n_in) x.x = source.x[at];
                if (at + 1 < n_in) x.y = source.x[at + 1];
                if (at + 2 < n_in) x.z = source.x[at + 2];
                if (at + 3 < n_in) x.w = source.x[at + 3];
            }
            in.x[i] = E::round(x.x);
            in.x[i + 1] = E::round(x.y);
            in.x[i + 2] = E::round(x.z);
            in.x[i + 3] = E::round(x.w);
        }
        return in;
    }

    struct Decoded {
        float w[8];
    };
    __device__ static void decode(const Raw& raw, unsigned, Decoded& out) {
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const unsigned word = raw.words[i * E::SIZE / 4];
            out.w[i] = E::value(E::SIZE == 4 ? word : word >> i % 2 * 16 & 0xffff);
        }
    }

    __device__ static float dot(const Decoded& weights, const Input& in) {
        float sum = 0;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) sum = fmaf(weights.w[i], in.x[i], sum);
        return sum;
    }
};

using F16 = Floating<Half>;
using BF16 = Floating<Brain>;
using F32 = Floating<Single>;
