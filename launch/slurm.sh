#!/usr/bin/env bash
#SBATCH --job-name=pdjax
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@30
# Prefill and decode instances on the nodes of one Slurm job, and a router on its first node. Options are those of an
# instance; the model's folder and this one must be where all nodes see them. From this folder's parent:
#
#   sbatch --nodes=4 launch/slurm.sh --config configs/tp2.gin --gin.Model.folder=/shared/model
#
# Every instance gets as many nodes as every other, with a process on each, which has all devices of its node. An
# instance that ends is started again, unless it cannot start as it is; the router goes on with the others meanwhile.
# Variables, for sbatch --export:
#
#   PREFILL, DECODE   how many instances of each role (1)
#   PORT              the router's (8000); instances take the ports from PORT + 1 on, and as many more for their rooms
#   MPI               what srun starts MPI programs by (pmi2)
#   PDJAX_SECRET      what all of them know; made up if it is not set
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is a job for sbatch}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi

port="${PORT:-8000}" prefills="${PREFILL:-1}" decodes="${DECODE:-1}"
instances=$((prefills + decodes))
each=$((SLURM_JOB_NUM_NODES / instances))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "$each" -lt 1 ]; then
    echo "$instances instances need as many nodes; the job has $SLURM_JOB_NUM_NODES (sbatch --nodes)" >&2
    exit 2
fi
export PDJAX_SECRET="${PDJAX_SECRET:-$(head -c 32 /dev/urandom | base64)}"

# Usage: step OPTION... COMMAND...: a step that is started again until it ends as one that was asked to. One that cannot
# start as it is (2) ends the job.
step() {
    local stopping='' code
    trap 'stopping=1' TERM
    until srun --kill-on-bad-exit=1 "$@" < /dev/null; do
        code=$?
        if [ "$stopping" ]; then
            return "$code"
        elif [ "$code" = 2 ]; then
            kill -TERM $$
            return 2
        fi
        sleep 5
    done
}

number=0
prefill=() decode=()
# Usage: start ROLE OPTION...: the next instance, on the next nodes.
start() {
    local role="$1" first=$((number * each)) own rooms
    local -n urls="$role"
    shift
    own=$((port + 1 + number)) rooms=$((port + 1 + instances + number))
    number=$((number + 1))
    local where="${nodes[*]:first:each}"
    step --mpi="${MPI:-pmi2}" --nodes="$each" --ntasks="$each" --nodelist="${where// /,}" \
        python -m pdjax.launch "$role" --nproc "$each" "$@" --gin.Server.host=0.0.0.0 --gin.Server.port="$own" \
        --gin.Disagg.bootstrap_host=0.0.0.0 --gin.Disagg.bootstrap_port="$rooms" &
    urls+=("http://${nodes[first]}:$own")
}

# Each step is asked to end, and tells its clients so.
end() {
    trap - TERM INT
    mapfile -t steps < <(jobs -p)
    kill "${steps[@]}"
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait
}
trap end TERM INT
for ((i = 0; i < prefills; i++)); do start prefill "$@"; done
for ((i = 0; i < decodes; i++)); do start decode "$@"; done
step --mpi=none --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    python -m pdjax.launch router --host 0.0.0.0 --port "$port" --prefill "${prefill[@]}" --decode "${decode[@]}" &
wait
