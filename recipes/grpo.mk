# GRPO on the built-in shell tasks: groups of attempts at one task, each measured against its group's mean.
#     bin/lego-serve MODEL -- make -j2 -f recipes/grpo.mk RUN=runs/first LAG=1
# Its small variant for a CPU is demo.mk.
ROUNDS ?= 100
TASK_SET ?= shell --count 480 --seed $(SEED) --split train
TASKS ?= 16
ATTEMPTS ?= 16
ROLLOUT ?= -c 32 --max-turns 12 --turn-tokens 512 --time-limit 600
GRADE ?= -c 8
TRAINER ?= --loss grpo --lr 1e-6
include $(dir $(lastword $(MAKEFILE_LIST)))common.mk
