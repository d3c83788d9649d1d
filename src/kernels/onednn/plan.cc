// SPDX-License-Identifier: Apache-2.0
#include "onednn/plan.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "onednn/widen.h"
#include "tensors/workspace.h"

namespace amp_ir::onednn {
namespace {

constexpr size_t kAlignment = 64;  // bytes: a cache line, and an avx512 register
constexpr size_t kMaxThreadWorkspace = size_t{256} << 20;  // bytes kept between calls, a thread

dnnl::stream& ThreadStream() {
  thread_local dnnl::stream stream(CpuEngine());
  return stream;
}

// Workspace of one thread: grows to what a call needs, and is given back after a call that
// needed more than kMaxThreadWorkspace. Kept at all because fresh pages cost more than most calls.
class ThreadWorkspace {
 public:
  char* Reserve(size_t nbytes) {
    if (nbytes > nbytes_) {
      Release();
      void* data = ::operator new(nbytes, std::align_val_t{kAlignment}, std::nothrow);
      if (data == nullptr) {
        TVM_FFI_THROW(MemoryError)
            << "oneDNN's workspace of " << nbytes << " bytes cannot be had from the system";
      }
      data_ = static_cast<char*>(data);
      nbytes_ = nbytes;
    }
    return data_;
  }
  void Trim() {
    if (nbytes_ > kMaxThreadWorkspace) Release();
  }
  ~ThreadWorkspace() { Release(); }

 private:
  void Release() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{kAlignment});
    data_ = nullptr;
    nbytes_ = 0;
  }
  char* data_ = nullptr;
  size_t nbytes_ = 0;
};

// Never destroyed: threads may still run plans while the process ends.
PlanCache<Plan>& Cache() {
  static PlanCache<Plan>* cache = new PlanCache<Plan>;
  return *cache;
}

}  // namespace

const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine = [] {
    // Our cache is the one that is bounded and counted; oneDNN's own would keep what ours drops.
    dnnl::set_primitive_cache_capacity(0);
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return engine;
}

dnnl::memory::data_type DataType(DLDataType dtype) {
  if (IsFloat(dtype, 32)) return dnnl::memory::data_type::f32;
  return IsBfloat16(dtype) ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f16;
}

dnnl::memory::desc Describe(const StridedTensor& t) {
  return dnnl::memory::desc(dnnl::memory::dims(t.dims.begin(), t.dims.begin() + t.rank),
                            DataType(t.dtype),
                            dnnl::memory::dims(t.strides.begin(), t.strides.begin() + t.rank));
}

bool HasIsa(dnnl::cpu_isa required) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  // Values of dnnl::cpu_isa are sets of bits: a newer ISA contains the bits of an older one.
  const auto bits = static_cast<unsigned>(required);
  return (isa & bits) == bits;
}

bool IsNative(DLDataType dtype) {
  if (IsFloat(dtype, 32)) return true;
  return HasIsa(IsBfloat16(dtype) ? dnnl::cpu_isa::avx512_core_bf16
                                  : dnnl::cpu_isa::avx512_core_fp16);
}

Plan::Id Plan::AddArgument(int argument, const dnnl::memory::desc& desc) {
  buffers_.push_back({desc, argument, 0});
  return static_cast<Id>(buffers_.size()) - 1;
}

Plan::Id Plan::AddTemporary(const dnnl::memory::desc& desc) {
  buffers_.push_back({desc, -1, workspace_nbytes_});
  workspace_nbytes_ += (desc.get_size() + kAlignment - 1) / kAlignment * kAlignment;
  return static_cast<Id>(buffers_.size()) - 1;
}

Plan::Id Plan::AddWorkspace(int64_t nbytes) {
  return AddTemporary({{nbytes}, dnnl::memory::data_type::u8, dnnl::memory::format_tag::a});
}

void Plan::AddPrimitive(const dnnl::primitive& primitive, const dnnl::memory::desc& scratchpad,
                        std::vector<std::pair<int, Id>> args) {
  if (scratchpad.get_size() > 0) args.emplace_back(DNNL_ARG_SCRATCHPAD, AddTemporary(scratchpad));
  steps_.push_back({primitive, std::move(args), {}, {}, {}});
}

void Plan::AddConversion(Id from_id, const StridedTensor& from, Id to_id, const StridedTensor& to) {
  steps_.push_back({dnnl::primitive(), {{0, from_id}, {1, to_id}}, from, to, {}});
}

void Plan::AddSum(Id from_id, const StridedTensor& from, Id to_id, const StridedTensor& to,
                  Id factor, Id total) {
  steps_.push_back(
      {dnnl::primitive(), {{0, from_id}, {1, to_id}, {2, factor}, {3, total}}, from, to, {}});
}

void Plan::AddCall(Call call, const std::vector<Id>& args) {
  Step step{dnnl::primitive(), {}, {}, {}, std::move(call)};
  for (Id id : args) step.args.emplace_back(0, id);
  steps_.push_back(std::move(step));
}

