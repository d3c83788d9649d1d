// SPDX-License-Identifier: Apache-2.0
#include "amp_ir/memory_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace amp_ir {
namespace {

enum class Fit { kLowestGap, kTightestGap };

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
    int64_t reached = 0;  // end of the highest conflicting interval so far
    int64_t best_offset = -1;
    int64_t best_gap = std::numeric_limits<int64_t>::max();
    for (const Placed& other : placed_) {
      if (other.first_use > interval.last_use || other.last_use < interval.first_use) continue;
      int64_t gap = other.begin - reached;
      if (gap >= interval.nbytes && gap < best_gap) {
        best_offset = reached;
        best_gap = gap;
        if (fit == Fit::kLowestGap) break;
      }
      reached = std::max(reached, other.end);
    }
    int64_t offset = best_offset >= 0 ? best_offset : reached;
    Placed entry{offset, offset + interval.nbytes, interval.first_use, interval.last_use};
    auto above = [](int64_t value, const Placed& other) { return value < other.begin; };
    placed_.insert(std::upper_bound(placed_.begin(), placed_.end(), offset, above), entry);
    return offset;
  }

 private:
  struct Placed {
    int64_t begin, end, first_use, last_use;
  };
  std::vector<Placed> placed_;
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

}  // namespace

MemoryPlan PlanMemory(const std::vector<LiveInterval>& intervals, int64_t alignment_bytes) {
  // Rounding every length up makes all gaps, hence all offsets, multiples of the alignment.
  std::vector<LiveInterval> rounded = intervals;
  for (LiveInterval& interval : rounded)
    interval.nbytes = RoundUp(interval.nbytes, alignment_bytes);
  const int64_t floor_bytes = MostBytesAlive(rounded);
  std::vector<int64_t> best;
  int64_t best_peak = std::numeric_limits<int64_t>::max();
  for (const std::vector<size_t>& order : Orders(rounded)) {
    for (Fit fit : {Fit::kLowestGap, Fit::kTightestGap}) {
      if (best_peak <= floor_bytes) break;
      std::vector<int64_t> offsets = PlaceInOrder(rounded, order, fit);
      int64_t peak = Peak(rounded, offsets);
      if (peak < best_peak) {
        best_peak = peak;
        best = std::move(offsets);
      }
    }
  }
  return {best, Peak(intervals, best), MostBytesAlive(intervals)};
}

}  // namespace amp_ir
