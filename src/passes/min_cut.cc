// SPDX-License-Identifier: Apache-2.0
#include "amp_ir/min_cut.h"

#include <algorithm>

namespace amp_ir {
namespace {

// Edges and their reverses in one array, sorted by the vertex they leave: edges of vertex v are
// `first_[v]` to `first_[v + 1]`. `reverse_[e]` is the position of e's reverse.
class FlowNetwork {
 public:
  FlowNetwork(int64_t num_vertices, const std::vector<CutEdge>& edges)
      : first_(num_vertices + 1, 0),
        target_(2 * edges.size()),
        reverse_(2 * edges.size()),
        residual_(2 * edges.size()),
        level_(num_vertices),
        next_(num_vertices) {
    for (const CutEdge& edge : edges) {
      ++first_[edge.from + 1];
      ++first_[edge.to + 1];
    }
    for (int64_t vertex = 0; vertex < num_vertices; ++vertex) first_[vertex + 1] += first_[vertex];
    std::vector<int64_t> free_slot(first_.begin(), first_.end() - 1);
    for (const CutEdge& edge : edges) {
      int64_t forward = free_slot[edge.from]++;
      int64_t backward = free_slot[edge.to]++;
      target_[forward] = edge.to;
      target_[backward] = edge.from;
      reverse_[forward] = backward;
      reverse_[backward] = forward;
      residual_[forward] = edge.capacity;
    }
  }

  int64_t PushAll(int64_t source, int64_t sink) {
    int64_t flow = 0;
    while (FindLevels(source, sink)) {
      std::copy(first_.begin(), first_.end() - 1, next_.begin());
      while (int64_t pushed = PushOnePath(source, sink)) flow += pushed;
    }
    return flow;
  }

  // After the last `FindLevels` a vertex has a level exactly if the source reaches it.
  std::vector<bool> Reached() const {
    std::vector<bool> reached(level_.size());
    for (size_t vertex = 0; vertex < level_.size(); ++vertex) reached[vertex] = level_[vertex] >= 0;
    return reached;
  }

 private:
  // Breadth-first distances from the source along edges with room; whether the sink has one.
  bool FindLevels(int64_t source, int64_t sink) {
    std::fill(level_.begin(), level_.end(), -1);
    queue_.assign(1, source);
    level_[source] = 0;
    for (size_t head = 0; head < queue_.size(); ++head) {
      int64_t vertex = queue_[head];
      for (int64_t edge = first_[vertex]; edge < first_[vertex + 1]; ++edge) {
        int64_t target = target_[edge];
        if (residual_[edge] == 0 || level_[target] >= 0) continue;
        level_[target] = level_[vertex] + 1;
        queue_.push_back(target);
      }
    }
    return level_[sink] >= 0;
  }

  // Pushes along one shortest path, found by depth-first search with a stack of our own: a chain of
  // 100 000 ops would overflow the call stack. `next_[v]` skips edges known to lead nowhere.
  int64_t PushOnePath(int64_t source, int64_t sink) {
    path_.clear();
    int64_t vertex = source;
    while (vertex != sink) {
      int64_t& edge = next_[vertex];
      while (edge < first_[vertex + 1] && !Leads(vertex, edge)) ++edge;
      if (edge < first_[vertex + 1]) {
        path_.push_back(edge);
        vertex = target_[edge];
        continue;
      }
      if (path_.empty()) return 0;
      vertex = target_[reverse_[path_.back()]];
      path_.pop_back();
      ++next_[vertex];
    }
    int64_t pushed = residual_[path_.front()];
    for (int64_t edge : path_) pushed = std::min(pushed, residual_[edge]);
    for (int64_t edge : path_) {
      residual_[edge] -= pushed;
      residual_[reverse_[edge]] += pushed;
    }
    return pushed;
  }

  bool Leads(int64_t vertex, int64_t edge) const {
    return residual_[edge] > 0 && level_[target_[edge]] == level_[vertex] + 1;
  }

  std::vector<int64_t> first_;
  std::vector<int64_t> target_;
  std::vector<int64_t> reverse_;
  std::vector<int64_t> residual_;
  std::vector<int64_t> level_;
  std::vector<int64_t> next_;
  std::vector<int64_t> queue_;
  std::vector<int64_t> path_;
};

}  // namespace

MinCut FindMinCut(int64_t num_vertices, const std::vector<CutEdge>& edges, int64_t source,
                  int64_t sink) {
  FlowNetwork network(num_vertices, edges);
  int64_t value = network.PushAll(source, sink);
  return {network.Reached(), value};
}

}  // namespace amp_ir
