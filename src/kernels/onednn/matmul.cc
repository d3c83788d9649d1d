// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "onednn/ops.h"
#include "onednn/plan.h"
#include "onednn/tile_matmul.h"
#include "onednn/widen.h"
#include "tensors/batched_matrices.h"
#include "tensors/workspace.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

// Extents from which another algorithm than oneDNN 3.2's first choice is faster, measured on an
// Emerald Rapids with 2 threads, each beside the first choice in one run. "Low" is bfloat16 with
// AMX; with avx512_bf16 alone nothing is gained.
//
// Float32 reads a row-major `b` where it is stored, unless its rows are a power of two long. Rows a
// multiple of 4 KiB apart share cache sets: 1024 x 768 x 3072 takes 0.52 of the time with a copy.
constexpr int64_t kAliasedColumns = 1024, kAliasedRows = 128;
// The older gemm copies a part of its operands at a time, which sums of so many terms gain from,
// the gradient of a vocabulary's logits: low 1024 x 30522 x 768 0.7 of the time, 512 x 50257 x 768
// 0.86, 1024 x 16384 x 768 0.9, with 10000 terms 0.95 to 1.05. It asks the system for the memory
// of its copies: measured with 2 threads as 0.6 to 1.0 of this for each row and column of the
// result (1024 x 30522 x 768 in float32 5.9 MiB, 1024 x 16384 x 4096 18.0).
constexpr int64_t kGemmRows = 512, kGemmTerms = 16384, kGemmBytesPerExtent = 3700;
// Without AVX-512 the gemm is oneDNN's first choice in float32. It copies panels of at most 10000
// columns by 192 terms and 192 terms by 384 rows of the result, unless the result is narrower than
// 264 in either direction (gemm_info.cpp and gemm_driver.cpp of oneDNN 3.2).
constexpr int64_t kPanelColumns = 10000, kPanelTerms = 192, kPanelRows = 384, kCopiedExtent = 264;
// Below that it reads both operands where they are. A sum over the rows of both, the gradient of a
// weight, then waits for the cache where rows are a multiple of 2 KiB apart, which share sets of
// it. With a copy whose rows are a line longer, milliseconds on two cores of a Zen 3, before and
// after: 1024 x 2048 x 100 9.0 and 5.4, 256 x 512 x 1024 4.4 and 2.5, 512 x 2048 x 128 3.4 and 2.5.
// In a step, one of 64 x 2048 x 512 gains nothing.
constexpr int64_t kSharingColumns = 512, kLineColumns = 16, kFewColumns = 96;
// What glibc keeps free at the end of each arena beside the rest (M_TOP_PAD).
constexpr int64_t kTopPad = 128 << 10;

// Where a product is (alpha / beta) times itself for a while, up to this factor: a product of 1e32
// does not overflow by it. Beyond, what is stored at `out` is multiplied first, in a pass of its
// own.
constexpr float kMostRatio = 1e6F;

// What is done with the matmul beside what is stored at `out`; see PostOps.
struct Accumulation {
  bool is_on = false, scales_product = false, scales_total = false;
};

struct Problem : BatchedMatrices {
  std::optional<StridedTensor> bias;
  Epilogue epilogue = Epilogue::kNone;
  // How oneDNN laid `b` out, whose strides then mean nothing.
  std::optional<dnnl::memory::desc> layout_of_b;
  Accumulation accumulation;
};

// One number as oneDNN's post-ops multiply a result of this rank by it.
dnnl::memory::desc DescribeFactor(int rank) {
  return dnnl::memory::desc(dnnl::memory::dims(rank, 1), dnnl::memory::data_type::f32,
                            dnnl::memory::dims(rank, 1));
}

// oneDNN's own factor of a sum is part of the primitive: a step size that changes would make a new
// one each time, a millisecond. So out = beta * (out + (alpha / beta) * product).
dnnl::post_ops PostOps(const Problem& problem, bool sums) {
  dnnl::post_ops ops;
  if (problem.epilogue != Epilogue::kNone) {
    ops.append_eltwise(problem.epilogue == Epilogue::kRelu   ? dnnl::algorithm::eltwise_relu
                       : problem.epilogue == Epilogue::kGelu ? dnnl::algorithm::eltwise_gelu_erf
                                                             : dnnl::algorithm::eltwise_gelu_tanh,
                       0.F, 0.F);
  }
  if (!sums) return ops;
  const dnnl::memory::desc factor = DescribeFactor(problem.out.rank);
  const Accumulation& sum = problem.accumulation;
  if (sum.scales_product) ops.append_binary(dnnl::algorithm::binary_mul, factor);
  ops.append_sum(1.F);
  if (sum.scales_total) ops.append_binary(dnnl::algorithm::binary_mul, factor);
  return ops;
}

