// The C interface of the emulated entries: one found by name, and one run.
#pragma once

struct EmulatedLaunch {
    const EmulatedEntry *entry;
    void *const *params;
};

extern "C" const EmulatedEntry *beeline_emulated_find(const char *module, const char *name) {
    for (const EmulatedEntry *const *table = beeline_emulated; *table; table++)
        for (const EmulatedEntry *entry = *table; entry->name; entry++)
            if (!strcmp(entry->module, module) && !strcmp(entry->name, name)) return entry;
    return nullptr;
}

// Runs all blocks on the calling thread, to their end.
extern "C" void beeline_emulated_run(const EmulatedEntry *entry, void *const *params, u32 blocks, u32 threads) {
    EmulatedLaunch launch = {entry, params};
    auto body = [](const void *at) {
        const EmulatedLaunch &launch = *(const EmulatedLaunch *)at;
        launch.entry->call(launch.params);
    };
    for (u32 block = 0; block < blocks; block++)
        fibers_run(block, blocks, threads < FIBERS_MAX ? threads : FIBERS_MAX, body, &launch);
}
