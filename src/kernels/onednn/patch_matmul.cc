// SPDX-License-Identifier: Apache-2.0
#include "onednn/patch_matmul.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "onednn/patches.h"
#include "onednn/tile_matmul.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

StridedTensor Matrix(DLDataType dtype, int64_t rows, int64_t columns) {
  StridedTensor matrix;
  matrix.dtype = dtype;
  matrix.rank = 2;
  matrix.dims = {rows, columns};
  return RowMajor(matrix);
}

StridedTensor Transposed(StridedTensor matrix) {
  std::swap(matrix.dims[0], matrix.dims[1]);
  std::swap(matrix.strides[0], matrix.strides[1]);
  return matrix;
}

bool HasStridesOf(const StridedTensor& t, const StridedTensor& wanted) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.dims[i] != 1 && t.strides[i] != wanted.strides[i]) return false;
  }
  return true;
}

// Whether an image is dense with its channels last: a matrix with a row for each position.
bool IsMatrix(const StridedTensor& image) { return HasStridesOf(image, DenseChannelsLast(image)); }

int64_t Positions(const StridedTensor& image) {
  int64_t positions = image.dims[0];
  for (int i = 2; i < image.rank; ++i) positions *= image.dims[i];
  return positions;
}

// What a convolution, or a gradient of one, is as a matmul: y [positions, o] =
// patches [positions, columns] @ w [o, columns]^T.
class PatchMatmul {
 public:
  PatchMatmul(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
              const Convolution& convolution)
      : kind_(kind),
        x_(x),
        w_(w),
        y_(y),
        patches_(x, w, y, convolution),
        rows_(Positions(y)),
        columns_(w.numel() / w.dims[0]),
        is_matrix_(IsMatrix(x) && patches_.is_copy()) {}

  // Whether operands are in bfloat16, which this CPU multiplies, and stored as the matmul takes
  // them.
  bool IsSupported() const {
    const StridedTensor& result = kind_ == ConvKind::kForward         ? y_
                                  : kind_ == ConvKind::kBackwardInput ? x_
                                                                      : w_;
    for (const StridedTensor* t : {&x_, &w_, &y_}) {
      if (IsBfloat16(t->dtype) ? !IsNative(t->dtype) : !(t == &result && IsFloat(t->dtype, 32))) {
        return false;
      }
    }
    return IsMatrix(y_) && (HasStridesOf(w_, RowMajor(w_)) || IsMatrix(w_));
  }

  bool IsFaster() const {
    if (kind_ == ConvKind::kBackwardWeight && is_matrix_ && IsFasterAsTiles()) return true;
    const bool repeats = patches_.repeats();
    if (repeats && !HasIsa(dnnl::cpu_isa::avx512_core_amx) && !IsFasterWithoutTiles()) return false;
    // Fewer channels make tiles of few columns, up to 2.6 of the time; where patches overlap, the
    // copies of them are not worth it, up to 10.
    const int64_t least = repeats ? 128 : 32;
    return std::min(w_.dims[0], columns_) >= least && w_.numel() >= WeightsPerRow() * rows_;
  }

  // Null where oneDNN has no fast matmul for it.
  std::shared_ptr<const Plan> Build() const {
    auto plan = std::make_shared<Plan>();
    const bool is_input = kind_ == ConvKind::kBackwardInput;
    const bool sums = is_input && !is_matrix_;  // what several patches have of an element
    const StridedTensor patches = Matrix(sums ? kFloat32 : x_.dtype, rows_, columns_);
    const StridedTensor window = Matrix(w_.dtype, w_.dims[0], columns_);
    const StridedTensor positions = Matrix(y_.dtype, rows_, w_.dims[0]);
    const Plan::Id image = plan->AddArgument(0, Describe(is_matrix_ ? patches : x_));
    const Plan::Id rows = is_matrix_ ? image : plan->AddTemporary(Describe(patches));
    auto argument = [&](int number, const StridedTensor& view) {
      return Operand{plan->AddArgument(number, Describe(view)), view};
    };
    bool is_done = false;
    if (is_input) {
      is_done = Multiply(argument(2, positions), argument(1, window), {rows, patches}, *plan);
      if (!is_matrix_) AddScatter(rows, image, *plan);
    } else {
      if (!is_matrix_) AddGather(image, rows, *plan);
      is_done = kind_ == ConvKind::kForward
                    ? Multiply({rows, patches}, argument(1, Transposed(window)),
                               argument(2, positions), *plan)
                    : Multiply(argument(2, Transposed(positions)), {rows, patches},
                               argument(1, window), *plan);
    }
    return is_done ? plan : nullptr;
  }

 private:
  struct Operand {
    Plan::Id id;
    StridedTensor view;
  };

