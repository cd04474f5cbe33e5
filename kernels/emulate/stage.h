// The kernel of stream-ordered requests against a host that fills and empties the cells of a slot, one block after the
// other. Included by main.cpp.
#pragma once
#include "../beeline/stage.cuh"

struct Staged {
    static const u32 CELL = 4096, PASS = 7;
    alignas(128) u64 control[(STAGE_LINES + STAGE_CELLS * STAGE_LINE) / 8] = {};
    std::vector<u8> memory;
    u8 *slot;
    StageArgs args = {};
    std::atomic<bool> over{false};
    Staged(u64 last, bool out) : memory((last > STAGE_CELLS * CELL ? STAGE_CELLS * CELL : last) + 8192, 0xcd) {
        slot = (u8 *)(((u64)memory.data() + 4095) & ~4095ull);
        args.control = (u64)control, args.slot = (u64)slot, args.timeout_ns = 4000000000ull;
        args.cell = CELL, args.pass = PASS, args.out = out;
    }
    void set(u64 at, u64 v) { store_wide(args.control + at, v); }
    u32 word(u64 at) { return load_flag(args.control + at); }
    u64 line(u64 block, u64 at) { return STAGE_LINES + block * STAGE_LINE + at; }
    void all(u64 at, u64 v) {
        for (u64 block = 0; block < STAGE_CELLS; block++) set(line(block, at), v);
    }
    void describe(u64 device, u64 first, u64 last, bool ring) {
        all(STAGE_ADDRESS, device), all(STAGE_FIRST, first), all(STAGE_LAST, last), all(STAGE_RING, ring);
        all(STAGE_LIMIT, (last + CELL - 1) / CELL);
    }
    void turn(u64 chunk, u64 bytes) { set(line(chunk % STAGE_CELLS, STAGE_TURN), (u32)(chunk + 1) | bytes << 32); }
    bool ended() { return over; }
    std::thread run() {
        return std::thread([this] {
            launch<StageShared>(STAGE_CELLS, [this](StageShared &s) { stage(args, s); });
            over = true;
        });
    }
};
static u8 stage_byte(u64 i, u64 seed) { return (u8)((i * 2654435761u + seed) >> 7); }

// `bytes` of which the file has `have`, at `first` in the slot and `shift` behind an aligned device address.
static void staged(u64 bytes, u64 have, u64 first, u64 shift, bool out) {
    const u64 CELL = Staged::CELL, last = first + bytes;
    const bool ring = last > STAGE_CELLS * CELL;
    Staged s(last, out);
    std::vector<u8> mem(bytes + 96, 0xee), file(bytes, 0xdd);
    u8 *device = (u8 *)(((u64)mem.data() + 15) & ~15ull) + 16 + shift;
    for (u64 i = 0; i < bytes; i++) (out ? device : file.data())[i] = stage_byte(i, first);
    s.describe((u64)device, first, out || ring ? last : first + have, ring);
    auto start = [&](u64 c) { return c == 0 ? first : c * CELL; };
    auto length = [&](u64 c) { return ((c + 1) * CELL < last ? (c + 1) * CELL : last) - start(c); };
    u64 next[STAGE_CELLS], chunks = (last + CELL - 1) / CELL;
    bool host[STAGE_CELLS];
    for (u64 c = 0; c < STAGE_CELLS; c++) {
        next[c] = c, host[c] = !out;
        if (ring && out) s.turn(c, length(c));
    }
    if (!ring && !out) memcpy(s.slot + first, file.data(), have);
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(6);
    std::thread kernel = s.run();
    // Once more after the end: what the kernel was done with last.
    for (bool over = !ring; !over && std::chrono::steady_clock::now() < end;) {
        over = s.ended();
        for (u64 cell = 0; cell < STAGE_CELLS; cell++) {
            if (next[cell] >= chunks) continue;
            u64 c = next[cell], at = start(c) - first, n = length(c);
            u8 *place = s.slot + start(c) % (STAGE_CELLS * CELL);
            if (!out && host[cell]) {
                u64 there = at >= have ? 0 : have - at < n ? have - at : n;
                memcpy(place, file.data() + at, there);
                if (there < n && c + 1 < chunks) s.all(STAGE_LIMIT, chunks = c + 1);
                s.turn(c, there);
                host[cell] = false;
            } else if (s.word(s.line(cell, STAGE_DONE)) == (u32)(c + 1)) {
                if (out) memcpy(file.data() + at, place, n);
                memset(place, 0xab, n);
                next[cell] += STAGE_CELLS, host[cell] = !out;
                if (out && next[cell] < chunks) s.turn(next[cell], length(next[cell]));
            }
        }
        std::this_thread::yield();
    }
    kernel.join();
    if (!ring && out) memcpy(file.data(), s.slot + first, bytes);
    CHECK(s.ended() && s.word(STAGE_FAILED) == 0, "stage %llu bytes at %llu and %llu, out %d: ended %d, failed %u", bytes, first, shift, out, s.ended(), s.word(STAGE_FAILED));
    u64 good = out ? bytes : have;
    for (u64 i = 0; i < good; i++)
        if ((out ? file.data() : device)[i] != stage_byte(i, first)) {
            CHECK(false, "stage %llu bytes at %llu and %llu, out %d: byte %llu", bytes, first, shift, out, i);
            break;
        }
    CHECK(device[-1] == 0xee && device[bytes] == 0xee && (out || have == bytes || device[have] == 0xee), "stage %llu wrote beyond", bytes);
    if (out && !ring) CHECK(s.slot[last] == 0xcd && (first == 0 || s.slot[first - 1] == 0xcd), "stage %llu wrote beyond the slot", bytes);
}

// No turn comes: the kernel ends by itself, and says so.
static void stage_deadline() {
    Staged s(1 << 20, false);
    u8 nothing[16];
    s.describe((u64)nothing, 0, 1 << 20, true);
    s.args.timeout_ns = 20000000;
    std::thread kernel = s.run();
    for (int i = 0; i < 400 && !s.ended(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    s.all(STAGE_LIMIT, 0);
    kernel.join();
    CHECK(s.ended() && s.word(STAGE_FAILED) == Staged::PASS, "stage without turns: ended %d, failed %u", s.ended(), s.word(STAGE_FAILED));
}

static void stages() {
    static const u64 PLACES[][2] = {{0, 0}, {5, 5}, {4095, 8}};
    for (bool out : {false, true})
        for (u64 bytes : {0ull, 1ull, 17ull, 20001ull, 32768ull, 90000ull})
            for (auto &place : PLACES) {
                staged(bytes, bytes, place[0], place[1], out);
                if (!out && bytes > 17 && place[0] != 4095) staged(bytes, bytes / 3, place[0], place[1], out);
            }
    stage_deadline();
}
