// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcublasLt that multiplies this process's own memory, for machines without a GPU.
//
// Build:  g++ -std=c++17 -O3 -shared -fPIC -I src/kernels -I <tvm-ffi headers>
// tests/fake_cublaslt.cc
//         (fake_cublaslt.py does it: `fake_cublaslt.build(directory)` -> path)
// Load:   native.function("amp_ir.cublaslt.use")(path), or AMP_IR_CUBLASLT=path in the environment;
//         `with fake_cublaslt.installed(path) as fake:` does it and gives the records below.
//
// It has the functions of src/kernels/cublaslt_api.h and no others. Sums are float32, in the order
// of k; TF32 rounds operands to 11 significant bits first. Where the real library would answer with
// an error, read or write where it must not, or be slow or inexact for a reason that the caller
// could see, the call is recorded as a misuse (amp_ir_fake_misuses) and fails.
//
// Not imitated: streams (a call has finished when it returns), speed, which problems real
// algorithms support, the order in which they sum.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cublaslt/api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace amp_ir::cublaslt;

constexpr Status kInvalidValue = 7, kNotSupported = 15;
constexpr uint64_t kMagic = 0x616c676f72697468;
constexpr size_t kWantedWorkspace = 4096;

struct FakeDesc {
  int32_t compute, scale_type;
  int32_t trans_a = kAsStored, trans_b = kAsStored;
  uint32_t epilogue = kEpilogueDefault;
  const void* bias = nullptr;
};

struct FakeLayout {
  int32_t type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batch_count = 1;
  int64_t batch_stride = 0;
};

struct FakePreference {
  uint64_t max_workspace = 0;
  uint32_t reduction_mask = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};  // a, b, c, d
};

struct Records {
  std::mutex mutex;
  std::vector<std::string> misuses;
  std::set<void*> objects;
  int64_t heuristics = 0, launches = 0;
  int64_t workspace = 0;  // bytes of the last launch
  void* stream = nullptr;
} records;

Status Misuse(const std::string& text) {
  std::lock_guard<std::mutex> lock(records.mutex);
  records.misuses.push_back(text);
  return kInvalidValue;
}

template <class Object>
void* Keep(Object* object) {
  std::lock_guard<std::mutex> lock(records.mutex);
  records.objects.insert(object);
  return object;
}

template <class Object>
Status Drop(void* object) {
  {
    std::lock_guard<std::mutex> lock(records.mutex);
    if (records.objects.erase(object) == 1) {
      delete static_cast<Object*>(object);
      return kSuccess;
    }
  }
  return Misuse("an object is destroyed that is not alive");
}

template <class Value>
Status Assign(Value* target, const void* value, size_t nbytes, const char* what) {
  if (value == nullptr || nbytes != sizeof(Value)) {
    return Misuse(std::string(what) + " is set with " + std::to_string(nbytes) + " bytes");
  }
  std::memcpy(target, value, nbytes);
  return kSuccess;
}

int64_t ItemSize(int32_t type) { return type == kFloat32 ? 4 : 2; }

float FromHalf(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

uint16_t ToHalf(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.0F) return sign | 0x7c00;  // halfway between the largest and 2^16
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  // Units in the last place: 2^(exponent - 11), and no smaller than the subnormals' 2^-24.
  const int unit = std::max(exponent - 11, -24);
  const auto count = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -unit)));
  if (unit == -24) return sign | static_cast<uint16_t>(count);
  return sign | static_cast<uint16_t>(((unit + 24) << 10) + count);
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// `value` with the lowest `dropped` bits rounded away, to nearest, ties to even.
uint32_t RoundBits(float value, int dropped) {
  uint32_t bits = ToBits(value);
  if (std::isnan(value)) return bits | 1U << dropped;
  bits += (1U << (dropped - 1)) - 1 + (bits >> dropped & 1);
  return bits >> dropped << dropped;
}

