// Collectives that compute nothing: gathers, scatters, broadcasts, all-to-all, send and receive.
#include "beeline/moved.cuh"
#include "beeline/push.cuh"

extern "C" __global__ void __launch_bounds__(544, 1) bl_ll_move(const __grid_constant__ MoveArgs args) {
    __shared__ LlShared shared;
    ll_move(args, shared);
}
extern "C" __global__ void __launch_bounds__(544, 1) bl_line_move(const __grid_constant__ MoveArgs args) {
    __shared__ LineShared shared;
    line_move(args, shared);
}
extern "C" __global__ void __launch_bounds__(1024) bl_push_move(const __grid_constant__ PushMoveArgs args) {
    __shared__ PushShared shared;
    __shared__ BulkShared bulk;
    push_move(args, shared, bulk);
}
