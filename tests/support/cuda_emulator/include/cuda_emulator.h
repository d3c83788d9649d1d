// SPDX-License-Identifier: Apache-2.0
// What a generated CUDA source expects of the compiler, for g++: each kernel becomes an ordinary
// function that the emulator (emulator.cc) calls once a thread.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUDA_EMULATOR 1
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(nbytes) __attribute__((aligned(nbytes)))
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")

struct EmulatedIndex {
  unsigned int x, y, z;
};

extern "C" {
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

// Ends the launch; the text is what the host sees as the error's name.
[[noreturn]] void emulator_fail(const char* format, ...);
// Waits until every thread of the block is at the same line of the source.
void emulator_barrier(int line);
// Gives `value` to the warp and returns what lane `source` gave; nothing for source < 0. `mask`
// names the lanes that must come to the same line, this one among them.
uint64_t emulator_exchange(unsigned mask, uint64_t value, int source, int line);
// The lanes of `mask` whose value is not zero.
unsigned emulator_vote(unsigned mask, bool value, int line);
int emulator_lane();
}

// Vectors, aligned as a GPU requires of their loads and stores. They are copied by functions, not
// by the compiler, since it is the binding of their references that g++ checks for alignment.
#define EMULATED_VECTORS(type, name, nbytes)                                           \
  struct alignas(2 * (nbytes)) name##2 {                                               \
    type x, y;                                                                         \
    name##2() = default;                                                               \
    name##2(type x, type y) : x(x), y(y) {}                                            \
    name##2(const name##2 & other) : x(other.x), y(other.y) {}                         \
    name##2 & operator=(const name##2 & other) {                                       \
      x = other.x, y = other.y;                                                        \
      return *this;                                                                    \
    }                                                                                  \
  };                                                                                   \
  struct alignas((nbytes) == 8 ? 16 : 4 * (nbytes)) name##4 {                          \
    type x, y, z, w;                                                                   \
    name##4() = default;                                                               \
    name##4(type x, type y, type z, type w) : x(x), y(y), z(z), w(w) {}                \
    name##4(const name##4 & other) : x(other.x), y(other.y), z(other.z), w(other.w) {} \
    name##4 & operator=(const name##4 & other) {                                       \
      x = other.x, y = other.y, z = other.z, w = other.w;                              \
      return *this;                                                                    \
    }                                                                                  \
  };                                                                                   \
  struct name##3 { type x, y, z; };                                                    \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                     \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATED_VECTORS(char, char, 1)
EMULATED_VECTORS(unsigned char, uchar, 1)
EMULATED_VECTORS(short, short, 2)
EMULATED_VECTORS(unsigned short, ushort, 2)
EMULATED_VECTORS(int, int, 4)
EMULATED_VECTORS(unsigned int, uint, 4)
EMULATED_VECTORS(float, float, 4)
EMULATED_VECTORS(long long, longlong, 8)
EMULATED_VECTORS(unsigned long long, ulonglong, 8)
EMULATED_VECTORS(double, double, 8)
#undef EMULATED_VECTORS

// Bits

template <class To, class From>
inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t(a) * b) >> 32; }
inline int __mulhi(int a, int b) { return (int64_t(a) * b) >> 32; }

// Arithmetic

template <class T>
inline T __ldg(const T* address) {
  return *address;
}
#define EMULATED_ORDER(type)                                \
  inline type max(type a, type b) { return a < b ? b : a; } \
  inline type min(type a, type b) { return b < a ? b : a; }
EMULATED_ORDER(int)
EMULATED_ORDER(unsigned)
EMULATED_ORDER(long)
EMULATED_ORDER(unsigned long)
EMULATED_ORDER(long long)
EMULATED_ORDER(unsigned long long)
#undef EMULATED_ORDER
// Of a number and a NaN, the number.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dadd_rn(double x, double y) { return x + y; }
// The prelude of CUDA sources has them, with instructions that no CPU has.
inline float amp_ir_maximum(float x, float y) { return x > y || x != x ? x : y; }
inline float amp_ir_minimum(float x, float y) { return x < y || x != x ? x : y; }
inline unsigned short amp_ir_bfloat16_bits(float x) {
  unsigned int bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
}
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }

// Atomics: blocks and threads take turns, so plain arithmetic is atomic.

