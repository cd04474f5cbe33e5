// Parts that go straight into registered memory of their receivers, among others that do not.
#pragma once

static u64 offer_of(u64 entry, u64 generation, u64 offset) {
    return (entry + 1) << OFFER_ENTRY | generation << OFFER_GENERATION | offset / 16;
}

// What a pair of ranks has agreed on in a call, or not.
enum Registration { NONE, KNOWN, NOT_MAPPED, STALE, BEYOND, SHORT, NO_ENTRY, REGISTRATIONS };
static Registration registration_of(u32 from, u32 to, int call) { return (Registration)((from * 3 + to + call) % REGISTRATIONS); }

// No two pieces are alike.
static u8 straight_byte(u64 i, u32 from, u32 to, int call) { return (u8)(i * 11 + i / 253 + from * 5 + to * 3 + call); }

static void straight(u32 n, u64 bytes, u32 shift) {
    World world(n);
    const u64 ENTRY = 5, OFFSET = 48;
    std::vector<std::vector<u64>> tables(n, std::vector<u64>(n * DIRECT_ENTRIES * 2));
    std::vector<u32> counted(n), expected(n);
    std::vector<std::vector<std::vector<u8>>> in(n, std::vector<std::vector<u8>>(n));
    auto size = [&](u32 from, u32 to, int call) -> u64 { return (bytes + from * 3 + to) / (call % 3 + 1); };
    for (int call = 0; call < REGISTRATIONS + 2; call++) {
        // The host's part: buffers, and what each sender has mapped of them. Kernels never see a half of it.
        std::vector<PushMoveArgs> args(n);
        std::vector<std::vector<std::vector<u8>>> out(n, std::vector<std::vector<u8>>(n));
        for (u32 rank = 0; rank < n; rank++) {
            PushMoveArgs &a = args[rank];
            a = PushMoveArgs{};
            a.move.comm = world.comm(rank, 7, 8000);
            a.table = (u64)tables[rank].data(), a.straight = (u64)&counted[rank];
            for (u32 p = 0; p < n; p++) {
                u64 s = size(rank, p, call), r = size(p, rank, call);
                out[p][rank].resize(s + 32);
                for (u64 i = 0; i < s; i++) out[p][rank][shift + i] = straight_byte(i, rank, p, call);
                std::vector<u8> &into = in[rank][p];
                into.assign(r + OFFSET + 64, 0xee);
                // Memory of the allocator's is aligned to 16 bytes, as an offered place must be.
                a.move.parts[p] = Part{(u64)out[p][rank].data() + shift, s, (u64)into.data() + OFFSET, r, s, r};
            }
        }
        for (u32 from = 0; from < n; from++)
            for (u32 to = 0; to < n; to++) {
                if (from == to) continue;
                Registration kind = registration_of(from, to, call);
                u64 length = size(from, to, call) + OFFSET, generation = (u64)call + 1;
                u64 *entry = tables[from].data() + (to * DIRECT_ENTRIES + ENTRY) * 2;
                args[to].offers[from] = kind == NONE ? 0 : kind == NO_ENTRY ? offer_of(DIRECT_ENTRIES, 1, OFFSET) : offer_of(ENTRY, generation, kind == BEYOND ? (length + 32) / 16 * 16 : OFFSET);
                if (kind != NOT_MAPPED) args[from].mapped |= 1u << to;
                entry[0] = (u64)in[to][from].data();
                entry[1] = kind == NOT_MAPPED ? 0 : (generation - (kind == STALE)) << ENTRY_GENERATION | (length - (kind == SHORT));
                u64 span = push_span(size(from, to, call));
                bool large = chunks_of(span, chunk_of(args[from].move.comm, size(from, to, call))) > PUSH_SLOTS;
                expected[from] += kind == KNOWN && large;
            }
        everywhere(n, [&](u32 rank) {
            BulkShared bulk;
            launch<PushShared>(BLOCKS, [&](PushShared &s) { push_move(args[rank], s, bulk); });
        });
        for (u32 rank = 0; rank < n; rank++) {
            Report &report = *world.reports[rank];
            CHECK(report.code == 0, "straight rank %u call %d: code %u phase %u peer %u", rank, call, report.code, report.phase, report.peer);
            CHECK(counted[rank] == expected[rank], "straight n %u bytes %llu rank %u call %d: %u parts, not %u", n, bytes, rank, call, counted[rank], expected[rank]);
            if (report.code) return;
            for (u32 p = 0; p < n; p++) {
                u64 r = size(p, rank, call), wrong = 0;
                const u8 *got = in[rank][p].data();
                for (u64 i = 0; i < r + OFFSET + 64; i++) {
                    bool inside = i >= OFFSET && i < OFFSET + r;
                    wrong += got[i] != (inside ? straight_byte(i - OFFSET, p, rank, call) : 0xee);
                }
                CHECK(wrong == 0, "straight n %u bytes %llu rank %u from %u call %d kind %d: %llu bytes", n, bytes, rank, p, call, registration_of(p, rank, call), wrong);
            }
        }
    }
}

