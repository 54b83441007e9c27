/*
 * TensorAccessLog: a record of an operation of a model's graph, or of a token in an expert operation; 1024 bytes.
 *
 * A trace.bin consists of these records, little-endian and packed. A record whose timestamp_ns is 0 ends it. Bytes 0 to
 * 856 have the published layout v4 (https://github.com/ErsjanKeri/BSC). Readers of v4 ignore the following bytes, which
 * contain the extension described here if ext_version is 1. The header compiles as C11 and C++17.
 */
#ifndef TENSOR_ACCESS_LOG_H
#define TENSOR_ACCESS_LOG_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the records are little-endian: swap the bytes of each field after reading it on this machine"
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TENSOR_LOG_NAME_SIZE   = 128,
    TENSOR_LOG_MAX_SOURCES = 4,
    TENSOR_LOG_MAX_EXPERTS = 16,
};

#define TENSOR_LOG_NO_LAYER  UINT16_MAX /* layer_id: belongs to no layer */
#define TENSOR_LOG_NO_TENSOR UINT32_MAX /* tensor_idx: not a tensor of the model's files */

enum tensor_log_phase {
    TENSOR_LOG_PHASE_PROMPT   = 0,
    TENSOR_LOG_PHASE_GENERATE = 1,
};

enum tensor_log_memory_source {
    TENSOR_LOG_SOURCE_DISK   = 0, /* a tensor of the model's files */
    TENSOR_LOG_SOURCE_BUFFER = 1, /* a buffer that was allocated at run time */
};

enum tensor_log_flags {
    TENSOR_LOG_FLAG_CONTINUATION    = 1, /* contains further experts of the token in the preceding record */
    TENSOR_LOG_FLAG_CPU_FALLBACK    = 2, /* was assigned to the GPU and fell back to the CPU */
    TENSOR_LOG_FLAG_SOURCES_OMITTED = 4, /* has more than four sources; the record has the first four */
};

enum tensor_log_lane {
    TENSOR_LOG_LANE_UNKNOWN         = 0,
    TENSOR_LOG_LANE_CPU             = 1,
    TENSOR_LOG_LANE_GPU_RESIDENT    = 2,
    TENSOR_LOG_LANE_HOT_CACHE       = 3,
    TENSOR_LOG_LANE_POST_FETCHED    = 4,
    TENSOR_LOG_LANE_POST_FETCH_MISS = 5, /* ran on the CPU because the copy was not complete in time */
    TENSOR_LOG_LANE_CACHE_HIT       = 6,
    TENSOR_LOG_LANE_CACHE_MISS      = 7,
};

#pragma pack(push, 1)

struct tensor_source_log {
    char     name[TENSOR_LOG_NAME_SIZE]; /* terminated by a NUL */
    uint64_t tensor_ptr;                 /* address during the recording */
    uint32_t size_bytes;                 /* low 32 bits; the high bits are in size_bytes_high */
    uint16_t layer_id;
    uint8_t  memory_source;
    uint8_t  pad;
    uint64_t offset_or_buffer_id;        /* DISK: offset in its file in bytes; BUFFER: id of the buffer */
    uint32_t tensor_idx;                 /* index in the GGUF's tensor table */
    uint8_t  pad2[4];
};

