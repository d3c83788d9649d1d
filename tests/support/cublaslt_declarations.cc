// SPDX-License-Identifier: Apache-2.0
// Compiles where src/kernels/cublaslt_api.h declares what NVIDIA's headers do; nothing to run.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "cublaslt/api.h"

namespace ours = amp_ir::cublaslt;

#define SAME_VALUE(name, theirs) \
  static_assert(static_cast<int64_t>(ours::name) == static_cast<int64_t>(theirs), #theirs)

SAME_VALUE(kSuccess, CUBLAS_STATUS_SUCCESS);
SAME_VALUE(kFloat32, CUDA_R_32F);
SAME_VALUE(kFloat16, CUDA_R_16F);
SAME_VALUE(kBfloat16, CUDA_R_16BF);
SAME_VALUE(kCompute32F, CUBLAS_COMPUTE_32F);
SAME_VALUE(kCompute32FFastTf32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME_VALUE(kAsStored, CUBLAS_OP_N);
SAME_VALUE(kTransposed, CUBLAS_OP_T);
SAME_VALUE(kEpilogueDefault, CUBLASLT_EPILOGUE_DEFAULT);
SAME_VALUE(kEpilogueBias, CUBLASLT_EPILOGUE_BIAS);
SAME_VALUE(kEpilogueGelu, CUBLASLT_EPILOGUE_GELU);
SAME_VALUE(kEpilogueGelu | ours::kEpilogueBias, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME_VALUE(kReduceInComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME_VALUE(kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME_VALUE(kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME_VALUE(kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME_VALUE(kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME_VALUE(kBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
SAME_VALUE(kBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
SAME_VALUE(kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME_VALUE(kReductionSchemeMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME_VALUE(kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME_VALUE(kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME_VALUE(kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME_VALUE(kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

using Result = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(ours::Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(ours::HeuristicResult) == sizeof(Result));
static_assert(offsetof(ours::HeuristicResult, algorithm) == offsetof(Result, algo));
static_assert(offsetof(ours::HeuristicResult, workspace_nbytes) == offsetof(Result, workspaceSize));
static_assert(offsetof(ours::HeuristicResult, state) == offsetof(Result, state));

// Handles and enumerations have other names there; their sizes are what the C interface passes.
template <class Function>
struct Signature;
template <class R, class... Args>
struct Signature<R (*)(Args...)> {
  using Type = std::integer_sequence<size_t, sizeof(R), sizeof(Args)...>;
};

#define SAME_SIGNATURE(field, function)                                     \
  static_assert(std::is_same_v<Signature<decltype(ours::Api::field)>::Type, \
                               Signature<decltype(&function)>::Type>,       \
                #function)

SAME_SIGNATURE(version, cublasLtGetVersion);
SAME_SIGNATURE(status_string, cublasLtGetStatusString);
SAME_SIGNATURE(create, cublasLtCreate);
SAME_SIGNATURE(desc_create, cublasLtMatmulDescCreate);
SAME_SIGNATURE(desc_destroy, cublasLtMatmulDescDestroy);
SAME_SIGNATURE(desc_set, cublasLtMatmulDescSetAttribute);
SAME_SIGNATURE(layout_create, cublasLtMatrixLayoutCreate);
SAME_SIGNATURE(layout_destroy, cublasLtMatrixLayoutDestroy);
SAME_SIGNATURE(layout_set, cublasLtMatrixLayoutSetAttribute);
SAME_SIGNATURE(preference_create, cublasLtMatmulPreferenceCreate);
SAME_SIGNATURE(preference_destroy, cublasLtMatmulPreferenceDestroy);
SAME_SIGNATURE(preference_set, cublasLtMatmulPreferenceSetAttribute);
SAME_SIGNATURE(heuristic, cublasLtMatmulAlgoGetHeuristic);
SAME_SIGNATURE(matmul, cublasLtMatmul);