// One part from rank 0 to rank 1, into memory that rank 0 has mapped.
struct Couple {
    World world{2};
    std::vector<u8> out, in;
    std::vector<u64> table = std::vector<u64>(2 * DIRECT_ENTRIES * 2);
    u32 counted = 0;
    Couple(u64 bytes = 100000) : out(bytes, 1), in(bytes + 20000, 0xee) { table[DIRECT_ENTRIES * 2] = (u64)in.data(), table[DIRECT_ENTRIES * 2 + 1] = 3ull << ENTRY_GENERATION | in.size(); }
    void rank(u32 rank, u64 timeout_ms) {
        PushMoveArgs a = {};
        a.move.comm = world.comm(rank, 7, timeout_ms);
        a.table = (u64)table.data(), a.straight = (u64)&counted;
        if (rank == 0)
            a.move.parts[1] = Part{(u64)out.data(), out.size(), 0, 0, 7, 0}, a.mapped = 2;
        else
            a.move.parts[0] = Part{0, 0, (u64)in.data(), out.size(), 0, 7}, a.offers[0] = offer_of(0, 3, 0);
        BulkShared bulk;
        launch<PushShared>(BLOCKS, [&](PushShared &s) { push_move(a, s, bulk); });
    }
    u32 poison(u32 rank) { return host_word<u32>((u64)world.windows[rank] + AT_POISON).exchange(0); }
    void check(const char *what, u32 code) {
        u64 written = 0;
        for (u8 byte : in) written += byte != 0xee;
        Report &report = *world.reports[0];
        CHECK(written == 0 && counted == 0 && report.code == code, "straight, %s: %llu bytes, code %u", what, written, report.code);
    }
};

// The sender's host changes its table while kernels read it: an entry that was offered, or none, and never another's address.
static void straight_changes() {
    Couple pair;
    std::vector<u8> other(pair.in.size(), 0xee);
    std::atomic<bool> over{false};
    std::thread host([&] {
        u64 at = (u64)&pair.table[DIRECT_ENTRIES * 2], size = pair.in.size();
        for (u64 turn = 0; !over; turn++) {
            bool right = turn % 2;
            host_word<u64>(at + 8).store(0);
            host_word<u64>(at).store(right ? (u64)pair.in.data() : (u64)other.data());
            if (turn % 5) host_word<u64>(at + 8).store((right ? 3ull : 4ull) << ENTRY_GENERATION | size);
            std::this_thread::yield();
        }
    });
    for (int call = 0; call < 8; call++) {
        std::fill(pair.in.begin(), pair.in.end(), 0xee), std::fill(pair.out.begin(), pair.out.end(), (u8)call);
        everywhere(2, [&](u32 rank) { pair.rank(rank, 8000); });
        bool whole = std::equal(pair.out.begin(), pair.out.end(), pair.in.begin());
        CHECK(whole && pair.world.reports[0]->code == 0 && pair.world.reports[1]->code == 0, "straight, a changing table: call %d", call);
    }
    over = true, host.join();
    for (u8 byte : other)
        CHECK(byte == 0xee, "straight, a changing table: another's memory was written");
}

