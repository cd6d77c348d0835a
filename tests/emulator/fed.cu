// push.cu and joint_mm.cu with FED, one behind the other on each rank: a machine has one kernel, so a launch says which it is.

#include "primitives.cuh"
#include "wgmma.cuh"
#include "fed.cuh"

#define THREADS PUSH_THREADS
namespace of_push {
#include "push.cu"
}
#undef THREADS
#define COLUMNS GEMM_COLUMNS
namespace of_gemm {
#include "joint_mm.cu"
}

struct FedLaunchParams {
  alignas(64) uint8_t params[sizeof(of_gemm::JointMmParams)];
  uint32_t is_gemm;
};
static_assert(sizeof(of_push::PushParams) <= sizeof(of_gemm::JointMmParams), "it has room for both");

KERNEL(384, 1) fed(GRID_CONSTANT FedLaunchParams p) {
  if (p.is_gemm)
    of_gemm::joint_mm(*(const of_gemm::JointMmParams*)p.params);
  else
    of_push::push(*(const of_push::PushParams*)p.params);
}