struct tensor_access_log {
    uint64_t timestamp_ns;               /* start, monotonic; equal in all records of an operation */
    uint32_t token_id;                   /* position in its sequence; of the first token of a batch, like phase and sequence_id */
    uint16_t layer_id;
    uint16_t thread_id;
    uint8_t  operation_type;             /* number of the ggml operation; names are in "ops" of the manifest */
    uint8_t  phase;
    uint8_t  num_sources;                /* 0 to 4 */
    uint8_t  pad[5];
    char     dst_name[TENSOR_LOG_NAME_SIZE];
    struct tensor_source_log sources[TENSOR_LOG_MAX_SOURCES];
    int32_t  expert_ids[TENSOR_LOG_MAX_EXPERTS]; /* best first */
    uint8_t  num_experts;                /* 0 to 16 */
    uint8_t  ext_version;                /* 0: the following fields are undefined (v4) */
    uint8_t  flags;
    uint8_t  expert_slot_base;           /* rank of expert_ids[0] in the token's top-k */
    uint64_t duration_ns;                /* of the operation; 0 if unknown */
    uint32_t n_tokens;                   /* of the operation's batch */
    uint32_t sequence_id;
    uint32_t size_bytes_high[TENSOR_LOG_MAX_SOURCES];
    float    expert_weights[TENSOR_LOG_MAX_EXPERTS]; /* router weight as applied */
    uint8_t  expert_lane[TENSOR_LOG_MAX_EXPERTS];    /* enum tensor_log_lane */
    uint16_t source_file[TENSOR_LOG_MAX_SOURCES];    /* index of the file (GGUF shard), from 0 */
    uint8_t  reserved[44];
};

#pragma pack(pop)

#define TENSOR_LOG_AT(type, field, offset) \
    static_assert(offsetof(struct type, field) == (offset), #type "." #field " is at " #offset)

static_assert(sizeof(struct tensor_source_log) == 160, "a source has 160 bytes");
TENSOR_LOG_AT(tensor_source_log, name, 0);
TENSOR_LOG_AT(tensor_source_log, tensor_ptr, 128);
TENSOR_LOG_AT(tensor_source_log, size_bytes, 136);
TENSOR_LOG_AT(tensor_source_log, layer_id, 140);
TENSOR_LOG_AT(tensor_source_log, memory_source, 142);
TENSOR_LOG_AT(tensor_source_log, pad, 143);
TENSOR_LOG_AT(tensor_source_log, offset_or_buffer_id, 144);
TENSOR_LOG_AT(tensor_source_log, tensor_idx, 152);
TENSOR_LOG_AT(tensor_source_log, pad2, 156);

static_assert(sizeof(struct tensor_access_log) == 1024, "a record has 1024 bytes");
TENSOR_LOG_AT(tensor_access_log, timestamp_ns, 0);
TENSOR_LOG_AT(tensor_access_log, token_id, 8);
TENSOR_LOG_AT(tensor_access_log, layer_id, 12);
TENSOR_LOG_AT(tensor_access_log, thread_id, 14);
TENSOR_LOG_AT(tensor_access_log, operation_type, 16);
TENSOR_LOG_AT(tensor_access_log, phase, 17);
TENSOR_LOG_AT(tensor_access_log, num_sources, 18);
TENSOR_LOG_AT(tensor_access_log, pad, 19);
TENSOR_LOG_AT(tensor_access_log, dst_name, 24);
TENSOR_LOG_AT(tensor_access_log, sources, 152);
TENSOR_LOG_AT(tensor_access_log, expert_ids, 792);
TENSOR_LOG_AT(tensor_access_log, num_experts, 856);
TENSOR_LOG_AT(tensor_access_log, ext_version, 857);
TENSOR_LOG_AT(tensor_access_log, flags, 858);
TENSOR_LOG_AT(tensor_access_log, expert_slot_base, 859);
TENSOR_LOG_AT(tensor_access_log, duration_ns, 860);
TENSOR_LOG_AT(tensor_access_log, n_tokens, 868);
TENSOR_LOG_AT(tensor_access_log, sequence_id, 872);
TENSOR_LOG_AT(tensor_access_log, size_bytes_high, 876);
TENSOR_LOG_AT(tensor_access_log, expert_weights, 892);
TENSOR_LOG_AT(tensor_access_log, expert_lane, 956);
TENSOR_LOG_AT(tensor_access_log, source_file, 972);
TENSOR_LOG_AT(tensor_access_log, reserved, 980);

#undef TENSOR_LOG_AT

#ifdef __cplusplus
}
#endif

#endif /* TENSOR_ACCESS_LOG_H */