float Read(const char* data, int32_t type, int64_t index) {
  if (type == kFloat32) return reinterpret_cast<const float*>(data)[index];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(data)[index];
  return type == kFloat16 ? FromHalf(bits) : FromBits(static_cast<uint32_t>(bits) << 16);
}

void Write(char* data, int32_t type, int64_t index, float value) {
  if (type == kFloat32) {
    reinterpret_cast<float*>(data)[index] = value;
  } else {
    reinterpret_cast<uint16_t*>(data)[index] =
        type == kFloat16 ? ToHalf(value) : static_cast<uint16_t>(RoundBits(value, 16) >> 16);
  }
}

struct Problem {
  const FakeDesc& desc;
  const FakeLayout &a, &b, &c, &d;

  int64_t m() const { return static_cast<int64_t>(d.rows); }
  int64_t n() const { return static_cast<int64_t>(d.columns); }
  int64_t k() const {
    return static_cast<int64_t>(desc.trans_a == kTransposed ? a.rows : a.columns);
  }

  Status Refuse() const {
    const bool at = desc.trans_a == kTransposed, bt = desc.trans_b == kTransposed;
    if ((at ? a.columns : a.rows) != d.rows || (bt ? b.rows : b.columns) != d.columns ||
        (bt ? b.columns : b.rows) != (at ? a.rows : a.columns)) {
      return Misuse("the matrices do not fit each other");
    }
    if (desc.scale_type != kFloat32) return Misuse("alpha and beta are not float32");
    if (desc.compute != kCompute32F && desc.compute != kCompute32FFastTf32) {
      return Misuse("sums are not float32");
    }
    if (desc.compute == kCompute32FFastTf32 && a.type != kFloat32) {
      return Misuse("TF32 is for float32 operands");
    }
    if (a.type != b.type || (d.type != a.type && d.type != kFloat32) || c.type != d.type) {
      return Misuse("cuBLASLt does not multiply these dtypes");
    }
    if (a.batch_count != d.batch_count || b.batch_count != d.batch_count ||
        c.batch_count != d.batch_count) {
      return Misuse("the batch counts differ");
    }
    if (d.batch_count > 1 && d.batch_stride == 0) return Misuse("the batches of d coincide");
    const uint32_t known = kEpilogueDefault | kEpilogueBias | kEpilogueGelu;
    const bool plain = (desc.epilogue & kEpilogueDefault) != 0;
    if ((desc.epilogue & ~known) != 0 || plain != (desc.epilogue == kEpilogueDefault)) {
      return Misuse("epilogue " + std::to_string(desc.epilogue));
    }
    if ((desc.epilogue & kEpilogueBias) != 0 && desc.bias == nullptr) {
      return Misuse("an epilogue with a bias without a pointer to one");
    }
    return kSuccess;
  }

  // What an algorithm is good for.
  uint64_t Hash() const {
    uint64_t hash = 1469598103934665603ULL;
    auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
    for (const FakeLayout* l : {&a, &b, &c, &d}) {
      for (uint64_t value :
           {static_cast<uint64_t>(l->type), l->rows, l->columns, static_cast<uint64_t>(l->leading),
            static_cast<uint64_t>(l->batch_count), static_cast<uint64_t>(l->batch_stride)}) {
        add(value);
      }
    }
    add(desc.epilogue);
    add(static_cast<uint64_t>(desc.trans_a * 2 + desc.trans_b));
    add(static_cast<uint64_t>(desc.compute));
    return hash;
  }
};

// op(m) of one batch as float32, its rows x columns column-major.
std::vector<float> Dense(const FakeLayout& m, bool is_transposed, const char* data, bool tf32) {
  const auto rows = static_cast<int64_t>(is_transposed ? m.columns : m.rows);
  const auto columns = static_cast<int64_t>(is_transposed ? m.rows : m.columns);
  std::vector<float> dense(static_cast<size_t>(rows * columns));
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = is_transposed ? j + i * m.leading : i + j * m.leading;
      const float value = Read(data, m.type, at);
      dense[static_cast<size_t>(i + j * rows)] = tf32 ? FromBits(RoundBits(value, 13)) : value;
    }
  }
  return dense;
}

