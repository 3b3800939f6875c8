/* A device that computes nothing: as much of CUDA's runtime, cuBLAS and NCCL as torch needs to go
   through its own CUDA code, on a machine without a GPU.

   Memory is the host's, mapped as it is touched, so that tensors of any size cost nothing. Kernels
   and products do nothing; small copies and fills are done. All that is not here is made by
   `__init__.py`: a function that returns success. Shapes, memory and waits are real, numbers are
   not. */

#define _GNU_SOURCE
#include <driver_types.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

#define DONE_UP_TO (1u << 20) /* bytes of a fill, or of a copy within the device */

enum { NOBODYS = 0, LOCKED = 1, DEVICES = 2 }; /* cudaMemoryType */

/* Memory that was handed out. */
static struct range { char *start; size_t size; int kind, device, file; } *ranges;
static int num_ranges, room;
static volatile int busy;

static __thread int current; /* device */

static void enter(void) { while (__sync_lock_test_and_set(&busy, 1)) {} }
static void leave(void) { __sync_lock_release(&busy); }

static void note_file(void *start, size_t size, int kind, int file) {
  enter();
  if (num_ranges == room) {
    room = room ? room * 2 : 1024;
    ranges = realloc(ranges, room * sizeof *ranges);
  }
  ranges[num_ranges++] = (struct range){start, size, kind, current, file};
  leave();
}
void noop_cuda_note(void *start, size_t size, int kind) { note_file(start, size, kind, -1); }

size_t noop_cuda_forget(void *start) {
  size_t size = 0;
  enter();
  for (int i = 0; i < num_ranges; i++)
    if (ranges[i].start == (char *)start) {
      size = ranges[i].size;
      if (ranges[i].file >= 0) close(ranges[i].file);
      ranges[i] = ranges[--num_ranges];
      break;
    }
  leave();
  return size;
}

static int kind_and_device(const void *pointer, int *device) {
  const char *at = pointer;
  int kind = NOBODYS;
  enter();
  for (int i = 0; i < num_ranges; i++)
    if (at >= ranges[i].start && at < ranges[i].start + ranges[i].size) {
      kind = ranges[i].kind;
      *device = ranges[i].device;
      break;
    }
  leave();
  return kind;
}
int noop_cuda_kind(const void *pointer) {
  int device;
  return kind_and_device(pointer, &device);
}

/* Devices: each an H200. */

/* What a process sees of them. */
static int visible(int *numbers) {
  const char *seen = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  for (; !seen && count < devices(); count++) numbers[count] = count;
  while (seen && *seen && count < MOST) {
    char *end;
    numbers[count] = strtol(seen, &end, 10);
    if (end == seen || numbers[count] >= devices()) break;
    count++;
    seen = *end ? end + 1 : end;
  }
  return count;
}
int cudaGetDeviceCount(int *count) {
  int numbers[MOST];
  *count = visible(numbers);
  return 0;
}
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) {
  int numbers[MOST];
  if (device < 0 || device >= visible(numbers)) return cudaErrorInvalidDevice;
  current = device;
  return 0;
}
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  int numbers[MOST];
  if (device < 0 || device >= visible(numbers)) return cudaErrorInvalidDevice;
  memset(to, 0, sizeof *to);
  to->uuid.bytes[15] = numbers[device];
  strcpy(to->name, "a device that computes nothing");
  to->major = 9;
  to->totalGlobalMem = total();
  to->multiProcessorCount = 132;
  to->warpSize = 32;
  to->maxThreadsPerMultiProcessor = 2048;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->sharedMemPerBlock = 49152;
  to->sharedMemPerBlockOptin = 232448;
  to->sharedMemPerMultiprocessor = 233472;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->textureAlignment = 512;
  to->l2CacheSize = 50 << 20;
  return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return 0;
}

int cudaDeviceReset(void) { return 0; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
int cudaDeviceGetPCIBusId(char *id, int size, int device) {
  strncpy(id, "0000:01:00.0", size);
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

/* Memory. */

/* A file without a name, which another process may map. */
static void *mapped(int file, size_t size) {
  return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
}
int cudaMalloc(void **pointer, size_t size) {
  int file = memfd_create("noop_cuda", MFD_CLOEXEC);
  if (!size) size = 1;
  *pointer = file < 0 || ftruncate(file, size) ? MAP_FAILED : mapped(file, size);
  if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  note_file(*pointer, size, DEVICES, file);
  return 0;
}
struct shared { int process, file; size_t size; };
int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
  int error = cudaErrorInvalidValue;
  enter();
  for (int i = 0; i < num_ranges; i++)
    if (ranges[i].start == (char *)pointer && ranges[i].file >= 0) {
      *(struct shared *)handle = (struct shared){getpid(), ranges[i].file, ranges[i].size};
      error = 0;
    }
  leave();
  return error;
}
int cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  struct shared *told = (struct shared *)&handle;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", told->process, told->file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  *pointer = file < 0 ? MAP_FAILED : mapped(file, told->size);
  if (*pointer == MAP_FAILED) return cudaErrorInvalidValue;
  note_file(*pointer, told->size, DEVICES, file);
  return 0;
}
int cudaFree(void *pointer);
int cudaIpcCloseMemHandle(void *pointer) { return cudaFree(pointer); }
int cudaMallocAsync(void **pointer, size_t size, void *stream) { return cudaMalloc(pointer, size); }
int cudaFree(void *pointer) {
  if (pointer) {
    size_t size = noop_cuda_forget(pointer);
    munmap(pointer, size ? size : 1);
  }
  return 0;
}
int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  if (posix_memalign(pointer, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
  noop_cuda_note(*pointer, size, LOCKED);
  return 0;
}
int cudaFreeHost(void *pointer) { noop_cuda_forget(pointer); free(pointer); return 0; }
int cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  noop_cuda_note(pointer, size, LOCKED);
  return 0;
}
int cudaHostGetDevicePointer(void **pointer, void *of, unsigned flags) {
  *pointer = of;
  return 0;
}
int cudaHostUnregister(void *pointer) { noop_cuda_forget(pointer); return 0; }
int cudaMemGetInfo(size_t *left, size_t *all) {
  *all = total();
  *left = *all - *all / 13;
  return 0;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *pointer) {
  memset(to, 0, sizeof *to);
  to->type = kind_and_device(pointer, &to->device);
  to->devicePointer = (void *)pointer;
  to->hostPointer = to->type == LOCKED ? (void *)pointer : NULL;
  return 0;
}
int cudaGetSymbolAddress(void **pointer, const void *symbol) {
  static char somewhere[1 << 20];
  *pointer = somewhere;
  return 0;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  memmove(to, from, size);
  return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  int within = noop_cuda_kind(to) == DEVICES && noop_cuda_kind(from) == DEVICES;
  if (!within || size <= DONE_UP_TO) memmove(to, from, size);
  return 0;
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                      size_t height, int kind, void *stream) {
  for (size_t i = 0; i < height; i++)
    memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return 0;
}
int cudaMemset(void *to, int value, size_t size) {
  if (size <= DONE_UP_TO) memset(to, value, size);
  return 0;
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  return cudaMemset(to, value, size);
}

