// SPDX-License-Identifier: Apache-2.0
#include "onednn/depthwise.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "onednn/divide_up.h"
#include "tensors/stored_float.h"

namespace amp_ir::onednn {
namespace {

constexpr int64_t kLanes = kDepthwiseLanes;
// Bytes of the buffers of a task, that stay in a cache of the second level.
constexpr int64_t kBufferBytes = 192 << 10;
// The same for a single block of channels, at most: each thread has one.
constexpr int64_t kMostBufferBytes = 1 << 20;
// Tasks that there are at least, for threads, where there are rows enough: at least kFewRows each.
constexpr int64_t kTasks = 32, kFewRows = 8;
// Memory for sums that are added at the end, as a share of what is read.
constexpr int64_t kShareOfSums = 4;
// Multiplications below which one thread is faster: some tens of microseconds.
constexpr int64_t kFewProducts = 1 << 17;

int64_t RowsDim(const StridedTensor& t) { return t.rank == 4 ? t.dims[2] : 1; }

}  // namespace

bool IsDepthwise(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                 const Convolution& convolution) {
  return (x.rank == 3 || x.rank == 4) && convolution.groups > 1 &&
         convolution.groups == x.dims[1] && convolution.groups == w.dims[0] && HasChannelsLast(x) &&
         HasChannelsLast(y);
}

int64_t Depthwise::Axis::end() const {
  const int64_t room = places() - padding;  // places from the first element on
  return std::min(source, room <= 0 ? 0 : DivideUp(room, spread));
}

int64_t Depthwise::Axis::at(int64_t place) const {
  const int64_t offset = place - padding;
  if (offset < 0 || offset % spread != 0 || offset / spread >= source) return -1;
  return offset / spread;
}

char* Depthwise::Image::at(void* data, int64_t sample, int64_t row, int64_t column,
                           int64_t channel) const {
  const int64_t element =
      sample * sample_stride + row * row_stride + column * column_stride + channel;
  return static_cast<char*>(data) + element * (dtype.bits / 8);
}

// The source's rows that one row of the result reads. Each is copied once.
class Depthwise::PaddedRows {
 public:
  PaddedRows(const Depthwise& call, float* memory)
      : call_(call), memory_(memory), rows_(call.vertical_.taps) {}

  void Start(const Task& task, void* source) {
    // Padding and lanes without a channel are zeros, which nothing overwrites.
    if (task.channels != channels_) {
      std::memset(memory_, 0, task.blocks * call_.padded_floats() * sizeof(float));
    }
    channels_ = task.channels;
    task_ = task;
    source_ = source;
    next_ = 0;
  }

  // Copies what row `out` of the result reads and the row before it did not.
  void Advance(int64_t out) {
    const Axis& axis = call_.vertical_;
    const int64_t top = out * axis.stride, end = top + axis.span();
    for (int64_t place = std::max(next_, top); place < end; ++place) Load(place);
    next_ = end;
  }

  // For each tap, its row of [places, lanes]; null where all of it is padding.
  const std::vector<const float*>& Of(int64_t out, int64_t block) {
    const Axis& axis = call_.vertical_;
    for (int64_t k = 0; k < axis.taps; ++k) {
      const int64_t place = out * axis.stride + k * axis.dilation;
      rows_[k] = axis.at(place) < 0 ? nullptr : Slot(place) + block * call_.padded_floats();
    }
    return rows_;
  }

 private:
  float* Slot(int64_t place) const {
    return memory_ + place % call_.vertical_.span() * call_.horizontal_.places() * kLanes;
  }

  void Load(int64_t place) {
    const int64_t row = call_.vertical_.at(place);
    const Axis& axis = call_.horizontal_;
    const int64_t begin = axis.begin(), end = axis.end();
    if (row < 0 || begin >= end) return;
    const Image& image = call_.source_;
    void* from = image.at(source_, task_.sample, row, begin, task_.first_channel());
    LoadRow({from, image.dtype, image.column_stride, task_.channels, end - begin},
            Slot(place) + (axis.padding + begin * axis.spread) * kLanes, axis.spread,
            call_.padded_floats());
  }

