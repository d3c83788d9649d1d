// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/matmul.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cublaslt/api.h"
#include "onednn/plan_cache.h"
#include "tensors/batched_matrices.h"
#include "tensors/workspace.h"

namespace amp_ir::cublaslt {
namespace {

// What NVIDIA recommends for Hopper, and what PyTorch takes there.
constexpr size_t kMaxWorkspace = size_t{32} << 20;
constexpr size_t kAlignment = 256;  // bytes: the most that cuBLASLt's heuristic tells apart

// A matrix as it is laid out in memory: column-major rows x columns, which op(...) may transpose.
struct Matrix {
  int64_t rows, columns, leading;
  bool is_transposed;
};

// Matrices one after another: how many, and the elements from each to the next in a, b and d.
struct Batch {
  int64_t count = 1, a = 0, b = 0, d = 0;
};

// The call as cuBLASLt takes it: d = op(a) op(b).
struct Form {
  bool is_swapped;  // d is out^T = b^T a^T, so that a row-major result is column-major
  Matrix a, b, d;
  Batch batch;               // one launch
  std::vector<Batch> loops;  // a launch for each combination
};

// A matrix whose element (i, j) is stored at i * row_stride + j * column_stride; nothing where
// neither of them is 1 or where rows overlap.
std::optional<Matrix> Store(int64_t rows, int64_t columns, int64_t row_stride,
                            int64_t column_stride) {
  if (row_stride == 1 || rows == 1) {
    const int64_t leading = columns == 1 ? rows : column_stride;
    if (leading >= rows) return Matrix{rows, columns, leading, false};
  }
  if (column_stride == 1 || columns == 1) {
    const int64_t leading = rows == 1 ? columns : row_stride;
    if (leading >= columns) return Matrix{columns, rows, leading, true};
  }
  return std::nullopt;
}

std::optional<Matrix> StoreMatrix(const StridedTensor& t, bool is_swapped) {
  const int row = t.rank - (is_swapped ? 1 : 2), column = t.rank - (is_swapped ? 2 : 1);
  return Store(t.dims[row], t.dims[column], t.strides[row], t.strides[column]);
}

const char* RefuseDtypes(const MatmulCall& call) {
  if (!SameDtype(call.a.dtype, call.b.dtype)) return "a and b differ in dtype";
  if (!SameDtype(call.out.dtype, call.a.dtype) && !IsFloat(call.out.dtype, 32)) {
    return "out is neither float32 nor of the operands' dtype";
  }
  // As cublasLt.h says of CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE.
  if (call.bias != nullptr && !SameDtype(call.bias->dtype, call.out.dtype)) {
    return "bias is not of out's dtype";
  }
  if (call.bias != nullptr && call.bias->strides[0] != 1 && call.bias->dims[0] > 1) {
    return "bias is not dense";
  }
  // developer.nvidia.com's forum, topic 329783; a NaN that becomes 0 hides an overflow from the
  // loss scale.
  if (call.epilogue == Epilogue::kRelu) return "cuBLASLt's relu turns NaN into 0";
  if (call.epilogue == Epilogue::kGelu) {
    return "gelu is exact, and cuBLASLt's is the tanh approximation";
  }
  return nullptr;
}

// The longest batch dim is one launch's, the others are looped over.
void FillBatches(const BatchedMatrices& p, Form* form) {
  int longest = 0;
  for (int dim = 1; dim < p.out.rank - 2; ++dim) {
    if (p.out.dims[dim] > p.out.dims[longest]) longest = dim;
  }
  for (int dim = 0; dim < p.out.rank - 2; ++dim) {
    const int64_t of_a = p.a.dims[dim] == 1 ? 0 : p.a.strides[dim];
    const int64_t of_b = p.b.dims[dim] == 1 ? 0 : p.b.strides[dim];
    Batch batch{p.out.dims[dim], of_a, of_b, p.out.strides[dim]};
    if (form->is_swapped) std::swap(batch.a, batch.b);
    if (dim == longest) {
      form->batch = batch;
    } else {
      form->loops.push_back(batch);
    }
  }
}

std::optional<Form> FindForm(const MatmulCall& call, std::string* why) {
  if (const char* reason = RefuseDtypes(call)) {
    *why = reason;
    return std::nullopt;
  }
  if (call.a.dims[call.a.rank - 1] == 0) {
    *why = "the sums have no terms";
    return std::nullopt;
  }
  const BatchedMatrices p(call.a, call.b, call.out);
  for (int i = 0; i < p.out.rank; ++i) {
    if (p.out.strides[i] == 0 && p.out.dims[i] > 1) {
      *why = "elements of out repeat";
      return std::nullopt;
    }
  }
  *why = "a, b or out has no unit stride among its last two dims, or rows that overlap";
  for (bool is_swapped : {true, false}) {
    // The bias is along d's rows, which are n only when swapped.
    if (call.bias != nullptr && !is_swapped) {
      *why = "out has no unit stride along n, which a bias needs, or a or b has none at all";
      break;
    }
    auto d = StoreMatrix(p.out, is_swapped);
    auto left = StoreMatrix(is_swapped ? p.b : p.a, is_swapped);
    auto right = StoreMatrix(is_swapped ? p.a : p.b, is_swapped);
    if (!d || d->is_transposed || !left || !right) continue;
    Form form{is_swapped, *left, *right, *d, {}, {}};
    FillBatches(p, &form);
    if (form.batch.count > std::numeric_limits<int32_t>::max()) {
      *why = "it counts matrices in 32 bits";
      break;
    }
    return form;
  }
  return std::nullopt;
}

int64_t Launches(const Form& form) {
  int64_t count = 1;
  for (const Batch& loop : form.loops) count *= loop.count;
  return count;
}

// The workspace that a call may use, from its shapes alone, since a step is planned where there is
// neither a GPU nor cuBLASLt: 16 float32 partial results of a sum split over k (more are slower to
// add up than they save) and 1 MiB for what else an algorithm keeps. The heuristic looks only among
// algorithms that need no more.
size_t WorkspaceNbytes(const Form& form) {
  constexpr size_t kSplits = 16, kOther = size_t{1} << 20;
  // Divided, not multiplied: the product of the shapes may be any number.
  const double partial = 4.0 * static_cast<double>(form.d.rows) *
                         static_cast<double>(form.d.columns) *
                         static_cast<double>(form.batch.count);
  if (kSplits * partial >= static_cast<double>(kMaxWorkspace - kOther)) return kMaxWorkspace;
  const size_t nbytes = kSplits * static_cast<size_t>(partial) + kOther;
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

int32_t TypeOf(DLDataType dtype) {
  if (IsFloat(dtype, 32)) return kFloat32;
  return IsBfloat16(dtype) ? kBfloat16 : kFloat16;
}

using Owned = std::unique_ptr<void, Status (*)(void*)>;

template <class Value>
void Set(const Api& api, Status (*set)(void*, int32_t, const void*, size_t), void* object,
         int32_t attribute, Value value) {
  Check(api, set(object, attribute, &value, sizeof(value)), "setting an attribute");
}

// Everything of a call but its pointers. Immutable, so threads may run it together.
struct Plan {
  Owned a, b, d;
  Algorithm algorithm;
  size_t workspace_nbytes;
};

// Never destroyed: threads may still run plans while the process ends.
PlanCache<Plan>& Cache() {
  static PlanCache<Plan>* cache = new PlanCache<Plan>;
  return *cache;
}

class Launcher {
 public:
  Launcher(const Api& api, const MatmulCall& call, const Form& form, DLDevice device)
      : api_(api),
        call_(call),
        form_(form),
        handle_(HandleOf(api, device.device_id)),
        device_(device),
        a_(form.is_swapped ? call.b : call.a),
        b_(form.is_swapped ? call.a : call.b),
        compute_(call.allow_tf32 && IsFloat(a_.dtype, 32) ? kCompute32FFastTf32 : kCompute32F),
        epilogue_(Bits(call)),
        alignments_{AlignmentOf(a_, &Batch::a), AlignmentOf(b_, &Batch::b),
                    AlignmentOf(call.out, &Batch::d),
                    call.bias != nullptr ? LowestBit(Address(call.bias->data)) : kAlignment} {
    // As many bytes wherever the caller's workspace starts, so that calls of one shape share a
    // plan.
    const Workspace provided = CallerWorkspace::Current();
    if (provided.nbytes <= kAlignment) return;
    const size_t skipped = (kAlignment - Address(provided.data) % kAlignment) % kAlignment;
    workspace_ = {provided.data + skipped, provided.nbytes - kAlignment};
  }

  void Run() {
    const std::shared_ptr<const Plan> plan = Cache().Get(Key(), [this] { return Build(); });
    const Owned desc = MakeDesc();
    Launch(*plan, desc.get(), 0, a_.data, b_.data, call_.out.data);
  }

 private:
  static size_t Address(const void* data) { return reinterpret_cast<size_t>(data); }

  // The largest power of two, up to kAlignment, that divides a number.
  static size_t LowestBit(size_t number) {
    number |= kAlignment;
    return number & (~number + 1);
  }

  static uint32_t Bits(const MatmulCall& call) {
    uint32_t bits = 0;
    if (call.bias != nullptr) bits |= kEpilogueBias;
    if (call.epilogue == Epilogue::kGeluTanh) bits |= kEpilogueGelu;
    return bits != 0 ? bits : kEpilogueDefault;
  }

  // Of the first element of every launch's matrices.
  size_t AlignmentOf(const StridedTensor& t, int64_t Batch::* stride) const {
    size_t bits = Address(t.data);
    for (const Batch& loop : form_.loops) {
      if (loop.count > 1) bits |= static_cast<size_t>(loop.*stride) * (t.dtype.bits / 8);
    }
    return LowestBit(bits);
  }

  PlanKey Key() const {
    PlanKey key(static_cast<int64_t>(Address(&api_)));
    key.Add(device_.device_id);
    key.Add(compute_);
    key.Add(static_cast<int64_t>(epilogue_));
    key.Add(TypeOf(a_.dtype));
    key.Add(TypeOf(call_.out.dtype));
    for (const Matrix* m : {&form_.a, &form_.b, &form_.d}) {
      key.Add(m->rows);
      key.Add(m->columns);
      key.Add(m->leading);
      key.Add(m->is_transposed ? 1 : 0);
    }
    for (int64_t value : {form_.batch.count, form_.batch.a, form_.batch.b, form_.batch.d}) {
      key.Add(value);
    }
    for (size_t alignment : alignments_) key.Add(static_cast<int64_t>(alignment));
    key.Add(static_cast<int64_t>(workspace_.nbytes));
    return key;
  }

  // Made for each call, since it holds the pointer to the bias.
  Owned MakeDesc() const {
    MatmulDesc raw = nullptr;
    Check(api_, api_.desc_create(&raw, compute_, kFloat32), "cublasLtMatmulDescCreate");
    Owned desc(raw, api_.desc_destroy);
    const int32_t of_a = form_.a.is_transposed ? kTransposed : kAsStored;
    const int32_t of_b = form_.b.is_transposed ? kTransposed : kAsStored;
    Set(api_, api_.desc_set, raw, kTransA, of_a);
    Set(api_, api_.desc_set, raw, kTransB, of_b);
    Set(api_, api_.desc_set, raw, kEpilogue, epilogue_);
    if (call_.bias != nullptr) {
      Set(api_, api_.desc_set, raw, kBiasPointer, static_cast<const void*>(call_.bias->data));
    }
    return desc;
  }

  Owned MakeLayout(const Matrix& m, DLDataType dtype, int64_t batch_stride) const {
    Layout raw = nullptr;
    Check(api_,
          api_.layout_create(&raw, TypeOf(dtype), static_cast<uint64_t>(m.rows),
                             static_cast<uint64_t>(m.columns), m.leading),
          "cublasLtMatrixLayoutCreate");
    Owned layout(raw, api_.layout_destroy);
    if (form_.batch.count > 1) {
      Set(api_, api_.layout_set, raw, kBatchCount, static_cast<int32_t>(form_.batch.count));
      Set(api_, api_.layout_set, raw, kBatchStride, batch_stride);
    }
    return layout;
  }

  Owned MakePreference() const {
    Preference raw = nullptr;
    Check(api_, api_.preference_create(&raw), "cublasLtMatmulPreferenceCreate");
    Owned preference(raw, api_.preference_destroy);
    auto set = [&](int32_t attribute, auto value) {
      Set(api_, api_.preference_set, raw, attribute, value);
    };
    set(kMaxWorkspaceBytes, static_cast<uint64_t>(workspace_.nbytes));
    // Partial results of a split sum stay float32; the default also allows rounding them to d's
    // dtype, which NVIDIA's heuristic does choose (TransformerEngine #3440, on an L40).
    set(kReductionSchemeMask, kReduceInComputeType);
    set(kMinAlignmentA, static_cast<uint32_t>(alignments_[0]));
    set(kMinAlignmentB, static_cast<uint32_t>(alignments_[1]));
    set(kMinAlignmentC, static_cast<uint32_t>(alignments_[2]));
    set(kMinAlignmentD, static_cast<uint32_t>(alignments_[2]));
    return preference;
  }

  std::shared_ptr<const Plan> Build() const {
    auto plan = std::make_shared<Plan>(Plan{
        MakeLayout(form_.a, a_.dtype, form_.batch.a), MakeLayout(form_.b, b_.dtype, form_.batch.b),
        MakeLayout(form_.d, call_.out.dtype, form_.batch.d), Algorithm{}, 0});
    const Owned desc = MakeDesc(), preference = MakePreference();
    // In the order of estimated time; the first may be one that this GPU lacks.
    constexpr int kRequested = 4;
    HeuristicResult results[kRequested]{};
    int returned = 0;
    Check(api_,
          api_.heuristic(handle_, desc.get(), plan->a.get(), plan->b.get(), plan->d.get(),
                         plan->d.get(), preference.get(), kRequested, results, &returned),
          "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < returned; ++i) {
      const HeuristicResult& result = results[i];
      if (result.state != kSuccess || result.workspace_nbytes > workspace_.nbytes) continue;
      plan->algorithm = result.algorithm;
      plan->workspace_nbytes = result.workspace_nbytes;
      return plan;
    }
    TVM_FFI_THROW(RuntimeError) << "cuBLASLt " << api_.version() << " has no algorithm for a "
                                << DimsToString(call_.a) << " @ b " << DimsToString(call_.b)
                                << " -> out " << DimsToString(call_.out) << " with "
                                << workspace_.nbytes << " bytes of workspace";
    TVM_FFI_UNREACHABLE();
  }

  void Launch(const Plan& plan, MatmulDesc desc, size_t loop, void* a, void* b, void* d) const {
    if (loop < form_.loops.size()) {
      const Batch& batch = form_.loops[loop];
      auto step = [](void* data, int64_t elements, DLDataType dtype) -> void* {
        return static_cast<char*>(data) + elements * (dtype.bits / 8);
      };
      for (int64_t i = 0; i < batch.count; ++i) {
        Launch(plan, desc, loop + 1, step(a, i * batch.a, a_.dtype), step(b, i * batch.b, b_.dtype),
               step(d, i * batch.d, call_.out.dtype));
      }
      return;
    }
    const float one = 1, zero = 0;
    void* workspace = plan.workspace_nbytes > 0 ? workspace_.data : nullptr;
    Check(api_,
          api_.matmul(handle_, desc, &one, a, plan.a.get(), b, plan.b.get(), &zero, d, plan.d.get(),
                      d, plan.d.get(), &plan.algorithm, workspace, plan.workspace_nbytes,
                      TVMFFIEnvGetStream(device_.device_type, device_.device_id)),
          "cublasLtMatmul");
  }

  const Api& api_;
  const MatmulCall& call_;
  const Form& form_;
  Handle handle_;
  DLDevice device_;
  const StridedTensor& a_;
  const StridedTensor& b_;
  ComputeType compute_;
  uint32_t epilogue_;
  size_t alignments_[4];  // of a, b, d and the bias
  Workspace workspace_;
};

}  // namespace

int64_t CountLaunches(const MatmulCall& call, std::string* why) {
  const std::optional<Form> form = FindForm(call, why);
  return form ? Launches(*form) : 0;
}

void Matmul(const MatmulCall& call, DLDevice device) {
  if (call.out.numel() == 0) return;
  std::string why;
  const std::optional<Form> form = FindForm(call, &why);
  if (!form) {
    TVM_FFI_THROW(ValueError) << "amp_ir.cublaslt.matmul: cuBLASLt cannot multiply a "
                              << DimsToString(call.a) << " @ b " << DimsToString(call.b)
                              << " -> out " << DimsToString(call.out) << ": " << why
                              << "; ask amp_ir.cublaslt.launches first: where it says 0, copy the "
                                 "operand, leave the epilogue to a kernel, or use "
                                 "amp_ir.torch_cuda.matmul";
  }
  // The workspace is aligned inside of the caller's, whose start the arena aligns less.
  if (auto* query = WorkspaceQuery::Current()) {
    return query->Note(WorkspaceNbytes(*form) + kAlignment);
  }
  const Api& api = Library();
  if (device.device_type != kDLCUDA && !api.is_on_host) {
    TVM_FFI_THROW(ValueError) << "amp_ir.cublaslt.matmul: the tensors are on device type "
                              << static_cast<int>(device.device_type) << "; expected CUDA tensors ("
                              << static_cast<int>(kDLCUDA) << ")";
  }
  Launcher(api, call, *form, device).Run();
}

int64_t CountCachedPlans() { return static_cast<int64_t>(Cache().All().size()); }
void ClearCachedPlans() { Cache().Clear(); }

}  // namespace amp_ir::cublaslt
