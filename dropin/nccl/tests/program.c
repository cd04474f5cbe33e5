/* A client of libnccl.so.2 as C programs are, on N devices (at least 2). Prints "passed" at the end. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "declared.h"

/* Of the test driver alone. */
__attribute__((weak)) long long beeline_test_cuda_counter(const char *);

#ifndef N
#define N 4
#endif
enum { COUNT = 1001, INT = 2, FLOAT = 7, ARGUMENT = 4, USAGE = 5, REMOTE = 6, PROGRESS = 7 };

static void *context[N], *in[N], *out[N];
static stream_t stream[N];
static int host[N * COUNT], result[N * COUNT];

#define CHECK(what) do { int code_ = (what); if (code_) fail(#what, code_, __LINE__); } while (0)
#define EXPECT(code, what) do { int code_ = (what); if (code_ != (code)) fail(#what, code_, __LINE__); } while (0)
#define TRUE(what) do { if (!(what)) fail(#what, -1, __LINE__); } while (0)

static void fail(const char *what, int code, int line) {
  printf("line %d: %s: %d, %s\n", line, what, code, ncclGetLastError(NULL));
  exit(1);
}

static void on(int device) { void *old; cuCtxPopCurrent_v2(&old); CHECK(cuCtxPushCurrent_v2(context[device])); }
static int turn;  /* other values each time */
static int value(int rank, int at) { return (rank + 1) * 3 + at % 17 + 5 * turn; }

static void setup(void) {
  CHECK(cuInit(0));
  for (int d = 0; d < N; d++) {
    CHECK(cuDevicePrimaryCtxRetain(&context[d], d));
    on(d);
    CHECK(cuStreamCreate(&stream[d], 1));
    CHECK(cuMemAlloc_v2(&in[d], sizeof host));
    CHECK(cuMemAlloc_v2(&out[d], sizeof host));
  }
}

static void fill(int count) {
  for (int d = 0; d < N; d++) {
    on(d);
    for (int i = 0; i < count; i++) host[i] = value(d, i);
    CHECK(cuMemcpyHtoDAsync_v2(in[d], host, count * sizeof(int), stream[d]));
    memset(host, 0xee, sizeof host);
    CHECK(cuMemcpyHtoDAsync_v2(out[d], host, sizeof host, stream[d]));
  }
}

static int *fetch(int d) {
  on(d);
  CHECK(cuMemcpyDtoHAsync_v2(result, out[d], sizeof result, stream[d]));
  return result;
}

#define EACH(call) do { CHECK(ncclGroupStart()); for (int r = 0; r < N; r++) CHECK(call); CHECK(ncclGroupEnd()); } while (0)

/* Every collective by number: queued for all ranks, and what rank `d` then has at `i`. */
enum { REDUCED, SCATTERED, GATHERED, EXCHANGED, COLLECTED, DEALT, CAST, CAST_HERE, BEST, PASSED, KINDS };

static void queue(int kind, ncclComm_t *comm, stream_t *st) {
  switch (kind) {
    case REDUCED: EACH(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], st[r])); break;
    case SCATTERED: EACH(ncclReduceScatter(in[r], out[r], COUNT, INT, 0, comm[r], st[r])); break;
    case GATHERED: EACH(ncclAllGather(in[r], out[r], COUNT, INT, comm[r], st[r])); break;
    case EXCHANGED: EACH(ncclAlltoAll(in[r], out[r], COUNT, INT, comm[r], st[r])); break;
    case COLLECTED: EACH(ncclGather(in[r], r == N - 1 ? out[r] : NULL, COUNT, INT, N - 1, comm[r], st[r])); break;
    case DEALT: EACH(ncclScatter(r == 1 ? in[r] : NULL, out[r], COUNT, INT, 1, comm[r], st[r])); break;
    case CAST: EACH(ncclBroadcast(in[r], out[r], COUNT, INT, N - 1, comm[r], st[r])); break;
    case CAST_HERE: EACH(ncclBcast(r ? out[r] : in[r], 1, INT, 0, comm[r], st[r])); break;
    case BEST: EACH(ncclReduce(in[r], out[r], COUNT, INT, 2, 0, comm[r], st[r])); break;
    case PASSED:
      CHECK(ncclGroupStart());
      for (int r = 0; r < N; r++) {
        CHECK(ncclSend(in[r], COUNT, INT, (r + 1) % N, comm[r], st[r]));
        CHECK(ncclRecv(out[r], COUNT, INT, (r + N - 1) % N, comm[r], st[r]));
      }
      CHECK(ncclGroupEnd());
  }
}

