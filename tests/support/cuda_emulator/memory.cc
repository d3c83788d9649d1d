// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "emulator.h"

namespace emulator {
namespace {

constexpr size_t kPageNbytes = 4096;
// What cudaMalloc promises.
constexpr size_t kAlignmentNbytes = 256;
constexpr unsigned char kCanary = 0xa5;
constexpr unsigned char kPoison = 0xff;

struct Block {
  char* pages;  // the first page that may be touched
  size_t pages_nbytes;
  size_t nbytes;
};

std::map<char*, Block> blocks;
size_t allocated_nbytes, peak_nbytes;
char overrun[256];

size_t RoundUp(size_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

long FirstDamage(const char* from, const char* to) {
  for (const char* at = from; at < to; ++at) {
    if (static_cast<unsigned char>(*at) != kCanary) return at - from;
  }
  return -1;
}

}  // namespace

int Allocate(void** pointer, size_t nbytes) {
  size_t own = RoundUp(std::max<size_t>(nbytes, 1), kAlignmentNbytes);
  size_t pages_nbytes = RoundUp(own, kPageNbytes);
  void* mapped = mmap(nullptr, pages_nbytes + 2 * kPageNbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  char* pages = static_cast<char*>(mapped) + kPageNbytes;
  mprotect(mapped, kPageNbytes, PROT_NONE);
  mprotect(pages + pages_nbytes, kPageNbytes, PROT_NONE);
  // The end is at the page that faults: reads and writes past it are found at once.
  char* begin = pages + pages_nbytes - own;
  memset(pages, kCanary, pages_nbytes);
  memset(begin, kPoison, nbytes);
  blocks[begin] = {pages, pages_nbytes, nbytes};
  allocated_nbytes += nbytes;
  peak_nbytes = std::max(peak_nbytes, allocated_nbytes);
  *pointer = begin;
  return kSuccess;
}

int Free(void* pointer) {
  if (pointer == nullptr) return kSuccess;
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return kInvalidValue;
  Block block = found->second;
  allocated_nbytes -= block.nbytes;
  blocks.erase(found);
  munmap(block.pages - kPageNbytes, block.pages_nbytes + 2 * kPageNbytes);
  return kSuccess;
}

const char* FindOverrun() {
  for (const auto& entry : blocks) {
    const Block& block = entry.second;
    const char* begin = entry.first;
    const char* end = begin + block.nbytes;
    long before = FirstDamage(block.pages, begin);
    long after = FirstDamage(end, block.pages + block.pages_nbytes);
    if (before < 0 && after < 0) continue;
    long bytes = after >= 0 ? after : (begin - block.pages) - before;
    snprintf(overrun, sizeof(overrun), "%ld bytes %s an allocation of %zu bytes", bytes,
             after >= 0 ? "past the end of" : "before", block.nbytes);
    // Told once.
    memset(block.pages, kCanary, begin - block.pages);
    memset(const_cast<char*>(end), kCanary, block.pages + block.pages_nbytes - end);
    return overrun;
  }
  return nullptr;
}

void DescribeAddress(const void* address, char* text, size_t nbytes) {
  const char* at = static_cast<const char*>(address);
  for (const auto& entry : blocks) {
    const Block& block = entry.second;
    const char* begin = entry.first;
    if (at < block.pages - kPageNbytes || at >= block.pages + block.pages_nbytes + kPageNbytes) {
      continue;
    }
    bool is_before = at < begin;
    snprintf(text, nbytes, "%td bytes %s an allocation of %zu bytes",
             is_before ? begin - at : at - (begin + block.nbytes),
             is_before ? "before" : "past the end of", block.nbytes);
    return;
  }
  snprintf(text, nbytes, "address %p is in no allocation", address);
}

size_t AllocatedNbytes() { return allocated_nbytes; }
size_t PeakNbytes() { return peak_nbytes; }

}  // namespace emulator
