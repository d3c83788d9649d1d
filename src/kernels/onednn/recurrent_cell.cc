// SPDX-License-Identifier: Apache-2.0
#include "onednn/recurrent_cell.h"

#include "onednn/vectors.h"
#include "tensors/stored_float.h"

namespace amp_ir {
namespace {

// e^x to 1 unit in the last place from -87.3 to 88.3; beyond, its bound 1.2e-38 or infinity. NaN
// stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by a polynomial. Adding 1.5 * 2^23 leaves n in the
// low bits of a float, which shifted up become the exponent of 2^n; n = 128 gives infinity.
// Source: Cephes (Moshier), expf, its polynomial and its ln 2 in two parts.
[[gnu::always_inline]] inline float Exp(float x) {
  constexpr float kRound = 12582912.F;
  x = x < -87.33F ? -87.33F : x;
  x = x > 88.8F ? 88.8F : x;
  const float shifted = x * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375F) - n * -2.12194440E-4F;
  float y = 1.9875691500E-4F;
  y = y * r + 1.3981999507E-3F;
  y = y * r + 8.3334519073E-3F;
  y = y * r + 4.1665795894E-2F;
  y = y * r + 1.6666665459E-1F;
  y = y * r + 5.0000001201E-1F;
  y = y * (r * r) + r + 1.F;
  return y * FromBits((ToBits(shifted) << 23) + 0x3F800000);
}

[[gnu::always_inline]] inline float Sigmoid(float x) { return 1.F / (1.F + Exp(-x)); }

// Source: Cephes, tanhf: a polynomial below 0.625, where 1 - 2 / (e^2x + 1) would cancel.
[[gnu::always_inline]] inline float Tanh(float x) {
  const float square = x * x;
  float y = -5.70498872745E-3F;
  y = y * square + 2.06390887954E-2F;
  y = y * square - 5.37397155531E-2F;
  y = y * square + 1.33314422036E-1F;
  y = y * square - 3.33332819422E-1F;
  const float small = y * square * x + x;
  const uint32_t sign = ToBits(x) & 0x80000000;
  const float magnitude = FromBits(ToBits(x) ^ sign);
  const float large = 1.F - 2.F / (Exp(2.F * magnitude) + 1.F);
  return magnitude < 0.625F ? small : FromBits(ToBits(large) | sign);
}

// One of the rows with its pointers typed; calling it does one column.
template <class Dtype>
class LstmForwardColumn {
 public:
  explicit LstmForwardColumn(const LstmForwardRow& row)
      : row_(row),
        gates_(static_cast<const T*>(row.gates)),
        state_(static_cast<T*>(row.state)),
        activated_(static_cast<T*>(row.activated)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float i = Sigmoid(Gate(0, j)), f = Sigmoid(Gate(1, j));
    const float m = Tanh(Gate(2, j)), o = Sigmoid(Gate(3, j));
    const float cell = f * row_.cell_before[j] + i * m;
    row_.cell[j] = cell;
    state_[j] = Dtype::Narrow(o * Tanh(cell));
    activated_[j] = Dtype::Narrow(i);
    activated_[j + row_.gate_stride] = Dtype::Narrow(f);
    activated_[j + 2 * row_.gate_stride] = Dtype::Narrow(m);
    activated_[j + 3 * row_.gate_stride] = Dtype::Narrow(o);
  }

 private:
  using T = typename Dtype::Stored;
  [[gnu::always_inline]] float Gate(int64_t gate, int64_t j) const {
    return Dtype::Widen(gates_[j + gate * row_.gate_stride]) +
           row_.product[j + gate * row_.product_stride];
  }
  LstmForwardRow row_;
  const T* gates_;
  T *state_, *activated_;
};

template <class Dtype>
class LstmBackwardColumn {
 public:
  explicit LstmBackwardColumn(const LstmBackwardRow& row)
      : row_(row),
        grad_(static_cast<const T*>(row.grad)),
        activated_(static_cast<const T*>(row.activated)),
        grad_gates_(static_cast<T*>(row.grad_gates)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float i = Activated(0, j), f = Activated(1, j);
    const float m = Activated(2, j), o = Activated(3, j);
    const float grad_state = Dtype::Widen(grad_[j]) + row_.product[j];
    const float bounded = Tanh(row_.cell[j]);
    const float grad_cell = row_.grad_cell[j] + grad_state * o * (1.F - bounded * bounded);
    Store(0, j, grad_cell * m * (i * (1.F - i)));
    Store(1, j, grad_cell * row_.cell_before[j] * (f * (1.F - f)));
    Store(2, j, grad_cell * i * (1.F - m * m));
    Store(3, j, grad_state * bounded * (o * (1.F - o)));
    row_.grad_cell[j] = grad_cell * f;
  }

