// What only real devices show of the kernels' guards: who lets whom start early, what is counted, what copies that the machine
// makes by itself need, and what a receiver that leaves waits for. Each part fails without one of them (`mutants.sh`).
#pragma once

// Four calls each of two communicators, in a stream each, which the two devices are given in opposite order. A kernel here fills all
// multiprocessors but a few, by the memory of a block that it asks for and does not need: so the others' kernels get on by those
// few, as long as nobody takes them who has to wait for a kernel that a peer has not begun.
static void opposite() {
    if (!early) return (void)printf("SKIP opposite order: nothing starts early\n");
    Kernels sums("f32-sum", "reduce"), moves("move", "move");
    const u32 CALLS = 4, SHARED = 120 << 10;
    int bad = 0;
    CUdeviceptr first[N], second[N];
    for (u32 r = 0; r < N; r++) {
        CK(cuCtxSetCurrent(g[r].ctx));
        CK(cuMemAlloc(&second[r], window_bytes)), CK(cuMemsetD8(second[r], 0, window_bytes)), CK(cuCtxSynchronize());
        first[r] = g[r].window;
    }
    for (Way way : {LL, LINE})
        for (bool reduces : {true, false})
            for (int turn = 0; turn < 3; turn++) {
                const Kernels &k = reduces ? sums : moves;
                u64 bytes = way == LL ? 256 << 10 : 1 << 20;
                u32 threads = way == LL ? 288 : 416;
                auto call = [&](u32 r, u32 which) {
                    CK(cuCtxSetCurrent(g[r].ctx));
                    CK(cuFuncSetAttribute(k.function[way][r], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED));
                    CUstream stream = which ? g[r].side : g[r].stream;
                    u64 out = g[r].out + (which * CALLS) * bytes;
                    for (u32 i = 0; i < CALLS; i++, out += bytes) {
                        ReduceArgs a = reduce_args(r, ALL_REDUCE, g[r].in, out, bytes, Weigh{}, 1000);
                        MoveArgs m = move_args(r, BROADCAST, g[r].in, out, bytes, 1000);
                        // The second communicator's go the other way, so that each rank has some that it only sends.
                        if (which)
                            for (u32 p = 0; p < N; p++) m.parts[p] = Part{g[r].in, r == 1 ? bytes : 0, out, p == 1 ? bytes : 0, r == 1 ? bytes : 0, p == 1 ? bytes : 0};
                        Comm &c = reduces ? a.comm : m.comm;
                        for (u32 p = 0; p < N; p++) c.windows[p] = which ? second[p] : first[p];
                        c.admits = ADMIT_THERE;
                        launch(k.function[way][r], stream, LL_BLOCKS_MAX, threads, reduces ? (void *)&a : (void *)&m, true, SHARED);
                    }
                };
                for (u32 r = 0; r < N; r++) {
                    CK(cuCtxSetCurrent(g[r].ctx));
                    CK(cuMemsetD32Async(g[r].in, 0x3f800000, bytes / 4, g[r].stream)), CK(cuMemsetD32Async(g[r].out, 0, 2 * CALLS * bytes / 4, g[r].stream));
                }
                finish();
                for (u32 half : {0u, 1u}) {
                    for (u32 r = 0; r < N; r++) call(r, half ^ r);
                    // The first ones have begun then, whoever else uses the devices, and those behind them, where they may.
                    usleep(60000);
                }
                for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuStreamSynchronize(g[r].stream)), CK(cuStreamSynchronize(g[r].side));
                bool gave_up = reported();
                if (gave_up) printf("WRONG opposite order, %s, %s: gave up\n", WAY[way], reduces ? "reduced" : "moved"), bad++;
                for (u32 r = 0; r < N && !gave_up; r++) {
                    std::vector<u32> got(2 * CALLS * bytes / 4);
                    CK(cuCtxSetCurrent(g[r].ctx));
                    CK(cuMemcpyDtoH(got.data(), g[r].out, got.size() * 4));
                    u32 right = reduces ? 0x40000000 : 0x3f800000;
                    if (std::any_of(got.begin(), got.end(), [&](u32 v) { return v != right; })) printf("WRONG opposite order, %s, %s, rank %u\n", WAY[way], reduces ? "reduced" : "moved", r), bad++;
                    // Each block was told of as much as it has counted itself.
                    for (CUdeviceptr window : {first[r], second[r]}) {
                        std::vector<u32> told(LL_BLOCKS_MAX * RANKS_MAX * 4), counted(LL_BLOCKS_MAX * RANKS_MAX);
                        CK(cuMemcpyDtoH(told.data(), window + AT_LL_COUNTERS, told.size() * 4)), CK(cuMemcpyDtoH(counted.data(), window + AT_LL_CALLED, counted.size() * 4));
                        for (u32 i = 1 - r, b = 0; b < LL_BLOCKS_MAX; b++, i += RANKS_MAX)
                            if (told[i * 4 + 3] != counted[i]) { printf("WRONG announcements, rank %u block %u: %u, not %u\n", r, b, told[i * 4 + 3], counted[i]), bad++; break; }
                    }
                }
                if (!bad) continue;
                reset();
                for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemFree(second[r]));
                wrong += bad;
                return;
            }
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemFree(second[r]));
    printf("opposite order: 12 cases, %d wrong\n", bad);
}

