# What the kernel answers when memory of every kind is registered with its soft RoCE, in every way.
load rdma
load net
load nvme
load udmabuf
ip link set lo up
ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
ip addr add 10.9.0.1/24 dev veth0
ip link set veth0 up
ip link set veth1 up
rdma link add rxe0 type rxe netdev veth0
sleep 1
allocate=
for device in /sys/bus/pci/devices/*; do
  [ -e "$device/p2pmem/allocate" ] && allocate=$device/p2pmem/allocate
done
rxe_memory rxe0 1 $allocate || status=1
