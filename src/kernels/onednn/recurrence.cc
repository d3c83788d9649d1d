// SPDX-License-Identifier: Apache-2.0
#include "onednn/recurrence.h"

#include <omp.h>

#include <atomic>
#include <cstring>
#include <new>
#include <type_traits>

#include "onednn/plan.h"
#include "onednn/recurrence_plan.h"
#include "onednn/recurrent_cell.h"
#include "onednn/widen.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

int64_t ElementBytes(DLDataType dtype) { return dtype.bits / 8; }

const void* At(const void* base, int64_t element, DLDataType dtype) {
  return static_cast<const char*>(base) + element * ElementBytes(dtype);
}

void* At(void* base, int64_t element, DLDataType dtype) {
  return static_cast<char*>(base) + element * ElementBytes(dtype);
}

// Never destroyed: threads may still run plans while the process ends.
PlanCache<RecurrencePlan>& Cache() {
  static PlanCache<RecurrencePlan>* cache = new PlanCache<RecurrencePlan>;
  return *cache;
}

std::shared_ptr<const RecurrencePlan> CachedRecurrence(const ProductShape& shape) {
  PlanKey key = OperationKey(kRecurrence);
  for (int64_t extent : {shape.rows, shape.hidden, shape.gates}) key.Add(extent);
  key.Add(shape.is_backward | shape.dtype.code << 8 | shape.dtype.bits << 16);
  return Cache().Get(key, [&] { return std::make_shared<const RecurrencePlan>(shape); });
}

// The memory objects of one task's run.
class Execution {
 public:
  Execution(const RecurrencePlan& plan, const Task& task, char* workspace, const void* weight)
      : task_(task),
        form_(plan.FormOf(task)),
        terms_(plan.shape().terms()),
        dtype_(plan.compute_dtype()),
        stream_(CpuEngine()),
        operand_(form_.operand, CpuEngine(), nullptr),
        packed_(form_.packed, CpuEngine(), workspace + task.packed_offset),
        product_(form_.product, CpuEngine(), workspace + task.product_offset),
        multiply_workspace_(form_.multiply_workspace, CpuEngine(),
                            workspace + task.workspace_offset),
        pack_workspace_(form_.pack_workspace, CpuEngine(), workspace + task.workspace_offset) {
    const ProductShape& shape = plan.shape();
    const int64_t first = shape.is_backward ? task.column : task.column * shape.hidden;
    weight_ = dnnl::memory(form_.weight, CpuEngine(), const_cast<void*>(At(weight, first, dtype_)));
  }

  const Task& task() const { return task_; }
  float* product() const { return static_cast<float*>(product_.get_data_handle()); }

  // Copies the task's part of the weight into oneDNN's own layout, for all of its columns.
  dnnl_status_t Pack() const {
    if (task_.row != 0) return dnnl_success;
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, weight_.get()},
                                    {DNNL_ARG_TO, packed_.get()},
                                    {DNNL_ARG_SCRATCHPAD, pack_workspace_.get()}};
    return dnnl_primitive_execute(form_.pack.get(), stream_.get(), 3, args);
  }

  // product = operand @ weight, for the task's rows and columns.
  dnnl_status_t Multiply(const void* operand) const {
    const void* rows = At(operand, task_.row * terms_, dtype_);
    const dnnl_status_t status =
        dnnl_memory_set_data_handle(operand_.get(), const_cast<void*>(rows));
    if (status != dnnl_success) return status;
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, operand_.get()},
                                    {DNNL_ARG_WEIGHTS, packed_.get()},
                                    {DNNL_ARG_DST, product_.get()},
                                    {DNNL_ARG_SCRATCHPAD, multiply_workspace_.get()}};
    return dnnl_primitive_execute(form_.multiply.get(), stream_.get(), 4, args);
  }

 private:
  const Task& task_;
  const Form& form_;
  int64_t terms_;
  DLDataType dtype_;
  dnnl::stream stream_;
  dnnl::memory operand_, weight_, packed_, product_, multiply_workspace_, pack_workspace_;
};

