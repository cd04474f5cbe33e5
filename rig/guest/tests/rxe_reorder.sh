# Not about this project: what two rdma_rxe do to each other on a bad network, with many requests
# outstanding. The status is 0 whatever comes out; the lines are what this test is for.
load net
load rdma
tc() { /usr/bin/tc "$@"; }
rxe_pair
rxe_verbs_agent rxe0 10.9.0.1 7000 &
ip netns exec peer rxe_verbs_agent rxe1 10.9.0.4 7000 &
echo "no fault"
verbs_agent drive 10.9.0.1:7000 10.9.0.4:7000 --mtu 1024 --sizes 0 --bursts 10
fault="loss 1% delay 500us reorder 5%"
tc qdisc replace dev veth0 root netem $fault
ip netns exec peer /usr/bin/tc qdisc replace dev veth1 root netem $fault
echo "netem $fault"
for round in 1 2 3; do
  verbs_agent drive 10.9.0.1:7000 10.9.0.4:7000 --mtu 1024 --sizes 0 --bursts 10
done
status=0
