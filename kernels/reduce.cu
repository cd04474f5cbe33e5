// Collectives that reduce, for one type and one operator: -DTYPE=F32 -DOP=SUM.
#include "beeline/line.cuh"
#include "beeline/push.cuh"

extern "C" __global__ void __launch_bounds__(544, 1) bl_ll_reduce(const __grid_constant__ ReduceArgs args) {
    __shared__ LlShared shared;
    ll_reduce<TYPE, OP>(args, shared);
}
extern "C" __global__ void __launch_bounds__(544, 1) bl_line_reduce(const __grid_constant__ ReduceArgs args) {
    __shared__ LineShared shared;
    line_reduce<TYPE, OP>(args, shared);
}
extern "C" __global__ void __launch_bounds__(1024) bl_push_reduce(const __grid_constant__ ReduceArgs args) {
    __shared__ PushShared shared;
    push_reduce<TYPE, OP>(args, shared);
}
