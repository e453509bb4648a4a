#!/bin/bash
#SBATCH --job-name=legorl-train
#SBATCH --output=slurm-%x-%j.log
#SBATCH --ntasks-per-node=1
# One training step over the GPUs of several nodes, weights sharded over all of them (FSDP2):
#     export STEP=runs/first/step-0001 MODEL=/models/base TRAINER="--loss grpo --lr 1e-6 --dtype bf16"
#     sbatch --nodes=4 --gres=gpu:8 recipes/slurm/train.sh
# STEP is the round's folder, with graded.list, on a disk that every node sees; it gets checkpoint/ and train.list. Submitted
# again, a job that was cut takes the step anew, and one that was not finds it taken. GPUS: processes a node.
set -eu -o pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export ACCELERATE_USE_FSDP=${ACCELERATE_USE_FSDP:-true}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
mapfile -t shards <"$STEP/graded.list"
# shellcheck disable=SC2086  # options are words
srun .venv/bin/torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${GPUS:-${SLURM_GPUS_ON_NODE:-1}}" \
    --rdzv_backend c10d --rdzv_endpoint "$head:${PORT:-29500}" --rdzv_id "$SLURM_JOB_ID" \
    -m legorl.commands.train.cli "${shards[@]}" --model "$MODEL" --out "$STEP/checkpoint" ${TRAINER:-} >"$STEP/train.list.tmp"
mv "$STEP/train.list.tmp" "$STEP/train.list"
