# The suite of verbs over NICs of the kernel's, through libibverbs: rdma_rxe with rdma_rxe, and with the
# software NIC. Arguments: pairwise | full.
#
# rxe0 and rxe1 are a veth pair in two network namespaces. rxe takes port 4791 on every address of its
# namespace, so the software NIC has a third, with a veth pair and an rxe of its own at the other end.
load net
load rdma
load udmabuf
rxe_pair
ip netns add soft
ip link add veth2 mtu 9000 type veth peer name veth3 mtu 9000
ip link set veth3 netns soft
ip addr add 10.9.1.1/24 dev veth2
ip link set veth2 up
ip netns exec soft /usr/bin/ip addr add 10.9.1.2/24 dev veth3
ip netns exec soft /usr/bin/ip link set veth3 up
ip netns exec soft /usr/bin/ip link set lo up
rdma link add rxe2 type rxe netdev veth2
sleep 1

# Every device is seen from every namespace (`rdma system`: netns shared).
suite() {
  echo "pairs: $1"
  BEELINE_VERBS_NICS=$1 timeout 240 $2 verbs_suite --test-threads 1 --nocapture kernel > /tmp/out 2>&1
  code=$?
  grep -E '^(pair|rxe|SKIP|test )' /tmp/out
  [ $code = 0 ] || { status=1; tail -40 /tmp/out; }
}
suite rxe0,rxe1
suite rxe2,10.9.1.2 "/usr/bin/ip netns exec soft"

# The command: what it lists, and one side that chooses while the other is told.
command() {
  echo "beeline $*"
  beeline "$@" > /tmp/out 2>&1 || { status=1; cat /tmp/out /tmp/serve; }
  grep -E '^ ?(rxe|link|port|registered|compared)' /tmp/out
}
command devices
grep -q 'rxe2 .*ACTIVE .*soft RoCE' /tmp/out || { status=1; cat /tmp/out; }
ip netns exec peer beeline rdma serve --nic rxe1 --bind 10.9.0.4 --count 4 > /tmp/serve 2>&1 &
sleep 1
command rdma bw 10.9.0.4 --nic auto -n 20 --size 64K
command rdma ping 10.9.0.4 --nic rxe0 -n 20
command rdma read 10.9.0.4 --nic rxe0:1 -n 20
beeline rdma read 10.9.0.4 --nic none9 > /tmp/out 2>&1 && status=1
grep -q 'no RDMA device none9: there are rxe0, rxe1, rxe2' /tmp/out || { status=1; cat /tmp/out; }
