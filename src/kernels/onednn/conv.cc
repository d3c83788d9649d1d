// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>

#include "onednn/depthwise.h"
#include "onednn/ops.h"
#include "onednn/patch_matmul.h"
#include "onednn/plan.h"
#include "onednn/pointwise.h"
#include "onednn/vectors.h"
#include "onednn/weight_gradient.h"
#include "onednn/widen.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

// oneDNN wants grouped weights as [groups, o / groups, i / groups, kernel...].
StridedTensor SplitGroups(const StridedTensor& w, int64_t groups) {
  if (groups == 1) return w;
  StridedTensor split = w;
  split.rank = w.rank + 1;
  split.dims[0] = groups;
  split.dims[1] = w.dims[0] / groups;
  split.strides[0] = split.dims[1] * w.strides[0];
  split.strides[1] = w.strides[0];
  for (int i = 1; i < w.rank; ++i) {
    split.dims[i + 1] = w.dims[i];
    split.strides[i + 1] = w.strides[i];
  }
  return split;
}

dnnl::memory::desc AnyLayout(const StridedTensor& t) {
  return dnnl::memory::desc(dnnl::memory::dims(t.dims.begin(), t.dims.begin() + t.rank),
                            DataType(t.dtype), dnnl::memory::format_tag::any);
}

bool HasAvx512() { return dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core; }

// Whether a weight without groups has channels enough for blocks of them, at several positions.
bool IsBlockedWindow(const StridedTensor& x, const StridedTensor& w) {
  constexpr int64_t kChannels = 16;
  int64_t window = 1;
  for (int i = 2; i < w.rank; ++i) window *= w.dims[i];
  return w.rank == x.rank && window > 1 && w.dims[0] >= kChannels && w.dims[1] >= kChannels;
}

// Whether an image has so few channels that putting them last costs little.
bool HasFewChannels(const StridedTensor& image) {
  constexpr int64_t kFewChannels = 4;
  return image.dims[1] <= kFewChannels;
}

StridedTensor WithChannelsLast(const StridedTensor& image) {
  return HasChannelsLast(image) ? image : DenseChannelsLast(image);
}

// Whether strides or dilations are more than one in any dim.
bool IsSpread(tvm::ffi::ShapeView steps) {
  return std::any_of(steps.begin(), steps.end(), [](int64_t step) { return step > 1; });
}

// Whether to put the few channels of one activation last where the other one has them there: in the
// first and last layers of models for images, strides 1 to 4, 32 to 128 channels. Beside a copy of
// the other one it takes 0.23 to 1.1 of the time in float32 and 0.25 to 1.1 in bfloat16, but up to
// 2 for gradients in bfloat16 at strides, and without AVX-512 up to 1.9 for those of weights. With
// AMX bfloat16 was not compared.
bool IsWorthReordering(ConvKind kind, DLDataType dtype, const Convolution& convolution) {
  const bool has_strides = IsSpread(convolution.strides);
  if (kind == ConvKind::kBackwardWeight && !HasAvx512()) return false;
  if (!IsBfloat16(dtype)) return true;
  return !HasIsa(dnnl::cpu_isa::avx512_core_amx) && (kind == ConvKind::kForward || !has_strides);
}

// Whether the channels of both activations are worth keeping innermost, where they are. oneDNN then
// works instead of copying into blocks of channels and back; on planes of a few positions its
// blocked kernels win all the same (measured: 4 x 4 is 3 times faster blocked, 8 x 8 a fifth
// slower).
//
// Without AVX-512 they win for gradients of windows too, copies included: in 0.6 to 0.95 of the
// time for a U-Net, 0.8 to 1.08 for ResNet-50. Single pixels take 0.95 to 1.8 of it.
//
// So is one whose few channels are not innermost made that, instead of copying the other one: see
// `IsWorthReordering`.
bool KeepsChannelsLast(ConvKind kind, const StridedTensor& x, const StridedTensor& w,
                       const StridedTensor& y, const Convolution& convolution) {
  constexpr int64_t kWorthwhile = 64;  // positions
  if (kind == ConvKind::kBackwardWeight && IsBlockedWindow(x, w) && !HasAvx512()) return false;
  int64_t positions = 1;
  for (int i = 2; i < y.rank; ++i) positions *= y.dims[i];
  if (positions < kWorthwhile) return false;
  const bool has_x = HasChannelsLast(x), has_y = HasChannelsLast(y);
  if (has_x && has_y) return true;
  const bool can_be = (has_x && HasFewChannels(y)) || (has_y && HasFewChannels(x));
  return can_be && IsWorthReordering(kind, y.dtype, convolution);
}