dnnl::primitive_attr Attributes(const dnnl::post_ops& ops) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_post_ops(ops);
  return attr;
}

dnnl::memory::desc AnyLayout(const StridedTensor& t) {
  return dnnl::memory::desc(dnnl::memory::dims(t.dims.begin(), t.dims.begin() + t.rank),
                            DataType(t.dtype), dnnl::memory::format_tag::any);
}

// bias [n] as oneDNN wants it: as many dims as the result, all but the last 1.
dnnl::memory::desc DescribeBias(const StridedTensor& bias, int rank) {
  dnnl::memory::dims dims(rank, 1);
  dims.back() = bias.dims[0];
  dnnl::memory::dims strides(rank, bias.dims[0]);
  strides.back() = 1;
  return dnnl::memory::desc(dims, DataType(bias.dtype), strides);
}

using PrimitiveDesc = dnnl::matmul::primitive_desc;

PrimitiveDesc Create(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                     const std::optional<dnnl::memory::desc>& bias, const dnnl::memory::desc& out,
                     const dnnl::post_ops& ops) {
  constexpr bool kAllowEmpty = true;
  const dnnl::primitive_attr attr = Attributes(ops);
  if (bias) return {CpuEngine(), a, b, *bias, out, attr, kAllowEmpty};
  return {CpuEngine(), a, b, out, attr, kAllowEmpty};
}

// oneDNN's reference implementations are right and hundreds of times slower.
bool IsUsable(const PrimitiveDesc& pd) {
  return pd && std::string(pd.impl_info_str()).find("ref") == std::string::npos;
}

