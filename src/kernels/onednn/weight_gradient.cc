// SPDX-License-Identifier: Apache-2.0
#include "onednn/weight_gradient.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "onednn/divide_up.h"

namespace amp_ir::onednn {
namespace {

// Places of a block: as many as keep a panel of 16 channels in a cache of the first level, and all
// channels in one of the second; not so few that loading and storing a tile shows.
constexpr int64_t kMostPlaces = 256, kFewPlaces = 128, kBlockFloats = 96 << 10;
// Fewer channels fill no tile: with 8 of both it takes twice oneDNN's time, with 12 as long.
constexpr int64_t kFewChannels = 12;
// Floats of a thread's buffers, at most.
constexpr int64_t kMostBufferFloats = 1 << 20;
// Places of a part, at least: its sums are as much memory as the weight, and are added at the end.
constexpr int64_t kPlacesOfPart = 2048;
// Parts at most.
constexpr int64_t kMostParts = 16;
// What copying a block's left channels takes, in the time of a panel of the right ones and one tap.
constexpr double kCopyPanels = 0.4;
// Multiplications below which one thread is faster: some tens of microseconds.
constexpr int64_t kFewProducts = 1 << 20;

// Share of the lanes' registers that hold no channel.
double Waste(int64_t channels) {
  const int64_t lanes = DivideUp(channels, kTileLanes) * kTileLanes;
  return static_cast<double>(lanes - channels) / channels;
}

int64_t Positions(const StridedTensor& w) {
  return w.rank == 4 ? w.dims[2] * w.dims[3] : w.dims[2];
}

}  // namespace

bool IsSumOfOuterProducts(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                          const Convolution& convolution) {
  return (x.rank == 3 || x.rank == 4) && convolution.groups == 1 && Positions(w) > 1 &&
         std::min(w.dims[0], w.dims[1]) >= kFewChannels && HasChannelsLast(x) && HasChannelsLast(y);
}

int64_t WeightGradient::Axis::begin(int64_t tap, int64_t first) const {
  const int64_t before = padding - tap * dilation;
  return std::max(first, before <= 0 ? 0 : DivideUp(before, stride));
}

int64_t WeightGradient::Axis::end(int64_t tap, int64_t last) const {
  const int64_t room = x + padding - tap * dilation;  // from the tap's first place to x's end
  return std::min(last, room <= 0 ? 0 : DivideUp(room, stride));
}

WeightGradient::Image WeightGradient::ImageOf(const StridedTensor& t) {
  const bool is_plane = t.rank == 4;
  const int last = t.rank - 1;
  return {t.dims[1],    is_plane ? t.dims[2] : 1,    t.dims[last],
          t.strides[0], is_plane ? t.strides[2] : 0, t.strides[last]};
}

WeightGradient::WeightGradient(const StridedTensor& x, const StridedTensor& w,
                               const StridedTensor& y, const Convolution& convolution, int threads)
    : samples_(x.dims[0]), threads_(threads) {
  const Image x_image = ImageOf(x), y_image = ImageOf(y);
  const bool is_plane = x.rank == 4;
  const int last = x.rank - 1, spatial = last - 2;
  vertical_ = {x_image.rows,
               y_image.rows,
               is_plane ? w.dims[2] : 1,
               is_plane ? convolution.strides[0] : 1,
               is_plane ? convolution.padding[0] : 0,
               is_plane ? convolution.dilation[0] : 1};
  horizontal_ = {x_image.columns,
                 y_image.columns,
                 w.dims[last],
                 convolution.strides[spatial],
                 convolution.padding[spatial],
                 convolution.dilation[spatial]};
  x_is_right_ = Waste(x_image.channels) <= Waste(y_image.channels);
  left_ = x_is_right_ ? y_image : x_image;
  right_ = x_is_right_ ? x_image : y_image;
  weight_strides_ = {w.strides[0], w.strides[1], is_plane ? w.strides[2] : 0, w.strides[last]};
  Divide();
}

void WeightGradient::Divide() {
  left_panels_ = DivideUp(left_.channels, kTileRows);
  right_panels_ = DivideUp(right_.channels, kTileLanes);
  const int64_t wanted =
      std::clamp(kBlockFloats / (left_.channels + right_.channels), kFewPlaces, kMostPlaces);
  const int64_t rows = vertical_.y, columns = horizontal_.y;
  if (rows * columns >= wanted) {
    const int64_t chunks = std::max<int64_t>(1, rows * columns / wanted);
    samples_a_block_ = 1;
    rows_a_block_ = DivideUp(rows, std::min(chunks, rows));
    blocks_ = samples_ * DivideUp(rows, rows_a_block_);
  } else {
    blocks_ = DivideUp(samples_, wanted / (rows * columns));
    samples_a_block_ = DivideUp(samples_, blocks_);
    blocks_ = DivideUp(samples_, samples_a_block_);
    rows_a_block_ = rows;
  }
  parts_ = std::clamp<int64_t>(samples_ * rows * columns / kPlacesOfPart, 1,
                               std::min(kMostParts, blocks_));
  groups_ = Groups();
}

// Into how many groups the right panels are divided: those that the slowest thread needs the least
// time with. Each group copies the left channels again.
int64_t WeightGradient::Groups() const {
  const double copy = kCopyPanels / static_cast<double>(taps());
  int64_t best = 1;
  double least = 0;
  for (int64_t groups = 1; groups <= right_panels_; ++groups) {
    const double tasks = static_cast<double>(DivideUp(parts_ * groups, threads_));
    const double took = tasks * (static_cast<double>(DivideUp(right_panels_, groups)) + copy);
    if (groups > 1 && took >= least) continue;
    best = groups;
    least = took;
  }
  return best;
}

WeightGradient::Block WeightGradient::BlockOf(int64_t block) const {
  if (samples_a_block_ > 1 || rows_a_block_ == vertical_.y) {
    const int64_t first = block * samples_a_block_;
    return {first, std::min(samples_a_block_, samples_ - first), 0, vertical_.y};
  }
  const int64_t chunks = DivideUp(vertical_.y, rows_a_block_);
  const int64_t begin = block % chunks * rows_a_block_;
  return {block / chunks, 1, begin, std::min(begin + rows_a_block_, vertical_.y)};
}

// Panels of nearly the same number of channels.
WeightGradient::Channels WeightGradient::LeftPanel(int64_t panel) const {
  const int64_t first = panel * left_.channels / left_panels_;
  return {first, (panel + 1) * left_.channels / left_panels_ - first};
}

WeightGradient::Channels WeightGradient::RightPanel(int64_t panel) const {
  const int64_t first = panel * kTileLanes;
  return {first, std::min(kTileLanes, right_.channels - first)};
}

int64_t WeightGradient::places(const Image& image, int64_t rows) const {
  return samples_a_block_ * rows * image.columns;
}

int64_t WeightGradient::left_floats() const {
  const int64_t span =
      (rows_a_block_ - 1) * vertical_.stride + (vertical_.taps - 1) * vertical_.dilation + 1;
  const int64_t rows = x_is_right_ ? rows_a_block_ : std::min(vertical_.x, span);
  return DivideUp(places(left_, rows) * left_.channels, kTileLanes) * kTileLanes;
}

int64_t WeightGradient::right_floats() const {
  const int64_t span =
      (rows_a_block_ - 1) * vertical_.stride + (vertical_.taps - 1) * vertical_.dilation + 1;
  const int64_t rows = x_is_right_ ? std::min(vertical_.x, span) : rows_a_block_;
  return places(right_, rows) * kTileLanes;
}

bool WeightGradient::fits_cache() const {
  return left_floats() + right_floats() <= kMostBufferFloats;
}

int64_t WeightGradient::workspace_nbytes() const {
  const int64_t floats = shared_floats() + threads_ * own_floats();
  return floats * static_cast<int64_t>(sizeof(float));
}

// The rows of a block: of y, those that are summed; of x, those that are read for them.
WeightGradient::Rows WeightGradient::RowsOf(const Image& image, const Block& block) const {
  if ((&image == &right_) != x_is_right_) return {block.begin, block.end - block.begin};
  const int64_t first = std::max<int64_t>(0, vertical_.at(block.begin, 0));
  const int64_t last = vertical_.at(block.end - 1, vertical_.taps - 1);
  return {first, std::max<int64_t>(0, std::min(vertical_.x, last + 1) - first)};
}

// Some channels where `Pack` copied them to, from row 0 of the block's first sample on.
ChannelPanel WeightGradient::Packed(const Image& image, const Block& block, int64_t width,
                                    const float* packed) const {
  const Rows rows = RowsOf(image, block);
  const int64_t row_floats = image.columns * width;
  return {packed - rows.first * row_floats, rows.count * row_floats, row_floats, width};
}

// Copies some channels of a block's rows side by side, `width` a position.
void WeightGradient::Pack(const Image& image, const Block& block, const float* data,
                          Channels channels, int64_t width, float* to) const {
  const Rows rows = RowsOf(image, block);
  for (int64_t s = 0; s < block.samples; ++s) {
    for (int64_t k = rows.first; k < rows.first + rows.count; ++k) {
      const float* row = data + (block.sample + s) * image.sample_stride + k * image.row_stride;
      PackChannels(row + channels.first, image.column_stride, channels.count, width, image.columns,
                   to);
      to += image.columns * width;
    }
  }
}

void WeightGradient::PackLeft(const Block& block, const float* data, float* to) const {
  const int64_t positions = block.samples * RowsOf(left_, block).count * left_.columns;
  for (int64_t panel = 0; panel < left_panels_; ++panel) {
    const Channels channels = LeftPanel(panel);
    Pack(left_, block, data, channels, channels.count, to + channels.first * positions);
  }
}

void WeightGradient::AddTap(const Block& block, int64_t tap, ChannelPanel left, ChannelPanel right,
                            int64_t count, bool is_first, float* tile) const {
  const int64_t down = tap / horizontal_.taps, across = tap % horizontal_.taps;
  const int64_t top = vertical_.begin(down, block.begin), bottom = vertical_.end(down, block.end);
  const int64_t near = horizontal_.begin(across, 0);
  const int64_t far = horizontal_.end(across, horizontal_.y);
  if (top >= bottom || near >= far) {
    if (is_first) std::memset(tile, 0, kTileFloats * sizeof(float));
    return;
  }
  ChannelPanel &x = x_is_right_ ? right : left, &y = x_is_right_ ? left : right;
  x.data += vertical_.at(top, down) * x.row_stride + horizontal_.at(near, across) * x.column_stride;
  x.row_stride *= vertical_.stride;
  x.column_stride *= horizontal_.stride;
  y.data += top * y.row_stride + near * y.column_stride;
  AddOuterProducts(left, right, block.samples, bottom - top, far - near, count, is_first, tile);
}

void WeightGradient::Accumulate(const Block& block, const float* right, int64_t panel,
                                const Buffers& buffers, bool is_first, float* tiles) const {
  const Channels lanes = RightPanel(panel);
  Pack(right_, block, right, lanes, kTileLanes, buffers.right);
  const ChannelPanel b = Packed(right_, block, kTileLanes, buffers.right);
  const int64_t positions = block.samples * RowsOf(left_, block).count * left_.columns;
  for (int64_t tap = 0; tap < taps(); ++tap) {
    for (int64_t k = 0; k < left_panels_; ++k) {
      const Channels own = LeftPanel(k);
      const ChannelPanel a = Packed(left_, block, own.count, buffers.left + own.first * positions);
      AddTap(block, tap, a, b, own.count, is_first, tiles + (k * taps() + tap) * kTileFloats);
    }
  }
}

void WeightGradient::Store(float* tiles, int64_t right, int64_t left, float* w) const {
  const Channels rows = LeftPanel(left), lanes = RightPanel(right);
  for (int64_t part = 1; part < parts_; ++part) {
    const float* other = tiles + part * part_floats();
#pragma omp simd
    for (int64_t k = 0; k < taps() * kTileFloats; ++k) tiles[k] += other[k];
  }
  const int64_t left_stride = weight_strides_[x_is_right_ ? 0 : 1];
  const int64_t right_stride = weight_strides_[x_is_right_ ? 1 : 0];
  const bool is_dense = weight_strides_[2] == horizontal_.taps * weight_strides_[3];
  const int64_t lines = is_dense ? 1 : vertical_.taps, line = taps() / lines;
  for (int64_t i = 0; i < rows.count; ++i) {
    for (int64_t j = 0; j < lanes.count; ++j) {
      const float* sum = tiles + i * kTileLanes + j;
      float* to = w + (rows.first + i) * left_stride + (lanes.first + j) * right_stride;
      for (int64_t down = 0; down < lines; ++down, to += weight_strides_[2]) {
        for (int64_t k = 0; k < line; ++k, sum += kTileFloats) to[k * weight_strides_[3]] = *sum;
      }
    }
  }
}

// The sums of one part and some right panels: in memory of their own, or of one panel at a time
// right to where they belong.
void WeightGradient::Sum(int64_t part, int64_t first, int64_t last, const float* left,
                         const float* right, const Buffers& buffers, float* sums, float* w) const {
  const int64_t begin = part * blocks_ / parts_, end = (part + 1) * blocks_ / parts_;
  for (int64_t k = begin; k < end; ++k) {
    const Block block = BlockOf(k);
    PackLeft(block, left, buffers.left);
    for (int64_t panel = first; panel < last; ++panel) {
      float* tiles = blocks_ == 1 ? buffers.tiles : sums + tiles_at(panel, 0);
      Accumulate(block, right, panel, buffers, k == begin, tiles);
      for (int64_t i = 0; blocks_ == 1 && i < left_panels_; ++i) {
        Store(tiles + i * taps() * kTileFloats, panel, i, w);
      }
    }
  }
}

void WeightGradient::Run(const float* x, float* w, const float* y, float* workspace) const {
  const float* left = x_is_right_ ? y : x;
  const float* right = x_is_right_ ? x : y;
  const int64_t products =
      samples_ * vertical_.y * horizontal_.y * left_.channels * right_.channels * taps();
#pragma omp parallel num_threads(threads_) if (products >= kFewProducts)
  {
    float* own = workspace + shared_floats() + omp_get_thread_num() * own_floats();
    const Buffers buffers{own, own + left_floats(), own + left_floats() + right_floats()};
#pragma omp for schedule(static)
    for (int64_t task = 0; task < parts_ * groups_; ++task) {
      const int64_t part = task / groups_, group = task % groups_;
      Sum(part, group * right_panels_ / groups_, (group + 1) * right_panels_ / groups_, left, right,
          buffers, workspace + part * part_floats(), w);
    }
    if (blocks_ > 1) {
#pragma omp for schedule(static)
      for (int64_t k = 0; k < left_panels_ * right_panels_; ++k) {
        Store(workspace + k * taps() * kTileFloats, k / left_panels_, k % left_panels_, w);
      }
    }
  }
}

}  // namespace amp_ir::onednn
