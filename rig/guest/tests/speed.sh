# How fast things are inside the guest: rdma_rxe against rdma_rxe over a veth pair (perftest), and the
# benchmark of the software NIC, with its bare sockets and TCP, on the guest's loopback. Everything runs
# in software emulation: the figures are for comparison with each other only.
load net
load rdma
ip link set lo up
ip netns add peer
ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
ip link set veth1 netns peer
ip addr add 10.9.0.1/24 dev veth0
ip link set veth0 up
ip netns exec peer /usr/bin/ip addr add 10.9.0.4/24 dev veth1
ip netns exec peer /usr/bin/ip link set veth1 up
ip netns exec peer /usr/bin/ip link set lo up
rdma link add rxe0 type rxe netdev veth0
ip netns exec peer rdma link add rxe1 type rxe netdev veth1
sleep 1

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
verbs_bench --runs 1 --seconds 2 || status=1
