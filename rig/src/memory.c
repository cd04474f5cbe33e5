/* Registers every kind of memory with a soft RoCE device in every way, and writes into what was accepted.
 *
 *   rxe_memory DEVICE GID_INDEX [P2PMEM_ALLOCATE]
 *
 * One line for each: kind, way, path MTU, the answer (registered, or the error number), and whether the
 * bytes of an RDMA WRITE over the loopback arrived.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BYTES 65536

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static int gid_index;
static unsigned char *source;
static struct ibv_mr *source_mr;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static struct ibv_qp *make_qp(struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    return ibv_create_qp(pd, &init);
}

static int connect_qp(struct ibv_qp *qp, unsigned peer, enum ibv_mtu mtu) {
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 7};
    if (ibv_modify_qp(qp, &init,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        return -1;
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu,
        .dest_qp_num = peer,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.sgid_index = gid_index, .hop_limit = 64, .dgid = gid}},
    };
    if (ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return -1;
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
                              .timeout = 14,
                              .retry_cnt = 3,
                              .rnr_retry = 3,
                              .max_rd_atomic = 1};
    return ibv_modify_qp(qp, &rts,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Writes into the region from elsewhere; answers how the bytes arrived. */
static const char *try_write(struct ibv_mr *mr, enum ibv_mtu mtu) {
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_qp *a = make_qp(cq), *b = make_qp(cq);
    const char *answer = "not-tried";
    if (!a || !b || connect_qp(a, b->qp_num, mtu) || connect_qp(b, a->qp_num, mtu))
        goto out;
    for (size_t i = 0; i < BYTES; i++)
        source[i] = rand();
    struct ibv_sge sge = {(uintptr_t)source, BYTES, source_mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {(uintptr_t)mr->addr, mr->rkey}},
                       *bad;
    if (ibv_post_send(a, &wr, &bad))
        goto out;
    struct ibv_wc wc = {0};
    int got = 0;
    for (double start = now(); !got && now() - start < 20;)
        got = ibv_poll_cq(cq, 1, &wc);
    if (!got)
        answer = "timeout";
    else if (wc.status != IBV_WC_SUCCESS)
        answer = "refused";
    else
        answer = memcmp(source, mr->addr, BYTES) ? "wrong" : "equal";
out:
    if (a)
        ibv_destroy_qp(a);
    if (b)
        ibv_destroy_qp(b);
    ibv_destroy_cq(cq);
    return answer;
}

static void try_way(const char *kind, void *memory, int on_demand) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    const char *way = on_demand ? "on-demand" : "pinned";
    if (memory == MAP_FAILED) {
        printf("memory kind=%s way=%s mtu=0 answer=no-memory data=none\n", kind, way);
        return;
    }
    for (int big = 0; big < 2; big++) {
        int mtu = big ? 4096 : 1024;
        errno = 0;
        struct ibv_mr *mr =
            ibv_reg_mr(pd, memory, BYTES, access | (on_demand ? IBV_ACCESS_ON_DEMAND : 0));
        if (!mr) {
            printf("memory kind=%s way=%s mtu=%d answer=errno-%d data=none\n", kind, way, mtu, errno);
            continue;
        }
        const char *data = try_write(mr, big ? IBV_MTU_4096 : IBV_MTU_1024);
        printf("memory kind=%s way=%s mtu=%d answer=registered data=%s\n", kind, way, mtu, data);
        ibv_dereg_mr(mr);
    }
    fflush(stdout);
}

static void try_ways(const char *kind, void *memory) {
    try_way(kind, memory, 0);
    try_way(kind, memory, 1);
}

static void try_dma_buf(const char *kind, int fd) {
    errno = 0;
    struct ibv_mr *mr =
        ibv_reg_dmabuf_mr(pd, 0, BYTES, 0, fd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (mr) {
        printf("memory kind=%s way=dma-buf mtu=0 answer=registered data=none\n", kind);
        ibv_dereg_mr(mr);
    } else {
        printf("memory kind=%s way=dma-buf mtu=0 answer=errno-%d data=none\n", kind, errno);
    }
}

static void *map(int fd, int flags) {
    return mmap(NULL, BYTES, PROT_READ | PROT_WRITE, flags, fd, 0);
}

int main(int argc, char **argv) {
    int count = 0;
    struct ibv_device **list = argc > 2 ? ibv_get_device_list(&count) : NULL;
    for (int i = 0; i < count; i++)
        if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
            context = ibv_open_device(list[i]);
    pd = context ? ibv_alloc_pd(context) : NULL;
    if (!pd) {
        fprintf(stderr, "usage: rxe_memory DEVICE GID_INDEX [P2PMEM_ALLOCATE]\n");
        return 2;
    }
    gid_index = atoi(argv[2]);
    ibv_query_gid(context, 1, gid_index, &gid);
    source = aligned_alloc(4096, BYTES);
    source_mr = ibv_reg_mr(pd, source, BYTES, IBV_ACCESS_LOCAL_WRITE);

    try_ways("ram", map(-1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE));
    int file = memfd_create("memory", MFD_ALLOW_SEALING);
    if (ftruncate(file, BYTES) == 0)
        try_ways("memory-file", map(file, MAP_SHARED));
    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK);
    int device = open("/dev/udmabuf", O_RDWR);
    struct udmabuf_create create = {.memfd = file, .offset = 0, .size = BYTES};
    int buf = device < 0 ? -1 : ioctl(device, UDMABUF_CREATE, &create);
    if (buf >= 0) {
        try_ways("udmabuf", map(buf, MAP_SHARED));
        try_dma_buf("udmabuf", buf);
    } else {
        printf("memory kind=udmabuf way=none mtu=0 answer=no-memory data=none\n");
    }
    int p2p = argc > 3 ? open(argv[3], O_RDWR) : -1;
    if (p2p >= 0)
        try_ways("controller-memory", map(p2p, MAP_SHARED));
    else
        printf("memory kind=controller-memory way=none mtu=0 answer=no-memory data=none\n");
    return 0;
}
