// A CUDA runtime without a device, for LD_PRELOAD: device memory is host memory, kernels do
// nothing, each cuBLAS product is one launch, and everything is counted. Captures are tracked, and
// what they forbid is recorded and refused, as CUDA does.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <driver_types.h>
#include <map>
#include <string>
#include <sys/mman.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define NOTHING(signature) \
  API E signature { return cudaSuccess; }

typedef cudaError_t E;
typedef std::map<std::string, long> Counts;
// Called for each thing counted outside captures: what it is, its bytes, and its kernel or "".
typedef void (*Watcher)(const char*, size_t, const char*);

static const size_t TOTAL = 150754820096ull;  // bytes of the device
static const size_t CONTEXT = 600ull << 20;   // that a context uses

static Counts counts, bytes, kernels, captured_kernels;
static std::vector<std::string> violations;
static Watcher watcher = nullptr;
static std::map<const void*, std::string> names;  // of kernels, by host function
static std::map<uintptr_t, size_t> pinned, allotted;
static std::map<void*, long> graph_nodes;
static size_t used = 0;
static bool capturing = false;
static cudaStream_t capture_stream = nullptr;
static long nodes = 0, last_nodes = 0;  // of the current capture, of the last one
static uintptr_t handles = 0x1000;

template <class T> static E made(T* handle) {
  *handle = (T)(handles += 16);
  return cudaSuccess;
}

static void count(const std::string& what, size_t size = 0, const char* kernel = "") {
  std::string key = (capturing ? "captured " : "") + what;
  counts[key]++;
  if (size) bytes[key] += size;
  if (watcher && !capturing) watcher(what.c_str(), size, kernel);
}

// -- the tests' interface

API void standin_reset() {
  counts.clear(), bytes.clear(), kernels.clear(), captured_kernels.clear(), violations.clear();
}

API void standin_watch(Watcher given) { watcher = given; }

API const char* standin_report() {  // a JSON object of numbers
  static std::string text;
  text = "{";
  for (auto& each : counts) text += "\"" + each.first + "\":" + std::to_string(each.second) + ",";
  for (auto& each : bytes)
    text += "\"bytes of " + each.first + "\":" + std::to_string(each.second) + ",";
  text += "\"last graph nodes\":" + std::to_string(last_nodes) + "}";
  return text.c_str();
}

API const char* standin_violations() {  // one per line
  static std::string text;
  text = "";
  for (auto& each : violations) text += each + "\n";
  return text.c_str();
}

API const char* standin_kernels(int captured) {  // one per line, after its number of launches
  static std::string text;
  text = "";
  for (auto& each : captured ? captured_kernels : kernels)
    text += std::to_string(each.second) + " " + each.first + "\n";
  return text.c_str();
}

// -- launches

API void standin_launched(const char* name) {
  if (capturing) nodes++;
  (capturing ? captured_kernels : kernels)[name]++;
  count("launch", 0, name);
}

static E launched(const void* function, cudaStream_t stream) {
  auto found = names.find(function);
  std::string name = found == names.end() ? "?" : found->second;
  if (capturing && stream != capture_stream)
    violations.push_back("launch on another stream in a capture: " + name.substr(0, 80));
  standin_launched(name.c_str());
  return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, void*,
                                void*, void*, void*, int*) {
  names[host] = device ? device : "?";
}
API E __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}
API E __cudaLaunchKernel(void* f, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launched(f, s);
}
API E cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launched(f, s);
}
API E cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* f, void**) {
  return launched(f, how->stream);
}
API E cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launched(f, s);
}
NOTHING(cudaFuncSetAttribute(const void*, cudaFuncAttribute, int))
API E cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 90;
  return cudaSuccess;
}
API E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                             unsigned) {
  *blocks = 8;
  return cudaSuccess;
}

// -- waits

static E waited(const char* name) {
  count("wait");
  if (!capturing) return cudaSuccess;
  violations.push_back(std::string(name) + " in a capture");
  return cudaErrorStreamCaptureUnsupported;
}
API E cudaDeviceSynchronize() { return waited("wait for the device"); }
API E cudaStreamSynchronize(cudaStream_t) { return waited("wait for a stream"); }
API E cudaEventSynchronize(cudaEvent_t) { return waited("wait for an event"); }
API E cudaStreamQuery(cudaStream_t) { count("query"); return cudaSuccess; }
API E cudaEventQuery(cudaEvent_t) { count("query"); return cudaSuccess; }

