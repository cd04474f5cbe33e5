# How fast things are inside the guest: rdma_rxe against rdma_rxe over a veth pair (perftest), and the
# benchmark of the software NIC, with its bare sockets and TCP, on the guest's loopback. Everything runs
# in software emulation: the figures are for comparison with each other only.
load net
load rdma
rxe_pair

# PROGRAM ARGUMENTS: as server there, as client here; the client's line of figures.
perftest() {
  program=$1
  shift
  ip netns exec peer "$program" -d rxe1 -x 1 -m 4096 "$@" > /tmp/server 2>&1 &
  sleep 1
  timeout 120 "$program" -d rxe0 -x 1 -m 4096 "$@" 10.9.0.4 > /tmp/client 2>&1 || {
    status=1
    cat /tmp/server /tmp/client
  }
  echo "rxe to rxe: $program $*"
  grep -A1 '#bytes' /tmp/client
  wait
}
perftest ib_write_bw -s 1048576 -n 100 -t 8
perftest ib_write_lat -s 8 -n 2000
# In a third namespace: rxe takes port 4791 on every address of its own.
ip netns add plain
ip netns exec plain /usr/bin/ip link set lo up
ip netns exec plain verbs_bench --runs 1 --seconds 2 || status=1
