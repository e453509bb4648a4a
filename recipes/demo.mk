# The demo: two rounds of GRPO that 2 CPU cores finish while you watch, and a table at the end. `make demo` runs it.
#     bin/lego-serve MODEL -- make -f recipes/demo.mk RUN=runs/demo
RUN ?= runs/demo
ROUNDS ?= 2
TASK_SET ?= shell --count 4 --seed 2 --level 0 --split train --kind delete --kind create --kind rename
# Both rounds try the same four tasks, so that their rewards can be compared.
TASKS ?= 4
ATTEMPTS ?= 6
HARNESS ?= mini-swe-agent:small
ROLLOUT ?= -c 6 --temperature 0.6 --max-turns 2 --turn-tokens 64 --time-limit 240
GRADE ?= -c 2
TRAINER ?= --loss grpo --lr 1e-5
include $(dir $(lastword $(MAKEFILE_LIST)))common.mk

all:
	@$(bin)/lego-inspect summary $(RUN)
	@printf '%s\n' '' \
	    'Files: $(RUN)/step-*/ holds rollout/ and graded/ (trajectory shards), checkpoint/ (the new weights), and logs.' \
	    'Try next:' \
	    '  bin/lego-inspect show --best $(RUN)' \
	    '  bin/lego-inspect sql "select step, reason, count(*) as tokens from updates group by all order by all" $(RUN)' \
	    '  make demo RUN=$(RUN) ROUNDS=$(shell expr $(ROUNDS) + 1)'