// A primitive of any of the three kinds, with the layouts that it wants for x, w and y.
struct Chosen {
  dnnl::primitive primitive;
  dnnl::memory::desc x, w, y, scratchpad;
  std::string implementation;

  // Loops without vectors, hundreds of times slower than any other implementation.
  bool is_reference() const { return implementation.find("ref") != std::string::npos; }
  // oneDNN's bfloat16 gradient of the weight, other than depthwise kernels and matmuls.
  bool is_bfloat16_loop() const { return implementation.find("jit_bf16") != std::string::npos; }
  // The same or that in float32, with AVX-512.
  bool is_loop() const {
    return is_bfloat16_loop() || implementation.find(" jit:avx512") != std::string::npos;
  }
};

class PlanBuilder {
 public:
  PlanBuilder(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
              const Convolution& convolution)
      : kind_(kind), user_{x, w, y}, convolution_(convolution) {}

  std::shared_ptr<const Plan> Build() {
    const int result = kind_ == ConvKind::kForward ? 2 : kind_ == ConvKind::kBackwardInput ? 0 : 1;
    const DLDataType first = user_[result == 0 ? 1 : 0].dtype;
    const DLDataType second = user_[result == 2 ? 1 : 2].dtype;
    const bool is_native = SameDtype(first, second) && IsNative(first);
    StridedTensor compute_view[3];
    View(is_native ? first : kFloat32, result, compute_view);
    Chosen chosen = Choose(compute_view);
    if (is_native && (chosen.is_reference() || ReadsUnwritten(chosen))) {
      // A CPU may have float16 arithmetic while oneDNN has only the forward convolution for it: a
      // detour by float32 is faster than its reference gradients.
      View(kFloat32, result, compute_view);
      chosen = Choose(compute_view);
    }
    const dnnl::memory::desc wanted[3] = {chosen.x, chosen.w, chosen.y};
    Plan::Id ids[3];
    for (int i = 0; i < 3; ++i) {
      ids[i] = i == result ? -1 : Input(i, compute_view[i], wanted[i]);
    }
    const Plan::Id given = plan_->AddArgument(result, Describe(user_[result]));
    const bool same_dtype = SameDtype(user_[result].dtype, compute_view[result].dtype);
    const Plan::Id plain = same_dtype ? given : plan_->AddTemporary(Describe(compute_view[result]));
    const bool same_layout = wanted[result] == plan_->desc(plain);
    ids[result] = same_layout ? plain : plan_->AddTemporary(wanted[result]);
    plan_->AddPrimitive(chosen.primitive, chosen.scratchpad, Arguments(ids));
    plan_->AddNote(chosen.implementation);
    if (!same_layout) {
      plan_->AddReorder(ids[result], plain);
      plan_->AddNote("+reorder");
    }
    if (!same_dtype) {
      plan_->AddConversion(plain, compute_view[result], given, user_[result]);
      plan_->AddNote("+narrow");
    }
    return plan_;
  }

 private:
  // oneDNN 3.2's loops with AVX-512 compute some gradients of weights from memory that they did not
  // write, or write beyond it; its other implementations, and what it computes of these in float32,
  // are right. Wrong, by as much as the result or up to infinity, were of random ones
  // - in bfloat16, of dilated windows with channels last, 385 of 632 depthwise ones and, without
  //   AMX, 65 of 123 of others with channels that fill no block;
  // - in bfloat16 without AMX, where a tap of the last dim reads padding alone at a stride, 93 of
  //   163 with one or two dims, and of 1289 others none;
  // - in bfloat16 without AMX, of windows in three dims that are longer than the image in one of
  //   the first two, 94 of 124;
  // - in float32, where the first of three dims has a stride and more padding than that, 8 of 490
  //   of all in three dims.
  bool ReadsUnwritten(const Chosen& chosen) const {
    if (kind_ != ConvKind::kBackwardWeight) return false;
    if (user_[0].rank == 5 && chosen.is_loop() && IsWrongInDepth()) return true;
    if (!chosen.is_bfloat16_loop()) return false;
    const int last = static_cast<int>(convolution_.strides.size()) - 1;
    return IsSpread(convolution_.dilation) || (convolution_.strides[last] > 1 && HasIdleTap(last));
  }

  bool IsWrongInDepth() const {
    const auto& [x, w, y] = user_;
    const int64_t stride = convolution_.strides[0];
    return x.dims[2] < w.dims[2] || x.dims[3] < w.dims[3] ||
           (stride > 1 && convolution_.padding[0] > stride);
  }

