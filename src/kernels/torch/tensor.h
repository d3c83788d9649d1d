// SPDX-License-Identifier: Apache-2.0
// PyTorch's tensor objects over memory of ours.
#ifndef AMP_IR_KERNELS_TORCH_TENSOR_H_
#define AMP_IR_KERNELS_TORCH_TENSOR_H_

#include <tvm/ffi/extra/c_env_api.h>

#include <vector>

#include "tensors/strided_tensor.h"
#include "tensors/workspace.h"
#include "torch/api.h"

namespace amp_ir::torch {

// Where a call runs: the functions for a kind of device, and which one of that kind.
//
// On CUDA, while it lives, PyTorch's current device and stream are those of the environment, so
// that kernels of TVM's and PyTorch's run in the order in which they were called.
class Place {
 public:
  Place(const Api& functions, DLDevice device) : api(functions), index_(device.device_id) {
    if (!api.is_cuda) return;
    void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
    Check(api, api.create_stream_guard(stream, index_, &guard_), "stream guard");
  }
  ~Place() {
    if (guard_ != nullptr) api.delete_stream_guard(guard_);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  int32_t index() const { return api.is_on_host ? 0 : index_; }

  const Api& api;

 private:
  int32_t index_;
  void* guard_ = nullptr;
};

// The bytes that CopyMemory takes for a dense float32 copy.
inline size_t CopyNbytes(const StridedTensor& like) {
  constexpr size_t kAlignment = 64;
  const size_t nbytes = static_cast<size_t>(like.numel()) * sizeof(float);
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The memory of a call's dense float32 copies, one after the other in what the caller provides
// where that holds all `nbytes` of them; else each is PyTorch's.
class CopyMemory {
 public:
  explicit CopyMemory(size_t nbytes) {
    const Workspace provided = CallerWorkspace::Current();
    if (nbytes <= provided.nbytes) next_ = provided.data;
  }
  // Memory for a copy of `like`; null: PyTorch's.
  void* Take(const StridedTensor& like) {
    void* const taken = next_;
    if (next_ != nullptr) next_ += CopyNbytes(like);
    return taken;
  }

 private:
  char* next_ = nullptr;
};

// Owns one PyTorch tensor object.
class Tensor {
 public:
  explicit Tensor(const Place& place) : place_(&place) {}
  Tensor(const Place& place, const StridedTensor& t) : place_(&place) {
    Check(api(),
          api().from_blob(t.data, t.rank, t.dims.data(), t.strides.data(), 0, DtypeCode(t.dtype),
                          api().device_type, place.index(), &handle_),
          "from_blob");
  }
  Tensor(Tensor&& other) noexcept : place_(other.place_), handle_(other.handle_) {
    other.handle_ = nullptr;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) api().destroy(handle_);
  }

  // A tensor without memory or shape, where PyTorch takes that for "none".
  static Tensor Undefined(const Place& place) {
    Tensor result(place);
    Check(place.api, place.api.undefined(&result.handle_), "new_uninitialized_tensor");
    return result;
  }

  static Tensor DenseFloat32(const Place& place, const StridedTensor& like, StridedTensor* view,
                             CopyMemory* memory) {
    *view = RowMajor(like);
    view->dtype = DLDataType{kDLFloat, 32, 1};
    view->data = memory->Take(like);
    if (view->data != nullptr) return Tensor(place, *view);
    Tensor result(place);
    Check(place.api,
          place.api.empty_strided(view->rank, view->dims.data(), view->strides.data(),
                                  place.api.float32(), place.api.device_type, place.index(),
                                  &result.handle_),
          "empty_strided");
    Check(place.api, place.api.data_ptr(result.handle_, &view->data), "data_ptr");
    return result;
  }

  void CopyFrom(const Tensor& other) { Check(api(), api().copy(handle_, other.get(), 0), "copy_"); }

  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  const Api& api() const { return place_->api; }
  int32_t DtypeCode(DLDataType dtype) const {
    if (IsFloat(dtype, 32)) return api().float32();
    return IsBfloat16(dtype) ? api().bfloat16() : api().float16();
  }
  const Place* place_;
  Handle handle_ = nullptr;
};

// How an operand is given to PyTorch: as it is, or as a copy without gaps in its dims' order.
enum class Form { kAsIs, kFloat32, kDenseFloat32 };

// An operand in the form that the computation needs: itself, or a dense float32 copy. kFloat32
// copies what has another dtype, kDenseFloat32 also what is laid out in another way.
class Operand {
 public:
  Operand(const Place& place, const StridedTensor& source, Form form, CopyMemory* memory)
      : view(source), tensor_(place, source) {
    if (!IsCopied(source, form)) return;
    Tensor wide = Tensor::DenseFloat32(place, source, &view, memory);
    wide.CopyFrom(tensor_);
    wide_.push_back(std::move(wide));
  }
  static size_t Nbytes(const StridedTensor& source, Form form) {
    return IsCopied(source, form) ? CopyNbytes(source) : 0;
  }
  Handle get() const { return wide_.empty() ? tensor_.get() : wide_.back().get(); }
  StridedTensor view;

 private:
  static bool IsCopied(const StridedTensor& source, Form form) {
    if (form == Form::kAsIs) return false;
    if (!IsFloat(source.dtype, 32)) return true;
    return form == Form::kDenseFloat32 && RowMajor(source).strides != source.strides;
  }
  Tensor tensor_;
  std::vector<Tensor> wide_;
};

}  // namespace amp_ir::torch

#endif  // AMP_IR_KERNELS_TORCH_TENSOR_H_
