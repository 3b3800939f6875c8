/* The driver of the device that computes nothing: libcuda.so.1, which torch and Triton open by its
   name and ask for its functions. */

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

int cudaDeviceGetAttribute(int *value, int attribute, int device);
int noop_cuda_kind(const void *pointer);
void noop_cuda_note(void *start, size_t size, int kind);
size_t noop_cuda_forget(void *start);

static int nothing(void) { return 0; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *status) {
  *function = (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
int cuCtxGetCurrent(void **context) { *context = (void *)0x1000; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x1000; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)0x2000; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)0x3000;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 /* CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */ ? 1024 : 0;
  return 0;
}
int cuPointerGetAttribute(void *to, int attribute, unsigned long long pointer) {
  if (!noop_cuda_kind((void *)pointer)) return 1 /* CUDA_ERROR_INVALID_VALUE */;
  if (attribute == 3 /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */) memcpy(to, &pointer, sizeof pointer);
  return 0;
}
int cuGetErrorString(int error, const char **text) {
  *text = "an error of a device that computes nothing";
  return 0;
}
/* Memory that is mapped where room was kept for it, as vLLM's that sleeps is. */
int cuMemGetAllocationGranularity(size_t *size, const void *of, int option) {
  *size = 2 << 20;
  return 0;
}
int cuMemAddressReserve(unsigned long long *at, size_t size, size_t alignment,
                        unsigned long long wanted, unsigned long long flags) {
  int lazily = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *room = mmap(NULL, size, PROT_READ | PROT_WRITE, lazily, -1, 0);
  *at = (unsigned long long)room;
  return room == MAP_FAILED ? 2 /* CUDA_ERROR_OUT_OF_MEMORY */ : 0;
}
int cuMemAddressFree(unsigned long long at, size_t size) { return munmap((void *)at, size) != 0; }
int cuMemCreate(unsigned long long *handle, size_t size, const void *of, unsigned long long flags) {
  static unsigned long long last = 0x5000;
  *handle = __sync_add_and_fetch(&last, 16);
  return 0;
}
int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long handle,
             unsigned long long flags) {
  noop_cuda_note((void *)at, size, 2);
  return 0;
}
int cuMemUnmap(unsigned long long at, size_t size) {
  noop_cuda_forget((void *)at);
  return madvise((void *)at, size, MADV_DONTNEED) != 0; /* its numbers are lost */
}
