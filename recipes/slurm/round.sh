#!/bin/bash
# Submit a round: rollout in PARTS jobs with a GPU each, then grading in PARTS jobs without one. $STEP/graded.list is its end.
#     export PARTS=8 STEP=runs/first/step-0001 MODEL=/models/base ROLLOUT="--harness mini-swe-agent -n 8 -c 32"
#     recipes/slurm/round.sh --partition=gpu           # its arguments go to sbatch for the rollout jobs
# What failed is submitted again as part.sh says; what stands is not made again. Then:
#     bin/lego-train - --model "$MODEL" --out "$STEP/checkpoint" < "$STEP/graded.list"
set -eu -o pipefail
submit() { sbatch --parsable ${1:+--dependency=afterok:$1} "${@:2}" | cut -d';' -f1; }
rollout=$(submit '' --array="1-$PARTS" --gres=gpu:1 "$@" recipes/slurm/part.sh rollout)
gathered=$(submit "$rollout" recipes/slurm/gather.sh rollout)
graded=$(submit "$gathered" --array="1-$PARTS" recipes/slurm/part.sh graded)
submit "$graded" recipes/slurm/gather.sh graded
