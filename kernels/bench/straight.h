// Large parts into registered memory, with what can be wrong with a registration; only right ones may be written.
#pragma once

enum Registration { KNOWN, NONE, STALE, BEYOND, SHORT, NO_ENTRY, OTHER_LENGTH, REGISTRATIONS };

static void check_straight() {
    Kernels k("move", "move");
    const u64 AT = 48, ENTRY = 3, GENERATION = 9;
    u64 *tables[N];
    int cases = 0, bad = 0;
    for (u32 r = 0; r < N; r++) CK(cuMemHostAlloc((void **)&tables[r], 64 + N * DIRECT_ENTRIES * 16, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    // More than the slots have room for, of which one is not of whole bulk copies, nor of whole 16 bytes.
    for (u64 bytes : {40ull << 20, (40ull << 20) + 12345})
        for (u32 off : {0u, 5u})
            for (Move what : {SEND, BROADCAST})
                for (int kind = 0; kind < REGISTRATIONS; kind++) {
                    if (kind != KNOWN && (off != 0 || what != SEND || bytes % 16 == 0)) continue;
                    std::vector<std::vector<u8>> in(N, std::vector<u8>(bytes));
                    u32 expected[N] = {};
                    for (u32 r = 0; r < N; r++) {
                        for (u64 i = 0; i < bytes; i++) in[r][i] = (u8)(i * 13 + i / 251 + r * 101 + kind + off);
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemsetD8Async(g[r].out, 0xc5, bytes + 4096, g[r].stream));
                        CK(cuMemcpyHtoDAsync(g[r].in + off, in[r].data(), bytes, g[r].stream));
                        memset(tables[r], 0, 64 + N * DIRECT_ENTRIES * 16);
                        CK(cuMemsetD32Async(g[r].window + AT_STRAIGHT, 0, 1, g[r].stream));
                    }
                    finish();
                    for (u32 r = 0; r < N; r++) {
                        u32 p = 1 - r;
                        PushMoveArgs a = of_chunks(move_args(r, what, g[r].in + off, g[r].out + AT, bytes));
                        CUdeviceptr host;
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemHostGetDevicePointer(&host, tables[r], 0));
                        a.straight = host, a.table = host + 64, a.mapped = 1u << p;
                        // Wrong: one byte less is mapped than is sent, or the place is behind it.
                        u64 length = bytes + AT - (kind == SHORT), offset = kind == BEYOND ? (length + 31) / 16 * 16 : AT;
                        u64 *entry = tables[r] + 8 + (p * DIRECT_ENTRIES + ENTRY) * 2;
                        entry[0] = g[p].out, entry[1] = (GENERATION - (kind == STALE)) << ENTRY_GENERATION | length;
                        u64 number = kind == NO_ENTRY ? DIRECT_ENTRIES : ENTRY;
                        if (kind != NONE) a.offers[p] = (number + 1) << OFFER_ENTRY | GENERATION << OFFER_GENERATION | offset / 16;
                        // Less is taken than is sent: a mistake that is found, and may not cost a byte of anybody's.
                        if (kind == OTHER_LENGTH && r == 1) a.move.parts[0].recv_bytes = a.move.parts[0].recv_word = bytes - 1024 * 1024;
                        expected[r] = kind == KNOWN && a.move.parts[p].send_bytes;
                        launch(k.function[PUSH][r], g[r].stream, PUSH_BLOCKS, push_threads, &a, false);
                    }
                    finish();
                    cases++;
                    bool gave_up = kind == OTHER_LENGTH ? g[1].report->code == 0 : reported();
                    if (gave_up) printf("WRONG straight kind %d bytes %llu: reports\n", kind, bytes), bad++;
                    if (gave_up || kind == OTHER_LENGTH) reset();
                    for (u32 r = 0; r < N; r++) {
                        if ((u32)tables[r][0] != expected[r]) printf("WRONG straight kind %d rank %u: %u parts, not %u\n", kind, r, (u32)tables[r][0], expected[r]), bad++;
                        std::vector<u8> got(bytes + 4096);
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemcpyDtoH(got.data(), g[r].out, got.size()));
                        // The root of a broadcast has its own part, too.
                        u32 source = what == BROADCAST ? 0 : 1 - r;
                        u64 end = kind == OTHER_LENGTH && r == 1 ? bytes - 1024 * 1024 : bytes;
                        for (u64 i = 0; i < got.size(); i++) {
                            bool inside = i >= AT && i < AT + end;
                            if (inside && kind == OTHER_LENGTH) continue;
                            if (got[i] == (inside ? in[source][i - AT] : 0xc5)) continue;
                            // With another length, the rank that takes all may have got a part before it was told.
                            if (kind == OTHER_LENGTH && r == 0) continue;
                            if (++bad < 6) printf("WRONG straight kind %d bytes %llu off %u move %d rank %u [%llu]\n", kind, bytes, off, what, r, i);
                            break;
                        }
                    }
                }
    for (u32 r = 0; r < N; r++) CK(cuMemFreeHost(tables[r]));
    printf("%-10s %4d cases, %d wrong\n", "straight", cases, bad);
    wrong += bad;
}

// A sender that comes when the receiver has given up: not a byte of its memory may change.
static void check_late() {
    Kernels k("move", "move");
    const u64 bytes = 40ull << 20;
    u64 *table;
    CUdeviceptr host;
    CK(cuMemHostAlloc((void **)&table, 64 + N * DIRECT_ENTRIES * 16, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(table, 0, 64 + N * DIRECT_ENTRIES * 16);
    table[8 + DIRECT_ENTRIES * 2] = g[1].out, table[9 + DIRECT_ENTRIES * 2] = 1ull << ENTRY_GENERATION | bytes;
    int bad = 0;
    for (bool told : {true, false}) {
        for (u32 r : {1u, 0u}) {
            PushMoveArgs a = of_chunks(move_args(r, BROADCAST, g[r].in, g[r].out, bytes, 200));
            CK(cuCtxSetCurrent(g[r].ctx));
            CK(cuMemHostGetDevicePointer(&host, table, 0));
            a.straight = host, a.table = host + 64;
            if (r == 0) a.mapped = 2;
            if (r == 1) a.offers[0] = 1ull << OFFER_ENTRY | 1ull << OFFER_GENERATION;
            if (r == 0 && !told) CK(cuMemsetD32(g[0].window + AT_POISON, 0, 1));
            launch(k.function[PUSH][r], g[r].stream, PUSH_BLOCKS, push_threads, &a, false);
            finish();
            if (r == 0) break;
            if (g[1].report->code != DEADLINE) printf("WRONG late: the receiver has code %u\n", g[1].report->code), bad++;
            CK(cuMemsetD8(g[1].out, 0xc5, bytes));
            CK(cuCtxSynchronize());
        }
        std::vector<u8> got(bytes);
        CK(cuCtxSetCurrent(g[1].ctx));
        CK(cuMemcpyDtoH(got.data(), g[1].out, bytes));
        u64 written = 0;
        for (u8 byte : got) written += byte != 0xc5;
        u32 code = g[0].report->code;
        if (written || code != (told ? (u32)PEER_FAILED : (u32)DEADLINE)) printf("WRONG late, told %d: %llu bytes, code %u\n", told, written, code), bad++;
        reset();
    }
    CK(cuMemFreeHost(table));
    printf("%-10s %4d cases, %d wrong\n", "late", 2, bad);
    wrong += bad;
}