// -- the device

API E cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
NOTHING(cudaSetDevice(int))
API E cudaGetDeviceCount(int* devices) { *devices = 1; return cudaSuccess; }
NOTHING(cudaGetLastError())
NOTHING(cudaPeekAtLastError())
API const char* cudaGetErrorString(E) { return "error of the stand-in"; }
API const char* cudaGetErrorName(E) { return "stand-in"; }
API E cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API E cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API E cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  *high = -5;
  return cudaSuccess;
}
API E cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
NOTHING(cudaDeviceEnablePeerAccess(int, unsigned))
API E cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;  // CUB's scans advance by it
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API E cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "stand-in");
  p->totalGlobalMem = TOTAL;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 32;
  p->regsPerMultiprocessor = p->regsPerBlock = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 62914560;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}
API E cudaDeviceGetPCIBusId(char* text, int, int) { strcpy(text, "0000:00:00.0"); return cudaSuccess; }
API E cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = nullptr; return cudaSuccess; }
NOTHING(cudaMemPoolTrimTo(cudaMemPool_t, size_t))
NOTHING(cudaProfilerStart())
NOTHING(cudaProfilerStop())
API E cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                       cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *found = driver ? dlsym(driver, name) : nullptr;
  if (status) *status = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -- memory

static bool within(const std::map<uintptr_t, size_t>& ranges, const void* at) {
  auto after = ranges.upper_bound((uintptr_t)at);
  if (after == ranges.begin()) return false;
  --after;
  return (uintptr_t)at < after->first + after->second;
}

API E cudaMalloc(void** found, size_t size) {
  count("device allocation", size);
  if (size < 4096) size = 4096;
  *found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
  if (*found == MAP_FAILED) {
    *found = nullptr;
    return cudaErrorMemoryAllocation;
  }
  allotted[(uintptr_t)*found] = size;
  used += size;
  return cudaSuccess;
}
API E cudaFree(void* at) {
  if (!at) return cudaSuccess;
  count("device free");
  if (capturing) violations.push_back("free in a capture");
  auto found = allotted.find((uintptr_t)at);
  if (found != allotted.end()) {
    munmap(at, found->second);
    used -= found->second;
    allotted.erase(found);
  }
  return cudaSuccess;
}
API E cudaMallocAsync(void** found, size_t size, cudaStream_t) { return cudaMalloc(found, size); }
API E cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }
API E cudaMemGetInfo(size_t* left, size_t* total) {
  *total = TOTAL;
  *left = TOTAL - used - CONTEXT;
  return cudaSuccess;
}
API E cudaHostAlloc(void** found, size_t size, unsigned) {
  count("pinned allocation", size);
  *found = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  pinned[(uintptr_t)*found] = size;
  return cudaSuccess;
}
API E cudaFreeHost(void* at) {
  pinned.erase((uintptr_t)at);
  free(at);
  return cudaSuccess;
}
API E cudaHostRegister(void* at, size_t size, unsigned) {
  pinned[(uintptr_t)at] = size;
  return cudaSuccess;
}
API E cudaHostUnregister(void* at) { pinned.erase((uintptr_t)at); return cudaSuccess; }
API E cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  memset(found, 0, sizeof *found);
  found->type = within(allotted, at) ? cudaMemoryTypeDevice
                : within(pinned, at) ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
  found->devicePointer = (void*)at;
  return cudaSuccess;
}

// -- copies: reads from the device return zeros, since nothing is computed there

static E copied(void* to, const void* from, size_t size, cudaStream_t stream) {
  bool from_device = within(allotted, from), to_device = within(allotted, to);
  bool crosses = from_device != to_device;
  bool pageable = crosses && !within(pinned, to_device ? from : to);
  std::string what = !crosses    ? from_device ? "copy on the device" : "copy on the host"
                     : to_device ? "copy to the device"
                                 : "copy from the device";
  if (crosses) what += pageable ? ", pageable" : ", pinned";
  if (capturing) {
    if (stream != capture_stream) violations.push_back(what + ", on another stream in a capture");
    if (pageable) violations.push_back(what + ", in a capture");
    nodes++;
  }
  count(what, size);
  if (from_device && !to_device) memset(to, 0, size);
  else if (!from_device) memcpy(to, from, size);
  return cudaSuccess;
}
API E cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t s) {
  return copied(to, from, size, s);
}
API E cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  E waits = waited("copy that waits");
  return waits == cudaSuccess ? copied(to, from, size, nullptr) : waits;
}
API E cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t s) {
  return copied(to, from, size, s);
}
NOTHING(cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind))
API E cudaMemsetAsync(void*, int, size_t size, cudaStream_t) {
  if (capturing) nodes++;
  count("memset", size);
  return cudaSuccess;
}
API E cudaMemset(void*, int, size_t size) { count("memset", size); return cudaSuccess; }
API E cudaGetSymbolAddress(void** found, const void*) {
  static char symbol[1 << 16];
  *found = symbol;
  return cudaSuccess;
}

