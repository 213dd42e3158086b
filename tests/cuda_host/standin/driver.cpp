// libcuda.so.1 without a device: the driver functions that torch and Triton use. Launches go to
// the stand-in of the runtime, which counts them; everything else succeeds and does nothing.
#include <cstring>
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))
#define NOTHING(name) \
  API int name() { return 0; }

static void launched(const void* function) {
  static void (*launch)(const char*) =
      (void (*)(const char*))dlsym(RTLD_DEFAULT, "standin_launched");
  if (launch) launch(function ? (const char*)function : "?");
}

// -- the attributes of a device of compute capability 9.0, as in runtime.cpp

API int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 75: *value = 9; break;       // compute capability, major
    case 16: *value = 132; break;     // multiprocessors
    case 97: *value = 232448; break;  // shared memory per block, with opt-in
    case 81: *value = 233472; break;  // shared memory per multiprocessor
    case 82: *value = 65536; break;   // registers per multiprocessor
    case 10: *value = 32; break;      // warp size
    case 39: *value = 2048; break;    // threads per multiprocessor
    default: *value = 0;
  }
  return 0;
}
API int cuDeviceGet(int* device, int) { return *device = 0; }
API int cuDeviceGetCount(int* count) { *count = 1; return 0; }
API int cuCtxGetDevice(int* device) { return *device = 0; }
API int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
API int cuCtxGetCurrent(void** context) { *context = (void*)0x53; return 0; }
API int cuDevicePrimaryCtxRetain(void** context, int) { *context = (void*)0x53; return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuGetErrorString(int, const char** text) { *text = "error of the stand-in"; return 0; }
API int cuGetErrorName(int, const char** name) { *name = "stand-in"; return 0; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks) { *blocks = 8; return 0; }
API int cuGetProcAddress_v2(const char* name, void** found, int, unsigned long long, void*) {
  *found = dlsym(RTLD_DEFAULT, name);
  return *found ? 0 : 500;
}

// -- kernels: a function handle is its name

API int cuModuleLoadData(void** module, const void*) { *module = (void*)0x51; return 0; }
API int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = strdup(name);
  return 0;
}
// Attribute 0: the maximum of threads per block.
API int cuFuncGetAttribute(int* value, int which, void*) { *value = which ? 0 : 1024; return 0; }
API int cuLaunchKernel(void* function) { launched(function); return 0; }
API int cuLaunchKernelEx(void*, void* function) { launched(function); return 0; }

NOTHING(cuCtxCreate_v2) NOTHING(cuCtxFromGreenCtx) NOTHING(cuCtxGetLimit)
NOTHING(cuCtxPopCurrent) NOTHING(cuCtxPushCurrent) NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit) NOTHING(cuCtxSynchronize) NOTHING(cuDevResourceGenerateDesc)
NOTHING(cuDevSmResourceSplitByCount) NOTHING(cuDeviceComputeCapability)
NOTHING(cuDeviceGetDevResource) NOTHING(cuDeviceGetName) NOTHING(cuDeviceGetUuid)
NOTHING(cuDeviceTotalMem_v2) NOTHING(cuEventRecord) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuGreenCtxCreate) NOTHING(cuGreenCtxDestroy)
NOTHING(cuGreenCtxStreamCreate) NOTHING(cuInit) NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2)
NOTHING(cuMemAddressFree) NOTHING(cuMemAddressReserve) NOTHING(cuMemCreate)
NOTHING(cuMemExportToShareableHandle) NOTHING(cuMemGetAddressRange_v2)
NOTHING(cuMemGetAllocationGranularity) NOTHING(cuMemGetAllocationPropertiesFromHandle)
NOTHING(cuMemImportFromShareableHandle) NOTHING(cuMemMap) NOTHING(cuMemRelease)
NOTHING(cuMemRetainAllocationHandle) NOTHING(cuMemSetAccess) NOTHING(cuMemUnmap)
NOTHING(cuMemcpyDtoHAsync_v2) NOTHING(cuMemsetD32Async) NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadDataEx) NOTHING(cuModuleUnload) NOTHING(cuMulticastAddDevice)
NOTHING(cuMulticastBindMem) NOTHING(cuMulticastCreate) NOTHING(cuMulticastUnbind)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuPointerGetAttribute) NOTHING(cuStreamGetCtx)
NOTHING(cuStreamSynchronize) NOTHING(cuStreamWriteValue32) NOTHING(cuTensorMapEncodeTiled)
