// SPDX-License-Identifier: Apache-2.0
// Runs a kernel: every thread of a block is a fiber, so that it can wait for the others.
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulator.h"

#ifndef __x86_64__
#error "the emulator switches fibers on x86-64 only"
#endif

extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
// The thread that runs first in a block: 0, or the last. A kernel whose result depends on it lacks
// a barrier, or has blocks that write to the same place.
EXPORT int emulator_reverse_order = 0;

// Saves the registers that a call preserves and the stack pointer at *save; goes on from `load`.
void emulator_switch(void** save, void* load);
asm(R"(
  .text
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
}

namespace emulator {
namespace {

constexpr unsigned kMostThreads = 1024;
constexpr unsigned kWarp = 32;
constexpr size_t kStackNbytes = 128 << 10;
constexpr size_t kPageNbytes = 4096;
constexpr size_t kStaticSharedNbytes = 48 << 10;

enum class State { kReady, kAtBarrier, kAtWarp, kDone };

struct Fiber {
  void* stack_pointer;
  State state;
  EmulatedIndex index;
  // Where it waits, and in a warp's exchange: for whom, what it gives and whose value it asks for.
  int line;
  unsigned mask;
  uint64_t given;
  int source;
  // What it is given.
  uint64_t taken;
  unsigned votes;
  bool was_answered;
};

Fiber fibers[kMostThreads];
char* stacks;
void* scheduler_stack_pointer;
unsigned current, thread_count;
const EmulatedKernel* kernel;
void** arguments;
sigjmp_buf failed;
volatile bool is_running;
char last_error[2048];

char* StackEnd(unsigned thread) {
  if (stacks == nullptr) {
    stacks = static_cast<char*>(mmap(nullptr, kMostThreads * kStackNbytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
    for (unsigned k = 0; k < kMostThreads; ++k) {
      mprotect(stacks + k * kStackNbytes, kPageNbytes, PROT_NONE);
    }
  }
  return stacks + (thread + 1) * kStackNbytes;
}

void Yield() { emulator_switch(&fibers[current].stack_pointer, scheduler_stack_pointer); }

void RunFiber() {
  kernel->call(arguments);
  fibers[current].state = State::kDone;
  Yield();
  abort();
}

void Prepare(unsigned thread) {
  // As if RunFiber had been called: the stack is 8 bytes off a multiple of 16.
  void** top = reinterpret_cast<void**>(StackEnd(thread)) - 2;
  *top = reinterpret_cast<void*>(&RunFiber);
  fibers[thread].stack_pointer = top - 6;
  fibers[thread].state = State::kReady;
  fibers[thread].index = {thread % blockDim.x, thread / blockDim.x % blockDim.y,
                          thread / (blockDim.x * blockDim.y)};
}

void RunReady() {
  for (unsigned k = 0; k < thread_count; ++k) {
    current = emulator_reverse_order ? thread_count - 1 - k : k;
    if (fibers[current].state != State::kReady) continue;
    threadIdx = fibers[current].index;
    emulator_switch(&scheduler_stack_pointer, fibers[current].stack_pointer);
  }
}

bool IsLane(unsigned mask, unsigned first, unsigned lane) {
  return (mask >> lane & 1) && first + lane < thread_count;
}

// Whether all lanes that `one` waits for have come to the same exchange.
bool HaveMet(unsigned first, const Fiber& one) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!IsLane(one.mask, first, lane)) continue;
    const Fiber& other = fibers[first + lane];
    if (other.state != State::kAtWarp || other.mask != one.mask || other.line != one.line) {
      return false;
    }
  }
  return true;
}

void Exchange(unsigned first, unsigned mask) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (IsLane(mask, first, lane) && fibers[first + lane].given) votes |= 1u << lane;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!IsLane(mask, first, lane)) continue;
    Fiber& fiber = fibers[first + lane];
    fiber.votes = votes;
    fiber.was_answered = fiber.source < 0 || IsLane(mask, first, fiber.source);
    if (fiber.was_answered && fiber.source >= 0) fiber.taken = fibers[first + fiber.source].given;
    fiber.state = State::kReady;
  }
}

bool ReleaseWarp(unsigned first) {
  bool released = false;
  for (unsigned k = first; k < first + kWarp && k < thread_count; ++k) {
    if (fibers[k].state != State::kAtWarp || !HaveMet(first, fibers[k])) continue;
    Exchange(first, fibers[k].mask);
    released = true;
  }
  return released;
}

bool ReleaseBarrier() {
  for (unsigned k = 0; k < thread_count; ++k) {
    if (fibers[k].state != State::kAtBarrier || fibers[k].line != fibers[0].line) return false;
  }
  for (unsigned k = 0; k < thread_count; ++k) fibers[k].state = State::kReady;
  return true;
}

std::string Describe(const Fiber& fiber) {
  switch (fiber.state) {
    case State::kAtBarrier:
      return "__syncthreads in line " + std::to_string(fiber.line);
    case State::kAtWarp:
      return "a warp's exchange in line " + std::to_string(fiber.line);
    case State::kDone:
      return "the kernel's end";
    default:
      return "work";
  }
}

[[noreturn]] void FailDivergent() {
  std::string text;
  for (unsigned k = 0; k < thread_count;) {
    unsigned end = k;
    std::string where = Describe(fibers[k]);
    while (end < thread_count && Describe(fibers[end]) == where) ++end;
    text += (text.empty() ? "threads " : "; threads ") + std::to_string(k) + " to " +
            std::to_string(end - 1) + " are at " + where;
    k = end;
    if (text.size() > 600) {
      text += "; ...";
      break;
    }
  }
  emulator_fail("threads wait for each other for ever: %s", text.c_str());
}

