/* What programs do wrong: wrong arguments of every function, handles of what is gone, groups left open, identifiers of other jobs,
   an abort beside other threads' calls, fork, many communicators, the library unloaded. On two simulated devices; prints "passed". */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "declared.h"

enum { N = 2, COUNT = 501, INT = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, PROGRESS = 7 };
static void *context[N], *in[N], *out[N];
static stream_t stream[N];

#define CHECK(what) do { int code_ = (what); if (code_) fail(#what, code_, __LINE__); } while (0)
#define EXPECT(code, what) do { int code_ = (what); if (code_ != (code)) fail(#what, code_, __LINE__); } while (0)
#define REFUSED(what) EXPECT(ARGUMENT, what)
#define TRUE(what) do { if (!(what)) fail(#what, -1, __LINE__); } while (0)

static void fail(const char *what, int code, int line) {
  printf("line %d: %s: %d, %s\n", line, what, code, ncclGetLastError(NULL));
  exit(1);
}
static void on(int device) { CHECK(cuCtxSetCurrent(context[device])); }
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static int entries(const char *folder) {
  DIR *d = opendir(folder);
  int n = 0;
  TRUE(d != NULL);
  while (readdir(d)) n++;
  closedir(d);
  return n;
}

/* One all-reduce by all, looked at. */
static void works(ncclComm_t *comm, int value) {
  static int host[COUNT];
  for (int i = 0; i < COUNT; i++) host[i] = value + i;
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    on(r);
    CHECK(cuMemcpyHtoDAsync_v2(in[r], host, sizeof host, stream[r]));
    CHECK(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], stream[r]));
  }
  CHECK(ncclGroupEnd());
  for (int r = 0; r < N; r++) {
    int got[COUNT];
    on(r);
    CHECK(cuStreamSynchronize(stream[r]));
    CHECK(cuMemcpyDtoHAsync_v2(got, out[r], sizeof got, stream[r]));
    CHECK(cuStreamSynchronize(stream[r]));
    for (int i = 0; i < COUNT; i++) TRUE(got[i] == N * (value + i));
  }
}

/* Every function that takes a communicator, with one that is none any more, or null. `code`: what calls answer. */
static void none(ncclComm_t comm, int code) {
  int number = 0;
  void *handle = NULL;
  ncclComm_t made = NULL;
  int excluded[1] = {1};
  ncclTeam_t team = {2, 0, 1};
  EXPECT(code, ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm, stream[0]));
  EXPECT(code, ncclReduce(in[0], out[0], COUNT, INT, 0, 0, comm, stream[0]));
  EXPECT(code, ncclReduceScatter(in[0], out[0], COUNT / 2, INT, 0, comm, stream[0]));
  EXPECT(code, ncclBroadcast(in[0], out[0], COUNT, INT, 0, comm, stream[0]));
  EXPECT(code, ncclBcast(in[0], COUNT, INT, 0, comm, stream[0]));
  EXPECT(code, ncclAllGather(in[0], out[0], COUNT / 2, INT, comm, stream[0]));
  EXPECT(code, ncclAlltoAll(in[0], out[0], COUNT / 2, INT, comm, stream[0]));
  EXPECT(code, ncclGather(in[0], out[0], COUNT / 2, INT, 0, comm, stream[0]));
  EXPECT(code, ncclScatter(in[0], out[0], COUNT / 2, INT, 0, comm, stream[0]));
  EXPECT(code, ncclSend(in[0], COUNT, INT, 1, comm, stream[0]));
  EXPECT(code, ncclRecv(out[0], COUNT, INT, 1, comm, stream[0]));
  EXPECT(code, ncclCommSplit(comm, 0, 0, &made, NULL));
  EXPECT(code, ncclCommSplit(comm, -1, 0, &made, NULL));
  EXPECT(code, ncclCommShrink(comm, excluded, 1, &made, NULL, 0));
  EXPECT(code, ncclCommCount(comm, &number));
  EXPECT(code, ncclCommUserRank(comm, &number));
  EXPECT(code, ncclCommRegister(comm, in[0], 4096, &handle));
  EXPECT(code, ncclCommWindowRegister(comm, in[0], 4096, &handle, 0));
  REFUSED(ncclCommDeregister(comm, (void *)1));
  REFUSED(ncclCommWindowDeregister(comm, (void *)1));
  REFUSED(ncclRedOpDestroy(5, comm));
  TRUE(ncclTeamWorld(comm).nRanks == 0 && ncclTeamLsa(comm).nRanks == 0 && ncclTeamRail(comm).nRanks == 0);
  TRUE(ncclTeamRankToWorld(comm, team, 1) == -1 && ncclTeamRankToLsa(comm, team, 1) == -1);
  EXPECT(USAGE, ncclDevCommCreate(comm, NULL, NULL));
  EXPECT(USAGE, ncclDevCommDestroy(comm, NULL));
  TRUE(ncclGetLastError(comm) != NULL);
}
static void gone(ncclComm_t comm) {
  int number = 0;
  none(comm, ARGUMENT);
  REFUSED(ncclCommCuDevice(comm, &number));
  REFUSED(ncclCommGetAsyncError(comm, &number));
  REFUSED(ncclCommFinalize(comm));
  REFUSED(ncclRedOpCreatePreMulSum(&number, &number, INT, 1, comm));
}