  // Whether a tap of the window reads padding alone, wherever the window lies.
  bool HasIdleTap(int axis) const {
    const int64_t extent = user_[0].dims[2 + axis], stride = convolution_.strides[axis];
    for (int64_t tap = 0; tap < user_[1].dims[2 + axis]; ++tap) {
      const int64_t first = tap * convolution_.dilation[axis] - convolution_.padding[axis];
      const int64_t windows = first < 0 ? (stride - 1 - first) / stride : 0;  // before the image
      if (windows >= user_[2].dims[2 + axis] || first + windows * stride >= extent) return true;
    }
    return false;
  }

  // The tensors as the primitive is to see them when it computes in `compute`.
  void View(DLDataType compute, int result, StridedTensor* views) const {
    for (int i = 0; i < 3; ++i) {
      const bool kept =
          SameDtype(user_[i].dtype, compute) || (i == result && IsFloat(user_[i].dtype, 32));
      if (kept) {
        views[i] = user_[i];
        continue;
      }
      views[i] = DenseLike(user_[i], i == result ? kFloat32 : compute);
      if (i != 1) views[i] = WithIdleStridesOfImage(views[i]);
    }
  }

  Plan::Id Input(int argument, const StridedTensor& view, const dnnl::memory::desc& wanted) {
    Plan::Id id = plan_->AddArgument(argument, Describe(user_[argument]));
    if (!SameDtype(user_[argument].dtype, view.dtype)) {
      const Plan::Id wide = plan_->AddTemporary(Describe(view));
      plan_->AddConversion(id, user_[argument], wide, view);
      plan_->AddNote("widen+");
      id = wide;
    }
    if (plan_->desc(id) == wanted) return id;
    const Plan::Id ordered = plan_->AddTemporary(wanted);
    plan_->AddReorder(id, ordered);
    plan_->AddNote("reorder+");
    return ordered;
  }

  // What all three primitives are created from.
  struct Request {
    dnnl::memory::desc x, w, y;
    dnnl::memory::dims strides, dilation, padding;
    dnnl::primitive_attr attr;
  };

  static constexpr auto kDirect = dnnl::algorithm::convolution_direct;

  Request MakeRequest(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                      bool keep) const {
    Request request;
    request.x = keep ? Describe(WithChannelsLast(x)) : AnyLayout(x);
    request.w = AnyLayout(w);
    request.y = keep ? Describe(WithChannelsLast(y)) : AnyLayout(y);
    request.strides.assign(convolution_.strides.begin(), convolution_.strides.end());
    request.padding.assign(convolution_.padding.begin(), convolution_.padding.end());
    for (int64_t step : convolution_.dilation) {
      request.dilation.push_back(step - 1);  // oneDNN counts the elements left out
    }
    request.attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return request;
  }

  static dnnl::convolution_forward::primitive_desc DescribeForward(const Request& r) {
    return {CpuEngine(), dnnl::prop_kind::forward_training,
            kDirect,     r.x,
            r.w,         r.y,
            r.strides,   r.dilation,
            r.padding,   r.padding,
            r.attr};
  }

  // The forward primitive that the backward ones ask for as a hint: all in the dtype of the data,
  // whatever dtype the gradient is to have.
  dnnl::convolution_forward::primitive_desc Hint(const StridedTensor* views, bool keep) const {
    const DLDataType dtype = views[kind_ == ConvKind::kBackwardInput ? 2 : 0].dtype;
    StridedTensor typed[3] = {views[0], views[1], views[2]};
    for (StridedTensor& t : typed) t.dtype = dtype;
    return DescribeForward(MakeRequest(typed[0], typed[1], typed[2], keep));
  }

  Chosen Choose(const StridedTensor* views) const {
    const bool keep = KeepsChannelsLast(kind_, views[0], views[1], views[2], convolution_);
    Chosen chosen = Create(views, keep);
    // Samples inside of the positions, say: oneDNN computes that in blocks of channels only.
    return keep && chosen.is_reference() ? Create(views, false) : chosen;
  }