  // Whether the images as they are stored are what a kernel of ours multiplies.
  bool IsFasterAsTiles() const {
    const StridedTensor patches = Matrix(x_.dtype, rows_, columns_);
    const StridedTensor window = Matrix(w_.dtype, w_.dims[0], columns_);
    return TileMatmul::IsFaster(Transposed(Matrix(y_.dtype, rows_, w_.dims[0])), patches, window);
  }

  // With avx512_bf16 alone, the gradients of weights of overlapping patches take 0.5 to 0.98 of the
  // time where weights are very many for the positions, or windows have strides, and otherwise 0.99
  // to 2.3; forward and backward, images take 0.87 to 3.
  bool IsFasterWithoutTiles() const {
    constexpr int64_t kVeryMany = 8192;  // weights for each row
    return kind_ == ConvKind::kBackwardWeight &&
           (patches_.has_strides() || w_.numel() >= kVeryMany * rows_);
  }

  // From how many weights for each row of the patches on the matmul is the faster one.
  //
  // oneDNN's convolutions copy a weight into blocks of channels, and its gradient out of them, and
  // divide their work by the positions of an image: they are slow where weights are many and
  // positions are few. The matmul, copies of patches included, takes of their time, for the shapes
  // of ResNet-50, MobileNetV2, SSD, ConvNeXt, a ViT and a U-Net on two cores with AMX:
  //
  //                                        from here on    between that and a quarter
  //   weight gradients                     0.11 to 0.81    0.48 to 1.23
  //   those of patches that overlap        0.22 to 0.78    1.14 to 1.29
  //   others, of an image as it is stored  0.43 to 1.01    1.03 to 1.12
  //   others, of copied patches            0.37 to 0.75    0.73 to 0.98
  //   others, of patches that overlap      0.41 to 0.79    0.73 to 1.18
  //
  // and below a quarter up to 2.7. With avx512_bf16 alone it takes 0.37 to 0.94 for the first kind,
  // 0.56 to 1.01 for the third and 0.61 to 0.93 for the fourth.
  int64_t WeightsPerRow() const {
    if (kind_ == ConvKind::kBackwardWeight) return patches_.repeats() ? 1024 : 64;
    if (is_matrix_) return 256;
    return patches_.repeats() ? 16384 : 4096;
  }

  static bool Multiply(const Operand& a, const Operand& b, const Operand& out, Plan& plan) {
    if (TileMatmul::IsFaster(a.view, b.view, out.view) &&
        AddTileMatmul({{a.view, a.id}, {b.view, b.id}, {out.view, out.id}}, {}, &plan)) {
      return true;
    }
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    constexpr bool kAllowEmpty = true;
    const dnnl::matmul::primitive_desc pd(CpuEngine(), Describe(a.view), Describe(b.view),
                                          Describe(out.view), attr, kAllowEmpty);
    // oneDNN's reference implementations are right and hundreds of times slower.
    if (!pd || std::string(pd.impl_info_str()).find("ref") != std::string::npos) return false;
    plan.AddPrimitive(dnnl::matmul(pd), pd.scratchpad_desc(),
                      {{DNNL_ARG_SRC, a.id}, {DNNL_ARG_WEIGHTS, b.id}, {DNNL_ARG_DST, out.id}});
    plan.AddNote(std::string("matmul ") + pd.impl_info_str());
    return true;
  }

  void AddGather(Plan::Id image, Plan::Id rows, Plan& plan) const {
    plan.AddCall(
        [patches = patches_](const std::vector<void*>& args) {
          patches.Gather(static_cast<const uint16_t*>(args[0]), static_cast<uint16_t*>(args[1]));
        },
        {image, rows});
    plan.AddNote("patches+");
  }

  void AddScatter(Plan::Id rows, Plan::Id image, Plan& plan) const {
    plan.AddCall(
        [patches = patches_](const std::vector<void*>& args) {
          patches.Scatter(static_cast<const float*>(args[0]), args[1]);
        },
        {rows, image});
    plan.AddNote("+patches");
  }

  ConvKind kind_;
  const StridedTensor &x_, &w_, &y_;
  Patches patches_;
  int64_t rows_, columns_;
  bool is_matrix_;  // whether the patches are stored as the matmul takes them
};

}  // namespace

std::shared_ptr<const Plan> PatchMatmulPlan(ConvKind kind, const StridedTensor& x,
                                            const StridedTensor& w, const StridedTensor& y,
                                            const Convolution& convolution) {
  constexpr int kMostSpatialDims = 2;
  if (x.rank - 2 > kMostSpatialDims || convolution.groups != 1) return nullptr;
  const PatchMatmul matmul(kind, x, w, y, convolution);
  return matmul.IsSupported() && matmul.IsFaster() ? matmul.Build() : nullptr;
}

}  // namespace amp_ir::onednn
