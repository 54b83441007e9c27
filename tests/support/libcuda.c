/* A replacement for the CUDA driver: GPUs that compute nothing. The environment variable STAND_IN_GPUS is their number; the default is 1.

   Streams, copies, events and waits behave like on a GPU. A launch takes 3 us and a kernel 20 us, a copy takes 5 us, and the CPU
   continues meanwhile. The GPU's clock is 20 ppm fast, that of the second GPU 50 ppm slow, with a resolution of half a microsecond.
   A kernel stores its start, with a resolution of 32 ns. A kernel that selects experts selects the first ones, or with the environment variable STAND_IN_EXPERTS, other ones of this number
   at each launch. Another one finds their slots. Other kernels write nothing. Work for a stream is rejected while another
   GPU is the current one.

   With the environment variable STAND_IN_LOAD, kernels take 300 us, and a call that records an event on an idle stream waits 1.5 ms
   before it records the event, as if the thread had been preempted.

   The environment variable STAND_IN_FAILS contains the step that fails:

   old         the driver supports only CUDA 11.8
   open        another process uses the GPU
   capability  the GPU's compute capability is 7.0
   stream      the second stream cannot be created
   memory      opening succeeds, but every allocation of memory fails
   copy        every H2D copy fails
   wait        no stream can wait for a value
   weights     every H2D copy of at least 64 KiB that are not all zero fails
   search      the first such copy after a kernel has found slots fails
   kernel      every launch fails
   graph       no graph can be created
   lost        after 1500 launches, every launch, copy, allocation and wait fails */

#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, DEVICE_UNAVAILABLE = 46, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_READY = 600, LAUNCH_FAILED = 719
};
/* Nanoseconds. */
enum { START = 3000, KERNEL = 20000, LONG_KERNEL = 300000, COPY = 5000, RESOLUTION = 512, START_RESOLUTION = 32, PREEMPTED = 1500000 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MEMORY_POOLS = 115 };

static int fails_at(const char *step) {
    const char *at = getenv("STAND_IN_FAILS");
    return at && strcmp(at, step) == 0;
}

static unsigned n_launches;
static int is_lost(void) { return n_launches > 1500 && fails_at("lost"); }

static int is_loaded(void) { return getenv("STAND_IN_LOAD") != NULL; }

/* Handles that are never dereferenced. */
static int handle;

static int give(void **out) {
    *out = &handle;
    return SUCCESS;
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = fails_at("old") ? 11080 : 12040; return SUCCESS; }

enum { MOST_GPUS = 4 };
struct context { double rate; };
static struct context contexts[MOST_GPUS] = {{1.00002}, {0.99995}, {1.0}, {1.00001}};
static _Thread_local struct context *current;

static int gpus(void) {
    const char *n = getenv("STAND_IN_GPUS");
    return n && *n ? atoi(n) : 1;
}

int cuDeviceGetCount(int *count) { *count = gpus(); return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < gpus() && ordinal < MOST_GPUS ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, "Stand-in", length);
    return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case CAPABILITY_MAJOR: *value = fails_at("capability") ? 7 : 8; break;
    case CAPABILITY_MINOR: case MEMORY_POOLS: *value = 0; break;
    default: *value = 1;
    }
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    *context = &contexts[device];
    return fails_at("open") ? DEVICE_UNAVAILABLE : SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetCurrent(struct context **context) { *context = current; return SUCCESS; }
int cuCtxSetCurrent(struct context *context) { current = context; return SUCCESS; }

/* A stream: end time of its work. An event: time at which its stream reaches it. Both on the CPU's clock. */
struct stream { struct context *context; uint64_t end; };
struct event { struct context *context; uint64_t at; };

static uint64_t last_end;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static int wait_until(uint64_t end) {
    if (is_lost()) return LAUNCH_FAILED;
    while (now() < end) {}
    return SUCCESS;
}

