// SPDX-License-Identifier: Apache-2.0
// What a library call was worked out from, and a bounded cache of what was worked out.
#ifndef AMP_IR_KERNELS_PLAN_CACHE_H_
#define AMP_IR_KERNELS_PLAN_CACHE_H_

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensors/strided_tensor.h"

namespace amp_ir {

// What a plan depends on; equal keys mean equal plans.
class PlanKey {
 public:
  explicit PlanKey(int64_t operation) {
    values_.reserve(64);
    values_.push_back(operation);
  }
  void Add(int64_t value) { values_.push_back(value); }
  void Add(const StridedTensor& t) {
    values_.push_back(t.rank | t.dtype.code << 8 | t.dtype.bits << 16);
    values_.insert(values_.end(), t.dims.begin(), t.dims.begin() + t.rank);
    values_.insert(values_.end(), t.strides.begin(), t.strides.begin() + t.rank);
  }
  void Add(tvm::ffi::ShapeView shape) {
    values_.push_back(static_cast<int64_t>(shape.size()));
    values_.insert(values_.end(), shape.begin(), shape.end());
  }
  bool operator==(const PlanKey& other) const { return values_ == other.values_; }
  size_t Hash() const {
    uint64_t hash = 1469598103934665603ULL;  // FNV-1a, over words
    for (int64_t value : values_) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211ULL;
      hash ^= hash >> 29;
    }
    return hash;
  }

 private:
  std::vector<int64_t> values_;
};

constexpr size_t kMaxPlans = 512;

// The kMaxPlans plans used last; the one used least recently leaves first. Thread-safe.
template <class Plan>
class PlanCache {
 public:
  // The plan for `key`, built by `build` when it is not here.
  std::shared_ptr<const Plan> Get(const PlanKey& key,
                                  const std::function<std::shared_ptr<const Plan>()>& build) {
    std::shared_ptr<const Plan> plan = Find(key);
    if (plan == nullptr) {
      plan = build();  // outside the lock: it takes milliseconds
      Insert(key, plan);
    }
    return plan;
  }
  std::vector<std::shared_ptr<const Plan>> All() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<const Plan>> plans;
    for (const auto& entry : plans_) plans.push_back(entry.second);
    return plans;
  }
  void Clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    index_.clear();
    plans_.clear();
  }

 private:
  struct KeyHash {
    size_t operator()(const PlanKey& key) const { return key.Hash(); }
  };
  using Entries = std::list<std::pair<PlanKey, std::shared_ptr<const Plan>>>;

  std::shared_ptr<const Plan> Find(const PlanKey& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    plans_.splice(plans_.begin(), plans_, found->second);
    return found->second->second;
  }
  void Insert(const PlanKey& key, std::shared_ptr<const Plan> plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (index_.count(key) != 0) return;  // another thread built it meanwhile
    plans_.emplace_front(key, std::move(plan));
    index_.emplace(key, plans_.begin());
    if (plans_.size() <= kMaxPlans) return;
    index_.erase(plans_.back().first);
    plans_.pop_back();
  }

  std::mutex mutex_;
  Entries plans_;
  std::unordered_map<PlanKey, typename Entries::iterator, KeyHash> index_;
};

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_PLAN_CACHE_H_
