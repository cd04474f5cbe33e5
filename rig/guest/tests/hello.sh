# The guest boots, has its modules, and makes a soft RoCE device.
load net
load rdma
ip link set lo up
ip link add d0 type dummy
ip addr add 10.9.0.1/24 dev d0
ip link set d0 up
rdma link add rxe0 type rxe netdev d0 || status=1
rdma link