 private:
  using T = typename Dtype::Stored;
  [[gnu::always_inline]] float Activated(int64_t gate, int64_t j) const {
    return Dtype::Widen(activated_[j + gate * row_.gate_stride]);
  }
  [[gnu::always_inline]] void Store(int64_t gate, int64_t j, float value) const {
    grad_gates_[j + gate * row_.gate_stride] = Dtype::Narrow(value);
  }
  LstmBackwardRow row_;
  const T *grad_, *activated_;
  T* grad_gates_;
};

template <class Dtype>
class GruForwardColumn {
 public:
  explicit GruForwardColumn(const GruForwardRow& row)
      : row_(row),
        gates_(static_cast<const T*>(row.gates)),
        bias_(static_cast<const T*>(row.bias)),
        state_(static_cast<T*>(row.state)),
        activated_(static_cast<T*>(row.activated)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float r = Sigmoid(Gate(0, j) + Recurrent(0, j));
    const float z = Sigmoid(Gate(1, j) + Recurrent(1, j));
    const float p = Recurrent(2, j);
    const float n = Tanh(Gate(2, j) + r * p);
    const float state = n + z * (row_.carried[j] - n);
    row_.carried[j] = state;
    state_[j] = Dtype::Narrow(state);
    activated_[j] = Dtype::Narrow(r);
    activated_[j + row_.gate_stride] = Dtype::Narrow(z);
    activated_[j + 2 * row_.gate_stride] = Dtype::Narrow(n);
    activated_[j + 3 * row_.gate_stride] = Dtype::Narrow(p);
  }

 private:
  using T = typename Dtype::Stored;
  [[gnu::always_inline]] float Gate(int64_t gate, int64_t j) const {
    return Dtype::Widen(gates_[j + gate * row_.gate_stride]);
  }
  [[gnu::always_inline]] float Recurrent(int64_t gate, int64_t j) const {
    return row_.product[j + gate * row_.product_stride] +
           Dtype::Widen(bias_[j + gate * row_.gate_stride]);
  }
  GruForwardRow row_;
  const T *gates_, *bias_;
  T *state_, *activated_;
};

template <class Dtype>
class GruBackwardColumn {
 public:
  explicit GruBackwardColumn(const GruBackwardRow& row)
      : row_(row),
        grad_(static_cast<const T*>(row.grad)),
        activated_(static_cast<const T*>(row.activated)),
        before_(static_cast<const T*>(row.state_before)),
        grad_gates_(static_cast<T*>(row.grad_gates)),
        grad_recurrent_(static_cast<T*>(row.grad_recurrent)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float r = Activated(0, j), z = Activated(1, j);
    const float n = Activated(2, j), p = Activated(3, j);
    const float grad = Dtype::Widen(grad_[j]) + row_.product[j] + row_.carried[j];
    const float grad_z = grad * (Dtype::Widen(before_[j]) - n) * (z * (1.F - z));
    const float grad_n = grad * (1.F - z) * (1.F - n * n);
    const float grad_r = grad_n * p * (r * (1.F - r));
    Store(grad_gates_, 0, j, grad_r);
    Store(grad_gates_, 1, j, grad_z);
    Store(grad_gates_, 2, j, grad_n);
    Store(grad_recurrent_, 0, j, grad_r);
    Store(grad_recurrent_, 1, j, grad_z);
    Store(grad_recurrent_, 2, j, grad_n * r);
    row_.carried[j] = grad * z;
  }

 private:
  using T = typename Dtype::Stored;
  [[gnu::always_inline]] float Activated(int64_t gate, int64_t j) const {
    return Dtype::Widen(activated_[j + gate * row_.gate_stride]);
  }
  [[gnu::always_inline]] void Store(T* to, int64_t gate, int64_t j, float value) const {
    to[j + gate * row_.gate_stride] = Dtype::Narrow(value);
  }
  GruBackwardRow row_;
  const T *grad_, *activated_, *before_;
  T *grad_gates_, *grad_recurrent_;
};

template <class Dtype, bool kIsRelu>
class RnnForwardColumn {
 public:
  explicit RnnForwardColumn(const RnnForwardRow& row)
      : product_(row.product),
        gates_(static_cast<const T*>(row.gates)),
        state_(static_cast<T*>(row.state)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float sum = Dtype::Widen(gates_[j]) + product_[j];
    // The comparison leaves NaN as it is.
    const float state = kIsRelu ? (sum < 0.F ? 0.F : sum) : Tanh(sum);
    state_[j] = Dtype::Narrow(state);
  }

