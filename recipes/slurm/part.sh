#!/bin/bash
#SBATCH --job-name=legorl
#SBATCH --output=slurm-%x-%A-%a.log
# One part of a round's rollout or grading, as a job of a Slurm array. recipes/slurm/round.sh submits whole rounds; by hand:
#     export PARTS=8 STEP=runs/first/step-0001 MODEL=/models/base
#     sbatch --array=1-$PARTS recipes/slurm/part.sh rollout
#     sbatch --array=3 recipes/slurm/part.sh rollout        # part 3 once more: what it has made stays
# STEP is the round's folder, on a disk that every node sees: it holds tasks.list, and gets rollout-K/, graded-K/ and their
# lists. Every job is given the whole list and takes its K-th of PARTS. A rollout job runs a model server of its own, unless
# LEGORL_SERVE names one on its node. Options of the commands: SERVE, ROLLOUT (with --harness), GRADE.
set -eu -o pipefail
cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file from elsewhere
stage=$1
part=$SLURM_ARRAY_TASK_ID
parts=${PARTS:-$SLURM_ARRAY_TASK_COUNT} # PARTS, because an array of one job, run again, counts 1
serve=()
[ -n "${LEGORL_SERVE:-}" ] || serve=(bin/lego-serve "$MODEL" ${SERVE:-} --)
list=$STEP/$stage.list.$part
# shellcheck disable=SC2086  # options are words
case $stage in
    rollout) "${serve[@]}" bin/lego-rollout - --shard "$part/$parts" --out "$STEP/rollout-$part" $ROLLOUT <"$STEP/tasks.list" ;;
    graded) bin/lego-grade - --shard "$part/$parts" --out "$STEP/graded-$part" ${GRADE:-} <"$STEP/rollout.list" ;;
    *) echo "part.sh: rollout or graded, not $stage" >&2 && exit 2 ;;
esac >"$list.tmp"
mv "$list.tmp" "$list"