/* Of no communicator: places, numbers, identifiers. */
static void arguments(void) {
  ncclUniqueId id, garbage;
  ncclComm_t comm[N];
  ncclConfig_t config = {0};
  void *mem = NULL;
  int devices[3] = {0, 0, 1};
  ncclTeam_t team = {INT_MAX, INT_MIN, INT_MAX};
  REFUSED(ncclGetVersion(NULL));
  REFUSED(ncclGetUniqueId(NULL));
  CHECK(ncclGetUniqueId(&id));
  memset(&garbage, 0xa5, sizeof garbage);
  REFUSED(ncclCommInitAll(NULL, 2, NULL));
  for (int count = 0; count > -3; count--) REFUSED(ncclCommInitAll(comm, count, NULL));
  TRUE(ncclCommInitAll(comm, INT_MAX, NULL) != 0);
  TRUE(ncclCommInitAll(comm, 3, NULL) != 0);
  devices[0] = -1;
  REFUSED(ncclCommInitAll(comm, 2, devices));
  devices[0] = 77;
  TRUE(ncclCommInitAll(comm, 2, devices) != 0);
  REFUSED(ncclCommInitRank(NULL, 1, id, 0));
  REFUSED(ncclCommInitRank(comm, 1, garbage, 0));
  memset(&garbage, 0, sizeof garbage);
  REFUSED(ncclCommInitRank(comm, 1, garbage, 0));
  int wrong[][2] = {{0, 0}, {-1, 0}, {1, 1}, {2, -1}, {2, 2}, {INT_MIN, INT_MIN}, {INT_MAX, INT_MAX}, {1, INT_MIN}};
  for (unsigned i = 0; i < sizeof wrong / sizeof *wrong; i++) REFUSED(ncclCommInitRank(comm, wrong[i][0], id, wrong[i][1]));
  TRUE(ncclCommInitRank(comm, 1 << 20, id, 3) != 0);
  REFUSED(ncclCommInitRankConfig(comm, 1, id, 0, &config));
  REFUSED(ncclCommInitRankScalable(comm, 1, 0, 0, &id, NULL));
  REFUSED(ncclCommInitRankScalable(comm, 1, 0, -1, &id, NULL));
  REFUSED(ncclCommInitRankScalable(comm, 1, 0, 1, NULL, NULL));
  REFUSED(ncclCommInitRankScalable(NULL, 1, 0, 1, &id, NULL));
  REFUSED(ncclMemAlloc(NULL, 16));
  TRUE(ncclMemAlloc(&mem, SIZE_MAX) != 0);
  CHECK(ncclMemAlloc(&mem, 0));
  TRUE(mem == NULL);
  REFUSED(ncclMemFree((void *)16));
  CHECK(ncclCommDestroy(NULL));
  CHECK(ncclCommAbort(NULL));
  EXPECT(USAGE, ncclGroupEnd());
  EXPECT(USAGE, ncclGroupSimulateEnd(NULL));
  EXPECT(USAGE, ncclLLA2ACreateRequirement(-1, -1, NULL, NULL));
  EXPECT(USAGE, ncclLsaBarrierCreateRequirement(team, -1, NULL, NULL));
  TRUE(ncclLLA2ACalcSlots(INT_MAX, INT_MAX) >= 0 && ncclLLA2ACalcSlots(0, 0) == 0);
  for (int code = -3; code < 20; code++) TRUE(strlen(ncclGetErrorString(code)) > 0);
  TRUE(strlen(ncclGetErrorString(INT_MIN)) > 0 && strlen(ncclGetErrorString(INT_MAX)) > 0);
  ncclResetDebugInit();
  gone(NULL);
  long not_one[64] = {0};
  gone((ncclComm_t)not_one);
  gone((ncclComm_t)((char *)not_one + 1));
}

