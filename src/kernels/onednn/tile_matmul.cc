// SPDX-License-Identifier: Apache-2.0
#include "onednn/tile_matmul.h"

#include <omp.h>

#include <algorithm>

#include "onednn/plan.h"
#include "onednn/tiles.h"
#include "tensors/low_float.h"

namespace amp_ir::onednn {
namespace {

// How many terms are summed at a time: a panel of a's tiles and one of b's fit a cache of 48 KiB.
// Few terms are summed at once, so that the result is written evenly and not at the end.
constexpr int64_t kTerms = 256, kFewTerms = 512;
// Where a's tiles are cheap to make again and there are so few terms, those of b are made once for
// all of them: of so many elements, for so many rows.
constexpr int64_t kKeptTerms = 1024, kKeptElements = 400 << 10, kMostRows = 4096;
// Otherwise a task's block of the result is at most this: its sums and the tiles that are kept fit
// a cache of 2 MiB. Blocks become smaller for more threads, but not than `kLeastExtent`.
struct Extents {
  int64_t rows, columns;
};
constexpr Extents kHigh{768, 384}, kWide{384, 768};
constexpr int64_t kLeastExtent = 2 * kPanel;
// Tasks that share one block of the result are at most so many, and each has so many terms. Their
// sums take at most an eighth of the operands' bytes.
constexpr int64_t kMostParts = 16, kTermsOfPart = 1024, kShareOfOperands = 8;

// Smaller products take up to twice oneDNN's time.
constexpr int64_t kLeastTerms = 32, kLeastColumns = 16, kLeastProducts = 1 << 20;

// Beside oneDNN 3.2 on two cores with AMX, shapes with 64 to 30522 rows and columns and 32 to 50176
// terms. With a transposed: half of 286 take 0.70 to 0.90 of the time, 17 more than 1.05. With a
// stored row after row: half of 606 from these extents on take 0.70 to 1.01, one in ten more than
// 1.04 to 1.13; with fewer rows or columns up to twice as much. Where b is, too, sums of many terms
// are faster with fewer rows.
constexpr int64_t kManyRows = 256, kManyColumns = 256, kManyTerms = 2048;
// The elements of the result that each thread had then, at least.
constexpr int64_t kThreadElements = 1 << 16;

// Whether few threads wait for the last tasks.
bool IsBalanced(int64_t tasks, int64_t threads) {
  return tasks >= 8 * threads || 10 * tasks >= 9 * threads * DivideUp(tasks, threads);
}

// A power of two, as numbers of threads mostly are.
int64_t Parts(const BlockShape& s, const Extents& most) {
  if (s.rows > most.rows || s.columns > most.columns) return 1;
  const int64_t operands = s.terms * (s.rows + s.columns) * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t sums = s.rows * s.columns * static_cast<int64_t>(sizeof(float));
  const int64_t limit =
      std::min({kMostParts, s.terms / kTermsOfPart, operands / kShareOfOperands / sums});
  int64_t parts = 1;
  while (2 * parts <= limit) parts *= 2;
  return parts;
}

bool HasUnitStride(const StridedTensor& matrix) {
  return matrix.strides[0] == 1 || matrix.strides[1] == 1;
}

BlockShape ShapeOf(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out) {
  BlockShape s{};
  s.rows = out.dims[0];
  s.columns = out.dims[1];
  s.terms = b.dims[0];
  s.a_has_rows = a.strides[1] == 1;
  s.b_has_rows = b.strides[1] == 1;
  s.is_low = IsBfloat16(out.dtype);
  s.a_stride = a.strides[s.a_has_rows ? 0 : 1];
  s.b_stride = b.strides[s.b_has_rows ? 0 : 1];
  s.out_stride = out.strides[0];
  return s;
}

Extents MostExtents(const BlockShape& s, bool keeps_all) {
  if (!keeps_all) return s.a_has_rows ? kHigh : kWide;
  return {kMostRows, kKeptElements / s.terms};
}

}  // namespace

TileMatmul::TileMatmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out,
                       int threads)
    : shape_(ShapeOf(a, b, out)) {
  BlockShape& s = shape_;
  const int64_t all_terms = DivideUp(s.terms, kTileTerms) * kTileTerms;
  const bool keeps_all = s.a_has_rows && s.terms <= kKeptTerms;
  const Extents most = MostExtents(s, keeps_all);
  const int64_t parts = keeps_all ? 1 : Parts(s, most);
  s.sub_terms = s.terms <= kFewTerms ? all_terms : kTerms;
  s.block_terms = keeps_all ? all_terms : s.sub_terms;
  s.part_terms = DivideUp(DivideUp(s.terms, parts), s.block_terms) * s.block_terms;
  s.parts = DivideUp(s.terms, s.part_terms);
  int64_t down = DivideUp(s.rows, most.rows), across = DivideUp(s.columns, most.columns);
  while (!IsBalanced(down * across * s.parts, threads) && s.parts == 1) {
    const int64_t high = s.rows / down, wide = s.columns / across;
    if (std::max(high, wide) < kLeastExtent) break;
    // In the shape of the largest: a's tiles are made again for each block of columns, b's of rows.
    ++(high * most.columns > wide * most.rows ? down : across);
  }
  s.block_rows = DivideUp(DivideUp(s.rows, down), kPanel) * kPanel;
  s.block_columns = DivideUp(DivideUp(s.columns, across), kPanel) * kPanel;
  threads_ = static_cast<int>(std::min<int64_t>(threads, row_blocks() * column_blocks() * s.parts));
}

