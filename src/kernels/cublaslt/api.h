// SPDX-License-Identifier: Apache-2.0
// The part of cuBLASLt that we call, declared here so that no build needs CUDA.
//
// Source: cublasLt.h, cublas_api.h and library_types.h of CUDA 13 (the wheel nvidia-cublas), the
// same values in CUDA 11 and 12. Objects are made by the library and only pointed at, so that their
// sizes, which do change between versions, do not matter here; the two structs below that we
// allocate (an algorithm and a heuristic's result) have kept theirs since CUDA 10.1.
#ifndef AMP_IR_KERNELS_CUBLASLT_API_H_
#define AMP_IR_KERNELS_CUBLASLT_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace amp_ir::cublaslt {

using Handle = void*;      // cublasLtHandle_t
using MatmulDesc = void*;  // cublasLtMatmulDesc_t
using Layout = void*;      // cublasLtMatrixLayout_t
using Preference = void*;  // cublasLtMatmulPreference_t
using Stream = void*;      // cudaStream_t

using Status = int32_t;  // cublasStatus_t
constexpr Status kSuccess = 0;

enum DataType : int32_t { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14 };     // cudaDataType
enum ComputeType : int32_t { kCompute32F = 68, kCompute32FFastTf32 = 77 };  // cublasComputeType_t
enum Operation : int32_t { kAsStored = 0, kTransposed = 1 };                // cublasOperation_t

// cublasLtEpilogue_t: a set of bits; without any of these it is kEpilogueDefault.
enum EpilogueBits : uint32_t {
  kEpilogueDefault = 1,
  kEpilogueBias = 4,
  kEpilogueGelu = 32,  // the tanh approximation
};

// cublasLtReductionScheme_t, as a mask of what a split sum may do: only sum in the compute type.
constexpr uint32_t kReduceInComputeType = 2;

enum MatmulAttribute : int32_t {  // cublasLtMatmulDescAttributes_t
  kTransA = 3,                    // int32_t
  kTransB = 4,                    // int32_t
  kEpilogue = 7,                  // uint32_t
  kBiasPointer = 8,               // const void*; its alignment counts in the heuristic too
};

enum LayoutAttribute : int32_t {  // cublasLtMatrixLayoutAttribute_t
  kBatchCount = 5,                // int32_t
  kBatchStride = 6,               // int64_t, elements
};

enum PreferenceAttribute : int32_t {  // cublasLtMatmulPreferenceAttributes_t
  kMaxWorkspaceBytes = 1,             // uint64_t
  kReductionSchemeMask = 3,           // uint32_t
  kMinAlignmentA = 5,                 // uint32_t, bytes; 256 unless set, and so for B, C and D
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_nbytes;
  Status state;
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96, "as in cublasLt.h");

// Matrices are column-major: element (i, j) of a layout is stored at i + j * leading.
struct Api {
  size_t (*version)();
  const char* (*status_string)(Status);
  Status (*create)(Handle*);
  Status (*desc_create)(MatmulDesc*, int32_t compute, int32_t scale_type);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, int32_t attribute, const void* value, size_t nbytes);
  Status (*layout_create)(Layout*, int32_t type, uint64_t rows, uint64_t columns, int64_t leading);
  Status (*layout_destroy)(Layout);
  Status (*layout_set)(Layout, int32_t attribute, const void* value, size_t nbytes);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, int32_t attribute, const void* value, size_t nbytes);
  Status (*heuristic)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                      int requested, HeuristicResult* results, int* returned);
  // d = epilogue(alpha op(a) op(b) + beta c + bias); alpha and beta are on the host.
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b,
                   Layout, const void* beta, const void* c, Layout, void* d, Layout,
                   const Algorithm*, void* workspace, size_t workspace_nbytes, Stream);
  // Of a stand-in for tests only: it works on this process's own memory instead of a GPU's.
  bool is_on_host;
  std::string path;
};

// The library, loaded at the first call.
//
// Looked for: what Use named, else the path in the environment variable AMP_IR_CUBLASLT, else the
// copy that PyTorch has loaded, the paths of AlsoLookAt, and the dynamic linker's search path;
// libcublasLt.so.13 before .12.
//
// Raises: RuntimeError where it is not found; it is looked for again at the next call.
const Api& Library();
bool IsAvailable();

// Loads the library at `path` from now on; "" for the usual search. Plans and handles of the one
// before are dropped. Not while another thread multiplies.
void Use(const std::string& path);
void AlsoLookAt(const std::string& path);

// The handle for CUDA device `device_id`, made at its first use: the caller has made the device
// current, and captures no graph (it allocates a little on the device).
Handle HandleOf(const Api& api, int32_t device_id);

// Raises: RuntimeError with cuBLASLt's own words unless `status` is success.
void Check(const Api& api, Status status, const char* what);

}  // namespace amp_ir::cublaslt

#endif  // AMP_IR_KERNELS_CUBLASLT_API_H_