/* Adds work to a stream. */
static int work(struct stream *stream, uint64_t ns) {
    if (is_lost()) return LAUNCH_FAILED;
    if (stream->context != current) return INVALID_CONTEXT;
    stream->end = later(stream->end, now() + START) + ns;
    last_end = later(last_end, stream->end);
    return SUCCESS;
}

static int create(void **out, size_t bytes) {
    *out = calloc(1, bytes);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

static int allocate(void **out, size_t bytes) {
    if (is_lost()) return LAUNCH_FAILED;
    return fails_at("memory") ? OUT_OF_MEMORY : create(out, bytes);
}

int cuCtxSynchronize(void) { return wait_until(last_end); }

int cuStreamCreate(struct stream **stream, unsigned flags) {
    static int streams;
    int created = fails_at("stream") && streams++ > 0 ? OUT_OF_MEMORY : create((void **)stream, sizeof **stream);
    if (created == SUCCESS) (*stream)->context = current;
    return created;
}
int cuStreamDestroy_v2(struct stream *stream) { free(stream); return SUCCESS; }
int cuStreamSynchronize(struct stream *stream) { return wait_until(stream->end); }
int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    if (stream->context != current) return INVALID_CONTEXT;
    stream->end = later(stream->end, event->at);
    return SUCCESS;
}
int cuStreamQuery(struct stream *stream) { return now() < stream->end ? NOT_READY : SUCCESS; }
/* A stream does not wait: its kernels compute nothing. */
int cuStreamWaitValue32_v2(struct stream *stream, uint32_t *address, uint32_t value, unsigned flags) {
    return fails_at("wait") ? INVALID_VALUE : SUCCESS;
}
int cuStreamWriteValue32_v2(struct stream *stream, uint32_t *address, uint32_t value, unsigned flags) {
    *address = value;
    return SUCCESS;
}

int cuEventCreate(struct event **event, unsigned flags) {
    int created = create((void **)event, sizeof **event);
    if (created == SUCCESS) (*event)->context = current;
    return created;
}
int cuEventDestroy_v2(struct event *event) { free(event); return SUCCESS; }
int cuEventRecord(struct event *event, struct stream *stream) {
    if (event->context != stream->context) return INVALID_HANDLE;
    if (stream->context != current) return INVALID_CONTEXT;
    if (is_loaded() && stream->end < now()) wait_until(now() + PREEMPTED);
    event->at = later(stream->end, now() + START);
    return SUCCESS;
}
int cuEventQuery(struct event *event) { return now() < event->at ? NOT_READY : SUCCESS; }
int cuEventSynchronize(struct event *event) { return wait_until(event->at); }
int cuEventElapsedTime(float *ms, struct event *from, struct event *to) {
    if (from->context != to->context) return INVALID_HANDLE;
    int64_t ns = (int64_t)((double)(int64_t)(to->at - from->at) * from->context->rate);
    *ms = (float)((double)(ns / RESOLUTION * RESOLUTION) * 1e-6);
    return SUCCESS;
}