#if AMP_IR_HAS_TILES

bool TileMatmul::IsFor(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out) {
  const bool is_low = IsBfloat16(a.dtype) && IsBfloat16(b.dtype) &&
                      (IsFloat(out.dtype, 32) || IsBfloat16(out.dtype));
  const bool is_large = b.dims[0] >= kLeastTerms && out.numel() * b.dims[0] >= kLeastProducts &&
                        std::min(out.dims[0], out.dims[1]) >= kLeastColumns;
  // oneDNN says so only after the system has let this process use tiles.
  return out.rank == 2 && is_low && is_large && out.strides[1] == 1 && HasUnitStride(a) &&
         HasUnitStride(b) && HasIsa(dnnl::cpu_isa::avx512_core_amx);
}

bool TileMatmul::IsFaster(const StridedTensor& a, const StridedTensor& b,
                          const StridedTensor& out) {
  if (!IsFor(a, b, out)) return false;
  const bool a_has_rows = a.strides[1] == 1, b_has_rows = b.strides[1] == 1;
  if (!a_has_rows) return b_has_rows;
  if (out.dims[1] < kManyColumns) return false;
  if (b_has_rows && b.dims[0] >= kManyTerms) return true;
  return out.dims[0] >= kManyRows && out.numel() >= omp_get_max_threads() * kThreadElements;
}

int64_t TileMatmul::part_nbytes() const {
  return shape_.block_panels() * kPanelFloats * static_cast<int64_t>(sizeof(float));
}

int64_t TileMatmul::workspace_nbytes() const {
  return threads_ * shape_.thread_nbytes() + (shape_.parts == 1 ? 0 : shape_.parts * part_nbytes());
}

AMP_IR_TILES void TileMatmul::Run(const uint16_t* a, const uint16_t* b, const float* bias,
                                  void* out, float alpha, float beta, char* workspace) const {
  const BlockShape& s = shape_;
  const int64_t down = row_blocks(), tasks = down * column_blocks() * s.parts;
  char* shared = s.parts == 1 ? nullptr : workspace + threads_ * s.thread_nbytes();
  const BlockOperands operands{a, b, bias, out, {alpha, beta}};
#pragma omp parallel num_threads(threads_)
  {
    char* own = workspace + omp_get_thread_num() * s.thread_nbytes();
    const TilesInUse tiles;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t part = task % s.parts, block = task / s.parts;
      char* sums = shared == nullptr ? nullptr : shared + part * part_nbytes();
      BlockSum(s, operands, block % down * s.block_rows, block / down * s.block_columns,
               reinterpret_cast<float*>(sums), own)
          .Run(part * s.part_terms);
    }
    if (s.parts > 1) {
      const int64_t panels = Panels(s.rows) * Panels(s.columns);
#pragma omp for
      for (int64_t panel = 0; panel < panels; ++panel) {
        BlockSum(s, operands, 0, 0, reinterpret_cast<float*>(shared), own).FinishParts(panel);
      }
    }
  }
}

