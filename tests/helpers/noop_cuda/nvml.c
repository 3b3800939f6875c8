/* libnvidia-ml.so.1 of the device that computes nothing, which vLLM asks what there is. */

#include <stdio.h>
#include <string.h>

#include "machine.h"

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = devices(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(0x4000 + (size_t)index);
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  return nvmlDeviceGetHandleByIndex_v2(0, device);
}
int nvmlDeviceGetIndex(void *device, unsigned *index) {
  *index = (size_t)device - 0x4000;
  return 0;
}
int nvmlDeviceGetP2PStatus(void *device, void *peer, int what, int *status) {
  *status = 1; /* not supported */
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  strncpy(name, "a device that computes nothing", size);
  return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
  snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012x", (int)((size_t)device - 0x4000));
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
  total_free_used[0] = total();
  total_free_used[1] = total_free_used[0] - total_free_used[0] / 13;
  total_free_used[2] = total_free_used[0] / 13;
  return 0;
}
const char *nvmlErrorString(int error) { return "an error of a device that computes nothing"; }