 private:
  using T = typename Dtype::Stored;
  const float* product_;
  const T* gates_;
  T* state_;
};

template <class Dtype, bool kIsRelu>
class RnnBackwardColumn {
 public:
  explicit RnnBackwardColumn(const RnnBackwardRow& row)
      : product_(row.product),
        grad_(static_cast<const T*>(row.grad)),
        state_(static_cast<const T*>(row.state)),
        grad_gates_(static_cast<T*>(row.grad_gates)) {}

  [[gnu::always_inline]] void operator()(int64_t j) const {
    const float state = Dtype::Widen(state_[j]);
    const float grad = Dtype::Widen(grad_[j]) + product_[j];
    const float of_gate = kIsRelu ? (state <= 0.F ? 0.F : grad) : grad * (1.F - state * state);
    grad_gates_[j] = Dtype::Narrow(of_gate);
  }

 private:
  using T = typename Dtype::Stored;
  const float* product_;
  const T *grad_, *state_;
  T* grad_gates_;
};

template <class Dtype>
struct WidenColumn {
  const typename Dtype::Stored* from;
  float* to;
  [[gnu::always_inline]] void operator()(int64_t j) const { to[j] = Dtype::Widen(from[j]); }
};

template <class Dtype>
struct NarrowColumn {
  const float* from;
  typename Dtype::Stored* to;
  [[gnu::always_inline]] void operator()(int64_t j) const { to[j] = Dtype::Narrow(from[j]); }
};

// No two of a row's memories overlap but where both are read, hence "simd".
template <class Column>
[[gnu::always_inline]] inline void Loop(const Column& column, int64_t columns) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) column(j);
}

#if defined(__x86_64__)
template <class Column>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void
LoopAvx512(Column column, int64_t columns) {
  Loop(column, columns);
}

template <class Column>
__attribute__((target("avx2,fma"))) void LoopAvx2(Column column, int64_t columns) {
  Loop(column, columns);
}
#endif

template <class Column>
void ForEachColumn(const Column& column, int64_t columns) {
#if defined(__x86_64__)
  static const onednn::Vectors vectors = onednn::ChooseVectors();
  if (vectors == onednn::Vectors::kAvx512) return LoopAvx512(column, columns);
  if (vectors == onednn::Vectors::kAvx2) return LoopAvx2(column, columns);
#endif
  Loop(column, columns);
}

}  // namespace

void ComputeRow(DLDataType dtype, const LstmForwardRow& row, int64_t columns) {
  WithDtype(dtype,
            [&](auto type) { ForEachColumn(LstmForwardColumn<decltype(type)>(row), columns); });
}

void ComputeRow(DLDataType dtype, const LstmBackwardRow& row, int64_t columns) {
  WithDtype(dtype,
            [&](auto type) { ForEachColumn(LstmBackwardColumn<decltype(type)>(row), columns); });
}

void ComputeRow(DLDataType dtype, const GruForwardRow& row, int64_t columns) {
  WithDtype(dtype,
            [&](auto type) { ForEachColumn(GruForwardColumn<decltype(type)>(row), columns); });
}

void ComputeRow(DLDataType dtype, const GruBackwardRow& row, int64_t columns) {
  WithDtype(dtype,
            [&](auto type) { ForEachColumn(GruBackwardColumn<decltype(type)>(row), columns); });
}

void ComputeRow(DLDataType dtype, const RnnForwardRow& row, int64_t columns) {
  WithDtype(dtype, [&](auto type) {
    using Dtype = decltype(type);
    if (row.is_relu) return ForEachColumn(RnnForwardColumn<Dtype, true>(row), columns);
    ForEachColumn(RnnForwardColumn<Dtype, false>(row), columns);
  });
}

void ComputeRow(DLDataType dtype, const RnnBackwardRow& row, int64_t columns) {
  WithDtype(dtype, [&](auto type) {
    using Dtype = decltype(type);
    if (row.is_relu) return ForEachColumn(RnnBackwardColumn<Dtype, true>(row), columns);
    ForEachColumn(RnnBackwardColumn<Dtype, false>(row), columns);
  });
}

void WidenColumns(DLDataType dtype, const void* from, float* to, int64_t columns) {
  WithDtype(dtype, [&](auto type) {
    using Dtype = decltype(type);
    using T = typename Dtype::Stored;
    ForEachColumn(WidenColumn<Dtype>{static_cast<const T*>(from), to}, columns);
  });
}

void NarrowColumns(DLDataType dtype, const float* from, void* to, int64_t columns) {
  WithDtype(dtype, [&](auto type) {
    using Dtype = decltype(type);
    using T = typename Dtype::Stored;
    ForEachColumn(NarrowColumn<Dtype>{from, static_cast<T*>(to)}, columns);
  });
}

}  // namespace amp_ir