/* Of a communicator that is there. */
static void calls(ncclComm_t *comm) {
  int op = 0, number = 0, excluded[4] = {1, 1, 7, 0}, factor = 3;
  void *handle = NULL;
  ncclComm_t made = NULL;
  ncclTeam_t team = {INT_MAX, INT_MIN, INT_MAX};
  int types[] = {-1, 12, 13, INT_MAX, INT_MIN}, ops[] = {-1, 5, 6, 77, INT_MAX, INT_MIN}, ranks[] = {-1, N, 77, INT_MAX, INT_MIN};
  size_t counts[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 62, SIZE_MAX / 4 + 1};
#define EVERY(list, one, call) for (unsigned i_ = 0; i_ < sizeof(list) / sizeof *(list); i_++) { one = (list)[i_]; REFUSED(call); }
  on(0);
  int type, root;
  size_t count;
  EVERY(types, type, ncclAllReduce(in[0], out[0], COUNT, type, 0, comm[0], stream[0]));
  EVERY(types, type, ncclAllGather(in[0], out[0], COUNT / 2, type, comm[0], stream[0]));
  EVERY(types, type, ncclSend(in[0], COUNT, type, 1, comm[0], stream[0]));
  EVERY(types, type, ncclRedOpCreatePreMulSum(&op, &factor, type, 1, comm[0]));
  EVERY(ops, op, ncclAllReduce(in[0], out[0], COUNT, INT, op, comm[0], stream[0]));
  EVERY(ops, op, ncclReduce(in[0], out[0], COUNT, INT, op, 0, comm[0], stream[0]));
  EVERY(ops, op, ncclReduceScatter(in[0], out[0], COUNT / 2, INT, op, comm[0], stream[0]));
  EVERY(ops, op, ncclRedOpDestroy(op, comm[0]));
  REFUSED(ncclRedOpDestroy(0, comm[0]));
  EVERY(ranks, root, ncclReduce(in[0], out[0], COUNT, INT, 0, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclBroadcast(in[0], out[0], COUNT, INT, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclBcast(in[0], COUNT, INT, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclGather(in[0], out[0], COUNT / 2, INT, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclScatter(in[0], out[0], COUNT / 2, INT, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclSend(in[0], COUNT, INT, root, comm[0], stream[0]));
  EVERY(ranks, root, ncclRecv(out[0], COUNT, INT, root, comm[0], stream[0]));
  EVERY(counts, count, ncclAllReduce(in[0], out[0], count, INT, 0, comm[0], stream[0]));
  EVERY(counts, count, ncclReduceScatter(in[0], out[0], count, INT, 0, comm[0], stream[0]));
  EVERY(counts, count, ncclAllGather(in[0], out[0], count, INT, comm[0], stream[0]));
  EVERY(counts, count, ncclAlltoAll(in[0], out[0], count, INT, comm[0], stream[0]));
  EVERY(counts, count, ncclGather(in[0], out[0], count, INT, 0, comm[0], stream[0]));
  EVERY(counts, count, ncclScatter(in[0], out[0], count, INT, 0, comm[0], stream[0]));
  EVERY(counts, count, ncclSend(in[0], count, INT, 1, comm[0], stream[0]));
  EVERY(counts, count, ncclRecv(out[0], count, INT, 1, comm[0], stream[0]));
  REFUSED(ncclAllReduce(NULL, out[0], COUNT, INT, 0, comm[0], stream[0]));
  REFUSED(ncclAllReduce(in[0], NULL, COUNT, INT, 0, comm[0], stream[0]));
  REFUSED(ncclAllGather(in[0], NULL, COUNT / 2, INT, comm[0], stream[0]));
  REFUSED(ncclAlltoAll(NULL, out[0], COUNT / 2, INT, comm[0], stream[0]));
  REFUSED(ncclBcast(NULL, COUNT, INT, 0, comm[0], stream[0]));
  REFUSED(ncclSend(NULL, COUNT, INT, 1, comm[0], stream[0]));
  REFUSED(ncclRecv(NULL, COUNT, INT, 1, comm[0], stream[0]));
  REFUSED(ncclCommCount(comm[0], NULL));
  REFUSED(ncclCommCuDevice(comm[0], NULL));
  REFUSED(ncclCommUserRank(comm[0], NULL));
  REFUSED(ncclCommGetAsyncError(comm[0], NULL));
  REFUSED(ncclCommRegister(comm[0], NULL, 16, &handle));
  REFUSED(ncclCommRegister(comm[0], in[0], 0, &handle));
  REFUSED(ncclCommRegister(comm[0], in[0], 16, NULL));
  REFUSED(ncclCommWindowRegister(comm[0], NULL, 16, &handle, 0));
  REFUSED(ncclCommWindowRegister(comm[0], in[0], 16, NULL, 0));
  REFUSED(ncclCommDeregister(comm[0], (void *)-1));
  REFUSED(ncclCommWindowDeregister(comm[0], in[0]));
  /* Nonsense that is accepted as a hint must change nothing. */
  if (ncclCommRegister(comm[0], (void *)4096, SIZE_MAX, &handle) == 0) CHECK(ncclCommDeregister(comm[0], handle));
  REFUSED(ncclRedOpCreatePreMulSum(NULL, &factor, INT, 1, comm[0]));
  REFUSED(ncclRedOpCreatePreMulSum(&op, NULL, INT, 1, comm[0]));
  REFUSED(ncclRedOpCreatePreMulSum(&op, &factor, INT, 2, comm[0]));
  REFUSED(ncclRedOpCreatePreMulSum(&op, &factor, INT, -1, comm[0]));
  REFUSED(ncclCommSplit(comm[0], -2, 0, &made, NULL));
  REFUSED(ncclCommSplit(comm[0], INT_MIN, 0, &made, NULL));
  REFUSED(ncclCommSplit(comm[0], 0, 0, NULL, NULL));
  REFUSED(ncclCommShrink(comm[0], excluded, 1, NULL, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], NULL, 1, &made, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], excluded, 0, &made, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], excluded, -1, &made, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], excluded, 3, &made, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], excluded + 3, 1, &made, NULL, 1));
  REFUSED(ncclCommShrink(comm[0], excluded, 1, &made, NULL, 2));
  TRUE(ncclTeamRankToWorld(comm[0], team, INT_MAX) == -1 && ncclTeamRankToLsa(comm[0], team, 0) == -1);
  CHECK(ncclCommGetAsyncError(comm[0], &number));
  TRUE(number == 0);
  works(comm, 1);
}

