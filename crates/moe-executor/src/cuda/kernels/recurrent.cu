// Recurrent layers, all f32. The states of all sequences are in one buffer. A kernel updates those of its runs, which belong to different
// sequences.
#include "pipeline.cuh"

// Consecutive tokens of a sequence.
struct Run {
    unsigned sequence, first, n;
};

// Column of the kernels whose blocks are (row, some of its columns), and element of those with one thread per element.
__device__ inline unsigned column() { return blockIdx.y * blockDim.x + threadIdx.x; }
__device__ inline size_t element() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// Tokens per block of `convolution`, and the longest kernel that it keeps in registers.
enum : unsigned { TOKENS = 16, WINDOW = 4 };

// out[t] = Σ kernel[i] · input[t + i] + bias for each channel, where the input consists of the state and x; with `silu`, then multiplied by
// its sigmoid. Block: (run and part of its tokens, channels). kernel: (n, channels), x: (token, channels); `bias` may be null. The states
// (n - 1, channels) of two sequences are `state_stride` elements apart, the rows of `out` `row` elements.
KERNEL convolution(
    const float* x, const float* __restrict__ kernel, const float* __restrict__ bias, unsigned channels, unsigned n, bool silu, const Run* runs,
    unsigned parts, float* states, unsigned state_stride, float* __restrict__ out, unsigned row, Start start
) {
    follow_previous(start);
    const unsigned channel = column(), part = blockIdx.x % parts, n_past = n - 1;
    if (channel >= channels) return;
    const Run run = runs[blockIdx.x / parts];
    float* state = states + size_t(run.sequence) * state_stride + channel;
    x += size_t(run.first) * channels + channel;
    out += size_t(run.first) * row + channel;
    kernel += channel;
    const auto input = [&](unsigned i) { return i < n_past ? state[size_t(i) * channels] : x[size_t(i - n_past) * channels]; };
    const float added = bias ? bias[channel] : 0.0f;
    const auto store = [&](unsigned t, float sum) {
        sum += added;
        out[size_t(t) * row] = silu ? sum / (1.0f + expf(-sum)) : sum;
    };
    // The first block of a run has all tokens that read the state, and updates it.
    const unsigned from = part ? max(part * TOKENS, n_past) : 0;
    const unsigned to = min(run.n, part ? (part + 1) * TOKENS : max(unsigned(TOKENS), n_past));
    if (from >= to) return;
    if (n <= WINDOW) {
        // The kernel ends with the last element. Elements before a shorter one are 0.
        float weights[WINDOW], window[WINDOW];
        const unsigned missing = WINDOW - n;
#pragma unroll
        for (unsigned i = 0; i < WINDOW; i++) {
            weights[i] = i < missing ? 0.0f : kernel[size_t(i - missing) * channels];
            window[i] = i <= missing ? 0.0f : input(from + i - missing - 1);
        }
#pragma unroll 4
        for (unsigned t = from; t < to; t++) {
            float sum = 0.0f;
#pragma unroll
            for (unsigned i = 0; i < WINDOW; i++) {
                window[i] = i + 1 < WINDOW ? window[i + 1] : x[size_t(t) * channels];
                sum += weights[i] * window[i];
            }
            store(t, sum);
        }
    } else {
        for (unsigned t = from; t < to; t++) {
            float sum = 0.0f;
            for (unsigned i = 0; i < n; i++) sum += kernel[size_t(i) * channels] * input(t + i);
            store(t, sum);
        }
    }
    if (part > 0) return;
    for (unsigned i = 0; i < n_past; i++) state[size_t(i) * channels] = input(run.n + i);
}

// Lanes that share rows of a state, groups of four elements of a row per lane, rows, and the longest row.
enum : unsigned { LANES = 16, FOURS = 2, ROWS = 2, MAX_ROW = 4 * LANES * FOURS };

// The elements of a row that a lane has: four of each 4 · LANES. Elements after the end of the row are 0. The width of a row is a multiple
// of 4.
struct Part {
    float4 fours[FOURS];

    __device__ static unsigned first(unsigned i) { return (i * LANES + threadIdx.x % LANES) * 4; }
    __device__ void load(const float* row, unsigned width) {
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) fours[i] = first(i) < width ? *(const float4*)(row + first(i)) : float4{};
    }
    __device__ void store(float* row, unsigned width) const {
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) {
            if (first(i) < width) *(float4*)(row + first(i)) = fours[i];
        }
    }
    // The product of both rows, returned in each of their lanes.
    __device__ float dot(const Part& other) const {
        float sum = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) {
            const float4 a = fours[i], b = other.fours[i];
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
#pragma unroll
        for (unsigned step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        return sum;
    }
    // this = this · a + x · b
    __device__ void update(float a, float x, const Part& b) {
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) {
            float4& s = fours[i];
            const float4 o = b.fours[i];
            s = {s.x * a + x * o.x, s.y * a + x * o.y, s.z * a + x * o.z, s.w * a + x * o.w};
        }
    }
};

