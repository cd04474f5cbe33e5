/*
 * A queue pair of libibverbs that does what it is told, line by line, over TCP: the kernel's side of the
 * interoperability tests. The other side, and the driver, is crates/beeline/examples/verbs_agent.
 *
 *   verbs_agent IBDEV LOCAL_ADDRESS PORT
 *
 * A request is a line of words, the answer a line that begins with "ok", "bad", "wc", "none" or "err".
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static uint8_t *mem;
static union ibv_gid gid;
static int gid_index = -1;
static const char *local;

/* An IPv4 address as a GID is mapped into IPv6. */
static int to_gid(const char *text, union ibv_gid *out)
{
	memset(out, 0, sizeof *out);
	if (strchr(text, ':'))
		return inet_pton(AF_INET6, text, out->raw) == 1;
	out->raw[10] = out->raw[11] = 0xff;
	return inet_pton(AF_INET, text, out->raw + 12) == 1;
}

static uint8_t pattern(uint64_t i, unsigned seed)
{
	return (uint8_t)(i * 31 + (i >> 8)) ^ (uint8_t)seed;
}

static void drop(void)
{
	if (qp)
		ibv_destroy_qp(qp);
	if (cq)
		ibv_destroy_cq(cq);
	if (mr)
		ibv_dereg_mr(mr);
	if (pd)
		ibv_dealloc_pd(pd);
	free(mem);
	qp = NULL, cq = NULL, mr = NULL, pd = NULL, mem = NULL;
}

/* new BYTES MR_ACCESS QP_ACCESS: a fresh queue pair in INIT with one region. */
static void cmd_new(FILE *out, size_t bytes, int mr_access, int qp_access)
{
	drop();
	if (posix_memalign((void **)&mem, 4096, bytes))
		goto fail;
	memset(mem, 0, bytes);
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 512, NULL, NULL, 0);
	mr = pd ? ibv_reg_mr(pd, mem, bytes, mr_access) : NULL;
	if (!pd || !cq || !mr)
		goto fail;
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 128, .max_recv_wr = 128, .max_send_sge = 2,
			 .max_recv_sge = 2, .max_inline_data = 64 },
	};
	qp = ibv_create_qp(pd, &init);
	if (!qp)
		goto fail;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = qp_access };
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			  IBV_QP_ACCESS_FLAGS))
		goto fail;
	struct ibv_port_attr port;
	ibv_query_port(ctx, 1, &port);
	fprintf(out, "ok qpn=%u psn=%u addr=%s mtu=%u va=%" PRIu64 " len=%zu rkey=%u\n",
		qp->qp_num, 0xfffff0u, local, 128u << port.active_mtu, (uint64_t)(uintptr_t)mem,
		bytes, mr->rkey);
	return;
fail:
	fprintf(out, "err new: %s\n", strerror(errno));
}

/* connect QPN PSN ADDR MTU TIMEOUT RETRY RNR RD_ATOMIC */
static void cmd_connect(FILE *out, char **w)
{
	unsigned mtu = atoi(w[4]);
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu == 256 ? 1 : mtu == 512 ? 2 : mtu == 1024 ? 3 : mtu == 2048 ? 4 : 5,
		.dest_qp_num = atoi(w[1]), .rq_psn = atoi(w[2]),
		.max_dest_rd_atomic = atoi(w[8]), .min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .sgid_index = gid_index, .hop_limit = 64 } },
	};
	to_gid(w[3], &attr.ah_attr.grh.dgid);
	int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
				  IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				  IBV_QP_MIN_RNR_TIMER);
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = atoi(w[5]),
				   .retry_cnt = atoi(w[6]), .rnr_retry = atoi(w[7]),
				   .sq_psn = 0xfffff0, .max_rd_atomic = atoi(w[8]) };
	if (!error)
		error = ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
	fprintf(out, error ? "err connect: %s\n" : "ok\n", strerror(error));
}

/* KIND ID OFFSET LEN VA RKEY IMM(-1: none) A B, for every send work request */
static void cmd_post(FILE *out, char **w)
{
	static const struct { const char *name; enum ibv_wr_opcode plain, imm; } ops[] = {
		{ "send", IBV_WR_SEND, IBV_WR_SEND_WITH_IMM },
		{ "write", IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM },
		{ "read", IBV_WR_RDMA_READ, IBV_WR_RDMA_READ },
		{ "cas", IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP },
		{ "fadd", IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD },
	};
	struct ibv_sge sge = { .addr = (uintptr_t)mem + strtoull(w[2], 0, 0),
			       .length = strtoul(w[3], 0, 0), .lkey = mr->lkey };
	long long imm = atoll(w[6]);
	struct ibv_send_wr wr = { .wr_id = strtoull(w[1], 0, 0), .sg_list = &sge, .num_sge = 1,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
		if (!strcmp(w[0], ops[i].name))
			wr.opcode = imm < 0 ? ops[i].plain : ops[i].imm;
	wr.imm_data = htonl((uint32_t)imm);
	uint64_t va = strtoull(w[4], 0, 0);
	uint32_t rkey = strtoul(w[5], 0, 0);
	if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = va;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = strtoull(w[7], 0, 0);
		wr.wr.atomic.swap = strtoull(w[8], 0, 0);
	} else {
		wr.wr.rdma.remote_addr = va;
		wr.wr.rdma.rkey = rkey;
	}
	int error = ibv_post_send(qp, &wr, &bad);
	fprintf(out, error ? "err post: %s\n" : "ok\n", strerror(error));
}