/* A call that is refused refuses its whole group: nobody is left alone in what the others have queued. */
static void groups(ncclComm_t *comm) {
  ncclUniqueId id;
  ncclComm_t made[N];
  int state = 0, back[COUNT];
  for (int wrong = 0; wrong < 3; wrong++) {
    CHECK(ncclGroupStart());
    CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm[0], stream[0]));
    REFUSED(wrong == 0 ? ncclAllReduce(NULL, out[1], COUNT, INT, 0, comm[1], stream[1])
          : wrong == 1 ? ncclAllReduce(in[1], out[1], COUNT, 99, 0, comm[1], stream[1]) : ncclAllReduce(in[1], out[1], COUNT, INT, 0, NULL, stream[1]));
    REFUSED(ncclGroupEnd());
    on(0);
    CHECK(cuStreamSynchronize(stream[0]));
    CHECK(ncclCommGetAsyncError(comm[0], &state));
    TRUE(state == 0);
    works(comm, 10 + wrong);
  }
  /* Ranks that come together in a group of which one is refused. */
  CHECK(ncclGetUniqueId(&id));
  CHECK(ncclGroupStart());
  on(0);
  CHECK(ncclCommInitRank(&made[0], N, id, 0));
  REFUSED(ncclCommInitRank(&made[1], N, id, N));
  REFUSED(ncclGroupEnd());
  EXPECT(ARGUMENT, ncclCommCount(made[0], &state));
  CHECK(ncclCommDestroy(made[0]));
  /* Simulated: no rank comes of it. */
  CHECK(ncclGroupStart());
  CHECK(ncclCommInitRank(&made[0], N, id, 0));
  CHECK(ncclGroupSimulateEnd(NULL));
  CHECK(ncclCommGetAsyncError(made[0], &state));
  TRUE(state == USAGE);
  CHECK(ncclCommDestroy(made[0]));
  /* Deep, and ended too often. */
  for (int i = 0; i < 5000; i++) CHECK(ncclGroupStart());
  CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm[0], stream[0]));
  CHECK(ncclAllReduce(in[1], out[1], COUNT, INT, 0, comm[1], stream[1]));
  for (int i = 0; i < 5000; i++) CHECK(ncclGroupEnd());
  for (int i = 0; i < 3; i++) EXPECT(USAGE, ncclGroupEnd());
  on(1);
  CHECK(cuStreamSynchronize(stream[1]));
  CHECK(cuMemcpyDtoHAsync_v2(back, out[1], sizeof back, stream[1]));
  works(comm, 20);
}

