#!/bin/sh
# Runs a command in a bare system, as its root, from inside new namespaces of mounts, processes and
# System V IPC: enter.sh ROOT TUN SHM_MIB COMMAND. Folders on standard input are shown there too.
set -eu
root=$1 tun=$2 shm=$3
shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
while read -r folder; do
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm" "$root/dev/pts" "$root/dev/net"
mount -t tmpfs -o "mode=1777${shm:+,size=${shm}m}" tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
case $tun in
root) mknod -m 600 "$root/dev/net/tun" c 10 200 ;;
open) mknod -m 666 "$root/dev/net/tun" c 10 200 ;;
esac
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${number%%:*}" "$root/dev/${number#*:}"; done
cd "$root"
pivot_root . mnt
# a bare system has no umount; 2: at once, whoever still looks into it
# This shell stays: the first process inherits all orphans, and `script` in its place spins over them.
exec chroot . sh -c 'python3 -c "import ctypes; exit(ctypes.CDLL(None).umount2(b\"/mnt\", 2))" || exit; "$@"; exit $?' \
    sh "$@" </dev/null