static int right(int kind, int d, int i) {
  int sum = 0, none = (int)0xeeeeeeee, one = i < COUNT;
  switch (kind) {
    case REDUCED: for (int r = 0; r < N; r++) sum += value(r, i); return one ? sum : none;
    case SCATTERED: for (int r = 0; r < N; r++) sum += value(r, d * COUNT + i); return one ? sum : none;
    case GATHERED: return value(i / COUNT, i % COUNT);
    case EXCHANGED: return value(i / COUNT, d * COUNT + i % COUNT);
    case COLLECTED: return d == N - 1 ? value(i / COUNT, i % COUNT) : none;
    case DEALT: return one ? value(1, d * COUNT + i) : none;
    case CAST: return one ? value(N - 1, i) : none;
    case CAST_HERE: return d && i == 0 ? value(0, 0) : none;
    case BEST: return d == 0 && one ? value(N - 1, i) : none;
    default: return one ? value((d + N - 1) % N, i) : none;
  }
}

static void check(int kind) {
  for (int d = 0; d < N; d++) {
    int *got = fetch(d);
    for (int i = 0; i < N * COUNT; i++)
      if (got[i] != right(kind, d, i)) {
        printf("collective %d, turn %d, rank %d, %d: %d, not %d\n", kind, turn, d, i, got[i], right(kind, d, i));
        exit(1);
      }
  }
}

static void collectives(ncclComm_t *comm) {
  fill(N * COUNT);
  for (int op = 0; op < 5; op++) {
    EACH(ncclAllReduce(in[r], out[r], COUNT, INT, op, comm[r], stream[r]));
    for (int d = 0; d < N; d++) {
      int *got = fetch(d);
      for (int i = 0; i < COUNT; i++) {
        int sum = 0, prod = 1, max = value(N - 1, i), min = value(0, i);
        for (int r = 0; r < N; r++) { sum += value(r, i); prod *= value(r, i); }
        int right[5] = {sum, prod, max, min, sum / N};
        TRUE(got[i] == right[op]);
      }
      TRUE(got[COUNT] == (int)0xeeeeeeee);
    }
  }
  for (int kind = 0; kind < KINDS; kind++) {
    fill(N * COUNT);
    queue(kind, comm, stream);
    check(kind);
  }
  EACH(ncclAllReduce(in[r], out[r], 0, INT, 0, comm[r], stream[r]));
}

/* A thread's own default stream has one name in all threads. What the first one queues waits at a gate; the second one's
   calls come after it all the same. */
static const stream_t own = (stream_t)2;
static ncclComm_t *shared;
static void *gate[N];
static pthread_barrier_t queued;

static void *first_thread(void *unused) {
  on(0);
  for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamWaitValue32_v2(own, gate[r], 1, 0)); }
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, 0, shared[r], own));
  pthread_barrier_wait(&queued);
  for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamSynchronize(own)); }
  return unused;
}

static void *second_thread(void *unused) {
  on(0);
  pthread_barrier_wait(&queued);
  EACH(ncclAllReduce(out[r], out[r], COUNT, INT, 1, shared[r], own));
  pthread_barrier_wait(&queued);
  for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamSynchronize(own)); }
  return unused;
}

static void threads(ncclComm_t *comm) {
  int zero = 0, one = 1;
  pthread_t both[2];
  shared = comm;
  fill(COUNT);
  for (int r = 0; r < N; r++) {
    on(r);
    CHECK(cuMemAlloc_v2(&gate[r], 4));
    CHECK(cuMemcpyHtoDAsync_v2(gate[r], &zero, 4, stream[r]));
    CHECK(cuStreamSynchronize(stream[r]));
  }
  TRUE(!pthread_barrier_init(&queued, NULL, 2));
  TRUE(!pthread_create(&both[0], NULL, first_thread, NULL));
  /* This thread is the barrier's second party once, the second thread the next time. */
  pthread_barrier_wait(&queued);
  TRUE(!pthread_create(&both[1], NULL, second_thread, NULL));
  pthread_barrier_wait(&queued);
  pthread_barrier_wait(&queued);
  for (int r = 0; r < N; r++) { on(r); CHECK(cuMemcpyHtoDAsync_v2(gate[r], &one, 4, stream[r])); }
  for (int i = 0; i < 2; i++) TRUE(!pthread_join(both[i], NULL));
  for (int d = 0; d < N; d++) {
    int *got = fetch(d);
    for (int i = 0; i < COUNT; i++) {
      unsigned sum = 0, right = 1;  /* wraps, as the device does */
      for (int r = 0; r < N; r++) sum += value(r, i);
      for (int r = 0; r < N; r++) right *= sum;
      TRUE((unsigned)got[i] == right);
    }
  }
}

