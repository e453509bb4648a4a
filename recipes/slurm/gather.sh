#!/bin/bash
#SBATCH --job-name=legorl-gather
#SBATCH --output=slurm-%x-%j.log
# Make one list of the parts' lists, once all are there:   PARTS=8 STEP=runs/first/step-0001 recipes/slurm/gather.sh rollout
set -eu -o pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
lists=()
for part in $(seq "$PARTS"); do
    [ -e "$STEP/$1.list.$part" ] || { echo "gather.sh: part $part of $1 is not done; sbatch --array=$part recipes/slurm/part.sh $1" >&2; exit 1; }
    lists+=("$STEP/$1.list.$part")
done
cat "${lists[@]}" >"$STEP/$1.list.tmp"
mv "$STEP/$1.list.tmp" "$STEP/$1.list"