float Finish(float value, uint32_t epilogue) {
  if ((epilogue & kEpilogueGelu) != 0) {
    return 0.5F * value *
           (1 + std::tanh(0.79788456F * (value + 0.044715F * value * value * value)));
  }
  return value;
}

void MultiplyOne(const Problem& p, const char* a, const char* b, char* d) {
  const bool tf32 = p.desc.compute == kCompute32FFastTf32;
  const std::vector<float> left = Dense(p.a, p.desc.trans_a == kTransposed, a, tf32);
  const std::vector<float> right = Dense(p.b, p.desc.trans_b == kTransposed, b, tf32);
  const int64_t m = p.m(), k = p.k();
  std::vector<float> sums(static_cast<size_t>(m));
  for (int64_t j = 0; j < p.n(); ++j) {
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (int64_t t = 0; t < k; ++t) {
      const float factor = right[static_cast<size_t>(t + j * k)];
      const float* column = left.data() + t * m;
      for (int64_t i = 0; i < m; ++i) sums[static_cast<size_t>(i)] += column[i] * factor;
    }
    for (int64_t i = 0; i < m; ++i) {
      float value = sums[static_cast<size_t>(i)];
      if ((p.desc.epilogue & kEpilogueBias) != 0) {
        value += Read(static_cast<const char*>(p.desc.bias), p.d.type, i);
      }
      Write(d, p.d.type, i + j * p.d.leading, Finish(value, p.desc.epilogue));
    }
  }
}

struct Range {
  const char *begin, *end;
  bool Overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

Range RangeOf(const FakeLayout& l, const void* data) {
  const int64_t last = (l.batch_count - 1) * l.batch_stride +
                       static_cast<int64_t>(l.columns - 1) * l.leading +
                       static_cast<int64_t>(l.rows);
  const auto* begin = static_cast<const char*>(data);
  return {begin, begin + last * ItemSize(l.type)};
}

bool IsAligned(const void* data, uint64_t alignment) {
  return reinterpret_cast<uint64_t>(data) % alignment == 0;
}

}  // namespace

EXPORT int amp_ir_cublaslt_is_on_host() { return 1; }

// The misuses so far, one a line, cut at `size` bytes; how many there are.
EXPORT int64_t amp_ir_fake_misuses(char* text, size_t size) {
  std::lock_guard<std::mutex> lock(records.mutex);
  std::string all;
  for (const std::string& one : records.misuses) all += one + "\n";
  if (size > 0) {
    const size_t length = std::min(all.size(), size - 1);
    std::memcpy(text, all.data(), length);
    text[length] = '\0';
  }
  return static_cast<int64_t>(records.misuses.size());
}

// counts: calls of the heuristic, launches, objects alive, workspace bytes of the last launch, its
// stream.
EXPORT void amp_ir_fake_counts(int64_t counts[5]) {
  std::lock_guard<std::mutex> lock(records.mutex);
  counts[0] = records.heuristics;
  counts[1] = records.launches;
  counts[2] = static_cast<int64_t>(records.objects.size());
  counts[3] = records.workspace;
  counts[4] = reinterpret_cast<int64_t>(records.stream);
}

EXPORT void amp_ir_fake_reset() {
  std::lock_guard<std::mutex> lock(records.mutex);
  records.misuses.clear();
  records.heuristics = records.launches = records.workspace = 0;
  records.stream = nullptr;
}

EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT const char* cublasLtGetStatusString(Status status) {
  return status == kInvalidValue   ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == kNotSupported ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                   : "CUBLAS_STATUS_SUCCESS";
}

EXPORT Status cublasLtCreate(Handle* handle) {
  static int one_handle;
  *handle = &one_handle;
  return kSuccess;
}