static void operations(ncclComm_t *comm) {
  int op[N], factor = 3;
  fill(N * COUNT);
  for (int r = 0; r < N; r++) {
    CHECK(ncclRedOpCreatePreMulSum(&op[r], &factor, INT, 1, comm[r]));
    TRUE(op[r] >= 5);
  }
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, op[r], comm[r], stream[r]));
  int sum = 0;
  for (int r = 0; r < N; r++) sum += 3 * value(r, 9);
  TRUE(fetch(1)[9] == sum);
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], COUNT, FLOAT, op[0], comm[0], stream[0]));
  for (int r = 0; r < N; r++) CHECK(ncclRedOpDestroy(op[r], comm[r]));
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], COUNT, INT, op[0], comm[0], stream[0]));
  /* A factor in device memory: the first element of the rank's input. */
  for (int r = 0; r < N; r++) CHECK(ncclRedOpCreatePreMulSum(&op[r], in[r], INT, 0, comm[r]));
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, op[r], comm[r], stream[r]));
  sum = 0;
  for (int r = 0; r < N; r++) sum += value(r, 0) * value(r, 9);
  TRUE(fetch(N - 1)[9] == sum);
}

static void arguments(ncclComm_t *comm) {
  EXPECT(ARGUMENT, ncclAllReduce(NULL, out[0], COUNT, INT, 0, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], COUNT, 12, 0, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], COUNT, INT, 77, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], (size_t)-1, INT, 0, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclBroadcast(in[0], out[0], COUNT, INT, N, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclBroadcast(in[0], out[0], COUNT, INT, -1, comm[0], stream[0]));
  EXPECT(ARGUMENT, ncclAllReduce(in[0], out[0], COUNT, INT, 0, NULL, stream[0]));
  EXPECT(ARGUMENT, ncclCommCount(comm[0], NULL));
  EXPECT(USAGE, ncclGroupEnd());
  EXPECT(USAGE, ncclDevCommCreate(comm[0], NULL, NULL));
  TRUE(strstr(ncclGetLastError(NULL), "ncclDevCommCreate"));
  ncclTeam_t world = ncclTeamWorld(comm[1]), rail = ncclTeamRail(comm[1]);
  TRUE(world.nRanks == N && world.rank == 1 && world.stride == 1 && rail.nRanks == 1);
  TRUE(ncclTeamRankToWorld(comm[1], world, N - 1) == N - 1);
  struct { size_t size; unsigned magic, version; float time; } info = {24, 0x74685ff7, 22809, 0};
  CHECK(ncclGroupStart());
  CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm[0], stream[0]));
  CHECK(ncclGroupSimulateEnd(&info));
  TRUE(info.time > 0);
}

/* Calls of one communicator in two streams run in their order, also where the first stream is held up, and gone. */
static void streams(ncclComm_t *comm) {
  stream_t first[N];
  void *gate[N];
  fill(COUNT);
  for (int r = 0; r < N; r++) {
    fetch(r);  /* what was queued before is over */
    CHECK(cuMemAlloc_v2(&gate[r], 8));
    CHECK(cuStreamCreate(&first[r], 1));
    int zero = 0;
    CHECK(cuMemcpyHtoDAsync_v2(gate[r], &zero, sizeof zero, first[r]));
    CHECK(cuStreamWaitValue32_v2(first[r], gate[r], 1, 0));
  }
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], first[r]));
  EACH(ncclAllReduce(out[r], out[r], COUNT, INT, 2, comm[r], first[r]));  /* no other stream waited for: its end is counted */
  EACH(ncclAllReduce(out[r], in[r], COUNT, INT, 2, comm[r], stream[r]));
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], stream[r]));
  struct timespec pause = {0, 50000000};
  nanosleep(&pause, NULL);
  for (int r = 0; r < N; r++) {
    stream_t other;
    on(r);
    CHECK(cuStreamDestroy_v2(first[r]));
    CHECK(cuStreamCreate(&other, 1));
    CHECK(cuStreamWriteValue32_v2(other, gate[r], 1, 0));
    CHECK(cuStreamDestroy_v2(other));
  }
  for (int r = 0; r < N; r++) {
    int *got = fetch(r);
    for (int i = 0; i < COUNT; i++) {
      int sum = 0;
      for (int p = 0; p < N; p++) sum += value(p, i);
      TRUE(got[i] == N * sum);
    }
  }
}