/* GPU memory is allocated in CPU memory. */
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = *total = 4ull << 30; return SUCCESS; }
int cuMemAlloc_v2(void **address, size_t bytes) { return allocate(address, bytes); }
int cuMemAllocAsync(void **address, size_t bytes, struct stream *stream) { return allocate(address, bytes); }
int cuMemFree_v2(void *address) { free(address); return SUCCESS; }
int cuMemFreeAsync(void *address, struct stream *stream) { free(address); return SUCCESS; }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { return allocate(address, bytes); }
int cuMemFreeHost(void *address) { free(address); return SUCCESS; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    return fails_at("memory") ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemHostUnregister(void *address) { return SUCCESS; }

static int copy(void *to, const void *from, size_t bytes, struct stream *stream) {
    if (is_lost()) return LAUNCH_FAILED;
    memcpy(to, from, bytes);
    return work(stream, COPY);
}
static int is_large(const char *from, size_t bytes) {
    return bytes >= 64 << 10 && (from[0] || memcmp(from, from + 1, bytes - 1));
}
/* Whether a kernel has found slots, and no copy of weights has failed since. */
static int has_searched;
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, struct stream *stream) {
    if (fails_at("copy") || fails_at("weights") && is_large(from, bytes)) return INVALID_VALUE;
    if (fails_at("search") && has_searched && is_large(from, bytes)) {
        has_searched = 0;
        return INVALID_VALUE;
    }
    return copy(to, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, struct stream *stream) {
    return copy(to, from, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, struct stream *stream) {
    return copy(to, from, bytes, stream);
}
int cuMemsetD8Async(void *to, unsigned char value, size_t bytes, struct stream *stream) {
    if (is_lost()) return LAUNCH_FAILED;
    memset(to, value, bytes);
    return work(stream, COPY);
}

int cuMemcpyPeerAsync(void *to, struct context *there, const void *from, struct context *here, size_t bytes,
                      struct stream *stream) {
    return there == stream->context && here != there ? copy(to, from, bytes, stream) : INVALID_VALUE;
}

int cuModuleLoadData(void **module, const void *image) { return give(module); }
int cuModuleUnload(void *module) { return SUCCESS; }
/* A function is its name. */
int cuModuleGetFunction(char **function, void *module, const char *name) {
    *function = strdup(name);
    return *function ? SUCCESS : OUT_OF_MEMORY;
}
int cuFuncGetAttribute(int *value, int attribute, char *function) { *value = 0; return SUCCESS; }
int cuFuncSetAttribute(char *function, int attribute, int value) { return SUCCESS; }

static int launch(const char *function, void **args, struct stream *stream) {
    n_launches++;
    if (fails_at("kernel") || is_lost()) return LAUNCH_FAILED;
    /* The last argument is the address for the start of the kernel. */
    size_t n = 0;
    while (args[n]) n++;
    /* Kernels that compute several operations have several starts. */
    size_t n_starts = strcmp(function, "add_rms_norm") == 0 ? 2 : strcmp(function, "attention_inputs") == 0 ? 8 : 1;
    for (size_t i = n - n_starts; i < n; i++) {
        uint64_t *start = *(uint64_t **)args[i];
        if (start) *start = (uint64_t)(later(stream->end, now() + START) * stream->context->rate) / START_RESOLUTION * START_RESOLUTION;
    }
    if (strncmp(function, "route_", 6) == 0) {
        uint64_t tokens = *(uint32_t *)args[5], k = *(uint32_t *)args[7];
        int32_t *ids = *(int32_t **)args[10];
        float *weights = *(float **)args[11];
        int32_t *log = *(int32_t **)args[12];
        for (uint64_t i = 0; i < tokens * k; i++) {
            ids[i] = (int32_t)(i % k);
            weights[i] = 1.0f / (float)k;
        }
        static uint64_t launches;
        const char *n = getenv("STAND_IN_EXPERTS");
        /* Every third launch moves to the next expert. */
        if (n) for (uint64_t i = 0; i < tokens * k; i++) ids[i] = (int32_t)((i + launches / 3) % (uint64_t)atoi(n));
        launches++;
        if (log) memcpy(log, ids, tokens * k * sizeof *log);
        if (log) memcpy(log + tokens * k, weights, tokens * k * sizeof *log);
    }
    if (strcmp(function, "find_slots") == 0) {
        int32_t *ids = *(int32_t **)args[0], *table = *(int32_t **)args[1], *slots = *(int32_t **)args[5];
        uint32_t k = *(uint32_t *)args[2], dummy = *(uint32_t *)args[3], number = *(uint32_t *)args[4], missing = 0;
        uint32_t *mail = *(uint32_t **)args[6], *mailed = *(uint32_t **)args[7], *go = *(uint32_t **)args[8];
        for (uint32_t i = 0; i < k; i++) {
            int32_t slot = table[ids[i]];
            missing += slot < 0;
            slots[i] = slot < 0 ? (int32_t)dummy : slot;
            mail[1 + i] = (uint32_t)ids[i];
        }
        mail[0] = missing;
        if (missing == 0) *go = number;
        *mailed = number;
        has_searched |= k > 0;
    }
    return work(stream, is_loaded() ? LONG_KERNEL : KERNEL);
}

int cuLaunchKernel(char *function, unsigned x, unsigned y, unsigned z, unsigned width, unsigned height, unsigned depth,
                   unsigned shared, struct stream *stream, void **args, void **extra) {
    return launch(function, args, stream);
}

struct config {
    unsigned grid[3], block[3], shared;
    struct stream *stream;
};
int cuLaunchKernelEx(const struct config *config, char *function, void **args, void **extra) {
    return launch(function, args, config->stream);
}

/* A graph is a list of kernels with copies of their arguments. */
enum { MOST_ARGS = 31 };
struct node { struct node *next; char *function; uint64_t args[MOST_ARGS + 1]; void *pointers[MOST_ARGS + 1]; };
struct graph { struct node *first, **end; };
struct kernel_node { char *function; unsigned grid[3], block[3], shared; void **args, **extra; void *kernel, *context; };
static void set_args(struct node *node, void **args) {
    memset(node->pointers, 0, sizeof node->pointers);
    for (int i = 0; args[i]; i++) {
        memcpy(&node->args[i], args[i], sizeof node->args[i]);
        node->pointers[i] = &node->args[i];
    }
}
int cuGraphCreate(struct graph **graph, unsigned flags) {
    if (fails_at("graph") || create((void **)graph, sizeof **graph) != SUCCESS) return OUT_OF_MEMORY;
    (*graph)->end = &(*graph)->first;
    return SUCCESS;
}
int cuGraphAddKernelNode_v2(struct node **node, struct graph *graph, void *dependencies, size_t n, const struct kernel_node *kernel) {
    if (create((void **)node, sizeof **node) != SUCCESS) return OUT_OF_MEMORY;
    (*node)->function = kernel->function;
    set_args(*node, kernel->args);
    *graph->end = *node;
    graph->end = &(*node)->next;
    return SUCCESS;
}
int cuGraphAddDependencies_v2(struct graph *graph, struct node **from, struct node **to, const void *edges, size_t n) {
    return n == 1 && (*from)->next == *to ? SUCCESS : INVALID_VALUE;
}
/* The graph itself is executed, and destroyed last. */
int cuGraphInstantiateWithFlags(struct graph **executable, struct graph *graph, unsigned long long flags) {
    *executable = graph;
    return SUCCESS;
}
int cuGraphExecKernelNodeSetParams_v2(struct graph *graph, struct node *node, const struct kernel_node *kernel) {
    if (node->function != kernel->function) return INVALID_VALUE;
    set_args(node, kernel->args);
    return SUCCESS;
}
int cuGraphLaunch(struct graph *graph, struct stream *stream) {
    int launched = SUCCESS;
    for (struct node *node = graph->first; node && launched == SUCCESS; node = node->next)
        launched = launch(node->function, node->pointers, stream);
    return launched;
}
int cuGraphExecDestroy(struct graph *graph) { return SUCCESS; }
int cuGraphDestroy(struct graph *graph) {
    for (struct node *node = graph->first, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    free(graph);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case DEVICE_UNAVAILABLE: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; return SUCCESS;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; return SUCCESS;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
int cuGetErrorString(int error, const char **words) {
    switch (error) {
    case OUT_OF_MEMORY: *words = "out of memory"; return SUCCESS;
    case LAUNCH_FAILED: *words = "unspecified launch failure"; return SUCCESS;
    case INVALID_VALUE: *words = "invalid argument"; return SUCCESS;
    case DEVICE_UNAVAILABLE: *words = "CUDA-capable device(s) is/are busy or unavailable"; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