void RunBlock() {
  if (kernel->shared_begin != nullptr) {
    memset(kernel->shared_begin, 0xff, kernel->shared_end - kernel->shared_begin);
  }
  for (unsigned k = 0; k < thread_count; ++k) Prepare(k);
  while (true) {
    RunReady();
    bool done = true, released = false;
    for (unsigned k = 0; k < thread_count; ++k) done &= fibers[k].state == State::kDone;
    if (done) return;
    for (unsigned first = 0; first < thread_count; first += kWarp) released |= ReleaseWarp(first);
    if (!released && !ReleaseBarrier()) FailDivergent();
  }
}

void RunGrid() {
  unsigned count = gridDim.x * gridDim.y * gridDim.z;
  for (unsigned k = 0; k < count; ++k) {
    unsigned block = emulator_reverse_order ? count - 1 - k : k;
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / (gridDim.x * gridDim.y)};
    RunBlock();
  }
}

void OnFault(int signal, siginfo_t* information, void*) {
  if (!is_running) {
    // Not ours: let the process die of it.
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  if (signal == SIGILL) {
    emulator_fail(
        "an access that is not aligned to its size, an index outside of a local or shared array, "
        "a shift by too much, a division by zero or an overflow of a signed integer");
  }
  char where[256];
  DescribeAddress(information->si_addr, where, sizeof(where));
  emulator_fail("an access to memory that is not the kernel's: %s", where);
}

// While a kernel runs, its faults are errors of the launch, as on a GPU.
class FaultHandler {
 public:
  FaultHandler() {
    static char stack[64 << 10];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof(stack);
    sigaltstack(&own, &previous_stack_);
    struct sigaction action = {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int k = 0; k < kSignals; ++k) sigaction(kSignal[k], &action, &previous_[k]);
  }
  ~FaultHandler() {
    for (int k = 0; k < kSignals; ++k) sigaction(kSignal[k], &previous_[k], nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

 private:
  static constexpr int kSignals = 4;
  static constexpr int kSignal[kSignals] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  stack_t previous_stack_;
  struct sigaction previous_[kSignals];
};
constexpr int FaultHandler::kSignal[];

const char* Refuse(const Launch& launch) {
  unsigned block = launch.block.x * launch.block.y * launch.block.z;
  if (block == 0 || block > kMostThreads) return "a block has 1 to 1024 threads";
  if (launch.kernel->threads_limit && block > unsigned(launch.kernel->threads_limit)) {
    return "the block is larger than the kernel's __launch_bounds__";
  }
  if (!launch.grid.x || !launch.grid.y || !launch.grid.z) return "the grid is empty";
  if (launch.grid.y > 65535 || launch.grid.z > 65535) return "a grid has 65535 blocks along y, z";
  size_t shared = launch.kernel->shared_end - launch.kernel->shared_begin;
  if (shared > kStaticSharedNbytes) return "a kernel has 48 KiB of static shared memory";
  return nullptr;
}

}  // namespace

const char* LastError() { return last_error; }

void SetLastError(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error, sizeof(last_error), format, values);
  va_end(values);
}

int Run(const Launch& launch, void** launch_arguments) {
  const char* reason = Refuse(launch);
  if (reason != nullptr) {
    SetLastError("%s: %s", launch.kernel->name, reason);
    return kInvalidValue;
  }
  kernel = launch.kernel;
  arguments = launch_arguments;
  blockDim = {launch.block.x, launch.block.y, launch.block.z};
  gridDim = {launch.grid.x, launch.grid.y, launch.grid.z};
  thread_count = launch.block.x * launch.block.y * launch.block.z;
  FaultHandler handler;
  if (sigsetjmp(failed, 1) == 0) {
    is_running = true;
    RunGrid();
    is_running = false;
  } else {
    is_running = false;
    return kLaunchFailed;
  }
  const char* overrun = FindOverrun();
  if (overrun != nullptr) {
    SetLastError("%s wrote %s", launch.kernel->name, overrun);
    return kLaunchFailed;
  }
  return kSuccess;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

EXPORT void emulator_fail(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  EmulatedIndex thread = fibers[current].index;
  SetLastError("%s, block (%u, %u, %u), thread (%u, %u, %u): %s", kernel->name, blockIdx.x,
               blockIdx.y, blockIdx.z, thread.x, thread.y, thread.z, text);
  siglongjmp(failed, 1);
}

EXPORT int emulator_lane() { return current % kWarp; }

EXPORT void emulator_barrier(int line) {
  fibers[current].state = State::kAtBarrier;
  fibers[current].line = line;
  Yield();
}

EXPORT uint64_t emulator_exchange(unsigned mask, uint64_t value, int source, int line) {
  Fiber& fiber = fibers[current];
  if (!(mask >> (current % kWarp) & 1)) {
    emulator_fail("line %d: the mask %08x lacks the lane", line, mask);
  }
  fiber.state = State::kAtWarp;
  fiber.line = line;
  fiber.mask = mask;
  fiber.given = value;
  fiber.source = source;
  Yield();
  if (!fiber.was_answered) {
    emulator_fail("line %d: asks for the value of lane %d, which gives none", line, source);
  }
  return fiber.taken;
}

EXPORT unsigned emulator_vote(unsigned mask, bool value, int line) {
  emulator_exchange(mask, value, -1, line);
  return fibers[current].votes;
}

}  // extern "C"
