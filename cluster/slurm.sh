#!/usr/bin/env bash
#SBATCH --job-name=raydp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@300
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A search on the nodes that Slurm grants: the first is the head, all of them train.
#
#   sbatch cluster/slurm.sh searches/quickstart.py /shared/runs/quickstart [options of raydp run]
#
# Five minutes before the time is over Slurm sends SIGINT here, which is one Ctrl-C to the search; submit the same line
# again, or let it be requeued, and it goes on. The run directory must be on a file system that all nodes see. The token
# lies beside it, for its owner alone, and is made anew for every job.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: sbatch $0 FILE STORAGE [options of raydp run]" >&2
    exit 2
fi
file="$1" storage="$2"
shift 2
: "${SLURM_JOB_ID:?must be run by sbatch}" "${SLURM_CPUS_PER_TASK:?set --cpus-per-task}"

mkdir -p "$(dirname "$storage")"
token="$(dirname "$storage")/.token-$SLURM_JOB_ID"
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" RAY_USAGE_STATS_ENABLED=0
export RAY_TMPDIR="/tmp/ray-$SLURM_JOB_ID"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"
port=$((20000 + SLURM_JOB_ID % 20000)) # several jobs may share a node
address="$head:$port"
gpus="${SLURM_GPUS_ON_NODE:-0}"
started=()

# shellcheck disable=SC2329 # the trap calls it
finish() {
    local pid
    for pid in "${started[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    wait || true
    rm -f "$token"
}
trap finish EXIT

srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    ray start --head --node-ip-address="$head" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" \
    --include-dashboard=true --dashboard-host=127.0.0.1 --dashboard-port=$((port + 20000)) --block &
started+=($!)
sleep 20
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" --block &
    started+=($!)
done
sleep 20

# `raydp run` goes on with the search that the run directory holds already.
raydp run "$file" --storage "$storage" --address "$address" "$@" &
driver=$!
trap 'kill -INT "$driver"' INT
status=0
while true; do
    wait "$driver" && status=0 || status=$?
    kill -0 "$driver" 2>/dev/null || break # a signal ends `wait`, not the driver
done
exit "$status"
