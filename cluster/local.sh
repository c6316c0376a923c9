#!/usr/bin/env bash
# A Ray cluster of several nodes on this machine, with a token, for trying out what a real one does.
#
#   cluster/local.sh start [NODES] [CPUS_EACH]   # default: 3 nodes of 1 CPU; prints what to export
#   cluster/local.sh status
#   cluster/local.sh stop                        # ends what `start` started, and nothing else
#
# The head has no CPU of its own to give: it runs the drivers. RAYDP_CLUSTER_DIR names the directory of the cluster's
# files (default /tmp/raydp-cluster-UID; keep it short, for Ray puts sockets below it), RAYDP_CLUSTER_PORT and
# RAYDP_DASHBOARD_PORT the ports (default 6380 and 8265), RAY the ray command (default: the one on the PATH).
set -euo pipefail

directory="${RAYDP_CLUSTER_DIR:-/tmp/raydp-cluster-$(id -u)}"
port="${RAYDP_CLUSTER_PORT:-6380}"
dashboard="${RAYDP_DASHBOARD_PORT:-8265}"
ray="${RAY:-ray}"
pids="$directory/pids"
token="$directory/token"

export RAY_TMPDIR="$directory" RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS RAY_AUTH_TOKEN

node() { # name, then the arguments of `ray start`: each node is a process group of its own
    local name="$1"
    shift
    setsid "$ray" start "$@" --block >"$directory/$name.log" 2>&1 &
    echo $! >>"$pids"
}

alive() {
    [ -s "$pids" ] && xargs kill -0 <"$pids" 2>/dev/null
}

start() {
    local nodes="${1:-3}" cpus="${2:-1}" index
    if alive; then
        echo "A cluster runs already in $directory; $0 stop ends it." >&2
        exit 1
    fi
    [ -d "$directory" ] || mkdir -m 700 "$directory"
    [ -O "$directory" ] || { echo "$directory belongs to somebody else; set RAYDP_CLUSTER_DIR." >&2 && exit 1; }
    chmod 700 "$directory"
    rm -f "$pids"
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token")
    node head --head --port="$port" --num-cpus=0 --include-dashboard=true \
        --dashboard-host=127.0.0.1 --dashboard-port="$dashboard"
    for _ in $(seq 120); do
        grep -q "This command will now block" "$directory/head.log" && break
        alive || { tail -n 20 "$directory/head.log" >&2 && exit 1; }
        sleep 1
    done
    for index in $(seq 2 "$nodes"); do
        node "node-$index" --address="127.0.0.1:$port" --num-cpus="$cpus" \
            --dashboard-agent-listen-port=$((52400 + index))
    done
    cat <<TEXT
$nodes nodes are starting ($((nodes - 1)) of $cpus CPU; the head has none). Logs: $directory/*.log
Now:
  export RAY_AUTH_TOKEN_PATH=$token RAYDP_ADDRESS=http://127.0.0.1:$dashboard
  raydp submit searches/quickstart.py --storage $directory/runs/quickstart -f
TEXT
}

stop() {
    local pid
    [ -s "$pids" ] || { echo "No cluster in $directory." && return; }
    while read -r pid; do
        kill -TERM -- "-$pid" 2>/dev/null || true
    done <"$pids"
    for _ in $(seq 20); do
        alive || break
        sleep 0.5
    done
    while read -r pid; do
        kill -KILL -- "-$pid" 2>/dev/null || true
    done <"$pids"
    rm -f "$pids" "$token"
    echo "Stopped. Run directories in $directory/runs stay."
}

status() {
    if alive; then "$ray" status --address="127.0.0.1:$port"; else echo "No cluster in $directory."; fi
}

case "${1:-}" in
start) start "${2:-3}" "${3:-1}" ;;
stop) stop ;;
status) status ;;
*) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
