#!/bin/sh
# Runs in the bare system, as its root: inside.sh USER HOME NAMESPACES IPV6 TERMINAL COMMAND.
# The command, one line of a shell, runs as USER with what the environment says.
set -eu
user=$1 home=$2 namespaces=$3 ipv6=$4 terminal=$5 command=$6

if [ "$ipv6" = no ]; then
    # A network of its own, as the machine's is shared; what pip needed is there already.
    # First of all: who may make no more namespaces cannot make this one.
    up='import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x49))'
    exec unshare --net sh -euc 'echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
        echo 1 >/proc/sys/net/ipv6/conf/lo/disable_ipv6
        python3 -c "$0" && exec "$@"' "$up" \
        sh "$0" "$user" "$home" "$namespaces" yes "$terminal" "$command"
fi

id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
cd "$(getent passwd "$user" | cut -d: -f6)"
unset HOME
[ "$home" = no ] || export HOME="$PWD"
export USER="$user" LOGNAME="$user"
[ "$terminal" = no ] || export COMMAND="$command" command='script --quiet --return --command "$COMMAND" /dev/null'

set -- setpriv --reuid="$user" --regid="$(id -g "$user")" --init-groups bash -c "$command"
[ "$namespaces" = no ] || exec "$@"

# As in a container: no more user namespaces, and root may neither mount nor make other ones.
wait_here=$(mktemp -d)
mkfifo "$wait_here/made" "$wait_here/mapped"
refuse='echo 0 >/proc/sys/user/max_user_namespaces
    exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"'
# who is not mapped yet loses its capabilities by exec, and has them again by the next
unshare --user sh -c 'echo >"$0/made"; read -r _ <"$0/mapped"; exec sh -euc "$@"' \
    "$wait_here" "$refuse" sh "$@" &
read -r _ <"$wait_here/made"
echo 0 0 65536 >/proc/$!/uid_map
echo 0 0 65536 >/proc/$!/gid_map
echo >"$wait_here/mapped"
wait $!