// What the blocks count when they are done, and what another stream that waits for the count finds then.
static void counted() {
    Kernels k("f32-sum", "reduce");
    const u64 bytes = 1 << 20;
    CUdeviceptr kept[N];
    u32 blocks = 0;
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemAlloc(&kept[r], bytes)), CK(cuMemsetD32(g[r].window + AT_DONE, 0, 1)), CK(cuCtxSynchronize());
    for (int turn = 0; turn < 40; turn++) {
        Way way = turn % 2 ? LINE : LL;
        u64 part = way == LL ? 128 << 10 : bytes;
        blocks += way == LL ? part / 2048 : std::min<u64>(LL_BLOCKS_MAX, (part + LINE_BLOCK - 1) / LINE_BLOCK);
        float value = (float)(turn + 1);
        u32 bits, doubled;
        memcpy(&bits, &value, 4), value *= 2, memcpy(&doubled, &value, 4);
        for (u32 r = 0; r < N; r++) {
            CK(cuCtxSetCurrent(g[r].ctx));
            CK(cuMemsetD32Async(g[r].in, bits, part / 4, g[r].stream)), CK(cuMemsetD32Async(g[r].out, 0, part / 4, g[r].stream)), CK(cuMemsetD32Async(kept[r], 0, part / 4, g[r].stream));
        }
        finish();
        for (u32 r = 0; r < N; r++) {
            ReduceArgs a = reduce_args(r, ALL_REDUCE, g[r].in, g[r].out, part, Weigh{}, 1000);
            a.comm.counted = 1;
            run(k, r, a, part, way);
            // The kernel is there already: a stream that waits for what never comes cannot be ended.
            CK(cuStreamWaitValue32(g[r].side, g[r].window + AT_DONE, blocks, CU_STREAM_WAIT_VALUE_GEQ));
            CK(cuMemcpyDtoDAsync(kept[r], g[r].out, part, g[r].side));
        }
        finish();
        for (u32 r = 0; r < N; r++) {
            u32 done;
            CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemcpyDtoH(&done, g[r].window + AT_DONE, 4));
            if (reported() || done != blocks) printf("WRONG counted, turn %d rank %u: %u blocks, not %u\n", turn, r, done, blocks), fflush(stdout), _exit(1);
            CK(cuStreamSynchronize(g[r].side));
            std::vector<u32> got(part / 4);
            CK(cuMemcpyDtoH(got.data(), kept[r], part));
            if (std::any_of(got.begin(), got.end(), [&](u32 v) { return v != doubled; })) printf("WRONG counted, turn %d rank %u: another stream came too early\n", turn, r), wrong++;
        }
    }
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemFree(kept[r]));
    printf("counted: 40 cases\n");
}

