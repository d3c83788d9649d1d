// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "batched_matrices.h"
#include "onednn_ops.h"
#include "onednn_plan.h"
#include "widen.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

struct Problem : BatchedMatrices {
  std::optional<StridedTensor> bias;
  Epilogue epilogue;
};

dnnl::primitive_attr Attributes(Epilogue epilogue) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (epilogue == Epilogue::kNone) return attr;
  dnnl::post_ops ops;
  ops.append_eltwise(epilogue == Epilogue::kRelu   ? dnnl::algorithm::eltwise_relu
                     : epilogue == Epilogue::kGelu ? dnnl::algorithm::eltwise_gelu_erf
                                                   : dnnl::algorithm::eltwise_gelu_tanh,
                     0.F, 0.F);
  attr.set_post_ops(ops);
  return attr;
}

// bias [n] as oneDNN wants it: as many dims as the result, all but the last 1.
dnnl::memory::desc DescribeBias(const StridedTensor& bias, int rank) {
  dnnl::memory::dims dims(rank, 1);
  dims.back() = bias.dims[0];
  dnnl::memory::dims strides(rank, bias.dims[0]);
  strides.back() = 1;
  return dnnl::memory::desc(dims, DataType(bias.dtype), strides);
}

dnnl::matmul::primitive_desc Create(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                    const std::optional<dnnl::memory::desc>& bias,
                                    const dnnl::memory::desc& out, Epilogue epilogue) {
  constexpr bool kAllowEmpty = true;
  const dnnl::primitive_attr attr = Attributes(epilogue);
  if (bias) return {CpuEngine(), a, b, *bias, out, attr, kAllowEmpty};
  return {CpuEngine(), a, b, out, attr, kAllowEmpty};
}

// oneDNN's reference implementations are right and hundreds of times slower.
bool IsUsable(const dnnl::matmul::primitive_desc& pd) {
  return pd && std::string(pd.impl_info_str()).find("ref") == std::string::npos;
}

bool IsColumnMajor(const StridedTensor& t) {
  return t.strides[t.rank - 1] != 1 && t.strides[t.rank - 2] == 1 && t.dims[t.rank - 1] != 1;
}

bool HasRepeatedElements(const StridedTensor& t) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.strides[i] == 0 && t.dims[i] > 1) return true;
  }
  return false;
}

StridedTensor RowMajor(const StridedTensor& t) {
  StridedTensor dense = t;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    dense.strides[i] = stride;
    stride *= t.dims[i];
  }
  return dense;
}

class PlanBuilder {
 public:
  explicit PlanBuilder(const Problem& problem) : problem_(problem) {}

  std::shared_ptr<const Plan> Build() {
    const bool low = SameDtype(problem_.a.dtype, problem_.b.dtype) && IsNative(problem_.a.dtype);
    const DLDataType compute = low ? problem_.a.dtype : kFloat32;
    a_ = Input(0, problem_.a, compute);
    b_ = Input(1, problem_.b, compute);
    if (problem_.bias) {
      // oneDNN 3.2 has no float16 bias where the CPU has AMX.
      const bool fits = IsFloat(problem_.bias->dtype, 32) ||
                        (IsBfloat16(problem_.bias->dtype) && IsBfloat16(compute));
      bias_ = Input(2, *problem_.bias, fits ? problem_.bias->dtype : kFloat32);
    }
    const StridedTensor& out = problem_.out;
    const bool direct = IsFloat(out.dtype, 32) || SameDtype(out.dtype, compute);
    out_ = direct ? Operand{plan_->AddArgument(3, Describe(out)), out}
                  : Scratch(DenseLike(out, kFloat32));
    Multiply();
    if (!direct) {
      plan_->AddConversion(out_.id, out_.view, plan_->AddArgument(3, Describe(out)), out);
      plan_->AddNote("+narrow_out");
    }
    return plan_;
  }

 private:
  struct Operand {
    Plan::Id id;
    StridedTensor view;
  };

