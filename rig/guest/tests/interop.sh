# The software NIC against the kernel's rdma_rxe. Arguments: pairwise | full.
#
# rxe0 is on veth0 in the first network namespace, the software NIC on veth1 in the second: rxe takes
# port 4791 on every address of its namespace.
load net
load rdma
tc() { /usr/bin/tc "$@"; }
what=${1:-pairwise}
ip link set lo up
ip netns add peer
ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
ip link set veth1 netns peer
# No offload may change a packet that the check covers, or hold it back.
ip addr add 10.9.0.1/24 dev veth0
ip addr add fd00::1/64 dev veth0 nodad
ip link set veth0 up
ip netns exec peer /usr/bin/ip addr add 10.9.0.2/24 dev veth1
ip netns exec peer /usr/bin/ip addr add 10.9.0.3/24 dev veth1
ip netns exec peer /usr/bin/ip addr add 10.9.0.4/24 dev veth1
ip netns exec peer /usr/bin/ip addr add fd00::2/64 dev veth1 nodad
ip netns exec peer /usr/bin/ip link set veth1 up
ip netns exec peer /usr/bin/ip link set lo up
rdma link add rxe0 type rxe netdev veth0
sleep 1

in_peer() { ip netns exec peer "$@"; }
# The kernel's agents: one for each family, and a second one that talks to the first.
rxe_verbs_agent rxe0 10.9.0.1 7000 &
rxe_verbs_agent rxe0 10.9.0.1 7001 &
rxe_verbs_agent rxe0 fd00::1 7000 &
in_peer verbs_agent serve 10.9.0.2 7000 raw > /tmp/soft4.log 2>&1 &
in_peer verbs_agent serve 10.9.0.3 7000 udp > /tmp/soft4b.log 2>&1 &
# Several packets at a time to the kernel, which cuts them: over IPv4 rxe's check covers what it makes of
# their identification. Over IPv6 soft6 does so unasked.
in_peer verbs_agent serve 10.9.0.4 7000 raw pieces > /tmp/soft4c.log 2>&1 &
in_peer verbs_agent serve fd00::2 7000 > /tmp/soft6.log 2>&1 &

rxe4=10.9.0.1:7000
rxe4b=10.9.0.1:7001
rxe6=[fd00::1]:7000
soft4=10.9.0.2:7000
soft4b=10.9.0.3:7000
soft4c=10.9.0.4:7000
soft6=[fd00::2]:7000

run() {
  echo "$*"
  verbs_agent drive "$@" > /tmp/out 2>&1
  code=$?
  grep -v '^  mtu' /tmp/out
  [ $code = 0 ] || { status=1; tail -2 /tmp/soft4.log /tmp/soft6.log; }
}

# Statuses of refused requests: the kernel against itself is the reference.
same() {
  option=$1 reference=$2
  shift 2
  expected=$(verbs_agent drive $reference $option 2>&1)
  echo "$reference: $expected"
  case $expected in statuses*) ;; *) status=1 ;; esac
  for pair in "$@"; do
    got=$(verbs_agent drive $pair $option 2>&1)
    if [ "$got" = "$expected" ]; then
      echo "$pair: the same"
    else
      echo "$pair: DIFFERENT $got"
      status=1
    fi
  done
}
same --errors "$rxe4 $rxe4b" "$rxe4 $soft4" "$soft4 $rxe4" "$soft4 $soft4b"
# Not from rxe: its library does not post a misaligned atomic.
same --misaligned "$soft4 $rxe4" "$soft4 $soft4b"

if [ $what = full ]; then
  large="--sizes 65536,1048576,16777216"
  mtus=256,512,1024,2048,4096
else
  large="--sizes 65536"
  mtus=256,1024,4096
fi
for pair in "$soft4 $rxe4" "$rxe4 $soft4" "$soft6 $rxe6" "$rxe6 $soft6"; do
  run $pair --mtu $mtus $large
done
[ $what = full ] || for pair in "$soft4 $rxe4" "$rxe4 $soft4"; do
  run $pair --mtu 4096 --sizes 1048576,16777216
done
# The UDP socket without the raw one: half the check, everything else alike.
run $soft4b $rxe4 --mtu 2048
run $rxe4 $soft4b --mtu 512
run $soft4c $rxe4 --mtu $mtus $large
run $soft4b $soft4c --mtu 4096 $large
run $soft4c $soft4b --mtu 256 $large

# A bad network, in both directions. rxe as requester loses READ data there when several requests are
# outstanding, against another rxe too (test rxe_reorder): it gets one at a time, the software NIC all.
losses="1"
bursts=4
[ $what = full ] && losses="1 5" && bursts=20
for loss in $losses; do
  for fault in "loss $loss%" "loss $loss% delay 500us reorder $((loss * 5))%"; do
    tc qdisc replace dev veth0 root netem $fault
    in_peer /usr/bin/tc qdisc replace dev veth1 root netem $fault
    echo "netem $fault"
    run $soft4 $rxe4 --mtu 1024 --sizes 65536 --bursts $bursts
    run $soft6 $rxe6 --mtu 1024 --sizes 65536 --bursts $bursts
    run $rxe4 $soft4 --mtu 1024 --sizes 65536 --bursts 0
    run $rxe6 $soft6 --mtu 1024 --sizes 65536 --bursts 0
  done
done
cat /tmp/soft4.log
cat /tmp/soft4c.log