#define EMULATED_ATOMIC(name, result)  \
  template <class T>                   \
  inline T name(T* address, T value) { \
    T old = *address;                  \
    *address = result;                 \
    return old;                        \
  }
EMULATED_ATOMIC(atomicAdd, old + value)
EMULATED_ATOMIC(atomicSub, old - value)
EMULATED_ATOMIC(atomicMax, old < value ? value : old)
EMULATED_ATOMIC(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicAnd, old& value)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicXor, old ^ value)
EMULATED_ATOMIC(atomicExch, value)
#undef EMULATED_ATOMIC
template <class T>
inline T atomicCAS(T* address, T compare, T value) {
  T old = *address;
  if (old == compare) *address = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads of a block and of a warp

template <class T>
inline T emulated_shuffle(unsigned mask, T value, int source, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulator_exchange(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline int emulated_from(int lane, int source, int first, int last) {
  return source < first || source > last ? lane : source;
}
template <class T>
inline T emulated_shfl(unsigned mask, T value, int from, int width, int line) {
  int lane = emulator_lane();
  return emulated_shuffle(mask, value, (lane & ~(width - 1)) | (from & (width - 1)), line);
}
template <class T>
inline T emulated_shfl_up(unsigned mask, T value, int delta, int width, int line) {
  int lane = emulator_lane();
  int from = emulated_from(lane, lane - delta, lane & ~(width - 1), 31);
  return emulated_shuffle(mask, value, from, line);
}
template <class T>
inline T emulated_shfl_down(unsigned mask, T value, int delta, int width, int line) {
  int lane = emulator_lane();
  int from = emulated_from(lane, lane + delta, 0, lane | (width - 1));
  return emulated_shuffle(mask, value, from, line);
}
template <class T>
inline T emulated_shfl_xor(unsigned mask, T value, int bits, int width, int line) {
  int lane = emulator_lane();
  int from = emulated_from(lane, lane ^ bits, 0, lane | (width - 1));
  return emulated_shuffle(mask, value, from, line);
}
#define __shfl_sync(mask, value, from, width) emulated_shfl(mask, value, from, width, __LINE__)
#define __shfl_up_sync(mask, value, by, width) emulated_shfl_up(mask, value, by, width, __LINE__)
#define __shfl_down_sync(mask, value, by, width) \
  emulated_shfl_down(mask, value, by, width, __LINE__)
#define __shfl_xor_sync(mask, value, by, width) emulated_shfl_xor(mask, value, by, width, __LINE__)
#define __syncthreads() emulator_barrier(__LINE__)
#define __syncwarp(...) emulator_exchange(0xffffffffu, 0, -1, __LINE__)
#define __ballot_sync(mask, value) emulator_vote(mask, value, __LINE__)
#define __any_sync(mask, value) (emulator_vote(mask, value, __LINE__) != 0)
#define __all_sync(mask, value) (emulator_vote(mask, !(value), __LINE__) == 0)

// How the emulator calls a kernel: through pointers to its arguments, as the driver is given them.

template <class... A, size_t... I>
inline void emulated_call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
template <class... A>
inline void emulated_call(void (*kernel)(A...), void** arguments) {
  emulated_call(kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A>
inline int emulated_sizes(void (*)(A...), int* nbytes) {
  int k = 0;
  ((nbytes[k++] = sizeof(A)), ...);
  return k;
}

// What the emulator asks a library of kernels about one of them.
struct EmulatedKernel {
  const char* name;
  void (*call)(void** arguments);
  int (*sizes)(int* nbytes);
  int threads_limit;
  char* shared_begin;
  char* shared_end;
};
// A kernel's shared variables lie in a section of their own, to be poisoned when a block starts.
#define EMULATED_KERNEL(kernel, limit)                                                      \
  extern "C" char __start_shared_##kernel[] __attribute__((weak));                          \
  extern "C" char __stop_shared_##kernel[] __attribute__((weak));                           \
  extern "C" __attribute__((visibility("default"))) const EmulatedKernel emulated_##kernel{ \
      #kernel,                                                                              \
      [](void** arguments) { emulated_call(kernel, arguments); },                           \
      [](int* nbytes) { return emulated_sizes(kernel, nbytes); },                           \
      limit,                                                                                \
      __start_shared_##kernel,                                                              \
      __stop_shared_##kernel};