  const Depthwise& call_;
  float* memory_;
  std::vector<const float*> rows_;
  Task task_{};
  void* source_ = nullptr;
  int64_t channels_ = 0, next_ = 0;
};

Depthwise::Image Depthwise::ImageOf(const StridedTensor& t) {
  return {t.dtype, t.strides[0], t.rank == 4 ? t.strides[2] : 0, t.strides[t.rank - 1]};
}

// The gradient of the input is a convolution too: of y, with zeros between its elements where the
// convolution has a stride, with the window turned around.
Depthwise::Axis Depthwise::AxisOf(ConvKind kind, int64_t x, int64_t taps, int64_t y, int64_t stride,
                                  int64_t padding, int64_t dilation) {
  if (kind == ConvKind::kBackwardInput) {
    return {y, x, taps, 1, dilation, stride, (taps - 1) * dilation - padding};
  }
  return {x, y, taps, stride, dilation, 1, padding};
}

Depthwise::Depthwise(ConvKind kind, const StridedTensor& x, const StridedTensor& w,
                     const StridedTensor& y, const Convolution& convolution, int threads)
    : kind_(kind),
      weight_dtype_(w.dtype),
      samples_(x.dims[0]),
      channels_(x.dims[1]),
      blocks_(DivideUp(x.dims[1], kLanes)),
      threads_(threads) {
  const bool is_plane = x.rank == 4;
  const int last = x.rank - 1, spatial = last - 2;
  vertical_ =
      AxisOf(kind, RowsDim(x), RowsDim(w), RowsDim(y), is_plane ? convolution.strides[0] : 1,
             is_plane ? convolution.padding[0] : 0, is_plane ? convolution.dilation[0] : 1);
  horizontal_ = AxisOf(kind, x.dims[last], w.dims[last], y.dims[last], convolution.strides[spatial],
                       convolution.padding[spatial], convolution.dilation[spatial]);
  const bool is_turned = kind == ConvKind::kBackwardInput;
  source_ = ImageOf(is_turned ? y : x);
  out_ = ImageOf(is_turned ? x : y);
  weight_strides_ = {w.strides[0], is_plane ? w.strides[2] : 0, w.strides[last]};
  Divide();
}

void Depthwise::Divide() {
  groups_ = DivideUp(blocks_, std::max<int64_t>(1, kBufferBytes / block_nbytes()));
  group_ = DivideUp(blocks_, groups_);
  groups_ = DivideUp(blocks_, group_);
  // A chunk of rows also reads those of a window: not more of these than of its own.
  const int64_t rows = std::max(vertical_.span() / vertical_.stride, kFewRows);
  chunks_ = std::min(DivideUp(kTasks, samples_ * groups_), DivideUp(vertical_.out, rows));
  units_ = samples_ * chunks_;
  const int64_t read =
      samples_ * (vertical_.source * horizontal_.source + vertical_.out * horizontal_.out);
  parts_ = std::max(read / (kShareOfSums * taps()), DivideUp(kTasks, groups_));
  parts_ = std::max<int64_t>(1, std::min(parts_, units_));
}

Depthwise::Task Depthwise::TaskOf(int64_t unit, int64_t group) const {
  const int64_t chunk = unit % chunks_, first = group * group_;
  const int64_t blocks = std::min(group_, blocks_ - first);
  const int64_t channels = std::min(blocks * kLanes, channels_ - first * kLanes);
  return {unit / chunks_,
          chunk * vertical_.out / chunks_,
          (chunk + 1) * vertical_.out / chunks_,
          first,
          blocks,
          channels};
}

int64_t Depthwise::padded_floats() const {
  return vertical_.span() * horizontal_.places() * kLanes;
}

// The weight in blocks of channels, or the sums of its gradient's parts.
int64_t Depthwise::shared_floats() const {
  const int64_t copies = kind_ == ConvKind::kBackwardWeight ? parts_ : 1;
  return copies * blocks_ * taps() * kLanes;
}

int64_t Depthwise::block_nbytes() const {
  return (padded_floats() + row_floats()) * static_cast<int64_t>(sizeof(float));
}

bool Depthwise::fits_cache() const { return block_nbytes() <= kMostBufferBytes; }

int64_t Depthwise::workspace_nbytes() const {
  const int64_t floats = shared_floats() + threads_ * own_floats();
  return floats * static_cast<int64_t>(sizeof(float));
}

int64_t Depthwise::weight_at(int64_t channel, int64_t tap) const {
  return channel * weight_strides_[0] + tap / horizontal_.taps * weight_strides_[1] +
         tap % horizontal_.taps * weight_strides_[2];
}

void Depthwise::PackWeight(const void* w, int64_t block, float* packed) const {
  const int64_t channels = std::min(kLanes, channels_ - block * kLanes);
  std::memset(packed, 0, taps() * kLanes * sizeof(float));
  WithDtype(weight_dtype_, [&](auto type) {
    const auto* from = static_cast<const typename decltype(type)::Stored*>(w);
    for (int64_t tap = 0; tap < taps(); ++tap) {
      const int64_t place = kind_ == ConvKind::kBackwardInput ? taps() - 1 - tap : tap;
      for (int64_t j = 0; j < channels; ++j) {
        packed[place * kLanes + j] = type.Widen(from[weight_at(block * kLanes + j, tap)]);
      }
    }
  });
}

void Depthwise::StoreWeight(const float* sums, int64_t block, void* w) const {
  const int64_t channels = std::min(kLanes, channels_ - block * kLanes);
  const int64_t part_floats = blocks_ * taps() * kLanes;
  WithDtype(weight_dtype_, [&](auto type) {
    auto* to = static_cast<typename decltype(type)::Stored*>(w);
    float total[kLanes];
    for (int64_t tap = 0; tap < taps(); ++tap) {
      AddParts(sums + (block * taps() + tap) * kLanes, parts_, part_floats, total);
      for (int64_t j = 0; j < channels; ++j) {
        to[weight_at(block * kLanes + j, tap)] = type.Narrow(total[j]);
      }
    }
  });
}

void Depthwise::Convolve(const Task& task, void* source, void* out, const float* packed,
                         PaddedRows& rows, float* row) const {
  const Window window{horizontal_.taps, horizontal_.dilation, horizontal_.stride};
  rows.Start(task, source);
  for (int64_t i = task.begin; i < task.end; ++i) {
    rows.Advance(i);
    for (int64_t b = 0; b < task.blocks; ++b) {
      const float* weight = packed + (task.first_block + b) * taps() * kLanes;
      MultiplyRow(rows.Of(i, b), window, weight, row + b * row_floats(), horizontal_.out);
    }
    StoreRow(row, row_floats(),
             {out_.at(out, task.sample, i, 0, task.first_channel()), out_.dtype, out_.column_stride,
              task.channels, horizontal_.out});
  }
}

void Depthwise::Accumulate(const Task& task, void* x, void* y, float* sums, PaddedRows& rows,
                           float* row) const {
  const Window window{horizontal_.taps, horizontal_.dilation, horizontal_.stride};
  rows.Start(task, x);
  for (int64_t i = task.begin; i < task.end; ++i) {
    rows.Advance(i);
    LoadRow({out_.at(y, task.sample, i, 0, task.first_channel()), out_.dtype, out_.column_stride,
             task.channels, horizontal_.out},
            row, 1, row_floats());
    for (int64_t b = 0; b < task.blocks; ++b) {
      float* sum = sums + (task.first_block + b) * taps() * kLanes;
      AddProducts(rows.Of(i, b), window, row + b * row_floats(), horizontal_.out, sum);
    }
  }
}

void Depthwise::Run(void* x, void* w, void* y, float* workspace) const {
  const int64_t block_floats = taps() * kLanes, part_floats = blocks_ * block_floats;
  const bool is_weight = kind_ == ConvKind::kBackwardWeight;
  void* source = kind_ == ConvKind::kBackwardInput ? y : x;
  void* out = kind_ == ConvKind::kBackwardInput ? x : y;
  const int64_t products = samples_ * vertical_.out * row_floats() * blocks_ * taps();
#pragma omp parallel num_threads(threads_) if (products >= kFewProducts)
  {
    float* row = workspace + shared_floats() + omp_get_thread_num() * own_floats();
    std::memset(row, 0, group_ * row_floats() * sizeof(float));
    PaddedRows rows(*this, row + group_ * row_floats());
    if (is_weight) {
#pragma omp for schedule(static)
      for (int64_t task = 0; task < parts_ * groups_; ++task) {
        const int64_t part = task / groups_, group = task % groups_;
        float* sums = workspace + part * part_floats;
        const Task first = TaskOf(0, group);
        std::memset(sums + first.first_block * block_floats, 0,
                    first.blocks * block_floats * sizeof(float));
        for (int64_t unit = part * units_ / parts_; unit < (part + 1) * units_ / parts_; ++unit) {
          Accumulate(TaskOf(unit, group), x, y, sums, rows, row);
        }
      }
#pragma omp for schedule(static)
      for (int64_t block = 0; block < blocks_; ++block) StoreWeight(workspace, block, w);
    } else {
#pragma omp for schedule(static)
      for (int64_t block = 0; block < blocks_; ++block) {
        PackWeight(w, block, workspace + block * block_floats);
      }
#pragma omp for schedule(static)
      for (int64_t task = 0; task < units_ * groups_; ++task) {
        Convolve(TaskOf(task / groups_, task % groups_), source, out, workspace, rows, row);
      }
    }
  }
}

}  // namespace amp_ir::onednn