static long long refused(void) { return beeline_test_cuda_counter ? beeline_test_cuda_counter("refused") : 0; }

static void *ended(int device, stream_t st) {
  void *graph = NULL;
  on(device);
  CHECK(cuStreamEndCapture(st, &graph));
  TRUE(graph);
  return graph;
}

static void *instance(void *graph) {
  void *exec;
  CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CHECK(cuGraphDestroy(graph));
  return exec;
}

/* The streams of all ranks, and a second one of each, in one capture; calls of a communicator keep their order from stream to
   stream, which the program does not make. */
static void forked(ncclComm_t *comm) {
  stream_t side[N];
  void *event[2 * N], *exec;
  for (int r = 0; r < N; r++) {
    on(r);
    CHECK(cuStreamCreate(&side[r], 1));
    for (int i = 0; i < 2; i++) CHECK(cuEventCreate(&event[2 * r + i], 2));
  }
  on(0);
  CHECK(cuStreamBeginCapture_v2(stream[0], 0));
  CHECK(cuEventRecord(event[0], stream[0]));
  for (int r = 0; r < N; r++) {
    on(r);
    if (r) CHECK(cuStreamWaitEvent(stream[r], event[0], 0));
    CHECK(cuStreamWaitEvent(side[r], event[0], 0));
  }
  queue(REDUCED, comm, stream);
  EACH(ncclAllReduce(out[r], out[r], COUNT, INT, 0, comm[r], side[r]));
  EACH(ncclAllReduce(out[r], out[r], COUNT, INT, 4, comm[r], stream[r]));
  for (int r = 0; r < N; r++) {
    on(r);
    if (r) CHECK(cuEventRecord(event[2 * r], stream[r]));
    CHECK(cuEventRecord(event[2 * r + 1], side[r]));
    on(0);
    if (r) CHECK(cuStreamWaitEvent(stream[0], event[2 * r], 0));
    CHECK(cuStreamWaitEvent(stream[0], event[2 * r + 1], 0));
  }
  exec = instance(ended(0, stream[0]));
  for (turn = 1; turn < 4; turn++) {
    fill(COUNT);
    for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamSynchronize(stream[r])); }
    on(0);
    CHECK(cuGraphLaunch(exec, stream[0]));
    CHECK(cuStreamSynchronize(stream[0]));
    for (int d = 0; d < N; d++) { int *got = fetch(d); for (int i = 0; i < COUNT; i++) TRUE(got[i] == N * right(REDUCED, d, i)); }
    fill(N * COUNT);
    queue(GATHERED, comm, side);  /* and outside of the graph */
    for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamSynchronize(side[r])); }
    check(GATHERED);
  }
  CHECK(cuGraphExecDestroy(exec));
  for (int r = 0; r < N; r++) {
    on(r);
    CHECK(cuStreamDestroy_v2(side[r]));
    for (int i = 0; i < 2; i++) CHECK(cuEventDestroy_v2(event[2 * r + i]));
  }
}

/* Every collective captured, in every mode, and replayed, the communicator being used outside of graphs in between. No call that
   the library makes meanwhile is one that captures do not allow. */