EXPORT Status cublasLtMatmulDescCreate(MatmulDesc* desc, int32_t compute, int32_t scale_type) {
  *desc = Keep(new FakeDesc{compute, scale_type});
  return kSuccess;
}
EXPORT Status cublasLtMatmulDescDestroy(MatmulDesc desc) { return Drop<FakeDesc>(desc); }
EXPORT Status cublasLtMatmulDescSetAttribute(MatmulDesc object, int32_t attribute,
                                             const void* value, size_t nbytes) {
  auto* desc = static_cast<FakeDesc*>(object);
  switch (attribute) {
    case kTransA:
      return Assign(&desc->trans_a, value, nbytes, "TRANSA");
    case kTransB:
      return Assign(&desc->trans_b, value, nbytes, "TRANSB");
    case kEpilogue:
      return Assign(&desc->epilogue, value, nbytes, "EPILOGUE");
    case kBiasPointer:
      return Assign(&desc->bias, value, nbytes, "BIAS_POINTER");
    default:
      return Misuse("matmul attribute " + std::to_string(attribute));
  }
}

EXPORT Status cublasLtMatrixLayoutCreate(Layout* layout, int32_t type, uint64_t rows,
                                         uint64_t columns, int64_t leading) {
  if (type != kFloat32 && type != kFloat16 && type != kBfloat16) {
    return Misuse("data type " + std::to_string(type));
  }
  if (rows == 0 || columns == 0) return Misuse("an empty matrix");
  if (leading < static_cast<int64_t>(rows)) {
    return Misuse("leading dimension " + std::to_string(leading) + " of " + std::to_string(rows) +
                  " rows");
  }
  *layout = Keep(new FakeLayout{type, rows, columns, leading});
  return kSuccess;
}
EXPORT Status cublasLtMatrixLayoutDestroy(Layout layout) { return Drop<FakeLayout>(layout); }
EXPORT Status cublasLtMatrixLayoutSetAttribute(Layout object, int32_t attribute, const void* value,
                                               size_t nbytes) {
  auto* layout = static_cast<FakeLayout*>(object);
  switch (attribute) {
    case kBatchCount:
      return Assign(&layout->batch_count, value, nbytes, "BATCH_COUNT");
    case kBatchStride:
      return Assign(&layout->batch_stride, value, nbytes, "STRIDED_BATCH_OFFSET");
    default:
      return Misuse("layout attribute " + std::to_string(attribute));
  }
}

EXPORT Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = Keep(new FakePreference);
  return kSuccess;
}
EXPORT Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  return Drop<FakePreference>(preference);
}
EXPORT Status cublasLtMatmulPreferenceSetAttribute(Preference object, int32_t attribute,
                                                   const void* value, size_t nbytes) {
  auto* preference = static_cast<FakePreference*>(object);
  if (attribute == kMaxWorkspaceBytes) {
    return Assign(&preference->max_workspace, value, nbytes, "MAX_WORKSPACE_BYTES");
  }
  if (attribute == kReductionSchemeMask) {
    return Assign(&preference->reduction_mask, value, nbytes, "REDUCTION_SCHEME_MASK");
  }
  if (attribute >= kMinAlignmentA && attribute <= kMinAlignmentD) {
    uint32_t* alignment = &preference->alignment[attribute - kMinAlignmentA];
    return Assign(alignment, value, nbytes, "MIN_ALIGNMENT_BYTES");
  }
  return Misuse("preference attribute " + std::to_string(attribute));
}