  Operand Scratch(const StridedTensor& view) { return {plan_->AddScratch(Describe(view)), view}; }

  // The caller's tensor; a copy when the computation is in another dtype or elements repeat, which
  // oneDNN's descriptions cannot say.
  Operand Input(int argument, const StridedTensor& t, DLDataType dtype) {
    const bool repeats = HasRepeatedElements(t);
    const bool same = SameDtype(t.dtype, dtype);
    Operand given{plan_->AddArgument(argument, Describe(repeats ? DenseLike(t, t.dtype) : t)), t};
    if (same && !repeats) return given;
    Operand copy = Scratch(DenseLike(t, dtype));
    plan_->AddConversion(given.id, given.view, copy.id, copy.view);
    plan_->AddNote(same ? "copy+" : "widen+");
    return copy;
  }

  // The same memory as a transposed matrix: out^T = b^T @ a^T.
  static Operand Swap(Operand operand) {
    StridedTensor& t = operand.view;
    std::swap(t.dims[t.rank - 1], t.dims[t.rank - 2]);
    std::swap(t.strides[t.rank - 1], t.strides[t.rank - 2]);
    return operand;
  }

  Operand Densify(const Operand& given) {
    Operand dense = Scratch(RowMajor(given.view));
    plan_->AddReorder(given.id, dense.id);
    plan_->AddNote("reorder+");
    return dense;
  }

  void Multiply() {
    if (IsColumnMajor(out_.view) && !bias_ && TryMultiply(Swap(b_), Swap(a_), Swap(out_))) return;
    if (TryMultiply(a_, b_, out_)) return;
    // Some layout has no fast implementation; plain row-major operands always have one.
    a_ = Densify(a_);
    b_ = Densify(b_);
    if (TryMultiply(a_, b_, out_)) return;
    Operand dense = Scratch(RowMajor(out_.view));
    if (!TryMultiply(a_, b_, dense)) {
      TVM_FFI_THROW(RuntimeError) << "oneDNN has no matmul for " << DimsToString(a_.view) << " @ "
                                  << DimsToString(b_.view);
    }
    plan_->AddReorder(dense.id, out_.id);
    plan_->AddNote("+reorder_out");
  }

  bool TryMultiply(const Operand& a, const Operand& b, const Operand& out) {
    std::optional<dnnl::memory::desc> bias;
    if (bias_) bias = DescribeBias(bias_->view, out.view.rank);
    auto pd =
        Create(Describe(a.view), Describe(b.view), bias, Describe(out.view), problem_.epilogue);
    if (!IsUsable(pd)) return false;
    std::vector<std::pair<int, Plan::Id>> args{
        {DNNL_ARG_SRC, a.id}, {DNNL_ARG_WEIGHTS, b.id}, {DNNL_ARG_DST, out.id}};
    if (bias_) args.emplace_back(DNNL_ARG_BIAS, bias_->id);
    plan_->AddPrimitive(dnnl::matmul(pd), pd.scratchpad_desc(), args);
    plan_->AddNote(std::string("matmul ") + pd.impl_info_str());
    return true;
  }

  const Problem& problem_;
  std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
  Operand a_, b_, out_;
  std::optional<Operand> bias_;
};

}  // namespace

void Matmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
            const StridedTensor& out, Epilogue epilogue) {
  if (out.numel() == 0) return;
  Problem problem{{a, b, out}, std::nullopt, epilogue};
  if (bias != nullptr) problem.bias = *bias;
  PlanKey key = OperationKey(0);
  key.Add(static_cast<int64_t>(epilogue));
  key.Add(problem.a);
  key.Add(problem.b);
  key.Add(problem.out);
  if (bias != nullptr) key.Add(*bias);
  auto plan = CachedPlan(key, [&] { return PlanBuilder(problem).Build(); });
  plan->Run({a.data, b.data, bias != nullptr ? bias->data : nullptr, out.data});
}

}  // namespace amp_ir::onednn