// A sender that comes when the receiver has given up: its memory may be anybody's.
static void straight_late() {
    for (bool told : {true, false}) {
        Couple pair;
        pair.rank(1, 20); // nobody sends
        CHECK(pair.world.reports[1]->code == DEADLINE, "straight, late: the receiver has code %u", pair.world.reports[1]->code);
        // What is queued behind it says nothing any more.
        u64 offers = (u64)pair.world.windows[0] + AT_OFFERS;
        std::vector<u8> before((u8 *)offers, (u8 *)offers + BLOCKS * RANKS_MAX * 32);
        pair.rank(1, 20);
        CHECK(!memcmp(before.data(), (u8 *)offers, before.size()), "straight, late: offered after a failure");
        // Also where the sender does not know: the offer itself is gone.
        if (!told) pair.poison(0);
        pair.rank(0, 20);
        pair.check(told ? "late" : "late and not told", told ? PEER_FAILED : DEADLINE);
    }
    const u32 number = counters_at + 1; // of the first part
    auto offered = [&](Couple &pair) {
        for (u32 block = 0; block < BLOCKS; block++) {
            u64 at = (u64)pair.world.windows[0] + AT_OFFERS + ((u64)block * RANKS_MAX + 1) * 32, offer = offer_of(0, 3, 0), size = pair.out.size();
            store_packet(at, Quad{(u32)offer, number, (u32)(offer >> 32), number}), store_packet(at + 16, Quad{(u32)size, number, (u32)(size >> 32), number});
        }
    };
    // The offer stands, and somebody has failed.
    {
        Couple pair;
        offered(pair);
        host_word<u32>((u64)pair.world.windows[0] + AT_POISON).store(2);
        pair.rank(0, 2000);
        pair.check("poisoned", PEER_FAILED);
    }
    // A sender that has begun, and learns of a failure, says that it has stopped: its receiver waits for that.
    {
        Couple pair(48 << 20);
        offered(pair);
        auto claim = [&](u32 block) { return (u64)pair.world.windows[0] + AT_PUSH_COUNTERS + ((u64)block * RANKS_MAX + 1) * 16 + 12; };
        std::atomic<bool> over{false};
        std::thread other([&] {
            while (host_word<u32>(claim(0)).load() != number && !over) std::this_thread::yield();
            host_word<u32>((u64)pair.world.windows[0] + AT_POISON).store(2);
        });
        pair.rank(0, 2000);
        over = true, other.join();
        for (u32 block = 0; block < BLOCKS; block++) {
            u64 flag = (u64)pair.world.windows[1] + AT_PUSH_FLAGS + ((u64)block * RANKS_MAX + 0) * PUSH_SLOTS * 4 + (number - 1) % PUSH_SLOTS * 4;
            bool there = (i32)(load_flag(flag) - number) >= 0;
            CHECK(there || load_flag(claim(block)) != number, "straight: block %u stopped, and did not say so", block);
        }
    }
    // A receiver that gives up waits for a sender that has begun, as long as that may be, and for no other.
    for (bool begun : {false, true}) {
        Couple pair;
        for (u32 block = 0; block < BLOCKS; block++)
            if (begun) store_word((u64)pair.world.windows[0] + AT_PUSH_COUNTERS + ((u64)block * RANKS_MAX + 1) * 16 + 12, number);
        u64 started = now_ns();
        pair.rank(1, 1);
        CHECK(!begun || now_ns() - started >= LEAVE_NS, "straight: the receiver left a sender that had begun");
    }
}

// A receiver that never comes, or makes another call; a sender that is aborted while it waits for an offer, or says another size.
static void straight_troubles() {
    for (int kind = 0; kind < 4; kind++) {
        World world(2);
        std::vector<u8> out(200000), in(200000, 0xee);
        std::vector<u64> tables(2 * DIRECT_ENTRIES * 2);
        u32 counted = 0;
        tables[DIRECT_ENTRIES * 2] = (u64)in.data(), tables[DIRECT_ENTRIES * 2 + 1] = 3ull << ENTRY_GENERATION | in.size();
        everywhere(2, [&](u32 rank) {
            if (rank == 1 && kind < 2) {
                std::this_thread::sleep_for(std::chrono::milliseconds(30));
                if (kind == 1) host_word<u32>((u64)world.aborts[0]).store(1);
                return;
            }
            PushMoveArgs a = {};
            // Another call of the receiver's, or less room than is sent: not a byte may go straight.
            u64 bytes = kind == 3 && rank == 1 ? 90000 : 100000;
            a.move.comm = world.comm(rank, kind == 2 && rank == 1 ? 8 : 7, kind == 0 ? 50 : 5000);
            a.table = (u64)tables.data(), a.straight = (u64)&counted, a.mapped = rank == 0 ? 2 : 0;
            if (rank == 0)
                a.move.parts[1] = Part{(u64)out.data(), bytes, 0, 0, bytes, 0};
            else
                a.move.parts[0] = Part{0, 0, (u64)in.data(), bytes, 0, bytes}, a.offers[0] = offer_of(0, 3, 0);
            BulkShared bulk;
            launch<PushShared>(BLOCKS, [&](PushShared &s) { push_move(a, s, bulk); });
        });
        Report &sender = *world.reports[0], &receiver = *world.reports[1];
        // One whose part was taken all the same may have ended well before.
        u32 code = kind == 0 ? DEADLINE : kind == 1 ? ABORTED : PEER_FAILED;
        CHECK((sender.code == code && sender.peer == 1) || (kind >= 2 && sender.code == 0), "straight trouble %d: code %u peer %u", kind, sender.code, sender.peer);
        CHECK(kind < 2 || (receiver.code == MISMATCH && receiver.peer == 0), "straight trouble %d: the receiver has code %u peer %u", kind, receiver.code, receiver.peer);
        u64 written = 0;
        for (u64 i = 0; i < in.size(); i++) written += in[i] != 0xee && (kind < 2 || i >= 100000);
        CHECK(written == 0 && (kind == 2 || counted == 0), "straight trouble %d: %llu bytes, %u parts", kind, written, counted);
    }
}