/* A thread ends with its group open: what it had noted is gone with it. */
static void *leaves_open(void *comm) {
  on(0);
  CHECK(ncclGroupStart());
  CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, comm, stream[0]));
  return NULL;
}

/* A communicator ends while its call waits in an open group. */
static void ended_in_a_group(int abort) {
  ncclComm_t comm[N];
  CHECK(ncclCommInitAll(comm, N, NULL));
  CHECK(ncclGroupStart());
  for (int r = 0; r < N; r++) CHECK(ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], stream[r]));
  for (int r = 0; r < N; r++) CHECK(abort ? ncclCommAbort(comm[r]) : ncclCommDestroy(comm[r]));
  TRUE(ncclGroupEnd() != 0);
  for (int r = 0; r < N; r++) { on(r); CHECK(cuStreamSynchronize(stream[r])); gone(comm[r]); }
}

/* Ranks that have other ideas of how many they are, or which one they are. */
struct join { pthread_t thread; ncclUniqueId id; int ranks, rank, device, code; ncclComm_t comm; };
static void *join(void *argument) {
  struct join *one = argument;
  on(one->device);
  one->code = ncclCommInitRank(&one->comm, one->ranks, one->id, one->rank);
  return NULL;
}
static void other_sizes(void) {
  enum { SETS = 4 };
  int sets[SETS][4] = {{2, 0, 3, 1}, {3, 0, 2, 1}, {2, 1, 2, 1}, {2, 0, 2, 0}};
  static struct join one[SETS][N];
  for (int i = 0; i < SETS; i++) {
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id));
    for (int r = 0; r < N; r++) {
      one[i][r] = (struct join){.id = id, .ranks = sets[i][2 * r], .rank = sets[i][2 * r + 1], .device = r};
      TRUE(!pthread_create(&one[i][r].thread, NULL, join, &one[i][r]));
    }
  }
  for (int i = 0; i < SETS; i++)
    for (int r = 0; r < N; r++) {
      TRUE(!pthread_join(one[i][r].thread, NULL));
      TRUE(one[i][r].code == ARGUMENT || one[i][r].code == REMOTE);
      if (one[i][r].comm) CHECK(ncclCommDestroy(one[i][r].comm));
    }
}

