/* What the environment says of the machine. */

#include <stdlib.h>

#define GIB (1ull << 30)

/* Bytes of a device: those of an H200, of 141 GiB, where NOOP_CUDA_GIB says nothing else. */
static unsigned long long total(void) {
  const char *said = getenv("NOOP_CUDA_GIB");
  return (said ? strtoull(said, NULL, 10) : 141) * GIB;
}

#define MOST 8 /* devices */

/* Devices: one, where NOOP_CUDA_DEVICES says nothing else. */
static int devices(void) {
  const char *said = getenv("NOOP_CUDA_DEVICES");
  int count = said ? atoi(said) : 1;
  return count < MOST ? count : MOST;
}