namespace {

// What a call of the plan reads beside the matrices, by its position among the arguments.
struct CallArguments {
  int factor = -1, total = -1, bias = -1;
};

// A bias as the kernel reads it: float32, and 0 up to a multiple of 32.
struct Bias {
  bool is_low = false;
  int64_t columns = 0;

  int64_t padded() const { return DivideUp(columns, kPanel) * kPanel; }
  int64_t nbytes() const { return padded() * static_cast<int64_t>(sizeof(float)); }
  void Widen(const void* from, float* to) const {
    for (int64_t i = 0; i < columns; ++i) {
      to[i] = is_low ? WidenBfloat16(static_cast<const uint16_t*>(from)[i])
                     : static_cast<const float*>(from)[i];
    }
    std::fill(to + columns, to + padded(), 0.F);
  }
};

}  // namespace

bool AddTileMatmul(const TileOperands& operands, const ScaledSum& sum, Plan* plan) {
  const auto& [a, b, out, bias] = operands;
  const bool is_for = TileMatmul::IsFor(a.view, b.view, out.view);
  if (!is_for || (sum.is_on && (bias || !IsFloat(out.view.dtype, 32)))) return false;
  Bias widened;
  if (bias) {
    widened = {IsBfloat16(bias->view.dtype), out.view.dims[1]};
    if (bias->view.strides[0] != 1 || !(widened.is_low || IsFloat(bias->view.dtype, 32))) {
      return false;
    }
  }
  const TileMatmul matmul(a.view, b.view, out.view, omp_get_max_threads());
  const Plan::Id workspace = plan->AddWorkspace(widened.nbytes() + matmul.workspace_nbytes());
  std::vector<Plan::Id> args{a.id, b.id, out.id, workspace};
  const auto add = [&](bool is_there, Plan::Id id) {
    if (!is_there) return -1;
    args.push_back(id);
    return static_cast<int>(args.size()) - 1;
  };
  CallArguments more;
  more.factor = add(sum.factor >= 0, sum.factor);
  more.total = add(sum.total >= 0, sum.total);
  more.bias = add(bias.has_value(), bias ? bias->id : -1);
  plan->AddCall(
      [matmul, more, widened, sums = sum.is_on](const std::vector<void*>& given) {
        const auto number = [&](int at) {
          return at < 0 ? 1.F : *static_cast<const float*>(given[at]);
        };
        const float total = number(more.total);
        char* workspace = static_cast<char*>(given[3]);
        float* bias = more.bias < 0 ? nullptr : reinterpret_cast<float*>(workspace);
        if (bias != nullptr) widened.Widen(given[more.bias], bias);
        matmul.Run(static_cast<const uint16_t*>(given[0]), static_cast<const uint16_t*>(given[1]),
                   bias, given[2], total * number(more.factor), sums ? total : 0.F,
                   workspace + widened.nbytes());
      },
      args);
  plan->AddNote("matmul tiles");
  return true;
}

#else

bool AddTileMatmul(const TileOperands&, const ScaledSum&, Plan*) { return false; }
bool TileMatmul::IsFor(const StridedTensor&, const StridedTensor&, const StridedTensor&) {
  return false;
}
bool TileMatmul::IsFaster(const StridedTensor&, const StridedTensor&, const StridedTensor&) {
  return false;
}
int64_t TileMatmul::workspace_nbytes() const { return 0; }
void TileMatmul::Run(const uint16_t*, const uint16_t*, const float*, void*, float, float,
                     char*) const {}

#endif

}  // namespace amp_ir::onednn