/* Threads that queue calls without end, until one of them, or another thread, ends the communicators. */
static ncclComm_t aborted[N];
static volatile int queued;
static void *queues(void *argument) {
  int r = (int)(intptr_t)argument, code = 0;
  on(r);
  for (int i = 0; i < 100000 && code == 0; i++) {
    code = ncclAllReduce(in[r], out[r], 64, INT, 0, aborted[r], stream[r]);
    if (r == 0) queued++;
    if (i % 64 == 0) cuStreamSynchronize(stream[r]);
  }
  return (void *)(intptr_t)code;
}
static void abort_beside_calls(void) {
  for (int turn = 0; turn < 6; turn++) {
    pthread_t thread[N];
    queued = 0;
    CHECK(ncclCommInitAll(aborted, N, NULL));
    for (int r = 0; r < N; r++) TRUE(!pthread_create(&thread[r], NULL, queues, (void *)(intptr_t)r));
    while (queued < 20 + turn * 30) usleep(100);
    for (int r = 0; r < N; r++) CHECK(ncclCommAbort(aborted[r]));
    for (int r = 0; r < N; r++) {
      void *code = NULL;
      TRUE(!pthread_join(thread[r], &code));
      TRUE(code != NULL);
      on(r);
      CHECK(cuStreamSynchronize(stream[r]));
    }
  }
}

/* A process that was forked has no communicators that work; it can ask, fail and end, and its parent goes on. */
static void forked(ncclComm_t *comm) {
  for (int way = 0; way < 3; way++) {
    fflush(stdout);
    pid_t child = fork();
    TRUE(child >= 0);
    if (child == 0) {
      int number = 0;
      alarm(120);
      if (ncclGetVersion(&number) || ncclCommCount(comm[0], &number) || number != N) _exit(3);
      for (int r = 0; r < N; r++) {
        ncclComm_t made;
        if (ncclAllReduce(in[r], out[r], COUNT, INT, 0, comm[r], stream[r]) != ARGUMENT) _exit(4);
        if (!strstr(ncclGetLastError(comm[r]), "forked") || ncclCommSplit(comm[r], 0, 0, &made, NULL) == 0) _exit(5);
        if (way == 1) ncclCommAbort(comm[r]);
        if (way == 2) ncclCommDestroy(comm[r]);
      }
      if (way == 2) exit(0);
      _exit(0);
    }
    int status = 0;
    TRUE(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fail("the child", status, __LINE__);
    works(comm, 30 + way);
  }
}

/* As programs do it: the identifier is made, the processes are forked, and each joins with a device. */
static void forked_first(void) {
  ncclUniqueId id;
  pid_t child[N];
  CHECK(ncclGetUniqueId(&id));
  fflush(stdout);
  for (int r = 0; r < N; r++) {
    child[r] = fork();
    TRUE(child[r] >= 0);
    if (child[r]) continue;
    ncclComm_t comm;
    int host[COUNT], code;
    alarm(300);
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context[r], r)) _exit(3);
    on(r);
    CHECK(cuStreamCreate(&stream[r], 1));
    CHECK(cuMemAlloc_v2(&in[r], sizeof host));
    for (int i = 0; i < COUNT; i++) host[i] = r + i;
    CHECK(ncclCommInitRank(&comm, N, id, r));
    CHECK(cuMemcpyHtoDAsync_v2(in[r], host, sizeof host, stream[r]));
    CHECK(ncclAllReduce(in[r], in[r], COUNT, INT, 0, comm, stream[r]));
    CHECK(cuMemcpyDtoHAsync_v2(host, in[r], sizeof host, stream[r]));
    CHECK(cuStreamSynchronize(stream[r]));
    for (int i = 0; i < COUNT; i++) TRUE(host[i] == 2 * i + 1);
    code = ncclCommDestroy(comm);
    _exit(code);
  }
  for (int r = 0; r < N; r++) {
    int status = 0;
    TRUE(waitpid(child[r], &status, 0) == child[r]);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fail("a rank in a child", status, __LINE__);
  }
}

