// SPDX-License-Identifier: Apache-2.0
#include "amp_ir/memory_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

namespace amp_ir {
namespace {

// Bounds the time for long programs to about a second; up to 10 000 intervals, everything is tried.
constexpr int64_t kMaxComparisons = 600'000'000;

// Rounds of improving the best order; more gained nothing on training steps.
constexpr int kMaxPromotions = 200;
constexpr int64_t kMaxPromotionComparisons = 60'000'000;

// First fit: the gap of the lowest offset. Best fit: the smallest gap.
enum class Fit { kFirst, kBest };

int64_t RoundUp(int64_t nbytes, int64_t alignment_bytes) {
  return (nbytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

int64_t MostBytesAlive(const std::vector<LiveInterval>& intervals) {
  std::vector<std::pair<int64_t, int64_t>> changes;  // (time, bytes gained or lost)
  changes.reserve(2 * intervals.size());
  for (const LiveInterval& interval : intervals) {
    changes.emplace_back(interval.first_use, interval.nbytes);
    changes.emplace_back(interval.last_use + 1, -interval.nbytes);
  }
  // At one time, losses (negative) sort before gains: last_use + 1 is the first free time.
  std::sort(changes.begin(), changes.end());
  int64_t alive = 0;
  int64_t most = 0;
  for (const auto& change : changes) {
    alive += change.second;
    most = std::max(most, alive);
  }
  return most;
}

// For each interval, how many others are alive at some time with it.
std::vector<int64_t> ConflictCounts(const std::vector<LiveInterval>& intervals) {
  std::vector<int64_t> starts, ends;
  for (const LiveInterval& interval : intervals) {
    starts.push_back(interval.first_use);
    ends.push_back(interval.last_use);
  }
  std::sort(starts.begin(), starts.end());
  std::sort(ends.begin(), ends.end());
  std::vector<int64_t> counts;
  for (const LiveInterval& interval : intervals) {
    // Began no later than it ends, less those that ended before it began; itself is among them.
    auto began = std::upper_bound(starts.begin(), starts.end(), interval.last_use);
    auto ended = std::lower_bound(ends.begin(), ends.end(), interval.first_use);
    counts.push_back((began - starts.begin()) - (ended - ends.begin()) - 1);
  }
  return counts;
}

// Intervals already placed, kept in the order of their offsets so that one walk meets every gap.
class Block {
 public:
  // Places `interval` in a gap between the intervals alive with it, or above them all.
  int64_t Place(const LiveInterval& interval, Fit fit) {
    Gap best{-1, std::numeric_limits<int64_t>::max()};
    int64_t reached = 0;  // end of the highest conflicting interval so far
    for (size_t begin = 0; begin < placed_.size(); begin += kChunk) {
      const size_t conflicts = CollectConflicts(begin, interval);
      for (size_t i = 0; i < conflicts; ++i) {
        const Placed& other = placed_[conflicts_[i]];
        const int64_t gap = other.begin - reached;
        const bool better = fit == Fit::kFirst ? best.offset < 0 : gap < best.nbytes;
        if (gap >= interval.nbytes && better) best = {reached, gap};
        reached = std::max(reached, other.end);
      }
      if (fit == Fit::kFirst && best.offset >= 0) break;
    }
    const int64_t offset = best.offset >= 0 ? best.offset : reached;
    Placed entry{offset, offset + interval.nbytes, interval.first_use, interval.last_use};
    auto above = [](int64_t value, const Placed& other) { return value < other.begin; };
    placed_.insert(std::upper_bound(placed_.begin(), placed_.end(), offset, above), entry);
    return offset;
  }

 private:
  static constexpr size_t kChunk = 256;
  struct Gap {
    int64_t offset, nbytes;
  };
  struct Placed {
    int64_t begin, end, first_use, last_use;
  };

  // Fills conflicts_ with the intervals of one chunk that are alive with `interval`; returns how
  // many. Apart from the walk and without a branch, because whether two intervals meet cannot be
  // predicted and a wrong guess costs more than the rest of the loop.
  size_t CollectConflicts(size_t begin, const LiveInterval& interval) {
    const size_t end = std::min(begin + kChunk, placed_.size());
    size_t count = 0;
    for (size_t i = begin; i < end; ++i) {
      conflicts_[count] = i;
      count += static_cast<size_t>((placed_[i].first_use <= interval.last_use) &
                                   (placed_[i].last_use >= interval.first_use));
    }
    return count;
  }

  std::vector<Placed> placed_;
  std::array<size_t, kChunk> conflicts_{};
};

std::vector<int64_t> PlaceInOrder(const std::vector<LiveInterval>& intervals,
                                  const std::vector<size_t>& order, Fit fit) {
  Block block;
  std::vector<int64_t> offsets(intervals.size(), 0);
  for (size_t index : order) {
    // An empty tensor needs no byte; offset 0 is inside every block.
    if (intervals[index].nbytes > 0) offsets[index] = block.Place(intervals[index], fit);
  }
  return offsets;
}

int64_t Peak(const std::vector<LiveInterval>& intervals, const std::vector<int64_t>& offsets) {
  int64_t peak = 0;
  for (size_t i = 0; i < intervals.size(); ++i) {
    peak = std::max(peak, offsets[i] + intervals[i].nbytes);
  }
  return peak;
}

// The orders worth trying; within equal keys, earlier and larger first, so that plans are stable.
std::vector<std::vector<size_t>> Orders(const std::vector<LiveInterval>& intervals) {
  std::vector<int64_t> conflicts = ConflictCounts(intervals);
  auto sorted_by = [&](auto key) {
    std::vector<size_t> order(intervals.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::make_pair(key(a), intervals[b].first_use) >
             std::make_pair(key(b), intervals[a].first_use);
    });
    return order;
  };
  auto nbytes = [&](size_t i) { return static_cast<double>(intervals[i].nbytes); };
  auto lifetime = [&](size_t i) {
    return static_cast<double>(intervals[i].last_use - intervals[i].first_use + 1);
  };
  return {
      sorted_by(nbytes),                                             // the hardest to fit first
      sorted_by([&](size_t i) { return nbytes(i) * lifetime(i); }),  // largest area first
      sorted_by([&](size_t i) { return nbytes(i) * static_cast<double>(conflicts[i]); }),
      sorted_by(lifetime),  // long-lived below, short-lived stacked on top
      sorted_by([&](size_t i) { return -static_cast<double>(intervals[i].first_use); }),
  };
}

// The best plan so far, and how much searching is left.
class Search {
 public:
  Search(const std::vector<LiveInterval>& intervals, int64_t lower_bound_bytes)
      : intervals_(intervals), lower_bound_bytes_(lower_bound_bytes) {}

  bool Done() const { return peak_ <= lower_bound_bytes_ || comparisons_ > kMaxComparisons; }
  int64_t comparisons() const { return comparisons_; }

  // Places all in this order, keeps the plan if it is the best, and returns its offsets.
  std::vector<int64_t> Try(const std::vector<size_t>& order, Fit fit) {
    comparisons_ += static_cast<int64_t>(intervals_.size() * intervals_.size() / 2);
    std::vector<int64_t> offsets = PlaceInOrder(intervals_, order, fit);
    const int64_t peak = Peak(intervals_, offsets);
    if (peak < peak_) {
      peak_ = peak;
      offsets_ = offsets;
      order_ = order;
      fit_ = fit;
    }
    return offsets;
  }

  const std::vector<LiveInterval>& intervals() const { return intervals_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  const std::vector<size_t>& order() const { return order_; }
  Fit fit() const { return fit_; }

 private:
  const std::vector<LiveInterval>& intervals_;
  int64_t lower_bound_bytes_;
  int64_t comparisons_ = 0;
  int64_t peak_ = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> offsets_;
  std::vector<size_t> order_;
  Fit fit_ = Fit::kFirst;
};

// Which place in `order` holds the interval that reaches highest.
size_t HighestPlace(const Search& search, const std::vector<size_t>& order,
                    const std::vector<int64_t>& offsets) {
  size_t highest = 0;
  for (size_t place = 1; place < order.size(); ++place) {
    auto end = [&](size_t at) { return offsets[order[at]] + search.intervals()[order[at]].nbytes; };
    if (end(place) > end(highest)) highest = place;
  }
  return highest;
}

// What reaches highest was placed too late: it goes to half its place, and all is placed again. A
// step may make things worse; the next goes on from there, and the best is kept.
void PromoteHighest(Search* search) {
  const int64_t enough = search->comparisons() + kMaxPromotionComparisons;
  const Fit fit = search->fit();
  std::vector<size_t> order = search->order();
  std::vector<int64_t> offsets = search->offsets();
  for (int round = 0; round < kMaxPromotions; ++round) {
    if (search->Done() || search->comparisons() > enough) return;
    const size_t place = HighestPlace(*search, order, offsets);
    if (place == 0) return;
    const auto from = order.begin() + static_cast<std::ptrdiff_t>(place);
    std::rotate(order.begin() + static_cast<std::ptrdiff_t>(place / 2), from, from + 1);
    offsets = search->Try(order, fit);
  }
}

}  // namespace

MemoryPlan PlanMemory(const std::vector<LiveInterval>& intervals, int64_t alignment_bytes) {
  // Rounding every length up makes all gaps, hence all offsets, multiples of the alignment.
  std::vector<LiveInterval> rounded = intervals;
  for (LiveInterval& interval : rounded) {
    interval.nbytes = RoundUp(interval.nbytes, alignment_bytes);
  }
  Search search(rounded, MostBytesAlive(rounded));
  const std::vector<std::vector<size_t>> orders = Orders(rounded);
  for (Fit fit : {Fit::kFirst, Fit::kBest}) {
    for (const std::vector<size_t>& order : orders) {
      if (!search.Done()) search.Try(order, fit);
    }
  }
  PromoteHighest(&search);
  return {search.offsets(), Peak(intervals, search.offsets()), MostBytesAlive(intervals)};
}

}  // namespace amp_ir
