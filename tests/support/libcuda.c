/* A stand-in for the CUDA driver: one GPU that fails at the step which the environment variable STAND_IN_FAILS names:

   old         the driver knows no newer CUDA than 11.8
   open        another process holds the GPU
   capability  the GPU's compute capability is 7.0
   stream      there is one stream, and no second
   memory      all opens, but there is no memory: whatever is asked for, the host has to do */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, DEVICE_UNAVAILABLE = 46 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MEMORY_POOLS = 115 };

static int fails_at(const char *step) {
    const char *at = getenv("STAND_IN_FAILS");
    return at && strcmp(at, step) == 0;
}

/* Handles are never looked into. */
static int handle;

static int give(void **out) {
    *out = &handle;
    return SUCCESS;
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = fails_at("old") ? 11080 : 12040; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return SUCCESS; }
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

int cuDevicePrimaryCtxRetain(void **context, int device) {
    return fails_at("open") ? DEVICE_UNAVAILABLE : give(context);
}
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetCurrent(void **context) { return give(context); }
int cuCtxSetCurrent(void *context) { return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }

int cuStreamCreate(void **stream, unsigned flags) {
    static int streams;
    return fails_at("stream") && streams++ > 0 ? OUT_OF_MEMORY : give(stream);
}
int cuStreamDestroy_v2(void *stream) { return SUCCESS; }
int cuStreamSynchronize(void *stream) { return SUCCESS; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }

int cuEventCreate(void **event, unsigned flags) { return give(event); }
int cuEventDestroy_v2(void *event) { return SUCCESS; }
int cuEventRecord(void *event, void *stream) { return SUCCESS; }
int cuEventQuery(void *event) { return SUCCESS; }
int cuEventSynchronize(void *event) { return SUCCESS; }
int cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 0; return SUCCESS; }

int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = *total = 4ull << 30; return SUCCESS; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return OUT_OF_MEMORY; }
int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) { return OUT_OF_MEMORY; }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { return OUT_OF_MEMORY; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) { return OUT_OF_MEMORY; }

int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case DEVICE_UNAVAILABLE: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
int cuGetErrorString(int error, const char **words) {
    switch (error) {
    case OUT_OF_MEMORY: *words = "out of memory"; return SUCCESS;
    case DEVICE_UNAVAILABLE: *words = "CUDA-capable device(s) is/are busy or unavailable"; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
