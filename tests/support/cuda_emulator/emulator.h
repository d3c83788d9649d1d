// SPDX-License-Identifier: Apache-2.0
// What the two stand-ins, libcuda (driver.cc) and libcudart (runtime.cc), share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda_emulator.h"

namespace emulator {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kLaunchFailed = 719;
constexpr int kNotWhileCapturing = 900;

struct Dimensions {
  unsigned x, y, z;
};

struct Launch {
  const EmulatedKernel* kernel;
  Dimensions grid, block;
  size_t shared_nbytes;
};

// Runs every thread of a launch; returns kSuccess, or kLaunchFailed with the text in `LastError`.
int Run(const Launch& launch, void** arguments);
const char* LastError();
void SetLastError(const char* format, ...);

// Memory between two pages that fault; filled with bytes of ones, which is NaN in every float
// dtype.
int Allocate(void** pointer, size_t nbytes);
int Free(void* pointer);
// What was written outside of an allocation but within its pages, as a text; nullptr if nothing.
const char* FindOverrun();
// Where an address that faulted is.
void DescribeAddress(const void* address, char* text, size_t nbytes);
// The bytes that are allocated now, and the most there were.
size_t AllocatedNbytes();
size_t PeakNbytes();

// What the host asked for since the last reset; the order is that of device.py's Counters.
enum Counter {
  kLaunches,
  kAllocations,
  kFrees,
  kCopies,
  kSynchronisations,
  kGraphLaunches,
  kCounters
};
void Count(Counter counter);

// While a stream is captured, work is kept instead of done.
using Work = std::function<int()>;
int Enqueue(Work work);
bool IsCapturing();
int BeginCapture();
int EndCapture(void** graph);

}  // namespace emulator