// Rows of a state of a head that the lanes of a thread have, or none after the last row. Blocks of all heads follow each other. The number
// of rows is a multiple of ROWS.
struct State {
    Part rows[ROWS];
    unsigned head, row, width;
    float* at;
    // Index of the first of its rows in those of all heads.
    size_t index;

    // `states`: those of a sequence (head, n_rows, n).
    __device__ State(float* states, unsigned n_rows, unsigned n) {
        const unsigned of_block = blockDim.x / LANES * ROWS, blocks = (n_rows + of_block - 1) / of_block;
        head = blockIdx.x / blocks;
        row = blockIdx.x % blocks * of_block + threadIdx.x / LANES * ROWS;
        width = row < n_rows ? n : 0;
        row = min(row, n_rows - ROWS);
        index = size_t(head) * n_rows + row;
        at = states + index * n;
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) rows[i].load(at + i * n, width);
    }
    __device__ void store() const {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) rows[i].store(at + i * width, width);
    }
    // Whether this thread stores the results of the rows.
    __device__ bool is_first() const { return width > 0 && threadIdx.x % LANES == 0; }
};

// Logarithm of the decay of a head.
struct HeadDecay {
    float g;

    // Values of a head of `width` elements.
    __device__ static unsigned size(unsigned) { return 1; }
    __device__ void load(const float* from, unsigned) { g = *from; }
    // Returns a factor on the rows, which the caller applies.
    __device__ float apply(Part (&)[ROWS]) const { return expf(g); }
};

// Logarithms of the decays of the elements of a key.
struct KeyDecay {
    Part g;

    __device__ static unsigned size(unsigned width) { return width; }
    __device__ void load(const float* from, unsigned width) { g.load(from, width); }
    // Decays the rows. No factor remains.
    __device__ float apply(Part (&rows)[ROWS]) const {
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) {
            const float4 x = g.fours[i], kept = {expf(x.x), expf(x.y), expf(x.z), expf(x.w)};
#pragma unroll
            for (unsigned row = 0; row < ROWS; row++) {
                float4& s = rows[row].fours[i];
                s = {s.x * kept.x, s.y * kept.y, s.z * kept.z, s.w * kept.w};
            }
        }
        return 1.0f;
    }
};

// What `delta_rule` reads of a token.
template <class Decay>
struct DeltaToken {
    Part q, k;
    Decay decay;
    float v[ROWS], beta;
};

// The gated delta rule of cpu/delta_net.rs, with the norms of queries and keys. Block: (head and some of its values, run).
//
// With the decayed state S, the result (S + δ kᵀ) q is S q + δ (k · q), so all products of a token are of the state before it.
template <class Decay>
__device__ inline void delta_rule(
    const float* qkv, const float* decay, const float* beta, unsigned n_k, unsigned n_v, unsigned width, bool in_turn, float eps, const Run* runs,
    float* states, float* out, Start start
) {
    follow_previous(start);
    const Run run = runs[blockIdx.y];
    State state(states + size_t(run.sequence) * n_v * width * width, width, width);
    const unsigned key = in_turn ? state.head % n_k : state.head / (n_v / n_k), stride = (2 * n_k + n_v) * width;
    const size_t first = run.first;
    const float* k = qkv + first * stride + (n_k + key) * width;
    const float* v = qkv + first * stride + 2 * n_k * width + state.index;
    const unsigned n_decay = Decay::size(width);
    decay += (first * n_v + state.head) * n_decay;
    beta += first * n_v + state.head;
    out += first * n_v * width + state.index;
    const auto read = [&] {
        DeltaToken<Decay> it;
        it.q.load(k - n_k * width, width);
        it.k.load(k, width);
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) it.v[i] = v[i];
        it.decay.load(decay, width);
        it.beta = *beta;
        k += stride, v += stride, decay += n_v * n_decay, beta += n_v;
        return it;
    };
    DeltaToken<Decay> next = read();
    const float scale = rsqrtf(float(width));
    for (unsigned t = 0; t < run.n; t++, out += n_v * width) {
        const DeltaToken<Decay> it = next;
        if (t + 1 < run.n) next = read();
        const float of_k = rsqrtf(it.k.dot(it.k) + eps), of_q = scale * rsqrtf(it.q.dot(it.q) + eps), overlap = it.k.dot(it.q);
        const float kept = it.decay.apply(state.rows);
        float results[ROWS];
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            const float known = state.rows[i].dot(it.k), found = state.rows[i].dot(it.q);
            const float change = (it.v[i] - kept * known * of_k) * it.beta * of_k;
            state.rows[i].update(kept, change, it.k);
            results[i] = (kept * found + change * overlap) * of_q;
        }
        if (!state.is_first()) continue;
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) out[i] = results[i];
    }
    state.store();
}

