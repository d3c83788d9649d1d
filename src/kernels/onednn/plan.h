// SPDX-License-Identifier: Apache-2.0
// A library call worked out once, and the cache of them.
#ifndef AMP_IR_KERNELS_ONEDNN_PLAN_H_
#define AMP_IR_KERNELS_ONEDNN_PLAN_H_

#include <functional>
#include <memory>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <utility>
#include <vector>

#include "onednn/plan_cache.h"
#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

const dnnl::engine& CpuEngine();

// oneDNN throws exceptions of its own, which must not cross into tvm-ffi unexplained.
template <class Call>
void Guard(const char* function, Call call) {
  try {
    call();
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory) {
      TVM_FFI_THROW(MemoryError) << function << ": oneDNN is out of memory: " << error.what();
    }
    TVM_FFI_THROW(RuntimeError) << function << ": oneDNN failed: " << error.what();
  }
}

dnnl::memory::data_type DataType(DLDataType dtype);
dnnl::memory::desc Describe(const StridedTensor& t);

// Whether oneDNN uses these instructions here, after ONEDNN_MAX_CPU_ISA.
bool HasIsa(dnnl::cpu_isa required);

// Whether oneDNN multiplies this dtype faster than float32 on this CPU. Where it does not, low
// operands are widened to float32 and results rounded once.
bool IsNative(DLDataType dtype);

// The steps of one call, fixed for its shapes, strides and dtypes: conversions and reorders into
// workspace around oneDNN primitives. Immutable once built but for its memory objects, of which
// each run has a set for itself, so threads may run it together.
class Plan {
 public:
  using Id = int;  // names one buffer of the plan

  // The caller's tensor number `argument` in Run, seen as `desc`.
  Id AddArgument(int argument, const dnnl::memory::desc& desc);
  Id AddTemporary(const dnnl::memory::desc& desc);
  // Bytes for a call of ours.
  Id AddWorkspace(int64_t nbytes);
  // Bytes that a primitive takes from the system itself. The C library keeps them for the next
  // call.
  void CountPersistent(size_t nbytes) { persistent_nbytes_ += nbytes; }

  // `primitive`'s own scratchpad is taken from ours (user mode), so that its bytes are counted and
  // bounded with the rest; oneDNN's library mode keeps a buffer of its own a thread for good.
  void AddPrimitive(const dnnl::primitive& primitive, const dnnl::memory::desc& scratchpad,
                    std::vector<std::pair<int, Id>> args);
  // `from` and `to` give dims, strides and dtypes; their data pointers are ignored.
  void AddConversion(Id from_id, const StridedTensor& from, Id to_id, const StridedTensor& to);
  void AddReorder(Id from, Id to);
  // to = total * (to + factor * from), where `factor` and `total` are float32 arguments or -1,
  // for 1.
  void AddSum(Id from_id, const StridedTensor& from, Id to_id, const StridedTensor& to, Id factor,
              Id total);
  // Calls `call` with the memory of `args`, in their order.
  using Call = std::function<void(const std::vector<void*>& args)>;
  void AddCall(Call call, const std::vector<Id>& args);
  void AddNote(const std::string& text) { implementation_ += text; }

  void Run(const std::vector<void*>& arguments) const;
  size_t workspace_nbytes() const { return workspace_nbytes_; }

  // "matmul brg:avx512_core_bf16+reorder_a", for reports.
  const std::string& implementation() const { return implementation_; }
  const dnnl::memory::desc& desc(Id id) const { return buffers_[id].desc; }

 private:
  struct Buffer {
    dnnl::memory::desc desc;
    int argument;             // -1: in workspace
    size_t workspace_offset;  // bytes
  };
  struct Step {
    // Empty: `call`, or without it a conversion from args[0] to args[1], or with 4 a sum.
    dnnl::primitive primitive;
    std::vector<std::pair<int, Id>> args;
    StridedTensor from, to;
    Call call;
  };
  // What one run writes: oneDNN's memory object of each buffer that a primitive reads or writes,
  // and what each step's primitive is called with.
  struct Handles {
    std::vector<dnnl::memory> memories;
    std::vector<std::vector<dnnl_exec_arg_t>> args;
  };
  // Making a set takes microseconds, as much as a small matmul: runs hand theirs on.
  class BorrowedHandles;
  std::unique_ptr<Handles> MakeHandles() const;
  void RunSteps(const std::vector<void*>& arguments, char* workspace) const;

  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  size_t workspace_nbytes_ = 0;
  size_t persistent_nbytes_ = 0;
  std::string implementation_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Handles>> idle_;
};

enum Operation : int64_t { kMatmul, kPack, kMatmulPacked, kRecurrence, kFirstConvolution };

// A key that also holds the number of threads: a primitive's blocking is chosen for it, and with
// another it stays right but slow.
PlanKey OperationKey(int64_t operation);

// The plan for `key`, built by `build` when it is not among the kMaxPlans used last. Thread-safe.
std::shared_ptr<const Plan> CachedPlan(const PlanKey& key,
                                       const std::function<std::shared_ptr<const Plan>()>& build);

// Runs `body` with so many bytes of workspace, 64-byte aligned: the caller's where that is enough,
// else this thread's own. Under a WorkspaceQuery, records the bytes instead.
void WithWorkspace(size_t nbytes, size_t persistent_nbytes, const std::function<void(char*)>& body);

std::vector<std::string> CachedImplementations();
void ClearCachedPlans();

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_ONEDNN_PLAN_H_
