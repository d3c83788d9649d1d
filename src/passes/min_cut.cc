// SPDX-License-Identifier: Apache-2.0
#include "amp_ir/min_cut.h"

#include <algorithm>

namespace amp_ir {
namespace {

// Edges and their reverses in one array, sorted by the vertex they leave: edges of vertex v are
// `first_[v]` to `first_[v + 1]`. Kept together, since a search touches all three at once.
struct Arc {
  int32_t target;
  int32_t reverse;  // position of the reverse edge
  int64_t room;     // capacity not yet used
};

class FlowNetwork {
 public:
  FlowNetwork(int64_t num_vertices, const std::vector<CutEdge>& edges)
      : first_(num_vertices + 1, 0),
        arcs_(2 * edges.size()),
        distance_(num_vertices),
        next_(num_vertices) {
    for (const CutEdge& edge : edges) {
      ++first_[edge.from + 1];
      ++first_[edge.to + 1];
    }
    for (int64_t vertex = 0; vertex < num_vertices; ++vertex) first_[vertex + 1] += first_[vertex];
    std::vector<int32_t> free_slot(first_.begin(), first_.end() - 1);
    for (const CutEdge& edge : edges) {
      int32_t forward = free_slot[edge.from]++;
      int32_t backward = free_slot[edge.to]++;
      arcs_[forward] = {static_cast<int32_t>(edge.to), backward, edge.capacity};
      arcs_[backward] = {static_cast<int32_t>(edge.from), forward, 0};
    }
  }

  int64_t PushAll(int32_t source, int32_t sink) {
    int64_t flow = 0;
    while (FindDistances(source, sink)) {
      std::copy(first_.begin(), first_.end() - 1, next_.begin());
      flow += PushAlongShortestPaths(source, sink);
    }
    return flow;
  }

  std::vector<bool> ReachedFrom(int32_t source) {
    std::vector<bool> reached(next_.size(), false);
    reached[source] = true;
    queue_.assign(1, source);
    for (size_t head = 0; head < queue_.size(); ++head) {
      for (int32_t i = first_[queue_[head]]; i < first_[queue_[head] + 1]; ++i) {
        if (arcs_[i].room == 0 || reached[arcs_[i].target]) continue;
        reached[arcs_[i].target] = true;
        queue_.push_back(arcs_[i].target);
      }
    }
    return reached;
  }

 private:
  // Breadth-first distances to the sink along edges with room, up to that of the source; whether
  // the source has one.
  bool FindDistances(int32_t source, int32_t sink) {
    std::fill(distance_.begin(), distance_.end(), -1);
    queue_.assign(1, sink);
    distance_[sink] = 0;
    for (size_t head = 0; head < queue_.size() && distance_[source] < 0; ++head) {
      int32_t vertex = queue_[head];
      for (int32_t i = first_[vertex]; i < first_[vertex + 1]; ++i) {
        int32_t before = arcs_[i].target;
        if (distance_[before] >= 0 || arcs_[arcs_[i].reverse].room == 0) continue;
        distance_[before] = distance_[vertex] + 1;
        queue_.push_back(before);
      }
    }
    return distance_[source] >= 0;
  }

  // Depth-first search with a stack of our own: a chain of 100 000 ops would overflow the call
  // stack. `next_[v]` skips edges that lead nowhere; after a push the search goes on from the first
  // edge that is full.
  int64_t PushAlongShortestPaths(int32_t source, int32_t sink) {
    int64_t flow = 0;
    path_.clear();
    int32_t vertex = source;
    while (true) {
      if (vertex == sink) {
        size_t full = 0;
        flow += PushAlongPath(&full);
        vertex = arcs_[arcs_[path_[full]].reverse].target;
        path_.resize(full);
      }
      int32_t& i = next_[vertex];
      while (i < first_[vertex + 1] && !Leads(vertex, arcs_[i])) ++i;
      if (i < first_[vertex + 1]) {
        path_.push_back(i);
        vertex = arcs_[i].target;
      } else if (path_.empty()) {
        return flow;
      } else {
        vertex = arcs_[arcs_[path_.back()].reverse].target;
        path_.pop_back();
        ++next_[vertex];
      }
    }
  }

  // Uses up the room of the path; `*full` is its first edge without any afterwards.
  int64_t PushAlongPath(size_t* full) {
    for (size_t step = 1; step < path_.size(); ++step) {
      if (arcs_[path_[step]].room < arcs_[path_[*full]].room) *full = step;
    }
    int64_t pushed = arcs_[path_[*full]].room;
    for (int32_t i : path_) {
      arcs_[i].room -= pushed;
      arcs_[arcs_[i].reverse].room += pushed;
    }
    return pushed;
  }

  bool Leads(int32_t vertex, const Arc& arc) const {
    return arc.room > 0 && distance_[arc.target] == distance_[vertex] - 1;
  }

  std::vector<int32_t> first_;
  std::vector<Arc> arcs_;
  std::vector<int32_t> distance_;
  std::vector<int32_t> next_;
  std::vector<int32_t> queue_;
  std::vector<int32_t> path_;
};

}  // namespace

MinCut FindMinCut(int64_t num_vertices, const std::vector<CutEdge>& edges, int64_t source,
                  int64_t sink) {
  FlowNetwork network(num_vertices, edges);
  int64_t value = network.PushAll(static_cast<int32_t>(source), static_cast<int32_t>(sink));
  return {network.ReachedFrom(static_cast<int32_t>(source)), value};
}

}  // namespace amp_ir