static void cmd_recv(FILE *out, char **w)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem + strtoull(w[2], 0, 0),
			       .length = strtoul(w[3], 0, 0), .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = strtoull(w[1], 0, 0), .sg_list = &sge, .num_sge = 1 },
			   *bad;
	int error = ibv_post_recv(qp, &wr, &bad);
	fprintf(out, error ? "err recv: %s\n" : "ok\n", strerror(error));
}

/* poll MILLISECONDS: the next completion */
static void cmd_poll(FILE *out, long ms)
{
	struct timespec start, now;
	struct ibv_wc wc;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		int count = ibv_poll_cq(cq, 1, &wc);
		if (count > 0) {
			/* rxe sets the immediate flag on the sender's completion too */
			int is_recv = wc.status == 0 && (wc.opcode & IBV_WC_RECV);
			int has_imm = is_recv && (wc.wc_flags & IBV_WC_WITH_IMM);
			fprintf(out, "wc %" PRIu64 " %d %u %lld\n", wc.wr_id, wc.status,
				is_recv ? wc.byte_len : 0,
				has_imm ? (long long)ntohl(wc.imm_data) : -1);
			return;
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < ms);
	fprintf(out, "none\n");
}

static void cmd_check(FILE *out, uint64_t offset, uint64_t len, unsigned seed)
{
	uint64_t first = len, last = 0, count = 0;
	for (uint64_t i = 0; i < len; i++)
		if (mem[offset + i] != pattern(i, seed)) {
			first = count++ ? first : i;
			last = i;
		}
	if (count)
		fprintf(out, "bad byte %" PRIu64 ": %u for %u, %" PRIu64 " bad up to %" PRIu64 "\n",
			first, mem[offset + first], pattern(first, seed), count, last);
	else
		fprintf(out, "ok\n");
}

static int is(const char *word, const char *name) { return !strcmp(word, name); }

static int serve_line(FILE *out, char *line)
{
	char *w[16] = { 0 };
	int n = 0;
	for (char *s = strtok(line, " \n"); s && n < 15; s = strtok(NULL, " \n"))
		w[n++] = s;
	for (int i = n; i < 15; i++)
		w[i] = "0";
	if (is(w[0], "quit"))
		return 0;
	else if (is(w[0], "new"))
		cmd_new(out, strtoull(w[1], 0, 0), atoi(w[2]), atoi(w[3]));
	else if (is(w[0], "connect"))
		cmd_connect(out, w);
	else if (is(w[0], "recv"))
		cmd_recv(out, w);
	else if (is(w[0], "poll"))
		cmd_poll(out, atol(w[1]));
	else if (is(w[0], "check"))
		cmd_check(out, strtoull(w[1], 0, 0), strtoull(w[2], 0, 0), atoi(w[3]));
	else if (is(w[0], "fill")) {
		uint64_t offset = strtoull(w[1], 0, 0), len = strtoull(w[2], 0, 0);
		for (uint64_t i = 0; i < len; i++)
			mem[offset + i] = pattern(i, atoi(w[3]));
		fprintf(out, "ok\n");
	} else if (is(w[0], "zero")) {
		memset(mem + strtoull(w[1], 0, 0), 0, strtoull(w[2], 0, 0));
		fprintf(out, "ok\n");
	} else if (is(w[0], "word")) {
		uint64_t value;
		memcpy(&value, mem + strtoull(w[1], 0, 0), 8);
		fprintf(out, "ok %" PRIu64 "\n", value);
	} else if (is(w[0], "setword")) {
		uint64_t value = strtoull(w[2], 0, 0);
		memcpy(mem + strtoull(w[1], 0, 0), &value, 8);
		fprintf(out, "ok\n");
	} else if (is(w[0], "state")) {
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
		fprintf(out, "ok %s\n", attr.qp_state == IBV_QPS_ERR ? "ERR" :
			attr.qp_state == IBV_QPS_RTS ? "RTS" : "other");
	} else
		cmd_post(out, w);
	fflush(out);
	return 1;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	local = argv[2];
	struct ibv_device **list = ibv_get_device_list(NULL);
	for (int i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
			ctx = ibv_open_device(list[i]);
	if (!ctx || !to_gid(local, &gid)) {
		fprintf(stderr, "verbs_agent: no device %s or bad address\n", argv[1]);
		return 1;
	}
	for (int i = 0; i < 16 && gid_index < 0; i++) {
		union ibv_gid entry;
		if (!ibv_query_gid(ctx, 1, i, &entry) && !memcmp(&entry, &gid, sizeof gid))
			gid_index = i;
	}
	if (gid_index < 0) {
		fprintf(stderr, "verbs_agent: %s is in no GID of %s\n", local, argv[1]);
		return 1;
	}
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM }, *info;
	if (getaddrinfo(local, argv[3], &hints, &info))
		return 1;
	int one = 1, listener = socket(info->ai_family, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, info->ai_addr, info->ai_addrlen) || listen(listener, 1)) {
		perror("verbs_agent: listen");
		return 1;
	}
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		if (fd < 0)
			return 1;
		FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
		char line[512];
		while (fgets(line, sizeof line, in) && serve_line(out, line))
			;
		drop();
		fclose(in);
		fclose(out);
	}
}