// A layer's own part, element by element, for the rows and columns of one task. A backward pass
// takes the steps from the last one to the first.
//   Operand(step)              what the step's product reads, all rows, [n, terms]
//   Begin(task, product)       before the first step
//   Step(task, step, product)  one step; `product` float32[gates or 1, rows, columns]
//   End(task, product)         after the last one
class LayerPass {
 protected:
  explicit LayerPass(const RecurrentLayer& layer) : layer_(layer) {}

  // In which states, in order of time, those before and after the step lie.
  int64_t Time(int64_t step) const { return layer_.is_reverse ? layer_.steps - 1 - step : step; }
  int64_t Before(int64_t step) const { return Time(step) + (layer_.is_reverse ? 1 : 0); }
  int64_t After(int64_t step) const { return Time(step) + (layer_.is_reverse ? 0 : 1); }

  // Elements from the start of a tensor [..., n, h], or with so many gates [..., n, gates * h].
  int64_t Element(int64_t index, int64_t row, int64_t column) const {
    return (index * layer_.rows + row) * layer_.hidden + column;
  }
  int64_t Element(int64_t index, int64_t row, int64_t column, int64_t gates) const {
    return (index * layer_.rows + row) * gates * layer_.hidden + column;
  }
  const void* Low(const void* base, int64_t element) const {
    return At(base, element, layer_.dtype);
  }
  void* Low(void* base, int64_t element) const { return At(base, element, layer_.dtype); }

  // The initial state of a forward pass, where its first step reads it.
  void CopyState(const Task& task, const void* from, void* to, DLDataType dtype) const {
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      std::memcpy(At(to, Element(Before(0), row, task.column), dtype),
                  At(from, Element(0, row, task.column), dtype),
                  task.columns * ElementBytes(dtype));
    }
  }

  // The gradient of the last state, as if a product had given it.
  void ReadGradient(const Task& task, const void* from, float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      WidenColumns(layer_.dtype, Low(from, Element(0, task.row + i, task.column)),
                   product + i * task.columns, task.columns);
    }
  }

  // The gradient of the initial state, which the last product gave.
  void WriteGradient(const Task& task, const float* product, void* to) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      NarrowColumns(layer_.dtype, product + i * task.columns,
                    Low(to, Element(0, task.row + i, task.column)), task.columns);
    }
  }

  RecurrentLayer layer_;
};

class LstmForwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = false, kIsCarried = false;
  static constexpr int64_t kGates = 4;
  LstmForwardPass(const RecurrentLayer& layer, const Lstm& lstm) : LayerPass(layer), of_(lstm) {}

  const void* Operand(int64_t step) const { return Low(of_.states, Element(Before(step), 0, 0)); }
  void Begin(const Task& task, float*) const {
    CopyState(task, of_.hidden, of_.states, layer_.dtype);
    CopyState(task, of_.cell, of_.cells, kFloat32);
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      const int64_t gates = Element(Time(step), row, task.column, kGates);
      const int64_t before = Element(Before(step), row, task.column);
      const int64_t after = Element(After(step), row, task.column);
      LstmForwardRow columns;
      columns.product = product + i * task.columns;
      columns.product_stride = task.rows * task.columns;
      columns.gates = Low(of_.gates, gates);
      columns.cell_before = of_.cells + before;
      columns.gate_stride = layer_.hidden;
      columns.cell = of_.cells + after;
      columns.state = Low(of_.states, after);
      columns.activated = Low(of_.activated, gates);
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task&, const float*) const {}

 private:
  Lstm of_;
};

class LstmBackwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = true, kIsCarried = false;
  static constexpr int64_t kGates = 4;
  LstmBackwardPass(const RecurrentLayer& layer, const LstmBackward& lstm)
      : LayerPass(layer), of_(lstm) {}

  const void* Operand(int64_t step) const {
    return Low(of_.grad_gates, Element(Time(step), 0, 0, kGates));
  }
  // The gradient of the cell is stored in its result all the time.
  void Begin(const Task& task, float* product) const {
    ReadGradient(task, of_.grad_hidden, product);
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      const int64_t at = Element(0, row, task.column);
      std::memcpy(of_.grad_cell0 + at, of_.grad_cell + at, task.columns * sizeof(float));
    }
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      const int64_t gates = Element(Time(step), row, task.column, kGates);
      LstmBackwardRow columns;
      columns.product = product + i * task.columns;
      columns.grad = Low(of_.grad, Element(Time(step), row, task.column));
      columns.activated = Low(of_.activated, gates);
      columns.cell = of_.cells + Element(After(step), row, task.column);
      columns.cell_before = of_.cells + Element(Before(step), row, task.column);
      columns.gate_stride = layer_.hidden;
      columns.grad_cell = of_.grad_cell0 + Element(0, row, task.column);
      columns.grad_gates = Low(of_.grad_gates, gates);
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task& task, const float* product) const {
    WriteGradient(task, product, of_.grad_hidden0);
  }

 private:
  LstmBackward of_;
};

class GruForwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = false, kIsCarried = true;
  static constexpr int64_t kGates = 3, kActivated = 4;
  GruForwardPass(const RecurrentLayer& layer, const Gru& gru) : LayerPass(layer), of_(gru) {}

  void SetCarried(float* carried) { carried_ = carried; }
  const void* Operand(int64_t step) const { return Low(of_.states, Element(Before(step), 0, 0)); }
  void Begin(const Task& task, float*) const {
    CopyState(task, of_.hidden, of_.states, layer_.dtype);
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      const int64_t at = Element(0, row, task.column);
      WidenColumns(layer_.dtype, Low(of_.hidden, at), carried_ + at, task.columns);
    }
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      GruForwardRow columns;
      columns.product = product + i * task.columns;
      columns.product_stride = task.rows * task.columns;
      columns.gates = Low(of_.gates, Element(Time(step), row, task.column, kGates));
      columns.bias = Low(of_.bias, task.column);
      columns.gate_stride = layer_.hidden;
      columns.carried = carried_ + Element(0, row, task.column);
      columns.state = Low(of_.states, Element(After(step), row, task.column));
      columns.activated = Low(of_.activated, Element(Time(step), row, task.column, kActivated));
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task&, const float*) const {}

 private:
  Gru of_;
  float* carried_ = nullptr;
};

class GruBackwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = true, kIsCarried = true;
  static constexpr int64_t kGates = 3, kActivated = 4;
  GruBackwardPass(const RecurrentLayer& layer, const GruBackward& gru)
      : LayerPass(layer), of_(gru) {}

  void SetCarried(float* carried) { carried_ = carried; }
  const void* Operand(int64_t step) const {
    return Low(of_.grad_recurrent, Element(Time(step), 0, 0, kGates));
  }
  void Begin(const Task& task, float* product) const {
    ReadGradient(task, of_.grad_hidden, product);
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      std::memset(carried_ + Element(0, row, task.column), 0, task.columns * sizeof(float));
    }
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      const int64_t gates = Element(Time(step), row, task.column, kGates);
      GruBackwardRow columns;
      columns.product = product + i * task.columns;
      columns.grad = Low(of_.grad, Element(Time(step), row, task.column));
      columns.activated = Low(of_.activated, Element(Time(step), row, task.column, kActivated));
      columns.state_before = Low(of_.states, Element(Before(step), row, task.column));
      columns.gate_stride = layer_.hidden;
      columns.carried = carried_ + Element(0, row, task.column);
      columns.grad_gates = Low(of_.grad_gates, gates);
      columns.grad_recurrent = Low(of_.grad_recurrent, gates);
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task& task, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t at = Element(0, task.row + i, task.column);
      for (int64_t j = 0; j < task.columns; ++j) carried_[at + j] += product[i * task.columns + j];
      NarrowColumns(layer_.dtype, carried_ + at, Low(of_.grad_hidden0, at), task.columns);
    }
  }

 private:
  GruBackward of_;
  float* carried_ = nullptr;
};

class RnnForwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = false, kIsCarried = false;
  static constexpr int64_t kGates = 1;
  RnnForwardPass(const RecurrentLayer& layer, const Rnn& rnn) : LayerPass(layer), of_(rnn) {}

  const void* Operand(int64_t step) const { return Low(of_.states, Element(Before(step), 0, 0)); }
  void Begin(const Task& task, float*) const {
    CopyState(task, of_.hidden, of_.states, layer_.dtype);
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      RnnForwardRow columns;
      columns.product = product + i * task.columns;
      columns.gates = Low(of_.gates, Element(Time(step), row, task.column));
      columns.is_relu = of_.is_relu;
      columns.state = Low(of_.states, Element(After(step), row, task.column));
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task&, const float*) const {}

 private:
  Rnn of_;
};

class RnnBackwardPass : public LayerPass {
 public:
  static constexpr bool kIsBackward = true, kIsCarried = false;
  static constexpr int64_t kGates = 1;
  RnnBackwardPass(const RecurrentLayer& layer, const RnnBackward& rnn)
      : LayerPass(layer), of_(rnn) {}

  const void* Operand(int64_t step) const { return Low(of_.grad_gates, Element(Time(step), 0, 0)); }
  void Begin(const Task& task, float* product) const {
    ReadGradient(task, of_.grad_hidden, product);
  }
  void Step(const Task& task, int64_t step, const float* product) const {
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t row = task.row + i;
      RnnBackwardRow columns;
      columns.product = product + i * task.columns;
      columns.grad = Low(of_.grad, Element(Time(step), row, task.column));
      columns.state = Low(of_.states, Element(After(step), row, task.column));
      columns.is_relu = of_.is_relu;
      columns.grad_gates = Low(of_.grad_gates, Element(Time(step), row, task.column));
      ComputeRow(layer_.dtype, columns, task.columns);
    }
  }
  void End(const Task& task, const float* product) const {
    WriteGradient(task, product, of_.grad_hidden0);
  }

 private:
  RnnBackward of_;
};

// One layer's pass by its plan, in one team of threads.
template <class Pass>
class TeamRun {
 public:
  TeamRun(const RecurrencePlan& plan, const Pass& pass, const RecurrentLayer& layer,
          const void* weight, char* workspace)
      : plan_(plan), pass_(pass), layer_(layer), workspace_(workspace) {
    if (plan.is_widened()) weight = Widened(weight);
    executions_.reserve(plan.tasks().size());
    for (const Task& task : plan.tasks()) executions_.emplace_back(plan, task, workspace, weight);
  }

  void Run() {
    // OpenMP may grant fewer threads than there are tasks: then a thread has several.
#pragma omp parallel num_threads(static_cast<int>(executions_.size()))
    {
      ForOwn([&](const Execution& one) {
        Check(one.Pack());
        pass_.Begin(one.task(), one.product());
        if (!Pass::kIsBackward) WidenOperand(one.task(), 0);
      });
#pragma omp barrier
      for (int64_t step = 0; step < layer_.steps; ++step) {
        if (Pass::kIsBackward) {
          Backward(layer_.steps - 1 - step);
        } else {
          Forward(step);
        }
      }
      ForOwn([&](const Execution& one) { pass_.End(one.task(), one.product()); });
    }
    dnnl::error::wrap_c_api(status_, "could not execute a primitive");
  }

 private:
  // One step of this thread's tasks. The barrier parts what tasks write of a product's operand from
  // what the others read of it; a widened operand has two places in turns, so that one barrier a
  // step is enough.
  void Forward(int64_t step) {
    ForOwn([&](const Execution& one) {
      Check(one.Multiply(ReadOperand(step)));
      pass_.Step(one.task(), step, one.product());
      if (step + 1 < layer_.steps) WidenOperand(one.task(), step + 1);
    });
#pragma omp barrier
  }

  void Backward(int64_t step) {
    ForOwn([&](const Execution& one) {
      pass_.Step(one.task(), step, one.product());
      WidenOperand(one.task(), step);
    });
#pragma omp barrier
    ForOwn([&](const Execution& one) { Check(one.Multiply(ReadOperand(step))); });
  }