static void graphs(ncclComm_t *comm) {
  const char *path = getenv("BEELINE_COMM_PATH");
  int staged = path && !strcmp(path, "staged");
  long long before = refused();
  void *exec[N];
  for (int kind = 0; kind < KINDS; kind++) {
    for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamBeginCapture_v2(stream[r], kind % 3)); }
    if (staged) {
      on(0);
      EXPECT(USAGE, ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm[0], stream[0]));
    } else {
      queue(kind, comm, stream);
      if (kind == PASSED) queue(PASSED, comm, stream);
    }
    for (int r = 0; r < N; r++) exec[r] = ended(r, stream[r]);
    for (int r = 0; r < N; r++) { on(r); exec[r] = instance(exec[r]); }
    TRUE(refused() == before);
    for (turn = 1; turn < 4 && !staged; turn++) {
      fill(N * COUNT);
      for (int r = 0; r < N; r++) { on(r); CHECK(cuGraphLaunch(exec[r], stream[r])); }
      check(kind);
      if (turn == 2) {
        fill(N * COUNT);
        queue(kind, comm, stream);
        for (int r = 0; r < N; r++) { on(r); CHECK(cuGraphLaunch(exec[r], stream[r])); }
        check(kind);
      }
    }
    for (int r = 0; r < N; r++) CHECK(cuGraphExecDestroy(exec[r]));
  }
  if (!staged) forked(comm);
  turn = 0;
  TRUE(refused() == before);
}

/* What a small call costs in a stream that the call before was in: a launch, whether the stream is being captured, and a few
   looks at which context is current. */
static void driver_calls(ncclComm_t *comm) {
  const char *most = getenv("BEELINE_TEST_CALLS");
  if (!beeline_test_cuda_counter || !most) return;
  for (int i = 0; i < 3; i++)
    for (int r = 0; r < N; r++) {
      on(r);
      long long before = beeline_test_cuda_counter("calls");
      CHECK(ncclBroadcast(in[r], in[r], 8, INT, 0, comm[r], stream[r]));
      long long calls = beeline_test_cuda_counter("calls") - before;
      if (i && calls > atoi(most)) fail("calls of the driver", (int)calls, __LINE__);
    }
}

static void memory(ncclComm_t comm) {
  void *mem, *handle, *window;
  on(0);
  CHECK(ncclMemAlloc(&mem, 12345));
  CHECK(ncclCommRegister(comm, mem, 12345, &handle));
  CHECK(ncclCommWindowRegister(comm, mem, 12345, &window, 1));
  CHECK(ncclCommDeregister(comm, handle));
  EXPECT(ARGUMENT, ncclCommDeregister(comm, handle));
  CHECK(ncclCommWindowDeregister(comm, window));
  CHECK(ncclMemFree(mem));
  EXPECT(ARGUMENT, ncclMemFree(mem));
  CHECK(ncclMemFree(NULL));
}

static void init_ranks(ncclComm_t *comm) {
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id));
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) { on(r); CHECK(r % 2 ? pncclCommInitRank(&comm[r], N, id, r) : ncclCommInitRank(&comm[r], N, id, r)); }
  CHECK(ncclGroupEnd());
  for (int r = 0; r < N; r++) {
    int count, device, rank;
    CHECK(ncclCommCount(comm[r], &count));
    CHECK(ncclCommCuDevice(comm[r], &device));
    CHECK(ncclCommUserRank(comm[r], &rank));
    TRUE(count == N && device == r && rank == r);
  }
}

static void wait_ready(ncclComm_t comm) {
  int state = PROGRESS;
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 60000 && state == PROGRESS; i++) { CHECK(ncclCommGetAsyncError(comm, &state)); nanosleep(&pause, NULL); }
  TRUE(state == 0);
}

static void configs(void) {
  ncclUniqueId id, other;
  ncclComm_t comm[N];
  ncclConfig_t config = {sizeof config, 0xcafebeef, 22809, 0, INT32_MIN, INT32_MIN, INT32_MIN, NULL, INT32_MIN, INT32_MIN, NULL,
                         {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN}};
  TRUE(sizeof config == 80);
  CHECK(ncclGetUniqueId(&id));
  for (int r = 0; r < N; r++) { on(r); EXPECT(PROGRESS, ncclCommInitRankConfig(&comm[r], N, id, r, &config)); }
  for (int r = 0; r < N; r++) wait_ready(comm[r]);
  EACH(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], stream[r]));
  for (int r = 0; r < N; r++) { fetch(r); CHECK(ncclCommFinalize(comm[r])); }
  for (int r = 0; r < N; r++) CHECK(ncclCommDestroy(comm[r]));
  config.blocking = 7;
  EXPECT(ARGUMENT, ncclCommInitRankConfig(comm, 1, id, 0, &config));
  config.blocking = 1; config.minCTAs = 4; config.maxCTAs = 2;
  EXPECT(ARGUMENT, ncclCommInitRankConfig(comm, 1, id, 0, &config));
  config.magic = 1;
  EXPECT(ARGUMENT, ncclCommInitRankConfig(comm, 1, id, 0, &config));
  config.magic = 0xcafebeef; config.size = 24; config.minCTAs = config.maxCTAs = 0;  /* an older one: the rest is not read */
  CHECK(ncclGetUniqueId(&other));
  CHECK(ncclCommInitRankConfig(comm, 1, other, 0, &config));
  CHECK(ncclCommDestroy(comm[0]));
  memset(&id, 7, sizeof id);
  EXPECT(ARGUMENT, ncclCommInitRank(comm, 1, id, 0));
  EXPECT(ARGUMENT, ncclCommInitRank(comm, 2, other, 2));
}