static void many(void) {
  static ncclComm_t comm[64][N];
  const char *path = getenv("BEELINE_COMM_PATH");
  /* Windows of kernels are large. */
  int many = path && !strcmp(path, "staged") ? 64 : 16;
  for (int i = 0; i < many; i++) CHECK(ncclCommInitAll(comm[i], N, NULL));
  for (int i = 0; i < many; i++) works(comm[i], 100 + i);
  for (int i = 0; i < many; i++) for (int r = 0; r < N; r++) CHECK(i % 2 ? ncclCommDestroy(comm[i][r]) : ncclCommAbort(comm[i][r]));
  int files = 0, threads = 0;
  for (int i = 0; i < 20; i++) {
    ncclComm_t one[N];
    CHECK(ncclCommInitAll(one, N, NULL));
    for (int r = 0; r < N; r++) CHECK(ncclCommDestroy(one[r]));
    if (i == 7) files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  }
  usleep(200000);
  TRUE(entries("/proc/self/fd") <= files + 4);
  TRUE(entries("/proc/self/task") <= threads + 4);
}

/* The library named by the program's first argument, loaded a second time, and let go of with a communicator in it. */
static void unloaded(const char *path) {
  for (int i = 0; i < 3; i++) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TRUE(library != NULL);
    int (*init)(ncclComm_t *, int, const int *) = dlsym(library, "ncclCommInitAll");
    int (*end)(ncclComm_t) = dlsym(library, "ncclCommDestroy");
    TRUE(init && end);
    ncclComm_t comm[N];
    CHECK(init(comm, N, NULL));
    if (i != 1) for (int r = 0; r < N; r++) CHECK(end(comm[r]));
    TRUE(!dlclose(library));
  }
}

int main(int count, char **arguments_) {
  ncclComm_t comm[N], other[N];
  pthread_t thread;
  alarm(900);
  /* Before the driver is there, and before any context is current. */
  gone(NULL);
  forked_first();
  CHECK(cuInit(0));
  for (int r = 0; r < N; r++) {
    CHECK(cuDevicePrimaryCtxRetain(&context[r], r));
    on(r);
    CHECK(cuStreamCreate(&stream[r], 1));
    CHECK(cuMemAlloc_v2(&in[r], COUNT * sizeof(int)));
    CHECK(cuMemAlloc_v2(&out[r], COUNT * sizeof(int)));
  }
  CHECK(cuCtxSetCurrent(NULL));
  { void *mem; ncclUniqueId id; int code = ncclMemAlloc(&mem, 16); if (!code) CHECK(ncclMemFree(mem)); CHECK(ncclGetUniqueId(&id)); }
  on(0);
#define PART(call) do { double began_ = now(); call; fprintf(stderr, "%-40s %.2f s\n", #call, now() - began_); } while (0)
  PART(arguments());
  CHECK(ncclCommInitAll(comm, N, NULL));
  PART(calls(comm));
  PART(groups(comm));
  TRUE(!pthread_create(&thread, NULL, leaves_open, comm[0]));
  TRUE(!pthread_join(thread, NULL));
  works(comm, 25);
  PART(ended_in_a_group(0));
  PART(ended_in_a_group(1));
  PART(other_sizes());
  PART(abort_beside_calls());
  PART(forked(comm));
  PART(many());
  if (count > 1) PART(unloaded(arguments_[1]));
  works(comm, 40);
  for (int r = 0; r < N; r++) CHECK(ncclCommFinalize(comm[r]));
  for (int r = 0; r < N; r++) { int state = 9; none(comm[r], ARGUMENT); CHECK(ncclCommGetAsyncError(comm[r], &state)); CHECK(ncclCommDestroy(comm[r])); gone(comm[r]); }
  for (int r = 0; r < N; r++) { REFUSED(ncclCommDestroy(comm[r])); REFUSED(ncclCommAbort(comm[r])); }
  /* The program ends with a group open, and with a call that waits for a rank that never comes. */
  CHECK(ncclCommInitAll(other, N, NULL));
  on(0);
  CHECK(ncclAllReduce(in[0], out[0], COUNT, INT, 0, other[0], stream[0]));
  CHECK(ncclGroupStart());
  CHECK(ncclAllReduce(in[1], out[1], COUNT, INT, 0, other[1], stream[1]));
  puts("passed");
  return 0;
}
