// SPDX-License-Identifier: Apache-2.0
// Tells ThreadSanitizer what libgomp's fork, join and barriers order; it cannot see these, and
// would call every parallel region a race. `make sanitize SANITIZE=thread` loads it before libgomp,
// whose functions it stands before. Not instrumented itself.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace {

struct Region {
  void (*body)(void*);
  void* data;
  // Two barriers in a row have a place each: a thread that is early at the second does not hide a
  // race with one that is late at the first.
  char barriers[2];
};

thread_local Region* current_region = nullptr;
thread_local unsigned barrier_count = 0;

void Member(void* argument) {
  Region* region = static_cast<Region*>(argument);
  Region* const outer = current_region;
  const unsigned outer_count = barrier_count;
  current_region = region;
  barrier_count = 0;
  __tsan_acquire(region);
  region->body(region->data);
  __tsan_release(region);
  current_region = outer;
  barrier_count = outer_count;
}

template <class Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  static Parallel* const next = Next<Parallel>("GOMP_parallel");
  Region region{body, data, {}};
  __tsan_release(&region);
  next(Member, &region, threads, flags);
  __tsan_acquire(&region);
}

extern "C" void GOMP_barrier() {
  static auto* const next = Next<void()>("GOMP_barrier");
  char* place =
      current_region != nullptr ? &current_region->barriers[barrier_count++ & 1] : nullptr;
  if (place != nullptr) __tsan_release(place);
  next();
  if (place != nullptr) __tsan_acquire(place);
}
