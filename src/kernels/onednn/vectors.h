// SPDX-License-Identifier: Apache-2.0
// Which vector instructions our own kernels beside oneDNN's use.
#ifndef AMP_IR_KERNELS_VECTORS_H_
#define AMP_IR_KERNELS_VECTORS_H_

#include "onednn/plan.h"

namespace amp_ir::onednn {

enum class Vectors { kBaseline, kAvx2, kAvx512 };

// As oneDNN's own kernels, so that ONEDNN_MAX_CPU_ISA bounds these too.
inline Vectors ChooseVectors() {
#if defined(__x86_64__)
  if (HasIsa(dnnl::cpu_isa::avx512_core)) return Vectors::kAvx512;
  const bool has_fma = __builtin_cpu_supports("fma");
  if (has_fma && HasIsa(dnnl::cpu_isa::avx2)) return Vectors::kAvx2;
#endif
  return Vectors::kBaseline;
}

#if defined(__x86_64__)
template <class Body>
__attribute__((target("avx2,fma"))) void RunAvx2(Body body) {
  body();
}

template <class Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void
RunAvx512(Body body) {
  body();
}
#endif

// Calls a body that is always inlined, with AVX2 where there is that or more.
template <class Body>
void RunWithVectors(const Body& body) {
#if defined(__x86_64__)
  static const bool has_avx2 = ChooseVectors() != Vectors::kBaseline;
  if (has_avx2) return RunAvx2(body);
#endif
  body();
}

// The same with AVX-512 where there is that, for which `wide` is written.
template <class Body, class Wide>
void RunWithVectors(const Body& body, [[maybe_unused]] const Wide& wide) {
#if defined(__x86_64__)
  static const bool has_avx512 = ChooseVectors() == Vectors::kAvx512;
  if (has_avx512) return RunAvx512(wide);
#endif
  RunWithVectors(body);
}

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_VECTORS_H_