// The table of a rank, of which entry 1 is all of the peer's memory at `at`.
static PushMoveArgs straight_args(u32 r, const MoveArgs &move, u64 *table, CUdeviceptr at, u64 bytes) {
    PushMoveArgs a = of_chunks(move);
    CUdeviceptr host;
    u32 p = 1 - r;
    CK(cuCtxSetCurrent(g[r].ctx));
    CK(cuMemHostGetDevicePointer(&host, table, 0));
    a.straight = host, a.table = host + 64;
    u64 *entry = table + 8 + p * DIRECT_ENTRIES * 2;
    entry[0] = at, entry[1] = 1ull << ENTRY_GENERATION | bytes;
    if (move.parts[p].send_bytes) a.mapped = 1u << p;
    if (move.parts[p].recv_bytes) a.offers[p] = 1ull << OFFER_ENTRY | 1ull << OFFER_GENERATION;
    return a;
}
static u64 *straight_table() {
    u64 *table;
    const u64 bytes = 64 + N * DIRECT_ENTRIES * 16;
    CK(cuMemHostAlloc((void **)&table, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(table, 0, bytes);
    return table;
}

// Straight into memory of the host, where stores are many times slower than loads, and of the peer: what is behind the receiver's
// kernel in its stream finds all of it. The end of each block's share is what comes last.
static void slow() {
    Kernels k("move", "move");
    const u64 bytes = 64ull << 20, TAIL = 32768, span = bytes / PUSH_BLOCKS;
    u8 *host[N];
    u64 *tables[N];
    CUdeviceptr mapped[N], tails[N];
    std::vector<u8> sent(bytes + 4096), got(bytes), ends(PUSH_BLOCKS * TAIL);
    for (u64 i = 0; i < sent.size(); i++) sent[i] = (u8)(i * 13 + i / 251);
    for (u32 r = 0; r < N; r++) {
        CK(cuCtxSetCurrent(g[r].ctx));
        tables[r] = straight_table();
        CK(cuMemHostAlloc((void **)&host[r], bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        CK(cuMemHostGetDevicePointer(&mapped[r], host[r], 0));
        CK(cuMemAlloc(&tails[r], PUSH_BLOCKS * TAIL)), CK(cuMemcpyHtoD(g[r].in, sent.data(), sent.size()));
    }
    int bad = 0, cases = 0;
    reset();
    for (bool to_host : {true, false})
        for (int turn = 0; turn < 8; turn++) {
            u64 shift = turn * 16;
            for (u32 r = 0; r < N; r++) {
                CK(cuCtxSetCurrent(g[r].ctx));
                if (!to_host) CK(cuMemsetD8(g[r].out, 0xc5, bytes)), CK(cuCtxSynchronize());
                memset(host[r], 0xc5, bytes);
            }
            for (u32 r = 0; r < N; r++) {
                CUdeviceptr place = to_host ? mapped[r] : g[r].out, peers = to_host ? mapped[1 - r] : g[1 - r].out;
                PushMoveArgs a = straight_args(r, move_args(r, SEND, g[r].in + shift, place, bytes), tables[r], peers, bytes);
                launch(k.function[PUSH][r], g[r].stream, PUSH_BLOCKS, push_threads, &a, false);
                CUDA_MEMCPY2D tail = {};
                tail.srcMemoryType = tail.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
                tail.srcDevice = place + span - TAIL, tail.srcPitch = span, tail.dstDevice = tails[r], tail.dstPitch = TAIL, tail.WidthInBytes = TAIL, tail.Height = PUSH_BLOCKS;
                CK(cuMemcpy2DAsync(&tail, g[r].stream));
            }
            finish();
            cases++;
            if (reported()) { printf("WRONG slow: gave up\n"), bad++, reset(); continue; }
            for (u32 r = 0; r < N; r++) {
                CK(cuCtxSetCurrent(g[r].ctx));
                if ((u32)tables[r][0] != (u32)cases) printf("WRONG slow: not straight\n"), bad++;
                CK(cuMemcpyDtoH(ends.data(), tails[r], ends.size()));
                for (u32 b = 0; b < PUSH_BLOCKS; b++)
                    if (memcmp(&ends[b * TAIL], &sent[shift + (b + 1) * span - TAIL], TAIL)) { printf("WRONG slow, to the host %d, rank %u: block %u was not there at the end\n", to_host, r, b), bad++; break; }
                if (!to_host) CK(cuMemcpyDtoH(got.data(), g[r].out, bytes));
                if (memcmp(to_host ? host[r] : got.data(), &sent[shift], bytes)) printf("WRONG slow, to the host %d, rank %u: other bytes\n", to_host, r), bad++;
            }
            if (bad) break;
        }
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuMemFree(tails[r])), CK(cuMemFreeHost(host[r])), CK(cuMemFreeHost(tables[r]));
    printf("slow: %d cases, %d wrong\n", cases, bad);
    wrong += bad;
}

// A receiver that is told to leave while its peer stores into its memory: what is done there afterwards stays. The memory is the
// host's, and other copies go there from the sender's device, so that it is slow: it looks every 32 pieces of a block whether anybody
// has failed, some milliseconds apart, and what it stores just before such a look comes last.
static void leaves() {
    Kernels k("move", "move");
    const u64 bytes = 512ull << 20, LOOK = 32 * 8192, TAIL = 65536;
    CK(cuCtxSetCurrent(g[1].ctx));
    u8 *host;
    CUdeviceptr mapped;
    CK(cuMemHostAlloc((void **)&host, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)), CK(cuMemHostGetDevicePointer(&mapped, host, 0));
    u64 *tables[N] = {straight_table(), straight_table()};
    const u64 BESIDE = 64 << 20;
    CUstream beside[3];
    u8 *sink;
    CK(cuCtxSetCurrent(g[0].ctx)), CK(cuMemsetD8(g[0].in, 0x11, bytes)), CK(cuMemHostAlloc((void **)&sink, 3 * BESIDE, 0)), CK(cuCtxSynchronize());
    for (auto &one : beside) CK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    int bad = 0, cut = 0;
    // Before the receiver's blocks have looked once: they look for the first time together, and later not.
    for (u32 wait_us : {150u, 300u, 450u, 600u}) {
        for (u32 r : {1u, 0u}) {
            PushMoveArgs a = straight_args(r, move_args(r, BROADCAST, g[r].in, r == 0 ? g[r].in : mapped, bytes), tables[r], mapped, bytes);
            launch(k.function[PUSH][r], g[r].stream, PUSH_BLOCKS, push_threads, &a, false);
            if (r == 1) CK(cuMemsetD2D8Async(mapped + LOOK - TAIL, LOOK, 0xc5, TAIL, bytes / LOOK, g[1].stream));
        }
        // 20 ms of them, on the sender's device.
        for (int i = 0; i < 15; i++) CK(cuMemcpyDtoHAsync(sink + i % 3 * BESIDE, g[0].out, BESIDE, beside[i % 3]));
        usleep(wait_us);
        *(volatile u32 *)g[1].abort = 1;
        finish();
        CK(cuCtxSetCurrent(g[0].ctx));
        for (auto &one : beside) CK(cuStreamSynchronize(one));
        cut += g[1].report->code == ABORTED && g[0].report->code == PEER_FAILED;
        u64 others = 0;
        for (u64 row = LOOK - TAIL; row < bytes; row += LOOK) others += std::any_of(host + row, host + row + TAIL, [](u8 byte) { return byte != 0xc5; });
        if (others) printf("WRONG leaves after %u us: in %llu places something came later\n", wait_us, others), bad++;
        reset();
        if (bad) break;
    }
    for (u32 r = 0; r < N; r++) CK(cuMemFreeHost(tables[r]));
    CK(cuMemFreeHost(host)), CK(cuMemFreeHost(sink));
    for (auto &one : beside) CK(cuStreamDestroy(one));
    printf("leaves: %d of 4 in the middle, %d wrong\n", cut, bad);
    wrong += bad;
}

// What a rank finds that comes after a failure: an offer of a receiver that has gone without taking it back, and what an earlier
// call has left. Nothing is written.
static void abandoned() {
    Kernels k("move", "move");
    const u64 bytes = 40ull << 20, small = 1 << 20, offer = 1ull << OFFER_ENTRY | 1ull << OFFER_GENERATION;
    CK(cuCtxSetCurrent(g[0].ctx));
    u64 *table = straight_table();
    int bad = 0;
    std::vector<u8> got(bytes);
    auto untouched = [&](u64 length) {
        CK(cuCtxSetCurrent(g[1].ctx));
        CK(cuMemcpyDtoH(got.data(), g[1].out, length));
        return std::all_of(got.begin(), got.begin() + length, [](u8 byte) { return byte == 0xc5; });
    };
    CK(cuCtxSetCurrent(g[1].ctx)), CK(cuMemsetD8(g[1].out, 0xc5, bytes)), CK(cuCtxSynchronize());
    PushMoveArgs a = straight_args(0, move_args(0, BROADCAST, g[0].in, g[0].in, bytes), table, g[1].out, bytes);
    const u32 packets[8] = {(u32)offer, 1, (u32)(offer >> 32), 1, (u32)bytes, 1, (u32)(bytes >> 32), 1};
    for (u32 b = 0; b < PUSH_BLOCKS; b++) CK(cuMemcpyHtoD(g[0].window + AT_OFFERS + ((u64)b * RANKS_MAX + 1) * 32, packets, 32));
    CK(cuMemsetD32(g[0].window + AT_POISON, 2, 1)), CK(cuCtxSynchronize());
    launch(k.function[PUSH][0], g[0].stream, PUSH_BLOCKS, push_threads, &a, false);
    finish();
    if (!untouched(bytes) || g[0].report->code != PEER_FAILED) printf("WRONG abandoned: an offer was taken, code %u\n", g[0].report->code), bad++;
    reset();
    // The second call's chunks are there before its receiver begins, which has failed in the first one.
    for (u32 call : {1u, 2u})
        for (u32 r : {0u, 1u}) {
            PushMoveArgs m = of_chunks(move_args(r, BROADCAST, g[r].in, r == 0 ? g[0].in : g[1].out, small));
            if (r == 1 && call == 1) m.move.comm.call ^= 1;
            if (r == 1) CK(cuMemsetD8Async(g[1].out, 0xc5, small, g[1].stream));
            CK(cuCtxSetCurrent(g[r].ctx));
            launch(k.function[PUSH][r], g[r].stream, PUSH_BLOCKS, push_threads, &m, false);
            finish();
        }
    if (g[1].report->code != MISMATCH) printf("WRONG abandoned: code %u\n", g[1].report->code), bad++;
    if (!untouched(small)) printf("WRONG abandoned: a call after a failure\n"), bad++;
    reset();
    CK(cuMemFreeHost(table));
    printf("abandoned: 2 cases, %d wrong\n", bad);
    wrong += bad;
}
