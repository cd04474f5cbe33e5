// A cuFile request in stream order: bytes between a device and pinned host memory, moved in the caller's own stream.
#include "beeline/stage.cuh"

extern "C" __global__ void __launch_bounds__(512) bl_stage(const __grid_constant__ StageArgs args) {
    __shared__ StageShared shared;
    stage(args, shared);
}