/* Streams, events and kernels. */

struct size { unsigned x, y, z; };

static void *next(void) {
  static long last = 0x1000;
  return (void *)__sync_add_and_fetch(&last, 16);
}
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  *stream = next();
  return 0;
}
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { *stream = next(); return 0; }
int cudaStreamCreate(void **stream) { *stream = next(); return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id) *id = 0;
  return 0;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = next(); return 0; }
int cudaEventCreate(void **event) { *event = next(); return 0; }
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
  *milliseconds = 1;
  return 0;
}

/* With NOOP_CUDA_LOUD a kernel that would do nothing is an error, which torch asks for next. */
static int last_error;

static int launched(const void *kernel, struct size grid, struct size block) {
  unsigned threads = block.x * block.y * block.z;
  int fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535;
  int error = fits && threads && threads <= 1024 ? 0 : cudaErrorInvalidConfiguration;
  if (getenv("NOOP_CUDA_LOUD")) abort();
  return last_error = error;
}
int cudaLaunchKernel(const void *kernel, struct size grid, struct size block, void **arguments,
                     size_t shared, void *stream) {
  return launched(kernel, grid, block);
}
/* What nvcc's stubs call. */
int __cudaLaunchKernel(const void *kernel, struct size grid, struct size block, void **arguments,
                       size_t shared, void *stream) {
  return launched(kernel, grid, block);
}
int cudaLaunchCooperativeKernel(const void *kernel, struct size grid, struct size block,
                                void **arguments, size_t shared, void *stream) {
  return launched(kernel, grid, block);
}
int cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
  struct size grid = {how->gridDim.x, how->gridDim.y, how->gridDim.z};
  struct size block = {how->blockDim.x, how->blockDim.y, how->blockDim.z};
  return launched(kernel, grid, block);
}
int cudaGetLastError(void) { int error = last_error; last_error = 0; return error; }
int cudaPeekAtLastError(void) { return last_error; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *kernel) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = 1024;
  to->binaryVersion = to->ptxVersion = 90;
  to->numRegs = 32;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t shared,
                                                           unsigned flags) {
  *blocks = 2;
  return 0;
}

static int nothing(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *result) {
  *function = (void *)nothing;
  if (result) *result = 0;
  return 0;
}
const char *cudaGetErrorString(int error) { return "an error of a device that computes nothing"; }
const char *cudaGetErrorName(int error) { return "error"; }

/* cuBLAS and NCCL. */

int cublasCreate_v2(void **handle) { *handle = calloc(1, 64); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void **made, int a, int b) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 64); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int a, long b, long c, long d) {
  *made = calloc(1, 64);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int count, void *found, int *got) {
  memset(found, 0, 64);
  *got = 1;
  return 0;
}

int ncclGetVersion(int *version) { *version = 22800; return 0; }
int ncclGetUniqueId(void *id) { memset(id, 1, 128); return 0; }
int ncclCommInitRankConfig(void **made) { *made = calloc(1, 64); return 0; }
int ncclCommInitRank(void **made) { *made = calloc(1, 64); return 0; }
int ncclCommInitRankScalable(void **made) { *made = calloc(1, 64); return 0; }
int ncclCommSplit(void *from, int color, int key, void **made, void *config) {
  *made = calloc(1, 64);
  return 0;
}
int ncclCommGetAsyncError(void *group, int *error) { *error = 0; return 0; }
int ncclCommCount(void *group, int *count) { *count = 1; return 0; }
int ncclCommUserRank(void *group, int *rank) { *rank = 0; return 0; }
/* Of one rank: what comes is what went. */
static size_t bytes_of(int type) { /* ncclDataType_t */
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
static int same(const void *from, void *to, size_t count, int type) {
  if (from != to) memmove(to, from, count * bytes_of(type));
  return 0;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *group,
                  void *stream) {
  return same(from, to, count, type);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, void *group, void *stream) {
  return same(from, to, count, type);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                      void *group, void *stream) {
  return same(from, to, count, type);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *group,
                  void *stream) {
  return same(from, to, count, type);
}

const char *ncclGetErrorString(int error) { return ""; }
const char *ncclGetLastError(void *group) { return ""; }
