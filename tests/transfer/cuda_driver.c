/* What UCX's cuda transports ask of the CUDA driver, with ranges of the host's memory in the place of a GPU's.
   Whoever copies or waits without a context ends the process, as UCX does on a GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { FLUSH_OPTIONS = 117, WRITES_ORDERING = 118, COMPUTE_MAJOR = 75 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, BUFFER_ID = 7, ORDINAL = 9, START = 11, SIZE = 12, MAPPED = 13 };
#define PRIMARY ((void *)0x1000)

static struct { uintptr_t start, size; } ranges[64];
static int known;
static long copied, flushes;
static __thread void *contexts[16];
static __thread int depth;

void emulated_gpu_has(uintptr_t start, uintptr_t size) { ranges[known].start = start; ranges[known++].size = size; }
long emulated_gpu_copied(void) { return copied; }
long emulated_gpu_flushes(void) { return flushes; }

static int range_of(uintptr_t address) {
    for (int i = 0; i < known; i++)
        if (address - ranges[i].start < ranges[i].size) return i;
    return -1;
}
static void *current(void) { return depth ? contexts[depth - 1] : NULL; }
static int with_context(void) {
    if (!current()) { fputs("emulated GPU: a thread has no context\n", stderr); abort(); }
    return OK;
}
static int copy(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
    copied += size;
    return with_context();
}
static int made(void **handle) { *handle = malloc(1); return with_context(); }

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 12000; return OK; }
int cuGetErrorString(int error, const char **words) { *words = "an emulated error"; return OK; }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
    *function = NULL;
    return NOT_FOUND;
}
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : OK; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "emulated"); return OK; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 1, 16); return OK; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)1 << 36; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == COMPUTE_MAJOR ? 9 : attribute == FLUSH_OPTIONS;
    if (attribute == WRITES_ORDERING && getenv("EMULATED_GPU_ORDERS")) *value = 100;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = PRIMARY; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return OK; }
int cuCtxSetCurrent(void *context) { depth = depth ? depth : 1; contexts[depth - 1] = context; return OK; }
int cuCtxGetCurrent(void **context) { *context = current(); return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return current() ? OK : INVALID_CONTEXT; }
int cuCtxGetId(void *context, unsigned long long *id) { *id = 1; return OK; }
int cuCtxPushCurrent_v2(void *context) { contexts[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(void **context) {
    if (!depth--) return INVALID_CONTEXT;
    if (context) *context = contexts[depth];
    return OK;
}
int cuEventCreate(void **event, unsigned flags) { return made(event); }
int cuEventDestroy_v2(void *event) { free(event); return OK; }
int cuEventRecord(void *event, void *stream) { return with_context(); }
int cuEventQuery(void *event) { return with_context(); }
int cuStreamCreate(void **stream, unsigned flags) { return made(stream); }
int cuStreamDestroy_v2(void *stream) { free(stream); return OK; }
int cuStreamSynchronize(void *stream) { return with_context(); }
int cuStreamAddCallback(void *stream, void (*then)(void *, int, void *), void *data, unsigned flags) {
    then(stream, OK, data);
    return OK;
}
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t size, void *stream) { return copy((void *)to, (void *)from, size); }
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void *stream) { return copy((void *)to, (void *)from, size); }
int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t size) { return copy((void *)to, from, size); }
int cuMemAlloc_v2(uintptr_t *start, size_t size) {
    emulated_gpu_has(*start = (uintptr_t)malloc(size), size);
    return with_context();
}
int cuMemFree_v2(uintptr_t start) {
    int found = range_of(start);
    if (found < 0) return INVALID_VALUE;
    ranges[found].size = 0;
    free((void *)start);
    return OK;
}
int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) { return OK; }
int cuMemHostUnregister(void *start) { return OK; }
int cuMemGetAddressRange_v2(uintptr_t *start, size_t *size, uintptr_t address) {
    int found = range_of(address);
    if (found < 0) return NOT_FOUND;
    if (start) *start = ranges[found].start;
    if (size) *size = ranges[found].size;
    return OK;
}
int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
    int found = range_of(address);
    if (found < 0) return INVALID_VALUE;
    switch (attribute) {
    case CONTEXT: *(void **)value = PRIMARY; break;
    case DEVICE_POINTER: *(uintptr_t *)value = address; break;
    case BUFFER_ID: *(unsigned long long *)value = found + 1; break;
    case START: *(uintptr_t *)value = ranges[found].start; break;
    case SIZE: *(size_t *)value = ranges[found].size; break;
    default: *(int *)value = attribute == MEMORY_TYPE ? 2 : attribute == MAPPED;
    }
    return OK;
}
int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, uintptr_t address) {
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], address) != OK)
            memset(values[i], 0, attributes[i] == CONTEXT ? sizeof(void *) : sizeof(int));
    return OK;
}
int cuPointerSetAttribute(const void *value, int attribute, uintptr_t address) { return OK; }
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    flushes++;
    return target == 0 && scope == 100 ? with_context() : INVALID_VALUE;
}

/* No other process can open this memory. */
#define UNSUPPORTED(function) int function(void) { return 801; }
UNSUPPORTED(cuIpcGetMemHandle)
UNSUPPORTED(cuMemGetAllocationGranularity)
UNSUPPORTED(cuMemRetainAllocationHandle)