static void parts(ncclComm_t *comm) {
  ncclComm_t part[N];
  int count, rank;
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) CHECK(ncclCommSplit(comm[r], r == N - 1 ? -1 : 0, -r, &part[r], NULL));
  CHECK(ncclGroupEnd());
  TRUE(part[N - 1] == NULL);
  CHECK(ncclCommCount(part[0], &count));
  CHECK(ncclCommUserRank(part[0], &rank));
  TRUE(count == N - 1 && rank == N - 2);
  fill(COUNT);
  CHECK(ncclGroupStart());
  for (int r = 0; r < N - 1; r++) CHECK(ncclAllReduce(in[r], out[r], COUNT, INT, 0, part[r], stream[r]));
  CHECK(ncclGroupEnd());
  int sum = 0;
  for (int r = 0; r < N - 1; r++) sum += value(r, 4);
  TRUE(fetch(0)[4] == sum);
  int gone = 1;
  ncclComm_t left[N];
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) if (r != gone) CHECK(ncclCommShrink(comm[r], &gone, 1, &left[r], NULL, 0));
  CHECK(ncclGroupEnd());
  int last = N == 2 ? 0 : N - 1;
  CHECK(ncclCommCount(left[last], &count));
  CHECK(ncclCommUserRank(left[last], &rank));
  TRUE(count == N - 1 && rank == N - 2);
  for (int r = 0; r < N; r++) { if (r != gone) CHECK(ncclCommDestroy(left[r])); if (r < N - 1) CHECK(ncclCommDestroy(part[r])); }
}

static void trouble(void) {
  ncclComm_t comm[N];
  int state = 0;
  CHECK(ncclCommInitAll(comm, N, NULL));
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) CHECK(ncclAllReduce(in[r], out[r], r == N - 1 ? 5 : COUNT, INT, 0, comm[r], stream[r]));
  CHECK(ncclGroupEnd());
  for (int r = 0; r < N; r++) {
    fetch(r);  /* the stream goes on */
    CHECK(ncclCommGetAsyncError(comm[r], &state));
    EXPECT(USAGE, state);
    TRUE(strstr(ncclGetLastError(comm[r]), "count 5") && strstr(ncclGetLastError(comm[r]), "count 1001"));
    TRUE(strlen(ncclGetErrorString(state)) > 0);
    CHECK(ncclCommAbort(comm[r]));
  }
  EXPECT(ARGUMENT, ncclCommCount(comm[0], &state));
  /* One that never comes: abort ends what waits. */
  CHECK(ncclCommInitAll(comm, 2, NULL));
  CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm[0], stream[0]));
  CHECK(ncclCommAbort(comm[0]));
  fetch(0);
  CHECK(ncclCommAbort(comm[1]));
}

int main(void) {
  ncclComm_t comm[N];
  int version = 0;
  CHECK(ncclGetVersion(&version));
  TRUE(version == 22809);
  setup();
  CHECK(ncclCommInitAll(comm, N, NULL));
  collectives(comm);
  streams(comm);
  graphs(comm);
  driver_calls(comm);
  threads(comm);
  operations(comm);
  arguments(comm);
  memory(comm[0]);
  parts(comm);
  for (int r = 0; r < N; r++) CHECK(ncclCommDestroy(comm[r]));
  init_ranks(comm);
  collectives(comm);
  for (int r = 0; r < N; r++) CHECK(ncclCommDestroy(comm[r]));
  configs();
  trouble();
  puts("passed");
  return 0;
}
