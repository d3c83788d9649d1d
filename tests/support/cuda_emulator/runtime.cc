// SPDX-License-Identifier: Apache-2.0
// libcudart.so.13 of the emulator: one device whose memory is the host's and whose work is done
// when a call returns, unless a stream is captured.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace emulator;

namespace {

int last_status;

int Answer(int status) {
  if (status) last_status = status;
  return status;
}

// Allocations and waiting for the device are errors in a captured stream.
int Refused(const char* what) {
  if (!IsCapturing()) return kSuccess;
  SetLastError("%s while a stream is captured", what);
  return Answer(kNotWhileCapturing);
}

// How often the host has waited: what was recorded before the last time is known to be done.
long waits;

struct Event {
  long long nanoseconds;
  long waits;  // when it was recorded; -1 before
};

int Synchronise() {
  Count(kSynchronisations);
  int refused = Refused("the host waits for the device");
  if (!refused) ++waits;
  return refused;
}

int Elapsed(float* milliseconds, const Event& begin, const Event& end) {
  if (begin.waits < 0 || end.waits < 0) {
    SetLastError("an event that was not recorded is read");
    return kInvalidHandle;
  }
  if (begin.waits == waits || end.waits == waits) {
    SetLastError("an event is read that the host has not waited for");
    return kNotReady;
  }
  *milliseconds = static_cast<float>(end.nanoseconds - begin.nanoseconds) / 1e6f;
  return kSuccess;
}

int Attribute(int attribute) {
  switch (attribute) {
    case 1:  // threads a block
    case 2:  // along x
    case 3:  // along y
      return 1024;
    case 4:  // along z
      return 64;
    case 8:  // shared memory a block
      return 48 << 10;
    case 97:  // and when asked for
      return 227 << 10;
    case 10:  // lanes of a warp
      return 32;
    case 12:  // registers a block
      return 65536;
    case 13:  // kHz
      return 1980000;
    case 16:  // multiprocessors
      return 132;
    case 38:  // second-level cache
      return 50 << 20;
    case 75:  // compute capability
      return 9;
    default:
      return 0;
  }
}

constexpr size_t kMemoryNbytes = size_t(8) << 30;

}  // namespace

EXPORT int cudaGetDeviceCount(int* count) { return *count = 1, kSuccess; }
EXPORT int cudaGetDevice(int* device) { return *device = 0, kSuccess; }
EXPORT int cudaSetDevice(int device) { return device ? Answer(101) : kSuccess; }
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int) {
  return *value = Attribute(attribute), kSuccess;
}
EXPORT int cudaGetDeviceProperties(void* properties, int) {
  // name, then after uuid, luid and a mask the bytes of memory; TVM reads no more.
  constexpr size_t kMemoryOffset = 288;
  snprintf(static_cast<char*>(properties), 256, "emulated GPU");
  memcpy(static_cast<char*>(properties) + kMemoryOffset, &kMemoryNbytes, sizeof(kMemoryNbytes));
  return kSuccess;
}
EXPORT int cudaMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
  *total_nbytes = kMemoryNbytes;
  *free_nbytes = kMemoryNbytes - AllocatedNbytes();
  return kSuccess;
}
EXPORT const char* cudaGetErrorName(int) { return LastError(); }
EXPORT const char* cudaGetErrorString(int) { return LastError(); }
EXPORT int cudaPeekAtLastError() { return last_status; }
EXPORT int cudaGetLastError() {
  int status = last_status;
  last_status = kSuccess;
  return status;
}

EXPORT int cudaMalloc(void** pointer, size_t nbytes) {
  Count(kAllocations);
  int refused = Refused("memory is allocated");
  if (refused) return refused;
  if (nbytes > kMemoryNbytes - AllocatedNbytes()) {
    SetLastError("out of memory");
    return Answer(kOutOfMemory);
  }
  return Answer(Allocate(pointer, nbytes));
}
EXPORT int cudaFree(void* pointer) {
  Count(kFrees);
  return Answer(Free(pointer));
}
EXPORT int cudaMallocHost(void** pointer, size_t nbytes) { return cudaMalloc(pointer, nbytes); }
EXPORT int cudaFreeHost(void* pointer) { return cudaFree(pointer); }

EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t nbytes, int, void*) {
  return Enqueue([=] {
    Count(kCopies);
    memcpy(to, from, nbytes);
    return kSuccess;
  });
}
EXPORT int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, void* stream) {
  return cudaMemcpyAsync(to, from, nbytes, 0, stream);
}
EXPORT int cudaMemsetAsync(void* to, int value, size_t nbytes, void*) {
  return Enqueue([=] {
    memset(to, value, nbytes);
    return kSuccess;
  });
}

EXPORT int cudaStreamCreate(void** stream) { return *stream = new char, kSuccess; }
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
EXPORT int cudaStreamDestroy(void* stream) {
  delete static_cast<char*>(stream);
  return kSuccess;
}
EXPORT int cudaStreamSynchronize(void*) { return Synchronise(); }
EXPORT int cudaDeviceSynchronize() { return Synchronise(); }
EXPORT int cudaStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
EXPORT int cudaEventCreate(void** event) { return *event = new Event{0, -1}, kSuccess; }
EXPORT int cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
EXPORT int cudaEventDestroy(void* event) { return delete static_cast<Event*>(event), kSuccess; }
EXPORT int cudaEventRecord(void* event, void*) {
  return Enqueue([event] {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    *static_cast<Event*>(event) = {nanoseconds, waits};
    return kSuccess;
  });
}
EXPORT int cudaEventSynchronize(void*) { return Synchronise(); }
EXPORT int cudaEventElapsedTime(float* milliseconds, void* begin, void* end) {
  return Answer(Elapsed(milliseconds, *static_cast<Event*>(begin), *static_cast<Event*>(end)));
}

EXPORT int cudaStreamBeginCapture(void*, int) { return Answer(BeginCapture()); }
EXPORT int cudaStreamEndCapture(void*, void** graph) { return Answer(EndCapture(graph)); }
EXPORT int cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  *executable = new std::vector<Work>(*static_cast<std::vector<Work>*>(graph));
  return kSuccess;
}
EXPORT int cudaGraphDestroy(void* graph) {
  delete static_cast<std::vector<Work>*>(graph);
  return kSuccess;
}
EXPORT int cudaGraphExecDestroy(void* graph) { return cudaGraphDestroy(graph); }
EXPORT int cudaGraphLaunch(void* executable, void*) {
  Count(kGraphLaunches);
  for (const Work& work : *static_cast<std::vector<Work>*>(executable)) {
    int status = work();
    if (status) return Answer(status);
  }
  return kSuccess;
}