void Plan::AddReorder(Id from, Id to) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::reorder::primitive_desc pd(CpuEngine(), desc(from), CpuEngine(), desc(to), attr);
  AddPrimitive(dnnl::reorder(pd), pd.scratchpad_desc(), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
}

void Plan::Run(const std::vector<void*>& arguments) const {
  WithWorkspace(workspace_nbytes_, persistent_nbytes_,
                [&](char* workspace) { RunSteps(arguments, workspace); });
}

// A set of handles for as long as it lives; the plan keeps as many as ever ran at once.
class Plan::BorrowedHandles {
 public:
  explicit BorrowedHandles(const Plan& plan) : plan_(plan) {
    {
      std::lock_guard<std::mutex> lock(plan.mutex_);
      if (!plan.idle_.empty()) {
        handles_ = std::move(plan.idle_.back());
        plan.idle_.pop_back();
      }
    }
    if (handles_ == nullptr) handles_ = plan.MakeHandles();
  }
  ~BorrowedHandles() {
    std::lock_guard<std::mutex> lock(plan_.mutex_);
    plan_.idle_.push_back(std::move(handles_));
  }
  BorrowedHandles(const BorrowedHandles&) = delete;
  BorrowedHandles& operator=(const BorrowedHandles&) = delete;
  Handles* operator->() const { return handles_.get(); }

 private:
  const Plan& plan_;
  std::unique_ptr<Handles> handles_;
};

std::unique_ptr<Plan::Handles> Plan::MakeHandles() const {
  auto handles = std::make_unique<Handles>();
  handles->memories.resize(buffers_.size());
  handles->args.resize(steps_.size());
  for (size_t k = 0; k < steps_.size(); ++k) {
    if (!steps_[k].primitive) continue;
    for (const auto& arg : steps_[k].args) {
      dnnl::memory& memory = handles->memories[arg.second];
      if (!memory) memory = dnnl::memory(buffers_[arg.second].desc, CpuEngine(), nullptr);
      handles->args[k].push_back({arg.first, memory.get()});
    }
  }
  return handles;
}

void Plan::RunSteps(const std::vector<void*>& arguments, char* workspace) const {
  auto pointer = [&](Id id) -> void* {
    const Buffer& buffer = buffers_[id];
    return buffer.argument < 0 ? workspace + buffer.workspace_offset : arguments[buffer.argument];
  };
  const BorrowedHandles handles(*this);
  for (size_t id = 0; id < buffers_.size(); ++id) {
    dnnl::memory& memory = handles->memories[id];
    if (memory) memory.set_data_handle(pointer(static_cast<Id>(id)));
  }
  for (size_t k = 0; k < steps_.size(); ++k) {
    const Step& step = steps_[k];
    if (step.call) {
      std::vector<void*> args;
      for (const auto& arg : step.args) args.push_back(pointer(arg.second));
      step.call(args);
      continue;
    }
    if (!step.primitive) {
      StridedTensor from = step.from, to = step.to;
      from.data = pointer(step.args[0].second);
      to.data = pointer(step.args[1].second);
      if (step.args.size() == 2) {
        ConvertStrided(from, to);
        continue;
      }
      auto number = [&](Id id) { return id < 0 ? 1.F : *static_cast<float*>(pointer(id)); };
      AddStrided(from, number(step.args[2].second), number(step.args[3].second), to);
      continue;
    }
    const std::vector<dnnl_exec_arg_t>& args = handles->args[k];
    // Returns when done: oneDNN's CPU stream over OpenMP is synchronous.
    dnnl::error::wrap_c_api(dnnl_primitive_execute(step.primitive.get(), ThreadStream().get(),
                                                   static_cast<int>(args.size()), args.data()),
                            "could not execute a primitive");
  }
}

void WithWorkspace(size_t nbytes, size_t persistent_nbytes,
                   const std::function<void(char*)>& body) {
  if (auto* query = WorkspaceQuery::Current()) return query->Note(nbytes, persistent_nbytes);
  thread_local ThreadWorkspace thread_workspace;
  // The caller's workspace is too small after a change of the number of threads.
  const Workspace provided = CallerWorkspace::Current();
  const bool is_enough = nbytes <= provided.nbytes;
  body(is_enough ? provided.data : thread_workspace.Reserve(nbytes));
  thread_workspace.Trim();
}

PlanKey OperationKey(int64_t operation) {
  PlanKey key(operation);
  key.Add(static_cast<int64_t>(omp_get_max_threads()));
  return key;
}

std::shared_ptr<const Plan> CachedPlan(const PlanKey& key,
                                       const std::function<std::shared_ptr<const Plan>()>& build) {
  return Cache().Get(key, build);
}

std::vector<std::string> CachedImplementations() {
  std::vector<std::string> names;
  for (const auto& plan : Cache().All()) names.push_back(plan->implementation());
  return names;
}
void ClearCachedPlans() { Cache().Clear(); }

}  // namespace amp_ir::onednn
