// Layout of a rank's window (device memory that every other rank of the host can address) and of the
// arguments of the kernels. crates/beeline-sys/src/cuda/collective.rs has the same in Rust.
#pragma once
#include "device.cuh"

constexpr u32 RANKS_MAX = 16;
constexpr u32 LL_BLOCKS_MAX = 128; // blocks of a low-latency kernel
constexpr u32 LL_SPAN_MAX = 8192;  // bytes of data that one of them carries to one peer
constexpr u32 LL_SLOTS = 2;        // messages of one pair under way
constexpr u32 LL_REGION = 2 * LL_SPAN_MAX;
#ifndef BEELINE_PUSH_BLOCKS
#define BEELINE_PUSH_BLOCKS 128
#endif
constexpr u32 PUSH_BLOCKS = BEELINE_PUSH_BLOCKS;
constexpr u32 PUSH_SLOTS = 4; // chunks of one pair and block under way
constexpr u32 HEADERS = 8; // headers of one pair that are kept
constexpr u32 DIRECT_ENTRIES = 64; // registrations of one rank that others map

// What an offer says, in 64 bits: 1 + the entry of the receiver's table (0: none), the generation of the entry, and where in
// it the receiver wants the part, in units of 16 bytes.
constexpr u32 OFFER_ENTRY = 57, OFFER_GENERATION = 36;
// What the sender's table has of an entry behind its address: the generation, and below it the length in bytes.
constexpr u32 ENTRY_GENERATION = 43;
constexpr u32 GENERATION_BITS = OFFER_ENTRY - OFFER_GENERATION;
static_assert(ENTRY_GENERATION + GENERATION_BITS == 64 && DIRECT_ENTRIES < 1 << (64 - OFFER_ENTRY), "words of 64 bits");

// Counters of one block and one peer in the window of the rank that they are about.
// LL counts messages, push chunks. They live in device memory, so a graph that is replayed goes on where it was.
struct Counters {
    u32 sent, received; // by this rank
    u32 consumed;       // written by the peer: what it has read of ours
    // Of packets and lines, added to by the peer: messages of its kernels whose block has room, both ways. Of chunks: 1 + the
    // number of the part that is being stored straight into the peer's memory, or was.
    u32 last;
};

// Offsets in a window.
constexpr u64 AT_FAILED = 0;                                                            // u32
constexpr u64 AT_POISON = 64;                                                           // u32: 1 + the rank that failed
constexpr u64 AT_CALLS = 128;                                                           // Counters [peer]: headers
constexpr u64 AT_DONE = 704;                                                            // u32: see Comm::counted
constexpr u64 AT_STRAIGHT = 768;                                                        // u32: parts that block 0 has sent straight
constexpr u64 AT_HEADERS = 1024;                                                        // packets [peer][HEADERS][2]
constexpr u64 AT_LL_COUNTERS = AT_HEADERS + (u64)RANKS_MAX * HEADERS * 32;              // [block][peer]
constexpr u64 AT_PUSH_COUNTERS = AT_LL_COUNTERS + (u64)LL_BLOCKS_MAX * RANKS_MAX * 16;  // [block][peer]
constexpr u64 AT_PUSH_FLAGS = AT_PUSH_COUNTERS + (u64)PUSH_BLOCKS * RANKS_MAX * 16;      // u32 [block][peer][slot]
constexpr u64 AT_PUSH_WAYS = AT_PUSH_FLAGS + (u64)PUSH_BLOCKS * RANKS_MAX * PUSH_SLOTS * 4; // u32 [block][peer][slot]: see direct.cuh
constexpr u64 AT_OFFERS = AT_PUSH_WAYS + (u64)PUSH_BLOCKS * RANKS_MAX * PUSH_SLOTS * 4; // packets [block][peer][2]
constexpr u64 AT_LL_CALLED = AT_OFFERS + (u64)PUSH_BLOCKS * RANKS_MAX * 32; // u32 [block][peer]: what `last` says of packets there
constexpr u64 AT_TABLE = 229376; // [peer][entry]: see PushMoveArgs::table; the host writes it
constexpr u64 AT_LL = 262144;                                                           // [source][slot][block] regions
static_assert(AT_CALLS + RANKS_MAX * 16 <= 512 && AT_STRAIGHT + 4 <= AT_HEADERS, "words of the first page overlap");
static_assert(AT_LL_CALLED + (u64)LL_BLOCKS_MAX * RANKS_MAX * 4 <= AT_TABLE && AT_TABLE + RANKS_MAX * DIRECT_ENTRIES * 16 <= AT_LL, "counters overlap the packets");

