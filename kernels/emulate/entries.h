// Entries of the kernels for a driver that has no GPU: by the name of their module and their own, with the sizes of
// their parameters. A build of dropin/test-libcuda generates a source a module around this.
#pragma once
#define BEELINE_HOST
#define BEELINE_FIBERS
#ifndef SPINS
#define SPINS 16
#endif
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
// One block at a time runs on a CPU thread, and stays on it.
#define __shared__ static thread_local
#include "../beeline/device.cuh"
#include <type_traits>
#include <utility>

struct HostDim {
    u32 x;
};
#define threadIdx (HostDim{host_thread})
#define blockIdx (HostDim{host_block_index})
#define blockDim (HostDim{host_threads})
#define gridDim (HostDim{host_blocks})

struct EmulatedEntry {
    const char *module, *name;
    u32 count; // of parameters
    const u32 *sizes;
    void (*call)(void *const *params);
};

template <auto F, class... A>
struct EmulatedCall {
    static constexpr u32 sizes[sizeof...(A)] = {(u32)sizeof(A)...};
    template <size_t... I>
    static void spread(void *const *params, std::index_sequence<I...>) {
        F(*(const A *)params[I]...);
    }
    static void call(void *const *params) { spread(params, std::index_sequence_for<A...>{}); }
};
template <auto F, class... A>
constexpr EmulatedEntry emulated(const char *module, const char *name, void (*)(A...)) {
    return {module, name, sizeof...(A), EmulatedCall<F, A...>::sizes, &EmulatedCall<F, A...>::call};
}
#define EMULATED(module, name, function) emulated<&function>(module, name, &function)
