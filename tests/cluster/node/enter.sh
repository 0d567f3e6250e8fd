#!/bin/sh
# Process 1 of a node: gives it directories of its own, then waits.  enter.sh DIRECTORY
#
# Runs in mount, process, IPC and host name namespaces of its own: no mount of it is seen outside.
set -eu
directory=$1
here=$(cd "$(dirname "$0")" && pwd)

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock

# Layers over /etc and /var, so that nothing is written there on this machine.
for name in etc var; do
    mkdir -p "$directory/layers/$name" "$directory/layers/$name.work"
    mount -t overlay overlay \
        -o "lowerdir=/$name,upperdir=$directory/layers/$name,workdir=$directory/layers/$name.work" "/$name"
done
# Layers of containers, and disks that they mount, may not lie in such a layer themselves.
for name in containerd kubelet volumes; do
    mkdir -p "$directory/$name" "/var/lib/$name"
    mount --bind "$directory/$name" "/var/lib/$name"
done
rm -rf /etc/cni/net.d /etc/kubernetes
mkdir -p /etc/cni/net.d /etc/kubernetes /var/lib/cni /var/log/pods /var/log/containers
cp "$here"/*.yaml "$here/containerd.toml" /etc/kubernetes/
cp "$here/cni.conflist" /etc/cni/net.d/

# The kubelet sets these; here it finds what it wants, and the machine keeps its own.
for setting in vm/overcommit_memory=1 kernel/panic=10 kernel/panic_on_oops=1; do
    value=/run/$(basename "${setting%=*}")
    echo "${setting#*=}" >"$value"
    mount --bind "$value" "/proc/sys/${setting%=*}"
done
mount --make-rshared /
hostname node
echo 1 >/proc/sys/net/ipv4/ip_forward
# Packets between pods pass the filters as well: NetworkPolicies.
echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
touch "$directory/entered"
# A shell that waits also reaps processes whose parents have ended.
sleep infinity &
wait