// decay: (token, n_v)
KERNEL delta_net(
    const float* qkv, const float* decay, const float* beta, unsigned n_k, unsigned n_v, unsigned width, bool in_turn, float eps, const Run* runs,
    float* states, float* out, Start start
) {
    delta_rule<HeadDecay>(qkv, decay, beta, n_k, n_v, width, in_turn, eps, runs, states, out, start);
}

// decay: (token, n_v, width)
KERNEL delta_net_by_element(
    const float* qkv, const float* decay, const float* beta, unsigned n_k, unsigned n_v, unsigned width, bool in_turn, float eps, const Run* runs,
    float* states, float* out, Start start
) {
    delta_rule<KeyDecay>(qkv, decay, beta, n_k, n_v, width, in_turn, eps, runs, states, out, start);
}

// ln(1 + exp(x)), as in ggml.
__device__ inline float softplus(float x) { return x > 20.0f ? x : logf(1.0f + expf(x)); }

// What `ssm_scan` reads of a token.
struct ScanToken {
    Part b, c;
    float x[ROWS], dt;
};

// The scan of cpu/state_space.rs. Block: (head and some of its elements, run).
KERNEL ssm_scan(
    const float* xbc, const float* dt, const float* __restrict__ a, unsigned n_head, unsigned dim, unsigned n_group, unsigned n_state,
    const Run* runs, float* states, float* out, Start start
) {
    follow_previous(start);
    const Run run = runs[blockIdx.y];
    const unsigned width = n_head * dim, channels = width + 2 * n_group * n_state;
    State state(states + size_t(run.sequence) * width * n_state, dim, n_state);
    const float decay = a[state.head];
    const size_t first = run.first;
    const float* x = xbc + first * channels + state.index;
    const float* b = xbc + first * channels + width + state.head / (n_head / n_group) * n_state;
    dt += first * n_head + state.head;
    out += first * width + state.index;
    const auto read = [&] {
        ScanToken it;
        it.b.load(b, n_state);
        it.c.load(b + n_group * n_state, n_state);
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) it.x[i] = x[i];
        it.dt = *dt;
        x += channels, b += channels, dt += n_head;
        return it;
    };
    ScanToken next = read();
    for (unsigned t = 0; t < run.n; t++, out += width) {
        const ScanToken it = next;
        if (t + 1 < run.n) next = read();
        const float step = softplus(it.dt), kept = expf(step * decay), overlap = it.b.dot(it.c);
        float results[ROWS];
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            const float added = it.x[i] * step;
            results[i] = kept * state.rows[i].dot(it.c) + added * overlap;
            state.rows[i].update(kept, added, it.b);
        }
        if (!state.is_first()) continue;
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) out[i] = results[i];
    }
    state.store();
}

// x = softplus(x + bias) · factors, x: (rows, width)
KERNEL decay(float* x, const float* __restrict__ bias, const float* __restrict__ factors, unsigned width, size_t n, Start start) {
    follow_previous(start);
    const size_t i = element();
    if (i < n) x[i] = softplus(x[i] + bias[i % width]) * factors[i % width];
}

// y += x · factors[head]: y (token, head, dim); x is the start of each row of `channels` elements. Block: (token, some elements).
KERNEL add_scaled_heads(float* y, const float* x, const float* __restrict__ factors, unsigned width, unsigned dim, unsigned channels, Start start) {
    follow_previous(start);
    const unsigned i = column();
    if (i < width) y[size_t(blockIdx.x) * width + i] += x[size_t(blockIdx.x) * channels + i] * factors[i / dim];
}

// x += bias for rows of `width` elements.
KERNEL add_bias(float* x, const float* __restrict__ bias, unsigned width, size_t n, Start start) {
    follow_previous(start);
    const size_t i = element();
    if (i < n) x[i] += bias[i % width];
}

// out = a · b for rows of `width` elements, `row_of_a` and `row_of_b` elements apart. `out` may be an operand whose rows have no gaps.
KERNEL multiply_columns(const float* a, unsigned row_of_a, const float* b, unsigned row_of_b, unsigned width, float* out, Start start) {
    follow_previous(start);
    const unsigned i = column();
    const size_t row = blockIdx.x;
    if (i < width) out[row * width + i] = a[row * row_of_a + i] * b[row * row_of_b + i];
}

// Copies up to three ranges of the columns of each group of columns to `out`, `width` columns: those of all groups, one range after the other.
KERNEL copy_groups(
    const float* x, unsigned row, unsigned group, unsigned start_0, unsigned n_0, unsigned start_1, unsigned n_1, unsigned start_2, unsigned n_2,
    unsigned width, float* out, Start start
) {
    follow_previous(start);
    const unsigned to = column(), groups = row / group;
    if (to >= width) return;
    unsigned at = to, from = start_0, n = n_0;
    if (at >= groups * n) {
        at -= groups * n;
        from = start_1, n = n_1;
        if (at >= groups * n) {
            at -= groups * n;
            from = start_2, n = n_2;
        }
    }
    out[size_t(blockIdx.x) * width + to] = x[size_t(blockIdx.x) * row + at / n * group + from + at % n];
}