// Gives an algorithm that this "GPU" lacks, then one that takes the workspace it may have, up to
// kWantedWorkspace, and relies on the alignments of the preference.
EXPORT Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc desc, Layout a, Layout b, Layout c,
                                             Layout d, Preference object, int requested,
                                             HeuristicResult* results, int* returned) {
  const Problem p{*static_cast<FakeDesc*>(desc), *static_cast<FakeLayout*>(a),
                  *static_cast<FakeLayout*>(b), *static_cast<FakeLayout*>(c),
                  *static_cast<FakeLayout*>(d)};
  const auto& preference = *static_cast<FakePreference*>(object);
  if (const Status status = p.Refuse()) return status;
  if (preference.reduction_mask != kReduceInComputeType) {
    return Misuse("parts of a split sum may be rounded to d's dtype");
  }
  if (requested < 2) return Misuse("only one algorithm is asked for, and the GPU may lack it");
  const uint64_t workspace = std::min<uint64_t>(preference.max_workspace, kWantedWorkspace);
  const uint32_t* alignment = preference.alignment;
  results[0].state = kNotSupported;
  results[1] = {{{kMagic, p.Hash(), workspace, alignment[0], alignment[1],
                  std::min(alignment[2], alignment[3]), IsAligned(p.desc.bias, 16) ? 16U : 1U, 0}},
                workspace,
                kSuccess,
                1,
                {}};
  *returned = 2;
  std::lock_guard<std::mutex> lock(records.mutex);
  ++records.heuristics;
  return kSuccess;
}

EXPORT Status cublasLtMatmul(Handle, MatmulDesc desc, const void* alpha, const void* a,
                             Layout a_layout, const void* b, Layout b_layout, const void* beta,
                             const void* c, Layout c_layout, void* d, Layout d_layout,
                             const Algorithm* algorithm, void* workspace, size_t workspace_nbytes,
                             Stream stream) {
  const Problem p{*static_cast<FakeDesc*>(desc), *static_cast<FakeLayout*>(a_layout),
                  *static_cast<FakeLayout*>(b_layout), *static_cast<FakeLayout*>(c_layout),
                  *static_cast<FakeLayout*>(d_layout)};
  if (const Status status = p.Refuse()) return status;
  if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 || c != d) {
    return Misuse("alpha, beta or c is not what this stand-in knows: 1, 0 and d");
  }
  const uint64_t* known = algorithm->data;
  if (known[0] != kMagic || known[1] != p.Hash()) {
    return Misuse("the algorithm was found for another problem");
  }
  if (!IsAligned(a, known[3]) || !IsAligned(b, known[4]) || !IsAligned(d, known[5]) ||
      !IsAligned(p.desc.bias, known[6])) {
    return Misuse("an operand is aligned less than the heuristic was told");
  }
  if (workspace_nbytes < known[2]) return Misuse("the workspace is too small");
  if (known[2] > 0 && (workspace == nullptr || !IsAligned(workspace, 16))) {
    return Misuse("the workspace is null or not aligned to 16 bytes");
  }
  const auto* space = static_cast<const char*>(workspace);
  const Range provided{space, space + known[2]}, result = RangeOf(p.d, d);
  const Range operands[] = {RangeOf(p.a, a), RangeOf(p.b, b)};
  for (const Range& operand : operands) {
    if (operand.Overlaps(result)) return Misuse("the result overlaps an operand");
    if (known[2] > 0 && operand.Overlaps(provided)) return Misuse("an operand is in the workspace");
  }
  if (known[2] > 0 && result.Overlaps(provided)) return Misuse("the result is in the workspace");
  if (known[2] > 0) std::memset(workspace, 0xA5, known[2]);
  for (int64_t i = 0; i < p.d.batch_count; ++i) {
    MultiplyOne(p, static_cast<const char*>(a) + i * p.a.batch_stride * ItemSize(p.a.type),
                static_cast<const char*>(b) + i * p.b.batch_stride * ItemSize(p.b.type),
                static_cast<char*>(d) + i * p.d.batch_stride * ItemSize(p.d.type));
  }
  std::lock_guard<std::mutex> lock(records.mutex);
  ++records.launches;
  records.workspace = static_cast<int64_t>(known[2]);
  records.stream = stream;
  return kSuccess;
}
