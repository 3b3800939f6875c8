/* The driver of the device that computes nothing: libcuda.so.1, which torch opens by its name and
   asks for its functions. */

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