// -- streams and events

API E cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return made(s); }
API E cudaStreamCreate(cudaStream_t* s) { return made(s); }
NOTHING(cudaStreamDestroy(cudaStream_t))
API E cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
NOTHING(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))
NOTHING(cudaStreamAddCallback(cudaStream_t, void*, void*, unsigned))
NOTHING(cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void*))
API E cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return made(e); }
API E cudaEventCreate(cudaEvent_t* e) { return made(e); }
NOTHING(cudaEventDestroy(cudaEvent_t))
API E cudaEventRecord(cudaEvent_t, cudaStream_t) { count("event"); return cudaSuccess; }
API E cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) {
  count("event");
  return cudaSuccess;
}
API E cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}

// -- captures and graphs

static cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  return capturing && stream == capture_stream ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusNone;
}
API E cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = status_of(stream);
  return cudaSuccess;
}
API E cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                               unsigned long long* id, cudaGraph_t* graph,
                               const cudaGraphNode_t** on, const cudaGraphEdgeData** edges,
                               size_t* number) {
  *status = status_of(stream);
  if (id) *id = 7;
  if (graph) *graph = (cudaGraph_t)0x77;
  if (on) *on = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
NOTHING(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*))
API E cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr) violations.push_back("capture of the legacy stream");
  count("capture");
  capturing = true;
  capture_stream = stream;
  nodes = 0;
  captured_kernels.clear();
  return cudaSuccess;
}
API E cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = false;
  made(graph);
  graph_nodes[*graph] = last_nodes = nodes;
  return cudaSuccess;
}
API E cudaGraphInstantiateWithFlags(cudaGraphExec_t* found, cudaGraph_t graph, unsigned long long) {
  made(found);
  graph_nodes[*found] = graph_nodes[graph];
  return cudaSuccess;
}
API E cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  count("graph launch");
  counts["graph nodes launched"] += graph_nodes[graph];
  return cudaSuccess;
}
API E cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = graph_nodes[graph];
  return cudaSuccess;
}
NOTHING(cudaGraphDestroy(cudaGraph_t))
API E cudaGraphExecDestroy(cudaGraphExec_t) { count("graph destroyed"); return cudaSuccess; }
NOTHING(cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned))

// -- cuBLAS

#define ACCEPTS(name) \
  API int name() { return 0; }
#define MAKES(name) \
  API int name(void** found) { *found = (void*)0x99; return 0; }
#define PRODUCT(name) \
  API int name() { standin_launched("cublas " #name); return 0; }

MAKES(cublasCreate_v2) ACCEPTS(cublasDestroy_v2) ACCEPTS(cublasSetStream_v2)
ACCEPTS(cublasSetWorkspace_v2) ACCEPTS(cublasSetMathMode) ACCEPTS(cublasSetPointerMode_v2)
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasLtMatmul) PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDotEx)
API size_t cublasLtGetVersion() { return 130000; }
MAKES(cublasLtMatmulDescCreate) ACCEPTS(cublasLtMatmulDescDestroy)
ACCEPTS(cublasLtMatmulDescSetAttribute) MAKES(cublasLtMatmulPreferenceCreate)
ACCEPTS(cublasLtMatmulPreferenceDestroy) ACCEPTS(cublasLtMatmulPreferenceSetAttribute)
MAKES(cublasLtMatrixLayoutCreate) ACCEPTS(cublasLtMatrixLayoutDestroy)
ACCEPTS(cublasLtMatrixLayoutSetAttribute)
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                       void* results, int* number) {
  memset(results, 0, 96);
  *number = 1;
  return 0;
}