  Chosen Create(const StridedTensor* views, bool keep) const {
    const Request r = MakeRequest(views[0], views[1], views[2], keep);
    if (kind_ == ConvKind::kForward) {
      auto pd = DescribeForward(r);
      return {dnnl::convolution_forward(pd),
              pd.src_desc(),
              pd.weights_desc(),
              pd.dst_desc(),
              pd.scratchpad_desc(),
              Name("conv ", pd.impl_info_str())};
    }
    if (kind_ == ConvKind::kBackwardInput) {
      dnnl::convolution_backward_data::primitive_desc pd(CpuEngine(), kDirect, r.x, r.w, r.y,
                                                         r.strides, r.dilation, r.padding,
                                                         r.padding, Hint(views, keep), r.attr);
      return {dnnl::convolution_backward_data(pd),
              pd.diff_src_desc(),
              pd.weights_desc(),
              pd.diff_dst_desc(),
              pd.scratchpad_desc(),
              Name("conv_backward_input ", pd.impl_info_str())};
    }
    const auto hint = Hint(views, keep);  // which `next_impl` reads
    dnnl::convolution_backward_weights::primitive_desc pd(CpuEngine(), kDirect, r.x, r.w, r.y,
                                                          r.strides, r.dilation, r.padding,
                                                          r.padding, hint, r.attr);
    const auto chosen = [&]() -> Chosen {
      return {dnnl::convolution_backward_weights(pd),
              pd.src_desc(),
              pd.diff_weights_desc(),
              pd.diff_dst_desc(),
              pd.scratchpad_desc(),
              Name("conv_backward_weight ", pd.impl_info_str())};
    };
    // In bfloat16 a detour by float32 comes first.
    const bool is_full = SameDtype(views[0].dtype, kFloat32);
    Chosen found = chosen();
    while (is_full && ReadsUnwritten(found) && pd.next_impl()) found = chosen();
    return found;
  }

  static std::string Name(const char* operation, const char* implementation) {
    return std::string(operation) + implementation;
  }

  std::vector<std::pair<int, Plan::Id>> Arguments(const Plan::Id* ids) const {
    switch (kind_) {
      case ConvKind::kForward:
        return {{DNNL_ARG_SRC, ids[0]}, {DNNL_ARG_WEIGHTS, ids[1]}, {DNNL_ARG_DST, ids[2]}};
      case ConvKind::kBackwardInput:
        return {
            {DNNL_ARG_DIFF_SRC, ids[0]}, {DNNL_ARG_WEIGHTS, ids[1]}, {DNNL_ARG_DIFF_DST, ids[2]}};
      default:
        return {
            {DNNL_ARG_SRC, ids[0]}, {DNNL_ARG_DIFF_WEIGHTS, ids[1]}, {DNNL_ARG_DIFF_DST, ids[2]}};
    }
  }

  ConvKind kind_;
  StridedTensor user_[3];  // x, w, y
  const Convolution& convolution_;
  std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
};

// The tensor itself in float32, or one of its dims and order without gaps.
StridedTensor Widened(const StridedTensor& t) {
  if (IsFloat(t.dtype, 32)) return t;
  return WithIdleStridesOfImage(DenseLike(t, kFloat32));
}

// Whether our kernels for depthwise windows are worth it beside oneDNN's plan, with AVX-512: where
// oneDNN has none for such windows in the dtype of the operands, and computes them as groups of
// padded channels, as matmuls, or after widening. Ours take 0.02 to 0.9 of the time of that. Its
// own are mostly faster in float32 and forward. Its gradients in bfloat16 are slower for the input
// of windows of 25 positions or more (ours take 0.5 to 0.8, 1.1 on images of 4 x 4) and for the
// weight where rows are long (0.6 to 1.0 from 32 positions on, 1.05 to 1.8 below).
bool PrefersDepthwise(ConvKind kind, const StridedTensor& w, const StridedTensor& y,
                      const Plan& theirs) {
  constexpr int64_t kLongRow = 32, kWideWindow = 25;
  const std::string& name = theirs.implementation();
  const bool is_widened = name.find("widen") != std::string::npos;
  if (is_widened || name.find("_dw") == std::string::npos) return true;
  if (IsFloat(y.dtype, 32)) return false;
  if (kind == ConvKind::kBackwardWeight) return y.dims[y.rank - 1] >= kLongRow;
  int64_t window = 1;
  for (int i = 2; i < w.rank; ++i) window *= w.dims[i];
  return kind == ConvKind::kBackwardInput && window >= kWideWindow;
}