// What a failing kernel writes to host memory; `code` last.
struct Report {
    u32 code; // 0 none, then as below
    u32 peer;
    u64 mine[2], theirs[2];
    u64 waited_ns;
    u32 block, phase;
};
// Behind the report, for the host while a kernel waits: 1 + the rank that it waits for, and above that how many calls
// the two have made. Nobody else writes it, and the host clears it.
constexpr u64 WAITING_AT = 56;
enum { MISMATCH = 1, DEADLINE = 2, ABORTED = 3, PEER_FAILED = 4 };
enum { PHASE_CREDIT = 1, PHASE_DATA = 2, PHASE_HEADER = 3, PHASE_ORDER = 4 };

// What every kernel gets.
struct Comm {
    u64 windows[RANKS_MAX]; // of all ranks, as this device addresses them
    u64 report;             // Report in host memory
    u64 abort;              // u32 in host memory: not 0 means leave
    u64 timeout_ns;
    u64 call; // what this rank is asked to do, as the peers shall find it; a second word stands with each part
    u64 push_at; // offset of the chunks in every window: [source][block][slot]
    u32 chunk;   // bytes of one, a power of two of at least 4096
    u32 rank, ranks;
    u32 ll_blocks; // of a low-latency kernel at most, a power of two: fewer where there are many ranks
    u64 line_at;   // offset of the lines in every window: [source][slot][block]
    u32 line_span; // bytes of data that a block carries to a peer in one message of lines, whole groups; 0: none
    // 1: every block of packets or lines adds one to AT_DONE when it is done, for good or not; 0 in graphs, whose replays
    // the host does not count, in streams of the library's own, and where streams cannot wait for it.
    u32 counted;
    u32 admits;  // when blocks of the next kernel may start, below
    u32 atomics; // 1: the devices of all ranks carry out atomic operations of the others
};

// When a kernel lets blocks of the next one start, which take room that another stream's kernel may need, for which a peer waits.
// So it does that only when it is sure to end without more room for anybody:
// - THERE: in each block, once the blocks that it takes something from have their room; or, where it takes nothing, once it has
//   room for what it sends. They say so as soon as they start, before what was queued before them has ended. That is enough
//   where nobody else is waited for: with two ranks, or where each rank exchanges something with each other one.
//   A block has its room only where the kernel before it in its stream has ended, or lets others start itself and so is sure to
//   end. So all of these blocks come to their data. What they send has room too, since a block acknowledges what was
//   sent before when it begins.
// - HEARD: in each block, once something has come from every peer that it takes from, or it waits for nobody any more. Who
//   has sent something has room for all that it sends (one message a peer), and waits for nobody before it has.
// - AT_ONCE: if it is one block of few threads, which finds room beside whatever kernels of ours start early, on every rank.
enum { ADMIT_NEVER = 0, ADMIT_AT_ONCE = 1, ADMIT_HEARD = 2, ADMIT_THERE = 3 };

// What a rank sends to one peer and receives from it; itself among them (a local copy).
struct Part {
    u64 send, send_bytes, recv, recv_bytes;
    u64 send_word, recv_word; // second words of the headers: ours to the peer, and what we expect of it
};
struct MoveArgs {
    Comm comm;
    Part parts[RANKS_MAX];
};
// Of a kernel of chunks, whose parts may go straight into registered memory of their receivers.
struct PushMoveArgs {
    MoveArgs move;
    u64 offers[RANKS_MAX]; // where the part of each source may go, as direct.cuh has it; 0: through slots
    u64 table;             // in memory of the device: what this rank has mapped of the others' entries, {address, generation and length} [peer][entry]
    u64 straight;          // u32 in host memory, which never reads: what AT_STRAIGHT has come to
    u32 mapped;            // ranks of which it has anything mapped
    u32 unused;
};
struct ReduceArgs {
    Comm comm;
    u64 in, out;
    u64 bytes;  // of one part
    u64 stride; // from the part that goes to one rank to the next rank's; 0: all get the same
    u32 send_mask, recv_mask;
    u64 scalar;
    u32 multiply; // 0 no factor, 1 `scalar` is one, 2 `scalar` is the address of one
    u32 divide;   // by what a sum is divided, 0: by nothing
    u64 word; // second word of every header
};

// A window has room for every rank but its own.
DEVICE u32 lane_of(u32 source, u32 dest) { return source > dest ? source - 1 : source; }
DEVICE u64 at_ll(u32 ll_blocks, u32 source, u32 dest, u32 slot, u32 block) {
    return AT_LL + (((u64)lane_of(source, dest) * LL_SLOTS + slot) * ll_blocks + block) * LL_REGION;
}
// Each block of a low-latency kernel carries 1 << this of `bytes` to a peer: the same on both sides.
DEVICE u32 ll_shift(const Comm &c, u64 bytes) {
    return bytes <= (u64)c.ll_blocks << 11 ? 11 : bytes <= (u64)c.ll_blocks << 12 ? 12 : 13;
}