  template <class Call>
  void ForOwn(Call call) {
    const size_t threads = omp_get_num_threads();
    for (size_t i = omp_get_thread_num(); i < executions_.size(); i += threads) {
      try {
        call(executions_[i]);
      } catch (const std::bad_alloc&) {
        Check(dnnl_out_of_memory);
      } catch (...) {
        Check(dnnl_runtime_error);
      }
    }
  }

  // Remembers an error, which must not leave the team: that would end the process.
  void Check(dnnl_status_t status) {
    if (status != dnnl_success) status_ = status;
  }

  float* OperandCopy(int64_t step) const {
    return reinterpret_cast<float*>(workspace_ + plan_.operand_offset(step));
  }
  const void* ReadOperand(int64_t step) const {
    return plan_.is_widened() ? OperandCopy(step) : pass_.Operand(step);
  }

  // The task's columns of each gate that the operand has.
  void WidenOperand(const Task& task, int64_t step) const {
    if (!plan_.is_widened()) return;
    const int64_t parts = Pass::kIsBackward ? Pass::kGates : 1;
    const void* operand = pass_.Operand(step);
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t at = (row * parts + part) * layer_.hidden + task.column;
        WidenColumns(layer_.dtype, At(operand, at, layer_.dtype), OperandCopy(step) + at,
                     task.columns);
      }
    }
  }

  const void* Widened(const void* weight) const {
    StridedTensor from, to;
    from.data = const_cast<void*>(weight);
    from.dtype = layer_.dtype;
    from.rank = 1;
    from.dims[0] = Pass::kGates * layer_.hidden * layer_.hidden;
    from.strides[0] = 1;
    to = from;
    to.data = workspace_ + plan_.weight_offset();
    to.dtype = kFloat32;
    ConvertStrided(from, to);
    return to.data;
  }

  const RecurrencePlan& plan_;
  const Pass& pass_;
  const RecurrentLayer& layer_;
  char* workspace_;
  std::vector<Execution> executions_;
  std::atomic<dnnl_status_t> status_{dnnl_success};
};

template <class Pass>
void RunPass(const RecurrentLayer& layer, const void* weight, Pass pass) {
  if (layer.rows == 0) return;
  const auto plan = CachedRecurrence(
      {layer.rows, layer.hidden, Pass::kGates, Pass::kIsBackward, Pass::kIsCarried, layer.dtype});
  WithWorkspace(plan->workspace_nbytes(), 0, [&](char* workspace) {
    if constexpr (Pass::kIsCarried) {
      pass.SetCarried(reinterpret_cast<float*>(workspace + plan->carried_offset()));
    }
    TeamRun<Pass>(*plan, pass, layer, weight, workspace).Run();
  });
}

}  // namespace

void Run(const RecurrentLayer& layer, const Lstm& lstm) {
  RunPass(layer, lstm.weight, LstmForwardPass(layer, lstm));
}

void Run(const RecurrentLayer& layer, const LstmBackward& lstm) {
  RunPass(layer, lstm.weight, LstmBackwardPass(layer, lstm));
}

void Run(const RecurrentLayer& layer, const Gru& gru) {
  RunPass(layer, gru.weight, GruForwardPass(layer, gru));
}

void Run(const RecurrentLayer& layer, const GruBackward& gru) {
  RunPass(layer, gru.weight, GruBackwardPass(layer, gru));
}

void Run(const RecurrentLayer& layer, const Rnn& rnn) {
  RunPass(layer, rnn.weight, RnnForwardPass(layer, rnn));
}

void Run(const RecurrentLayer& layer, const RnnBackward& rnn) {
  RunPass(layer, rnn.weight, RnnBackwardPass(layer, rnn));
}

std::vector<std::string> RecurrenceImplementations() {
  std::vector<std::string> names;
  for (const auto& plan : Cache().All()) names.push_back(plan->implementation());
  return names;
}

void ClearRecurrencePlans() { Cache().Clear(); }

}  // namespace amp_ir::onednn