// On AVX2 ours take 0.05 to 0.3 of oneDNN's time for the weight of 7 x 7 windows, 0.3 to 1.6 for
// that of 3 x 3, and 0.3 to 1.3 for the others; in bfloat16, which oneDNN widens first, 0.05 to
// 1.1.
//
// `w` has the dims of one without groups, as `Depthwise` wants them. Null where it is not for that.
std::shared_ptr<const Plan> DepthwisePlan(ConvKind kind, const StridedTensor& x,
                                          const StridedTensor& w, const StridedTensor& y,
                                          const Convolution& convolution) {
  if (!IsDepthwise(x, w, y, convolution)) return nullptr;
  const Depthwise depthwise(kind, x, w, y, convolution, omp_get_max_threads());
  if (!depthwise.fits_cache()) return nullptr;
  auto plan = std::make_shared<Plan>();
  std::vector<Plan::Id> ids;
  for (const StridedTensor* one : {&x, &w, &y}) {
    ids.push_back(plan->AddArgument(static_cast<int>(ids.size()), Describe(*one)));
  }
  ids.push_back(plan->AddWorkspace(depthwise.workspace_nbytes()));
  plan->AddCall(
      [depthwise](const std::vector<void*>& args) {
        depthwise.Run(args[0], args[1], args[2], static_cast<float*>(args[3]));
      },
      ids);
  static const char* const kNames[] = {"conv", "conv_backward_input", "conv_backward_weight"};
  plan->AddNote(std::string(kNames[static_cast<int>(kind)]) + " depthwise rows");
  return plan;
}

// On AVX2 ours take 0.4 to 0.95 of oneDNN's time for the weight of windows of several positions;
// those of single ones take up to 4 times as long. With other vectors they were not compared.
//
// Null where it is not for that.
std::shared_ptr<const Plan> WeightGradientPlan(const StridedTensor& x, const StridedTensor& w,
                                               const StridedTensor& y,
                                               const Convolution& convolution) {
  if (ChooseVectors() != Vectors::kAvx2) return nullptr;
  if (!IsSumOfOuterProducts(x, w, y, convolution)) return nullptr;
  const StridedTensor given[3] = {x, w, y};
  StridedTensor wide[3];
  auto plan = std::make_shared<Plan>();
  std::vector<Plan::Id> arguments, ids;
  for (int i = 0; i < 3; ++i) {
    wide[i] = Widened(given[i]);
    arguments.push_back(plan->AddArgument(i, Describe(given[i])));
    const bool is_same = SameDtype(given[i].dtype, kFloat32);
    ids.push_back(is_same ? arguments[i] : plan->AddTemporary(Describe(wide[i])));
  }
  const WeightGradient gradient(wide[0], wide[1], wide[2], convolution, omp_get_max_threads());
  if (!gradient.fits_cache()) return nullptr;
  ids.push_back(plan->AddWorkspace(gradient.workspace_nbytes()));
  for (int i : {0, 2}) {
    if (ids[i] == arguments[i]) continue;
    plan->AddConversion(arguments[i], given[i], ids[i], wide[i]);
    plan->AddNote("widen+");
  }
  plan->AddCall(
      [gradient](const std::vector<void*>& args) {
        gradient.Run(static_cast<const float*>(args[0]), static_cast<float*>(args[1]),
                     static_cast<const float*>(args[2]), static_cast<float*>(args[3]));
      },
      ids);
  plan->AddNote("conv_backward_weight outer products");
  if (ids[1] != arguments[1]) {
    plan->AddConversion(ids[1], wide[1], arguments[1], w);
    plan->AddNote("+narrow");
  }
  return plan;
}

}  // namespace

void Convolve(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
              const Convolution& convolution) {
  if (x.numel() == 0 || w.numel() == 0 || y.numel() == 0) return;
  if (ConvolvePointwise(kind, x, w, y, convolution)) return;
  PlanKey key = OperationKey(kFirstConvolution + static_cast<int64_t>(kind));
  key.Add(x);
  key.Add(w);
  key.Add(y);
  key.Add(convolution.strides);
  key.Add(convolution.padding);
  key.Add(convolution.dilation);
  key.Add(convolution.groups);
  auto plan = CachedPlan(key, [&]() -> std::shared_ptr<const Plan> {
    auto patches = PatchMatmulPlan(kind, x, w, y, convolution);
    if (patches != nullptr) return patches;
    auto depthwise = DepthwisePlan(kind, x, w, y, convolution);
    if (depthwise != nullptr && !HasAvx512()) return depthwise;
    if (kind == ConvKind::kBackwardWeight) {
      auto gradient = WeightGradientPlan(x, w, y, convolution);
      if (gradient != nullptr) return gradient;
    }
    auto theirs = PlanBuilder(kind, x, SplitGroups(w, convolution.groups), y, convolution).Build();
    const bool is_ours = depthwise != nullptr && PrefersDepthwise(kind, w, y, *theirs);
    return is_ours ? depthwise : theirs;
  });
  plan->Run({x.data, w.data, y.data});
}

}  // namespace amp_ir::onednn