bool IsGemm(const PrimitiveDesc& pd) {
  return std::string(pd.impl_info_str()).rfind("gemm:jit", 0) == 0;
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

bool IsRowMajor(const StridedTensor& t) { return t.strides[t.rank - 1] == 1; }

bool UsesAmx(DLDataType dtype) {
  return IsBfloat16(dtype) && HasIsa(dnnl::cpu_isa::avx512_core_amx);
}

// Bytes that the gemm of a CPU without AVX-512 leaves with the process: glibc returns freed memory
// to the system only beyond twice the largest block that it mapped, in each thread's arena
// (mallopt(3), M_TRIM_THRESHOLD).
int64_t KeptByPanels(const StridedTensor& out) {
  const int64_t rows = out.dims[out.rank - 2], columns = out.dims[out.rank - 1];
  if (HasIsa(dnnl::cpu_isa::avx512_core) || std::min(rows, columns) < kCopiedExtent) return 0;
  const int64_t terms = kPanelTerms * static_cast<int64_t>(sizeof(float));
  const int64_t largest = (std::min(columns, kPanelColumns) + kPanelRows) * terms;
  return omp_get_max_threads() * (2 * largest + kTopPad);
}

// Whether oneDNN's gemm is the faster one for a [m, k] @ b [k, n].
bool PrefersGemm(const StridedTensor& a, const StridedTensor& b) {
  const bool is_known = IsFloat(a.dtype, 32) || UsesAmx(a.dtype);
  return is_known && a.rank == 2 && IsRowMajor(a) && IsRowMajor(b) && a.dims[0] >= kGemmRows &&
         a.dims[1] >= kGemmTerms;
}

bool IsPowerOfTwo(int64_t n) { return (n & (n - 1)) == 0; }

// Whether float32 with so many rows reads b [k, n] faster from a copy.
bool IsAliased(const StridedTensor& b, int64_t rows) {
  const int64_t columns = b.dims[1];
  return IsFloat(b.dtype, 32) && rows >= kAliasedRows && columns % kAliasedColumns == 0 &&
         !IsPowerOfTwo(columns);
}

// Whether the gemm of a CPU without AVX-512 reads both a [m, k] and b [k, n] where they are, in the
// order of their m and n columns.
bool SumsRowsInPlace(const StridedTensor& a, const StridedTensor& b) {
  const int64_t narrow = std::min(a.dims[0], b.dims[1]);
  return !HasIsa(dnnl::cpu_isa::avx512_core) && IsFloat(a.dtype, 32) && IsColumnMajor(a) &&
         IsRowMajor(b) && narrow >= kFewColumns && narrow < kCopiedExtent;
}

int64_t NumBytes(const StridedTensor& t) { return t.numel() * (t.dtype.bits / 8); }

class PlanBuilder {
 public:
  explicit PlanBuilder(const Problem& problem) : problem_(problem) {}

  std::shared_ptr<const Plan> Build() {
    const bool low = SameDtype(problem_.a.dtype, problem_.b.dtype) && IsNative(problem_.a.dtype);
    const DLDataType compute = low ? problem_.a.dtype : kFloat32;
    a_ = Input(0, problem_.a, compute);
    if (problem_.layout_of_b) {
      b_ = {plan_->AddArgument(1, *problem_.layout_of_b), problem_.b, problem_.layout_of_b};
    } else {
      b_ = Input(1, problem_.b, compute);
    }
    if (problem_.bias) {
      // oneDNN 3.2 has no float16 bias where the CPU has AMX.
      const bool fits = IsFloat(problem_.bias->dtype, 32) ||
                        (IsBfloat16(problem_.bias->dtype) && IsBfloat16(compute));
      bias_ = Input(2, *problem_.bias, fits ? problem_.bias->dtype : kFloat32);
    }
    const StridedTensor& out = problem_.out;
    const bool direct = IsFloat(out.dtype, 32) || SameDtype(out.dtype, compute);
    out_ = direct ? Operand{plan_->AddArgument(3, Describe(out)), out}
                  : Temporary(DenseLike(out, kFloat32));
    const dnnl::memory::desc factor = DescribeFactor(out.rank);
    if (problem_.accumulation.scales_product) factor_ = plan_->AddArgument(4, factor);
    if (problem_.accumulation.scales_total) total_ = plan_->AddArgument(5, factor);
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
    std::optional<dnnl::memory::desc> layout = std::nullopt;  // packed: `view` has only its dims
  };

  static dnnl::memory::desc LayoutOf(const Operand& operand) {
    return operand.layout ? *operand.layout : Describe(operand.view);
  }

  Operand Temporary(const StridedTensor& view) {
    return {plan_->AddTemporary(Describe(view)), view};
  }

  // The caller's tensor; a copy when the computation is in another dtype or elements repeat, which
  // oneDNN's descriptions cannot say.
  Operand Input(int argument, const StridedTensor& t, DLDataType dtype) {
    const bool repeats = HasRepeatedElements(t);
    const bool same = SameDtype(t.dtype, dtype);
    Operand given{plan_->AddArgument(argument, Describe(repeats ? DenseLike(t, t.dtype) : t)), t};
    if (same && !repeats) return given;
    Operand copy = Temporary(DenseLike(t, dtype));
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
    Operand dense = Temporary(RowMajor(given.view));
    plan_->AddReorder(given.id, dense.id);
    plan_->AddNote("reorder+");
    return dense;
  }

  void Multiply() {
    const bool swaps = IsColumnMajor(out_.view) && !bias_ && !b_.layout;
    if (swaps && TryMultiply(Swap(b_), Swap(a_), Swap(out_))) return;
    if (TryMultiplyTiles(a_, b_, out_, false) || TryMultiplyCopy()) return;
    SpreadRows();
    if (TryMultiply(a_, b_, out_) || TryMultiplyAside()) return;
    // Some layout has no fast implementation; plain row-major operands always have one.
    a_ = Densify(a_);
    b_ = Densify(b_);
    if (TryMultiply(a_, b_, out_) || TryMultiplyAside()) return;
    Operand dense = Temporary(RowMajor(out_.view));
    if (sums_ || !TryMultiply(a_, b_, dense)) {
      TVM_FFI_THROW(RuntimeError) << "oneDNN has no matmul for " << DimsToString(a_.view) << " @ "
                                  << DimsToString(b_.view);
    }
    plan_->AddReorder(dense.id, out_.id);
    plan_->AddNote("+reorder_out");
  }

  // The product in memory of its own, then the sum: CPUs without avx512 have no primitive for both.
  bool TryMultiplyAside() {
    if (!sums_) return false;
    Operand dense = Temporary(RowMajor(out_.view));
    sums_ = false;
    const bool is_done = TryMultiply(a_, b_, dense);
    sums_ = !is_done;
    if (!is_done) return false;
    plan_->AddSum(dense.id, dense.view, out_.id, out_.view, factor_, total_);
    plan_->AddNote("+sum");
    return true;
  }

  PrimitiveDesc PrimitiveFor(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                             const StridedTensor& out) {
    std::optional<dnnl::memory::desc> bias;
    if (bias_) bias = DescribeBias(bias_->view, out.rank);
    return Create(a, b, bias, Describe(out), PostOps(problem_, sums_));
  }

  bool TryMultiply(const Operand& a, const Operand& b, const Operand& out) {
    if (TryMultiplyTiles(a, b, out, false)) return true;
    if (!b.layout && PrefersGemm(a.view, b.view)) {
      PrimitiveDesc pd = PrimitiveFor(LayoutOf(a), LayoutOf(b), out.view);
      while (pd && !IsGemm(pd) && pd.next_impl()) continue;
      if (pd && IsGemm(pd)) {
        plan_->CountPersistent((out.view.dims[0] + out.view.dims[1]) * kGemmBytesPerExtent);
        return AddMatmul(pd, a.id, b.id, out.id);
      }
    }
    PrimitiveDesc pd = PrimitiveFor(LayoutOf(a), LayoutOf(b), out.view);
    if (MissesAmx(pd) && TryMultiplyTiles(a, b, out, true)) return true;
    if (!IsUsable(pd)) return false;
    if (IsGemm(pd)) plan_->CountPersistent(KeptByPanels(out.view));
    return AddMatmul(pd, a.id, b.id, out.id);
  }

  // By a kernel of ours, where it is faster; or `always` where it multiplies these at all.
  bool TryMultiplyTiles(const Operand& a, const Operand& b, const Operand& out, bool always) {
    const bool is_plain = !b.layout && problem_.epilogue == Epilogue::kNone;
    if (!is_plain || !(always || TileMatmul::IsFaster(a.view, b.view, out.view))) return false;
    ScaledSum sum;
    if (sums_) sum = {true, factor_, total_};
    TileOperands operands{{a.view, a.id}, {b.view, b.id}, {out.view, out.id}};
    if (bias_) operands.bias.emplace(TileOperands::Operand{bias_->view, bias_->id});
    return AddTileMatmul(operands, sum, plan_.get());
  }

  // Whether oneDNN multiplies low operands without AMX where there is that: some sums of few terms,
  // on one thread. Ours take 0.17 to 0.5 of the time.
  bool MissesAmx(const PrimitiveDesc& pd) const {
    const bool names_amx = pd && std::string(pd.impl_info_str()).find("amx") != std::string::npos;
    return UsesAmx(a_.view.dtype) && !names_amx;
  }

  // The product of a copy of b in the layout that oneDNN chooses.
  bool TryMultiplyCopy() {
    const bool is_plain = b_.view.rank == 2 && IsRowMajor(b_.view) && !b_.layout;
    if (!is_plain || !IsAliased(b_.view, out_.view.dims[0])) return false;
    PrimitiveDesc pd = PrimitiveFor(LayoutOf(a_), AnyLayout(b_.view), out_.view);
    return IsUsable(pd) && AddMatmul(pd, a_.id, Reordered(b_, pd.weights_desc()), out_.id);
  }

  // Copies those of `SumsRowsInPlace` whose rows share sets of the cache.
  void SpreadRows() {
    if (out_.view.rank != 2 || b_.layout || !SumsRowsInPlace(a_.view, b_.view)) return;
    for (const auto& [operand, dim] : {std::pair(&a_, 1), std::pair(&b_, 0)}) {
      StridedTensor spread = operand->view;
      if (spread.strides[dim] % kSharingColumns != 0) continue;
      spread.strides[dim] = spread.dims[1 - dim] + kLineColumns;
      const Operand copy = Temporary(spread);
      plan_->AddReorder(operand->id, copy.id);
      plan_->AddNote("spread+");
      *operand = copy;
    }
  }

  Plan::Id Reordered(const Operand& given, const dnnl::memory::desc& desc) {
    if (desc == Describe(given.view)) return given.id;
    const Plan::Id packed = plan_->AddTemporary(desc);
    plan_->AddReorder(given.id, packed);
    plan_->AddNote("pack+");
    return packed;
  }

  static int FactorArgument(int position) {
    return DNNL_ARG_ATTR_MULTIPLE_POST_OP(position) | DNNL_ARG_SRC_1;
  }

  bool AddMatmul(const PrimitiveDesc& pd, Plan::Id a, Plan::Id b, Plan::Id out) {
    std::vector<std::pair<int, Plan::Id>> args{
        {DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, out}};
    if (bias_) args.emplace_back(DNNL_ARG_BIAS, bias_->id);
    // The post-ops: a factor, the sum, a factor; either factor may be missing.
    if (sums_ && factor_ >= 0) args.emplace_back(FactorArgument(0), factor_);
    if (sums_ && total_ >= 0) args.emplace_back(FactorArgument(factor_ >= 0 ? 2 : 1), total_);
    plan_->AddPrimitive(dnnl::matmul(pd), pd.scratchpad_desc(), args);
    plan_->AddNote(std::string("matmul ") + pd.impl_info_str());
    return true;
  }

  const Problem& problem_;
  std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
  Operand a_, b_, out_;
  std::optional<Operand> bias_;
  // Numbers to multiply by; -1: none.
  Plan::Id factor_ = -1, total_ = -1;
  // Whether the primitive adds to what is stored at its result.
  bool sums_ = problem_.accumulation.is_on;
};

// How oneDNN lays out `b` [k, n] for its matmuls, whatever the number of their rows; nothing where
// it does so with no algorithm of its own, or in one that takes more than `nbytes`.
std::optional<dnnl::memory::desc> LayoutOfPacked(const StridedTensor& b, int64_t nbytes) {
  constexpr int64_t kRows = 16;
  if (b.rank != 2 || b.numel() == 0 || !IsNative(b.dtype)) return std::nullopt;
  const dnnl::memory::desc rows({kRows, b.dims[0]}, DataType(b.dtype),
                                dnnl::memory::format_tag::ab);
  const dnnl::memory::desc out({kRows, b.dims[1]}, dnnl::memory::data_type::f32,
                               dnnl::memory::format_tag::ab);
  PrimitiveDesc pd = Create(rows, AnyLayout(b), std::nullopt, out, {});
  if (!IsUsable(pd)) return std::nullopt;
  const dnnl::memory::desc layout = pd.weights_desc();
  const bool fits = layout.get_size() <= static_cast<size_t>(nbytes);
  if (!fits || layout.get_inner_nblks() == 0) return std::nullopt;
  return layout;
}

std::shared_ptr<const Plan> BuildPack(const StridedTensor& b, int64_t nbytes) {
  auto plan = std::make_shared<Plan>();
  const Plan::Id from = plan->AddArgument(0, Describe(b));
  if (auto layout = LayoutOfPacked(b, nbytes)) {
    plan->AddReorder(from, plan->AddArgument(1, *layout));
    plan->AddNote("pack");
  } else {
    const StridedTensor dense = RowMajor(b);
    plan->AddConversion(from, b, plan->AddArgument(1, Describe(dense)), dense);
    plan->AddNote("copy");
  }
  return plan;
}

// The numbers that post-ops multiply by.
struct Factors {
  float product = 1.F, total = 1.F;
};

// One matmul by the plan for it; `packed_nbytes`: how many bytes hold a packed b, 0 where b is laid
// out as its strides say.
void Run(Operation operation, Problem problem, int64_t packed_nbytes, Factors factors = {}) {
  if (problem.out.numel() == 0) return;
  const Accumulation& sum = problem.accumulation;
  PlanKey key = OperationKey(operation);
  key.Add(packed_nbytes);
  key.Add(static_cast<int64_t>(problem.epilogue));
  key.Add(sum.is_on | sum.scales_product << 1 | sum.scales_total << 2);
  key.Add(problem.a);
  key.Add(problem.b);
  key.Add(problem.out);
  if (problem.bias) key.Add(*problem.bias);
  auto plan = CachedPlan(key, [&] {
    if (packed_nbytes > 0) problem.layout_of_b = LayoutOfPacked(problem.b, packed_nbytes);
    return PlanBuilder(problem).Build();
  });
  plan->Run({problem.a.data, problem.b.data, problem.bias ? problem.bias->data : nullptr,
             problem.out.data, &factors.product, &factors.total});
}

// A zero, as often as dims say.
StridedTensor Zeros(int64_t rows, int64_t columns) {
  static float zero = 0.F;
  StridedTensor zeros;
  zeros.data = &zero;
  zeros.dtype = kFloat32;
  zeros.rank = 2;
  zeros.dims = {rows, columns};
  return zeros;
}

// What oneDNN cannot say as other products that are the same: a sum of no terms is one of a zero,
// and a matrix that neither operand has more than once is repeated in one of them.
BatchedMatrices Sayable(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out) {
  const bool has_terms = a.dims[a.rank - 1] != 0;
  const int64_t rows = out.dims[out.rank - 2], columns = out.dims[out.rank - 1];
  BatchedMatrices matrices(has_terms ? a : Zeros(rows, 1), has_terms ? b : Zeros(1, columns), out);
  for (int i = 0; i < matrices.out.rank - 2; ++i) {
    if (matrices.a.dims[i] != 1 || matrices.b.dims[i] != 1) continue;
    matrices.a.dims[i] = matrices.out.dims[i];
    if (matrices.out.dims[i] != 1) matrices.a.strides[i] = 0;
  }
  return matrices;
}

Problem MakeProblem(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
                    const StridedTensor& out) {
  Problem problem{Sayable(a, b, out), std::nullopt, Epilogue::kNone, std::nullopt, {}};
  if (bias != nullptr) problem.bias = *bias;
  return problem;
}

}  // namespace

void Matmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
            const StridedTensor& out, Epilogue epilogue) {
  Problem problem = MakeProblem(a, b, bias, out);
  problem.epilogue = epilogue;
  Run(kMatmul, problem, 0);
}

void MatmulAccumulate(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
                      const float* alpha, const float* beta, const StridedTensor& out) {
  Problem problem = MakeProblem(a, b, bias, out);
  problem.accumulation = {true, alpha != nullptr || beta != nullptr, beta != nullptr};
  if (WorkspaceQuery::Current() != nullptr) return Run(kMatmul, problem, 0);
  Factors factors{alpha != nullptr ? *alpha : 1.F, beta != nullptr ? *beta : 1.F};
  if (beta != nullptr) {
    const float ratio = factors.product / factors.total;
    if (std::abs(ratio) <= kMostRatio) {
      factors.product = ratio;
    } else {
      static float zero = 0.F;  // not 0 times `out`: infinity there stays what it is
      StridedTensor zeros = out;
      zeros.data = &zero;
      std::fill(zeros.strides.begin(), zeros.strides.end(), 0);
      AddStrided(zeros, 0.F, factors.total, out);
      factors.total = 1.F;
    }
  }
  Run(kMatmul, problem, 0, factors);
}

int64_t PackedBytes(const StridedTensor& b) {
  const auto layout = LayoutOfPacked(b, std::numeric_limits<int64_t>::max());
  return layout ? std::max(static_cast<int64_t>(layout->get_size()), NumBytes(b)) : 0;
}

void Pack(const StridedTensor& b, void* packed, int64_t nbytes) {
  if (b.numel() == 0) return;
  PlanKey key = OperationKey(kPack);
  key.Add(nbytes);
  key.Add(b);
  auto plan = CachedPlan(key, [&] { return BuildPack(b, nbytes); });
  plan->Run({b.data, packed});
}

void MatmulPacked(const StridedTensor& a, const StridedTensor& b, int64_t nbytes,
                  const StridedTensor* bias, const StridedTensor& out, Epilogue epilogue) {
  if (b.numel() == 0) return Matmul(a, RowMajor(b), bias, out, epilogue);
  Problem problem = MakeProblem(a, RowMajor(b), bias, out);
  problem.epilogue = epilogue;
  Run(kMatmulPacked, problem, nbytes);
}

}  // namespace amp_ir::onednn
